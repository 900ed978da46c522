"""Predict from the weights alone which heads can overflow, and patch only the layers at risk."""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import pasa

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_hidden_layers=3, vocab_size=128)).eval()
biased = model.model.layers[1].self_attn
torch.nn.init.constant_(biased.q_proj.bias, 60)
torch.nn.init.constant_(biased.k_proj.bias, 60)

prediction = pasa.predict_overflow(model)
print(prediction)
print("not safe:", ", ".join(prediction.modules("certain", "at risk", "unknown")))

with pasa.patch_pipeline(model, policy="auto") as handle:
    print(handle.report())
