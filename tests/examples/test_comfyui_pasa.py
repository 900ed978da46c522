"""The ComfyUI node keeps the contract of ComfyUI's attention functions.

ComfyUI is not on the package index, so this is NOT a test against ComfyUI. The functions below imitate the two hooks
that the node uses, as ComfyUI's pull request 9639 describes them, and its attention by torch.
"""

import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

NODE = Path(__file__).resolve().parents[2] / "examples" / "comfyui_pasa" / "__init__.py"


def wrap_attn(function):
    """Let `transformer_options` override an attention function, once a call: ComfyUI's decorator."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        if "_inside_attn_wrapper" not in kwargs:
            kwargs["_inside_attn_wrapper"] = True
            override = (kwargs.get("transformer_options") or {}).get("optimized_attention_override")
            if override is not None:
                return override(function, *args, **kwargs)
        return function(*args, **kwargs)

    return wrapper


@wrap_attn
def attention_pytorch(
    q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kwargs
):
    """ComfyUI's attention by torch."""
    batch = q.shape[0]
    if not skip_reshape:
        q, k, v = (x.view(batch, -1, heads, x.shape[-1] // heads).transpose(1, 2) for x in (q, k, v))
    if mask is not None:
        mask = mask.unsqueeze(0) if mask.ndim == 2 else mask
        mask = mask.unsqueeze(1) if mask.ndim == 3 else mask
    extra = {name: kwargs[name] for name in ("scale", "enable_gqa") if name in kwargs}
    out = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=mask, **extra)
    return out if skip_output_reshape else out.transpose(1, 2).reshape(batch, -1, out.shape[1] * out.shape[3])


class Model:
    """A ModelPatcher: options that a clone shares until it replaces them."""

    def __init__(self, options):
        self.model_options = options

    def clone(self):
        return Model(dict(self.model_options))


@pytest.fixture
def comfy(monkeypatch):
    """The node, loaded as ComfyUI loads a folder, with the attention functions that it registered."""
    registered = {}
    attention = SimpleNamespace(register_attention_function=registered.__setitem__)
    for name in ("comfy", "comfy.ldm", "comfy.ldm.modules"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["comfy.ldm.modules"].attention = attention
    spec = importlib.util.spec_from_file_location("comfyui_pasa", NODE, submodule_search_locations=[str(NODE.parent)])
    node = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(node)
    return SimpleNamespace(node=node, registered=registered)


def patched(comfy, options=None):
    """Return a model as it comes out of the node, run as ComfyUI runs nodes: by the names that the class states."""
    node = comfy.node.NODE_CLASS_MAPPINGS["PasaAttention"]
    assert node.INPUT_TYPES() == {"required": {"model": ("MODEL",)}}
    (model,) = getattr(node(), node.FUNCTION)(model=Model(options or {}))
    assert node.RETURN_TYPES == ("MODEL",)
    return model


def tensors(*shape, key_shape=None):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).half() for size in (shape, key_shape or shape, key_shape or shape)]


CALLS = {
    "tokens first": ((2, 9, 64), None, {}),
    "other keys": ((2, 9, 64), (2, 5, 64), {}),
    "heads first": ((2, 4, 9, 16), None, {"skip_reshape": True}),
    "heads first in and out": ((2, 4, 9, 16), None, {"skip_reshape": True, "skip_output_reshape": True}),
    "mask of a batch": ((2, 9, 64), None, {"mask": torch.ones(2, 9, 9).tril().bool()}),
    "mask of all": ((2, 9, 64), None, {"mask": torch.linspace(-3, 0, 81).view(9, 9).half()}),
    "mask of a head": ((2, 9, 64), None, {"mask": torch.linspace(-3, 0, 162).view(2, 1, 9, 9).half()}),
    "precision": ((2, 9, 64), None, {"attn_precision": torch.float32}),
    "scale": ((2, 9, 64), None, {"scale": 0.5, "low_precision_attention": False}),
    "shared heads": ((2, 4, 9, 16), (2, 2, 9, 16), {"skip_reshape": True, "enable_gqa": True}),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_override_answers_as_comfyuis_attention(comfy, name):
    shape, key_shape, keywords = CALLS[name]
    keywords = dict(keywords)
    q, k, v = tensors(*shape, key_shape=key_shape)
    mask = keywords.pop("mask", None)
    exact = None if mask is None or mask.dtype == torch.bool else mask.double()
    expected = attention_pytorch(q, k, v, 4, mask if exact is None else exact, **keywords)
    options = patched(comfy).model_options["transformer_options"]
    out = attention_pytorch(q, k, v, 4, mask, transformer_options=options, **keywords)
    assert out.shape == expected.shape
    assert out.dtype == torch.float16
    assert (out.double() - expected).abs().max() < 2.0**-8
    assert torch.equal(out, comfy.registered["pasa"](q, k, v, 4, mask, **keywords))


def test_scores_beyond_fp16(comfy):
    q, k, v = tensors(1, 20, 64)
    options = patched(comfy).model_options["transformer_options"]
    out = attention_pytorch(q + 200, k + 200, v, heads=1, transformer_options=options)
    assert out.isfinite().all()
    assert ((q + 200) @ (k + 200).mT).isinf().all()


def test_other_dtypes_are_left_to_torch(comfy, monkeypatch):
    monkeypatch.setattr("pasa.scaled_dot_product.attention", None)
    q, k, v = (x.bfloat16() for x in tensors(1, 5, 32))
    assert comfy.registered["pasa"](q, k, v, 2).dtype == torch.bfloat16


def test_a_model_is_copied_and_its_options_are_kept(comfy):
    options = {"transformer_options": {"patches": 1}}
    model = patched(comfy, options)
    assert options == {"transformer_options": {"patches": 1}}
    assert model.model_options["transformer_options"].keys() == {"patches", "optimized_attention_override"}


def test_unknown_keywords_are_refused(comfy):
    with pytest.raises(NotImplementedError, match="attention_pasa: window is not supported"):
        comfy.registered["pasa"](*tensors(1, 5, 32), 2, window=3)
