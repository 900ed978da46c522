"""Bad input to the public functions raises an error that names the value."""

import pytest
import torch

import pasa

HALF = torch.float16


def tensor(*shape, dtype=HALF, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def call(q=(1, 4, 8, 16), k=(1, 2, 9, 16), v=None, **how):
    q, k = (x if isinstance(x, torch.Tensor) or not isinstance(x, tuple) else tensor(*x) for x in (q, k))
    v = k if v is None else tensor(*v) if isinstance(v, tuple) else v
    return pasa.attention(q, k, v, **how)


BF16 = torch.bfloat16
ALL_BF16 = {"q": tensor(1, 4, 8, 16, dtype=BF16), "k": tensor(1, 2, 9, 16, dtype=BF16)}
BAD_CALLS = [
    ({"q": (4, 8, 16)}, ValueError, r"q has 3 dimensions \(4, 8, 16\), expected 4"),
    ({"k": (1, 1, 2, 9, 16)}, ValueError, "k has 5 dimensions"),
    ({"q": [1.0]}, TypeError, "q is a list"),
    ({"v": 7}, TypeError, "v is a int, not a Tensor"),
    ({"q": tensor(1, 4, 8, 16, dtype=torch.complex64)}, TypeError, "q is torch.complex64"),
    ({"q": tensor(1, 4, 8, 16, dtype=torch.int32)}, TypeError, "q is torch.int32"),
    ({"q": tensor(1, 4, 8, 16, dtype=torch.float64)}, TypeError, "q is torch.float64"),
    ({"q": tensor(1, 4, 8, 16, dtype=torch.float32)}, TypeError, "k is torch.float16 but q is torch.float32"),
    ({"v": tensor(1, 2, 9, 16, dtype=torch.bfloat16)}, TypeError, "v is torch.bfloat16 but q is"),
    ({"k": tensor(1, 2, 9, 16, device="meta")}, ValueError, "k is on meta but q is on cpu"),
    ({"q": (1, 3, 8, 16)}, ValueError, "3 query heads are not a multiple of 2 key heads"),
    ({"q": (2, 4, 8, 16)}, ValueError, "batch of q is 2 but that of k is 1"),
    ({"q": (1, 4, 8, 32)}, ValueError, "head dim of q is 32 but that of k is 16"),
    ({"v": (1, 2, 10, 16)}, ValueError, r"k and v differ.*\(1, 2, 9, 16\) and \(1, 2, 10, 16\)"),
    ({"q": (1, 4, 0, 16)}, ValueError, r"q is empty.*\(1, 4, 0, 16\)"),
    ({"k": (1, 2, 0, 16)}, ValueError, r"k is empty.*\(1, 2, 0, 16\)"),
    ({"q": (0, 4, 8, 16), "k": (0, 2, 9, 16)}, ValueError, "q is empty"),
    ({"q": (1, 4, 8, 0), "k": (1, 2, 9, 0)}, ValueError, "q is empty"),
    ({"q": (1, 2, 8, 513), "k": (1, 2, 9, 513)}, NotImplementedError, "head dim 513 is outside 1 to 512"),
    ({**ALL_BF16, "v": tensor(1, 2, 9, 16, dtype=BF16) - 3e38}, ValueError, "v has 288 values beyond the FP16 range"),
    ({"attn_mask": torch.ones(0).bool()}, ValueError, r"attn_mask \(0,\) does not broadcast"),
    ({"attn_mask": torch.ones(8, 8).bool()}, ValueError, r"attn_mask \(8, 8\) does not broadcast to .*\(1, 4, 8, 9\)"),
    ({"attn_mask": torch.ones(3, 8, 9).bool()}, ValueError, r"attn_mask \(3, 8, 9\)"),
    ({"attn_mask": torch.ones(2, 1, 8, 9).bool()}, ValueError, r"attn_mask \(2, 1, 8, 9\)"),
    ({"attn_mask": torch.ones(1, 1, 1, 8, 9).bool()}, ValueError, r"attn_mask \(1, 1, 1, 8, 9\)"),
    ({"attn_mask": torch.ones(8, 9).int()}, TypeError, "attn_mask is torch.int32"),
    ({"attn_mask": [[True]]}, TypeError, "attn_mask is a list"),
    ({"attn_mask": torch.ones(8, 9, device="meta").bool()}, ValueError, "attn_mask is on meta"),
    ({"tensor_layout": "BHSD"}, ValueError, "tensor_layout='BHSD' is not one of"),
    ({"tensor_layout": ["HND"]}, ValueError, "tensor_layout=.*'HND'.* is not one of"),
    ({"scale": 0.0}, ValueError, "scale=0.0 is outside 2"),
    ({"scale": -1.0}, ValueError, "scale=-1.0"),
    ({"scale": float("nan")}, ValueError, "scale=nan is outside 2"),
    ({"scale": float("inf")}, ValueError, "scale=inf"),
    ({"scale": 10**400}, ValueError, "scale=1000"),
    ({"scale": 2.0**-81}, ValueError, "scale=.* is outside 2"),
    ({"scale": True}, TypeError, "scale=True is a bool, not a number"),
    ({"scale": 2.0**17, "config": pasa.PasaConfig(recovery="paper")}, ValueError, "scale=.* beyond the range of torch"),
    ({"scale": 1e30}, ValueError, r"scale=1e\+30 is outside 2\^-80 to 2\^80"),
    ({"scale": "x"}, TypeError, "scale='x' is a str, not a number"),
    ({"is_causal": "yes"}, TypeError, "is_causal='yes' is a str, not a bool"),
    ({"backend": 0}, TypeError, "backend=0 is a int, not a name"),
    ({"attn_mask": torch.ones(8, 9, dtype=torch.float64)}, TypeError, "attn_mask is torch.float64"),
    ({"config": {"recovery": "paper"}}, TypeError, "config is a dict, not a PasaConfig"),
    ({"backend": "cuda"}, ValueError, "backend='cuda' is not registered; registered: .*reference"),
    ({"backend": "npu"}, NotImplementedError, "npu: torch_npu is not installed"),
    ({"dropout_p": 0.1}, TypeError, "dropout_p"),
    ({"enable_gqa": True}, TypeError, "enable_gqa"),
]


@pytest.mark.parametrize(("how", "error", "message"), BAD_CALLS, ids=lambda x: str(x)[:60])
def test_attention_refuses(how, error, message):
    with pytest.raises(error, match=message):
        call(**how)


GOOD_LENGTHS = {"cu_seqlens_q": [0, 3, 8], "cu_seqlens_k": [0, 4, 9], "max_seqlen_q": 5, "max_seqlen_k": 5}
BAD_LENGTHS = [
    ({"cu_seqlens_q": [1, 3, 8]}, ValueError, r"cu_seqlens_q=\[1, 3, 8\] does not rise from 0 to the 8 tokens"),
    ({"cu_seqlens_q": [0, 3, 7]}, ValueError, "does not rise from 0 to the 8 tokens"),
    ({"cu_seqlens_k": [0, 10, 9], "max_seqlen_k": 10}, ValueError, r"cu_seqlens_k=\[0, 10, 9\]"),
    ({"cu_seqlens_k": [0, 9], "max_seqlen_k": 9}, ValueError, "cu_seqlens_q has 3 entries but cu_seqlens_k has 2"),
    ({"cu_seqlens_q": [8]}, ValueError, r"cu_seqlens_q has shape \(1,\)"),
    ({"cu_seqlens_q": [0.0, 8.0]}, TypeError, "cu_seqlens_q is torch.float32, not an int32 or int64 Tensor"),
    ({"max_seqlen_q": None}, TypeError, "max_seqlen_q=None is not an integer"),
    ({"max_seqlen_q": 7.0}, TypeError, "max_seqlen_q=7.0 is not an integer"),
    ({"max_seqlen_q": True}, TypeError, "max_seqlen_q=True is not an integer"),
    ({"return_lse": 2}, TypeError, "return_lse=2"),
    ({"max_seqlen_q": 4}, ValueError, "max_seqlen_q=4 is below the longest sequence, 5"),
    ({"max_seqlen_k": 1}, ValueError, "max_seqlen_k=1 is below"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_LENGTHS, ids=lambda x: str(x)[:60])
def test_attention_varlen_refuses(change, error, message):
    how = {name: torch.tensor(x) if isinstance(x, list) else x for name, x in (GOOD_LENGTHS | change).items()}
    with pytest.raises(error, match=message):
        pasa.attention_varlen(tensor(8, 4, 16), tensor(9, 2, 16), tensor(9, 2, 16), **how)


def test_attention_varlen_checks_tensors_too():
    lengths = [torch.tensor(GOOD_LENGTHS[name]) for name in ("cu_seqlens_q", "cu_seqlens_k")]
    with pytest.raises(ValueError, match="q has 4 dimensions"):
        pasa.attention_varlen(tensor(1, 8, 4, 16), tensor(9, 2, 16), tensor(9, 2, 16), *lengths, 5, 5)
    with pytest.raises(ValueError, match="q is empty"):
        pasa.attention_varlen(tensor(0, 4, 16), tensor(9, 2, 16), tensor(9, 2, 16), *lengths, 5, 5)
    with pytest.raises(ValueError, match="3 query heads"):
        pasa.attention_varlen(tensor(8, 3, 16), tensor(9, 2, 16), tensor(9, 2, 16), *lengths, 5, 5)


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_return_lse_is_a_bool(value):
    """`return_lse` must be a bool.

    Story: 1 was taken for True, and None for False.
    """
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(TypeError, match="return_lse="):
        pasa.attention(q, q, q, return_lse=value)


def test_cumulative_lengths_with_values_for_tensors_with_values():
    """Cumulative lengths on meta are refused if the tensors have values.

    Story: they raised torch's RuntimeError about item().
    """
    q, edges = torch.zeros(2, 1, 4), torch.tensor([0, 2])
    with pytest.raises(ValueError, match="cu_seqlens_k is on meta but q is on cpu"):
        pasa.attention_varlen(q, q, q, edges, edges.to("meta"), 2, 2)
