"""`pasa.scaled_dot_product_attention` takes torch's arguments to the letter, and can replace torch's function."""

import importlib
import inspect

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import pasa
from pasa.ops.attention import torch_sdpa as kept
from tests.pasa.patching.unets import classic_unet

TORCH = torch._C._nn.scaled_dot_product_attention
ERROR = 2.0**-9  # of outputs of size 4 at most, with FP16 inputs; FP16's own spacing there is 2^-9


@pytest.fixture
def replaced(monkeypatch):
    """torch's function is replaced by pasa's, and the calls that reach `pasa.attention` are counted."""
    calls = []

    def counted(*arguments, **keywords):
        calls.append(arguments[0].dtype)
        return pasa.attention(*arguments, **keywords)

    monkeypatch.setattr("pasa.scaled_dot_product.attention", counted)
    monkeypatch.setattr(F, "scaled_dot_product_attention", pasa.scaled_dot_product_attention)
    return calls


def tensors(query, key, value, dtype=torch.float16):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in (query, key, value)]


def expected(query, key, value, attn_mask=None, **keywords):
    """Return torch's output for the same numbers in FP64."""
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = attn_mask.double()
    return TORCH(query.double(), key.double(), value.double(), attn_mask, **keywords)


def check(query, key, value, attn_mask=None, **keywords):
    out = pasa.scaled_dot_product_attention(query, key, value, attn_mask, **keywords)
    truth = expected(query, key, value, attn_mask, **keywords)
    assert out.shape == truth.shape
    assert out.dtype == query.dtype
    assert (out.double() - truth).abs().max() <= ERROR
    return out


# ---- the signature and the shapes


def test_signature_is_that_of_torch():
    schema = torch.ops.aten.scaled_dot_product_attention.default._schema.arguments
    ours = list(inspect.signature(pasa.scaled_dot_product_attention).parameters.values())
    assert [(p.name, p.kind is p.KEYWORD_ONLY) for p in ours] == [(each.name, each.kwarg_only) for each in schema]
    for parameter, each in zip(ours, schema, strict=True):
        default = each.default_value if each.has_default_value() else parameter.empty
        assert parameter.default is default or parameter.default == default


SHAPES = [
    ((2, 4, 8, 16), (2, 4, 6, 16), (2, 4, 6, 16)),
    ((4, 8, 16), (4, 6, 16), (4, 6, 16)),
    ((8, 16), (6, 16), (6, 16)),
    ((3, 2, 4, 8, 16), (3, 2, 4, 6, 16), (3, 2, 4, 6, 16)),
    ((2, 3, 2, 4, 8, 16), (3, 1, 4, 6, 16), (3, 2, 4, 6, 16)),
    ((2, 4, 8, 16), (2, 1, 6, 16), (2, 1, 6, 16)),
    ((2, 1, 8, 16), (2, 4, 6, 16), (2, 4, 6, 16)),
    ((1, 4, 8, 16), (2, 4, 6, 16), (2, 4, 6, 16)),
    ((4, 8, 16), (2, 4, 6, 16), (2, 4, 6, 16)),
    ((2, 4, 8, 16), (2, 4, 6, 16), (2, 1, 6, 16)),
    ((2, 4, 8, 16), (6, 16), (4, 6, 16)),
    ((2, 4, 8, 16), (2, 4, 6, 16), (2, 4, 6, 12)),
    ((2, 4, 8, 16), (2, 4, 6, 16), (2, 4, 6, 40)),
]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_shapes_that_torch_takes(shapes, is_causal):
    check(*tensors(*shapes), is_causal=is_causal)


