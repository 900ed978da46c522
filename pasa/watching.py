"""`watch`: count large and repeated scores of a patched model, layer by layer, while it runs."""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from pasa.keywords import hint_at_arguments
from pasa.ops import dispatch, operators
from pasa.ops.attention.call import NO_WINDOW
from pasa.ops.attention.spec.watch import FIELDS, STRIDE, sample
from pasa.patching import components_of
from pasa.patching.callbacks import BINDING, Callbacks, patched_modules, removed_modules
from pasa.patching.handle import first_names

ENOUGH_ROWS = 300  # sampled rows in which a count of 0 excludes a share of 1 % (95 % confidence, see `_doubt`)


@dataclass(frozen=True)
class LayerCounts:
    """Counts of rows and scores in the sampled query rows of one layer.

    Attributes
    ----------
    name : str
        Name of the module, as in the patch report.
    rows : int
        Sampled rows that see a key. All other counts are of these rows only.
    repeated : int
        Rows with more than one score within 1e-3 nats of the row's largest (arXiv:2510.04212, section 4.1).
    runaway : int
        Rows whose largest score exceeds the largest score of the first 128 keys by more than 8 nats. For such rows the
        exact recovery keeps tiles in FP32 (from 6 nats on); beyond 11 nats the GPU kernels compute them again.
        Tiles are not counted.
    scores : int
        Visible scores of the rows.
    saturated : int
        Scores with |q.k| > 65504, unscaled: plain FP16 attention stores them as infinity, or as 65504.
    """

    name: str
    rows: int
    repeated: int
    runaway: int
    scores: int
    saturated: int


@dataclass(frozen=True)
class WatchReport:
    """The counts of every watched layer, in the model's order.

    Attributes
    ----------
    layers : tuple of LayerCounts
    passed : int
        Number of query rows of all layers so far, sampled or not.
    """

    layers: tuple[LayerCounts, ...]
    passed: int

    @property
    def total(self) -> LayerCounts:
        """Return the sums over all layers, under the name "total"."""
        return LayerCounts("total", *(sum(getattr(layer, field) for layer in self.layers) for field in FIELDS))

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain containers, ready for JSON."""
        layers = [asdict(layer) for layer in self.layers]
        return {"stride": STRIDE, "passed": self.passed, "layers": layers, "total": asdict(self.total)}

    def __str__(self) -> str:
        table = [("layer", *FIELDS), *(tuple(map(str, vars(each).values())) for each in (*self.layers, self.total))]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            f"{len(self.layers)} layers, one query row in {STRIDE}, counted through all batch entries, heads and calls"
        ]
        for name, *counts in table:
            numbers = "  ".join(text.rjust(width) for text, width in zip(counts, widths[1:], strict=True))
            lines.append(f"  {name.ljust(widths[0])}  {numbers}")
        sampled = self.total.rows
        lines.append(f"{sampled:,} of {self.passed:,} rows sampled" + self._doubt(sampled))
        return "\n".join(lines)

    @staticmethod
    def _doubt(sampled: int) -> str:
        """Return a warning for the report if too few rows were sampled, else "".

        If a share p of all rows shows an event, none of n independent rows shows it with probability (1 - p)^n. This
        is 5 % at p = 3 / n.
        """
        if sampled >= ENOUGH_ROWS:
            return ""
        unseen = (
            "" if sampled <= 3 else f": a count of 0 leaves a share of up to {3 / sampled:.0%} open (95 %, binomial)"
        )
        return f", below {ENOUGH_ROWS}: too few to judge{unseen}"


class Watch:
    """Running counters. :meth:`unwatch` or the end of a ``with`` block stops them; they can still be read."""

    def __init__(self, modules: list[tuple[str, torch.nn.Module, Callbacks]]) -> None:
        self._counters = [(name, callbacks, _Counter(module)) for name, module, callbacks in modules]
        for _, callbacks, counter in self._counters:
            callbacks.functions = (*callbacks.functions, counter)

    def report(self) -> WatchReport:
        """Return the counts; this call waits for the devices, whereas counting never does."""
        layers = tuple(LayerCounts(name, *counter.read()) for name, _, counter in self._counters)
        return WatchReport(layers, sum(counter.passed for *_, counter in self._counters))

    def reset(self) -> None:
        """Set all counts to zero."""
        for _, _, counter in self._counters:
            counter.reset()

    def unwatch(self) -> None:
        """Stop counting; a second call does nothing."""
        for _, callbacks, counter in self._counters:
            callbacks.functions = tuple(each for each in callbacks.functions if each is not counter)

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unwatch()


class _Counter:
    """The counts of one layer, in one table on each device on which the layer runs."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._tables: dict[torch.device, Tensor] = {}
        with torch.inference_mode(False):
            self._walked = torch.zeros(1, dtype=torch.int64, device="cpu")
        # The same memory as a NumPy array, which the host reads faster; compiled graphs use the tensor.
        self._walked_here = self._walked.numpy()
        weight = next(module.parameters(), None)
        # A table made in a captured graph would be reset by each replay, so it is made now.
        if weight is not None and not weight.is_meta:
            self._table_on(weight.device)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        attn_mask: Tensor | None,
        is_causal: bool,
        scale: float,
        window: tuple[int, int] = NO_WINDOW,
        softcap: float = 0.0,
    ) -> None:
        if not torch.compiler.is_compiling():
            batch, heads, rows, _ = q.shape
            rows *= batch * heads
            if not sample(int(self._walked_here[0]), rows):  # in most decoding steps: then no tensor is touched
                self._walked_here[0] += rows
                return
        table = self._tables.get(q.device)
        if table is None:
            table = self._table_on(q.device)
        tensors = q.detach(), k.detach(), attn_mask, table, self._walked
        dispatch.call(operators.watch_scores, *tensors, is_causal, scale, *window, softcap)

    def _table_on(self, device: torch.device) -> Tensor:
        with torch.inference_mode(False):
            self._tables[device] = torch.zeros(len(FIELDS), dtype=torch.int64, device=device)
        return self._tables[device]

    @property
    def passed(self) -> int:
        """Return the number of query rows so far, sampled or not."""
        return int(self._walked_here[0])

    def read(self) -> list[int]:
        """Return the counts named in `FIELDS`, summed over devices; this waits for the devices."""
        return [sum(column) for column in zip(*(table.tolist() for table in self._tables.values()), strict=True)] or [
            0
        ] * len(FIELDS)

    def reset(self) -> None:
        for tensor in (self._walked, *self._tables.values()):
            tensor.zero_()


