"""The command `pasa eval saturating`: whole models as an Ascend 310P would compute them, emulated.

Every FP16 result that would be infinite becomes 65504 there, and NaN becomes 0, so overflow leaves no NaN behind. A
model runs in FP32, in FP16 as it is, and in FP16 with pasa. Attention of the first layer then runs in the Ascend C
kernel for that chip, on the CPU twin of its core, where PASA_ASCEND_LIBRARY names the twin's library. That of other
layers runs in the reference.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Annotated, Any
from unittest import mock

import torch

import pasa
from pasa.eval.kit import output
from pasa.eval.kit.device import describe
from pasa.eval.kit.embedded_model import find_essays, require_built_in
from pasa.eval.kit.experiment import Experiment, gate, outcome
from pasa.eval.kit.options import at_least, stages
from pasa.eval.kit.overflow_fixture import inject_overflow
from pasa.eval.kit.saturating import Saturating
from pasa.eval.kit.tables import Column, Table
from pasa.eval.models.rescue.run import ESSAY, equal_prefix
from pasa.eval.models.whole_model.arms import SUBJECTS, written
from pasa.eval.models.whole_model.measuring import TensorCoreProducts
from pasa.ops import envs
from pasa.ops.attention.ascend import backend as npu_backend
from pasa.ops.attention.ascend import on_310p
from pasa.ops.attention.call import Call, Results
from pasa.ops.attention.spec import attention as reference

TITLES = {"fp32": "FP32", "fp16": "FP16, as it is", "fp16_pasa": "FP16, pasa"}
MODELS = {"qwen2": "SmolLM2-135M-Instruct as Qwen2, 131,072 added to every score", "gemma": SUBJECTS["gemma"].title}
PROMPT = 40  # tokens of an essay
FORCED = 64  # that follow in the essay; distributions are compared after all tokens but the first
Record = dict[str, Any]


def run_saturating(
    model: Annotated[str, "qwen2, whose scores overflow, or gemma, whose residual stream does."] = "qwen2",
    new_tokens: Annotated[int, "Tokens to generate."] = 64,
    essay: Annotated[str, "Essay whose first tokens are the prompt."] = ESSAY,
    progress: output.Report = output.silent,
) -> Record:
    """Run a whole model as an Ascend 310P would compute it, emulated; exit 1 if a check fails (README.md)."""
    at_least(1, new_tokens=new_tokens)
    if model not in MODELS:
        raise ValueError(f"model={model!r} is not one of {', '.join(MODELS)}")
    require_built_in(model=model == "qwen2", text=True)
    if essay not in (essays := find_essays()):
        raise ValueError(f"essay={essay!r} is not one of {', '.join(essays)}")
    SUBJECTS["gemma" if model == "gemma" else "smollm2"].require()
    say = stages(progress, 4)
    say("loading the model")
    subject, tokenizer = SUBJECTS["gemma" if model == "gemma" else "smollm2"].load()
    ids = tokenizer(output.read_text(essays[essay]), return_tensors="pt").input_ids[:, : PROMPT + FORCED]
    if ids.shape[1] < PROMPT + FORCED:
        raise ValueError(f"essay={essay!r} has {ids.shape[1]} tokens, and {PROMPT + FORCED} are needed: choose another")
    if model == "qwen2":
        subject, _ = inject_overflow(subject)
    return {
        **compare(subject, ids, new_tokens, say, scales=model == "gemma", tokenizer=tokenizer),
        "model": MODELS[model],
        "prompt": {"essay": essay, "tokens": PROMPT, "new_tokens": new_tokens},
        "environment": describe(torch.device("cpu"), "transformers"),
    }


def compare(
    model: Any, ids: torch.Tensor, new_tokens: int, say: Any, *, scales: bool = False, tokenizer: Any = None
) -> Record:
    """Return the gate and the runs of a model in FP32, which is given, in FP16, and in FP16 with pasa.

    The first 40 of `ids` (1, tokens) are the prompt. Each run also gets the divergence of the next token's distribution
    from FP32's, in nats, as a mean over all tokens but the first.
    `scales`: what overflows is not attention, so the last one is what `pasa to-fp16` writes, patched.
    """
    model.set_attn_implementation("eager")
    runs = {}
    say("FP32")
    runs["fp32"], expected = generate(model, ids, new_tokens), log_probabilities(model, ids)
    runs["fp32"]["divergence"] = 0.0
    say("FP16, as it is, saturating")
    plain = copy.deepcopy(model).half() if scales else model.half()
    with TensorCoreProducts(), Saturating() as chip:
        runs["fp16"] = generate(plain, ids, new_tokens) | {"replaced": chip.replaced.total()}
        runs["fp16"]["divergence"] = divergence(expected, log_probabilities(plain, ids))
    say("FP16 with pasa, saturating")
    config = pasa.PasaConfig(overflow="saturate")
    with written(model, tokenizer) if scales else nullcontext(plain) as served, first_layer_on_twin(served) as calls:
        patched = pasa.patch_pipeline(served, policy="all", config=config, backend="reference")
        with patched, TensorCoreProducts(), Saturating() as chip:
            runs["fp16_pasa"] = generate(served, ids, new_tokens) | {"replaced": chip.replaced.total()}
            runs["fp16_pasa"]["divergence"] = divergence(expected, log_probabilities(served, ids))
        runs["fp16_pasa"] |= {"calls_on_twin": sum(calls), "calls": len(calls)}
    for run in runs.values():
        run["equal"] = equal_prefix(run["tokens"], runs["fp32"]["tokens"])
        run["text"] = "" if tokenizer is None else tokenizer.decode(run["tokens"])
    plain_run, ours = runs["fp16"], runs["fp16_pasa"]
    checks = {
        "FP16 as it is saturates": plain_run["replaced"] > 0,
        "its text is not FP32's": plain_run["equal"] < new_tokens,
        "none of its logits is NaN or infinite": plain_run["finite"],
        "pasa's text is FP32's": ours["equal"] == new_tokens,
        "nothing saturates with pasa": chip.replaced.total() == 0,  # in the essay as well
        "pasa is nearer to FP32": ours["divergence"] < plain_run["divergence"],
    }
    return {"gate": gate(checks), "runs": runs}


@torch.no_grad()
def log_probabilities(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logarithms of the next token's probabilities, (tokens - 1, vocabulary), after all but the first."""
    logits: torch.Tensor = model(ids).logits[0, 1:]
    return logits.double().log_softmax(-1)


