"""The kernel of few keys agrees with FP64, alone and with anchors; agreement.py states the bound."""

import pytest
import torch
from triton.runtime.errors import InterpreterError

import pasa
from pasa.ops.attention.call import Call
from pasa.ops.attention.options import AttentionOptions
from pasa.ops.attention.triton import split_kernel
from pasa.ops.attention.triton.kernel_call import KernelCall
from pasa.ops.attention.triton.short import launch
from pasa.ops.attention.triton.short.launch import is_short, tile_for
from tests.inputs import DEVICE, normal_qkv, pairwise, short_prompts
from tests.ops.attention.triton.agreement import check, on_device

SHORT = [  # heads, (Sq, Skv), D: one tile, several tiles, as many keys as the kernel takes, and one more
    ((2, 2), (25, 25), 64), ((4, 2), (7, 1), 64), ((2, 1), (150, 33), 80), ((2, 2), (3, 16), 256),
    ((2, 2), (40, 17), 256), ((2, 1), (5, 64), 64), ((2, 1), (5, 65), 64), ((2, 2), (70, 32), 128),
    ((2, 2), (70, 33), 128),
]  # fmt: skip


KINDS = ["none", "causal", "bool", "float", "causal row"]
HELD = launch.HELD, 0  # elements of the keys of one block; with 0, more than 64 keys take several blocks


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize(("shape", "bias", "kind"), pairwise(SHORT, (0, 300), KINDS), ids=str)
def test_short_keys(shape, bias, kind, held, monkeypatch):
    """Few keys are right, as in video models, which attend over 25 frames at every pixel and over single tokens."""
    monkeypatch.setattr(launch, "HELD", held)
    check_few_keys(shape, bias, kind)


def check_few_keys(shape, bias, kind):
    """Check a call under a mask of some kind. Scores of the bias exceed FP16 and FP32's exact integers."""
    heads, lengths, dim = shape
    q, k, v = normal_qkv(heads, lengths, dim, batch=2)
    g = torch.Generator().manual_seed(5)
    q[..., :8] += bias
    k[..., :8] += bias
    how = {"is_causal": kind.startswith("causal")}
    if kind == "bool":
        how["attn_mask"] = torch.rand(2, 1, *lengths, generator=g) < 0.6
    if kind == "float":
        how["attn_mask"] = torch.randn(heads[0], *lengths, generator=g)
    if kind == "causal row":
        how["attn_mask"] = torch.rand(2, 1, 1, lengths[1], generator=g) < 0.6
    check(q, k, v, "exact", **how)


PROMPTS = [  # heads, (Sq, Skv), D: fewer rows than keys, more, as many, several heads in a tile
    ((2, 1), (40, 130), 64), ((4, 2), (150, 65), 80), ((2, 2), (256, 256), 128), ((1, 1), (70, 120), 256),
    ((8, 2), (33, 250), 32),
]  # fmt: skip


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize(("shape", "bias", "kind"), pairwise(PROMPTS, (0, 300), KINDS), ids=str)
def test_short_prompts(shape, bias, kind, held, monkeypatch):
    """Prompts of some blocks of keys are right where no multiprocessor has more than two tiles to do."""
    monkeypatch.setattr(launch, "HELD", held)
    with short_prompts(True):
        call = Call(*on_device(*normal_qkv(shape[0], shape[1], shape[2], batch=2)), 1.0)
        assert is_short(KernelCall.of(call))
        check_few_keys(shape, bias, kind)


@pytest.mark.parametrize("keys", [65, 100, 200])
@pytest.mark.parametrize(("bias", "kind", "dim"), pairwise((0, 300), KINDS, (64, 128)), ids=str)
def test_tiles_of_more_rows_hold_all_keys_of_a_prompt(bias, kind, dim, keys, monkeypatch):
    """Two programs share a multiprocessor, or one that has more rows has it for itself."""
    places, block_n = (8, 128) if keys <= 128 else (16, 256)
    with short_prompts(True), monkeypatch.context() as patch:
        patch.setattr(launch, "processors", lambda _: places)
        tile, _ = tile_for(dim, keys, 4, 100, places, launch.HELD)
        assert (tile.block_m, tile.block_n) == (32, block_n)
        check_few_keys(((2, 2), (100, keys), dim), bias, kind)


