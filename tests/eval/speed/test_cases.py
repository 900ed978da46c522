"""The table of cases: work, data."""

import dataclasses

import pytest
import torch

from pasa.eval.speed.cases import CASES, DATA, SpeedCase, select_cases

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("paper", 4 * 16 * 1280 * 1280 * 128),
        ("qwen2-8k", 4 * 28 * 8192 * 8192 * 128 / 2),
        ("qwen2-8k-full", 4 * 28 * 8192 * 8192 * 128),
        ("svd", 4 * 50 * 5 * 9216 * 9216 * 64),
        ("decode-16x32k", 4 * 28 * 16 * 32768 * 128),
    ],
)
def test_flops_by_the_printed_formula(name: str, flops: float) -> None:
    assert BY_NAME[name].flops == flops
    assert BY_NAME["decode-1x128k"].kv_bytes == 2 * 4 * 131072 * 128 * 2


@pytest.mark.parametrize(("rows", "keys"), [(5, 9), (9, 5), (1, 7), (7, 1)])
def test_other_causal_shapes_count_visible_pairs(rows: int, keys: int) -> None:
    case = SpeedCase("c", 2, 3, 3, rows, keys, 16, causal=True)
    assert case.flops == 4 * 2 * 3 * 16 * float(torch.ones(rows, keys).tril(keys - rows).sum())


@pytest.mark.parametrize("data", DATA)
def test_data_are_what_the_legend_says_and_the_same_every_time(data: str) -> None:
    case = SpeedCase("c", 1, 4, 2, 64, 96, 32, data=data)
    first, second = case.inputs("cpu"), case.inputs("cpu")
    assert [tuple(x.shape) for x in first.tensors] == [(1, 4, 64, 32), (1, 2, 96, 32), (1, 2, 96, 32)]
    assert all(x.dtype == torch.float16 for x in first.tensors)
    assert all(map(torch.equal, first.tensors, second.tensors))
    assert not torch.equal(first.k, first.v)
    bias = {"randn": (0, 0), "constant": (20, 20), "channels": (80, 0)}[data]
    for x in (first.q, first.k):
        assert float(x[..., :16].float().mean()) == pytest.approx(bias[0], abs=0.2)
        assert float(x[..., 16:].float().mean()) == pytest.approx(bias[1], abs=0.2)
    plain = dataclasses.replace(case, data="randn").inputs("cpu")
    difference = first.q[..., :16].float() - plain.q[..., :16].float()
    assert float((difference - bias[0]).abs().max()) <= bias[0] / 1280  # an FP16 number near 20 is rounded to 2^-6
    assert torch.equal(first.v, plain.v)


def test_cases_are_chosen_by_name_and_read_like_the_tables() -> None:
    assert len(BY_NAME) == len(CASES) == len(select_cases())
    assert [case.name for case in select_cases(["svd", "paper", "svd"])] == ["svd", "paper"]
    assert BY_NAME["qwen2-8k"].shape == "(1, 28/4, 8192, 128) causal"
    assert BY_NAME["decode-1x32k"].shape == "(1, 28/4, 1 x 32768, 128) full"
