"""Tests of page anchors: the anchors that `write_pages` keeps, and decoding with them.

An anchor must be exact: k - a is an FP16 number, and k - a + a is k bit for bit. The bound on results is that without
anchors: `error <= 2 x error of the emulation` plus half an ulp of an output up to 4.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

import pasa
from pasa.ops.attention.spec.shift_keys import shift_exact, shifts_exactly
from pasa.ops.attention.triton import kernel_call
from pasa.ops.attention.triton.paged import launch as paged_write_launch
from tests import unlike_keys
from tests.inputs import DEVICE, max_error
from tests.pages import make_pages, worst

HALF_ULP = 2.0**-11 * 4


def lse_bound(bias):
    return 1e-3 + 2.0**-23 * 8 * bias**2


def check(pages, bias=0.0, lse_error=None, **how):
    golden = pages.golden()
    emulated = worst(pages.attend(backend="reference"), golden)
    out, lse = worst(pages.attend(DEVICE, backend="triton", **how), golden)
    assert out <= 2 * emulated[0] + HALF_ULP
    assert lse <= (lse_bound(bias) if lse_error is None else lse_error)


def by_kernel(pages, order=None):
    """Write pages and anchors like `anchored`, but by the Triton kernels into caches of NaN."""
    here = pages.to(DEVICE)
    order = torch.arange(len(pages.k)) if order is None else order
    caches = [torch.full_like(here.k_cache, torch.nan) for _ in range(2)]
    anchors = torch.zeros(pages.k_cache.shape[0], *pages.k_cache.shape[2:], device=DEVICE).half()
    new = (x[order.to(DEVICE)] for x in (here.k, here.v))
    paged_write_launch.write_pages(*new, *caches, pages.slots[order].to(DEVICE), anchors)
    return pages._replace(k_cache=caches[0].cpu(), v_cache=caches[1].cpu(), anchors=anchors.cpu())


@pytest.mark.parametrize("write", [lambda pages: pages.anchored(), by_kernel], ids=["torch", "triton"])
@pytest.mark.parametrize(("slots", "dim", "bias"), [(16, 64, 300), (48, 80, 20), (200, 64, 300), (7, 16, 40)])
def test_an_anchor_is_the_block_mean_that_keys_lose_exactly(write, slots, dim, bias):
    pages = make_pages([100, slots, 0, 1], (2, 2), dim, slots)
    k = pages.k.clone()
    k[..., ::2] += bias
    found = write(pages._replace(k=k.half()))
    assert torch.equal(found.k_cache.reshape(-1, 2, dim)[pages.slots], k)
    assert torch.equal(found.v_cache.reshape(-1, 2, dim)[pages.slots], pages.v)
    at = 0
    for row, n in zip(pages.table.long(), pages.lengths.tolist(), strict=True):
        for page in range(-(-n // slots)):
            count = min(slots, n - page * slots)
            keys, anchor = k[at : at + count].float(), found.anchors[row[page]].float()
            at += count
            assert shifts_exactly(keys, anchor).all()
            expected = shift_exact(keys.transpose(0, 1)[None], 1.0).anchor[0, :, 0]
            assert (anchor - expected).abs().max() <= bias * 2.0**-10  # one grid step, because sums have another order
    untouched = torch.ones(len(found.anchors), dtype=torch.bool)
    untouched[pages.slots // slots] = False
    assert (found.anchors[untouched] == 0).all()


@pytest.mark.parametrize("write", ["torch", "triton"])
def test_order_and_padding_change_no_bit(write):
    """Anchors have the same bits for any order of tokens and any padding, because they use all slots of a page."""
    pages = make_pages([70], (1, 1), 32, bias=50)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(0))
    if write == "triton":
        a, b = by_kernel(pages), by_kernel(pages, order)
    else:
        a, b = pages.anchored(), pages._replace(anchors=torch.zeros(len(pages.k_cache), 1, 32).half())
        padded = [torch.cat([x[order], x[:3]]) for x in (pages.k, pages.v)]
        slots = torch.cat([pages.slots[order], torch.tensor([-1, -7])])
        pasa.write_pages(*padded, pages.k_cache, pages.v_cache, slots, b.anchors)
    assert a.anchors.any()
    assert torch.equal(a.anchors, b.anchors)


@pytest.mark.parametrize("write", ["torch", "triton"])
def test_a_sequence_that_is_cut_and_grows_anew(write):
    """A sequence that is cut and grows again, as after rejected drafts, gets anchors of its present keys only.

    The later keys of the page no longer count, even if one of them was NaN.
    """
    pages = make_pages([16], (1, 1), 32, bias=50)
    pages.k[9] = torch.nan
    pages = (by_kernel if write == "triton" else lambda x: x.anchored())(pages).to(
        DEVICE if write == "triton" else "cpu"
    )
    slots = int(pages.table[0, 0]) * 16 + torch.arange(16, device=pages.k.device)
    page = int(pages.table[0, 0])
    assert pages.anchors[page].isnan().all()
    new = pages.k[8:9] * 1.25
    call = (new, new, pages.k_cache, pages.v_cache, slots[9:10], pages.anchors)
    (paged_write_launch.write_pages if write == "triton" else pasa.write_pages)(*call)
    keys = torch.cat([pages.k[:9], new])[:, 0].float()
    assert shifts_exactly(keys, pages.anchors[page].float()).all()
    assert (pages.anchors[page, 0, :8] > 40).all()


@pytest.mark.parametrize(
    ("heads", "dim", "slots", "bias"),
    [((7, 1), 128, 16, 300), ((2, 2), 64, 16, 300), ((4, 1), 64, 32, 40), ((3, 1), 80, 48, 300), ((16, 1), 32, 64, 30),
     ((2, 1), 128, 128, 5000)],
)  # fmt: skip
def test_decoding_with_anchors(heads, dim, slots, bias):
    """Decoding with anchors is within the bound for odd lengths, one key or none, and scores up to 2e8."""
    check(make_pages([1, 15, 130, 17, 0, 127], heads, dim, slots, bias=bias).anchored(), bias)


def test_more_blocks_than_offsets_are_found_for_at_once():
    """Results are right for more than TURNS blocks of 64 keys, after which the memory of offsets is reused."""
    check(make_pages([64 * 64 * 2 + 77], (1, 1), 16, 32, bias=300).anchored(), 300, max_seqlen_k=1)


def test_heads_with_and_without_a_bias():
    """Heads with and without a bias are right in one call.

    Heads without a bias finish in the first pass and have no frame. The others use the frame of their first page.
    """
    pages = make_pages([300, 40], (4, 4), 64, 16)
    pages.q[:, 1:3, :8] += 300
    pages.k[:, 1:3, :8] += 300
    check(pages.anchored(), 300)


def test_anchors_that_differ_from_page_to_page():
    """Results are right if anchors differ from page to page.

    As under rotary embeddings, the bias turns from +300 to -300, which changes scores by 1,400,000.
    """
    pages = make_pages([512], (2, 1), 64, 16)
    pages.q[..., :8] += 300
    turn = torch.cos(torch.arange(512) / 512 * torch.pi)[:, None, None]
    pages.k[..., :8] += 300 * turn.half()
    pages = pages.anchored()
    assert len(pages.anchors[:, 0, 0].unique()) > 20
    check(pages, 300)


@pytest.mark.parametrize(("c", "dim"), [(8, 64), (64, 128)])
def test_keys_whose_mean_is_a_few_times_as_long_as_the_rest(c, dim):
    """Results are right for keys whose mean is only a few times as long as the rest.

    Story: an anchor was dropped if it was less than 4 times as long as the remainder of the keys, and errors were up to
    110 times those without anchors. Scores reach 1e7 nats, and keys differ in one bit of one column.
    """
    pages = make_pages([128], (2, 1), dim, 16)
    g = torch.Generator().manual_seed(3)
    pages.q[:], pages.k[:] = ((torch.rand(x.shape, generator=g) * 10 + 5) * c for x in (pages.q, pages.k))
    pages.k[1::2] = pages.k[::2]
    pages.k[1::2, :, 0] *= 1 + 2.0**-10
    largest = pages.q.float().norm(dim=-1).max() * pages.k.float().norm(dim=-1).max() * dim**-0.5
    check(pages.anchored(), lse_error=1e-3 + 2.0**-22 * float(largest))


@pytest.mark.parametrize("at", [0, 300, 511])
def test_a_key_without_the_bias(at):
    """One key without the bias, as the first key of a sequence often is, does not reduce accuracy.

    Story: the anchor of its page was 0, all pages used the frame of that page, and every sum with an offset was rounded
    like q.k. Each key has a slightly larger twin 16 pages later.
    """
    pages = make_pages([512], (2, 1), 64, 16, seed=1)
    pages.q[:] += 40
    pages.k[:] += 600
    pages.k[257:] = pages.k[1:256]
    pages.k[257:, :, 3] += 600 * 2.0**-9
    pages.k[at] = 0.3 * torch.randn(1, 64, generator=torch.Generator().manual_seed(2)).half()
    check(pages.anchored(), lse_error=1e-3 + 2.0**-22 * 8 * 64 * 40 * 600 / 8)


@pytest.mark.parametrize("slots", [16, 128])
@pytest.mark.parametrize("name", [name for name, make in unlike_keys.CASES.items() if not make(1.0).how])
def test_pages_that_are_far_from_the_frame(name, slots):
    """Results are right for pages whose keys are far from the frame.

    Story: some pages have a bias of 30,000 in one column and no weight. If the frame was theirs, outputs were wrong by
    0.18, because offsets and maxima were FP32 numbers relative to that frame. Pages also differ in another column.
    """
    case = unlike_keys.CASES[name](30000.0)
    case.q[..., 1] = 3.0
    case.k[..., 1] += 100 + 2.0 * (torch.arange(case.k.shape[2]) // slots)
    rows = case.q.shape[2] // 16 * 16
    q, k, v = case.q[0, 0, :rows].view(-1, 16, 64), case.k[0, 0].unsqueeze(1), case.v[0, 0].unsqueeze(1)
    pages = make_pages([len(k)], (16, 1), 64, slots)
    pages.k_cache.view(-1, 1, 64)[pages.slots], pages.v_cache.view(-1, 1, 64)[pages.slots] = k, v
    pages = pages._replace(k=k, v=v).anchored()
    pages = pages._replace(q=q, table=pages.table.expand(len(q), -1), lengths=pages.lengths.expand(len(q)))
    out, lse = pages.attend(DEVICE, backend="triton")
    true, _ = unlike_keys.found(case)
    out, lse = out.reshape(rows, 64), lse.reshape(rows)
    naive = scaled_dot_product_attention(*(x.float() for x in case[:3]))[0, 0, :rows]
    bound = max_error(naive, true.out[0, 0, :rows]) + 2.0**-10 * v.abs().max().item()
    assert max_error(out, true.out[0, 0, :rows]) <= bound
    assert (lse - true.lse[0, 0, :rows]).abs().max() <= 2.0**-11 + 2.0**-22 * true.lse.abs().max()


def test_a_page_that_32_bits_do_not_count_is_refused(monkeypatch):
    """A page is refused if offsets within it exceed 32 bits.

    Story: these offsets wrapped around.
    """
    monkeypatch.setattr(kernel_call, "PAGE_SPAN", 16 * 2 * 64)
    with pytest.raises(NotImplementedError, match="a page of the cache spans 2048 elements"):
        make_pages([20]).attend(DEVICE, backend="triton")


@pytest.mark.parametrize("how", [{"heads": (20, 1)}, {"dim": 256}, {"slots": 24}, {"queries": [3, 2]}], ids=str)
def test_anchors_that_do_not_serve_change_no_bit(how):
    pages = make_pages([40, 33], **{"heads": (2, 1), "dim": 32, "bias": 300} | how)
    expected = pages.attend(DEVICE, backend="triton")
    got = pages.anchored().attend(DEVICE, backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("bias", [0, 300])
def test_what_is_not_finite_reaches_the_sequence_that_has_it(which, bad, bias):
    pages = make_pages([100, 33, 50], bias=bias)
    getattr(pages, which)[120, 0, 5] = bad  # sequence 1, key 20: two query heads share the key head
    pages = pages.anchored()
    out, _ = pages.attend(DEVICE, backend="triton")
    expected, _ = pages.attend(backend="reference")
    assert expected[1, :2].isnan().any(-1).all()
    assert torch.equal(out.isnan(), expected.isnan())


def test_stale_slots_and_pages_change_no_bit():
    expected = make_pages([100, 33, 0, 7], stale=0.0, bias=300).anchored().attend(DEVICE, backend="triton")
    pages = make_pages([100, 33, 0, 7], stale=torch.nan, bias=300).anchored()
    unused = torch.ones(len(pages.anchors), dtype=torch.bool)
    unused[pages.slots // 16] = False
    pages.anchors[unused] = torch.nan
    got = pages.attend(DEVICE, backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_dtypes(dtype):
    pages = make_pages([100, 33], (8, 2), 64, dtype=dtype if dtype == torch.bfloat16 else torch.float16, bias=30)
    floats = {name: x.to(dtype) for name, x in pages._asdict().items() if x is not None and x.is_floating_point()}
    pages = pages._replace(**floats).anchored()
    out, lse = worst(pages.attend(DEVICE, backend="triton"), pages.golden())
    assert out <= 2.0 ** (-8 if dtype == torch.bfloat16 else -11) * 4 + HALF_ULP
    assert lse <= lse_bound(30)


@settings(max_examples=12)
@given(
    lengths=st.lists(st.integers(0, 150), min_size=1, max_size=3),
    slots=st.sampled_from([16, 32, 48, 80]),
    group=st.sampled_from([1, 3, 16]),
    bias=st.sampled_from([0, 40, 300, 3000]),
    seed=st.integers(0, 99),
)
def test_any_batch(lengths, slots, group, bias, seed):
    check(make_pages(lengths, (group, 1), 16, slots, bias=bias, seed=seed).anchored(), bias)


def test_anchors_of_other_keys_are_refused():
    """Anchors of other keys are refused on a CPU, because keys that were written without them would be rounded."""
    pages = make_pages([20, 33], bias=300).anchored()
    pages.k_cache[pages.table[1, 1], 3] = torch.linspace(-1, 1, 64).half()
    with pytest.raises(ValueError, match="key_anchors are not those of the keys in k_cache"):
        pages.attend()
    pages = make_pages([20, 33], bias=300).anchored()
    pages.k_cache[pages.table[1, 1], 3, 0, 9] = -torch.inf  # unchanged by subtracting a finite anchor
    with pytest.raises(ValueError, match="key_anchors are not those"):
        pages.attend()


@pytest.mark.parametrize(
    ("anchors", "error", "message"),
    [
        (torch.zeros(3, 2, 64), TypeError, "key_anchors is torch.float32, not an FP16 Tensor"),
        ([1.0], TypeError, "key_anchors is a list, not a Tensor"),
        (torch.zeros(3, 2, 64).half(), ValueError, r"key_anchors \(3, 2, 64\) on cpu are not contiguous, or not the"),
        (torch.zeros(2, 64, 9).half().permute(2, 0, 1), ValueError, "are not contiguous"),
        (torch.zeros(9, 2, 64, device="meta").half(), ValueError, "key_anchors .* on meta are not contiguous, or not"),
    ],
)
def test_refuses(anchors, error, message):
    pages = make_pages([20, 33], slots=16)
    pages = pages._replace(k_cache=pages.k_cache[:9], v_cache=pages.v_cache[:9])
    tensors = pages.q, pages.k_cache, pages.v_cache, pages.table, pages.lengths
    with pytest.raises(error, match=message):
        pasa.attention_paged(*tensors, key_anchors=anchors)
    with pytest.raises(error, match=message):
        pasa.write_pages(pages.k[:1], pages.v[:1], pages.k_cache, pages.v_cache, torch.tensor([3]), anchors)


def test_operators_pass_opcheck():
    pages = make_pages([20, 33], dim=32, stale=0.0).anchored()
    call = (pages.k[:3], pages.v[:3], pages.k_cache, pages.v_cache, torch.tensor([4, -1, 9]), pages.anchors)
    torch.library.opcheck(torch.ops.pasa.write_pages.default, call)
    pages = pages.anchored()
    tensors = (pages.q, pages.k_cache, pages.v_cache, pages.table, pages.lengths)
    torch.library.opcheck(torch.ops.pasa.attention_paged.default, tensors, {"key_anchors": pages.anchors})
