"""Windows, sinks, soft caps and largest scores: results and gradients of the reference agree with FP64.

Bound: `error <= c * error of the same-precision naive`, and half an ulp of what is rounded last. The naive forward
stores q k^T in FP16 and its weights too; the naive gradients are FP32 autograd of the definition.
"""

import itertools

import pytest
import torch

import pasa
from pasa import PasaConfig
from pasa.ops.attention.spec.scores import ExactScores, FlashScores
from tests.inputs import REFERENCE_MODES, max_error, normal_qkv
from tests.pages import make_pages

HALF_ULP = 2.0**-11
STORED = 2.0**-8  # scores below 8 nats err by half of this when FP16 stores them
WINDOWS = [None, (0, 0), (17, 0), (100, -1), (-1, 40), (128, 30), (1000, 1000)]
LENGTHS = [(130, 130), (50, 300), (300, 70), (1, 500)]  # (Sq, Skv)


def seen(rows, keys, is_causal=False, window=None):
    """Return which keys (rows, keys) the band of a call shows."""
    ahead = torch.arange(keys) - torch.arange(rows)[:, None] - (keys - rows)
    left, right = window or (-1, -1)
    band = (ahead >= -left) | (left < 0)
    return band & ((ahead <= right) | (right < 0)) & ((ahead <= 0) | (not is_causal))


def true_scores(q, k, attn_mask=None, is_causal=False, window=None, softcap=None, sinks=None, stored=None):
    """Return scaled, capped and masked scores in the dtype of q; `stored` is the dtype that q k^T is rounded to."""
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    scores = (scores if stored is None else scores.to(stored).to(q.dtype)) * q.shape[-1] ** -0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    band = seen(*scores.shape[-2:], is_causal, window)
    if attn_mask is not None:
        band, bias = (band & attn_mask, 0.0) if attn_mask.dtype == torch.bool else (band, attn_mask)
        scores = scores + bias
    return scores.masked_fill(~band, -torch.inf)


def naive(q, k, v, sinks=None, stored=None, **how):
    """Return softmax(scores) v in the dtype of q; with `stored`, scores and weights are rounded to it."""
    scores = true_scores(q, k, stored=stored, **how)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(q)[:, None, None].expand(*scores.shape[:-1], 1)), -1)
    live = (scores > -torch.inf).any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(~live, 0.0), -1).where(live, 0.0)[..., : k.shape[2]]
    weights = weights if stored is None else weights.to(stored).to(q.dtype)
    lse = torch.logsumexp(scores.masked_fill(~live, 0.0), -1).where(live.squeeze(-1), -torch.inf)
    return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1), lse


def check(q, k, v, config=None, lse_bound=STORED, **how):
    golden, golden_lse = pasa.golden_attention(q, k, v, **how)
    call = {"config": config, "return_lse": True, "return_max_logits": True}
    out, lse, max_logits = pasa.attention(q, k, v, **how, **call)
    plain, _ = naive(q.float(), k.float(), v.float(), stored=torch.float16, **how)
    factor = 8 if config is not None and config.accumulate == "fp16" else 2
    assert max_error(out, golden) <= factor * (max_error(plain.nan_to_num(0.0), golden) + 2 * HALF_ULP)
    live = golden_lse > -torch.inf
    assert torch.equal(lse > -torch.inf, live)
    assert not live.any() or (lse - golden_lse)[live].abs().max() <= lse_bound
    assert not out[~live].any()
    largest = true_scores(q.double(), k.double(), **how).amax((-1, -2))
    torch.testing.assert_close(max_logits.double(), largest, atol=lse_bound, rtol=0)


def some_mask(kind, q, k):
    g = torch.Generator().manual_seed(5)
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if kind == "bool":
        return torch.rand(shape[0], 1, *shape[2:], generator=g) > 0.3
    return torch.randn(1, *shape[1:], generator=g) if kind == "float" else None


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_windows(window, lengths, is_causal):
    check(*normal_qkv((2, 1), lengths, 32), window=window, is_causal=is_causal)


COMBINED = list(itertools.product(["none", "bool", "float"], [False, True], [None, 5.0, 30.0], [False, True]))


@pytest.mark.parametrize("mode", REFERENCE_MODES, ids=str)
@pytest.mark.parametrize("lengths", [(70, 200), (200, 70)], ids=str)
def test_all_together(mode, lengths):
    """Every mask, with and without a causal band, sinks and a soft cap, under windows in turn; with grouped heads."""
    q, k, v = normal_qkv((4, 2), lengths, 40, batch=2)
    sinks = 3 * torch.randn(4, generator=torch.Generator().manual_seed(1))
    for number, (mask, is_causal, softcap, sunk) in enumerate(COMBINED):
        how = {"is_causal": is_causal, "softcap": softcap, "sinks": sinks if sunk else None}
        check(q, k, v, mode.config, attn_mask=some_mask(mask, q, k), window=WINDOWS[number % len(WINDOWS)], **how)


