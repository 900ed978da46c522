"""A converted model at run time: what it counts and reports, what it refuses, and how it is copied, saved and moved."""

import copy
import gc
import io
import json
import threading
import warnings

import pytest
import torch

import pasa
from pasa.fp16.counting import EVERY
from tests.pasa.fp16.models import large

IDS = torch.arange(20)[None]
SAMPLE = {"input_ids": IDS, "output_hidden_states": True, "use_cache": False}


def run(model):
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


@pytest.fixture
def model():
    return large("qwen2")


def grow(model, factor):
    """Make the last residual stream larger than it was on the sample."""
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(factor)


def messages(call):
    """Return the texts of the warnings of this package that a call raises."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in caught if str(each.message).startswith("to_fp16")]


def test_a_value_beyond_the_margin_is_counted_and_reported_once(model):
    handle = pasa.to_fp16(model, SAMPLE)
    assert messages(lambda: run(model)) == []
    assert handle.report().beyond == ()
    grow(model, 3.9)
    for _ in range(EVERY - 1):
        assert messages(lambda: run(model)) == []
    texts = messages(lambda: [run(model) for _ in range(2 * EVERY)])
    assert any("model.layers.1 " in text and "times the planned 65504 / 4" in text for text in texts)
    assert len(texts) == len(set(texts))
    counts = {name: (value, count) for name, value, count in handle.report().beyond}
    value, count = counts["model.layers.1"]
    assert 65504 / 4 < value <= 65504
    assert count == 2  # of the forward passes in which values are compared
    assert "BEYOND" in str(handle.report())


def hooked(model):
    """Return how many modules have hooks for what they return, the model itself aside."""
    return sum(bool(each._forward_hooks) for each in model.modules() if each is not model)


def test_only_passes_that_compare_hook_modules(model):
    """Story: hooks that did nothing in 15 of 16 passes slowed decoding by 1 %."""
    pasa.to_fp16(model, SAMPLE)
    assert hooked(model) == 0
    seen = []
    model.model.norm.register_forward_pre_hook(lambda *_: seen.append(hooked(model)))
    for _ in range(EVERY + 1):
        run(model)
        assert hooked(model) == 0
    assert [count > 0 for count in seen] == [True, *[False] * (EVERY - 1), True]


def test_layers_have_no_guards_while_the_model_runs(model):
    """Story: decoding Qwen2-7B took 1.03 times plain FP16, most of it for guards that let every layer pass."""
    pasa.to_fp16(model, SAMPLE)
    layers = list(model.model.layers)
    hidden = torch.zeros(1, 20, model.config.hidden_size, dtype=torch.float16)
    seen = []
    stop = model.model.norm.register_forward_pre_hook(
        lambda *_: seen.append([len(each._forward_pre_hooks) for each in layers])
    )
    for _ in range(2):
        run(model)
        assert all(len(each._forward_pre_hooks) == 1 for each in layers)
        with pytest.raises(RuntimeError, match="call Qwen2ForCausalLM"):
            layers[1](hidden)
    assert seen == [[0, 0]] * 2
    stop.remove()


def test_a_call_that_fails_leaves_the_guards_in_place(model):
    pasa.to_fp16(model, SAMPLE)
    with pytest.raises(ValueError, match="inputs_embeds"), torch.no_grad():
        model(inputs_embeds=torch.zeros(1, 20, model.config.hidden_size, dtype=torch.float16), use_cache=False)
    hidden = torch.zeros(1, 20, model.config.hidden_size, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="call Qwen2ForCausalLM"):
        model.model.layers[1](hidden)


def interrupt(model, error):
    """Let an error end a forward pass that compares."""

    def stop(*_):
        raise error

    handle = model.model.norm.register_forward_pre_hook(stop)
    with pytest.raises(error):
        run(model)
    handle.remove()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_interrupted_pass_leaves_no_hooks_behind(model, error):
    pasa.to_fp16(model, SAMPLE)
    interrupt(model, error)
    if error is KeyboardInterrupt:  # which torch lets pass without calling a hook
        assert hooked(model) > 0
        run(model)
    assert hooked(model) == 0


def test_undo_after_an_interrupted_pass_leaves_no_hooks_behind(model):
    handle = pasa.to_fp16(model, SAMPLE, keep_original="cpu")
    interrupt(model, KeyboardInterrupt)
    handle.undo()
    assert hooked(model) == 0
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())


def test_an_infinity_is_seen_in_the_forward_pass_that_returns_it(model):
    handle = pasa.to_fp16(model, SAMPLE)
    run(model)
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.inf)
    texts = messages(lambda: run(model))
    assert len(texts) == 1
    assert "returned infinity or NaN" in texts[0]
    assert messages(lambda: run(model)) == []
    ((name, value, count),) = handle.report().beyond
    assert (name, count) == ("", 2)
    assert not value < torch.inf
    json.loads(json.dumps(handle.report().as_dict(), allow_nan=False))


def test_a_copy_is_scaled_too_and_counts_nothing(model):
    truth = run(model)
    handle = pasa.to_fp16(model, SAMPLE)
    scaled = run(model)
    twin = copy.deepcopy(model)
    assert torch.allclose(run(twin), scaled, rtol=1e-2, atol=1e-2 * scaled.abs().max())
    assert torch.allclose(run(twin).float(), truth, rtol=1e-2, atol=1e-2 * truth.abs().max())
    with torch.no_grad():
        hidden = twin(**SAMPLE).hidden_states
    assert hidden[-2].isfinite().all()
    assert hidden[-2].abs().max() > 65504
    with torch.no_grad():
        twin.lm_head.weight.fill_(60000)
    assert messages(lambda: run(twin)) == []
    assert handle.report().beyond == ()
    with pytest.raises(RuntimeError, match="converted already"):
        pasa.to_fp16(twin, SAMPLE)


def test_hidden_states_of_the_sample_leave_no_hooks_behind(model):
    """Story: 56 hooks of transformers in a model of 28 layers made each step of decoding 3 % slower."""
    pasa.to_fp16(model, SAMPLE, keep_original="cpu").undo()
    assert not any(module._forward_hooks for module in model.modules())
    with torch.no_grad():
        states = model(**SAMPLE).hidden_states
    hooks = sum(len(module._forward_hooks) for module in model.modules())
    assert len(states) == len(model.model.layers) + 1
    assert hooks >= len(model.model.layers)
    pasa.to_fp16(model, SAMPLE, keep_original="cpu").undo()
    assert sum(len(module._forward_hooks) for module in model.modules()) == hooks


def test_a_saved_model_loads_scaled(model):
    """Story: asked for hidden states, transformers left hooks in the model, which torch.save refuses."""
    pasa.to_fp16(model, SAMPLE)
    scaled = run(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.allclose(run(loaded), scaled, rtol=1e-2, atol=1e-2 * scaled.abs().max())


def test_state_dicts_of_the_scaled_and_the_original_model_do_not_mix(model):
    original = copy.deepcopy(model)
    before = original.state_dict()
    pasa.to_fp16(model, SAMPLE)
    after = model.state_dict()
    with pytest.raises(RuntimeError, match="scaled_by_pasa_to_fp16"):
        original.load_state_dict(after)
    with pytest.raises(RuntimeError, match="scaled_by_pasa_to_fp16"):
        model.load_state_dict(before)
    model.load_state_dict(after)


@pytest.mark.parametrize("change", ["half", "float", "bfloat16"])
def test_a_changed_dtype_is_refused(change):
    model = large("gemma3")  # keeps parameters in FP32
    pasa.to_fp16(model, SAMPLE)
    getattr(model, change)()
    with pytest.raises(RuntimeError, match=r"changed from torch\.\w+ to torch\.\w+ after it was scaled"):
        run(model)


def test_a_move_to_a_device_keeps_it_working(model):
    pasa.to_fp16(model, SAMPLE)
    scaled = run(model)
    assert torch.equal(run(model.to("cpu")), scaled)


def test_training_is_refused(model):
    pasa.to_fp16(model, SAMPLE)
    model.train()
    with pytest.raises(RuntimeError, match="training mode"):
        model(IDS)
    model.eval()
    assert model(IDS).logits.requires_grad


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_it_compiles_to_one_graph(family):
    model = large(family)
    pasa.to_fp16(model, SAMPLE)
    eager = run(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert messages(lambda: run(compiled)) == []
    assert torch.equal(run(compiled), eager)


def test_an_exception_in_a_forward_pass_does_not_confuse_the_counters(model):
    handle = pasa.to_fp16(model, SAMPLE)
    with pytest.raises(IndexError):
        model(IDS + 10**6)
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.inf)
    assert len(messages(lambda: run(model))) == 1
    ((_, _, count),) = handle.report().beyond
    assert count == 1


def test_hidden_states_in_a_tuple_are_refused_too(model):
    pasa.to_fp16(model, SAMPLE)
    with pytest.raises(ValueError, match="return_dict"):
        model(**SAMPLE, return_dict=False)


def test_threads_share_a_model(model):
    handle = pasa.to_fp16(model, SAMPLE)
    expected = run(model)
    results = []
    threads = [threading.Thread(target=lambda: results.append(run(model))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(torch.equal(each, expected) for each in results)
    assert handle.report().beyond == ()


def test_the_model_stays_converted_without_its_handle(model):
    pasa.to_fp16(model, SAMPLE)
    gc.collect()
    assert run(model).isfinite().all()


def test_blocks_may_be_nested_and_undo_may_be_repeated(model):
    before = copy.deepcopy(model.state_dict())
    with pasa.to_fp16(model, SAMPLE, keep_original="cpu") as handle:
        with handle:
            assert handle.active
        assert handle.active
        assert next(model.parameters()).dtype == torch.float16
    assert not handle.active
    handle.undo()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert "scaled_by_pasa_to_fp16" not in model.state_dict()
    hooks = [
        hook
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    ]
    assert not any(type(hook).__module__.startswith("pasa") for hook in hooks)
    pasa.to_fp16(model, SAMPLE)


def test_undo_follows_an_error_in_its_block(model):
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(KeyError), pasa.to_fp16(model, SAMPLE, keep_original="cpu"):
        raise KeyError
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_without_the_original_undo_is_refused(model):
    handle = pasa.to_fp16(model, SAMPLE)
    with pytest.raises(RuntimeError, match='keep_original="cpu"'):
        handle.undo()
    with pytest.raises(RuntimeError, match='keep_original="cpu"'), handle:
        pass
    assert handle.active


def test_the_report_is_plain_and_fits_a_terminal(model):
    handle = pasa.to_fp16(model, SAMPLE)
    report = handle.report()
    json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert max(map(len, str(report).splitlines())) <= 80


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_it_waits_for_nothing_on_a_gpu(model):
    """No operation of the hooks synchronises with the host; the layers alone run, because a model may synchronise."""
    handle = pasa.to_fp16(model.cuda(), {"input_ids": IDS.cuda(), "use_cache": False})
    x = torch.randn(1, 20, 32, device="cuda", dtype=torch.float16)
    mlp = model.model.layers[1].mlp
    counters = handle._make_report.__self__._counters
    begin, end = counters._entering(""), counters._leaving(len(counters.names) - 1)

    def forward():
        begin(model, ())
        with torch.no_grad():
            mlp(x)
        end(model, (), x)

    forward()
    grow(model, 3.9)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        texts = messages(lambda: [forward() for _ in range(2 * EVERY)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert [text.split(" reached")[0] for text in texts] == ["to_fp16: model.layers.1.mlp"]
    assert counters._calls[""] == 2 * EVERY + 1
    assert [name for name, _, _ in handle.report().beyond] == ["model.layers.1.mlp"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_cuda_graph_counts_infinities_at_each_replay(model):
    handle = pasa.to_fp16(model.cuda(), {"input_ids": IDS.cuda(), "use_cache": False})
    ids = IDS.cuda()
    with torch.no_grad():
        for _ in range(3):
            model(ids, use_cache=False)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(ids, use_cache=False)
        graph.replay()
        assert handle.report().beyond == ()
        model.lm_head.weight.fill_(torch.inf)
        graph.replay()
        graph.replay()
    ((name, _, count),) = handle.report().beyond
    assert (name, count) == ("", 2)
