"""Windows, sinks, soft caps and largest scores in the forward kernels agree with FP64, in every family of kernels.

They run on a GPU where there is one, in Triton's interpreter elsewhere. Bound: `error <= 2 x error of the emulation`
plus half an ulp of the FP16 output, as for calls without a feature.
"""

from itertools import pairwise

import pytest
import torch
from triton.runtime import interpreter

import pasa
from pasa import PasaConfig
from pasa.ops.attention.call import Call
from pasa.ops.attention.spec.gradients import gradients
from pasa.ops.attention.triton.backend import _family, portable_attention
from pasa.ops.attention.triton.decode.launch import decode
from pasa.ops.attention.triton.kernel_call import KernelCall
from pasa.ops.attention.triton.prefill import kernel as prefill_kernel
from pasa.ops.attention.triton.short.launch import short_attention
from tests.inputs import DEVICE, max_error, normal_qkv, rmse, short_prompts
from tests.pages import make_pages

HALF_ULP = 2.0**-11 * 4  # of an output up to 4
SINKS = torch.tensor([0.5, -torch.inf, 4.0, -30.0])
# (query heads, key heads), (rows, keys), head dimension: each is served by another kernel
FAMILIES = {
    "prefill": ((4, 2), (200, 257), 64),
    "prefill-overlap": ((4, 4), (140, 300), 128),
    "prefill-few-keys": ((4, 2), (129, 63), 80),
    "short": ((4, 2), (33, 40), 64),
    "short-more-rows": ((4, 1), (90, 20), 16),
    "short-prompt": ((4, 2), (60, 200), 64),
    "short-decode": ((4, 2), (11, 300), 64),
    "short-256": ((4, 4), (3, 120), 256),
    "short-prompt-256": ((4, 2), (60, 100), 256),
    "decode-lanes": ((4, 1), (1, 400), 64),
    "decode-tiles": ((4, 2), (11, 400), 64),
    "decode-256": ((4, 4), (3, 400), 256),
}
SERVED = {"prefill": portable_attention, "short": short_attention, "decode": decode}
FEWER = ["left", "both", "sinks", "high cap", "all"]  # where cases take long
FEATURES = {
    "left": {"window": (40, -1)},
    "right": {"window": (-1, 7)},
    "both": {"window": (20, 30)},
    "diagonal": {"window": (0, 0)},
    "wide": {"window": (110, 2)},
    "wider": {"window": (390, 2)},  # keys before it are cut off, and enough for the decoding kernels are left
    "whole blocks": {"window": (210, 5)},  # some that every row of a tile sees
    "causal": {"window": (70, -1), "is_causal": True},
    "sinks": {"sinks": SINKS},
    "low cap": {"softcap": 2.0},
    "high cap": {"softcap": 3000.0, "is_causal": True},
    "all": {"window": (50, -1), "is_causal": True, "softcap": 20.0, "sinks": SINKS},
    "causal sinks": {"is_causal": True, "sinks": SINKS},
}


def on_device(**how):
    return {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in how.items()}


def without_none(window=None, softcap=None, **how):
    """Return the arguments of `golden_attention`, which has numbers for what the public function calls None."""
    return {"window": window or (-1, -1), "softcap": softcap or 0.0, **how}


def largest_scores(q, k, window=None, softcap=None, sinks=None, is_causal=False, attn_mask=None):
    """Return the largest score of each head in FP64, sinks excluded."""
    scores = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT * q.shape[-1] ** -0.5
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    if attn_mask is not None:
        bias = attn_mask if attn_mask.dtype != torch.bool else torch.zeros(attn_mask.shape).where(attn_mask, -torch.inf)
        scores = scores + bias
    rows, keys = scores.shape[-2:]
    ahead = torch.arange(keys) - torch.arange(rows)[:, None] - keys + rows
    left, right = window or (-1, -1)
    hidden = (ahead < -left) if left >= 0 else torch.zeros_like(ahead, dtype=torch.bool)
    hidden = hidden | (ahead > right) if right >= 0 else hidden
    hidden = hidden | (ahead > 0) if is_causal else hidden
    return scores.masked_fill(hidden, -torch.inf).amax((-1, -2))


