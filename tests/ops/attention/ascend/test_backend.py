"""An NPU is served by the library, or by another backend, which one warning names.

There is no NPU here: torch_npu is faked, and tensors are the CPU's. tests/ascend_c/test_binding.py tests what the
library computes.
"""

import dataclasses
import re
import types
import warnings

import pytest
import torch

import pasa
from pasa.ops import devices, notices, registry
from pasa.ops.attention.ascend import backend as npu_backend
from pasa.ops.attention.ascend import build_record
from pasa.ops.attention.options import AttentionOptions
from pasa.ops.backends import Request
from tests import fake_npu
from tests.inputs import normal_qkv

HALF_ULP = 2.0**-11  # of an output near 1
EXACT, PAPER = AttentionOptions(), AttentionOptions(recovery="paper")
SATURATING = AttentionOptions(overflow="saturate")
UNBIASED = AttentionOptions(softmax="unbiased")


@pytest.fixture
def torch_npu(monkeypatch):
    return fake_npu.install(monkeypatch)


@pytest.fixture
def unbuilt(monkeypatch, tmp_path):
    """Remove the library, and let tensors of the CPU count as the NPU's."""
    monkeypatch.setenv("PASA_ASCEND_LIBRARY", str(tmp_path / "libpasa_npu.so"))
    npu_backend.library_error.cache_clear()
    npu_backend._architecture.cache_clear()
    notices.warn_once.cache_clear()
    npu = dataclasses.replace(registry.BACKENDS["npu"], devices=("cpu",))
    monkeypatch.setitem(registry.BACKENDS, "npu", npu)
    yield tmp_path / "libpasa_npu.so"
    npu_backend.library_error.cache_clear()
    npu_backend._architecture.cache_clear()
    notices.warn_once.cache_clear()


def status():
    return next(line for line in pasa.backends() if line.name == "npu")


# ---- the library


def test_reasons_why_the_library_does_not_serve(unbuilt, torch_npu):
    assert status()[:3] == ("npu", False, f"there is no {unbuilt}: run `pasa build-ascend` where CANN is installed")
    unbuilt.write_text("not a library")
    npu_backend.library_error.cache_clear()
    assert status().reason.startswith(f"{unbuilt} does not load: ")


def test_a_library_for_another_torch_is_not_loaded(unbuilt, torch_npu, monkeypatch):
    """Its C++ interface is another, and loading it can crash the process; another CANN is left to `pasa doctor`."""
    unbuilt.write_bytes(b"not a library pasa-build:torch=2.8.0 torch_npu=2.9.0 cann=9.1.0\0")
    here = {"torch": "2.9.0", "torch_npu": "2.9.0", "cann": "9.2.0"}
    monkeypatch.setattr(build_record, "installed", lambda: here)
    asked = "run `pasa build-ascend` again"
    assert status().reason == f"{unbuilt} was built for torch 2.8.0, and 2.9.0 is installed: {asked}"
    here |= {"torch": "2.8.0", "torch_npu": "2.9.0.post2"}
    npu_backend.library_error.cache_clear()
    assert status().reason == f"{unbuilt} was built for torch_npu 2.9.0, and 2.9.0.post2 is installed: {asked}"
    here["torch_npu"] = "2.9.0"
    npu_backend.library_error.cache_clear()
    assert status().reason.startswith(f"{unbuilt} does not load: ")


def test_a_machine_without_npu(unbuilt, monkeypatch):
    assert status().reason == "torch_npu is not installed (pip install '.[npu]')"
    q, k, v = normal_qkv((1, 1), (4, 4), 16)
    notices.warn_once.cache_clear()
    with pytest.warns(UserWarning, match="served by backend 'sdpa' .*torch_npu is not installed"):
        pasa.attention(q, k, v)
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch, "npu", types.SimpleNamespace(is_available=lambda: False), raising=False)
    assert status().reason == "torch finds no NPU"


def test_a_call_that_names_the_backend_gets_it_or_nothing(unbuilt, torch_npu):
    q, k, v = normal_qkv((1, 1), (4, 4), 16)
    with pytest.raises(NotImplementedError, match=r"npu: there is no .*run `pasa build-ascend`"):
        pasa.attention(q, k, v, backend="npu")


