"""The guards of a device's fused attention find the keys that some row sees while they read a mask."""

import pytest
import torch

from pasa.ops.attention.call import Call
from pasa.ops.attention.sdpa import anchors, backend, fused
from pasa.ops.attention.sdpa.anchors import head_anchors
from pasa.ops.attention.triton.guard import launch as guard
from tests.inputs import DEVICE, normal_qkv


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16])
@pytest.mark.parametrize("keys", [50, 64, 1100])
@pytest.mark.parametrize("shared", [(), (0,), (1,), (2,), (0, 1), (0, 1, 2)])
@pytest.mark.parametrize("expanded", [False, True])
def test_the_keys_that_some_row_sees_are_found_with_the_bias(dtype, keys, shared, expanded):
    """One key is seen only by the last row of the last head, and others by no row.

    A NaN or an infinity in a float mask is seen. Masks may come with axes of size 1, or expanded along them.
    """
    shape = [1 if axis in shared else size for axis, size in enumerate((2, 4, 33))]
    keep = torch.rand(*shape, keys, generator=torch.Generator().manual_seed(keys)) < 0.02
    keep[..., [3, 17]] = False
    keep[-1, -1, -1, 17] = True
    mask = keep if dtype == torch.bool else torch.randn(keep.shape).half().masked_fill(~keep, -torch.inf)
    if dtype == torch.float16:
        mask[-1, 0, 0, 5:7] = torch.tensor([torch.nan, torch.inf])
        mask[-1, 0, 0, 7] = torch.finfo(dtype).min
    mask = mask.to(DEVICE)
    seen_by_row = (mask if dtype == torch.bool else mask != -torch.inf).expand(2, 4, 33, keys)
    if expanded:
        mask = mask.expand(2, 4, 33, keys)
    bias, empty, seen = guard.Bias.of(mask, (2, 4, 33, keys), marks_keys=True).run(mask)
    assert torch.equal(seen, seen_by_row.flatten(1, 2).any(1).byte())
    others = guard.Bias.of(mask, (2, 4, 33, keys)).run(mask)
    assert others[2] is None
    torch.testing.assert_close(bias, others[0], atol=0, rtol=0, equal_nan=True)
    assert torch.equal(empty, others[1])
    assert torch.equal(empty.bool(), ~seen_by_row.any(-1))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "shape", [(2, 4, 40, 600), (1, 4, 40, 600), (2, 1, 40, 600), (2, 1, 1, 600), (40, 600), (1, 600)]
)
def test_masked_out_keys_enter_no_anchor(dtype, shape, monkeypatch):
    """Masks of all dtypes count the same keys: a NaN changes the anchors only where some row sees it."""
    q, k, v = (x.to(DEVICE) for x in normal_qkv((4, 2), (40, 600), 16, batch=2))
    k += 20
    k[:, :, 7, 3], k[-1, 1, 599, 5] = torch.nan, torch.nan
    keep = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.5
    keep[..., [7, 599]] = False
    keep.view(-1, 600)[-1, 599] = True  # by the last row of the last head of the last entry
    keep = keep.to(DEVICE)
    mask = (
        keep if dtype == torch.bool else torch.zeros(shape, device=DEVICE, dtype=dtype).masked_fill(~keep, -torch.inf)
    )
    monkeypatch.setattr(anchors, "LEAST_ROWS_ON_GPU", anchors.LEAST_ROWS)  # so few rows have anchors there, too
    found = []
    shift = guard.Shift.run
    monkeypatch.setattr(guard.Shift, "run", lambda *given: found.append(shift(*given)) or found[0])
    call = Call(q, k, v, 0.25, mask=mask)
    guard.attend_guarded(call, backend.attend_visible, fused.fused_attention, anchored=True)
    ((_, columns),) = found
    bad = torch.zeros(2, 2, 16, dtype=torch.bool, device=DEVICE)
    bad[1, 1, 5] = True
    assert torch.equal(columns[:, :, 0].isnan(), bad)
    assert torch.equal(columns[:, :, 0].nan_to_num()[:, :, None], head_anchors(call))
