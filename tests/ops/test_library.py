"""torch.ops.pasa.*: schema, fake kernels, compilation."""

import dataclasses

import pytest
import torch
from torch.library import opcheck

import pasa
from pasa.ops.attention.options import AttentionOptions
from tests.inputs import normal_qkv

SAMPLES = {
    "plain": {},
    "causal": {"is_causal": True},
    "bool mask": {"attn_mask": torch.ones(33, 70).bool().tril(9)},
    "float mask": {"attn_mask": torch.zeros(2, 1, 1, 70)},
    "diagnose": {"diagnose": True, "precision": "partial"},
    "paper": {"recovery": "paper", "beta": 0.9, "scale": 0.2},
}


@pytest.mark.parametrize("sample", SAMPLES)
def test_attention_passes_opcheck(sample):
    q, k, v = normal_qkv((4, 2), (33, 70), 32, batch=2)
    opcheck(torch.ops.pasa.attention.default, (q, k, v), SAMPLES[sample])


def test_attention_passes_opcheck_on_strided_bf16():
    q, k, v = (x.bfloat16().transpose(1, 2).contiguous().transpose(1, 2) for x in normal_qkv((2, 2), (9, 20), 16))
    opcheck(torch.ops.pasa.attention.default, (q, k, v))


@pytest.mark.parametrize("diagnose", [False, True])
def test_varlen_passes_opcheck(diagnose):
    q, k, v = (x[0].transpose(0, 1) for x in normal_qkv((4, 2), (30, 30), 32))
    edges = torch.tensor([0, 10, 30])
    opcheck(torch.ops.pasa.attention_varlen.default, (q, k, v, edges, edges), {"diagnose": diagnose})


@pytest.mark.parametrize("op", ["attention", "attention_varlen"])
def test_defaults_are_those_of_the_options(op):
    arguments = {a.name: a.default_value for a in getattr(torch.ops.pasa, op).default._schema.arguments}
    for field in dataclasses.fields(AttentionOptions):
        assert arguments[field.name] == field.default


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_compiles_into_one_graph(layout):
    q, k, v = normal_qkv((4, 2), (33, 70), 32)
    if layout == "NHD":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))

    def step(q, k, v):
        out, lse = pasa.attention(q * 1, k, v, is_causal=True, tensor_layout=layout, return_lse=True)
        return out + 1, lse

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(q, k, v), step(q, k, v), strict=True):
        assert torch.equal(got, expected)


def test_compiles_with_inductor_and_other_lengths():
    def step(q, k, v):
        return pasa.attention(q, k, v) * 2

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for keys in (70, 71, 130):
        q, k, v = normal_qkv((4, 2), (33, keys), 32)
        assert torch.equal(compiled(q, k, v), step(q, k, v))


def test_varlen_compiles():
    q, k, v = (x[0].transpose(0, 1) for x in normal_qkv((4, 2), (30, 30), 32))
    edges = torch.tensor([0, 10, 30])

    def step(*tensors):
        return pasa.attention_varlen(*tensors, 20, 20, is_causal=True)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v, edges, edges), step(q, k, v, edges, edges))


def test_recording_reaches_into_a_compiled_graph():
    q, k, v = normal_qkv((2, 2), (9, 20), 16)
    compiled = torch.compile(lambda *x: pasa.attention(*x), fullgraph=True, backend="aot_eager")
    plain = compiled(q, k, v)
    with pasa.record_diagnostics() as records:
        assert torch.equal(compiled(q, k, v), plain)
    assert len(records) == 1
    assert records[0].max_score_before.min() > 0
