"""Windows and masks through the binding: `pasa.attention(..., backend="npu")` on the CPU twin.

An output is a mean of normal values. Two ways to round it differ by an FP16 ulp, and FP16 scores by 2^-9 of a weight.
"""

import pytest
import torch

import pasa
from pasa.ops.attention.ascend.masks import find_visits
from tests.inputs import normal_qkv

TOLERANCE = {"atol": 2e-3, "rtol": 2.0**-9}


def compared(q, k, v, **how):
    """Compare output and log-sum-exp with those of the reference, and return the output."""
    (out, lse), expected = (
        pasa.attention(q, k, v, backend=name, return_lse=True, **how) for name in ("npu", "reference")
    )
    torch.testing.assert_close((out, lse), expected, **TOLERANCE)
    return out


def masks(batch, heads, rows, keys):
    """Return masks of every layout that broadcasts to (B, H, Sq, Skv)."""
    g = torch.Generator().manual_seed(4)

    def draw(*shape):
        return torch.rand(*shape, generator=g) < 0.4

    every_other = draw(batch, heads, 2 * rows, keys)[:, :, ::2]  # rows are strided
    first_keys = draw(batch, heads, rows, 2 * keys)[..., :keys]
    return {
        "keys": draw(keys),
        "rows and keys": draw(rows, keys),
        "rows alone": draw(rows, 1),
        "padding": draw(batch, 1, 1, keys),
        "heads": draw(heads, 1, keys),
        "all": draw(batch, heads, rows, keys),
        "rows of another": every_other,
        "keys of another": first_keys,
        "transposed": draw(batch, heads, keys, rows).mT,
        "heads last": draw(batch, rows, heads, keys).transpose(1, 2),
        "expanded": draw(1, 1, rows, keys).expand(batch, heads, rows, keys),
        "a scalar": torch.tensor(True),
    }


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", masks(1, 1, 1, 1))
def test_masks_of_every_layout(npu, name, is_causal):
    q, k, v = normal_qkv((4, 2), (70, 150), 40, batch=2)
    mask = masks(2, 4, 70, 150)[name]
    before = mask.clone()
    compared(q, k, v, attn_mask=mask, is_causal=is_causal)
    assert torch.equal(mask, before)


@pytest.mark.parametrize("window", [(10, 0), (0, -1), (-1, 5), (40, 40), (1000, 1000)])
@pytest.mark.parametrize("lengths", [(70, 150), (150, 70), (300, 300), (1, 200)])
def test_windows(npu, window, lengths):
    q, k, v = normal_qkv((2, 1), lengths, 32)
    compared(q, k, v, window=window)
    compared(q, k, v, window=window, attn_mask=torch.rand(lengths, generator=torch.Generator().manual_seed(1)) < 0.8)


def test_windows_beside_causal_masks_and_sinks(npu):
    q, k, v = normal_qkv((2, 1), (200, 150), 32)
    sinks = torch.tensor([1.0, -torch.inf])
    plain = compared(q, k, v, window=(30, -1), is_causal=True)
    sunk = compared(q, k, v, window=(30, -1), is_causal=True, sinks=sinks)
    assert torch.equal(plain[:, 1, 50:], sunk[:, 1, 50:])
    assert not torch.equal(plain[:, 0, 50:], sunk[:, 0, 50:])
    compared(q, k, v, attn_mask=torch.ones(200, 150, dtype=torch.bool).tril(-20), sinks=sinks)


@pytest.mark.parametrize("is_causal", [False, True])
def test_windows_of_packed_sequences(npu, is_causal):
    """One has no keys, one no queries, and one has more queries than keys."""
    edges_q, edges_k = torch.tensor([0, 5, 9, 44, 44, 74]), torch.tensor([0, 10, 10, 140, 143, 153])
    q, k, v = (x[0].transpose(0, 1) for x in normal_qkv((4, 2), (74, 153), 32))
    how = {"is_causal": is_causal, "window": (7, -1), "return_lse": True}
    found, expected = (
        pasa.attention_varlen(q, k + 2, v, edges_q, edges_k, 35, 130, backend=name, **how)
        for name in ("npu", "reference")
    )
    torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_padding_may_hold_anything(npu, bad):
    """Story: the mean of a block held the NaN of an empty cache slot, and the matrix unit multiplied one by 0."""
    q, k, v = normal_qkv((2, 1), (60, 150), 32, batch=2)
    mask = torch.ones(2, 1, 60, 150, dtype=torch.bool)
    mask[0, ..., :140] = False
    mask[1, ..., 130:] = False
    expected = compared(q, k, v, attn_mask=mask)
    k[0, :, :140], v[0, :, :140] = bad, bad
    k[1, :, 130:], v[1, :, 130:] = bad, bad
    out = pasa.attention(q, k, v, attn_mask=mask, backend="npu")
    torch.testing.assert_close(out, expected, **TOLERANCE)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5])])
def test_a_query_that_is_not_finite(npu, sinks):
    """It turns its row to NaN, unless the row sees no key."""
    q, k, v = normal_qkv((1, 1), (6, 40), 16)
    q[0, 0, :4, 3] = torch.nan
    mask = torch.ones(6, 40, dtype=torch.bool)
    mask[:2] = False
    for how in ({"attn_mask": mask}, {"window": (0, 0)}):
        (out, lse), (expected, expected_lse) = (
            pasa.attention(q, k, v, return_lse=True, sinks=sinks, **how, backend=name) for name in ("npu", "reference")
        )
        assert torch.equal(torch.isnan(out), torch.isnan(expected))
        assert torch.equal(torch.isnan(lse), torch.isnan(expected_lse))
    k, v = k[:, :, :3], v[:, :, :3]  # the first three rows of a window see no key
    (out, _), (expected, _) = (
        pasa.attention(q, k, v, return_lse=True, sinks=sinks, window=(0, 0), backend=name)
        for name in ("npu", "reference")
    )
    assert torch.equal(torch.isnan(out), torch.isnan(expected))


@pytest.mark.parametrize("what", ["masks", "windows"])
def test_the_published_recovery_is_refused_by_name(npu, what):
    q, k, v = normal_qkv((1, 1), (6, 40), 16)
    how = {"masks": {"attn_mask": torch.ones(6, 40, dtype=torch.bool)}, "windows": {"window": (3, 0)}}[what]
    with pytest.raises(NotImplementedError, match=f"{what} are served with recovery exact, not paper"):
        pasa.attention(q, k, v, backend="npu", config=pasa.PasaConfig(recovery="paper"), **how)


def test_tables_of_visits():
    """130 rows are two tiles, the second with two rows, the last of which stands for those behind it."""
    mask = torch.zeros(1, 1, 130, 300, dtype=torch.bool)
    mask[..., 63, 299] = mask[..., 64, 10] = mask[..., 129, 128] = True
    table = find_visits(mask, 130)
    assert table.shape == (1, 1, 2, 4, 3)
    first, second = table[0, 0].tolist()
    assert first[0] == [2, 0, 0]
    assert first[1:3] == [[0, 0, 1], [2, -(2**63), 0]]
    assert second[0] == [1, 0, 0]
    assert second[1] == [1, -2, -1]  # rows 1 to 63 of the tile, and all of its other half
    of_all = find_visits(mask[:, :, 129:], 130)[0, 0].tolist()
    assert of_all[0][1] == of_all[1][1] == [1, -1, -1]
