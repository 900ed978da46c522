"""Decode two sequences from a paged cache, one token a step."""

import torch

import pasa

torch.manual_seed(0)
slots, heads, kv_heads, dim = 16, 8, 2, 64
k_cache, v_cache = torch.zeros(2, 8, slots, kv_heads, dim).half()  # 8 pages
block_table = torch.tensor([[3, 7], [5, 1]], dtype=torch.int32)  # pages of each sequence, in order
seq_lens = torch.zeros(2, dtype=torch.int32)
keys, values = [], []

for step in range(20):  # the second page of each sequence begins at step 16
    k, v = torch.randn(2, 2, kv_heads, dim).half()  # the new token of each sequence
    k += 60  # a bias that all keys share
    slot_mapping = block_table[:, step // slots].long() * slots + step % slots
    pasa.write_pages(k, v, k_cache, v_cache, slot_mapping)
    seq_lens += 1
    keys.append(k)
    values.append(v)
    q = torch.randn(2, heads, dim).half() + 60
    out = pasa.attention_paged(q, k_cache, v_cache, block_table, seq_lens)

whole = pasa.attention(q[:, :, None], torch.stack(keys, 2), torch.stack(values, 2))[:, :, 0]
print(f"finite: {bool(out.isfinite().all())}")
print(f"largest difference to contiguous keys: {(out - whole).abs().max():.1e}")