@pytest.mark.parametrize("name", ["Ascend310P1", "Ascend310P3"])
def test_a_310p_is_served_by_a_library_of_its_own_or_by_sdpa(unbuilt, monkeypatch, name):
    """The reasons do not advise to install triton-ascend."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    fake_npu.install(monkeypatch, name)
    why = f"there is no {unbuilt}: run `pasa build-ascend` where CANN is installed"
    reasons = {line.name: line.reason for line in pasa.backends() if not line.available}
    assert reasons == {"npu": why, "triton": f"Triton has no path to an {name}"}
    q, k, v = normal_qkv((2, 1), (20, 30), 16)
    with pytest.warns(UserWarning, match=f"served by backend 'sdpa' .*{re.escape(why)}"):
        pasa.attention(q, k, v)
    assert registry.server("npu").name == "sdpa"


@pytest.mark.parametrize(
    ("chip", "architecture", "kind"),
    [
        ("Ascend310P3", "dav-2201", "Atlas A2"),
        ("Ascend310P1", None, "Atlas A2"),
        ("Ascend910B3", "dav-2002", "the Ascend 310P"),
    ],
)
def test_a_library_for_another_chip_is_refused_by_name(unbuilt, monkeypatch, chip, architecture, kind):
    """It is not loaded. Libraries of before the 310P do not say what they were built for: it was an A2."""
    fake_npu.install(monkeypatch, chip)
    arch = "" if architecture is None else f" arch={architecture}"
    unbuilt.write_bytes(f"not a library pasa-build:torch={torch.__version__}{arch}\0".encode())
    why = f"{unbuilt} was built for {kind}, and this chip is an {chip}: run `pasa build-ascend` again"
    assert status().reason == why
    q, k, v = normal_qkv((2, 1), (20, 30), 16)
    with pytest.raises(NotImplementedError, match=re.escape(f"npu: {why}")):
        pasa.attention(q, k, v, backend="npu")


def test_one_warning_says_who_serves_and_why(unbuilt, torch_npu):
    q, k, v = normal_qkv((2, 1), (20, 30), 16)
    with pytest.warns(UserWarning, match=f"served by backend 'sdpa' .*there is no {unbuilt}"):
        pasa.attention(q, k, v)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pasa.attention(q.bfloat16(), k.bfloat16(), v.bfloat16())


def test_what_the_kernels_do_not_do_needs_no_fallback(unbuilt, torch_npu):
    """Baselines and the like need no fallback: another backend serves them, built kernels or not."""
    q, k, v = normal_qkv((1, 1), (4, 4), 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pasa.attention(q, k, v, config=pasa.PasaConfig(precision="fp32"))
        pasa.attention(q, k, v, config=pasa.PasaConfig(block_k=64))
        pasa.attention(q, k, v, config=pasa.PasaConfig(accumulate="fp16"))


# ---- the order of backends


@pytest.mark.parametrize(
    ("triton", "options", "chosen"),
    [
        (True, EXACT, "triton"),
        (True, PAPER, "triton"),
        (True, UNBIASED, "triton"),
        (True, SATURATING, "reference"),
        (True, AttentionOptions(block_k=256), "sdpa"),
        (False, AttentionOptions(block_k=64), "sdpa"),
        (False, EXACT, "sdpa"),
        (False, PAPER, "reference"),
        (False, SATURATING, "reference"),
        (False, UNBIASED, "reference"),
    ],
)
def test_who_serves_an_npu_without_the_library(unbuilt, torch_npu, monkeypatch, triton, options, chosen):
    install_triton(monkeypatch, ascend=triton)
    record = dataclasses.replace(registry.BACKENDS["triton"], devices=("cpu",))
    monkeypatch.setitem(registry.BACKENDS, "triton", record)
    request = Request("cpu", torch.float16, 64, "none", options=options)
    assert registry.select(request).name == chosen


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


# ---- what the kernels receive


@pytest.mark.parametrize("dim", [1, 16, 40, 96, 255])
def test_head_dims_become_multiples_of_16(dim):
    x = torch.randn(2, 3, 5, dim).half().transpose(1, 2)
    padded = npu_backend.pad_head_dim(x)
    assert padded.is_contiguous()
    assert padded.shape[3] == -(-dim // 16) * 16
    assert torch.equal(padded[..., :dim], x)
    assert not padded[..., dim:].any()


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 4, 5), (1, 1, 1, 16), (1, 1, 7, 64)], ids=str)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (3, 2, 1, 0)], ids=str)
def test_kernels_get_strides_of_a_new_tensor(shape, order):
    """torch's padding keeps the order of channels_last, and contiguous() the strides of dimensions of one element."""
    inverse = [order.index(axis) for axis in range(4)]
    x = torch.randn([shape[axis] for axis in order]).permute(inverse)
    padded = npu_backend.pad_head_dim(x)
    assert padded.stride() == torch.empty(padded.shape).stride()
    assert torch.equal(padded[..., : shape[3]], x)


def test_the_matrix_of_the_published_recovery():
    matrix, invariance = npu_backend.paper_matrix(0.125, 0.9, torch.device("cpu"))
    assert torch.equal(matrix, pasa.shifting_matrix(128, 0.9, scale=0.125, dtype=torch.float16))
    assert invariance == pytest.approx(9.0)