@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 4, 8, 16), (2, 2, 6, 16), (2, 2, 6, 16)),
        ((4, 8, 16), (2, 6, 16), (2, 6, 16)),
        ((3, 2, 4, 8, 16), (3, 2, 2, 6, 16), (3, 2, 2, 6, 24)),
        ((1, 4, 8, 16), (2, 2, 6, 16), (2, 2, 6, 16)),
    ],
    ids=str,
)
def test_query_heads_share_key_heads_only_if_asked(shapes):
    q, k, v = tensors(*shapes)
    check(q, k, v, enable_gqa=True)
    with pytest.raises(ValueError, match="enable_gqa=True"):
        pasa.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize(
    ("query", "mask"),
    [
        ((2, 4, 8, 16), (8, 6)),
        ((2, 4, 8, 16), (1, 6)),
        ((2, 4, 8, 16), (4, 1, 6)),
        ((2, 4, 8, 16), (2, 1, 8, 6)),
        ((4, 8, 16), (4, 8, 6)),
        ((4, 8, 16), (1, 8, 6)),
        ((8, 16), (8, 6)),
        ((3, 2, 4, 8, 16), (8, 6)),
        ((3, 2, 4, 8, 16), (4, 8, 1)),
        ((3, 2, 4, 8, 16), (2, 1, 8, 6)),
        ((3, 2, 4, 8, 16), (3, 1, 4, 8, 6)),
        ((3, 2, 4, 8, 16), (1, 1, 1, 1, 6)),
    ],
    ids=str,
)
def test_masks_that_torch_takes(query, mask):
    key = (*query[:-2], 6, 16)
    q, k, v = tensors(query, key, key)
    bias = torch.randn(mask)
    check(q, k, v, bias)
    check(q, k, v, (bias > -1) | (torch.arange(mask[-1]) == 0))  # every row sees a key
    check(q, k, v, bias.half())


@given(st.data())
@settings(max_examples=150)
def test_equals_torch_on_many_arguments(data):
    """Property: the same output as torch's function in FP64 on the same FP16 numbers, and FP32 bit for bit."""
    leading = data.draw(st.lists(st.integers(1, 3), max_size=3), label="leading")
    queries, keys, width, of_values = (data.draw(st.integers(1, 9)) for _ in range(4))
    gqa = bool(leading) and data.draw(st.booleans(), label="gqa")
    of_query = [*leading[:-1], leading[-1] * data.draw(st.integers(1, 3))] if gqa else leading
    shapes = [(*of_query, queries, width), (*leading, keys, width), (*leading, keys, of_values)]
    kind = data.draw(st.sampled_from(["none", "causal", "bool", "float"]), label="mask")
    cut = data.draw(st.integers(0, len(of_query)), label="mask dimensions")
    mask = None if kind in ("none", "causal") else torch.randn(*of_query[cut:], queries, keys)
    if kind == "bool":
        mask = mask > 0
        mask[..., 0] = True
    keywords = {
        "is_causal": kind == "causal",
        "scale": data.draw(st.sampled_from([None, 0.25, 1.0]), label="scale"),
        "enable_gqa": gqa,
    }
    check(*tensors(*shapes), mask, **keywords)
    q, k, v = tensors(*shapes, torch.float32)
    single = pasa.scaled_dot_product_attention(q, k, v, mask, **keywords)
    assert torch.equal(single, TORCH(q, k, v, mask, **keywords))


@pytest.mark.parametrize(("queries", "keys"), [(5, 9), (9, 5), (7, 7), (1, 6), (6, 1)])
def test_causality_is_top_left(queries, keys):
    """Query i sees keys up to i at every pair of lengths. Keys that no row sees may be NaN."""
    q, k, v = tensors((1, 2, queries, 8), (1, 2, keys, 8), (1, 2, keys, 8))
    out = check(q, k, v, is_causal=True)
    k[:, :, queries:], v[:, :, queries:] = torch.nan, torch.inf
    assert torch.equal(pasa.scaled_dot_product_attention(q, k, v, is_causal=True), out)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("queries", "keys"), [(5, 9), (7, 7)])
@pytest.mark.parametrize("variant", ["causal_upper_left", "causal_lower_right"])
def test_causal_bias_of_torch(replaced, variant, queries, keys, dtype):
    """torch's own dispatch of this class compares functions by identity, so it fails once the function is replaced."""
    bias = importlib.import_module("torch.nn.attention.bias")
    mask = getattr(bias, variant)(queries, keys)
    q, k, v = tensors((1, 2, queries, 8), (1, 2, keys, 8), (1, 2, keys, 8), dtype)
    out = F.scaled_dot_product_attention(q, k, v, mask)
    assert (out.double() - expected(q, k, v, mask._materialize())).abs().max() <= ERROR
    assert bool(replaced) == (dtype == torch.float16)
    with pytest.raises(ValueError, match="leave one out"):
        F.scaled_dot_product_attention(q, k, v, mask, is_causal=True)
    with pytest.raises(ValueError, match=r"CausalBias of \(3, 4\)"):
        F.scaled_dot_product_attention(q, k, v, getattr(bias, variant)(3, 4))


