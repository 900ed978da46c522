"""The binding: the shapes it makes, and its kernels' results, on the CPU twin in place of an NPU."""

import re
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch.library import opcheck

import pasa
from pasa.ops.attention.ascend import backend as npu_backend
from pasa.ops.attention.ascend import build_record
from pasa.ops.attention.spec.shift_keys import shift_exact, shift_paper, whole_blocks
from tests.adversarial_search import Genes, badness
from tests.ascend_c.test_refusals import call_arguments, masked_arguments
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


# ---- shapes and entries


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
