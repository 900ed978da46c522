"""Judge a patched model: its outputs must equal those of the same model unpatched, in FP32, within three bounds.

The error is the largest difference of an output from the unpatched model's, relative to that output's RMS.

* `PLUMBING` bounds the error with FP64 attention (`pasa.golden_attention`) in place of `pasa.attention`. It shows that
  masks, scales, heads and caches reach attention unchanged, because FP16 rounds nothing here. Models in `AMPLIFIES` may
  instead err by `RELAXED` times the error that rounding q, k and v to FP16 causes.
* `ROUNDING` bounds the error with PASA itself. Some models amplify any rounding, because they choose between experts
  or codes. They may err by `AMPLIFIED` times the error that rounding q, k and v to FP16 causes; for models in
  `CHOOSES`, the largest such error over several roundings.
* With a planted fault, a wrong mask, the error must exceed `SEEN` times `PLUMBING`. Otherwise the outputs hardly depend
  on attention, and the model counts as not judged.
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
from pasa.eval.kit.output import error_line

PLUMBING, ROUNDING, AMPLIFIED, SEEN = 1e-4, 1e-2, 8.0, 10.0
# FP32 rounds 2^-13 as coarsely as FP16. It rounds all of a model, not only q, k and v, so 32 times as much is allowed.
RELAXED = 2.0**-8
AMPLIFIES = {"Kandinsky3UNet": "roundings of FP16 move its output by 90 %, so those of FP32 move it by 0.1 %"}
CHOOSES = {"VQModel": "takes the nearest of its codes, and a rounding decides where two are about equally near"}
"""Architectures with wider bounds, and why; all others must stay below `PLUMBING`, and may try one rounding."""
# The most random roundings of q, k and v to try for a model in `CHOOSES`, until one changes the same choice as PASA.
DRAWS = 16
STEADY = 1e-5  # the most by which two runs of the unpatched model may differ
REFUSALS = (NotImplementedError, TypeError, ValueError)
VERDICTS = ("right", "refused", "nothing to patch", "wrong", "refused at call", "crashed", "not judged", "not built")
FINDINGS = ("wrong", "refused at call", "crashed")  # verdicts that fail the gate
UNJUDGED = re.compile("past_key_values|cache|attentions")  # caches, and attention weights, which PASA never forms
Attention = Callable[..., Any]
Record = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One call of a model. Only positions where `real` (B, L) is True are judged; the others are padding."""

    name: str
    call: Callable[[], Any]
    real: Tensor | None = None


@dataclass(frozen=True)
class Generated:
    """Greedily generated tokens (B, steps), and the logits (B, steps, vocabulary) of each step."""

    tokens: Tensor
    logits: Tensor

    def same(self, other: Generated) -> int:
        """Count the leading steps whose logits can be compared: those up to the first differing token, included.

        Later steps have different inputs. At the differing token itself, either two logits were nearly equal, or the
        comparison shows the error.
        """
        differs = (self.tokens != other.tokens).any(0)
        return int(differs.int().argmax()) + 1 if bool(differs.any()) else self.tokens.shape[1]


def tensors(output: Any) -> list[Tensor]:
    """Return all tensors of a model's output, except those whose name matches `UNJUDGED`."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Generated):
        return [output.logits]
    if is_dataclass(output) and not isinstance(output, Mapping):
        output = vars(output)
    if isinstance(output, Mapping):
        output = [value for name, value in output.items() if not UNJUDGED.search(str(name))]
    return [each for value in output for each in tensors(value)] if isinstance(output, (list, tuple)) else []


def distance(expected: Any, other: Any, real: Tensor | None = None) -> float:
    """Return the largest difference of two outputs, relative to the RMS of each tensor.

    It is infinite if shapes differ, or if NaN and infinity are at different places.
    """
    if isinstance(expected, Generated):
        steps = expected.same(other)
        expected, other = expected.logits[:, :steps], other.logits[:, :steps]
    first, second = tensors(expected), tensors(other)
    if [each.shape for each in first] != [each.shape for each in second]:
        return math.inf
    largest = 0.0
    for a, b in zip(first, second, strict=True):
        if a.is_floating_point() or a.is_complex():
            judged = real is not None and a.shape[:2] == real.shape
            largest = max(largest, _distance(a[real], b[real]) if judged else _distance(a, b))
    return largest


def _distance(expected: Tensor, other: Tensor) -> float:
    finite = expected.isfinite()
    if not torch.equal(finite, other.isfinite()):
        return math.inf
    expected, other = expected[finite].double(), other[finite].double()
    if torch.equal(expected, other):
        return 0.0
    size = float(expected.pow(2).mean().sqrt())
    return float((expected - other).abs().max()) / size if size else math.inf


def run(case: Case) -> Any:
    """Return the model's output; the random seed is the same in every call."""
    torch.manual_seed(0)
    with torch.no_grad():
        return case.call()


