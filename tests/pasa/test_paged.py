"""Tests of `attention_paged` and `write_pages` on the reference, against FP64 and `attention_varlen`; and their checks.

The bound is `error <= 2 x error of the naive attention of the same precision`, plus half an ulp of the output. The
naive attention is `attention_varlen` on gathered keys in precision "partial" (Q K^T stored in FP16 before it is
scaled). With a bias it overflows. The bound is then the error of unbiased inputs of the same kind: 2^-9 of values of up
to 4.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

import pasa
from pasa import PasaConfig
from tests.pages import make_pages, worst

HALF_ULP = 2.0**-11 * 4  # half an ulp of an output up to 4


def varlen(pages, **how):
    queries, keys = pages.edges
    cu = torch.tensor(queries), torch.tensor(keys)
    return pasa.attention_varlen(
        pages.q[: queries[-1]], pages.k, pages.v, *cu, 10**6, 10**6, return_lse=True, backend="reference", **how
    )


@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("heads", [(2, 2), (4, 1), (7, 1), (8, 1)], ids=str)
@pytest.mark.parametrize("slots", [16, 48, 128])
def test_odd_lengths(dim, heads, slots):
    pages = make_pages([1, 15, 16, 17, 0, 127, 129], heads, dim, slots)
    golden = pages.golden()
    naive = worst(varlen(pages, config=PasaConfig(precision="partial")), golden)
    out, lse = worst(pages.attend(), golden)
    assert out <= 2 * naive[0] + HALF_ULP
    assert lse <= 2 * naive[1] + 1e-3


@pytest.mark.parametrize("overflow", ["inf", "saturate"])
@pytest.mark.parametrize("bias", [0, 300])
def test_long_cache_with_scores_beyond_fp16(bias, overflow):
    """A long cache is right with scores that share 8 bias^2 = 720,000, eleven times FP16's largest number."""
    pages = make_pages([1407, 333], (7, 1), 128, bias=bias)
    out, lse = worst(pages.attend(config=PasaConfig(overflow=overflow)), pages.golden())
    assert out <= HALF_ULP
    assert lse <= 1e-3 + 2.0**-23 * 8 * bias**2


@pytest.mark.parametrize("config", [PasaConfig(), PasaConfig(recovery="paper", overflow="saturate")], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_equals_varlen_on_gathered_keys(config, causal, dtype):
    pages = make_pages([40, 17, 0, 200], queries=[5, 1, 2, 130], dtype=dtype)
    got = pages.attend(is_causal=causal, config=config)
    for a, b in zip(got, varlen(pages, is_causal=causal, config=config), strict=True):
        assert torch.equal(a, b)


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=4),
    slots=st.integers(1, 40),
    group=st.sampled_from([1, 3]),
    data=st.data(),
)
def test_equals_varlen_whatever_the_pages(lengths, slots, group, data):
    """Results equal those of `attention_varlen` bit for bit, for any pages, and with NaN in stale slots."""
    queries = data.draw(st.lists(st.integers(0, 9), min_size=len(lengths), max_size=len(lengths)))
    queries[0], lengths[0] = queries[0] + 1, lengths[0] + 1  # attention_varlen refuses an empty batch
    pages = make_pages(lengths, (2 * group, 2), 16, slots, queries=queries, seed=data.draw(st.integers(0, 9)))
    for a, b in zip(pages.attend(is_causal=True), varlen(pages, is_causal=True), strict=True):
        assert torch.equal(a, b)


def test_sequences_share_pages():
    """Sequences may share pages: with prefix caching, both begin with the same two pages."""
    pages = make_pages([40, 50])
    pages.table[1, :2] = pages.table[0, :2]
    pages.k[40:72], pages.v[40:72] = pages.k[:32], pages.v[:32]
    out, lse = worst(pages.attend(), pages.golden())
    assert out <= HALF_ULP
    assert lse <= 1e-3


def test_a_batch_without_keys():
    out, lse = make_pages([0, 0]).attend()
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


