"""Gradients of torch.ops.pasa.*: registration, tracing, compiling, and refused calls."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

import pasa
from pasa.ops import operators
from tests.inputs import DEVICE, normal_qkv

EDGES = torch.tensor([0, 10, 30])


def inputs(lengths=(33, 70), dim=32, batch=2, device="cpu"):
    return [x.to(device).requires_grad_() for x in normal_qkv((4, 2), lengths, dim, batch=batch)]


SAMPLES = {
    "plain": {},
    "causal": {"is_causal": True, "scale": 0.2},
    "bool mask": {"attn_mask": torch.ones(33, 70).bool().tril(9)},
    "float mask": {"attn_mask": torch.zeros(2, 1, 1, 70).requires_grad_()},
    "diagnose": {"diagnose": True, "precision": "partial"},
    "window": {"window_left": 20, "window_right": 3, "softcap": 20.0, "return_max_logits": True},
    "sinks": {"sinks": torch.tensor([1.0, 0.0, -1.0, 2.0]).requires_grad_(), "is_causal": True, "window_left": 9},
}


@pytest.mark.parametrize("sample", SAMPLES)
def test_operator_passes_opcheck_with_gradients(sample):
    opcheck(torch.ops.pasa.attention.default, tuple(inputs()), SAMPLES[sample])


def test_kernels_pass_opcheck_with_gradients():
    opcheck(
        torch.ops.pasa.attention.default,
        tuple(inputs(batch=1, device=DEVICE)),
        {"is_causal": True, "backend": "triton"},
    )


def test_varlen_passes_opcheck_with_gradients():
    packed = [x.detach()[0].transpose(0, 1).requires_grad_() for x in inputs((30, 30), batch=1)]
    opcheck(torch.ops.pasa.attention_varlen.default, (*packed, EDGES, EDGES), {"is_causal": True})


@pytest.mark.parametrize("gradients", ["both", "out", "lse"])
def test_backward_operators_pass_opcheck(gradients):
    q, k, v = (x.detach() for x in inputs((30, 30), batch=1))
    lse = torch.ones(1, 4, 30) if gradients != "out" else None
    out = None if gradients == "lse" else q.clone()
    mask, sinks, limits = torch.zeros(30, 30), torch.zeros(4).half(), (12, 2, 20.0)
    opcheck(
        torch.ops.pasa.attention_backward.default,
        (out, lse, q, k, v, mask, sinks, False, 0.2, *limits, True, True, "reference"),
    )
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    out, lse = (None if x is None else x[0].transpose(0, 1) for x in (out, lse))
    how = (EDGES, EDGES, sinks, True, None, *limits, True, "reference")
    opcheck(torch.ops.pasa.attention_varlen_backward.default, (out, lse, q, k, v, *how))


def test_compiles_into_one_graph_with_its_backward_pass():
    torch.compiler.reset()
    mask, sinks = torch.linspace(-1, 1, 70).requires_grad_(), torch.linspace(-1, 1, 4).half().requires_grad_()

    def step(q, k, v, mask, sinks):
        how = {"attn_mask": mask, "sinks": sinks, "is_causal": True, "window": (40, 0), "softcap": 30.0}
        out, lse = pasa.attention(q * 1, k, v, **how, return_lse=True)
        return out.float().square().sum() + lse[..., 5:].sum()

    def run(function):
        tensors = [*inputs(), mask, sinks]
        return torch.autograd.grad(function(*tensors), tensors)

    for got, expected in zip(run(torch.compile(step, fullgraph=True)), run(step), strict=True):
        assert torch.allclose(got, expected, rtol=2**-9, atol=1e-5)


def test_gradients_pass_through_vmap():
    """vmap loops over the operator, so its gradients are those of the single calls."""
    q, k, v = inputs(batch=3)
    torch.func.vmap(pasa.attention)(*(x.unsqueeze(1) for x in (q, k, v))).float().square().sum().backward()
    whole = inputs(batch=3)
    pasa.attention(*whole).float().square().sum().backward()
    for x, expected in zip((q, k, v), whole, strict=True):
        assert torch.allclose(x.grad, expected.grad, rtol=2**-9, atol=2**-12)


def squares(*qkv):
    return pasa.attention(*qkv, is_causal=True).float().square().sum()


def test_torch_func_grad():
    """torch.func.grad works, although torch does not support it for custom operators.

    torch's own message named neither the operator nor a workaround.
    """
    tensors = inputs()
    expected = torch.autograd.grad(squares(*tensors), tensors)
    result = torch.func.grad(squares, argnums=(0, 1, 2))(*(x.detach() for x in tensors))
    for got, true in zip(result, expected, strict=True):
        assert torch.equal(got, true)


def test_gradients_of_every_sample():
    """vmap of grad equals torch's loop over single calls."""
    q, k, v = (x.detach().unsqueeze(1) for x in inputs(batch=3))
    result = torch.func.vmap(torch.func.grad(squares, argnums=(0, 1, 2)))(q, k, v)
    for index in range(3):
        one = torch.func.grad(squares, argnums=(0, 1, 2))(q[index], k[index], v[index])
        for got, true in zip(result, one, strict=True):
            assert torch.equal(got[index], true)


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_torch_func_grad_is_traced_whole(mode):
    """torch.func.grad traces into one forward and one backward operator.

    Story: under torch.func the shortcut ran kernels on tensors without data, or traced into the
    implementation.
    """
    tensors = [x.detach() for x in inputs()]
    graph = make_fx(torch.func.grad(squares, argnums=(0, 1, 2)), tracing_mode=mode)(*tensors)
    called = [str(node.target) for node in graph.graph.nodes if "pasa" in str(node.target)]
    assert called == ["pasa.attention.default", "pasa.attention_backward.default"]
    for got, true in zip(graph(*tensors), torch.func.grad(squares, argnums=(0, 1, 2))(*tensors), strict=True):
        assert torch.equal(got, true)


def test_second_derivatives_of_torch_func_are_refused():
    q, k, v = (x.detach() for x in inputs())
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.func.grad(lambda x: torch.func.grad(squares)(x, k, v).float().square().sum())(q)


def test_a_result_that_nobody_uses_costs_no_gradient(monkeypatch):
    class NoGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return None

    q, k, v = inputs()
    out, *_, counts = torch.ops.pasa.attention(q, k, v, diagnose=True)
    assert out.requires_grad
    assert not counts.requires_grad
    monkeypatch.setattr(operators.dispatch, "call", lambda *_: pytest.fail("computed"))
    NoGradient.apply(out).sum().backward()
    assert q.grad is None


def test_second_derivatives_are_refused():
    q, k, v = inputs()
    (grad,) = torch.autograd.grad(pasa.attention(q, k, v).float().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        grad.float().square().sum().backward()


@pytest.mark.parametrize("varlen", [False, True])
def test_forward_mode_is_refused(varlen):
    """Forward-mode differentiation raises.

    Story: torch drops the tangent of a custom operator, so a Jacobian-vector product came out as 0.
    """
    q, k, v = (x.detach() for x in inputs((30, 30), batch=1))

    def attend(q):
        if not varlen:
            return pasa.attention(q, k, v)
        return pasa.attention_varlen(
            q[0].transpose(0, 1), *(x[0].transpose(0, 1) for x in (k, v)), EDGES, EDGES, 20, 20
        )

    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(attend, (q,), (torch.ones_like(q),))
    with torch.autograd.forward_ad.dual_level():
        attend(q)  # without a tangent there is nothing to lose
        with pytest.raises(NotImplementedError, match="forward-mode"):
            attend(torch.autograd.forward_ad.make_dual(q, torch.ones_like(q)))
