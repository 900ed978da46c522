"""Files that somebody else wrote: whatever they hold, one clear error, no code of theirs, no memory on their word."""

import contextlib
import json
import pickle
import shutil
import struct
from pathlib import Path
from random import Random

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save, save_file
from tokenizers import Tokenizer, models

import pasa
from pasa.eval.kit.model_folder import load_folder
from pasa.eval.models.longbench.data import load_items
from pasa.eval.models.rescue.run import build_prompt

CONFIG = {
    "model_type": "llama", "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "head_dim": 8,
    "max_position_embeddings": 32, "num_key_value_heads": 2,
}  # fmt: skip
TENSORS = {
    f"model.layers.0.{name}.weight": torch.randn(shape)
    for name, shape in {"self_attn.q_proj": (16, 16), "self_attn.k_proj": (16, 16), "input_layernorm": (16,)}.items()
}
EXPECTED = (ValueError, TypeError, NotImplementedError, OSError)  # what the command line shows in one line


def model(folder, weights=None, config=None):
    """A folder of a tiny model."""
    (folder / "tokenizer.json").write_text("{}")
    (folder / "config.json").write_bytes(json.dumps(CONFIG).encode() if config is None else config)
    if weights is not None:
        (folder / "model.safetensors").write_bytes(weights)
    return folder


