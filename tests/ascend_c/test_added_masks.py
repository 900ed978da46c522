"""Float masks, which are added to scores, on the CPU twin: against the reference, FP64, and through the binding.

A mask may hold finfo.min, or -inf, for all keys of a row. FP32 adds a score to finfo.min without a trace, so such keys
have equal weights. -inf hides a key. Bounds are those of test_attention.py and of random calls.
"""

import pytest
import torch

import pasa
from pasa.eval.random_calls import inputs
from pasa.eval.random_calls.judge import Arithmetic, judge
from pasa.eval.random_calls.truth import find_truth
from tests.ascend_c.kernel_runs import launch_attention, launch_shift, shifted_by_reference
from tests.ascend_c.test_attention import make_call
from tests.ascend_c.test_masked_calls import TOLERANCE, compared, masks
from tests.ascend_c.test_masks import HIDING, block_diagonal, check_agreement
from tests.inputs import normal_qkv

DRAWS = torch.Generator().manual_seed(12)
LOWEST = torch.finfo(torch.float32).min
HALF_LOWEST = torch.finfo(torch.float16).min


def drawn(*shape, size=1.0, kept=0.7):
    """Return numbers of N(0, size^2), and -inf for the other keys."""
    keep = torch.rand(shape, generator=DRAWS) < kept
    return (size * torch.randn(shape, generator=DRAWS)).masked_fill(~keep, -torch.inf)


def slopes(rows, keys):
    """Return a bias that falls with the distance of a key, as ALiBi adds it."""
    row, key = torch.arange(rows).unsqueeze(1), torch.arange(keys)
    return -0.5 * (row + keys - rows - key).abs().float().view(1, 1, rows, keys)


ADDED = {
    "of each head": (drawn(1, 2, 193, 300), 2),
    "of each batch entry": (drawn(2, 1, 130, 200, kept=1.0), 2),
    "of both": (drawn(2, 2, 65, 183, size=10.0), 2),
    "of all keys": (drawn(1, 1, 1, 257, kept=1.0), 1),
    "slopes": (slopes(300, 430), 1),
    "sequences": (torch.zeros(1, 1, 500, 500).masked_fill(~block_diagonal(500, 100, 230, 430), LOWEST), 1),
}


