"""Random calls of one backend's kernels on a device: few families, so that compilers do not take all of the time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache, partial
from random import Random

import torch

from pasa.eval.random_calls import attention
from pasa.eval.random_calls.backends import NPU, REFERENCE, SDPA, TRITON, pinned_tile, poison
from pasa.eval.random_calls.cases import Kind, Measures, Params, broken
from pasa.eval.random_calls.inputs import Call, make
from pasa.eval.random_calls.judge import Result, compare, count_faults, differing, find_moved, judge
from pasa.eval.random_calls.number_draws import ORDINARY, SCORES, VALUES
from pasa.eval.random_calls.truth import find_truth

HEADS = ((1, 1), (1, 3), (1, 2), (2, 2), (2, 3), (4, 2), (7, 1), (7, 2), (8, 1), (8, 2))  # (Hq / Hkv, Hkv)
DIMS = (16, 40, 64, 72, 80, 96, 128, 160, 192, 256)
# Served by a kernel of its own there, without a mask and with `block_k` 128.
HOPPER_DIMS = (40, 64, 72, 80, 96, 128, 136, 160, 192, 256)
FEW_ROWS = (1, 1, 2, 3, 8, 16)  # decoding pads them to a power of two: one number for a family
SOME_ROWS = ((17, 32), (33, 64), (65, 128), (129, 300), (129, 300), (301, 1500))
PACKED_DECODE = (1, 16)
KEYS = ((1, 60), (61, 300), (200, 1000), (800, 3000))
SHORT_KEYS, LONG_KEYS = (1, 64), (9000, 12000)
MASKS = ("bool", "float", "padding", "padding-float", "row", "keys")
LAYOUTS = ("contiguous", "contiguous", "heads last", "sliced", "turned", "offset", "fused", "expanded")
PACKED_LAYOUTS = ("contiguous", "sliced")
DTYPES = ("float16",) * 8 + ("bfloat16", "float32")
GROUPS = {"hopper": 14, "portable": 14, "masked": 14, "decode": 14, "packed": 6, "paper": 8, "short": 8}
GARBAGE_SHARE, EMULATED_SHARE = 0.1, 0.4  # about half of the emulated are ordinary: a fifth of all are compared
SCALES = (None,) * 7 + (1e-4, 1.0, 30.0)
SMALL = {"rows": 40, "keys": 140}  # what Triton's interpreter does in a second
SMALL_DIM = 128
PAPER_SCORE = 2 * 2.0**-9  # an FP16 score of 4 to 8 nats is off by 2^-9, and so is its weight


@cache
def draw_families(seed: int) -> tuple[Params, ...]:
    """Return what kernels are compiled for, `GROUPS` of each kind; lengths are ranges, log-uniform."""
    names = [(group, f"{group}-{number}") for group, count in GROUPS.items() for number in range(count)]
    return tuple(_family(group, name, Random(f"family {seed} {name}")) for group, name in names)


def _family(group: str, name: str, rng: Random) -> Params:
    groups, heads = rng.choice(HEADS)
    family = {
        "group": group, "family": name, "batch": rng.choice((1, 1, 2, 3)), "heads": heads, "groups": groups,
        "dim": rng.choice(DIMS), "rows": rng.choice(SOME_ROWS), "keys": rng.choice(KEYS),
        "aligned": rng.random() < 0.25,  # lengths are multiples of 16; otherwise none is
        "causal": rng.random() < 0.5, "packed": False, "mask": "none", "strides": rng.choice(LAYOUTS),
        "dtype": rng.choice(DTYPES), "recovery": "exact", "accumulate": "fp16" if rng.random() < 0.25 else "fp32",
        "block_k": rng.choice((32, 64, 128, 128)),
        "tile": rng.randrange(3),  # which of the candidates to take, modulo their number
    }  # fmt: skip
    return family | _of_group(group, family, rng)


def _of_group(group: str, family: Params, rng: Random) -> Params:
    if group == "hopper":
        return {"dim": rng.choice(HOPPER_DIMS), "block_k": 128, "accumulate": rng.choice(("fp32", "fp16"))}
    if group == "portable":
        taken = family["dim"] in HOPPER_DIMS and family["block_k"] == 128
        return {"block_k": 64 if taken else family["block_k"]}
    if group == "masked":
        return {"mask": rng.choice(MASKS)}
    if group == "decode":
        few, long = rng.choice(FEW_ROWS), rng.random() < 0.25
        mask = "none" if rng.random() < 0.6 else rng.choice(MASKS)
        return {"rows": (few, few), "keys": LONG_KEYS if long else family["keys"], "mask": mask}
    if group == "short":
        rows = rng.choice(((1, 64), SOME_ROWS[-1]))
        return {"rows": rows, "keys": SHORT_KEYS, "mask": rng.choice(("none", *MASKS)), "aligned": False}
    if group == "packed":
        rows = rng.choice((*SOME_ROWS, PACKED_DECODE))
        how = {"packed": True, "batch": rng.randint(2, 6), "strides": rng.choice(PACKED_LAYOUTS)}
        return how | {"rows": rows, "keys": KEYS[1]}
    paper: Params = {"recovery": "paper", "accumulate": rng.choice(("fp32", "fp16"))}
    paper["rows"] = PACKED_DECODE if rng.random() < 0.25 else family["rows"]
    if rng.random() < 0.25:
        return paper | {"packed": True, "keys": KEYS[1], "strides": rng.choice(PACKED_LAYOUTS)}
    return paper | {"mask": "none" if rng.random() < 0.5 else rng.choice(MASKS)}


def kinds(seed: int, backend: str, small: bool, device: str) -> Mapping[str, Kind]:
    """Return the one kind of case that these kernels have; `small` ones have sizes for an interpreter."""
    return {"kernel": Kind(partial(draw, seed=seed, backend=backend, small=small), partial(run, device=device), 1)}


def draw(rng: Random, seed: int, backend: str, small: bool) -> Params:
    """Draw a call of a family of this seed."""
    family = rng.choice(draw_families(seed))
    if small:
        family = shrink(family)
    batch = family["batch"]
    rows, keys = ([_length(rng, family, name) for _ in range(batch)] for name in ("rows", "keys"))
    sizes: Params = {"rows": rows[0], "keys": keys[0]}
    if family["packed"]:  # a sequence may be empty; not all of them, and not the first
        rows, keys = (_some_empty(rng, lengths) for lengths in (rows, keys))
        sizes = {"batch": 1, "rows": sum(rows), "keys": sum(keys), "row_lengths": rows, "key_lengths": keys}
    paper, garbage = family["recovery"] == "paper", "none"
    if rng.random() < GARBAGE_SHARE and not paper:
        garbage = rng.choice(("query", "key", "key", "value", "value", *("mask",) * 3 * ("float" in family["mask"])))
    data = rng.choice((*ORDINARY, *SCORES))  # ordinary ones twice as often
    values = "randn" if rng.random() < 0.5 else rng.choice(list(VALUES))
    params = attention.SIMPLEST | family | sizes | {
        "backend": backend, "layout": "NHD" if family["strides"] == "heads last" else "HND", "lse": True,
        "data": "randn" if paper else data, "values": "randn" if paper else values,
        "scale": None if paper else rng.choice(SCALES), "garbage": garbage, "where": rng.choice(("seen", "hidden")),
        "emulated": paper or rng.random() < EMULATED_SHARE,  # to be compared with the reference's emulation
        "poisoned": rng.random() < 0.5,  # memory that the call allocates is filled with NaN first
    }  # fmt: skip
    return attention.serve(params, rng) if backend in (SDPA, NPU) else params


def shrink(family: Params) -> Params:
    """Return the same family in small."""
    changed: Params = {"batch": min(family["batch"], 3 if family["packed"] else 2), "heads": 1}
    for name, most in SMALL.items():
        low, high = family[name]
        changed[name] = min(low, most // 2), min(high, most)
    return family | changed | {"dim": min(family["dim"], SMALL_DIM)}


def _length(rng: Random, family: Params, name: str) -> int:
    """Draw a multiple of 16, or an odd number: Triton compiles anew for arguments that 16 divides."""
    low, high = family[name]
    if low == high:
        return int(low)
    length = round(math.exp(rng.uniform(math.log(low), math.log(high))))
    if family["aligned"]:
        return max(16, length // 16 * 16)
    return length | 1 if length < high else (length - 1) | 1


def _some_empty(rng: Random, lengths: list[int]) -> list[int]:
    """Empty some sequences after the first; a sum of odd lengths stays odd."""
    drawn = [lengths[0], *(0 if rng.random() < 0.15 else n for n in lengths[1:])]
    drawn[0] += 1 - sum(drawn) % 2 if lengths[0] % 2 else 0
    return drawn


@torch.inference_mode()
def run(params: Params, device: str) -> Measures:
    """Call on a device, and hold the result against FP64 and the reference's emulation.

    Some cases are called twice, for the same bits.
    """
    call = make(params).to(torch.device(device))
    stored, paper = params["backend"] in (REFERENCE, NPU), params["recovery"] == "paper"  # scores are stored in FP16
    result, measures = attention.checked(lambda: attend(params, call), params, call.q)
    if measures["shape"]:
        return measures
    out, lse = result
    truth, longest = find_truth(call, fp16_scores=stored), max(n for _, n in call.sequences or [(0, params["keys"])])
    how = attention.arithmetic_of(params, longest)
    # The published recovery is bounded by its inputs only: nothing else is promised.
    measures |= count_faults(truth, out, lse) if paper else judge(truth, out, lse, how)
    if params["twice"]:
        measures["repeat"] = differing(result, attend(params, call))
    alike = params["backend"] not in (REFERENCE, SDPA)  # SDPA does not centre each block of keys
    if not (alike and params["emulated"]) or params["garbage"] != "none" or not attention.is_ordinary(params):
        return measures
    blocks = -(-longest // params["block_k"])
    extra = PAPER_SCORE + (blocks + 2) * 2.0**-11 * (params["accumulate"] == "fp16") if paper else None
    compared = partial(compare, truth, result, emulate(params, call), dtype=call.q.dtype, paper=extra)
    measures |= compared(moved=None)
    if broken(measures):  # what takes longer than the call is computed only where it is needed
        measures |= compared(moved=find_moved(call, truth))
    return measures


def attend(params: Params, call: Call) -> Result:
    """Return attention and its log-sum-exp, heads first."""
    tile = pinned_tile(params["tile"]) if params["backend"] == TRITON else nullcontext()
    with tile, poison(params["poisoned"]):
        return attention.attend(params, call)


def emulate(params: Params, call: Call) -> Result:
    """Return what the reference computes. Exact outputs of kernels are FP32 sums with either `accumulate`.

    The reference removes keys that no query sees, so that its blocks hold other keys than a kernel's, and the published
    recovery errs otherwise: one more query, which sees every key, keeps them in.
    """
    reference = params | {"backend": REFERENCE}
    if params["recovery"] == "exact":
        return attend(reference | {"accumulate": "fp32"}, call)
    if call.mask is None:
        return attend(reference, call)
    seen = call.visible()
    added = 0.0 if call.mask.dtype == torch.bool else call.mask.float()
    bias = torch.zeros(seen.shape, device=seen.device).add(added).masked_fill(~seen, -torch.inf)
    bias = torch.cat([bias, torch.zeros_like(bias[:, :, :1])], 2)
    more = dataclasses.replace(call, q=torch.cat([call.q, call.q[:, :, :1]], 2), mask=bias, causal=False)
    out, lse = attend(reference | {"strides": "contiguous", "layout": "HND"}, more)
    return out[:, :, :-1], lse[:, :, :-1]
