"""Entries of a model's configuration that feed the epsilons of its norms, and equations that keep each one number.

A checkpoint holds no epsilons: they come from ``config.json``, where one entry usually serves all norms. A scaled
checkpoint can change that entry only for all of them alike.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from pasa.fp16.tracing import Tracer
from pasa.fp16.tracks import Constant

Entry = tuple[str, ...]
"""Path of an entry in config.json: ``("text_config", "rms_norm_eps")``."""
DISTINCT = 3.0
"""Factor on an entry that shows which attributes follow it."""


def entries_of(model: Any) -> dict[Entry, frozenset[Constant]]:
    """Return the epsilons of a transformers model by the entry of its configuration that they come from.

    The model is built again on the meta device, once for each entry with another value there. So no table of names is
    needed, and an epsilon that is written in the model's code has no entry.
    """
    built = _attributes(model, model.config)
    fed = {}
    for entry, value in _epsilons(model.config):
        config = copy.deepcopy(model.config)
        set_entry(config, entry, value * DISTINCT)
        changed = _attributes(model, config)
        fed[entry] = frozenset(place for place, number in changed.items() if number != built.get(place))
    return fed


def set_entry(config: Any, entry: Entry, value: float) -> None:
    """Set an entry of a configuration, or of one inside it."""
    for name in entry[:-1]:
        config = getattr(config, name)
    setattr(config, entry[-1], value)


def tie(tracer: Tracer, entries: Mapping[Entry, frozenset[Constant]]) -> dict[Entry, Constant]:
    """Give the epsilons of each entry one exponent, and exponent 0 to those without an entry.

    Returns
    -------
    dict of Entry to Constant
        One epsilon of each entry that can be scaled.
    """
    scalable = {}
    for entry, places in entries.items():
        met = sorted(places & tracer.constants.keys(), key=lambda place: (place.module, place.attribute))
        for place in met:
            other = tracer.constants[met[0]] if places <= tracer.constants.keys() else {}
            tracer.equations.equate(tracer.constants[place], other, f"{'.'.join(entry)} of config.json is one number")
        if met:
            scalable[entry] = met[0]
    for place in tracer.constants.keys() - {place for places in entries.values() for place in places}:
        tracer.equations.equate(tracer.constants[place], {}, f"{place.module}.{place.attribute} is not in config.json")
    return scalable


def _attributes(model: Any, config: Any) -> dict[Constant, float]:
    """Return the numbers that the modules of a model of this configuration keep in attributes."""
    with torch.device("meta"):
        built = type(model)(copy.deepcopy(config))
    return {
        Constant(path, name): value
        for path, module in built.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, float)
    }


def _epsilons(config: Any, path: Entry = ()) -> Iterator[tuple[Entry, float]]:
    """Yield the entries of a configuration, and of those inside it, whose names say that they are an epsilon."""
    for name, value in vars(config).items():
        if hasattr(value, "model_type"):
            yield from _epsilons(value, (*path, name))
        elif "eps" in name and isinstance(value, float):
            yield (*path, name), value
