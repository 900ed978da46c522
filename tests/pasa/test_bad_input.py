"""Every public function refuses bad input with an error that names the value and says what to do next."""

import inspect
import re
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist

import pasa
from pasa.ops import notices

HALF, SINGLE = torch.float16, torch.float32
Q, K = torch.zeros(1, 4, 8, 16, dtype=HALF), torch.zeros(1, 2, 9, 16, dtype=HALF)
PACKED, EDGES = torch.zeros(8, 4, 16, dtype=HALF), torch.tensor([0, 3, 8])
CACHE, TABLE, LENGTHS = torch.zeros(6, 16, 2, 16, dtype=HALF), torch.tensor([[1, 2], [3, 4]]), torch.tensor([20, 5])
TWO = torch.zeros(2, 4, 16, dtype=HALF)
NEW = torch.zeros(3, 2, 16, dtype=HALF)
NESTED = torch.nested.nested_tensor([torch.zeros(3, 4, 16), torch.zeros(5, 4, 16)], layout=torch.jagged)
STRIDED = torch.nested.nested_tensor([torch.zeros(3, 4, 16), torch.zeros(5, 4, 16)])
SLOTS = torch.tensor([4, -1, 7])


def dense(q=Q, k=K, v=None, **how):
    return pasa.attention(q, k, k if v is None else v, **how)


def varlen(q=PACKED, edges_q=EDGES, edges_k=EDGES, longest_q=5, longest_k=5, **how):
    return pasa.attention_varlen(q, PACKED, PACKED, edges_q, edges_k, longest_q, longest_k, **how)


def paged(q=TWO, caches=(CACHE, CACHE), table=TABLE, lengths=LENGTHS, **how):
    return pasa.attention_paged(q, *caches, table, lengths, **how)


def write(k=NEW, v=NEW, cache=CACHE, slots=SLOTS, anchors=None):
    return pasa.write_pages(k, v, cache.clone(), cache.clone(), slots, anchors)


def ring(q=Q, k=K, **how):
    return pasa.ring_attention(q, k, k, **how)


def predict(model=None, **how):
    return pasa.predict_overflow(torch.nn.Linear(2, 2) if model is None else model, **how)


def masked(*shape, dtype=torch.bool, **how):
    return dense(q=torch.zeros(2, 4, 8, 16).half(), k=torch.zeros(2, 2, 9, 16).half(),
                 attn_mask=torch.ones(shape, dtype=dtype), **how)  # fmt: skip


SINKS = torch.zeros(4)
LINEAR = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.MultiheadAttention(4, 2))
FROM_NUMPY = r"torch\.from_numpy"

