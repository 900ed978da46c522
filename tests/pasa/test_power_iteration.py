"""Tests of power iteration against a full SVD of the expanded matrices, and of its memory."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pasa.power_iteration import PowerIteration

HEADS = {"MHA": (8, 8), "GQA 4:1": (8, 2), "GQA 8:1": (8, 1), "MQA": (5, 1)}
DIM, HIDDEN = 6, 37


def weights(heads, kv_heads, seed=0, dtype=torch.float64, bias=True):
    """Return W_Q, W_K, b_Q, b_K with one dominant singular value a head, so that power iteration converges."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for count in (heads, kv_heads):
        weight = torch.randn(count, DIM, HIDDEN, generator=generator, dtype=torch.float64)
        weight[:, 0] *= 3
        parts.append(weight.flatten(0, 1).to(dtype))
    biases = [torch.randn(len(part), generator=generator, dtype=torch.float64).to(dtype) for part in parts]
    return (*parts, *(biases if bias else (None, None)))


def expanded(weight, bias, count, groups):
    """Return [W, b] per head, with keys repeated for their query heads: (Hq, D, d + 1)."""
    whole = weight if bias is None else torch.cat([weight, bias[:, None]], 1)
    return whole.unflatten(0, (count, -1)).repeat_interleave(groups, 0)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("name", HEADS)
def test_equals_svd_of_the_expanded_matrix(name, per_head, bias):
    heads, kv_heads = HEADS[name]
    q_weight, k_weight, q_bias, k_bias = weights(heads, kv_heads, bias=bias)
    q, k = expanded(q_weight, q_bias, heads, 1), expanded(k_weight, k_bias, kv_heads, heads // kv_heads)
    interaction = q.mT @ k
    exact = torch.linalg.matrix_norm(interaction if per_head else interaction.sum(0)[None], 2)
    power = PowerIteration(heads, kv_heads, per_head=per_head, generator=torch.Generator().manual_seed(1))
    found = power.update(q_weight, k_weight, q_bias, k_bias, steps=300)
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=0)
    assert (found <= exact * (1 + 1e-12)).all(), "power iteration approaches from below"


def test_one_warm_step_follows_weights_that_move():
    """One warm step follows weights scaled by 4: the norm is 16 times as large, and the vectors are still right."""
    q_weight, k_weight, *_ = weights(8, 2)
    power = PowerIteration(8, 2, generator=torch.Generator().manual_seed(1))
    before = power.update(q_weight, k_weight, steps=300)
    torch.testing.assert_close(power.update(4 * q_weight, 4 * k_weight), 16 * before, rtol=1e-10, atol=0)


def test_five_steps_come_first_and_then_one():
    q_weight, k_weight, *_ = weights(4, 4)
    given, counted = (PowerIteration(4, 4, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(given.update(q_weight, k_weight), counted.update(q_weight, k_weight, steps=5))
    assert torch.equal(given.update(q_weight, k_weight), counted.update(q_weight, k_weight, steps=1))


def test_heads_can_cancel_in_the_norm_of_a_layer():
    """The paper's norm of a layer is 0 for two heads with opposite interactions, although their scores are not 0."""
    q_weight, k_weight, *_ = weights(1, 1)
    q_weight, k_weight = torch.cat([q_weight, -q_weight]), torch.cat([k_weight, k_weight])
    generator = torch.Generator().manual_seed(1)
    layer = PowerIteration(2, 2, per_head=False, generator=generator).update(q_weight, k_weight)
    head = PowerIteration(2, 2, generator=generator).update(q_weight, k_weight)
    assert layer.item() < 1e-12 < 1 < head.min().item()


class Largest(TorchDispatchMode):
    """Records the largest number of elements that any operation wrote into new memory."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sources = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        for each in result if isinstance(result, tuple) else (result,):
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in sources:
                self.elements = max(self.elements, each.untyped_storage().nbytes() // each.element_size())
        return result


@pytest.mark.parametrize("per_head", [True, False])
def test_no_expanded_key_and_no_copy_of_a_weight_is_made(per_head):
    """No new tensor is larger than one vector of length d + 1 for each query head."""
    q_weight, k_weight, *biases = weights(8, 2)
    with Largest() as largest:
        PowerIteration(8, 2, per_head=per_head, generator=torch.Generator().manual_seed(1)).update(
            q_weight, k_weight, *biases
        )
    assert 0 < largest.elements <= 8 * (HIDDEN + 1) < k_weight.numel()


def test_sixteen_bits_are_good_for_two_digits():
    q_weight, k_weight, *_ = weights(8, 2, dtype=torch.bfloat16)
    exact = PowerIteration(8, 2, generator=torch.Generator().manual_seed(1)).update(
        q_weight.double(), k_weight.double(), steps=300
    )
    power = PowerIteration(8, 2, generator=torch.Generator().manual_seed(1))
    found = power.update(q_weight, k_weight, steps=100)
    assert found.dtype == torch.float32
    # four roundings to 8 significant bits a step, each of at most 2^-9 of the vector
    torch.testing.assert_close(found.double(), exact, rtol=4 * 2**-9, atol=0)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="heads=6 is not a multiple of kv_heads=4"):
        PowerIteration(6, 4)


def test_no_step_is_refused():
    q_weight, k_weight, *_ = weights(1, 1)
    with pytest.raises(ValueError, match="steps=0 is below 1"):
        PowerIteration(1, 1).update(q_weight, k_weight, steps=0)


def test_norms_beyond_16_bits_of_a_square_are_no_problem():
    """Norms are right even if |W|^2 exceeds FP16, because no value between the products is stored unscaled."""
    generator = torch.Generator().manual_seed(2)
    q_weight, k_weight = (torch.randn(8, 64, generator=generator).half() * scale for scale in (1e-3, 1000))
    exact = torch.linalg.matrix_norm(q_weight.double().T @ k_weight.double(), 2)
    found = PowerIteration(1, 1, generator=generator).update(q_weight, k_weight, steps=100)
    torch.testing.assert_close(found[0].double(), exact, rtol=4 * 2**-12, atol=0)
