"""`import pasa` imports only torch and numpy, and has no side effects."""

import json
import os
import subprocess
import sys

import pytest

import pasa

PROBE = """
import json, os, sys, time
import torch
before, environment = set(sys.modules), dict(os.environ)
start = time.process_time()  # not the time that other processes take
import pasa
seconds = time.process_time() - start
loaded = sorted({name.partition(".")[0] for name in set(sys.modules) - before})
print(json.dumps({"seconds": seconds, "loaded": loaded, "same_environment": environment == dict(os.environ),
                  "op": hasattr(torch.ops.pasa, "attention")}))
"""


def run(code, folder):
    environment = {**os.environ, "HOME": str(folder), "XDG_CACHE_HOME": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )


def test_import_does_nothing_else(tmp_path):
    done = run(PROBE, tmp_path)
    seen = json.loads(done.stdout)  # valid JSON, so nothing else was printed
    assert done.stderr == ""
    assert not set(seen["loaded"]) & {
        *("transformers", "diffusers", "triton", "torch_npu", "matplotlib", "typer", "rich", "gguf", "safetensors")
    }
    assert seen["same_environment"]
    assert seen["op"]
    assert seen["seconds"] < 1.0
    assert list(tmp_path.iterdir()) == []


ORDERS = [
    "import pasa, pasa.attention",
    "from pasa.attention import attention_varlen; import pasa",
    "import pasa; pasa.attention_varlen; import pasa.attention",
    "import pasa.patching, pasa",
]
IMPORTS = """
import os, torch
for order in ORDERS:
    if not (child := os.fork()):  # torch takes seconds to import, once for all
        exec(order)
        assert callable(pasa.attention), pasa.attention
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, order
"""


def test_attention_stays_the_function(tmp_path):
    """`pasa.attention` stays the function, even if the module of the same name is imported later."""
    run(f"ORDERS = {ORDERS!r}\n{IMPORTS}", tmp_path)


def test_unknown_name_is_refused_by_name():
    with pytest.raises(AttributeError, match=r"'atention'.*attention"):
        pasa.atention  # noqa: B018


def test_every_public_name_resolves():
    assert set(pasa.__all__) == set(dir(pasa))
    for name in pasa.__all__:
        assert getattr(pasa, name) is not None
