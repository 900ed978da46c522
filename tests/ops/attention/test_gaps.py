"""Every gap Skv - Sq modulo a tile, on every kernel with a causal band.

An index that is off by one at a tile's edge shows in one residue alone. Each key has a weight that must show in
the log-sum-exp of its row.

Bound: half of the lightest weight in a row, which separates a key that is lost or seen too early from rounding.
"""

import pytest
import torch

import pasa
from pasa import PasaConfig
from pasa.ops.attention.triton.short.launch import DECODE_KEYS
from pasa.ops.attention.triton.tiles import tiles_for
from tests.inputs import DEVICE, normal_qkv
from tests.ops.attention.spec.test_gradients import check as check_gradients
from tests.pages import make_pages

ROWS, TILE = 65, 64  # a whole tile of rows, and one row of the next
GAPS = range(TILE)
# Gaps on both sides of every edge, where a sweep over all gaps would take too long.
EVERY_CASE = [-70, -64, -1, 0, 1, 31, 62, 63]


def even(q):
    """Return queries that give all keys similar weights."""
    return (q * 0.1).half()


def offset(*tensors):
    """Fill two columns that add one number to all scores, 1.2 times what FP32 accepts without an anchor."""
    size = (1.2 * 2048 * tensors[0].shape[-1] ** 0.5 / 2) ** 0.5
    for x in tensors:
        x[..., :2] = size


def judge(q, k, v, out, lse, mask=None, is_causal=True):
    """Check the log-sum-exp to half of the lightest weight of its row, and the output to 2^-9."""
    golden, golden_lse = pasa.golden_attention(q, k, v, attn_mask=mask, is_causal=is_causal)
    scores = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT * q.shape[-1] ** -0.5
    lightest = torch.exp(scores.amin(-1) - golden_lse)
    seen = golden_lse > -torch.inf
    assert torch.equal(lse > -torch.inf, seen)
    assert ((lse - golden_lse).abs() <= lightest / 2)[seen].all()
    assert (out - golden).abs().max() <= 2.0**-9


def attend(q, k, v, **how):
    """Return output and log-sum-exp of the Triton kernels."""
    tensors = [x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in (q, k, v)]
    mask = how.pop("attn_mask", None)
    mask = None if mask is None else mask.to(DEVICE)
    out, lse = pasa.attention(*tensors, attn_mask=mask, return_lse=True, backend="triton", **how)
    return out.cpu(), lse.cpu()


@pytest.mark.parametrize(
    ("config", "dim", "shared"),
    [
        (PasaConfig(), 16, False),
        (PasaConfig(), 16, True),
        (PasaConfig(), 80, False),
        (PasaConfig(precision="fp32"), 16, False),
        (PasaConfig(recovery="paper", block_k=64), 16, False),
    ],
    ids=["fast", "exact", "overlapped", "fp32", "paper"],
)
def test_prefill_of_packed_sequences(config, dim, shared):
    """Packed prefill has its tile edges right: one launch holds 70 sequences, each with another gap."""
    gaps = [-70, -64, -63, -1, *GAPS[:: 3 if shared else 1]]
    keys = [max(ROWS + gap, 0) for gap in gaps]
    q, _, _ = normal_qkv((2, 1), (ROWS * len(gaps), 1), dim)
    _, k, v = normal_qkv((2, 1), (1, sum(keys)), dim, seed=1)
    q = even(q)
    if shared:
        offset(q, k)
    packed = [x[0].transpose(0, 1).contiguous().to(DEVICE) for x in (q, k, v)]
    edges = [torch.tensor([0, *n]).cumsum(0) for n in ([ROWS] * len(gaps), keys)]
    out, lse = pasa.attention_varlen(
        *packed, *(x.to(DEVICE) for x in edges), ROWS, max(keys), is_causal=True, config=config, return_lse=True,
        backend="triton",
    )  # fmt: skip
    for (q0, q1), (k0, k1) in zip(*(zip(x[:-1].tolist(), x[1:].tolist(), strict=True) for x in edges), strict=True):
        if k0 == k1:
            assert (lse[q0:q1] == -torch.inf).all()
            continue
        rows = out[q0:q1].cpu().transpose(0, 1)[None], lse[q0:q1].cpu().T[None]
        judge(q[:, :, q0:q1], k[:, :, k0:k1], v[:, :, k0:k1], *rows)


def test_prefill_of_one_sequence():
    """Prefill without packing has its tile edges right."""
    for gap in GAPS:
        q, k, v = normal_qkv((2, 1), (ROWS, ROWS + gap), 16)
        judge(even(q), k, v, *attend(even(q), k, v, is_causal=True))


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masked_prefill(kind):
    """A causal band joined with a mask is not off by one; the mask differs by head."""
    for gap in EVERY_CASE:
        q, k, v = normal_qkv((2, 1), (ROWS + 70, ROWS + 70 + gap), 16)
        keep = torch.rand(2, ROWS + 70, k.shape[2], generator=torch.Generator().manual_seed(gap + 100)) < 0.9
        mask = keep if kind == "bool" else torch.zeros(keep.shape).masked_fill(~keep, -torch.inf)
        judge(even(q), k, v, *attend(even(q), k, v, attn_mask=mask, is_causal=True), mask)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("dim", "tile"), [(160, 32), (128, 64)])
