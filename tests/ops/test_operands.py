"""Invalid operands that torch.ops.pasa refuses when called without `pasa.attention`."""

import pytest
import torch

import pasa
from tests.inputs import DEVICE, normal_qkv
from tests.operators import OPERATORS, all_arguments

FORWARD = ("attention", "attention_varlen", "attention_paged")
BACKWARD = ("attention_backward", "attention_varlen_backward")
BATCHED = ("attention", "attention_backward")
PACKED = ("attention_varlen", "attention_varlen_backward")
PAGED = ("attention_paged", "write_pages")
KEYS = (*BATCHED, *PACKED)
SCORED = (*FORWARD, *BACKWARD)
LIMITED = (*SCORED, "watch_scores")


def narrowed(dim):
    return lambda x: x.narrow(dim, 0, x.shape[dim] - 1)


# operator, argument, change of the argument, part of the message
BAD = [
    (BATCHED, "k", narrowed(0), r"k and v differ in shape: \(1, 2, 30, 16\) and \(2, 2, 30, 16\)"),
    (BATCHED, "v", narrowed(0), r"k and v differ in shape: \(2, 2, 30, 16\) and \(1, 2, 30, 16\)"),
    (BATCHED, "v", narrowed(2), r"\(2, 2, 30, 16\) and \(2, 2, 29, 16\)"),
    (BATCHED, "q", narrowed(0), "batch of q is 1 but that of k is 2"),
    (BATCHED, "q", narrowed(1), "3 query heads are not a multiple of 2 key heads"),
    (BATCHED, "q", narrowed(3), "head dim of q is 15 but that of k is 16"),
    (BATCHED, "q", lambda x: x[:, :, :0], r"q is empty: \(2, 4, 0, 16\)"),
    (BATCHED, "attn_mask", narrowed(1), r"attn_mask \(12, 29\) does not broadcast to .* \(2, 4, 12, 30\)"),
    (BATCHED, "attn_mask", lambda x: x.int(), "attn_mask is torch.int32"),
    (PACKED, "v", narrowed(0), r"k and v differ in shape: \(30, 2, 16\) and \(29, 2, 16\)"),
    (PACKED, "q", narrowed(1), "3 query heads are not a multiple of 2 key heads"),
    (PACKED, "cu_seqlens_k", narrowed(0), "cu_seqlens_q has 3 entries but cu_seqlens_k has 2"),
    (PACKED, "cu_seqlens_q", lambda x: x.float(), "cu_seqlens_q is torch.float32"),
    (PACKED, "cu_seqlens_q", lambda x: x[None], r"cu_seqlens_q has shape \(1, 3\)"),
    (KEYS, "k", lambda x: x.float(), "k is torch.float32 but q is torch.float16"),
    (KEYS, "q", lambda x: x.int(), "q is torch.int32, expected one of"),
    (KEYS, "q", lambda x: x[0], "q has .* dimensions .*, expected"),
    (KEYS, "k", lambda x: x.to("meta"), "k is on meta but q is on"),
    (KEYS, "scale", lambda _: -1.0, "scale=-1.0 is outside"),
    (KEYS, "scale", lambda _: float("nan"), "scale=nan is outside"),
    (SCORED, "sinks", narrowed(0), r"sinks has shape \(3,\), expected one score a query head: \(4,\)"),
    (SCORED, "sinks", lambda x: x[None], r"sinks has shape \(1, 4\)"),
    (SCORED, "sinks", lambda x: x.int(), "sinks is torch.int32, expected one of"),
    (SCORED, "sinks", lambda x: x.to("meta"), "sinks is on meta but q is on"),
    (LIMITED, "window_left", lambda _: -2, r"window=\(-2, -1\) has a number below -1"),
    (LIMITED, "window_right", lambda _: -9, r"window=\(-1, -9\) has a number below -1"),
    (LIMITED, "softcap", lambda _: -30.0, "softcap=-30.0 is outside 2.-20 to 2.20"),
    (LIMITED, "softcap", lambda _: float("nan"), "softcap=nan is outside"),
    (FORWARD, "block_k", lambda _: -128, "block_k=-128 is not an integer from 1 to 65536"),
    (FORWARD, "block_q", lambda _: 0, "block_q=0 is not an integer from 1 to 65536"),
    (FORWARD, "softmax", lambda _: "fair", "softmax='fair' is not one of"),
    (FORWARD, "beta", lambda _: 1.5, "beta=1.5"),
    (BACKWARD, "grad_out", narrowed(-1), "grad_out has shape .*15.*, expected .*16"),
    (BACKWARD, "grad_out", narrowed(0), "grad_out has shape"),
    (BACKWARD, "grad_lse", narrowed(0), "grad_lse has shape"),
    (BACKWARD, "grad_lse", lambda x: x.int(), "grad_lse is torch.int32"),
    (BACKWARD, "grad_out", lambda x: x.to("meta"), "grad_out is on meta but q is on"),
    (BACKWARD, "backend", lambda _: "nothing", "backend='nothing' is not registered"),
    (("watch_scores",), "k", narrowed(0), "batch of q is 2 but that of k is 1"),
    (("watch_scores",), "totals", narrowed(0), r"totals has shape \(4,\)"),
    (("watch_scores",), "totals", lambda x: x.int(), "totals is torch.int32"),
    (("watch_scores",), "walked", lambda x: x.expand(3), r"walked has shape \(3,\)"),
    (PAGED, "v_cache", narrowed(0), r"caches \(pages, slots, Hkv, D\) are \(6, 16, 2, 16\) and \(5, 16, 2, 16\)"),
    (PAGED, "k_cache", lambda x: x.mT.contiguous().mT, "k_cache has strides .*: the last one is not 1"),
    (PAGED, "v_cache", lambda x: x.to("meta"), "v_cache is on meta but k_cache is on"),
    (PAGED, "key_anchors", narrowed(0), r"key_anchors \(5, 2, 16\) on .* are not contiguous, or not the \(6, 2, 16\)"),
    (PAGED, "key_anchors", lambda x: x.float(), "key_anchors is torch.float32"),
    (("attention_paged",), "q", narrowed(1), "3 query heads are not a multiple of 2 key heads"),
    (("attention_paged",), "q", narrowed(2), r"q \(12, 4, 15\) is empty, or not of the cache's head dim 16"),
    (("attention_paged",), "block_table", narrowed(0), r"block_table \(1, 2\) does not fit 2 seq_lens"),
    (("attention_paged",), "seq_lens", narrowed(0), r"block_table \(2, 2\) does not fit 1 seq_lens"),
    (("attention_paged",), "cu_seqlens_q", narrowed(0), "cu_seqlens_q has 2 entries for 2 sequences, expected 3"),
    (("attention_paged",), "cu_seqlens_q", lambda _: None, "q has 12 rows for 2 sequences"),
    (("attention_paged",), "seq_lens", lambda x: x.to("meta"), "seq_lens is on meta but k_cache is on"),
    (("attention_paged",), "max_seqlen_k", lambda _: 0, "max_seqlen_k=0 is not a positive integer"),
    (("write_pages",), "k", narrowed(1), r"k \(30, 1, 16\) does not fit the cache's heads \(2, 16\)"),
    (("write_pages",), "v", narrowed(0), "30 slots, but 30 keys and 29 values"),
    (("write_pages",), "slot_mapping", narrowed(0), "29 slots, but 30 keys and 30 values"),
    (("write_pages",), "slot_mapping", lambda x: x.float(), "slot_mapping is torch.float32"),
]
CASES = [(operator, *case) for operators, *case in BAD for operator in operators]


