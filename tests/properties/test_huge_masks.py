"""Float masks of finfo.min, with which transformers hides keys: they are finite, so a row of them has keys.

Golden attention adds them in FP64, while FP32 keeps 24 bits of their sum with a score. Scores of ordinary size
vanish in either sum, and a row of such masks alone gives the plain mean of its values.
"""

import pytest
import torch

import pasa
from pasa.ops.attention.spec.exact_fp64 import golden_attention
from pasa.ops.attention.spec.masking import fitting_mask
from tests.inputs import MODES, normal_qkv
from tests.ops.attention.spec.test_gradients import FORMULAS

LOWEST = torch.finfo(torch.float32).min
SHAPES = [((2, 2), (20, 50)), ((4, 1), (70, 200)), ((4, 1), (1, 300))]  # one launch; key blocks; splits of the keys


def mask_of(rows, keys):
    """Return a mask in which every fifth row sees nothing, one has finfo.min everywhere, one on most keys.

    The other two of five rows have it on every other key.
    """
    mask = torch.zeros(rows, keys)
    mask[:, ::2] = LOWEST
    mask[1::5], mask[2::5], mask[2::5, keys // 3] = LOWEST, LOWEST, 0.0
    if rows > 1:
        mask[3::5] = -torch.inf
    return mask


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(("heads", "lengths"), SHAPES, ids=str)
@pytest.mark.parametrize("log_scale", [-3, 72, 80])
def test_rows_of_finfo_min_have_keys(mode, heads, lengths, log_scale):
    """Rows of finfo.min have keys.

    Story: with scales of 2^62 and more the sum of finfo.min and a score of -2^103 was -inf. A row of such keys
    was taken for a row without keys: its output was 0, its log-sum-exp -inf. Beside such masks FP32 cannot
    separate scores that FP64 can, so those rows are held to the range of their values, and all others to golden
    attention.
    """
    q, k, v = normal_qkv(heads, lengths, 64)
    if log_scale > 0:
        q, k = torch.full_like(q, 32768), -32768 * (k > 0).half()  # FP32 holds their sums; all scores are negative
    mask = mask_of(*lengths)
    if lengths[0] == 1:
        mask[:] = LOWEST
    out, lse = mode.attend(q, k, v, attn_mask=mask, scale=2.0**log_scale)
    golden, true = golden_attention(q, k, v, attn_mask=mask, scale=2.0**log_scale)
    assert torch.equal(lse == -torch.inf, true == -torch.inf)
    assert torch.isfinite(out).all()
    seen = true > -torch.inf
    room = 2.0 ** (46 + log_scale) if log_scale > 57 else 0.0  # what `fitting_mask` leaves
    assert ((lse.double() - true)[seen].abs() <= room + 2.0**-22 * true[seen].abs() + 2.0**-8).all()
    slack = 2.0**-9 * v.abs().max().double()
    assert (out.double() <= v.double().amax((1, 2), keepdim=True) + slack).all()
    assert (out.double() >= v.double().amin((1, 2), keepdim=True) - slack).all()
    assert torch.equal((out != 0).any(-1), seen)
    told_apart = (mask > LOWEST).any(-1) | (log_scale < 0)
    assert ((out.double() - golden)[:, :, told_apart].abs() <= slack).all()


@pytest.mark.parametrize("backend", FORMULAS)
@pytest.mark.parametrize("log_scale", [-3, 70])
def test_rows_of_finfo_min_have_gradients(backend, log_scale):
    """Rows of finfo.min have gradients: each of n keys of equal weight gets G / n.

    Story: the kernels multiplied masked scores by log2(e), which makes finfo.min infinite at any scale. So a
    row of such masks had no gradient.
    """
    q, k, v = normal_qkv((2, 1), (20, 50), 64)
    if log_scale > 0:
        q, k = 65504 * q.sign(), (65504 * k.sign())[:, :, :1].expand_as(k)
    mask = torch.full((20, 50), LOWEST)
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(9)).half()
    _, _, dv = FORMULAS[backend](grad, None, q, k, v, mask, False, 2.0**log_scale)
    expected = grad.double().sum((1, 2), keepdim=True).expand_as(v) / 50
    assert ((dv.double() - expected).abs() <= 2.0**-9 * expected.abs().max()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_fitting_mask_leaves_room_for_the_largest_scores(dtype):
    """A fitting mask leaves room for the largest scores, and keeps NaN and infinities.

    At ordinary scales it changes nothing and copies nothing.
    """
    info = torch.finfo(dtype)
    mask = torch.tensor([info.min, info.max, 1.0, torch.nan, torch.inf, -torch.inf]).to(dtype)
    assert fitting_mask(mask, 2.0**56) is mask
    result = fitting_mask(mask, 2.0**80)
    assert torch.isfinite(result[:3].float() - 2.0**125).all()
    assert torch.isfinite(result[:3].float() + 2.0**125).all()
    assert result[2] == 1
    assert torch.equal(result[3:].isnan(), torch.tensor([True, False, False]))
    assert torch.equal(result[4:].float(), torch.tensor([torch.inf, -torch.inf]))


def test_finfo_min_and_scale_through_the_public_function():
    """finfo.min and a huge scale work in the public function, as in the first report: scores near -2^104."""
    q, k, v = normal_qkv((1, 1), (1, 4), 512)
    q, k = torch.full_like(q, 65504), torch.full_like(k, -65504)
    out, lse = pasa.attention(q, k, v, attn_mask=torch.full((4,), LOWEST), scale=2.0**63, return_lse=True)
    assert torch.isfinite(lse).all()
    assert (out.double() - v.double().mean(2, keepdim=True)).abs().max() < 2e-3
