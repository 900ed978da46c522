"""The registry follows measured choices where both backends can serve, and nowhere else."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

import pasa
from pasa.ops import measured, notices, registry
from pasa.ops.attention.call import Call
from pasa.ops.attention.options import AttentionOptions
from pasa.ops.backends import Backend
from pasa.ops.measured import Measurement, Shape

FULL = Shape(dim=80, causal=False, mask="none", heads=16, kv_heads=16, rows=4096, keys=4096)
SLOWER = Measurement("9.0", FULL, "sdpa", "sdpa", {"eager": 1.3, "graph": 1.4}, "full", ("H200, commit 0",))
SHORT = dataclasses.replace(FULL, rows=512, keys=512)
FASTER = Measurement("9.0", SHORT, "triton", "triton", {"eager": 0.3, "graph": 0.9}, "short", ("H200, commit 0",))


@pytest.fixture
def hopper(monkeypatch):
    """Simulate a machine with an H200, a table of two measurements, and backends that return their names."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(measured, "table", lambda: (SLOWER, FASTER))
    warm = set()
    monkeypatch.setattr(
        Backend,
        "load",
        lambda self: SimpleNamespace(attend=lambda call: self.name, warm_up=warm.add, is_warm=warm.__contains__),
    )
    caches = registry.choose, registry._capability, notices.warn_once, measured.chosen, measured.rivals
    caches += (measured._of_kind,)
    for each in caches:
        each.cache_clear()
    yield monkeypatch
    for each in caches:
        each.cache_clear()


def chosen(dim=80, dtype=torch.float16, mask="none", features=(), backend=None, device="cuda", **options):
    needs = (device, dtype, dim, mask, features)
    return registry.choose(tuple(registry.BACKENDS.values()), backend, needs, AttentionOptions(**options).arguments)


def served(module, rows, keys, heads=16, dim=80, is_causal=False):
    """Return the name of the backend that gets a call."""
    q, k = (torch.empty(1, heads, n, dim, dtype=torch.float16, device="meta") for n in (rows, keys))
    return module.attend(Call(q, k, k, 1.0, is_causal=is_causal))


@pytest.mark.parametrize(
    ("rows", "keys", "heads", "who"),
    [
        (4096, 4096, 16, "sdpa"),
        (2100, 8192, 30, "sdpa"),
        (512, 512, 16, "triton"),
        (700, 700, 9, "triton"),
        (1024, 1024, 16, "triton"),  # an octave from it, and two from the other
        (32768, 32768, 256, "sdpa"),  # far beyond both
        (32, 32, 1, "triton"),
    ],
)
def test_a_shape_goes_to_the_backend_that_was_faster_for_one_like_it(hopper, rows, keys, heads, who):
    module, _, name = chosen()
    assert served(module, rows, keys, heads) == who
    assert name == "triton"  # whose kernels differentiate the call


def test_another_kind_of_call_stays_where_it_was(hopper):
    """A causal call is not like a full one, nor is decoding, and an H100 is not like another GPU."""
    assert served(chosen()[0], 4096, 4096, is_causal=True) == "triton"
    assert served(chosen()[0], 16, 4096) == "triton"
    assert served(chosen()[0], 1100, 4096) == "sdpa"
    hopper.setattr(torch.cuda, "get_device_capability", lambda *device: (8, 0))
    registry.choose.cache_clear()
    assert not isinstance(chosen()[0], registry.ByShape)


@pytest.mark.parametrize(
    "call",
    [
        {"dim": 64},
        {"dtype": torch.bfloat16},
        {"mask": "bool"},
        {"features": ("windows",)},
        {"features": ("sinks",)},
        {"features": ("soft caps",)},
        {"features": ("max logits",)},
        {"features": ("packed sequences",)},
        {"features": ("paged caches",)},
        {"recovery": "paper"},
        {"softmax": "unbiased"},
        {"backend": "triton"},
    ],
)
def test_calls_that_were_not_measured_do_not_ask_the_table(hopper, call):
    module, _, name = chosen(**call)
    assert not isinstance(module, registry.ByShape)
    assert name == "triton"


def test_without_a_faster_backend_no_call_asks_the_table(hopper):
    """A table in which the preferred backend is always faster costs calls nothing."""
    hopper.setattr(measured, "table", lambda: (FASTER,))
    measured.rivals.cache_clear()
    assert not isinstance(chosen()[0], registry.ByShape)


def test_the_list_of_servers_names_both(hopper):
    assert dict(registry.servers([(torch.float16, 80)]))["cuda"] == "triton or sdpa where it was measured to be faster"
    assert dict(registry.servers([(torch.float16, 64)]))["cuda"] == "triton"
    reasons = {line.name: line.reason for line in pasa.backends()}
    assert "serves calls like 1 of 2 shapes measured on such a GPU (head dim 80)" in reasons["sdpa"]
    assert "shapes measured" not in reasons["triton"]
    assert "shapes measured" not in reasons["reference"]


