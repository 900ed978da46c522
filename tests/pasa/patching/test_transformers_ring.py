"""Tests of a tiny Qwen2 on several processes that share its sequence (context parallel) or heads (tensor parallel)."""

import pytest
import torch
import torch.distributed as dist

import pasa
from tests import ranks

LENGTH = 37
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 128,
}


def tiny_qwen2(**overrides):
    """Return a seeded Qwen2 whose biases put the scores of all heads near 131,072."""
    import transformers

    torch.manual_seed(0)
    # transformers 4 reads rope_theta, version 5 reads rope_parameters
    rope = {"rope_type": "default", "rope_theta": 1e30}  # so slow that the pair with the bias does not rotate
    config = transformers.Qwen2Config(**SIZES | {"rope_parameters": rope, "rope_theta": 1e30} | overrides)
    model = transformers.Qwen2ForCausalLM(config).eval()
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.weight.data[15::16] = 0.0  # weights would be lost to rounding beside the bias
            projection.bias.data[15::16] = 724.0  # adds 724^2 / 4 to every scaled score
    return model


def prompt():
    return torch.randint(5, 97, (2, LENGTH), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits_of(model, ids, **how):
    return model(ids, **how).logits


def share_the_sequence(rank):
    model, ids = tiny_qwen2(), pasa.shard_sequence(prompt(), 1)
    positions = pasa.shard_sequence(torch.arange(LENGTH)[None], 1)
    found = []
    with pasa.patch_pipeline(model, context_parallel=dist.group.WORLD):
        for use_cache in (False, True):
            logits = logits_of(model, ids, position_ids=positions, use_cache=use_cache)
            found.append(pasa.gather_sequence(logits, 1))
        told = refusals(model, ids, positions)
    return found, told, model.config._attn_implementation


def refusals(model, ids, positions):
    """Return the error messages of calls that a patched model refuses; they are the same on both ranks."""
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    cache = model(ids, position_ids=positions).past_key_values
    calls = {
        "positions": {},
        "padding": {"position_ids": positions, "attention_mask": mask},
        "decoding": {"position_ids": positions[:, :1] + LENGTH, "past_key_values": cache},
    }
    told = {}
    for name, how in calls.items():
        try:
            logits_of(model, ids[:, :1] if name == "decoding" else ids, **how)
        except (ValueError, NotImplementedError) as error:
            told[name] = str(error)
    return told


@pytest.fixture(scope="module")
def alone():
    """The logits of one process: of the model with PASA, and of the model in FP64."""
    model = tiny_qwen2()
    with pasa.patch_pipeline(model):
        one = logits_of(model, prompt())
    return one, logits_of(model.double(), prompt())


def test_a_shared_prompt_has_the_logits_of_one_process(alone, tmp_path):
    """Logits of ranks that share a sequence are as close to FP64 as those of one process, up to a factor of 2.

    The factor covers FP16's rounding of the outputs of chunks.
    """
    one, golden = alone
    error = float((one - golden).abs().max())
    assert error < 0.05 * float(golden.abs().max())
    for found, told, attention in ranks.run(share_the_sequence, 2, tmp_path):
        for logits in found:
            assert logits.shape == golden.shape
            assert float((logits - golden).abs().max()) <= 2 * error
        assert "pasa.shard_sequence(torch.arange(length)[None], 1)" in told["positions"]
        assert "padding is not supported" in told["padding"]
        assert "nothing is decoded after it" in told["decoding"]
        assert attention == "sdpa", "unpatched"


def share_the_heads(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = tiny_qwen2()
    plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"} | {"self_attn.o_proj": RowwiseParallel()}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    heads = []

    def count(name, module):
        module.q_proj.register_forward_hook(lambda *call: heads.append(call[-1].shape[-1] // module.head_dim))
        return True

    with pasa.patch_pipeline(model, policy=count):
        return logits_of(model, prompt()), heads


def test_a_model_whose_heads_are_shared_is_patched_as_any_other(alone, tmp_path):
    one, golden = alone
    error = float((one - golden).abs().max())
    for logits, heads in ranks.run(share_the_heads, 2, tmp_path):
        assert heads == [2, 2], "half of them on each rank"
        assert float((logits - golden).abs().max()) <= 2 * error


def in_one_process(task, folder):
    """Run a task in a process group that consists of this process alone."""
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    try:
        task()
    finally:
        dist.destroy_process_group()


def test_settings_are_told_apart_and_others_refused(tmp_path):
    def task():
        model = tiny_qwen2()
        for policy in ("auto", lambda name, _: ".0." in name):
            # Story: "auto" found no risk and patched nothing, so each rank silently attended to its own shard only.
            with pytest.raises(ValueError, match=r'context_parallel .* policy must be "all"'):
                pasa.patch_pipeline(model, policy=policy, context_parallel=dist.group.WORLD)
        with pasa.patch_pipeline(model, context_parallel=dist.group.WORLD) as handle:
            assert pasa.patch_pipeline(model, context_parallel=dist.group.WORLD) is handle
            with pytest.raises(ValueError, match=r"already patched .*context_parallel=None instead of <"):
                pasa.patch_pipeline(model)
            twin = type(model)(model.config)
            with pytest.raises(ValueError, match="is shared with a model patched with context_parallel=<"):
                pasa.patch_pipeline(twin)
            with pytest.raises(NotImplementedError, match="cannot keep its own attention beside context_parallel"):
                logits_of(twin, prompt())
            with pytest.raises(NotImplementedError, match="cannot be watched with context_parallel"):
                pasa.watch(model)
        assert model.config._attn_implementation == "sdpa"

    in_one_process(task, tmp_path)


def test_what_no_rank_could_run_is_refused_when_patching(tmp_path):
    """A wrong group and an unsupported config are refused by `patch_pipeline`.

    Story: both errors came from inside the ring, at the first forward.
    """

    def task():
        model = tiny_qwen2()
        with pytest.raises(TypeError, match="context_parallel=True is a bool, not a ProcessGroup"):
            pasa.patch_pipeline(model, context_parallel=True)
        for config in (pasa.PasaConfig(softmax="unbiased"), pasa.PasaConfig(precision="fp32")):
            with pytest.raises(NotImplementedError, match=r"ring_attention has (softmax='safe'|precision='pasa') only"):
                pasa.patch_pipeline(model, context_parallel=dist.group.WORLD, config=config)
        assert model.config._attn_implementation == "sdpa"

    in_one_process(task, tmp_path)


def test_windows_are_refused(tmp_path):
    def task():
        model = tiny_qwen2(use_sliding_window=True, sliding_window=8, max_window_layers=0)
        with (
            pasa.patch_pipeline(model, context_parallel=dist.group.WORLD),
            pytest.raises(NotImplementedError, match="sliding windows are not supported"),
        ):
            logits_of(model, prompt())

    in_one_process(task, tmp_path)


def test_packed_sequences_and_attention_beside_the_ring_are_refused(tmp_path):
    """Packed sequences, and models with attention that PASA cannot reach, are refused with context_parallel.

    Story: the encoder of BigBirdPegasus computes its attention itself, and would have attended to its own shard only.
    """
    import transformers as hf

    def task():
        model = tiny_qwen2()
        with pasa.patch_pipeline(model, context_parallel=dist.group.WORLD):
            for keyword in ("cu_seq_lens_q", "seq_idx"):
                with pytest.raises(NotImplementedError, match=f"{keyword} .*give one sequence a row"):
                    model(prompt(), **{keyword: torch.tensor([0, 5, 21])})
        sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 97}
        heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
        bird = hf.BigBirdPegasusForConditionalGeneration(hf.BigBirdPegasusConfig(**sizes, **heads))
        with pytest.raises(NotImplementedError, match=r"encoder.* would attend to its own shard alone"):
            pasa.patch_pipeline(bird, context_parallel=dist.group.WORLD)

    in_one_process(task, tmp_path)


def test_a_diffusers_model_is_refused():
    pipeline = type("Pipeline", (), {"__module__": "diffusers.pipelines"})()
    with pytest.raises(NotImplementedError, match="context_parallel is not supported for diffusers models"):
        pasa.patch_pipeline(pipeline, context_parallel=object())
