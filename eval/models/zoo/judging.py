"""Judges a patched model by what the same model gives unpatched, in FP32.

Three bounds, on the largest difference of an output from the unpatched model's, relative to the output's own RMS:

* with FP64 attention (`pasa.golden_attention`) in the place of `pasa.attention`, the patched model must give the
  unpatched one's output up to the order of FP32 sums, `PLUMBING`, or, for the models that `AMPLIFIES` names,
  `LIKEWISE` of what rounding q, k and v to FP16 does to it: masks, scales, heads and caches reach attention as they
  should, whatever FP16 rounds;
* with PASA itself it may err by `ROUNDING`, or, where the model amplifies any rounding (experts, codebooks and other
  choices), by `AMPLIFIED` times what rounding q, k and v to FP16 alone does to it, of several draws for the models
  that `CHOOSES` names;
* a planted fault must show: the same model with a wrong mask must err by more than `SEEN` times `PLUMBING`. A model
  that does not pass shows nothing, and counts as not judged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import pasa

PLUMBING, ROUNDING, AMPLIFIED, SEEN = 1e-4, 1e-2, 8.0, 10.0
LIKEWISE = 2.0**-8  # FP32 rounds 2^-13 as coarsely as FP16, and not q, k and v alone: 32 times as often
AMPLIFIES = {
    "Kandinsky3UNet": "roundings of FP16 move its output by 90 %, so those of FP32 move it by 0.1 %",
}
"""Models that are permitted `LIKEWISE` of what FP16 rounds, with the reason; all others are held to `PLUMBING`."""
DRAWS = 16  # of roundings, until one changes the choice that PASA's changed
CHOOSES = {
    "VQModel": "takes the nearest of its codes, and a rounding decides between two of them where it comes near both",
}
"""Models whose roundings are drawn up to `DRAWS` times, with the reason; those of all others are taken once."""
STEADY = 1e-5  # what two runs of the unpatched model may differ by
REFUSALS = (NotImplementedError, TypeError, ValueError)
VERDICTS = ("right", "refused", "nothing to patch", "wrong", "refused at call", "crashed", "not judged", "not built")
FINDINGS = ("wrong", "refused at call", "crashed")
UNJUDGED = re.compile("past_key_values|attentions")
"""Outputs that are left out: caches, and attention weights, which some models return unasked and PASA never forms."""
Attention = Callable[..., Tensor]
Record = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One call of a model.

    Attributes
    ----------
    name : str
    call : callable
        Takes nothing and returns the model's output.
    real : Tensor (B, L), bool, optional
        Which positions are no padding; outputs at others are nobody's business.
    """

    name: str
    call: Callable[[], Any]
    real: Tensor | None = None


@dataclass(frozen=True)
class Generated:
    """Greedy tokens (B, steps) and the logits (B, steps, vocabulary) that they are the largest of."""

    tokens: Tensor
    logits: Tensor

    def same(self, other: Generated) -> int:
        """Steps whose logits can be compared: up to and with the first token that differs, as what follows has other
        inputs. There two logits lie closer than their errors, or the errors show."""
        differs = (self.tokens != other.tokens).any(0)
        return int(differs.int().argmax()) + 1 if bool(differs.any()) else self.tokens.shape[1]


def tensors(output: Any) -> Iterator[Tensor]:
    """The tensors in a model's output, without those `UNJUDGED` names."""
    if isinstance(output, Generated):
        yield output.logits
    elif isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for name, value in output.items():
            if not UNJUDGED.search(str(name)):
                yield from tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from tensors(value)
    elif is_dataclass(output):
        yield from tensors(vars(output))


def distance(own: Any, other: Any, real: Tensor | None = None) -> float:
    """The largest difference relative to the RMS of a tensor, over all of them; infinite where they do not match."""
    if isinstance(own, Generated):
        steps = own.same(other)
        own, other = own.logits[:, :steps], other.logits[:, :steps]
    pairs = list(zip(list(tensors(own)), list(tensors(other)), strict=False))
    if len(list(tensors(own))) != len(list(tensors(other))):
        return float("inf")
    return max([_distance(a, b, real) for a, b in pairs if a.is_floating_point() or a.is_complex()], default=0.0)


def _distance(own: Tensor, other: Tensor, real: Tensor | None) -> float:
    if own.shape != other.shape:
        return float("inf")
    if real is not None and own.shape[:2] == real.shape:
        own, other = own[real], other[real]
    finite = own.isfinite()
    if not torch.equal(finite, other.isfinite()):
        return float("inf")
    own, other = own[finite].double(), other[finite].double()
    size = float(own.pow(2).mean().sqrt()) if own.numel() else 0.0
    largest = float((own - other).abs().max()) if own.numel() else 0.0
    return 0.0 if largest == 0 else largest / size if size else float("inf")


def run(case: Case) -> Any:
    """What the model gives, with one seed for whatever it draws."""
    torch.manual_seed(0)
    with torch.no_grad():
        return case.call()


@contextmanager
def attention_is(function: Attention) -> Iterator[None]:
    """Put another function in the place of `pasa.attention`."""
    own = pasa.attention
    pasa.attention = function  # type: ignore[assignment]
    try:
        yield
    finally:
        pasa.attention = own


