"""The binding of the NPU kernels refuses what does not fit, by name, before anything is launched."""

import re

import pytest
import torch

from pasa.ops.attention.ascend import backend as npu_backend
from pasa.ops.attention.ascend.masks import find_visits


def call_arguments(**changed):
    """Arguments of npu_attention that are in order, but for what is changed."""
    half = {"dtype": torch.float16}
    arguments = {
        "q": torch.zeros(2, 4, 20, 32, **half),
        "keys": torch.zeros(2, 2, 150, 32, **half),
        "v": torch.zeros(2, 2, 150, 32, **half),
        "anchors": torch.zeros(2, 2, 4, 32, **half),
        "units": torch.ones(2, 2, 2, 8),
        "lengths": torch.tensor([150, 70], dtype=torch.int32),
        "starts": None,
        "sinks": torch.zeros(4),
        "mask": None,
        "visits": None,
    }
    numbers = {"is_causal": False, "left": -1, "right": -1, "scale": 1.0, "invariance": 0.0, "saturate": False}
    results = {"largest_scores": False, "counted": False}
    return arguments | numbers | {"unbiased_columns": 0, "to_bf16": False} | results | changed


def masked_arguments(**changed):
    """Arguments in order of a call with a mask."""
    mask = torch.ones(2, 1, 20, 150, dtype=torch.bool)
    table = {"mask": mask.expand(2, 4, 20, 150), "visits": find_visits(mask, 20)}
    anchors = torch.zeros(2, 2, 6, 32, dtype=torch.float16)
    return call_arguments(**{"anchors": anchors, "lengths": None, **table} | changed)


def visits_of(*entries):
    """Return a table of one tile for each of two batch entries: how many blocks it visits, and which."""
    table = torch.full((2, 1, 1, len(entries), 3), -1)
    table[..., 0] = torch.tensor(entries)
    return table


BOOL = {"dtype": torch.bool}
MASKS_REFUSED = [
    ({"mask": torch.ones(2, 4, 20, 150).half()}, TypeError, "mask is Half, expected Bool or Float"),
    (
        {"mask": torch.ones(2, 4, 20, 300)[..., ::2]},
        ValueError,
        "mask has a stride of 2 between keys, expected 1",
    ),
    (
        {"mask": torch.ones(2, 4, 20, 140)},
        ValueError,
        r"mask has shape \[2, 4, 20, 140\], expected \[2, 4, 20, 150\]: expand it",
    ),
    (
        {
            "q": torch.zeros(2, 4, 2, 32).half(),
            "mask": torch.empty(2**30 + 150, **BOOL).as_strided((2, 4, 2, 150), (0, 0, 2**30, 1)),
        },
        ValueError,
        "mask has a stride of 1073741824 between rows, expected less than 1073741824: copy it",
    ),
    (
        {"mask": torch.ones(2, 1, 20, 150, **BOOL)},
        ValueError,
        r"mask has shape \[2, 1, 20, 150\], expected \[2, 4, 20, 150\]: expand it",
    ),
    (
        {"mask": torch.ones(2, 4, 150, 20, **BOOL).mT},
        ValueError,
        "mask has a stride of 20 between keys, expected 1",
    ),
    (
        {"mask": torch.ones(6000, **BOOL).as_strided((2, 4, 20, 150), (0, 600, 30, 1))},
        ValueError,
        "mask has a stride of 30 between rows, expected 0 or at least 150",
    ),
    ({"visits": None}, ValueError, "mask and visits come together"),
    ({"visits": torch.zeros(2, 1, 1, 3, 3)}, TypeError, "visits is Float, expected Long"),
    (
        {"visits": torch.zeros(2, 2, 1, 3, 3).long()},
        ValueError,
        r"visits has shape \[2, 2, 1, 3, 3\], expected \[2, 4, 1, 3, 3\]",
    ),
    ({"visits": torch.zeros(2, 1, 1, 2, 3).long()}, ValueError, r"visits has shape .*, expected \[2, 1, 1, 3, 3\]"),
    ({"visits": torch.tensor(0)}, ValueError, "visits has 0 dimensions"),
    ({"visits": visits_of(3, 0, 1)}, ValueError, "visits says that a tile visits 3 of 2 blocks of keys"),
    ({"visits": visits_of(-1, 0, 1)}, ValueError, "visits says that a tile visits -1 of 2 blocks"),
    ({"visits": visits_of(1, 2, 0)}, ValueError, "visits has block 2 behind block -1 of 2 blocks of keys: they rise"),
    ({"visits": visits_of(1, -1, 0)}, ValueError, "visits has block -1 behind block -1"),
    ({"visits": visits_of(2, 1, 1)}, ValueError, "visits has block 1 behind block 1"),
    ({"anchors": torch.zeros(2, 2, 4, 32).half()}, ValueError, r"anchors has shape .* expected \[2, 2, 6, 32\]"),
    ({"is_causal": True}, ValueError, "a mask comes alone"),
    ({"left": 3}, ValueError, "a mask comes alone"),
    ({"right": 3}, ValueError, "a mask comes alone"),
    ({"lengths": torch.tensor([150, 70], dtype=torch.int32)}, ValueError, "a mask comes alone"),
]