# what is wrong: (call, error, the value in the message, the hint in the message)
BAD = {
    # keywords of torch, flash-attn, xformers and transformers
    "dropout_p": (lambda: dense(dropout_p=0.0), TypeError, r"'dropout_p' \(0\.0\)", "leave it out"),
    "enable_gqa": (lambda: dense(enable_gqa=True), TypeError, r"'enable_gqa' \(True\)", "leave it out: .*multiple"),
    "layout": (lambda: dense(layout="NHD"), TypeError, r"'layout' \('NHD'\)", "use tensor_layout"),
    "attn_bias": (lambda: dense(attn_bias=Q), TypeError, "'attn_bias' .a Tensor", "use attn_mask"),
    "key_padding_mask": (lambda: dense(key_padding_mask=Q), TypeError, "'key_padding_mask'", r"attn_mask=~key_padd"),
    "softmax_scale": (lambda: dense(softmax_scale=0.5), TypeError, r"'softmax_scale' \(0\.5\)", "use scale"),
    "causal": (lambda: dense(causal=True), TypeError, r"'causal' \(True\)", "use is_causal"),
    "window_size": (lambda: dense(window_size=(4, 0)), TypeError, r"\(\(4, 0\)\)", r"window=\(left, right\)"),
    "sliding_window": (lambda: paged(sliding_window=4), TypeError, r"'sliding_window' \(4\)", r"window=\(left, "),
    "logits_soft_cap": (lambda: varlen(logits_soft_cap=30.0), TypeError, r"\(30\.0\)", "use softcap"),
    "s_aux": (lambda: dense(s_aux=SINKS), TypeError, "'s_aux'", "use sinks"),
    "max_logits": (lambda: dense(max_logits=True), TypeError, r"'max_logits' \(True\)", "use return_max_logits"),
    "a ring's window": (lambda: ring(window_size=(4, 0)), TypeError, r"\(\(4, 0\)\)", "only pasa.attention, .*paged"),
    "a ring's sinks": (lambda: ring(s_aux=SINKS), TypeError, "'s_aux'", "only pasa.attention, .*paged take it"),
    "a ring's cap": (lambda: ring(softcap=30.0), TypeError, r"'softcap' \(30\.0\)", "only pasa.attention"),
    "alibi_slopes": (lambda: dense(alibi_slopes=Q), TypeError, "'alibi_slopes'", "float attn_mask"),
    "is_casual": (lambda: dense(is_casual=True), TypeError, "'is_casual'", "did you mean is_causal"),
    "recovery": (lambda: dense(recovery="paper"), TypeError, "'recovery'", r"config=pasa\.PasaConfig\(recovery="),
    "nonsense": (lambda: dense(nonsense=1), TypeError, "'nonsense'", "accepts q, k, v, attn_mask"),
    "query": (lambda: pasa.attention(query=Q, key=K, value=K), TypeError, "'query'", "use q"),
    "mask by position": (lambda: pasa.attention(Q, K, K, None), TypeError, "but 4 were given", "attn_mask=..."),
    "a packed mask": (lambda: varlen(attn_mask=Q), TypeError, "'attn_mask'", "pasa.attention"),
    "packed dropout": (lambda: varlen(dropout_p=0.0), TypeError, "'dropout_p'", "leave it out"),
    "packed layout": (lambda: varlen(tensor_layout="NHD"), TypeError, "'tensor_layout'", "leave it out"),
    "block_tables": (lambda: paged(block_tables=TABLE), TypeError, "'block_tables'", "block_table"),
    "cache_seqlens": (lambda: paged(cache_seqlens=LENGTHS), TypeError, "'cache_seqlens'", "use seq_lens"),
    "a ring's mask": (lambda: ring(attn_mask=Q), TypeError, "'attn_mask'", "is_causal"),
    "write slots": (
        lambda: pasa.write_pages(NEW, NEW, CACHE, CACHE, slots=SLOTS), TypeError, "'slots'", "slot_mapping"
    ),
    "patch model": (lambda: pasa.patch_pipeline(model=LINEAR), TypeError, "'model'", "model_or_pipeline"),
    "patch options": (
        lambda: pasa.patch_pipeline(LINEAR, softmax="safe"), TypeError, "'softmax'", r"config=pasa\.PasaConfig"
    ),
    # ways in
    "dropout in torch's place": (
        lambda: pasa.scaled_dot_product_attention(Q, Q, Q, dropout_p=0.1), NotImplementedError, "dropout_p=0.1", "0.0"
    ),
    "a name in torch's place": (
        lambda: pasa.scaled_dot_product_attention(Q, Q, Q, sm_scale=1.0), TypeError, r"'sm_scale' \(1\.0\)", "use scale"
    ),
    "host": (lambda: pasa.register("foo"), ValueError, "'foo' is not a host", "pass 'transformers', 'diffusers'"),
    "a model to register": (lambda: pasa.register(LINEAR), TypeError, "a Sequential", "patch_pipeline"),
    "block": (lambda: pasa.PasaConfig(block=64), TypeError, r"'block' \(64\)", "did you mean block_k or block_q"),
    "roundings": (lambda: pasa.PasaConfig(recover="exact"), TypeError, "'recover'", "did you mean recovery"),
    "config dtype": (lambda: pasa.PasaConfig(dtype=HALF), TypeError, "'dtype'", "accepts precision, recovery"),
    # PasaConfig
    "precision": (lambda: pasa.PasaConfig(precision="fp8"), ValueError, "precision='fp8'", r"not one of \('pasa'"),
    "a mask by another name": (lambda: varlen(mask=None), TypeError, "'mask'", "need pasa.attention"),
    "a layout by another name": (lambda: varlen(layout="TND"), TypeError, "'layout'", "one layout; leave it out"),
    "block_q": (lambda: pasa.PasaConfig(block_q=0), ValueError, "block_q=0", "integer from 1 to 65536"),
    "lone beta": (lambda: pasa.PasaConfig(beta=0.9), ValueError, "beta=0.9", "recovery='paper'"),
    # tensors of attention
    "NumPy": (lambda: dense(q=np.zeros((1, 4, 8, 16))), TypeError, "q is a ndarray, not a Tensor", FROM_NUMPY),
    "a list": (lambda: dense(k=[1.0]), TypeError, "k is a list, not a Tensor", r"torch\.tensor"),
    "None": (lambda: dense(q=None), TypeError, "q is a NoneType", "pass a Tensor"),
    "three dimensions": (
        lambda: dense(q=Q[0]), ValueError, r"q has 3 dimensions \(4, 8, 16\), expected 4",
        r"\(B, H, S, D\): .*q\[None\].*attention_varlen",
    ),
    "three, tokens first": (
        lambda: dense(q=Q[0], tensor_layout="NHD"), ValueError, "q has 3 dimensions", r"\(B, S, H, D\): .*q\[None\]"
    ),
    "five dimensions": (lambda: dense(k=K[None]), ValueError, "k has 5 dimensions", "flatten"),
    "integers": (lambda: dense(q=Q.int()), TypeError, "q is torch.int32", r"\.half\(\)"),
    "FP64": (lambda: dense(q=Q.double()), TypeError, "q is torch.float64", r"\.half\(\)"),
    "two dtypes": (lambda: dense(q=Q.float()), TypeError, "k is torch.float16 but q is", r"\.to\(torch.float32\)"),
    "meta": (lambda: dense(k=K.to("meta")), ValueError, "k is on meta but q is on cpu", "no data.*load"),
    "meta queries": (lambda: dense(q=Q.to("meta")), ValueError, "k is on cpu but q is on meta", "no data.*load"),
    "batches": (lambda: dense(q=Q.expand(2, -1, -1, -1)), ValueError, "batch of q is 2", "expand the smaller"),
    "head dims": (lambda: dense(q=Q[..., :8]), ValueError, "head dim of q is 8", "pad"),
    "keys and values": (lambda: dense(v=K[:, :, :8]), ValueError, "k and v differ in shape", "pad"),
    "heads": (lambda: dense(q=Q[:, :3]), ValueError, "3 query heads are not a multiple of 2", "repeat heads"),
    "tokens first": (
        lambda: dense(q=torch.zeros(1, 300, 4, 16).half(), k=torch.zeros(1, 77, 4, 16).half()),
        ValueError, "300 query heads are not a multiple of 77", "tensor_layout='NHD'",
    ),
    "empty": (lambda: dense(q=Q[:, :, :0]), ValueError, r"q is empty: \(1, 4, 0, 16\)", "leave out calls"),
    "wide heads": (
        lambda: dense(q=torch.zeros(1, 1, 2, 600), k=torch.zeros(1, 1, 2, 600)), NotImplementedError,
        "head dim 600", "outside 1 to 512",
    ),
    "too large": (
        lambda: dense(q=Q.float() + 1e6, k=K.float()), ValueError, r"q has 512 values.*1e\+06 > 65504", "divide q"
    ),
    "sparse": (lambda: dense(q=Q.to_sparse()), TypeError, "q has the layout torch.sparse_coo", r"\.to_dense\(\)"),
    "nested": (lambda: dense(q=NESTED), TypeError, "q has the layout torch.jagged", r"attention_varlen.*offsets\(\)"),
    "nested strided": (lambda: dense(q=STRIDED), TypeError, "q is a nested tensor", r"jagged.*attention_varlen"),
    # masks
    "mask as a list": (lambda: dense(attn_mask=[[True]]), TypeError, "attn_mask is a list", r"torch\.tensor"),
    "causal as a mask": (lambda: dense(attn_mask="causal"), TypeError, "attn_mask is a str", "is_causal=True"),
    "NumPy mask": (lambda: dense(attn_mask=np.ones((8, 9))), TypeError, "attn_mask is a ndarray", FROM_NUMPY),
    "padding mask": (
        lambda: masked(2, 9), ValueError, r"attn_mask \(2, 9\)", r"mask\[:, None, None, :\].*True = keep"
    ),
    "padding mask of integers": (
        lambda: masked(2, 9, dtype=torch.int64), TypeError, "attn_mask is torch.int64", r"\.bool\(\).*True = keep"
    ),
    "mask without heads": (lambda: masked(2, 8, 9), ValueError, r"attn_mask \(2, 8, 9\)", r"mask\[:, None\]"),
    "mask of FP64": (
        lambda: masked(8, 9, dtype=torch.float64), TypeError, "attn_mask is torch.float64", r"\.float\(\)"
    ),
    "mask of another layout": (
        lambda: dense(q=Q.transpose(1, 2), k=Q.transpose(1, 2), attn_mask=torch.ones(8, 8).bool()),
        ValueError, r"attn_mask \(8, 8\)", "tensor_layout='NHD'",
    ),
    "mask of another shape": (lambda: masked(5, 6), ValueError, r"attn_mask \(5, 6\)", r"\(B, Hq, Sq, Skv\)"),
    "mask on meta": (
        lambda: dense(attn_mask=torch.ones(8, 9, device="meta").bool()), ValueError, "attn_mask is on meta", "no data"
    ),
    # switches
    "layout name": (
        lambda: dense(tensor_layout="BHSD"), ValueError, "tensor_layout='BHSD'", r"\(B, H, S, D\) is 'HND'"
    ),
    "scale": (lambda: dense(scale=0.0), ValueError, "scale=0.0", r"leave it out for 1/sqrt\(D\)"),
    "large scale": (lambda: dense(scale=1e30), ValueError, r"scale=1e\+30", "2.-80 to 2.80"),
    "scale as a string": (lambda: dense(scale="x"), TypeError, "scale='x' is a str, not a number", "float"),
    "scale as a tensor": (lambda: dense(scale=torch.tensor(0.5)), TypeError, "is a Tensor", r"float\(scale\)"),
    "NumPy scale": (lambda: dense(scale=np.float32(0.5)), TypeError, "is a float32", r"float\(scale\)"),
    "is_causal": (lambda: dense(is_causal="yes"), TypeError, "is_causal='yes' is a str, not a bool", "True or False"),
    "NumPy bool": (lambda: dense(is_causal=np.True_), TypeError, "is_causal", r"bool\(is_causal\)"),
    "return_lse": (lambda: dense(return_lse=1), TypeError, "return_lse=1 is a int, not a bool", "True or False"),
    "return_max_logits": (lambda: paged(return_max_logits=1), TypeError, "return_max_logits=1 is a int", "True or"),
    "window as a number": (
        lambda: dense(window=4), TypeError, "window=4 is not a pair", r"pass window=\(4 - 1, 0\) for 4 keys"
    ),
    "window as True": (lambda: dense(window=True), TypeError, "window=True", r"\(left, right\) of integers"),
    "window of floats": (lambda: varlen(window=(4.0, 0)), TypeError, r"window=\(4\.0, 0\)", "pass two integers"),
    "window of None": (lambda: dense(window=(None, 0)), TypeError, r"window=\(None, 0\)", "-1 is unlimited"),
    "window of one": (lambda: paged(window=(4,)), TypeError, r"window=\(4,\)", "pass two integers"),
    "negative window": (lambda: dense(window=(-2, 0)), ValueError, r"window=\(-2, 0\)", "-1 is an unlimited side"),
    "softcap": (lambda: dense(softcap=-30.0), ValueError, "softcap=-30.0", "2.-20 to 2.20 nats: leave it out"),
    "small softcap": (lambda: paged(softcap=1e-9), ValueError, "softcap=1e-09", "leave it out for no cap"),
    "infinite softcap": (lambda: varlen(softcap=np.inf), ValueError, "softcap=inf", "leave it out for no cap"),
    "softcap as a string": (lambda: dense(softcap="x"), TypeError, "softcap='x' is a str", "pass a float"),
    "softcap as a tensor": (lambda: dense(softcap=torch.tensor(9.0)), TypeError, "a Tensor", r"float\(softcap\)"),
    "softcap as True": (lambda: dense(softcap=True), TypeError, "softcap=True is a bool", "pass a float"),
    "sinks as a list": (lambda: dense(sinks=[0.0] * 4), TypeError, "sinks is a list", r"torch\.tensor"),
    "NumPy sinks": (lambda: varlen(sinks=np.zeros(4)), TypeError, "sinks is a ndarray", FROM_NUMPY),
    "sinks of FP64": (lambda: paged(sinks=SINKS.double()), TypeError, "sinks is torch.float64", r"\.float\(\)"),
    "sinks of key heads": (lambda: dense(sinks=SINKS[:2]), ValueError, r"sinks has shape \(2,\)", "query head.*4"),
    "sinks on meta": (lambda: dense(sinks=SINKS.to("meta")), ValueError, "sinks is on meta but q is on", "no data"),
    "config": (lambda: dense(config={"recovery": "paper"}), TypeError, "config is a dict", r"PasaConfig\(\*\*config\)"),
    "config class": (lambda: dense(config=pasa.PasaConfig), TypeError, "config is a type", r"PasaConfig\(\)"),
    "backend type": (lambda: dense(backend=0), TypeError, "backend=0 is a int", r"pasa\.backends\(\)"),
    "backend name": (lambda: dense(backend="cuda"), ValueError, "backend='cuda'", "registered: .*reference"),
    "backend elsewhere": (
        lambda: dense(backend="npu"), NotImplementedError, "npu: torch_npu is not installed", "no backend can serve"
    ),
    # packed sequences
    "packed in a batch": (lambda: varlen(q=Q), ValueError, "q has 4 dimensions", r"\(tokens, heads, D\)"),
    "edges as a list": (lambda: varlen(edges_q=[0, 3, 8]), TypeError, "cu_seqlens_q is list", r"torch\.tensor"),
    "edges of floats": (
        lambda: varlen(edges_q=EDGES.float()), TypeError, "cu_seqlens_q is torch.float32", r"\.int\(\)"
    ),
    "lengths for edges": (lambda: varlen(edges_q=EDGES + 1), ValueError, r"cu_seqlens_q=\[1, 4, 9\]", "from 0"),
    "one edge": (lambda: varlen(edges_q=EDGES[:1]), ValueError, r"cu_seqlens_q has shape \(1,\)", r"sequences \+ 1"),
    "edges on meta": (lambda: varlen(edges_k=EDGES.to("meta")), ValueError, "cu_seqlens_k is on meta", "no data"),
    "unequal edges": (
        lambda: varlen(edges_q=torch.tensor([0, 8]), longest_q=8), ValueError, "has 2 entries", "one entry more"
    ),
    "longest": (lambda: varlen(longest_q=4), ValueError, "max_seqlen_q=4", "longest sequence, 5: pass 5 or more"),
    "longest, a tensor": (
        lambda: varlen(longest_q=torch.tensor(5)), TypeError, "max_seqlen_q=", r"int\(max_seqlen_q\)"
    ),
    "longest, None": (lambda: varlen(longest_k=None), TypeError, "max_seqlen_k=None", r"int\(max_seqlen_k\)"),
    # pages
    "queries in a batch": (lambda: paged(q=Q), ValueError, "q has 4 dimensions", r"\(tokens, heads, D\)"),
    "table as a list": (lambda: paged(table=[[1]]), TypeError, "block_table is a list", r"torch\.tensor"),
    "NumPy table": (lambda: paged(table=np.ones((2, 2))), TypeError, "block_table is a ndarray", FROM_NUMPY),
    "table of floats": (lambda: paged(table=TABLE.float()), TypeError, "block_table is torch.float32", r"\.int\(\)"),
    "lengths on meta": (lambda: paged(lengths=LENGTHS.to("meta")), ValueError, "seq_lens is on meta", "no data"),
    "longer lengths": (lambda: paged(lengths=LENGTHS + 99), ValueError, "seq_lens are 104 to 119", "room for 0 to 32"),
    "no such page": (lambda: paged(table=TABLE + 9), ValueError, "block_table names page", "the cache has 6 pages"),
    "rows": (lambda: paged(q=PACKED), ValueError, "q has 8 rows for 2 sequences", "give cu_seqlens_q"),
    "cache rank": (lambda: paged(caches=(CACHE[0], CACHE[0])), ValueError, "k_cache has 3 dimensions", "pages, slots"),
    "longest of none": (lambda: paged(max_seqlen_k=0), ValueError, "max_seqlen_k=0", "positive integer.*leave it out"),
    "paged gradient": (
        lambda: paged(q=TWO.clone().requires_grad_()), NotImplementedError, "q requires one", "detach it"
    ),
    "paged config": (lambda: paged(config="exact"), TypeError, "config is a str", "PasaConfig"),
    "keys of another rank": (lambda: write(k=NEW[None]), ValueError, "k has 4 dimensions", r"\(tokens, heads, D\)"),
    "NumPy keys": (lambda: write(k=NEW.numpy()), TypeError, "k is a ndarray", FROM_NUMPY),
    "slots as a list": (lambda: write(slots=[1, 2, 3]), TypeError, "slot_mapping is a list", r"torch\.tensor"),
    "slots of floats": (lambda: write(slots=SLOTS.float()), TypeError, "slot_mapping is torch.float32", r"\.int\(\)"),
    "a slot beyond": (lambda: write(slots=SLOTS + 99), ValueError, "slot 106", "the cache has 96 slots"),
    "slots in rows": (lambda: write(slots=SLOTS[None]), ValueError, "slot_mapping has 2 dimensions", "one entry after"),
    "slots on meta": (lambda: write(slots=SLOTS.to("meta")), ValueError, "slot_mapping is on meta", "no data"),
    "keys on meta": (lambda: write(k=NEW.to("meta")), ValueError, "k is on meta but k_cache is on cpu", "no data"),
    "values of FP32": (lambda: write(v=NEW.float()), TypeError, "v is torch.float32 but k_cache is", r"\.to\("),
    "too few keys": (lambda: write(k=NEW[:2]), ValueError, "3 slots, but 2 keys and 3 values", "one slot"),
    "anchors": (
        lambda: write(anchors=torch.zeros(6, 2, 16)), TypeError, "key_anchors is torch.float32", "allocate it in FP16"
    ),
    # sequences over ranks
    "shard a list": (lambda: pasa.shard_sequence([1, 2], 0), TypeError, "x is a list", r"torch\.tensor"),
    "shard NumPy": (lambda: pasa.shard_sequence(np.ones(4), 0), TypeError, "x is a ndarray", FROM_NUMPY),
    "shard dim": (lambda: pasa.shard_sequence(EDGES, 1), ValueError, "dim=1", "has 1: .*-1 to 0"),
    "dim type": (lambda: pasa.shard_sequence(EDGES, "x"), TypeError, "dim='x' is a str", "integer"),
    "short sequence": (
        lambda: pasa.shard_sequence(EDGES[:1], 0), ValueError, "sequence of 1 tokens", "2 tokens or more"
    ),
    "no group": (lambda: pasa.shard_sequence(EDGES, 0, group="world"), TypeError, "group='world'", "group.WORLD"),
    "gather NumPy": (lambda: pasa.gather_sequence(np.ones(4), 0), TypeError, "x is a ndarray", FROM_NUMPY),
    "gather meta": (lambda: pasa.gather_sequence(Q.to("meta"), 2), ValueError, "x is on meta", "serves.* cpu"),
    "gather gradient": (
        lambda: pasa.gather_sequence(Q.float().requires_grad_(), 2), NotImplementedError, "gather_sequence", "detach"
    ),
    "ring NumPy": (lambda: ring(q=Q.numpy()), TypeError, "q is a ndarray", FROM_NUMPY),
    "ring rank": (lambda: ring(q=Q[0]), ValueError, "q has 3 dimensions", r"q\[None\]"),
    "ring group": (lambda: ring(group=0), TypeError, "group=0", "group.WORLD"),
    "ring config": (
        lambda: ring(config=pasa.PasaConfig(softmax="unbiased")), NotImplementedError, "'unbiased'", "softmax='safe'"
    ),
    "ring lengths": (lambda: ring(is_causal=True), ValueError, "8 queries and 9 keys", "shard_sequence"),
    "ring diagnostics": (lambda: recorded_ring(), NotImplementedError, "records no diagnostics", "leave"),
    # models
    "patch a name": (lambda: pasa.patch_pipeline("llama"), TypeError, "'llama'", r"from_pretrained\('llama'\)"),
    "patch a class": (lambda: pasa.patch_pipeline(torch.nn.Linear), TypeError, "class Linear", "instance"),
    "patch nothing": (lambda: pasa.patch_pipeline(None), TypeError, "expected a model.*NoneType", "from_pretrained"),
    "patch a tensor": (lambda: pasa.patch_pipeline(Q), TypeError, "expected a model.*Tensor", "from_pretrained"),
    "patch torch": (
        lambda: pasa.patch_pipeline(LINEAR), TypeError, "Sequential contains no transformers", r"call pasa\.attention"
    ),
    "policy": (lambda: pasa.patch_pipeline(LINEAR, policy="some"), ValueError, "'some'", "policy must be"),
    "patch config": (lambda: pasa.patch_pipeline(LINEAR, config={}), TypeError, "config is a dict", "PasaConfig"),
    "patch backend": (lambda: pasa.patch_pipeline(LINEAR, backend="x"), ValueError, "backend='x'", "registered: "),
    "margin": (lambda: pasa.to_fp16(LINEAR, margin=0.5), ValueError, "got 0.5", "from 1 to below 65504"),
    "convert a name": (lambda: pasa.to_fp16("llama"), TypeError, "'llama'", "from_pretrained"),
    "what to keep": (lambda: pasa.to_fp16(LINEAR, keep_original=True), ValueError, "got True", '"cpu" or None'),
    "watch a name": (lambda: pasa.watch("llama"), TypeError, "'llama'", "from_pretrained"),
    "watch too early": (lambda: pasa.watch(LINEAR), ValueError, "Sequential", r"call pasa\.patch_pipeline first"),
    "predict a number": (lambda: predict(3), TypeError, "expected a model, a pipeline or a folder.*int", "folder"),
    "predict a name": (
        lambda: predict("org/model"), FileNotFoundError, "'org/model' is not a folder", "snapshot_download"
    ),
    "predict torch": (lambda: predict(), TypeError, "Linear has no config", "folder"),
    "delta": (lambda: predict(delta=2), ValueError, "delta=2", "between 0 and 1"),
    "delta type": (lambda: predict(delta="x"), TypeError, "delta='x'", "not a number"),
    "seq_len type": (lambda: predict(seq_len=1.5), TypeError, "seq_len=1.5", "not an integer"),
    "seq_len": (lambda: predict(seq_len=0), ValueError, "seq_len=0", "leave it out"),
    "streams": (lambda: predict(streams="mlp"), TypeError, "streams='mlp'", "True or False"),
    "progress": (lambda: predict(progress=True), TypeError, "progress=True", r"progress\(done, total, layer\)"),
    # the shifting matrix
    "n": (lambda: pasa.shifting_matrix(0, 0.9), ValueError, "got 0", "integer >= 1"),
    "beta": (lambda: pasa.shifting_matrix(4, 1.5), ValueError, "got 1.5", r"in \[0, 1\)"),
    "beta type": (lambda: pasa.shifting_matrix(4, "x"), TypeError, "beta='x'", "pass a float"),
    "matrix scale": (lambda: pasa.shifting_matrix(4, 0.5, scale="1"), TypeError, "scale='1'", "pass a float"),
    "complex scale": (lambda: pasa.optimal_beta(0.5, 4, scale=1j), TypeError, "scale=1j", "pass a float"),
    "matrix of bool": (lambda: pasa.shifting_matrix(4, 0.5, dtype=torch.bool), ValueError, "torch.bool", "known: "),
    "matrix dtype": (lambda: pasa.shifting_matrix(4, 0.5, dtype=torch.int32), ValueError, "torch.int32", "known: "),
    "beta0": (lambda: pasa.optimal_beta(np.ones(2), 4), TypeError, "beta", "pass a float"),
    # the FP64 truth
    "golden NumPy": (lambda: pasa.golden_attention(Q.numpy(), K, K), TypeError, "q is a ndarray", FROM_NUMPY),
}  # fmt: skip


