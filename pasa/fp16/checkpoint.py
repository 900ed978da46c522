"""Scale a checkpoint on disk for FP16, so that any runtime can load it: `pasa to-fp16 FOLDER OUT`.

The plan is that of :func:`pasa.to_fp16` under more equations, because a folder holds weights and config.json alone.
There are no hooks and no modules in FP32; the epsilons that one entry of config.json feeds stay equal; and what is not
in the folder, such as rotary frequencies, stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pasa.fp16 import editing, epsilons
from pasa.fp16.conversion import Conversion
from pasa.fp16.epsilons import Entry
from pasa.fp16.handle import ScaledModule
from pasa.fp16.offloading import Weights
from pasa.fp16.planning import LARGEST, Plan
from pasa.fp16.summary import scaled_modules
from pasa.fp16.tracing import Tracer
from pasa.fp16.tracks import Constant, Cut
from pasa.prediction.checkpoint import Checkpoint

IGNORED = ("inv_freq", "attn.bias", "attn.masked_bias")
"""Suffixes of tensor names that old checkpoints hold and today's model code computes: such tensors stay as they are."""
QUANTISED = ("qweight", "qzeros", "scales", "g_idx", "absmax", "quant_state", "weight_scale", "weight_packed")
"""Last parts of the names of tensors that only quantised weights have."""


class CheckpointConversion(Conversion):
    """A model whose powers of two will be written to disk.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    run : callable
        Runs the model once on the sample.
    margin : float
    weights : Weights, optional
        The data of the model, which may be on disk.
    """

    hooked = False

    def __init__(self, model: Any, run: Callable[[], object], margin: float, weights: Weights | None = None) -> None:
        super().__init__({"": model}, run, margin, weights)
        self.entries = epsilons.entries_of(model)
        self.values: dict[Entry, tuple[float, float]] = {}
        self._scalable: dict[Entry, Constant] = {}

    def _trace(
        self,
        cuts: Mapping[str, tuple[int, tuple[Cut, ...]]],
        plan: Plan | None = None,
        epilogues: Set[str] = frozenset(),
        prologues: Set[str] = frozenset(),
    ) -> Tracer:
        """Trace the model, and add the equations of a checkpoint."""
        tracer = super()._trace(cuts, plan, epilogues, prologues)
        self._check_reached(tracer)
        self._scalable = epsilons.tie(tracer, self.entries)
        for inputs in tracer.inputs.values():
            for name, form in inputs.items():
                tracer.equations.equate(form, {}, f"the input {name} is the caller's")
        return tracer

    def _check_reached(self, tracer: Tracer) -> None:
        """Refuse parameters that the sample does not reach, because their scale would be unknown."""
        for name, tensor in self._tensors().items():
            if tensor.numel() > 1 and name not in tracer.parameters and name not in self._fixed:
                raise NotImplementedError(
                    f"to-fp16: the sample does not reach {name}, so its power of two is not known: a longer text may "
                    "reach an expert; towers for images or sound are not supported"
                )

    def _round(self) -> None:
        """Count the weights that become subnormal; they are rounded when they are written."""
        self._lost = self._total = 0
        for name, original in self._original.items():
            self._rounded(name, original())
        self.underflow = self._lost / max(self._total, 1)

    def plan_checkpoint(self) -> None:
        """Choose the powers of two, check them by a second trace, and note the new entries of config.json.

        Raises
        ------
        NotImplementedError
            A tensor overflows and cannot be scaled; the message names its module.
        """
        try:
            self.plan_and_convert()
        except OverflowError as error:
            raise ValueError(str(error)) from None
        except NotImplementedError as error:
            if not str(error).startswith("to_fp16:"):
                raise
            raise NotImplementedError(
                f"{error}; a checkpoint can say less than a running model: load it and call pasa.to_fp16"
            ) from None
        except RuntimeError as error:
            if not str(error).startswith("to_fp16:"):
                raise
            raise NotImplementedError(str(error)) from None
        for name, why in self.plan.islands.items():
            raise NotImplementedError(
                f"to-fp16: {name} would have to run in FP32 ({why}), which a checkpoint cannot say: load the model and "
                "call pasa.to_fp16"
            )
        for name in self.plan.epilogues:
            raise NotImplementedError(
                f"to-fp16: {name} adds or returns numbers that the model computes, so its results would have to be "
                "scaled, which a checkpoint cannot say: load the model and call pasa.to_fp16"
            )
        for entry, place in self._scalable.items():
            if power := self.plan.constants.get(place, 0):
                scaled = float(getattr(editing.module_at(self.models, place.module), place.attribute))
                self.values[entry] = scaled * 2.0**power, scaled

    def scaled_modules(self) -> list[ScaledModule]:
        """Return the modules with a scaled result, or one near FP16's limit."""
        return list(scaled_modules(self.plan, self._tracer, self.margin))

    def hidden_states(self) -> dict[str, int]:
        """Return the powers of two of the hidden states that a caller can ask for, where they are not 0."""
        return dict(self.plan.outputs.get("", {}))


