"""The binding for the Ascend 310P: what it refuses, and its kernels' results as a backend, on the CPU twin."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.library import opcheck

import pasa
from pasa.eval.random_calls.run import FUZZ
from pasa.ops.attention.ascend import build_record
from pasa.ops.attention.ascend.masks import HALF, find_visits, tile_bits
from tests.ascend_c.decode_runs import make_call, put_into_pages
from tests.ascend_c.test_masked_calls import TOLERANCE, compared, masks
from tests.inputs import max_error, normal_qkv

RESULTS = Path(__file__).parents[2] / "eval" / "random_calls" / "results" / "310p"
HALF_ULP = 2.0**-11  # of an output near 1


@pytest.fixture
def npu(npu_310p):
    """torch.ops.pasa, and the backend `npu` ready for tensors of the CPU, as on a machine with a 310P."""
    return npu_310p


def test_the_library_says_what_it_was_built_for(npu_310p_library):
    assert build_record.built_with(npu_310p_library)["arch"] == "dav-2002"


# ---- results


@pytest.mark.parametrize("overflow", ["inf", "saturate"])
@pytest.mark.parametrize(
    ("heads", "lengths", "dim", "is_causal"),
    [
        ((1, 1), (1, 63), 64, False),
        ((4, 2), (40, 70), 40, True),
        ((3, 1), (130, 300), 80, True),
        ((8, 2), (1, 200), 64, True),
    ],
)
def test_attention_is_as_accurate_as_the_emulation(npu, heads, lengths, dim, is_causal, overflow):
    """The chip saturates in either mode, and no number of the exact recovery does."""
    q, k, v = normal_qkv(heads, lengths, dim)
    q, k = q + 2, k + 2
    how = {"is_causal": is_causal, "config": pasa.PasaConfig(overflow=overflow), "return_lse": True}
    out, lse = pasa.attention(q, k, v, backend="npu", **how)
    emulated, _ = pasa.attention(q, k, v, backend="reference", **how)
    golden, golden_lse = pasa.golden_attention(q, k, v, is_causal=is_causal)
    assert max_error(out, golden) <= 2 * max_error(emulated, golden) + HALF_ULP
    seen = golden_lse > -torch.inf
    assert torch.equal(lse > -torch.inf, seen)
    assert float((lse - golden_lse)[seen].abs().max()) <= 1e-3


@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_sequences(npu, is_causal):
    """Sequences of several lengths, one of them empty, are padded to one another in a launch."""
    rows, keys = [3, 0, 40, 17], [5, 7, 150, 17]
    g = torch.Generator().manual_seed(1)
    q = torch.randn(sum(rows), 4, 64, generator=g).half()
    k, v = (torch.randn(sum(keys), 2, 64, generator=g).half() for _ in "kv")
    edges = [torch.tensor([0, *torch.tensor(x).cumsum(0)], dtype=torch.int32) for x in (rows, keys)]
    how = {"is_causal": is_causal}
    out = pasa.attention_varlen(q, k, v, *edges, max(rows), max(keys), backend="npu", **how)
    expected = pasa.attention_varlen(q, k, v, *edges, max(rows), max(keys), backend="reference", **how)
    assert max_error(out, expected) <= 4 * HALF_ULP


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", masks(1, 1, 1, 1))
def test_masks_of_every_layout(npu, name, is_causal):
    q, k, v = normal_qkv((4, 2), (70, 150), 40, batch=2)
    compared(q, k, v, attn_mask=masks(2, 4, 70, 150)[name], is_causal=is_causal)


@pytest.mark.parametrize("name", masks(1, 1, 1, 1))
def test_masks_beside_a_few_rows(npu, name):
    """Heads that share keys are rows of a tile, so the mask's rows are those of tokens and heads."""
    q, k, v = normal_qkv((6, 2), (3, 150), 32, batch=2)
    compared(q, k, v, attn_mask=masks(2, 6, 3, 150)[name], sinks=torch.arange(6.0) - 2)


@pytest.mark.parametrize("window", [(10, 0), (0, -1), (-1, 5), (40, 40), (1000, 1000)])
@pytest.mark.parametrize("lengths", [(70, 150), (150, 70), (300, 300), (1, 200), (3, 200)])
def test_windows(npu, window, lengths):
    q, k, v = normal_qkv((4, 2), lengths, 32)
    compared(q, k, v, window=window)
    compared(q, k, v, window=window, attn_mask=torch.rand(lengths, generator=torch.Generator().manual_seed(1)) < 0.8)


