"""`pasa.register` makes the name "pasa" work in the libraries that are installed."""

from __future__ import annotations

import copy
import dataclasses
import gc
import importlib.util
import pickle

import pytest
import torch
import transformers as hf
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

import pasa
from pasa.patching import registration, transformers_registered
from pasa.patching.transformers_registered import reach_of_models
from tests.pasa.patching import test_transformers_explicit_masks as explicit
from tests.versions import INSTALLED, since

hf.logging.set_verbosity_error()
if INSTALLED >= (5, 0):
    import diffusers
    from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend

    from tests.pasa.patching.test_diffusers_models import dispatched_output, flux, hunyuan, wan
else:
    flux = hunyuan = wan = None
diffusion = since("5.0", "the installed diffusers needs a newer one")
MODELS = ("qwen2", "llama", "mistral", "qwen3", "gemma3", "phi3", "gpt2", "gemma4")
FACTOR = 2.0  # of the error of `naive_fp16`, which rounds only what FP16 attention must


@pytest.fixture(autouse=True)
def registered():
    """Register before each test, and forget what transformers knows after it, as a new process would."""
    yield pasa.register()
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop("pasa", None)


def served(model):
    """Return the names of attention that a model and the models inside it have."""
    return {each.config._attn_implementation for each in model.modules() if isinstance(each, hf.PreTrainedModel)}


# ---- the record


def test_the_record_is_frozen_and_a_second_call_changes_nothing(registered):
    again = pasa.register()
    assert again == registered
    served = ["transformers", "diffusers", "torch"] if INSTALLED >= (5, 0) else ["transformers", "torch"]
    assert [host for host, _ in registered.registered] == served  # diffusers cannot be imported beside an old one
    assert registered.absent[-1] == ("vllm", "vllm is not installed: pip install vllm")
    assert str(registered).splitlines()[-1].startswith("vllm: not registered, because vllm is not installed")
    with pytest.raises(dataclasses.FrozenInstanceError):
        registered.registered = ()


def test_one_host_leaves_the_others_alone(monkeypatch):
    called = []
    for host in registration.HOSTS:
        monkeypatch.setitem(registration.HOSTS, host, lambda host=host: called.append(host) or "how")
    assert pasa.register("torch", "torch") == registration.Registration((("torch", "how"),))
    assert called == ["torch"]


@pytest.mark.parametrize(
    ("host", "error", "message"),
    [
        ("foo", ValueError, r"'foo' is not a host of pasa: pass 'transformers', 'diffusers', 'torch' or 'vllm', or "),
        ("", ValueError, r"'' is not a host"),
        (torch.nn.Linear(1, 1), TypeError, r"got a Linear: for one model, call pasa.patch_pipeline\(model\)"),
        ("vllm", ImportError, r"vllm is not installed: pip install vllm"),
    ],
)
def test_what_is_refused_names_value_and_remedy_in_one_line(host, error, message):
    with pytest.raises(error, match=message) as caught:
        pasa.register("transformers", host)
    assert "\n" not in str(caught.value)


def test_hosts_that_are_missing_or_old_are_left_out_with_the_reason(monkeypatch):
    monkeypatch.setattr(registration, "find_spec", lambda name: None)
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl")
    record = pasa.register()
    assert record.registered == ()
    assert dict(record.absent)["transformers"] == "transformers is not installed: pip install transformers"
    assert "install torch 2.11 or newer" in dict(record.absent)["torch"]
    monkeypatch.setattr(registration, "find_spec", importlib.util.find_spec)
    monkeypatch.setattr("transformers.__version__", "4.40.0")  # by name: importing a model replaces the module
    assert dict(pasa.register().absent)["transformers"].startswith("register needs transformers 4.54.1 or newer")


# ---- transformers


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_what_it_did_with_sdpa(tiny, batch, naive, name, padded):
    """The 21 tokens of a row exceed the windows of 8 of mistral, gemma3 and gemma4; padding is on the left."""
    ids, mask = batch
    seen = mask.bool() if padded else torch.ones_like(mask).bool()
    model = tiny(name, "sdpa")
    logits = {}
    for attention in ("sdpa", naive, "pasa"):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            logits[attention] = model(ids, attention_mask=mask if padded else None).logits[seen]
    assert served(model) == {"pasa"}
    error, bound = ((logits[each] - logits["sdpa"]).abs().max() for each in ("pasa", naive))
    assert 0 < error <= FACTOR * bound


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens(tiny, batch, name, cache):
    ids, mask = batch
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "cache_implementation": cache}
    model = tiny(name, "sdpa")
    expected = [model.generate(ids, attention_mask=each, **options) for each in (None, mask)]
    model.set_attn_implementation("pasa")
    found = [model.generate(ids, attention_mask=each, **options) for each in (None, mask)]
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=["beams", "assisted"])
def test_beams_and_assisted_decoding(tiny, batch, options):
    ids, _ = batch
    options |= {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": 96}
    model, ids = tiny("qwen2", "sdpa"), ids[:1]
    expected = model.generate(ids, **options)
    model.set_attn_implementation("pasa")
    assert torch.equal(model.generate(ids, **options), expected)


def test_names_a_loaded_model(tiny, batch, tmp_path):
    tiny("qwen2", "sdpa").save_pretrained(tmp_path)
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="pasa")
    other = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert served(model) == {"pasa"}
    assert served(other) == {"sdpa"}
    with torch.no_grad():
        assert 0 < (model(batch[0]).logits - other(batch[0]).logits).abs().max() < 1e-3
    model.save_pretrained(tmp_path)
    assert "pasa" not in (tmp_path / "config.json").read_text()


