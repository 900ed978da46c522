"""`register`: make the name "pasa" known to the libraries that models come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

from pasa.patching.versions import check_transformers


@dataclass(frozen=True)
class Registration:
    """The hosts that know the name "pasa" now, and those that do not.

    Attributes
    ----------
    registered : tuple of (str, str)
        Hosts, each with the code that selects PASA there.
    absent : tuple of (str, str)
        Hosts that were left out, each with the reason.
    """

    registered: tuple[tuple[str, str], ...]
    absent: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        lines = [f"{host}: {how}" for host, how in self.registered]
        return "\n".join([*lines, *(f"{host}: not registered, because {why}" for host, why in self.absent)])


def register(*hosts: str) -> Registration:
    """Make the name "pasa" known to transformers, diffusers, torch and vLLM.

    The registration is for the whole process. A second call changes nothing. Nothing runs PASA until the name is
    selected, by the code that the result shows.

    - transformers: ``attn_implementation="pasa"`` in ``from_pretrained`` and ``from_config``, and
      ``model.set_attn_implementation("pasa")``. Models that compute their attention themselves, not through
      transformers' attention interface, are refused when they build a mask.
    - diffusers: ``transformer.set_attention_backend("pasa")``. diffusers has no function to add a backend, so the name
      is added to its enumeration. UNets have no attention backends: use :func:`pasa.patch_pipeline`.
    - torch 2.11 and newer: ``torch.nn.attention.activate_flash_attention_impl("PASA")`` replaces the flash attention of
      `scaled_dot_product_attention` on CUDA, for FP16. Not run on a GPU yet.
    - vllm: the attention backend CUSTOM, see `pasa.patching.vllm`.

    Unlike :func:`pasa.patch_pipeline`, this has no settings, no report and no choice of modules, and a model keeps the
    attention that was set last. Of a patched model whose attention is set to "pasa", the handle reports its modules as
    removed.

    Parameters
    ----------
    *hosts : "transformers", "diffusers", "torch" or "vllm"
        Without any, all that are installed.

    Returns
    -------
    Registration
        A frozen record: `registered` and `absent` are pairs of a host and the code that selects PASA, or the reason.

    Raises
    ------
    ValueError, TypeError
        A host is unknown, or not a name.
    ImportError
        A host is named, and is not installed or too old.

    Examples
    --------
    >>> print(pasa.register("transformers"))
    transformers: from_pretrained(..., attn_implementation='pasa') or model.set_attn_implementation('pasa')
    >>> model.set_attn_implementation("pasa")
    >>> model(ids).logits.isfinite().all()
    tensor(True)
    >>> pasa.register("jax")
    Traceback (most recent call last):
    ValueError: register: 'jax' is not a host of pasa: pass 'transformers', 'diffusers', 'torch' or 'vllm', or none \
for all
    """
    for host in hosts:
        if not isinstance(host, str):
            raise TypeError(
                f"register: expected the name of a host, got a {type(host).__name__}: for one model, call "
                "pasa.patch_pipeline(model)"
            )
        if host not in HOSTS:
            *most, last = map(repr, HOSTS)
            raise ValueError(
                f"register: {host!r} is not a host of pasa: pass {', '.join(most)} or {last}, or none for all"
            )
    registered, absent = [], []
    for host in HOSTS if not hosts else dict.fromkeys(hosts):
        try:
            registered.append((host, HOSTS[host]()))
        except ImportError as error:
            if hosts:
                raise
            absent.append((host, str(error)))
    return Registration(tuple(registered), tuple(absent))


def _transformers() -> str:
    _find("transformers")
    check_transformers("register")
    from pasa.patching import transformers_registered

    return transformers_registered.register()


def _diffusers() -> str:
    _find("diffusers")
    from pasa.patching import diffusers_registered

    return diffusers_registered.register()


def _torch() -> str:
    from pasa.patching import torch_flash

    return torch_flash.register()


def _vllm() -> str:
    _find("vllm")
    from pasa.patching import vllm

    vllm.register()
    return "vllm serve ... --attention-backend CUSTOM --dtype float16"


def _find(package: str) -> None:
    """Raise an ImportError if a package is not installed; it is not imported."""
    if find_spec(package) is None:
        raise ImportError(f"{package} is not installed: pip install {package}")


HOSTS: dict[str, Callable[[], str]] = {
    "transformers": _transformers,
    "diffusers": _diffusers,
    "torch": _torch,
    "vllm": _vllm,
}
"""Maps each host to the function that registers with it, which returns the code that selects PASA there."""
