"""Tiny models with random weights, and prompts after which their best tokens have a clear lead."""

import torch
import transformers as hf

SIZES = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 511,
}  # fmt: skip
TOKENS = 12
MARGIN = 0.1
"""The least lead of the best token, in logits.

Servers and transformers round differently in FP16. The largest difference of two logits that was seen is 0.02."""


def build_model(name):
    """Return a model in FP16: "plain", "window", "range" (whose scores overflow), or "counting" (mostly upwards)."""
    torch.manual_seed(1)
    config = hf.MistralConfig(**SIZES, sliding_window=24) if name == "window" else hf.Qwen2Config(**SIZES)
    config.initializer_range = 0.15
    model = hf.AutoModelForCausalLM.from_config(config).half().eval()
    if name == "range":
        for layer in model.model.layers:
            layer.self_attn.q_proj.bias.data.fill_(60.0)
            layer.self_attn.k_proj.bias.data.fill_(60.0)
    if name == "counting":  # the head looks for the embedding of the token before; attention sometimes differs
        model.lm_head.weight.data = 0.3 * model.model.embed_tokens.weight.data.roll(1, 0)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.data *= 0.07
            layer.mlp.down_proj.weight.data *= 0.003
    return model


@torch.no_grad()
def continued(model, prompt, tokens=TOKENS):
    """Return the best tokens, one after another, and their least lead over the second."""
    ids, lead = list(prompt), float("inf")
    for _ in range(tokens):
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1].float()
        assert logits.isfinite().all()
        best = logits.topk(2)
        ids.append(int(best.indices[0]))
        lead = min(lead, float(best.values[0] - best.values[1]))
    return ids[len(prompt) :], lead


def prompts_of(model, lengths):
    """Return random prompts whose continuations have no near ties, and the continuations."""
    g = torch.Generator().manual_seed(3)
    chosen = []
    for n in lengths:
        for _ in range(40):
            prompt = torch.randint(1, 511, (n,), generator=g).tolist()
            tokens, lead = continued(model, prompt)
            if lead >= MARGIN and 511 not in tokens:
                break
        else:
            raise AssertionError("no prompt without near ties")
        chosen.append((prompt, tokens))
    return zip(*chosen, strict=True)
