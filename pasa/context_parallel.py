"""Attention over a sequence that several devices share: `ring_attention`, `shard_sequence` and `gather_sequence`."""

from __future__ import annotations

import zlib
from dataclasses import fields
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from pasa import diagnostics
from pasa.checks import check_switches, check_tensor, checked_config, checked_scale, heads_first
from pasa.config import PasaConfig
from pasa.keywords import hint_at_arguments
from pasa.ops import operands, operators
from pasa.ops.attention.call import Call, to_fp16
from pasa.ops.ring import layout
from pasa.ops.ring.attention import RingCall
from pasa.ops.ring.attention import ring_attention as attend
from pasa.ops.ring.group import Ring

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FACTS = ("accepted", "batch", "query heads", "key heads", "head dim", "switches")  # must be equal on every rank
SWITCHES = "dtype, is_causal, scale, config or backend"
# Each rank's calls may have any value of these options, because outputs are merged in FP32 whatever the value.
FREE_OPTIONS = ("block_q", "block_k", "overflow", "accumulate")


@hint_at_arguments
def shard_sequence(x: Tensor, dim: int, *, group: ProcessGroup | None = None) -> Tensor:
    """Return the tokens of this rank r of n: chunks r and 2n - 1 - r of 2n chunks, joined (zig-zag).

    With this choice every rank has the same work under a causal mask. Cut position ids in the same way as tokens.

    Parameters
    ----------
    x : Tensor
        The whole sequence, the same on every rank.
    dim : int
        Dimension of the tokens, of any length from 2n on. The lengths of chunks differ by at most one token.
    group : ProcessGroup, optional
        The n ranks; the default group when None.

    Raises
    ------
    ValueError
        The sequence has fewer than 2n tokens, x has no dimension `dim`, or there is no process group.

    Examples
    --------
    >>> pasa.shard_sequence(torch.arange(8), 0)  # rank 0 of 2
    tensor([0, 1, 6, 7])
    """
    ring = _ring(group)
    _check_dim(x, dim)
    chunks = layout.chunks_of(ring.rank, x.shape[dim], ring.size)
    return torch.cat([x.narrow(dim, chunk.start, chunk.stop - chunk.start) for chunk in chunks], dim)