def test_rows_behind_the_last_sequence_are_padding():
    pages = make_pages([20, 30], queries=[3, 4])
    padded = pages._replace(q=torch.cat([pages.q, torch.full((5, 4, 64), torch.nan).half()]))
    out, lse = padded.attend()
    expected, expected_lse = pages.attend()
    assert torch.equal(out[:7], expected)
    assert torch.equal(lse[:7], expected_lse)
    assert (out[7:] == 0).all()
    assert (lse[7:] == -torch.inf).all()


def test_diagnostics():
    pages = make_pages([40, 17], bias=300)
    with pasa.record_diagnostics() as records:
        pages.attend()
    assert records[0].max_score_before.max() > 65504


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_written_token_by_token(dtype):
    """Writing a prompt at once, then token by token with padding in between, gives the same cache."""
    expected = make_pages([37], dtype=dtype, stale=0.0)
    k_cache, v_cache = (torch.zeros_like(expected.k_cache) for _ in range(2))
    page = expected.table[0].long()[torch.arange(37) // 16]
    slots = (page * 16 + torch.arange(37) % 16).int()
    pasa.write_pages(expected.k[:20], expected.v[:20], k_cache, v_cache, slots[:20])
    for i in range(20, 37):
        k, v = (torch.stack([torch.full_like(x[i], 9.0), x[i], x[i]]) for x in (expected.k, expected.v))
        pasa.write_pages(k, v, k_cache, v_cache, torch.tensor([-1, int(slots[i]), -1]))
    assert torch.equal(k_cache, expected.k_cache)
    assert torch.equal(v_cache, expected.v_cache)


def test_padding_alone_writes_nothing():
    pages = make_pages([20])
    before = pages.k_cache.clone(), pages.v_cache.clone()
    pasa.write_pages(pages.k[:3], pages.v[:3], pages.k_cache, pages.v_cache, torch.tensor([-1, -1]))
    for cache, was in zip((pages.k_cache, pages.v_cache), before, strict=True):
        assert torch.equal(cache.nan_to_num(7.0), was.nan_to_num(7.0))


@pytest.mark.parametrize("anchored", [False, True])
def test_tokens_behind_the_last_slot_are_not_written(anchored):
    """Tokens beyond the end of `slot_mapping` are not written.

    A captured graph has rows of padding after its tokens, and slots for the tokens only: slot i belongs to token i.
    """
    g = torch.Generator().manual_seed(0)
    k, v = (torch.randn(7, 2, 8, generator=g).half() for _ in range(2))
    k_cache, v_cache = (torch.full((3, 4, 2, 8), 5.0).half() for _ in range(2))
    anchors = torch.zeros(3, 2, 8).half() if anchored else None
    slots = [8, -1, 9, 4]
    pasa.write_pages(k, v, k_cache, v_cache, torch.tensor(slots), anchors)
    for new, cache in ((k, k_cache), (v, v_cache)):
        expected = torch.full((12, 2, 8), 5.0).half()
        for token, slot in enumerate(slots):
            if slot >= 0:
                expected[slot] = new[token]
        assert torch.equal(cache.flatten(0, 1), expected)
    if anchored:
        alone = torch.zeros(3, 2, 8).half()
        pasa.write_pages(k[:4], v[:4], k_cache, v_cache, torch.tensor(slots), alone)
        assert torch.equal(anchors, alone)


def test_caches_may_be_views_of_one():
    """Caches may be views of one tensor, as in vLLM.

    Its shape is (2, pages, ...), or (pages, 2, ...) with the keys and values of a page side by side.
    """
    pages = make_pages([20, 33])
    expected = pages.attend()
    both = torch.stack([pages.k_cache, pages.v_cache], 1)
    got = pages._replace(k_cache=both[:, 0], v_cache=both[:, 1]).attend()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    pasa.write_pages(pages.k[:1], pages.v[:1], both[:, 0], both[:, 1], pages.table[1, 2:3] * 16 + 9)
    assert torch.equal(both[pages.table[1, 2], 0, 9], pages.k[0])


CACHES = ("k_cache", "v_cache")
WIDE = {"q": torch.zeros(2, 4, 513).half()} | dict.fromkeys(CACHES, torch.zeros(7, 16, 2, 513).half())
LARGE = {"q": torch.full((2, 4, 64), 65536.0)} | dict.fromkeys(CACHES, torch.zeros(7, 16, 2, 64))
BAD = [
    ({"block_table": torch.zeros(2, 3)}, TypeError, "block_table is torch.float32"),
    ({"block_table": torch.zeros(3, 3).int()}, ValueError, r"block_table \(3, 3\) does not fit 2 seq_lens"),
    ({"block_table": torch.full((2, 3), 99).int()}, ValueError, "names page 99, but the cache has 7 pages"),
    ({"block_table": torch.full((2, 3), -1).int()}, ValueError, "names page -1"),
    ({"seq_lens": torch.tensor([20, 49])}, ValueError, "20 to 49, but the block table has room for 0 to 48 keys"),
    ({"seq_lens": torch.tensor([-1, 9])}, ValueError, "seq_lens are -1 to 9"),
    ({"seq_lens": [20, 33]}, TypeError, "seq_lens is a list, not a Tensor"),
    ({"cu_seqlens_q": torch.tensor([0, 1, 3])}, ValueError, r"cu_seqlens_q=\[0, 1, 3\] does not rise"),
    ({"cu_seqlens_q": torch.tensor([0, 2])}, ValueError, "cu_seqlens_q has 2 entries for 2 sequences, expected 3"),
    ({"q": torch.zeros(3, 4, 64).half()}, ValueError, "q has 3 rows for 2 sequences; give cu_seqlens_q"),
    ({"q": torch.zeros(2, 3, 64).half()}, ValueError, "3 query heads are not a multiple of 2"),
    ({"q": torch.zeros(2, 4, 32).half()}, ValueError, "not of the cache's head dim 64"),
    ({"q": torch.zeros(2, 4, 64)}, TypeError, "q is torch.float32 but k_cache is torch.float16"),
    ({"k_cache": torch.zeros(7, 16, 2, 128).half()[..., ::2]}, ValueError, "the last one is not 1"),
    ({"v_cache": torch.zeros(6, 16, 2, 64).half()}, ValueError, "caches"),
    ({"v_cache": torch.zeros(16, 2, 64).half()}, ValueError, "v_cache has 3 dimensions"),
    ({"v_cache": torch.zeros(7, 16, 2, 64)}, TypeError, "v_cache is torch.float32 but k_cache is torch.float16"),
    (dict.fromkeys(CACHES, torch.zeros(0, 16, 2, 64).half()), ValueError, r"caches \(pages, .* are \(0, 16, 2, 64\)"),
    (dict.fromkeys(CACHES, torch.zeros(7, 16, 2, 64).int()), TypeError, "k_cache is torch.int32, expected one of"),
    ({"k_cache": None}, TypeError, "k_cache is a NoneType, not a Tensor"),
    ({"q": [1.0]}, TypeError, "q is a list, not a Tensor"),
    ({"q": torch.zeros(2, 4, 64, device="meta").half()}, ValueError, "q is on meta but k_cache is on cpu"),
    ({"q": torch.zeros(0, 4, 64).half()}, ValueError, r"q \(0, 4, 64\) is empty"),
    (WIDE, NotImplementedError, "head dim 513 is outside"),
    (LARGE, ValueError, "q has 256 values beyond the FP16 range"),
    ({"block_table": torch.zeros(2).int()}, ValueError, "block_table has 1 dimensions"),
    ({"block_table": torch.zeros(2, 3, device="meta").int()}, ValueError, "block_table is on meta"),
    ({"seq_lens": torch.tensor([20, 33]).short()}, TypeError, "seq_lens is torch.int16, not an int32"),
    ({"cu_seqlens_q": torch.zeros(3)}, TypeError, "cu_seqlens_q is torch.float32, not an int32"),
    ({"return_lse": 1}, TypeError, "return_lse=1"),
    ({"scale": 0.0}, ValueError, "scale=0.0"),
    ({"scale": "x"}, TypeError, "scale='x' is a str, not a number"),
    ({"backend": "x"}, ValueError, "backend='x' is not registered"),
    ({"backend": 1}, TypeError, "backend=1 is a int, not a name"),
    ({"max_seqlen_k": 0}, ValueError, "max_seqlen_k=0 is not a positive integer"),
    ({"max_seqlen_q": 1.0}, ValueError, "max_seqlen_q=1.0"),
    ({"is_causal": 1}, TypeError, "is_causal=1"),
    ({"config": PasaConfig(recovery="paper"), "backend": "triton"}, NotImplementedError, "served with recovery exact"),
    ({"backend": "npu"}, NotImplementedError, "device cpu is not among npu"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=lambda x: str(x)[:50])
def test_refuses(change, error, message):
    pages = make_pages([20, 33])
    table = torch.tensor([[0, 1, -1], [2, 3, 4]])
    call = {"q": pages.q, "k_cache": pages.k_cache[:7], "v_cache": pages.v_cache[:7], "seq_lens": pages.lengths}
    with pytest.raises(error, match=message):
        pasa.attention_paged(**call | {"block_table": table} | change)


@pytest.mark.parametrize(
    ("slots", "error", "message"),
    [
        ([0.0], TypeError, "slot_mapping is torch.float32"),
        ([10**4], ValueError, "names slot 10000"),
        ([5, 5], ValueError, "names a slot twice"),
        ([1, 2, 3, 4], ValueError, "4 slots, but 3 keys"),
    ],
)
def test_write_refuses(slots, error, message):
    pages = make_pages([20])
    with pytest.raises(error, match=message):
        pasa.write_pages(pages.k[:3], pages.v[:3], pages.k_cache, pages.v_cache, torch.tensor(slots))


@pytest.mark.parametrize("queries", [None, [3, 1]])
def test_operator_passes_opcheck(queries):
    pages = make_pages([20, 33], dim=32, queries=queries)
    tensors = (pages.q, pages.k_cache, pages.v_cache, pages.table, pages.lengths)
    torch.library.opcheck(torch.ops.pasa.attention_paged.default, tensors, {"cu_seqlens_q": pages.cu_q})


def test_a_growing_length_compiles_once():
    """A compiled decoding step serves every `max_seqlen_k` by one graph.

    Story: the schema had `int` in place of `SymInt`, so that every length was compiled anew. With `fullgraph=True` the
    ninth length was an error.
    """
    pages, counter = make_pages([20, 33]), CompileCounter()

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def step(longest):
        tables = {"block_table": pages.table, "seq_lens": pages.lengths, "max_seqlen_k": longest}
        return pasa.attention_paged(pages.q, pages.k_cache, pages.v_cache, **tables)

    for longest in range(33, 45):
        assert step(longest).isfinite().all()
    assert counter.frame_count == 1


def test_write_passes_opcheck():
    pages = make_pages([20], stale=0.0)
    call = (pages.k[:3], pages.v[:3], pages.k_cache, pages.v_cache, torch.tensor([4, -1, 9]), None)
    torch.library.opcheck(torch.ops.pasa.write_pages.default, call)


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache"])
def test_a_gradient_is_refused_by_name(name):
    """A tensor that requires a gradient is refused by name.

    Story: the output silently had no gradient.
    """
    pages = make_pages([5, 3])
    tensors = {"q": pages.q, "k_cache": pages.k_cache, "v_cache": pages.v_cache}
    tensors[name] = tensors[name].clone().requires_grad_()
    rest = {"block_table": pages.table, "seq_lens": pages.lengths}
    with pytest.raises(NotImplementedError, match=f"attention_paged has no gradient, and {name} requires one"):
        pasa.attention_paged(**tensors, **rest)
    with torch.no_grad():
        assert pasa.attention_paged(**tensors, **rest).isfinite().all()


@pytest.mark.parametrize("name", ["k", "v", "k_cache", "v_cache"])
def test_a_written_gradient_is_refused_by_name(name):
    tensors = {n: torch.ones(1, 2, 8).half() for n in ("k", "v")}
    tensors |= {n: torch.zeros(1, 16, 2, 8).half() for n in ("k_cache", "v_cache")}
    tensors[name].requires_grad_()
    with pytest.raises(NotImplementedError, match=f"write_pages has no gradient, and {name} requires one"):
        pasa.write_pages(**tensors, slot_mapping=torch.tensor([3]))
    with torch.no_grad():
        pasa.write_pages(**tensors, slot_mapping=torch.tensor([3]))
    assert int(tensors["k_cache"].sum()) == 16
