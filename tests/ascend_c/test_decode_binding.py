"""The operators of decoding and what calls them: what they refuse and serve, and paged caches, on the CPU twin."""

import math
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.library import opcheck

import pasa
from pasa.ops.attention.ascend import decode, on_310p
from tests.ascend_c.decode_runs import make_call, put_into_pages
from tests.inputs import normal_qkv

HALF_ULP = 2.0**-11  # of an output near 1
# The reference keeps scores in FP16, up to 2^-8 units from their reference; a log-sum-exp averages them.
CLOSE = {"atol": 4 * HALF_ULP, "rtol": 2.0**-9}


@dataclass(frozen=True)
class Chip:
    """Hold the operator of a chip, the arguments that it lacks, and the tokens of a sequence in each of its calls."""

    operator: Any
    lacks: tuple[str, ...]
    launches: list[int]

    def decode(self, arguments: dict[str, Any]) -> Any:
        return self.operator(*self.taken(arguments))

    def taken(self, arguments: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(value for name, value in arguments.items() if name not in self.lacks)


@pytest.fixture(params=["A2", "310P"])
def chip(request, monkeypatch):
    """Make `npu` the backend of a chip, and count the calls of its kernel of decoding."""
    is_310p = request.param == "310P"
    npu = request.getfixturevalue("npu_310p" if is_310p else "npu")
    module, name = (on_310p, "decode") if is_310p else (decode, "on_a2")
    launch, made = getattr(module, name), []

    def counted(call, operands):
        made.append(operands.tokens)
        return launch(call, operands)

    monkeypatch.setattr(module, name, counted)
    lacks = ("saturate", "unbiased_columns", "to_bf16") if is_310p else ()
    return Chip(npu.npu_310p_decode if is_310p else npu.npu_decode, lacks, made)


@pytest.fixture
def launches(chip):
    """The calls of the kernel of decoding; prefill and gathered pages make none."""
    return chip.launches


on_a2 = pytest.mark.parametrize("chip", ["A2"], indirect=True)


def paged(batch=3, heads=4, kv_heads=2, keys=300, dim=64, slots=16, starts=None, **how):
    """Return q, caches, table and lengths of a paged call, and the starts of its sequences if it has several tokens."""
    x = make_call(batch, heads, kv_heads, 1 if starts is None else 100, keys, dim, lengths=torch.tensor(how["lengths"]))
    return put_into_pages(x, slots, starts)


# ---- dense calls


@pytest.mark.parametrize("config", [{}, {"overflow": "saturate"}], ids=str)
@pytest.mark.parametrize(
    ("heads", "rows", "dim"), [((7, 1), 1, 64), ((4, 2), 5, 40), ((8, 8), 64, 80), ((6, 1), 30, 32)]
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_few_rows_are_decoded(launches, heads, rows, dim, is_causal, config):
    q, k, v = normal_qkv(heads, (rows, 333), dim, batch=2)
    how = {"is_causal": is_causal, "config": pasa.PasaConfig(**config), "return_lse": True}
    found, expected = (pasa.attention(q, k + 2, v, backend=name, **how) for name in ("npu", "reference"))
    assert launches == [rows]
    torch.testing.assert_close(found, expected, **CLOSE)


@on_a2
@pytest.mark.parametrize(("heads", "rows"), [((7, 1), 1), ((8, 8), 64)])
def test_a_few_rows_are_decoded_with_unbiased_rounding(launches, heads, rows):
    q, k, v = normal_qkv(heads, (rows, 333), 64, batch=2)
    how = {"is_causal": True, "config": pasa.PasaConfig(softmax="unbiased"), "return_lse": True}
    found, expected = (pasa.attention(q, k + 2, v, backend=name, **how) for name in ("npu", "reference"))
    assert launches == [rows]
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize(("rows", "dim", "decoded"), [(48, 64, True), (49, 64, False), (64, 80, True), (65, 80, False)])
@pytest.mark.parametrize("chip", ["310P"], indirect=True)
def test_more_tiles_of_longer_rows_are_decoded_on_a_310p(launches, rows, dim, decoded):
    """A tile has 16 tokens of four heads: three tiles up to 64 columns, and four above; see on_310p.most_tiles."""
    q, k, v = normal_qkv((4, 1), (rows, 100), dim)
    found, expected = (pasa.attention(q, k, v, backend=name, return_lse=True) for name in ("npu", "reference"))
    assert launches == [rows] * decoded
    torch.testing.assert_close(found, expected, **CLOSE)


@on_a2
def test_many_rows_are_not_decoded(launches):
    q, k, v = normal_qkv((4, 1), (49, 100), 32)  # four tiles
    pasa.attention(q, k, v, backend="npu")
    pasa.attention(q[:, :, :1], k, v, backend="npu", config=pasa.PasaConfig(recovery="paper"))
    assert launches == []


@pytest.mark.parametrize(
    "how", [{"window": (90, 0)}, {"attn_mask": torch.arange(150) % 3 > 0}, {"return_max_logits": True}], ids=str
)
def test_rows_with_what_decoding_lacks_take_prefill(launches, how):
    """A mask that decoding ignored would change the output by far more than roundings."""
    q, k, v = normal_qkv((4, 2), (2, 150), 32)
    found, expected = (pasa.attention(q, k, v, backend=name, return_lse=True, **how) for name in ("npu", "reference"))
    torch.testing.assert_close(found, expected, **CLOSE)
    assert launches == []


@on_a2
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_layouts_and_types(launches, layout):
    """Keys of tokens before heads are read where they are."""
    q, k, v = normal_qkv((6, 2), (1, 150), 64, batch=2)
    expected = pasa.attention(q, k, v, backend="npu")
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        inputs = [x.to(dtype) for x in (q, k, v)]
        rounded = pasa.attention(*(x.half() for x in inputs), backend="npu")
        if layout == "NHD":
            inputs = [x.transpose(1, 2).contiguous() for x in inputs]
        out = pasa.attention(*inputs, backend="npu", tensor_layout=layout)
        out = out.transpose(1, 2) if layout == "NHD" else out
        assert torch.equal(out, rounded.to(dtype))
        assert dtype != torch.float16 or torch.equal(out, expected)


def test_results_do_not_depend_on_other_sequences_or_much_on_cores(chip, monkeypatch):
    """Parts are merged in FP32, so another number of cores changes no more than roundings."""
    q, k, v = normal_qkv((4, 2), (1, 500), 32, batch=3)
    outputs = []
    for cores in ("1", "3", "8"):
        monkeypatch.setenv("FAKE_CORES", cores)
        outputs.append(pasa.attention(q, k, v, backend="npu", return_lse=True))
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0], atol=2.0**-11, rtol=2.0**-10)


