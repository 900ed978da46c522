"""The Triton kernels agree with FP64, and with the reference's emulation of the same mode.

They run on a GPU where there is one, in Triton's interpreter elsewhere. agreement.py states the bound.
"""

import itertools

import pytest
import torch

import pasa
from pasa import PasaConfig
from pasa.ops.attention.triton.kernel_call import KernelCall
from pasa.ops.attention.triton.prefill.mask_launch import ALIGNED, ORDERED, MaskTiles
from tests.inputs import (
    DEVICE,
    HOPPER,
    ODD_LENGTHS,
    biased_qkv,
    max_error,
    normal_qkv,
    pairwise,
    part_blocks,
    portable_kernel,
    rmse,
    short_prompts,
)
from tests.ops.attention.triton.agreement import CONFIGS, HALF_ULP, check, on_device

ARITHMETICS = [*((name, 64) for name in CONFIGS), ("exact", 128), ("fp32", 128)]


@pytest.fixture(autouse=True, params=["portable", "hopper"] if HOPPER else ["portable"])
def kernel(request):
    """Select the kernel of prompts: on Hopper its own and the portable one in turn, elsewhere the portable one."""
    with portable_kernel() if request.param == "portable" else short_prompts(False):
        yield


@pytest.mark.parametrize(
    ("arithmetic", "causal", "lengths"),
    pairwise(ARITHMETICS, (False, True), ODD_LENGTHS),
    ids=lambda x: f"{x[0]}x{x[1]}" if isinstance(x, tuple) else None,
)
def test_odd_lengths_with_grouped_heads(arithmetic, causal, lengths):
    """Odd lengths and grouped heads are right; with Sq > Skv the first causal rows see nothing and give 0 and -inf.

    Loops of head dim 128 overlap (tiles.py).
    """
    name, dim = arithmetic
    check(*normal_qkv((4, 2), lengths, dim), name, is_causal=causal)


