"""Show what the fast pass of the portable kernels leaves to the exact pass: nothing that all keys of a head share.

Story: a bias of 80 on some channels of Q and K, as trained models have, sent every tile through both passes, at a
quarter of the speed; a float mask sent all data through the exact pass.
"""

import pytest
import torch

import pasa
from pasa.ops import plans
from pasa.ops.attention.triton.prefill import launch
from tests.inputs import DEVICE, portable_kernel

HALF_ULP = 2.0**-11
ROWS, KEYS = 150, 533


@pytest.fixture
def marked(monkeypatch):
    """Return the marks of the calls so far."""
    found, centre = [], launch.centre_keys
    monkeypatch.setattr(plans, "_plans", {})  # a plan would repeat the launches alone
    monkeypatch.setattr(launch, "centre_keys", lambda *args, **how: (found.append(centre(*args, **how)), found[-1])[1])
    with portable_kernel():
        yield lambda: [int(each.marked) for each in found]


def inputs(dim, bias=80.0, seed=0, tokens=None):
    g = torch.Generator().manual_seed(seed)
    shapes = [(2, 4, ROWS, dim), (2, 2, KEYS, dim), (2, 2, KEYS, dim)]
    if tokens is not None:
        shapes = [(tokens, heads, dim) for heads in (4, 2, 2)]
    q, k, v = (torch.randn(shape, generator=g) for shape in shapes)
    q[..., : dim // 4] += bias
    k[..., : dim // 4] += bias
    return q.half(), k.half(), v.half()


def padding():
    """Return a mask of sequences that are padded on the left, by 201 and by 0 keys."""
    return (torch.arange(KEYS) >= torch.tensor([201, 0])[:, None])[:, None, None, :]


def check(out, lse, golden, golden_lse, v):
    assert ((out.cpu().double() - golden).abs() <= 4 * HALF_ULP * v.double().abs().max()).all()
    assert torch.allclose(lse.cpu().double(), golden_lse, rtol=2e-6, atol=1e-3)


CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window": (200, 0)},
    "sinks": {"is_causal": True, "sinks": torch.tensor([0.0, -3.0, 13000.0, -torch.inf])},
    "bool": {"attn_mask": padding()},
    "causal bool": {"attn_mask": padding(), "is_causal": True},
    "float": {"attn_mask": torch.zeros(2, 1, 1, KEYS).masked_fill(~padding(), -torch.inf)},
    "lowest": {"attn_mask": torch.zeros(2, 1, 1, KEYS).masked_fill(~padding(), -3.4028234663852886e38)},
    "biased float": {"attn_mask": torch.linspace(-9.0, 9.0, KEYS).half().expand(2, 4, ROWS, KEYS)},
}


@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("dim", [160, 256])
def test_a_bias_takes_no_second_pass(how, dim, marked):
    q, k, v = inputs(dim)
    call = CALLS[how]
    there = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    tensors = [x.to(DEVICE) for x in (q, k, v)]
    out, lse = pasa.attention(*tensors, **there, backend="triton", return_lse=True)
    assert marked() == [0]
    check(out, lse, *pasa.golden_attention(q, k, v, **call), v)


@pytest.mark.parametrize("garbage", [0.0, torch.nan, torch.inf, -60000.0])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_padding_takes_no_second_pass(kind, garbage, marked):
    """Keys and values that no row sees may hold anything: fresh caches are zeros, and used ones what was there."""
    q, k, v = inputs(160)
    call = CALLS[kind]
    clean = pasa.golden_attention(q, k, v, **call)
    hidden = ~padding()[:, 0, 0, :, None].unsqueeze(1)
    k = k.masked_fill(hidden, garbage)
    tensors = [x.to(DEVICE) for x in (q, k, v)]
    out, lse = pasa.attention(*tensors, attn_mask=call["attn_mask"].to(DEVICE), backend="triton", return_lse=True)
    assert marked() == [0]
    check(out, lse, *clean, v)


def test_packed_sequences_take_no_second_pass(marked):
    edges = [0, 140, 140, 141, 400]
    q, k, v = inputs(160, tokens=400)
    k[140:141] *= -1.0  # each sequence has a bias of its own
    cu = torch.tensor(edges, dtype=torch.int32, device=DEVICE)
    tensors = [x.to(DEVICE) for x in (q, k, v)]
    out, lse = pasa.attention_varlen(*tensors, cu, cu, 259, 259, is_causal=True, backend="triton", return_lse=True)
    assert marked() == [0]
    for begin, end in ((0, 140), (140, 141), (141, 400)):
        part = [x[begin:end].transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
        golden, golden_lse = pasa.golden_attention(*part, is_causal=True)
        check(out[begin:end].transpose(0, 1), lse[begin:end].T, golden[0], golden_lse[0], v)


@pytest.mark.parametrize("kind", ["plain", "bool", "float"])
def test_heads_without_a_common_bias_take_it(kind, marked):
    """A head with one key off the bias has no K', and its tiles go through the exact pass; others are not touched."""
    q, k, v = inputs(160)
    k[0, 1, 300] *= -1.0
    call = CALLS[kind]
    there = {name: x.to(DEVICE) for name, x in call.items()}
    tensors = [x.to(DEVICE) for x in (q, k, v)]
    out, lse = pasa.attention(*tensors, **there, backend="triton", return_lse=True)
    assert marked() == [1]
    check(out, lse, *pasa.golden_attention(q, k, v, **call), v)


@pytest.mark.parametrize("query", [torch.nan, torch.inf, 100.0])
def test_a_row_without_keys_may_have_any_query(query, marked):
    q, k, v = inputs(160)
    mask = torch.ones(2, 1, ROWS, KEYS, dtype=torch.bool)
    mask[0, :, :3] = False
    q[0, :, :3] = query
    tensors = [x.to(DEVICE) for x in (q, k, v)]
    out, lse = pasa.attention(*tensors, attn_mask=mask.to(DEVICE), backend="triton", return_lse=True)
    assert marked() == [int(query == torch.inf)]  # its norm marks the tile
    assert (out[0, :, :3] == 0).all()
    assert (lse[0, :, :3] == -torch.inf).all()
    q[0, :, :3] = 0
    check(out, lse, *pasa.golden_attention(q, k, v, attn_mask=mask), v)
