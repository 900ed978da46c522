"""Keys and values that are not finite and that no query sees change nothing, on the CPU twins of both chips."""

import pytest
import torch

import pasa
from tests.inputs import max_error, normal_qkv

HALF_ULP = 2.0**-11  # of an output near 1
BAD = (torch.nan, torch.inf, -torch.inf)


@pytest.fixture(params=["npu", "npu_310p"])
def chip(request):
    return request.getfixturevalue(request.param)


def spoil(x, where, index):
    """Return a copy with a number that is not finite there."""
    x = x.clone()
    x[where] = BAD[index % len(BAD)]
    return x


@pytest.mark.parametrize("overflow", ["inf", "saturate"])
@pytest.mark.parametrize("kind", ["packed", "prompts", "pages"])
def test_before_all_windows_of_a_sequence(chip, kind, overflow):
    """Story: a slot behind the window, in a block with keys that the window shows, made a row NaN or wrong by 1.3."""
    rows = 3 if kind == "prompts" else 1
    q, k, v = (x[0].transpose(0, 1) for x in normal_qkv((4, 2), (2 * rows, 400), 32))
    how = {"window": (5, 0), "config": pasa.PasaConfig(overflow=overflow), "backend": "npu"}
    hidden = [0, 150, 193 - rows, 200, 350, 393 - rows]  # the last of each sequence lies next to a visible key
    expected = [
        pasa.golden_attention(
            *(x.transpose(0, 1)[None] for x in (q[rows * b :][:rows], k[200 * b :][:200], v[200 * b :][:200])),
            window=(5, 0),
        )[0][0].transpose(0, 1)
        for b in range(2)
    ]
    for index, at in enumerate(hidden):
        bad_k, bad_v = spoil(k, at, index), spoil(v, at, index + 1)
        if kind == "pages":
            table, lengths = torch.arange(26).view(2, 13), torch.tensor([200, 200])
            caches = [torch.zeros(2, 208, 2, 32).half() for _ in range(2)]
            for cache, x in zip(caches, (bad_k, bad_v), strict=True):
                cache[:, :200] = x.view(2, 200, 2, 32)
            out = pasa.attention_paged(q, *(x.view(26, 16, 2, 32) for x in caches), table, lengths, **how)
        else:
            edges = torch.tensor([0, rows, 2 * rows]), torch.tensor([0, 200, 400])
            out = pasa.attention_varlen(q, bad_k, bad_v, *edges, rows, 200, **how)
        assert max_error(out, torch.cat(expected)) <= 4 * HALF_ULP, at


@pytest.mark.parametrize("overflow", ["inf", "saturate"])
@pytest.mark.parametrize(("chip", "dtype"), [("npu", torch.bool), ("npu", torch.float16), ("npu_310p", torch.bool)])
def test_hidden_from_their_own_head_alone(request, chip, dtype, overflow):
    """Story: a key counted as seen if the queries of any head saw it, and a hidden infinity left an error of 0.57."""
    request.getfixturevalue(chip)
    q, k, v = normal_qkv((4, 2), (20, 150), 32)
    keep = torch.rand(1, 4, 20, 150, generator=torch.Generator().manual_seed(0)) < 0.7
    keep[:, :2, :, 40] = False  # hidden from both query heads of the first key head
    keep[:, 2:, :, 40] = True
    mask = keep if dtype == torch.bool else torch.zeros(keep.shape).half().masked_fill(~keep, -torch.inf)
    golden, _ = pasa.golden_attention(q, k, v, attn_mask=mask)
    for index in range(3):
        bad = [spoil(x, (0, 0, 40), index + place) for place, x in enumerate((k, v))]
        out = pasa.attention(q, *bad, attn_mask=mask, backend="npu", config=pasa.PasaConfig(overflow=overflow))
        assert max_error(out, golden) <= 4 * HALF_ULP


def test_keys_whose_rows_overlap(chip):
    """Story: the distance between two rows of `unfold` is less than a row, and the gap in a copy became 268,435,455."""
    q, _, v = normal_qkv((2, 2), (1, 60), 32)
    line = torch.randn(2, 60 * 16 + 32, generator=torch.Generator().manual_seed(0)).half()
    k = line.unfold(1, 32, 16)[None, :, :60]
    assert k.stride(2) == 16
    golden, _ = pasa.golden_attention(q, k, v)
    assert max_error(pasa.attention(q, k, v, backend="npu"), golden) <= 4 * HALF_ULP
