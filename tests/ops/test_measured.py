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
SLOWER = Measurement("9.0", FULL, 0.4, 0.5, {"eager": 1.3, "graph": 1.4}, "full", ("H200, commit 0",))
SHORT = dataclasses.replace(FULL, rows=512, keys=512)
FASTER = Measurement("9.0", SHORT, -0.4, -0.5, {"eager": 0.3, "graph": 0.9}, "short", ("H200, commit 0",))


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


def expected(shape, *known, captured=False):
    return measured.expected_gain("9.0", shape, known, captured=captured)


def at(tokens, gain):
    """Return a measurement of so many rows and keys."""
    return dataclasses.replace(SLOWER, shape=dataclasses.replace(FULL, rows=tokens, keys=tokens), eager=gain)


def test_similar_measurements_count_by_the_inverse_cube_of_their_distance():
    """512 and 4,096 tokens are one octave and two from 1,024, in rows and in keys."""
    between = dataclasses.replace(FULL, rows=1024, keys=1024)
    assert expected(between, at(512, -1.0), at(4096, 1.0)) == pytest.approx((-1 + 1 / 8) / (1 + 1 / 8))
    assert expected(between, at(4096, 1.0), at(512, -1.0)) == expected(between, at(512, -1.0), at(4096, 1.0))
    assert measured.expected_gain("8.0", FULL, (at(512, 1.0),)) is None
    assert expected(FULL) is None


def test_what_was_measured_of_a_shape_decides_alone():
    """Otherwise its neighbours could outweigh a small difference, and the check of the table would name the shape."""
    near = [at(tokens, -5.0) for tokens in (4095, 4097, 4094, 4098)]
    assert expected(FULL, *near, at(4096, 0.1)) == 0.1
    assert expected(FULL, at(4096, 0.1), at(4096, 0.3), *near) == pytest.approx(0.2)
    assert expected(FULL, *near) == pytest.approx(-5.0)


def test_only_the_most_similar_measurements_count():
    """Eight do: as far apart as to count alike, seven of them 0.2 and the eighth 1.0."""
    near = [at(tokens, 0.2) for tokens in (2**13, 2**11, 2**13, 2**11, 2**13, 2**11, 2**13)] + [at(2**11, 1.0)]
    assert expected(FULL, *near, at(2**14, -100.0), at(2**10, -100.0)) == pytest.approx(0.3)


def test_of_measurements_that_are_equally_far_those_for_the_preferred_backend_count_first():
    """The order of a table decides nothing: of nine at one distance, eight count."""
    near = [*[at(2**13, 1.0)] * 8, at(2**11, -1.0)]
    assert expected(FULL, *near) == expected(FULL, *near[::-1]) == pytest.approx(0.75)


def test_a_graph_and_an_eager_call_have_gains_of_their_own():
    assert (expected(SHORT, FASTER), expected(SHORT, FASTER, captured=True)) == (-0.4, -0.5)


@pytest.mark.parametrize(("gain", "name"), [(0.071, "sdpa"), (0.07, ""), (0.0, ""), (-0.07, ""), (-0.071, "triton")])
def test_a_difference_of_5_percent_makes_no_backend_the_faster_one(gain, name):
    assert measured.faster(gain) == name


def test_causal_rows_behind_a_cache_are_a_kind_of_their_own():
    """The fused attention takes two calls for them, and one for as many rows as keys."""
    causal = dataclasses.replace(SLOWER, shape=dataclasses.replace(FULL, causal=True))
    chunk = dataclasses.replace(FULL, causal=True, rows=512)
    assert expected(causal.shape, causal) == 0.4
    assert expected(chunk, causal) is None


def test_one_row_is_a_kind_of_its_own():
    """cuDNN divides the keys of a single row alone.

    Story: 3 rows over many keys followed a measurement of one row to `sdpa`, where they took several times as long.
    """
    single = dataclasses.replace(SLOWER, shape=dataclasses.replace(FULL, rows=1))
    assert expected(dataclasses.replace(FULL, rows=1, keys=64), single) == 0.4
    assert expected(dataclasses.replace(FULL, rows=1, causal=True), single) == 0.4
    assert expected(dataclasses.replace(FULL, rows=2), single) is None


def test_a_table_survives_being_written(tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "FILE", tmp_path / "table.json")
    measured.FILE.write_text(measured.to_json((SLOWER, FASTER)))
    assert measured.table.__wrapped__() == (SLOWER, FASTER)


def test_the_stored_table_can_be_read():
    assert {each.best(captured) for each in measured.table() for captured in (False, True)} == {"", "triton", "sdpa"}


def test_a_call_that_a_graph_captures_goes_to_the_backend_that_is_faster_there(hopper):
    """Eager decoding waits for the host, whose work for `sdpa` takes longer; a graph does not wait."""
    decoding = dataclasses.replace(FULL, rows=1)
    other = dataclasses.replace(SLOWER, shape=decoding, eager=-1.3)
    hopper.setattr(measured, "table", lambda: (other,))
    module = chosen()[0]
    hopper.setattr(registry, "capturing", lambda x: True)
    assert served(module, 1, 4096) == "triton"  # cuDNN's first call would break the capture off
    hopper.setattr(registry, "capturing", lambda x: False)
    assert served(module, 1, 4096) == "triton"
    hopper.setattr(registry, "capturing", lambda x: True)
    assert served(module, 1, 4096) == "sdpa"
    reason = {line.name: line.reason for line in pasa.backends()}["sdpa"]
    assert "serves calls like 1 of 1 shapes" in reason
    assert reason.endswith("because it is faster there than triton, in 1 of them in a CUDA graph alone")


@pytest.mark.parametrize("text", ["", "{", '[{"capability": "9.0"}]', '[{"shape": 1}]'])
def test_a_damaged_table_is_named(text, tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "FILE", tmp_path / "measured.json")
    measured.FILE.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"measured\.json holds no table of choices .*: install pasa again"):
        measured.table.__wrapped__()
