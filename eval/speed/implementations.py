"""The table of implementations: torch's attention by backend, peers where they are installed, ours in each mode."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import pasa
from pasa.eval.kit.timing import Call
from pasa.eval.speed.cases import Inputs, select
from pasa.ops.attention.sdpa import npu

Prepare: TypeAlias = Callable[[Inputs], dict[str, Call]]
PLAIN, EXPANDED, AS_ROWS = "as given", "K and V expanded beforehand", "a group's queries as rows"
FP32, EXACT = pasa.PasaConfig(precision="fp32"), pasa.PasaConfig()
INVARIANT = pasa.PasaConfig(batch_invariant=True)
EMULATED_SCORES = 2**28  # q.k of all heads: beyond, the emulation is not worth the wait
EIGHT_BIT_LIMIT = 0.1  # relative RMSE of 8-bit scores: a cosine of 0.995


@dataclass(frozen=True)
class Implementation:
    """One row of the comparison.

    `prepare` makes calls of inputs, by variant, with every copy in another layout made before the time is taken; the
    fastest variant that runs counts. The gate compares with `emulation`, or allows an RMSE of `limit`.
    """

    name: str
    what: str
    prepare: Prepare
    emulation: pasa.PasaConfig = FP32
    shifted: bool = False  # a common bias of the keys is removed before scores are formed
    limit: float | None = None
    lse: Callable[[Inputs], Tensor] | None = None  # the log-sum-exp, where it can return that
    device: str = "cuda"  # the type of device that it runs on unless it is named


def _sdpa(backend: str, inputs: Inputs) -> dict[str, Call]:
    """Hold torch's scaled_dot_product_attention to one backend; grouped queries come in every form that it may take."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    scope = partial(sdpa_kernel, getattr(SDPBackend, backend))
    attend = partial(scaled_dot_product_attention, **inputs.visibility)
    q, k, v = inputs.tensors
    groups = q.shape[1] // k.shape[1]
    if groups == 1:
        return {PLAIN: Call(partial(attend, q, k, v), scope)}
    wide_k, wide_v = (x.repeat_interleave(groups, 1) for x in (k, v))
    calls = {
        PLAIN: Call(partial(attend, q, k, v, enable_gqa=True), scope),
        EXPANDED: Call(partial(attend, q, wide_k, wide_v), scope),
    }
    if inputs.decode and not inputs.causal:
        rows = q.view(q.shape[0], k.shape[1], -1, q.shape[3])  # heads of a group are neighbours: no copy
        calls[AS_ROWS] = Call(partial(attend, rows, k, v), scope, lambda out: out.reshape(q.shape))
    return calls


def _flash_attn(module: str, inputs: Inputs) -> dict[str, Call]:
    """Call one of the flash-attn packages: (B, S, H, D), grouped queries by shape."""
    function = importlib.import_module(module).flash_attn_func
    _refuse_mask(inputs)
    q, k, v = (x.transpose(1, 2).contiguous() for x in inputs.tensors)

    def run() -> Tensor:
        out = function(q, k, v, causal=inputs.causal)
        heads_last: Tensor = out[0] if isinstance(out, tuple) else out
        return heads_last.transpose(1, 2)

    return {PLAIN: Call(run)}


def _refuse_mask(inputs: Inputs) -> None:
    """Refuse a mask, for packages that have no argument for one."""
    if inputs.mask is not None:
        raise NotImplementedError("takes no mask")


def _sage(inputs: Inputs) -> dict[str, Call]:
    function = importlib.import_module("sageattention").sageattn
    _refuse_mask(inputs)
    return {PLAIN: Call(partial(function, *inputs.tensors, tensor_layout="HND", is_causal=inputs.causal))}