@pytest.mark.parametrize("precision", ["fp16", "partial", "prescaled", "smooth_k", "fp32"])
def test_baselines_have_windows_and_sinks(precision):
    q, k, v = normal_qkv((2, 2), (60, 200), 64)
    config = PasaConfig(precision=precision)
    check(q, k, v, config, lse_bound=6 * STORED, window=(50, 3), sinks=torch.tensor([1.0, -1.0]))


@pytest.mark.parametrize(("size", "cap"), [(100.0, 50.0), (1e5, 50.0), (1e10, 20.0), (1e10, 2.0**20)])
def test_soft_caps_of_large_scores(size, cap):
    """A capped score of 1e10 is the cap, and outputs stay in the range of the values."""
    q, k, v = normal_qkv((2, 1), (60, 200), 64)
    q, k = ((x.float().clamp(-3, 3) * (size / 8) ** 0.5).clamp(-65504, 65504).half() for x in (q, k))
    out, max_logits = pasa.attention(q, k, v, softcap=cap, return_max_logits=True)
    golden, _ = pasa.golden_attention(q, k, v, softcap=cap)
    plain, _ = naive(q.float(), k.float(), v.float(), softcap=cap)
    assert max_error(out, golden) <= 2 * max_error(plain, golden) + 2 * HALF_ULP * v.abs().max()
    assert out.isfinite().all()
    assert (out <= v.amax(2, keepdim=True)).all()
    assert (out >= v.amin(2, keepdim=True)).all()
    assert (max_logits <= cap).all()


def test_a_soft_cap_needs_the_true_score():
    q, k, v = normal_qkv((1, 1), (3, 5), 16)
    for config in (PasaConfig(recovery="paper"), PasaConfig(precision="partial")):
        with pytest.raises(NotImplementedError, match="soft caps are served with"):
            pasa.attention(q, k, v, softcap=30.0, config=config)


@pytest.mark.parametrize("accumulate", ["fp32", "fp16"])
def test_infinite_sinks(accumulate):
    """A sink of -inf changes no bit; one of +inf takes all the weight; NaN stays in its head."""
    q, k, v = normal_qkv((4, 2), (30, 70), 32)
    how = {
        "config": PasaConfig(accumulate=accumulate),
        "window": (20, 0),
        "return_lse": True,
        "return_max_logits": True,
    }
    plain = pasa.attention(q, k, v, **how)
    sinks = torch.tensor([-torch.inf, torch.inf, torch.nan, -torch.inf])
    out, lse, max_logits = pasa.attention(q, k, v, sinks=sinks, **how)
    for ours, theirs in zip((out, lse), plain, strict=False):
        assert torch.equal(ours[:, ::3], theirs[:, ::3])
        assert ours[:, 2].isnan().all()
    assert not out[:, 1].any()
    assert (lse[:, 1] == torch.inf).all()
    assert torch.equal(max_logits, plain[2])


def test_rows_without_keys_have_their_sink():
    """A row without keys gives 0, and its sink as log-sum-exp, whether a mask, a band or a length hides the keys."""
    q, k, v = normal_qkv((2, 1), (3, 5), 16)
    sinks = torch.tensor([2.0, -1.0]).half()
    how = {"sinks": sinks, "return_lse": True, "return_max_logits": True}
    hidden = [
        pasa.attention(q, k, v, attn_mask=torch.zeros(3, 5).bool(), **how),
        pasa.attention(q, k, v, attn_mask=torch.full((3, 5), -torch.inf), window=(1, 1), **how),
    ]
    rows, keys = q[0].transpose(0, 1), k[0, 0, :, None]
    edges, lengths = torch.tensor([0, 3, 3]), torch.tensor([0, 0, 5])  # only a sequence without queries has keys
    packed = pasa.attention_varlen(rows, keys, keys, edges, lengths, 3, 5, **how)
    hidden.append((packed[0].transpose(0, 1)[None], packed[1].T[None], packed[2]))
    cache = keys[None].expand(2, -1, -1, -1).contiguous()
    table = torch.zeros(3, 1, dtype=torch.int32)
    paged = pasa.attention_paged(rows, cache, cache, table, torch.zeros(3, dtype=torch.int32), **how)
    hidden.append((paged[0].transpose(0, 1)[None], paged[1].T[None], paged[2]))
    for out, lse, max_logits in hidden:
        assert not out.any()
        assert torch.equal(lse, sinks.float()[:, None].expand(1, 2, 3))
        assert (max_logits == -torch.inf).all()


