"""The lowering check's own logic; the compilers themselves run in scripts/test.sh."""

import importlib.util
import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("lower_triton_ascend", ROOT / "scripts" / "lower_triton_ascend.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lowered(kib):
    return {"stage": "HIVM", "error": "", "ub_kib": kib}


def outcomes(script, runs, monkeypatch):
    """`lower_all` where the worker answers from a table; kernels: one per case, and one that nobody lists."""
    cases = [{"module": "m", "kernel": "a_kernel", "name": name, "source": name} for name in runs if name != "excluded"]
    answers = {"list": {"cases": cases, "excluded": runs.get("excluded", {})}}
    answers |= {f"m:{name}": run for name, run in runs.items()}
    monkeypatch.setattr(script, "run_worker", lambda task, python: answers[task])
    monkeypatch.setattr(script, "make_venv", lambda: None)
    monkeypatch.setattr(script, "kernels_of", lambda folder: {"a_kernel", "other_kernel"})
    return {result["name"]: result["failed"] for result in script.lower_all(None, {})}


def test_unified_buffer_is_the_end_of_the_highest_buffer(script):
    """Offsets are bytes; several offsets belong to one multi-buffered tile; other memories do not count."""
    hivm = """
    %1 = hivm.hir.pointer_cast(%c0_i64) : memref<32x128xf32, #hivm.address_space<ub>>
    %2 = hivm.hir.pointer_cast(%c16384_i64, %c32768_i64) : memref<64x128xf16, #hivm.address_space<ub>>
    %3 = hivm.hir.pointer_cast(%c1024_i64) : memref<256xi1, strided<[1]>, #hivm.address_space<ub>>
    %4 = hivm.hir.pointer_cast(%c131072_i64) : memref<8x4x16x16xf32, #hivm.address_space<cc>>
    """
    assert script.unified_buffer(hivm) == 32768 + 64 * 128 * 2
    assert script.unified_buffer("") == 0


def test_what_nothing_after_hivm_can_use_is_refused(script, tmp_path):
    (tmp_path / "meta_op.aiv.c220.bc").write_bytes(b"\0_mlir_ciface_vexp_1d_float\0")
    (tmp_path / "meta_op.aiv.c310.bc").write_bytes(b"\0_mlir_ciface_vexp_1d_half\0")  # another chip's
    known = "func.func private @vexp_1d_float(memref<?xf32>)"
    assert script.refusal(known, tmp_path) == ""
    assert "vexp_1d_half" in script.refusal(known + "\nfunc.func private @vexp_1d_half()", tmp_path)
    assert "ex2.approx" in script.refusal('%1 = llvm.inline_asm "ex2.approx.f32 $0, $1;"', tmp_path)


def test_a_library_of_one_chip_has_no_chip_in_its_name(script, tmp_path):
    """ascendnpu-ir 1.1.0 ships meta_op.aiv.bc: taken for an empty library, it failed every case."""
    (tmp_path / "meta_op.aiv.bc").write_bytes(b"_mlir_ciface_vexp_1d_float")
    assert script.refusal("func.func private @vexp_1d_float()", tmp_path) == ""


def test_first_cause_says_what_overflows(script):
    log = 'loc("/x/k.mlir":1:1): error: Failed to run\nerror: ub overflow, requires 2363392 bits while 1572864 bits'
    failure = subprocess.CalledProcessError(1, "bishengir-compile", stderr=log.encode())
    assert script.first_cause(failure) == "UB overflow, 288 of 192 KiB"


def test_first_cause_is_the_root_without_places(script):
    log = b'loc("/x/k.mlir":1:1): error: Failed to run\nloc("/x/k.mlir":8:2): error: no copy from cc to cc\n'
    error = ValueError("at 15:8")
    error.__cause__ = subprocess.CalledProcessError(1, "bishengir-compile", stderr=log)
    assert script.first_cause(error) == "error: no copy from cc to cc"


def test_failures_are_counted_once_a_case(script, monkeypatch):
    good, bad = lowered(100), {"stage": "linalg", "error": "UB overflow"}
    runs = {"fits": {"1.2.0": good, "1.1.0": good}, "one": {"1.2.0": good, "1.1.0": bad}, "crash": {"error": "-11"}}
    assert outcomes(script, runs, monkeypatch) == {"fits": False, "one": True, "crash": True, "-": True}


def test_a_kernel_without_a_case_fails_unless_a_reason_is_given(script, monkeypatch):
    runs = {"fits": {"1.2.0": lowered(1), "1.1.0": lowered(1)}, "excluded": {"other_kernel": "a branch round a GEMM"}}
    assert outcomes(script, runs, monkeypatch) == {"fits": False, "-": False}


@pytest.fixture
def repository(script, tmp_path, monkeypatch):
    """Answers of the compilers by task, the tasks that they were asked, and a README whose table is of today."""
    good = {"1.2.0": lowered(141.2), "1.1.0": lowered(0)}
    cases = [{"module": "m", "kernel": "a_kernel", "name": name, "source": f"text of {name}"} for name in ("x|y", "z")]
    answers = {"list": {"cases": cases, "excluded": {}}, "m:x|y": good, "m:z": good}
    asked = []
    monkeypatch.setattr(script, "run_worker", lambda task, python: asked.append(task) or answers[task])
    monkeypatch.setattr(script, "make_venv", lambda: asked.append("environment"))
    monkeypatch.setattr(script, "kernels_of", lambda folder: {"a_kernel"})
    monkeypatch.setattr(script, "README", tmp_path / "README.md")
    script.README.write_text(f"{script.BEGIN}\n{script.END}\n")

    def run(flag):
        asked.clear()
        monkeypatch.setattr(sys, "argv", ["lower_triton_ascend.py", flag])
        return script.main()

    assert run("--update-readme") == 0
    assert asked == ["list", "environment", "m:x|y", "m:z"]
    return types.SimpleNamespace(run=run, answers=answers, asked=asked, cases=cases)


def test_a_table_of_today_is_taken_as_it_stands(repository):
    """An up-to-date table needs no environment, which would fetch 400 MB."""
    assert repository.run("--check") == 0
    assert repository.asked == ["list"]


def test_a_changed_kernel_is_lowered_and_its_row_is_stale(repository):
    """Also where the compilers say of it what they said before."""
    repository.cases[1]["source"] = "another text"
    assert repository.run("--check") == 1
    assert repository.asked == ["list", "environment", "m:z"]
    assert repository.run("--update-readme") == 0
    assert repository.run("--check") == 0
    assert repository.asked == ["list"]


def test_a_row_that_was_edited_is_lowered(script, repository):
    script.README.write_text(script.README.read_text().replace("UB 141 KiB", "UB 140 KiB", 1))
    assert repository.run("--check") == 1
    assert repository.asked == ["list", "environment", "m:x|y"]


def test_other_compilers_lower_all_again(script, repository, monkeypatch):
    monkeypatch.setattr(script, "FRONT_END", ["triton-ascend==3.3.0"])
    assert repository.run("--check") == 1
    assert repository.asked == ["list", "environment", "m:x|y", "m:z"]


def test_a_failure_is_not_kept(repository):
    """It may have been the machine's."""
    repository.cases[1]["source"] = "another text"
    repository.answers["m:z"] = {"error": "no answer in 120 s"}
    for _ in range(2):
        assert repository.run("--update-readme") == 1
        assert repository.asked == ["list", "environment", "m:z"]


def test_kernels_are_found_by_decorator_and_name(script, tmp_path):
    (tmp_path / "m.py").write_text(
        "@triton.jit\ndef a_kernel(): ...\n@triton.jit(do_not_specialize=['n'])\ndef b_kernel(n): ...\n"
        "@triton.jit\ndef helper(): ...\n@gluon.jit\ndef hopper_kernel(): ...\ndef c_kernel(): ...\n"
    )
    assert script.kernels_of(tmp_path) == {"a_kernel", "b_kernel"}


def test_table_goes_between_the_markers_and_stays_there(script):
    runs = {"1.2.0": lowered(141.2), "1.1.0": lowered(0)}
    result = {"kernel": "attention_kernel", "name": "d64|causal", "source": "text", "runs": runs, "failed": False}
    table = script.markdown([result])
    assert "Lowered, not run on an NPU" in table
    assert r"| `attention_kernel` | `d64\|causal` | HIVM, UB 141 KiB | HIVM, cube only | " in table
    text = f"before\n{script.BEGIN}\nold\n{script.END}\nafter\n"
    once = script.with_table(text, table)
    assert once == f"before\n{script.BEGIN}\n{table}{script.END}\nafter\n"
    assert script.with_table(once, table) == once
    with pytest.raises(SystemExit, match="needs one line"):
        script.with_table("no markers", table)


def test_stub_keeps_the_module_and_makes_the_objects(script, tmp_path):
    (tmp_path / "hivmc").write_text(script.STUB)
    (tmp_path / "in.mlir").write_text("module {}")
    env = {**os.environ, "HIVM": str(tmp_path / "kept")}
    command = ["sh", tmp_path / "hivmc", tmp_path / "in.mlir", "--enable-x=true", "-o", tmp_path / "kernel"]
    subprocess.run(command, check=True, env=env)
    assert (tmp_path / "kept").read_text() == "module {}"
    assert {path.name for path in tmp_path.glob("kernel*")} == {"kernel", "kernel.o", "kernel_reloc.o"}
    subprocess.run(["sh", tmp_path / "hivmc", "--version"], check=True, env=env)


def test_unknown_arguments_are_refused_by_name(script, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton.compiler", types.SimpleNamespace(ASTSource=None))
    kernel = types.SimpleNamespace(__name__="k", arg_names=["p_x", "n"])
    case = {"name": "c", "kernel": kernel, "signature": {"p_y": "*fp16"}, "constexprs": {}}
    with pytest.raises(ValueError, match="k has no argument p_y"):
        script.make_source(case, object)


def test_worker_that_fails_is_an_error_with_its_last_line(script, tmp_path):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    for body, expected in (
        ("echo log; echo 'boom' >&2; exit 3", {"error": "exit status 3: boom"}),
        ("echo noise; echo '" + json.dumps({"1.2.0": lowered(1)}) + "'", {"1.2.0": lowered(1)}),
    ):
        python.write_text(f"#!/bin/sh\n{body}\n")
        python.chmod(0o755)
        assert script.run_worker("list", python) == expected


def test_a_python_without_wheels_is_said(script, monkeypatch):
    monkeypatch.setattr(script.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match=r"wheels up to Python 3\.11"):
        script.find_python()


def test_a_compiler_that_hangs_is_stopped(script, tmp_path, monkeypatch):
    """Killing the worker alone left bishengir-compile running for hours."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f"#!/bin/sh\nsleep 60 &\necho $! > {tmp_path}/pid\nwait\n")
    python.chmod(0o755)
    monkeypatch.setattr(script, "SECONDS", 1)
    assert script.run_worker("m:c", python) == {"error": "no answer in 1 s"}
    child = int((tmp_path / "pid").read_text())
    for _ in range(100):  # a signal takes its time
        state = subprocess.run(
            ["ps", "-o", "stat=", "-p", str(child)], capture_output=True, text=True, check=False
        ).stdout
        if not state.strip() or state.startswith("Z"):
            return
        time.sleep(0.05)
    pytest.fail(f"process {child} is still there: {state}")