def recorded_ring():
    with pasa.record_diagnostics():
        ring()


@pytest.fixture(scope="module")
def group():
    """Make a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, error, value, hint = BAD[name]
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert re.search(value, text), text
    assert re.search(hint, text), text


def test_every_public_function_has_bad_input():
    """The table has calls of every public function; `backends` and `record_diagnostics` take no argument."""
    calls = " ".join(inspect.getsource(inspect.getmodule(dense)).split())
    for name in set(pasa.__all__) - {"__version__", "backends", "record_diagnostics", "PatchHandle", "Fp16Handle"}:
        assert f"pasa.{name}(" in calls, name


@pytest.mark.parametrize("name", ["attention", "attention_varlen", "attention_paged", "write_pages", "PasaConfig"])
def test_signatures_have_no_keywords_of_any_name(name):
    """Hints at unknown keywords do not change signatures: no `**kwargs`, and help() shows the parameters."""
    signature = inspect.signature(getattr(pasa, name))
    assert not [each for each in signature.parameters.values() if each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    assert getattr(pasa, name).__module__ == "pasa." + {"write_pages": "paged", "PasaConfig": "config"}.get(
        name, "paged" if name.endswith("paged") else "attention"
    )


WRONG_IN_A_GRAPH = {
    "keyword": (lambda q: pasa.attention(q, q, q, dropout_p=0.0), "'dropout_p'"),
    "position": (lambda q: pasa.attention(q, q, q, None), "takes 3 positional arguments but 4 were given"),
    "field": (lambda q: pasa.attention(q, q, q, config=pasa.PasaConfig(percision="fp32")), "did you mean precision"),
}


@pytest.mark.parametrize("wrong", WRONG_IN_A_GRAPH)
def test_compiled_code_is_told_of_wrong_arguments(wrong):
    """Compiled code gets the message of an eager call, inside of torch's own.

    Story: torch cannot trace `function.__qualname__`, of which the message was formed, and complained of that instead.
    """
    call, told = WRONG_IN_A_GRAPH[wrong]
    with pytest.raises(torch._dynamo.exc.Unsupported) as raised:
        torch.compile(call, fullgraph=True, backend="eager")(Q)
    assert told in str(raised.value)


def test_configs_are_made_in_compiled_code():
    def step(q):
        return pasa.attention(q, q, q, config=pasa.PasaConfig(block_k=64))

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    assert torch.equal(compiled(Q), step(Q))


LIKELY = [((2, 300, 8, 16), (2, 300, 8, 16)), ((1, 1024, 32, 64), (1, 1024, 8, 64)), ((1, 200, 1, 8), (1, 200, 1, 8))]
UNLIKELY = {
    "128 heads": ((1, 128, 2, 8), (1, 128, 2, 8)),
    "a batch folded into the heads": ((1, 256, 200, 8), (1, 256, 200, 8)),
    "decoding with such heads": ((1, 256, 1, 8), (1, 256, 300, 8)),
    "grouped heads": ((1, 256, 2, 8), (1, 128, 2, 8)),
    "heads that do not divide": ((1, 256, 3, 8), (1, 256, 2, 8)),
}


@pytest.fixture
def no_earlier_warnings():
    notices.warn_once.cache_clear()
    yield
    notices.warn_once.cache_clear()


@pytest.mark.usefixtures("no_earlier_warnings")
@pytest.mark.parametrize("shapes", LIKELY, ids=str)
def test_tokens_first_shapes_raise_a_warning_once(shapes):
    """Tensors (B, S, H, D) that are passed without tensor_layout raise a warning, once.

    Story: they were taken for heads-first, and the result was wrong without a word.
    """
    q, k = (torch.zeros(shape, dtype=HALF) for shape in shapes)
    with pytest.warns(UserWarning, match="tensor_layout='NHD'") as caught:
        pasa.attention(q, k, k)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pasa.attention(q, k, k)
    notices.warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pasa.attention(q, k, k, tensor_layout="NHD")


@pytest.mark.usefixtures("no_earlier_warnings")
@pytest.mark.parametrize("name", UNLIKELY)
def test_heads_first_shapes_raise_no_warning(name):
    q, k = (torch.zeros(shape, dtype=HALF) for shape in UNLIKELY[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pasa.attention(q, k, k)
