"""One model in several precisions."""

import pytest
import torch
import transformers as hf

import pasa
from pasa.eval.kit import random_model
from pasa.eval.models import precisions
from pasa.eval.models.precisions import MIB, Subject, fingerprint, parse_precisions

CPU = torch.device("cpu")
IDS = torch.arange(1, 60)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("models") / "tiny"
    config = hf.Qwen2Config(**random_model.CONFIGS["tiny"], initializer_range=0.1)
    hf.Qwen2ForCausalLM(config).save_pretrained(path)
    return str(path)


@pytest.fixture
def subject(folder, monkeypatch):
    """The tiny model with injected overflow; its tokenizer is not looked at."""
    load = hf.Qwen2ForCausalLM.from_pretrained
    monkeypatch.setattr(precisions, "load_folder", lambda path, dtype: (load(path, dtype=dtype).eval(), None))
    return Subject(folder, 131072, CPU)


def logits(subject, name):
    with subject.model(name) as model, torch.no_grad():
        return model(IDS).logits.float(), next(model.parameters()).dtype, model.config._attn_implementation


def test_fp16_scores_overflow_and_pasa_does_not(subject):
    reference = logits(subject, "fp32")[0]
    assert logits(subject, "fp16-eager")[0].isnan().all()
    for name in ("pasa", "fp16-sdpa"):
        values, dtype, _ = logits(subject, name)
        assert dtype == torch.float32, "emulated: FP16 attention in an FP32 model"
        assert (values - reference).abs().max() < 0.02 * reference.abs().max()
    assert logits(subject, "fp32")[2] == "sdpa", "a model is unpatched behind the context"


def test_what_is_called_emulated_is_the_reference(folder, subject, monkeypatch):
    """Story: since a backend of the CPU serves, the row "PASA (emulated)" was torch's attention with FP32 scores."""
    backends, patch = [], pasa.patch_pipeline
    monkeypatch.setattr(pasa, "patch_pipeline", lambda *a, **b: backends.append(b["backend"]) or patch(*a, **b))
    for each in (subject, Subject(folder, 131072, CPU, half=True)):
        logits(each, "pasa")
    assert backends == ["reference", None]


def test_bf16_loses_accuracy_where_scores_are_stored(subject):
    """Near 131,072 a BF16 score is rounded to 1,024, which a fused kernel with FP32 scores does not do."""
    reference = logits(subject, "fp32-base")[0]
    errors = {name: (logits(subject, name)[0] - reference).norm() for name in ("fp32", "bf16", "bf16-eager")}
    assert errors["fp32"] < errors["bf16"] < errors["bf16-eager"] / 2


def test_half_models_are_half_and_run_their_own_attention(folder, subject):
    half = Subject(folder, 131072, CPU, half=True)
    values, dtype, attention = logits(half, "fp16-eager")
    assert (dtype, attention) == (torch.float16, "eager")
    assert values.isnan().all()
    assert logits(half, "fp16-sdpa")[1:] == (torch.float16, "sdpa")
    values, dtype, _ = logits(half, "pasa")
    assert dtype == torch.float16
    assert values.isfinite().all()
    assert half.titles(["pasa"]) == {"pasa": "FP16, PASA"}
    assert subject.titles(["fp32", "pasa"]) == {"fp32": "FP32", "pasa": "FP16, PASA (emulated)"}


def test_the_base_is_the_model_before_the_injection(folder, subject):
    plain = Subject(folder, 0, CPU)
    assert torch.equal(logits(subject, "fp32-base")[0], logits(plain, "fp32")[0])
    assert not torch.equal(logits(subject, "fp32")[0], logits(plain, "fp32")[0])
    assert subject.fixture["offset"] == (131072, 131072)
    assert plain.fixture is None


def test_identity_tells_models_apart(folder, subject):
    assert subject.identity()["offset"] == 131072
    assert {"config.json", "model.safetensors"} <= set(subject.files())
    assert subject.identity() != Subject(folder, 0, CPU).identity()


@pytest.mark.parametrize(("name", "seen"), [("model.safetensors", [0, -1]), ("tokenizer.json", [0, 2 * MIB, -1])])
def test_a_file_of_the_same_size_is_not_the_same(tmp_path, name, seen):
    """Training goes on and changes no size. Of weights both ends are looked at, of all else everything."""
    file, content = tmp_path / name, bytearray(4 * MIB)
    file.write_bytes(content)
    prints = {fingerprint(file)}
    for place in seen:
        content[place] ^= 1
        file.write_bytes(content)
        prints.add(fingerprint(file))
    assert len(prints) == 1 + len(seen)
    file.write_bytes(content + b"\0")
    assert fingerprint(file) not in prints


def test_an_accelerator_that_emulates_runs_pasas_own_kernel(subject, folder):
    device = Subject(folder, 131072, torch.device("cuda"), half=False)
    names = ["fp32", "fp16-eager", "pasa"]
    assert list(device.titles(names).values()) == ["FP32", "FP16, eager (emulated)", "FP16, PASA (FP32 model)"]
    assert device.note(names).startswith("FP32 model, FP16 attention: PASA is its own kernel")
    assert "on CPU" not in device.note(names)
    assert "emulated NPU arithmetic on CPU" in subject.note(names)
    assert subject.note(["fp32"]) == device.note(["bf16"]) == "not run on an NPU"


def test_names_are_checked():
    assert parse_precisions(["pasa", "bf16", "pasa"], injected=True) == ["fp32", "pasa", "bf16"]
    with pytest.raises(ValueError, match="'int8' is not one of fp32, fp32-base"):
        parse_precisions(["int8"], injected=True)
    with pytest.raises(ValueError, match="'fp32-base' is 'fp32' where no overflow is injected"):
        parse_precisions(["fp32-base"], injected=False)
