"""A model of one step of vLLM's engine on the CPU: new tokens, a paged cache, and the metadata for a builder."""

from dataclasses import dataclass
from types import SimpleNamespace

import torch

from pasa.patching import vllm as adapter
from tests.pages import make_pages

SPEC = SimpleNamespace(head_size=64, dtype=torch.float16)
"""The fields of vLLM's AttentionSpec that a builder checks."""


@dataclass
class Common:
    """The fields of CommonAttentionMetadata that a builder reads."""

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: object = True


class Step:
    """A step of the engine: the newest queries of each sequence are new tokens, whose keys are not yet in the cache.

    packed: if True, the cache is (pages, heads, slots, 2 D), else (2, pages, slots, heads, D); common: class of the
    metadata for a builder; cache: function from the numbers of pages and of slots of a page to the cache; slots: number
    of slots of a page; bias: of queries and keys. With 300, scores are eleven times FP16's largest number, so that no
    sink in FP16 has a weight.
    """

    def __init__(self, lengths, queries, padding=0, packed=False, common=Common, cache=None, slots=16, bias=300.0):
        self.pages = make_pages(lengths, slots=slots, queries=queries, bias=bias, stale=7.0)
        pages, (starts, ends) = self.pages, self.pages.edges
        new = [range(end - n, end) for n, end in zip(queries, ends[1:], strict=True)]
        where = [(b, key - ends[b]) for b, span in enumerate(new) for key in span]
        new_slots = [int(pages.table[b, at // slots]) * slots + at % slots for b, at in where]
        n, per_page, heads, dim = pages.k_cache.shape
        if cache is not None:
            self.cache = cache(n, per_page)
        else:
            self.cache = torch.empty(*((n, heads, per_page, 2 * dim) if packed else (2, *pages.k_cache.shape))).half()
        self.k_cache, self.v_cache = self.cache.transpose(1, 2).split(dim, -1) if packed else self.cache
        self.k_cache.copy_(pages.k_cache)
        self.v_cache.copy_(pages.v_cache)
        for part in (self.k_cache, self.v_cache):
            for slot in new_slots:
                part[slot // slots, slot % slots] = torch.nan
        index = [key for span in new for key in span]
        rows = [torch.full((padding, *x.shape[1:]), torch.nan).half() for x in (pages.q, pages.k, pages.v)]
        self.q, self.k, self.v = (
            torch.cat(x) for x in zip((pages.q, pages.k[index], pages.v[index]), rows, strict=True)
        )
        cu, n = torch.tensor(starts).int(), len(index)
        self.common = common(
            query_start_loc=cu, query_start_loc_cpu=cu, seq_lens=pages.lengths, num_reqs=len(lengths),
            num_actual_tokens=n, max_query_len=max(queries), max_seq_len=max(lengths), block_table_tensor=pages.table,
            slot_mapping=torch.tensor(new_slots + [-1] * padding),
        )  # fmt: skip

    def run(self, output, key=True, spec=SPEC, vllm_config=None, **how):
        """Return the output that the layer writes; spec: the builder's KVCacheSpec."""
        backend = adapter.PasaAttentionBackend
        builder = backend.get_builder_cls()(spec, ["layer"], vllm_config, torch.device("cpu"))
        implementation = backend.get_impl_cls()(4, 64, 64**-0.5, 2, **how)
        metadata = builder.build(0, self.common)
        key, value = (self.k, self.v) if key else (None, None)
        return implementation.forward(None, self.q, key, value, self.cache, metadata, output)
