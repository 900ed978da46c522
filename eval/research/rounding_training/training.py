"""Does the bias of rounding add up? A small decoder trained with each arm's attention, from the same seeds.

What is followed: the sum over steps of delta's error, delta_lp - delta_hp (arXiv:2510.04212, section 3.3.1), the sum of
what it puts on the gradient of W_Q, and what might come of it: spectral norms of W_Q and the loss.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from pasa.eval.kit import output
from pasa.eval.kit.embedded_model import TEXTS, find_essays
from pasa.eval.kit.experiment import Experiment
from pasa.eval.research.rounding_training import report
from pasa.eval.research.rounding_training.attention import ARMS, Arm, Record, RoundedAttention
from pasa.eval.research.rounding_training.model import (
    SINK,
    SMALL,
    Decoder,
    Shape,
    batch,
    provoke,
    spectral_norms,
    token_losses,
)
from pasa.eval.research.rounding_training.sums import ErrorSums, interval

NOTE = "emulated BF16 and FP16 attention in FP32 on a CPU; the rest of the model is FP32"
STEPS, SEEDS = 300, (0, 1)
BATCH = 4
HELD_OUT, HELD_OUT_SHARE = 64, 0.1  # windows; the end of the text
# AdamW, clipping and the cosine as in section 3.1 of the paper, with a tenth of the steps to warm up.
RATE, LAST_RATE, BETAS, CLIP, WARM = 1e-3, 1e-5, (0.9, 0.95), 1.0, 0.1
GRADIENT_EVERY = 50  # steps between two comparisons of all gradients with those of FP32 attention
KEPT_EVERY = 10  # of the steps, points of the curves that are stored
REPEATED = 5  # steps that are run twice
LEAST_TIED = 0.05  # share of rows, in every rounded arm; with fewer there is nothing to see


class Attention:
    """An arm, layer by layer, with a record of the last step."""

    def __init__(self, arm: Arm, layers: int) -> None:
        self.arm, self.records = arm, [Record() for _ in range(layers)]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend causally."""
        out: Tensor = RoundedAttention.apply(q, k, v, self.arm, self.records[layer])  # type: ignore[no-untyped-call]
        return out


class Sums(ErrorSums):
    """Sums over the steps of one run, and its curves."""

    def __init__(self) -> None:
        super().__init__()
        self.curves: dict[str, list[float]] = {name: [] for name in ("loss", "tied", "lost", "output_bias")}
        self.norms: list[float] = []  # largest of W_Q, every `KEPT_EVERY`th step
        self.gradient_errors: list[float] = []

    def add(self, loss: float, model: Decoder, records: Sequence[Record]) -> None:
        """Add one step."""
        pairs = list(zip(records, model.blocks, strict=True))

        def of_weight(name: str) -> Tensor:
            """Return the gradient of each head's W_Q for one of q (B, H, S, D) and its input (B, S, width)."""
            parts = [torch.einsum("bhsd,bsw->hdw", getattr(each, name), block.features) for each, block in pairs]
            return torch.stack(parts)

        self.add_delta(*(torch.stack([getattr(r, name) for r in records]) for name in ("delta_error", "delta_size")))
        self.add_weight(of_weight("query_error"), of_weight("query_gradient"))
        if len(self.curves["loss"]) % KEPT_EVERY == 0:
            self.norms.append(float(spectral_norms(model).max()))
        means = {name: sum(getattr(r, name) for r in records) / len(records) for name in ("tied", "output_bias")}
        for name, value in {"loss": loss, "lost": sum(each.lost for each in records), **means}.items():
            self.curves[name].append(value)

    def kept_curves(self) -> dict[str, list[float]]:
        """Return the points of the curves that are stored."""
        every = self.curves | {"accumulated": self.curve()}
        return {name: values[::KEPT_EVERY] for name, values in every.items()} | {"norm": self.norms}


def read_text() -> Tensor:
    """Return all essays of the installed text distribution, as bytes (n,), in order of their names."""
    return as_bytes("\n\n".join(path.read_text(encoding="utf-8") for path in find_essays().values()))


