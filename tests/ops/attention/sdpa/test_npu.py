"""The fused attention of an NPU, from its documentation: torch_npu is faked, and tensors are the CPU's."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

import pasa
from pasa.ops.attention.call import Call
from pasa.ops.attention.sdpa import backend, fused, npu
from tests import fake_npu
from tests.inputs import ODD_LENGTHS, max_error, normal_qkv

HALF_ULP = 2.0**-11  # of an output near 1


class FusedAttention:
    """`npu_fused_infer_attention_score` as documented, with q.k stored in FP16 before it is scaled in FP32."""

    def __init__(self):
        self.calls, self.stored = [], torch.float32  # in which format scaled scores are stored

    def __call__(self, q, k, v, *, num_heads, num_key_value_heads, input_layout, scale, **how):
        self.calls.append(how | {"scale": scale})
        assert num_heads <= 256
        assert num_heads // num_key_value_heads <= 64
        assert (input_layout, num_heads, num_key_value_heads) == ("BNSD", q.shape[1], k.shape[1])
        assert all(x.is_contiguous() and x.dtype == torch.float16 and x.shape[3] % 16 == 0 for x in (q, k, v))
        assert how["softmax_lse_flag"] is True
        group, rows, keys = num_heads // num_key_value_heads, q.shape[2], k.shape[2]
        k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
        scores = ((q.float() @ k.mT).half().float() * scale).to(self.stored).float()
        hidden = how["atten_mask"]
        if how["sparse_mode"] == 2:
            assert torch.equal(hidden, torch.ones(2048, 2048).triu(1).bool())
            hidden = torch.ones(rows, keys).triu(1).bool()
        else:
            assert how["sparse_mode"] == 0
        if hidden is not None:
            assert how["inner_precise"] == 2 or how["sparse_mode"] == 2
            scores = scores.masked_fill(hidden, -torch.inf)
        out = (scores.softmax(-1) @ v).half()
        return out, scores.logsumexp(-1, keepdim=True)


@pytest.fixture
def torch_npu(monkeypatch):
    """Fake torch_npu, and let tensors of the CPU count as the NPU's."""
    module = fake_npu.install(monkeypatch)
    module.npu_fused_infer_attention_score = FusedAttention()
    format_of = fused.score_format
    monkeypatch.setattr(fused, "score_format", lambda device: format_of("npu"))
    return module


