"""The SGLang adapter without SGLang: what it refuses and how it reads a batch; sglang_itself.py runs SGLang itself."""

import importlib.metadata
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from pasa.patching import sglang as adapter
from tests.pasa.patching.vllm_on_cpu import ROOT


def batch(mode, lengths, queries=None, **fields):
    """Return the fields of a ForwardBatch that the adapter reads."""
    sequences = {"seq_lens": torch.tensor(lengths), "seq_lens_cpu": torch.tensor(lengths)}
    new = {"extend_seq_lens": queries and torch.tensor(queries), "extend_seq_lens_cpu": queries}
    rows = torch.arange(len(lengths)) + 1
    return SimpleNamespace(forward_mode=SimpleNamespace(name=mode), req_pool_indices=rows, **sequences | new | fields)


def test_without_sglang_it_says_so():
    with pytest.raises(ImportError, match=r"register needs SGLang 0\.5\.20 to 0\.5\.23 .*No module named 'sglang'"):
        adapter.register()
    with pytest.warns(UserWarning, match="pasa's attention backend was not registered: .*No module named 'sglang'"):
        adapter.plugin()


def test_an_installation_brings_the_plugin(tmp_path):
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)
    (installed,) = importlib.metadata.distributions(name="pasa", path=[str(tmp_path)])
    (entry,) = installed.entry_points.select(group="sglang.srt.plugins")
    assert entry.load() is adapter.plugin


@pytest.mark.parametrize("on_host", [True, False])
def test_a_page_is_named_by_its_first_row(on_host):
    """Request 1 has pages 3 and 5 of 4 rows, request 2 has page 2; rows beyond the longest are not read."""
    rows = torch.full((3, 16), 999, dtype=torch.int32)
    rows[1, :7] = torch.tensor([12, 13, 14, 15, 20, 21, 22])
    rows[2, :3] = torch.tensor([8, 9, 10])
    lengths = {} if on_host else {"seq_lens_cpu": None, "extend_seq_lens_cpu": None}
    step = adapter.Step.of(batch("MIXED", [7, 3], [5, 1], **lengths), rows, 4)
    assert step.block_table[0].tolist() == [3, 5]
    assert step.block_table[1, 0] == 2
    assert step.cu_seqlens_q.tolist() == [0, 5, 6]
    assert (step.longest_q, step.longest_k, step.seq_lens.tolist()) == (5, 7, [7, 3])
    decode = adapter.Step.of(batch("DECODE", [7, 3]), rows, 4)
    assert (decode.cu_seqlens_q, decode.longest_q) == (None, 1)


@pytest.mark.parametrize("mode", ["TARGET_VERIFY", "DRAFT_EXTEND_V2", "DLLM_EXTEND", "a new one"])
def test_modes_that_attend_in_another_way_are_refused(mode):
    with pytest.raises(NotImplementedError, match=f"does not support the forward mode {mode}"):
        adapter.Step.of(batch(mode, [4], [4]), torch.zeros(2, 8).int(), 1)


def test_all_that_a_runner_lacks_is_named_at_once():
    pool = SimpleNamespace(store_dtype=torch.uint8, kv_cache_layout="hnd", head_dim=64, v_head_dim=32)
    arguments = SimpleNamespace(speculative_algorithm="EAGLE")
    runner = SimpleNamespace(dtype=torch.bfloat16, server_args=arguments)
    expected = (
        r"dtype=torch\.bfloat16 \(serve with --dtype float16\), speculative decoding by EAGLE, "
        r"a cache of torch\.uint8, the cache layout 'hnd', head_dim=64 and v_head_dim=32: use another"
    )
    with pytest.raises(NotImplementedError, match=expected):
        adapter.check_runner(runner, pool, SimpleNamespace)
    with pytest.raises(NotImplementedError, match="a memory pool of class SimpleNamespace"):
        adapter.check_runner(runner, pool, dict)


def test_the_versions_that_are_named_are_those_that_are_run():
    (listed,) = re.findall(r"\|\| versions=\((.*)\)", (ROOT / "scripts" / "test_sglang.sh").read_text("utf-8"))
    oldest, newest = listed.split()
    assert f"SGLang {oldest} to {newest}" == adapter.TESTED
    for page in ("docs/hosts/sglang.md", "CHANGELOG.md"):
        assert adapter.TESTED in " ".join((ROOT / page).read_text("utf-8").split())