@hint_at_arguments
def gather_sequence(x: Tensor, dim: int, *, group: ProcessGroup | None = None) -> Tensor:
    """Return the whole sequence on every rank from the shards that `shard_sequence` made.

    Parameters
    ----------
    x : Tensor
        Tokens of this rank; its other dimensions are the same on every rank.
    dim, group
        As for `shard_sequence`.

    Raises
    ------
    NotImplementedError
        The tensor requires a gradient. Form the loss on the shards instead.
    ValueError
        Lengths are not those of `shard_sequence`; ranks differ in dtype, `dim` or another dimension; or x has no
        dimension `dim`. If one rank raises an error, every rank does.

    Examples
    --------
    >>> shard = pasa.shard_sequence(torch.arange(8), 0)
    >>> pasa.gather_sequence(shard, 0)
    tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    ring = _ring(group)
    try:
        _check_dim(x, dim)
        if torch.is_grad_enabled() and x.requires_grad:
            raise NotImplementedError("gather_sequence has no gradient: form the loss on the shards, or detach them")
        _check_device("x", x, ring)
    except Exception:  # of any kind, because the other ranks wait for this rank's message
        ring.tell([0] * 3, _device(ring, x))
        raise
    others = (dim % x.dim(), x.dtype, x.movedim(dim, 0).shape[1:])
    held = _agreed_tokens(ring.tell([1, zlib.crc32(repr(others).encode()), x.shape[dim]], x.device))
    lengths = _zigzag_lengths(held)
    x = x.movedim(dim, 0)
    longest = x.new_zeros((max(held), *x.shape[1:]))
    longest[: x.shape[0]] = x
    shards = ring.gather(longest)
    early = [shard[:first] for shard, (first, _) in zip(shards, lengths, strict=True)]
    late = [shard[first : first + second] for shard, (first, second) in zip(shards, lengths, strict=True)]
    return torch.cat([*early, *reversed(late)]).movedim(0, dim)


@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: ProcessGroup | None = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    tensor_layout: str = ...,
    return_lse: Literal[False] = ...,
    config: PasaConfig | None = ...,
    backend: str | None = ...,
) -> Tensor: ...
@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: ProcessGroup | None = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    tensor_layout: str = ...,
    return_lse: Literal[True],
    config: PasaConfig | None = ...,
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


@hint_at_arguments
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: ProcessGroup | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    tensor_layout: str = "HND",
    return_lse: bool = False,
    config: PasaConfig | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention over a sequence that the ranks of a process group share (ring attention, context parallelism).

    This is a collective call: every rank makes it with its shard of the sequence. If one rank runs the backward pass,
    every rank must. Keys and values travel from rank to rank by n - 1 sends that overlap with computation. A rank never
    holds the keys of more than two ranks.

    Parameters
    ----------
    q : Tensor (B, Hq, Sq, D)
    k, v : Tensor (B, Hkv, Skv, D)
        Tokens of this rank, as for `attention`. Without a causal mask, lengths are free and may differ by rank.
    group : ProcessGroup, optional
        gloo for CPUs, NCCL for GPUs, HCCL for NPUs; the default group when None.
    is_causal : bool
        Causal mask. The tokens of q, k and v are then those that `shard_sequence` gives this rank.
    scale, tensor_layout, return_lse, backend
        As for `attention`.
    config : PasaConfig, optional
        Arithmetic, with recovery="exact" and softmax="safe".

    Returns
    -------
    out : Tensor
        As for `attention`, for this rank's queries.
    lse : Tensor (B, Hq, Sq), FP32, only with ``return_lse=True``

    Raises
    ------
    ValueError, TypeError
        As for `attention`, or there is no process group. Every rank raises if ranks differ in a size or switch, if
        lengths are not those of `shard_sequence`, or if one rank has refused its arguments for any reason.
    NotImplementedError
        The config asks for another arithmetic, or diagnostics are being recorded.

    Notes
    -----
    Each rank makes one attention call per set of keys, and the outputs of these calls are merged in
    FP32. The error of the merged output has three parts: the largest error of any call, one rounding
    to FP16, and the errors of the FP32 log-sum-exps. A log-sum-exp has the score errors that one call
    on all keys would have, and the rounding of its storage in FP32. This rounding changes a weight by
    at most 2^-22 of max(1024, 2 s). Here s is the largest sum over columns c of
    scale |q_c| |k_c - a_c| in any block of up to 128 keys that the row sees, |q_c| is the largest
    of all queries in that column, and a is the anchor of that block alone. An anchor is 0 in columns
    in which it would round a key of the block. So a bias that keys share does not reduce accuracy,
    whether all keys have it or biases differ by block. A key that cannot be shifted removes the
    anchor of its own block only (pasa/ops/ring/frames.py says why). If biases differ by block, a
    rank's keys take one call for every bias.

    Examples
    --------
    >>> tokens = torch.randn(3, 1, 4, 30, 64).half()  # q, k, v
    >>> q, k, v = pasa.shard_sequence(tokens, -2)
    >>> out = pasa.ring_attention(q, k, v, is_causal=True)
    >>> bool((pasa.gather_sequence(out, -2) - pasa.attention(*tokens, is_causal=True)).abs().max() < 2e-3)
    True
    """
    ring = _ring(group)
    try:
        check_switches(backend, is_causal, return_lse)
        q, k, v, last = heads_first(q, k, v, tensor_layout)
        _check_device("q", q, ring)
        scale = checked_scale(scale)
        operands.check_attention(q, k, v)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        config = ring_config(config)
        if diagnostics.recording():
            raise NotImplementedError("ring_attention records no diagnostics: leave the record_diagnostics context")
        operators.choose(Call(q, k, v, scale), backend, *config.arguments)  # raises if no backend can serve the call
        for name, x in (("q", q), ("k", k), ("v", v)):
            to_fp16(x.detach(), name)  # refuse values beyond 65504 now, before another rank waits for this one
    except Exception:  # of any kind, because the other ranks wait for this rank's message
        ring.tell([0] * (len(FACTS) + 2), _device(ring, q, k, v))
        raise
    switches = zlib.crc32(repr((q.dtype, is_causal, scale, config, backend)).encode())
    facts = (1, q.shape[0], q.shape[1], k.shape[1], q.shape[3], switches, q.shape[2], k.shape[2])
    lengths = _agreed_lengths(ring.tell(facts, q.device))
    early = None
    if is_causal:
        early = tuple(first for first, _ in _zigzag_lengths([_square(*both) for both in lengths]))
    call = RingCall(ring, tuple(keys for _, keys in lengths), early, scale, config.arguments, backend)
    out, lse, anchor = attend(q, k, v, call)
    if return_lse:
        rows = q.half().unflatten(1, (k.shape[1], -1)).float()
        lse = lse + (rows * anchor.unsqueeze(2)).sum(-1).flatten(1, 2) * scale
    out = out.transpose(1, 2) if last else out
    return (out, lse) if return_lse else out


