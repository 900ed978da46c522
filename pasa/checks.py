"""Argument checks that public functions share; an error names the argument that is wrong, and says what to do next.

These functions check Python types and layouts. Shapes, dtypes and devices of tensors are checked once, by the operators
(`pasa/ops/operands.py`), because a compiled program calls the operators without these functions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pasa.config import PasaConfig
from pasa.ops import notices, operands
from pasa.ops.attention.call import NO_WINDOW

HEADS_FIRST, HEADS_LAST = ("HND", "BNSD"), ("NHD", "BSND")  # the usual name, then CANN's name
DEFAULT = PasaConfig()
MOST_HEADS = 128
"""The most heads of a layer in published models (Llama 3.1 405B and DeepSeek-V3)."""


def heads_first(q: Tensor, k: Tensor, v: Tensor, tensor_layout: str) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Return views (B, H, S, D) of q, k and v, and whether their layout is heads-last.

    Raises
    ------
    ValueError, TypeError
        The layout is unknown, or q, k or v is not a dense tensor of four dimensions.
    """
    if tensor_layout not in (*HEADS_FIRST, *HEADS_LAST):
        raise ValueError(
            f"tensor_layout={tensor_layout!r} is not one of {(*HEADS_FIRST, *HEADS_LAST)}: "
            "(B, H, S, D) is 'HND' and (B, S, H, D) is 'NHD'"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.ndim != 4:
            raise _wrong_rank(name, x, tensor_layout in HEADS_LAST)
    if tensor_layout in HEADS_LAST:
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), True
    if not torch.compiler.is_compiling() and q.shape[1] > MOST_HEADS:
        warn_of_layout(q.shape, k.shape)
    return q, k, v, False


def warn_of_layout(q: torch.Size, k: torch.Size) -> None:
    """Warn once if tensors that are read as (B, H, S, D) are very likely (B, S, H, D).

    The rule: q and k have the same number of heads, above `MOST_HEADS`; they have at most `MOST_HEADS` tokens; and the
    tokens of q are a multiple of those of k, as query heads are of key heads. Attention within one sequence of more
    than 128 tokens meets the rule if it is passed tokens-first. A heads-first call meets it only if a batch was folded
    into the heads and its sequences are short.
    """
    if q[1] == k[1] > MOST_HEADS and q[2] <= MOST_HEADS and k[2] and q[2] % k[2] == 0:
        notices.warn_once(
            f"q and k have more than {MOST_HEADS} heads of {q[2]} tokens if they are read as (B, H, S, D): if they are "
            f"(B, S, H, D) with {q[2]} heads, pass tensor_layout='NHD'; if not, call "
            "warnings.filterwarnings('ignore', 'q and k have more than', UserWarning)"
        )


