"""Experts that transformers fuses: they are stored a second time while `pasa to-fp16` runs, and never left there."""

import json
import resource
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pasa.eval import cli
from pasa.eval.kit import model_folder
from pasa.eval.models.to_fp16 import run
from pasa.eval.models.to_fp16.run import run_to_fp16
from pasa.fp16 import writing
from tests.pasa.fp16.checkpoints import contents, save

EXPERTS = 2 * 4 * 3 * 32 * 32
"""Weights of the experts: 2 layers of 4 experts, with 3 matrices each."""


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A folder with a mixture of experts in FP32, which no test may change."""
    folder = tmp_path_factory.mktemp("qwen3_moe") / "model"
    save("qwen3_moe", folder, max_shard_size="20KB")
    before = contents(folder)
    yield folder
    assert contents(folder) == before


def files(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def size(folder):
    """Return the bytes of the shards in a folder."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@contextmanager
def short_files(largest):
    """Let files end at some size, as on a disk that is full."""
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def free(monkeypatch, room):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(room, 0, room))


def test_a_disk_without_room_for_the_experts_is_refused_before_they_are_stored(mixture, tmp_path, refused, monkeypatch):
    """Story: experts filled a disk that had room for OUT alone. They are FP32 here, and so the larger part."""
    out = tmp_path / "out"
    assert size(mixture) // 2 < 4 * EXPERTS
    free(monkeypatch, 4 * EXPERTS - 1)
    monkeypatch.setattr(run, "load_folder", lambda *_: pytest.fail("the model is loaded"))
    assert "for fused experts while it runs" in refused("to-fp16", str(mixture), str(out), "--skip-check")
    assert not out.exists()


def test_the_check_of_the_written_checkpoint_needs_room_for_experts_beside_it(mixture, tmp_path, refused, monkeypatch):
    """The folder is written, and its experts in FP16 are stored a second time; without the check they are not."""
    out, headers = tmp_path / "out", 4 * 200  # of the files of experts
    room = size(mixture) // 2 + 2 * EXPERTS
    assert room > 4 * EXPERTS + headers
    free(monkeypatch, room - 1)
    assert "for fused experts while it runs" in refused("to-fp16", str(mixture), str(out))
    assert not out.exists()
    free(monkeypatch, room + headers)
    assert run_to_fp16(str(mixture), str(out))["gate"]["passed"]
    free(monkeypatch, 4 * EXPERTS)
    run_to_fp16(str(mixture), str(tmp_path / "unchecked"), skip_check=True)


@pytest.mark.parametrize("during", ["the original", "the written checkpoint"])
def test_a_disk_that_experts_fill_ends_in_one_line(during, mixture, tmp_path, refused, monkeypatch):
    """Story: a full disk was blamed on the model, "load it again", or ended in a traceback."""
    out, score = tmp_path / "deep" / "out", run._score_written
    if during == "the original":
        with short_files(10000):
            line = refused("to-fp16", str(mixture), str(out))
        assert not out.parent.exists()
    else:

        def filled(*args):
            with short_files(10000):
                return score(*args)

        monkeypatch.setattr(run, "_score_written", filled)
        line = refused("to-fp16", str(mixture), str(out))
        assert json.loads((out / writing.MANIFEST).read_text())["complete"]
        assert not list(out.glob(".pasa-*"))
        assert "the new checkpoint is whole, but was not run" in line
    assert ".pasa-scratch: File too large: make room for fused experts" in line


def test_an_interrupt_leaves_no_experts(mixture, tmp_path, monkeypatch, capsys):
    def stopped(*_):
        assert any(path.stat().st_size > EXPERTS for path in tmp_path.rglob("*experts*.safetensors"))
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "tokens", stopped)
    with pytest.raises(SystemExit):
        cli.main(["to-fp16", str(mixture), str(tmp_path / "new" / "out")])
    assert "stopped; nothing was written" in capsys.readouterr().err
    assert files(tmp_path) == []


def test_a_killed_run_leaves_experts_that_the_next_run_removes(mixture, tmp_path):
    """Story: they lay in a folder of a random name beside OUT for ever."""
    out = tmp_path / "out"
    (out / ".pasa-scratch" / "inner").mkdir(parents=True)
    (out / ".pasa-scratch" / "experts.safetensors").write_bytes(bytes(99))
    (out / ".pasa-model.safetensors").write_bytes(bytes(99))
    assert run_to_fp16(str(mixture), str(out))["gate"]["passed"]
    assert not list(out.glob(".pasa-*"))


def test_a_folder_that_was_there_stays(tmp_path):
    (tmp_path / "out").mkdir()
    for _ in range(2):
        with writing.scratch_folder(tmp_path / "out") as scratch:
            assert Path(scratch).is_dir()
    assert files(tmp_path) == ["out"]


def test_a_model_without_fused_experts_needs_no_room_for_them(mixture, tmp_path, monkeypatch):
    """Before transformers 5.23 the model is in memory, and nothing is stored."""
    monkeypatch.setattr(model_folder, "STREAMING", (99,))
    free(monkeypatch, size(mixture) // 2)
    assert run_to_fp16(str(mixture), str(tmp_path / "out"))["gate"]["passed"]
    assert writing.size_of_experts(writing.Checkpoint(mixture), torch.float32) == 4 * EXPERTS
