"""The operators torch.ops.pasa.*: schemas, fake kernels and compilation."""

import dataclasses
import io

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._library.custom_ops import CustomOpDef
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

import pasa
from pasa.ops.arguments import LIMITS
from pasa.ops.attention.options import AttentionOptions
from tests.inputs import DEVICE, normal_qkv
from tests.pages import make_pages

SAMPLES = {
    "plain": {},
    "causal": {"is_causal": True},
    "bool mask": {"attn_mask": torch.ones(33, 70).bool().tril(9)},
    "float mask": {"attn_mask": torch.zeros(2, 1, 1, 70)},
    "diagnose": {"diagnose": True, "precision": "partial"},
    "paper": {"recovery": "paper", "beta": 0.9, "scale": 0.2},
    "window": {"window_left": 20, "window_right": 3, "return_max_logits": True},
    "sinks": {"sinks": torch.tensor([1.0, 0.0, -1.0, 2.0]), "softcap": 20.0, "return_max_logits": True},
}


@pytest.mark.parametrize("sample", SAMPLES)
def test_attention_passes_opcheck(sample):
    q, k, v = normal_qkv((4, 2), (33, 70), 32, batch=2)
    opcheck(torch.ops.pasa.attention.default, (q, k, v), SAMPLES[sample])


def test_attention_passes_opcheck_on_strided_bf16():
    q, k, v = (x.bfloat16().transpose(1, 2).contiguous().transpose(1, 2) for x in normal_qkv((2, 2), (9, 20), 16))
    opcheck(torch.ops.pasa.attention.default, (q, k, v))


@pytest.mark.parametrize("how", [{}, {"diagnose": True}, SAMPLES["window"], SAMPLES["sinks"]], ids=str)
def test_varlen_passes_opcheck(how):
    q, k, v = (x[0].transpose(0, 1) for x in normal_qkv((4, 2), (30, 30), 32))
    edges = torch.tensor([0, 10, 30])
    opcheck(torch.ops.pasa.attention_varlen.default, (q, k, v, edges, edges), how)


@pytest.mark.parametrize("how", [SAMPLES["window"], SAMPLES["sinks"]], ids=str)
def test_paged_passes_opcheck(how):
    pages = make_pages([5, 0, 40], (4, 2), stale=0.0)
    tensors = pages.q, pages.k_cache, pages.v_cache, pages.table, pages.lengths
    opcheck(torch.ops.pasa.attention_paged.default, tensors, how)


@pytest.mark.parametrize("sample", ["plain", "causal", "bool mask", "paper"])
def test_kernels_pass_opcheck(sample):
    q, k, v = (x.to(DEVICE) for x in normal_qkv((2, 1), (33, 70), 32))
    how = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in SAMPLES[sample].items()}
    opcheck(torch.ops.pasa.attention.default, (q, k, v), how | {"backend": "triton"})


def test_kernels_compile_into_one_graph():
    q, k, v = (x.to(DEVICE) for x in normal_qkv((4, 2), (33, 70), 64))

    def step(q, k, v):
        out, lse = pasa.attention(q * 1, k, v, is_causal=True, return_lse=True, backend="triton")
        return out + 1, lse

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(q, k, v), step(q, k, v), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("op", ["attention", "attention_varlen"])
def test_defaults_are_those_of_the_options(op):
    arguments = {a.name: a.default_value for a in getattr(torch.ops.pasa, op).default._schema.arguments}
    for field in dataclasses.fields(AttentionOptions):
        assert arguments[field.name] == field.default


@pytest.mark.parametrize("op", ["attention", "attention_varlen"])
def test_options_are_handed_on_in_order(op):
    options = AttentionOptions("pasa", "paper", 0.5, 1, 2, "unbiased", "saturate", "fp16", True)
    names = [field.name for field in dataclasses.fields(options)]
    assert options.arguments == tuple(getattr(options, name) for name in names)
    schema = [a.name for a in getattr(torch.ops.pasa, op).default._schema.arguments]
    limits = [each.split()[1].split("=")[0] for each in LIMITS]
    # story: bounds of lengths stood before is_causal, so a graph that was saved earlier ran without its causal limit
    behind = ["max_seqlen_q", "max_seqlen_k"] if op == "attention_varlen" else []
    assert schema[schema.index("is_causal") :] == [*limits, *names, "diagnose", "backend", *behind]


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


