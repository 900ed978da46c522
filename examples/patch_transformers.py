"""Patch a language model whose FP16 attention gives NaN, and undo the patch."""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import pasa

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
config = Qwen2Config(**sizes, num_hidden_layers=2, vocab_size=128, attn_implementation="eager")
model = Qwen2ForCausalLM(config).half().eval()
for layer in model.model.layers:  # biases that make every score large, as a trained model may have them
    torch.nn.init.constant_(layer.self_attn.q_proj.bias, 60)
    torch.nn.init.constant_(layer.self_attn.k_proj.bias, 60)
ids = torch.arange(1, 33)[None]

with torch.no_grad():
    print(f"eager attention in FP16: logits finite: {bool(model(ids).logits.isfinite().all())}")
    with pasa.patch_pipeline(model) as handle:
        print(f"patched: logits finite: {bool(model(ids).logits.isfinite().all())}")
        print(handle.report())