@dataclass
class Powers:
    """The powers of two of a checkpoint, by the names of its tensors.

    Attributes
    ----------
    factors : dict of str to Tensor
        A factor for each element, expanded to the tensor's shape.
    offsets : dict of str to float
        Numbers that the model adds to a parameter: it is written as ``(w + number) * factor - number``.
    """

    factors: dict[str, Tensor] = field(default_factory=dict)
    offsets: dict[str, float] = field(default_factory=dict)

    def dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a tensor is written."""
        if not dtype.is_floating_point or name not in self.factors:
            return dtype
        return torch.float32 if name in self.offsets else torch.float16

    def apply(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor as it is written: FP16, or FP32 where the model adds a number to it.

        Raises
        ------
        ValueError
            The tensor is not finite, or FP16 cannot hold it.
        """
        if not tensor.is_floating_point() or name not in self.factors:
            return tensor
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"to-fp16: {name} holds infinities or NaN: load the checkpoint again")
        factor = self.factors[name]
        if name in self.offsets:
            number = self.offsets[name]
            return ((tensor.double() + number) * factor.double() - number).float()
        wide = torch.promote_types(tensor.dtype, torch.float32)
        written = (tensor.to(wide) * factor.to(wide)).half()
        if not bool(written.isfinite().all()):
            largest = float(tensor.abs().max())
            raise ValueError(f"to-fp16: {name} reaches {largest:.4g}, which FP16 cannot hold after scaling either")
        return written

    def as_dict(self) -> dict[str, Any]:
        """Return exponents e of the factors ``2**-e`` by tensor, where they are not 0.

        A list of (start, stop, e) stands for parts of the rows, and one under "columns" for parts of the columns.
        """
        listed = {name: _exponents(factor) for name, factor in self.factors.items()}
        return {name: power for name, power in listed.items() if power != 0}


def _exponents(factor: Tensor) -> int | list[list[int]] | dict[str, list[list[int]]]:
    """Return the exponent of a tensor's factor, or those of parts of its rows or columns; one dimension is cut."""
    if not factor.numel():
        return 0
    table = factor.reshape(-1, factor.shape[-1] if factor.ndim > 1 else 1)
    columns = _along(table[0])
    return _along(table[:, 0]) if isinstance(columns, int) else {"columns": columns}


def _along(line: Tensor) -> int | list[list[int]]:
    """Return the exponent that all factors of a line have, or a list of (start, stop, exponent) for parts of it."""
    if not line.stride(0):
        line = line[:1]
    powers: list[int] = [-round(value) for value in line.float().log2().tolist()]
    starts = [at for at in range(len(powers)) if at == 0 or powers[at] != powers[at - 1]]
    if len(starts) == 1:
        return powers[0]
    return [[start, stop, powers[start]] for start, stop in zip(starts, [*starts[1:], len(powers)], strict=True)]


def powers_of(model: Any, plan: Plan) -> Powers:
    """Return the powers of two of a plan by the names that the tensors of the model have in its checkpoint."""
    names = {id(tensor): name for name, tensor in editing.named_tensors({"": model})}
    factors, numbers = {}, {}
    for key, tensor in model.state_dict(keep_vars=True).items():
        name = names.get(id(tensor), key)  # a tied tensor has the factor of the first name
        power, number = plan.offsets.get(name, (0, 0.0))
        dims = {dim for dim, cut, _ in plan.scales.get(name, []) if cut is not None}
        shape = [size if at - tensor.ndim in dims else 1 for at, size in enumerate(tensor.shape)]
        line = torch.full(shape, 2.0**-power, dtype=torch.bfloat16)
        factor = line if name in plan.offsets else editing.scaled(name, line, plan)
        factors[key] = factor.expand(tensor.shape)
        numbers[key] = torch.full((), number, dtype=torch.bfloat16).expand(tensor.shape)
    offsets = {name: float(line.reshape(-1)[0]) for name, line in _on_disk(model, numbers).items() if line.numel()}
    return Powers(_on_disk(model, factors), {name: number for name, number in offsets.items() if number})