def test_windows_sinks_and_soft_caps_compile():
    q, k, v = normal_qkv((4, 2), (33, 70), 32)
    pages, edges = make_pages([5, 0, 40], (4, 2)), torch.tensor([0, 33])
    how = {"window": (20, 0), "softcap": 20.0, "return_lse": True, "return_max_logits": True}

    def step(q, k, v, sinks):
        packed = (x[0].transpose(0, 1) for x in (q, k[:, :, :33], v[:, :, :33]))
        return (
            *pasa.attention(q, k, v, sinks=sinks, **how),
            *pasa.attention_varlen(*packed, edges, edges, 33, 33, sinks=sinks, **how),
            *pasa.attention_paged(pages.q, *pages[1:5], sinks=sinks, **how),
        )

    sinks = torch.tensor([1.0, 0.0, -1.0, 2.0])
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(q, k, v, sinks), step(q, k, v, sinks), strict=True):
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


def test_varlen_compiles_with_a_bound_that_is_computed():
    """Story: the operator compared the bound with 1, which no graph can decide about a number that it computes."""
    q, k, v = (x[0].transpose(0, 1) for x in normal_qkv((4, 2), (30, 30), 32))
    edges = torch.tensor([0, 10, 30])

    def step(q, k, v, edges):
        most = edges.diff().max().item()
        return pasa.attention_varlen(q, k, v, edges, edges, most, most, is_causal=True)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(q, k, v, edges), step(q, k, v, edges))


def test_an_exported_graph_keeps_no_bound():
    """It may serve longer sequences than those of the example."""
    q, k, v = (x[0].transpose(0, 1) for x in normal_qkv((4, 2), (30, 30), 32))
    edges = torch.tensor([0, 10, 30])

    class Step(torch.nn.Module):
        def forward(self, *tensors):
            return pasa.attention_varlen(*tensors, 20, 20, is_causal=True)

    exported = torch.export.export(Step(), (q, k, v, edges, edges))
    (node,) = (each for each in exported.graph.nodes if "attention_varlen" in str(each.target))
    assert node.args[6] is True  # is_causal, where graphs that were saved earlier have it
    assert 20 not in (*node.args, *node.kwargs.values())


def test_recording_reaches_into_a_compiled_graph(by_reference):
    q, k, v = normal_qkv((2, 2), (9, 20), 16)
    compiled = torch.compile(lambda *x: pasa.attention(*x), fullgraph=True, backend="aot_eager")
    plain = compiled(q, k, v)
    with pasa.record_diagnostics() as records:
        assert torch.equal(compiled(q, k, v), plain)
    assert len(records) == 1
    assert records[0].max_score_before.min() > 0


PACKED = {"cu_seqlens_q": torch.tensor([0, 10, 30]), "cu_seqlens_k": torch.tensor([0, 0, 30])}


def arguments(op, dtype=torch.float16, strided=False):
    """Return keyword arguments of either operator."""
    heads_first = normal_qkv((4, 2), (30, 30), 32, batch=2)
    tensors = heads_first if op == "attention" else [x[0].transpose(0, 1) for x in heads_first]
    if strided:
        tensors = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors]
    return dict(zip("qkv", (x.to(dtype) for x in tensors), strict=True)) | (PACKED if op == "attention_varlen" else {})


def geometry(results):
    return [(x.shape, x.dtype, x.stride(), x.device.type) for x in results]


