"""Make a language model's attention scores overflow FP16 without changing what the model computes.

Softmax does not see a constant that is added to every score of a row. This module adds one, large enough for FP16 to
overflow, with weights alone: the heads are widened and a few of the new dimensions carry a constant bias in q and k.

Let d be the head size and theta the rotary base. A head of size 2d with base theta^2 has d rotary pairs; pair i < d/2
turns with frequency (theta^2)^(-2i/2d) = theta^(-2i/d), exactly that of pair i before. The d/2 new pairs turn more
slowly still, the last ones by about 1e-10 rad per token, so that a bias in them stays what it is at every position:

* old dimensions keep their weights; those of q are multiplied by sqrt(2), as 1/sqrt(2d) replaces 1/sqrt(d);
* new dimensions have zero weights in q, k, v and in the output projection;
* the first dimension of each of the `pairs` slowest pairs has bias b in q and +-b in k.

Then S' = sqrt(2) S +- pairs b^2, the same constant for every query and key: softmax, and so the model, is unchanged.
It proves that overflow is survived, not the recovery between key blocks whose means differ; the RMSE experiment does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

# 2^11: up to here every integer is an FP16 number (11 significant bits), so that b survives `model.half()`.
LARGEST_EXACT_INTEGER = 2048


@dataclass(frozen=True)
class OverflowInfo:
    """The injection that :func:`inject_overflow` really made.

    `head_dim` is the head size after widening; `pairs` rotary pairs carry the bias; `bias` is b per layer, 0 where
    nothing was injected; `offset` is the exact constant added to every unscaled score, per layer: ``+-pairs * b**2``.
    """

    head_dim: int
    pairs: int
    bias: tuple[int, ...]
    offset: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain containers, ready for JSON."""
        return asdict(self)


def check_offset(offset: float | None) -> None:
    """Refuse, before a model is loaded, an offset that no fixture can add to its scores."""
    most = LARGEST_EXACT_INTEGER**2
    if offset is not None and not abs(offset) <= most:
        raise ValueError(f"offset={offset} is not in -{most} to {most}")


def inject_overflow(
    model: Any, offset: float | Mapping[int, float] = 131072, *, pairs: int = 8
) -> tuple[Any, OverflowInfo]:
    """Return a widened copy of `model` whose unscaled scores q.k are shifted by about `offset`.

    Parameters
    ----------
    model : transformers.Qwen2ForCausalLM
        With default rotary embedding. It is not modified; the copy has its dtype and device, and twice its head size.
    offset : float or mapping of layer index to float, default 131072 (twice the largest FP16 number)
        Constant to add, of either sign; layers that a mapping does not name get none. The bias is rounded to an
        integer, so the exact constant is the one in the returned info.
    pairs : int, default 8
        Rotary pairs that carry the bias.
    """
    from transformers import Qwen2ForCausalLM

    if not isinstance(model, Qwen2ForCausalLM):
        # Other architectures have no biases on q and k, or one on the output projection.
        raise TypeError(f"inject_overflow: expected Qwen2ForCausalLM, got {type(model).__name__}")
    config = _widened_config(model.config)
    width = config.head_dim // 2
    if not 1 <= pairs <= width // 2:
        raise ValueError(f"inject_overflow: pairs={pairs} is outside 1..{width // 2}, the pairs that widening adds")
    info = _plan(offset, pairs, config)
    parameter = next(model.parameters())
    wide = Qwen2ForCausalLM(config).to(device=parameter.device, dtype=parameter.dtype)
    state = dict(model.state_dict())
    for layer in range(config.num_hidden_layers):
        _widen_layer(state, f"model.layers.{layer}.self_attn.", width, info, layer)
    wide.load_state_dict(state)
    wide.generation_config = model.generation_config
    return wide.eval(), info


def _widened_config(config: Any) -> Any:
    """Copy the configuration with twice the head size and the square of the rotary base."""
    from transformers import Qwen2Config

    rope = dict(config.rope_parameters)
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"inject_overflow: rope_type={rope['rope_type']!r} is not supported: use 'default'")
    fields = config.to_dict()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    fields.update(head_dim=2 * head_dim, rope_parameters={**rope, "rope_theta": float(rope["rope_theta"]) ** 2})
    wide = Qwen2Config.from_dict(fields)
    wide._attn_implementation = config._attn_implementation
    return wide


def _plan(offset: float | Mapping[int, float], pairs: int, config: Any) -> OverflowInfo:
    """Round every layer's bias to an integer and state the exact offset that follows."""
    layers = config.num_hidden_layers
    by_layer = dict(offset) if isinstance(offset, Mapping) else dict.fromkeys(range(layers), offset)
    if unknown := [layer for layer in by_layer if layer not in range(layers)]:
        raise ValueError(f"inject_overflow: the model has layers 0..{layers - 1}, not {unknown}")
    per_layer = [by_layer.get(layer, 0) for layer in range(layers)]
    bias = [round(math.sqrt(abs(value) / pairs)) for value in per_layer]
    if max(bias) > LARGEST_EXACT_INTEGER:
        raise ValueError(
            f"inject_overflow: offset {max(per_layer, key=abs)} needs a bias of {max(bias)} in {pairs} pairs, beyond "
            f"{LARGEST_EXACT_INTEGER}, the last integer that FP16 is sure to represent; use a smaller offset"
        )
    if lost := [value for value, b in zip(per_layer, bias, strict=True) if value and not b]:
        raise ValueError(f"inject_overflow: offset {lost[0]} is too small: its bias rounds to 0 in {pairs} pairs")
    exact = [int(math.copysign(pairs * b * b, value)) for b, value in zip(bias, per_layer, strict=True)]
    return OverflowInfo(config.head_dim, pairs, tuple(bias), tuple(exact))


def _widen_layer(state: dict[str, torch.Tensor], prefix: str, width: int, info: OverflowInfo, layer: int) -> None:
    """Replace the four projections of one layer in `state` by their widened forms."""
    b, offset = info.bias[layer], info.offset[layer]
    constant = {"q_proj": float(b), "k_proj": math.copysign(b, offset), "v_proj": 0.0}
    gain = {"q_proj": math.sqrt(2.0), "k_proj": 1.0, "v_proj": 1.0}
    for name in ("q_proj", "k_proj", "v_proj"):
        for kind in ("weight", "bias"):
            rows = state[f"{prefix}{name}.{kind}"].unflatten(0, (-1, width))  # (heads, width, ...)
            wide = _spread(rows, 1) * gain[name]
            if kind == "bias":
                # First dimension of the slowest pairs: pair i holds dimensions i and i + width.
                wide[:, width - info.pairs : width] = constant[name]
            state[f"{prefix}{name}.{kind}"] = wide.flatten(0, 1)
    columns = state[f"{prefix}o_proj.weight"].unflatten(1, (-1, width))  # (hidden, heads, width)
    state[f"{prefix}o_proj.weight"] = _spread(columns, 2).flatten(1, 2)


def _spread(old: torch.Tensor, axis: int) -> torch.Tensor:
    """Double `axis`: halves (first and second members of the pairs) move to the head of each new half, zeros behind."""
    first, second = old.chunk(2, dim=axis)
    return torch.cat([first, torch.zeros_like(first), second, torch.zeros_like(second)], dim=axis)
