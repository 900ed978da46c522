"""Tests of diagnostics: their counts, when they are recorded, and that recording changes no bit of the output."""

import dataclasses
import math

import pytest
import torch

import pasa
from pasa import PasaConfig
from pasa.diagnostics import AttentionRecord
from tests.inputs import normal_qkv


def recorded(q, k, v, **how):
    with pasa.record_diagnostics() as records:
        pasa.attention(q, k, v, **how)
    (record,) = records
    return record


def test_nothing_is_recorded_outside():
    q, k, v = normal_qkv((2, 1), (9, 20), 16)
    with pasa.record_diagnostics() as records:
        pass
    pasa.attention(q, k, v)
    assert records == []


def test_closing_the_inner_context_leaves_the_outer_open():
    """Closing the inner context leaves the outer one open.

    Story: two contexts without a record hold equal lists, and removal by equality closed the wrong one.
    """
    q, k, v = normal_qkv((2, 1), (9, 20), 16)
    with pasa.record_diagnostics() as outer:
        with pasa.record_diagnostics() as inner:
            pass
        pasa.attention(q, k, v)
    assert len(outer) == 1
    assert inner == []


@pytest.mark.parametrize("recovery", ["exact", "paper"])
def test_recording_changes_no_bit(by_reference, recovery):
    q, k, v = (x + 20 for x in normal_qkv((4, 2), (40, 300), 64))
    config = PasaConfig(recovery=recovery)
    plain = pasa.attention(q, k, v, is_causal=True, config=config)
    with pasa.record_diagnostics():
        assert torch.equal(pasa.attention(q, k, v, is_causal=True, config=config), plain)


@pytest.mark.parametrize("causal", [False, True])
def test_largest_score_over_visible_pairs(causal):
    q, k, v = normal_qkv((4, 2), (40, 300), 64, batch=2)
    mask = torch.rand(2, 1, 40, 300, generator=torch.Generator().manual_seed(0)) < 0.1
    scores = (q.double() @ k.double().repeat_interleave(2, 1).mT).abs()
    seen = mask & torch.ones(40, 300).bool().tril(260) if causal else mask
    expected = scores.masked_fill(~seen, 0).amax((-1, -2))
    record = recorded(q, k, v, attn_mask=mask, is_causal=causal)
    assert record.max_score_before.shape == (2, 4)
    torch.testing.assert_close(record.max_score_before, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("mode", ["inf", "saturate"])
def test_overflow_is_counted_where_it_is_stored(mode):
    q, k, v = (x + 22.6 for x in normal_qkv((2, 2), (40, 300), 128))
    stored = (q.float() @ k.float().mT).half()
    infinite, largest = torch.isinf(stored).sum((-1, -2)).double(), (stored == 65504).sum((-1, -2)).double()
    record = recorded(q, k, v, config=PasaConfig(precision="partial", overflow=mode))
    assert infinite.min() > 0
    assert torch.equal(record.nonfinite, infinite if mode == "inf" else torch.zeros_like(infinite))
    assert torch.equal(record.saturated, largest if mode == "inf" else largest + infinite)
    assert record.max_score_after.max() == (torch.inf if mode == "inf" else 65504)


def test_tiles():
    """Tiles are counted if a row sees them, and rescued only if their scores run away or have a float mask."""
    q, k, v = normal_qkv((1, 1), (96, 128), 64)
    config = PasaConfig(block_q=32, block_k=64)
    assert recorded(q, k, v, config=config).tiles.item() == 3 * 2
    q, k, v = (x[:, :, :96] for x in (q, k, v))
    assert recorded(q, k, v, config=config, is_causal=True).tiles.item() == 3 + 1
    assert recorded(q, k, v, config=config).rescued_tiles.item() == 0
    q[..., 0], k[..., 0] = 0, 0
    k[:, :, 70, 0], q[:, :, 40, 0] = 60, 60  # one large score, in tile (1, 1)
    assert recorded(q, k, v, config=config).rescued_tiles.item() == 1
    assert recorded(q, k, v, config=config, attn_mask=torch.zeros(1)).rescued_tiles.item() == 6  # all, for a float mask


def test_packed_sequences_are_joined():
    q, k, v = normal_qkv((2, 1), (30, 30), 64)
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    edges = torch.tensor([0, 10, 30])
    with pasa.record_diagnostics() as records:
        pasa.attention_varlen(*packed, edges, edges, 20, 20)
    parts = [recorded(*(x[:, :, a:b] for x in (q, k, v))) for a, b in ((0, 10), (10, 30))]
    assert torch.equal(records[0].max_score_before, torch.maximum(*(p.max_score_before for p in parts)))
    assert torch.equal(records[0].tiles, parts[0].tiles + parts[1].tiles)


FIELDS = [field.name for field in dataclasses.fields(AttentionRecord)]
CONFIGS = [
    *(PasaConfig(precision=precision) for precision in ("fp32", "partial", "fp16", "prescaled", "smooth_k")),
    *(PasaConfig(recovery=recovery, accumulate=low) for recovery in ("exact", "paper") for low in ("fp32", "fp16")),
    PasaConfig(overflow="saturate", block_q=48, block_k=96),
]


def same(one, other):
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in FIELDS)


