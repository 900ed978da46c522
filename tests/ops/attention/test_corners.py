"""Conditions that must meet before a fault shows.

They are biases that differ by block, head, batch entry or sequence, masks that differ by head, hidden keys that
hold large numbers, and scores far below 0. Each test is for one such fault.

Bound of an output: 2^-8, two roundings of a weight; of a log-sum-exp: 2^-21 of its size, and 1e-3.
"""

import pytest
import torch

import pasa
from pasa.ops.attention.triton.decode import launch as decode_launch
from pasa.ops.attention.triton.kernel_call import dropped_bits
from pasa.ops.attention.triton.paged import launch as paged_write_launch
from pasa.ops.numerics.dither import round_unbiased
from tests.inputs import DEVICE, max_error, normal_qkv, part_blocks
from tests.ops.attention.spec.test_gradients import by_kernels, definition
from tests.ops.attention.triton.test_rounding import DTYPES, ROWS, rows_kernel
from tests.pages import make_pages


def attend(q, k, v, **how):
    tensors = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in how.items()}
    out, lse = pasa.attention(*(x.to(DEVICE) for x in (q, k, v)), return_lse=True, backend="triton", **tensors)
    return out.cpu(), lse.cpu()


def check(q, k, v, **how):
    """Compare output and log-sum-exp with FP64."""
    golden, golden_lse = pasa.golden_attention(q, k, v, **how)
    out, lse = attend(q, k, v, **how)
    seen = golden_lse > -torch.inf
    assert torch.equal(lse > -torch.inf, seen)
    assert max_error(out, golden) <= 2.0**-8
    assert ((lse - golden_lse).abs() <= 1e-3 + 2.0**-21 * golden_lse.abs())[seen].all()


def offset(q, k, sizes):
    """Fill column 0 with a bias: 512 in q, and in k the given FP16 numbers, which differ by block, head or batch entry.

    The bias adds so much to scores that FP32 has steps of 0.03 without anchors.
    """
    q[..., 0] = 512.0
    k[..., 0] = sizes


FAR = -60000.0
"""A key that weighs nothing. No anchor of a head brings it near the others, so each block needs its own."""


@pytest.mark.parametrize("dim", [16, 64])
def test_biases_that_differ_by_batch_entry_and_head(dim):
    """Each head of each batch entry uses its own anchors."""
    for rows in (70, 3):
        q, k, v = normal_qkv((4, 2), (rows, 385), dim, batch=2)
        offset(q, k, torch.tensor([[4096.0, -4096.0], [8192.0, 2048.0]]).unsqueeze(-1))
        if rows == 70:  # decoding would put it into a block with others
            k[..., -1, 0] = FAR
        check(q, k, v)


def test_packed_sequences_with_other_biases():
    """Each packed sequence uses the anchors of its own blocks."""
    lengths, sizes = [129, 257, 1, 129], [4096.0, -4096.0, 2048.0, 8192.0]
    q, k, v = normal_qkv((2, 1), (sum(lengths), sum(lengths)), 16)
    offset(q, k, torch.tensor(sizes).repeat_interleave(torch.tensor(lengths)))
    k[:, :, torch.tensor(lengths).cumsum(0) - 1, 0] = FAR  # in a block of its own
    packed = [x[0].transpose(0, 1).contiguous().to(DEVICE) for x in (q, k, v)]
    edges = torch.tensor([0, *lengths]).cumsum(0).to(DEVICE)
    out = pasa.attention_varlen(*packed, edges, edges, 257, 257, is_causal=True, backend="triton").cpu()
    for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        golden, _ = pasa.golden_attention(*(x[:, :, a:b] for x in (q, k, v)), is_causal=True)
        assert max_error(out[a:b].transpose(0, 1)[None], golden) <= 2.0**-8