def check_tensor(name: str, x: object) -> None:
    """Check that an argument is a tensor, and neither sparse nor nested."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}, not a Tensor: {_conversion(name, x)}")
    hint = f"call pasa.attention_varlen with {name}.values() as tokens and {name}.offsets() as cu_seqlens"
    if x.layout is not torch.strided:
        hint = hint if x.is_nested else "call .to_dense()"
        raise TypeError(f"{name} has the layout {x.layout}, and a dense tensor is needed: {hint}")
    if x.is_nested:
        jagged = f"make it {name} = torch.nested.nested_tensor({name}.unbind(), layout=torch.jagged)"
        raise TypeError(f"{name} is a nested tensor, and a dense one is needed: {jagged}, and {hint}")


def check_optional(name: str, x: object) -> None:
    """Check that an argument is a tensor or None."""
    if x is not None:
        check_tensor(name, x)


def _conversion(name: str, x: object) -> str:
    """Return how to make a tensor of a value that is none."""
    if type(x).__name__ == "ndarray":
        return f"convert it with torch.from_numpy({name})"
    if isinstance(x, (list, tuple, int, float)):
        return f"convert it with torch.tensor({name})"
    if name == "attn_mask":
        return "pass a bool Tensor (True = keep), or is_causal=True for a causal mask"
    return "pass a Tensor"


def _wrong_rank(name: str, x: Tensor, last: bool) -> ValueError:
    form = "(B, S, H, D)" if last else "(B, H, S, D)"
    hint = f"make it a tensor {form}"
    if x.ndim == 3:
        tokens_first = "" if last else f" (or {name}.transpose(0, 1)[None] if it is (S, H, D))"
        hint = f"add the batch dimension with {name}[None]{tokens_first}, or pack sequences for pasa.attention_varlen"
    if x.ndim > 4:
        hint = f"flatten leading dimensions into the batch, as with {name}.flatten(0, {x.ndim - 4})"
    return ValueError(f"{name} has {x.ndim} dimensions {tuple(x.shape)}, expected 4, {form}: {hint}")


def check_longest(name: str, cu_seqlens: object, longest: object) -> None:
    """Check the types of cumulative lengths and of `longest`, and that no sequence exceeds `longest`.

    The operator checks the rest of the cumulative lengths. While torch compiles, and on meta, their values are not read
    here. Nor are they on an NPU, whose kernels read lengths themselves, so that no call waits for the device.
    """
    if not isinstance(cu_seqlens, Tensor):
        kind, hint = type(cu_seqlens).__name__, _conversion(f"cu_seqlens_{name}", cu_seqlens)
        raise TypeError(f"cu_seqlens_{name} is {kind}, not an int32 or int64 Tensor: {hint}")
    if isinstance(longest, bool) or not isinstance(longest, int):
        hint = f"pass the longest length, as int(max_seqlen_{name})"
        raise TypeError(f"max_seqlen_{name}={longest!r} is not an integer: {hint}")
    if torch.compiler.is_compiling() or cu_seqlens.is_meta or cu_seqlens.device.type == "npu":
        return
    if cu_seqlens.dtype not in operands.INTEGERS or cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        return  # the operator refuses it
    if (most := int(cu_seqlens.diff().max())) > longest:
        raise ValueError(f"max_seqlen_{name}={longest} is below the longest sequence, {most}: pass {most} or more")


def checked_scale(scale: object) -> float | None:
    """Return the scale as a float; None stands for 1/sqrt(D), which the operator forms."""
    if scale is None:
        return None
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        hint = "pass float(scale)" if hasattr(scale, "item") else "pass a float, or leave it out for 1/sqrt(D)"
        raise TypeError(f"scale={scale!r} is a {type(scale).__name__}, not a number: {hint}")
    operands.check_scale(scale)
    return float(scale)


def checked_limits(
    is_causal: bool, scale: object, window: object, softcap: object, return_max_logits: bool
) -> tuple[bool, float | None, int, int, float, bool]:
    """Return what an operator takes in place of these arguments (`LIMITS` in ops/arguments.py)."""
    scale = checked_scale(scale)
    if window is None and softcap is None:
        return is_causal, scale, *NO_WINDOW, 0.0, return_max_logits
    return is_causal, scale, *_checked_window(window), _checked_softcap(softcap), return_max_logits


def _checked_window(window: object) -> tuple[int, int]:
    """Return both sides of a window, or `NO_WINDOW` for None."""
    if window is None:
        return NO_WINDOW
    sides = tuple(window) if isinstance(window, (tuple, list)) else ()
    if len(sides) != 2 or any(isinstance(x, bool) or not isinstance(x, int) for x in sides):
        count = isinstance(window, int) and window > 0
        hint = f"pass window=({window} - 1, 0) for {window} keys up to the row's own" if count else "pass two integers"
        raise TypeError(f"window={window!r} is not a pair (left, right) of integers: {hint}, where -1 is unlimited")
    return sides[0], sides[1]


def _checked_softcap(softcap: object) -> float:
    """Return the cap of the scores, or 0 for None."""
    if softcap is None:
        return 0.0
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float)):
        hint = "pass float(softcap)" if hasattr(softcap, "item") else "pass a float, or leave it out for no cap"
        raise TypeError(f"softcap={softcap!r} is a {type(softcap).__name__}, not a number: {hint}")
    return float(softcap)


def check_switches(
    backend: object, is_causal: object = False, return_lse: object = False, return_max_logits: object = False
) -> None:
    """Check that switches are bool and a backend is a name; the registry checks later that the backend exists."""
    for name, value in (
        ("is_causal", is_causal), ("return_lse", return_lse), ("return_max_logits", return_max_logits),
    ):  # fmt: skip
        if not isinstance(value, bool):
            hint = f"pass bool({name})" if hasattr(value, "item") else "pass True or False"
            raise TypeError(f"{name}={value!r} is a {type(value).__name__}, not a bool: {hint}")
    if backend is not None and not isinstance(backend, str):
        hint = "pass a name that pasa.backends() lists, or None"
        raise TypeError(f"backend={backend!r} is a {type(backend).__name__}, not a name: {hint}")


def checked_config(config: object) -> PasaConfig:
    """Return the config, or the default for None; refuse any other type."""
    if config is None:
        return DEFAULT
    if not isinstance(config, PasaConfig):
        hint = "pasa.PasaConfig()" if config is PasaConfig else "pasa.PasaConfig(recovery=...), or None"
        hint = "pasa.PasaConfig(**config)" if isinstance(config, dict) else hint
        raise TypeError(f"config is a {type(config).__name__}, not a PasaConfig: pass {hint}")
    return config