def whole_numbers(lengths, dim=32, size=60, heads=(4, 2), seed=0):
    """Return integer q, k, v, for which q.k is exact in FP32 in any order of the sum."""
    g = torch.Generator().manual_seed(seed)
    shapes = (heads[0], lengths[0]), (heads[1], lengths[1]), (heads[1], lengths[1])
    return [torch.randint(-size, size + 1, (2, h, s, dim), generator=g).half() for h, s in shapes]


def test_nested_contexts_both_get_the_record():
    q, k, v = normal_qkv((2, 1), (9, 20), 16)
    with pasa.record_diagnostics() as outer:
        pasa.attention(q, k, v)
        with pasa.record_diagnostics() as inner:
            pasa.attention(2 * q, k, v)
        pasa.attention(3 * q, k, v)
    assert (len(outer), len(inner)) == (3, 1)
    assert outer[1] is inner[0]
    largest = [record.max_score_before.max() for record in outer]
    assert largest == sorted(set(largest))


def test_contexts_may_close_in_any_order():
    q, k, v = normal_qkv((1, 1), (9, 20), 16)
    first, second = pasa.record_diagnostics(), pasa.record_diagnostics()
    a, b = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    pasa.attention(q, k, v)
    second.__exit__(None, None, None)
    pasa.attention(q, k, v)
    assert (len(a), len(b)) == (0, 1)


