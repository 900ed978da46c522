"""`PasaConfig(batch_invariant=True)`: a sequence has the same bits whatever it is batched with.

510 random batches of each backend that claims it. On a CPU, Triton's interpreter adds up in the same order whatever the
tile is, so what the order depends on is tested apart: the constants and options of all launches.
"""

import dataclasses
import os
from collections import defaultdict

import pytest
import torch

import pasa
from pasa.ops import plans
from pasa.ops.attention.triton import anchor_launch, backend, tiles
from pasa.ops.attention.triton.decode import launch, paged_launch
from pasa.ops.attention.triton.hopper import launch as hopper
from pasa.ops.attention.triton.kernel_call import KernelCall
from pasa.ops.attention.triton.paper import launch as paper
from pasa.ops.attention.triton.prefill import launch as prefill
from pasa.ops.attention.triton.prefill import mask_launch
from pasa.ops.attention.triton.short import launch as short
from pasa.ops.registry import BACKENDS
from tests.batchings import KINDS, changed, draw
from tests.inputs import DEVICE, max_error, normal_qkv

CLAIMED = [name for name, each in BACKENDS.items() if True in (each.values("batch_invariant") or (True,))]
POOLS = {"dense": 17, "masked": 17, "packed": 17, "decode": 25, "anchored": 17, "paged": 9}  # the last are slow
EACH = 5  # batches of each pool: 510 of a backend
# Triton's interpreter takes minutes for all pools, so it gets every sixth; scripts/test.sh --all gives it all.
SHARE = 6 if DEVICE == "cpu" and "PASA_ALL_BATCHES" not in os.environ else 1
INVARIANT = pasa.PasaConfig(batch_invariant=True)
UNSUPPORTED = {"sdpa": "softcap"}


def test_the_number_of_batches():
    assert set(POOLS) == set(KINDS)
    assert sum(POOLS.values()) * EACH == 510  # docs/batch-invariance.md


def test_these_backends_claim_it():
    assert sorted(CLAIMED) == ["reference", "sdpa", "triton"]
    with pytest.raises(NotImplementedError, match=r"npu: .*batch_invariant True is not among False"):
        pasa.attention(*normal_qkv((1, 1), (4, 4), 16), config=INVARIANT, backend="npu")


@pytest.fixture
def many_splits(monkeypatch):
    """Split short keys too, and as on a device on which the batch decides into how many splits."""
    monkeypatch.setattr(launch, "FIXED_KEYS", 128)  # a split has two blocks of lanes, or more, below 2,048 keys
    monkeypatch.setattr(launch, "FIXED_SPLITS", 4)
    for module in (launch, paged_launch):
        monkeypatch.setattr(module, "processors", lambda _: 12)
    monkeypatch.setattr(paged_launch, "FIXED_KEYS_OF_TILES", 64)
    monkeypatch.setattr(paged_launch, "FIXED_SPLITS_OF_TILES", 2)
    monkeypatch.setattr(plans, "_plans", {})


def pools(kind, backend, seeds, config=INVARIANT):
    """Yield the pools of a kind that a backend serves."""
    for seed in seeds:
        pool = draw(kind, seed, device=DEVICE, config=config, backend=backend, return_max_logits=seed % 2 == 0)
        if UNSUPPORTED.get(backend) in pool.how:
            del pool.how[UNSUPPORTED[backend]]
        yield seed, pool


@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", CLAIMED)
def test_no_batch_changes_a_bit(backend, kind, part, many_splits):
    seeds = range(POOLS[kind])[part :: 2 * (SHARE if backend == "triton" else 1)]
    found = {seed: changed(pool, EACH, seed) for seed, pool in pools(kind, backend, seeds)}
    assert found == dict.fromkeys(seeds, 0)


def test_an_ordinary_run_draws_every_feature():
    """Story: every fourth seed had no window at all."""
    for kind in ("dense", "packed", "decode", "anchored"):
        seeds = [seed for part in range(2) for seed in range(POOLS[kind])[part :: 2 * SHARE]]
        drawn = {name for _, pool in pools(kind, "triton", seeds) for name in pool.how}
        assert {"window", "sinks", "softcap"} <= drawn, kind


@pytest.mark.parametrize(
    ("backend", "kind"),
    [("triton", "decode"), ("triton", "anchored"), ("triton", "paged"), ("triton", "masked"), ("reference", "dense")],
)
def test_without_it_batches_change_bits(backend, kind, many_splits):
    """The test above can fail: the same batches change bits where the option is off."""
    ordinary = pools(kind, backend, range(8), pasa.PasaConfig())
    assert any(changed(pool, EACH, seed) for seed, pool in ordinary)


@pytest.mark.parametrize("kind", ["decode", "paged", "dense"])
def test_the_splits_of_long_sequences(kind, monkeypatch):
    """The same with the splits that calls really have, for sequences of 1, 2 and 3 of them."""
    monkeypatch.setattr(launch, "processors", lambda _: 132)
    pool = draw(kind, 3, config=INVARIANT, backend="triton", device=DEVICE)
    g = torch.Generator().manual_seed(0)
    keys = {"dense": (2100,) * 3}.get(kind, (300, 1100, 2100))
    sequences = []
    for each, n in zip(pool.sequences, keys, strict=False):
        k, v = (torch.randn(n, *each.k.shape[1:], generator=g).half().to(DEVICE) for _ in range(2))
        sequences.append(each._replace(q=each.q[:1].contiguous(), k=k + 50.0 * (n == 1100), v=v))
    assert changed(dataclasses.replace(pool, sequences=tuple(sequences)), 4, 3) == 0