@pytest.mark.parametrize(("changed", "error", "sentence"), MASKS_REFUSED, ids=[each[2] for each in MASKS_REFUSED])
def test_masks_that_do_not_fit_are_refused(npu, changed, error, sentence):
    npu.npu_attention(*masked_arguments().values())
    with pytest.raises(error, match=sentence):
        npu.npu_attention(*masked_arguments(**changed).values())


REFUSED = [
    ({"q": torch.zeros(2, 4, 20, 32)}, TypeError, "q is Float, expected Half"),
    ({"q": torch.zeros(2, 4, 20, dtype=torch.float16)}, ValueError, "q has 3 dimensions"),
    ({"q": torch.zeros(2, 3, 20, 32).half()}, ValueError, "heads=3 must be a multiple of kv_heads=2"),
    ({"q": torch.zeros(2, 4, 20, 40).half()}, ValueError, "dim=40 must be a multiple of 16, from 16 to 256"),
    ({"q": torch.zeros(2, 4, 0, 32).half()}, ValueError, "rows=0"),
    (
        {"q": torch.zeros(2, 4, 20, 272).half(), "v": torch.zeros(2, 2, 150, 272).half()},
        ValueError,
        "dim=272 must be a multiple of 16, from 16 to 256",
    ),
    ({"q": torch.zeros(2, 4, 32, 20).half().mT}, ValueError, "q is not contiguous"),
    ({"q": torch.zeros(2, 20, 4, 32).half().transpose(1, 2)}, ValueError, "q is not contiguous"),
    ({"v": torch.zeros(2, 150, 2, 32).half().transpose(1, 2)}, ValueError, "v is not contiguous"),
    (
        {"v": torch.zeros(1, 2, 150, 32).half()},
        ValueError,
        r"v has shape \[1, 2, 150, 32\], expected \[2, 2, 150, 32\]",
    ),
    ({"keys": torch.zeros(2, 2, 150, 48).half()}, ValueError, r"keys has shape .* expected \[2, 2, 150, 32\]"),
    ({"anchors": None}, ValueError, "anchors and units come together"),
    ({"anchors": torch.zeros(2, 2, 2, 32).half()}, ValueError, r"anchors has shape .* expected \[2, 2, 4, 32\]"),
    ({"units": torch.ones(2, 2, 2, 8).half()}, TypeError, "units is Half, expected Float"),
    ({"lengths": torch.tensor([150, 70])}, TypeError, "lengths is Long, expected Int"),
    ({"sinks": torch.zeros(4).half()}, TypeError, "sinks is Half, expected Float"),
    ({"sinks": torch.zeros(2)}, ValueError, r"sinks has shape \[2\], expected \[4\]"),
    (
        {"anchors": None, "units": None, "lengths": None, "sinks": None, "largest_scores": True},
        ValueError,
        "the published recovery returns no largest scores",
    ),
    (
        {"anchors": None, "units": None, "lengths": None, "sinks": None, "counted": True},
        ValueError,
        "the published recovery returns no counts",
    ),
    ({"scale": 0.0}, ValueError, "scale must be positive and finite"),
    ({"left": -2}, ValueError, "left=-2 and right=-1 must be -1, which is unlimited, or more"),
    ({"right": -5}, ValueError, "left=-1 and right=-5 must be -1"),
    ({"unbiased_columns": -1}, ValueError, "unbiased_columns=-1 is negative"),
    ({"unbiased_columns": 33}, ValueError, "unbiased_columns=33 is above 64 or dim"),
    ({"to_bf16": True}, ValueError, "BF16 outputs are for unbiased rounding alone"),
]


