"""PASA behind torch's flash attention: torch's registry, and both operators, registered here for the CPU.

torch has these operators for CUDA alone. On the CPU the same functions are reached through torch's dispatcher and its
own derivative formula. That `scaled_dot_product_attention` chooses them on a GPU is torch's part, and is not tested.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import attention
from torch.nn import functional as F

import pasa
from pasa.patching import torch_flash

FLASH = torch.ops.aten._scaled_dot_product_flash_attention


@pytest.fixture
def on_cpu():
    """The two operators are PASA's on the CPU, which has none of its own."""
    handle = torch_flash.activate("CPU")
    yield handle
    handle.remove()


@pytest.fixture
def below(monkeypatch):
    """A backend whose attention calls torch's flash attention itself, as one over torch's fused attention might."""
    calls = []
    original = torch_flash.operators.attention

    def attend(query, *arguments, **switches):
        calls.append(query.dtype)
        with pytest.raises(NotImplementedError, match="left to torch"):
            FLASH(query, query, query)
        return original(query, *arguments, **switches)

    monkeypatch.setattr(torch_flash.operators, "attention", attend)
    return calls


def tensors(heads, key_heads, queries, keys, width=16, dtype=torch.float16):
    generator = torch.Generator().manual_seed(0)
    shapes = (heads, queries, width), (key_heads, keys, width), (key_heads, keys, width)
    return [torch.randn(2, *shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def test_torchs_registry():
    """Activated by its name and restored, as torch's own FA3 and FA4; a second registration changes nothing."""
    try:
        pasa.register("torch")
        pasa.register("torch")
        assert attention.list_flash_attention_impls().count("PASA") == 1
        attention.activate_flash_attention_impl("PASA")
        assert attention.current_flash_attention_impl() == "PASA"
        attention.activate_flash_attention_impl("PASA")
        assert torch._C._dispatch_has_kernel_for_dispatch_key(FLASH.default.name(), "CUDA")
        attention.restore_flash_attention_impl()
        assert attention.current_flash_attention_impl() is None
        if torch.version.cuda is None:  # otherwise the operator has torch's own kernel
            assert not torch._C._dispatch_has_kernel_for_dispatch_key(FLASH.default.name(), "CUDA")
    finally:
        attention._registry._FLASH_ATTENTION_IMPLS.pop("PASA", None)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("sizes", [(4, 4, 9, 9), (4, 2, 9, 9), (2, 1, 1, 7)], ids=str)
def test_results_and_gradients(on_cpu, sizes, is_causal):
    q, k, v = tensors(*sizes)
    out, lse, *rest = FLASH(q, k, v, is_causal=is_causal, scale=0.3)
    expected, expected_lse = pasa.attention(q, k, v, is_causal=is_causal, scale=0.3, return_lse=True)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert len(rest) == 7
    assert rest[2:4] == [sizes[2], sizes[3]]
    weights = torch.randn_like(out)
    ours, truth = (torch.autograd.grad(each, (q, k, v), weights) for each in (out, expected))
    assert all(map(torch.equal, ours, truth))


def test_scores_beyond_fp16(on_cpu):
    q, k, v = tensors(2, 2, 20, 20, 64)
    q, k = q + 60, k + 60
    out = FLASH(q, k, v)[0]
    truth = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert (out.double() - truth).abs().max() < 2.0**-5


def test_a_backend_that_calls_flash_attention_gets_torchs(on_cpu, below):
    q, k, v = tensors(2, 2, 5, 5)
    assert FLASH(q, k, v)[0].isfinite().all()
    assert FLASH(q, k, v)[0].isfinite().all(), "the mark is taken back"
    assert below == [torch.float16, torch.float16]


def test_other_dtypes_are_left_to_torch():
    """Their calls reach the kernel that was there before, with all arguments."""
    before = torch.library.Library("aten", "IMPL")
    seen = []

    def kernel(*arguments, **keywords):
        seen.append((arguments[0].dtype, arguments[3:], keywords))
        q = arguments[0]
        empty = q.new_empty(0)
        return q.clone(), q.new_empty(q.shape[:-1]), None, None, 1, 1, empty, empty, empty

    before.impl(torch_flash.FORWARD, kernel, "CPU")
    handle = torch_flash.activate("CPU")
    try:
        q, k, v = (x.detach().bfloat16() for x in tensors(2, 2, 5, 5))
        assert torch.equal(FLASH(q, k, v, 0.0, True, scale=0.5)[0], q)
        half = FLASH(q.half(), k.half(), v.half())[0]
        assert torch.equal(half, pasa.attention(q.half(), k.half(), v.half()))
    finally:
        handle.remove()
        assert torch.equal(FLASH(q.half(), k.half(), v.half())[0], q.half()), "the kernel before is in force again"
        before._destroy()
    assert [dtype for dtype, _, _ in seen] == [torch.bfloat16, torch.float16]
    assert seen[0][1][:2] == (0.0, True)
    assert seen[0][2] == {"scale": 0.5}


@pytest.mark.parametrize(
    ("dtype", "keywords", "message"),
    [
        (torch.float16, {"dropout_p": 0.1}, r"dropout_p=0.1 is not supported"),
        (torch.float16, {"return_debug_mask": True}, r"return_debug_mask=True is not supported"),
        (torch.bfloat16, {}, r"query is torch.bfloat16, which is left to torch, .*restore_flash_attention_impl"),
    ],
)
def test_refusals_name_the_value(on_cpu, dtype, keywords, message):
    with pytest.raises(NotImplementedError, match=message):
        FLASH(*tensors(2, 2, 5, 5, dtype=dtype), **keywords)


def test_undone_on_the_cpu():
    torch_flash.activate("CPU").remove()
    with pytest.raises(NotImplementedError):
        FLASH(*tensors(2, 2, 5, 5))
