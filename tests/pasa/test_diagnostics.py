"""Diagnostics: what is counted, when, and that asking changes no bit."""

import pytest
import torch

import pasa
from pasa import PasaConfig
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
    """Two contexts without a record yet hold equal lists; removing by equality once closed the wrong one."""
    q, k, v = normal_qkv((2, 1), (9, 20), 16)
    with pasa.record_diagnostics() as outer:
        with pasa.record_diagnostics() as inner:
            pass
        pasa.attention(q, k, v)
    assert len(outer) == 1
    assert inner == []


@pytest.mark.parametrize("recovery", ["exact", "paper"])
def test_recording_changes_no_bit(recovery):
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
    """Two of three query tiles see the second block of keys; only tiles whose scores run away are rescued."""
    q, k, v = normal_qkv((1, 1), (96, 128), 64)
    config = PasaConfig(block_q=32, block_k=64)
    assert recorded(q, k, v, config=config).tiles.item() == 3 * 2
    q, k, v = (x[:, :, :96] for x in (q, k, v))
    assert recorded(q, k, v, config=config, is_causal=True).tiles.item() == 3 + 1
    assert recorded(q, k, v, config=config).rescued_tiles.item() == 0
    q[..., 0], k[..., 0] = 0, 0
    k[:, :, 70, 0], q[:, :, 40, 0] = 60, 60  # one query meets one key, in tile (1, 1)
    assert recorded(q, k, v, config=config).rescued_tiles.item() == 1
    assert recorded(q, k, v, config=config, attn_mask=torch.zeros(1)).rescued_tiles.item() == 6  # a float mask


def test_packed_sequences_are_joined():
    q, k, v = normal_qkv((2, 1), (30, 30), 64)
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    edges = torch.tensor([0, 10, 30])
    with pasa.record_diagnostics() as records:
        pasa.attention_varlen(*packed, edges, edges, 20, 20)
    parts = [recorded(*(x[:, :, a:b] for x in (q, k, v))) for a, b in ((0, 10), (10, 30))]
    assert torch.equal(records[0].max_score_before, torch.maximum(*(p.max_score_before for p in parts)))
    assert torch.equal(records[0].tiles, parts[0].tiles + parts[1].tiles)
