"""Float masks that mask keys out by the lowest finite number, as transformers' eager attention does.

Such a key has no weight beside a key that is seen. In a row with such keys only, all have the same weight, because a
score is lost beside such a number. Its output is the mean of the values, not 0.

Bound: rows that see a key must equal those of the same mask with -inf. For other rows it is 2^-9, or 2^-6 for
FP16's lowest number, beside which FP32 keeps scores in steps of 2^-8.
"""

import pytest
import torch

import pasa
from pasa import PasaConfig
from pasa.ops.attention.spec import watch
from pasa.ops.attention.triton.watch import launch as watch_launch
from tests.inputs import DEVICE, normal_qkv
from tests.ops.attention.spec.test_gradients import FORMULAS, definition
from tests.ops.attention.triton.test_backend import CONFIGS

LOWEST = [torch.float16, torch.bfloat16, torch.float32]
SHAPES = {  # rows, keys, head dim
    "prefill": (70, 150, 32),
    "decode by lanes' head dims": (3, 450, 64),
    "decode by tiles' head dims": (3, 390, 160),
    "short": (25, 40, 32),
    "short in several blocks": (3, 150, 64),
}


def make_mask(rows, keys, lowest, dtype=torch.float32):
    """Return a mask with left padding, which hides all keys of some rows, a hole, and a row that sees one key."""
    hidden = torch.rand(2, 1, rows, keys, generator=torch.Generator().manual_seed(5)) < 0.3
    hidden[0, :, :, : keys // 2] = True
    hidden[1, :, 1] = True
    hidden[1, :, 1, -1] = False
    hidden[1, :, 0] = True  # all keys
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, lowest), hidden


def judge(result, expected, golden, hidden, lowest):
    """Compare output and log-sum-exp with those of a mask of -inf, and with FP64 for rows that see no key."""
    fully_masked = hidden.all(-1).expand(result[1].shape)
    assert torch.equal(result[0][~fully_masked], expected[0][~fully_masked])
    assert torch.equal(result[1][~fully_masked], expected[1][~fully_masked])
    assert fully_masked.any()
    bound = 2.0**-6 if lowest == -65504 else 2.0**-9
    assert (result[0] - golden[0])[fully_masked].abs().max() <= bound
    assert (result[1] / golden[1] - 1)[fully_masked].abs().max() <= 2.0**-22


@pytest.mark.parametrize("dtype", LOWEST, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["exact", "fp32"])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_forward(dtype, shape, name, backend):
    """The forward pass treats a mask's lowest number as finite, and -inf as hidden, and never swaps the two."""
    rows, keys, dim = SHAPES[shape]
    lowest = torch.finfo(dtype).min
    q, k, v = normal_qkv((4, 2), (rows, keys), dim, batch=2)
    mask, hidden = make_mask(rows, keys, lowest)
    golden = pasa.golden_attention(q, k, v, attn_mask=mask)
    device = DEVICE if backend == "triton" else "cpu"
    how = {"config": CONFIGS[name], "backend": backend, "return_lse": True}
    tensors = [x.to(device) for x in (q, k, v)]
    result, expected = (
        [x.cpu() for x in pasa.attention(*tensors, attn_mask=m.to(device), **how)]
        for m in (mask, mask.masked_fill(hidden, -torch.inf))
    )
    if backend == "reference":  # the reference drops keys that nobody sees, so its blocks differ
        seen = ~hidden.all(-1).expand(result[1].shape)
        for one, other in zip(result, expected, strict=True):
            assert (one - other)[seen].abs().max() <= 2.0**-9
            one[seen] = other[seen]
    judge(result, expected, golden, hidden, lowest)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_published_recovery(backend):
    """The published recovery is checked on rows that see a key; a mean over blocks of FP16 numbers bounds no others."""
    q, k, v = normal_qkv((4, 2), (70, 150), 32, batch=2)
    mask, hidden = make_mask(70, 150, torch.finfo(torch.float32).min)
    device = DEVICE if backend == "triton" else "cpu"
    how = {"config": PasaConfig(recovery="paper"), "backend": backend}
    out = pasa.attention(*(x.to(device) for x in (q, k, v)), attn_mask=mask.to(device), **how).cpu()
    golden, _ = pasa.golden_attention(q, k, v, attn_mask=mask)
    seen = ~hidden.all(-1).expand(out.shape[:3])
    assert (out - golden)[seen].abs().max() <= 2.0**-6
    assert out.isfinite().all()


@pytest.mark.parametrize("dtype", LOWEST, ids=str)
@pytest.mark.parametrize("backend", FORMULAS)
def test_backward(dtype, backend):
    """The lowest number stays finite in the backward pass, where scores are in bits.

    If it became -inf, the row would have no gradient, and its values none from it.
    """
    q, k, v = normal_qkv((2, 1), (70, 150), 32, batch=2)
    mask, _ = make_mask(70, 150, torch.finfo(dtype).min)
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(9)).half()
    result = FORMULAS[backend](grad, None, q.float(), k.float(), v.float(), mask, False, 32**-0.5)
    golden = definition(q, k, v, torch.float64, grad, mask)
    for x, true in zip(result, golden, strict=True):
        assert (x - true).abs().max() <= 2.0**-6 * true.abs().max()


def test_watch():
    """The watch kernel counts such rows as torch does: their keys are visible, and tie if the mask lowers all."""
    q, k, _ = normal_qkv((2, 1), (70, 150), 32, batch=2)
    mask, hidden = make_mask(70, 150, torch.finfo(torch.float32).min)
    totals = [torch.zeros(5, dtype=torch.int64) for _ in range(2)]
    counters = (watch.count_scores, watch_launch.count_scores)
    for counter, result, device in zip(counters, totals, ("cpu", DEVICE), strict=True):
        device_totals = result.to(device)
        counter(
            q.to(device),
            k.to(device),
            mask.to(device),
            device_totals,
            False,
            32**-0.5,
            range(0, q.shape[:3].numel(), 7),
        )
        result.copy_(device_totals)
    assert torch.equal(*totals)
    assert totals[0][1] >= hidden.all(-1).expand(2, 2, 70).flatten()[::7].sum() > 0