def check(q, k, v, config=None, lse_bound=1e-3, **how):
    golden, golden_lse = pasa.golden_attention(q, k, v, **without_none(**how))
    tensors = (x.to(DEVICE) for x in (q, k, v))
    asked = {"return_lse": True, "return_max_logits": True, "config": config}
    out, lse, top = (x.cpu() for x in pasa.attention(*tensors, backend="triton", **asked, **on_device(**how)))
    emulated = pasa.attention(q, k, v, backend="reference", config=config, **how)
    assert max_error(out, golden) <= 2 * max_error(emulated, golden) + HALF_ULP
    assert torch.equal(lse > -torch.inf, golden_lse > -torch.inf)
    torch.testing.assert_close(lse.double(), golden_lse, atol=lse_bound, rtol=0)
    torch.testing.assert_close(top.double(), largest_scores(q, k, **how), atol=lse_bound, rtol=0)


@pytest.fixture(autouse=True)
def prompts(request):
    """Let the kernel of few keys serve prompts in one family alone."""
    with short_prompts("short-prompt" in request.node.name):
        yield


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_served_by_the_kernels_that_it_is_named_after(family):
    """Story: calls of 300 keys moved to the kernel for few keys, and nothing tested features of decoding any more."""
    heads, lengths, dim = FAMILIES[family]
    q, k, v = (x.to(DEVICE) for x in normal_qkv(heads, lengths, dim))
    call = KernelCall.of(Call(q, k, v, dim**-0.5, window=FEATURES["wider"]["window"]).narrowed())
    assert _family(call) is SERVED[family.partition("-")[0]]


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("family", FAMILIES)
def test_agrees_with_fp64(family, feature):
    heads, lengths, dim = FAMILIES[family]
    check(*normal_qkv(heads, lengths, dim, batch=2), **FEATURES[feature])


@pytest.mark.parametrize("window", [(30, 0), (30, -1), (-1, 0), (29, 1)])
def test_a_tile_of_several_heads_ends_with_the_keys_of_the_last_row(window):
    """The first of two tiles ends with row 3 of a head, and holds row 14 of others, which sees more keys."""
    check(*normal_qkv((8, 1), (15, 300), 64), window=window)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("feature", ["both", "causal", "sinks", "low cap", "all"])
@pytest.mark.parametrize("family", ["prefill", "short", "short-decode", "decode-tiles"])
def test_beside_a_mask(family, feature, kind):
    heads, (rows, keys), dim = FAMILIES[family]
    keep = torch.rand(2, 1, rows, keys, generator=torch.Generator().manual_seed(4)) < 0.7
    keep[0, :, 64:128, :200], keep[1, ..., :30] = True, False
    mask = keep if kind == "bool" else torch.zeros(keep.shape).where(keep, -torch.inf)
    check(*normal_qkv(heads, (rows, keys), dim, batch=2), attn_mask=mask, **FEATURES[feature])


@pytest.mark.parametrize(
    "config", [PasaConfig(precision="fp32"), PasaConfig(block_k=32), PasaConfig(accumulate="fp16")]
)
@pytest.mark.parametrize("feature", ["both", "all", "sinks"])
def test_other_options(feature, config):
    check(*normal_qkv((4, 2), (70, 150), 64), config, **FEATURES[feature])


@pytest.mark.parametrize("family", ["prefill", "short", "decode-lanes"])
def test_unbiased_rounding_comes_after_the_sink(family):
    heads, lengths, dim = FAMILIES[family]
    q, k, v = normal_qkv(heads, lengths, dim)
    golden, _ = pasa.golden_attention(q, k, v, sinks=SINKS)
    how = {"sinks": SINKS.to(DEVICE), "config": PasaConfig(softmax="unbiased"), "backend": "triton"}
    for dtype, ulp in ((torch.float16, 2.0**-10), (torch.bfloat16, 2.0**-7)):
        out = pasa.attention(*(x.to(DEVICE, dtype) for x in (q, k, v)), **how)
        inputs = (x.to(dtype).half() for x in (q, k, v))
        golden, _ = pasa.golden_attention(*inputs, sinks=SINKS)
        assert max_error(out.cpu(), golden) <= 2 * ulp


