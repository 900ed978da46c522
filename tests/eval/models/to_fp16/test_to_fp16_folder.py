"""`pasa to-fp16`: the same function from a folder, in FP16, by transformers alone."""

import json
import math
import resource
import shutil
import signal
import weakref

import pytest
import torch
from accelerate.utils import OffloadedWeightsLoader
from safetensors import safe_open
from safetensors.torch import load_file

from pasa.eval import cli
from pasa.eval.kit import model_folder
from pasa.eval.models.to_fp16 import run
from pasa.eval.models.to_fp16.run import run_to_fp16
from pasa.fp16 import offloading, writing
from pasa.fp16.checkpoint import CheckpointConversion, powers_of
from pasa.fp16.planning import Plan
from tests.pasa.fp16.checkpoints import FAMILIES, HEADS, SIZES, build, contents, save, tokenizer

DEEP = {"num_hidden_layers": 24, "hidden_size": 64, "intermediate_size": 256}
SHARE = 0.03
"""Largest share of a model's weights that is in memory at once: a projection of one of 24 layers, and copies of it."""
COMPARED = {"finite": True, "perplexity": 9.0, "perplexity_before": 9.0, "dtype_before": "float32", "top1": 1.0}
IDS = torch.arange(3, 40)[None]


def load(model, folder, dtype):
    """Load a folder by plain transformers; `_grouped_mm` has no FP64."""
    experts = {"experts_implementation": "eager"} if hasattr(model.config, "moe_intermediate_size") else {}
    return type(model).from_pretrained(folder, dtype=dtype, **experts).eval()


def logits(model):
    with torch.no_grad():
        return model(IDS).logits.double()


def error(result, truth):
    return ((result - truth).abs().max() / truth.abs().max()).item()


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    """A folder in several shards, which no test may change."""
    folder = tmp_path_factory.mktemp("qwen2") / "model"
    save("qwen2", folder, max_shard_size="20KB")
    before = contents(folder)
    yield folder
    assert contents(folder) == before


@pytest.mark.parametrize("family", FAMILIES)
def test_a_written_checkpoint_computes_the_same_and_stays_finite(family, tmp_path):
    """The weights are multiples of 1/64, so that nothing is rounded; Gemma's own code casts to FP32."""
    model = save(family, tmp_path / "model", max_shard_size="20KB")
    result = run_to_fp16(str(tmp_path / "model"), str(tmp_path / "out"))
    assert result["gate"]["passed"]
    assert result["settings"]["config"]
    assert result["shards"] > 3
    truth = logits(load(model, tmp_path / "model", torch.float64))
    assert error(logits(load(model, tmp_path / "out", torch.float64)), truth) < (1e-6 if family == "gemma3" else 1e-12)
    plain, scaled = (logits(load(model, tmp_path / name, torch.float16)) for name in ("model", "out"))
    assert not plain.isfinite().all(), "nothing overflows here"
    assert scaled.isfinite().all()
    assert error(scaled, truth) < 5e-3


