"""Reading Nsight Compute's table, with a fake ncu."""

import json
import sys

import pytest

from pasa.eval.speed import counters

STALLS = [f"{counters.STALL}{name}_per_issue_active.ratio" for name in counters.STALLS.values()]
TABLE = [
    ["ID", "Kernel Name", *(name for name, _ in counters.METRICS.values()), *STALLS],
    ["", "", *[""] * (len(counters.METRICS) + len(STALLS))],
    ["0", "merge_kernel", "4,800", "1886208", "8.2", "3980000", "0", "43.5", "128", "12000",
     "35.5", "10.25", "14.5", "5.75", "n/a", "11", "0"],
]  # fmt: skip


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """A program of that name that keeps its arguments and prints what is put into `says`."""
    program, says, heard = tmp_path / "ncu", tmp_path / "says", tmp_path / "heard"
    program.write_text(
        f"#!{sys.executable}\nimport json, sys\n"
        f"open({str(heard)!r}, 'w').write(json.dumps(sys.argv))\nprint(open({str(says)!r}).read())\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return says, heard


def test_units_and_reasons(ncu):
    says, heard = ncu
    lines = [",".join(f'"{cell}"' for cell in line) for line in TABLE]
    says.write_text("==PROF== Connected\n" + "\n".join(lines))
    (line,) = counters.profile("decode-1x32k", "pasa")
    assert line["kernel"] == "merge_kernel"
    assert [line[name] for name in ("us", "DRAM MB", "registers")] == pytest.approx([4.8, 1.886208, 128])
    assert line[counters.WAITS] == "memory 35.5, shared memory 14.5, fixed latency 11.0"
    arguments = json.loads(heard.read_text())
    assert arguments[-2:] == ["decode-1x32k", "pasa"]
    assert arguments[arguments.index("--clock-control") + 1] == "none", "clocks are not ours to set"


def test_refused_counters_and_a_missing_ncu_are_said(ncu, monkeypatch, tmp_path):
    ncu[0].write_text("==ERROR== ERR_NVGPUCTRPERM")
    with pytest.raises(NotImplementedError, match="ERR_NVGPUCTRPERM"):
        counters.profile("paper", "pasa")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(FileNotFoundError, match="'ncu': install Nsight Compute"):
        counters.profile("paper", "pasa")
