"""An NPU is served by the library, or by another backend, which one warning names.

There is no NPU here: torch_npu is faked, and tensors are the CPU's. tests/ascend_c/test_binding.py tests what the
library computes.
"""

import dataclasses
import importlib.machinery
import sys
import types
import warnings

import pytest
import torch

import pasa
from pasa.ops import devices, envs, notices, registry
from pasa.ops.attention.ascend import backend as npu_backend
from pasa.ops.attention.ascend import vendor as npu_vendor
from pasa.ops.attention.call import Call
from pasa.ops.attention.options import AttentionOptions
from pasa.ops.backends import Request
from tests.inputs import ODD_LENGTHS, max_error, normal_qkv

HALF_ULP = 2.0**-11  # of an output near 1
EXACT, PAPER = AttentionOptions(), AttentionOptions(recovery="paper")
SATURATING = AttentionOptions(overflow="saturate")
UNBIASED = AttentionOptions(softmax="unbiased")


class FusedAttention:
    """`npu_fused_infer_attention_score` as documented, in FP32, for the options that npu_vendor uses."""

    def __init__(self):
        self.calls = []

    def __call__(self, q, k, v, *, num_heads, num_key_value_heads, input_layout, scale, **how):
        self.calls.append(how)
        assert num_heads <= 256
        assert num_heads // num_key_value_heads <= 64
        assert (input_layout, num_heads, num_key_value_heads) == ("BNSD", q.shape[1], k.shape[1])
        assert all(x.is_contiguous() and x.dtype == torch.float16 and x.shape[3] % 16 == 0 for x in (q, k, v))
        assert how["softmax_lse_flag"] is True
        group, rows, keys = num_heads // num_key_value_heads, q.shape[2], k.shape[2]
        k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
        scores = q.float() @ k.mT * scale
        if how["sparse_mode"] == 3:
            assert torch.equal(how["atten_mask"], torch.ones(2048, 2048).triu(1).bool())
            scores = scores.masked_fill(torch.ones(rows, keys).triu(1 + keys - rows).bool(), -torch.inf)
        else:
            assert (how["sparse_mode"], how["atten_mask"]) == (0, None)
        return (scores.softmax(-1) @ v).half(), scores.logsumexp(-1, keepdim=True)


@pytest.fixture
def torch_npu(monkeypatch):
    """Fake an installed torch_npu with the vendor's attention, and an NPU."""
    module = types.ModuleType("torch_npu")
    module.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)
    module.npu_fused_infer_attention_score = FusedAttention()
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    monkeypatch.setattr(torch, "npu", types.SimpleNamespace(is_available=lambda: True), raising=False)
    return module


@pytest.fixture
def unbuilt(monkeypatch, tmp_path):
    """Remove the library, and let tensors of the CPU count as the NPU's."""
    monkeypatch.setenv("PASA_ASCEND_LIBRARY", str(tmp_path / "libpasa_npu.so"))
    npu_backend.library_error.cache_clear()
    notices.warn_once.cache_clear()
    for name in ("npu", "vendor"):
        monkeypatch.setitem(registry.BACKENDS, name, dataclasses.replace(registry.BACKENDS[name], devices=("cpu",)))
    yield tmp_path / "libpasa_npu.so"
    npu_backend.library_error.cache_clear()
    notices.warn_once.cache_clear()


def status():
    return next(line for line in pasa.backends() if line.name == "npu")


# ---- the library


def test_reasons_why_the_library_does_not_serve(unbuilt, torch_npu):
    assert status()[:3] == (
        "npu",
        False,
        f"there is no {unbuilt}: build it with {envs.ascend_build_script()} where CANN is installed",
    )
    unbuilt.write_text("not a library")
    npu_backend.library_error.cache_clear()
    assert status().reason.startswith(f"{unbuilt} does not load: ")


def test_a_machine_without_npu(unbuilt, monkeypatch):
    assert status().reason == "torch_npu is not installed (pip install '.[npu]')"
    q, k, v = normal_qkv((1, 1), (4, 4), 16)
    notices.warn_once.cache_clear()
    with pytest.warns(UserWarning, match="served by backend 'reference', an emulation: torch_npu is not installed"):
        pasa.attention(q, k, v)
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch, "npu", types.SimpleNamespace(is_available=lambda: False), raising=False)
    assert status().reason == "torch finds no NPU"


