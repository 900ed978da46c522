"""A residual stream that overflows FP16, by weights alone."""

import pytest
import torch
import transformers as hf

from pasa.eval.kit.random_model import CONFIGS, SMALL
from pasa.eval.kit.residual_fixture import amplify_residual


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [("Qwen2Config", "Qwen2ForCausalLM"), ("LlamaConfig", "LlamaForCausalLM")])
def test_logits_are_the_same_and_the_stream_is_amplified(kind, tied):
    config, model = (getattr(hf, name) for name in kind)
    torch.manual_seed(0)
    sizes = {**CONFIGS[SMALL], "tie_word_embeddings": tied, "initializer_range": 0.3}
    model = model(config(**sizes)).eval()
    ids = torch.randint(sizes["vocab_size"], (1, 20))
    amplified = amplify_residual(model, 2**12)
    before, after = (each(ids, output_hidden_states=True) for each in (model, amplified))
    assert torch.allclose(before.logits, after.logits, rtol=0, atol=1e-6 * float(before.logits.detach().abs().max()))
    for plain, large in zip(before.hidden_states[:-1], after.hidden_states[:-1], strict=True):
        assert torch.allclose(plain * 2**12, large, rtol=1e-5)
    assert not amplified.half()(ids).logits.isfinite().any()


@pytest.mark.parametrize("factor", [0, -2, 3])
def test_other_factors_are_refused(factor):
    with pytest.raises(ValueError, match=f"factor={factor} is not a power of two"):
        amplify_residual(None, factor)
