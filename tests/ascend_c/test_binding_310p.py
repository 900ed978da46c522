"""The binding for the Ascend 310P: what it refuses, and its kernels' results as a backend, on the CPU twin."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.library import opcheck

import pasa
from pasa.eval.check_device.npu import probes
from pasa.eval.random_calls.run import FUZZ
from pasa.ops import registry
from pasa.ops.attention.ascend import backend as npu_backend
from pasa.ops.attention.ascend import build_record
from tests import fake_npu
from tests.inputs import max_error, normal_qkv

CHIP = "Ascend310P3"
RESULTS = Path(__file__).parents[2] / "eval" / "random_calls" / "results" / "310p"
HALF_ULP = 2.0**-11  # of an output near 1


@pytest.fixture
def npu(npu_310p_library, monkeypatch):
    """torch.ops.pasa, and the backend `npu` ready for tensors of the CPU, as on a machine with a 310P."""
    monkeypatch.setenv("PASA_ASCEND_LIBRARY", str(npu_310p_library))
    monkeypatch.setenv("FAKE_SOC", CHIP)
    fake_npu.install(monkeypatch, CHIP)
    npu_backend.library_error.cache_clear()
    assert npu_backend.library_error() is None  # loads it
    record = dataclasses.replace(registry.BACKENDS["npu"], devices=("cpu",), missing=lambda: None)
    monkeypatch.setitem(registry.BACKENDS, "npu", record)
    yield torch.ops.pasa
    npu_backend.library_error.cache_clear()


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
    opcheck(npu.npu_310p_attention.default, (q, shifted[0], values, *shifted[1:], None, 16, 150, is_causal, 0.125),
            test_utils=tests)  # fmt: skip


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
        ({"sinks": torch.zeros(2)}, "the kernels for the Ascend 310P have no sinks"),
        ({"attn_mask": torch.ones(20, 30).bool()}, "the kernels for the Ascend 310P have no masks"),
        ({"window": (5, 0)}, "the kernels for the Ascend 310P have no windows"),
        ({"return_max_logits": True}, "the kernels for the Ascend 310P have no max logits"),
    ],
)
def test_what_the_kernels_do_not_do(npu, how, words):
    q, k, v = (x.to(how.get("dtype", torch.float16)) for x in normal_qkv((2, 1), (20, 30), 64))
    arguments = {name: value for name, value in how.items() if name != "dtype"}
    with pytest.raises(NotImplementedError, match=f"npu: .*{re.escape(words)}"):
        pasa.attention(q, k, v, backend="npu", **arguments)


def test_paged_caches_are_refused_by_name(npu):
    q, k, v = (torch.randn(shape).half() for shape in ((1, 2, 64), (2, 16, 1, 64), (2, 16, 1, 64)))
    table, lengths = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=r"npu: .*the kernels for the Ascend 310P have no paged caches"):
        pasa.attention_paged(q, k, v, table, lengths, backend="npu")


def test_bad_arguments_of_the_operators(npu):
    q, k, v = normal_qkv((2, 1), (20, 30), 64)
    keys, anchors, units = npu.npu_310p_shift(k, None, 0.125)
    values = npu.npu_310p_lay_out(v, None)
    q = torch.nn.functional.pad(q, (0, 0, 0, 12))

    def attend(q=q, keys=keys, rows=20, scale=0.125):
        return npu.npu_310p_attention(q, keys, values, anchors, units, None, rows, 30, False, scale)

    attend()
    with pytest.raises(TypeError, match="q is BFloat16, expected Half"):
        attend(q=q.bfloat16())
    with pytest.raises(ValueError, match="q has 32 rows, expected 40 rounded up to a multiple of 16"):
        attend(rows=40)
    with pytest.raises(ValueError, match=r"keys has shape \[1, 1, 2, 4, 128, 16\], expected \[1, 1, 1, 4, 128, 16\]"):
        attend(keys=torch.cat([keys, keys], 2))
    with pytest.raises((ValueError, RuntimeError), match="scale must be positive and finite"):
        attend(scale=0.0)
    with pytest.raises(TypeError, match="k is Float, expected Half"):
        npu.npu_310p_shift(k.float(), None, 0.125)


def test_probes_of_the_a2_say_that_they_are_none_of_this_chip(npu):
    with pytest.raises(NotImplementedError, match="none is written for the Ascend 310P"):
        probes.check_chip("cpu")


def test_another_chip_is_refused_by_name(npu, monkeypatch):
    monkeypatch.setenv("FAKE_SOC", "Ascend910B3")
    why = "the library was built for the Ascend 310P, and this chip is 'Ascend910B3'"
    assert npu.npu_310p_chip_error().startswith(why)
    _, k, _ = normal_qkv((2, 1), (20, 30), 64)
    with pytest.raises(NotImplementedError, match=re.escape(why)):
        npu.npu_310p_shift(k, None, 0.125)
