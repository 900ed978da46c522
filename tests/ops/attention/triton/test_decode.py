"""Decoding takes one pass over the keys on any data that its bound allows, and is right where the bound fails.

README.md, "Decoding", has the bound. Here are inputs built against each line of it, and counts of exact passes.
"""

import pytest
import torch
import triton
import triton.language as tl

import pasa
from pasa import PasaConfig
from pasa.ops import plans
from pasa.ops.attention.triton.decode import launch as decode_launch
from pasa.ops.attention.triton.decode import paged_launch
from pasa.ops.attention.triton.decode.tile_math import spread
from tests.inputs import DEVICE, max_error, rmse
from tests.pages import make_pages

HALF_ULP = 2.0**-11


def whole(x):
    """Return the memory of a kernel's argument, which is a place in a larger tensor on a GPU, up to its end."""
    if isinstance(x, torch.Tensor):
        return x.view(-1)
    start = x.address - x.owner.data_ptr()
    size = (x.owner.numel() - start) // x.dtype.itemsize
    return x.owner[start : start + size * x.dtype.itemsize].view(x.dtype)


class Passes:
    """Count the splits (or lanes) that fast passes marked, and those that exact passes attended to again."""

    def __init__(self):
        self.splits = self.marked = self.redone = 0

    def watch(self, launch):
        """Return a launch that counts; frames of marked splits are poisoned, so that it shows who writes them."""

        def watching(kernel, grid, tensors, numbers, constants, **options):
            if constants.get("EXACT") is not True:
                launch(kernel, grid, tensors, numbers, constants, **options)
                return
            frames, framed = (whole(x) for x in tensors[5:7])
            frames, framed = frames[: grid[0] * constants["D"]].view(-1, constants["D"]), framed[: grid[0]]
            marked = framed < 0
            frames[framed == -1] = torch.nan  # the frame of this mark is 0, so nobody reads it
            before = framed.clone()
            launch(kernel, grid, tensors, numbers, constants, **options)
            settled = marked & (framed == -1 - before) & ((before == -2) | frames[:, 0].isnan())
            self.splits += len(framed)
            self.marked += int(marked.sum())
            self.redone += int((marked & ~settled).sum())
            assert (framed >= 0).all()

        return watching


@pytest.fixture
def passes(monkeypatch):
    counts = Passes()
    monkeypatch.setattr(plans, "_plans", {})
    for module in (decode_launch, paged_launch):
        monkeypatch.setattr(module, "launch", counts.watch(module.launch))
        monkeypatch.setattr(module, "processors", lambda _: 16)  # of a small GPU: some lanes have several blocks
    return counts


def normal(heads, lengths, dim, seed=0):
    g = torch.Generator().manual_seed(seed)
    (hq, hkv), (rows, keys) = heads, lengths
    return [torch.randn(1, *shape, dim, generator=g) for shape in ((hq, rows), (hkv, keys), (hkv, keys))]


def on_both(q, k, c):
    return q + c, k + c


def on_channels(q, k, c):
    q[..., :16] += c
    k[..., :16] += c
    return q, k


def one_key(q, k, factor):
    k[:, :, 100] *= factor
    return q, k


def one_key_without_the_bias(q, k, c):
    key = k[:, :, 100].clone()
    q, k = on_both(q, k, c)
    k[:, :, 100] = key
    return q, k


KINDS = {
    "N(0, 1)": lambda q, k: (q, k),
    **{f"{c} on Q": lambda q, k, c=c: (q + c, k) for c in (5, 20, 40)},
    **{f"{c} on K": lambda q, k, c=c: (q, k + c) for c in (5, 20, 40)},
    **{f"{c} on both": lambda q, k, c=c: on_both(q, k, c) for c in (5, 20, 40)},
    "80 on 16 channels": lambda q, k: on_channels(q, k, 80),
    **{f"one key {c} times as long": lambda q, k, c=c: one_key(q, k, c) for c in (30, 300, 3000)},
    "wide scores": lambda q, k: (7 * q, k),
    "very wide scores": lambda q, k: (7 * q, 7 * k),
}
SHAPES = {  # heads, lengths, head dimension, options
    "lanes": ((7, 1), (1, 1100), 128, {}),
    "lanes of some rows": ((4, 1), (3, 700), 64, {"is_causal": True}),
    "tiles": ((4, 1), (1, 500), 256, {}),
    "tiles of many rows": ((5, 1), (7, 500), 64, {"is_causal": True}),
    "wide tiles of many rows": ((9, 1), (5, 500), 160, {"is_causal": True}),
    "masked": ((4, 1), (1, 700), 128, {"left padding": 250}),
}


