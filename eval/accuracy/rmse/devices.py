"""Errors of the backends that serve a device, beside those of torch's attention there, and the share of anchored keys.

`pasa bench rmse --backends` runs the paper's cases and biases, `--layers` the attention layers of a recorded model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Annotated, Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import pasa
from pasa.eval.accuracy.rmse import cases
from pasa.eval.accuracy.rmse.measure import Record, golden_by_head, quotient
from pasa.eval.kit import output
from pasa.eval.kit.attention_calls import show_layers
from pasa.eval.kit.device import describe, origin, pick_device
from pasa.eval.kit.embedded_model import load_model, read_essay, require_built_in
from pasa.eval.kit.error_metrics import measure_errors
from pasa.eval.kit.experiment import Experiment
from pasa.eval.kit.options import at_least
from pasa.eval.kit.overflow_fixture import inject_overflow
from pasa.eval.kit.stored import pick
from pasa.eval.kit.tables import Table, percent, short
from pasa.ops import registry
from pasa.ops.attention.call import Call
from pasa.ops.attention.sdpa.anchors import head_anchors
from pasa.ops.backends import Request

FP32, FP16 = "torch FP32", "torch FP16"
GUARDED = "sdpa"
EMULATION = "reference"  # keeps scores in FP16 as an NPU does, so FP32 scores are no limit for it
LIMIT = 1.1  # of the RMSE over that of torch's attention on the same FP16 tensors, on the paper's cases
BIAS, BIAS_LIMIT = 80, 0.6  # a bias on 16 channels; the RMSE over torch's that an accelerator should reach
BIAS_SEEDS = 12  # many of them give rows of one weight, which have no error
BIAS_CASES = tuple(cases.BiasCase(BIAS, keys_only=only) for only in (False, True))
KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]  # those that the backend sdpa uses on CUDA
OFFSET = 131072  # the constant added to every score of the biased model
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


def run_backends(
    heads: Annotated[int | None, "Heads of the paper's cases (the paper has 16)."] = None,
    seq: Annotated[int | None, "Sequence length of every case (the paper has 1280)."] = None,
    seeds: Annotated[Sequence[int], "Seeds of the paper's cases, such as 0,1,2."] = (0, 1, 2),
    progress: output.Report = output.silent,
) -> dict[str, Any]:
    """RMSE of each backend that serves this device, beside torch's attention; exit 1 beyond 1.1 times torch's."""
    at_least(1, heads=heads, seq=seq)
    at_least(0, seeds=min(seeds))
    device = pick_device()
    attentions, records = attentions_of(device), []
    jobs: list[tuple[cases.Case, int]] = [(case, seed) for case in cases.PAPER_CASES for seed in seeds]
    jobs += [(case, seed) for case in BIAS_CASES for seed in range(BIAS_SEEDS)]
    for done, (case, seed) in enumerate(jobs):
        progress(done, len(jobs), f"{case.name}, seed {seed}")
        batch, case_heads, case_seq, dim = case.shape
        most = heads if heads and case in cases.PAPER_CASES else case_heads
        resized = dataclasses.replace(case, shape=(batch, most, seq or case_seq, dim))
        q, k, v = (x.to(device) for x in resized.tensors(seed))
        errors = compare(q, k, v, golden_by_head(q, k, v), attentions)
        records += [{"case": case.name, "seed": seed, **each} for each in errors]
    rows = ratios(records)
    return {
        "note": f"backends that serve {device.type}, each on the device named here",
        "environment": describe(device),
        "seeds": list(seeds),
        "shape": [1, heads or cases.SHAPE[1], seq or cases.SHAPE[2], cases.SHAPE[3]],
        "gate": judge(rows),
        "ratios": rows,
        "records": records,
    }


def attentions_of(device: torch.device) -> dict[str, Attend]:
    """Return torch's attention in FP32 and in FP16, and each backend that takes FP16 calls there without its name."""
    request = Request(device.type, torch.float16, cases.SHAPE[3], "none")
    names = [each.name for each in registry.BACKENDS.values() if not each.refusals(request)]
    named: dict[str, Attend] = {name: partial(_serve, name) for name in names}
    return {FP32: _torch_fp32, FP16: _torch, **named}


