"""The spectral norm of W_Q^T W_K by power iteration, without forming the product or expanding grouped keys.

The method is that of section 4 and appendices E, F of S. M. Emadi, "Rank-Aware Spectral Bounds on Attention Logits for
Stable Low-Precision Training". The vectors persist from call to call: the first call makes 5 steps, later calls make 1,
which is enough to follow weights that change slowly. The estimate approaches the norm from below;
:func:`pasa.geometry.interaction_norm` is a certified upper bound.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pasa.ops.spectral.half_step import half_step

COLD_STEPS, WARM_STEPS = 5, 1


class PowerIteration:
    """An estimate of the spectral norm of one layer's query-key interaction, updated from call to call.

    Parameters
    ----------
    heads, kv_heads : int
        Hq, a multiple of Hkv.
    per_head : bool, default True
        True: one norm for each query head, on which the scores of the head depend. False: the norm of the sum over
        heads, which the paper uses for a layer. The latter bounds the scores of no head, because heads may cancel in
        the sum.
    generator : torch.Generator, optional
        Source of the first random vectors, on the device of the weights.
    """

    def __init__(
        self, heads: int, kv_heads: int, *, per_head: bool = True, generator: torch.Generator | None = None
    ) -> None:
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"PowerIteration: heads={heads} is not a multiple of kv_heads={kv_heads}")
        self.heads, self.kv_heads, self.per_head, self.generator = heads, kv_heads, per_head, generator
        self.state: Tensor | None = None  # W_Q u, stored instead of u: it is shorter, and u follows from it

    @torch.no_grad()
    def update(
        self,
        q_weight: Tensor,
        k_weight: Tensor,
        q_bias: Tensor | None = None,
        k_bias: Tensor | None = None,
        *,
        steps: int | None = None,
    ) -> Tensor:
        """Estimate the norm for these weights, and keep the vectors for the next call.

        Parameters
        ----------
        q_weight, k_weight : Tensor (Hq * D, d), (Hkv * D, d)
            Weights in the layout of `torch.nn.Linear`; they are not copied. With 16-bit weights the vectors are rounded
            to 16 bits before each product, so two to three digits of the norm are right.
        q_bias, k_bias : Tensor (Hq * D,), (Hkv * D,), optional
            Biases, used as a last column of the weights. The norm is then that of the augmented matrices [W, b].
        steps : int, optional
            Number of steps; by default 5 in the first call and 1 in later ones.

        Returns
        -------
        Tensor (Hq,) or (1,), FP32 (FP64 for FP64 weights)
        """
        if steps is None:
            steps = COLD_STEPS if self.state is None else WARM_STEPS
        if steps < 1:
            raise ValueError(f"PowerIteration.update: steps={steps} is below 1")
        q, q_last = self._matrices(q_weight, q_bias, self.heads)
        k, k_last = self._matrices(k_weight, k_bias, self.kv_heads)
        if self.state is None:
            self.state = self._start(q_weight)
        y = self.state
        for _ in range(steps):
            z, v_square = half_step(k, k_last, self._to_keys(y))
            z = self._to_queries(z)
            y, u_square = half_step(q, q_last, z)
            ratio = u_square.flatten() / v_square.flatten().clamp(min=torch.finfo(y.dtype).tiny)
            # |W_Qᵀ W_K v| of the unit vector v = W_Kᵀy / |W_Kᵀy|
            norm: Tensor = z.flatten(0, 1).norm(dim=-1) * ratio.sqrt()
        self.state.copy_(y)  # in place, so that each replay of a CUDA graph continues the iteration
        return norm

    def _matrices(self, weight: Tensor, bias: Tensor | None, heads: int) -> tuple[Tensor, Tensor | None]:
        """Return views of weight and bias: (H, D, d) and (H, D), or (1, H * D, d) and (1, H * D) for summed heads."""
        count = heads if self.per_head else 1
        return weight.unflatten(0, (count, -1)), None if bias is None else bias.unflatten(0, (count, -1))

    def _start(self, weight: Tensor) -> Tensor:
        """Return random first vectors: (Hq, 1, D), or (1, 1, Hq * D) for the sum of heads."""
        dtype = torch.promote_types(weight.dtype, torch.float32)
        count = self.heads if self.per_head else 1
        shape = count, 1, weight.shape[0] // count
        return torch.randn(shape, generator=self.generator, dtype=dtype, device=weight.device)

    def _to_keys(self, y: Tensor) -> Tensor:
        """Group rows by key head, one row for each of its query heads; summed heads: sum the group (SumGroups)."""
        if self.per_head:
            return y.view(self.kv_heads, self.heads // self.kv_heads, -1)
        return y.view(self.kv_heads, self.heads // self.kv_heads, -1).sum(1).view(1, 1, -1)

    def _to_queries(self, z: Tensor) -> Tensor:
        """Return rows by query head again; summed heads: repeat each key head's block (RepeatBlocks)."""
        if self.per_head:
            return z.view(self.heads, 1, -1)
        return z.view(self.kv_heads, -1).repeat_interleave(self.heads // self.kv_heads, 0).view(1, 1, -1)