def exact_attention(
    q: Tensor, k: Tensor, v: Tensor, *, tensor_layout: str = "HND", return_lse: bool = False, **keywords: Any
) -> Any:
    """Compute attention in FP64, with the signature of `pasa.attention`."""
    last = tensor_layout in ("NHD", "BSND")
    names = ("attn_mask", "is_causal", "window", "scale", "softcap", "sinks")
    known = {name: keywords[name] for name in names if keywords.get(name) is not None}
    out, lse = pasa.golden_attention(*((x.transpose(1, 2) for x in (q, k, v)) if last else (q, k, v)), **known)
    out = (out.transpose(1, 2) if last else out).to(q.dtype)
    return (out, lse.float()) if return_lse else out


def rounded_attention(q: Tensor, k: Tensor, v: Tensor, *, draw: int = 0, **keywords: Any) -> Any:
    """Compute FP64 attention of q, k and v rounded to FP16; with `draw`, of q, k and v changed at random by as much."""
    if not draw:
        return exact_attention(*(x.half().to(x.dtype) for x in (q, k, v)), **keywords)
    generator = torch.Generator().manual_seed(draw)
    noise = (1 + 2.0**-11 * (2 * torch.rand(x.shape, generator=generator) - 1) for x in (q, k, v))
    return exact_attention(*(x * each for x, each in zip((q, k, v), noise, strict=True)), **keywords)


def faulty_attention(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Any:
    """Compute FP64 attention with a planted fault: without the mask, or, if there is none, without the last key."""
    if keywords.get("attn_mask") is not None or keywords.get("is_causal"):
        return exact_attention(q, k, v, **{**keywords, "attn_mask": None, "is_causal": False})
    length = 1 if keywords.get("tensor_layout") in ("NHD", "BSND") else 2
    fewer = max(1, k.shape[length] - 1)
    return exact_attention(q, k.narrow(length, 0, fewer), v.narrow(length, 0, fewer), **keywords)


def judge(model: Any, cases: Iterable[Case]) -> Record:
    """Patch the model and judge its cases; return the verdict, the reason, and the errors of each case."""
    steady, left_out = _steady(cases)
    if not steady:
        return {"verdict": "not judged", "why": "; ".join(left_out), "cases": {}}
    try:
        handle = pasa.patch_pipeline(model)
    except REFUSALS as error:
        nothing = "no attention module found" in str(error)
        return {"verdict": "nothing to patch" if nothing else "refused", "why": error_line(error), "cases": {}}
    name = type(model).__name__
    errors: dict[str, Record] = {}
    verdict, why = "right", ""
    for case, expected in steady:
        try:
            errors[case.name] = compare(case, expected, DRAWS if name in CHOOSES else 1)
        except Exception as error:
            verdict = "refused at call" if isinstance(error, NotImplementedError) else "crashed"
            why = f"{case.name}: {error_line(error)}"
    handle.unpatch()
    if verdict == "right":
        verdict, why = _verdict(errors, RELAXED if name in AMPLIFIES else 0.0)
    if verdict == "right" and distance(steady[0][1], run(steady[0][0])) > STEADY:
        verdict, why = "wrong", "after unpatching, the model's output differs from its output before patching"
    return {"verdict": verdict, "why": why, "cases": errors, "left_out": left_out}


def _steady(cases: Iterable[Case]) -> tuple[list[tuple[Case, Any]], list[str]]:
    """Run the cases unpatched; return those that can be judged, with their outputs, and why others are left out."""
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
    """Return the errors of a patched model in one case.

    Roundings of q, k and v, at most `draws`, are tried until one explains the error of PASA.
    """

    def error_with(function: Attention) -> float:
        unchanged, pasa.attention = pasa.attention, function
        try:
            return distance(expected, run(case), case.real)
        finally:
            pasa.attention = unchanged

    errors = {"error": error_with(pasa.attention), "plumbing": error_with(exact_attention)}
    if not isinstance(expected, Generated):
        errors["planted"] = error_with(faulty_attention)
    for draw in range(draws):
        if errors["error"] > max(ROUNDING, AMPLIFIED * errors.get("rounded", 0.0)):
            errors["rounded"] = max(errors.get("rounded", 0.0), error_with(partial(rounded_attention, draw=draw)))
    return errors


def _verdict(errors: dict[str, Record], relaxed: float) -> tuple[str, str]:
    for name, each in errors.items():
        amplified = each.get("rounded", 0.0)
        if each["plumbing"] > max(PLUMBING, relaxed * amplified):
            return "wrong", f"{name}: off by {100 * each['plumbing']:.2g} % with FP64 attention in PASA's place"
        if each["error"] > max(ROUNDING, AMPLIFIED * amplified):
            return "wrong", f"{name}: off by {100 * each['error']:.2g} %, rounding alone explains less"
    if max(each.get("planted", 0.0) for each in errors.values()) <= SEEN * PLUMBING:
        return "not judged", "a planted fault does not show: attention hardly reaches the outputs"
    return "right", ""
