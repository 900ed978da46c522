"""ComfyUI custom node: FP16 attention of a model by pasa, which cannot overflow.

Copy this folder into `ComfyUI/custom_nodes`, and install pasa where ComfyUI runs. The node "Attention by pasa" takes a
MODEL and returns one whose attention is pasa's, for FP16 tensors; others are left to torch. The two hooks that are used
here, `register_attention_function` and `optimized_attention_override`, are those of ComfyUI's pull request 9639. The
node is tested against an imitation of them, not in ComfyUI.
"""

from comfy.ldm.modules import attention as comfy_attention

import pasa

KNOWN = {"transformer_options", "scale", "enable_gqa", "_inside_attn_wrapper", "low_precision_attention"}


def attention_pasa(
    q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kwargs
):
    """Attend: q, k and v (B, S, heads * D), or with `skip_reshape` (B, heads, S, D) -> (B, S, heads * D).

    `attn_precision` asks for FP32 scores, and needs no action: pasa's scores cannot overflow.
    """
    unknown = {name: value for name, value in kwargs.items() if name not in KNOWN and value is not None}
    if unknown:
        raise NotImplementedError(f"attention_pasa: {', '.join(unknown)} is not supported: use another attention")
    if not skip_reshape:
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    if mask is not None and mask.ndim == 3:
        mask = mask[:, None]  # one mask for all heads
    scale, gqa = kwargs.get("scale"), kwargs.get("enable_gqa", False)
    out = pasa.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=gqa)
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


class PasaAttention:
    """The node; its input and output is a model."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "model_patches"

    @classmethod
    def INPUT_TYPES(cls):
        """Return the node's inputs, as ComfyUI asks for them."""
        return {"required": {"model": ("MODEL",)}}

    def patch(self, model):
        """Return a copy of the model whose attention calls are answered by `attention_pasa`."""
        model = model.clone()
        options = dict(model.model_options.get("transformer_options", {}))
        options["optimized_attention_override"] = lambda original, *args, **kwargs: attention_pasa(*args, **kwargs)
        model.model_options["transformer_options"] = options
        return (model,)


comfy_attention.register_attention_function("pasa", attention_pasa)
NODE_CLASS_MAPPINGS = {"PasaAttention": PasaAttention}
NODE_DISPLAY_NAME_MAPPINGS = {"PasaAttention": "Attention by pasa"}
