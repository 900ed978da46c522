"""Scales a checkpoint on disk for FP16, then loads it as any user of transformers would, and compares."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import pasa
from pasa.eval.kit import output
from pasa.eval.kit.experiment import Experiment, gate
from pasa.eval.kit.model_folder import load_folder, on_disk, quiet, readable
from pasa.eval.kit.options import stages
from pasa.eval.kit.tables import Column, Table
from pasa.eval.models.to_fp16.sample import TEXT
from pasa.fp16 import running, writing
from pasa.fp16.checkpoint import CheckpointConversion, check_names, note_of, open_source, powers_of, scaled_config
from pasa.fp16.offloading import Weights
from pasa.fp16.planning import LARGEST
from pasa.prediction.checkpoint import Checkpoint

TOKENS = 1024
"""Most tokens of the sample that a model is run on."""
AGREEING = 0.9
"""Least share of the sample's places at which the written checkpoint has the original's best token; 0.995 is usual."""
SHOWN = 20
"""Modules in the table, those with the largest peaks."""
Run = dict[str, Any]


def run_to_fp16(
    source: Annotated[str, typer.Argument(metavar="FOLDER", help="Folder of a language model, as safetensors.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="New folder for the scaled checkpoint.")],
    sample: Annotated[str | None, "Text file to measure peaks on, its first 1024 tokens (default: built in)."] = None,
    margin: Annotated[float, "Factor between the largest magnitude on the sample and 65504."] = 4.0,
    force: Annotated[bool, "Replace the checkpoint that OUT holds; other files stay."] = False,
    skip_check: Annotated[bool, "Do not load and run the written checkpoint."] = False,
    progress: output.Report = output.silent,
) -> Run:
    """Scale a checkpoint by powers of two so that it runs in FP16 anywhere; exit 1 if the written one fails a check.

    FOLDER is only read. An interrupted run goes on where it ended.
    """
    folder, target, say = Path(source), Path(out), stages(progress, 5)
    if not 1 <= margin < LARGEST:
        raise ValueError(f"margin={margin:g} must be at least 1 and below {LARGEST:g}")
    text = TEXT if sample is None else output.read_text(Path(sample))
    checkpoint = open_source(folder)
    writing.check_places(folder, target, force=force)
    say("loading the model")
    with _on_disk(folder, checkpoint, target) as (model, tokenizer, weights, fused):
        ids = tokens(model, tokenizer, text)
        before = None if skip_check else score(model, ids)
        say("choosing powers of two")
        conversion = CheckpointConversion(model, _runner(model, ids), margin, weights)
        conversion.plan_checkpoint()
        powers = powers_of(model, conversion.plan)
    check_names(checkpoint, powers)
    values, hidden = conversion.values, conversion.hidden_states()
    config = scaled_config(checkpoint.config, model, values)
    result = {
        "model": source,
        "records": output.jsonable([asdict(each) for each in conversion.scaled_modules()]),
        "hidden_states": hidden,
        "underflow": conversion.underflow,
    }
    say("reading the original")
    settings = {
        "pasa": pasa.__version__,
        "source": writing.hashes(checkpoint, folder),
        "margin": margin,
        "sample": {"sha256": hashlib.sha256(text.encode()).hexdigest(), "tokens": ids.shape[1]},
        "config": {".".join(entry): list(pair) for entry, pair in values.items()},
        "powers": {name: power for name, power in powers.as_dict().items() if name in checkpoint.names},
        "fp32": sorted(checkpoint.names & powers.offsets.keys()),
    }
    kind = type(model)
    del model, conversion
    stored = 0 if skip_check else fused * torch.float16.itemsize
    writer = writing.Writer(
        checkpoint, folder, target, powers, settings, force=force, written=output.WRITTEN, fused=stored
    )
    details = {"peaks": result["records"], "hidden_states": hidden, "underflow": result["underflow"]}
    kept = writer.write(config, note_of(values, powers, hidden), details)
    say("running the written checkpoint")
    after = None if skip_check else _score_written(kind, target, ids)
    compared = compare(before, after)
    checks = {"finite in FP16": compared is None or compared["finite"]}
    checks["best tokens agree"] = compared is None or compared["top1"] >= AGREEING
    return {
        "gate": gate(checks),
        "out": out,
        "settings": settings,
        "kept_shards": kept,
        "shards": len(writer.shards),
        "check": compared,
        **result,
    }


@contextmanager
def _on_disk(folder: Path, checkpoint: Checkpoint, target: Path) -> Iterator[tuple[Any, Any, Weights, int]]:
    """Load a model whose weights stay on disk, in BF16 if they all are and otherwise in FP32, and its tokenizer.

    The class is the one that its configuration names. Memory holds the weights of one module at a time. The last thing
    that is yielded is how many weights are fused, and so stored in another form while the model is there.
    """
    import transformers

    names = checkpoint.config.get("architectures") or []
    kind = getattr(transformers, str(names[0]), None) if names else None
    if names and kind is None:
        raise NotImplementedError(
            f"to-fp16: {str(folder)!r} is a {names[0]}, which transformers {transformers.__version__} does not know"
        )
    if kind is not None and not (hasattr(kind, "can_generate") and kind.can_generate()):
        raise NotImplementedError(
            f"to-fp16: {str(folder)!r} is a {names[0]}, which is no language model: load it and call pasa.to_fp16"
        )
    stored = {checkpoint.dtype(name) for name in checkpoint.names}
    dtype = torch.bfloat16 if stored == {torch.bfloat16} else torch.float32
    experts = writing.size_of_experts(checkpoint, dtype) if on_disk(str(target)) else 0
    writing.check_space(checkpoint, folder, target, fused=experts, at_once=False)
    with writing.scratch_folder(target) as scratch:
        model, tokenizer = load_folder(str(folder), dtype, kind, scratch)
        with running.plain({"": model}), Weights({"": model}) as weights:
            for name, parameter in model.named_parameters():
                if not bool(weights.load(parameter).isfinite().all()):
                    raise ValueError(
                        f"to-fp16: {name} of {str(folder)!r} holds infinities or NaN: load the checkpoint again"
                    )
            fused = sum(path.stat().st_size for path in Path(scratch).iterdir())
            yield model, tokenizer, weights, fused // dtype.itemsize


def _score_written(kind: Any, target: Path, ids: Tensor) -> Run:
    """Return the score of the written checkpoint, loaded by transformers alone; its weights stay on disk too."""
    with writing.scratch_folder(target) as scratch, quiet():
        try:
            with readable(str(target), scratch):
                model = kind.from_pretrained(target, dtype=torch.float16, **on_disk(scratch)).eval()
        except OSError as error:
            why = f"{error.strerror or error}; the new checkpoint is whole, but was not run"
            raise OSError(error.errno, why, error.filename) from error
        return score(model, ids)


def tokens(model: Any, tokenizer: Any, text: str) -> Tensor:
    """Return the ids of a text, behind the model's first token, and no more than the model has positions for."""
    ids: Tensor = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"].reshape(-1)
    first = tokenizer.bos_token_id
    if first is not None and (not len(ids) or ids[0] != first):
        ids = torch.cat([torch.tensor([first]), ids])
    config = model.config.get_text_config()
    if len(ids) < 2 or int(ids.max()) >= config.vocab_size:
        raise ValueError("to-fp16: the sample has fewer than two tokens, or the tokenizer is that of another model")
    return ids[None, : min(TOKENS, getattr(config, "max_position_embeddings", None) or TOKENS)]


