"""Scores that FP32 sums without rounding, so that the bound does not loosen with large scores.

Queries and keys are small whole numbers and constants on runs of keys, which masks cut. So tiles are far from
their reference, and references far from FP16's range. All products are below 2^24. What remains: a score is
stored within 2^-11 of 16 nats, so eps = 2^-7; a frame is added in FP32, 4 u of the log-sum-exp; and outputs are
rounded.
"""

from random import Random
from typing import Any

import pytest
import torch

import pasa
from pasa.eval.random_calls.inputs import Call
from pasa.eval.random_calls.truth import find_truth

EPS, DIM = 2.0**-7, 16


def draw(seed: int) -> tuple[list[torch.Tensor], dict[str, Any], pasa.PasaConfig]:
    rng, g = Random(seed), torch.Generator().manual_seed(seed)
    block, rows = 32, rng.choice([1, 5, 33])
    keys = block * rng.choice([2, 3, 4]) - rng.choice([0, 5])

    def whole(count, largest):
        return torch.randint(-largest, largest + 1, (1, 1, count, DIM), generator=g).float()

    q, k = whole(rows, rng.choice([1, 8, 200])), whole(keys, rng.choice([0, 1, 30]))
    run = rng.choice([4, 16, block])
    k += whole(-(-keys // run), rng.choice([0, 30, 1900])).repeat_interleave(run, 2)[:, :, :keys]
    kind = rng.choice(["none", "causal", "random", "documents"])
    mask = None
    if kind == "random":
        mask = torch.rand(1, 1, rows, keys, generator=g) < rng.choice([0.1, 0.5])
    if kind == "documents":
        mask = (torch.arange(keys) < rng.randrange(1, keys)) == (torch.arange(rows) < rows // 2 + 1).view(1, 1, -1, 1)
    how = {"attn_mask": mask, "is_causal": kind == "causal", "scale": 2.0 ** rng.choice([-10, -6, -2, 0, 2])}
    v = torch.rand(1, 1, keys, DIM, generator=g)
    config = pasa.PasaConfig(block_k=block, block_q=rng.choice([1, 16]), overflow=rng.choice(["inf", "saturate"]))
    return [x.half() for x in (q, k, v)], how, config


def check(seed, backend):
    tensors, how, config = draw(seed)
    config = config if backend == "reference" else pasa.PasaConfig(block_k=config.block_k)
    out, lse = pasa.attention(*tensors, **how, config=config, return_lse=True, backend=backend)
    true = find_truth(Call(*tensors, how["attn_mask"], how["is_causal"], how["scale"]))
    assert (lse.isinf() == true.fully_masked).all()
    off = (lse.double() - true.lse)[~true.fully_masked].abs() - 2.0**-22 * true.lse[~true.fully_masked].abs()
    assert (off <= EPS).all(), f"seed {seed}: log-sum-exp"
    allowed = 2 * EPS + 2 * 2.0**-11  # for values in [0, 1]
    assert ((out.double() - true.out).abs() <= allowed).all(), f"seed {seed}: output"


@pytest.mark.parametrize("start", range(0, 600, 100))
def test_reference(start):
    """The reference is exact up to the remaining roundings.

    Story: with seeds like these whole blocks were lost, or weights were off by hundredths of a nat. No bound on
    FP32 sums of the same size noticed.
    """
    for seed in range(start, start + 100):
        check(seed, "reference")


# NumPy, which interprets the kernels, warns of intended infinities.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_kernels():
    for seed in range(20):
        check(seed, "triton")
