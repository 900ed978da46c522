"""Windows and masks of the exact recovery on the CPU twin, against the reference and against FP64.

Bounds are those of test_attention.py. Where no query sees a key, the reference leaves the key out, so its blocks begin
elsewhere: such calls are compared with FP64 alone, by the bounds of random calls.
"""

import pytest
import torch

from pasa.eval.random_calls import inputs
from pasa.eval.random_calls.judge import Arithmetic, judge
from pasa.eval.random_calls.truth import find_truth
from tests.ascend_c.kernel_runs import (
    SOME_LAUNCHES,
    attend_by_reference,
    launch_attention,
    launch_shift,
    seen,
    shifted_by_reference,
)
from tests.ascend_c.test_attention import check_output, check_scores, make_call
from tests.inputs import pairwise

# Window, queries and keys; a row's first key lies in any block.
WINDOWS = [
    ((50, 0), 300, 300),
    ((0, 0), 129, 129),  # one key a row
    ((127, 0), 257, 300),
    ((128, 0), 600, 600),  # tiles begin at blocks 0, 0, 1, 2 and 3
    ((200, -1), 300, 257),  # the first rows see keys that do not exist, and all later ones
    ((64, 64), 300, 300),
    ((3, 3), 193, 193),  # a vector core with one row, whose twin sees other keys
    ((-1, 20), 300, 300),
    ((0, 0), 140, 300),
]
DRAWS = torch.Generator().manual_seed(11)


def block_diagonal(rows, *edges):
    """Return a mask of sequences that see themselves alone, with edges at any row."""
    mask = torch.zeros(1, 1, rows, rows, dtype=torch.bool)
    for start, stop in zip((0, *edges), (*edges, rows), strict=True):
        mask[..., start:stop, start:stop] = True
    return mask


def with_empty_rows(mask, *rows):
    mask = mask.clone()
    mask[:, :, list(rows)] = False
    return mask


# Masks of which every key is seen by some query, and heads.
MASKS = {
    "causal": (torch.ones(1, 1, 300, 300, dtype=torch.bool).tril(), 2),
    "of each head": (torch.rand(1, 2, 193, 300, generator=DRAWS) < 0.7, 2),
    "of each batch entry": (torch.rand(2, 1, 130, 200, generator=DRAWS) < 0.5, 2),
    "of both": (torch.rand(2, 2, 65, 183, generator=DRAWS) < 0.5, 2),
    "of all keys": (torch.ones(1, 1, 1, 257, dtype=torch.bool).expand(1, 1, 1, 257), 1),
    "sequences": (block_diagonal(500, 100, 230, 430), 1),
    "sequences and empty rows": (with_empty_rows(block_diagonal(300, 100, 230), 0, 5, 128, 256), 1),
}


def check_agreement(kernels, x):
    """Check a call against the reference under every interleaving."""
    shifted = shifted_by_reference(x)
    made = launch_shift(kernels, x)
    assert made.report["ok"], made.report["fault"]
    assert all(torch.equal(made[name], values) for name, values in shifted.items())
    first, expected = None, attend_by_reference(x)
    visible = seen(x).expand_as(expected["scores"])
    for mode, seed in SOME_LAUNCHES:
        result = launch_attention(kernels, x, shifted, mode=mode, seed=seed, groups=1 + seed % 3)
        assert result.report["ok"], result.report["fault"]
        assert sum(result.report["undefined"].values()) == 0
        if first is None:
            first = result
            check_output(x, result, expected)
            check_scores(x, result, expected, shifted)
        assert all(torch.equal(result[name], first[name]) for name in ("out", "lse")), (mode, seed)
        assert torch.equal(result["scores"][visible], first["scores"][visible])


@pytest.mark.parametrize(("shape", "dim", "overflow"), pairwise(WINDOWS, (64, 256), ("inf", "saturate")), ids=str)
def test_windows_agree_with_the_reference(kernels, shape, dim, overflow):
    window, rows, keys = shape
    check_agreement(kernels, make_call(1, 2, 1, rows, keys, dim, False, window=window, overflow=overflow))


@pytest.mark.parametrize(("name", "dim", "overflow"), pairwise(tuple(MASKS), (64, 256), ("inf", "saturate")), ids=str)
def test_masks_agree_with_the_reference(kernels, name, dim, overflow):
    mask, heads = MASKS[name]
    batch, rows = mask.shape[0], 70 if mask.shape[2] == 1 else mask.shape[2]
    check_agreement(kernels, make_call(batch, heads, 1, rows, mask.shape[3], dim, False, mask=mask, overflow=overflow))


def padded(batch, rows, *padding):
    """Return a causal mask of sequences that are padded on the left."""
    mask = torch.ones(batch, 1, rows, rows, dtype=torch.bool).tril()
    for entry, count in zip(mask, padding, strict=True):
        entry[..., :count] = False
    return mask


def with_holes():
    """Return a mask with blocks that no row of a tile sees, between others and before them."""
    mask = torch.zeros(1, 1, 200, 640, dtype=torch.bool)
    mask[..., ::2, :50] = True
    mask[..., 1::2, 500:] = True
    mask[..., 3, 50:500] = True
    mask[..., 130:, :] = False
    mask[..., 140:, 300:310] = True
    return mask