@pytest.mark.parametrize("name", ["keys", "v", "anchors", "units", "lengths", "sinks", "mask", "visits"])
def test_tensors_of_another_device_are_refused(npu, name):
    """A tensor without data would send the call to the operator of shapes, so the device is named."""
    arguments = masked_arguments() if name in ("mask", "visits") else call_arguments()
    moved = arguments | {name: arguments[name].to("meta")}
    with pytest.raises(ValueError, match=f"{name} is on meta but the first tensor is on cpu"):
        npu.npu_attention.default._op_dk(torch._C.DispatchKey.CPU, *moved.values())


@pytest.mark.parametrize(("changed", "error", "sentence"), REFUSED, ids=[each[2] for each in REFUSED])
def test_what_does_not_fit_is_refused(npu, changed, error, sentence):
    with pytest.raises(error, match=sentence):
        npu.npu_attention(*call_arguments(**changed).values())


@pytest.mark.parametrize("what", ["lengths", "windows", "masks"])
def test_the_published_recovery_takes_no_lengths_windows_or_masks(npu, what):
    given = {"lengths": call_arguments(), "windows": call_arguments(left=3, lengths=None), "masks": masked_arguments()}
    published = {"anchors": None, "units": None, "sinks": None, "keys": torch.zeros(2, 2, 256, 32).half()}
    with pytest.raises(ValueError, match=f"the published recovery takes no {what}"):
        npu.npu_attention(*(given[what] | published).values())


@pytest.mark.parametrize(
    ("keys", "matrix", "sentence"),
    [
        (256, 44, r"matrix has shape \[44, 44\], expected \[128, 128\]"),
        (300, 128, "k has 300 keys, no multiple of 128: fill the last block"),
        (44, 44, "k has 44 keys, no multiple of 128"),
    ],
)
def test_the_matrix_fits_whole_blocks(npu, keys, matrix, sentence):
    with pytest.raises(ValueError, match=sentence):
        npu.npu_shift_paper(torch.zeros(1, 1, keys, 16).half(), torch.zeros(matrix, matrix).half(), False)


@pytest.mark.parametrize(
    ("soc", "refused"),
    [
        ("Ascend910B1", ""),
        ("Ascend910B2C", ""),
        ("Ascend910B4-1", ""),
        ("Ascend310P3", "the library was built for Atlas A2, and this chip is an Ascend310P3: run `pasa build-ascend`"),
        ("", "no kernel was written for this chip, '': only for Ascend910B1 to B4 and the Ascend 310P"),
    ],
)
def test_chips(npu, monkeypatch, soc, refused):
    monkeypatch.setenv("FAKE_SOC", soc)
    npu_backend.library_error.cache_clear()
    if not refused:
        assert npu_backend.library_error() is None
        npu.npu_attention(*call_arguments().values())
    else:
        why = npu_backend.library_error()  # so that a call which names no backend is served by another
        assert why.startswith(refused)
        with pytest.raises(NotImplementedError, match=re.escape(refused)):
            npu.npu_attention(*call_arguments().values())
