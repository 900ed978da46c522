"""The accuracy gate of the speed benchmark: right outputs pass, wrong ones do not, on all rows and on sampled rows."""

import dataclasses
import re

import pytest
import torch

import pasa
from pasa.eval.speed import gate as module
from pasa.eval.speed.cases import SpeedCase
from pasa.eval.speed.gate import FACTOR, RMSE_FLOOR, Gate, sampled_pairs, sampled_pieces

CASE = SpeedCase("c", 2, 4, 2, 700, 700, 32, causal=True)
FP32, EXACT = pasa.PasaConfig(precision="fp32"), pasa.PasaConfig()


@pytest.fixture(params=[False, True], ids=["all rows", "sampled"])
def gate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Gate:
    if request.param:
        monkeypatch.setattr(module, "ALL_BELOW", 2**10)
        monkeypatch.setattr(module, "SAMPLED_ROWS", 96)
    return Gate(CASE, CASE.inputs("cpu"))


def attend(gate: Gate, config: pasa.PasaConfig) -> tuple[torch.Tensor, torch.Tensor]:
    x = gate.inputs
    return pasa.attention(x.q, x.k, x.v, is_causal=True, config=config, return_lse=True, backend="reference")


@pytest.mark.parametrize("config", [FP32, EXACT])
def test_a_right_answer_passes(gate: Gate, config: pasa.PasaConfig) -> None:
    verdict = gate.judge(*attend(gate, config), config, shifted=config == EXACT)
    assert verdict.why == ""
    assert 0 < verdict.rmse <= verdict.rmse_limit < 2e-3
    assert verdict.lse_error is not None
    assert verdict.lse_error < 1e-3


def test_golden_rows_are_those_of_the_whole(gate: Gate) -> None:
    """FP64 rows computed from only the keys that they may see equal the same rows of the whole FP64 output."""
    x = gate.inputs
    whole, lse = pasa.golden_attention(x.q, x.k, x.v, is_causal=True)
    assert torch.allclose(gate.sampled(whole), gate.golden, rtol=1e-12, atol=1e-12)
    assert torch.allclose(gate.sampled(lse), gate.golden_lse, rtol=1e-12, atol=1e-12)
    assert gate.golden.shape[1:] == (1, sum(rows.stop - rows.start for rows, _ in gate.pieces), CASE.dim)
    assert gate.share == pytest.approx(4 * 288 / (8 * 700)) or gate.share == 1.0


@pytest.mark.parametrize(
    ("alter", "why"),
    [
        (lambda out, lse: (out * 1.01, lse), "RMSE"),
        (lambda out, lse: (out.roll(1, 2), lse), "RMSE"),
        (lambda out, lse: (out.index_fill(2, torch.tensor([3]), torch.nan), lse), "256 values are not finite"),
        (lambda out, lse: (out, lse + 0.01), r"^LSE off by 1\.0"),
        (lambda out, lse: (out, lse.index_fill(2, torch.tensor([5]), torch.inf)), "8 values are not finite"),
    ],
)
def test_a_wrong_answer_is_stopped(gate: Gate, alter, why: str) -> None:  # type: ignore[no-untyped-def]
    verdict = gate.judge(*alter(*attend(gate, EXACT)), EXACT, shifted=True)
    assert re.search(why, verdict.why)


def test_non_finite_values_count_in_rows_that_are_not_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ALL_BELOW", 2**10)
    monkeypatch.setattr(module, "SAMPLED_ROWS", 32)
    gate = Gate(CASE, CASE.inputs("cpu"))
    out, _ = attend(gate, EXACT)
    row = next(r for r in range(CASE.rows) if not any(p.start <= r < p.stop for p, _ in gate.pieces))
    out[0, 0, row, 0] = torch.nan
    verdict = gate.judge(out, None, EXACT, shifted=True)
    assert verdict.nonfinite == 1
    assert verdict.why == "1 values are not finite"


def test_limit_is_twice_the_emulation_or_the_floor() -> None:
    gate = Gate(CASE, CASE.inputs("cpu"))
    coarse = pasa.PasaConfig(accumulate="fp16")
    out, _ = attend(gate, coarse)
    verdict = gate.judge(out, None, coarse, shifted=True)
    assert (verdict.rmse_limit, verdict.lse_error) == (max(FACTOR * gate.emulated(coarse)[0], RMSE_FLOOR), None)
    assert gate.judge(out, None, coarse, shifted=True, limit=0.1).rmse_limit == 0.1
    with pytest.raises(ValueError, match="700, 32"):
        gate.judge(out.mT, None, FP32, shifted=False)


def test_unshifted_scores_of_a_large_bias_get_what_fp32_cannot_hold() -> None:
    case = dataclasses.replace(CASE, name="c+channels", data="channels")
    gate = Gate(case, case.inputs("cpu"))
    top = float(gate.golden_lse.abs().max())
    assert top > 10000  # 16 * 80^2 / sqrt(32) = 18,000
    assert gate.resolution == 2 * 2.0**-23 * top
    out, _ = attend(gate, FP32)
    loose, tight = (gate.judge(out, None, FP32, shifted=shifted).rmse_limit for shifted in (False, True))
    assert loose - tight == pytest.approx(gate.resolution)
    plain = Gate(CASE, CASE.inputs("cpu"))
    assert plain.resolution < 1e-5


def test_large_cases_sample_first_middle_and_last_rows_of_spread_heads() -> None:
    case = SpeedCase("c", 1, 28, 4, 32768, 32768, 128, causal=True)
    pairs = sampled_pairs(case)
    assert pairs == [0, 9, 18, 27]
    pieces = sampled_pieces(case, len(pairs))
    assert (pieces[0][0].start, pieces[-1][0].stop) == (0, 32768)
    assert all(keys.stop == rows.stop for rows, keys in pieces)
    decode = SpeedCase("d", 1, 28, 4, 16, 131072, 128, decode=True)
    assert sampled_pieces(decode, 4) == [(slice(0, 16), slice(131072))]


def test_rows_of_padding_are_not_judged_and_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends write what they like where a row sees no key, and nobody reads it."""
    for limit in (2**26, 2**10):
        monkeypatch.setattr(module, "ALL_BELOW", limit)
        monkeypatch.setattr(module, "SAMPLED_ROWS", 96)
        case = dataclasses.replace(CASE, padded=True)
        inputs = case.inputs("cpu")
        gate, padding = Gate(case, inputs), int(case.paddings()[1])
        assert padding > 0
        assert gate.resolution < 1e-5
        options = {"attn_mask": inputs.mask, "config": EXACT, "return_lse": True, "backend": "reference"}
        out, lse = pasa.attention(*inputs.tensors, **options)
        assert gate.judge(out, lse, EXACT, shifted=True).why == ""
        out[1, :, :padding], lse[1, :, :padding] = torch.nan, torch.nan
        assert gate.judge(out, lse, EXACT, shifted=True).why == ""
        unmasked = pasa.attention(*inputs.tensors, is_causal=True, backend="reference")
        assert "RMSE" in gate.judge(unmasked, None, EXACT, shifted=True).why
        out[1, 0, padding, 0] = torch.nan
        assert "1 values are not finite" in gate.judge(out, lse, EXACT, shifted=True).why