@pytest.mark.parametrize("is_causal", [False, True])
def test_windows_of_packed_sequences(npu, is_causal):
    """One has no keys, one no queries, and one has more queries than keys."""
    edges_q, edges_k = torch.tensor([0, 5, 9, 44, 44, 74]), torch.tensor([0, 10, 10, 140, 143, 153])
    q, k, v = (x[0].transpose(0, 1) for x in normal_qkv((4, 2), (74, 153), 32))
    how = {"is_causal": is_causal, "window": (7, -1), "return_lse": True, "sinks": torch.tensor([1.0, -9.0, 2.0, 0.0])}
    found, expected = (
        pasa.attention_varlen(q, k + 2, v, edges_q, edges_k, 35, 130, backend=name, **how)
        for name in ("npu", "reference")
    )
    torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("sink", [-torch.inf, -1e9, 1e4])
def test_sinks_that_fp32_saturates(npu, sink):
    """A distance to infinity is infinite, and exp(10^4) too: the launches raise an error if a number saturates."""
    q, k, v = normal_qkv((2, 1), (30, 20), 32)
    compared(q, k, v, sinks=torch.tensor([1.0, sink]), is_causal=True)


@pytest.mark.parametrize("rows", [1, 60])
def test_largest_scores(npu, rows):
    q, k, v = normal_qkv((4, 2), (rows, 300), 32)
    for how in ({}, {"window": (50, 0)}, {"attn_mask": torch.arange(300) % 3 > 0}):
        *_, found = pasa.attention(q, k, v, backend="npu", return_max_logits=True, **how)
        *_, expected = pasa.attention(q, k, v, backend="reference", return_max_logits=True, **how)
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("rows", [1, 4])
def test_long_caches_are_cut_into_parts(npu, rows, is_causal, monkeypatch):
    """Parts are merged in FP32, so another number of cores changes no more than roundings."""
    q, k, v = normal_qkv((8, 1), (rows, 4000), 32)
    outputs = []
    for cores in ("1", "3", "8"):
        monkeypatch.setenv("FAKE_CORES", cores)
        outputs.append(compared(q, k + 3, v, is_causal=is_causal, sinks=torch.arange(8.0)))
    assert not torch.equal(outputs[0], outputs[2])
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0], atol=2.0**-11, rtol=2.0**-10)


@pytest.mark.parametrize("how", [{}, {"window": (20, 0)}, {"sinks": torch.tensor([1.0, 0.0, -1.0, 3.0])}], ids=str)
@pytest.mark.parametrize("starts", [None, [0, 1, 5, 60]], ids=["decoding", "mixed"])
def test_caches_in_pages(npu, starts, how):
    x = make_call(3, 4, 2, 1 if starts is None else 100, 300, 64, lengths=torch.tensor([300, 37, 120]))
    x = put_into_pages(x, 16, starts)
    arguments = (x.q, x.k, x.v, x.table, x.lengths)
    found, expected = (
        pasa.attention_paged(*arguments, cu_seqlens_q=x.starts, is_causal=True, backend=name, return_lse=True, **how)
        for name in ("npu", "reference")
    )
    torch.testing.assert_close(found, expected, **TOLERANCE)


def test_a_query_that_is_not_finite_gives_nan_to_its_row_alone(npu):
    q, k, v = normal_qkv((2, 1), (20, 30), 64)
    q[0, 1, 7, 3] = torch.inf
    out, lse = pasa.attention(q, k, v, backend="npu", return_lse=True)
    assert out[0, 1, 7].isnan().all()
    assert lse[0, 1, 7].isnan()
    assert out.isnan().sum() == out.shape[-1]


@pytest.mark.parametrize("is_causal", [False, True])
def test_operators_keep_torchs_rules(npu, is_causal):
    """Shapes for tracing are those of the results."""
    q, k, v = normal_qkv((2, 1), (16, 150), 32)
    shifted = npu.npu_310p_shift(k, None, 0.125)
    values = npu.npu_310p_lay_out(v, None)
    tests = ("test_schema", "test_faketensor")
    opcheck(npu.npu_310p_shift.default, (k, None, 0.125), test_utils="test_faketensor")
    opcheck(npu.npu_310p_lay_out.default, (v, None), test_utils="test_faketensor")
    for window, largest in (((-1, -1), False), ((5, 5), True)):
        limits = 16, 150, 1, is_causal, *window, 0.125, largest
        arguments = q, shifted[0], values, *shifted[1:], None, None, None, None, *limits
        opcheck(npu.npu_310p_attention.default, arguments, test_utils=tests)


def test_random_calls_hold_all_bounds(npu, monkeypatch):
    """The launches raise an error if a number saturates."""
    monkeypatch.delitem(sys.modules, "torch_npu")  # else the fuzzer takes the library for that of a device
    monkeypatch.delattr(torch, "npu")
    result = FUZZ.measure(cases=60, seed=3, backend="npu")
    assert result["gate"] == {"passed": True, "failed": 0, "run": 60, "stopped": False, "absent": 0}
    assert "Ascend C for the 310P on its CPU twin" in result["note"]


