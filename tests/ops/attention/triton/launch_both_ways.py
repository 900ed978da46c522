"""Launch kernels directly and through Triton's Python layers, on a CPU, and print what reached the driver.

no_cuda.c takes the place of libcuda.so.1, so the compiler and the launcher are those of the installed Triton. Printed
is a JSON list of [kernel, what the direct launch gave to the driver, what Triton gave to it]. test_c_launcher.py runs
this.
"""

import ctypes
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch
import triton
import triton.language as tl

STREAM = 7
SIZES = {"u8": 1, "b8": 1, "u16": 2, "b16": 2, "f16": 2, "u32": 4, "b32": 4, "f32": 4, "u64": 8, "b64": 8, "f64": 8}


def build(folder):
    """Write libcuda.so.1. Functions that Triton links and the launches do not need return 0."""
    nvidia = Path(triton.__file__).parent / "backends" / "nvidia"
    source = Path(__file__).with_name("no_cuda.c")
    sources = [(nvidia / name).read_text() for name in ("driver.c", "driver.py")]
    named = {name for text in sources for name in re.findall(r"\bcu[A-Z]\w+(?=\()", text)}
    written = set(re.findall(r"^CUresult (cu\w+)", source.read_text(), re.MULTILINE))
    rest = "".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(named - written))
    (folder / "rest.c").write_text(rest)
    command = ["gcc", "-shared", "-fPIC", "-w", f"-I{nvidia / 'include'}", "-o", folder / "libcuda.so.1"]
    subprocess.run([*command, source, folder / "rest.c"], check=True)


def on_hopper():
    """Let Triton believe that the machine has an H100."""
    from triton.backends.nvidia.driver import CudaDriver

    driver = CudaDriver()
    driver.get_device_capability = lambda device=0: (9, 0)
    driver.get_current_device = lambda: 0
    driver.get_current_stream = torch._C._cuda_getCurrentRawStream = lambda device=0: STREAM
    triton.runtime.driver.set_active(driver)


def parameter_sizes(compiled):
    """Return the bytes of the kernel's parameters, which its PTX declares."""
    sizes, declared = [], compiled.asm["ptx"].partition(".entry ")[2].partition("{")[0]
    for kinds, length in re.findall(r"^\s*\.param (.+?) \w+_param_\d+(?:\[(\d+)\])?", declared, re.MULTILINE):
        kind = next(each for each in kinds.replace(".", "").split() if each in SIZES)
        sizes.append(SIZES[kind] * int(length or 1))
    return sizes


class Driver:
    """Read the last launch."""

    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")
        self.library.last_launch.restype = ctypes.c_char_p

    def noted(self, compiled, launch):
        """Return what `launch` gives to the driver for a compiled kernel."""
        sizes = parameter_sizes(compiled)
        self.library.set_sizes((ctypes.c_int * len(sizes))(*sizes), len(sizes))
        launch()
        return self.library.last_launch().decode()


def told(launch):
    """Return which kernels a profiler hears of, before and after each launch."""
    said, runtime = [], triton.knobs.runtime
    hooks = runtime.launch_enter_hook, runtime.launch_exit_hook
    notes = [
        lambda metadata, when=when: said.append(f"{when} {metadata.get()['name']}") for when in ("before", "after")
    ]
    for hook, note in zip(hooks, notes, strict=True):
        hook.add(note)
    launch()
    for hook, note in zip(hooks, notes, strict=True):
        hook.remove(note)
    return said


@triton.jit(do_not_specialize=["n"])
def arguments_kernel(p_x, desc, p_y, one, sixteen, n, wide, scale, BLOCK: tl.constexpr):
    """Use every kind of argument that launches pass."""
    b_x = desc.load([0, 0]) * scale
    o_x = tl.arange(0, BLOCK)
    tl.store(p_x + o_x, tl.sum(b_x, 1) + n + one + sixteen, mask=o_x < wide)
    tl.store(p_y + o_x, o_x)