@pytest.mark.parametrize("family", ["prefill", "prefill-overlap", "decode-lanes", "decode-tiles"])
@pytest.mark.parametrize("feature", ["left", "both", "causal", "sinks"])
def test_bias_that_all_keys_share(family, feature):
    """Scores of 90,000 that all keys share leave the error that they have without, beside a window or a small sink."""
    heads, lengths, dim = FAMILIES[family]
    q, k, v = normal_qkv(heads, lengths, dim)
    q[..., :8] += 300
    k[..., :8] += 300
    how = dict(FEATURES[feature])
    golden, _ = pasa.golden_attention(q, k, v, **without_none(**how))
    out = pasa.attention(*(x.to(DEVICE) for x in (q, k, v)), backend="triton", **on_device(**how)).cpu()
    emulated = pasa.attention(q, k, v, backend="reference", **how)
    assert rmse(out, golden) <= 1.5 * rmse(emulated, golden) + 2.0**-12


@pytest.mark.parametrize(
    "family", ["prefill", "prefill-overlap", "short", "decode-lanes", "decode-tiles", "decode-256"]
)
@pytest.mark.parametrize("cap", [30.0, 900.0, 2.0**20])
def test_caps_of_large_scores(family, cap):
    """Scores of 1e5 are finite below any cap, and err as FP32 scores do."""
    heads, lengths, dim = FAMILIES[family]
    q, k, v = normal_qkv(heads, lengths, dim)
    q, k = q * 150, k * 150
    golden, golden_lse = pasa.golden_attention(q, k, v, softcap=cap)
    how = {"softcap": cap, "return_lse": True}
    out, lse = (x.cpu() for x in pasa.attention(*(x.to(DEVICE) for x in (q, k, v)), backend="triton", **how))
    emulated, _ = pasa.attention(q, k, v, backend="reference", **how)
    assert max_error(out, golden) <= 2 * max_error(emulated, golden) + HALF_ULP
    torch.testing.assert_close(lse.double(), golden_lse, atol=1e-3, rtol=2.0**-20)


@pytest.mark.parametrize("feature", ["both", "causal", "sinks", "low cap", "all"])
@pytest.mark.parametrize("family", FAMILIES)
def test_non_finite_elements_reach_the_rows_that_see_them(family, feature):
    """A NaN or infinity in q, k or v makes NaN what the reference makes NaN, outside of windows nothing."""
    heads, (rows, keys), dim = FAMILIES[family]
    q, k, v = normal_qkv(heads, (rows, keys), dim, batch=2)
    k[0, 0, keys // 2, 3], k[1, -1, keys - 3, 0] = torch.nan, torch.inf
    v[1, 0, keys - 9, 2], v[0, 0, 2, 1] = -torch.inf, torch.nan
    q[1, 1, rows - 1, 5] = torch.inf
    how = FEATURES[feature] | {"return_lse": True, "return_max_logits": True}
    expected = pasa.attention(q, k, v, backend="reference", **how)
    got = pasa.attention(*(x.to(DEVICE) for x in (q, k, v)), backend="triton", **on_device(**how))
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one.cpu().isnan(), other.isnan())
        torch.testing.assert_close(one.cpu(), other, atol=0.01, rtol=0, equal_nan=True)


@pytest.mark.parametrize("feature", FEWER)
@pytest.mark.parametrize(
    ("heads", "dim", "queries", "lengths"),
    [
        ((4, 2), 64, [20, 1, 0, 3, 4, 9], [110, 90, 30, 0, 2, 9]),
        ((4, 1), 128, [3, 33], [140, 90]),
    ],
    ids=["mixed", "prompts"],
)
@pytest.mark.parametrize("kind", ["packed", "paged"])
def test_packed_and_paged(kind, heads, dim, queries, lengths, feature):
    """Rows, keys and windows are counted within each sequence; some lack queries, keys, or fill no window."""
    assert_sequences(make_pages(lengths, heads, dim, queries=queries), kind, FEATURES[feature])


@pytest.mark.parametrize("feature", FEWER)
@pytest.mark.parametrize("slots", [1, 16, 48])
def test_one_query_for_each_sequence(feature, slots):
    """Decoding from pages; with anchors of pages, which calls with a window or a cap do without."""
    pages = make_pages([1, 15, 16, 0, 129, 200], (4, 1), 64, slots)
    assert_sequences(pages, "paged", FEATURES[feature])
    if slots == 16:
        assert_sequences(pages.anchored(), "paged", FEATURES[feature])
        assert_sequences(make_pages([300, 200], (4, 1), 64, bias=300).anchored(), "paged", FEATURES[feature], 300)


