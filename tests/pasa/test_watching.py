"""Tests of `pasa.watch`: its counts, that it changes no bit of the output, and that `unwatch` leaves no trace."""

from __future__ import annotations

import diffusers
import pytest
import torch
import transformers as hf
from torch._dynamo.testing import CompileCounter
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

import pasa
from pasa.eval.models.video.tiny import tiny_unet
from pasa.ops import operators
from pasa.ops.attention.spec import watch as counting
from pasa.patching.callbacks import patched_modules
from pasa.watching import ENOUGH_ROWS, LayerCounts, WatchReport
from tests.inputs import normal_qkv

FIELDS = counting.FIELDS
QWEN2 = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
QWEN2 |= {"num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 1024, "eos_token_id": None}
IDS = torch.randint(5, 97, (2, 750), generator=torch.Generator().manual_seed(1))
PADDED = torch.ones_like(IDS).index_fill(1, torch.arange(9), 0)
LAYERS = ["model.layers.0.self_attn", "model.layers.1.self_attn"]


@pytest.fixture
def qwen2():
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(hf.Qwen2Config(**QWEN2)).eval()


@torch.no_grad()
def logits(model, **how):
    return model(IDS, **how).logits


class Seen(TorchDispatchMode):
    """Records queries, keys, masks, causality and scales of every attention call."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.pasa.attention.default:
            self.calls.append((args[0].clone(), args[1].clone(), args[3], *args[5:7]))
        return func(*args, **(kwargs or {}))


def counted(calls, walked=0):
    """Return the expected counts of a layer after these calls; `walked` rows came before the first call."""
    totals = torch.zeros(len(FIELDS), dtype=torch.int64)
    for q, k, mask, causal, scale in calls:
        rows = q.shape[:3].numel()
        if taken := counting.sample(walked, rows):
            counting.count_scores(q, k, mask, totals, causal, scale, taken)
        walked += rows
    return totals.tolist()


def numbers(layer):
    return [getattr(layer, field) for field in FIELDS]


@pytest.mark.parametrize("how", [{}, {"attention_mask": PADDED}], ids=["causal", "padded"])
def test_counts_of_a_model_are_those_of_its_calls(qwen2, how):
    with pasa.patch_pipeline(qwen2) as handle, pasa.watch(qwen2) as watched, Seen() as seen:
        logits(qwen2, **how)
        logits(qwen2, **how)
    report = watched.report()
    assert [layer.name for layer in report.layers] == [name for name, _ in handle.report().removed] == LAYERS
    assert len(seen.calls) == 4
    for number, layer in enumerate(report.layers):
        assert numbers(layer) == counted(seen.calls[number::2])
        assert layer.rows == pytest.approx(2 * 2 * 4 * 750 / 1021, abs=2)
    assert numbers(report.total) == [sum(column) for column in zip(*map(numbers, report.layers), strict=True)]


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_windows_and_soft_caps_are_counted(name):
    """A layer with a sliding window counts the keys inside it, and a soft cap moves no score by more than it allows."""
    kind, extra = {
        "mistral": (hf.MistralConfig, {"sliding_window": 50}),
        "gemma2": (hf.Gemma2Config, {"sliding_window": 50, "attn_logit_softcapping": 1e-5, "head_dim": 16}),
    }[name]
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(kind(**QWEN2 | extra, pad_token_id=0)).eval()
    with pasa.patch_pipeline(model), pasa.watch(model) as watched:
        logits(model)
    layer = watched.report().layers[0]
    assert layer.rows < layer.scores <= 50 * layer.rows
    assert (layer.repeated > layer.rows / 2) == (name == "gemma2"), "a cap of 1e-5 nats makes all scores alike"


def test_watching_changes_no_bit_and_leaves_nothing(qwen2):
    with pasa.patch_pipeline(qwen2):
        expected = logits(qwen2)
        watched = pasa.watch(qwen2)
        assert torch.equal(logits(qwen2), expected)
        found = watched.report()
        assert found.total.rows > 0
        watched.unwatch()
        watched.unwatch()
        assert torch.equal(logits(qwen2), expected)
        assert watched.report() == found
        assert not any(callbacks.functions for _, _, callbacks in patched_modules({"": qwen2}))


def test_reset_starts_again(qwen2):
    with pasa.patch_pipeline(qwen2), pasa.watch(qwen2) as watched:
        logits(qwen2)
        once = watched.report()
        logits(qwen2)
        assert watched.report() != once
        watched.reset()
        assert watched.report().total.rows == watched.report().total.scores == 0
        logits(qwen2)
        assert watched.report() == once


def test_a_watch_may_begin_under_another_default_device_or_in_inference_mode(qwen2):
    """A watch may begin under another default device or in inference mode.

    Its row counter must be on the host, and an inference tensor could not be changed outside that mode.
    """
    with pasa.patch_pipeline(qwen2):
        with torch.device("meta"), torch.inference_mode():
            watched = pasa.watch(qwen2)
        logits(qwen2)
        logits(qwen2)
    assert watched.report().total.rows == 2 * len(range(510, 2 * 6000, 1021))


def test_watches_of_one_model_are_independent(qwen2):
    with pasa.patch_pipeline(qwen2), pasa.watch(qwen2) as outer:
        logits(qwen2)
        with pasa.watch(qwen2) as inner:
            logits(qwen2)
        logits(qwen2)
    with pasa.patch_pipeline(qwen2), pasa.watch(qwen2) as once:
        logits(qwen2)
    assert inner.report() == once.report()
    assert outer.report().total.rows > 2 * once.report().total.rows


def test_decoded_tokens_are_sampled_too(qwen2):
    """Decoded tokens are sampled too: one row in 1021, so with 2 x 4 query rows a step, one step in 128."""
    with pasa.patch_pipeline(qwen2), pasa.watch(qwen2) as watched:
        qwen2.generate(IDS[:, :100], attention_mask=torch.ones(2, 100), max_new_tokens=100, do_sample=False)
    rows = 2 * 4 * (100 + 99)
    assert 510 < 2 * 4 * 100 < 510 + 1021 < rows  # one sampled row in the prompt, one in a step
    assert [layer.rows for layer in watched.report().layers] == [2, 2]


def test_an_overflowing_model_shows_where(qwen2):
    """The report shows in which layer scores overflow.

    Queries and keys of the second layer get a bias of 128 in every dimension, so q.k is near 16 x 128^2.
    """
    with torch.no_grad():
        for linear in (qwen2.model.layers[1].self_attn.q_proj, qwen2.model.layers[1].self_attn.k_proj):
            linear.bias.fill_(128.0)
    with pasa.patch_pipeline(qwen2), pasa.watch(qwen2) as watched:
        logits(qwen2)
    first, second = watched.report().layers
    assert first.saturated == 0
    assert second.saturated > second.scores / 2


def test_diffusers_layers_have_the_names_of_the_report():
    torch.manual_seed(0)
    unet = tiny_unet()
    inputs = torch.randn(1, 3, 8, 16, 16), torch.tensor([3.0]), torch.randn(1, 1, 32), torch.tensor([[6.0, 127, 0.02]])
    with torch.no_grad(), pasa.patch_pipeline(unet) as handle:
        expected = unet(*inputs).sample
        with pasa.watch(unet) as watched, Seen() as seen:
            assert torch.equal(unet(*inputs).sample, expected)
    report = watched.report()
    assert [layer.name for layer in report.layers] == [name for name, _ in handle.report().removed]
    assert sorted(map(numbers, report.layers)) == sorted(counted([call]) for call in seen.calls)
    assert report.total.rows > 10


def test_dispatched_layers_are_told_apart():
    """Dispatched layers are counted separately, because each module has its own registered attention function."""
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    ).eval()  # fmt: skip
    draw = torch.Generator().manual_seed(1)
    inputs = {
        "hidden_states": torch.randn(1, 256, 4, generator=draw),
        "encoder_hidden_states": torch.randn(1, 9, 32, generator=draw),
        "pooled_projections": torch.randn(1, 32, generator=draw), "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(256, 3), "txt_ids": torch.zeros(9, 3),
    }  # fmt: skip
    with torch.no_grad(), pasa.patch_pipeline(model), pasa.watch(model) as watched, Seen() as seen:
        model(**inputs)
    report = watched.report()
    assert [layer.rows for layer in report.layers] == [1, 1, 1]
    assert [numbers(layer) for layer in report.layers] == [counted([call]) for call in seen.calls]


def test_what_is_not_patched_is_refused_by_name(qwen2):
    with pytest.raises(ValueError, match="no module of Qwen2ForCausalLM is patched"):
        pasa.watch(qwen2)
    with pytest.raises(TypeError, match="got 'qwen2': load it first"):
        pasa.watch("qwen2")
    with pasa.patch_pipeline(qwen2):
        pass
    with pytest.raises(ValueError, match="no module of Qwen2ForCausalLM is patched"):
        pasa.watch(qwen2)


def test_the_report_says_what_it_counted(qwen2):
    with pasa.patch_pipeline(qwen2), pasa.watch(qwen2) as watched:
        logits(qwen2)
    report = watched.report()
    lines = str(report).splitlines()
    assert lines[0].startswith("2 layers, one query row in 1021, ")
    assert lines[1].split() == ["layer", *FIELDS]
    assert [line.split()[0] for line in lines[2:-1]] == [*LAYERS, "total"]
    assert lines[2].split()[1:] == [str(number) for number in numbers(report.layers[0])]
    assert report.as_dict()["total"]["rows"] == report.total.rows


def test_a_step_without_a_sampled_row_runs_no_operation():
    """A step without a sampled row reads, writes, views and detaches no tensor.

    Most decoding steps are such steps, and they cost host time only.
    """

    class Recording(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(func)
            return func(*args, **(kwargs or {}))

    model = hf.Qwen2Model(hf.Qwen2Config(**QWEN2))
    with pasa.patch_pipeline(model), pasa.watch(model) as watched:
        (_, _, callbacks), *_ = patched_modules({"": model})
        q, k, _ = normal_qkv((4, 2), (1, 70), 16)
        samples = []
        for _ in range(300):
            with Recording() as ran:
                callbacks.call(q.requires_grad_(), k, None, False, 0.25)
            samples.append(len(ran.seen) > 0)
    assert watched.report().total.rows == sum(samples) == 1
    assert samples.index(True) == 510 // 4


def test_no_value_is_read_in_the_forward_pass():
    """Counting reads no value on the host during the forward pass.

    A dispatch mode does not see inside an operator, so the test calls the operator's function directly.
    """

    class NoReading(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func is not torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    q, k, _ = normal_qkv((4, 2), (450, 450), 16)
    totals, walked = torch.zeros(5, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    with NoReading():
        operators.watch_scores._init_fn(q, k, None, totals, walked, True, 0.25)
    assert totals[0] > 0
    assert walked.item() == 1800


def test_a_compiled_model_counts_what_an_eager_one_does(qwen2):
    with pasa.patch_pipeline(qwen2):
        with pasa.watch(qwen2) as eager:
            logits(qwen2)
            logits(qwen2)
        counter = CompileCounter()
        forward = torch.compile(qwen2, fullgraph=True, backend=counter)
        with torch.no_grad():
            forward(IDS)
        before = counter.frame_count
        with pasa.watch(qwen2) as watched, torch.no_grad():
            forward(IDS)
            once = counter.frame_count
            forward(IDS)
        assert counter.frame_count == once > before
        assert watched.report() == eager.report()
    torch._dynamo.reset()


def test_operator_passes_opcheck():
    q, k, _ = normal_qkv((4, 2), (150, 70), 16)
    totals, walked = torch.zeros(5, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    opcheck(torch.ops.pasa.watch_scores.default, (q, k, None, totals, walked, False, 0.25))
    opcheck(torch.ops.pasa.watch_scores.default, (q, k, torch.ones(150, 70).bool(), totals, walked, True, 0.25))


def test_gradients_of_a_model_do_not_mind(qwen2):
    """Counting does not take part in the gradients of a model."""
    with pasa.patch_pipeline(qwen2), pasa.watch(qwen2) as watched:
        qwen2(IDS)
    assert watched.report().total.rows > 0


@pytest.mark.parametrize(
    ("sampled", "said"), [(0, "0 of 99,999 rows sampled, below 300: too few"), (30, "up to 10% open")]
)
def test_a_report_says_that_its_rows_are_too_few(sampled, said):
    """A report says if too few rows were sampled.

    Story: on short prompts a table of zeros looked like a clean result, although no row or one had been sampled.
    """
    text = str(WatchReport((LayerCounts("layer", sampled, 0, 0, 0, 0),), 99999))
    assert said in text
    assert "too few to judge" in text


def test_enough_rows_exclude_a_share_of_one_percent():
    assert (1 - 0.01) ** ENOUGH_ROWS <= 0.05
    assert "too few" not in str(WatchReport((LayerCounts("layer", ENOUGH_ROWS, 0, 0, 0, 0),), 10**6))


def test_a_model_from_which_pasa_was_taken_out_is_refused(qwen2):
    """`watch` refuses a model from all of whose modules PASA has been removed.

    Story: it was accepted, and the report said "0 of 0 rows sampled".
    """
    with pasa.patch_pipeline(qwen2):
        qwen2.set_attn_implementation("eager")
        with pytest.raises(
            ValueError, match=r"no module of Qwen2ForCausalLM runs PASA any more .*'eager'.*patch again"
        ):
            pasa.watch(qwen2)


def test_modules_from_which_pasa_was_taken_out_are_named():
    """Modules from which PASA was removed are named in a warning; the other model of the pair is watched."""
    pair = torch.nn.ModuleDict({name: hf.Qwen2ForCausalLM(hf.Qwen2Config(**QWEN2)).eval() for name in "ab"})
    with pasa.patch_pipeline(pair):
        pair["a"].set_attn_implementation("eager")
        with pytest.warns(UserWarning, match=r"2 of 4 .* do not run PASA .*a.model.layers.0.self_attn, a.* 'eager'"):
            watched = pasa.watch(pair)
        with pytest.warns(UserWarning, match="2 of 4 .* no longer run PASA"):
            logits(pair["b"])
    report = watched.report()
    assert [layer.rows > 0 for layer in report.layers] == [False, False, True, True]


def test_a_processor_that_asks_for_another_backend_is_no_longer_watched():
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4}
    model = diffusers.WanTransformer3DModel(**sizes, text_dim=16, freq_dim=32, ffn_dim=32, num_layers=1).eval()
    with pasa.patch_pipeline(model):
        pasa.watch(model).unwatch()
        model.set_attention_backend("native")
        with pytest.raises(ValueError, match=r"runs PASA any more .*backend 'native'"):
            pasa.watch(model)