def ring_config(config: PasaConfig | None) -> PasaConfig:
    """Return the checked config; raise NotImplementedError for an option that `ring_attention` does not serve.

    An option that is not among `FREE_OPTIONS` is served with its default alone.
    """
    config = checked_config(config)
    for option in fields(config):
        value = getattr(config, option.name)
        if option.name not in FREE_OPTIONS and value != option.default:
            raise NotImplementedError(f"ring_attention has {option.name}={option.default!r} only, not {value!r}")
    return config


def check_group(name: str, group: object) -> None:
    """Check that an argument is a process group of torch.distributed."""
    if not isinstance(group, getattr(torch.distributed, "ProcessGroup", ())):  # torch may be built without
        hint = "torch.distributed.group.WORLD is that of all ranks"
        raise TypeError(f"{name}={group!r} is a {type(group).__name__}, not a ProcessGroup; {hint}")


def _ring(group: ProcessGroup | None) -> Ring:
    # For a process outside a new group, torch returns a mark in its place; the ring refuses it with its own message.
    outside: object = torch.distributed.GroupMember.NON_GROUP_MEMBER if torch.distributed.is_available() else None
    if group not in (None, outside):
        check_group("group", group)
    return Ring(group)


def _check_dim(x: Tensor, dim: int) -> None:
    check_tensor("x", x)
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim={dim!r} is a {type(dim).__name__}: pass the dimension of the tokens, an integer")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(
            f"dim={dim} is not a dimension of x, which has {x.dim()}: {tuple(x.shape)}; "
            f"pass {-x.dim()} to {x.dim() - 1}"
        )


def _check_device(name: str, x: Tensor, ring: Ring) -> None:
    if x.device.type not in ring.devices:
        devices = ", ".join(ring.devices)
        raise ValueError(f"{name} is on {x.device}, but the process group serves {devices} alone: move {name} there")


def _device(ring: Ring, *tensors: object) -> torch.device:
    """Return a device on which a rank with wrong arguments can send the others a message."""
    for x in tensors:
        if isinstance(x, Tensor) and x.device.type in ring.devices:
            return x.device
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or accelerator.type not in ring.devices:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _check_accepted(function: str, every: list[list[int]]) -> None:
    for rank, facts in enumerate(every):
        if not facts[0]:
            raise ValueError(f"{function}: rank {rank} has refused its arguments; its error says why")


def _agreed_lengths(every: list[list[int]]) -> list[tuple[int, int]]:
    """Return the numbers of queries and keys of every rank; raise if ranks differ in anything else."""
    _check_accepted("ring_attention", every)
    for rank, facts in enumerate(every):
        for name, value, first in zip(FACTS, facts, every[0], strict=False):
            if value != first:
                what = SWITCHES if name == "switches" else f"{name}: {first} and {value}"
                raise ValueError(f"ring_attention: ranks 0 and {rank} differ in {what}; pass the same on every rank")
    return [(facts[-2], facts[-1]) for facts in every]


def _agreed_tokens(every: list[list[int]]) -> list[int]:
    """Return the number of tokens of every rank; raise if ranks differ in anything else."""
    _check_accepted("gather_sequence", every)
    for rank, (_, others, _) in enumerate(every):
        if others != every[0][1]:
            raise ValueError(f"gather_sequence: ranks 0 and {rank} differ in dtype, dim or another dimension of x")
    return [tokens for _, _, tokens in every]


def _square(queries: int, keys: int) -> int:
    if queries != keys:
        raise ValueError(
            f"ring_attention: is_causal=True with {queries} queries and {keys} keys on one rank: cut q, k and v by "
            "shard_sequence"
        )
    return keys


def _zigzag_lengths(held: list[int]) -> tuple[tuple[int, int], ...]:
    """Return the lengths of both chunks of every rank; raise if the ranks hold other numbers of tokens."""
    lengths = layout.lengths(sum(held), len(held))
    expected = [sum(both) for both in lengths]
    if held != expected:
        raise ValueError(f"ranks hold {held} tokens, not {expected} as shard_sequence gives them")
    return lengths