@pytest.mark.parametrize("backend", ["reference", "triton", "fake"])
@pytest.mark.parametrize(
    ("operator", "name", "change", "message"), CASES, ids=lambda x: x if isinstance(x, str) else ""
)
def test_operators_refuse_by_name(operator, name, change, message, backend):
    """Every operator refuses a wrong operand by name.

    Story: operators trusted `pasa.attention` to have checked. Called without it, as an exported
    program does, kernels read past the end of k or v with fewer batch entries, with a wrong group
    size, or of a short gradient. A negative block_k gave zeros, and k on meta beside q on a CPU
    gave uninitialised memory.
    """
    device = {"reference": "cpu", "triton": DEVICE, "fake": "meta"}[backend]
    if backend == "fake" and "meta" in message:
        message = None  # if everything is on meta, no tensor is on another device
    arguments = all_arguments(operator, "reference" if backend == "fake" else backend, device)
    arguments[name] = change(arguments[name])
    if message is None:
        OPERATORS[operator](**arguments)
        return
    with pytest.raises((ValueError, TypeError), match=message):
        OPERATORS[operator](**arguments)


REMEDIES = [
    ("attention", "q", narrowed(1), "repeat heads of k and v"),
    ("attention", "k", lambda x: x.float(), r"call \.to\(torch\.float16\)"),
    ("attention", "q", lambda x: x.int(), r"call \.half\(\)"),
    ("attention", "k", lambda x: x.to("meta"), r"no data on meta"),
    ("attention_varlen", "cu_seqlens_q", lambda x: x.float(), r"call \.int\(\)"),
    ("attention_paged", "k_cache", lambda x: x.mT.contiguous().mT, r"call \.contiguous\(\)"),
    ("attention_paged", "v_cache", narrowed(0), "give two of one shape"),
    ("attention", "sinks", lambda x: x.int(), r"call \.float\(\)"),
    ("attention_paged", "softcap", lambda _: 1e9, "leave it out for no cap"),
    ("attention_varlen", "window_left", lambda _: -2, "-1 is an unlimited side"),
    ("attention_backward", "grad_lse", lambda x: x.int(), r"call \.float\(\)"),
]


