"""PASA's processor agrees with the original processor in FP32 for every flag of `Attention`."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from diffusers.models import attention_processor as own
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.attention_processor import Attention
from torch.nn import functional

import pasa
from pasa.patching import diffusers_attention as ours
from pasa.patching.callbacks import Callbacks

FACTOR = 2.0
"""The bound in this file: error against FP32 <= FACTOR x that of `naive`, which has only unavoidable roundings."""


def naive(query, key, value, attn_mask=None, scale=None, is_causal=False, **kwargs):
    """Attend with FP16 inputs, probabilities and output, and FP32 sums; (B, H, S, D), with grouped queries."""
    q, k, v = (x.half().float() for x in (query, key, value))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return (scores.softmax(-1).half().float() @ v).half().float()


class NaiveEager(own.AttnProcessor):
    """The eager processor of diffusers with the same roundings as :func:`naive`."""

    def __call__(self, attn, *args, **kwargs):
        heads, probabilities, back = attn.head_to_batch_dim, attn.get_attention_scores, attn.batch_to_head_dim
        with (
            mock.patch.object(attn, "head_to_batch_dim", lambda x: heads(x).half().float()),
            mock.patch.object(attn, "get_attention_scores", lambda *a: probabilities(*a).half().float()),
            mock.patch.object(attn, "batch_to_head_dim", lambda x: back(x.half().float())),
        ):
            return super().__call__(attn, *args, **kwargs)


def naive_output(attn, arguments):
    if ours.KINDS[type(attn.processor).__name__].module_scale:
        return NaiveEager()(attn, **arguments)
    with mock.patch.object(functional, "scaled_dot_product_attention", naive):
        return attn(**arguments)


@torch.no_grad()
def agree(attn, **arguments):
    """Assert the bound of this file, and that unpatching restores the same bits."""
    expected = attn(**arguments)
    bound = FACTOR * (naive_output(attn, arguments) - expected).abs().max()
    original = attn.processor
    with pasa.patch_pipeline(torch.nn.ModuleDict({"attn": attn})):
        assert isinstance(attn.processor, ours.PasaAttnProcessor)
        result = attn(**arguments)
    assert attn.processor is original
    assert torch.equal(attn(**arguments), expected)
    assert result.shape == expected.shape
    error = (result - expected).abs().max()
    assert 0 < error <= bound, f"error {error:.2e} > {FACTOR} x naive = {bound:.2e}"


def attention(**options):
    """Return an `Attention`, by default of 2 heads with head dimension 32; weights of norms differ from 1."""
    torch.manual_seed(0)
    module = Attention(**{"query_dim": 64, "heads": 2, "dim_head": 32} | options).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name and parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            if name in ("to_q.weight", "to_k.weight"):
                parameter.mul_(4)  # scores of a few units, so that rows differ
    return module


def states(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


FLAGS = {
    "plain": {},
    "bias": {"bias": True},
    "upcast_attention": {"upcast_attention": True},
    "upcast_softmax": {"upcast_softmax": True},
    "group_norm": {"norm_num_groups": 8},
    "residual_connection": {"residual_connection": True},
    "rescale_output_factor": {"rescale_output_factor": 1.7},
    "no output bias": {"out_bias": False},
    "norm_q and norm_k, layer": {"qk_norm": "layer_norm"},
    "norm_q and norm_k, rms": {"qk_norm": "rms_norm"},
    "norm_q and norm_k, l2": {"qk_norm": "l2"},
    "all of the VAE": {"bias": True, "norm_num_groups": 8, "residual_connection": True, "rescale_output_factor": 2.0},
}
EAGER = {name: flags for name, flags in FLAGS.items() if "qk_norm" not in flags}


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("image", [False, True], ids=["tokens", "image"])
def test_flags(name, image):
    """Each flag of `Attention` is honoured; with `image` the input is (B, C, height, width), as from the VAE."""
    agree(attention(**FLAGS[name]), hidden_states=states(2, 64, 7, 9) if image else states(2, 63, 64))


@pytest.mark.parametrize("name", [*EAGER, "scale_qk"])
def test_flags_of_the_eager_processor(name):
    """The eager processor uses the module's own scale; diffusers chooses it for `scale_qk=False`."""
    attn = attention(**EAGER[name]) if name in EAGER else attention(scale_qk=False)
    if name == "scale_qk":
        assert attn.scale == 1.0
        assert type(attn.processor) is own.AttnProcessor
    attn.set_processor(own.AttnProcessor())
    agree(attn, hidden_states=states(2, 63, 64))