def _npu_attention(function: str, inputs: Inputs, **how: Any) -> dict[str, Call]:
    """Call one of torch_npu's attentions; a causal mask aligns as theirs does, at the top left."""
    torch_npu = importlib.import_module("torch_npu")
    q, k, v = inputs.tensors
    if inputs.mask is not None or (inputs.causal and q.shape[2] != k.shape[2]):
        raise NotImplementedError("torch_npu's attention is timed without a mask, or with one for as many keys as rows")
    how |= {"scale": q.shape[-1] ** -0.5, "sparse_mode": npu.TOP_LEFT_CAUSAL if inputs.causal else npu.ALL_KEYS}
    how |= {"atten_mask": npu.causal_mask(q.device)} if inputs.causal else {}
    if function == "npu_fusion_attention":
        attend = partial(getattr(torch_npu, function), q, k, v, q.shape[1], "BNSD", **how)
    else:
        how |= {"num_heads": q.shape[1], "num_key_value_heads": k.shape[1], "input_layout": "BNSD"}
        attend = partial(getattr(torch_npu, function), q, k, v, **how)
    return {PLAIN: Call(lambda: attend()[0])}


def _ours(
    name: str, what: str, config: pasa.PasaConfig, backend: str | None = "triton", device: str = "cuda"
) -> Implementation:
    def attend(inputs: Inputs, **options: Any) -> Callable[[], Any]:
        options |= {**inputs.visibility, "config": config, "backend": backend}
        return partial(pasa.attention, *inputs.tensors, **options)

    def prepare(inputs: Inputs) -> dict[str, Call]:
        return {PLAIN: Call(attend(inputs))}

    shifted = config.precision == "pasa" and backend in ("triton", "npu")  # `sdpa` shifts whole heads, if at all
    return Implementation(
        name, what, prepare, config, shifted, lse=lambda x: attend(x, return_lse=True)()[1], device=device
    )


def _unguarded(inputs: Inputs) -> dict[str, Call]:
    """Return what backend `sdpa` guards: the same calls of torch's fused attention, alone."""
    backend: Any = importlib.import_module("pasa.ops.attention.sdpa.backend")
    q, k, v = inputs.tensors
    call = backend.Call(q, k, v, float(q.shape[-1] ** -0.5), is_causal=inputs.causal)
    return {PLAIN: Call(lambda: backend.attend_visible(call)[0])}


def _reference(inputs: Inputs) -> dict[str, Call]:
    """Return the emulation, which serves devices that have no kernels."""
    scores = inputs.q.shape[:3].numel() * inputs.k.shape[2]
    if scores > EMULATED_SCORES:
        raise NotImplementedError(f"at most {EMULATED_SCORES} scores are emulated here, not {scores}")
    return {PLAIN: Call(partial(pasa.attention, *inputs.tensors, is_causal=inputs.causal, backend="reference"))}


def _portable(inputs: Inputs) -> dict[str, Call]:
    """Hold our default to the kernel that Ascend and the interpreter see as well."""
    backend: Any = importlib.import_module("pasa.ops.attention.triton.backend")
    q, k, v = inputs.tensors
    call = backend.KernelCall(q, k, v, float(q.shape[-1] ** -0.5), is_causal=inputs.causal)
    return {PLAIN: Call(lambda: backend.portable_attention(call)[0])}


def _paged(slots: int, inputs: Inputs, config: pasa.PasaConfig = EXACT) -> dict[str, Call]:
    """Decode from the same keys in pages of so many slots, in random order, written with their anchors."""
    (batch, _, rows, _), keys = inputs.q.shape, inputs.k.shape[2]
    if rows > 1 or keys % slots:
        raise NotImplementedError(f"one query of a sequence whose keys fill pages, not {rows} and {keys} keys")
    pages = batch * keys // slots
    k, v = (x.transpose(1, 2).flatten(0, 1) for x in (inputs.k, inputs.v))
    caches = [x.new_zeros(pages, slots, *x.shape[1:]) for x in (k, v)]
    key_anchors = k.new_zeros(pages, *k.shape[1:])
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).to(k.device)
    slot_mapping = (table[:, None] * slots + torch.arange(slots, device=k.device)).flatten()
    pasa.write_pages(k, v, caches[0], caches[1], slot_mapping, key_anchors)
    lengths = torch.full((batch,), keys, dtype=torch.int32, device=k.device)
    tensors = inputs.q.squeeze(2), caches[0], caches[1], table.view(batch, -1).int(), lengths
    run = partial(pasa.attention_paged, *tensors, key_anchors=key_anchors, config=config, backend="triton")
    return {PLAIN: Call(run, restore=lambda out: out.unsqueeze(2))}


