"""Serves a model of transformers with an attention backend of vllm-ascend.

Metadata, builder, cache and layers are those of vllm-ascend's classes. Scheduler, pages and block tables are here,
because vllm-ascend's own need an NPU. Each step takes the next tokens of some sequences, decodes first.
"""

from types import SimpleNamespace

import torch
from transformers import AttentionInterface

NAME = "vllm_ascend_test"
PAGE = 128


class Server:
    """Keeps the cache of a model's sequences; pages are in random order.

    padding: tokens that vllm-ascend would append to a step, with a sequence of their own.
    """

    def __init__(self, model, backend, common, spec, vllm_config, pages=12, padding=0):
        config = model.config
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        dim = config.hidden_size // heads
        self.model, self.common, self.padding = model, common, padding
        self.builder = backend.get_builder_cls()(spec, ["layer"], vllm_config, torch.device("cpu"))
        window = getattr(config, "sliding_window", None) if config.model_type == "mistral" else None
        arguments = heads, dim, dim**-0.5, kv_heads, None, window, "auto", None, "decoder", None
        layers = range(config.num_hidden_layers)
        self.layers = [backend.get_impl_cls()(*arguments) for _ in layers]
        shape = backend.get_kv_cache_shape(pages, PAGE, kv_heads, dim)
        self.caches = [tuple(torch.full(shape, torch.nan).half()) for _ in layers]
        self.free = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).tolist()
        self.tables, self.lengths = {}, {}
        AttentionInterface.register(NAME, self.attend)
        model.set_attn_implementation(NAME)

    def attend(self, module, q, k, v, mask, scaling=None, **others):
        """Run a layer on packed tokens (1, H, n, D), in the place of transformers' attention."""
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
        layer = SimpleNamespace(layer_name="model.layers.0", _k_scale_float=1.0, _v_scale_float=1.0)
        i = module.layer_idx
        out = torch.full_like(q, 5.0)
        self.layers[i].forward(layer, q, k, v, self.caches[i], self.metadata, out)
        return out[None], None

    @torch.no_grad()
    def step(self, tokens):
        """Run the next tokens of some sequences (sequence: list of tokens); return each sequence's last logits."""
        before = [self.lengths.get(name, 0) for name in tokens]
        counts = [len(each) for each in tokens.values()]
        for name, n in zip(tokens, counts, strict=True):
            self.lengths[name] = self.lengths.get(name, 0) + n
            table = self.tables.setdefault(name, [])
            while len(table) * PAGE < self.lengths[name]:
                table.append(self.free.pop())
        positions = [torch.arange(n) + first for first, n in zip(before, counts, strict=True)]
        self.metadata = self.builder.build(0, self._common(tokens, counts, positions))
        ids = [token for each in tokens.values() for token in each] + [0] * self.padding
        at = torch.cat([*positions, torch.zeros(self.padding).long()])
        logits = self.model(torch.tensor([ids]), position_ids=at[None], use_cache=False).logits[0]
        ends = torch.tensor(counts).cumsum(0) - 1
        return dict(zip(tokens, logits[ends].float(), strict=True))

    def _common(self, tokens, counts, positions):
        longest = max(len(self.tables[name]) for name in tokens)
        table = torch.tensor([(self.tables[name] + [0] * longest)[:longest] for name in tokens]).int()
        slots = [
            self.tables[name][at // PAGE] * PAGE + at % PAGE
            for name, span in zip(tokens, positions, strict=True)
            for at in span.tolist()
        ]
        n, ends = sum(counts), [0, *torch.tensor(counts).cumsum(0).tolist()]
        if self.padding:
            ends.append(n + self.padding)  # a sequence without a length and without pages
        lengths = torch.tensor([self.lengths[name] for name in tokens]).int()
        starts = torch.tensor(ends).int()
        return self.common(
            query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths, num_reqs=len(starts) - 1,
            num_actual_tokens=n, max_query_len=max(counts), max_seq_len=int(lengths.max()), block_table_tensor=table,
            slot_mapping=torch.tensor(slots + [-1] * self.padding).int(),
        )  # fmt: skip


def generate(server, prompts, tokens, chunk):
    """Return the best tokens after each prompt; prompts are cut into chunks, and start one step after the other."""
    waiting = {i: list(prompt) for i, prompt in enumerate(prompts)}
    made = {i: [] for i in waiting}
    now = 0
    while any(len(each) < tokens for each in made.values()):
        now += 1
        running = {i: made[i][-1:] for i in made if made[i] and len(made[i]) < tokens}
        filling = {i: waiting[i][:chunk] for i in list(waiting)[:now] if waiting[i]}
        logits = server.step(running | filling)
        for i in filling:
            waiting[i] = waiting[i][chunk:]
        for i, scores in logits.items():
            assert scores.isfinite().all()
            if not waiting[i]:
                made[i].append(int(scores.argmax()))
    return list(made.values())