def exact(q: Tensor, k: Tensor, v: Tensor, *, tensor_layout: str = "HND", **keywords: Any) -> Tensor:
    """FP64 attention, called as `pasa.attention` is."""
    heads_last = tensor_layout in ("NHD", "BSND")
    q, k, v = (x.transpose(1, 2) if heads_last else x for x in (q, k, v))
    known = {name: keywords.get(name) for name in ("attn_mask", "scale")}
    out = pasa.golden_attention(q, k, v, is_causal=keywords.get("is_causal", False), **known)[0].to(q.dtype)
    return out.transpose(1, 2) if heads_last else out


def rounded(q: Tensor, k: Tensor, v: Tensor, *, draw: int = 0, **keywords: Any) -> Tensor:
    """FP64 attention of inputs that were rounded to FP16, or, of other draws, changed by as much at random."""
    if not draw:
        return exact(*(x.half().to(x.dtype) for x in (q, k, v)), **keywords)
    generator = torch.Generator().manual_seed(draw)
    noise = (1 + 2.0**-11 * (2 * torch.rand(x.shape, generator=generator) - 1) for x in (q, k, v))
    return exact(*(x * each for x, each in zip((q, k, v), noise, strict=True)), **keywords)


def faulty(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
    """FP64 attention that looks at keys it should not, or, where it may look at all, leaves the last one out."""
    if keywords.get("attn_mask") is not None or keywords.get("is_causal"):
        return exact(q, k, v, **{**keywords, "attn_mask": None, "is_causal": False})
    length = 1 if keywords.get("tensor_layout") in ("NHD", "BSND") else 2
    fewer = max(1, k.shape[length] - 1)
    return exact(q, k.narrow(length, 0, fewer), v.narrow(length, 0, fewer), **keywords)


def judge(model: Any, cases: list[Case]) -> Record:
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
    found: dict[str, Record] = {}
    verdict, why = "right", ""
    for case, own in steady:
        try:
            found[case.name] = compare(case, own, DRAWS if name in CHOOSES else 1)
        except NotImplementedError as error:
            verdict, why = "refused at call", f"{case.name}: {line(error)}"
        except Exception as error:
            verdict, why = "crashed", f"{case.name}: {type(error).__name__}: {line(error)}"
    report = handle.report()
    handle.unpatch()
    if verdict == "right":
        verdict, why = _verdict(found, LIKEWISE if name in AMPLIFIES else 0.0)
    if verdict == "right" and distance(steady[0][1], run(steady[0][0])) > STEADY:
        verdict, why = "wrong", "unpatched, it does not give what it gave"
    return {
        "verdict": verdict, "why": why, "cases": found, "left_out": left_out,
        "patched": len(report.patched), "skipped": len(report.skipped),
    }  # fmt: skip


def _steady(cases: list[Case]) -> tuple[list[tuple[Case, Any]], list[str]]:
    """Cases that the unpatched model can run and gives the same output for twice, and why others are left out."""
    steady: list[tuple[Case, Any]] = []
    left_out: list[str] = []
    for case in cases:
        try:
            own = run(case)
            if not any(x.is_floating_point() and bool(x.isfinite().any()) for x in tensors(own)):
                left_out.append(f"{case.name}: no finite output")
            elif not steady and distance(own, run(case)) > STEADY:
                left_out.append(f"{case.name}: two runs differ")
            else:
                steady.append((case, own))
        except Exception as error:
            left_out.append(f"{case.name}: {type(error).__name__}: {line(error)}")
    return steady, left_out


def compare(case: Case, own: Any, draws: int) -> Record:
    """Return the errors of a patched model in one case; roundings are drawn up to this often."""
    error = distance(own, run(case), case.real)
    found = {"error": error}
    with attention_is(exact):
        found["plumbing"] = distance(own, run(case), case.real)
    if not isinstance(own, Generated):
        with attention_is(faulty):
            found["planted"] = distance(own, run(case), case.real)
    for draw in range(draws):
        if error > max(ROUNDING, AMPLIFIED * found.get("rounded", 0.0)):
            with attention_is(partial(rounded, draw=draw)):
                found["rounded"] = max(found.get("rounded", 0.0), distance(own, run(case), case.real))
    return found


def _verdict(found: dict[str, Record], likewise: float) -> tuple[str, str]:
    """Return the verdict over all cases of an architecture, and why."""
    for name, each in found.items():
        if each["plumbing"] > max(PLUMBING, likewise * each.get("rounded", 0.0)):
            return "wrong", f"{name}: off by {100 * each['plumbing']:.2g} % with FP64 attention in PASA's place"
        if each["error"] > max(ROUNDING, AMPLIFIED * each.get("rounded", 0.0)):
            return "wrong", f"{name}: off by {100 * each['error']:.2g} %, rounding alone explains less"
    if max(each.get("planted", 0.0) for each in found.values()) <= SEEN * PLUMBING:
        return "not judged", "a planted fault does not show: attention hardly reaches the outputs"
    return "right", ""


def line(error: BaseException) -> str:
    """Its message on one line."""
    return " ".join(str(error).split())[:300]