@since("5.0", "Qwen2-VL has other configuration keys")
def test_towers_of_a_model(tiny_vl):
    model = tiny_vl({"text_config": "pasa", "vision_config": "sdpa"})
    assert (model.config.text_config._attn_implementation, model.config.vision_config._attn_implementation) == (
        "pasa",
        "sdpa",
    )


@since("4.57", "the model does not compile as one graph without PASA either")
def test_compiles_to_one_graph(tiny, batch):
    model = tiny("qwen2", "pasa")
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="eager")(batch[0]).logits
        assert torch.equal(compiled, model(batch[0]).logits)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", explicit.MODELS)
def test_models_without_sdpa(name, padded):
    """They get the masks of eager attention, because modules that compute attention themselves read them too."""
    model, inputs = explicit.MODELS[name]()
    inputs = inputs(padded)
    with torch.no_grad():
        expected = explicit.run(model, inputs)
        model.set_attn_implementation("pasa")
        error = explicit.worst_error(explicit.run(model, inputs), expected, inputs)
    assert 0 < error <= 2 * 2**-11


@since("5.0", "BERT computes its attention itself")
def test_a_decoder_beside_modules_that_attend_themselves():
    """BERT's file has wrappers named attention that do not use the interface, so its masks are never left out."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = hf.BertConfig(**sizes, vocab_size=97, is_decoder=True)
    torch.manual_seed(0)
    model = hf.BertLMHeadModel._from_config(config, attn_implementation="sdpa").eval()
    ids = torch.arange(1, 12)[None]
    assert reach_of_models(hf.BertConfig) == "some"
    with torch.no_grad():
        expected = model(ids).logits
        model.set_attn_implementation("pasa")
        assert 0 < (model(ids).logits - expected).abs().max() < 1e-3


@since("5.0", "these models build their masks themselves")
@pytest.mark.parametrize("name", ["Bloom", "Mpt"])
def test_models_that_the_interface_does_not_reach_are_refused(name):
    """transformers takes any registered name for them, and would then ignore it without a word."""
    config = getattr(hf, f"{name}Config")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "n_layer": 1, "num_attention_heads": 2, "n_head": 2}
    built = config(**sizes, vocab_size=97)
    model = getattr(hf, f"{name}ForCausalLM")._from_config(built, attn_implementation="pasa")
    with pytest.raises(NotImplementedError, match=f'{name}Config: attn_implementation="pasa" has no effect.*eager'):
        model(torch.arange(5)[None])


@since("5.0", "more models compute their attention themselves")
@pytest.mark.parametrize(
    ("config", "reach"),
    [
        *(("Qwen2Config", "all"), ("LlamaConfig", "all"), ("WhisperConfig", "all")),
        *(("NllbMoeConfig", "some"), ("BertConfig", "some"), ("XGLMConfig", "none"), ("PreTrainedConfig", "some")),
    ],
)
def test_reach_of_the_interface(config, reach):
    _ = hf.Qwen2Model, hf.LlamaModel, hf.WhisperModel, hf.NllbMoeModel, hf.XGLMModel  # transformers loads files lazily
    assert reach_of_models(getattr(hf, config)) == reach


@pytest.mark.parametrize(("keyword", "value"), [("head_mask", torch.ones(1)), ("dropout", 0.5), ("nonsense", 1)])
def test_keywords_that_change_the_result_are_refused(keyword, value):
    x = torch.zeros(1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match=f"Module: {keyword}"):
        AttentionInterface()["pasa"](torch.nn.Module(), x, x, x, None, **{keyword: value})


def test_attention_weights_are_left_out_as_with_sdpa(tiny, batch, monkeypatch):
    logged = []
    monkeypatch.setattr(transformers_registered._LOGGER, "warning_once", logged.append)
    model = tiny("qwen2", "pasa")
    with torch.no_grad():
        found = model(batch[0], output_attentions=True)
        assert torch.equal(found.logits, model(batch[0]).logits)
        model.set_attn_implementation("sdpa")
        assert found.attentions == model(batch[0], output_attentions=True).attentions
    assert all('set_attn_implementation("eager")' in each for each in logged)


# ---- beside a patch


def test_a_handle_that_the_name_made_ineffective_says_so(tiny, batch):
    """After `set_attn_implementation("pasa")` the model runs PASA, but with the default settings, not the handle's."""
    model = tiny("qwen2", "sdpa")
    with torch.no_grad():
        expected = model(batch[0]).logits
        handle = pasa.patch_pipeline(model, config=pasa.PasaConfig(precision="fp32"))
        patched = model(batch[0]).logits
        model.set_attn_implementation("pasa")
        with pytest.warns(UserWarning, match=r"2 of 2 patched .*names the attention 'pasa'.*unpatch"):
            named = model(batch[0]).logits
        assert "its config names the attention 'pasa' now" in str(handle.report())
        handle.unpatch()
        assert torch.equal(model(batch[0]).logits, named), "what was set last stays"
        assert not torch.equal(named, patched)
        assert served(model) == {"pasa"}
        model.set_attn_implementation("sdpa")
        assert torch.equal(model(batch[0]).logits, expected)


