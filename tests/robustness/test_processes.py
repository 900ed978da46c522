"""Real processes in bad surroundings: no memory, no home, a fork, company, packages that are not there."""

import json
import os
import subprocess
import sys

import pytest
import torch

CALL = """
import torch, pasa
g = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(1, 2, n, 32, generator=g).half() for n in (20, 70, 70))
def call(backend="reference"):
    return pasa.attention(q, k, v, is_causal=True, backend=backend)
"""


def run(code, *, timeout=120, arguments=(), **environment):
    """A Python process; its output."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=os.environ | environment, capture_output=True, text=True,
        timeout=timeout, check=False,
    )  # fmt: skip


def said(done):
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_a_call_beyond_memory_raises_and_the_process_goes_on():
    """Row vectors and tiles of 65,536 rows and 16 heads want gigabytes; the process may have 300 MB more."""
    code = (
        CALL
        + """
import resource
expected = call()
with open("/proc/self/statm") as f:
    used = int(f.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 300 * 2**20, resource.RLIM_INFINITY))
try:
    large = torch.zeros(1, 1, 1, 32).half().expand(1, 16, 65536, 32)
    pasa.attention(large, large, large, backend="reference")
    print("served")
except (MemoryError, RuntimeError) as error:
    print("refused" if "memory" in str(error) or isinstance(error, MemoryError) else error)
print(torch.equal(call(), expected))
"""
    )
    assert said(run(code)).split() == ["refused", "True"]


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_no_home_to_write_to(backend):
    """A HOME that is not a folder costs the cached files only, which are made again."""
    code = CALL + f"print(torch.equal(call({backend!r}), call({backend!r})))"
    without = {"HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null/cache", "PASA_CACHE_DIR": "/dev/null/pasa"}
    assert said(run(code, **without, TRITON_CACHE_DIR="/dev/null/triton")) == "True"


def test_doctor_without_a_home():
    code = "from pasa.eval.cli import main; main(['doctor'])"
    done = run(code, HOME="/dev/null", XDG_CACHE_HOME="/dev/null/cache", PASA_CACHE_DIR="/dev/null/pasa")
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(("threads", "before"), [(1, "call()"), (2, "None")])
def test_a_fork(threads, before):
    """After a call, or after the import alone where there are threads: those of OpenMP do not survive a fork, in torch
    as a whole, once they have worked."""
    code = (
        CALL
        + f"""
import os
torch.set_num_threads({threads})
expected = {before}
pid = os.fork()
if pid == 0:
    found = call()
    os._exit(0 if expected is None or torch.equal(found, expected) else 3)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), expected is None or torch.equal(call(), expected))
"""
    )
    assert said(run(code)) == "0 True"


FOUR = """
import os
children = []
for number in range(4):
    if not (child := os.fork()):  # before torch has worked: it takes seconds to import, once for all
        work(number)
        os._exit(0)
    children.append(child)
print([os.waitpid(child, 0)[1] for child in children])
"""


def test_four_processes_at_once(tmp_path):
    """First use together with an empty cache: the same bits everywhere."""
    code = (
        CALL
        + """
import sys
torch.set_num_threads(1)
def work(number):
    torch.save([call(name) for name in ("reference", "triton")], f"{sys.argv[1]}/{number}")
"""
        + FOUR
    )
    kept = {"HOME": str(tmp_path), "PASA_CACHE_DIR": str(tmp_path / "pasa")}
    assert said(run(code, arguments=[str(tmp_path)], **kept)) == "[0, 0, 0, 0]"
    first, *others = (torch.load(tmp_path / str(number)) for number in range(4))
    assert all(torch.equal(*pair) for other in others for pair in zip(first, other, strict=True))


def test_four_processes_write_their_tiles(tmp_path):
    """The file of chosen tiles is whole whenever it is read, and so at the end."""
    code = """
from pasa.ops.attention.triton import tuning
def work(number):
    for i in range(50):
        tuning._write(f"{number} {i}", "tile")
        assert isinstance(tuning._read(), dict) and tuning._read(), "half a file"
"""
    done = run(code + FOUR, PASA_CACHE_DIR=str(tmp_path))
    assert (said(done), done.stderr) == ("[0, 0, 0, 0]", "")
    assert json.loads((tmp_path / "triton_tiles.json").read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["triton_tiles.json"]


BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
BLOCKED = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Blocker())
"""


def test_attention_needs_torch_and_numpy_alone():
    blocked = "triton,transformers,diffusers,gguf,matplotlib,typer,rich,safetensors,accelerate,PIL,skimage,jinja2"
    code = BLOCKER + CALL + "print(call('reference').isfinite().all().item(), pasa.optimal_beta(0.9, 128).beta > 0.5)"
    assert said(run(code, arguments=[blocked])) == "True True"


COMMANDS = """
import os, torch
from pasa.eval.cli import main
for command in (["--help"], ["--version"], ["doctor"], ["bench", "--help"]):
    if not (child := os.fork()):  # torch takes seconds to import, once for all
        print("\\0", flush=True)
        main(command)
    assert os.waitpid(child, 0)[1] == 0, command
"""


def test_help_and_doctor_need_no_extra(tmp_path):
    blocked = "transformers,diffusers,gguf,matplotlib,safetensors,accelerate,PIL,skimage,jinja2,rouge,jieba"
    done = run(BLOCKER + COMMANDS, arguments=[blocked], PASA_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    _, *shown = said(done).split("\0")
    assert len(shown) == 4
    assert all(each.strip() for each in shown)


@pytest.mark.parametrize(
    ("blocked", "command", "extra"),
    [
        ("safetensors", "predict --model FOLDER", "eval"),
        ("transformers", "demo", "eval"),
        ("gguf", "demo", "eval"),
        ("diffusers", "eval video", "video"),
    ],
)
def test_a_package_that_is_not_there_is_named_with_its_extra(blocked, command, extra, tmp_path):
    """One line, no traceback, exit 2."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    words = command.replace("FOLDER", str(tmp_path)).split()
    code = BLOCKER + f"from pasa.eval.cli import main; main({words!r})"
    done = run(code, arguments=[blocked], PASA_CACHE_DIR=str(tmp_path / "cache"))
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2, done.stderr[-2000:]
    assert len(lines) == 1
    assert blocked in lines[0]
    assert f"not installed; run, in the checkout: pip install '.[{extra}]'" in lines[0]