@on_a2
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_sequences_of_a_few_rows(launches, is_causal):
    edges_q, edges_k = torch.tensor([0, 1, 2, 3, 4]), torch.tensor([0, 300, 301, 301, 400])
    q, k, v = (x[0].transpose(0, 1) for x in normal_qkv((4, 2), (4, 400), 32))
    how = {"is_causal": is_causal, "return_lse": True}
    found, expected = (
        pasa.attention_varlen(q, k, v, edges_q, edges_k, 1, 300, backend=name, **how) for name in ("npu", "reference")
    )
    assert launches == [0]  # one for all sequences, whatever their lengths
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("sinks", [None, torch.tensor([2.0, -1.0])], ids=["plain", "sinks"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_query_that_is_not_finite_reaches_its_row_alone(chip, bad, sinks):
    """Unless it sees no key: with causal alignment the first two tokens see none."""
    q, k, v = normal_qkv((2, 1), (6, 4), 16)
    q[0, 1, 0, 3] = q[0, 0, 3, 5] = bad
    how = {"is_causal": True, "return_lse": True, "sinks": sinks}
    (out, lse), (expected, expected_lse) = (
        pasa.attention(q, k, v, **how, backend=name) for name in ("npu", "reference")
    )
    assert torch.isnan(out[0, 0, 3]).all()
    assert torch.equal(torch.isnan(out), torch.isnan(expected))
    assert torch.equal(torch.isnan(lse), torch.isnan(expected_lse))
    assert torch.equal(lse[:, :, :2], expected_lse[:, :, :2])


# ---- caches in pages


def attend_paged(x, name, **how):
    arguments = (x.q, x.k, x.v, x.table, x.lengths)
    return pasa.attention_paged(*arguments, cu_seqlens_q=x.starts, backend=name, return_lse=True, **how)


@pytest.mark.parametrize("slots", [16, 48, 128])
@pytest.mark.parametrize("sinks", [None, torch.tensor([1.0, -1.0, 4.0, -torch.inf])], ids=["plain", "sinks"])
def test_pages_are_decoded_where_they_are(launches, slots, sinks):
    x = paged(slots=slots, lengths=[300, 1, 0])
    found, expected = (attend_paged(x, name, sinks=sinks) for name in ("npu", "reference"))
    assert launches == [1]
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("sinks", [None, torch.tensor([1.0, -1.0, 4.0, -torch.inf])], ids=["plain", "sinks"])
def test_prompts_and_mixed_batches_are_read_where_they_are(launches, is_causal, sinks):
    """A token, a prompt, no query, a prompt longer than its keys, one whose query is NaN, and tokens of padding."""
    x = paged(batch=5, lengths=[300, 130, 50, 10, 0], starts=[0, 1, 21, 21, 41, 43])
    q = torch.cat([x.q, torch.full((3, 4, 64), torch.nan).half()])
    q[[0, 25, 41]] = torch.nan  # the second of them sees no key if causal, and the third none at all
    x = type(x)(q, x.k, x.v, x.table, x.lengths, x.starts)
    found, expected = (attend_paged(x, name, is_causal=is_causal, sinks=sinks) for name in ("npu", "reference"))
    assert launches == [0]
    torch.testing.assert_close(found, expected, **CLOSE, equal_nan=True)
    assert torch.isnan(found[0][0]).all()
    assert not found[0][41:].any()


@pytest.mark.parametrize("longest", [None, 100])
def test_prompts_of_about_one_length_are_gathered_for_prefill(launches, longest):
    x = paged(batch=2, lengths=[300, 130], starts=[0, 97, 197])
    how = {"is_causal": True, "max_seqlen_q": longest}
    found, expected = (attend_paged(x, name, **how) for name in ("npu", "reference"))
    assert launches == ([0] if longest is None else [])  # without a bound, one sequence might have all tokens
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("how", [{"window": (90, 0)}, {"return_max_logits": True}], ids=str)
def test_pages_with_what_decoding_lacks_are_gathered_for_prefill(launches, how):
    x = paged(lengths=[300, 1, 150])
    found, expected = (attend_paged(x, name, **how) for name in ("npu", "reference"))
    torch.testing.assert_close(found, expected, **CLOSE)
    assert launches == []


def test_a_paged_decode_falls_back_nowhere(chip):
    """The call names no backend: it is served by `npu`, without a warning."""
    x = paged(lengths=[300, 129, 16])
    expected = attend_paged(x, "npu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = attend_paged(x, None)
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


@on_a2
@pytest.mark.parametrize(
    ("change", "config"),
    [("bf16", {}), ("dim", {}), ("paper", {"recovery": "paper"})],
)
def test_pages_that_the_kernel_cannot_read_are_gathered(launches, change, config):
    x = paged(dim=40 if change == "dim" else 64, lengths=[300, 1, 0])
    if change == "bf16":
        x = type(x)(*(each.bfloat16() for each in (x.q, x.k, x.v)), x.table, x.lengths)
    how = {"config": pasa.PasaConfig(**config)}
    found, expected = (attend_paged(x, name, **how) for name in ("npu", "reference"))
    assert launches == ([] if change == "paper" else [0])  # packed: the kernel reads the lengths
    torch.testing.assert_close(found, expected, atol=2.0**-7, rtol=2.0**-7)


def test_anchors_of_pages_change_nothing(chip):
    """Keys lose a frame of their head as they are read, so the kernel needs no anchors that a cache keeps."""
    x = paged(lengths=[300, 129, 16])
    x = type(x)(x.q, *(each.nan_to_num() for each in (x.k, x.v)), x.table, x.lengths)
    anchors = torch.zeros(x.k.shape[0], 2, 64).half()
    found = attend_paged(x, "npu", key_anchors=anchors)
    torch.testing.assert_close(found, attend_paged(x, "npu"), atol=0, rtol=0)


# ---- refusals and shapes


def call_arguments(**changed):
    """Arguments of the operators that are in order, but for what is changed."""
    half, whole = {"dtype": torch.float16}, {"dtype": torch.int32}
    arguments = {
        "q": torch.zeros(2, 6, 2, 32, **half),
        "k": torch.zeros(9, 16, 2, 32, **half),
        "v": torch.zeros(9, 16, 2, 32, **half),
        "table": torch.arange(8, **whole).view(2, 4),
        "lengths": torch.tensor([64, 1], **whole),
        "starts": torch.tensor([0, 5, 6], **whole),
        "sinks": torch.zeros(4),
        "tokens": 0,
    }
    numbers = {"is_causal": False, "scale": 1.0, "saturate": False}
    return arguments | numbers | {"unbiased_columns": 0, "to_bf16": False} | changed


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


DENSE = {"k": torch.zeros(3, 2, 50, 32).half(), "v": torch.zeros(3, 2, 50, 32).half(), "table": None, "starts": None}
REFUSED = [
    ({"table": ints([0, 1, 9, 3], [4, 0, 0, 0])}, ValueError, r"table\[0, 2\]=9, but the cache has 9 pages"),
    ({"table": ints([0, 1, -1, 3], [4, 0, 0, 0])}, ValueError, r"table\[0, 2\]=-1, but the cache has 9 pages"),
    ({"table": ints([0, 1], [4, 0])}, ValueError, r"lengths\[0\]=64 do not fit into the 2 pages of 16 keys"),
    ({"lengths": ints(64, -1)}, ValueError, r"lengths\[1\]=-1 do not fit into the 4 pages"),
    ({"lengths": None}, ValueError, "table needs two dimensions, and lengths"),
    ({"lengths": torch.tensor([64, 1])}, TypeError, "lengths is Long, expected Int"),
    ({"table": torch.zeros(2, 4).long()}, TypeError, "table is Long, expected Int"),
    ({"table": torch.zeros(8, dtype=torch.int32)}, ValueError, "table needs two dimensions"),
    ({"table": torch.zeros(4, 2, dtype=torch.int32).T}, ValueError, "table is not contiguous"),
    ({"starts": ints(0, 7, 6)}, ValueError, r"starts\[1\]=7 does not rise from 0 to at most the 6 tokens of q"),
    ({"starts": ints(0, 3, 2)}, ValueError, r"starts\[2\]=2 does not rise"),
    ({"starts": ints(1, 3, 6)}, ValueError, r"starts\[0\]=1 must be 0"),
    ({"starts": ints(0, 6)}, ValueError, r"starts has shape \[2\], expected \[3\]"),
    ({"k": torch.zeros(9, 16, 3, 32).half()}, ValueError, r"k has shape \[9, 16, 3, 32\], expected \[9, 16, 2, 32\]"),
    ({"k": torch.zeros(9, 2, 16, 32).half().mT.contiguous()}, ValueError, "k has shape"),
    ({"v": torch.zeros(9, 16, 32, 2).half().mT}, ValueError, r"v has strides \[1024, 64, 1, 2\], expected 1 as the"),
    ({"v": torch.zeros(9, 16, 2, 40).half()[..., :32]}, ValueError, "v has heads 40 numbers apart"),
    ({"k": torch.zeros(9, 16, 2, 32)}, TypeError, "k is Float, expected Half"),
    ({"q": torch.zeros(2, 6, 32, 2).half().mT}, ValueError, "q has strides"),
    ({"q": torch.zeros(6, 2, 2, 32).half().transpose(0, 1)}, ValueError, "expected the tokens of a sequence in a row"),
    ({"q": torch.zeros(2, 6, 32).half()}, ValueError, "q has 3 dimensions"),
    (
        {name: torch.zeros(*shape, 2, 272).half() for name, shape in (("q", (2, 6)), ("k", (9, 16)), ("v", (9, 16)))},
        ValueError,
        "dim=272 must be a multiple of 16, from 16 to 256",
    ),
    ({"q": torch.zeros(2, 6, 65, 32).half(), "sinks": None}, ValueError, "heads=130 are 65 for each of kv_heads=2"),
    ({"sinks": torch.zeros(2)}, ValueError, r"sinks has shape \[2\], expected \[4\]"),
    ({"scale": 0.0}, ValueError, "scale must be positive and finite"),
    (DENSE | {"lengths": None, "tokens": 4}, ValueError, "q has 6 tokens, expected tokens=4 for each of 3 sequences"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "error", "sentence"), REFUSED, ids=[each[2] for each in REFUSED])
def test_what_does_not_fit_is_refused(chip, changed, error, sentence):
    with pytest.raises(error, match=sentence):
        chip.decode(call_arguments(**changed))
    assert chip.launches == []


@pytest.mark.parametrize(
    ("chip", "sentence"),
    [
        ("A2", r"starts has shape \[4\], expected \[2, sequences \+ 1\] without a table"),
        ("310P", "starts come with a table"),
    ],
    indirect=["chip"],
)
def test_starts_that_do_not_fit_are_refused(chip, sentence):
    """Packed sequences are decoded on Atlas A2 alone."""
    with pytest.raises(ValueError, match=sentence):
        chip.decode(call_arguments(**DENSE | {"lengths": None, "tokens": 2, "starts": ints(0, 1, 2, 6)}))
    assert chip.launches == []


@on_a2
def test_a_number_of_columns_below_0_is_refused(chip):
    with pytest.raises(ValueError, match="unbiased_columns=-1 is negative"):
        chip.decode(call_arguments(unbiased_columns=-1))


@pytest.mark.parametrize("name", ["k", "v", "table", "lengths", "starts", "sinks"])
def test_tensors_of_another_device_are_refused(chip, name):
    arguments = call_arguments()
    moved = arguments | {name: arguments[name].to("meta")}
    with pytest.raises(ValueError, match=f"{name} is on meta but the first tensor is on cpu"):
        chip.operator.default._op_dk(torch._C.DispatchKey.CPU, *chip.taken(moved))


def test_a_cache_of_the_wrong_kind_is_named_by_the_public_function(chip):
    x = paged(lengths=[300, 129, 16])
    x.table[0, 1] = 1000
    with pytest.raises(ValueError, match="block_table names page 1000"):
        attend_paged(x, "npu")
    x.table[0, 1] = 0
    with pytest.raises(ValueError, match="room for 0 to 304 keys"):
        attend_paged(type(x)(x.q, x.k, x.v, x.table, x.lengths + 5), "npu")


CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("changed", [{}, DENSE | {"lengths": None, "tokens": 2}], ids=["pages", "dense"])
def test_shapes_of_outputs_are_known_without_data(chip, changed):
    opcheck(chip.operator.default, chip.taken(call_arguments(**changed)), test_utils=CHECKS)


def test_single_tokens_keep_the_order_of_q(chip):
    """One token of each sequence needs no copy of q (T, Hq, D), and the output has its order."""
    q = torch.randn(6, 2, 2, 32).half().transpose(0, 1)
    changed = DENSE | {"lengths": None, "tokens": 1, "q": q, "k": torch.randn(6, 2, 50, 32).half()}
    changed["v"] = torch.randn(6, 2, 50, 32).half()
    out, lse = chip.decode(call_arguments(**changed, sinks=None, scale=1 / math.sqrt(32)))
    assert out.stride() == q.stride()
    apart = lse.stride(2)  # a 310P writes 32 bytes for each row
    assert lse.stride() == (2 * apart, 4 * apart, apart)
    expected = pasa.attention(q.transpose(0, 1).flatten(1, 2).unsqueeze(2), changed["k"], changed["v"], backend="npu")
    assert torch.equal(out.transpose(0, 1).flatten(1, 2), expected.squeeze(2))


@pytest.mark.parametrize("dim", [1, 16, 40])
@pytest.mark.parametrize("keys", [1, 21])
def test_strides_of_axes_with_one_entry_mean_nothing(chip, keys, dim):
    """Story: one KV head of head dimension 1 was refused, because its heads were 1 number apart."""
    g = torch.Generator().manual_seed(dim)
    q, k, v = (torch.randn(1, 1, rows, dim, generator=g).half() for rows in (1, keys, keys))
    expected = pasa.attention(q, k, v, backend="npu")
    odd = [x.as_strided(x.shape, (3, 1, 5 if keys == 1 else dim, 1)) for x in (k, v)]
    assert torch.equal(pasa.attention(q, *odd, backend="npu"), expected)
    reference = pasa.attention(q, k, v, backend="reference")
    torch.testing.assert_close(expected, reference, atol=2.0**-9, rtol=2.0**-9)
