"""Golden attention: the definition, in FP64, without blocks. It shares no code with what it judges."""

from __future__ import annotations

import torch
from torch import Tensor


def golden_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute softmax(scale * q k^T + mask) v in FP64; a fully masked row gives 0 and LSE -inf (or its sink).

    Parameters
    ----------
    q : Tensor (B, Hq, Sq, D)
    k, v : Tensor (B, Hkv, Skv, D)
        Hq must be a multiple of Hkv.
    attn_mask : Tensor, optional
        Bool (True = keep) or float (added), broadcastable to (B, Hq, Sq, Skv).
    is_causal : bool
        Bottom-right aligned: query i sees keys up to i + Skv - Sq.
    window : (int, int), optional
        Query i sees keys i + Skv - Sq - window[0] to i + Skv - Sq + window[1]; -1 is unlimited.
    scale : float, optional
        1/sqrt(D) by default.
    softcap : float, optional
        Scores become softcap * tanh(s / softcap) before the mask.
    sinks : Tensor (Hq,), optional
        One more score of every row, whose value is 0.

    Returns
    -------
    out : Tensor (B, Hq, Sq, D), FP64
    lse : Tensor (B, Hq, Sq), FP64
        Natural logarithm of the row sums.

    Examples
    --------
    >>> q, k, v = torch.randn(3, 1, 2, 130, 64).half()
    >>> golden, _ = pasa.golden_attention(q, k, v)
    >>> bool((pasa.attention(q, k, v) - golden).abs().max() < 2e-3)
    True
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}, not a Tensor: torch.from_numpy({name}) converts an array")
    q, k, v = q.double(), k.double(), v.double()
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    if is_causal:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(~ones.tril(scores.shape[-1] - scores.shape[-2]), -torch.inf)
    aligned = torch.arange(scores.shape[-2], device=q.device)[:, None] + scores.shape[-1] - scores.shape[-2]
    ahead = torch.arange(scores.shape[-1], device=q.device) - aligned  # how far to the right of the row's own key
    left, right = window or (-1, -1)
    if left >= 0:
        scores = scores.masked_fill(ahead < -left, -torch.inf)
    if right >= 0:
        scores = scores.masked_fill(ahead > right, -torch.inf)
    if sinks is not None:
        sink = sinks.double()[:, None, None].expand(*scores.shape[:-1], 1)
        scores, v = torch.cat((scores, sink), -1), torch.nn.functional.pad(v, (0, 0, 0, 1))
    lse = torch.logsumexp(scores, -1)
    # Not exp(scores - lse): under a common bias of -1e38, lse has no digit left for the number of
    # keys.
    weights = torch.softmax(scores, -1).masked_fill((lse == -torch.inf).unsqueeze(-1), 0.0)
    return weights @ v, lse
