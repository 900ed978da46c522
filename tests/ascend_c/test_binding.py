"""The binding: what it refuses, the shapes it makes, and its kernels' results, on the CPU twin in place of an NPU."""

import re
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch.library import opcheck

import pasa
from pasa.ops.attention.ascend import backend as npu_backend
from pasa.ops.attention.ascend import build_record
from pasa.ops.attention.ascend.masks import find_visits
from pasa.ops.attention.spec.shift_keys import shift_exact, shift_paper, whole_blocks
from tests.adversarial_search import Genes, badness
from tests.inputs import max_error, normal_qkv

SOURCES = Path(__file__).resolve().parents[2] / "ascend_c"
CONFIGS = {
    f"{recovery}-{overflow}": pasa.PasaConfig(recovery=recovery, overflow=overflow)
    for recovery in ("exact", "paper")
    for overflow in ("inf", "saturate")
}
HALF_ULP = 2.0**-11  # of an output near 1
# The published recovery multiplies the row mean of S' by 63 or so; one of 128 scores around 2 may be an ulp off.
LSE_BOUND = {"exact": 1e-3, "paper": 1e-3 + 63 * 2.0**-9 / 128}


def test_the_backend_is_available(npu):
    status = next(line for line in pasa.backends() if line.name == "npu")
    assert status.available
    assert "not on an NPU" in status.reason


def test_the_library_says_what_it_was_built_with(npu_library):
    """The build script writes what it finds; the versions of CANN and torch_npu are those of the mocks."""
    here = {"torch": metadata.version("torch"), "torch_npu": "2.9.0", "cann": "9.1.0", "arch": "dav-2201"}
    assert build_record.built_with(npu_library) == here


# ---- results


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("heads", "lengths", "dim", "is_causal"),
    [((1, 1), (1, 63), 64, False), ((4, 2), (40, 70), 40, True), ((3, 1), (130, 300), 80, True)],
)
def test_attention_is_as_the_emulation(npu, name, heads, lengths, dim, is_causal):
    """The binding passes its arguments in the right order; the tests of the kernels are stricter."""
    q, k, v = normal_qkv(heads, lengths, dim)
    q, k = q + 2, k + 2
    how = {"is_causal": is_causal, "config": CONFIGS[name], "return_lse": True}
    out, lse = pasa.attention(q, k, v, backend="npu", **how)
    emulated, emulated_lse = pasa.attention(q, k, v, backend="reference", **how)
    golden, golden_lse = pasa.golden_attention(q, k, v, is_causal=is_causal)
    assert max_error(out, golden) <= 2 * max_error(emulated, golden) + HALF_ULP
    seen = golden_lse > -torch.inf
    assert torch.equal(lse > -torch.inf, seen)
    assert float((lse - emulated_lse)[seen].abs().max()) <= LSE_BOUND[name.split("-")[0]]


