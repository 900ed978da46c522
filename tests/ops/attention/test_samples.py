"""Adversaries against every sample: keys that a kernel inspects to decide for all are unlike the rest.

Either the sampled keys are calm and the rest is not, or the other way round. Further tests cover conditions of
the exact pass over pages that must meet.

These places sample. Decoding tests some keys to decide if it tries without anchors (`load_tested_keys`), and others
to guess an anchor (`sampled_anchor`). `anchor_kernel` compares keys with the first key of a block.
`centre_kernel` chooses anchors from 32 keys of a head. A frame is taken from the anchors of three pages
(decode/paged_anchored_kernel.py).

Keys stand off in column 0 alone, which adds 2 million nats to a score, where FP32 has steps of 0.125. One such
key leaves a 32nd of that in the scores of its block, which FP32 rounds by 2^-9 at every step of a sum.

Bounds. If calm keys have the weight, their scores are small, and FP32 attention errs by 2e-6. An output then errs
by its own rounding and that of its weights, 2^-11 of max |v| = 4.4 each, so the bound is 2^-7; 0.0010 was
measured. If biased keys have the weight, FP32 attention itself errs by 0.08 to 0.27. Kernels that subtract an
anchor err by a ninth to a sixth of that, 0.022 to 0.046 with splits that begin with calm keys. So the bound there
is a fifth of FP32's error plus 2^-7, but at most 2^-4. In the exact pass over pages such keys have the weight in
every case; 0.0102 was measured, and the bound is 2^-6.
"""

import pytest
import torch

import pasa
from pasa.ops.attention.triton.decode import paged_launch
from tests.inputs import DEVICE, normal_qkv, pairwise
from tests.pages import make_pages

QUERY = 60000.0  # column 0 of the queries
# Column 0 of the keys; FP16 holds the squares, by which kernels recognise such keys.
CALM, NEAR, FAR = 0.0, 160.0, 240.0
HEADS = 9  # as many as the programs of the interpreter's device, so that each gets one split
KEYS = 128 * 4 + 50
BOUND = 2.0**-7