def test_what_a_checkpoint_cannot_say_is_refused_by_name(tmp_path, refused):
    """OPT's epsilons are in its code, so its stream cannot be scaled in a folder."""
    from transformers.models.opt import OPTConfig, OPTForCausalLM

    sizes = {"vocab_size": 128, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = OPTForCausalLM(OPTConfig(**sizes, word_embed_proj_dim=32))
    with torch.no_grad():
        for layer in model.model.decoder.layers:
            layer.fc2.weight.mul_(2.0**22)
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    line = refused("to-fp16", str(tmp_path / "model"), str(tmp_path / "out"))
    assert "model.decoder.layers" in line
    assert "pasa.to_fp16" in line
    assert not (tmp_path / "out").exists()


class Positions(torch.nn.Embedding):
    """Adds sines, which no parameter holds."""

    def forward(self, ids):
        angles = torch.arange(ids.shape[-1])[:, None] / torch.arange(1, self.embedding_dim + 1)
        return super().forward(ids) + angles.sin().to(self.weight.dtype)


def test_results_that_would_have_to_be_scaled_behind_their_module_are_refused_by_name():
    """`pasa.to_fp16` scales such results by a hook, which a checkpoint does not have."""
    model = build("llama")
    model.model.embed_tokens.__class__ = Positions
    conversion = CheckpointConversion(model, lambda: model(IDS), 4.0)
    with pytest.raises(NotImplementedError, match=r"^to-fp16: model.embed_tokens adds .* call pasa.to_fp16$"):
        conversion.plan_checkpoint()


class Resident:
    """Counts the bytes of weights in memory: those read from files that still live, and those that a model holds."""

    def __init__(self, monkeypatch):
        self.peak, self.model, self.read = 0, None, weakref.WeakSet()
        enter, load = offloading._Held.enter, OffloadedWeightsLoader.__getitem__
        monkeypatch.setattr(offloading._Held, "enter", lambda held: (enter(held), self.look())[0])
        monkeypatch.setattr(OffloadedWeightsLoader, "__getitem__", lambda *args: self.look(load(*args)))
        loaded = run.load_folder
        monkeypatch.setattr(run, "load_folder", lambda *args: self.look_at(loaded(*args)))

    def look_at(self, loaded):
        self.model = loaded[0]
        return loaded

    def look(self, tensor=None):
        if tensor is not None:
            self.read.add(tensor)
        held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in [*self.read, *self.parameters()]}
        self.peak = max(self.peak, sum(held.values()))
        return tensor

    def parameters(self):
        return [x for x in self.model.parameters() if not x.is_meta] if self.model is not None else []


def test_memory_holds_a_small_share_of_the_weights_and_the_powers_are_the_same(tmp_path, monkeypatch):
    """The model is run from disk, one module at a time; one that is loaded whole has the same powers and peaks."""
    from transformers.models.qwen2 import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES | DEEP, **HEADS))
    with torch.no_grad():
        for layer in model.model.layers[3::4]:
            layer.mlp.down_proj.weight.mul_(1e7)
    size = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    whole = tmp_path / "whole"
    with monkeypatch.context() as patch:
        patch.setattr(model_folder, "STREAMING", (99,))
        resident = Resident(patch)
        in_memory = run_to_fp16(str(tmp_path / "model"), str(whole))
        assert not resident.peak, "nothing is read from disk while it runs"
    with monkeypatch.context() as patch:
        resident = Resident(patch)
        streamed = run_to_fp16(str(tmp_path / "model"), str(tmp_path / "out"))
    assert 0 < resident.peak < SHARE * size
    assert streamed["settings"]["powers"]
    for entry in ("settings", "records", "hidden_states", "underflow", "check", "gate"):
        assert streamed[entry] == in_memory[entry]
    assert contents(tmp_path / "out") == contents(whole)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "whole", "out"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_on_disk_has_the_powers_of_one_in_memory(family, tmp_path, monkeypatch):
    save(family, tmp_path / "model", max_shard_size="20KB")
    streamed = run_to_fp16(str(tmp_path / "model"), str(tmp_path / "out"))
    monkeypatch.setattr(model_folder, "STREAMING", (99,))
    in_memory = run_to_fp16(str(tmp_path / "model"), str(tmp_path / "whole"))
    assert streamed | {"out": ""} == in_memory | {"out": ""}
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_checkpoint_of_any_precision_that_overflows_nowhere_is_only_converted(dtype, tmp_path):
    from transformers.models.qwen2 import Qwen2Config, Qwen2ForCausalLM

    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, **HEADS)).to(dtype)
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    result = run_to_fp16(str(tmp_path / "model"), str(tmp_path / "out"))
    assert (result["settings"]["powers"], result["settings"]["config"]) == ({}, {})
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name].half()) for name in before)


