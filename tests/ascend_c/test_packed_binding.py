"""Packed sequences through the binding on the CPU twin: dispatch, refusals and shapes."""

import dataclasses

import pytest
import torch
from torch.library import opcheck

import pasa
from pasa.ops import arguments
from pasa.ops.attention.ascend import backend as npu_backend
from pasa.ops.attention.ascend import decode as npu_decode
from tests.ascend_c import test_decode_binding, test_refusals
from tests.ascend_c.test_decode_binding import CHECKS, ints
from tests.inputs import normal_qkv

EDGES = torch.tensor([0, 5, 9, 244, 244, 400]), torch.tensor([0, 10, 10, 210, 213, 353])


def packed_qkv(dim=32, heads=(4, 2)):
    return [x[0].transpose(0, 1) for x in normal_qkv(heads, (400, 353), dim)]


# ---- dispatch


def refuse_reading(monkeypatch):
    """Let every read of a tensor's value on the host fail, but for checks of what lies in host memory.

    Here the CPU plays the device, which has no such checks.
    """
    monkeypatch.setattr(npu_backend.Call, "edges", lambda call: None)
    for name in ("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, _refuse)


def test_packed_calls_are_neither_padded_nor_read_on_the_host(npu, monkeypatch):
    """The kernels get all rows of all sequences, and lengths on a device stay there."""
    shapes, gathered, kernels = [], [], npu_backend._on_a2

    def launch(call, q, k, *rest):
        shapes.append((q.shape, k.shape))
        return kernels(call, q, k, *rest)

    monkeypatch.setattr(npu_backend, "_on_a2", launch)
    monkeypatch.setattr(npu_backend, "attend_padded", lambda *_: gathered.append(1))
    refuse_reading(monkeypatch)
    call = arguments.packed(*packed_qkv(), *EDGES, None, True, 0.2, -1, -1, 0.0, max_seqlen_q=235, max_seqlen_k=200)
    npu_backend.attend(call)
    assert shapes == [((1, 4, 400, 32), (1, 2, 353, 32))]
    assert not gathered


def _refuse(*_):
    raise AssertionError("a value was read on the host")


@pytest.mark.parametrize("sinks", [None, torch.zeros(4)], ids=["plain", "sinks"])
@pytest.mark.parametrize("kind", ["packed", "pages", "pages of prompts"])
def test_decoding_reads_nothing_on_the_host(npu, launches, monkeypatch, kind, sinks):
    """Lengths, tables and starts on a device stay there, so that no call waits and graphs can be captured."""
    x = test_decode_binding.paged(lengths=[300, 1, 0], starts=[0, 1, 4, 5] if "prompts" in kind else None)
    if kind == "packed":
        q, k, v = packed_qkv()
        edges = torch.tensor([0, 1, 3, 3, 4, 6]), EDGES[1]
        call = arguments.packed(q[:6], k, v, *edges, sinks, True, 0.2, -1, -1, 0.0, max_seqlen_q=2, max_seqlen_k=200)
    else:
        longest = 3 if "prompts" in kind else None, 300
        tables = x.table, x.lengths, x.starts, *longest, None
        call = arguments.paged(x.q, x.k, x.v, *tables, sinks, True, 0.2, -1, -1, 0.0)
    refuse_reading(monkeypatch)
    npu_backend.attend(call)
    assert len(launches) == 1


@pytest.fixture
def launches(monkeypatch):
    """The launches of the kernel of decoding."""
    made, launch = [], npu_decode._launch
    monkeypatch.setattr(npu_decode, "_launch", lambda *given: (made.append(1), launch(*given))[1])
    return made


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("strided", [False, True])
def test_outputs_have_the_type_of_q(npu, dtype, strided):
    q, k, v = (x.to(dtype) for x in packed_qkv())
    q = q if strided else q.contiguous()
    out = pasa.attention_varlen(q, k, v, *EDGES, 235, 200, backend="npu")
    assert (out.dtype, out.shape, out.is_contiguous()) == (dtype, q.shape, True)
    expected = pasa.attention_varlen(q, k, v, *EDGES, 235, 200, backend="reference")
    torch.testing.assert_close(out, expected, atol=2.0**-7, rtol=2.0**-7)


@pytest.mark.parametrize("how", [{}, {"window": (30, -1)}, {"sinks": torch.tensor([1.0, -2.0, 0.0, 3.0])}], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("many", [False, True], ids=["decode", "prefill"])
def test_a_query_that_is_not_finite_reaches_its_row_alone(npu, how, is_causal, many):
    """Unless it sees no key."""
    q, k, v = packed_qkv()
    edges = EDGES if many else (torch.tensor([0, 10, 12, 14, 15, 15]), EDGES[1])
    q = q if many else q[:15].clone()
    q[::3, 1] = torch.nan
    how = how | {"is_causal": is_causal, "return_lse": True}
    (out, lse), (expected, expected_lse) = (
        pasa.attention_varlen(q, k, v, *edges, 235, 200, **how, backend=name) for name in ("npu", "reference")
    )
    assert torch.equal(torch.isnan(out), torch.isnan(expected))
    assert torch.equal(torch.isnan(lse), torch.isnan(expected_lse))
    torch.testing.assert_close(out, expected, atol=2.0**-9, rtol=2.0**-8, equal_nan=True)


# The number of queries and of keys of each sequence; 48 queries of 4 heads take three tiles.
CHOICES = {
    "a few queries each": ([(48, 60)] * 2, True),
    "many queries each": ([(49, 60)] * 2, False),
    "single queries": ([(1, 70)] * 5, True),
    "a prompt beside single queries of many keys": ([(128, 128), *[(1, 300)] * 8], True),
    # story: there are few queries on average, and the prompt took eight tiles that read all of its keys
    "a prompt beside sequences of one token": ([(128, 128), *[(1, 1)] * 20], False),
    "a prompt beside sequences without queries": ([(128, 128), *[(0, 10)] * 20], False),
}
# Seven query heads of a key head, and too many keys for the twin.
LONG_CHOICES = {
    # story: the prompt was taken to have the keys of the others, and they lost a factor of 3 up to 17 of them
    "a prompt beside six single queries of many keys": ([(512, 512), *[(1, 4000)] * 6], True),
    "a prompt beside one of them": ([(512, 512), (1, 4000)], False),
    "two long prompts beside one of them": ([(512, 512)] * 2 + [(1, 4000)] * 6, False),
    "a chunk of a long prompt beside six of them": ([(512, 4000), *[(1, 4000)] * 6], True),
    "single queries of one key": ([(1, 1)] * 3, True),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_kernel_is_chosen_by_the_longest_sequences(npu, launches, name):
    """Both kernels give the same, so only the launch tells which one was chosen."""
    lengths, decodes = CHOICES[name]
    rows, keys = (torch.tensor(each) for each in zip(*lengths, strict=True))
    q, k, v = (x[0].transpose(0, 1) for x in normal_qkv((4, 1), (int(rows.sum()), int(keys.sum())), 16))
    edges = [torch.nn.functional.pad(each.cumsum(0), (1, 0)) for each in (rows, keys)]
    longest = int(rows.max()), int(keys.max())
    pasa.attention_varlen(q, k, v, *edges, *longest, backend="npu")
    assert bool(launches) == decodes


@pytest.mark.parametrize("name", LONG_CHOICES)
def test_the_kernel_of_long_sequences(name):
    lengths, decodes = LONG_CHOICES[name]
    (count, longest), (keys, most) = ((sum(each), max(each)) for each in zip(*lengths, strict=True))
    q, k = (torch.empty(n, heads, 128, dtype=torch.float16, device="meta") for n, heads in ((count, 7), (keys, 1)))
    starts = torch.empty(len(lengths) + 1, dtype=torch.int32, device="meta")
    call = npu_backend.Call(q, k, k, 1.0, cu_q=starts, cu_k=starts, longest=(longest, most))
    assert npu_decode.decodes_packed(npu_decode.Chip(npu_decode.on_a2, npu_decode.most_tiles_on_a2), call) == decodes


def test_without_the_longest_sequences_prefill_serves_a_call(npu, launches):
    """The operator takes calls without bounds: one sequence may then have all queries but few."""
    q, k, v = (x[0].transpose(0, 1) for x in normal_qkv((4, 1), (96, 120), 16))
    edges = torch.tensor([0, 48, 96]), torch.tensor([0, 60, 120])
    call = [torch.ops.pasa.attention_varlen(q, k, v, *edges, **longest, backend="npu")[0]
            for longest in ({}, {"max_seqlen_q": 48, "max_seqlen_k": 60})]  # fmt: skip
    assert len(launches) == 1
    torch.testing.assert_close(*call, atol=2.0**-9, rtol=2.0**-8)


def test_rows_behind_the_last_sequence_are_padding():
    """The last sequence may end before the last row, on a device; the kernel of decoding does not write such rows."""
    q, k, v = (x[0].transpose(0, 1) for x in normal_qkv((4, 2), (7, 30), 16))
    starts = ints([0, 2, 5], [0, 10, 30])
    call = arguments.packed(q, k, v, *starts, torch.ones(4), False, 0.25, -1, -1, 0.0, max_seqlen_q=3, max_seqlen_k=20)
    chip = npu_decode.Chip(lambda call, x: (x.q + torch.nan, x.q[..., 0].float()), npu_decode.most_tiles_on_a2)
    out, lse = npu_decode.decode_packed(chip, call, q, k, v, starts)
    assert out[:5].isnan().all()
    assert not out[5:].any()
    assert lse[:5].isfinite().all()
    assert lse[5:].isneginf().all()


# ---- refusals


@pytest.mark.parametrize(
    ("name", "lengths", "sentence"),
    [
        ("q", [0, 9, 5, 400], "cu_seqlens_q=.* does not rise from 0 to the 400 tokens of q"),
        ("q", [1, 9, 9, 400], "cu_seqlens_q=.* does not rise"),
        ("k", [0, 9, 9, 354], "cu_seqlens_k=.* does not rise from 0 to the 353 tokens of k"),
        ("k", [0, 9, 9, 352], "cu_seqlens_k=.* does not rise"),
    ],
)
def test_wrong_lengths_in_host_memory_are_named_by_the_public_function(npu, name, lengths, sentence):
    edges = {"q": torch.tensor([0, 5, 9, 400]), "k": torch.tensor([0, 10, 10, 353])} | {name: torch.tensor(lengths)}
    with pytest.raises(ValueError, match=sentence):
        pasa.attention_varlen(*packed_qkv(), edges["q"], edges["k"], 400, 354, backend="npu")


@pytest.mark.parametrize("recovery", ["exact", "paper"])
@pytest.mark.parametrize("device", ["q", "k"])
def test_lengths_on_two_devices_are_refused(npu, recovery, device):
    """Lengths in host memory would be checked, and lengths on the device would not."""
    edges = [x.to("meta") if name == device else x for name, x in zip("qk", EDGES, strict=True)]
    call = arguments.packed(*packed_qkv(), *EDGES, None, True, 0.2, -1, -1, 0.0, max_seqlen_q=235, max_seqlen_k=200)
    call.cu_q, call.cu_k = edges
    call.options = dataclasses.replace(call.options, recovery=recovery)
    with pytest.raises(ValueError, match=r"cu_seqlens_q is on .* but cu_seqlens_k is on .*: put both on one device"):
        npu_backend.attend(call)


def attention_arguments(**changed):
    """Arguments of npu_attention that are in order: three packed sequences."""
    half = {"dtype": torch.float16}
    given = {
        "q": torch.zeros(1, 4, 20, 32, **half),
        "keys": torch.zeros(1, 2, 150, 32, **half),
        "v": torch.zeros(1, 2, 150, 32, **half),
        "anchors": torch.zeros(1, 2, 8, 32, **half),
        "units": torch.ones(1, 2, 4, 8),
        "lengths": None,
        "starts": ints([0, 5, 5, 20], [0, 130, 150, 150]),
    }
    return test_refusals.call_arguments(**given | changed)


def decode_arguments(**changed):
    """The same of npu_decode."""
    half = {"dtype": torch.float16}
    given = {
        "k": torch.zeros(1, 2, 50, 32, **half),
        "v": torch.zeros(1, 2, 50, 32, **half),
        "table": None,
        "lengths": None,
        "starts": ints([0, 1, 1, 6], [0, 30, 50, 50]),
    }
    return test_decode_binding.call_arguments(**given | changed)


REFUSED = [
    (ints([0, 9, 5, 20], [0, 130, 150, 150]), ValueError, r"starts\[0\]\[2\]=5 is below starts\[0\]\[1\]=9"),
    (ints([1, 5, 5, 20], [0, 130, 150, 150]), ValueError, r"starts\[0\]\[0\]=1 must be 0"),
    (ints([0, 5, 5, 21], [0, 130, 150, 150]), ValueError, r"starts\[0\]\[3\]=21 must be 20: the last sequence ends"),
    (ints([0, 5, 5, 20], [0, 130, 150, 151]), ValueError, r"starts\[1\]\[3\]=151 must be 150"),
    (ints([0, 5, 5, 20], [0, -1, 150, 150]), ValueError, r"starts\[1\]\[1\]=-1 is below starts\[1\]\[0\]=0"),
    (ints([0, 5, 5, 20]), ValueError, r"starts has shape \[1, 4\], expected \[2, 4\]"),
    (ints(0, 5, 5, 20), ValueError, r"starts has shape \[4\], expected \[2, sequences \+ 1\]"),
    (ints([0], [0]), ValueError, r"starts has shape \[2, 1\], expected \[2, sequences \+ 1\]"),
    (torch.tensor([[0, 5, 5, 20], [0, 130, 150, 150]]), TypeError, "starts is Long, expected Int"),
    (ints([0, 0], [5, 130], [5, 150], [20, 150]).T, ValueError, "starts is not contiguous"),
]


@pytest.mark.parametrize(("starts", "error", "sentence"), REFUSED, ids=[each[2] for each in REFUSED])
def test_wrong_starts_are_refused(npu, starts, error, sentence):
    npu.npu_attention(*attention_arguments().values())
    with pytest.raises(error, match=sentence):
        npu.npu_attention(*attention_arguments(starts=starts).values())


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"starts": ints([0, 9, 6, 6], [0, 30, 50, 50])}, r"starts\[0\]\[2\]=6 is below starts\[0\]\[1\]=9"),
        ({"starts": ints([0, 1, 1, 6], [0, 30, 50, 51])}, r"starts\[1\]\[3\]=51 must be 50"),
        ({"lengths": ints(5, 5, 5)}, "packed sequences take no lengths: starts have them"),
        ({"k": torch.zeros(3, 2, 50, 32).half()}, r"k has shape \[3, 2, 50, 32\], expected \[1, 2, 50, 32\]"),
    ],
)
def test_wrong_starts_of_decoding_are_refused(npu, changed, sentence):
    npu.npu_decode(*decode_arguments().values())
    with pytest.raises(ValueError, match=sentence):
        npu.npu_decode(*decode_arguments(**changed).values())


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"lengths": ints(150)}, "packed sequences take no lengths: their starts have them"),
        ({"q": torch.zeros(2, 4, 20, 32).half()}, "batch=2 must be 1: packed sequences are one batch entry"),
        ({"anchors": torch.zeros(1, 2, 4, 32).half()}, r"anchors has shape .* expected \[1, 2, 8, 32\]"),
        ({"units": torch.zeros(1, 2, 2, 8)}, r"units has shape .* expected \[1, 2, 4, 8\]"),
        ({"anchors": None, "units": None, "sinks": None}, "the published recovery takes no packed sequences"),
        (
            {"mask": torch.ones(1, 4, 20, 150, dtype=torch.bool), "visits": torch.zeros(1, 1, 1, 3, 3).long()},
            "packed sequences take no mask",
        ),
    ],
)
def test_what_does_not_go_with_packed_sequences_is_refused(npu, changed, sentence):
    with pytest.raises(ValueError, match=sentence):
        npu.npu_attention(*attention_arguments(**changed).values())