@pytest.mark.parametrize("lengths", [*ODD_LENGTHS, (40, 7)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask", [None, "bool"])
def test_results(torch_npu, lengths, is_causal, mask):
    """Head dimensions, layout, masks, the causal band and fully masked rows come out as pasa's do."""
    q, k, v = normal_qkv((4, 2), lengths, 40, batch=2)
    keep = None if mask is None else torch.rand(lengths, generator=torch.Generator().manual_seed(0)) > 0.3
    call = Call(q, k, v, 0.2, is_causal=is_causal, mask=keep)
    out, lse, *_ = backend.attend(call)
    golden, golden_lse = pasa.golden_attention(q, k, v, attn_mask=keep, is_causal=is_causal, scale=0.2)
    assert max_error(out, golden) <= 8 * HALF_ULP  # FP16 holds scores of 8 with 2^-8
    torch.testing.assert_close(lse, golden_lse.float(), atol=4e-3, rtol=0)
    assert torch_npu.npu_fused_infer_attention_score.calls


def test_scores_beyond_fp16_are_scaled_down(torch_npu):
    """q.k reaches 270,000. It is stored as a quarter of 65504 at most, and the scale takes the power of two up."""
    q, k, v = normal_qkv((2, 2), (30, 200), 64)
    q, k = q + 64, k + 64
    out, _, *_ = backend.attend(Call(q, k, v, 2.0**-10))
    golden, _ = pasa.golden_attention(q, k, v, scale=2.0**-10)
    assert torch.isfinite(out).all()
    assert (out >= v.amin(2, keepdim=True)).all()
    assert (out <= v.amax(2, keepdim=True)).all()
    scale = torch_npu.npu_fused_infer_attention_score.calls[0]["scale"]
    assert scale >= 2.0**-10 * 16
    assert max_error(out, golden) <= 0.1  # FP16 holds scores of 16000 with 8: 1/4 nat after the scale


@pytest.mark.parametrize("is_causal", [False, True])
def test_an_npu_whose_scaled_scores_are_infinite_is_served_in_fp32(torch_npu, is_causal):
    """Scores reach 80,000 nats. No power of two helps where scaled scores are FP16, so the row would be NaN."""
    torch_npu.npu_fused_infer_attention_score.stored = torch.float16
    q, k, v = normal_qkv((2, 2), (30, 30), 64)
    q, k = 8 * q + 100, 8 * k + 100
    out, _, *_ = backend.attend(Call(q, k, v, 0.125, is_causal=is_causal))
    golden, _ = pasa.golden_attention(q, k, v, is_causal=is_causal, scale=0.125)
    assert max_error(out, golden) <= 0.05  # FP32 holds scores of 80,000 with 2^-8
    assert torch_npu.npu_fused_infer_attention_score.calls


@pytest.mark.parametrize("name", ["Ascend310P1", "Ascend310P3"])
def test_a_310p_is_served_in_fp32(torch_npu, monkeypatch, name):
    """The vendor does not list the function for this chip, so it is not called, whatever the scores are."""
    monkeypatch.setattr(torch_npu.npu, "get_device_name", lambda: name)
    assert fused.score_format("npu") == fused.ON_310P
    q, k, v = normal_qkv((4, 2), (30, 40), 64)
    q, k = ((8 * (x + 34)).round() / 8 for x in (q, k))  # q.k reaches 74,000, in steps of 2^-6: FP32 holds it exactly
    out, *_ = backend.attend(Call(q, k, v, 0.125, is_causal=True))
    golden, _ = pasa.golden_attention(q, k, v, is_causal=True, scale=0.125)
    assert max_error(out, golden) <= 2 * HALF_ULP + 2.0**-20  # of an output below 4; softmax in FP32
    assert not torch_npu.npu_fused_infer_attention_score.calls


class Saturating(TorchFunctionMode):
    """The worst matrix product that a 310P may have: operands and result in FP16, cut off at 65504."""

    def __init__(self):
        super().__init__()
        self.cut_off = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not torch.Tensor.matmul:  # what `@` calls
            return function(*args, **(kwargs or {}))
        product = torch.matmul(*(x.half().double() for x in args))
        self.cut_off += int((product.abs() > 65504).sum())
        return product.clamp(-65504, 65504).half().float()


@pytest.mark.parametrize("size", [1.0, 8.0, 100.0])
def test_no_score_is_cut_off_on_a_310p_whose_products_are_fp16(torch_npu, monkeypatch, size):
    """A q.k errs by 2^-11 of itself, and the scale makes that 2^-6 nats. So weights err by 3.2 %, and outputs by as
    much of the distance of two values, 2 max |V|; the roundings of weights and outputs add less than 0.2 %."""
    monkeypatch.setattr(torch_npu.npu, "get_device_name", lambda: "Ascend310P3")
    q, k, v = normal_qkv((4, 2), (30, 40), 64)
    q, k = size * (q + 64), size * (k + 64)
    scale = 2.0**5 / float(q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max())
    with Saturating() as product:
        out, _ = fused.fused_attention(q, k, v, None, False, scale)
    golden, _ = pasa.golden_attention(q, k, v, scale=scale)
    assert product.cut_off == 0
    assert max_error(out, golden) <= (0.064 + 0.002) * v.abs().max()


@pytest.mark.parametrize("size", [2.0**-10, 1.0, 300.0, 65504.0])
def test_no_product_passes_its_bound(size):
    """Keys and queries in one direction reach the bound of Cauchy and Schwarz."""
    x = torch.full((1, 1, 4, 64), size, dtype=torch.float16)
    exponent = npu._exponent(x, x)
    product = (x.double() * 2.0**-exponent * x.double()).sum(-1).max()
    assert product <= npu.LARGEST_PRODUCT * (1 + 2.0**-10)
    assert exponent == 0 or product > npu.LARGEST_PRODUCT / 2.1


@pytest.mark.parametrize(
    ("heads", "kv_heads", "launches"), [(256, 4, 1), (71, 1, 2), (130, 2, 2), (300, 100, 2), (520, 260, 3)]
)
@pytest.mark.parametrize("mask", [None, "bool"])
def test_limits_on_heads_are_kept_by_launches(torch_npu, heads, kv_heads, launches, mask):
    """The function takes 256 query heads, and 64 for each key head; Falcon has 71 for one."""
    q, k, v = normal_qkv((heads, kv_heads), (3, 5), 16, batch=2)
    keep = None if mask is None else torch.rand(1, heads, 3, 5, generator=torch.Generator().manual_seed(0)) > 0.3
    out, lse, *_ = backend.attend(Call(q, k, v, 0.25, mask=keep))
    golden, golden_lse = pasa.golden_attention(q, k, v, attn_mask=keep, scale=0.25)
    assert max_error(out, golden) <= 4 * HALF_ULP
    torch.testing.assert_close(lse, golden_lse.float(), atol=4e-3, rtol=0)
    assert len(torch_npu.npu_fused_infer_attention_score.calls) == launches


def test_what_the_function_does_not_take_is_served_in_fp32(torch_npu):
    """Float masks, head dimensions above 256, and a torch_npu without the function."""
    wide, narrow = normal_qkv((2, 2), (9, 9), 320), normal_qkv((2, 2), (9, 9), 16)
    for (q, k, v), mask in ((wide, None), (narrow, torch.randn(9, 9))):
        golden, _ = pasa.golden_attention(q, k, v, attn_mask=mask)
        assert max_error(backend.attend(Call(q, k, v, q.shape[-1] ** -0.5, mask=mask)).out, golden) <= 2 * HALF_ULP
    assert not torch_npu.npu_fused_infer_attention_score.calls
    del torch_npu.npu_fused_infer_attention_score
    assert npu.missing() == "torch_npu has no npu_fused_infer_attention_score"
    backend.attend(Call(*narrow, 0.25))