def _serve(backend: str, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    return pasa.attention(q, k, v, is_causal=is_causal, backend=backend)


def _torch_fp32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend in FP32, and round the output to FP16."""
    return scaled_dot_product_attention(q.float(), k.float(), v.float()).half()


def _torch(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """Attend by the kernel that the backend sdpa guards, without guards and anchors."""
    forced: AbstractContextManager[Any] = sdpa_kernel(KERNELS, set_priority=True) if q.is_cuda else nullcontext()
    with forced:
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1])


def compare(q: Tensor, k: Tensor, v: Tensor, golden: Tensor, attentions: dict[str, Attend]) -> Iterator[Record]:
    """Yield the errors of each attention, with the share of the keys' columns that have an anchor in `sdpa`."""
    columns, _ = anchored(q, k, v)
    for name, attend in attentions.items():
        errors = measure_errors(attend(q, k, v), golden)
        yield {
            "attention": name,
            "rmse": errors.rmse,
            "max_error": errors.max_error,
            "nonfinite_share": errors.nonfinite_share,
            "anchored_columns": columns if name == GUARDED else 0.0,
        }


def anchored(q: Tensor, k: Tensor, v: Tensor) -> tuple[float, float]:
    """Return the share of the columns of K, and of its heads, that have an anchor in the backend `sdpa`."""
    anchors = head_anchors(Call(q, k, v, 1.0))
    if anchors is None:
        return 0.0, 0.0
    kept = anchors != 0
    return float(kept.double().mean()), float(kept.any(-1).double().mean())


def pooled(errors: Iterable[float]) -> float:
    """Return the root mean square over seeds or layers."""
    errors = list(errors)
    return math.hypot(*errors) / math.sqrt(len(errors))


def ratios(records: Sequence[Record]) -> list[Record]:
    """Return by case the RMSE of each attention, pooled over seeds, and its ratios to torch's two."""
    rows = []
    for case in dict.fromkeys(each["case"] for each in records):
        selected = pick(records, case=case)
        names = dict.fromkeys(each["attention"] for each in selected)
        rmse = {name: pooled(each["rmse"] for each in pick(selected, attention=name)) for name in names}
        backends = [name for name in names if name not in (FP32, FP16)]
        rows.append({
            "case": case,
            "rmse": rmse,
            "to_fp16": {name: quotient(rmse[name], rmse[FP16]) for name in backends},
            "to_fp32": {name: quotient(rmse[name], rmse[FP32]) for name in backends},
            "anchored_columns": max(each["anchored_columns"] for each in selected),
        })  # fmt: skip
    return rows


def judge(rows: Sequence[Record]) -> dict[str, Any]:
    """Check the ratios on the paper's cases against `LIMIT`, of all backends but the emulation."""
    names = {case.name for case in cases.PAPER_CASES}
    failures = [
        f"{backend} on {row['case']}: {ratio:.3g} times the RMSE of torch's attention, {LIMIT} allowed"
        for row in rows if row["case"] in names
        for backend, ratio in row["to_fp16"].items() if backend != EMULATION and not ratio <= LIMIT
    ]  # fmt: skip
    return {"passed": not failures, "limit": LIMIT, "failures": failures}


def backend_table(result: dict[str, Any]) -> Table:
    """Return a row for each case: errors, their ratios to torch's, and the share of anchored columns."""
    rows = result["ratios"]
    names, backends = list(rows[0]["rmse"]), list(rows[0]["to_fp16"])
    columns: dict[str, Callable[[Record], str]] = {name: partial(_error, name) for name in names}
    columns |= {f"{name} / FP16": partial(_ratio, "to_fp16", name) for name in backends}
    columns |= {f"{name} / FP32": partial(_ratio, "to_fp32", name) for name in backends}
    columns["columns anchored"] = lambda row: percent(row["anchored_columns"])
    body = [[row["case"], *(cell(row) for cell in columns.values())] for row in rows]
    note = (
        f"Root mean square over {len(result['seeds'])} seeds, of biases over {BIAS_SEEDS}. {FP16}: torch's attention "
        f"on the same tensors, whose scores are FP32; unguarded, keys not centred. {FP32}: torch's attention on FP32 "
        "copies, its output rounded to FP16. The others are backends of pasa. Columns anchored: of K, in `sdpa`."
    )
    shape = ", ".join(map(str, result["shape"]))
    return Table(f"RMSE against FP64 by backend, shape ({shape})", ["case", *columns], body, note)


def _error(name: str, row: Record) -> str:
    return short(row["rmse"][name])


def _ratio(field: str, name: str, row: Record) -> str:
    return f"{row[field][name]:.3g}"


def backend_verdict(result: dict[str, Any]) -> str:
    """Return what the exit status says, then the worst ratio of the emulation, and the ratios under a bias."""
    paper = [row for row in result["ratios"] if "bias" not in row["case"]]
    lines = []
    for name in paper[0]["to_fp16"]:
        worst = max(paper, key=lambda row: float(row["to_fp16"][name]))
        judged = "not judged: it keeps scores in FP16" if name == EMULATION else f"limit {LIMIT}"
        lines.append(f"`{name}`: at most {worst['to_fp16'][name]:.3g} times torch's RMSE ({worst['case']}; {judged}).")
    for row in (row for row in result["ratios"] if "bias" in row["case"]):
        ratio = row["to_fp16"][GUARDED]
        within = "within" if ratio <= BIAS_LIMIT else "beyond"
        lines.append(f"{row['case']}: `{GUARDED}` {ratio:.3g} times torch's RMSE, {within} {BIAS_LIMIT}.")
    return " ".join([*lines, *result["gate"]["failures"]])


def run_layers(
    tokens: Annotated[int, "Tokens of the text that the model reads; anchors need at least 512."] = 1100,
    progress: output.Report = output.silent,
) -> dict[str, Any]:
    """Share of a model's keys that have an anchor, and errors with and without; SmolLM2 on real text, and biased."""
    at_least(1, tokens=tokens)
    require_built_in(model=True, text=True)
    device = pick_device()
    model, tokenizer = load_model()
    ids = read_essay(tokenizer, tokens).to(device)
    records: list[Record] = []
    biased, info = inject_overflow(model, OFFSET)
    for name, each in {"as trained": model, "biased": biased}.items():
        layers = each.config.num_hidden_layers
        record = partial(_record_layer, records, name, partial(_tell, progress, layers, name))
        show_layers(each.to(device), ids, record)
    return {
        "note": f"SmolLM2-135M-Instruct, {ids.shape[1]} tokens, each layer's tensors rounded to FP16",
        "environment": describe(device, "transformers"),
        "fixture": info.as_dict(),
        "records": records,
    }


def _tell(progress: output.Report, layers: int, model: str, done: int) -> None:
    progress(done, layers, model)


def _record_layer(
    records: list[Record], model: str, progress: Callable[[int], None], q: Tensor, k: Tensor, v: Tensor
) -> None:
    layer = len(pick(records, model=model))
    progress(layer)
    q, k, v = (x.half() for x in (q, k, v))
    golden, _ = pasa.golden_attention(q, k, v, is_causal=True)
    columns, heads = anchored(q, k, v)
    outputs = _torch(q, k, v, is_causal=True), _serve(GUARDED, q, k, v, is_causal=True)
    without, with_anchors = (measure_errors(out, golden).rmse for out in outputs)
    errors = {"without": without, "with": with_anchors}
    records.append({"model": model, "layer": layer, "columns": columns, "heads": heads, **errors})


def layer_table(result: dict[str, Any]) -> Table:
    """Return a row for each model: the share of anchored columns and heads, errors, and the ratio of a layer."""
    rows = []
    for model in dict.fromkeys(each["model"] for each in result["records"]):
        layers = pick(result["records"], model=model)
        errors = [pooled(each[name] for each in layers) for name in ("without", "with")]
        ratio = sorted(each["with"] / each["without"] for each in layers)
        shares = [sum(each[name] for each in layers) / len(layers) for name in ("columns", "heads")]
        rows.append([
            model, str(len(layers)), *map(percent, shares), *map(short, errors), f"{ratio[0]:.3g} to {ratio[-1]:.3g}"
        ])  # fmt: skip
    header = ["model", "layers", "columns anchored", "heads anchored", "RMSE without", "with", "with / without"]
    note = (
        "Anchored: columns of K, and key heads with at least one such column, in `sdpa`; means over layers. RMSE: root "
        "mean square over layers, without anchors (torch's attention on the same FP16 tensors) and with. Last column: "
        "lowest to highest ratio of a layer."
    )
    return Table("Anchors in a recorded model", header, rows, note)


BACKENDS = Experiment(
    name="backends",
    run=run_backends,
    report=lambda result: [backend_verdict(result), backend_table(result), origin(result)],
    title="RMSE of each backend on the paper's cases",
)
LAYERS = Experiment(
    name="layers",
    run=run_layers,
    report=lambda result: [layer_table(result), origin(result)],
    title="Anchors in a recorded model",
    needs_models=True,
)