def _on_disk(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by the names, and in the parts, that they have in the checkpoint."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before transformers 5, names were the same
        return tensors
    return dict(revert_weight_conversion(model, tensors))


def open_source(folder: Path) -> Checkpoint:
    """Open the folder of a checkpoint that can be scaled.

    Raises
    ------
    FileNotFoundError
        The folder, its configuration or its safetensors files are missing.
    NotImplementedError
        It holds an adapter, a pipeline, or quantised weights; the message names the kind.
    """
    if folder.suffix == ".gguf" or (folder.is_dir() and not (folder / "config.json").is_file()):
        files = [folder] if folder.suffix == ".gguf" else sorted(folder.glob("*.gguf"))
        if files:
            raise NotImplementedError(
                f"to-fp16: {str(files[0])!r} is GGUF, which is not supported: pass the folder of the safetensors "
                "checkpoint that it was made from"
            )
    if (folder / "adapter_config.json").is_file():
        raise NotImplementedError(
            f"to-fp16: {str(folder)!r} holds an adapter (LoRA): merge it (merge_and_unload), save the whole model, and "
            "pass that folder"
        )
    if (folder / "model_index.json").is_file():
        raise NotImplementedError(f"to-fp16: {str(folder)!r} holds a pipeline: load it and call pasa.to_fp16")
    source = Checkpoint(folder)
    source.check_index()
    method = (source.config.get("quantization_config") or {}).get("quant_method")
    old = "gptq" if (folder / "quantize_config.json").is_file() else None
    part = next((name for name in sorted(source.names) if name.rpartition(".")[2] in QUANTISED), None)
    if kind := method or old or part:
        raise NotImplementedError(
            f"to-fp16: {str(folder)!r} has quantised weights ({str(kind).upper() if kind != part else kind}), which "
            "are not supported: pass the checkpoint that they were made from"
        )
    return source


def check_names(source: Checkpoint, powers: Powers) -> None:
    """Refuse tensors of the checkpoint that the model does not load, because their scale is not known."""
    for name in sorted(source.names - powers.factors.keys()):
        if not name.endswith(IGNORED):
            raise NotImplementedError(
                f"to-fp16: {source.label!r} holds {name}, which the model does not load, so its power of two is not "
                "known: remove it from the checkpoint"
            )
    for name in sorted(source.names & powers.factors.keys()):
        if source.shape(name) != tuple(powers.factors[name].shape):
            raise NotImplementedError(
                f"to-fp16: {name} of {source.label!r} has the shape {source.shape(name)}, and the model "
                f"{tuple(powers.factors[name].shape)}"
            )


def scaled_config(config: Mapping[str, Any], model: Any, values: Mapping[Entry, tuple[float, float]]) -> dict[str, Any]:
    """Return a config.json with new epsilons and the dtype float16."""
    scaled: dict[str, Any] = json.loads(json.dumps(config))
    for entry, (_, value) in values.items():
        part, settings = scaled, model.config
        for name in entry[:-1]:
            part, settings = part.setdefault(name, {}), getattr(settings, name)
        for alias, name in (getattr(settings, "attribute_map", None) or {}).items():
            if name == entry[-1]:
                part.pop(alias, None)
        part[entry[-1]] = value
    if not {"dtype", "torch_dtype"} & scaled.keys():
        scaled["torch_dtype"] = "float16"
    _set_dtype(scaled)
    return scaled


def _set_dtype(part: dict[str, Any]) -> None:
    for name, value in part.items():
        if name in ("dtype", "torch_dtype"):
            part[name] = "float16"
        elif isinstance(value, dict):
            _set_dtype(value)


def note_of(values: Mapping[Entry, tuple[float, float]], powers: Powers, hidden: Mapping[str, int]) -> str:
    """Return the text of FP16.md: what is different in this checkpoint."""
    epsilons_changed = [f"- `{'.'.join(entry)}`: {old:g} is now {new!r}" for entry, (old, new) in values.items()]
    states = [f"- `{name}`: 2^{-power}" for name, power in hidden.items()]
    lines = [
        "# Scaled for FP16",
        "",
        "`pasa to-fp16` multiplied weights by powers of two, so that no tensor passes 65504 in FP16.",
        "The model computes the same logits. `pasa_fp16.json` lists the powers and the measured peaks.",
        "",
        "- Keep `config.json` with these weights: its epsilons are scaled with them.",
        "- A runtime must hold epsilons in FP32. In FP16 they become 0.",
        "- Attention scores are not scaled: use SDPA, FlashAttention or pasa, and not eager attention.",
        "- Adapters (LoRA) and embeddings (`inputs_embeds`) of the original model do not fit.",
        f"- {len(powers.offsets)} weights to which the model adds a number are stored in FP32.",
        "  A runtime that loads everything in FP16 rounds them.",
        *(["", "Changed epsilons:", "", *epsilons_changed] if values else []),
        *(["", "Hidden states (`output_hidden_states=True`) carry these factors:", "", *states] if states else []),
        "",
        f"FP16 ends at {LARGEST:g}. Inputs unlike the sample may have larger peaks than those measured.",
    ]
    return "\n".join(lines) + "\n"