def assert_sequences(pages, kind, how, bias=0):
    queries, keys = pages.edges
    here = pages.to(DEVICE)
    asked = {"return_lse": True, "return_max_logits": True, "backend": "triton"} | on_device(**how)
    if kind == "packed":
        cu_k = torch.tensor(keys, device=DEVICE)
        longest = max(b - a for a, b in pairwise(queries)), int(pages.lengths.max())
        out, lse, top = pasa.attention_varlen(here.q, here.k, here.v, here.cu_q.long(), cu_k, *longest, **asked)
    else:
        call = here.q, here.k_cache, here.v_cache, here.table, here.lengths
        out, lse, top = pasa.attention_paged(*call, **here.how, **asked)
    emulating = {"return_lse": True, "backend": "reference"} | how
    for b in range(len(pages.lengths)):
        rows, span = slice(*queries[b : b + 2]), slice(*keys[b : b + 2])
        if rows.start == rows.stop:
            assert (top[b].cpu() == -torch.inf).all()
            continue
        q, k, v = (x.transpose(0, 1)[None] for x in (pages.q[rows], pages.k[span], pages.v[span]))
        golden, golden_lse = pasa.golden_attention(q, k, v, **without_none(**how))
        emulated = pasa.attention(q, k, v, **emulating)[0] if k.shape[2] else golden
        one, one_lse = out[rows].cpu().transpose(0, 1)[None], lse[rows].cpu().T[None]
        assert max_error(one, golden) <= 2 * max_error(emulated, golden) + HALF_ULP
        bound = {"atol": 1e-3 + 2.0**-23 * bias**2, "rtol": 2.0**-22}
        torch.testing.assert_close(one_lse.double(), golden_lse, **bound)
        largest = largest_scores(q, k, **how)[0] if k.shape[2] else torch.full((q.shape[1],), -torch.inf).double()
        torch.testing.assert_close(top[b].cpu().double(), largest, **bound)


def test_keys_outside_of_the_window_of_a_sequence_may_be_anything():
    """NaN, infinity and 65504 in keys and values that no row of a sequence sees change no bit of the other sequence.

    They change their own sequence by no more than a rounding.
    """
    pages = make_pages([200, 150], (4, 2), 64, queries=[70, 3])
    how = {"window": (20, -1), "is_causal": True, "return_lse": True, "return_max_logits": True, "backend": "triton"}
    cu_k = torch.tensor([0, 200, 350], device=DEVICE)
    clean = pages.to(DEVICE)
    k, v = clean.k.clone(), clean.v.clone()
    k[:50], v[:50] = torch.nan, torch.inf
    k[50:100], k[205:300] = 65504.0, torch.inf
    runs = [
        pasa.attention_varlen(clean.q, keys, values, clean.cu_q.long(), cu_k, 70, 200, **how)
        for keys, values in ((clean.k, clean.v), (k, v))
    ]
    for one, other in zip(*runs, strict=True):
        torch.testing.assert_close(one, other, atol=2e-3, rtol=0)


def test_sinks_alone():
    """Rows without keys give 0 and their sink; a sink above all scores takes all weight, one of -inf none."""
    q, k, v = (x.to(DEVICE) for x in normal_qkv((4, 2), (100, 70), 64))
    sinks = torch.tensor([-torch.inf, 3.0, 1e4, -1e4], device=DEVICE)
    how = {"is_causal": True, "return_lse": True, "backend": "triton"}
    out, lse = pasa.attention(q, k, v, sinks=sinks, **how)
    plain, plain_lse = pasa.attention(q, k, v, **how)
    assert (out[:, :, :30] == 0).all()
    assert torch.equal(lse[0, :, :30], sinks[:, None].expand(4, 30))
    assert (out[:, 2] == 0).all()
    assert (lse[:, 2] == 1e4).all()
    for head in (0, 3):
        torch.testing.assert_close(out[:, head, 30:], plain[:, head, 30:], atol=2e-3, rtol=0)
        torch.testing.assert_close(lse[:, head, 30:], plain_lse[:, head, 30:], atol=1e-3, rtol=0)


