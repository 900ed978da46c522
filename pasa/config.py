"""`PasaConfig` selects the arithmetic of attention."""

from __future__ import annotations

from dataclasses import dataclass

from pasa.keywords import hint_at_arguments
from pasa.ops.attention.options import AttentionOptions


def _with_hints(config: type[PasaConfig]) -> type[PasaConfig]:
    config.__init__ = hint_at_arguments(config.__init__)  # type: ignore[method-assign]
    return config


@_with_hints
@dataclass(frozen=True)
class PasaConfig(AttentionOptions):
    """The arithmetic of an attention call; its values are checked when it is made.

    Attributes
    ----------
    precision : str
        "pasa" (default), or a baseline: "fp32" (FP16 inputs and P, all else FP32), "partial" (Q K^T stored in FP16
        before scaling), "fp16" (everything FP16), "prescaled" (Q scaled before the product, stored in FP16),
        "smooth_k" ("partial" after the mean of K over the sequence is removed).
    recovery : str
        For "pasa": "exact" (default) or "paper" (arXiv:2503.01873, Algorithm 1). "paper" can overflow. Its log-sum-exp
        may be infinite although the output is right, even -inf for a row with keys. So do not merge parts by it.
    beta : float, optional
        Share of the block mean that recovery="paper" removes, in [0, 1). When None, it is solved for the rounded
        shifting matrix. recovery="exact" has no beta.
    block_q, block_k : int
        Rows and keys of a tile, 1 to 65536.
    softmax : str
        "safe", "unbiased" or "unbiased_paper".
        "unbiased" rounds rows with repeated maxima without one-sided error. It does so for rows whose weight two equal
        maxima share, and for rows of four or eight equal maxima if their values lie in one binade. Rows of three, five,
        six and seven equal maxima keep most of their one-sided error (up to 0.06 spacings; see docs/evidence-
        accuracy.md), and so do all rows of head dimensions below 19. BF16 outputs are formed by one rounding.
        "unbiased_paper" is arXiv:2510.04212 with beta = 2 and epsilon = 1e-3. Its weights underflow if a repeated
        maximum is beyond 17 nats. It warns of rows lost in this way.
    overflow : str
        The result of FP16 beyond 65504: "inf", or "saturate" (Ascend 310P and 910A).
    accumulate : str
        "fp32" or "fp16". With "fp16" the output between blocks is kept in FP16; unless recovery="exact", the row
        statistics m, l and F_j are too (then recovery="paper" is Algorithm 1 to the letter).
        The Triton kernels keep exact scores and outputs in FP32, so there "fp16" changes only recovery="paper".
    batch_invariant : bool
        True gives a sequence the same bits, whatever it is batched with; False (default) may change them by rounding.
        The sequence is a batch entry with its mask, or the queries and keys of a packed or paged sequence. It must be
        attended to by the same function, on the same kind of device. docs/batch-invariance.md has the cost and limits.

    Raises
    ------
    ValueError
        A value is not one of the above. The message names the attribute and the value.

    Examples
    --------
    >>> published = pasa.PasaConfig(recovery="paper", accumulate="fp16")
    >>> pasa.PasaConfig(precision="fp8")
    Traceback (most recent call last):
    ValueError: precision='fp8' is not one of (...)
    """