@pytest.mark.skipif(DEVICE != "cpu", reason="replaces a device function, which only the interpreter looks up")
@pytest.mark.parametrize("bias", [300, -300])
@pytest.mark.parametrize(("rows", "keys"), [(1, 40), (3, 300), (70, 30)])
def test_few_keys_with_a_bias_need_one_anchor(rows, keys, bias, monkeypatch):
    """An anchor for all keys is enough, and no block gets one of its own."""
    monkeypatch.delattr(split_kernel, "anchored_scores")
    q, k, v = normal_qkv((2, 1), (rows, keys), 64)
    q[..., :8] += 300
    k[..., :8] += bias
    check(q, k, v, "exact")
    q[..., 20] *= 100  # now one anchor is not enough
    k[..., 20] *= 100
    with pytest.raises(InterpreterError, match="anchored_scores"):
        pasa.attention(q, k, v, backend="triton")


@pytest.mark.skipif(DEVICE != "cpu", reason="replaces a device function, which only the interpreter looks up")
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize(("heads", "rows", "dim"), [((1, 1), 120, 256), ((4, 1), 1, 128)])
def test_a_mask_over_the_last_keys_needs_one_anchor(kind, heads, rows, dim, monkeypatch):
    """Story: tiles looked for the bias in the last keys, which masks hide, and every such tile started again.

    Masks with causality hide them from all tiles but the last, and static caches have slots that are not filled.
    """
    monkeypatch.delattr(split_kernel, "anchored_scores")
    monkeypatch.setattr(launch, "HELD", 0)
    q, k, v = normal_qkv(heads, (rows, 120), dim, batch=2)
    q[..., :8] += 300
    k[..., :8] += 300
    k[:, :, 100:] = 0.0  # no row sees these slots
    o_n = torch.arange(120)
    seen = o_n <= (torch.arange(rows) if rows > 1 else torch.tensor([60]))[:, None]
    seen = (seen & (o_n >= torch.tensor([33, 0])[:, None, None]) & (o_n < 100))[:, None]
    mask = seen if kind == "bool" else torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    with short_prompts(True):
        check(q, k, v, "exact", attn_mask=mask)