def test_a_written_checkpoint_that_predicts_other_tokens_fails(qwen2, tmp_path, monkeypatch):
    """Story: in a post-norm model, values that the scaling made subnormal were amplified by the next norm."""
    monkeypatch.setattr(run, "compare", lambda *_: dict(COMPARED, top1=0.5))
    result = run_to_fp16(str(qwen2), str(tmp_path))
    assert not result["gate"]["passed"]
    assert "predicts other tokens" in run.verdict(result)
    assert "computes infinity" in run.verdict(result | {"check": dict(COMPARED, finite=False)})


def test_a_huge_perplexity_does_not_fill_the_screen(qwen2, tmp_path):
    result = run_to_fp16(str(qwen2), str(tmp_path), skip_check=True)
    text = run.verdict(result | {"check": dict(COMPARED, perplexity=math.exp(700))})
    assert "perplexity 1.01423e+304, before 9 in" in text


def test_shards_index_and_tokenizer_are_those_of_the_original(qwen2, tmp_path):
    run_to_fp16(str(qwen2), str(tmp_path), skip_check=True)
    index, original = (
        json.loads((folder / "model.safetensors.index.json").read_text()) for folder in (tmp_path, qwen2)
    )
    assert index["weight_map"] == original["weight_map"]
    tensors = [load_file(tmp_path / name) for name in sorted(set(index["weight_map"].values()))]
    assert index["metadata"]["total_size"] == sum(x.nbytes for shard in tensors for x in shard.values())
    assert {x.dtype for shard in tensors for x in shard.values()} == {torch.float16}
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in qwen2.iterdir()} | {
        "pasa_fp16.json",
        "FP16.md",
    }
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float16"
    manifest = json.loads((tmp_path / "pasa_fp16.json").read_text())
    assert all((manifest["complete"], manifest["settings"]["powers"], manifest["peaks"]))
    assert len(manifest["settings"]["source"]) == len(tensors) + 1


def test_weights_to_which_the_model_adds_a_number_are_fp32_and_the_head_stays_tied(tmp_path):
    model = save("gemma3", tmp_path / "model")
    run_to_fp16(str(tmp_path / "model"), str(tmp_path / "out"), skip_check=True)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert "lm_head.weight" not in written
    listed = json.loads((tmp_path / "out" / "pasa_fp16.json").read_text())["settings"]["fp32"]
    assert {name for name, x in written.items() if x.dtype == torch.float32} == set(listed)
    assert "model.norm.weight" in listed, "the last norm undoes the power of the tied embedding"
    loaded = load(model, tmp_path / "out", torch.float16)
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()


def test_hidden_states_inside_are_listed_with_their_powers(tmp_path):
    model = save("llama", tmp_path / "model")
    result = run_to_fp16(str(tmp_path / "model"), str(tmp_path / "out"), skip_check=True)
    with torch.no_grad():
        before, after = (
            load(model, tmp_path / name, torch.float64)(IDS, output_hidden_states=True).hidden_states
            for name in ("model", "out")
        )
    powers = [result["hidden_states"].get(f"['hidden_states'][{index}]", 0) for index in range(len(before))]
    assert any(powers)
    assert all(error(x * 2.0**p, y) < 1e-12 for x, y, p in zip(after, before, powers, strict=True))
    assert "hidden_states" in (tmp_path / "out" / "FP16.md").read_text()