def divergence(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Return the Kullback-Leibler divergence of two results of `log_probabilities`, in nats, a mean over tokens."""
    return float((expected.exp() * (expected - found)).sum(-1).mean())


@torch.no_grad()
def generate(model: Any, ids: torch.Tensor, new_tokens: int) -> Record:
    """Return the tokens that a model adds greedily, and whether all logits of them are finite."""
    how = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
    ids = ids[:, :PROMPT]
    made = model.generate(ids, **how, output_logits=True, return_dict_in_generate=True, pad_token_id=0)
    finite = all(bool(torch.isfinite(logits).all()) for logits in made.logits)
    return {"tokens": made.sequences[0, ids.shape[1] :].tolist(), "finite": finite, "replaced": 0}


@contextmanager
def first_layer_on_twin(model: Any) -> Iterator[list[bool]]:
    """Let the kernel for the 310P serve the reference's calls of the first layer; yield if it served, call by call.

    Without the twin's library, the reference serves them all.
    """
    layers, attend, calls = model.config.num_hidden_layers, reference.attend, list[bool]()
    has_twin = envs.ascend_library().is_file() and npu_backend.architecture() == on_310p.ARCHITECTURE
    has_twin = has_twin and npu_backend.library_error() is None

    def first(call: Call) -> Results:
        calls.append(has_twin and len(calls) % layers == 0)
        return npu_backend.attend(call) if calls[-1] else attend(call)

    with mock.patch.object(reference, "attend", first):
        yield calls


def report(result: Record) -> list[Table | str]:
    """Return the table of a result, and what was emulated."""
    columns: dict[str, Column] = {
        "run": lambda run: TITLES[run["name"]],
        "tokens as in FP32": lambda run: f"{run['equal']} of {len(run['tokens'])}",
        "divergence, nats": lambda run: f"{run['divergence']:.1e}" if "divergence" in run else "",
        "logits finite": lambda run: "yes" if run["finite"] else "no",
        "numbers replaced": lambda run: f"{run['replaced']:,}",
        "text": lambda run: " ".join(run["text"].split()),
    }
    records = [{"name": name, **run} for name, run in result["runs"].items()]
    prompt, ours = result["prompt"], result["runs"]["fp16_pasa"]
    essay = prompt.get("essay", ESSAY)  # older results lack it
    title = f"{result['model']}: {prompt['tokens']} tokens of the essay {essay}, {prompt['new_tokens']} new ones"
    return [
        Table.of(title, records, columns),
        "Emulated on a CPU; no NPU ran it. Divergence: of the next token's distribution from FP32's, mean over tokens "
        f"of the essay. FP16 results beyond 65504 become 65504, and NaN 0: numbers replaced as the text was made. Of "
        f"{ours['calls']:,} calls of attention with pasa, {ours['calls_on_twin']:,} ran in the kernel for the 310P on "
        f"the CPU twin of its core, and the others in the reference. {outcome(result)}",
    ]


EXPERIMENT = Experiment(
    "saturating", run_saturating, report, "Whole models on a chip that saturates, emulated", needs_models=True
)