@pytest.mark.parametrize("kind", ["none", "bool", "float"])
@pytest.mark.parametrize(("rows", "dim"), [(70, 16), (3, 64), (3, 160)])
def test_biases_that_differ_by_block_under_a_mask(rows, dim, kind):
    """An offset between two frames is applied, in the right units.

    Blocks differ by so little that all of them have weight.
    """
    q, k, v = normal_qkv((4, 2), (rows, 512), dim)
    step = 8.0  # the spacing of FP16 numbers at 8192
    offset(q, k, 8192.0 + step * (torch.arange(512) // 128 % 2))
    q[..., 0] = dim**0.5 / step  # one nat from block to block
    if rows == 70:
        part_blocks(q, k, 512.0, 4096.0)
    else:  # few rows have anchors of blocks at once
        q[..., 1], k[..., 1] = 512.0, 4096.0
    g = torch.Generator().manual_seed(3)
    keep = torch.rand(4, rows, 512, generator=g) < 0.6
    mask = {"none": None, "bool": keep, "float": torch.where(keep, torch.randn(keep.shape, generator=g), -torch.inf)}
    check(q, k, v, attn_mask=mask[kind])


@pytest.mark.parametrize(
    ("rows", "keys", "dim"), [(70, 300, 16), (3, 300, 64), (3, 400, 64), (3, 400, 160), (20, 40, 16)]
)
def test_hidden_keys_hold_large_numbers(rows, keys, dim):
    """Keys that nobody sees affect neither an anchor nor a bound on scores."""
    q, k, v = normal_qkv((4, 2), (rows, keys), dim)
    offset(q, k, 4096.0)
    keep = torch.rand(1, 1, 1, keys, generator=torch.Generator().manual_seed(3)) < 0.8
    k[..., ~keep[0, 0, 0], 0] = -60000.0
    k[..., ~keep[0, 0, 0], 1] = 0.001
    check(q, k, v, attn_mask=keep)


@pytest.mark.parametrize(("rows", "keys", "dim"), [(70, 300, 16), (3, 300, 64), (3, 450, 64)])
def test_masks_that_differ_by_head_over_keys_with_a_bias(rows, keys, dim):
    """Keys that only the first head does not see count as visible.

    If such keys were taken as hidden, their anchor would round them.
    """
    q, k, v = normal_qkv((2, 1), (rows, keys), dim)
    offset(q, k, 4096.0)
    q[..., 0] = 8.0  # a difference rounded to FP16 is off by more than FP32 scores are
    mask = torch.ones(1, 2, 1, keys, dtype=torch.bool)
    mask[:, 0, :, ::3] = False
    k[..., ::3, 0] = 0.37 + 0.01 * torch.randn(keys // 3, generator=torch.Generator().manual_seed(3)).half()
    mask[:, 1] = ~mask[:, 0]
    check(q, k, v, attn_mask=mask.expand(1, 2, rows, keys))


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_whose_tiles_differ_by_batch_entry_and_head(kind):
    """Sorted mask tiles belong to their own head and batch entry.

    Each of the four sees one tile of keys, and part of the next.
    """
    q, k, v = normal_qkv((2, 1), (70, 300), 16, batch=2)
    first = 64 * torch.arange(4).view(2, 2, 1, 1)
    keep = (torch.arange(300) >= first) & (torch.arange(300) < first + 80)
    keep = keep.expand(2, 2, 70, 300)
    check(q, k, v, attn_mask=keep if kind == "bool" else torch.zeros(keep.shape).masked_fill(~keep, -torch.inf))


@pytest.mark.parametrize("kind", ["none", "float"])
@pytest.mark.parametrize(("dim", "keys"), [(64, 700), (160, 390), (160, 90)])
def test_scores_far_below_0(dim, keys, kind, monkeypatch):
    """Splits that do not exist do not count as scores of 0, beside which all others would vanish.

    The merge joins 8 splits of 700 keys, and 3 of 390, which is not a power of two. With 90 keys there are no splits.
    """
    if keys == 390:
        monkeypatch.setattr(decode_launch, "split_limit", lambda call: 3)
    q, k, v = normal_qkv((2, 1), (1, keys), dim)
    q[..., 0], k[..., 0] = -30.0, 60.0
    mask = torch.randn(1, keys, generator=torch.Generator().manual_seed(3)) if kind == "float" else None
    check(q, k, v, attn_mask=mask)


@pytest.mark.parametrize("dim", [64, 160])
def test_a_mask_that_outweighs_biases_by_block(dim):
    """Distances between frames are in nats under a float mask, as maxima are, not in units of q.k.

    The mask subtracts what the bias of a block adds. So all keys have the same weight, and their splits have
    different frames.
    """
    q, k, v = normal_qkv((4, 1), (3, 1280), dim)
    q[..., 0] = 64.0
    k[..., 0] = 128.0 * torch.tensor([1, 3, 2, 4, 1, 2, 4, 3, 1, 2]).repeat_interleave(128)
    mask = -(64.0 * dim**-0.5) * k[0, :, :, 0].float()
    check(q, k, v, attn_mask=mask)


@pytest.mark.parametrize("dim", [64, 160])
def test_a_far_bias_that_a_mask_leaves_without_weight(dim):
    """A split without weight does not set the frame: 2^20 nats off, it would leave the other splits steps of 1/16."""
    q, k, v = normal_qkv((4, 1), (3, 1280), dim)
    q[..., 0], k[..., 0] = 512.0, 0.0
    k[..., 640:, 0] = 16384.0
    mask = -(512.0 * dim**-0.5) * k[0, :, :, 0].float()
    mask[:, 640:] -= 200
    check(q, k, v, attn_mask=mask)


def test_an_anchor_that_would_round_a_key():
    """An anchor that would round a key is not used.

    A limit that bounds scores alone would accept it. Keys of 20 are close enough to an anchor of 100 for that
    limit, but FP16 holds their difference in steps of 2^-4.
    """
    q, k, v = normal_qkv((9, 9), (1, 562), 64)
    q, k = q * 0.1, k * 0.1
    q[..., 0], k[..., 0] = -182.0, 100.0  # 2,275 nats, which need an anchor; 1,820 do not
    k[..., 77:85, 0] = 20 + 0.03 * torch.randn(8, generator=torch.Generator().manual_seed(3)).half()
    check(q, k, v)


@pytest.mark.parametrize("calm", [128, 256, 384])
def test_one_of_the_pages_that_a_frame_is_taken_from(calm):
    """The frame is a vote of three pages' anchors, not the anchor of one page, which may be unlike the others."""
    pages = make_pages([512], (2, 1), 64, 16)
    pages.q[:] *= 3
    pages.q[..., 0], pages.k[..., 0] = 512.0, 30000.0
    pages.k[calm : calm + 16, :, 0] = 0.0
    pages.k_cache.view(-1, 1, 64)[pages.slots] = pages.k
    out, _ = pages.anchored().attend(DEVICE, backend="triton")
    assert max_error(out, pages.golden()[0]) <= 2.0**-8


@pytest.mark.parametrize(("dim", "keys"), [(64, 400), (160, 400), (64, 40), (16, 200), (160, 200)])
@pytest.mark.parametrize("tensor", ["k", "v"])
def test_a_number_that_is_not_finite_in_the_last_keys(dim, keys, tensor):
    """A NaN in the last keys reaches exactly the rows that see its key: of 3 rows only the last, and of 70."""
    for rows in (3, 70):
        q, k, v = normal_qkv((2, 1), (rows, keys + 70), dim)
        {"k": k, "v": v}[tensor][0, 0, -1, 5] = torch.nan
        out, _ = attend(q, k, v, is_causal=True)
        expected = pasa.golden_attention(q, k.nan_to_num(0.0), v.nan_to_num(0.0), is_causal=True)[0]
        assert max_error(out[:, :, :-1], expected[:, :, :-1]) <= 2.0**-8
        bad = out[:, :, -1].isnan()
        assert bad[..., 5].all()
        assert bad.all() == (tensor == "k")
        assert bad.sum() == (bad.numel() if tensor == "k" else 2)


@pytest.mark.parametrize(
    ("rows", "keys", "dim"), [(70, 300, 16), (70, 300, 128), (3, 60, 64), (3, 300, 64), (3, 400, 64), (3, 400, 160)]
)
def test_a_key_of_minus_infinity_that_weighs_nothing(rows, keys, dim):
    """A key of -inf turns all rows that see it to NaN, although its weight is 0.

    Every row's score of the key is -inf, so only a norm that includes infinity reveals the key.
    """
    q, k, v = normal_qkv((2, 1), (rows, keys), dim)
    q[..., 3] = q[..., 3].abs() + 0.1
    k[0, 0, keys // 3, 3] = -torch.inf
    out, _ = attend(q, k, v)
    assert out.isnan().all()


@pytest.mark.parametrize(
    ("rows", "keys", "dim"), [(70, 300, 128), (3, 60, 64), (3, 200, 128), (3, 400, 64), (3, 400, 160), (20, 700, 64)]
)
@pytest.mark.parametrize("cap", [None, 30.0])
def test_an_infinite_query_that_every_key_points_away_from(rows, keys, dim, cap):
    """An infinite query is NaN in its row and no other, although all of its scores are -inf, as if it saw no key."""
    q, k, v = normal_qkv((2, 1), (rows, keys), dim)
    k[..., 3] = -k[..., 3].abs() - 0.1
    q[0, 0, 1, 3] = torch.inf
    out, lse = attend(q, k, v, softcap=cap)
    bad = torch.zeros(out.shape[:-1], dtype=torch.bool)
    bad[0, 0, 1] = True
    assert out.isnan().all(-1).equal(bad)
    assert lse.isnan().equal(bad)


@pytest.mark.parametrize("slots", [16, 200])
@pytest.mark.parametrize("column", [3, 60])
def test_a_key_that_is_not_finite_in_a_long_page(slots, column):
    """A key that is not finite is found in any column of a long page, not only in the columns that are read last."""
    pages = make_pages([slots], (1, 1), 64, slots, bias=50)
    pages.k[7, 0, column] = torch.inf
    anchors = torch.zeros(len(pages.k_cache), 1, 64).half().to(DEVICE)
    moved = pages.to(DEVICE)
    paged_write_launch.write_pages(moved.k, moved.v, moved.k_cache, moved.v_cache, moved.slots, anchors)
    assert anchors[int(pages.table[0, 0])].isnan().all()


def test_gradients_where_the_first_keys_have_the_largest_values():
    """The unit of a row's gradient covers the largest values of all keys, not of the last keys alone.

    Otherwise dS leaves FP16's range.
    """
    q, k, v = normal_qkv((2, 1), (40, 600), 16)
    v[:, :, :256] *= 10000
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(9)).half()
    result = by_kernels(grad, None, q.float(), k.float(), v.float(), None, False, 0.25)
    for x, true in zip(result, definition(q, k, v, torch.float64, grad), strict=True):
        assert max_error(x, true) <= 2.0**-9 * true.abs().max()


def test_gradients_of_a_log_sum_exp_of_any_layout():
    """A gradient of the log-sum-exp may have any layout; that of a sum is one expanded number."""
    q, k, v = normal_qkv((2, 1), (40, 70), 32)
    grad = torch.randn(40, 2, 1, generator=torch.Generator().manual_seed(9)).T  # (1, 2, 40)
    for strided in (grad, torch.ones(()).expand(1, 2, 40)):
        result = by_kernels(None, strided, q, k, v, None, False, 0.2)
        for x, expected in zip(result, by_kernels(None, strided.contiguous(), q, k, v, None, False, 0.2), strict=True):
            assert torch.equal(x, expected)


@pytest.mark.parametrize("paper", [False, True])
def test_keys_that_only_early_rows_see(paper):
    """Keys count as visible if any row sees them; the mask's last row sees only the first 40 keys here."""
    q, k, v = normal_qkv((2, 1), (70, 150), 16)
    mask = torch.ones(1, 1, 70, 150, dtype=torch.bool)
    mask[:, :, -1, 40:] = False
    if paper:
        config = pasa.PasaConfig(recovery="paper")
        out = pasa.attention(
            *(x.to(DEVICE) for x in (q, k, v)), attn_mask=mask.to(DEVICE), config=config, backend="triton"
        )
        assert max_error(out.cpu(), pasa.golden_attention(q, k, v, attn_mask=mask)[0]) <= 2.0**-6
        return
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(9)).half()
    result = by_kernels(grad, None, q.float(), k.float(), v.float(), mask, False, 0.25)
    for x, true in zip(result, definition(q, k, v, torch.float64, grad, mask), strict=True):
        assert max_error(x, true) <= 2.0**-9 * true.abs().max()


def test_anchors_of_pages_that_are_far_apart_and_weigh_the_same():
    """The difference of two pages' anchors keeps its low term.

    600.25, which FP16 does not hold, and -600 in another column leave 2 nats.
    """
    pages = make_pages([512], (2, 1), 64, 16)
    pages.q[..., :2] = 64.0
    odd = torch.arange(512) // 16 % 2 == 1
    pages.k[..., 0] = torch.where(odd, 300.25, -300.0).half()[:, None]
    pages.k[..., 1] = torch.where(odd, -300.0, 300.0).half()[:, None]
    pages.k_cache.view(-1, 1, 64)[pages.slots] = pages.k
    out, _ = pages.anchored().attend(DEVICE, backend="triton")
    assert max_error(out, pages.golden()[0]) <= 2.0**-8


def test_all_keys_of_a_long_sequence_weigh():
    """The pass with the anchors of pages includes every turn of 4,096 keys, and all keys have the same weight.

    With keys that differ, one would have all the weight, and its place would decide which fault is noticed.
    """
    pages = make_pages([64 * 64 * 2 + 77], (1, 1), 16, 16)
    pages.q[:], pages.k[:] = 0.0, 0.0
    pages.q[..., 0] = pages.k[..., 0] = 100.0  # 2,500 nats
    pages.k_cache.view(-1, 1, 16)[pages.slots] = pages.k
    _, lse = pages.anchored().attend(DEVICE, backend="triton", max_seqlen_k=1)
    assert (lse - pages.golden()[1]).abs().max() <= 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_the_smallest_normal_numbers(dtype):
    """Numbers just above the smallest normal one are rounded as normal numbers, not to nearest as subnormals are."""
    g = torch.Generator().manual_seed(1)
    a, b = (1 + torch.rand(2, 4 * ROWS, 64, generator=g)).to(dtype).float()
    size = torch.finfo(dtype).tiny
    x = (a + b) / 2 * (1 + 1e-6 * torch.rand(4 * ROWS, 1, generator=g)) * size
    out = torch.empty(x.shape, dtype=dtype, device=DEVICE)
    rows_kernel[(4,)](x.to(DEVICE), out, 64, 64, ROWS, dropped_bits("unbiased", dtype), False)
    expected = round_unbiased(x, dtype)
    assert not torch.equal(expected, x.to(dtype).float())
    assert torch.equal(out.cpu(), expected.to(dtype))


def test_gradients_of_keys_without_the_bias_that_have_the_weight():
    """The centre of keys rounds no key.

    Four keys are near 0 in a column where all others have 1024. They have all the weight, and their small
    differences decide its distribution.
    """
    q, k, v = normal_qkv((2, 1), (40, 200), 32)
    q[..., 0], k[..., 0] = -512.0, 1024.0
    k[..., 50:54, 0] = 0.01 * torch.randn(4, generator=torch.Generator().manual_seed(3)).half()
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(9)).half()
    result = by_kernels(grad, None, q.float(), k.float(), v.float(), None, False, 32**-0.5)
    for x, true in zip(result, definition(q, k, v, torch.float64, grad), strict=True):
        assert max_error(x, true) <= 2.0**-8 * true.abs().max()