def test_packed_and_paged_calls_are_their_sequences():
    """Sequences of packed and paged calls have the bits of dense calls, and largest scores of their own."""
    pages = make_pages([70, 0, 200, 40], (4, 2), queries=[5, 2, 60, 40])
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(2))
    how = {"window": (33, 0), "softcap": 20.0, "sinks": sinks, "return_lse": True, "return_max_logits": True}
    queries, keys = (torch.tensor(each) for each in pages.edges)
    packed = pasa.attention_varlen(pages.q, pages.k, pages.v, queries, keys, 60, 200, **how)
    caches = pages.k_cache, pages.v_cache, pages.table, pages.lengths
    paged = pasa.attention_paged(pages.q, *caches, cu_seqlens_q=pages.cu_q, **how)
    for ours, theirs in zip(packed, paged, strict=True):
        assert torch.equal(ours, theirs)
    assert packed[2].shape == (4, 4)
    for number, (rows, span) in enumerate(zip(*(itertools.pairwise(each) for each in pages.edges), strict=True)):
        if span[0] == span[1]:
            assert (packed[2][number] == -torch.inf).all()
            continue
        parts = (pages.q[slice(*rows)], pages.k[slice(*span)], pages.v[slice(*span)])
        out, lse, max_logits = pasa.attention(*(x.transpose(0, 1)[None] for x in parts), **how)
        assert torch.equal(packed[0][slice(*rows)].transpose(0, 1)[None], out)
        assert torch.equal(packed[1][slice(*rows)].T[None], lse)
        assert torch.equal(packed[2][number : number + 1], max_logits)


@pytest.mark.parametrize("window", [(10, 0), (3, 4)], ids=str)
def test_a_key_outside_of_the_window_reaches_no_row(window):
    q, k, v = normal_qkv((2, 2), (60, 90), 32)
    golden, golden_lse = pasa.golden_attention(q, k, v, window=window)
    k[:, :, 50], v[:, :, 50] = torch.nan, torch.inf
    out, lse, max_logits = pasa.attention(q, k, v, window=window, return_lse=True, return_max_logits=True)
    reached = seen(60, 90, window=window)[:, 50]
    assert torch.equal(lse[0, 0].isnan(), reached)
    assert max_error(out[:, :, ~reached], golden[:, :, ~reached]) <= 4 * HALF_ULP
    assert (lse - golden_lse)[:, :, ~reached].abs().max() <= STORED
    assert max_logits.isnan().all()


@pytest.mark.parametrize("softcap", [None, 20.0])
def test_a_window_computes_no_score_outside_of_its_tiles(monkeypatch, softcap):
    computed = []
    for model in (ExactScores, FlashScores):

        def tile(self, block, model=model, original=model.tile):
            computed.append(block.q.shape[-2] * block.k.shape[-2])
            return original(self, block)

        monkeypatch.setattr(model, "tile", tile)
    q, k, v = normal_qkv((1, 1), (1024, 1024), 16)
    pasa.attention(q, k, v, window=(64, 0), softcap=softcap, backend="reference")
    assert sum(computed) <= 1024 * (128 + 64)
    computed.clear()
    pasa.attention(q[:, :, :1], k, v, window=(64, 0), softcap=softcap, backend="reference")
    assert sum(computed) == 65


@pytest.mark.parametrize("mask", ["none", "bool", "float"])
@pytest.mark.parametrize("softcap", [None, 8.0])
@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("lengths", [(40, 150), (150, 140), (1, 90)], ids=str)
def test_gradients(lengths, sunk, softcap, mask):
    """Gradients of q, k, v, a float mask and sinks, through output and log-sum-exp, are those of FP64."""
    q, k, v = normal_qkv((4, 2), lengths, 16)
    attn_mask, sinks = some_mask(mask, q, k), torch.tensor([1.0, -2.0, 0.0, 3.0]) if sunk else None
    tensors = {"q": q.float(), "k": (k + 2).float(), "v": v.float(), "attn_mask": attn_mask, "sinks": sinks}
    variables = [name for name, x in tensors.items() if x is not None and x.dtype != torch.bool]
    for number, (window, is_causal) in enumerate(itertools.product([None, (20, 0), (30, 7)], [False, True])):
        g = torch.Generator().manual_seed(number)
        grads = torch.randn(q.shape, generator=g), torch.randn(q.shape[:3], generator=g)
        how = {"window": window, "is_causal": is_causal, "softcap": softcap}

        def gradients(function, kind, how=how, grads=grads):
            leaves = {name: tensors[name].detach().to(kind).requires_grad_() for name in variables}
            out, lse = function(**(tensors | leaves | how))
            live = lse.detach() > -torch.inf
            loss = (out * grads[0].to(out)).where(live[..., None], 0.0).sum() + (lse * grads[1]).where(live, 0.0).sum()
            return [x.nan_to_num(0.0) for x in torch.autograd.grad(loss, list(leaves.values()))]

        ours = gradients(lambda **x: pasa.attention(**x, return_lse=True), torch.float32)
        plain, exact = gradients(naive, torch.float32), gradients(naive, torch.float64)
        for name, mine, theirs, true in zip(variables, ours, plain, exact, strict=True):
            assert max_error(mine, true) <= 2 * max_error(theirs, true) + 2.0**-20 * (1 + true.abs().max()), name