@pytest.mark.parametrize("recovery", ["exact", "paper"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_sequences(npu, recovery, is_causal):
    """Packed sequences of several lengths agree with the reference.

    One has no keys and one no queries; causal ones have more keys than queries.
    """
    edges_q, edges_k = torch.tensor([0, 5, 9, 44, 44, 74]), torch.tensor([0, 10, 10, 140, 143, 178])
    q, k, v = (x[0].transpose(0, 1) for x in normal_qkv((4, 2), (74, 178), 32))
    how = {"is_causal": is_causal, "config": pasa.PasaConfig(recovery=recovery), "return_lse": True}
    out, lse = pasa.attention_varlen(q, k + 2, v, edges_q, edges_k, 35, 130, backend="npu", **how)
    expected, expected_lse = pasa.attention_varlen(q, k + 2, v, edges_q, edges_k, 35, 130, backend="reference", **how)
    torch.testing.assert_close(out, expected, atol=4 * HALF_ULP, rtol=0)
    torch.testing.assert_close(lse, expected_lse, atol=LSE_BOUND[recovery], rtol=0)


def test_inputs_of_other_types_are_converted(npu):
    q, k, v = normal_qkv((2, 1), (20, 30), 48)
    out = pasa.attention(q, k, v, backend="npu")
    for dtype in (torch.bfloat16, torch.float32):
        inputs = [x.to(dtype) for x in (q, k, v)]
        assert torch.equal(
            pasa.attention(*inputs, backend="npu"), pasa.attention(*(x.half() for x in inputs)).to(dtype)
        )
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(pasa.attention(*strided, backend="npu"), out)


@pytest.mark.parametrize("recovery", ["exact", "paper"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [40, 80])
def test_unbiased_rounding(npu, dim, dtype, recovery):
    """Rows with two equal maxima are rounded stochastically, directly to the requested type, and others to nearest.

    Only two keys have weight, with equal scores. With the exact recovery, FP32 holds (v_1 + v_2) / 2 on both sides. The
    published recovery divides by a sum of weights that FP16 did not round. These are an ulp off here, so the random
    bits differ.
    """
    q, k, v = (x.to(dtype) for x in normal_qkv((3, 1), (70, 130), dim))
    k[:, :, 7] = k[:, :, 3] = 40 * q[:, :1].float().mean(2).sign().to(dtype)
    q[:, :, ::2] = k[:, :, 7].sign().unsqueeze(2)
    config = pasa.PasaConfig(recovery=recovery, softmax="unbiased")
    out = pasa.attention(q, k, v, backend="npu", config=config)
    expected = pasa.attention(q, k, v, backend="reference", config=config)
    nearest = pasa.attention(q, k, v, backend="npu", config=pasa.PasaConfig(recovery=recovery))
    assert out.dtype == dtype
    spacing = torch.finfo(torch.float16 if dtype == torch.float32 else dtype).eps * expected.double().abs()
    off = (out.double() - expected.double()).abs()[:, :, ::2]
    assert (off <= {"exact": 0, "paper": 2}[recovery] * spacing[:, :, ::2]).all()
    assert not torch.equal(out[:, :, ::2], nearest[:, :, ::2])
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    edges = (torch.tensor([0, 70]), torch.tensor([0, 130]))
    result = pasa.attention_varlen(*packed, *edges, 70, 130, backend="npu", config=config)
    assert torch.equal(result, out[0].transpose(0, 1))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_query_that_is_not_finite_reaches_only_its_row(npu, bad):
    """Story: a vector core's largest score was NaN, and no other row of it got the FP32 tile that it needed."""
    q, k, v = normal_qkv((2, 1), (20, 140), 32)
    q[0, 1, 5] *= 40  # needs the FP32 tile
    expected, expected_lse = pasa.attention(q, k, v, backend="npu", return_lse=True)
    q[0, 1, 0, 3] = bad
    out, lse = pasa.attention(q, k, v, backend="npu", return_lse=True)
    nan_row = torch.zeros(1, 2, 20, dtype=torch.bool)
    nan_row[0, 1, 0] = True
    assert torch.equal(torch.isnan(out).any(-1), nan_row)
    assert torch.equal(torch.isnan(lse), nan_row)
    assert torch.equal(out[~nan_row], expected[~nan_row])
    assert torch.equal(lse[~nan_row], expected_lse[~nan_row])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_query_that_is_not_finite_and_sees_no_key_gives_zero(npu, bad):
    """Story: a fully masked row gave NaN if its query was NaN, where the specification says 0 and -inf."""
    q, k, v = normal_qkv((1, 1), (6, 4), 16)  # causal, bottom right: the first two rows see no key
    q[0, 0, :4, 3] = bad
    out, lse = pasa.attention(q, k, v, is_causal=True, return_lse=True, backend="npu")
    expected, expected_lse = pasa.attention(q, k, v, is_causal=True, return_lse=True, backend="reference")
    assert not out[0, 0, :2].any()
    assert lse[0, 0, :2].isneginf().all()
    assert torch.equal(torch.isnan(out), torch.isnan(expected))
    assert torch.equal(torch.isnan(lse), torch.isnan(expected_lse))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sinks(npu, dtype):
    """Sinks of any dtype serve all rows of a head; packed sequences without keys have them as log-sum-exp."""
    q, k, v = normal_qkv((4, 2), (20, 140), 48, batch=2)
    sinks = torch.tensor([-2.0, 4.0, 9.0, -torch.inf], dtype=dtype)
    how = {"sinks": sinks, "return_lse": True}
    found, expected = (pasa.attention(q, k, v, is_causal=True, **how, backend=name) for name in ("npu", "reference"))
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2.0**-9)
    assert not torch.equal(found[0], pasa.attention(q, k, v, is_causal=True, backend="npu"))
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    edges = torch.tensor([0, 20, 25, 40]), torch.tensor([0, 140, 140, 280])
    found, expected = (
        pasa.attention_varlen(*packed, *edges, 20, 140, **how, backend=name) for name in ("npu", "reference")
    )
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2.0**-9)
    assert torch.equal(found[1][20:25], sinks.float().expand(5, 4))
    with pytest.raises(NotImplementedError, match="sinks"):
        pasa.attention(q, k, v, sinks=sinks, backend="npu", config=pasa.PasaConfig(recovery="paper"))


def test_a_query_that_is_not_finite_and_sees_a_sink_alone(npu):
    q, k, v = normal_qkv((1, 1), (6, 4), 16)  # causal, bottom right: the first two rows see no key
    q[0, 0, :4, 3] = torch.nan
    how = {"is_causal": True, "return_lse": True, "sinks": torch.tensor([1.5])}
    (out, lse), (expected, expected_lse) = (
        pasa.attention(q, k, v, **how, backend=name) for name in ("npu", "reference")
    )
    assert not out[0, 0, :2].any()
    assert (lse[0, 0, :2] == 1.5).all()
    assert torch.equal(torch.isnan(out), torch.isnan(expected))
    assert torch.equal(torch.isnan(lse), torch.isnan(expected_lse))


FOUND = [
    Genes(keys=128, base=6.4545, noise=1.37e-6, outliers=0.071, ties=0.85, exponent=55.5, values="signs", seed=455087),
    Genes(keys=129, dim=1, base=18.57, slope=14194.3, size=473.6, columns=0.61, profile="alternate", values="signs",
          seed=582666),
    Genes(keys=2, noise=0.0, values="subnormal"),
    Genes(keys=2, dim=256, noise=1.0, outliers=0.02, exponent=80.0, values="normal"),
    Genes(keys=2, dim=256, noise=1.0, base=-30000.0, columns=1.0, exponent=80.0),
]  # fmt: skip


@pytest.mark.parametrize("overflow", ["inf", "saturate"])
@pytest.mark.parametrize("softmax", ["safe", "unbiased"])
@pytest.mark.parametrize("genes", FOUND, ids=str)
def test_the_worst_that_a_search_has_found(npu, genes, softmax, overflow):
    """The worst inputs of a search keep the bounds.

    Story: in the last two, some scores lie below -2^90, where the running maximum once began, and outputs were NaN.
    """
    assert badness(genes, "npu", pasa.PasaConfig(softmax=softmax, overflow=overflow)) <= 1


# ---- K' in memory


@pytest.mark.parametrize("keys", [1, 100, 128, 129, 300])
def test_keys_of_the_published_recovery(npu, keys):
    k = whole_blocks(torch.randn(2, 3, keys, 32).half(), 128)
    matrix, _ = npu_backend.paper_matrix(0.125, None, torch.device("cpu"))
    shifted = npu.npu_shift_paper(k, matrix, False).float()
    expected = torch.cat([shift_paper(part, matrix.float(), "inf") for part in k.float().split(128, 2)], 2)
    torch.testing.assert_close(shifted, expected, atol=1e-3, rtol=2.0**-10)


@pytest.mark.parametrize("scale", [1.0, 0.125, 80**-0.5, 2.0**-20, 3.0])
def test_exact_shift_keeps_the_keys(npu, scale):
    """K' of the exact recovery has the bits of the reference, and so has the kernels' share of the scale."""
    k = torch.randn(1, 2, 200, 48).half() + 5
    keys, anchors, units = npu.npu_shift_exact(k, None, None, scale, False, False)
    assert (keys.shape, anchors.shape, units.shape) == ((1, 2, 200, 48), (1, 2, 4, 48), (1, 2, 2, 8))
    unit = min(1.0, 2.0 ** torch.tensor(scale).log2().add(0.5).floor().item())
    first = shift_exact(k[:, :, :128].float(), unit)
    assert torch.equal(units[:, :, 0, 0], first.unit[:, :, 0, 0])
    assert torch.equal(keys[:, :, :128].float(), first.keys)
    assert torch.equal(anchors[:, :, 0].float(), first.anchor[:, :, 0])


# ---- refusals and shapes


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


def test_results_do_not_depend_on_the_number_of_cores(npu, monkeypatch):
    q, k, v = normal_qkv((2, 1), (150, 200), 32, batch=2)
    outputs = []
    for cores in ("1", "3", "20"):
        monkeypatch.setenv("FAKE_CORES", cores)
        outputs.append(pasa.attention(q, k, v, is_causal=True, backend="npu"))
    assert all(torch.equal(out, outputs[0]) for out in outputs[1:])


CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("keys", [1, 128, 150])
def test_shapes_of_shifted_keys_are_known_without_data(npu, keys):
    k = torch.randn(2, 2, keys, 32).half()
    opcheck(npu.npu_shift_exact.default, (k, None, None, 0.125, False, True), test_utils=CHECKS)
    matrix, _ = npu_backend.paper_matrix(1.0, None, k.device)
    opcheck(npu.npu_shift_paper.default, (whole_blocks(k, 128), matrix, False), test_utils=CHECKS)


def test_shapes_of_outputs_are_known_without_data(npu):
    opcheck(npu.npu_attention.default, tuple(call_arguments().values()), test_utils=CHECKS)
    opcheck(
        npu.npu_attention.default,
        tuple(masked_arguments(largest_scores=True, counted=True).values()),
        test_utils=CHECKS,
    )


# ---- what only an NPU compiles: names alone


def fields(path, struct):
    """Members of a plain struct."""
    body = re.search(rf"struct {struct} {{(.*?)\n}};", (SOURCES / path).read_text(encoding="utf-8"), re.DOTALL)[1]
    return re.findall(r"^\s+[\w*]+ \*?(\w+)(?: = [^;]*)?;", body, re.MULTILINE)


def test_entries_hand_every_pointer_on():
    entries = (SOURCES / "kernel" / "pasa.asc").read_text(encoding="utf-8")
    structs = {"Arguments": "AttentionPointers", "ShiftArguments": "ShiftPointers", "DecodeArguments": "DecodePointers"}
    for struct, binding in structs.items():
        members = fields("kernel/arguments.h", struct)
        assert set(members) - {"scores"} == set(fields("binding/pointers.h", binding))
        assert all(f"arguments.{name} = " in entries for name in members)
        assert all(f"p.{name}" in entries for name in fields("binding/pointers.h", binding))


def test_entries_call_what_there_is():
    """Files, launches that the binding declares, and the kernels' entry functions."""
    entries = (SOURCES / "kernel" / "pasa.asc").read_text(encoding="utf-8")
    files = [(SOURCES / "kernel" / name).resolve() for name in re.findall(r'#include "(.+)"', entries)]
    headers = [path.read_text(encoding="utf-8") for path in files]
    for name in re.findall(r"^void (Launch\w+)\(", entries, re.MULTILINE):
        assert any(f"void {name}(" in header for header in headers)
    called = re.findall(r"^    pasa::(\w+)(?:<kExact>)?\(arguments, tiling\);", entries, re.MULTILINE)
    assert called == ["PasaAttention", "PasaDecode", "ShiftExact", "ShiftPaper"]
    for name in called:
        assert any(f"inline void {name}(const " in header for header in headers)


def test_attributes_of_entries():
    """Attention: a cube core with its two vector cores. SyncAll among vector cores: in batch mode, or two streams could
    wait for each other for ever; where there are vector cores alone it is documented as `__mix__(0, 1)`."""
    entries = (SOURCES / "kernel" / "pasa.asc").read_text(encoding="utf-8")
    result = dict(re.findall(r"^(.*__global__ .*) void (\w+)\(GM_ADDR", entries, re.MULTILINE))
    assert {name: attributes for attributes, name in result.items()} == {
        "pasa_attention": "__global__ __mix__(1, 2)",
        "pasa_decode": "__schedmode__(1) __global__ __mix__(1, 2)",
        "pasa_shift_exact": "__schedmode__(1) __global__ __mix__(0, 1)",
        "pasa_shift_paper": "__global__ __cube__",
    }
    syncs = {path.name for path in (SOURCES / "kernel").glob("*.h") if "SyncAll()" in path.read_text(encoding="utf-8")}
    assert syncs == {"shift_rows.h", "decode_vector.h"}
