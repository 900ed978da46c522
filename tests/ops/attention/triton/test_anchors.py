"""Anchors and K' by Triton, interpreted where there is no GPU; most of this is tested through attention."""

import torch

from pasa.ops.attention.triton.anchor_launch import find_anchors, shift_exact
from tests.inputs import DEVICE


def test_the_first_anchor_is_that_of_the_first_block_with_a_key():
    """The first anchor is that of the first block with a visible key.

    Story: if the first block was padding, its anchor was 0, and offsets were as large as the
    scores.
    """
    g = torch.Generator().manual_seed(0)
    k = (torch.randn(3, 2, 150, 32, generator=g) * 0.1 + torch.arange(1, 4).view(3, 1, 1, 1) * 100).half().to(DEVICE)
    first_seen = torch.tensor([0, 70, 149], device=DEVICE)
    visible = torch.arange(150, device=DEVICE) >= first_seen.unsqueeze(1)
    shifted, anchors = shift_exact(k, 64, visible=visible)
    for b, block in enumerate((0, 1, 2)):
        assert torch.equal(anchors[b, :, 0], anchors[b, :, block])
        assert ((anchors[b, :, 0].float() - 100 * (b + 1)).abs() < 1).all()
    seen = visible[:, None, :, None]
    restored = shifted.float() + anchors.repeat_interleave(64, 2)[:, :, :150].float()
    assert torch.equal(restored.where(seen, k.float()), k.float())


def test_a_key_counts_that_any_group_of_queries_sees():
    """A block whose keys nobody sees has no anchor, and a block's anchor is that of the keys that somebody sees."""
    g = torch.Generator().manual_seed(1)
    k = (torch.randn(2, 3, 150, 32, generator=g) * 0.1 + 50).half().to(DEVICE)
    k[:, :, ::3] = 400.0  # no group sees these
    seen = torch.rand(2, 37, 150, generator=g) < 0.1
    seen[0, :, :64] = False
    seen[..., ::3] = False
    anyone = seen.any(1).to(DEVICE)
    found = find_anchors(k, k, 64, visible=seen.to(DEVICE, torch.uint8)[:, None].expand(2, 3, 37, 150))
    _, expected = shift_exact(k, 64, visible=anyone)
    assert not found.anchors[0, :, 0].any()
    assert torch.equal(found.anchors[0, :, 1:], expected[0, :, 1:])
    assert torch.equal(found.anchors[1], expected[1])
    assert (found.norms[1] < 50.5 * 32**0.5).all()


def test_each_head_has_anchors_of_the_keys_that_its_own_rows_see():
    """Masks may differ by head: what rows of another head see changes no anchor and no norm."""
    k = torch.randn(2, 3, 150, 32, generator=torch.Generator().manual_seed(2)).half().to(DEVICE) + 50
    seen = torch.ones(2, 3, 5, 150, dtype=torch.uint8, device=DEVICE)
    seen[:, 1, :, 64:] = 0
    k[:, 1, 64:] = torch.nan
    assert find_anchors(k, k, 64, visible=seen).norms.isfinite().all()
    norms = find_anchors(k, k, 64, visible=seen.roll(1, 1)).norms
    assert norms[:, 1, 1:].isposinf().all()
    assert norms[:, [0, 2]].isfinite().all()