def test_an_error_inside_closes_the_context():
    q, k, v = normal_qkv((1, 1), (9, 20), 16)
    with pytest.raises(ValueError, match="scale=-1"), pasa.record_diagnostics() as records:
        pasa.attention(q, k, v, scale=-1)
    pasa.attention(q, k, v)
    assert records == []


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("how", ["plain", "causal", "mask", "bias"])
def test_recording_changes_no_bit_of_any_arithmetic(by_reference, config, how):
    q, k, v = (x + 20 for x in normal_qkv((4, 2), (40, 200), 64, batch=2))
    keep = torch.rand(2, 1, 40, 200, generator=torch.Generator().manual_seed(1)) < 0.5
    bias = torch.where(keep, 0.5, -torch.inf)
    options = {"plain": {}, "causal": {"is_causal": True}, "mask": {"attn_mask": keep}, "bias": {"attn_mask": bias}}[
        how
    ]
    plain = pasa.attention(q, k, v, return_lse=True, config=config, **options)
    with pasa.record_diagnostics() as records:
        watched = pasa.attention(q, k, v, return_lse=True, config=config, **options)
    for a, b in zip(plain, watched, strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    assert all(getattr(records[0], name).shape == (2, 4) for name in FIELDS)
    assert all(getattr(records[0], name).dtype == torch.float64 for name in FIELDS)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("lengths", [(1, 1), (129, 63), (63, 257)], ids=str)
def test_largest_score_is_that_of_the_inputs_in_every_arithmetic(config, lengths):
    """`max_score_before` depends on the inputs only, not on scale, shift, block size or precision."""
    q, k, v = normal_qkv((4, 2), lengths, 64)
    q, k = 9 * q + 1, 9 * k - 2
    seen = torch.ones(lengths, dtype=torch.bool).tril(lengths[1] - lengths[0])
    scores = (q.double() @ k.double().repeat_interleave(2, 1).mT).abs().masked_fill(~seen, 0)
    record = recorded(q, k, v, is_causal=True, config=config)
    # FP32 accumulation of 64 products errs by at most 64 half-ulps of the sum of their magnitudes
    slack = 64 * 2.0**-24 * float((q.double().abs() @ k.double().abs().repeat_interleave(2, 1).mT).max())
    torch.testing.assert_close(record.max_score_before, scores.amax((-1, -2)), rtol=0, atol=slack)


@pytest.mark.parametrize("mode", ["inf", "saturate"])
@pytest.mark.parametrize("how", ["plain", "causal", "mask"])
@pytest.mark.parametrize("block_k", [64, 100])
def test_overflow_is_counted_over_visible_pairs_only(mode, how, block_k):
    q, k, v = whole_numbers((70, 130), size=120)
    keep = torch.rand(2, 4, 70, 130, generator=torch.Generator().manual_seed(2)) < 0.5
    band = torch.ones(70, 130, dtype=torch.bool).tril(60)
    seen = {"plain": torch.ones_like(keep), "causal": band.expand_as(keep), "mask": keep}[how]
    options = {"plain": {}, "causal": {"is_causal": True}, "mask": {"attn_mask": keep}}[how]
    size = (q.double() @ k.double().repeat_interleave(2, 1).mT).abs()
    overflow = ((size >= 65520) & seen).sum((-1, -2)).double()  # from halfway to 65536 on, because ties go to even
    largest = ((size >= 65488) & (size < 65520) & seen).sum((-1, -2)).double()
    record = recorded(q, k, v, config=PasaConfig(precision="partial", overflow=mode, block_k=block_k), **options)
    assert overflow.min() > 0
    assert torch.equal(record.nonfinite, overflow if mode == "inf" else torch.zeros_like(overflow))
    assert torch.equal(record.saturated, largest if mode == "inf" else largest + overflow)


@pytest.mark.parametrize("mode", ["inf", "saturate"])
@pytest.mark.parametrize("config", [{}, {"accumulate": "fp16"}, {"precision": "fp32"}], ids=str)
def test_nothing_overflows_where_it_is_promised(mode, config):
    q, k, v = whole_numbers((70, 130), size=2000, dim=128)
    record = recorded(q, k, v, config=PasaConfig(overflow=mode, **config))
    assert record.max_score_before.min() > 65504
    assert record.nonfinite.max() == 0
    assert record.saturated.max() == 0


@pytest.mark.parametrize("lengths", [(1, 1), (128, 128), (129, 127), (40, 300), (300, 40)], ids=str)
@pytest.mark.parametrize("blocks", [(128, 128), (32, 48), (7, 300)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_tiles_of_ragged_and_causal_calls(lengths, blocks, causal):
    """A causal call counts, for each key block after the first, the query tiles from the first row that sees it."""
    (rows, keys), (block_q, block_k) = lengths, blocks
    q, k, v = normal_qkv((2, 1), lengths, 16)
    expected = 0
    for start in range(0, keys, block_k):
        first = max(0, start - (keys - rows)) if causal and start else 0
        expected += max(0, math.ceil(rows / block_q) - first // block_q) if first < rows else 0
    record = recorded(q, k, v, is_causal=causal, config=PasaConfig(block_q=block_q, block_k=block_k))
    assert torch.equal(record.tiles, torch.full((1, 2), float(expected), dtype=torch.float64))
    assert (record.rescued_tiles <= record.tiles).all()


def test_every_head_counts_its_own_rescues():
    q, k, v = normal_qkv((4, 2), (96, 192), 64)
    q[..., 0], k[..., 0] = 0, 0
    q[0, 2, 40, 0], k[0, 1, 100, 0] = 60, 60
    record = recorded(q, k, v, config=PasaConfig(block_q=32, block_k=64))
    assert record.rescued_tiles.tolist() == [[0, 0, 1, 0]]
    assert record.tiles.tolist() == [[9, 9, 9, 9]]


def test_a_call_that_sees_no_key_counts_nothing():
    q, k, v = normal_qkv((2, 1), (9, 20), 16)
    record = recorded(q, k, v, attn_mask=torch.zeros(9, 20, dtype=torch.bool))
    assert all((getattr(record, name) == 0).all() for name in FIELDS)


def test_packed_counts_add_and_maxima_join():
    lengths = [(5, 9), (0, 4), (70, 130), (3, 0)]
    q, k, v = whole_numbers((78, 143), size=120)
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    cu_q, cu_k = (torch.tensor([0, *column]).cumsum(0) for column in zip(*lengths, strict=True))
    config = PasaConfig(precision="partial", overflow="saturate", block_q=32)
    with pasa.record_diagnostics() as records:
        pasa.attention_varlen(*packed, cu_q, cu_k, 70, 130, is_causal=True, config=config)
    parts = [
        recorded(q[:1, :, i:j], k[:1, :, m:n], v[:1, :, m:n], is_causal=True, config=config)
        for i, j, m, n in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False)
        if i < j and m < n
    ]
    assert len(parts) == 2
    for name in FIELDS:
        one, other = (getattr(part, name) for part in parts)
        expected = torch.maximum(one, other) if name.startswith("max") else one + other
        assert torch.equal(getattr(records[0], name), expected), name
    assert records[0].saturated.min() > 0


def test_a_compiled_graph_records_what_eager_does():
    q, k, v = normal_qkv((4, 2), (40, 70), 16)
    compiled = torch.compile(lambda *x: pasa.attention(*x, is_causal=True), fullgraph=True, backend="eager")
    compiled(q, k, v)
    with pasa.record_diagnostics() as records:
        compiled(q, k, v)
        compiled(q, k, v)
        pasa.attention(q, k, v, is_causal=True)
    compiled(q, k, v)
    assert len(records) == 3
    assert same(records[0], records[2])
    assert same(records[1], records[2])
