"""The spectral norm of W_Q^T W_K by power iteration, without forming it and without expanding grouped keys.

Section 4 and appendices E, F of S. M. Emadi, "Rank-Aware Spectral Bounds on Attention Logits for Stable Low-Precision
Training". The vectors persist from call to call: 5 steps the first time, then 1, which follows weights that change
slowly. The estimate approaches the norm from below; :func:`pasa.geometry.interaction_norm` is the certified bound.
"""

from __future__ import annotations

import torch
from torch import Tensor

COLD_STEPS, WARM_STEPS = 5, 1


class PowerIteration:
    """Follows the spectral norm of one layer's query-key interaction from call to call.

    Parameters
    ----------
    heads, kv_heads : int
        Hq, a multiple of Hkv.
    per_head : bool, default True
        One norm for each query head, which is what a score depends on. False: the norm of the sum over heads, which
        the paper uses for a layer. That one is no bound on the scores of any head: heads may cancel in the sum.
    generator : torch.Generator, optional
        For the first vectors; on the device of the weights.
    """

    def __init__(
        self, heads: int, kv_heads: int, *, per_head: bool = True, generator: torch.Generator | None = None
    ) -> None:
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"PowerIteration: heads={heads} is not a multiple of kv_heads={kv_heads}")
        self.heads, self.kv_heads, self.per_head, self.generator = heads, kv_heads, per_head, generator
        self.state: tuple[Tensor, Tensor] | None = None  # v: (rows, d), and (rows, 1) for the biases; Hq rows or one

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
            As of `torch.nn.Linear`; read where they are. In 16 bits the vectors are rounded to 16 bits before each
            product, which is good for two to three digits of the norm.
        q_bias, k_bias : Tensor (Hq * D,), (Hkv * D,), optional
            A last column of the weights: the norm is then that of the augmented matrices [W, b].
        steps : int, optional
            5 in the first call and 1 in the others.

        Returns
        -------
        Tensor (Hq,) or (1,), FP32 (FP64 for FP64 weights)
        """
        q = _Matrix(q_weight.unflatten(0, (self.heads, -1)), q_bias, self.per_head)
        k = _Matrix(k_weight.unflatten(0, (self.kv_heads, -1)), k_bias, self.per_head)
        if steps is None:
            steps = COLD_STEPS if self.state is None else WARM_STEPS
        v, v_bias = self._start(q_weight) if self.state is None else self.state
        for _ in range(steps):
            u, u_bias, norm = _unit(*q.backward(self._to_queries(k.forward(v, v_bias))))
            v, v_bias, _ = _unit(*k.backward(self._to_keys(q.forward(u, u_bias))))
        self.state = v, v_bias
        return norm[:, 0]

    def _start(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Random unit vectors."""
        dtype = torch.promote_types(weight.dtype, torch.float32)
        shape = (self.heads if self.per_head else 1, weight.shape[1] + 1)
        start = torch.randn(shape, generator=self.generator, dtype=dtype, device=weight.device)
        v, v_bias, _ = _unit(start[:, :-1], start[:, -1:])
        return v, v_bias

    def _to_queries(self, z: Tensor) -> Tensor:
        """RepeatBlocks of (Hkv, D) vectors; per head there is a vector for each query head already."""
        return z if self.per_head else z.repeat_interleave(self.heads // self.kv_heads, 0)

    def _to_keys(self, z: Tensor) -> Tensor:
        """SumGroups."""
        return z if self.per_head else z.unflatten(0, (self.kv_heads, -1)).sum(1)


class _Matrix:
    """[W, b] as products with vectors, (H, D, d + 1); per head each matrix meets the vectors of its own query heads."""

    def __init__(self, weight: Tensor, bias: Tensor | None, per_head: bool) -> None:
        self.weight = weight if per_head else weight.flatten(0, 1)[None]
        self.bias = None if bias is None else bias.view(self.weight.shape[0], 1, -1)
        self.dim = weight.shape[1]

    def forward(self, v: Tensor, v_bias: Tensor) -> Tensor:
        """(rows, d) -> (rows, D), or (1, d) -> (H, D)."""
        count = self.weight.shape[0]
        z = (v.view(count, -1, v.shape[-1]).to(self.weight.dtype) @ self.weight.mT).to(v.dtype)
        if self.bias is not None:
            z = z + v_bias.view(count, -1, 1) * self.bias.to(v.dtype)
        return z.view(-1, self.dim)

    def backward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, D) -> (rows, d), or (H, D) -> (1, d); and the product with the bias."""
        count, _, dim = self.weight.shape
        z = z.reshape(count, -1, self.weight.shape[1])
        v = (z.to(self.weight.dtype) @ self.weight).to(z.dtype).reshape(-1, dim)
        v_bias = z.new_zeros(len(v), 1) if self.bias is None else (z * self.bias.to(z.dtype)).sum(-1).view(-1, 1)
        return v, v_bias


def _unit(v: Tensor, v_bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The augmented vector over its length, and the length, (rows, 1)."""
    length = torch.hypot(v.norm(dim=-1, keepdim=True), v_bias)
    divisor = length.clamp(min=torch.finfo(length.dtype).tiny)
    return v / divisor, v_bias / divisor, length
