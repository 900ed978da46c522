"""Files that somebody else wrote: whatever they hold, one clear error, no code of theirs, no memory on their word."""

import contextlib
import json
import pickle
import struct
from random import Random

import pytest
import torch
from safetensors.torch import save

import pasa
from pasa.eval.kit.model_folder import load_folder
from pasa.eval.models.longbench.data import load_items

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
