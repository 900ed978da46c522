"""The command that builds the Ascend C kernels for the Python that runs it."""

from __future__ import annotations

import subprocess
import sys

import typer

from pasa.ops import envs

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}


def build_ascend(context: typer.Context) -> None:
    """Build the Ascend C kernels for this Python; needs CANN and torch_npu. Arguments go to cmake."""
    environment = envs.for_command(PYTHON=sys.executable)
    command = ["bash", str(envs.ascend_build_script()), *context.args]
    raise typer.Exit(subprocess.run(command, env=environment, check=False).returncode)