def as_bytes(text: str) -> Tensor:
    """Return UTF-8, (n,) of uint8; ValueError where the text holds the byte that stands for a sink."""
    encoded = bytearray(text.encode())
    if SINK in encoded:
        raise ValueError(f"the text holds the byte {SINK} at {encoded.index(SINK)}")
    return torch.frombuffer(encoded, dtype=torch.uint8)


def learning_rate(step: int, steps: int) -> float:
    """Return the rate of a linear warm-up, then of a cosine down to `LAST_RATE`."""
    warm = WARM * steps
    if step < warm:
        return RATE * (step + 1) / warm
    return LAST_RATE + (RATE - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


def train(
    arm: Arm, text: Tensor, seed: int, steps: int, shape: Shape = SMALL, stop_after: int | None = None
) -> dict[str, Any]:
    """Train from the weights and through the batches of a seed.

    Parameters
    ----------
    text : Tensor (n,) of uint8
        Training text.
    steps : int
        For which the learning rate is planned.
    stop_after : int, optional
        End after fewer of them. A run also ends where its loss is not finite.

    Returns
    -------
    dict
        ``model``, ``sums`` (:class:`Sums`) and ``failed_step`` (None: none).
    """
    weights, batches = (torch.Generator().manual_seed(2 * seed + stream) for stream in range(2))
    attention = Attention(arm, shape.layers)
    model = Decoder(shape, attention, weights)
    provoke(model, weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, weight_decay=0.0)
    sums, failed = Sums(), None
    for step in range(min(steps, stop_after or steps)):
        tokens, targets = batch(text, BATCH, shape.context, batches)
        loss = backward(model, tokens, targets)
        sums.add(loss, model, attention.records)
        if not math.isfinite(loss):
            failed = step
            break
        if step % GRADIENT_EVERY == 0:
            sums.gradient_errors.append(gradient_error(model, attention, tokens, targets))
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps)
        optimizer.step()
    return {"model": model, "sums": sums, "failed_step": failed}


def backward(model: Decoder, tokens: Tensor, targets: Tensor, *, autocast: bool = False) -> float:
    """Replace the gradients by those of the mean loss and return the loss. autocast: forward pass in BF16."""
    model.zero_grad()
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
        loss = token_losses(model(tokens), targets).mean()
    loss.backward()
    return loss.item()


def gradient_error(model: Decoder, attention: Attention, tokens: Tensor, targets: Tensor) -> float:
    """Return the relative error of all gradients against FP32 attention; leaves the gradients as they were."""
    kept = {parameter: parameter.grad for parameter in model.parameters() if parameter.grad is not None}
    arm, attention.arm = attention.arm, ARMS[0]
    backward(model, tokens, targets)
    attention.arm = arm
    pairs = [(grad, parameter.grad) for parameter, grad in kept.items() if parameter.grad is not None]
    error, size = (
        sum(float(x.square().sum()) for x in xs) for xs in ([a - b for a, b in pairs], [b for _, b in pairs])
    )
    for parameter, grad in kept.items():
        parameter.grad = grad
    return math.sqrt(error / size)


