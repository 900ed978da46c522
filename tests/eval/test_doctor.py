"""`pasa doctor`: its checks, and the devices that it checks."""

import pytest
import torch

import pasa
from pasa.eval import doctor
from pasa.eval.check_device.npu import probes, probes_310p
from pasa.ops import envs, registry
from pasa.ops.attention.ascend import backend as npu_backend
from pasa.ops.attention.ascend import build_record
from tests import fake_npu

UNCONFIRMED = "; `pasa check-device --npu` probes {} assumptions that no NPU has confirmed"


@pytest.fixture
def gpus(monkeypatch):
    """Put two GPUs, which are the CPU, in place; `corrupt` maps a device to a function that changes its outputs."""
    corrupt = {}
    place, attend = {}, pasa.attention

    def to(x, device):
        moved = x.clone()
        place[id(moved)] = (moved, str(device))
        return moved

    def attention(q, k, v, *, is_causal=False, backend=None):
        _, device = place.get(id(q), (q, "cpu"))
        return corrupt.get(device, lambda out: out)(attend(q, k, v, is_causal=is_causal, backend="reference"))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(pasa, "attention", attention)
    return corrupt


def line(found, backend, device):
    (each,) = [each for each in found["checks"] if (each["backend"], each["device"]) == (backend, device)]
    return each


def broken(out):
    raise RuntimeError("the device\n is gone")


@pytest.mark.parametrize(
    ("corrupt", "said"),
    [
        (lambda out: out * 1.1, "max error"),
        (lambda out: torch.full_like(out, torch.nan), "max error inf"),
        (lambda out: out if out.shape[2] > 1 else torch.zeros_like(out), "max error"),
        (broken, "RuntimeError: the device is gone"),
    ],
    ids=["wrong", "nan", "wrong for one row", "raises"],
)
def test_a_gpu_that_gives_wrong_numbers_is_reported(gpus, corrupt, said):
    """Story: the check made tensors of the CPU alone. "Passed" on a machine with GPUs said nothing about them."""
    gpus["cuda:1"] = corrupt
    found = doctor.self_check()
    assert not found["passed"]
    assert not line(found, "triton", "cuda:1")["passed"]
    assert line(found, "triton", "cuda:0")["passed"]
    assert line(found, "reference", "cpu")["passed"]
    text = doctor.verdict(found)
    assert "Self check FAILED" in text
    assert "passed: triton on cuda:0, max error" in text
    assert f"FAILED: triton on cuda:1, {said}" in text


def test_every_backend_is_checked_on_every_device_or_said_not_to_be(gpus, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    found = doctor.self_check()
    assert found["passed"]
    places = {(each["backend"], each["device"]) for each in found["checks"]}
    gpu = {(name, at) for name in ("reference", "sdpa", "triton") for at in ("cuda:0", "cuda:1")}
    assert places == gpu | {("reference", "cpu"), ("sdpa", "cpu")}
    assert {each["backend"] for each in found["not_checked"]} == {"npu"}
    assert "not checked: npu, torch_npu is not installed" in doctor.verdict(found)


def test_no_check_stands_for_a_machine_without_kernels(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = doctor.self_check()
    assert {each["backend"] for each in found["checks"]} == {"reference", "sdpa"}
    assert {each["backend"] for each in found["not_checked"]} == set(registry.BACKENDS) - {"reference", "sdpa"}


def test_a_line_for_each_device_says_on_what_the_guarantee_rests(gpus, monkeypatch):
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    lines = doctor.guarantees()
    assert list(lines) == ["cpu", "cuda", "xpu"]
    source = "torch's flash attention for CPUs keeps scores in FP32 (run here)"
    assert lines["cpu"] == f"sdpa: {source}; torch's is in class (a)"
    assert lines["cuda"] == f"triton: {registry.BACKENDS['triton'].label}; torch's is in class (a)"
    assert lines["xpu"] == "sdpa: not known; q, k and v are handed over in FP32; torch's is in class (c)"


def test_an_ascend_310p_is_named_with_what_serves_it(monkeypatch):
    """The lines advise no step that would not help there, such as to install triton-ascend."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    fake_npu.install(monkeypatch, "Ascend310P3")
    npu_backend.library_error.cache_clear()
    found = doctor.ascend_c()
    npu_backend.library_error.cache_clear()
    assert doctor.devices()["npu"] == "Ascend310P3"
    assert doctor.kernels_line(doctor.kernels()) == "cannot run: Triton has no path to an Ascend310P3"
    assert doctor.ascend_c_line(found) == (
        f"cannot run: there is no {envs.ascend_library()}: run `pasa build-ascend` where CANN is installed; "
        "an NPU here would be served by backend 'sdpa'"
    )


@pytest.mark.parametrize(("is_310p", "count"), [(False, len(probes.PROBES)), (True, len(probes_310p.PROBES))])
def test_a_library_says_how_much_no_npu_has_confirmed(monkeypatch, is_310p, count):
    monkeypatch.setattr(probes_310p.calls, "is_310p", lambda: is_310p)
    found = doctor.ascend_c() | {"why_not": None, "built_with": {"torch": "2.9.0"}, "differences": {}}
    assert doctor.ascend_c_line(found).endswith(f"with torch 2.9.0{UNCONFIRMED.format(count)}")


def test_the_table_shows_these_lines():
    shown = doctor.report(doctor.run_doctor())[1]
    assert ["attention on cpu", doctor.guarantees()["cpu"]] in shown.rows


def test_it_says_whether_the_ascend_c_kernels_are_built():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PASA_ASCEND_LIBRARY", "/no/such/library.so")
        npu_backend.library_error.cache_clear()
        found = doctor.ascend_c()
    npu_backend.library_error.cache_clear()
    assert doctor.ascend_c_line(found) == (
        "cannot run: there is no /no/such/library.so: "
        "run `pasa build-ascend` where CANN is installed; "
        "an NPU here would be served by backend 'triton'"
    )
    built = {"library": "/there.so", "why_not": None, "built_with": {}, "differences": {}, "unverified": 7}
    assert doctor.ascend_c_line(built) == f"built: /there.so{UNCONFIRMED.format(7)}"


def test_it_says_that_the_ascend_c_kernels_are_built_for_another_cann(tmp_path, monkeypatch):
    """The library still loads, so it serves; the line says what to do if its kernels fail."""
    library, here = tmp_path / "libpasa_npu.so", {"torch": "2.9.0", "cann": "9.2.0"}
    library.write_bytes(b"\x7fELF pasa-build:torch=2.9.0 cann=9.1.0\0")
    monkeypatch.setenv("PASA_ASCEND_LIBRARY", str(library))
    monkeypatch.setattr(build_record, "installed", lambda: here)
    monkeypatch.setattr(npu_backend, "library_error", lambda: None)
    line, end = f"built: {library}, with torch 2.9.0, cann 9.1.0", UNCONFIRMED.format(len(probes.PROBES))
    assert doctor.ascend_c_line(doctor.ascend_c()) == (
        f"{line}; but cann 9.2.0 is installed: run `pasa build-ascend` again{end}"
    )
    here["cann"] = "9.1.0"
    assert doctor.ascend_c_line(doctor.ascend_c()) == f"{line}{end}"
