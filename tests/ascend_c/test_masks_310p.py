"""Windows, masks, sinks, and keys in parts on the core of an Ascend 310P, on the CPU twin.

Every key of a call is scored in FP32, so outputs are compared with FP64 by the bounds of random calls. Where every key
is seen by some query, also with the reference, whose FP16 scores are off by up to 2^-8 nats.
"""

import pytest
import torch

from pasa.eval.random_calls import inputs
from pasa.eval.random_calls.judge import Arithmetic, judge
from pasa.eval.random_calls.truth import find_truth
from tests.ascend_c.kernel_runs import BLOCK, LAUNCHES, Call, seen
from tests.ascend_c.runs_310p import FRACTAL
from tests.ascend_c.test_attention import make_call
from tests.ascend_c.test_attention_310p import check_against_reference, run
from tests.ascend_c.test_masks import HIDING, MASKS, WINDOWS, block_diagonal, padded
from tests.ascend_c.twin_build import TWIN


@pytest.fixture
def kernels(kernels_310p):
    """The 310P's kernels, and a launch of each."""
    return kernels_310p


def check_truth(x, result):
    """Check output, log-sum-exp and largest scores of a call against FP64."""
    mask = seen(x) if x.lengths is not None else x.mask
    window = list(x.window) if x.window != (-1, -1) else None
    true = find_truth(inputs.Call(x.q, x.k, x.v, mask, x.causal, x.softmax_scale, window=window, sinks=x.sinks))
    ratios = judge(true, result["out"], result["lse"], Arithmetic(x.q.dtype))
    assert not [measure for measure, value in ratios.items() if not value <= 1], ratios
    visible = seen(x).expand(*x.q.shape[:3], -1)
    assert (result["out"][~visible.any(-1)] == 0).all()
    if not x.largest:
        return
    k = x.k.double().repeat_interleave(x.q.shape[1] // x.k.shape[1], 1)
    scores = x.softmax_scale * (x.q.double() @ k.mT)
    largest = scores.masked_fill(~visible, -torch.inf).amax(-1)
    torch.testing.assert_close(result["largest"].double(), largest, atol=2e-4, rtol=2e-6)


def check_in_every_interleaving(kernels, x, **options):
    first = None
    for mode, seed in LAUNCHES[::3]:
        result = run(kernels, x, mode=mode, seed=seed, cores=1 + seed % 3, **options)
        if first is None:
            first = result
            check_truth(x, result)
        assert all(torch.equal(values, first[name]) for name, values in result.arrays.items()), (mode, seed)
    return first


@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("shape", WINDOWS, ids=str)
def test_windows(kernels, shape, dim):
    window, rows, keys = shape
    x = make_call(1, 2, 1, rows, keys, dim, False, window=window, overflow="saturate", largest=True)
    check_against_reference(x, check_in_every_interleaving(kernels, x))


@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("name", MASKS)
def test_masks(kernels, name, dim):
    mask, heads = MASKS[name]
    rows = 70 if mask.shape[2] == 1 else mask.shape[2]
    x = make_call(
        mask.shape[0], heads, 1, rows, mask.shape[3], dim, False, mask=mask, overflow="saturate", largest=True
    )
    check_against_reference(x, check_in_every_interleaving(kernels, x))


@pytest.mark.parametrize("bias", [0.0, 8.0, 300.0])
@pytest.mark.parametrize("name", HIDING)
def test_masks_that_hide_keys_from_all(kernels, name, bias):
    mask = HIDING[name]
    rows = 65 if mask.shape[2] == 1 else mask.shape[2]
    x = make_call(mask.shape[0], 2, 1, rows, mask.shape[3], 64, False, mask=mask)
    x.k.add_(bias)
    check_truth(x, run(kernels, x, cores=2))


@pytest.mark.parametrize("bias", [100.0, 30000.0])
def test_sequences_of_different_biases(kernels, bias):
    """A row that begins at a later block errs no more than its own keys allow, whatever earlier keys are."""
    x = make_call(1, 1, 1, 500, 500, 64, False, mask=block_diagonal(500, 100, 230, 430))
    for start, stop, sign in ((0, 100, 1), (230, 430, -1)):
        x.k[:, :, start:stop] += sign * bias
    check_truth(x, run(kernels, x))


@pytest.mark.parametrize("scale", [1e-5, 0.03, 100.0, 2.0**60])
def test_windows_at_any_scale(kernels, scale):
    x = make_call(1, 1, 1, 260, 260, 64, False, window=(40, 0), scale=scale)
    check_truth(x, run(kernels, x))


@pytest.mark.parametrize("how", [{}, {"window": (30, 0)}, {"mask": padded(1, 200, 70)[..., :150]}], ids=str)
def test_sinks(kernels, how):
    """A row without keys has its sink as log-sum-exp."""
    sinks = torch.tensor([2.0, -3.0, 40.0])
    x = make_call(1, 3, 1, 200, 150, 64, not how, sinks=sinks, **how)
    result = check_in_every_interleaving(kernels, x)
    empty = ~seen(x).expand(*x.q.shape[:3], -1).any(-1)
    assert empty.any()
    assert torch.equal(result["lse"][empty], sinks.view(1, 3, 1).expand_as(empty)[empty])


def test_windows_far_along_a_sequence(kernels):
    """A tile's first block is far behind the first one, and products of 32 blocks are made more than once."""
    x = make_call(1, 1, 1, 64, 70 * BLOCK, 16, False, window=(50 * BLOCK, 0))
    x.k.add_(torch.randint(-20, 20, (70,)).half().repeat_interleave(BLOCK).view(1, 1, -1, 1))
    check_truth(x, run(kernels, x))


@pytest.mark.parametrize("how", ["mask", "window"])
def test_blocks_that_no_row_sees_are_not_visited(kernels, how):
    """Eight tiles of 512 rows see one or two of four blocks each: 11 of 32 tiles of scores are formed."""
    near = torch.ones(1, 1, 512, 512, dtype=torch.bool).tril().triu(-40)
    masks = [near, torch.ones_like(near)] if how == "mask" else [None, None]
    windows = [(-1, -1), (-1, -1)] if how == "mask" else [(40, 0), (511, 511)]
    few, every = (
        run(kernels, make_call(1, 1, 1, 512, 512, 64, False, mask=mask, window=window)).report["ai"]["macs"]
        for mask, window in zip(masks, windows, strict=True)
    )
    assert few < 0.45 * every


# ---- decoding: query heads of a token are rows of a tile, and keys are in parts


def grouped(x: Call, heads: int) -> Call:
    """Return a call whose heads that share keys are neighbouring rows of a token."""
    batch, _, rows, dim = x.q.shape
    q = x.q.view(batch, heads, -1, rows, dim).transpose(2, 3).reshape(batch, heads, -1, dim)
    return Call(q, x.k, x.v, x.causal, lengths=x.lengths, scale=x.scale, window=x.window, largest=x.largest)


@pytest.mark.parametrize("how", [{}, {"causal": True}, {"window": (100, 0)}, {"window": (3, 1)}], ids=str)
@pytest.mark.parametrize(("group", "rows"), [(7, 1), (4, 5), (3, 40)])
def test_heads_of_a_token_are_rows_of_a_tile(kernels, how, group, rows):
    """Each row gives the bits that it gives as a row of its own head."""
    how = {"causal": False} | how
    x = make_call(2, 2 * group, 2, rows, 300, 64, how.pop("causal"), largest=True, **how)
    expected, found = run(kernels, x), run(kernels, grouped(x, 2), token_rows=group)
    check_truth(x, expected)
    for name, values in expected.arrays.items():
        folded = values.unflatten(1, (2, group)).transpose(2, 3).flatten(2, 3)
        assert torch.equal(found[name], folded), name


PARTS = {
    "one row": make_call(2, 2, 1, 1, 900, 64, False, largest=True),
    "causal": make_call(1, 2, 1, 70, 600, 128, True, largest=True),
    "lengths": make_call(3, 1, 1, 4, 700, 64, True, lengths=torch.tensor([700, 130, 0]), largest=True),
    "more parts than blocks": make_call(1, 1, 1, 17, 200, 32, False),
    "a window": make_call(1, 1, 1, 130, 700, 64, False, window=(200, 0), largest=True),
    "a mask": make_call(2, 1, 1, 200, 640, 64, False, mask=HIDING["holes"], largest=True),
    "padding": make_call(2, 1, 1, 1, 640, 64, False, mask=torch.arange(640).view(1, 1, 1, -1) >= 200),
    "sinks": make_call(1, 2, 1, 40, 300, 64, True, sinks=torch.tensor([1.0, 5.0])),
    "no keys": make_call(1, 1, 1, 40, 30, 64, True, sinks=torch.tensor([1.0])),
}


@pytest.mark.parametrize("parts", [2, 3, 5])
@pytest.mark.parametrize("name", PARTS)
def test_keys_in_parts(kernels, name, parts):
    check_in_every_interleaving(kernels, PARTS[name], parts=parts)


@pytest.mark.parametrize("apart", [100.0, 10000.0])
def test_parts_of_different_frames(kernels, apart):
    """Parts end in frames whose scores differ by thousands of nats: each row keeps the digits of its own keys."""
    x = make_call(1, 1, 1, 20, 6 * BLOCK, 64, False, overflow="saturate")
    x.k[:, :, : 2 * BLOCK] += apart
    x.k[:, :, 2 * BLOCK : 5 * BLOCK] -= apart
    whole, cut = run(kernels, x), run(kernels, x, parts=3)
    check_truth(x, whole)
    check_truth(x, cut)


def test_parts_that_are_stored_use_the_workspace_alone(kernels):
    """A part leaves FP32 outputs and four numbers a row behind; merging reads them once."""
    x = make_call(1, 1, 1, FRACTAL, 4 * BLOCK, 64, False)
    report = run(kernels, x, parts=2).report["ai"]  # of the launch that merges
    assert report["bytes"]["MTE2"] == 2 * (4 * 64 + FRACTAL * 64) * 4
    assert report["bytes"]["MTE3"] == FRACTAL * 64 * 2 + FRACTAL * 4


@pytest.mark.parametrize("how", ["mask", "window", "parts"])
def test_clean_under_sanitizers(twin_program, how):
    program = twin_program("kernels_310p", include=[TWIN.parent], define=["PASA_CPU_TWIN"])
    masks = {"mask": {"mask": padded(2, 140, 0, 130)}, "window": {"window": (20, 3)}, "parts": {}}
    x = make_call(2, 2, 1, 140, 140, 64, False, **masks[how])
    run(program, x, parts=2 if how == "parts" else 1)
