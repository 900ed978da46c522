"""A decoder of GPT-2 small's shape, trained in BF16 on a GPU with several attentions, a step of each in turn.

All start from the same weights and see the same batches; master weights are FP32, the rest runs under autocast. In
every `SAMPLE_EVERY`th step each is compared with FP32 attention: the error of delta from the same dO, the gradients of
W_Q from the same weights and batch, and rows with repeated maxima, counted in one sequence.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pasa import PasaConfig, attention
from pasa.eval.kit import output
from pasa.eval.kit.device import describe
from pasa.eval.kit.experiment import Experiment
from pasa.eval.research.rounding_training import report
from pasa.eval.research.rounding_training.model import (
    GPT2_SMALL,
    Decoder,
    Shape,
    batch,
    provoke,
    spectral_norms,
    token_losses,
)
from pasa.eval.research.rounding_training.sums import ErrorSums, interval
from pasa.eval.research.rounding_training.training import BETAS, CLIP, HELD_OUT_SHARE, RATE, as_bytes, backward
from pasa.ops.attention.spec.repeated_maxima import repeats

NOTE = (
    "Kernels on the device named here; FP32 attention is torch's matmuls and softmax. pasa's own backward pass forms "
    "delta of P and dP: delta's error is there what rowsum(dO * O) would have, and reaches no gradient"
)
TITLES = {
    "flash": "torch's flash attention",
    "flash-unbiased": "pasa's output, leaning rows drawn, in flash's backward pass",
    "safe": "pasa, nearest",
    "unbiased": "pasa, leaning rows drawn",
}
BACKENDS = {"cuda": "triton", "cpu": "reference"}
BATCH, HELD_OUT = 16, 64  # windows of a step and of the test, which reads them in batches
WARM = 100  # steps of linear warm-up; the rate is constant then, since the time decides on the number of steps
SAMPLE_EVERY, KEPT_EVERY = 20, 5  # steps between two samples, and between two points of the stored loss


class Probe:
    """Attention of one arm. While `samples` is a list, every layer adds a sample to it."""

    def __init__(self, arm: str, device: torch.device) -> None:
        self.arm, self.backend = arm, BACKENDS[device.type]
        self.exact = False  # FP32 attention instead
        self.samples: list[dict[str, Any]] | None = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend causally."""
        if self.exact:
            return exact_attention(q, k, v)
        if self.arm == "flash":
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.arm == "flash-unbiased":
            out = FlashBackward.apply(q, k, v, self.backend)  # type: ignore[no-untyped-call]
        else:
            out = attention(q, k, v, is_causal=True, config=PasaConfig(softmax=self.arm), backend=self.backend)
        if self.samples is not None and out.requires_grad:
            self._sample(self.samples, q, k, v, out)
        return out

    @staticmethod
    @torch.no_grad()
    def _sample(samples: list[dict[str, Any]], q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        right = exact_attention(q, k, v)
        near, rounded = tied_rows(q[0], k[0])
        error = (out.float() - right)[0] * right[0].sign()
        rows = near.expand_as(error)
        sample: dict[str, Any] = {"tied": near.float().mean(), "tied_bf16": rounded.float().mean()}
        sample["output_bias"] = error[rows].sum() / right[0].abs()[rows].sum().clamp(min=1e-30)
        samples.append(sample)
        error, size = out.detach().float() - right, right

        def note(grad: Tensor) -> None:
            sample["delta_error"] = (grad.float() * error).sum((0, 2, 3))
            sample["delta_size"] = (grad.float() * size).sum(-1).abs().sum((0, 2))

        out.register_hook(note)


class FlashBackward(torch.autograd.Function):
    """Our forward pass, whose output torch's flash backward pass then takes delta = rowsum(dO * O) from.

    Our own backward pass sums delta anew from P and dP, so that no rounding of O can reach a gradient.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, backend: str) -> Tensor:
        """Attend causally in BF16; torch's forward pass runs as well, for all else that its backward pass asks for."""
        out = attention(q, k, v, is_causal=True, config=PasaConfig(softmax="unbiased"), backend=backend)
        where = "_for_cpu" if q.device.type == "cpu" else ""
        names = [f"_scaled_dot_product_flash_attention{where}{direction}" for direction in ("", "_backward")]
        flash, ctx.flash_backward = (getattr(torch.ops.aten, name) for name in names)
        _, *lse_and_sizes = flash(q, k, v, 0.0, True)  # dropout, causal
        ctx.lse_and_sizes, ctx.seeds = lse_and_sizes[:5], lse_and_sizes[5:7]  # a CPU has the first of these alone
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return dQ, dK, dV by torch's kernels."""
        gradients = ctx.flash_backward(grads[0], *ctx.saved_tensors, *ctx.lse_and_sizes, 0.0, True, *ctx.seeds)
        return (*gradients, None)


def exact_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return FP32 attention of inputs of any dtype."""
    with torch.autocast(q.device.type, enabled=False), sdpa_kernel(SDPBackend.MATH):
        return nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)


def tied_rows(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows (H, S, 1) of q, k (H, S, D) whose maximum nearly repeats, in FP32 scores and in BF16 ones."""
    with torch.autocast(q.device.type, enabled=False):
        hidden = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)
        scores = (q.float() @ k.float().mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
    both = (scores, scores.bfloat16().float())
    near, rounded = (repeats(each, each.amax(-1, keepdim=True)) for each in both)
    return near, rounded


class Runner:
    """Model, optimizer and samples of one arm."""

    def __init__(self, arm: str, shape: Shape, seed: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(2 * seed)
        self.probe = Probe(arm, device)
        model = Decoder(shape, self.probe, generator)
        provoke(model, generator)
        self.model, self.device = model.to(device), device
        self.failed_step: int | None = None
        fused = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, weight_decay=0.0, fused=fused)
        self.losses: list[float] = []
        self.samples: list[dict[str, Tensor]] = []  # means over rows, (layers,)
        self.sums = ErrorSums()
        self.errors: list[float] = []

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        """Take one step; sample every `SAMPLE_EVERY`."""
        number = len(self.losses)
        sampled = number % SAMPLE_EVERY == 0
        if sampled:
            exact = self._exact_gradients(tokens, targets)
            self.probe.samples = []
        loss = backward(self.model, tokens, targets, autocast=True)
        if sampled:
            self._compare(exact)
        self.losses.append(loss)
        if not math.isfinite(loss):
            self.failed_step = number
            return
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.param_groups[0]["lr"] = RATE * min(1.0, (number + 1) / WARM)
        self.optimizer.step()

    def _gradients(self) -> Tensor:
        """Return the gradients of W_Q, (layers, heads, D, width)."""
        grads = [(block.query.weight.grad, block.heads) for block in self.model.blocks]
        return torch.stack([grad.unflatten(0, (heads, -1)) for grad, heads in grads if grad is not None])

    def _exact_gradients(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.probe.exact = True
        backward(self.model, tokens, targets, autocast=True)
        self.probe.exact = False
        return self._gradients()

    def _compare(self, exact: Tensor) -> None:
        """Add the samples of the step that has been done, with the gradients of W_Q that FP32 attention gives."""
        samples, self.probe.samples = self.probe.samples or [], None
        sampled = {name: torch.stack([each[name] for each in samples]) for name in samples[0]}
        self.sums.add_delta(sampled.pop("delta_error"), sampled.pop("delta_size"))
        self.samples.append({name: values.cpu() for name, values in sampled.items()})
        error = self._gradients() - exact
        self.errors.append(float(error.norm() / exact.norm()))
        self.sums.add_weight(error, exact)

    @torch.no_grad()
    def held_out(self, text: Tensor, shape: Shape) -> Tensor:
        """Return the mean loss of each of `HELD_OUT` windows, the same for every arm."""
        generator, losses = torch.Generator().manual_seed(0), []
        for _ in range(HELD_OUT // BATCH):
            tokens, targets = (each.to(self.device) for each in batch(text, BATCH, shape.context, generator))
            with torch.autocast(self.device.type, torch.bfloat16):
                losses.append(token_losses(self.model(tokens), targets).mean(1).float().cpu())
        return torch.cat(losses)

    def record(self) -> dict[str, Any]:
        """Return the stored record of the run, without the held-out loss."""
        column = {name: torch.stack([each[name] for each in self.samples]) for name in self.samples[0]}
        return {
            "steps": len(self.losses),
            "failed_step": self.failed_step,
            "samples": len(self.samples),
            "tied": float(column["tied"].mean()),
            "tied_bf16": float(column["tied_bf16"].mean()),
            **interval("output_bias", column["output_bias"].mean(1)),
            "gradient_errors": self.errors,
            **self.sums.summary(),
            "norms": spectral_norms(self.model).tolist(),
            "curves": {
                "loss": self.losses[::KEPT_EVERY],
                "tied": column["tied"].mean(1).tolist(),
                "accumulated": self.sums.curve(),
            },
        }


def run_training_gpu(
    text: Tensor,
    seconds: float,
    *,
    source: str,
    arms: Sequence[str] = tuple(TITLES),
    seed: int = 0,
    shape: Shape = GPT2_SMALL,
    device: str = "cuda",
    progress: output.Report | None = None,
) -> dict[str, Any]:
    """Train until the time is up; every arm has done equally many steps then.

    Parameters
    ----------
    text : Tensor (n,) of uint8
        Without the byte 0. Its last tenth is held out.
    seconds : float
        Of training; compiling kernels counts, the test of a few seconds at the end does not.
    source : str
        What the text is, for the record.
    arms : sequence of str
        Of `TITLES`.
    device : str
        "cuda", or "cpu" for a trial.

    Returns
    -------
    dict
        JSON-able: ``records`` (one for each arm), ``settings``, ``environment``.
    """
    where, cut = torch.device(device), int(len(text) * (1 - HELD_OUT_SHARE))
    runners = [Runner(arm, shape, seed, where) for arm in arms]
    begun = time.perf_counter()
    batches, done = torch.Generator().manual_seed(2 * seed + 1), 0
    while (spent := time.perf_counter() - begun) < seconds:
        if progress:
            progress(int(spent), int(seconds), f"step {done}")
        tokens, targets = (each.to(where) for each in batch(text[:cut], BATCH, shape.context, batches))
        for runner in runners:
            if runner.failed_step is None:
                runner.step(tokens, targets)
        done += 1
    records, first = [], None
    for runner in runners:
        losses = runner.held_out(text[cut:], shape)
        first = losses if first is None else first
        gap = {} if first is losses else interval("gap", losses - first)
        records.append({"arm": runner.probe.arm, "held_out": float(losses.mean()), **gap, **runner.record()})
    settings = {
        "steps": done,
        "seed": seed,
        "batch": BATCH,
        "warm_up": WARM,
        "sample_every": SAMPLE_EVERY,
        "kept_every": KEPT_EVERY,
        "shape": vars(shape),
        "parameters": sum(each.numel() for each in runners[0].model.parameters()),
        "text": f"{source}, {cut} bytes to train on",
    }
    return {
        "schema": 1,
        "experiment": "training-gpu",
        "note": NOTE,
        "gate": {"passed": all(each["failed_step"] is None for each in records if each["arm"] != "flash")},
        "environment": describe(where),
        "duration_s": round(time.perf_counter() - begun, 1),
        "settings": settings,
        "arms": {arm: {"title": TITLES[arm]} for arm in arms},
        "records": records,
    }


def run(
    seconds: Annotated[float, "Seconds to train."] = 240.0,
    text: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="UTF-8 file of some MB.")] = None,
    progress: output.Report | None = None,
) -> dict[str, Any]:
    """Train a model of GPT-2 small's shape on a GPU, on the bytes of a text."""
    if not torch.cuda.is_available():
        raise NotImplementedError("--gpt2-small trains on a CUDA device, and torch finds none")
    if text is None:
        raise ValueError("--gpt2-small needs a text to train on: --text FILE, some MB of UTF-8")
    return run_training_gpu(as_bytes(output.read_text(text)), seconds, source=text.name, progress=progress)


EXPERIMENT = Experiment(name="gpt2-small", run=run, report=report.report, title=report.TITLE)