def test_the_stored_run_is_long_and_holds_all_bounds():
    result = json.loads((RESULTS / "fuzz.json").read_text("utf-8"))
    assert result["gate"]["passed"]
    assert result["backends"]["npu"]["correct"] == result["cases"] >= 5000
    assert "310P" in result["note"]


# ---- refused by name


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"dtype": torch.bfloat16}, "an Ascend 310P has no BF16: convert q, k and v to torch.float16"),
        ({"config": pasa.PasaConfig(recovery="paper")}, "no recovery paper, only exact"),
        ({"config": pasa.PasaConfig(softmax="unbiased")}, "no softmax unbiased, only safe"),
        ({"attn_mask": torch.zeros(20, 30).half()}, "the kernels for the Ascend 310P have no float masks"),
        ({"softcap": 5.0}, "soft caps are not supported"),
    ],
)
def test_what_the_kernels_do_not_do(npu, how, words):
    q, k, v = (x.to(how.get("dtype", torch.float16)) for x in normal_qkv((2, 1), (20, 30), 64))
    arguments = {name: value for name, value in how.items() if name != "dtype"}
    with pytest.raises(NotImplementedError, match=f"npu: .*{re.escape(words)}"):
        pasa.attention(q, k, v, backend="npu", **arguments)


def test_bad_arguments_of_the_operators(npu):
    q, k, v = normal_qkv((2, 1), (20, 30), 64)
    keys, anchors, units = npu.npu_310p_shift(k, None, 0.125)
    values = npu.npu_310p_lay_out(v, None)
    q = torch.nn.functional.pad(q, (0, 0, 0, 12))

    def attend(q=q, keys=keys, rows=20, scale=0.125, token_rows=1, sinks=None, mask=None, visits=None):
        limits = rows, 30, token_rows, False, -1, -1, scale, False
        return npu.npu_310p_attention(q, keys, values, anchors, units, None, sinks, mask, visits, *limits)

    attend()
    with pytest.raises(TypeError, match="q is BFloat16, expected Half"):
        attend(q=q.bfloat16())
    with pytest.raises(ValueError, match="q has 32 rows, expected 40 rounded up to a multiple of 16"):
        attend(rows=40)
    with pytest.raises(ValueError, match=r"keys has shape \[1, 1, 2, 4, 128, 16\], expected \[1, 1, 1, 4, 128, 16\]"):
        attend(keys=torch.cat([keys, keys], 2))
    with pytest.raises((ValueError, RuntimeError), match="scale must be positive and finite"):
        attend(scale=0.0)
    with pytest.raises(ValueError, match="token_rows=0 is not in 1 to rows=20"):
        attend(token_rows=0)
    with pytest.raises((ValueError, RuntimeError), match="rows=20 are no multiple of token_rows=3"):
        attend(token_rows=3)
    with pytest.raises(ValueError, match=r"sinks has shape \[2\], expected \[2, 32\]"):
        attend(sinks=torch.zeros(2))
    keep = torch.ones(1, 1, 20, 30, dtype=torch.bool)
    bits, table = tile_bits(keep), find_visits(keep, 20, HALF)
    attend(mask=bits, visits=table)
    with pytest.raises(ValueError, match="mask and visits come together"):
        attend(mask=bits)
    with pytest.raises(TypeError, match="mask is Bool, expected Byte"):
        attend(mask=bits.bool(), visits=table)
    with pytest.raises(ValueError, match=r"mask has 4 dimensions .*, expected 5"):
        attend(mask=keep.byte(), visits=table)
    with pytest.raises(ValueError, match=r"mask has shape \[1, 1, 2, 1, 1024\], expected \[1, 1, 1, 1, 1024\]"):
        attend(mask=torch.cat([bits, bits], 2), visits=table)
    with pytest.raises(ValueError, match=r"visits has shape \[1, 1, 1, 2, 3\], expected \[1, 1, 1, 2, 2\]"):
        attend(mask=bits, visits=find_visits(keep, 20))
    with pytest.raises(TypeError, match="k is Float, expected Half"):
        npu.npu_310p_shift(k.float(), None, 0.125)


def test_another_chip_is_refused_by_name(npu, monkeypatch):
    monkeypatch.setenv("FAKE_SOC", "Ascend910B3")
    why = "the library was built for the Ascend 310P, and this chip is 'Ascend910B3'"
    assert npu.npu_310p_chip_error().startswith(why)
    _, k, _ = normal_qkv((2, 1), (20, 30), 64)
    with pytest.raises(NotImplementedError, match=re.escape(why)):
        npu.npu_310p_shift(k, None, 0.125)
