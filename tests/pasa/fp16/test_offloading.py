"""Weights that accelerate offloads: the same bits as without offloading, in the same place afterwards."""

import copy
from functools import cache

import accelerate
import pytest
import torch
from accelerate import hooks
from accelerate.utils import OffloadedWeightsLoader
from torch import nn

import pasa
from pasa.fp16 import offloading
from tests.pasa.fp16.diffusion_models import FAMILIES as DIFFUSION
from tests.pasa.fp16.models import FAMILIES, large, outputs
from tests.pasa.fp16.test_diffusion_pipelines import build, models, run

IDS = torch.arange(20)[None]
OFFLOADED = ("qwen2", "qwen2_tied", "gemma3", "qwen3_moe", "t5", "clip_text")


def dispatched(model):
    """Offload as `dispatch_model` does, which itself offloads nothing where the main device is a CPU."""
    parts = [name for name, _ in model.named_children()]
    tied = {tensor.data_ptr(): {} for name, tensor in model.named_parameters() if name.endswith("embed_tokens.weight")}
    hooks.attach_align_device_hook_on_blocks(
        model,
        execution_device=dict.fromkeys(["", *parts], "cpu"),
        offload=dict.fromkeys(parts, True),
        weights_map=OffloadedWeightsLoader(state_dict=dict(model.state_dict())),
        offload_buffers=True,
        tied_params_map=tied,
    )
    return model


def by_class(model):
    """Offload a model whose MLPs are loaded whole, as accelerate does where weights are used without a call."""
    names = {type(module).__name__ for module in model.modules() if hasattr(module, "down_proj")}
    return accelerate.cpu_offload(model, "cpu", preload_module_classes=[*names])


WAYS = {
    "cpu_offload": lambda model: accelerate.cpu_offload(model, "cpu"),
    "with buffers": lambda model: accelerate.cpu_offload(model, "cpu", offload_buffers=True),
    "dispatch_model": dispatched,
    "whole classes": by_class,
    "cpu_offload_with_hook": lambda model: accelerate.cpu_offload_with_hook(model, "cpu"),
}


def weights(model):
    """Return all data of an offloaded model: what its hooks would load, and what it holds itself."""
    found = {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta}
    for path, module in model.named_modules():
        hook = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", [hook]):
            if getattr(each, "offload", False):
                names = [name for name, tensor in module.state_dict().items() if tensor.is_meta]
                found |= {
                    f"{path}.{name}": each.weights_map[name]
                    for name in names
                    if each.place_submodules or "." not in name
                }
    return {name: tensor.clone() for name, tensor in found.items()}


def same(first, second):
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype
        assert torch.equal(tensor, second[name]), name


@cache
def in_memory(family):
    """Return the outputs of a model that is not offloaded, before and after its conversion."""
    model = large(family)
    before = outputs(model, family)
    pasa.to_fp16(model, FAMILIES[family].inputs())
    return before, outputs(model, family)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", OFFLOADED)
def test_an_offloaded_model_has_the_bits_of_one_in_memory(family, way):
    before, truth = in_memory(family)
    model = large(family)
    WAYS[way](model)
    data, meta = weights(model), {name for name, each in model.named_parameters() if each.is_meta}
    with pasa.to_fp16(model, FAMILIES[family].inputs(), keep_original="cpu") as handle:
        for _ in range(2):
            same(outputs(model, family), truth)
        assert {name for name, each in model.named_parameters() if each.is_meta} == meta
        assert {tensor.dtype for tensor in weights(model).values() if tensor.is_floating_point()} <= {
            torch.float16,
            torch.float32,
        }
        assert handle.report().modules
    same(weights(model), data)
    same(outputs(model, family), before)


def test_host_memory_holds_fp16_alone():
    """The maps of weights hold no original any more, and tied weights are there once."""
    model = large("qwen2_tied")
    data = {name: tensor.data for name, tensor in model.named_parameters()}
    accelerate.cpu_offload(model, "cpu")
    pasa.to_fp16(model, IDS)
    after = weights(model)
    maps = [model.model.embed_tokens._hf_hook.weights_map, model.lm_head._hf_hook.weights_map]
    assert maps[0]["weight"].data_ptr() == maps[1]["weight"].data_ptr() != data["model.embed_tokens.weight"].data_ptr()
    assert all(after[name].dtype == torch.float16 for name in data)


