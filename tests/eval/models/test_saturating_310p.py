"""A whole model as an Ascend 310P would compute it, emulated: every FP16 result saturates, and NaN becomes 0.

Attention of one layer runs in the kernel for that chip, on the CPU twin of its core, and that of the others in the
reference. Embedded is a Qwen2 whose scores pass FP16's range (pasa.eval.kit.overflow_fixture).
"""

from unittest import mock

import pytest
import torch

import pasa
from pasa.eval.kit.overflow_fixture import inject_overflow
from pasa.eval.kit.saturating import Saturating
from pasa.ops.attention.ascend import backend as npu_backend
from pasa.ops.attention.spec import attention as reference
from tests.ascend_c.twin_build import build_library

TOKENS = 6  # of 64: each takes a model of FP16 products several seconds on a CPU
PROMPT = 40


@pytest.fixture
def twin_of_310p(shared_folder, monkeypatch):
    monkeypatch.setenv("PASA_ASCEND_LIBRARY", str(build_library(shared_folder / "twin_310p", "Ascend310P3")))
    monkeypatch.setenv("FAKE_SOC", "Ascend310P3")
    npu_backend.library_error.cache_clear()
    assert npu_backend.library_error() is None
    yield
    npu_backend.library_error.cache_clear()


@torch.no_grad()
def generate(model, ids):
    return model.generate(ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)[0, ids.shape[1] :]


def test_results_beyond_fp16_are_replaced():
    with Saturating() as chip:
        x = torch.tensor([60000.0, -60000.0, 1.0]).half()
        assert (x * 2).tolist() == [65504.0, -65504.0, 2.0]
        assert (x.float() * 2).tolist() == [120000.0, -120000.0, 2.0]
        x *= 2
        assert x.tolist() == [65504.0, -65504.0, 2.0]
        assert (torch.zeros(1).half() / 0).tolist() == [0.0]
    assert chip.replaced == {"mul": 2, "mul_": 2, "div": 1}


def test_a_model_whose_scores_saturate_speaks_as_in_fp32(base, ids, twin_of_310p):
    """Plain FP16 gives other text, without any NaN that would say so."""
    ids, on_twin = ids[:, :PROMPT], []
    wide, _ = inject_overflow(base)
    wide.set_attn_implementation("eager")
    expected = generate(wide, ids)
    half, attend = wide.half(), reference.attend
    with Saturating() as chip:
        plain = generate(half, ids)
        assert torch.isfinite(half(ids).logits).all()
    assert sum(chip.replaced.values()) > 0
    assert not torch.equal(plain, expected)

    def first_layer_on_twin(call):
        on_twin.append(len(on_twin) % half.config.num_hidden_layers == 0)
        return npu_backend.attend(call) if on_twin[-1] else attend(call)

    config = pasa.PasaConfig(overflow="saturate")
    patched = pasa.patch_pipeline(half, config=config, backend="reference")
    with Saturating() as chip, mock.patch.object(reference, "attend", first_layer_on_twin), patched:
        assert torch.equal(generate(half, ids), expected)
    assert chip.replaced == {}
    assert sum(on_twin) == TOKENS
