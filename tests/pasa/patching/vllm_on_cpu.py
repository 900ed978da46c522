"""Lets the engines of vLLM's GPU wheels run on a CPU, with the Python files of a wheel alone.

Two things are replaced, at the border to what a CPU lacks: the compiled functions that these runs reach, and the choice
of a backend by vLLM's platform for CPUs, which knows one backend alone. The platform here chooses as the one for CUDA
does. A wheel that was built for CPUs brings its own compiled functions, which then stay.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[3]

ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "CUDA_VISIBLE_DEVICES": "",  # vLLM then takes Triton although no driver is active; TRITON_INTERPRET runs it
    "TRITON_INTERPRET": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "LD_PRELOAD": "libtcmalloc libiomp",  # vLLM 0.18 only looks for the names
}


def prepare():
    """Make vLLM ready for a CPU; call this before anything of vLLM but `vllm.platforms` is imported."""
    os.environ.update(ENVIRONMENT)
    import vllm.platforms as platforms

    platforms._current_platform = _platform()
    _define_missing()


def install_plugin(folder):
    """Let this process find the entry points of setup.py, as an installation of this checkout would."""
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"LD_PRELOAD": ""})
    sys.path.insert(0, str(folder))


def _platform():
    from vllm.platforms.cpu import CpuPlatform
    from vllm.platforms.interface import DeviceCapability

    class Platform(CpuPlatform):
        @classmethod
        def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
            backend = selected_backend.get_class()
            hopper = DeviceCapability(9, 0)
            reasons = backend.validate_configuration(device_capability=hopper, **attn_selector_config._asdict())
            if reasons:
                raise ValueError(f"Selected backend {selected_backend} is not valid. Reason: {reasons}")
            return selected_backend.get_path()

    return Platform()


def _define_missing():
    """Define the compiled functions that the installed vLLM does not bring."""
    library = torch.library.Library("_C", "FRAGMENT")
    for schema, function in COMPILED.items():
        name = schema.split("(")[0]
        if not hasattr(torch.ops._C, name):
            library.define(schema)
            library.impl(name, function, "CompositeExplicitAutograd")
    KEPT.append(library)  # its functions vanish with it


def slot_mapping(starts, positions, table, slots, page):
    """Write the slot of each new token; padding gets -1."""
    slots.fill_(-1)
    for row, (start, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        at = positions[start:end].long()
        slots[start:end] = table[row, at // page].long() * page + at % page


def rejection(out, cu_drafts, drafts, best, bonus, is_greedy, longest):
    """Keep drafts up to the first that is not the best token, which replaces it; all kept: append the bonus token."""
    assert is_greedy is None or bool(is_greedy.all())
    start = 0
    for row, end in enumerate(cu_drafts.tolist()):
        agree = drafts[start:end] == best[start:end]
        n = int(agree.int().cumprod(0).sum())
        tokens = torch.cat([best[start:end], bonus.flatten()[row : row + 1]])[: n + 1]
        out[row, : n + 1] = tokens
        start = end


def unused(*arguments):
    raise NotImplementedError("a compiled function that these runs were not to reach")


COMPILED = {
    "init_cpu_memory_env(int[] nodes) -> ()": lambda nodes: None,
    "silu_and_mul(Tensor(a!) out, Tensor x) -> ()": unused,  # looked up only; custom_ops is "none"
    "greedy_argmax(Tensor logits) -> Tensor": lambda logits: logits.argmax(-1),
    "compute_slot_mapping_kernel_impl(Tensor starts, Tensor at, Tensor table, Tensor(a!) slots, int page) -> ()": (
        slot_mapping
    ),
    "rejection_greedy_sample_kernel_impl(Tensor(a!) out, Tensor cu_drafts, Tensor drafts, Tensor best, Tensor bonus, "
    "Tensor? is_greedy, int longest) -> ()": rejection,
}
KEPT = []