@pytest.mark.parametrize("name", ["exact", "fp32"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keys", ["grow", "jump", "fall", "far"])
def test_first_block_unlike_the_rest(name, dim, causal, keys):
    """A first block unlike the rest does not change the accuracy.

    Later scores are 45 nats higher, along the keys or at once, or lower; or all are so far from 0 that the fast
    pass gives up.
    """
    q, k, v = normal_qkv((2, 1), (150, 330), dim)
    nats = {"grow": torch.linspace(0, 45, 330), "jump": 45.0 * (torch.arange(330) >= 64)}
    nats |= {"fall": -nats["jump"], "far": nats["jump"] + 4000}
    q[..., 0] = 16
    k[..., 0] = nats[keys] * dim**0.5 / 16
    check(q, k, v, name, is_causal=causal)


@pytest.mark.parametrize(
    ("name", "tensor"), [("exact", "q"), ("exact", "k"), ("exact", "v"), ("fp32", "q"), ("fp32", "v")]
)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keys", [200, 190])
def test_bad_numbers_reach_what_they_reach_in_the_reference(name, tensor, dim, causal, keys):
    """NaN and infinity reach the same outputs as in the reference.

    With fewer keys than rows the first causal rows see nothing, and row 10 one key. Its scores are all -inf,
    which must not look masked out.
    """
    q, k, v = normal_qkv((2, 1), (200, keys), dim)
    k[..., 3].abs_()
    bad = {"q": q, "k": k, "v": v}[tensor]
    bad[:, 0, 5, 1], bad[:, 0, 10, 3], bad[:, 0, 150, 2] = torch.nan, -torch.inf, torch.inf
    how = {"is_causal": causal, "config": CONFIGS[name], "return_lse": True}
    expected, expected_lse = pasa.attention(q, k, v, backend="reference", **how)
    out, lse = pasa.attention(*on_device(q, k, v), backend="triton", **how)
    assert torch.equal(out.cpu().isnan(), expected.isnan())
    assert torch.equal(lse.cpu().isnan(), expected_lse.isnan())
    assert torch.allclose(out.cpu(), expected, atol=0.01, equal_nan=True)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dim", [16, 64, 72, 80, 96, 128, 160, 256])
def test_head_dims(name, dim):
    check(*normal_qkv((2, 2), (65, 140), dim), name)


@pytest.mark.parametrize(
    ("arithmetic", "kind", "shape"),
    pairwise(
        [(name, lengths) for name in CONFIGS for lengths in ((40, 150), (3, 450))],  # prefill and decode
        ("bool", "float"),
        [(2, 4, 40, 150), (2, 1, 1, 150), (40, 1), (150,)],  # of 40 rows and 150 keys
    ),
    ids=str,
)
def test_masks_broadcast(arithmetic, kind, shape):
    name, (rows, keys) = arithmetic
    q, k, v = normal_qkv((4, 2), (rows, keys), 32, batch=2)
    shape = tuple({40: rows, 150: keys}.get(n, n) for n in shape)
    g = torch.Generator().manual_seed(3)
    keep = torch.rand(shape, generator=g) < 0.6
    mask = keep if kind == "bool" else torch.where(keep, torch.randn(shape, generator=g), -torch.inf)
    check(q, k, v, name, attn_mask=mask)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("bias", [0, 200])
def test_masks_with_tiles_that_are_whole_hidden_and_torn(kind, bias):
    """Left padding, the causal band and a hole may meet in one mask; a bias of 200 puts all tiles in the exact pass."""
    rows, keys = 210, 330
    q, k, v = normal_qkv((4, 2), (rows, keys), 64, batch=2)
    q[..., :8] += bias
    k[..., :8] += bias
    seen = torch.arange(keys) <= torch.arange(rows)[:, None] + keys - rows
    mask = seen.expand(2, 1, rows, keys).clone()
    mask[1, ..., :140] = False
    mask[0, :, 100:200, 70:75] = False
    if kind == "float":
        mask = torch.zeros(2, 1, rows, keys, dtype=torch.float16).masked_fill(~mask, -torch.inf)
        mask[0, :, 64:128, 0:64] = 0.5
    check(q, k, v, "exact", attn_mask=mask)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_mask_tiles_are_sorted(causal, kind):
    """A mask tile is whole if every row sees all its keys and nothing is added; the ragged last tile never is."""
    q, k, v = on_device(*normal_qkv((2, 2), (100, 200), 16, batch=2))
    keep = torch.ones(2, 1, 100, 200, dtype=torch.bool, device=DEVICE)
    keep[1, :, :, :70] = False
    mask = keep.byte() if kind == "bool" else torch.zeros(keep.shape, device=DEVICE).masked_fill(~keep, -torch.inf)
    if kind == "float":
        mask[0, 0, 99, 0] = 0.5
    seen = keep & torch.ones(100, 200, dtype=torch.bool, device=DEVICE).tril(100) if causal else keep
    plain = seen & (mask == (1 if kind == "bool" else 0))
    result = MaskTiles.of(KernelCall(q, k, v, 1.0, is_causal=causal, mask=mask.expand(2, 2, 100, 200)), 64, 64)
    assert torch.equal(result.visible.flatten(1, 2).any(1), seen[:, 0].any(1))
    for batch, tile in ((batch, tile) for batch in range(2) for tile in range(2)):
        rows = slice(64 * tile, 64 * tile + 64)
        parts = [slice(64 * n, 64 * n + 64) for n in range(4)]
        whole = [n for n in range(3) if plain[batch, 0, rows, parts[n]].all()]
        torn = [n for n in range(4) if n not in whole and seen[batch, 0, rows, parts[n]].any()]
        assert result.counts[batch, 0, tile].tolist() == [len(whole), len(torn)]
        order = result.order[batch, 0, tile].tolist()
        assert order[: len(whole)] == whole
        assert order[4 - len(torn) :] == torn[::-1]


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_more_mask_tiles_than_are_ordered_together(kind):
    """Whole and torn tiles of several blocks stay in order; some keys are seen only by the last row of the last head.

    The last program has fewer key tiles than the others, and the last tile fewer keys.
    """
    tile, rows, keys = 16, 20, 16 * (ORDERED + 9) + 5
    g = torch.Generator().manual_seed(0)
    state = torch.randint(3, (2, 2, keys // tile + 1), generator=g).repeat_interleave(tile, 2)[:, :, None, :keys]
    keep = (state == 2) | ((state == 1) & (torch.rand(2, 2, rows, keys, generator=g) < 0.1))
    keep[1, 1, rows - 1, keys - 3 :] = True
    q, k, v = on_device(*normal_qkv((2, 2), (rows, keys), 16, batch=2))
    keep = keep.to(DEVICE)
    mask = keep.byte() if kind == "bool" else torch.zeros(keep.shape, device=DEVICE).masked_fill(~keep, -torch.inf)
    result = MaskTiles.of(KernelCall(q, k, v, 1.0, mask=mask), tile, tile)
    for batch, head, row in itertools.product(range(2), range(2), range(2)):
        part = keep[batch, head, tile * row : tile * row + tile]
        assert torch.equal(result.visible[batch, head, row].bool(), part.any(0))
        padded = torch.nn.functional.pad(part, (0, -keys % tile)).unflatten(1, (-1, tile)).transpose(0, 1).flatten(1)
        whole, seen = padded.all(1), padded.any(1)
        torn = (seen & ~whole).nonzero().flatten()
        assert result.counts[batch, head, row].tolist() == [int(whole.sum()), len(torn)]
        order = result.order[batch, head, row]
        assert torch.equal(order[: int(whole.sum())], whole.nonzero().flatten().int())
        assert torch.equal(order[len(order) - len(torn) :], torn.flip(0).int())


@pytest.mark.parametrize("shared", [(), (0,), (1,), (2,), (0, 1), (0, 1, 2)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float16])
def test_mask_tiles_of_a_mask_that_repeats(shared, dtype):
    """A mask that is expanded along batch, heads or rows has the tiles of one that is written out."""
    q, k, v = on_device(*normal_qkv((2, 2), (50, 150), 16, batch=2))
    shape = [1 if axis in shared else size for axis, size in enumerate((2, 2, 50, 150))]
    keep = torch.rand(shape, generator=torch.Generator().manual_seed(len(shared))) > 0.02
    keep[..., :64] = True
    keep[..., 64:96] = False
    mask = (keep.byte() if dtype == torch.bool else torch.zeros(shape).half().masked_fill(~keep, -torch.inf)).to(DEVICE)
    full = mask.expand(2, 2, 50, 150)
    one, other = (MaskTiles.of(KernelCall(q, k, v, 1.0, mask=x), 32, 32) for x in (full, full.contiguous()))
    strides = one.strides()
    for batch, head, row in itertools.product(range(2), range(2), range(2)):
        at = batch * strides[0] + head * strides[1] + row
        whole, torn = counts = one.counts.flatten(0, 2)[at].tolist()
        assert counts == other.counts[batch, head, row].tolist()
        lists = one.order.flatten(0, 2)[at], other.order[batch, head, row]
        assert torch.equal(*(each[:whole] for each in lists))
        assert torch.equal(*(each[len(each) - torn :] for each in lists))
    assert torch.equal(one.visible, other.visible)


@pytest.mark.parametrize("kind", ["odd length", "odd start", "row of keys", "column of rows", "transposed", "aligned"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float16, torch.float32])
def test_a_mask_is_copied_where_its_rows_are_not_aligned(kind, dtype):
    """Story: masked prompts of lengths other than multiples of 16 took three times as long, for addresses of the mask.

    A mask of one row stays one row, and one of one column is not copied: written out, either would be large.
    """
    keys = 144 if kind in ("odd start", "aligned") else 150
    q, k, v = on_device(*normal_qkv((2, 2), (50, keys), 16, batch=2))
    shape = {"row of keys": (2, 1, 1, keys), "column of rows": (2, 1, 50, 1)}.get(kind, (2, 1, 50, keys))
    keep = torch.rand(shape, generator=torch.Generator().manual_seed(0)) > 0.4
    mask = keep.byte() if dtype == torch.bool else torch.zeros(shape, dtype=dtype).masked_fill(~keep, -torch.inf)
    mask = mask.to(DEVICE)
    if kind == "odd start":
        mask = torch.cat([mask.flatten()[:1], mask.flatten()])[1:].view(shape)
    if kind == "transposed":
        mask = mask.transpose(2, 3).contiguous().transpose(2, 3)
    full = mask.expand(2, 2, 50, keys)
    copy = MaskTiles.of(KernelCall(q, k, v, 1.0, mask=full), 32, 32).mask
    assert torch.equal(copy, full)
    if kind in ("aligned", "column of rows"):
        assert copy.data_ptr() == full.data_ptr()
    else:
        assert copy.stride(3) == 1
        assert all(stride % ALIGNED == 0 for stride in (copy.data_ptr(), *copy.stride()[:3]))
    assert copy.untyped_storage().nbytes() <= 2 * 50 * 160 * copy.element_size()
    if kind == "row of keys":
        assert copy.stride(2) == 0
    golden, _ = pasa.golden_attention(q, k, v, attn_mask=mask.bool() if dtype == torch.bool else mask)
    out = pasa.attention(q, k, v, attn_mask=mask.bool() if dtype == torch.bool else mask, backend="triton")
    assert (out.double() - golden.to(DEVICE)).abs().max() < 4e-3


@pytest.mark.parametrize("name", ["exact", "paper"])
@pytest.mark.parametrize("rows", [70, 4])
def test_left_padding_and_causal(name, rows):
    """Left padding and the causal band combine; the padded entry's first rows see only padding."""
    q, k, v = normal_qkv((4, 2), (rows, 150), 64, batch=2)
    mask = torch.ones(2, 1, 1, 150, dtype=torch.bool)
    mask[1, ..., :147] = False
    check(q, k, v, name, attn_mask=mask, is_causal=True)


def test_the_frame_of_a_padded_sequence_is_the_anchor_of_its_first_keys():
    """Scores count from the anchor of the first block that a row sees, which padding leaves in the second block.

    Story: where the first block was padding, its anchor was 0, and offsets were as large as the scores.
    """
    q, k, v = normal_qkv((2, 1), (70, 300), 64)
    q[..., :8], k[..., :8] = 100.0, 3001.0  # 300,000 nats, at which FP32 keeps one or two decimals
    mask = torch.ones(70, 300, dtype=torch.bool).tril(230)
    mask[:, :140] = False
    mask[40:, :260] = False
    part_blocks(q[..., 8:], k[..., 8:], 100.0, 3001.0)
    check(q, k, v, "exact", attn_mask=mask)


@pytest.mark.parametrize("rows", [1, 3, 16, 70])
def test_many_splits_and_frames(rows):
    """Splits of a decode may have different frames: as the bias changes along the keys, each has its own anchor."""
    q, k, v = normal_qkv((4, 1), (rows, 1300), 64)
    q[..., :8] += 40
    k[..., :8] += torch.linspace(-300, 300, 1300).unsqueeze(-1)
    check(q, k, v, "exact", is_causal=True)


@pytest.mark.parametrize("bias", [32, 200, 2000])
@pytest.mark.parametrize("rows", [2, 129])
def test_bias_that_all_keys_share_never_enters_a_rounded_number(bias, rows):
    """A bias shared by all keys never enters a rounded number.

    So the error is at most a tenth above that of FP32 flash attention, and below it at large bias.
    """
    q, k, v = biased_qkv(bias, seed=1, length=400)
    q = q[:, :, :rows]
    golden, _ = pasa.golden_attention(q, k, v)
    out = pasa.attention(*on_device(q, k, v), backend="triton").cpu()
    fp32 = pasa.attention(q, k, v, config=PasaConfig(precision="fp32"), backend="reference")
    assert rmse(out, golden) <= 1.1 * max(rmse(fp32, golden), 2.0**-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_dtypes_are_converted_first(dtype):
    q, k, v = (x.to(dtype) for x in on_device(*normal_qkv((2, 1), (33, 130), 64)))
    out = pasa.attention(q, k, v, backend="triton")
    assert torch.equal(out, pasa.attention(q.half(), k.half(), v.half(), backend="triton").to(dtype))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_value_beyond_fp16_is_reported_as_on_the_reference(name):
    tensors = {n: torch.ones(1, 1, 4, 16, dtype=torch.bfloat16, device=DEVICE) for n in "qkv"}
    tensors[name][0, 0, 2, 3] = 70000.0
    with pytest.raises(ValueError, match=rf"^{name} has 1 values beyond the FP16 range \(largest 70144 > 65504\)"):
        pasa.attention(**tensors, backend="triton")


def test_layouts_and_strides_agree():
    q, k, v = on_device(*normal_qkv((4, 2), (33, 70), 64))
    expected = pasa.attention(q, k, v, is_causal=True, backend="triton")
    last = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    out = pasa.attention(*last, is_causal=True, tensor_layout="NHD", backend="triton")
    assert torch.equal(out.transpose(1, 2), expected)
    wide = [torch.cat([x, x], -1)[..., :64] for x in (q, k, v)]
    assert torch.equal(pasa.attention(*wide, is_causal=True, backend="triton"), expected)
    turned = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v)]  # last stride is not 1
    assert torch.equal(pasa.attention(*turned, is_causal=True, backend="triton"), expected)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("causal", [False, True])
def test_varlen_equals_sequences_one_by_one(name, causal):
    """Packed sequences equal single calls: one without queries, one without keys, and lengths that no block divides."""
    q, _, _ = normal_qkv((4, 2), (140, 1), 64)
    _, k, v = normal_qkv((4, 2), (1, 400), 64, seed=1)
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
    cu_q, cu_k = torch.tensor([0, 5, 5, 75, 76, 140]), torch.tensor([0, 70, 100, 330, 330, 400])
    config = CONFIGS[name]
    golden, golden_lse = torch.zeros_like(q, dtype=torch.float64), torch.full((140, 4), -torch.inf, dtype=torch.float64)
    for i in range(5):
        a, b = slice(*cu_q[i : i + 2].tolist()), slice(*cu_k[i : i + 2].tolist())
        if a.start < a.stop and b.start < b.stop:
            one = (x.transpose(0, 1).unsqueeze(0) for x in (q[a], k[b], v[b]))
            o, s = pasa.golden_attention(*one, is_causal=causal)
            golden[a], golden_lse[a] = o[0].transpose(0, 1), s[0].T
    how = {"is_causal": causal, "config": config, "return_lse": True}
    emulated, _ = pasa.attention_varlen(q, k, v, cu_q, cu_k, 70, 230, backend="reference", **how)
    out, lse = pasa.attention_varlen(*on_device(q, k, v, cu_q, cu_k), 70, 230, backend="triton", **how)
    out, lse = out.cpu(), lse.cpu()
    assert max_error(out, golden) <= 2 * max_error(emulated, golden) + HALF_ULP
    assert torch.equal(lse > -torch.inf, golden_lse > -torch.inf)
    with pytest.raises(ValueError, match="does not rise from 0"):
        pasa.attention_varlen(*on_device(q, k, v, cu_q.flip(0), cu_k), 70, 230, backend="triton", **how)


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("name", ["exact", "paper"])
def test_block_sizes(block, name):
    q, k, v = normal_qkv((2, 1), (33, 300), 64)
    k[..., :8] += 30
    golden, _ = pasa.golden_attention(q, k, v)
    config = PasaConfig(recovery=name, block_k=block)
    emulated = pasa.attention(q, k, v, config=config, backend="reference")
    out = pasa.attention(*on_device(q, k, v), config=config, backend="triton").cpu()
    assert rmse(out, golden) <= 2 * rmse(emulated, golden) + 2.0**-13


@pytest.mark.parametrize("scale", [2.0**-80, 1e-6, 0.05, 37.0, 2.0**80])
@pytest.mark.parametrize("rows", [3, 40])
def test_any_scale(scale, rows):
    q, k, v = normal_qkv((2, 1), (rows, 140), 64)
    golden, _ = pasa.golden_attention(q, k, v, scale=scale)
    out = pasa.attention(*on_device(q, k, v), scale=scale, backend="triton").cpu()
    emulated = pasa.attention(q, k, v, scale=scale, backend="reference")
    assert max_error(out, golden) <= 2 * max_error(emulated, golden) + HALF_ULP


def test_what_a_backend_cannot_do_is_refused_by_name():
    q, k, v = on_device(*normal_qkv((1, 1), (4, 8), 300))
    with pytest.raises(NotImplementedError, match="head dim 300 is outside 1 to 256"):
        pasa.attention(q, k, v, backend="triton")
    with pytest.raises(NotImplementedError, match="block_k 100 is not among"):
        pasa.attention(q[..., :64], k[..., :64], v[..., :64], config=PasaConfig(block_k=100), backend="triton")


@pytest.mark.parametrize("rows", [70, 4])
def test_huge_scores_that_tie(rows):
    """Outputs stay within the range of the values if huge scores tie.

    Story: on a GPU a row's offset was summed in two layouts, in two orders. Scores of 10^10 nats that tie then
    had weights of 2 in all over a sum of 1. The interpreter has one layout, and runs two of the six heads.
    """
    g = torch.Generator().manual_seed(1500)
    q, k = (
        (torch.randint(0, 2, (1, 6, n, 72), generator=g) * 2 - 1) * torch.finfo(torch.float16).max for n in (rows, 900)
    )
    heads = slice(6 if DEVICE == "cuda" else 2)
    q, k, v = (x.half()[:, heads] for x in (q, k, torch.randn(1, 6, 900, 72, generator=g)))
    mask = torch.rand(900, generator=g) < 0.1  # blocks with one key, which is its own anchor
    out = pasa.attention(
        *on_device(q, k, v), attn_mask=mask.to(DEVICE), config=PasaConfig(block_k=32), backend="triton"
    ).cpu()
    seen = v[:, :, mask]
    low, high = (x.values.float().unsqueeze(2) for x in (seen.min(2), seen.max(2)))
    slack = 2.0**-10 * float(seen.abs().max())
    assert (out.float() >= low - slack).all()
    assert (out.float() <= high + slack).all()


@pytest.mark.parametrize(("rows", "kv_heads", "hidden"), [(70, 2, 465), (4, 2, 465), (4, 1, 265)])
def test_padding_before_keys_with_a_bias(rows, kv_heads, hidden):
    """Padding before keys with a bias costs no accuracy.

    Story: scores were relative to the anchor of the first block, which is 0 if padding hides that block. Offsets
    were then as large as the scores, here 250,000 nats, and errors two to seven times those of the emulation,
    which drops keys that no query sees. The last case is decoded in splits, of which the first see nothing.
    """
    g = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, n, 64, generator=g) * 0.1
        for heads, n in ((2 * kv_heads, rows), (kv_heads, 700), (kv_heads, 700))
    )
    q[..., :8] += 500
    k[..., :8] += 500
    part_blocks(q[..., 8:], k[..., 8:], 500.0, 512.0)
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    seen = (torch.arange(700) >= hidden).expand(1, 1, rows, 700)
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT / 8
    true = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.double().repeat_interleave(2, 1)
    by_kernels = pasa.attention(*on_device(q, k, v), attn_mask=seen.to(DEVICE), backend="triton").cpu()
    emulated = pasa.attention(q, k, v, attn_mask=seen, backend="reference")
    assert rmse(by_kernels, true) <= 1.5 * rmse(emulated, true)
