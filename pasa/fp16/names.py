"""Names of a model's parameters and buffers: of the tensor objects, and of the memory that holds them."""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch
from torch import Tensor

from pasa.fp16.paths import join


class Names:
    """The names of the floating-point parameters and buffers with more than one element.

    Parameters
    ----------
    models : mapping of str to torch.nn.Module
        The models, by the names that begin all paths.
    left_out : set of str
        Buffers that have no name here.
    """

    def __init__(self, models: Mapping[str, torch.nn.Module], left_out: Set[str]) -> None:
        self._names: dict[int, str] = {}
        self._memory: dict[int, str] = {}
        self._tensors: list[Tensor] = []  # keeps their ids from use by others where offloading replaces buffers
        for prefix, model in models.items():
            for path, tensor in (*model.named_parameters(), *model.named_buffers()):
                name = join(prefix, path)
                if tensor.is_floating_point() and tensor.numel() > 1 and name not in left_out:
                    self._names.setdefault(id(tensor), name)
                    self._memory.setdefault(tensor.untyped_storage().data_ptr(), name)
                    self._tensors.append(tensor)

    def of(self, tensor: Tensor) -> str | None:
        """Return the first name of a parameter or buffer, or None for another tensor."""
        return self._names.get(id(tensor))

    def behind(self, tensor: Tensor) -> str | None:
        """Return the name of the parameter or buffer whose memory a tensor uses, or None."""
        return self._memory.get(tensor.untyped_storage().data_ptr())