@pytest.mark.parametrize("softcap", [None, 0.5])
def test_diagnostics_count_what_the_window_shows(softcap):
    """Maxima are over the keys in the window, whatever the soft cap, and tiles are those that were computed."""
    q, k, v = normal_qkv((2, 2), (512, 512), 32)
    k[:, :, 300] = 1000.0
    with pasa.record_diagnostics() as records:
        pasa.attention(q, k, v, window=(20, 0), softcap=softcap, sinks=torch.zeros(2))
    products = (q.double() @ k.double().mT).where(seen(512, 512, window=(20, 0)), 0.0).abs()
    torch.testing.assert_close(records[0].max_score_before, products.amax((-1, -2)), rtol=1e-6, atol=0)
    assert torch.equal(records[0].tiles, torch.full((1, 2), 4.0 + 3).double())  # the diagonal, and what reaches below
    assert not records[0].saturated.any()


def test_gradients_of_packed_sequences_are_those_of_their_parts():
    """Sinks get gradients from every sequence; of one without keys, only its log-sum-exp depends on them."""
    q, k, v = normal_qkv((4, 2), (12, 90), 16)
    sinks = torch.tensor([1.0, -2.0, 0.0, 3.0]).half().requires_grad_()
    how = {"window": (20, 0), "softcap": 8.0, "sinks": sinks, "return_lse": True}
    rows, keys = torch.tensor([0, 4, 7, 12]), torch.tensor([0, 30, 30, 90])
    packed = [x[0].transpose(0, 1).float().requires_grad_() for x in (q, k, v)]
    out, lse = pasa.attention_varlen(*packed, rows, keys, 5, 60, **how)
    ours = torch.autograd.grad(out.square().sum() + lse.square().sum(), [*packed, sinks])
    dense = [x.float().requires_grad_() for x in (q, k, v)]
    loss = 3 * sinks.float().square().sum()  # the second sequence has three rows, and no keys
    for a, b, c, d in ((0, 4, 0, 30), (7, 12, 30, 90)):
        out, lse = pasa.attention(dense[0][:, :, a:b], *(x[:, :, c:d] for x in dense[1:]), **how)
        loss = loss + out.square().sum() + lse.square().sum()
    *expected, of_sinks = torch.autograd.grad(loss, [*dense, sinks])
    for mine, theirs in zip(ours, expected, strict=False):
        torch.testing.assert_close(mine.transpose(0, 1)[None], theirs)
    assert ours[3].dtype == torch.float16
    torch.testing.assert_close(ours[3], of_sinks, rtol=2**-9, atol=0)


def test_gradients_with_infinite_sinks():
    q, k, v = (x.requires_grad_() for x in normal_qkv((2, 2), (5, 9), 16))
    sinks = torch.tensor([-torch.inf, torch.inf]).requires_grad_()
    expected = torch.autograd.grad(pasa.attention(q, k, v)[:, 0].float().square().sum(), [q, k, v])
    *ours, of_sinks = torch.autograd.grad(pasa.attention(q, k, v, sinks=sinks).float().square().sum(), [q, k, v, sinks])
    for mine, theirs in zip(ours, expected, strict=True):
        assert torch.equal(mine[:, 0], theirs[:, 0])
        assert not mine[:, 1].any()
    assert not of_sinks.any()


def test_gradients_of_a_call_whose_keys_are_all_masked_out():
    """The log-sum-exp of an entry whose keys are all masked out still depends on the sinks, and on nothing else."""
    q, k, v = (x.requires_grad_() for x in normal_qkv((2, 2), (5, 9), 16, batch=2))
    sinks, mask = torch.tensor([1.0, 2.0]).requires_grad_(), torch.tensor([True, False])[:, None, None, None]
    _, lse = pasa.attention(q, k, v, attn_mask=mask, sinks=sinks, return_lse=True)
    *grads, of_sinks = torch.autograd.grad(lse[1].sum(), [q, k, v, sinks])
    assert not any(x.any() for x in grads)
    assert torch.equal(of_sinks, torch.tensor([5.0, 5.0]))
