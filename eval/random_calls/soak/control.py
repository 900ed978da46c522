"""What compute-sanitizer says of the means themselves: runs tma_scaling.py, which is known to be correct.

    compute-sanitizer --tool racecheck python -m pasa.eval.random_calls.soak.control

What a tool reports here it reports of any kernel made of TMA, mbarriers and specialised warps.
"""

from __future__ import annotations

import torch

from pasa.eval import cli

ROWS, COLUMNS, TILES, STAGES = 64, 64, 8, 2


def main() -> int:
    """0 if the result is right.

    Raises
    ------
    NotImplementedError
        Without a Hopper GPU.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise NotImplementedError(f"the control needs a GPU of sm_90, and torch {torch.__version__} finds none")
    from triton.experimental.gluon.language import NVMMASharedLayout, float16
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from pasa.eval.random_calls.soak.tma_scaling import FACTOR, scale_tiles

    source = torch.randn(TILES * ROWS, COLUMNS, device="cuda").half()
    out = torch.empty_like(source)
    layout = NVMMASharedLayout.get_default_for([ROWS, COLUMNS], float16)
    maps = [TensorDescriptor(x, list(x.shape), list(x.stride()), [ROWS, COLUMNS], layout) for x in (source, out)]
    scale_tiles[(1,)](*maps, TILES, STAGES, num_warps=4)
    right = torch.equal(out.cpu(), (source.float() * FACTOR).half().cpu())
    print("right" if right else "WRONG")
    return 0 if right else 1


if __name__ == "__main__":
    cli.leave(main)