@hint_at_arguments
def watch(model_or_pipeline: object) -> Watch:
    """Count large and repeated scores of a patched model, layer by layer, while it runs.

    Of each layer one query row in 1021 is sampled and scored in FP32 against every key that the row can see. The
    attention itself, and its result, stay the same. Counts are kept on the device, and nothing waits for it until
    :meth:`Watch.report` reads them. A model that is not watched has no overhead.

    Parameters
    ----------
    model_or_pipeline : torch.nn.Module, transformers.Pipeline or diffusers.DiffusionPipeline
        A model that :func:`pasa.patch_pipeline` has patched. Its patched modules are watched, under the names of the
        patch report.

    Returns
    -------
    Watch
        It has the methods ``report()``, ``reset()`` and ``unwatch()``, and can be used in a ``with`` block. Watches of
        one model are independent of each other, and each has the cost of its own sampling. Patching again ends the
        watch of the modules that were patched before.

    Raises
    ------
    ValueError
        No module of the model is patched, or PASA has been removed from all of them. If it has been removed from some,
        a warning is issued.
    NotImplementedError
        The model is patched with ``context_parallel``.
    TypeError
        The object holds no model.

    Notes
    -----
    In a CUDA graph every replay samples the same rows as the captured call. Compiled models are compiled again when a
    watch begins or ends. On an NPU the counting is done by torch operations; this has not been run on an NPU.

    Examples
    --------
    >>> with pasa.patch_pipeline(model), pasa.watch(model) as watched:
    ...     logits = model(ids.expand(64, -1)).logits
    ...     print(watched.report())
    2 layers, one query row in 1021, counted through all batch entries, heads and calls
      layer                     rows  repeated  runaway  scores  saturated
      model.layers.0.self_attn     6         0        0      73          0
      model.layers.1.self_attn     6 ...
      total                       12 ...
    """
    components = components_of(model_or_pipeline, "watch")
    modules = list(patched_modules(components))
    if not modules:
        from pasa.patching import auto  # imported here, because only this case needs it

        if auto.leaves_alone(model_or_pipeline):
            raise ValueError('watch: policy="auto" left all modules alone; use policy="all" to watch them')
        raise ValueError(
            f"watch: no module of {type(model_or_pipeline).__name__} is patched; call pasa.patch_pipeline first"
        )
    if any(getattr(module.__dict__.get(BINDING), "context_parallel", None) is not None for _, module, _ in modules):
        raise NotImplementedError("watch: scores cannot be watched with context_parallel: patch without it")
    _check_in_force(len(modules), removed_modules(components), type(model_or_pipeline).__name__)
    return Watch(modules)


def _check_in_force(patched: int, removed: dict[str, str], model: str) -> None:
    """Raise ValueError if PASA has been removed from all patched modules, and warn if it has from some."""
    if not removed:
        return
    reason, advice = next(iter(removed.values())), "call unpatch(), then patch again"
    if len(removed) == patched:
        raise ValueError(f"watch: no module of {model} runs PASA any more ({reason}); {advice}")
    warnings.warn(
        f"watch: {len(removed)} of {patched} patched modules do not run PASA any more and are not counted "
        f"({first_names(list(removed))}: {reason}); {advice}",
        stacklevel=3,
    )