# ---- the numbers


def test_scores_beyond_fp16():
    q, k, v = tensors((1, 2, 40, 64), (1, 2, 40, 64), (1, 2, 40, 64))
    q, k = q + 60, k + 60  # scores of 230,400
    assert (q @ k.mT).isinf().all()
    out = pasa.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert (out.double() - expected(q, k, v, is_causal=True)).abs().max() <= 2.0**-6


def test_rows_without_keys_are_zero():
    q, k, v = tensors((1, 2, 4, 8), (1, 2, 5, 8), (1, 2, 5, 8))
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[2] = False
    out = pasa.scaled_dot_product_attention(q, k, v, mask)
    assert (out[:, :, 2] == 0).all()
    assert (out[:, :, :2] != 0).all()


@pytest.mark.parametrize("shapes", [((2, 0, 8), (2, 3, 8), (2, 3, 8)), ((2, 3, 8), (2, 0, 8), (2, 0, 8))], ids=str)
def test_calls_without_queries_or_keys_go_to_torch(shapes):
    q, k, v = tensors(*shapes)
    out = pasa.scaled_dot_product_attention(q, k, v)
    assert torch.equal(out, TORCH(q, k, v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_other_dtypes_go_to_torch_unchanged(replaced, dtype):
    q, k, v = tensors((2, 4, 8, 16), (2, 4, 6, 16), (2, 4, 6, 16), dtype)
    mask = torch.zeros(8, 6, dtype=torch.bool)  # of rows without keys: torch's own answer too
    for arguments in ((), (mask,), (None, 0.0, True)):
        ours, theirs = (f(q, k, v, *arguments) for f in (F.scaled_dot_product_attention, TORCH))
        assert torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))
    torch.manual_seed(1)
    dropped = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(dropped, TORCH(q, k, v, dropout_p=0.5))
    assert replaced == []


def test_fp16_autocast_is_fp16(replaced):
    """FP32 tensors under FP16 autocast are served by pasa, because torch would cast them to FP16."""
    q, k, v = tensors((1, 2, 9, 16), (1, 2, 9, 16), (1, 2, 9, 16), torch.float32)
    with torch.autocast("cpu", torch.float16):
        out = F.scaled_dot_product_attention(q, k, v)
        mixed = F.scaled_dot_product_attention(q.half(), k, v.bfloat16())
        double = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    with torch.autocast("cpu", torch.bfloat16):
        assert F.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
    assert out.dtype == mixed.dtype == torch.float16
    assert double.dtype == torch.float64
    assert (out.double() - expected(q, k, v)).abs().max() <= 2 * ERROR
    assert replaced == [torch.float16, torch.float16]


@pytest.mark.parametrize("shapes", [SHAPES[0], SHAPES[3], SHAPES[5], SHAPES[11], SHAPES[12]], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients(shapes, is_causal):
    ours = [x.requires_grad_() for x in tensors(*shapes)]
    truth = [x.detach().double().requires_grad_() for x in ours]
    pasa.scaled_dot_product_attention(*ours, is_causal=is_causal).double().square().sum().backward()
    TORCH(*truth, is_causal=is_causal).square().sum().backward()
    for x, exact in zip(ours, truth, strict=True):
        assert (x.grad.double() - exact.grad).abs().max() <= 2.0**-9 * exact.grad.abs().max().clamp(min=1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_compiles_to_one_graph(replaced, dtype):
    def model(q, k, v):
        wide = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return F.scaled_dot_product_attention(wide, q, q[..., :8]) * 2

    q, k, v = tensors((2, 4, 6, 16), (2, 2, 9, 16), (2, 2, 9, 16), dtype)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for x in (q, k, v):
        x.requires_grad_()
    out, truth = compiled(q, k, v), model(q, k, v)
    assert torch.equal(out, truth)
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), (q, k)), torch.autograd.grad(truth.sum(), (q, k))))


def test_lengths_that_change_are_compiled_once():
    """Fewer and more queries than keys, with symbolic lengths: causality stays top-left."""

    def model(q, k, v):
        return pasa.scaled_dot_product_attention(q, k, v, is_causal=True)

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for queries, keys in ((5, 7), (7, 5), (6, 6), (9, 13)):
        q, k, v = tensors((2, 3, queries, 16), (2, 3, keys, 16), (2, 3, keys, 16))
        assert torch.equal(compiled(q, k, v), model(q, k, v))


