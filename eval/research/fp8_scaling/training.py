"""Trains a language model for a few steps and reports, at each, the largest logit of every layer and its weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pasa.eval.research.fp8_scaling.scaling import LayerWeights

ATTENTION = "pasa-eval-logits"


@contextmanager
def recorded_logits(model: Any) -> Iterator[dict[int, float]]:
    """Inside, the model attends as with "sdpa" and leaves max|q.k|/sqrt(D) of the visible pairs here, by layer."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    largest: dict[int, float] = {}

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
        with torch.no_grad():
            keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
            scores = query @ keys.mT * kwargs.get("scaling", query.shape[-1] ** -0.5)
            visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            largest[module.layer_idx] = float(scores.abs().masked_fill(~visible, 0).max())
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    before = model.config._attn_implementation
    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    model.set_attn_implementation(ATTENTION)
    try:
        yield largest
    finally:
        model.set_attn_implementation(before)
        AttentionInterface._global_mapping.pop(ATTENTION)  # the class offers no way to unregister
        AttentionMaskInterface._global_mapping.pop(ATTENTION)


def layer_weights(model: Any) -> list[LayerWeights]:
    """Return the current projections of every layer."""
    config = model.config
    return [
        LayerWeights(
            layer.self_attn.q_proj.weight.detach() * layer.input_layernorm.weight.detach(),
            layer.self_attn.k_proj.weight.detach() * layer.input_layernorm.weight.detach(),
            config.num_attention_heads,
            config.num_key_value_heads,
        )
        for layer in model.model.layers
    ]


class Trainer:
    """AdamW on next-token loss, as the paper fine-tunes: clipped at 1, weight decay 0.01.

    Training is in FP32: the methods look on. A method that overflowed would have changed the run from there on.
    """

    def __init__(self, model: Any, batches: Sequence[Tensor], learning_rate: float) -> None:
        self.model, self.batches, self.steps = model, batches, 0
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)

    def step(self) -> tuple[list[float], list[LayerWeights]]:
        """Take one step and return the largest logits of its forward pass, and the weights that made them."""
        weights = layer_weights(self.model)
        ids = self.batches[self.steps % len(self.batches)]
        with recorded_logits(self.model) as largest:
            self.optimizer.zero_grad()
            loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.steps += 1
        return [largest[layer] for layer in range(len(weights))], weights

    def multiply_learning_rate(self, factor: float) -> None:
        """Change the learning rate, as a schedule does."""
        for group in self.optimizer.param_groups:
            group["lr"] *= factor

    @torch.no_grad()
    def multiply_weights(self, factor: float) -> None:
        """The paper's stress test (appendix H) on the projections that logits are made by."""
        for layer in self.model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                projection.weight.mul_(factor)