def check(q, k, v, how, padding=0, ratio=1.1):
    """Check a call against FP64: errors of at most `ratio` times those of FP32, and half a spacing of the output."""
    q, k, v = (x.half() for x in (q, k, v))
    mask = (torch.arange(k.shape[2]) >= padding)[None, None, None] if padding else None
    golden, golden_lse = pasa.golden_attention(q, k, v, attn_mask=mask, **how)
    fp32 = pasa.attention(q, k, v, attn_mask=mask, config=PasaConfig(precision="fp32"), backend="reference", **how)
    on_device = [None if x is None else x.to(DEVICE) for x in (q, k, v, mask)]
    out, lse = pasa.attention(*on_device[:3], attn_mask=on_device[3], backend="triton", return_lse=True, **how)
    out, lse = out.cpu(), lse.cpu()
    assert max_error(out, golden) <= ratio * max_error(fp32, golden) + HALF_ULP
    assert rmse(out, golden) <= ratio * rmse(fp32, golden) + 2.0**-14
    rounding = 2.0**-20 * float(golden_lse.abs().max())
    assert float((lse - golden_lse).abs().max()) <= 1e-3 + rounding


def without_padding(how):
    """Return the options of a call, and how many keys a mask hides to the left."""
    return {name: value for name, value in how.items() if name != "left padding"}, how.get("left padding", 0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_one_pass_serves_these_data(shape, kind, passes):
    """No split is attended to twice, whatever all keys share, and however far the scores spread."""
    heads, lengths, dim, how = SHAPES[shape]
    how, padding = without_padding(how)
    q, k, v = normal(heads, lengths, dim)
    q, k = KINDS[kind](q, k)
    if padding:
        k[:, :, :padding] = 0  # padding lacks the bias
    check(q, k, v, how, padding)
    assert passes.splits > 1
    if shape.startswith("lanes"):
        assert passes.redone == 0
        assert passes.marked <= 1  # the lane of the one key
    else:
        tiles = 2 if shape == "wide tiles of many rows" else 1
        assert passes.redone <= tiles  # the split of the one key, for each tile: tiles know no settled splits


PROMPTS = {  # heads, lengths, head dimension, options
    "one head": ((1, 1), (150, 1100), 64, {}),
    "heads that share a tile": ((3, 1), (70, 1030), 32, {"is_causal": True}),
    "more rows than a split has keys": ((1, 1), (250, 1024), 16, {"is_causal": True}),
    "masked": ((2, 1), (100, 1100), 64, {"left padding": 950}),
    "two key heads": ((4, 2), (33, 1024), 80, {}),
    "a wide head": ((1, 1), (100, 1024), 160, {"is_causal": True}),
}


@pytest.mark.parametrize("kind", ["N(0, 1)", "40 on both", "one key 300 times as long"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_few_tiles_of_a_prompt_divide_their_keys(prompt, kind, passes):
    """Four tiles of 64 rows on a GPU of 16 multiprocessors, of which 12 waited for them before."""
    heads, lengths, dim, how = PROMPTS[prompt]
    how, padding = without_padding(how)
    q, k, v = normal(heads, lengths, dim)
    check(*KINDS[kind](q, k), v, how, padding)
    assert passes.splits > 4


@pytest.mark.parametrize("far", ["mask", "queries"])
def test_rows_of_a_prompt_may_lie_far_apart(far, passes):
    """Offsets of rows pass 2^31. Story: a product of two 32-bit numbers wrapped, and rows were read from elsewhere."""
    (q, k, v), stride = (x.half() for x in normal((1, 1), (130, 1024), 16)), 2**24 + 16
    mask = torch.rand(130, 1024, generator=torch.Generator().manual_seed(0)) < 0.5
    golden, _ = pasa.golden_attention(q, k, v, attn_mask=mask)
    apart = torch.empty(129 * stride + 1024, dtype=torch.bool if far == "mask" else torch.float16, device=DEVICE)
    if far == "mask":
        mask = apart.as_strided((130, 1024), (stride, 1)).copy_(mask)
    else:
        q = apart.as_strided((1, 1, 130, 16), (0, 0, stride, 1)).copy_(q)
    out = pasa.attention(*(x.to(DEVICE) for x in (q, k, v)), attn_mask=mask.to(DEVICE), backend="triton")
    assert passes.splits > 3
    assert max_error(out.cpu(), golden) <= 2.0**-9


@pytest.mark.parametrize(
    ("heads", "lengths", "how"),
    [
        ((5, 1), (64, 1024), {}),
        ((1, 1), (64, 1023), {}),
        ((1, 1), (64, 1024), {"window": (100, 0)}),
        ((1, 1), (64, 1024), {"config": PasaConfig(batch_invariant=True)}),
    ],
    ids=["busy", "short", "window", "batch-invariant"],
)
def test_other_prompts_keep_their_tiles_whole(heads, lengths, how, passes):
    q, k, v = (x.half().to(DEVICE) for x in normal(heads, lengths, 16))
    pasa.attention(q, k, v, backend="triton", **how)
    assert passes.splits == 0


@pytest.mark.parametrize("bias", [0, 20, 300])
@pytest.mark.parametrize("slots", [16, 48])
def test_pages_take_one_pass(bias, slots, passes):
    pages = make_pages([500, 0, 70], (4, 2), 64, slots, bias=bias)
    out, _ = pages.attend(DEVICE, backend="triton")
    golden, _ = pages.golden()
    assert max_error(out, golden) <= 2.0**-9
    assert passes.redone == 0


# ---- keys built against the bound


@pytest.mark.parametrize("heads", [(4, 1), (20, 1)])  # lanes and tiles
@pytest.mark.parametrize("value", [499.0, 499.75, 0.1234, 1502.0, 1999.0, -1000.0, -65504.0, 65504.0])
def test_a_difference_that_fp16_would_round(heads, value, passes):
    """A key that is not half to one and a half of the anchor is found, wherever it hides, and attended to exactly.

    The anchor is near 1000 in one column. q weighs that column so much that a difference rounded to FP16 would change
    the score by nats. The key has all the weight, some or none.
    """
    for place in (3, 333, 609):
        q, k, v = normal(heads, (1, 610), 64, seed=place)
        q[..., 5] = 30.0
        k[..., 5] = 1000.0
        k[:, :, place, 5] = value
        k[:, :, place, 6] = (1000.0 - value) * 30.0 / 40.0 if abs(value) < 2000 else 0.0  # the score of the others
        q[..., 6] = 40.0
        check(q, k, v, {})
    assert passes.redone >= 3 if value not in (1502.0,) else passes.redone >= 0


@pytest.mark.parametrize("heads", [(4, 1), (20, 1)])
def test_a_rounded_difference_within_the_limit_of_scores(heads, passes):
    """A difference that FP16 would round is found even if no score can pass 2048 nats.

    The anchor of 1000 is needed, as scores may pass 1024 nats. 0.1234 - 1000 is 1250 nats, and FP16 rounds it by 0.12.
    """
    q, k, v = normal(heads, (1, 610), 64)
    q, k = q * 0.1, k * 0.1
    q[..., 5], k[..., 5] = 10.0, 1000.0
    k[:, :, 333, 5] = 0.1234
    check(q, k, v, {})
    assert passes.redone == 1


@pytest.mark.parametrize("factor", [0.502, 0.503, 0.999, 1.497, 1.498])
def test_differences_at_the_edge_of_exactness(factor, passes):
    """Differences up to half of the anchor are exact, so keys there need no exact pass.

    The lanes' test by squares leaves a fifth of a percent to rounding.
    """
    q, k, v = normal((4, 1), (1, 610), 64)
    q[..., 5], k[..., 5] = 30.0, 1024.0
    k[:, :, 333, 5] = 1024 * factor
    check(q, k, v, {})
    assert passes.redone == 0


def test_small_keys_beside_a_large_anchor(passes):
    """Keys that lack the bias may have all the weight: their error must be that of their own scores.

    All keys but two have 2000 in a column where q is negative, so that they have no weight. In the frame of that
    anchor, the scores of the two would be sums of numbers near 10^6, whose FP32 spacing is 2^-4.
    """
    q, k, v = normal((4, 1), (1, 610), 64)
    q[..., 5], k[..., 5] = -700.0, 2000.0
    for place in (333, 601):
        k[:, :, place, 5] = 0.0
    check(q, k, v, {})
    assert passes.redone >= 1


@pytest.mark.parametrize("tensor", ["q", "k", "v"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("heads", [(4, 2), (40, 2)])
@pytest.mark.parametrize("bias", [0, 300])
def test_bad_numbers_reach_their_head_alone(tensor, value, heads, bias):
    q, k, v = normal(heads, (1, 300), 64)
    q[..., :8] += bias
    k[..., :8] += bias
    {"q": q, "k": k, "v": v}[tensor][0, 1, min(150, q.shape[2] - 1 if tensor == "q" else 150), 3] = value
    q, k, v = (x.half() for x in (q, k, v))
    expected, expected_lse = pasa.attention(q, k, v, backend="reference", return_lse=True)
    out, lse = pasa.attention(*(x.to(DEVICE) for x in (q, k, v)), backend="triton", return_lse=True)
    assert torch.equal(out.cpu().isnan(), expected.isnan())
    assert torch.equal(lse.cpu().isnan(), expected_lse.isnan())


@pytest.mark.parametrize("apart", [0.0, 10.0, 23.0, 200.0])
def test_two_long_keys_compete(apart, passes):
    """A lane is settled only if its long key is far from the keys of all other lanes, those of another long key, too.

    Two keys of 10^5 nats lie in different lanes, some nats apart. FP32 spaces such scores by 2^-7 nats.
    """
    q, k, v = normal((1, 1), (1, 1100), 128)
    q[...] = q.sign() * 32
    for place, extra in ((100, 0.0), (700, apart)):
        k[:, :, place] = q[:, :, 0].sign() * 276
        k[:, :, place, 0] += extra * 128**0.5 / 32 * q[0, 0, 0, 0].sign()
    check(q, k, v, {})
    assert passes.marked == 2
    assert passes.redone == (0 if apart > 100 else 2)


@pytest.mark.parametrize("other", [101, 700])
def test_a_long_key_beside_ordinary_ones(other, passes):
    """A long key that shares the weight with an ordinary one, in its lane or in another, is no settled one."""
    q, k, v = normal((1, 1), (1, 1100), 128)
    q[...] = 40 * q.sign()
    k[:, :, other] = 2 * q[:, :, 0].sign()  # 900 nats, where the others have 150 at most
    k[:, :, 100] = k[:, :, other] + 200 * q[:, :, 0].sign() * (torch.arange(128) % 2 * 2 - 1)  # these products cancel
    check(q, k, v, {})
    assert passes.redone == 1


def test_a_long_key_in_tiles(passes):
    """A split is marked by any of its blocks: products of this key cancel in FP32 only if they are anchored."""
    q, k, v = normal((80, 4), (1, 1100), 128)
    q[...] = 40 * q.sign()
    k[:, :, 100] = 200 * q[:, ::20, 0].sign() * (torch.arange(128) % 2 * 2 - 1)
    check(q, k, v, {})
    assert passes.splits < 4 * 1100 // 64, "a split has several blocks"
    assert passes.redone == 4


@pytest.mark.parametrize("heads", [(16, 4), (80, 4)])
@pytest.mark.parametrize("garbage", [60000.0, torch.inf, torch.nan])
def test_garbage_that_a_mask_hides_marks_no_split(heads, garbage, passes):
    """Keys and values of a cache that no row sees may be anything, in any block, and cost no second pass."""
    q, k, v = (x.half() for x in normal(heads, (1, 1200), 64))
    seen = torch.rand(1200, generator=torch.Generator().manual_seed(1)) < 0.7
    seen[128:192] = False
    k[:, :, ~seen], v[:, :, ~seen] = garbage, garbage
    golden, golden_lse = pasa.golden_attention(q, k[:, :, seen], v[:, :, seen])
    on_device = [x.to(DEVICE) for x in (q, k, v, seen[None, None, None])]
    out, lse = pasa.attention(*on_device[:3], attn_mask=on_device[3], backend="triton", return_lse=True)
    assert max_error(out.cpu(), golden) <= 4 * HALF_ULP
    assert float((lse.cpu() - golden_lse).abs().max()) <= 1e-3
    assert 4 < passes.splits < 4 * 1200 // 64, "a split has several blocks"
    assert passes.redone == 0


def test_unlike_keys_in_the_sample(passes):
    """Some unlike keys among the sampled ones, as attention sinks are, do not take a head's anchor away."""
    q, k, v = normal((4, 1), (1, 1600), 64)
    q, k = on_both(q, k, 40)
    step = 1600 // 16
    for place in (step // 2, 5 * step + step // 2):
        k[:, :, place] -= 40
    check(q, k, v, {})
    assert passes.marked <= 2


@pytest.mark.parametrize("hidden", [0, 300, 590])
def test_padding_is_no_sample(hidden, passes):
    """Keys that a mask hides do not choose the anchor, and fail no bound, even if they are not finite."""
    q, k, v = normal((4, 1), (1, 600), 64)
    q, k = on_both(q, k, 40)
    k[:, :, :hidden] = 3.0
    check(q, k, v, {}, hidden)
    assert passes.redone == 0


@triton.jit(do_not_specialize=["begin", "end"])
def spread_kernel(p_out, begin, end):
    tl.store(p_out + tl.arange(0, 16), spread(begin, end))


@pytest.mark.parametrize(("begin", "end"), [(0, 1), (3, 18), (0, 16), (0, 700), (0, 140_000_000), (10**9, 2**31 - 1)])
def test_a_sample_is_spread_over_any_number_of_keys(begin, end):
    """Story: 16 times 140 million keys passed 2^31, and a sample lay before the first key."""
    out = torch.zeros(16, dtype=torch.int32, device=DEVICE)
    spread_kernel[(1,)](out, begin, end)
    keys = end - begin
    assert out.tolist() == [begin + (i * keys + keys // 2) // 16 for i in range(16)]
    assert begin <= min(out.tolist()) <= max(out.tolist()) < end


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("filled", [1, 20, 100, 290, 450])
def test_a_static_cache_that_is_hardly_filled_takes_one_pass(filled, rows, kind, passes):
    """Story: fewer than half of the sampled slots were filled, so biased keys had no anchor, and all were redone."""
    q, k, v = (x.half() for x in normal((4, 1), (rows, 600), 64))
    q, k = on_both(q, k, 40)
    k[:, :, filled:], v[:, :, filled:] = 0.0, 0.0
    seen = torch.arange(600) < torch.arange(filled - rows + 1, filled + 1).clamp(min=1)[:, None]
    mask = seen if kind == "bool" else torch.zeros(rows, 600).masked_fill(~seen, -torch.inf)
    golden, golden_lse = pasa.golden_attention(q, k, v, attn_mask=mask)
    on_device = [x.to(DEVICE) for x in (q, k, v, mask)]
    out, lse = pasa.attention(*on_device[:3], attn_mask=on_device[3], backend="triton", return_lse=True)
    assert max_error(out.cpu(), golden) <= 4 * HALF_ULP
    assert float((lse.cpu() - golden_lse).abs().max()) <= 1e-3 + 2.0**-20 * float(golden_lse.abs().max())
    assert passes.redone == 0


@pytest.mark.parametrize("heads", [(4, 1), (20, 1)])
def test_frames_of_0_beside_an_anchor(heads, passes):
    """A split of the exact pass may have the frame 0 while the others have the anchor of the head.

    Its keys have no anchor, and their scores are as large as those of the others. FP32 rounds these scores once, and
    the offset of the other frame, which is as large, once more: twice the error of FP32 attention.
    """
    q, k, v = normal(heads, (1, 900), 64)
    q, k = on_both(q, k, 40)
    # 76 or 4 in turn, by key and channel: no anchor is a third of 4 and near 40
    turn = (torch.arange(32)[:, None] + torch.arange(64)) % 2
    k[:, :, 320:352] += torch.where(turn == 0, 36.0, -36.0)
    check(q, k, v, {}, ratio=2)
    assert passes.redone >= 1
