"""Judges a patched model by what the same model gives unpatched, in FP32.

Three bounds, on the largest difference of an output from the unpatched model's, relative to that output's RMS:

* `PLUMBING`, with FP64 attention (`pasa.golden_attention`) in the place of `pasa.attention`: masks, scales, heads and
  caches reach attention as they should, whatever FP16 rounds. Models that `AMPLIFIES` names may err by `RELAXED` of
  what rounding q, k and v to FP16 does to them;
* `ROUNDING`, with PASA itself, or, where the model amplifies any rounding (experts, codebooks and other choices),
  `AMPLIFIED` times what rounding q, k and v to FP16 alone does to it, of several draws for models in `CHOOSES`;
* a planted fault must show: with a wrong mask the model must err by more than `SEEN` times `PLUMBING`. A model that
  does not pass shows nothing, and counts as not judged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import pasa

PLUMBING, ROUNDING, AMPLIFIED, SEEN = 1e-4, 1e-2, 8.0, 10.0
RELAXED = 2.0**-8  # FP32 rounds 2^-13 as coarsely as FP16, and not q, k and v alone: 32 times as often
AMPLIFIES = {"Kandinsky3UNet": "roundings of FP16 move its output by 90 %, so those of FP32 move it by 0.1 %"}
"""Models that are permitted `RELAXED` of what FP16 rounds, with the reason; all others are held to `PLUMBING`."""
DRAWS = 16  # of roundings, until one changes the choice that PASA's changed
CHOOSES = {
    "VQModel": "takes the nearest of its codes, and a rounding decides between two of them where it comes near both"
}
"""Models whose roundings are drawn up to `DRAWS` times, with the reason; those of all others are taken once."""
STEADY = 1e-5  # the most by which two runs of the unpatched model may differ
REFUSALS = (NotImplementedError, TypeError, ValueError)
VERDICTS = ("right", "refused", "nothing to patch", "wrong", "refused at call", "crashed", "not judged", "not built")
FINDINGS = ("wrong", "refused at call", "crashed")
UNJUDGED = re.compile("past_key_values|attentions")
"""Outputs that are left out: caches, and attention weights, which some models return unasked and PASA never forms."""
Attention = Callable[..., Tensor]
Record = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One call of a model; `real` (B, L) says which positions are no padding, because others are not judged."""

    name: str
    call: Callable[[], Any]
    real: Tensor | None = None


@dataclass(frozen=True)
class Generated:
    """Greedy tokens (B, steps) and the logits (B, steps, vocabulary) that they are the largest of."""

    tokens: Tensor
    logits: Tensor

    def same(self, other: Generated) -> int:
        """Return the steps whose logits can be compared: up to and with the first token that differs.

        What follows has other inputs. At that token two logits lie closer than their errors, or the errors show.
        """
        differs = (self.tokens != other.tokens).any(0)
        return int(differs.int().argmax()) + 1 if bool(differs.any()) else self.tokens.shape[1]


def tensors(output: Any) -> list[Tensor]:
    """Return the tensors in a model's output, without those `UNJUDGED` names."""
    if isinstance(output, Tensor):
        return [output]
    if is_dataclass(output) and not isinstance(output, Mapping):
        output = {"logits": output.logits} if isinstance(output, Generated) else vars(output)
    if isinstance(output, Mapping):
        output = [value for name, value in output.items() if not UNJUDGED.search(str(name))]
    return [each for value in output for each in tensors(value)] if isinstance(output, (list, tuple)) else []


def distance(expected: Any, other: Any, real: Tensor | None = None) -> float:
    """Return the largest difference relative to the RMS of a tensor, over all; infinite where they do not match."""
    if isinstance(expected, Generated):
        steps = expected.same(other)
        expected, other = expected.logits[:, :steps], other.logits[:, :steps]
    first, second = tensors(expected), tensors(other)
    if [each.shape for each in first] != [each.shape for each in second]:
        return math.inf
    pairs = zip(first, second, strict=True)
    return max([_distance(a, b, real) for a, b in pairs if a.is_floating_point() or a.is_complex()], default=0.0)


def _distance(expected: Tensor, other: Tensor, real: Tensor | None) -> float:
    if real is not None and expected.shape[:2] == real.shape:
        expected, other = expected[real], other[real]
    finite = expected.isfinite()
    if not torch.equal(finite, other.isfinite()):
        return math.inf
    expected, other = expected[finite].double(), other[finite].double()
    if torch.equal(expected, other):
        return 0.0
    size = float(expected.pow(2).mean().sqrt())
    return float((expected - other).abs().max()) / size if size else math.inf


def run(case: Case) -> Any:
    """Return the model's output, with one seed for whatever it draws."""
    torch.manual_seed(0)
    with torch.no_grad():
        return case.call()


def exact(q: Tensor, k: Tensor, v: Tensor, *, tensor_layout: str = "HND", **keywords: Any) -> Tensor:
    """Return FP64 attention, called as `pasa.attention` is."""
    if tensor_layout in ("NHD", "BSND"):
        return exact(*(x.transpose(1, 2) for x in (q, k, v)), **keywords).transpose(1, 2)
    known = {name: keywords[name] for name in ("attn_mask", "scale", "is_causal") if name in keywords}
    return pasa.golden_attention(q, k, v, **known)[0].to(q.dtype)


