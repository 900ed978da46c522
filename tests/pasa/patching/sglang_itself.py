"""Tests of the SGLang adapter against SGLang's own registry, plugins, layers, pools and batches.

scripts/test_sglang.sh runs this file by its name, on the CPU, with the Python files of SGLang's wheel and replacements
of compiled packages (sglang_on_cpu.py). No engine runs: that needs the compiled kernels.
"""

import importlib.metadata
import inspect
from types import SimpleNamespace

import pytest
import torch

from pasa.patching import sglang as adapter
from tests.pages import make_pages, worst
from tests.pasa.patching import sglang_on_cpu
from tests.pasa.patching.test_vllm import HALF_ULP

LAYERS, LAYER, SPARE = 3, 1, 5  # layers of the pool, the tested one, and requests before the first


@pytest.fixture(scope="module", autouse=True)
def srt():
    """Return the modules of SGLang that the tests drive."""
    sglang_on_cpu.prepare()
    from sglang.srt.layers import radix_attention
    from sglang.srt.layers.attention import attention_registry, base_attn_backend, torch_native_backend
    from sglang.srt.mem_cache import memory_pool
    from sglang.srt.model_executor import forward_batch_info, forward_context

    adapter.register()
    modules = (radix_attention, attention_registry, base_attn_backend, torch_native_backend, memory_pool)
    return SimpleNamespace(
        **{each.__name__.split(".")[-1]: each for each in (*modules, forward_batch_info, forward_context)}
    )


class Step:
    """A forward pass: the newest queries of each sequence are new, and their keys are not in the pool yet."""

    def __init__(self, srt, lengths, queries, page=16, bias=300.0):
        self.srt = srt
        self.pages = pages = make_pages(lengths, queries=queries, slots=page, bias=bias, stale=7.0)
        rows = (pages.slots + page).split(lengths)  # page 0 of a pool is for padding
        used = int(pages.slots.max()) // page + 1
        self.pool = srt.memory_pool.MHATokenToKVPool(
            size=used * page, page_size=page, dtype=torch.float16, head_num=2, head_dim=64, layer_num=LAYERS,
            device="cpu", enable_memory_saver=False,
        )  # fmt: skip
        self.requests = srt.memory_pool.ReqToTokenPool(SPARE + len(lengths), max(lengths) + 7, "cpu", False)
        for buffer in (self.pool.k_buffer, self.pool.v_buffer):
            buffer[LAYER].fill_(torch.nan)
        starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        old, new = [], []
        for b, (row, n) in enumerate(zip(rows, queries, strict=True)):
            self.requests.req_to_token[SPARE + b, : len(row)] = row.int()
            old += range(starts[b], starts[b + 1] - n)
            new += range(starts[b + 1] - n, starts[b + 1])
        where = torch.cat(rows)
        self.pool.k_buffer[LAYER][where[old]], self.pool.v_buffer[LAYER][where[old]] = pages.k[old], pages.v[old]
        self.k, self.v, self.new = pages.k[new], pages.v[new], where[new]
        self.runner = SimpleNamespace(
            dtype=torch.float16, device="cpu", token_to_kv_pool=self.pool, req_to_token_pool=self.requests,
            server_args=SimpleNamespace(speculative_algorithm=None), use_mla_backend=False,
        )  # fmt: skip
        mode = srt.forward_batch_info.ForwardMode
        decode = max(queries) == 1
        self.batch = srt.forward_batch_info.ForwardBatch(
            forward_mode=mode.DECODE if decode else mode.EXTEND, batch_size=len(lengths),
            input_ids=torch.zeros(len(new), dtype=torch.long), req_pool_indices=torch.arange(len(lengths)) + SPARE,
            seq_lens=torch.tensor(lengths), out_cache_loc=self.new, seq_lens_sum=sum(lengths),
            seq_lens_cpu=torch.tensor(lengths),
        )  # fmt: skip
        if not decode:
            self.batch.extend_seq_lens, self.batch.extend_seq_lens_cpu = torch.tensor(queries), list(queries)
            self.batch.extend_prefix_lens = torch.tensor(lengths) - torch.tensor(queries)

    def layer(self, **options):
        return self.srt.radix_attention.RadixAttention(4, 64, 64**-0.5, 2, LAYER, **options)

    def run(self, backend, layer, **arguments):
        """Return (T, 4, 64) from the layer's own forward, in the context that a model runner publishes."""
        context = self.srt.forward_context
        backend.init_forward_metadata(self.batch)
        with context.forward_context(context.ForwardContext(attn_backend=backend)):
            out = layer(self.pages.q.flatten(1), self.k.flatten(1), self.v.flatten(1), self.batch, **arguments)
        return out.view(-1, 4, 64)


def make(step):
    """Return the backend as a model runner makes it."""
    return step.srt.attention_registry.ATTENTION_BACKENDS["pasa"](step.runner)


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("queries", [[1, 1, 1], [40, 17, 33], [5, 1, 33], [1, 17, 2]], ids=str)
def test_scores_beyond_fp16_are_exact_from_sglangs_pool(by_reference, srt, page, queries):
    """The keys share a bias of 300, so scores overflow FP16; new keys are written by SGLang's pool."""
    step = Step(srt, [40, 17, 33], queries, page)
    out = step.run(make(step), step.layer())
    golden, lse = step.pages.golden(is_causal=True)
    assert worst((out, lse), (golden, lse))[0] <= HALF_ULP
    assert torch.equal(step.pool.k_buffer[LAYER][step.new], step.k)
    assert all(not step.pool.k_buffer[other].any() for other in range(LAYERS) if other != LAYER)