@pytest.mark.parametrize("failing", ["sample", "overflow"])
def test_an_error_leaves_the_weights_where_they_were(failing):
    model = large("qwen2")
    if failing == "overflow":
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.fill_(3e38)
    accelerate.cpu_offload(model, "cpu")
    data = weights(model)
    with pytest.raises(ValueError if failing == "sample" else OverflowError):
        pasa.to_fp16(model, IDS + (1000 if failing == "sample" else 0))
    same(weights(model), data)
    assert all(each.is_meta for each in model.parameters())


def test_a_weight_of_another_shape_leaves_all_modules_offloaded():
    """Story: the modules before it lost their hooks' offloading, and the model could not be called any more."""
    model = large("qwen2")
    accelerate.cpu_offload(model, "cpu")
    places, key = offloading._place(model.model.layers[1].mlp.up_proj._hf_hook, "weight")
    whole, places[key] = places[key], places[key][:, :-1]
    with pytest.raises(ValueError, match=r"up_proj\.weight has the shape \(64, 31\), .* \(64, 32\)"):
        pasa.to_fp16(model, IDS)
    places[key] = whole
    assert all(each.is_meta for each in model.parameters())
    same(outputs(model, "qwen2"), outputs(large("qwen2"), "qwen2"))


def test_an_offloaded_weight_that_is_infinite():
    model = large("qwen2")
    with torch.no_grad():
        model.model.norm.weight[3] = torch.inf
    accelerate.cpu_offload(model, "cpu")
    with pytest.raises(ValueError, match=r"model\.norm\.weight holds infinities or NaN"):
        pasa.to_fp16(model, IDS)


def test_what_is_on_disk_is_refused_by_name(tmp_path):
    model = large("qwen2")
    accelerate.disk_offload(model, tmp_path, "cpu")
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(
        NotImplementedError, match=r"embed_tokens.weight is offloaded to disk, .* pasa to-fp16 FOLDER OUT"
    ):
        pasa.to_fp16(model, IDS)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files


def test_groups_of_modules_are_offloaded_after_the_conversion():
    """Story: diffusers keeps a copy of each weight on the host, and would have loaded the unscaled ones."""
    family = DIFFUSION["unet"]
    model, plain = family.model(), family.model()
    cpu = torch.device("cpu")
    model.enable_group_offload(onload_device=cpu, offload_device=cpu, offload_type="leaf_level")
    with pytest.raises(NotImplementedError, match=r"is offloaded in groups, .* enable_group_offload afterwards"):
        pasa.to_fp16(model, family.run)
    pasa.to_fp16(plain, family.run)
    truth = family.run(plain)[0]
    plain.enable_group_offload(onload_device=cpu, offload_device=cpu, offload_type="leaf_level")
    assert torch.equal(family.run(plain)[0], truth)


def test_parameters_without_data_are_refused():
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    with pytest.raises(NotImplementedError, match="weight is on the meta device and has no data"):
        pasa.to_fp16(model, torch.zeros(1, 3))


def sequential(pipeline):
    """Offload as `enable_sequential_cpu_offload` does, which refuses a machine without an accelerator."""
    for model in models(pipeline).values():
        accelerate.cpu_offload(model, "cpu", offload_buffers=len(model._parameters) > 0)


@cache
def picture_in_memory():
    """Return the picture of a converted pipeline that is not offloaded."""
    pipeline, call = build("StableDiffusionXLPipeline")
    pasa.to_fp16(pipeline, {**call, "generator": torch.Generator().manual_seed(0)})
    return run(pipeline, call)


@pytest.mark.parametrize("offload", [lambda each: each.enable_model_cpu_offload(device="cpu"), sequential])
def test_pictures_of_an_offloaded_pipeline(offload):
    truth = picture_in_memory()
    pipeline, call = build("StableDiffusionXLPipeline")
    offload(pipeline)
    before = {part: weights(model) for part, model in models(pipeline).items()}
    with pasa.to_fp16(pipeline, {**call, "generator": torch.Generator().manual_seed(0)}, keep_original="cpu"):
        for _ in range(2):
            assert torch.equal(run(pipeline, call), truth)
    for part, model in models(pipeline).items():
        same(weights(model), before[part])