@pytest.mark.parametrize("op", ["attention", "attention_varlen"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("how", [{}, {"diagnose": True, "return_max_logits": True}], ids=str)
def test_fake_kernel_has_the_true_geometry(op, dtype, strided, how):
    call = getattr(torch.ops.pasa, op)
    real = arguments(op, dtype, strided)
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) for name, x in real.items()}
        stated = geometry(call(**fake, **how))
    assert stated == geometry(call(**real, **how))


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_the_output_has_the_memory_order_of_q(backend, how):
    """Models hold q as (B, S, H, D) and transpose the output back, so any other order would be copied once more."""
    torch.compiler.reset()
    attention = torch.compile(pasa.attention, backend="eager") if how == "compiled" else pasa.attention
    q, k, v = normal_qkv((4, 2), (30, 30), 32, batch=2)
    plain = attention(q, k, v, backend=backend)
    assert plain.is_contiguous()
    fused = torch.randn(2, 30, 3, 4, 32).half()
    for tokens in (q.transpose(1, 2).contiguous(), fused[:, :, 0].copy_(q.transpose(1, 2))):
        out = attention(tokens.transpose(1, 2), k, v, backend=backend)
        assert out.transpose(1, 2).is_contiguous()
        assert torch.equal(out, plain)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_meta_tensors_have_shapes(layout):
    q, k, v = normal_qkv((4, 2), (30, 40), 32)
    q, k, v = (x if layout == "HND" else x.transpose(1, 2) for x in (q, k, v))
    real = pasa.attention(q, k, v, tensor_layout=layout, return_lse=True)
    shapes = pasa.attention(*(x.to("meta") for x in (q, k, v)), tensor_layout=layout, return_lse=True)
    for x, expected in zip(shapes, real, strict=True):
        assert (x.shape, x.stride(), x.dtype) == (expected.shape, expected.stride(), expected.dtype)
        assert x.device.type == "meta"


@pytest.mark.parametrize("op", ["attention", "attention_varlen"])
def test_schema_has_no_side_effect_and_no_alias(op):
    schema = getattr(torch.ops.pasa, op).default._schema
    assert not schema.is_mutable
    assert all(x.alias_info is None for x in (*schema.arguments, *schema.returns))
    call_arguments = arguments(op)
    before = {name: x.clone() for name, x in call_arguments.items()}
    results = getattr(torch.ops.pasa, op)(**call_arguments)
    assert all(torch.equal(call_arguments[name], before[name]) for name in call_arguments)
    pointers = {x.untyped_storage().data_ptr() for x in call_arguments.values()}
    assert not pointers & {x.untyped_storage().data_ptr() for x in results if x.numel()}


def test_default_scale_of_the_operator():
    q, k, v = normal_qkv((2, 2), (9, 20), 64)
    for result, expected in zip(
        torch.ops.pasa.attention(q, k, v), torch.ops.pasa.attention(q, k, v, scale=0.125), strict=True
    ):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_compile_with_changing_lengths(kind):
    def step(q, k, v, mask):
        return pasa.attention(q, k, v, attn_mask=mask, is_causal=True, return_lse=True)

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="eager")
    for lengths in [(6, 9), (11, 14), (66, 129)]:
        q, k, v = normal_qkv((4, 2), lengths, 16, batch=2)
        keep = torch.rand(lengths, generator=torch.Generator().manual_seed(0)) < 0.7
        mask = keep if kind == "bool" else torch.where(keep, 0.25, -torch.inf)
        for got, expected in zip(compiled(q, k, v, mask), step(q, k, v, mask), strict=True):
            assert torch.equal(got, expected)
            assert got.stride() == expected.stride()


def test_exports_and_loads():
    """A saved program holds the operator by name, with its plain arguments."""

    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return pasa.attention(q, k, v, is_causal=True, config=pasa.PasaConfig(block_k=64))

    q, k, v = normal_qkv((4, 2), (6, 90), 16)
    program = torch.export.export(Model(), (q, k, v))
    assert torch.ops.pasa.attention.default in [node.target for node in program.graph.nodes]
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    assert torch.equal(torch.export.load(file).module()(q, k, v), Model()(q, k, v))


def test_vmap_is_a_loop():
    q, k, v = (x.unsqueeze(1) for x in normal_qkv((2, 1), (6, 9), 16, batch=3))
    mapped = torch.func.vmap(pasa.attention)(q, k, v)
    assert torch.equal(mapped, torch.stack([pasa.attention(*one) for one in zip(q, k, v, strict=True)]))


