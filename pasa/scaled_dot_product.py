"""`scaled_dot_product_attention`, which takes the place of torch's function of that name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pasa.attention import attention
from pasa.checks import check_optional, check_switches, check_tensor
from pasa.keywords import hint_at_arguments
from pasa.ops.attention.torch_sdpa import torch_sdpa
from pasa.ops.operands import SCALES


@hint_at_arguments
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute torch's `scaled_dot_product_attention`, in FP16 by `pasa.attention`, which cannot overflow.

    The signature, the shapes and the meaning of the arguments are those of
    `torch.nn.functional.scaled_dot_product_attention`, so this function can replace it in a whole program. Calls in
    FP32, BF16 and FP64 go to torch's own function unchanged, as it was when pasa was imported. So do FP16 calls that
    have no query or no key. FP32 and BF16 inputs count as FP16 under FP16 autocast, because torch casts them there.

    Parameters
    ----------
    query : Tensor (..., L, E)
        At least two dimensions. With four or more, the third from the right is that of heads.
    key : Tensor (..., S, E)
    value : Tensor (..., S, Ev)
        Leading dimensions of query, key and value broadcast. Ev may differ from E.
    attn_mask : Tensor, optional
        Bool (True = keep) or float (added to the scaled scores), broadcastable to (..., L, S). A
        `torch.nn.attention.bias.CausalBias` is accepted too.
    dropout_p : float
        Only 0.0 is supported in FP16.
    is_causal : bool
        Causal mask, aligned top-left: query i sees keys up to i. It excludes `attn_mask`. `pasa.attention` aligns
        bottom-right.
    scale : float, optional
        Factor of the scores, at most 2^80 in size, also 0 or negative; 1/sqrt(E) by default. As in torch, a number in a
        0-d tensor or an array scalar is taken too.
    enable_gqa : bool
        Let query heads share key heads; their number is then a multiple of that of the key heads. Without it, heads
        that neither agree nor broadcast are an error.

    Returns
    -------
    Tensor (..., L, Ev)
        In the dtype of the query. A row that sees no key is 0; torch's backends return NaN or 0 there.

    Raises
    ------
    ValueError, TypeError
        In FP16: `attn_mask` and `is_causal` are both set; shapes, heads, dtypes or devices do not fit together; query,
        key or value is a nested tensor.
    NotImplementedError
        In FP16: dropout_p is not 0; the head dimension is more than 512.

    Examples
    --------
    >>> q = torch.full((1, 8, 20, 64), 60.0).half()  # scores of 230400, beyond FP16
    >>> v = torch.randn(1, 8, 20, 32).half()
    >>> pasa.scaled_dot_product_attention(q, q, v, is_causal=True).isfinite().all()
    tensor(True)

    To replace torch's function in a whole program:

    >>> import torch.nn.functional as F
    >>> original = F.scaled_dot_product_attention
    >>> F.scaled_dot_product_attention = pasa.scaled_dot_product_attention
    >>> F.scaled_dot_product_attention(q, q, v, dropout_p=0.1)
    Traceback (most recent call last):
    NotImplementedError: dropout_p=0.1 is not supported in FP16: pass 0.0, as models do after model.eval()
    >>> F.scaled_dot_product_attention = original
    """
    bottom_right = False
    if _is_causal_bias(attn_mask):
        if is_causal:
            raise ValueError("attn_mask is a CausalBias, and is_causal=True sets a causal mask too: leave one out")
        attn_mask, is_causal, bottom_right = _read_causal_bias(attn_mask, query, key)
    if not _is_ours(query, key, value):
        if bottom_right:
            attn_mask, is_causal = _causal_mask(query, key, key.shape[-2] - query.shape[-2]), False
        return torch_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    _check(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    return attend_as_torch(attention, query, key, value, attn_mask, is_causal, scale, enable_gqa, bottom_right)


def attend_as_torch(
    attend: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    bottom_right: bool = False,
) -> Tensor:
    """Attend with the shapes and the causality of torch's function by one that has those of `pasa.attention`.

    Parameters
    ----------
    attend : callable
        Takes 4-D query, key and value of equal head dimensions, and `attn_mask`, `is_causal` and `scale` by name.
    query, key, value, attn_mask, is_causal, scale, enable_gqa
        As for :func:`scaled_dot_product_attention`, of any dtype that `attend` takes.
    bottom_right : bool
        True: causality is aligned with the last key.
    """
    if scale is None and value.shape[-1] > query.shape[-1]:
        scale = query.shape[-1] ** -0.5  # queries are padded below, and their own width counts
    query, key, value = autocast_inputs(query, key, value)
    if scale is not None:
        query, scale = _positive_scale(query, scale)
    width, leading = value.shape[-1], query.shape[:-2]
    if not _is_4d(query, key, value, enable_gqa):
        leading = _leading(query, key, value, enable_gqa)
        query, key, value, attn_mask = _as_4d(query, key, value, attn_mask, leading, enable_gqa)
    if is_causal and not bottom_right:
        attn_mask, is_causal, key, value = _top_left(query, key, value)
    query, key, value = equal_widths(query, key, value)
    out = attend(query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
    out = out if out.shape[-1] == width else out[..., :width]
    return out if out.shape[:-2] == leading else out.reshape(*leading, *out.shape[-2:])


def _positive_scale(query: Tensor, scale: Any) -> tuple[Tensor, float]:
    """Return a query and a scale that `pasa.attention` takes, and that give the same scores.

    `pasa.attention` needs a scale of 2^-80 or more. |q.k| is below 2^42, so a smaller scale gives scores below 2^-38,
    which weigh all keys alike as 0 does. Negation of the query is exact.
    """
    if not isinstance(scale, (int, float)):
        if not hasattr(scale, "item"):
            return query, scale  # `pasa.attention` refuses it by name
        scale = scale.item()
    if scale < 0:
        query, scale = -query, -scale
    return query, SCALES[0] if scale < SCALES[0] else float(scale)


def equal_widths(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad values, or queries and keys, with zeros so that all head dimensions are equal, as `pasa.attention` needs.

    Zeros change neither the scores nor the leading output dimensions; the caller cuts the output back to the width of
    the values, and passes the scale of the queries' width.
    """
    missing = key.shape[-1] - value.shape[-1]
    if missing > 0:
        value = pad(value, (0, missing))
    elif missing < 0:
        query, key = (pad(x, (0, -missing)) for x in (query, key))
    return query, key, value


def _is_ours(*tensors: Tensor) -> bool:
    """Return whether torch would attend in FP16, and there are keys and queries, so that something could overflow."""
    if not isinstance(tensors[0], Tensor) or _attended_dtype(tensors[0]) != torch.float16:
        return False
    if not all(isinstance(x, Tensor) for x in tensors):
        return False  # torch names the argument
    return any(x.layout is not torch.strided for x in tensors) or all(x.numel() for x in tensors)


def _attended_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which torch attends to a tensor: its own, or under autocast that of autocast."""
    device = x.device.type
    if device == "meta" or x.dtype == torch.float64 or not x.is_floating_point():
        return x.dtype
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def autocast_inputs(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors in the dtype in which torch attends to them: without autocast, the tensors themselves.

    Under autocast, rotary embeddings leave q and k in FP32, but not v.
    """
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    return tuple([x.to(_attended_dtype(x)) for x in tensors])


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: object,
    is_causal: bool,
    enable_gqa: bool,
) -> None:
    """Check what `pasa.attention` cannot, because it has other arguments or sees other shapes."""
    if not isinstance(enable_gqa, bool):
        raise TypeError(f"enable_gqa={enable_gqa!r} is a {type(enable_gqa).__name__}, not a bool: pass True or False")
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x)
        if x.dim() < 2 + enable_gqa:
            needed = "(..., H, L, E) with enable_gqa=True" if enable_gqa else "(..., L, E)"
            raise ValueError(f"{name} has {x.dim()} dimensions {tuple(x.shape)}: make it a tensor {needed}")
    for name, x in (("key", key), ("value", value)):
        if x.dtype != query.dtype and autocast_inputs(x)[0].dtype != torch.float16:
            raise TypeError(f"{name} is {x.dtype} but query is {query.dtype}: call .to({query.dtype})")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"head dim of query is {query.shape[-1]} but that of key is {key.shape[-1]}: pad the smaller one with "
            "zeros, and pass the scale of the unpadded query"
        )
    check_optional("attn_mask", attn_mask)
    check_switches(None, is_causal)
    if dropout_p is None or isinstance(dropout_p, str):
        raise TypeError(f"dropout_p={dropout_p!r} is a {type(dropout_p).__name__}, not a number: pass 0.0")
    if dropout_p != 0:
        raise NotImplementedError(
            f"dropout_p={dropout_p!r} is not supported in FP16: pass 0.0, as models do after model.eval()"
        )
    if is_causal and attn_mask is not None:
        shape = tuple(attn_mask.shape)
        raise ValueError(f"attn_mask {shape} and is_causal=True exclude each other: put causality into the mask")


def _is_4d(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """Return whether tensors are (B, H, L, E) already, with as many key heads as `pasa.attention` takes for them."""
    if not query.dim() == key.dim() == value.dim() == 4:
        return False
    (batch, heads), of_keys = query.shape[:2], key.shape[:2]
    if of_keys != value.shape[:2] or of_keys[0] != batch:
        return False
    return bool(of_keys[1] in (1, heads) or (enable_gqa and heads % of_keys[1] == 0))


def _leading(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> torch.Size:
    """Return the output's dimensions to the left of (L, Ev): those of batches and heads."""
    shapes = [x.shape[:-2] for x in (query, key, value)]
    heads: tuple[int, ...] = ()
    if enable_gqa:
        of_query, of_key, of_value = (shape[-1] for shape in shapes)
        if of_key != of_value or of_query % of_key:
            raise ValueError(
                f"query has {of_query} heads, key {of_key} and value {of_value}: with enable_gqa=True, key and value "
                "need equally many, and query a multiple of them"
            )
        heads, shapes = (of_query,), [shape[:-1] for shape in shapes]
    try:
        return torch.Size((*torch.broadcast_shapes(*shapes), *heads))
    except RuntimeError as error:
        listed = ", ".join(f"{name} {tuple(x.shape)}" for name, x in (("query", query), ("key", key), ("value", value)))
        hint = "expand the smaller batch" if enable_gqa else "pass enable_gqa=True if query heads share key heads"
        raise ValueError(f"the dimensions left of the last two do not broadcast: {listed}: {hint}") from error


def _as_4d(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, leading: torch.Size, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return (B, H, L, E) tensors: all but the heads in the batch, or all of it if there are fewer than two dimensions.

    Key heads are not repeated where `pasa.attention` shares them: with `enable_gqa`, or if there is a single one.
    """
    batch = leading[:-1] if len(leading) > 1 or enable_gqa else leading
    of_heads = leading[len(batch) :]
    one_head = not enable_gqa and of_heads and all(x.dim() < 3 or x.shape[-3] == 1 for x in (key, value))

    def fold(x: Tensor, heads: tuple[int, ...]) -> Tensor:
        shape = (*batch, *heads, *x.shape[-2:])
        x = x if x.shape == shape else x.expand(shape)
        x = x if of_heads else x.unsqueeze(-3)
        return x.unsqueeze(0) if not batch else x if len(batch) == 1 else x.flatten(0, len(batch) - 1)

    of_keys = (key.shape[-3],) if enable_gqa else (1,) if one_head else of_heads
    if attn_mask is not None and (len(batch) != 1 or not of_heads):
        attn_mask = _fold_mask(attn_mask, leading, len(of_heads), fold)
    return fold(query, tuple(of_heads)), fold(key, tuple(of_keys)), fold(value, tuple(of_keys)), attn_mask


def _fold_mask(attn_mask: Tensor, leading: torch.Size, heads: int, fold: Callable[..., Tensor]) -> Tensor:
    """Return a mask whose batch dimensions are folded like those of the queries; `heads` is 1 if one is of heads."""
    of_heads = tuple(attn_mask.shape[-3:-2]) if heads and attn_mask.dim() > 2 else (1,) * heads
    if all(size == 1 for size in attn_mask.shape[: -2 - heads]) and attn_mask.dim() <= len(leading) + 2:
        return attn_mask.reshape(*of_heads, *attn_mask.shape[-2:])
    try:
        return fold(attn_mask, of_heads)
    except RuntimeError as error:
        shape = (*leading, *attn_mask.shape[-2:])
        raise ValueError(f"attn_mask {tuple(attn_mask.shape)} does not broadcast to {shape}: reshape it") from error


def _top_left(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor | None, bool, Tensor, Tensor]:
    """Return (mask, is_causal, key, value) with which `pasa.attention` lets query i see keys up to i.

    Keys beyond the last query are seen by no row, so they are cut off. Where queries outnumber keys, only a mask
    expresses the alignment.
    """
    queries, keys = query.shape[-2], key.shape[-2]
    if queries > keys:
        return _causal_mask(query, key, 0), False, key, value
    return None, True, key[..., :queries, :], value[..., :queries, :]


def _causal_mask(query: Tensor, key: Tensor, later: int) -> Tensor:
    """Return the (L, S) mask in which query i sees keys up to i + later."""
    shape = (query.shape[-2], key.shape[-2])
    return torch.ones(shape, dtype=torch.bool, device=query.device).tril(later)


def _is_causal_bias(attn_mask: object) -> bool:
    """Return whether a mask is torch's `CausalBias`; its module, which takes seconds to import, is not imported."""
    return attn_mask is not None and type(attn_mask).__module__ == "torch.nn.attention.bias"


def _read_causal_bias(attn_mask: Any, query: Tensor, key: Tensor) -> tuple[None, bool, bool]:
    """Return (mask, is_causal, whether it is aligned bottom-right) of torch's `CausalBias`.

    torch's own function cannot read such a mask once it is replaced, because the class compares functions by identity.
    """
    expected, sizes = (attn_mask.seq_len_q, attn_mask.seq_len_kv), (query.shape[-2], key.shape[-2])
    if expected != sizes:
        raise ValueError(f"attn_mask is a CausalBias of {expected}: make it one of {sizes}, the queries and keys here")
    return None, True, attn_mask.variant.name == "LOWER_RIGHT" and sizes[0] != sizes[1]