@pytest.mark.parametrize(
    ("name", "dim", "overflow"),
    [(name, (64, 256)[i % 2], ("inf", "saturate")[i // 2 % 2]) for i, name in enumerate(ADDED)],
    ids=str,
)
def test_added_masks_agree_with_the_reference(kernels, name, dim, overflow):
    mask, heads = ADDED[name]
    batch, rows = mask.shape[0], 70 if mask.shape[2] == 1 else mask.shape[2]
    check_agreement(kernels, make_call(batch, heads, 1, rows, mask.shape[3], dim, False, mask=mask, overflow=overflow))


def all_lowest(rows, keys, lowest):
    """Return a mask of which some rows have `lowest` for all keys that they see, and some see no key."""
    mask = torch.zeros(1, 1, rows, keys)
    mask[..., ::5, :] = lowest
    mask[..., 1::5, :200] = lowest
    mask[..., 2::5, 100:] = lowest
    mask[..., 3::5, :] = -torch.inf
    mask[..., ::10, :130] = -torch.inf
    mask[..., 5::10, 130:] = -torch.inf
    mask[..., 5::20, 3] = lowest / 2  # finite, and above all others of the row
    return mask


FAR = {
    "lowest": all_lowest(140, 290, LOWEST),
    "lowest of FP16": all_lowest(140, 290, HALF_LOWEST),
    "lowest of a padded batch": torch.where(HIDING["some keys for all"], 0.0, LOWEST),
    "nothing but lowest": torch.full((1, 1, 1, 300), LOWEST),
    "nothing": torch.full((1, 1, 1, 300), -torch.inf),
    "lowest and nothing": torch.full((1, 1, 70, 300), LOWEST).masked_fill(torch.arange(300) % 3 > 0, -torch.inf),
    "large": drawn(1, 1, 130, 300, size=1e4),
    "huge": drawn(1, 1, 65, 300, size=1e37),
    "rising": 200.0 * torch.arange(300).float().view(1, 1, 1, 300),
}


@pytest.mark.parametrize("overflow", ["inf", "saturate"])
@pytest.mark.parametrize("bias", [0.0, 300.0])
@pytest.mark.parametrize("name", FAR)
def test_masks_far_from_all_scores(kernels, name, bias, overflow):
    mask = FAR[name]
    rows = 65 if mask.shape[2] == 1 else mask.shape[2]
    x = make_call(mask.shape[0], 2, 1, rows, mask.shape[3], 64, False, mask=mask, overflow=overflow, largest=True)
    x.k.add_(bias)
    result = launch_attention(kernels, x, launch_shift(kernels, x).arrays, groups=2)
    assert result.report["ok"], result.report["fault"]
    assert sum(result.report["undefined"].values()) == 0
    true = find_truth(inputs.Call(x.q, x.k, x.v, mask, False, x.softmax_scale))
    ratios = judge(true, result["out"], result["lse"], Arithmetic(x.q.dtype))
    assert not [measure for measure, value in ratios.items() if not value <= 1], ratios
    empty = (mask == -torch.inf).all(-1).expand(true.lse.shape)
    assert torch.equal(result["lse"].isneginf(), empty)
    assert (result["out"][empty] == 0).all()


@pytest.mark.parametrize("scale", [1e-5, 100.0, 2.0**60, 2.0**80])
def test_lowest_masks_at_any_scale(npu, scale):
    """Story: above 2^57, FP32's lowest number and a score of 2^103 sum to -inf, which would hide the key."""
    q, k, v = normal_qkv((1, 1), (70, 290), 64)
    mask = all_lowest(70, 290, LOWEST)
    out, lse = pasa.attention(q, k, v, attn_mask=mask, scale=scale, backend="npu", return_lse=True)
    true = find_truth(inputs.Call(q, k, v, mask, False, scale))
    ratios = judge(true, out, lse, Arithmetic(q.dtype))
    assert not [measure for measure, value in ratios.items() if not value <= 1], ratios


# ---- through the binding


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", masks(1, 1, 1, 1))
def test_masks_of_every_layout_and_dtype(npu, name, dtype):
    q, k, v = normal_qkv((4, 2), (70, 150), 40, batch=2)
    keep = masks(2, 4, 70, 150)[name]
    mask = torch.where(keep, 0.5, torch.finfo(dtype).min).to(dtype)
    mask = mask.as_strided(mask.shape, keep.stride()) if name == "expanded" else mask
    before = mask.clone()
    compared(q, k, v, attn_mask=mask, is_causal=name == "rows and keys")
    assert torch.equal(mask, before)


def test_beside_windows_sinks_and_largest_scores(npu):
    q, k, v = normal_qkv((2, 1), (70, 200), 32)
    how = {"attn_mask": drawn(70, 200), "window": (30, 5), "sinks": torch.tensor([1.0, -torch.inf])}
    compared(q, k, v, **how)
    found, expected = (
        pasa.attention(q, k, v, backend=name, return_max_logits=True, **how)[-1] for name in ("npu", "reference")
    )
    torch.testing.assert_close(found, expected, atol=2.0**-6, rtol=0)


def test_one_query_row_takes_its_mask_too(npu):
    """Calls of few rows without a mask take the kernel of decoding, which has none."""
    q, k, v = normal_qkv((4, 2), (1, 300), 64, batch=2)
    compared(q, k, v, attn_mask=drawn(2, 1, 1, 300))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5])])
def test_masks_that_are_not_finite(npu, bad, sinks):
    """A NaN or +inf makes its row NaN, but not beside a causal mask's edge."""
    q, k, v = normal_qkv((1, 1), (40, 140), 16)
    mask = torch.zeros(40, 140)
    mask[3, 5], mask[4, 139], mask[7] = bad, bad, -torch.inf
    how = {"attn_mask": mask, "is_causal": True, "sinks": sinks, "return_lse": True}
    (out, lse), (expected, expected_lse) = (
        pasa.attention(q, k, v, backend=name, **how) for name in ("npu", "reference")
    )
    assert torch.equal(torch.isnan(out), torch.isnan(expected))
    assert torch.equal(torch.isnan(lse), torch.isnan(expected_lse))
    torch.testing.assert_close(out.nan_to_num(), expected.nan_to_num(), **TOLERANCE)


def test_rows_of_minus_infinity_are_not_visited(kernels):
    """Half of the tiles are hidden from all their rows."""
    near = torch.zeros(1, 1, 512, 512).masked_fill(~torch.ones(512, 512, dtype=torch.bool).tril().triu(-40), -torch.inf)
    few, all_tiles = (
        launch_attention(kernels, x, shifted_by_reference(x))
        for x in (make_call(1, 1, 1, 512, 512, 64, False, mask=mask) for mask in (near, torch.zeros_like(near)))
    )
    counts = [(run.report["aic"]["macs"], run.report["aic"]["bytes"]["MTE2"]) for run in (few, all_tiles)]
    assert all(less < 0.5 * more for less, more in zip(*counts, strict=True)), counts


def test_clean_under_sanitizers(sanitized_kernels):
    x = make_call(2, 2, 1, 140, 140, 64, False, mask=drawn(2, 1, 140, 140))
    result = launch_attention(sanitized_kernels, x, shifted_by_reference(x))
    assert result.report["ok"], result.report["fault"]