class Watch(TorchDispatchMode):
    """Record the operators that are dispatched."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_only_plain_calls_pass_by_the_dispatcher(monkeypatch):
    """Only plain calls skip the dispatcher; a mode, a subclass, vmap, a profiler and autograd still see theirs.

    The dispatcher costs the host 20 us a call, and 500 us if a gradient is needed.
    """
    calls = []
    real = CustomOpDef.__call__
    monkeypatch.setattr(CustomOpDef, "__call__", lambda *a, **k: calls.append(0) or real(*a, **k))
    q, k, v = normal_qkv((2, 2), (6, 9), 16)
    plain = pasa.attention(q, k, v)
    assert not calls
    with Watch() as watch:
        watched = pasa.attention(q, k, v)
    assert torch.ops.pasa.attention.default in watch.seen
    with torch.profiler.profile() as profile:
        profiled = pasa.attention(q, k, v)
    assert any(event.name == "pasa::attention" for event in profile.events())
    parameter = pasa.attention(torch.nn.Parameter(q, requires_grad=False), k, v)
    mapped = torch.func.vmap(pasa.attention)(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)).squeeze(1)
    differentiable = pasa.attention(q.clone().requires_grad_(), k, v)
    assert differentiable.requires_grad
    differentiable.float().sum().backward()
    assert len(calls) == 4
    with torch.no_grad():
        assert not pasa.attention(q.clone().requires_grad_(), k, v).requires_grad
    assert len(calls) == 4
    for other in (watched, profiled, parameter, mapped, differentiable):
        assert torch.equal(plain, other)


def test_a_view_with_a_sign_to_come_is_resolved():
    """A view with a lazy negation is resolved before the implementation reads it.

    Story: its type is Tensor, and the implementation read the memory below, which has the other
    sign.
    """
    q, k, v = normal_qkv((2, 2), (6, 9), 16)
    expected = pasa.attention(q, k, -v)
    assert torch.equal(pasa.attention(q, k, torch._neg_view(v)), expected)


def test_compiled_graphs_do_not_look_inside():
    """Dynamo does not trace into the operator of a compiled graph.

    Dynamo inspects every Python frame, including those that an operator in a graph runs.
    """
    q, k, v = normal_qkv((2, 2), (6, 9), 16)
    torch.compiler.reset()
    frames = CompileCounter()
    compiled = torch.compile(lambda *x: pasa.attention(*x), backend=frames, fullgraph=True)
    assert torch.equal(compiled(q, k, v), pasa.attention(q, k, v))
    assert frames.frame_count == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", [pasa.PasaConfig(), pasa.PasaConfig(accumulate="fp16")], ids=["fp32", "fp16"])
def test_autocast_does_not_reach_inside(dtype, config):
    """Autocast does not change the arithmetic inside the operator.

    Pipelines run under autocast. With FP16 accumulation the error of the output would silently grow
    sevenfold.
    """
    q, k, v = (x + 3 for x in normal_qkv((2, 2), (40, 200), 64))
    plain = pasa.attention(q, k, v, config=config)
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(pasa.attention(q, k, v, config=config), plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_default_dtype_does_not_reach_inside(dtype):
    """The default dtype, which model loaders set, does not change the result.

    Under FP16 and BF16 the scale was rounded to the default dtype, so all scores were off by up to
    2^-9 of themselves; under FP64 the multiplication with FP32 failed. A scale that is a power of
    two would hide the fault.
    """
    q, k, v = (x + 3 for x in normal_qkv((2, 2), (40, 200), 64))
    plain = pasa.attention(q, k, v, scale=0.1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(pasa.attention(q, k, v, scale=0.1), plain)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("edges", [[0, 10, 29], [0, 10, 31], [0, 40, 30], [1, 10, 30]], ids=str)
def test_compiled_varlen_refuses_wrong_lengths(edges):
    """Compiled calls refuse wrong lengths as eager calls do; otherwise rows would stay 0 or read other rows."""
    compiled = torch.compile(lambda *x: pasa.attention_varlen(*x, 30, 30), fullgraph=True, backend="eager")
    call_arguments = arguments("attention_varlen") | {"cu_seqlens_q": torch.tensor(edges)}
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        compiled(*call_arguments.values())