def test_exports_with_a_length_that_changes(replaced):
    class Model(torch.nn.Module):
        def forward(self, q, k):
            return F.scaled_dot_product_attention(q, k, k[..., :4])

    q, k = torch.randn(1, 2, 8, 16).half(), torch.randn(1, 2, 9, 16).half()
    length = torch.export.Dim("length", min=4, max=64)
    program = torch.export.export(Model(), (q, k), dynamic_shapes={"q": {2: length}, "k": None}).module()
    longer = torch.randn(1, 2, 21, 16).half()
    assert torch.equal(program(longer, k), Model()(longer, k))


def test_meta_tensors():
    q = torch.empty(3, 2, 4, 8, 16, dtype=torch.float16, device="meta")
    assert pasa.scaled_dot_product_attention(q, q, q[..., :4], is_causal=True).shape == (3, 2, 4, 8, 4)


# ---- scales that pasa.attention does not take


@pytest.mark.parametrize("scale", [0, -0.5, -2, 1e-30, -1e-300, True, torch.tensor(0.5), np.float32(-0.25)], ids=repr)
@pytest.mark.parametrize("is_causal", [False, True])
def test_scales_that_torch_takes(scale, is_causal):
    """Story: a program turns scores off with scale=0, or negates them; the FP32 model took it, so FP16 must."""
    shapes = (2, 4, 8, 16), (2, 4, 6, 16), (2, 4, 6, 24)
    check(*tensors(*shapes), scale=scale, is_causal=is_causal)


def test_scales_that_change_are_compiled():
    model = torch.compile(
        lambda q, scale: pasa.scaled_dot_product_attention(q, q, q, scale=scale),
        fullgraph=True, dynamic=True, backend="aot_eager",
    )  # fmt: skip
    q = torch.randn(1, 2, 8, 16).half()
    for scale in (0.5, -0.25, 0.0, 0.125):
        assert (model(q, scale).double() - expected(q, q, q, scale=scale)).abs().max() <= ERROR


def test_gradients_of_a_negative_scale():
    inputs = [x.requires_grad_() for x in tensors((1, 2, 8, 16), (1, 2, 8, 16), (1, 2, 8, 16))]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    pasa.scaled_dot_product_attention(*inputs, scale=-0.5).float().square().sum().backward()
    TORCH(*exact, scale=-0.5).square().sum().backward()
    for x, y in zip(inputs, exact, strict=True):
        assert (x.grad.double() - y.grad).abs().max() <= 2**-7 * y.grad.abs().max()


# ---- what is refused


Q = torch.zeros(1, 2, 3, 8).half()
REFUSED = [
    (NotImplementedError, r"dropout_p=0.25 is not supported in FP16: pass 0.0", (Q, Q, Q), {"dropout_p": 0.25}),
    (ValueError, r"attn_mask \(3, 3\) and is_causal=True exclude", (Q, Q, Q, Q[0, 0, :, :3], 0.0, True), {}),
    (ValueError, r"query has 2 heads, key 3 and value 3", (Q, Q[:, [0, 1, 0]], Q[:, [0, 1, 0]]), {"enable_gqa": True}),
    (ValueError, r"query has 2 heads, key 2 and value 1", (Q, Q, Q[:, :1]), {"enable_gqa": True}),
    (ValueError, r"query \(1, 2, 3, 8\), key \(1, 3, 3, 8\)", (Q, Q[:, [0, 1, 0]], Q[:, [0, 1, 0]]), {}),
    (ValueError, r"query has 1 dimensions \(8,\)", (Q[0, 0, 0], Q, Q), {}),
    (ValueError, r"query has 2 dimensions \(3, 8\).*enable_gqa", (Q[0, 0], Q, Q), {"enable_gqa": True}),
    (ValueError, r"attn_mask \(5, 3\) does not broadcast", (Q, Q, Q, torch.zeros(5, 3)), {}),
    (ValueError, r"attn_mask \(5, 3, 3\) does not broadcast", (Q[0], Q[0], Q[0], torch.zeros(5, 3, 3)), {}),
    (ValueError, r"attn_mask \(2, 1, 3, 3\) does not broadcast", (Q[0], Q[0], Q[0], torch.zeros(2, 1, 3, 3)), {}),
    (TypeError, r"key is torch.float32 but query is torch.float16", (Q, Q.float(), Q), {}),
    (ValueError, r"head dim of query is 8 but that of key is 4", (Q, Q[..., :4], Q), {}),
    (ValueError, r"differ in shape", (Q, Q, Q[:, :, :2]), {}),
    (ValueError, r"scale=inf is outside", (Q, Q, Q), {"scale": float("-inf")}),
    (TypeError, r"scale='1' is a str", (Q, Q, Q), {"scale": "1"}),
    (TypeError, r"query.* must be Tensor, not list", ([1.0], Q, Q), {}),
    (TypeError, r"causal", (Q, Q, Q), {"causal": True}),
    (TypeError, r"is_causal=1 is a int", (Q, Q, Q), {"is_causal": 1}),
    (TypeError, r"enable_gqa=None is a NoneType", (Q, Q, Q), {"enable_gqa": None}),
    (TypeError, r"dropout_p=None is a NoneType", (Q, Q, Q), {"dropout_p": None}),
    (TypeError, r"dropout_p='0' is a str", (Q, Q, Q), {"dropout_p": "0"}),
]


