"""Models written in unusual ways: in-place inputs, state in buffers, opaque outputs, branches of later calls."""

import copy
import dataclasses
import math

import pytest
import torch
import transformers as hf
from torch import nn

import pasa
from tests.pasa.fp16.test_bad_input import refused

X = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))


class Stream(nn.Module):
    """A residual stream of 1e6, a norm and a head; a subclass says what happens to the stream."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.write = nn.Linear(8, 8)
        with torch.no_grad():
            self.write.weight.mul_(1e6)
        self.eval()

    def stream(self, x):
        stream = self.embed(x)
        return stream + self.write(torch.tanh(self.norm(stream)))

    def forward(self, x):
        return self.head(self.norm(self.stream(x)))


def run(model, *args, **kwargs):
    """Call a model on inputs of its own precision."""
    dtype = model.head.weight.dtype
    with torch.no_grad():
        return model(*(each.to(dtype, copy=True) if each.is_floating_point() else each for each in args), **kwargs)


def close(result, truth, tolerance=1e-2):
    assert result.isfinite().all()
    assert (result.double() - truth.double()).abs().max() < tolerance * truth.double().abs().max()


def test_a_model_that_writes_to_its_input():
    """Story: each run of the sample added to it again, so that the second trace saw other values than the first."""

    class Positions(Stream):
        def __init__(self):
            super().__init__()
            self.positions = nn.Parameter(torch.randn(6, 8))

        def stream(self, x):
            x += self.positions
            return super().stream(x)

    model = Positions().bfloat16()
    truth = run(copy.deepcopy(model).float(), X)
    sample = X.bfloat16()
    pasa.to_fp16(model, {"x": sample})
    assert torch.equal(sample, X.bfloat16())
    close(run(model, X), truth, 0.05)


class Averages(Stream):
    """Keeps a running mean of its stream, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        stream = self.stream(x)
        self.mean.mul_(0.5).add_(0.5 * stream.mean((0, 1)))
        self.calls += 1
        return self.head(self.norm(stream) + self.norm(self.mean))