def test_an_interrupted_run_goes_on(qwen2, tmp_path, monkeypatch, capsys):
    out, write = tmp_path / "out", writing.Writer._write_shard

    def stop_at_the_third(self, shard):
        if shard == self.shards[2]:
            raise KeyboardInterrupt
        write(self, shard)

    monkeypatch.setattr(writing.Writer, "_write_shard", stop_at_the_third)
    with pytest.raises(SystemExit):
        cli.main(["to-fp16", str(qwen2), str(out), "--skip-check"])
    assert "complete: " in (line := capsys.readouterr().err)
    assert "the same command goes on" in line
    monkeypatch.undo()
    assert len(list(out.glob("*.safetensors"))) == 2
    assert not (out / "config.json").exists()
    with pytest.raises(FileExistsError, match="another conversion"):
        run_to_fp16(str(qwen2), str(out), margin=64, skip_check=True)
    first = min(out.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-64])  # a shard that something has cut is written again
    assert run_to_fp16(str(qwen2), str(out), skip_check=True)["kept_shards"] == 1
    run_to_fp16(str(qwen2), str(tmp_path / "whole"), skip_check=True)
    assert contents(out) == contents(tmp_path / "whole")


def test_a_full_disk_ends_in_one_line_and_a_second_run_goes_on(qwen2, tmp_path, refused):
    """Files stop growing in the middle of a shard, as on a disk that is full."""
    out = tmp_path / "out"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, before[1]))
        assert "model-0000" in refused("to-fp16", str(qwen2), str(out), "--skip-check")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert not list(out.glob(".pasa-*")), "no half file is left"
    for path in out.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.keys()
    assert run_to_fp16(str(qwen2), str(out), skip_check=True)["gate"]["passed"]


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(qwen2, tmp_path, refused, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(10, 0, 10))
    assert "GB, and 1e-08 GB are free" in refused("to-fp16", str(qwen2), str(tmp_path / "out"), "--skip-check")
    assert not (tmp_path / "out").exists()


def test_places_that_cannot_be_written_are_refused_in_one_line(qwen2, tmp_path, refused):
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").touch()
    for out, message in ((qwen2, "original"), (qwen2 / "fp16", "original"), (tmp_path / "file", "is a file")):
        assert message in refused("to-fp16", str(qwen2), str(out))
    assert "--force" in refused("to-fp16", str(qwen2), str(tmp_path / "full"))
    assert "margin=0.5" in refused("to-fp16", str(qwen2), str(tmp_path / "out"), "--margin", "0.5")
    assert "no file" in refused("to-fp16", str(qwen2), str(tmp_path / "out"), "--sample", "no file")
    assert "GGUF" in refused("to-fp16", str(tmp_path / "model.gguf"), str(tmp_path / "out"))
    assert "not a folder" in refused("to-fp16", str(tmp_path / "nothing"), str(tmp_path / "out"))


def test_a_manifest_that_cannot_be_read_protects_its_checkpoint(qwen2, tmp_path, refused):
    """Story: the weights beside it were deleted without --force."""
    run_to_fp16(str(qwen2), str(tmp_path), skip_check=True)
    (tmp_path / writing.MANIFEST).write_text('{"complete": tr')
    before = contents(tmp_path)
    assert "add --force" in refused("to-fp16", str(qwen2), str(tmp_path), "--skip-check")
    assert contents(tmp_path) == before


def test_powers_of_columns_are_listed():
    """Story: GPT-2 stores weights transposed, so its values are columns, and the powers of those were not listed."""
    model, name = build("gpt2"), "transformer.h.0.attn.c_attn"
    plan = Plan(scales={f"{name}.weight": [(-1, (64, 96, 1), 3)], f"{name}.bias": [(-1, (64, 96, 1), 3)]})
    parts = [[0, 64, 0], [64, 96, 3]]
    assert powers_of(model, plan).as_dict() == {f"{name}.weight": {"columns": parts}, f"{name}.bias": parts}


def test_force_replaces_a_converted_checkpoint(qwen2, tmp_path, refused):
    run_to_fp16(str(qwen2), str(tmp_path), skip_check=True)
    assert "converted checkpoint already" in refused("to-fp16", str(qwen2), str(tmp_path))
    (tmp_path / "model-of-another.safetensors").touch()
    assert run_to_fp16(str(qwen2), str(tmp_path), margin=64, force=True, skip_check=True)["kept_shards"] == 0
    assert not (tmp_path / "model-of-another.safetensors").exists()