@pytest.mark.parametrize("queries", [[1, 1, 1], [5, 1, 33]], ids=str)
@pytest.mark.parametrize("window", [-1, 8])
def test_outputs_are_those_of_sglangs_own_backend(by_reference, srt, queries, window):
    """Its backend over torch's attention sees the same windows; scores are small enough for it."""
    ours, theirs = (Step(srt, [40, 17, 33], queries, bias=0.0) for _ in range(2))
    out = ours.run(make(ours), ours.layer(sliding_window_size=window))
    backend = srt.torch_native_backend.TorchNativeAttnBackend(theirs.runner)
    expected = theirs.run(backend, theirs.layer(sliding_window_size=window))
    assert (out - expected).abs().max() <= 2 * HALF_ULP
    if window > 0:
        everything = ours.run(make(ours), ours.layer())
        assert (out - everything).abs().max() > 100 * HALF_ULP


@pytest.mark.parametrize("queries", [[1, 1, 1], [5, 1, 33]], ids=str)
def test_soft_caps_and_sinks(by_reference, srt, queries):
    step, sinks = Step(srt, [40, 17, 33], queries, bias=0.0), torch.tensor([0.5, 2.0, -1.0, 3.0]).half()
    out = step.run(make(step), step.layer(logit_cap=0.75), sinks=sinks)
    golden, lse = step.pages.golden(is_causal=True, softcap=0.75, sinks=sinks)
    assert worst((out, lse), (golden, lse))[0] <= HALF_ULP


def test_an_idle_rank_attends_to_nothing(srt):
    step = Step(srt, [4], [1])
    mode = srt.forward_batch_info.ForwardMode.IDLE
    step.batch.forward_mode, none = mode, torch.zeros(0, dtype=torch.long)
    step.batch.seq_lens = step.batch.seq_lens_cpu = step.batch.req_pool_indices = none
    backend = make(step)
    backend.init_forward_metadata(step.batch)
    assert backend.forward(step.pages.q[:0].flatten(1), None, None, step.layer(), step.batch).shape == (0, 4 * 64)


def test_the_plugin_makes_the_name_an_option_of_the_server(srt, monkeypatch):
    from sglang.srt import plugins, server_args

    monkeypatch.delitem(srt.attention_registry.ATTENTION_BACKENDS, "pasa")
    server_args.ATTENTION_BACKEND_CHOICES.remove("pasa")
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    entry = importlib.metadata.EntryPoint("pasa", "pasa.patching.sglang:plugin", plugins.GENERAL_PLUGINS_GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: (entry,) if group == entry.group else ())
    plugins.load_plugins()
    adapter.plugin()
    assert "pasa" in srt.attention_registry.ATTENTION_BACKENDS
    assert server_args.ATTENTION_BACKEND_CHOICES.count("pasa") == 1


REFUSED = {
    "dtype": (lambda step: setattr(step.runner, "dtype", torch.bfloat16), r"--dtype float16"),
    "speculation": (lambda step: setattr(step.runner.server_args, "speculative_algorithm", "EAGLE"), "EAGLE"),
    "cache dtype": (lambda step: setattr(step.pool, "store_dtype", torch.uint8), r"a cache of torch\.uint8"),
    "layout": (lambda step: setattr(step.pool, "kv_cache_layout", "hnd"), "the cache layout 'hnd'"),
    "pool": (lambda step: setattr(step.runner, "token_to_kv_pool", object()), "a memory pool of class object"),
    "values": (lambda step: setattr(step.pool, "v_head_dim", 32), "head_dim=64 and v_head_dim=32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_when_the_backend_is_made(srt, name):
    step = Step(srt, [4], [1])
    change, message = REFUSED[name]
    change(step)
    with pytest.raises(NotImplementedError, match=message):
        make(step)


def test_cuda_graphs_are_refused_before_they_are_captured(srt):
    with pytest.raises(NotImplementedError, match="--disable-cuda-graph"):
        make(Step(srt, [4], [1])).init_cuda_graph_state(8, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"is_cross_attention": True}, "cross attention"), ({"attn_type": "ENCODER_ONLY"}, "attn_type='encoder_only'"),
     ({"logit_cap": 3.0, "logit_capping_method": "other"}, "logit_capping_method='other'")],
)  # fmt: skip
def test_options_of_a_layer_are_refused(srt, options, message):
    step = Step(srt, [4], [1])
    if "attn_type" in options:
        options = {"attn_type": srt.radix_attention.AttentionType[options["attn_type"]]}
    with pytest.raises(NotImplementedError, match=message):
        step.run(make(step), step.layer(**options))


def test_unknown_arguments_and_modes_are_refused(srt):
    step = Step(srt, [4], [1])
    with pytest.raises(NotImplementedError, match="k_rope"):
        make(step).forward(step.pages.q, step.k, step.v, step.layer(), step.batch, k_rope=step.k)
    step.batch.forward_mode = srt.forward_batch_info.ForwardMode.TARGET_VERIFY
    with pytest.raises(NotImplementedError, match="TARGET_VERIFY"):
        make(step).init_forward_metadata(step.batch)


def test_another_interface_is_refused_by_what_differs(srt):
    base, batch = srt.base_attn_backend.AttentionBackend, srt.forward_batch_info.ForwardBatch
    adapter.refuse_unknown(base, batch)
    fields = {name: None for name in batch.__dataclass_fields__ if name != "extend_seq_lens"}
    moved = type("Moved", (base,), {"forward_extend": lambda self, layer, q, k, v: None})
    expected = r"ForwardBatch lacks extend_seq_lens; AttentionBackend.forward_extend takes \(self, layer, q, k, v\)"
    with pytest.raises(NotImplementedError, match=expected):
        adapter.refuse_unknown(moved, SimpleNamespace(__dataclass_fields__=fields))


def test_every_abstract_method_is_there(srt):
    assert not inspect.isabstract(adapter.backend_class())