def with_header(header, data=b"", length=None):
    """A safetensors file with that header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def spec(dtype="F32", shape=(16, 16), offsets=(0, 1024)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


Q, K = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
BAD_WEIGHTS = {
    "empty": b"",
    "seven bytes": b"1234567",
    "header of 2^63 bytes": with_header({}, length=2**63),
    "header of 2^40 bytes": with_header({}, length=2**40),
    "header beyond the file": with_header({}, length=100),
    "no JSON": with_header(b"{" * 9),
    "deep JSON": with_header(b"[" * 100_000),
    "overlapping": with_header({Q: spec(), K: spec(offsets=(512, 1536))}, bytes(1536)),
    "data beyond the file": with_header({Q: spec(offsets=(0, 2**62), shape=(2**30, 2**30))}),
    "shape that overflows": with_header({Q: spec(shape=(2**33, 2**33))}, bytes(1024)),
    "backward offsets": with_header({Q: spec(offsets=(1024, 0))}, bytes(1024)),
    "negative shape": with_header({Q: spec(shape=(-16, 16))}, bytes(1024)),
    "unknown type": with_header({Q: spec(dtype="F17")}, bytes(1024)),
    "integers": save({name: x.int() for name, x in TENSORS.items()}),
    "another shape": save({name: torch.zeros(3, 5) for name in TENSORS}),
    "cut": save(TENSORS)[:-100],
    "pickle": pickle.dumps({"a": 1}),
}


def test_the_model_is_otherwise_good(tmp_path):
    assert pasa.predict_overflow(model(tmp_path, save(TENSORS))).as_dict()


@pytest.mark.parametrize("name", BAD_WEIGHTS)
def test_broken_weights(name, tmp_path):
    with pytest.raises(EXPECTED):
        pasa.predict_overflow(model(tmp_path, BAD_WEIGHTS[name]))


def test_broken_weights_of_a_model_that_is_loaded(tmp_path):
    """Story: `pasa demo --model FOLDER` showed a traceback for a download that had been cut."""
    with pytest.raises(ValueError, match="has a file of weights that is not whole"):
        load_folder(str(model(tmp_path, BAD_WEIGHTS["cut"])))


BAD_CONFIGS = [
    *(b"", b"{", b"[]", b"3", b"null", b'"llama"', b"\xff\xfe", b"[" * 100_000),
    *(b'{"model_type": 3}', b'{"model_type": []}'),
]
ODD_FIELDS = [
    *({"hidden_size": "16"}, {"num_hidden_layers": -1}, {"num_attention_heads": 0}, {"head_dim": None}),
    *({"num_hidden_layers": 10**12}, {"hidden_size": 1e300}, {"max_position_embeddings": "x"}),
    *({"max_position_embeddings": -4}, {"num_key_value_heads": 0}),
]


@pytest.mark.parametrize("config", BAD_CONFIGS, ids=lambda text: repr(text[:20]))
def test_broken_configurations(config, tmp_path):
    """Story: "[]" was an AttributeError, and 100,000 brackets a RecursionError."""
    with pytest.raises(EXPECTED):
        pasa.predict_overflow(model(tmp_path, save(TENSORS), config))


@pytest.mark.parametrize("change", ODD_FIELDS, ids=str)
def test_odd_fields(change, tmp_path):
    """Refused by name, or of no account: a head dimension may follow from the others."""
    refused_or_read(model(tmp_path, save(TENSORS), json.dumps(CONFIG | change).encode()))


NUMBERS = [
    *((name, value) for name in ("num_attention_heads", "num_hidden_layers") for value in (True, 10**30)),
    *(("max_position_embeddings", value) for value in (10**400, "many", -4, True)),
    *(("partial_rotary_factor", value) for value in (float("inf"), float("nan"), -1, "half")),
    *(("layer_norm_eps", value) for value in (float("nan"), -1e-5, 10**400, True)),
]


@pytest.mark.parametrize(("name", "value"), NUMBERS, ids=lambda each: str(each)[:25])
def test_a_wrong_number_is_named(name, value, tmp_path):
    """Story: infinity and 10^400 were tracebacks, and an epsilon of NaN was believed."""
    config, tensors = CONFIG | {name: value}, TENSORS
    if name == "layer_norm_eps":
        config |= {"model_type": "clip_text_model"}
        tensors = {key.replace("input_layernorm", "layer_norm1"): x for key, x in TENSORS.items()}
        assert pasa.predict_overflow(model(tmp_path, save(tensors), json.dumps(config | {name: 1e-5}).encode()))
    with pytest.raises(ValueError, match=f"its config says {name}=.{{1,60}}, ") as refused:
        pasa.predict_overflow(model(tmp_path, save(tensors), json.dumps(config).encode()))
    assert len(str(refused.value).replace(str(tmp_path), "")) < 200


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_head_dim": [0, 0]}, "attention_head_dim="),
        ({"attention_head_dim": -4}, "attention_head_dim=-4"),
        ({"attention_head_dim": {"a": 4}}, "attention_head_dim="),
        ({"attention_head_dim": ["x"]}, "attention_head_dim="),
        ({"attention_head_dim": [2, 2]}, "a list of 3 numbers or more, as block up_blocks.2. needs"),
        ({"sample_size": 10**400}, "sample_size=1000.*, which is not an integer"),
        ({"sample_size": -8}, "sample_size=-8"),
        ({"_class_name": "AutoencoderKL", "sample_size": 8}, "block_out_channels=None"),
    ],
    ids=str,
)
def test_a_wrong_number_of_a_picture_model_is_named(change, message, tmp_path):
    """Story: no head was a ZeroDivisionError, and a list that is too short was read from its other end."""
    place = "up_blocks.2.attentions.0.transformer_blocks.0"
    tensors = {f"{place}.attn1.{name}.weight": torch.randn(16, 16) for name in ("to_q", "to_k")}
    tensors |= {f"{place}.norm1.weight": torch.ones(16)}
    if "_class_name" in change:
        tensors = {f"mid_block.attentions.0.{name}.weight": torch.randn(16, 16) for name in ("to_q", "to_k")}
    config = {"_class_name": "UNet2DConditionModel", "attention_head_dim": 2, "sample_size": 8}
    if "_class_name" not in change:
        assert pasa.predict_overflow(model(tmp_path, save(tensors), json.dumps(config).encode()))
    with pytest.raises(ValueError, match=message):
        pasa.predict_overflow(model(tmp_path, save(tensors), json.dumps(config | change).encode()))


def test_heads_that_the_weights_do_not_hold(tmp_path):
    """Story: 10^7 heads of Qwen3, whose bound needs the gains of one head alone, took minutes and then all memory."""
    config = CONFIG | {"model_type": "qwen3", "num_attention_heads": 10**7}
    gains = {f"model.layers.0.self_attn.{name}.weight": torch.ones(8) for name in ("q_norm", "k_norm")}
    with pytest.raises(ValueError, match=r"q_proj.weight is \(16, 16\), which 10000000 heads of 8 do not fit"):
        pasa.predict_overflow(model(tmp_path, save(TENSORS | gains), json.dumps(config).encode()))


@pytest.mark.parametrize(
    "config", [{"model_type": "x", "_class_name": "AutoencoderKL"}, {"model_type": ["x"]}], ids=str
)
def test_an_architecture_of_two_names(config, tmp_path):
    """Story: of the names "x" and AutoencoderKL one was checked and the other read; a list was "unhashable"."""
    with pytest.raises(NotImplementedError, match=r"architecture .{3,5} is not supported"):
        pasa.predict_overflow(model(tmp_path, save(TENSORS), json.dumps(config).encode()))


def refused_or_read(folder):
    """An expected error with words, or a prediction."""
    with contextlib.suppress(*EXPECTED):
        assert pasa.predict_overflow(folder).as_dict()


def test_random_bytes_in_a_good_file(tmp_path):
    """Refused, or read as other numbers."""
    good, rng = save(TENSORS), Random(0)
    for _ in range(300):
        bad = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            bad[rng.randrange(min(len(bad), rng.choice((16, 400, len(bad)))))] = rng.randrange(256)
        refused_or_read(model(tmp_path, bytes(bad)))


@pytest.mark.parametrize(
    "index",
    [{}, {"weight_map": []}, {"weight_map": {Q: 3}}, {"weight_map": {Q: "../outside.safetensors"}},
     {"weight_map": {Q: "/etc/passwd"}}, [], {"weight_map": {Q: "missing.safetensors"}}],
    ids=str,
)  # fmt: skip
def test_an_index_names_files_of_its_folder(index, tmp_path):
    """Story: "../" in an index read files outside of the folder; one without a map was a KeyError."""
    (tmp_path / "outside.safetensors").write_bytes(save(TENSORS))
    folder = tmp_path / "model"
    folder.mkdir()
    model(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(EXPECTED, match=r"its index|no weight_map|no object"):
        pasa.predict_overflow(folder)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    """Return a folder with a small model that loads, and its tokenizer."""
    folder = tmp_path_factory.mktemp("qwen2")
    letters = {letter: index for index, letter in enumerate(["<unk>", *"abcdefgh"])}
    words = Tokenizer(models.BPE(vocab=letters, merges=[], unk_token="<unk>"))
    hf.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = hf.Qwen2Config(**sizes, num_key_value_heads=2, vocab_size=9, max_position_embeddings=32)
    hf.Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def changed(folder, copy, config=None, **tensors):
    """Copy a folder with other entries in its configuration, and with other tensors; None drops one."""
    shutil.copytree(folder, copy)
    kept = load_file(copy / "model.safetensors") | tensors
    save_file({name: x for name, x in kept.items() if x is not None}, copy / "model.safetensors", {"format": "pt"})
    path = copy / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (config or {})))
    return str(copy)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (None, "is missing .1 weights in all., and would be random"),
        (torch.zeros(3, 16), "is of another shape than config.json says"),
        (torch.full((16, 16), torch.nan), "holds NaN or infinity, which no attention repairs"),
    ],
    ids=["missing", "shape", "nan"],
)
def test_weights_that_are_not_there_are_never_random(weight, message, qwen2, tmp_path, capfd):
    """Story: `pasa demo` and `pasa diagnose` gave a verdict on random weights where the folder lacked some."""
    load_folder(changed(qwen2, tmp_path / "good"))
    capfd.readouterr()
    with pytest.raises(ValueError, match=f"{Q} {message}"):
        load_folder(changed(qwen2, tmp_path / "bad", **{Q: weight}))
    assert "LOAD REPORT" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "change",
    [{"num_hidden_layers": "two"}, {"num_attention_heads": 0}, {"hidden_size": -16}, {"hidden_act": "evil"},
     {"dtype": "float99"}, {"rope_parameters": {"rope_type": "evil"}}, {"vocab_size": 10**12}],
    ids=str,
)  # fmt: skip
def test_a_configuration_that_a_library_stumbles_over(change, qwen2, tmp_path):
    """Story: each of them was a traceback of transformers: KeyError, AttributeError, ZeroDivisionError ..."""
    with pytest.raises(ValueError, match=r"bad' (cannot be read|.* is of another shape)"):
        load_folder(changed(qwen2, tmp_path / "bad", change))


@pytest.mark.parametrize(
    ("name", "text"),
    [("tokenizer.json", "{}"), ("tokenizer.json", ""), ("tokenizer_config.json", "[]"), ("config.json", "[]"),
     ("chat_template.jinja", "{{ raise_exception('no') }}"), ("chat_template.jinja", "{% if %}"),
     ("chat_template.jinja", "{{ ''.__class__.__mro__ }}")],
)  # fmt: skip
def test_files_beside_the_weights(name, text, qwen2, tmp_path):
    """Story: a chat template that refuses a message was a traceback from jinja2."""
    folder = Path(changed(qwen2, tmp_path / "bad"))
    (folder / name).write_text(text)
    with pytest.raises(ValueError, match=r"model '.*bad' cannot be read"):
        build_prompt(load_folder(str(folder))[1], "abc")


class Bomb:
    """Unpickled, it writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_pickled_weights_are_never_loaded(tmp_path):
    """Neither by the prediction, which reads safetensors alone, nor where a whole model is loaded."""
    fired = tmp_path / "fired"
    folder = tmp_path / "model"
    folder.mkdir()
    model(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(str(fired))))
    torch.save({"a": Bomb(str(fired))}, folder / "model.bin")
    with pytest.raises(FileNotFoundError, match=r"holds no model\.safetensors"):
        pasa.predict_overflow(folder)
    with pytest.raises(EXPECTED):
        load_folder(str(folder), torch.float32)
    assert not fired.exists()