class OnDevice:
    """Mimic a tensor of a device."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self, tensor):
        self.data_ptr, self.dtype = tensor.data_ptr, tensor.dtype


def all_kinds(driver):
    """Compare `launch`, for a kernel that takes all kinds of arguments."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    from pasa.ops.attention.triton import launcher

    launcher.Tensor = (torch.Tensor, OnDevice)  # what counts as a tensor there
    x, y = torch.zeros(64), torch.zeros(64, dtype=torch.int32)
    source = torch.zeros(64, 32)
    desc = TensorDescriptor(source, [64, 32], [32, 1], [16, 32])
    tensors, numbers, constants = (OnDevice(x), desc, y), (1, 32, 48, 2**33, 0.25), {"BLOCK": 16}
    options = launcher.FUSED | {"num_warps": 2}
    compiled = arguments_kernel.warmup(x, desc, y, *numbers, **constants, **options, grid=(5, 1, 1))
    direct = partial(launcher.launch, arguments_kernel, (5, 1, 1), tensors, numbers, constants, num_warps=2)
    by_triton = partial(arguments_kernel[(5, 1, 1)], x, desc, y, *numbers, **constants, **options)
    ours, own = driver.noted(compiled, direct), driver.noted(compiled, by_triton)
    assert launcher._ready, "the launch was not direct"
    return ["arguments_kernel", ours, own], ["told of arguments", told(direct), told(by_triton)]


def hopper(driver, dim):
    """Compare each launch of the Hopper kernels for a head dimension."""
    from pasa.ops.attention.triton.hopper import launch
    from pasa.ops.attention.triton.launcher import FUSED

    launch.processors = lambda _: 132
    q, k = torch.zeros(2, 4, 300, dim).half(), torch.zeros(2, 400, 2, dim).half().transpose(1, 2)
    v = torch.zeros_like(k)
    plan = launch.Plan(q.shape, k.shape, [list(x.stride()) for x in (q, k, v)], True, 0, torch.device("cuda", 0))
    out, lse, buffer = torch.empty_like(q), torch.empty(plan.lse_shape), q.new_empty(plan.bytes // 2)
    parts = plan._views(buffer)
    calls = plan._calls(k, v, lse, parts, plan._descriptors(q, k, parts[-1], v, out), 0.125)
    plan._prepare(q, k, v, out, lse, buffer, 0.125)
    driver.library.set_sizes(None, 0)  # four kernels follow
    plan.launch(q, k, v, out, lse, buffer, 0.125)
    (bound,) = [taken for key, taken in launch.bound.items() if key[0] == plan.number]
    ours = [
        driver.noted(ready.kernel, partial(run, *arguments))
        for ready, (run, arguments) in zip(plan.launchers, bound, strict=True)
    ]
    by_triton = [
        driver.noted(ready.kernel, partial(kernel[(programs, 1, 1)], *arguments, **FUSED, **options))
        for (kernel, options), ready, (programs, arguments) in zip(plan.kernels, plan.launchers, calls, strict=True)
    ]
    driver.library.set_sizes(None, 0)
    names = [kernel.__name__ for kernel, _ in plan.kernels]
    heard = told(lambda: plan.launch(q, k, v, out, lse, buffer, 0.125))
    return [
        [f"told of {dim}", heard, [f"{when} {name}" for name in names for when in ("before", "after")]],
        *([f"{name} {dim}", *both] for name, *both in zip(names, ours, by_triton, strict=True)),
    ]


def main():
    folder = Path(sys.argv[1])
    if "LD_LIBRARY_PATH" not in os.environ or str(folder) not in os.environ["LD_LIBRARY_PATH"]:
        build(folder)
        os.environ.update(LD_LIBRARY_PATH=str(folder), TRITON_LIBCUDA_PATH=str(folder))
        os.execv(sys.executable, [sys.executable, *sys.argv])  # the loader reads its path once
    on_hopper()
    driver = Driver()
    print(json.dumps([*all_kinds(driver), *hopper(driver, 64), *hopper(driver, 72)]))


if __name__ == "__main__":
    main()
