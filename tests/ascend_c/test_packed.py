"""Packed sequences on the CPU twin: each has the bits of a call of its own, whatever stands beside it.

The bounds of a call without packing are those of test_attention.py. A row may have one heavy key, whose score may be
stored an ulp apart: up to 2^-8 nats, because no score stays in FP16 further than 6 nats above its reference. The head
dimensions here have a scale that is a power of two, so a unit is a nat.
"""

from itertools import accumulate

import pytest
import torch

from tests.ascend_c.decode_runs import launch_decode
from tests.ascend_c.kernel_runs import (
    SOME_LAUNCHES,
    Call,
    attend_by_reference,
    launch_attention,
    launch_shift,
    shifted_by_reference,
    ulp,
)
from tests.ascend_c.test_attention import check_output
from tests.inputs import pairwise

# The number of queries and of keys of each sequence.
LENGTHS = {
    "one": [(70, 150)],
    "ends of blocks": [(128, 128), (1, 1), (127, 129), (256, 127)],
    "more queries than keys": [(200, 130), (140, 3), (2, 1)],
    "empty": [(0, 0), (0, 150), (130, 0), (0, 0), (65, 140), (1, 0), (0, 3)],
    "many short": [(i % 5, (7 * i) % 4) for i in range(12)] + [(3, 200)],
}
LIMITS = {
    "none": {},
    "causal": {"causal": True},
    "window": {"window": (40, 3)},
    "causal window": {"causal": True, "window": (130, -1)},
}


def packed_call(lengths, heads=2, kv_heads=1, dim=64, bias=3.0, **how):
    """Return a call of sequences whose keys have biases of their own, so that anchors and frames differ."""
    starts = torch.tensor([list(accumulate(each, initial=0)) for each in zip(*lengths, strict=True)])
    rows, keys = starts[:, -1].tolist()
    g = torch.Generator().manual_seed(rows * 1000 + keys)
    q, k, v = (torch.randn(1, n, s, dim, generator=g) for n, s in ((heads, rows), (kv_heads, keys), (kv_heads, keys)))
    for index, (first, last) in enumerate(zip(starts[1, :-1].tolist(), starts[1, 1:].tolist(), strict=True)):
        k[:, :, first:last] += bias * (1 + index % 3) * (1 - 2 * (index % 2))
    return Call((q + 1).half(), k.half(), v.half(), starts=starts, **how)


@pytest.mark.parametrize("window", [(-1, -1), (40, 3)], ids=str)
@pytest.mark.parametrize("name", LENGTHS)
def test_keys_are_shifted_by_sequence(kernels, name, window):
    """Means, anchors and frames begin anew with each sequence."""
    x = packed_call(LENGTHS[name], kv_heads=2, dim=80, window=window)
    expected = shifted_by_reference(x)
    for mode, seed in SOME_LAUNCHES:
        result = launch_shift(kernels, x, cores=3, mode=mode, seed=seed)
        assert result.report["ok"], result.report["fault"]
        assert result.report["undefined"].get("keys", 0) == 0
        for each, array in expected.items():
            there = ~torch.isnan(array)
            assert (result[each] == array)[there].double().mean() >= 0.995, each
        assert ((result["keys"].double() - expected["keys"].double()).abs() <= ulp(expected["keys"])).all()


def check_sequences(program, x, result):
    """Check each sequence against a call of its own: equal bits, and the bounds against the reference."""
    for rows, _, one in x.sequences():
        out, lse = result["out"][:, :, rows], result["lse"][:, :, rows]
        if one.k.shape[2] == 0:
            sinks = torch.full(lse.shape[1:2], -torch.inf) if x.sinks is None else x.sinks.float()
            assert (out == 0).all()
            assert torch.equal(lse, sinks.view(1, -1, 1).expand_as(lse))
            continue
        if rows.start == rows.stop:
            continue
        shifted = shifted_by_reference(one)
        alone = launch_attention(program, one, shifted, groups=2)
        names = [name for name in alone.arrays if name not in ("scores", "counts")]
        assert all(torch.equal(result[name][:, :, rows], alone[name]) for name in names)
        check_output(one, {"out": out, "lse": lse}, attend_by_reference(one), 2.0**-8)


@pytest.mark.parametrize(("name", "how", "limit"), pairwise(LENGTHS, [("inf", 64), ("saturate", 256)], LIMITS), ids=str)
def test_each_sequence_is_as_a_call_of_its_own(kernels, name, limit, how):
    overflow, dim = how
    x = packed_call(LENGTHS[name], heads=4, kv_heads=2, dim=dim, overflow=overflow, **LIMITS[limit])
    shifted, first = shifted_by_reference(x), None
    for mode, seed in SOME_LAUNCHES:
        result = launch_attention(kernels, x, shifted, mode=mode, seed=seed, groups=1 + seed % 3)
        assert result.report["ok"], result.report["fault"]
        assert sum(result.report["undefined"].values()) == 0
        if first is None:
            first = result
            check_sequences(kernels, x, result)
        for each in ("out", "lse"):
            assert torch.equal(result[each], first[each]), (mode, seed, "the interleaving changed a number")


