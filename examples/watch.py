"""Count what the scores of a patched model do while it runs."""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import pasa

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_hidden_layers=2, vocab_size=128)).eval()
biased = model.model.layers[1].self_attn
torch.nn.init.constant_(biased.q_proj.bias, 100)
torch.nn.init.constant_(biased.k_proj.bias, 100)

with torch.no_grad(), pasa.patch_pipeline(model), pasa.watch(model) as watched:
    for seed in range(6):
        ids = torch.randint(128, (4, 128), generator=torch.Generator().manual_seed(seed))
        model(ids)
    print(watched.report())  # one query row in 1021 is sampled
