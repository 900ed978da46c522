"""Calls whose time is taken with and without unbiased rounding, what they attend to, and the ratios to reach."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from pasa.eval.accuracy.rmse.cases import generator
from pasa.eval.speed.cases import Inputs, SpeedCase, select_cases

Data = Literal["random", "tied"]
DATA: tuple[Data, ...] = get_args(Data)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
TIED, TRIFLE, ELSE = 9.5, 0.5, -76.0  # scores: of two keys, of the third at the most, and of all others: no weight


@dataclass(frozen=True)
class Target:
    """Largest ratio of the times, unbiased over safe; `strict`: the ratio has to be below it."""

    ratio: float
    strict: bool = False

    def met(self, ratio: float) -> bool:
        """Whether a ratio is within it."""
        return ratio < self.ratio if self.strict else ratio <= self.ratio

    def __str__(self) -> str:
        return f"{'<' if self.strict else '≤'} {self.ratio:.2f}"


TARGETS: dict[Data, Target] = {"random": Target(1.03, strict=True), "tied": Target(1.08)}
BOTH = select_cases(("paper", "qwen2-8k"))  # in BF16 as well: a compilation each
CASES: tuple[tuple[SpeedCase, str], ...] = (
    *((case, fmt) for case in BOTH for fmt in DTYPES),
    *((case, "fp16") for case in select_cases(("qwen2-8k-full", "svd", "decode-1x32k"))),
    (SpeedCase("short", 9216, 5, 5, 25, 25, 64), "fp16"),  # temporal attention of a video model: 25 frames
)


def make_inputs(case: SpeedCase, data: Data, fmt: str, device: torch.device) -> Inputs:
    """N(0, 1), or rows that all repeat their maximum; the same on every call on one kind of device."""
    given = case.inputs(device) if data == "random" else _tied(case, device)
    q, k, v = (x.to(DTYPES[fmt]) for x in (given.q, given.k, given.v))
    return replace(given, q=q, k=k, v=v)


def _tied(case: SpeedCase, device: torch.device) -> Inputs:
    """The first two keys share each row, their V uniform in [1, 2); the third, 9 to 9.5 nats below them, has V = 2.5.

    O is then (v_0 + v_1) / 2 and a positive trifle that differs from row to row: nearest rounding raises every tie.
    """
    source = torch.Generator(device).manual_seed(generator(0, case.name, "tied").initial_seed())
    root = math.sqrt(case.dim)  # the kernels' scale is its inverse
    q = torch.zeros(case.batch, case.heads, case.rows, case.dim, device=device)
    k = torch.zeros(case.batch, case.kv_heads, case.keys, case.dim, device=device)
    v = torch.full_like(k, 2.5)
    q[..., 0] = TIED
    q[..., 1] = TRIFLE * torch.rand(q.shape[:-1], generator=source, device=device)
    k[..., 0] = ELSE / TIED * root
    k[:, :, :2, 0] = root
    k[:, :, 2, 0], k[:, :, 2, 1] = 0.0, root
    v[:, :, :2] = 1 + torch.rand(*v.shape[:2], 2, case.dim, generator=source, device=device)
    return Inputs(q, k, v, case.causal, case.decode)