def test_the_eager_processor_leaves_norms_out_and_so_do_we():
    attn = attention(qk_norm="layer_norm")
    attn.set_processor(own.AttnProcessor())
    agree(attn, hidden_states=states(2, 63, 64))


def test_the_scale_of_the_sdpa_processor_is_that_of_the_head():
    """A patch ignores ``attn.scale`` where `AttnProcessor2_0` does, and scales by the head dimension."""
    attn = attention()
    attn.scale = 3.0
    agree(attn, hidden_states=states(2, 63, 64))


def test_spatial_norm_is_conditioned_on_temb():
    attn = attention(spatial_norm_dim=8, residual_connection=True)
    agree(attn, hidden_states=states(2, 64, 6, 6), temb=states(2, 8, 6, 6, seed=2))


@pytest.mark.parametrize("norm", [None, "layer_norm", "group_norm"])
@pytest.mark.parametrize("keys", [1, 77])
def test_cross_attention(norm, keys):
    """Cross-attention agrees with the original, also to a single token as in SVD, where the only weight is 1."""
    options = {"cross_attention_dim": 32, "cross_attention_norm": norm, "cross_attention_norm_num_groups": 8}
    agree(attention(**options), hidden_states=states(3, 65, 64), encoder_hidden_states=states(3, keys, 32, seed=2))


def test_one_token_cross_attention_survives_scores_that_overflow():
    """Cross-attention to one token is right even if its score overflows FP16.

    An infinite score becomes NaN in the softmax, although the result does not depend on the score.
    """
    attn = attention(cross_attention_dim=32)
    with torch.no_grad():
        attn.to_q.weight.mul_(300)
        attn.to_k.weight.mul_(300)
    arguments = {"hidden_states": states(2, 9, 64), "encoder_hidden_states": states(2, 1, 32, seed=2)}
    partial = {"config": pasa.PasaConfig(precision="partial"), "backend": "reference"}
    with torch.no_grad(), pasa.patch_pipeline(torch.nn.ModuleDict({"attn": attn}), **partial):
        assert attn(**arguments).isnan().any()
    agree(attn, **arguments)


@pytest.mark.parametrize("processor", ["AttnProcessor", "AttnProcessor2_0"])
@pytest.mark.parametrize("rows", [1, 63])
def test_additive_masks(processor, rows):
    """Additive masks (B, 1 or S, Skv) as UNets make them apply to every head: 0 if visible, else -10000."""
    attn = attention(cross_attention_dim=32)
    attn.set_processor(getattr(own, processor)())
    mask = torch.where(torch.rand(2, rows, 77, generator=torch.Generator().manual_seed(3)) < 0.5, -1e4, 0.0)
    agree(attn, hidden_states=states(2, 63, 64), encoder_hidden_states=states(2, 77, 32, seed=2), attention_mask=mask)


def test_boolean_masks():
    mask = torch.arange(77)[None, None] < torch.tensor([77, 30])[:, None, None]
    agree(
        attention(cross_attention_dim=32),
        hidden_states=states(2, 63, 64),
        encoder_hidden_states=states(2, 77, 32, seed=2),
        attention_mask=mask,
    )


@pytest.mark.parametrize("cross", [False, True])
def test_fused_projections(cross):
    attn = attention(**({"cross_attention_dim": 32} if cross else {}), bias=True)
    attn.fuse_projections()
    attn.set_processor(own.FusedAttnProcessor2_0())
    with torch.no_grad():
        for name in ("to_k", "to_v") if cross else ("to_q", "to_k", "to_v"):
            getattr(attn, name).weight.fill_(torch.nan)  # the fused projections replace them, so nothing may read them
    more = {"encoder_hidden_states": states(2, 5, 32, seed=2)} if cross else {}
    agree(attn, hidden_states=states(2, 63, 64), **more)


@pytest.mark.parametrize("length", [1, 127, 129])
@pytest.mark.parametrize("width", [40, 64, 80, 160, 512])
def test_odd_shapes(length, width):
    """The head dimensions of Stable Diffusion 1 (40 to 160), SVD (64) and its VAE (512) agree at odd lengths."""
    agree(attention(heads=1, dim_head=width, query_dim=48), hidden_states=states(2, length, 48))