@pytest.mark.parametrize(
    ("starts", "sentence"),
    [
        (ints(0, 9, 5, 150), r"starts\[2\]=5 is below starts\[1\]=9"),
        (ints(0, 9, 150, 149), r"starts\[3\]=149 is below"),
        (ints(0, 9, 149), r"starts\[2\]=149 must be 150"),
        (ints(3), r"starts has shape \[1\], expected \[sequences \+ 1\]"),
        (ints([0, 150]), r"starts has shape \[1, 2\], expected \[2\]"),
    ],
)
def test_wrong_starts_of_keys_are_refused(npu, starts, sentence):
    k = torch.zeros(1, 2, 150, 32).half()
    npu.npu_shift_exact(k, None, ints(0, 9, 150), 1.0, False, False)
    with pytest.raises(ValueError, match=sentence):
        npu.npu_shift_exact(k, None, starts, 1.0, False, False)


@pytest.mark.parametrize("operator", ["npu_attention", "npu_decode"])
def test_starts_on_another_device_are_refused(npu, operator):
    given = attention_arguments() if operator == "npu_attention" else decode_arguments()
    moved = given | {"starts": given["starts"].to("meta")}
    with pytest.raises(ValueError, match="starts is on meta but the first tensor is on cpu"):
        getattr(npu, operator).default._op_dk(torch._C.DispatchKey.CPU, *moved.values())


def test_shapes_are_known_without_data(npu):
    opcheck(npu.npu_attention.default, tuple(attention_arguments().values()), test_utils=CHECKS)
    opcheck(npu.npu_decode.default, tuple(decode_arguments().values()), test_utils=CHECKS)
    k = torch.randn(1, 2, 150, 32).half()
    opcheck(npu.npu_shift_exact.default, (k, None, ints(0, 9, 150), 0.125, False, True), test_utils=CHECKS)