@pytest.mark.parametrize("name", ["sinks", "counts", "largest", "unbiased"])
def test_what_calls_may_ask_for(kernels, name):
    """Sinks are those of heads; counts of a row's tiles are those of its sequence alone."""
    asked = {
        "sinks": {"sinks": torch.tensor([4.0, -torch.inf])},
        "counts": {"counts": True},
        "largest": {"largest": True},
        "unbiased": {"unbiased": torch.bfloat16},
    }
    x = packed_call([(70, 150), (0, 40), (140, 0), (65, 300)], causal=True, **asked[name])
    result = launch_attention(kernels, x, shifted_by_reference(x), groups=2)
    assert result.report["ok"], result.report["fault"]
    assert sum(result.report["undefined"].values()) == 0
    for rows, keys, one in x.sequences():
        if rows.start == rows.stop or keys.start == keys.stop:
            continue
        alone = launch_attention(kernels, one, shifted_by_reference(one))
        for each, expected in alone.arrays.items():
            if each != "scores":
                assert torch.equal(result[each][..., rows, :] if each == "out" else result[each][..., rows], expected)


@pytest.mark.parametrize("sinks", [None, torch.tensor([4.0, -1.0])], ids=["plain", "sinks"])
def test_rows_behind_the_last_sequence(kernels, sinks):
    """Rows that belong to no sequence give 0 and -inf, and what stands in keys of none reaches no row.

    Story: their log-sum-exp was their sink, as that of a sequence's rows without keys.
    """
    x = packed_call([(70, 150), (60, 20)], sinks=sinks)
    expected = launch_attention(kernels, x, shifted_by_reference(x))
    longer = packed_call([(70, 150), (60, 20), (140, 130)])
    longer.k[:, :, 170:] = torch.nan
    longer.q[:, :, :130], longer.k[:, :, :170], longer.v[:, :, :170] = x.q, x.k, x.v
    longer = Call(longer.q, longer.k, longer.v, starts=x.starts, sinks=sinks)
    shifted = launch_shift(kernels, longer)
    assert shifted.report["ok"], shifted.report["fault"]
    result = launch_attention(kernels, longer, shifted.arrays)
    assert result.report["ok"], result.report["fault"]
    assert torch.equal(result["out"][:, :, :130], expected["out"])
    assert torch.equal(result["lse"][:, :, :130], expected["lse"])
    assert not result["out"][:, :, 130:].any()
    assert result["lse"][:, :, 130:].isneginf().all()


NONSENSE = {
    "decreasing": ([0, 200, 50, 270], [0, 300, 20, 290]),
    "beyond the rows": ([0, 100, 5000, 270], [0, 10**9, 290, 2**31 - 1]),
    "below 0": ([-5, 100, -(2**31), 270], [-1, -1, 150, 290]),
    "not from 0": ([260, 265, 266, 266], [280, 285, 290, 290]),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_lengths_that_are_wrong_reach_no_memory_outside(kernels, name):
    """Lengths on a device are not checked. The twin faults where a copy leaves its array."""
    x = packed_call([(90, 90), (90, 100), (90, 100)], window=(200, 200))
    good = shifted_by_reference(x)
    x.starts[:] = torch.tensor(NONSENSE[name])
    shifted = launch_shift(kernels, x)
    assert shifted.report["ok"] or shifted.report["fault"]["kind"] == "race", shifted.report["fault"]
    numbers = {each: torch.where(torch.isnan(array), 1.0, array).to(array.dtype) for each, array in good.items()}
    result = launch_attention(kernels, x, numbers)
    assert result.report["ok"] or result.report["fault"]["kind"] == "race", result.report["fault"]


DECODED = {
    "one row each": [(1, 300), (1, 1), (1, 129), (1, 40)],
    "without keys": [(1, 0), (1, 0), (0, 30), (3, 0), (2, 200)],  # story: two in a row without keys raced
    "more rows than keys": [(40, 3), (2, 140), (70, 100)],
}


@pytest.mark.parametrize("overflow", ["inf", "saturate"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", DECODED)
def test_decoded_sequences_are_as_calls_of_their_own(kernels, name, causal, overflow):
    """One group has whole sequences, and equal bits; several merge parts, which may turn one rounding."""
    x = packed_call(DECODED[name], heads=6, kv_heads=2, causal=causal, overflow=overflow)
    for groups in (1, 3):
        first = None
        for mode, seed in SOME_LAUNCHES:
            result = launch_decode(kernels, x, groups=groups, mode=mode, seed=seed)
            assert result.report["ok"], result.report["fault"]
            assert sum(result.report["undefined"].values()) == 0
            first = result if first is None else first
            assert all(torch.equal(result[each], first[each]) for each in ("out", "lse"))
        for rows, keys, one in x.sequences():
            out, lse = first["out"][:, :, rows], first["lse"][:, :, rows]
            if keys.start == keys.stop:
                assert not out.any()
                assert lse.isneginf().all()
            elif rows.start < rows.stop:
                alone = launch_decode(kernels, one)
                slack = 0 if groups == 1 else ulp(alone["out"].abs().amax(-1, keepdim=True))
                assert ((out.double() - alone["out"].double()).abs() <= slack).all()
                torch.testing.assert_close(lse, alone["lse"], atol=0 if groups == 1 else 1e-4, rtol=0)


@pytest.mark.parametrize("name", NONSENSE)
def test_wrong_lengths_of_decoding_reach_no_memory_outside(kernels, name):
    x = packed_call([(90, 90), (90, 100), (90, 100)])
    x.starts[:] = torch.tensor(NONSENSE[name])
    result = launch_decode(kernels, x)
    assert result.report["ok"] or result.report["fault"]["kind"] == "race", result.report["fault"]