@pytest.mark.parametrize(("kv_heads", "most"), [(1, 64), (2, 64), (3, 32), (4, 32), (8, 16), (28, 4), (200, 1)])
def test_one_sequence_occupies_a_gpu(kv_heads, most, monkeypatch):
    """A long sequence gets splits for the 132 multiprocessors of an H100; a short one gets splits of 2048 keys."""
    monkeypatch.setattr(launch, "processors", lambda _: 132)
    shape = torch.empty(2, kv_heads, 4, 16)
    limits = launch.fixed_limits(KernelCall(shape, shape, shape, 1.0))
    assert limits == (1024, most)
    assert launch.fixed_splits(10**6, *limits) == most
    lengths = {0: 1, 1: 1, 2048: 1, 2049: 2, 2**14 - 1: 8, 2**14: 16, 2**14 + 1: 17}
    assert {keys: launch.fixed_splits(keys, 1024, 64) for keys in lengths} == lengths


@pytest.fixture
def constants(monkeypatch, many_splits):
    """Launch nothing; return a dict that collects the constants and options of every kernel, on an H100's tiles.

    The tile that would be measured as the fastest depends on the batch here, as it may on a GPU.
    """
    collected = defaultdict(set)

    def record(kernel, grid, tensors, numbers, flags, **options):
        which = {name: flags.get(name) for name in ("EXACT", "FAST", "ANCHORED", "TILED", "BLOCK_M")}
        if kernel is not launch.merge_kernel:  # which has the tile of the kernel before it
            del which["BLOCK_M"]
        collected[(kernel.__name__, *which.items())].add((*sorted(flags.items()), *sorted(options.items())))

    modules = launch, paged_launch, anchor_launch, paper, prefill, mask_launch, short
    for module in modules:
        monkeypatch.setattr(module, "launch", record)
    for module in (*modules, tiles):
        if hasattr(module, "device_architecture"):
            monkeypatch.setattr(module, "device_architecture", lambda _: "sm_90")
    monkeypatch.setattr(backend, "hopper_serves", lambda _: False)
    monkeypatch.setattr(prefill, "best_tile", lambda _, variant, choices, run: choices[len(collected) % len(choices)])
    monkeypatch.setattr(plans, "_plans", {})
    return collected


@pytest.mark.parametrize(
    ("kind", "recovery"), [*((kind, "exact") for kind in KINDS), *((kind, "paper") for kind in ("dense", "packed"))]
)
def test_launches_of_a_sequence_have_the_same_constants(kind, recovery, constants):
    """Tiles, warps and the width of the merge decide in which order a GPU adds up; only the batch varies here."""
    config = dataclasses.replace(INVARIANT, recovery=recovery)
    for seed in range(8):
        pool = draw(kind, seed, device=DEVICE, config=config, backend="triton")
        if recovery == "paper":
            pool.how.update(window=None, softcap=None, sinks=None)
        constants.clear()
        for index in range(12):
            g = torch.Generator().manual_seed(index)
            members = torch.randint(len(pool.sequences), (1 + index,), generator=g).tolist()
            pool.attend(members, g)
        assert constants
        assert {name for name, different in constants.items() if len(different) > 1} == set()


def heights(rows, invariant):
    """Return the heights of Hopper's tiles in batches of 1 to 16, in warpgroups of 64 rows."""
    found = set()
    for batch in (1, 2, 3, 5, 16):
        q, k = torch.Size((batch, 8, rows, 128)), torch.Size((batch, 2, 700, 128))
        strides = [hopper.dense_strides(each) for each in (q, k, k)]
        found.add(hopper.Plan(q, k, strides, False, 0, torch.device("cpu"), invariant).plain[2][2])
    return found


def test_height_of_hoppers_tiles(monkeypatch):
    monkeypatch.setattr(hopper, "processors", lambda _: 132)
    assert any(len(heights(rows, False)) > 1 for rows in (64, 200, 1000))  # otherwise this would test nothing
    assert all(len(heights(rows, True)) == 1 for rows in (64, 200, 1000))


@pytest.mark.parametrize("backend", CLAIMED)
def test_it_costs_no_accuracy(backend):
    for rows, keys in ((1, 2500), (40, 300)):
        q, k, v = (x.to(DEVICE) for x in normal_qkv((4, 2), (rows, keys), 64, batch=2))
        golden, _ = pasa.golden_attention(q.cpu(), k.cpu(), v.cpu(), is_causal=True)
        errors = [
            max_error(pasa.attention(q, k, v, is_causal=True, config=config, backend=backend).cpu(), golden)
            for config in (pasa.PasaConfig(), INVARIANT)
        ]
        assert errors[1] <= 1.5 * errors[0]