def test_temporal_attention_has_a_batch_of_pixels():
    """Temporal attention (B h w, frames, C) agrees: 4,608 sequences of 25 tokens at the second level of SVD's UNet."""
    agree(attention(heads=1, dim_head=64, query_dim=32), hidden_states=states(4608, 25, 32))


def test_slicing_is_no_obstacle():
    attn = attention()
    attn.set_attention_slice(1)
    assert isinstance(attn.processor, own.SlicedAttnProcessor)
    agree(attn, hidden_states=states(2, 63, 64))


def test_norms_in_fp32_under_autocast():
    """A module with norms of q and k runs under autocast.

    Story: under autocast RMSNorm returns FP32 and the projections BF16, so q, k and v differed in dtype.
    """
    attn = attention(qk_norm="rms_norm")
    arguments = {"hidden_states": states(2, 9, attn.query_dim)}
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = attn(**arguments)
        attn.set_processor(ours.PasaAttnProcessor(ours.KINDS["AttnProcessor2_0"], None, None, Callbacks()))
        found = attn(**arguments)
    assert found.dtype == expected.dtype
    assert torch.allclose(found.float(), expected.float(), atol=0.02)


def test_a_half_model_keeps_its_dtype():
    attn = attention(norm_num_groups=8).half()
    with torch.no_grad(), pasa.patch_pipeline(torch.nn.ModuleDict({"attn": attn})):
        assert attn(states(2, 63, 64).half()).dtype == torch.float16


class Dispatched:
    """A processor of the dispatched kind, reduced to its call."""

    _attention_backend = None

    def __call__(self, attn, hidden_states, **arguments):
        return dispatch_attention_fn(*hidden_states, backend=self._attention_backend, **arguments)


@pytest.fixture
def dispatched():
    """A processor whose attention is PASA's, registered with the dispatcher during the test."""
    member = ours.register_backend(None, None, Callbacks())
    yield ours.dispatched_processor(Dispatched(), member)
    ours.unregister_backend(member)


def tokens(queries=9, keys=13, heads=4, key_heads=4):
    """Return q, k, v as the dispatcher takes them: (B, S, H, D)."""
    return states(2, queries, heads, 16), states(2, keys, key_heads, 16, seed=2), states(2, keys, key_heads, 16, seed=3)


KEYS = torch.arange(13) < torch.tensor([13, 6])[:, None]


@pytest.mark.parametrize(
    ("sizes", "arguments"),
    [
        ({}, {}),
        ({}, {"scale": 1.5}),
        ({"key_heads": 2}, {"enable_gqa": True}),
        ({"keys": 9}, {"is_causal": True}),
        ({}, {"is_causal": True}),
        ({}, {"attn_mask": KEYS}),
        ({}, {"attn_mask": KEYS[:, None, None]}),
        ({}, {"attn_mask": torch.where(KEYS[:, None, None], 0.0, -1e4)}),
    ],
    ids=[
        "plain",
        "scale",
        "grouped",
        "causal",
        "causal from the first key",
        "mask of keys",
        "4-D mask",
        "additive mask",
    ],
)
def test_the_dispatchers_arguments_mean_what_they_meant(dispatched, sizes, arguments):
    given = tokens(**sizes)
    expected = Dispatched()(None, given, **arguments)
    with mock.patch.object(functional, "scaled_dot_product_attention", naive):
        bound = FACTOR * (Dispatched()(None, given, **arguments) - expected).abs().max()
    assert 0 < (dispatched(None, given, **arguments) - expected).abs().max() <= bound


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"dropout_p": 0.1}, r"dropout_p=0\.1"),
        ({"parallel_config": "ring"}, "parallel_config='ring'"),
    ],
)
def test_what_the_dispatcher_asks_beyond_that_is_refused_by_name(dispatched, arguments, reason):
    with pytest.raises(NotImplementedError, match=reason):
        dispatched(None, tokens(), **arguments)


def test_a_backend_of_the_dispatcher_is_not_in_its_lists(dispatched):
    """Registering PASA adds no member and no default to the dispatcher's enumeration of backends."""
    name = dispatched._attention_backend
    assert name.value.startswith("pasa-")
    assert name not in list(type(name))
    with pytest.raises(ValueError, match="pasa"):
        type(name)(name.value)