def test_a_hook_loads_no_other_tensor_from_memory_that_is_free():
    """Story: accelerate finds copies of tied weights by their address, which another tensor may have after scaling."""
    model = large("qwen2_tied")
    dispatched(model)
    pasa.to_fp16(model, IDS)
    assert not any(copies for copies in model.lm_head._hf_hook.tied_params_map.values())


def test_buffers_that_an_offloaded_model_writes_are_not_those_of_the_sample():
    class Averages(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            self.mean.add_(x.mean(0))
            return self.linear(x)

    model = Averages().eval()
    accelerate.cpu_offload(model, "cpu", offload_buffers=True)
    pasa.to_fp16(model, torch.ones(2, 4))
    assert weights(model)[".mean"].tolist() == [0] * 4
    assert copy.deepcopy(weights(model))[".mean"].dtype == torch.float16


@pytest.mark.parametrize("family", ["qwen2", "qwen2_tied"])
@pytest.mark.parametrize("when", ["offloaded after it", "in memory after it"])
def test_undo_of_a_model_that_was_moved_after_the_conversion(when, family):
    """Stories: undo removed the forward of accelerate's hook in the place of its own, and logits were 1e28.

    Without its hooks, tied weights are two parameters, and undo left one of them scaled. Hooks that were removed after
    undo looked for the buffer that marks a scaled model.
    """
    model = large(family)
    before = outputs(model, family)
    if when == "in memory after it":
        accelerate.cpu_offload(model, "cpu")
    handle = pasa.to_fp16(model, IDS, keep_original="cpu")
    scaled = outputs(model, family)
    if when == "in memory after it":
        hooks.remove_hook_from_submodules(model)
    else:
        accelerate.cpu_offload(model, "cpu")
    same(outputs(model, family), scaled)
    handle.undo()
    same(outputs(model, family), before)
    hooks.remove_hook_from_submodules(model)
    same(outputs(model, family), before)


def test_undo_is_refused_on_disk_where_it_would_leave_scaled_weights(tmp_path):
    """Story: undo removed all hooks, and the weights on disk stayed scaled: logits were NaN without an error."""
    model = large("qwen2")
    handle = pasa.to_fp16(model, IDS, keep_original="cpu")
    truth = outputs(model, "qwen2")
    accelerate.disk_offload(model, tmp_path, "cpu")
    with pytest.raises(
        RuntimeError, match=r"weight is offloaded to disk since the conversion, .* load the model again"
    ):
        handle.undo()
    same(outputs(model, "qwen2"), truth)
    assert not handle.report().undone


def test_undo_is_refused_in_groups_which_keep_scaled_weights():
    family = DIFFUSION["unet"]
    model, cpu = family.model(), torch.device("cpu")
    handle = pasa.to_fp16(model, family.run, keep_original="cpu")
    truth = family.run(model)[0]
    model.enable_group_offload(onload_device=cpu, offload_device=cpu, offload_type="leaf_level")
    with pytest.raises(
        RuntimeError, match=r"model is offloaded in groups since the conversion, .* load the model again"
    ):
        handle.undo()
    assert torch.equal(family.run(model)[0], truth)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("family", ["qwen2", "qwen2_tied"])
def test_a_model_of_which_a_gpu_holds_a_part(family):
    """Devices are numbers here, as accelerate names them, and the first of them is 0."""
    plain, model = large(family).cuda(), large(family)
    inputs = {"input_ids": IDS.cuda(), "use_cache": False}
    pasa.to_fp16(plain, inputs)
    places = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": "cpu", "model.norm": "cpu"}
    places |= {"model.rotary_emb": 0, "lm_head": 0 if family == "qwen2_tied" else "cpu"}
    accelerate.dispatch_model(model, places)
    data = weights(model)
    with torch.no_grad(), pasa.to_fp16(model, inputs, keep_original="cpu"):
        assert {each.device.type for each in model.parameters()} == {"cuda", "meta"}
        assert torch.equal(model(**inputs).logits, plain(**inputs).logits)
    same(weights(model), data)