def test_a_call_that_names_the_backend_gets_it_or_nothing(unbuilt, torch_npu):
    q, k, v = normal_qkv((1, 1), (4, 4), 16)
    with pytest.raises(NotImplementedError, match=r"npu: there is no .*build it with .*scripts/build_ascend\.sh"):
        pasa.attention(q, k, v, backend="npu")


def test_one_warning_says_who_serves_and_why(unbuilt, torch_npu):
    q, k, v = normal_qkv((2, 1), (20, 30), 16)
    with pytest.warns(UserWarning, match=f"'vendor' .*without the guarantee against overflow.*there is no {unbuilt}"):
        pasa.attention(q, k, v)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pasa.attention(q.bfloat16(), k.bfloat16(), v.bfloat16())
    assert len(torch_npu.npu_fused_infer_attention_score.calls) == 2


def test_what_the_kernels_do_not_do_needs_no_fallback(unbuilt, torch_npu):
    """Masks, baselines and the like need no fallback: another backend serves them, with or without built kernels."""
    q, k, v = normal_qkv((1, 1), (4, 4), 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pasa.attention(q, k, v, attn_mask=torch.ones(4, 4).bool())
        pasa.attention(q, k, v, config=pasa.PasaConfig(precision="fp32"))
        pasa.attention(q, k, v, config=pasa.PasaConfig(block_k=64))
        pasa.attention(q, k, v, config=pasa.PasaConfig(accumulate="fp16"))


# ---- the order of backends


@pytest.mark.parametrize(
    ("triton", "vendor", "options", "chosen"),
    [
        (True, True, EXACT, "triton"),
        (True, True, PAPER, "triton"),
        (True, True, UNBIASED, "triton"),
        (True, True, SATURATING, "reference"),
        (True, True, AttentionOptions(block_k=256), "reference"),
        (False, True, AttentionOptions(block_k=64), "reference"),
        (False, True, EXACT, "vendor"),
        (False, True, PAPER, "reference"),
        (False, True, SATURATING, "reference"),
        (False, True, UNBIASED, "reference"),
        (False, False, EXACT, "reference"),
    ],
)
def test_who_serves_an_npu_without_the_library(unbuilt, torch_npu, monkeypatch, triton, vendor, options, chosen):
    install_triton(monkeypatch, ascend=triton)
    record = dataclasses.replace(registry.BACKENDS["triton"], devices=("cpu",))
    monkeypatch.setitem(registry.BACKENDS, "triton", record)
    if not vendor:
        del torch_npu.npu_fused_infer_attention_score
    request = Request("cpu", torch.float16, 64, "none", options=options)
    assert registry.select(request).name == chosen


def test_a_backend_without_the_guarantee_never_serves_in_silence(unbuilt, torch_npu, monkeypatch):
    """Story: with a block size that the kernels refuse, the vendor's attention served without a word."""
    vendor = dataclasses.replace(registry.BACKENDS["vendor"], accepts=None)
    monkeypatch.setitem(registry.BACKENDS, "vendor", vendor)
    q, k, v = normal_qkv((1, 1), (4, 4), 16)
    with pytest.warns(UserWarning, match="'vendor' .*without the guarantee.*block_k 256 is not among 128"):
        pasa.attention(q, k, v, config=pasa.PasaConfig(block_k=256))


def install_triton(monkeypatch, *, ascend):
    """Fake an installed Triton, for Ascend or for GPUs alone."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    present = {"triton", "torch_npu"} | ({"triton.backends.ascend"} if ascend else set())
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: object() if name in present else None)


def test_triton_for_gpus_is_not_triton_ascend(torch_npu, monkeypatch):
    """Triton for GPUs is not taken for triton-ascend, which has the same package name."""
    install_triton(monkeypatch, ascend=False)
    assert devices.triton_missing() == "the installed triton has no backend for an NPU: install triton-ascend"
    install_triton(monkeypatch, ascend=True)
    assert devices.triton_missing() is None
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: object() if name == "torch_npu" else None)
    assert devices.triton_missing() == "triton-ascend is not installed", "and not the Triton of GPUs"


def test_a_torch_npu_without_the_vendors_function_is_named(torch_npu):
    del torch_npu.npu_fused_infer_attention_score
    assert npu_vendor.missing() == "torch_npu has no npu_fused_infer_attention_score"


# ---- the vendor's attention


@pytest.mark.parametrize("lengths", [*ODD_LENGTHS, (40, 7)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_vendor_arguments(torch_npu, lengths, is_causal):
    """Head dimensions, layout, causal band and fully masked rows come out of the vendor's attention as pasa's do."""
    q, k, v = normal_qkv((4, 2), lengths, 40, batch=2)
    out, lse, *_ = npu_vendor.attend(Call(q, k, v, 0.2, EXACT, is_causal))
    golden, golden_lse = pasa.golden_attention(q, k, v, is_causal=is_causal, scale=0.2)
    assert max_error(out, golden) <= 2 * HALF_ULP
    torch.testing.assert_close(lse, golden_lse.float(), atol=1e-4, rtol=0)
    how = torch_npu.npu_fused_infer_attention_score.calls[0]
    masked_out = is_causal and 1 < lengths[0] > lengths[1]
    assert how["inner_precise"] == (2 if masked_out else 0), (
        "high precision, correcting rows without keys where there are any"
    )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "launches"), [(256, 4, 1), (71, 1, 2), (130, 2, 2), (300, 100, 2), (520, 260, 3)]
)
def test_the_vendors_limits_on_heads_are_kept_by_launches(torch_npu, heads, kv_heads, launches):
    """The vendor's function takes 256 query heads, and 64 for each key head; Falcon has 71 for one."""
    q, k, v = normal_qkv((heads, kv_heads), (3, 5), 16, batch=2)
    out, lse, *_ = npu_vendor.attend(Call(q, k, v, 0.25, EXACT, False))
    golden, golden_lse = pasa.golden_attention(q, k, v, scale=0.25)
    assert max_error(out, golden) <= 2 * HALF_ULP
    torch.testing.assert_close(lse, golden_lse.float(), atol=1e-4, rtol=0)
    assert len(torch_npu.npu_fused_infer_attention_score.calls) == launches


def test_vendor_packed(torch_npu):
    edges_q, edges_k = torch.tensor([0, 5, 9, 44, 74, 79]), torch.tensor([0, 10, 10, 140, 175, 185])
    q, k, v = torch.randn(79, 4, 32).half(), torch.randn(185, 2, 32).half(), torch.randn(185, 2, 32).half()
    for is_causal in (False, True):
        out, lse, *_ = npu_vendor.attend(Call(q, k, v, 0.2, EXACT, is_causal, cu_q=edges_q, cu_k=edges_k))
        how = {"is_causal": is_causal, "scale": 0.2, "return_lse": True, "backend": "reference"}
        expected, expected_lse = pasa.attention_varlen(q, k, v, edges_q, edges_k, 35, 130, **how)
        torch.testing.assert_close(out, expected, atol=1e-2, rtol=0)
        torch.testing.assert_close(lse, expected_lse, atol=1e-2, rtol=0)
    assert len(torch_npu.npu_fused_infer_attention_score.calls) == 2 * 3, "two sequences are of equal lengths"


# ---- what the kernels receive


@pytest.mark.parametrize("dim", [1, 16, 40, 96, 255])
def test_head_dims_become_multiples_of_16(dim):
    x = torch.randn(2, 3, 5, dim).half().transpose(1, 2)
    padded = npu_backend.pad_head_dim(x)
    assert padded.is_contiguous()
    assert padded.shape[3] == -(-dim // 16) * 16
    assert torch.equal(padded[..., :dim], x)
    assert not padded[..., dim:].any()


def test_the_matrix_of_the_published_recovery():
    matrix, invariance = npu_backend.paper_matrix(0.125, 0.9, torch.device("cpu"))
    assert torch.equal(matrix, pasa.shifting_matrix(128, 0.9, scale=0.125, dtype=torch.float16))
    assert invariance == pytest.approx(9.0)
