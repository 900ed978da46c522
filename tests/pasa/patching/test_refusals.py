"""Each way into a model refuses what it cannot do in one line, which names the value and says what to do next."""

from __future__ import annotations

import re

import diffusers
import pytest
import torch
import transformers as hf
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface

import pasa
from pasa.ops.attention.sdpa import fused
from pasa.patching.callbacks import Callbacks
from pasa.patching.diffusers_attention import make_dispatched
from pasa.patching.sdpa_calls import make_attention
from pasa.patching.torch_flash import Kernels

Q = torch.zeros(1, 2, 3, 8).half()
MASK = torch.ones(5, 7, dtype=torch.bool)
SIZES = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 97}
BLOCKS = {"block_out_channels": (32,), "down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)}


def registered(mask=None, **how):
    pasa.register("transformers")
    return AttentionInterface()["pasa"](torch.nn.Module(), Q, Q, Q, mask, **how)


def dispatched(**how):
    return make_dispatched(None, None, Callbacks())(*(x.transpose(1, 2) for x in (Q, Q, Q)), **how)


def processed(**how):
    return make_attention(None, None, Callbacks(), "Processor")(Q, Q, Q, **how)


def replaced(**how):
    return pasa.scaled_dot_product_attention(Q, Q, Q, **how)


REFUSED = {
    "an unknown host": (lambda: pasa.register("jax"), r"'jax' is not a host", r"pass 'transformers', 'diffusers'"),
    "attention of its own": (
        lambda: pasa.patch_pipeline(hf.OpenAIGPTLMHeadModel(hf.OpenAIGPTConfig(**SIZES))),
        r"OpenAIGPTLMHeadModel \(transformer\.h\.0\.attn: Attention computes its attention itself",
        r"call pasa\.attention where",
    ),
    "no attention": (
        lambda: pasa.patch_pipeline(diffusers.UNet2DModel(**BLOCKS, add_attention=False)),
        r"UNet2DModel \(no attention module found\)",
        r"call pasa\.attention where",
    ),
    "a mask in torch's place": (lambda: replaced(attn_mask=MASK), r"\(5, 7\) does not broadcast", "reshape it"),
    "a mask of transformers": (lambda: registered(MASK), r"\(5, 7\) does not broadcast", "reshape it"),
    "a mask of the dispatcher": (lambda: dispatched(attn_mask=MASK), r"\(5, 7\) does not broadcast", "reshape it"),
    "a mask of a processor": (lambda: processed(attn_mask=MASK), r"\(5, 7\) does not broadcast", "reshape it"),
    "dropout in torch's place": (lambda: replaced(dropout_p=0.1), r"dropout_p=0\.1", r"pass 0\.0"),
    "dropout of transformers": (lambda: registered(dropout=0.1), r"dropout=0\.1", r"call model\.eval\(\)"),
    "dropout of the dispatcher": (lambda: dispatched(dropout_p=0.1), r"dropout_p=0\.1", r"call model\.eval\(\)"),
    "dropout of a processor": (lambda: processed(dropout_p=0.1), r"dropout_p=0\.1", r"call model\.eval\(\)"),
    "dropout of torch's flash": (
        lambda: Kernels("CPU").forward(None, Q, Q, Q, 0.1), r"dropout_p=0\.1", "leave it out"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    call, value, remedy = REFUSED[name]
    with pytest.raises((NotImplementedError, ValueError)) as caught:
        call()
    text = str(caught.value)
    assert re.search(f"{value}.*{remedy}", text), text
    assert "\n" not in text


def test_a_device_whose_attention_lacks_fp16_is_served_in_fp32(monkeypatch):
    """No call in FP16 reaches the attention or the products of an unlisted device."""

    class NoHalf(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket.__name__ in ("bmm", "mm", "baddbmm") or "attention" in str(function):
                assert str(function).startswith("pasa.") or args[0].dtype == torch.float32, function
            return function(*args, **(kwargs or {}))

    monkeypatch.setattr(fused, "FORMATS", {})
    q, k, v = (torch.randn(1, 2, 9, 16, generator=torch.Generator().manual_seed(i)).half() for i in range(3))
    with NoHalf():
        out = pasa.scaled_dot_product_attention(q, k, v, is_causal=True)
        direct = fused.fused_attention(q, k, v, None, True, 0.25)[0]
    expected = pasa.golden_attention(q, k, v, is_causal=True)[0]
    assert (out - expected).abs().max() < 2e-3
    assert (direct - expected).abs().max() < 2e-3