def test_a_patch_of_a_model_that_has_the_name(tiny, batch):
    """The handle's settings rule the modules that it patches; the others keep the default ones; undoing restores."""
    model = tiny("qwen2", "pasa")
    fp32 = pasa.PasaConfig(precision="fp32")
    with torch.no_grad():
        named = model(batch[0]).logits
        with pasa.patch_pipeline(model, config=fp32) as handle:
            everywhere = model(batch[0]).logits
            assert len(handle.report().patched) == 2
        with pasa.patch_pipeline(model, config=fp32, policy=lambda name, module: "layers.0" in name):
            first = model(batch[0]).logits
            pasa.register()
            assert torch.equal(model(batch[0]).logits, first)
        assert len({tuple(each.flatten().tolist()) for each in (named, everywhere, first)}) == 3
        assert torch.equal(model(batch[0]).logits, named)
    assert served(model) == {"pasa"}


def test_undoing_a_patch_keeps_the_name(tiny):
    gc.collect()  # patches that other tests left
    pasa.patch_pipeline(tiny("qwen2", "sdpa")).unpatch()  # removes their names
    with pasa.patch_pipeline(tiny("qwen2", "sdpa")):
        assert len([name for name in AttentionInterface._global_mapping if name.startswith("pasa")]) == 2
    assert [name for name in AttentionInterface._global_mapping if name.startswith("pasa")] == ["pasa"]
    tiny("qwen2", "sdpa").set_attn_implementation("pasa")


# ---- diffusers


@diffusion
@pytest.mark.parametrize("build", [wan, flux, hunyuan])
def test_models_of_the_dispatcher(build):
    torch.manual_seed(0)
    model = build().eval()
    expected = dispatched_output(model)
    model.set_attention_backend("pasa")
    found = dispatched_output(model)
    assert 0 < (found - expected).abs().max() < 1e-3 * expected.abs().max()
    assert torch.equal(dispatched_output(torch.compile(model, backend="eager", fullgraph=True)), found)
    model.set_attention_backend("native")
    assert torch.equal(dispatched_output(model), expected)
    with attention_backend("pasa"):
        model.reset_attention_backend()
        assert torch.equal(dispatched_output(model), found)


@diffusion
def test_the_name_is_a_member_like_the_others():
    member = AttentionBackendName("pasa")
    assert member is AttentionBackendName.PASA
    assert member is AttentionBackendName["PASA"]
    assert [each.value for each in AttentionBackendName].count("pasa") == 1
    assert copy.deepcopy(member) is pickle.loads(pickle.dumps(member)) is member
    assert str(member) == "AttentionBackendName.PASA"
    with pytest.raises(ValueError, match="nonsense"):
        wan().set_attention_backend("nonsense")


@diffusion
def test_a_handle_says_that_the_backend_was_set():
    model = wan()
    handle = pasa.patch_pipeline(model)
    model.set_attention_backend("pasa")
    with pytest.warns(UserWarning, match=r"no longer run PASA .*attention backend 'pasa' \(set_attention_backend"):
        report = handle.report()
    assert report.patched == ()
    handle.unpatch()


@diffusion
def test_a_unet_has_no_attention_backend():
    """Setting one has no effect on a UNet, and diffusers does not say so; the documents do."""
    from tests.pasa.patching.unets import classic_unet

    unet = classic_unet()
    unet.set_attention_backend("pasa")
    assert {type(each) for each in unet.attn_processors.values()} == {
        diffusers.models.attention_processor.AttnProcessor2_0
    }