@pytest.mark.parametrize(("operator", "name", "change", "remedy"), REMEDIES)
def test_refusals_say_what_to_do(operator, name, change, remedy):
    """Every refusal says what to do next.

    Story: messages named the value only.
    """
    arguments = all_arguments(operator, "reference", "cpu")
    arguments[name] = change(arguments[name])
    with pytest.raises((ValueError, TypeError), match=remedy):
        OPERATORS[operator](**arguments)


def test_both_gradients_missing():
    for operator in BACKWARD:
        arguments = all_arguments(operator) | {"grad_out": None, "grad_lse": None}
        with pytest.raises(ValueError, match="grad_out and grad_lse are both None"):
            OPERATORS[operator](**arguments)


def test_an_exported_program_refuses_other_keys():
    """An exported program refuses wrong keys: it holds the operator, but no check made while tracing."""
    q, k, v = normal_qkv((4, 2), (6, 9), 16)
    traced = torch.fx.symbolic_trace(lambda q, k, v: torch.ops.pasa.attention(q, k, v)[0])
    assert torch.equal(traced(q, k, v), pasa.attention(q, k, v))
    with pytest.raises(ValueError, match="3 query heads are not a multiple of 2 key heads"):
        traced(q[:, :3], k, v)


def test_kernels_take_lengths_from_the_host():
    """Kernels accept cumulative lengths that are on the host.

    Story: lengths left on the CPU were a wild pointer for a kernel on a GPU.
    """
    arguments = all_arguments("attention_varlen", "triton", DEVICE) | {"sinks": None}
    expected = OPERATORS["attention_varlen"](**arguments)[0]
    host = {name: arguments[name].cpu() for name in ("cu_seqlens_q", "cu_seqlens_k")}
    assert torch.equal(OPERATORS["attention_varlen"](**arguments | host)[0], expected)