def test_decode(dim, tile, shared):
    """Decoding sees each block of keys exactly as far as it should.

    Few rows are served by tiles (head dims above 128) and by lanes, without and with anchors.
    """
    for gap in range(0, tile, 3 if shared else 1):
        q, k, v = normal_qkv((4, 2), (3, 3 + DECODE_KEYS + gap), dim)
        q = even(q)
        if shared:
            offset(q, k)
        judge(q, k, v, *attend(q, k, v, is_causal=True))


@pytest.mark.parametrize("dim", [64, 160])
def test_masked_decode(dim):
    """Masked decoding sees the right keys; the mask differs by head and row."""
    for gap in [0, 1, 15, 30, 31, 62, 63]:
        q, k, v = normal_qkv((4, 2), (3, DECODE_KEYS + 6 + gap), dim)
        keep = torch.rand(4, 3, k.shape[2], generator=torch.Generator().manual_seed(gap)) < 0.9
        judge(even(q), k, v, *attend(even(q), k, v, attn_mask=keep, is_causal=True), keep)


def test_short_keys():
    """The band is not off by one among keys that all fit into one tile."""
    for keys in range(1, TILE + 1):
        q, k, v = normal_qkv((2, 1), (40, keys), 16)
        judge(even(q), k, v, *attend(even(q), k, v, is_causal=True))


@pytest.mark.parametrize("shared", [False, True])
def test_short_keys_in_several_blocks(shared):
    """Few rows see each block of a short sequence as far as they should, in the first pass and in the restart."""
    for gap in range(0, 32, 3 if shared else 1):
        q, k, v = normal_qkv((4, 2), (3, 3 + 64 + gap), 64)
        q = even(q)
        if shared:
            offset(q, k)
        judge(q, k, v, *attend(q, k, v, is_causal=True))


@pytest.mark.parametrize(
    ("dim", "queries", "slots", "shared", "anchored"),
    [
        (64, 3, 16, False, False),
        (64, 1, 16, False, False),
        (64, 1, 48, True, False),
        (64, 1, 16, True, True),
        (160, 3, 48, False, False),
        (160, 3, 16, True, False),
        (160, 1, 16, False, False),
    ],
)
def test_pages(dim, queries, slots, shared, anchored):
    """The last page of a sequence is read right, at every length modulo a tile."""
    lengths = list(range(70, 70 + {(64, 1): 128, (64, 3): 64, (160, 1): 32, (160, 3): 32}[dim, queries]))
    each = [queries] * len(lengths) if queries > 1 else None
    # unused slots are finite, because NaN would trigger an exact pass, which hides the fault
    pages = make_pages(lengths, (2, 1), dim, slots, queries=each, stale=1.0)
    pages = pages._replace(q=even(pages.q))
    if shared:
        offset(pages.q, pages.k, pages.k_cache)
    pages = pages.anchored() if anchored else pages
    out, lse = pages.attend(DEVICE, backend="triton", is_causal=True, max_seqlen_q=queries)
    edges_q, edges_k = pages.edges
    for b in range(len(lengths)):
        rows, keys = slice(*edges_q[b : b + 2]), slice(*edges_k[b : b + 2])
        heads_first = [x.transpose(0, 1)[None] for x in (pages.q[rows], pages.k[keys], pages.v[keys], out[rows])]
        judge(*heads_first, lse[rows].T[None])


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_gradients(backend):
    """No pair of a row and a key is lost in the two backward passes; it would show in dK and dV of the last keys.

    Few rows see those keys.
    """
    for gap in GAPS:
        check_gradients(*normal_qkv((2, 1), (ROWS, ROWS + gap), 16, seed=gap), backend, is_causal=True)


def test_gradients_with_a_mask():
    """The band joined with a mask is not off by one in the backward pass."""
    for gap in EVERY_CASE:
        q, k, v = normal_qkv((2, 1), (ROWS + 70, ROWS + 70 + gap), 16)
        keep = torch.rand(2, ROWS + 70, k.shape[2], generator=torch.Generator().manual_seed(gap + 100)) < 0.9
        check_gradients(q, k, v, "triton", keep, True)


@pytest.mark.parametrize("block", [32, 128])
def test_reference(block):
    """The reference leaves out no block, and its band is not off by one."""
    for gap in range(-1, block):
        q, k, v = normal_qkv((2, 1), (ROWS, ROWS + gap), 16)
        config = PasaConfig(block_k=block)
        result = pasa.attention(even(q), k, v, is_causal=True, config=config, return_lse=True, backend="reference")
        judge(even(q), k, v, *result)


def test_tiles_of_the_sweep():
    """The interpreter's tiles are those that the sweep covers."""
    tiles = {size for dim in (16, 128) for tile in tiles_for(torch.device("cpu"), dim, 128, 100)
             for size in (tile.block_m, tile.block_n)}  # fmt: skip
    assert tiles == {TILE}