@torch.no_grad()
def held_out_losses(model: Decoder, text: Tensor, shape: Shape = SMALL) -> Tensor:
    """Return the mean loss of each of the `HELD_OUT` windows, which are the same for every arm and seed."""
    tokens, targets = batch(text, HELD_OUT, shape.context, torch.Generator().manual_seed(0))
    return token_losses(model(tokens), targets).mean(1)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread, so that a sum has one order, whatever the machine's load or settings."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def run_training(
    *,
    steps: int = STEPS,
    seeds: Sequence[int] = SEEDS,
    arms: Sequence[Arm] = ARMS,
    progress: output.Report | None = None,
) -> dict[str, Any]:
    """Train every arm from every seed, on one thread.

    Returns
    -------
    dict
        JSON-able: ``records`` (one for each seed and arm), ``gate``, ``settings``, ``environment``.

    Raises
    ------
    FileNotFoundError
        Without the text; the message is the command that installs it.
    ValueError
        For fewer steps than are run twice.
    """
    if steps < REPEATED:
        raise ValueError(f"steps={steps} is below {REPEATED}, the number that is run twice")
    begun, text = time.perf_counter(), read_text()
    cut = int(len(text) * (1 - HELD_OUT_SHARE))
    records: list[dict[str, Any]] = []
    with one_thread():
        environment = output.environment()
        for seed in seeds:
            plain = None
            for arm in arms:
                if progress:
                    progress(len(records), len(seeds) * len(arms), f"{arm.title}, seed {seed}")
                run = train(arm, text[:cut], seed, steps)
                losses = held_out_losses(run["model"], text[cut:]) if run["failed_step"] is None else None
                plain = losses if arm.name == "fp32" else plain
                records.append({"seed": seed, "arm": arm.name, **describe(run, losses, plain)})
        again = train(arms[-1], text[:cut], seeds[-1], steps, stop_after=REPEATED)
    reproduced = again["sums"].curves["loss"] == run["sums"].curves["loss"][:REPEATED]
    return {
        "schema": 1,
        "experiment": "training",
        "note": NOTE,
        "environment": environment,
        "duration_s": round(time.perf_counter() - begun, 1),
        "settings": {
            "steps": steps,
            "seeds": list(seeds),
            "batch": BATCH,
            "kept_every": KEPT_EVERY,
            "shape": vars(SMALL),
            "text": f"{TEXTS[0]} {TEXTS[1]}, {cut} bytes to train on",
        },
        "arms": {arm.name: vars(arm) for arm in arms},
        "gate": judge(records, reproduced),
        "records": records,
    }


def describe(run: dict[str, Any], losses: Tensor | None, plain: Tensor | None) -> dict[str, Any]:
    """Return a run as it is stored. plain: held-out losses of the FP32 arm of this seed."""
    sums: Sums = run["sums"]
    steps = len(sums.curves["loss"])
    record: dict[str, Any] = {
        "steps": steps,
        "failed_step": run["failed_step"],
        "digest": digest(sums, run["model"]),
        "held_out": None if losses is None else float(losses.mean()),
        "tied": sum(sums.curves["tied"]) / steps,
        "lost": sum(sums.curves["lost"]),
        "lost_in_last_step": sums.curves["lost"][-1],
        **interval("output_bias", torch.tensor(sums.curves["output_bias"])),
        "gradient_errors": sums.gradient_errors,
        "norms": spectral_norms(run["model"]).tolist(),
        **sums.summary(),
    }
    if losses is not None and plain is not None and losses is not plain:
        record |= interval("gap", losses - plain)
    return {**record, "curves": sums.kept_curves()}


def digest(sums: Sums, model: Decoder) -> str:
    """Return a digest of all losses and of the last weights: equal for runs that are equal bit for bit."""
    state = hashlib.sha256(torch.tensor(sums.curves["loss"]).numpy().tobytes())
    for parameter in model.parameters():
        state.update(parameter.detach().numpy().tobytes())
    return state.hexdigest()[:16]


def judge(records: Sequence[dict[str, Any]], reproduced: bool) -> dict[str, Any]:
    """Check what must hold whatever the losses are: nothing here says that an arm trains better."""
    rounded = [each for each in records if each["arm"] != "fp32"]
    failed = [each for each in records if each["failed_step"] is not None]
    checks = {
        "reproducible": reproduced,
        "repeated_maxima": all(each["tied"] >= LEAST_TIED for each in rounded),
        "ours_finite": not [each for each in failed if "published" not in each["arm"]],
        "failures_are_underflow": all(each["lost_in_last_step"] > 0 for each in failed),
    }
    return {"passed": all(checks.values()), **checks}


def run(
    steps: Annotated[int, "Training steps of each run."] = STEPS,
    seeds: Annotated[Sequence[int], "Seeds of weights and batches."] = SEEDS,
    progress: output.Report | None = None,
) -> dict[str, Any]:
    """Train a decoder with rounded attention, emulated: what its errors add up to; exit 1 if ours is not finite."""
    return run_training(steps=steps, seeds=seeds, progress=progress)


EXPERIMENT = Experiment(name="training", run=run, report=report.report, title=report.TITLE)
