"""PasaConfig checks its values, and names the one that it refuses."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasa import PasaConfig


def test_defaults():
    config = PasaConfig()
    assert (config.precision, config.recovery, config.softmax) == ("pasa", "exact", "safe")
    assert (config.block_q, config.block_k, config.beta) == (128, 128, None)
    assert (config.overflow, config.accumulate) == ("inf", "fp32")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.recovery = "paper"


@given(
    recovery=st.sampled_from([("exact", None), ("paper", None), ("paper", 0), ("paper", 0.999)]),
    softmax=st.sampled_from(["safe", "unbiased", "unbiased_paper"]),
    overflow=st.sampled_from(["inf", "saturate"]),
    accumulate=st.sampled_from(["fp32", "fp16"]),
    blocks=st.tuples(st.integers(1, 65536), st.integers(1, 65536)),
)
def test_values_are_kept_and_equal_configurations_are_equal(recovery, softmax, overflow, accumulate, blocks):
    values = {"recovery": recovery[0], "beta": recovery[1], "softmax": softmax, "overflow": overflow}
    values |= {"accumulate": accumulate, "block_q": blocks[0], "block_k": blocks[1]}
    config, again = PasaConfig(**values), PasaConfig(**values)
    assert {name: getattr(config, name) for name in values} == values
    assert config == again
    assert hash(config) == hash(again)


@pytest.mark.parametrize("precision", ["pasa", "fp32", "partial", "fp16", "prescaled", "smooth_k"])
def test_every_precision(precision):
    assert PasaConfig(precision=precision).precision == precision


@pytest.mark.parametrize("field", ["precision", "recovery", "softmax", "overflow", "accumulate"])
@pytest.mark.parametrize("value", ["nonsense", "", "FP16", None, 3, []])
def test_unknown_choice(field, value):
    with pytest.raises(ValueError, match=re.escape(f"{field}={value!r} is not one of")):
        PasaConfig(**{field: value})


@pytest.mark.parametrize("field", ["block_q", "block_k"])
@pytest.mark.parametrize("value", [0, -1, 65537, 1.0, "128", True, None, float("nan")])
def test_block_sizes(field, value):
    with pytest.raises(ValueError, match=f"{field}="):
        PasaConfig(**{field: value})


@pytest.mark.parametrize("beta", [-0.1, 1.0, 2, float("nan"), "0.9", []])
def test_beta_out_of_range(beta):
    with pytest.raises(ValueError, match="beta="):
        PasaConfig(recovery="paper", beta=beta)


@pytest.mark.parametrize("other", [{}, {"precision": "partial"}, {"precision": "fp32", "recovery": "paper"}])
def test_beta_is_the_papers_alone(other):
    """beta is refused unless recovery="paper", because it would be silently ignored."""
    with pytest.raises(ValueError, match=r"beta=0\.9 is only used by"):
        PasaConfig(beta=0.9, **other)