def stand_off(q, k, sign, others, at, sampled):
    """Fill column 0 of keys (..., S, D): `sampled` at the places `at`, `others` elsewhere.

    If calm keys have the weight (sign -1), add numbers that FP16 drops beside FAR, so that no anchor is exact for
    both. The other columns are scaled down until all keys are calm once an anchor is subtracted.
    """
    noise = k[..., 0].clone() * (1e-4 if sign < 0 else 0)
    k *= 0.01
    q *= 300  # scores of N(0, 3): few keys have all the weight, so that errors of scores do not cancel
    k[..., 0] = others + noise
    if sampled == CALM and sign > 0:  # their blocks may have no anchor, because none of their keys has weight
        k[..., (at // 32 * 32)[:, None] + torch.arange(32), 0] -= 0.5
    k[..., at, 0] = (sampled + noise)[..., at]
    q[..., 0] = sign * QUERY


def lse_bound(q, k):
    return 1e-3 + 2.0**-21 * float(q.abs().max()) * float(k.abs().max()) * q.shape[-1] ** -0.5


def judge(q, k, v, out, lse, mask=None, bound=BOUND):
    golden, golden_lse = pasa.golden_attention(q, k, v, attn_mask=mask)
    assert (out - golden).abs().max() <= bound
    assert (lse - golden_lse).abs().max() <= lse_bound(q, k)


def attend(q, k, v, **how):
    tensors = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in how.items()}
    out, lse = pasa.attention(*(x.to(DEVICE) for x in (q, k, v)), return_lse=True, backend="triton", **tensors)
    return out.cpu(), lse.cpu()


FEW = torch.arange(4) * (KEYS // 4)
SAMPLED = torch.arange(16) * (KEYS // 128 * 128 // 16)
# The sign of the query in column 0, which decides which keys have the weight; the keys there; the places; the
# keys at the places.
ADVERSARIES = {
    "few are calm": (1, FAR, FEW, CALM),
    "sampled share a bias": (-1, CALM, SAMPLED, FAR),
    "four stand off what all share": (-1, FAR, torch.arange(77, 81), CALM),
    "the last four stand off what all share": (-1, FAR, torch.arange(KEYS - 4, KEYS), CALM),
}


def bound_of(q, k, v):
    """Return the bound that the top of this file derives, for q (1, H, 1, D) and k, v (1, H, S, D)."""
    golden, _ = pasa.golden_attention(q, k, v)
    orders = ((q, k), (q.flip(-1), k.flip(-1)))  # one order may be right by luck
    plain = [torch.softmax(a.float() @ b.float().mT / 8, -1) @ v.float() for a, b in orders]
    return min(max(float((out - golden).abs().max()) for out in plain) / 5 + BOUND, 2.0**-4)


@pytest.mark.parametrize("name", ADVERSARIES)
def test_decode(name):
    """Decoding checks all keys, even after a sample suggested no anchor, or one."""
    q, k, v = normal_qkv((HEADS, HEADS), (1, KEYS), 64)
    stand_off(q, k, *ADVERSARIES[name])
    judge(q, k, v, *attend(q, k, v), bound=bound_of(q, k, v))


@pytest.mark.parametrize("name", ADVERSARIES)
@pytest.mark.parametrize("slots", [16, 48])
def test_paged_decode(name, slots):
    """Paged decoding checks all keys too."""
    pages = make_pages([KEYS], (HEADS, HEADS), 64, slots)
    stand_off(pages.q, pages.k.transpose(0, 1), *ADVERSARIES[name])
    check(write_again(pages), bound_of(*(x.transpose(0, 1)[None] for x in (pages.q, pages.k, pages.v))))


def write_again(pages):
    """Write the current keys into the cache, and return the pages."""
    pages.k_cache.view(-1, *pages.k.shape[1:])[pages.slots] = pages.k
    return pages


def check(pages, bound=BOUND, **how):
    out, lse = pages.attend(DEVICE, backend="triton", **how)
    golden, golden_lse = pages.golden(how.get("is_causal", False))
    seen = golden_lse > -torch.inf
    assert torch.equal(lse > -torch.inf, seen)
    assert (out - golden).abs().max() <= bound
    assert (lse - golden_lse)[seen].abs().max() <= lse_bound(pages.q, pages.k)


@pytest.mark.parametrize(
    ("slots", "queries", "dim"),
    pairwise([16, 32, 48, 64, 128], (1, 3), [64, 128, 160]),
)
def test_conditions_of_the_exact_pass_over_pages(slots, queries, dim):
    """The exact pass over pages finds its own anchors from the right pages.

    The pass runs only if several conditions meet: pages smaller and larger than a block, head dims on both sides
    of 128, and keys that fail every earlier pass. Lengths are on both sides of the end of a block, a page and a
    lane.
    """
    lengths = [1, 31, 33, 65, 180, 0, 200]
    pages = make_pages(lengths, (2, 1), dim, slots, queries=[queries] * len(lengths) if queries > 1 else None)
    stand_off(pages.q, pages.k.transpose(0, 1), 1, FAR, torch.tensor(pages.edges[1][:-1]), NEAR)
    check(write_again(pages), 2.0**-6, is_causal=queries > 1, max_seqlen_q=queries)


@pytest.mark.parametrize("hide", ["mask", "nothing"])
def test_first_key_of_every_block_stands_off(hide):
    """A first key of a block that stands off, and that no query sees, decides nothing about the block's anchor.

    The other keys are compared with the first. If it is seen, it weighs nothing, and the block is as accurate as
    FP32.
    """
    q, k, v = normal_qkv((2, 1), (70, 300), 64)
    stand_off(q, k, 1, FAR, torch.arange(0, 257, 128), CALM)
    mask = torch.ones(1, 1, 1, 300, dtype=torch.bool)
    mask[..., ::128] = False
    if hide == "mask":
        judge(q, k, v, *attend(q, k, v, attn_mask=mask), mask)
        return
    plain = q.float() @ k.float().mT / 8
    golden, _ = pasa.golden_attention(q, k, v)
    naive = (torch.softmax(plain, -1) @ v.float() - golden).abs().max()
    out, _ = attend(q, k, v)
    assert (out - golden).abs().max() <= 2 * naive + BOUND


def test_only_the_last_of_many_blocks_is_large():
    """Norms of all blocks count, not only those of the first 128: here 131 blocks of 32 keys."""
    q, k, v = normal_qkv((1, 1), (17, 131 * 32), 16)
    stand_off(q, k, 1, CALM, torch.arange(k.shape[2] - 32, k.shape[2]), FAR)
    judge(q, k, v, *attend(q, k, v, config=pasa.PasaConfig(block_k=32)))


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU's own number of programs is what it is")
def test_only_the_last_of_many_programs_fails(monkeypatch):
    """Marks of all programs are read, not only those of the first 128: here 131 programs, and the last keys stand off.

    Without the last program's mark the head would keep its results without anchors, and scores of 450,000 nats, which
    FP32 spaces by 2^-5 nats.
    """
    monkeypatch.setattr(paged_launch, "processors", lambda _: 131)
    pages = make_pages([131 * 128], (1, 1), 16, 16)
    pages.q[..., 0], pages.k[..., 0] = 60.0, 100.0
    pages.k[-32:, :, 0] = 30000.0
    check(write_again(pages).anchored())


def test_frame_of_pages_that_are_not_like_the_rest():
    """A frame is right even if two of its three sampled pages, with an anchor of 0, are unlike the rest.

    Sums with an offset are then rounded as FP32 rounds scores.
    """
    pages = make_pages([512], (2, 1), 64, 16)
    pages.q[..., 0] = QUERY
    pages.k[..., 0] = FAR
    for key in (128, 256):
        pages.k[key : key + 16, :, 0] = CALM
    pages = write_again(pages).anchored()
    out, lse = pages.attend(DEVICE, backend="triton")
    golden, golden_lse = pages.golden()
    plain = torch.einsum("bhd,khd->bhk", pages.q.float(), pages.k.float().expand(-1, 2, -1)) / 8
    naive = torch.einsum("bhk,khd->bhd", torch.softmax(plain, -1), pages.v.float().expand(-1, 2, -1))
    assert (out - golden).abs().max() <= 2 * (naive - golden).abs().max() + BOUND
    assert (lse - golden_lse).abs().max() <= lse_bound(pages.q, pages.k)