@pytest.mark.parametrize(
    ("dim", "like"), [(72, True), (96, True), (120, True), (64, False), (128, False), (136, False)]
)
def test_head_dimensions_that_the_same_kernels_serve_are_alike(hopper, dim, like):
    """Kernels have tiles of 64, 128 and 256 columns, and some serve only heads that fill a tile."""
    asked = chosen(dim=dim)[0]
    assert isinstance(asked, registry.ByShape) == like
    assert not like or served(asked, 4096, 4096, dim=dim) == "sdpa"
    assert measured.kind_of_dim(dim) == {72: (128, False), 64: (64, True), 128: (128, True), 136: (256, False)}.get(
        dim, (128, False)
    )


def test_the_nearest_measurement_counts():
    far = dataclasses.replace(
        SLOWER, shape=dataclasses.replace(FULL, rows=8192, keys=8192), eager="far", captured="far"
    )
    assert measured.nearest("9.0", dataclasses.replace(FULL, rows=5000), (far, SLOWER)) is SLOWER
    assert measured.nearest("9.0", dataclasses.replace(FULL, rows=7000, keys=7000), (far, SLOWER)) is far
    assert measured.nearest("8.0", FULL, (far, SLOWER)) is None
    assert measured.nearest("9.0", FULL, ()) is None


def test_of_two_measurements_that_are_equally_far_the_preferred_backend_wins():
    """The order of a table decides nothing."""
    long = dataclasses.replace(FASTER, shape=dataclasses.replace(FULL, rows=16384, keys=16384))
    between = dataclasses.replace(FULL, rows=8192, keys=8192)
    assert measured.nearest("9.0", between, (SLOWER, long)) is long
    assert measured.nearest("9.0", between, (long, SLOWER)) is long


def test_causal_rows_behind_a_cache_are_a_kind_of_their_own():
    """The fused attention takes two calls for them, and one for as many rows as keys."""
    causal = dataclasses.replace(SLOWER, shape=dataclasses.replace(FULL, causal=True))
    chunk = dataclasses.replace(FULL, causal=True, rows=512)
    assert measured.nearest("9.0", causal.shape, (causal,)) is causal
    assert measured.nearest("9.0", chunk, (causal,)) is None


def test_one_row_is_a_kind_of_its_own():
    """cuDNN divides the keys of a single row alone.

    Story: 3 rows over many keys followed a measurement of one row to `sdpa`, where they took several times as long.
    """
    single = dataclasses.replace(SLOWER, shape=dataclasses.replace(FULL, rows=1))
    assert measured.nearest("9.0", dataclasses.replace(FULL, rows=1, keys=64), (single,)) is single
    assert measured.nearest("9.0", dataclasses.replace(FULL, rows=1, causal=True), (single,)) is single
    assert measured.nearest("9.0", dataclasses.replace(FULL, rows=2), (single,)) is None


def test_a_table_survives_being_written(tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "FILE", tmp_path / "table.json")
    measured.FILE.write_text(measured.to_json((SLOWER, FASTER)))
    assert measured.table.__wrapped__() == (SLOWER, FASTER)


def test_the_stored_table_can_be_read():
    assert {name for each in measured.table() for name in (each.eager, each.captured)} <= {"", "triton", "sdpa"}


def test_a_call_that_a_graph_captures_goes_to_the_backend_that_is_faster_there(hopper):
    """Eager decoding waits for the host, whose work for `sdpa` takes longer; a graph does not wait."""
    decoding = dataclasses.replace(FULL, rows=1)
    other = dataclasses.replace(SLOWER, shape=decoding, eager="triton", ratios={"eager": 0.4, "graph": 1.5})
    hopper.setattr(measured, "table", lambda: (other,))
    module = chosen()[0]
    hopper.setattr(registry, "capturing", lambda x: True)
    assert served(module, 1, 4096) == "triton"  # cuDNN's first call would break the capture off
    hopper.setattr(registry, "capturing", lambda x: False)
    assert served(module, 1, 4096) == "triton"
    hopper.setattr(registry, "capturing", lambda x: True)
    assert served(module, 1, 4096) == "sdpa"
    assert "serves calls like 1 of 1 shapes" in {line.name: line.reason for line in pasa.backends()}["sdpa"]


@pytest.mark.parametrize("text", ["", "{", '[{"capability": "9.0"}]', '[{"shape": 1}]'])
def test_a_damaged_table_is_named(text, tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "FILE", tmp_path / "measured.json")
    measured.FILE.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"measured\.json holds no table of choices .*: install pasa again"):
        measured.table.__wrapped__()
