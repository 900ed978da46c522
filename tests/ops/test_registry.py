"""The registry: every field of a capability record is enforced, and the reference does all it claims."""

import dataclasses

import pytest
import torch

import pasa
from pasa.ops import registry
from pasa.ops.attention.options import AttentionOptions
from pasa.ops.registry import BACKENDS, Backend, Request, register, select

REFERENCE = BACKENDS["reference"]
CALL = Request("cpu", torch.float16, 64, "none", False, False, AttentionOptions())


@pytest.fixture
def own_registry(monkeypatch):
    monkeypatch.setattr(registry, "BACKENDS", {"reference": REFERENCE})
    return registry.BACKENDS


def test_names_of_the_architecture():
    assert sorted(BACKENDS) == ["npu", "reference", "triton"]
    listed = pasa.backends()
    assert [line.name for line in listed if line.available] == ["reference"]
    assert all(line.reason for line in listed)


@pytest.mark.parametrize("change", [{"name": "not a name"}, {"head_dims": (0, 4)}, {"head_dims": (8, 4)}])
def test_records_validate_themselves(change):
    with pytest.raises(ValueError, match=str(next(iter(change.values()))).replace("(", r"\(").replace(")", r"\)")):
        dataclasses.replace(REFERENCE, **change)


def test_a_name_is_taken_once(own_registry):
    with pytest.raises(ValueError, match="'reference' is already registered"):
        register(REFERENCE)


RESTRICTIONS = [
    ({"devices": ("npu",)}, "device cpu is not among npu"),
    ({"dtypes": (torch.bfloat16,)}, "dtype torch.float16 is not among torch.bfloat16"),
    ({"masks": ("bool",)}, "mask none is not among bool"),
    ({"precisions": ("fp32",)}, "precision pasa is not among fp32"),
    ({"recoveries": ("paper",)}, "recovery exact is not among paper"),
    ({"softmaxes": ("unbiased",)}, "softmax safe is not among unbiased"),
    ({"accumulates": ("fp16",)}, "accumulate fp32 is not among fp16"),
    ({"overflows": ("saturate",)}, "overflow inf is not among saturate"),
    ({"head_dims": (65, 128)}, "head dim 64 is outside 65 to 128"),
    ({"missing": lambda: "no such device here"}, "no such device here"),
]


@pytest.mark.parametrize(("restriction", "reason"), RESTRICTIONS, ids=lambda x: str(x)[:40])
def test_every_field_is_enforced(restriction, reason):
    assert dataclasses.replace(REFERENCE, **restriction).refusals(CALL) == [reason]


@pytest.mark.parametrize("need", ["varlen", "diagnostics"])
def test_every_flag_is_enforced(need):
    lacking = dataclasses.replace(REFERENCE, **{need: False})
    assert lacking.refusals(CALL) == []
    assert len(lacking.refusals(dataclasses.replace(CALL, **{need: True}))) == 1


def test_restrictions_cover_the_record():
    """A field added to the record needs a test that it refuses."""
    tested = {name for restriction, _ in RESTRICTIONS for name in restriction} | {"varlen", "diagnostics"}
    assert {f.name for f in dataclasses.fields(Backend)} - tested == {"name", "module", "label", "priority"}


def test_preferred_backend_that_can_serve(own_registry):
    better = dataclasses.replace(REFERENCE, name="better", priority=5, masks=("bool",))
    register(better)
    assert select(CALL) is REFERENCE
    assert select(dataclasses.replace(CALL, mask="bool")) is better
    with pytest.raises(NotImplementedError, match="better: mask none"):
        select(CALL, "better")


def test_all_reasons_are_told():
    call = dataclasses.replace(CALL, head_dim=1000)
    with pytest.raises(NotImplementedError, match=r"npu: .*triton: .*reference: head dim 1000 is outside"):
        select(call)


@pytest.mark.parametrize("precision", REFERENCE.precisions)
@pytest.mark.parametrize("recovery", REFERENCE.recoveries)
@pytest.mark.parametrize("accumulate", REFERENCE.accumulates)
@pytest.mark.parametrize("overflow", REFERENCE.overflows)
@pytest.mark.parametrize("mask", REFERENCE.masks)
def test_the_reference_does_what_it_claims(precision, recovery, accumulate, overflow, mask):
    config = pasa.PasaConfig(precision=precision, recovery=recovery, accumulate=accumulate, overflow=overflow)
    masks = {"none": None, "bool": torch.tensor([True, False]), "float": torch.tensor([0.5, -torch.inf])}
    for dtype in REFERENCE.dtypes:
        for dim in (REFERENCE.head_dims[0], 3, REFERENCE.head_dims[1]):
            x = torch.ones(1, 1, 2, dim, dtype=dtype)
            out = pasa.attention(x, x, x, attn_mask=masks[mask], config=config)
            torch.testing.assert_close(out, x)
