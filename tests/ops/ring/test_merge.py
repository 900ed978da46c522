"""Merging chunks in a frame in which log-sum-exps keep their digits."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch

import pasa
from pasa.ops.ring.frames import common_anchor
from pasa.ops.ring.merge import Merge
from tests.inputs import max_error, rmse

CHUNKS = 4
ALL = slice(None)


class Threads:
    """Threads in place of the processes of a ring; only `gather` and `tell` work."""

    def __init__(self, size):
        self.slots, self.barrier = [None] * size, Barrier(size)

    def rank(self, rank):
        def gather(x):
            self.slots[rank] = x
            self.barrier.wait()
            result = list(self.slots)
            self.barrier.wait()
            return result

        return SimpleNamespace(rank=rank, gather=gather, tell=lambda numbers, device: gather(numbers))


def on_every_rank(call, ranks):
    """Return what call(rank, its ring) returns on each rank."""
    ring = Threads(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(lambda rank: call(rank, ring.rank(rank)), range(ranks)))


def anchors_of(keys):
    """Return the anchor that every rank finds from its own chunk of the keys."""
    total = sum(k.shape[2] for k in keys)
    result = on_every_rank(lambda rank, ring: common_anchor(keys[rank], keys[rank], total, ring), len(keys))
    return [anchor for anchor, _ in result]


def offset_qkv(offset, length=517, dim=64, seed=0):
    """Return q, k, v of N(0, 1), except 16 dimensions that add about `offset` to every scaled score."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 2, length, dim, generator=g) for _ in range(3))
    bias = (offset * dim**0.5 / 16) ** 0.5
    q[..., :16] += bias
    k[..., :16] = bias  # the same in all keys, so that only the other dimensions decide
    return q.half(), k.half(), v.half()


def merged(q, keys, values, anchor):
    merge = Merge(q)
    for k, v in zip(keys, values, strict=True):
        merge.add(ALL, *pasa.attention(q, k - anchor, v, return_lse=True))
    return merge.finish()


def test_a_merge_in_the_true_frame_loses_what_the_kernels_got_right():
    """A merge in the true frame loses accuracy, but one in the frame of a common anchor does not.

    With 131,072 on every score, FP32 stores log-sum-exps in steps of 1/64, so chunks of true scores
    get weights that are off by up to a percent. In the frame of a common anchor the merge errs by
    at most twice the error of one call, plus one rounding of a chunk's output to FP16.
    """
    q, k, v = offset_qkv(131072.0)
    golden, true_lse = pasa.golden_attention(q, k, v)
    assert true_lse.min() > 120000
    one = pasa.attention(q, k, v)
    keys, values = k.chunk(CHUNKS, 2), v.chunk(CHUNKS, 2)
    anchor = anchors_of(keys)[0]
    out, lse = merged(q, keys, values, anchor)
    assert lse.abs().max() < 64, "nothing of the offset is left"
    assert max_error(out, golden) <= 2 * max_error(one, golden) + 2**-11 * float(golden.abs().max())
    assert rmse(out, golden) <= 2**0.5 * rmse(one, golden), "a rounding more, of no more than the error there was"
    in_true_frame, _ = merged(q, keys, values, torch.zeros_like(anchor))
    assert rmse(in_true_frame, golden) > 4 * rmse(one, golden), "the frame is what this story is about"


@pytest.mark.parametrize("offset", [0.0, 100.0, 20000.0])
def test_the_merged_log_sum_exp_is_that_of_all_keys(offset):
    q, k, v = offset_qkv(offset)
    anchor = anchors_of(k.chunk(CHUNKS, 2))[0]
    _, lse = merged(q, k.chunk(CHUNKS, 2), v.chunk(CHUNKS, 2), anchor)
    _, golden = pasa.golden_attention(q, k - anchor, v)
    _, one = pasa.attention(q, k - anchor, v, return_lse=True)
    assert max_error(lse, golden) <= 2 * max_error(one, golden) + 2**-21


def test_the_anchor_is_exact_for_every_key_and_the_same_on_every_rank():
    _, k, _ = offset_qkv(131072.0)
    k[..., 16:32] += 30  # N(30, 1): within two binades
    keys = k.chunk(CHUNKS, 2)
    anchor, *others = anchors_of(keys)
    assert all(torch.equal(anchor, other) for other in others)
    assert (anchor[..., :32] != 0).all()
    assert torch.equal((k - anchor).double() + anchor.double(), k.double())


def test_a_column_with_a_key_that_would_be_rounded_keeps_anchor_0():
    _, k, _ = offset_qkv(131072.0)
    k[0, 0, 300, 3] = 0.01234
    anchor = anchors_of(k.chunk(CHUNKS, 2))[0]
    assert anchor[0, 0, 0, 3] == 0
    assert anchor[0, 1, 0, 3] != 0
    assert torch.equal((k - anchor).double() + anchor.double(), k.double())


def test_a_nan_in_a_key_does_not_reach_the_anchor():
    _, k, _ = offset_qkv(1000.0)
    clean = anchors_of(k.chunk(CHUNKS, 2))[0]
    k[0, 0, 5, 3], k[0, 0, 6, 4] = torch.nan, torch.inf
    anchor = anchors_of(k.chunk(CHUNKS, 2))[0]
    assert torch.isfinite(anchor).all()
    assert (anchor[..., :16] != 0).any()
    assert torch.equal(anchor[:, 1], clean[:, 1])


def test_outputs_stay_a_mean_whatever_the_log_sum_exps_lack():
    """The merged output stays a mean of the outputs, however inexact the log-sum-exps are.

    Weights come from differences to the largest one and are divided by their own sum. At 1e9, where
    FP32 steps by 64, exp(LSE - log of the sum) would not sum to 1.
    """
    g = torch.Generator().manual_seed(0)
    q = torch.zeros(1, 1, 64, 8, dtype=torch.float16)
    merge = Merge(q)
    for _ in range(7):
        lse = 1e9 + 64 * torch.randint(0, 2, (1, 1, 64), generator=g)
        merge.add(ALL, torch.full_like(q, 65504), lse.float())
    out, _ = merge.finish()
    assert torch.equal(out.half(), torch.full_like(q, 65504))
