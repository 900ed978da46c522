"""Direct launches give to the driver what the installed Triton gives to it; needs no device.

scripts/test_triton.sh runs this with other versions of Triton.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pasa.ops.devices import TRITON_VERSIONS, triton_version

HOPPER = "centre", "plain", "anchor", "exact"
SCRIPT = Path(__file__).with_name("launch_both_ways.py")


@pytest.fixture(scope="module")
def launches(tmp_path_factory, pytestconfig):
    """Return, by kernel, what the direct launch gave to the driver and what Triton gave to it."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("TRITON_")}
    env["TRITON_CACHE_DIR"] = str(pytestconfig.cache.mkdir("triton"))
    command = [sys.executable, SCRIPT, tmp_path_factory.mktemp("driver")]
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return {name: (ours, own) for name, ours, own in json.loads(run.stdout)}


def test_the_installed_triton_is_known():
    assert triton_version() in TRITON_VERSIONS


@pytest.mark.parametrize(
    "kernel", ["arguments_kernel", *(f"{name}_kernel {dim}" for name in HOPPER for dim in (64, 72))]
)
def test_the_driver_gets_what_triton_would_give(launches, kernel):
    """Grid, warps, shared memory, stream, early launch and every parameter are the same, tensor maps included."""
    ours, own = launches[kernel]
    assert ours == own


@pytest.mark.parametrize("what", ["arguments", "64", "72"])
def test_a_profiler_hears_of_a_launch(launches, what):
    """Triton's hooks are called before and after each kernel."""
    heard, expected = launches[f"told of {what}"]
    assert heard == expected
    assert heard[1].startswith("after ")


def test_what_is_compared_is_all_that_a_launch_says(launches):
    """A number, an address, a tensor map and the flag of an early launch each show in what is compared."""
    text = launches["arguments_kernel"][0]
    assert text.startswith("grid 5 1 1 block 64 ")
    assert " stream 0x7 " in text
    assert (2**33).to_bytes(8, "little").hex() in text
    assert bytes.fromhex("0000803e").hex() in text  # 0.25
    parameters = text.partition("; ")[2].split()
    assert len(parameters[1]) == 2 * 128  # the tensor map
    early = ["attribute 6" in launches[f"{name}_kernel 64"][0] for name in HOPPER]
    assert early == [False, True, True, True]
