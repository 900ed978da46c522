"""Every public name has an example in its docstring, and the examples give the output that they show."""

import doctest
import sys

import pytest
import torch
import torch.distributed as dist

import pasa

PUBLIC = [name for name in pasa.__all__ if name != "__version__"]
RANKS = {"shard_sequence": ("fake", 2), "gather_sequence": ("gloo", 1), "ring_attention": ("gloo", 1)}


def examples_of(name):
    """Return the doctests of a public name and of its methods."""
    value = getattr(pasa, name)
    module = sys.modules[value.__module__]
    return [test for test in doctest.DocTestFinder().find(value, name, module) if test.examples]


@pytest.fixture
def group(request):
    """A process group of this process alone, or a fake group in which it is rank 0 of two and needs no answer."""
    from torch.testing._internal.distributed import fake_pg  # the import registers the backend

    backend, size = request.param
    store = fake_pg.FakeStore() if backend == "fake" else dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=size)
    yield
    dist.destroy_process_group()


@pytest.fixture
def names():
    """The names that examples use without defining them: a language model of two layers, and token ids."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(**sizes, num_hidden_layers=2, vocab_size=97, max_position_embeddings=128)
    ids = torch.arange(1, 24)[None]
    return {"torch": torch, "pasa": pasa, "model": Qwen2ForCausalLM(config).eval(), "ids": ids}


def run_examples(name, names):
    tests = examples_of(name)
    assert tests, f"pasa.{name} has no example"
    for test in tests:
        assert not [each for each in test.examples if each.options.get(doctest.SKIP)]
        test.globs = dict(names)
        said = []
        failed, _ = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append)
        assert not failed, "".join(said)


@pytest.mark.parametrize("name", sorted(set(PUBLIC) - set(RANKS)))
def test_examples_run(name, names):
    run_examples(name, names)


@pytest.mark.parametrize(("group", "name"), [(how, name) for name, how in RANKS.items()], indirect=["group"])
def test_examples_of_ranks_run(group, name, names):
    run_examples(name, names)


def test_a_wrong_example_is_noticed(names, monkeypatch):
    monkeypatch.setattr(pasa.attention, "__doc__", ">>> 1 + 1\n3\n")
    with pytest.raises(AssertionError, match="Expected"):
        run_examples("attention", names)
