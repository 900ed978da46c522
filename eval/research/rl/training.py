"""Group-relative policy optimisation (GRPO, arXiv:2402.03300, without its KL term) of a toy reward in half precision.

The half-precision model samples and computes gradients, with one attention for rollout and one for training. Master
weights and the optimizer are FP32. The loss is scaled by torch's GradScaler, which skips a step whose gradients are
not finite.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pasa.eval.research.rl.rollout import PAGED, sample

RATE, CLIP, NORM = 5e-5, 0.2, 1.0  # AdamW's rate; of the importance ratio; of the gradient
FIRST_SCALE = 2.0**10  # of the loss; GradScaler's own 2^16 begins with steps that it skips to find a scale


@dataclass(frozen=True)
class Arm:
    """State the arithmetic of one run: dtype, and the attentions of rollout and training."""

    title: str
    dtype: torch.dtype
    rollout: str
    training: str


ARMS = {
    "fp16-pasa": Arm("FP16, PASA: paged rollout, PASA in training", torch.float16, PAGED, "pasa"),
    "bf16-sdpa": Arm("BF16, SDPA in both", torch.bfloat16, "sdpa", "sdpa"),
    "fp16-eager": Arm("FP16, eager attention in both", torch.float16, "eager", "eager"),
}


class Policy:
    """Hold a half-precision model and its FP32 master weights."""

    def __init__(self, model: Any, arm: Arm, device: torch.device, rate: float = RATE) -> None:
        self.arm, self.device = arm, device
        self.model = copy.deepcopy(model).to(device, arm.dtype)
        if device.type == "cpu":
            accumulate_in_fp32(self.model)
        self.weights = [*self.model.parameters()]
        self.masters = [nn.Parameter(x.detach().float()) for x in self.weights]
        self.optimizer = torch.optim.AdamW(self.masters, lr=rate, weight_decay=0.0)
        self.scaler = torch.amp.GradScaler(device.type, init_scale=FIRST_SCALE)

    def log_probs(self, tokens: Tensor, prompt: int) -> Tensor:
        """Return the trainer's log-probabilities (B, new, vocabulary) of all tokens behind the prompt, in FP32."""
        self.model.set_attn_implementation(self.arm.training)
        logits = self.model(tokens, use_cache=False).logits[:, prompt - 1 : -1]
        return torch.log_softmax(logits.float(), -1)

    def update(self, loss: Tensor) -> bool:
        """Take a step unless gradients are not finite; return whether it was taken."""
        self.scaler.scale(loss).backward()
        for master, weight in zip(self.masters, self.weights, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.masters, NORM)
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for master, weight in zip(self.masters, self.weights, strict=True):
                weight.copy_(master)
        return self.scaler.get_scale() >= before


def accumulate_in_fp32(model: nn.Module) -> None:
    """Let linear layers multiply in FP32 and round once, as a GPU's matrix units do, because FP16 is slow on a CPU."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.forward = _linear.__get__(module)  # type: ignore[method-assign]


def _linear(self: nn.Linear, x: Tensor) -> Tensor:
    bias = None if self.bias is None else self.bias.float()
    return nn.functional.linear(x.float(), self.weight.float(), bias).to(x.dtype)


def rewards(tokens: Tensor, good: Tensor) -> Tensor:
    """Return the share of the new tokens (B, new) that are among the good ones (vocabulary,)."""
    return good[tokens].float().mean(1)


def objective(new: Tensor, old: Tensor, reward: Tensor, group: int) -> Tensor:
    """Return the loss of GRPO for log-probabilities (B, n) of sampled tokens, by trainer and rollout.

    B consists of groups of completions of one prompt. Advantages are rewards less their group's mean, over its
    standard deviation.
    """
    grouped = reward.unflatten(0, (-1, group))
    advantage = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
    advantage = advantage.flatten()[:, None]
    ratio = (new - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()


def divergence(rollout: Tensor, trainer: Tensor) -> float:
    """Return the mean KL divergence of the trainer's distributions from the rollout's, in nats a token, by FP64."""
    return float((rollout.double().exp() * (rollout.double() - trainer.double())).sum(-1).mean())


def train(
    policy: Policy, prompts: Sequence[Tensor], good: Tensor, steps: int, group: int, new: int, seed: int
) -> list[dict[str, Any]]:
    """Return a record of every step; a step is lost where logits are not finite, skipped where gradients are not."""
    draws = torch.Generator(policy.device).manual_seed(seed)
    return [
        step(policy, prompts[number % len(prompts)].to(policy.device), good, group, new, draws)
        for number in range(steps)
    ]


def step(policy: Policy, prompts: Tensor, good: Tensor, group: int, new: int, draws: torch.Generator) -> dict[str, Any]:
    """Sample `group` completions of each prompt (P, S), compare the two log-probabilities, and update."""
    lost = {"lost": True, "skipped": False, "reward": None, "kl": None, "largest": None}
    batch, length = prompts.repeat_interleave(group, 0), prompts.shape[1]
    done = sample(policy.model, batch, new, policy.arm.rollout, draws)
    if not done.finite:
        return lost
    behind = done.tokens[:, length:, None]
    trainer = policy.log_probs(done.tokens, length)
    if not bool(trainer.isfinite().all()):
        return lost
    rollout = torch.log_softmax(done.logits, -1)
    old, now = (x.gather(2, behind).squeeze(2) for x in (rollout, trainer))
    reward = rewards(behind.squeeze(2), good)
    mismatch = divergence(rollout, trainer.detach())
    loss = objective(now, old, reward, group)
    taken = policy.update(loss) and math.isfinite(loss.item())
    largest = float((now.detach() - old).abs().max())
    return {"lost": False, "skipped": not taken, "reward": float(reward.mean()), "kl": mismatch, "largest": largest}