FLASH, CUDNN = "sdpa-flash", "sdpa-cudnn"
GUARDED, UNGUARDED = "pasa-sdpa", "sdpa-unguarded"
PAGES = (16, 128)  # keys of a page: vLLM's default, and vllm-ascend's
# What a user gets who names no backend. It may choose `sdpa`, so it is allowed the rounding of unshifted scores.
DEFAULT = _ours("pasa-default", "ours, the default on the backend that pasa.attention chooses", EXACT, backend=None)
IMPLEMENTATIONS = (
    Implementation(CUDNN, "torch SDPA, cuDNN backend", partial(_sdpa, "CUDNN_ATTENTION")),
    Implementation(FLASH, "torch SDPA, flash backend (FlashAttention-2)", partial(_sdpa, "FLASH_ATTENTION")),
    Implementation("sdpa-efficient", "torch SDPA, memory-efficient backend", partial(_sdpa, "EFFICIENT_ATTENTION")),
    Implementation("flash-attn", "package flash_attn (FlashAttention-2)", partial(_flash_attn, "flash_attn")),
    Implementation(
        "flash-attn-3", "package flash_attn_interface (Hopper)", partial(_flash_attn, "flash_attn_interface")
    ),
    Implementation("flash-attn-4", "package flash-attn-4 (flash_attn.cute)", partial(_flash_attn, "flash_attn.cute")),
    Implementation("sageattention", "package sageattention: 8-bit scores", _sage, limit=EIGHT_BIT_LIMIT),
    _ours("triton-fp32", "our kernels with FP32 scores and softmax, no shift: what the schedule alone gives", FP32),
    DEFAULT,
    _ours("pasa", "our kernels with default options: keeps the guarantee", EXACT),
    _ours("pasa-paper", 'recovery="paper", as published', pasa.PasaConfig(recovery="paper")),
    Implementation("pasa-portable", "ours, the default, on the portable kernel", _portable, EXACT, shifted=True),
    Implementation(UNGUARDED, "what pasa-sdpa guards, without its guards", _unguarded),
    _ours(GUARDED, 'backend="sdpa": torch\'s fused attention, guarded', EXACT, backend="sdpa"),
    *(
        Implementation(f"pasa-paged-{n}", f"ours, from pages of {n} keys", partial(_paged, n), EXACT, shifted=True)
        for n in PAGES
    ),
    _ours("pasa-invariant", "ours, batch_invariant=True", INVARIANT),
    Implementation(
        f"pasa-paged-{PAGES[0]}-invariant",
        f"ours, from pages of {PAGES[0]} keys, batch_invariant=True",
        partial(_paged, PAGES[0], config=INVARIANT),
        EXACT,
        shifted=True,
    ),
    Implementation("pasa-reference", "ours, the emulation", _reference, EXACT, shifted=True),
    _ours("pasa-npu", "ours, the default, in Ascend C", EXACT, "npu", "npu"),
    _ours("pasa-npu-paper", 'ours in Ascend C, recovery="paper"', pasa.PasaConfig(recovery="paper"), "npu", "npu"),
    Implementation(
        "npu-fusion", "torch_npu.npu_fusion_attention", partial(_npu_attention, "npu_fusion_attention"), device="npu"
    ),
    *(
        Implementation(
            f"npu-infer-{name}",
            f"torch_npu.npu_fused_infer_attention_score, inner_precise={precise}",
            partial(_npu_attention, "npu_fused_infer_attention_score", inner_precise=precise),
            device="npu",
        )
        for precise, name in enumerate(("precise", "fast"))
    ),
)
MATH = Implementation("sdpa-math", "torch SDPA, math backend", partial(_sdpa, "MATH"))
OWN = tuple(each.name for each in IMPLEMENTATIONS if each.name.startswith(("pasa", "triton")))


def select_implementations(names: Sequence[str] | None = None, device: str = "cuda") -> tuple[Implementation, ...]:
    """Return implementations by name, or all that run on a type of device."""
    if names is None:
        return tuple(each for each in IMPLEMENTATIONS if each.device == device)
    return select({each.name: each for each in IMPLEMENTATIONS}, names)