@pytest.mark.skipif(DEVICE != "cpu", reason="watches what the interpreter loads")
@pytest.mark.parametrize("family", FAMILIES)
def test_no_sink_is_read_behind_the_last_one(monkeypatch, family):
    """Story: rows that fill a tile up belong to no head, and their sinks were read from behind the tensor."""
    heads, lengths, dim = FAMILIES[family]
    numbers = torch.zeros(4 * heads[0])
    sinks = numbers[: heads[0]]
    first, last, end = (numbers.data_ptr() + 4 * at for at in (0, heads[0], len(numbers)))
    load, read = interpreter.InterpreterBuilder.create_masked_load, []

    def watched(builder, pointers, mask, *how):
        at = pointers.data[mask.data]
        read.extend(at[(at >= first) & (at < end)].tolist())
        return load(builder, pointers, mask, *how)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", watched)
    pasa.attention(*normal_qkv(heads, lengths, dim), sinks=sinks, backend="triton")
    assert {(at - first) // 4 for at in read} == set(range(heads[0]))
    assert all(at < last for at in read)


@pytest.mark.skipif(DEVICE != "cpu", reason="counts what the interpreter loads")
@pytest.mark.parametrize(("window", "tiles"), [((64, 0), 7), ((-1, -1), 16), ((10, 10), 10)])
def test_tiles_outside_of_the_window_are_skipped(monkeypatch, window, tiles):
    """Each of four row tiles of 64 loads the key tiles that its rows see, for K and for V."""
    q, k, v = normal_qkv((1, 1), (256, 256), 64)
    loads, load = [], prefill_kernel.load_rows
    monkeypatch.setattr(prefill_kernel, "load_rows", lambda *args, **how: (loads.append(1), load(*args, **how))[1])
    pasa.attention(q, k, v, window=window, backend="triton", config=PasaConfig(precision="fp32"))
    assert len(loads) == 2 * tiles


@pytest.mark.parametrize(
    ("feature", "kind", "bias"),
    [
        ("left", "none", 0),
        ("both", "none", 300),
        ("both", "float", 0),
        ("causal", "bool", 300),
        ("sinks", "none", 0),
        ("sinks", "float", 300),
        ("window and sinks", "none", 300),
        ("window and sinks", "bool", 0),
    ],
)
@pytest.mark.parametrize("family", ["prefill", "prefill-few-keys", "decode-tiles"])
def test_gradients(family, feature, kind, bias):
    """Gradients of queries, keys, values and sinks agree with the formulas in FP64, for gradients of both results."""
    heads, (rows, keys), dim = FAMILIES[family]
    q, k, v = normal_qkv(heads, (rows, keys), dim)
    q[..., :8] += bias
    k[..., :8] += bias
    how = dict(FEATURES.get(feature, FEATURES["causal"] | FEATURES["sinks"]))
    g = torch.Generator().manual_seed(5)
    grads = torch.randn(q.shape, generator=g), torch.randn(q.shape[:-1], generator=g)
    if kind != "none":
        keep = torch.rand(rows, keys, generator=g) < 0.8
        how["attn_mask"] = keep if kind == "bool" else torch.zeros(keep.shape).where(keep, -torch.inf)
    formula = {name: x for name, x in how.items() if name not in ("attn_mask", "sinks")}
    call = Call(q.double(), k.double(), v.double(), dim**-0.5, mask=how.get("attn_mask"), **formula)
    of_sinks = torch.zeros(heads[0], dtype=torch.float64)
    if "sinks" in how:
        call.sinks = how["sinks"].double()
        how["sinks"] = how["sinks"].to(DEVICE, copy=True).requires_grad_()
    exact = [*gradients(call, *(x.half().double() for x in grads), grad_sinks=of_sinks), of_sinks]
    leaves = [x.to(DEVICE).requires_grad_() for x in (q, k, v)]
    here = on_device(**{name: x for name, x in how.items() if name != "sinks"})
    out = pasa.attention(*leaves, backend="triton", return_lse=True, sinks=how.get("sinks"), **here)
    leaves += [how["sinks"]] if "sinks" in how else []
    got = torch.autograd.grad(out, leaves, [x.half().to(y) for x, y in zip(grads, out, strict=True)])
    for one, other in zip(got, exact, strict=False):
        assert (one.cpu().double() - other).norm() <= 2e-3 * other.norm() + 1e-3