def rounded(q: Tensor, k: Tensor, v: Tensor, *, draw: int = 0, **keywords: Any) -> Tensor:
    """Return FP64 attention of inputs that were rounded to FP16, or, of other draws, changed by as much at random."""
    if not draw:
        return exact(*(x.half().to(x.dtype) for x in (q, k, v)), **keywords)
    generator = torch.Generator().manual_seed(draw)
    noise = (1 + 2.0**-11 * (2 * torch.rand(x.shape, generator=generator) - 1) for x in (q, k, v))
    return exact(*(x * each for x, each in zip((q, k, v), noise, strict=True)), **keywords)


def faulty(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
    """Return FP64 attention without the mask, or, where there is none, without the last key."""
    if keywords.get("attn_mask") is not None or keywords.get("is_causal"):
        return exact(q, k, v, **{**keywords, "attn_mask": None, "is_causal": False})
    length = 1 if keywords.get("tensor_layout") in ("NHD", "BSND") else 2
    fewer = max(1, k.shape[length] - 1)
    return exact(q, k.narrow(length, 0, fewer), v.narrow(length, 0, fewer), **keywords)


def judge(model: Any, cases: Iterable[Case]) -> Record:
    """Patch the model and judge its cases: the verdict, why, and the errors of each case."""
    steady, left_out = _steady(cases)
    if not steady:
        return {"verdict": "not judged", "why": "; ".join(left_out), "cases": {}}
    try:
        handle = pasa.patch_pipeline(model)
    except REFUSALS as error:
        nothing = "no attention module found" in str(error)
        return {"verdict": "nothing to patch" if nothing else "refused", "why": line(error), "cases": {}}
    name = type(model).__name__
    errors: dict[str, Record] = {}
    verdict, why = "right", ""
    for case, expected in steady:
        try:
            errors[case.name] = compare(case, expected, DRAWS if name in CHOOSES else 1)
        except NotImplementedError as error:
            verdict, why = "refused at call", f"{case.name}: {line(error)}"
        except Exception as error:
            verdict, why = "crashed", f"{case.name}: {error_line(error)}"
    report = handle.report()
    handle.unpatch()
    if verdict == "right":
        verdict, why = _verdict(errors, RELAXED if name in AMPLIFIES else 0.0)
    if verdict == "right" and distance(steady[0][1], run(steady[0][0])) > STEADY:
        verdict, why = "wrong", "unpatched, it does not give what it gave"
    return {
        "verdict": verdict, "why": why, "cases": errors, "left_out": left_out,
        "patched": len(report.patched), "skipped": len(report.skipped),
    }  # fmt: skip


def _steady(cases: Iterable[Case]) -> tuple[list[tuple[Case, Any]], list[str]]:
    """Return cases that the unpatched model runs, with their outputs, and why others are left out."""
    steady: list[tuple[Case, Any]] = []
    left_out: list[str] = []
    for case in cases:
        try:
            expected = run(case)
            if not any(x.is_floating_point() and bool(x.isfinite().any()) for x in tensors(expected)):
                left_out.append(f"{case.name}: no finite output")
            elif not steady and distance(expected, run(case)) > STEADY:
                left_out.append(f"{case.name}: two runs differ")
            else:
                steady.append((case, expected))
        except Exception as error:
            left_out.append(f"{case.name}: {error_line(error)}")
    return steady, left_out


def compare(case: Case, expected: Any, draws: int) -> Record:
    """Return the errors of a patched model in one case; roundings are drawn up to this often."""

    def error_with(function: Attention) -> float:
        unchanged, pasa.attention = pasa.attention, function  # type: ignore[assignment]
        try:
            return distance(expected, run(case), case.real)
        finally:
            pasa.attention = unchanged

    errors = {"error": error_with(pasa.attention), "plumbing": error_with(exact)}
    if not isinstance(expected, Generated):
        errors["planted"] = error_with(faulty)
    for draw in range(draws):
        if errors["error"] > max(ROUNDING, AMPLIFIED * errors.get("rounded", 0.0)):
            errors["rounded"] = max(errors.get("rounded", 0.0), error_with(partial(rounded, draw=draw)))
    return errors


def _verdict(errors: dict[str, Record], relaxed: float) -> tuple[str, str]:
    """Return the verdict over all cases of an architecture, and why."""
    for name, each in errors.items():
        amplified = each.get("rounded", 0.0)
        if each["plumbing"] > max(PLUMBING, relaxed * amplified):
            return "wrong", f"{name}: off by {100 * each['plumbing']:.2g} % with FP64 attention in PASA's place"
        if each["error"] > max(ROUNDING, AMPLIFIED * amplified):
            return "wrong", f"{name}: off by {100 * each['error']:.2g} %, rounding alone explains less"
    if max(each.get("planted", 0.0) for each in errors.values()) <= SEEN * PLUMBING:
        return "not judged", "a planted fault does not show: attention hardly reaches the outputs"
    return "right", ""


def line(error: BaseException) -> str:
    """Return an error's message on one line."""
    return " ".join(str(error).split())[:300]


def error_line(error: BaseException) -> str:
    """Return an error's class and message on one line."""
    return f"{type(error).__name__}: {line(error)}"