def test_code_of_a_model_is_never_run(tmp_path):
    """`auto_map` names a module in the folder; it is refused without a question on the terminal."""
    fired = tmp_path / "fired"
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    folder = tmp_path / "model"
    folder.mkdir()
    model(folder, save(TENSORS), json.dumps(config).encode())
    (folder / "own.py").write_text(f"open({str(fired)!r}, 'w')\n")
    with pytest.raises(EXPECTED):
        pasa.predict_overflow(folder)
    with pytest.raises(EXPECTED):
        load_folder(str(folder), torch.float32)
    assert not fired.exists()


LINE = {"context": "c", "input": "i", "answers": ["a"], "length": 1, "all_classes": None, "dataset": "qasper"}


@pytest.mark.parametrize(
    "line",
    [b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"a":' * 100_000,
     json.dumps(LINE | {"length": 1e400}).encode(), json.dumps(LINE | {"answers": [[]]}).encode(), b"9" * 10_000,
     json.dumps(LINE | {"context": {"a": []}}).encode(), json.dumps(LINE | {"dataset": "../x"}).encode(), b"NaN"],
    ids=lambda line: line[:24].decode(errors="replace"),
)  # fmt: skip
def test_broken_lines(line, tmp_path):
    """Named with file and number; a line of brackets is no crash."""
    (tmp_path / "qasper.jsonl").write_bytes(json.dumps(LINE).encode() + b"\n" + line + b"\n")
    with pytest.raises(ValueError, match="line 2"):
        load_items(str(tmp_path))