HIDING = {
    "padded": padded(3, 300, 0, 150, 299),
    "few keys": torch.rand(2, 1, 130, 383, generator=DRAWS) < 0.02,
    "some keys for all": torch.rand(2, 1, 1, 300, generator=DRAWS) < 0.5,
    "late keys for all": (torch.arange(300) >= 260).view(1, 1, 1, 300),
    "holes": with_holes(),
    "nothing": torch.zeros(1, 1, 1, 300, dtype=torch.bool),
}


@pytest.mark.parametrize("overflow", ["inf", "saturate"])
@pytest.mark.parametrize("bias", [0.0, 8.0, 300.0])
@pytest.mark.parametrize("name", HIDING)
def test_masks_that_hide_keys_from_all(kernels, name, bias, overflow):
    mask = HIDING[name]
    rows = 65 if mask.shape[2] == 1 else mask.shape[2]
    x = make_call(mask.shape[0], 2, 1, rows, mask.shape[3], 64, False, mask=mask, overflow=overflow)
    x.k.add_(bias)
    result = launch_attention(kernels, x, launch_shift(kernels, x).arrays, groups=2)
    assert result.report["ok"], result.report["fault"]
    assert sum(result.report["undefined"].values()) == 0
    true = find_truth(inputs.Call(x.q, x.k, x.v, mask, False, x.softmax_scale))
    ratios = judge(true, result["out"], result["lse"], Arithmetic(x.q.dtype))
    assert not [measure for measure, value in ratios.items() if not value <= 1], ratios
    empty = ~mask.any(-1).expand(true.lse.shape)
    assert (result["out"][empty] == 0).all()
    assert result["lse"][empty].isneginf().all()


@pytest.mark.parametrize("bias", [100.0, 30000.0])
def test_sequences_of_different_biases(kernels, bias):
    """A row that begins at a later block errs no more than its own keys allow, whatever earlier keys are."""
    x = make_call(1, 1, 1, 500, 500, 64, False, mask=block_diagonal(500, 100, 230, 430))
    for start, stop, sign in ((0, 100, 1), (230, 430, -1)):
        x.k[:, :, start:stop] += sign * bias
    result = launch_attention(kernels, x, launch_shift(kernels, x).arrays)
    assert result.report["ok"], result.report["fault"]
    true = find_truth(inputs.Call(x.q, x.k, x.v, x.mask, False, x.softmax_scale))
    ratios = judge(true, result["out"], result["lse"], Arithmetic(x.q.dtype))
    assert not [measure for measure, value in ratios.items() if not value <= 1], ratios


@pytest.mark.parametrize("scale", [1e-5, 0.03, 100.0, 2.0**60])
def test_windows_at_any_scale(kernels, scale):
    x = make_call(1, 1, 1, 260, 260, 64, False, window=(40, 0), scale=scale)
    result = launch_attention(kernels, x, shifted_by_reference(x))
    assert result.report["ok"], result.report["fault"]
    true = find_truth(inputs.Call(x.q, x.k, x.v, None, False, scale, window=[40, 0]))
    ratios = judge(true, result["out"], result["lse"], Arithmetic(x.q.dtype))
    assert not [measure for measure, value in ratios.items() if not value <= 1], ratios


def test_sinks_beside_a_window(kernels):
    x = make_call(1, 2, 1, 200, 150, 64, False, window=(30, 0), sinks=torch.tensor([2.0, -torch.inf]))
    result = launch_attention(kernels, x, shifted_by_reference(x))
    assert result.report["ok"], result.report["fault"]
    check_output(x, result, attend_by_reference(x))
    assert torch.equal(result["lse"][0, :, :50], x.sinks[:, None].expand(2, 50))  # these rows see no key


@pytest.mark.parametrize("how", ["mask", "window"])
def test_blocks_that_no_row_sees_are_not_visited(kernels, how):
    """Four tiles of 512 rows see 1, 2, 2 and 2 of four blocks each: 7 of 16 tiles of scores are formed."""
    near = torch.ones(1, 1, 512, 512, dtype=torch.bool).tril().triu(-40)
    masks = [near, torch.ones_like(near)] if how == "mask" else [None, None]
    windows = [(-1, -1), (-1, -1)] if how == "mask" else [(40, 0), (511, 511)]
    few, all_tiles = (
        launch_attention(kernels, x, shifted_by_reference(x))
        for x in (
            make_call(1, 1, 1, 512, 512, 64, False, mask=mask, window=window)
            for mask, window in zip(masks, windows, strict=True)
        )
    )
    counts = [(run.report["aic"]["macs"], run.report["aic"]["bytes"]["MTE2"]) for run in (few, all_tiles)]
    assert all(less < 0.5 * more for less, more in zip(*counts, strict=True)), counts


@pytest.mark.parametrize("how", ["mask", "window"])
def test_clean_under_sanitizers(sanitized_kernels, how):
    masks = {"mask": {"mask": padded(2, 140, 0, 130)}, "window": {"window": (20, 3)}}
    x = make_call(2, 2, 1, 140, 140, 64, False, **masks[how])
    for launch in (launch_shift, lambda *a: launch_attention(*a, shifted_by_reference(x))):
        result = launch(sanitized_kernels, x)
        assert result.report["ok"], result.report["fault"]
