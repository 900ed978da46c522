"""PasaConfig checks its values, and names the one that it refuses."""

import dataclasses

import pytest

from pasa import PasaConfig


def test_defaults():
    config = PasaConfig()
    assert (config.precision, config.recovery, config.softmax) == ("pasa", "exact", "safe")
    assert (config.block_q, config.block_k, config.beta) == (128, 128, None)
    assert (config.overflow, config.accumulate) == ("inf", "fp32")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.recovery = "paper"


@pytest.mark.parametrize("field", ["precision", "recovery", "softmax", "overflow", "accumulate"])
def test_unknown_choice(field):
    with pytest.raises(ValueError, match=f"{field}='nonsense' is not one of"):
        PasaConfig(**{field: "nonsense"})


@pytest.mark.parametrize("field", ["block_q", "block_k"])
@pytest.mark.parametrize("value", [0, -1, 2**17, 1.5, "128", True, None])
def test_block_sizes(field, value):
    with pytest.raises(ValueError, match=f"{field}="):
        PasaConfig(**{field: value})


@pytest.mark.parametrize("beta", [-0.1, 1.0, 2, float("nan"), "0.9"])
def test_beta_out_of_range(beta):
    with pytest.raises(ValueError, match="beta="):
        PasaConfig(recovery="paper", beta=beta)


@pytest.mark.parametrize("other", [{}, {"precision": "partial"}, {"precision": "fp32", "recovery": "paper"}])
def test_beta_is_the_papers_alone(other):
    """beta is refused unless recovery="paper", because it would be silently ignored."""
    with pytest.raises(ValueError, match=r"beta=0\.9 is only used by"):
        PasaConfig(beta=0.9, **other)