@pytest.mark.parametrize(("error", "message", "arguments", "keywords"), REFUSED)
def test_refusals_name_the_value_in_one_line(error, message, arguments, keywords):
    with pytest.raises(error, match=message) as caught:
        pasa.scaled_dot_product_attention(*arguments, **keywords)
    if "must be Tensor" not in message:  # torch's own message
        assert "\n" not in str(caught.value)


def test_nested_tensors_are_refused():
    x = torch.nested.nested_tensor([torch.zeros(2, 3, 8).half()], layout=torch.jagged)
    with pytest.raises(TypeError, match="attention_varlen"):
        pasa.scaled_dot_product_attention(x, x, x)


# ---- as a replacement of torch's function in a whole program


def test_does_not_call_itself(replaced):
    """The function that pasa keeps is torch's, also after its module is loaded again while the name is pasa's."""
    q = torch.randn(1, 2, 5, 8)
    assert kept.torch_sdpa is TORCH
    assert importlib.reload(kept).torch_sdpa is TORCH
    assert torch.equal(F.scaled_dot_product_attention(q, q, q), TORCH(q, q, q))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_under_a_language_model(monkeypatch, dtype):
    import transformers  # takes seconds, which the other tests here do not need

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Qwen2Config(**sizes, num_hidden_layers=2, vocab_size=97)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype).eval()
    ids = torch.randint(1, 97, (2, 9))
    padding = torch.ones_like(ids)
    padding[0, :4] = 0
    runs = [{"input_ids": ids}, {"input_ids": ids, "attention_mask": padding}]
    with torch.no_grad():
        before = [model(**run).logits for run in runs]
        tokens = model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)
        monkeypatch.setattr(F, "scaled_dot_product_attention", pasa.scaled_dot_product_attention)
        after = [model(**run).logits for run in runs]
        again = model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert torch.equal(tokens, again)
    after[1][0, :4], before[1][0, :4] = 0, 0  # padding: rows without keys
    bound = 0 if dtype == torch.float32 else 2.0**-9 * before[0].abs().max()
    assert all((x - y).abs().max() <= bound for x, y in zip(before, after, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_under_a_unet(replaced, dtype):
    """A UNet of diffusers: its processors call the function by its name in torch."""
    model = classic_unet().to(dtype)
    inputs = torch.randn(2, 4, 8, 8).to(dtype), torch.tensor(3), torch.randn(2, 5, 32).to(dtype)
    with torch.no_grad():
        after = model(*inputs).sample
        F.scaled_dot_product_attention = TORCH
        before = model(*inputs).sample
    if dtype == torch.float32:
        assert torch.equal(before, after)
        assert replaced == []
    else:
        assert len(replaced) > 3
        assert (before - after).abs().max() <= 2.0**-7 * before.abs().max()


def test_under_torch_layers(replaced):
    """`nn.MultiheadAttention` without weights, and a transformer layer in training mode, reach the replacement."""
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).half()
    x = torch.randn(2, 5, 16).half()
    layer(x, src_mask=torch.ones(5, 5, dtype=torch.bool).triu(1), is_causal=True).sum().backward()
    assert replaced == [torch.float16]
