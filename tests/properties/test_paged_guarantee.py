"""The guarantee over paged caches whose pages have anchors: finite FP16 in, finite out.

Every output lies among the values whose keys have weight. Bounds: eval/random_calls/README.md, for scores in FP32.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pasa
from pasa.eval.random_calls.cases import broken
from pasa.eval.random_calls.inputs import Call
from pasa.eval.random_calls.judge import Arithmetic, judge
from pasa.eval.random_calls.truth import find_truth
from tests.adversaries import specks, spikes, stalled, sunken
from tests.inputs import DEVICE
from tests.properties.test_guarantee import KINDS, adversary

SLOTS = 16
# NumPy, which interprets the kernels, warns of intended infinities.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def biased(q, k, v):
    """Add 32,768 to all scores by one column, which makes keys long enough to have anchors."""
    q, k = q.clone(), k.clone()
    q[..., -1], k[..., -1] = 8.0, 4096.0
    return q, k, v


def decode(q, k, v, scale):
    """Decode each row of q (1, H, rows, D) as its own sequence over the same pages.

    The order of pages is reversed, and the unused rest of the last page is NaN. Returns heads-first output and
    LSE, and the anchors.
    """
    keys, rows = k.shape[2], q.shape[2]
    count = -(-keys // SLOTS)
    k_cache, v_cache = torch.full((2, count, SLOTS, *k.shape[1::2]), torch.nan).half()
    table = torch.arange(count - 1, -1, -1)
    at = torch.arange(keys)
    anchors = torch.zeros(count, *k.shape[1::2]).half()
    new = (x[0].transpose(0, 1) for x in (k, v))
    pasa.write_pages(*new, k_cache, v_cache, table[at // SLOTS] * SLOTS + at % SLOTS, anchors)
    tensors = (q[0].transpose(0, 1), k_cache, v_cache, table.expand(rows, -1), torch.full((rows,), keys))
    moved = (x.to(DEVICE) for x in tensors)
    how = {"key_anchors": anchors.to(DEVICE), "scale": scale, "return_lse": True, "backend": "triton"}
    out, lse = pasa.attention_paged(*moved, **how)
    return out.cpu().transpose(0, 1)[None], lse.cpu().T[None], anchors


def check(q, k, v, scale, out, lse):
    true = find_truth(Call(q, k, v, None, False, scale), fp16_scores=False)
    found = judge(true, out, lse, Arithmetic(q.dtype))
    assert not broken(found), found


@pytest.mark.parametrize("change", [lambda *x: x, biased], ids=["as is", "biased"])
@pytest.mark.parametrize(
    ("adversary", "scale"),
    [(spikes(100), 5e-5), (spikes(100), 1.0), (specks(100), 2.0**30), (specks(100), 2.0**80), (sunken(16), 2.0**-60),
     (sunken(16), 1.0), (sunken(SLOTS * 5), 2.0**20), (stalled(40, 16, 16), 1.0)],
    ids=["spikes, tiny scale", "spikes", "specks", "specks, largest scale", "sunken, tiny scale", "sunken",
         "sunken, large scale", "stalled"],
)  # fmt: skip
def test_structured_adversaries(adversary, scale, change):
    q, k, v = change(*adversary)
    out, lse, anchors = decode(q, k, v, scale)
    assert (change is biased) <= bool(anchors.any())
    check(q, k, v, scale, out, lse)


@pytest.mark.parametrize("block", [16, 64])
def test_equal_scores_far_below_their_anchors(block):
    """Equal scores far below their anchors weigh the same; anchors are 2,000,000 units above the scores."""
    q, k, v = sunken(block)
    out, _, anchors = decode(q, k, v, 1.0)
    assert (anchors[:, 0, :3] > 40000).all()
    assert (out == 0.5).all()


def test_the_largest_values_are_not_passed():
    """Outputs do not exceed the largest values.

    Sums of weights stall, and sums of weighted values do not (`stalled`). Each lane has several blocks.
    """
    q, k, v = biased(*stalled(300, 16, 16))
    out, _, anchors = decode(q, k, v, 1.0)
    assert anchors.any()
    assert torch.equal(out, v[:, :, :1])


@settings(max_examples=25)
@given(
    kinds=st.tuples(*[st.sampled_from(KINDS)] * 3),
    keys=st.sampled_from([1, 2, 31, 100]),
    dim=st.sampled_from([16, 64, 80]),
    scale=st.sampled_from([None, 1e-4, 1.0, 30.0]),
    bias=st.sampled_from([0.0, 300.0, 30000.0]),
    seed=st.integers(0, 2**31),
)
def test_any_finite_input(kinds, keys, dim, scale, bias, seed):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (adversary(kind, (1, 1, n, dim), g) for kind, n in zip(kinds, (2, keys, keys), strict=True))
    k[..., ::2] = (k[..., ::2].float() + bias).clamp(-65504, 65504).half()
    out, lse, _ = decode(q, k, v, scale)
    check(q, k, v, dim**-0.5 if scale is None else scale, out, lse)