def _call(model: Any, ids: Tensor, **options: Any) -> Any:
    extra = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    return model(input_ids=ids, use_cache=False, **extra, **options)


def _runner(model: Any, ids: Tensor) -> Callable[[], object]:
    return lambda: _call(model, ids, output_hidden_states=True)


def score(model: Any, ids: Tensor) -> Run:
    """Return whether a model's logits are finite, its perplexity on the sample, and its best token at each place."""
    with torch.no_grad():
        logits = _call(model, ids).logits[0]
    losses = torch.cat(
        [
            torch.nn.functional.cross_entropy(part.float(), right, reduction="none")
            for part, right in zip(logits[:-1].split(128), ids[0, 1:].split(128), strict=True)
        ]
    )
    return {
        "finite": bool(logits.isfinite().all()),
        "perplexity": math.exp(min(float(losses.double().mean()), 700.0)),
        "best": logits.argmax(-1),
        "dtype": str(logits.dtype).removeprefix("torch."),
    }


def compare(before: Run | None, after: Run | None) -> Run | None:
    """Return what the written checkpoint computes in FP16, beside the original."""
    if before is None or after is None:
        return None
    return {
        "finite": after["finite"],
        "perplexity": after["perplexity"],
        "perplexity_before": before["perplexity"],
        "dtype_before": before["dtype"],
        "top1": float((before["best"] == after["best"]).double().mean()),
    }


def report(result: Run) -> list[Table | str]:
    """Return the table of scaled modules, and what the check saw."""
    columns: dict[str, Column] = {
        "module": lambda row: str(row["module"] or "(the model)"),
        "peak": ("peak", ",.4g"),
        "2^-e": lambda row: f"2^{-row['power']}" if row["power"] else "1",
        "in FP16": ("scaled", ",.4g"),
        "margin": ("margin", ".3g"),
    }
    worst = sorted(result["records"], key=lambda each: -each["peak"])
    shown = worst[:SHOWN]
    title = f"{result['model']}: the {len(shown)} largest of {len(worst)} modules that are scaled or near 65504"
    table = [Table.of(title, shown, columns, "", wraps="module")] if shown else []
    return [*table, verdict(result)]


def verdict(result: Run) -> str:
    """Return the outcome in a few sentences."""
    settings, check = result["settings"], result["check"]
    over = sum(each["peak"] > LARGEST for each in result["records"])
    lines = [
        f"{over} modules pass 65504 on the sample of {settings['sample']['tokens']} tokens; {len(settings['powers'])} "
        f"tensors are scaled, {len(settings['fp32'])} of them stored in FP32, because the model adds a number to them.",
    ]
    lines += [f"{entry} of config.json: {old:g} is now {new:.6g}." for entry, (old, new) in settings["config"].items()]
    lines.append(f"{result['underflow']:.2%} of the weights become subnormal or 0 by scaling.")
    lines.append(
        "Scores of attention are not scaled: where they may pass 65504, call pasa.patch_pipeline after loading."
    )
    if check and check["finite"]:
        lines.append(
            f"{result['out']}, loaded by transformers in FP16: perplexity {check['perplexity']:.6g}, before "
            f"{check['perplexity_before']:.6g} in {check['dtype_before']}; {check['top1']:.1%} of best tokens agree."
        )
    if check and check["finite"] and check["top1"] < AGREEING:
        lines.append(
            "FAILED: the written checkpoint predicts other tokens, as small values underflow: keep BF16 or FP32."
        )
    elif check and not check["finite"]:
        lines.append(f"FAILED: {result['out']}, loaded by transformers in FP16, computes infinity or NaN.")
    return "\n".join(lines)


EXPERIMENT = Experiment(
    name="to-fp16",
    run=run_to_fp16,
    report=report,
    title="A checkpoint scaled for FP16",
    needs_models=True,
    resume="the same command goes on from them",
)
