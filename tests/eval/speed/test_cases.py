"""The table of cases: work, data."""

import dataclasses
from pathlib import Path

import pytest
import torch

from pasa.eval.kit.error_metrics import generator
from pasa.eval.speed import recorded
from pasa.eval.speed.cases import CASES, DATA, PLAIN_CASES, Inputs, SpeedCase, select_cases

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


BIASES = {  # of Q and K: of the first 16 channels, and of the others
    "randn": ((0, 0), (0, 0)),
    "constant": ((20, 20), (20, 20)),
    "channels": ((80, 0), (80, 0)),
    "qk-constant-40": ((40, 40), (40, 40)),
    "q-constant-5": ((5, 5), (0, 0)),
    "k-constant-20": ((0, 0), (20, 20)),
}


@pytest.mark.parametrize("data", BIASES)
def test_data_are_what_the_legend_says_and_the_same_every_time(data: str) -> None:
    case = SpeedCase("c", 1, 4, 2, 64, 96, 32, data=data)
    first, second = case.inputs("cpu"), case.inputs("cpu")
    assert [tuple(x.shape) for x in first.tensors] == [(1, 4, 64, 32), (1, 2, 96, 32), (1, 2, 96, 32)]
    assert all(x.dtype == torch.float16 for x in first.tensors)
    assert all(map(torch.equal, first.tensors, second.tensors))
    assert not torch.equal(first.k, first.v)
    plain = dataclasses.replace(case, data="randn").inputs("cpu")
    for x, unbiased, (left, right) in zip((first.q, first.k), (plain.q, plain.k), BIASES[data], strict=True):
        assert float(x[..., :16].float().mean()) == pytest.approx(left, abs=0.2)
        assert float(x[..., 16:].float().mean()) == pytest.approx(right, abs=0.2)
        difference = x[..., :16].float() - unbiased[..., :16].float()
        assert float((difference - left).abs().max()) <= left / 1280  # an FP16 number near 20 is rounded to 2^-6
    assert torch.equal(first.v, plain.v)


def scores(inputs: Inputs) -> torch.Tensor:
    groups = inputs.q.shape[1] // inputs.k.shape[1]
    return inputs.q.float() @ inputs.k.float().repeat_interleave(groups, 1).mT * inputs.q.shape[-1] ** -0.5


@pytest.mark.parametrize(("data", "spread"), [("randn", 1.0), ("spread-2.7", 2.7), ("spread-6.9", 6.9)])
def test_scores_have_the_spread_of_their_name(data: str, spread: float) -> None:
    case = SpeedCase("c", 2, 4, 2, 256, 256, 64, data=data)
    assert float(scores(case.inputs("cpu")).std()) == pytest.approx(spread, rel=0.03)


def test_one_key_is_an_outlier() -> None:
    case = SpeedCase("c", 1, 4, 2, 256, 96, 64, data="outlier-key")
    spreads = scores(case.inputs("cpu")).std((0, 1, 2))
    assert int(spreads.argmax()) == 48
    assert float(spreads[48]) == pytest.approx(20, rel=0.2)
    assert float(spreads.sort().values[-2]) < 2


@pytest.mark.parametrize("dim", [4, 8, 16])
def test_recorded_layers_keep_their_scores(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are those of the recorded layers, wherever the recorded width divides the head dimension."""
    layers = [tuple(x.half() for x in torch.randn(3, 1, 2, 10, 8, generator=generator(0, str(i)))) for i in range(3)]
    monkeypatch.setattr(recorded, "layers", lambda: [(torch.cat([q, -q], 1), k, v) for q, k, v in layers])
    inputs = SpeedCase("c", 2, 6, 2, 3, 25, dim, decode=True, data="recorded").inputs("cpu")
    assert [tuple(x.shape) for x in inputs.tensors] == [(2, 6, 3, dim), (2, 2, 25, dim), (2, 2, 25, dim)]
    assert torch.equal(inputs.k[1, 0, :, 4 % dim], layers[1][1][0, 0, torch.arange(25) % 10, 4 % dim])
    if dim >= 8:
        # Query head 4 is the second of key head 1, whose layer is the first; rows are tokens 22, 23, 24: 2, 3, 4.
        (q, k, _) = recorded.layers()[0]
        expected = q[0, 3, 2:5].float() @ k[0, 1, torch.arange(25) % 10].float().T * 8**-0.5
        assert torch.allclose(scores(inputs)[0, 4], expected, atol=1e-2)


def test_a_recording_is_kept_and_read_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    layer = tuple(torch.randn(3, 1, 2, 10, 8, generator=generator(0)).half())
    made: list[int] = []
    monkeypatch.setenv("PASA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(recorded, "require_built_in", lambda **_: None)
    monkeypatch.setattr(recorded, "record", lambda: made.append(1) or [layer])
    for _ in range(2):
        [again] = recorded.layers.__wrapped__()
        assert all(map(torch.equal, again, layer))
    assert made == [1]
    assert [path.name for path in tmp_path.iterdir()] == [recorded.FILE]


@pytest.mark.parametrize(("rows", "causal"), [(40, True), (1, False), (7, False)])
def test_left_padding_masks_out_the_first_keys(rows: int, causal: bool) -> None:
    case = SpeedCase("c", 5, 2, 1, rows, 40, 16, causal=causal, padded=True)
    inputs, paddings = case.inputs("cpu"), case.paddings().tolist()
    assert inputs.mask is not None
    assert (inputs.causal, inputs.visibility) == (False, {"attn_mask": inputs.mask})
    assert paddings[0] == 0
    assert 0 < max(paddings) <= 20
    for entry, padding in enumerate(paddings):
        for row, visible in enumerate(inputs.mask.expand(5, 1, rows, 40)[entry, 0]):
            assert visible.tolist() == [padding <= key and (not causal or key <= row + 40 - rows) for key in range(40)]
    copied = inputs.copy().mask
    assert copied is not None
    assert torch.equal(copied, inputs.mask)
    assert copied.data_ptr() != inputs.mask.data_ptr()


def test_shapes_run_on_the_data_that_are_named() -> None:
    assert [case.name for case in select_cases(["svd"], ["randn", "q-constant-5"])] == ["svd", "svd+q-constant-5"]
    assert len(select_cases(None, list(DATA))) == len(PLAIN_CASES) * len(DATA)
    with pytest.raises(ValueError, match="'sparse' is not one of"):
        select_cases(["svd"], ["sparse"])


def test_cases_are_chosen_by_name_and_read_like_the_tables() -> None:
    assert len(BY_NAME) == len(CASES) == len(select_cases())
    assert [case.name for case in select_cases(["svd", "paper", "svd"])] == ["svd", "paper"]
    assert BY_NAME["qwen2-8k"].shape == "(1, 28/4, 8192, 128) causal"
    assert BY_NAME["decode-1x32k"].shape == "(1, 28/4, 1 x 32768, 128) full"