def test_undo_restores_a_buffer_that_no_checkpoint_holds():
    """Story: such a buffer shared its memory with the kept original, and calls wrote to both."""

    class Counts(Stream):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(2), persistent=False)

        def forward(self, x):
            self.calls.add_(1)
            return super().forward(x)

    model = Counts()
    with pasa.to_fp16(model, {"x": X}, keep_original="cpu"):
        run(model, X)
        assert model.calls.tolist() == [1, 1]
    assert model.calls.tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_that_a_forward_pass_writes_is_not_that_of_the_sample(dtype):
    """Story: the traces wrote to the buffers of a model in BF16, and `undo` restored what they had written."""
    model = Averages().to(dtype)
    run(model, X)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    other = copy.deepcopy(model)
    truth = [run(other, X) for _ in range(2)]
    with pasa.to_fp16(model, lambda each: run(each, X), keep_original="cpu"):
        assert model.calls == 1
        for each in truth:
            close(run(model, X), each, 0.05)
        assert model.calls == 3
    model.calls.copy_(before["calls"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_buffer_that_a_forward_pass_registers():
    """Story: a KeyError, after which the model stayed in BF16."""

    class Lazy(Stream):
        def forward(self, x):
            if not hasattr(self, "mask"):
                self.register_buffer("mask", torch.ones(6, 1, dtype=x.dtype), persistent=False)
            return super().forward(x) * self.mask

    model = Lazy()
    with pytest.raises(NotImplementedError, match=r"registers the buffer mask while it runs: .* run it once before"):
        pasa.to_fp16(model, X)
    assert model.embed.weight.dtype == torch.float32
    model = Lazy()
    truth = run(model, X)
    pasa.to_fp16(model, X)
    close(run(model, X), truth)


@pytest.mark.parametrize("kind", ["slots", "nested"])
def test_a_stream_that_leaves_in_an_object_is_not_scaled(kind):
    """Story: such objects were not looked into, and the caller read a stream that was too small by the power of two."""

    @dataclasses.dataclass(slots=True)
    class Result:
        stream: object

    class Returning(Stream):
        def forward(self, x):
            stream = self.stream(x)
            return self.head(self.norm(stream)), Result(stream if kind == "slots" else Result({"stream": [stream]}))

    refused(NotImplementedError, r"write computes .* because of the model \(returns it\)", Returning(), X)


class Cached(Stream):
    """Attention whose values pass 65504, with keys and values in nested tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        with torch.no_grad():
            self.value.weight.mul_(1e6)
            self.out.weight.mul_(1e-3)

    def forward(self, x, past_key_values=None):
        key, value = (self.norm(self.embed(x)), self.value(self.norm(self.embed(x))))
        if past_key_values is not None:
            key, value = (torch.cat(pair, 1) for pair in zip(past_key_values[0], (key, value), strict=True))
        query = key[:, -x.shape[1] :]
        mixed = nn.functional.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None])[:, 0]
        return self.head(self.out(mixed)), ((key, value),)


def in_two_calls(model):
    past = run(model, X[:, :4])[1]
    return run(model, X[:, 4:], past_key_values=past)[0]


def test_keys_and_values_in_nested_tuples_must_be_in_the_sample():
    """Story: they left restored to their true size, entered as they were, and met scaled values."""
    model = Cached()
    truth = in_two_calls(model)
    handle = pasa.to_fp16(model, lambda each: run(each, X), keep_original="cpu")
    with pytest.raises(ValueError, match=r"was scaled for calls without \['past_key_values'\]\[0\]\[0\]"):
        in_two_calls(model)
    handle.undo()
    pasa.to_fp16(model, in_two_calls)
    close(in_two_calls(model), truth)


def test_a_parameter_that_the_sample_did_not_read_gives_no_wrong_number():
    """Story: a mask token was added unscaled to a scaled stream. Its power of two is not known, so it is NaN."""

    class Masked(Stream):
        def __init__(self):
            super().__init__()
            self.token = nn.Parameter(torch.ones(8) * 1e3)

        def forward(self, x, masked=None):
            stream = self.stream(x)
            if masked is not None:
                stream = torch.where(masked[..., None], self.token.to(stream.dtype), stream)
            return self.head(self.norm(stream))

    model, masked = Masked(), torch.arange(12).reshape(2, 6) % 2 == 0
    truths = run(model, X), run(model, X, masked=masked)
    with pasa.to_fp16(model, lambda each: run(each, X), keep_original="cpu"):
        close(run(model, X), truths[0])
        with pytest.warns(UserWarning, match="infinity or NaN: convert the original again, with this input"):
            assert run(model, X, masked=masked).isnan().any()
    assert torch.equal(run(model, X, masked=masked), truths[1])


def test_a_parameter_that_is_read_behind_torch_keeps_its_values():
    """`Parameter.data` is another tensor in the same memory; it is read, and not scaled."""

    class Behind(Stream):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.rand(4))

        def forward(self, x):
            return super().forward(x) * self.gain.data

    model = Behind()
    truth = run(model, X)
    pasa.to_fp16(model, X)
    close(run(model, X), truth)


def test_a_module_without_parameters_that_the_sample_did_not_reach():
    """Story: it added numbers to a scaled stream in longer sequences than the sample's."""

    class Ramp(nn.Module):
        def forward(self, x):
            return 1e3 * torch.arange(8, dtype=x.dtype)

    class Long(Stream):
        def __init__(self):
            super().__init__()
            self.ramp, self.dropout = Ramp(), nn.Dropout(0.1).eval()

        def forward(self, x):
            stream = self.stream(x)
            if x.shape[1] > 4:
                stream = self.dropout(stream)
            if x.shape[1] > 6:
                stream = stream + self.ramp(stream)
            return self.head(self.norm(stream))

    model = Long()
    truth = run(model, X)
    pasa.to_fp16(model, lambda each: run(each, X[:, :4]))
    close(run(model, X), truth)
    with pytest.raises(RuntimeError, match="the sample did not reach ramp"):
        run(model, torch.cat([X, X], 1))


def test_a_mask_by_infinity_is_no_overflow():
    """Story: a masked maximum was refused, because its operand was infinite already in BF16."""

    class Pooled(Stream):
        def forward(self, x):
            stream = self.stream(x)
            masked = stream.masked_fill(torch.arange(6)[:, None] > 3, -math.inf)
            return self.head(self.norm(masked.amax(1)))

    model = Pooled()
    truth = run(model, X)
    pasa.to_fp16(model, X)
    close(run(model, X), truth)


class Positions(nn.Module):
    """Sinusoidal positions in a buffer that no checkpoint holds, as in M2M100."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(80.0).reshape(10, 8).sin(), persistent=False)

    def forward(self, x):
        return self.table[: x.shape[1]]


class Sides(Stream):
    """Two streams that share an embedding, each with positions of its own; a norm refuses mixed precisions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Positions(), Positions()

    def forward(self, x):
        first = self.stream(x) + self.first(x)
        return self.head(self.norm(self.stream(x) + self.second(x)) + self.norm(first))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_computed_positions_are_rounded_where_the_model_does_not_cast_them(dtype):
    """Story: they stayed in FP32 as rotary frequencies do, and the norm behind their sum refused FP32.

    Those of XGLM and M2M100 loaded in BF16 stayed in BF16, with which FP16 makes FP32 as well.
    """
    model = Sides()
    with torch.no_grad():
        model.write.weight.mul_(0.15)  # FP16 holds the weights, and not the stream
    tables = model.to(dtype).first.table.clone(), model.second.table.clone()
    truth = run(copy.deepcopy(model).float(), X)
    with pasa.to_fp16(model, X.to(dtype), keep_original="cpu") as handle:
        assert max(each.peak for each in handle.report().modules) > 65504
        assert model.first.table.dtype == torch.float16
        close(run(model, X), truth)
    assert model.first.table.dtype == model.second.table.dtype == dtype
    assert torch.equal(model.first.table, tables[0])
    assert torch.equal(model.second.table, tables[1])


def test_a_model_that_runs_in_bf16_alone_is_named():
    class Fixed(Stream):
        def forward(self, x):
            return super().forward(x) @ torch.eye(4, dtype=torch.bfloat16)

    refused(RuntimeError, r"runs on the sample in BF16, but not in FP16 \(RuntimeError: .*dtype", Fixed(), X)


def test_a_name_that_only_begins_like_a_mask_is_no_mask():
    """Story: `masked_latents` may be scaled, but was let through where the sample did not hold it."""

    class Inpainting(Stream):
        def forward(self, x, masked_latents=None, attention_mask=None):
            stream = self.stream(x)
            stream = stream if masked_latents is None else stream + masked_latents
            return self.head(self.norm(stream))

    model = Inpainting()
    pasa.to_fp16(model, X)
    run(model, X, attention_mask=torch.ones(2, 6))
    with pytest.raises(ValueError, match=r"was scaled for calls without .*masked_latents"):
        run(model, X, masked_latents=X.half())


def test_a_parameter_that_is_only_moved_is_not_reached():
    """Story: a model that was moved to its device inside of a call read all parameters, and one that no equation
    binds was scaled because it was large: a later call that used it was wrong, without an error."""

    class Moved(Stream):
        def __init__(self):
            super().__init__()
            self.other = nn.Linear(8, 8)
            with torch.no_grad():
                self.other.weight.fill_(1e6)

        def forward(self, x, other=False):
            self.to("cpu:0")
            stream = self.stream(x)
            return self.head(self.norm(self.other(stream) if other else stream))

    model = Moved()
    truth = run(model, X)
    pasa.to_fp16(model, X)
    close(run(model, X), truth)
    with pytest.raises(RuntimeError, match="the sample did not reach other"):
        run(model, X, other=True)


def test_an_encoder_whose_config_speaks_of_a_decoder():
    """Story: UMT5EncoderModel, which Wan's pipelines hold, was refused, because a decoder was called on its states."""
    torch.manual_seed(0)
    config = hf.UMT5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=60)
    model = hf.UMT5EncoderModel(config).eval()
    assert model.config.is_encoder_decoder
    with torch.no_grad():
        for block in model.encoder.block:
            block.layer[1].DenseReluDense.wo.weight.mul_(1e6)
    ids = torch.randint(60, (2, 20))
    expected = model(input_ids=ids).last_hidden_state
    pasa.to_fp16(model, {"input_ids": ids})
    assert (model(input_ids=ids).last_hidden_state - expected).abs().max() < 1e-2 * expected.abs().max()


def test_sinusoidal_positions_of_a_model_in_bf16():
    """Story: positions stayed in BF16 beside FP16, and the model was said to run in BF16 alone."""
    torch.manual_seed(0)
    sizes = {f"{part}_{name}": value for part in ("encoder", "decoder")
             for name, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))}  # fmt: skip
    config = hf.M2M100Config(d_model=32, vocab_size=60, max_position_embeddings=64, **sizes)
    model = hf.M2M100ForConditionalGeneration(config).eval().bfloat16()
    assert {buffer.dtype for buffer in model.buffers()} == {torch.bfloat16}
    ids = torch.randint(3, 60, (1, 20))
    sample = {"input_ids": ids, "decoder_input_ids": ids}
    expected = copy.deepcopy(model).float()(**sample).logits
    pasa.to_fp16(model, sample)
    assert (model(**sample).logits - expected).abs().max() < 1e-2 * expected.abs().max()
