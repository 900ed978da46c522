"""The Triton kernel of paged decoding agrees with FP64 and with decoding of contiguous keys.

It runs on a GPU where there is one, in Triton's interpreter elsewhere.

Bound: `error <= 2 x error of the emulation` (the reference on the same pages), plus half an ulp of the FP16
output.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pasa
from pasa import PasaConfig
from pasa.ops.attention.triton import c_launcher
from tests.inputs import DEVICE
from tests.pages import make_pages, worst

HALF_ULP = 2.0**-11 * 4  # of an output up to 4


def check(pages, lse_bound=1e-3, **how):
    golden = pages.golden(how.get("is_causal", False))
    emulated = worst(pages.attend(backend="reference", **how), golden)
    out, lse = worst(pages.attend(DEVICE, backend="triton", **how), golden)
    assert out <= 2 * emulated[0] + HALF_ULP
    assert lse <= lse_bound


@pytest.mark.parametrize(
    ("dim", "heads"),
    [(64, (2, 2)), (64, (4, 1)), (64, (7, 1)), (64, (20, 1)), (80, (8, 1)), (128, (7, 1)), (256, (2, 1))],
)
def test_odd_lengths(dim, heads):
    check(make_pages([1, 15, 16, 17, 0, 127, 129], heads, dim))


@pytest.mark.parametrize(
    ("slots", "bias"), [(1, 0), (16, 300), (32, 0), (48, 0), (48, 300), (64, 300), (128, 0), (200, 300)]
)
def test_page_sizes(slots, bias):
    """Pages may be smaller or larger than a block of keys, neither a part nor a multiple of one.

    All scores share 720,000.
    """
    check(make_pages([150, 7, 129], (2, 1), 64, slots, bias=bias), 1e-3 + 2.0**-23 * 8 * bias**2)


@pytest.mark.parametrize("bias", [0, 300])
def test_pages_with_anchors_can_be_read_without(monkeypatch, bias):
    """Calls with anchors of pages give the same results if the kernel that reads such anchors does not compile."""
    pages = make_pages([150, 7, 129], (2, 1), 64, bias=bias).anchored()
    without = pages._replace(anchors=None).attend(DEVICE, backend="triton")
    monkeypatch.setattr(c_launcher, "PAGE_ANCHORS", False)
    assert all(map(torch.equal, pages.attend(DEVICE, backend="triton"), without))
    check(pages, 1e-3 + 2.0**-23 * 8 * bias**2)


@pytest.mark.parametrize("heads", [(7, 1), (20, 1)], ids=str)
def test_long_cache(heads):
    check(make_pages([1407, 64], heads, 128))


@pytest.mark.parametrize(("causal", "bias", "longest"), [(True, 0, None), (True, 300, 3), (False, 300, 20)])
def test_prompts_and_tokens_in_one_batch(causal, bias, longest):
    """A batch may mix a prompt, a token, no query, no key, more queries than keys, and a second chunk of a prompt.

    Rows of padding follow.
    """
    pages = make_pages([20, 150, 30, 0, 2, 90], (3, 1), 64, queries=[20, 1, 0, 3, 4, 5], bias=bias)
    q = torch.cat([pages.q, torch.full((5, *pages.q.shape[1:]), torch.nan).half()])
    out, lse = pages._replace(q=q).attend(DEVICE, backend="triton", is_causal=causal, max_seqlen_q=longest)
    assert (out[-5:] == 0).all()
    assert (lse[-5:] == -torch.inf).all()
    golden = pages.golden(causal)
    emulated = worst(pages.attend(backend="reference", is_causal=causal), golden)
    got = worst((out[:-5], lse[:-5]), golden)
    assert got[0] <= 2 * emulated[0] + HALF_ULP
    assert got[1] <= 1e-3 + 2.0**-23 * 8 * bias**2


@pytest.mark.parametrize("softmax", ["safe", "unbiased"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_dtypes(dtype, softmax):
    config = PasaConfig(softmax=softmax)
    pages = make_pages([100, 33], (8, 2), 64, dtype=dtype)
    out, lse = worst(pages.attend(DEVICE, backend="triton", config=config), pages.golden())
    assert out <= 2.0 ** (-8 if dtype == torch.bfloat16 else -11) * 4
    assert lse <= 1e-3


@pytest.mark.parametrize("stale", [torch.nan, torch.inf, -65504.0])
def test_what_stands_in_stale_slots_changes_no_bit(stale):
    expected = make_pages([100, 33, 0, 7], stale=0.0).attend(DEVICE, backend="triton")
    got = make_pages([100, 33, 0, 7], stale=stale).attend(DEVICE, backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_nan_in_a_cache_reaches_the_sequences_that_see_it():
    pages = make_pages([100, 33, 50])
    pages.v_cache[pages.table[1, 1], 3, 0, 5] = torch.nan
    out, _ = pages.attend(DEVICE, backend="triton")
    expected, _ = pages.attend(backend="reference")
    assert expected.isnan().sum() == 2  # two query heads share the key head
    assert torch.equal(out.isnan(), expected.isnan())


def test_order_of_pages_changes_no_bit():
    pages = make_pages([300, 129], (7, 1), 128, bias=30)
    order = torch.randperm(len(pages.k_cache), generator=torch.Generator().manual_seed(1))
    table = torch.where((pages.table >= 0) & (pages.table < len(order)), order.argsort()[pages.table % len(order)], -1)
    moved = pages._replace(k_cache=pages.k_cache[order], v_cache=pages.v_cache[order], table=table.int())
    a, b = (x.attend(DEVICE, backend="triton") for x in (pages, moved))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_sequences_share_pages():
    pages = make_pages([40, 50])
    pages.table[1, :2] = pages.table[0, :2]
    pages.k[40:72], pages.v[40:72] = pages.k[:32], pages.v[:32]
    check(pages)


@pytest.mark.parametrize(("slots", "bias", "dim"), [(16, 0, 64), (48, 300, 64), (128, 0, 128), (16, 300, 128)])
@pytest.mark.parametrize("heads", [(20, 1), (7, 1)], ids=str)
def test_same_bits_as_contiguous_keys(bias, slots, heads, dim):
    """A paged sequence of 512 keys gives the same bits as contiguous keys, because both are cut into as many splits."""
    pages = make_pages([512], heads, dim, slots, bias=bias)
    q, k, v = (x.transpose(0, 1)[None].to(DEVICE) for x in (pages.q, pages.k, pages.v))
    expected = pasa.attention(q, k, v, return_lse=True, backend="triton")
    got = pages.attend(DEVICE, backend="triton", max_seqlen_k=512)
    assert torch.equal(got[0][0], expected[0][0, :, 0].cpu())
    assert torch.equal(got[1][0], expected[1][0, :, 0].cpu())


@settings(max_examples=10)
@given(
    lengths=st.lists(st.integers(0, 100), min_size=1, max_size=3),
    slots=st.integers(1, 70),
    heads=st.sampled_from([(1, 1), (3, 1)]),
    bias=st.sampled_from([0, 40, 300]),
    data=st.data(),
)
def test_any_batch(lengths, slots, heads, bias, data):
    queries = data.draw(st.none() | st.lists(st.integers(0, 5), min_size=len(lengths), max_size=len(lengths)))
    if queries is not None:
        queries[0] += 1
    pages = make_pages(lengths, heads, 16, slots, queries=queries, bias=bias)
    check(pages, 1e-3 + 2.0**-23 * 8 * bias**2, is_causal=data.draw(st.booleans()))


def test_operator_passes_opcheck():
    pages = make_pages([20, 33], dim=32).to(DEVICE)
    tensors = (pages.q, pages.k_cache, pages.v_cache, pages.table, pages.lengths)
    torch.library.opcheck(torch.ops.pasa.attention_paged.default, tensors, {"backend": "triton"})


def test_too_many_query_heads_are_refused():
    pages = make_pages([20], (129, 1), 16)
    with pytest.raises(NotImplementedError, match="129 query heads share a key head"):
        pages.attend(DEVICE, backend="triton")
