"""`PasaConfig`: which arithmetic attention runs in."""

from __future__ import annotations

from dataclasses import dataclass

from pasa.ops.attention.options import AttentionOptions


@dataclass(frozen=True)
class PasaConfig(AttentionOptions):
    """Arithmetic of an attention call; validates itself.

    Attributes
    ----------
    precision : str
        "pasa" (default), or a baseline: "fp32" (FP16 inputs and P, all else FP32), "partial" (Q K^T stored in FP16
        before scaling), "fp16" (everything FP16), "prescaled" (Q scaled before the product, stored in FP16),
        "smooth_k" ("partial" after the mean of K over the sequence is removed).
    recovery : str
        For "pasa": "exact" (default) or "paper" (arXiv:2503.01873, Algorithm 1). "paper" can overflow. Its log-sum-exp
        may be infinite, -inf even where a row has keys, and the output right: do not merge parts by it.
    beta : float, optional
        Share of the block mean that recovery="paper" removes, in [0, 1); solved for the rounded shifting matrix
        when None. recovery="exact" has none to set.
    block_q, block_k : int
        Rows and keys of a tile, 1 to 65536.
    softmax : str
        "safe"; "unbiased": rows whose weight two equal maxima share are rounded without one-sided error, of four and
        eight those whose values lie in one binade; rows of three, five, six and seven keep most of theirs (up to 0.06
        spacings; README, "Rounding without bias"), and so do all rows of head dims below 19. BF16 outputs by one
        rounding; or "unbiased_paper":
        arXiv:2510.04212 with beta = 2 and epsilon = 1e-3, whose weights underflow where a repeated maximum is beyond
        17 nats. It warns of rows lost so.
    overflow : str
        What FP16 does beyond 65504: "inf", or "saturate" (Ascend 310P and 910A).
    accumulate : str
        "fp32", or "fp16": the output between blocks is kept in FP16, and outside recovery="exact" the row
        statistics m, l and F_j as well (then recovery="paper" is Algorithm 1 to the letter).
        The Triton kernels keep exact scores and outputs in FP32: there "fp16" changes recovery="paper" alone.

    Raises
    ------
    ValueError
        For a value that is not one of the above, by name.

    Examples
    --------
    >>> published = pasa.PasaConfig(recovery="paper", accumulate="fp16")
    >>> pasa.PasaConfig(precision="fp8")
    Traceback (most recent call last):
    ValueError: precision='fp8' is not one of (...)
    """
