"""PasaConfig checks its values, and names the one that it refuses."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasa import PasaConfig
from pasa.ops.attention.options import CHOICES


def test_defaults():
    config = PasaConfig()
    assert dataclasses.asdict(config) == {
        "precision": "pasa",
        "recovery": "exact",
        "beta": None,
        "block_q": 128,
        "block_k": 128,
        "softmax": "safe",
        "overflow": "inf",
        "accumulate": "fp32",
        "batch_invariant": False,
    }
    assert {name: getattr(config, name) for name in CHOICES} == {name: values[0] for name, values in CHOICES.items()}
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.recovery = "paper"


@given(
    choices=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in CHOICES.items()}),
    beta=st.sampled_from([None, 0, 0.999]),
    blocks=st.tuples(st.integers(1, 65536), st.integers(1, 65536)),
)
def test_values_are_kept_and_equal_configurations_are_equal(choices, beta, blocks):
    published = (choices["precision"], choices["recovery"]) == ("pasa", "paper")
    values = choices | {"beta": beta if published else None, "block_q": blocks[0], "block_k": blocks[1]}
    config, again = PasaConfig(**values), PasaConfig(**values)
    assert {name: getattr(config, name) for name in values} == values
    assert config == again
    assert hash(config) == hash(again)


def test_every_option_and_value_is_explained():
    """The docstring has an entry for every option, with every value that it accepts."""
    entries = dict(re.findall(r"^    (\w[\w, ]*) : (.*?)(?=^    \w)", PasaConfig.__doc__, re.MULTILINE | re.DOTALL))
    text = {name: entry for names, entry in entries.items() for name in names.split(", ")}
    for field in dataclasses.fields(PasaConfig):
        missing = [value for value in CHOICES.get(field.name, ()) if f'"{value}"' not in text[field.name]]
        assert missing == []


@pytest.mark.parametrize("field", CHOICES)
@pytest.mark.parametrize("value", ["nonsense", "", "FP16", None, 3, []])
def test_unknown_choice(field, value):
    with pytest.raises(ValueError, match=re.escape(f"{field}={value!r} is not one of")):
        PasaConfig(**{field: value})


@pytest.mark.parametrize("field", ["block_q", "block_k"])
@pytest.mark.parametrize("value", [0, -1, 65537, 1.0, "128", True, None, float("nan")])
def test_block_sizes(field, value):
    with pytest.raises(ValueError, match=f"{field}="):
        PasaConfig(**{field: value})


@pytest.mark.parametrize("value", [0, 1, None, "yes", []])
def test_batch_invariance_is_a_switch(value):
    with pytest.raises(ValueError, match=re.escape(f"batch_invariant={value!r} is neither True nor False")):
        PasaConfig(batch_invariant=value)


@pytest.mark.parametrize("beta", [-0.1, 1.0, 2, float("nan"), "0.9", []])
def test_beta_out_of_range(beta):
    with pytest.raises(ValueError, match="beta="):
        PasaConfig(recovery="paper", beta=beta)


@pytest.mark.parametrize("other", [{}, {"precision": "partial"}, {"precision": "fp32", "recovery": "paper"}])
def test_beta_is_the_papers_alone(other):
    """beta is refused unless recovery="paper", because it would be silently ignored."""
    with pytest.raises(ValueError, match=r"beta=0\.9 is only used by"):
        PasaConfig(beta=0.9, **other)