@pytest.mark.skipif(DEVICE != "cpu", reason="replaces a device function, which only the interpreter looks up")
@pytest.mark.parametrize("keys", [128, 300])
@pytest.mark.parametrize("small", [0.0, 0.005, 0.03])
def test_a_column_of_small_steady_keys_needs_no_other_anchors(small, keys, monkeypatch):
    """Story: its anchor gave a unit beyond FP16, and all keys of a biased call counted as rounded."""
    monkeypatch.delattr(split_kernel, "anchored_scores")
    q, k, v = normal_qkv((1, 1), (16, keys), 64)
    q, k = q + 20, k + 300
    k[..., 5] = small
    check(q, k, v, "exact")


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("dim", [64, 128])
def test_a_key_that_other_tiles_see_changes_no_bit_of_a_tile(dim, held, monkeypatch):
    """The first row alone sees key 46. Story: rows of all tiles got other anchors where that key is long."""
    monkeypatch.setattr(launch, "HELD", held)
    q, k, v = normal_qkv((1, 1), (64, 150), dim)
    q, k = q + 100, k + 300
    q[..., dim // 2 :] *= -1
    results = []
    for far in (300.0, 65504.0):
        k[:, :, 46] = far
        with short_prompts(True):
            tensors = on_device(q, k, v)
            results.append(pasa.attention(*tensors, window=(40, 0), backend="triton", return_lse=True))
    assert all(torch.equal(a[:, :, 16:], b[:, :, 16:]) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("batch", [1, 70])
def test_a_prompt_is_short_where_its_tiles_run_soon(batch):
    """The other sequences decide on it, unless the call must not depend on them."""
    q, k, v = (torch.empty(batch, 4, 100, 64, dtype=torch.float16, device=DEVICE) for _ in range(3))
    with short_prompts(True):
        assert is_short(KernelCall.of(Call(q, k, v, 1.0))) == (batch == 1)
        alone = Call(q, k, v, 1.0, options=AttentionOptions(batch_invariant=True))
        assert not is_short(KernelCall.of(alone))


@pytest.mark.parametrize(
    ("keys", "masked", "short"),
    [(128, False, True), (129, False, False), (129, True, True), (256, True, True), (257, True, False)],
)
def test_wide_heads_under_a_mask_are_short_for_longer(keys, masked, short):
    """Story: 4 x 2 heads of 135 tokens at D = 192 with a mask took three launches and 53 us, in one 21 us (H100)."""
    q = torch.empty(4, 2, keys, 192, dtype=torch.float16, device=DEVICE)
    mask = torch.ones(keys, keys, dtype=torch.bool, device=DEVICE) if masked else None
    with short_prompts(True):
        assert is_short(KernelCall.of(Call(q, q, q, 1.0, mask=mask))) == short


H100 = 132, 2**15  # multiprocessors, and elements of K that a program can hold


@pytest.mark.parametrize(("dim", "tallest"), [(64, 64), (160, 32)])
def test_a_grid_has_no_more_tiles_than_cuda_allows(dim, tallest):
    """More query rows than its second axis can have tiles are left to other kernels."""
    k = torch.empty(1, 1, 16, dim, dtype=torch.float16, device=DEVICE)
    for tiles in (65535, 65536):
        q = k[:, :, :1].expand(1, 1, tallest * tiles, dim)
        assert is_short(KernelCall.of(Call(q, k, k, 1.0))) == (tiles == 65535)


@pytest.mark.parametrize("cap", [None, 30.0])
@pytest.mark.parametrize("tensor", ["k", "v"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(("rows", "keys"), [(70, 3), (129, 17), (129, 100)])
def test_rows_before_the_first_key_beside_a_bad_one(rows, keys, bad, tensor, cap):
    """Tiles of rows that see no key load the first one; only the sink has weight there."""
    q, k, v = (x.half().to(DEVICE) for x in normal_qkv((1, 1), (rows, keys), 64))
    {"k": k, "v": v}[tensor][:, :, 0] = bad
    sinks = torch.full((1,), 0.5, device=DEVICE)
    with short_prompts(True):
        how = {"is_causal": True, "softcap": cap, "sinks": sinks, "return_lse": True, "backend": "triton"}
        out, lse = pasa.attention(q, k, v, **how)
    blind = rows - keys
    assert (out[:, :, :blind] == 0).all()
    assert torch.allclose(lse[:, :, :blind], sinks[:, None])
    assert out[:, :, blind:].isnan().all()
    assert lse[:, :, blind:].isnan().all() == (tensor == "k")


@pytest.mark.parametrize("invariant", [False, True])
def test_a_graph_divides_fewer_keys(invariant, monkeypatch):
    """A batch-invariant call gives the same bits in a graph and outside."""
    monkeypatch.setattr(launch, "capturing", lambda _: True)
    options = AttentionOptions(batch_invariant=invariant)
    for keys, short in ((256, True), (257, invariant), (384, invariant), (385, False)):
        q, k = (torch.empty(1, 4, n, 64, dtype=torch.float16, device=DEVICE) for n in (1, keys))
        assert is_short(KernelCall.of(Call(q, k, k, 1.0, options=options))) == short


@pytest.mark.parametrize("captured", [False, True])
def test_wide_heads_divide_the_keys_that_no_program_holds(captured, monkeypatch):
    """Story: a step over 32 keys of 192 elements took 3 us, so 256 keys took twice as long as three launches (H100)."""
    monkeypatch.setattr(launch, "capturing", lambda _: captured)
    for keys, short in ((128, True), (129, False), (256, False)):
        q, k = (torch.empty(1, 4, n, 192, dtype=torch.float16, device=DEVICE) for n in (1, keys))
        assert is_short(KernelCall.of(Call(q, k, k, 1.0))) == short


def test_small_tiles_where_all_run_at_once():
    """Tiles are the smallest that all find a free multiprocessor; a call that must not depend on that has none."""
    small, _ = tile_for(128, 300, 8, 256, *H100)
    middle, _ = tile_for(128, 257, 16, 256, *H100)
    large, crowded = tile_for(128, 200, 64, 256, *H100)
    assert (small.block_m, small.warps, small.stages) == (16, 4, 3)
    wide, _ = tile_for(256, 100, 2, 256, *H100)
    decoding, _ = tile_for(128, 60, 8, 1, *H100)
    assert (wide.warps, decoding.warps) == (8, 8)  # eight where few rows, or wide ones, leave four waiting
    assert (middle.block_m, large.block_m, crowded) == (32, 64, False)
    over_few_keys, _ = tile_for(128, 128, 16, 256, *H100)  # two a multiprocessor
    assert (over_few_keys.block_m, over_few_keys.warps) == (16, 4)
    alone, waits = tile_for(128, 200, 1, 256, 0, H100[1])
    assert (alone.block_m, waits) == (64, True)


@pytest.mark.parametrize(
    ("pad", "keys", "pairs", "expected"),
    [
        (64, 300, 8, (64, 4, 3)),
        (128, 300, 8, (64, 4, 2)),  # 3 stages of 32 KiB are more than 99 KiB with the rest
        (128, 200, 300, (32, 4, 2)),  # programs wait for others, which need shared memory, too
        (256, 200, 8, (32, 8, 2)),
        (64, 60, 8, (64, 8, 1)),
    ],
)
def test_few_rows_take_few_steps(pad, keys, pairs, expected):
    tile, _ = tile_for(pad, keys, pairs, 4, *H100)
    assert (tile.block_n, tile.warps, tile.stages) == expected
    assert 2 * tile.stages * 2 * tile.block_n * pad <= 96 * 1024


@pytest.mark.parametrize(
    ("pad", "keys", "pairs", "held", "expected"),
    [
        (64, 200, 8, 2**14, (256, 8, 1)),
        (128, 200, 8, 2**15, (256, 8, 1)),
        (128, 200, 8, 2**14, (64, 4, 2)),  # K and V would take 128 KiB
        (128, 65, 8, 2**14, (128, 8, 1)),
        (256, 100, 8, 2**15, (128, 8, 1)),
        (256, 33, 8, 2**14, (64, 8, 1)),
        (256, 64, 200, 2**15, (64, 4, 1)),
        (256, 64, 300, 2**15, (32, 4, 2)),  # programs wait for others
        (64, 100, 200, 2**15, (128, 4, 1)),  # two programs share a multiprocessor
        (128, 100, 200, 2**15, (128, 4, 1)),
        (128, 100, 200, 2**14, (64, 4, 2)),  # and its shared memory
        (64, 200, 200, 2**15, (64, 4, 3)),
    ],
)
def test_a_program_alone_on_its_multiprocessor_holds_all_keys(pad, keys, pairs, held, expected):
    tile, _ = tile_for(pad, keys, pairs, 4, 132, held)
    assert (tile.block_n, tile.warps, tile.stages) == expected
    assert 4 * tile.stages * tile.block_n * pad <= (96 if held == 2**14 else 160) * 1024


@pytest.mark.parametrize(
    ("pad", "keys", "pairs", "rows", "expected"),
    [
        (64, 128, 8, 128, (16, 128, 8, 1)),
        (64, 128, 64, 128, (32, 128, 4, 1)),  # two programs share a multiprocessor
        (128, 128, 64, 128, (32, 128, 4, 1)),
        (64, 130, 64, 128, (64, 32, 4, 3)),
        (128, 256, 16, 250, (32, 256, 8, 1)),
        (256, 128, 64, 128, (32, 32, 4, 2)),  # and its shared memory
        (64, 128, 512, 128, (64, 32, 4, 2)),
    ],
)
def test_programs_of_more_rows_hold_all_keys_as_well(pad, keys, pairs, rows, expected):
    tile, _ = tile_for(pad, keys, pairs, rows, *H100)
    assert (tile.block_m, tile.block_n, tile.warps, tile.stages) == expected


@pytest.mark.parametrize(("rows", "keys"), [(1, 134), (1, 326), (3, 292)])
def test_long_keys_before_short_ones(rows, keys):
    """The last keys need no anchor. Those before them do: their scores differ by a few of 160,000 nats.

    The first block has none but long keys, so its own anchor makes them short.
    """
    q, k, v = normal_qkv((2, 1), (rows, keys), 64)
    q[..., :8] = 400
    k[..., :-70, :8] = 400
    check(q, k, v, "exact")


@pytest.mark.parametrize(("rows", "keys"), [(1, 100), (3, 300)])
def test_an_anchor_of_the_last_keys_that_would_round_others(rows, keys):
    """Less the anchor, the first keys would be short enough, but rounded: by 0.16 nats of their scores."""
    q, k, v = normal_qkv((2, 1), (rows, keys), 64)
    q[..., :8] = torch.tensor([50.0, -50.0]).repeat(4)
    k[..., :8] = 50
    k[..., :-70, :8] = 15.9 + 0.1 * torch.rand(k[..., :-70, :8].shape, generator=torch.Generator().manual_seed(7))
    check(q, k, v, "exact")


@pytest.mark.parametrize(("rows", "keys"), [(1, 100), (3, 300)])
@pytest.mark.parametrize("anchor", [1.0, 32.0, -1024.0])
def test_an_anchor_that_rounds_a_key_to_half_of_it(rows, keys, anchor):
    """A key just below half the anchor, a power of two, leaves a rounded difference of half the anchor.

    The ten keys that it rounds score half a nat too much then.
    """
    q, k, v = normal_qkv((2, 1), (rows, keys), 64)
    q[..., :8] = torch.tensor([3840.0 / anchor] * 4 + [-3840.0 / anchor] * 4)
    q[..., 8:], k[..., 8:] = 0, 0
    k[..., :8] = anchor
    k[..., :20, :8] = anchor / 2
    k[..., :10, :4] *= 1 - 2.0**-11
    check(q, k, v, "exact")


@pytest.mark.parametrize("far", [25.0, 60000.0, torch.nan])
def test_a_key_that_no_row_sees_changes_no_bit_of_few_keys(far):
    """The keys that rows see share a bias, but are short enough to need no anchor, which would change bits."""
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 2, n, 32, generator=g).to(DEVICE) for n in (6, 20, 20))
    q[..., 1] = 800
    k[..., 1] = 10
    mask = torch.ones(6, 20, dtype=torch.bool, device=DEVICE)
    mask[:, 19] = False
    q, k, v = q.half(), k.half(), v.half()
    hidden = k.clone()
    hidden[..., 19, 1] = far
    expected, found = (
        pasa.attention(q, each, v, attn_mask=mask, return_lse=True, backend="triton") for each in (k, hidden)
    )
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("lengths", [(25, 25), (40, 1)])
@pytest.mark.parametrize("tensor", ["q", "k", "v"])
@pytest.mark.parametrize("causal", [False, True])
def test_bad_numbers_among_short_keys(lengths, tensor, causal):
    q, k, v = normal_qkv((2, 1), lengths, 64, batch=2)
    {"q": q, "k": k, "v": v}[tensor][1, 0, lengths[1] // 2, 3] = torch.inf
    how = {"is_causal": causal, "return_lse": True}
    expected, expected_lse = pasa.attention(q, k, v, backend="reference", **how)
    out, lse = pasa.attention(*on_device(q, k, v), backend="triton", **how)
    assert torch.equal(out.cpu().isnan(), expected.isnan())
    assert torch.equal(lse.cpu().isnan(), expected_lse.isnan())
    assert torch.allclose(out.cpu(), expected, atol=0.01, equal_nan=True)
