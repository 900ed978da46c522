"""A valid call of every operator of torch.ops.pasa, for tests that make one argument invalid."""

from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef

from pasa.ops import operators
from pasa.ops.attention.options import AttentionOptions
from tests.inputs import normal_qkv

OPERATORS: dict[str, CustomOpDef] = {
    "attention": operators.attention,
    "attention_varlen": operators.attention_varlen,
    "watch_scores": operators.watch_scores,
    "attention_backward": operators.attention_backward,
    "attention_varlen_backward": operators.attention_varlen_backward,
    "attention_paged": operators.attention_paged,
    "write_pages": operators.write_pages,
}


def all_arguments(operator: str, backend: str = "reference", device: str = "cpu") -> dict[str, Any]:
    """Return every argument by name, in order; no tensor is None, and all sizes differ: B 2, Hq 4, Hkv 2, D 16."""
    q, k, v = (x.to(device) for x in normal_qkv((4, 2), (12, 30), 16, batch=2))
    packed = {"q": q[0].mT.mT.transpose(0, 1), "k": k[0].transpose(0, 1), "v": v[0].transpose(0, 1)}
    edges = {
        "cu_seqlens_q": torch.tensor([0, 5, 12], dtype=torch.int32, device=device),
        "cu_seqlens_k": torch.tensor([0, 10, 30], dtype=torch.int32, device=device),
    }
    options = AttentionOptions()
    arithmetic = {name: getattr(options, name) for name in options.__dataclass_fields__}
    limits = {"is_causal": False, "scale": 0.25, "window_left": -1, "window_right": -1, "softcap": 0.0}
    forward = {"sinks": torch.zeros(4, device=device)} | limits | {"return_max_logits": False} | arithmetic
    forward |= {"diagnose": False, "backend": backend}
    caches = torch.zeros(2, 6, 16, 2, 16, dtype=torch.float16, device=device)
    pages = {"k_cache": caches[0], "v_cache": caches[1]}
    anchors = torch.zeros(6, 2, 16, dtype=torch.float16, device=device)
    mask = torch.zeros(12, 30, device=device)
    if operator == "attention":
        return {"q": q, "k": k, "v": v, "attn_mask": mask} | forward
    if operator == "attention_varlen":
        return packed | edges | forward | {"max_seqlen_q": 7, "max_seqlen_k": 20}
    if operator == "watch_scores":
        counts = {
            "totals": torch.zeros(5, dtype=torch.int64, device=device),
            "walked": torch.full((1,), 500, dtype=torch.int64),  # row 10 of the call is sampled
        }
        return {"q": q, "k": k, "attn_mask": mask} | counts | limits
    if operator == "attention_backward":
        given = {"grad_out": q.clone(), "grad_lse": torch.zeros(2, 4, 12, device=device), "q": q, "k": k, "v": v}
        how = {"attn_mask": mask, "sinks": forward["sinks"]} | limits
        return given | how | {"mask_too": False, "sinks_too": False, "backend": backend}
    if operator == "attention_varlen_backward":
        given = {"grad_out": packed["q"].clone(), "grad_lse": torch.zeros(12, 4, device=device)}
        sinks = {"sinks": forward["sinks"]}
        return given | packed | edges | sinks | limits | {"sinks_too": False, "backend": backend}
    if operator == "write_pages":
        slots = torch.arange(30, device=device)
        return {"k": packed["k"], "v": packed["v"]} | pages | {"slot_mapping": slots, "key_anchors": anchors}
    tables = {
        "block_table": torch.tensor([[3, 1], [5, 0]], dtype=torch.int32, device=device),
        "seq_lens": torch.tensor([20, 9], dtype=torch.int32, device=device),
        "cu_seqlens_q": edges["cu_seqlens_q"], "max_seqlen_q": 12, "max_seqlen_k": 32, "key_anchors": anchors,
    }  # fmt: skip
    return {"q": packed["q"]} | pages | tables | forward
