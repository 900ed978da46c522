"""Tests of the bounds on scores against SVD, against the worst inputs that a search finds, and against samples."""

from __future__ import annotations

import math

import pytest
import torch

from pasa import geometry
from pasa.concentration import minimum_alpha
from pasa.geometry import score_bounds
from pasa.projections import Norm, project

HIDDEN, DIM = 33, 5
RADIUS = math.sqrt(HIDDEN)
KINDS = ("plain", "bias", "large bias", "rms", "layer")


def layer(kind, heads=4, kv_heads=2, seed=0):
    """Return the weights of a small layer and the norm before it: (q, q_bias, k, k_bias, norm)."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = randn(heads * DIM, HIDDEN), randn(kv_heads * DIM, HIDDEN)
    size = {"plain": None, "rms": None, "bias": 1.0, "large bias": 100.0, "layer": 1.0}[kind]
    q_bias, k_bias = (None, None) if size is None else (size * randn(len(q)), size * randn(len(k)))
    gain = randn(HIDDEN) if kind in ("rms", "layer") else None
    shift = randn(HIDDEN) if kind == "layer" else None
    return q, q_bias, k, k_bias, Norm(RADIUS, gain, shift, centred=kind == "layer")


def matrices(weight, bias, heads, norm):
    """Return A (H, D, d) and a (H, D), formed by their definition."""
    gain = torch.ones(HIDDEN, dtype=torch.float64) if norm.gain is None else norm.gain
    linear = weight * gain
    if norm.centred:
        linear = linear @ (torch.eye(HIDDEN, dtype=torch.float64) - 1 / HIDDEN)
    constant = torch.zeros(len(weight), dtype=torch.float64) if bias is None else bias
    if norm.shift is not None:
        constant = constant + weight @ norm.shift
    return linear.unflatten(0, (heads, -1)), constant.unflatten(0, (heads, -1))


def bounds_of(kind, rotary=0, heads=4, kv_heads=2, delta=1e-3):
    q, q_bias, k, k_bias, norm = layer(kind, heads, kv_heads)
    query, key = project(q, q_bias, heads, norm), project(k, k_bias, kv_heads, norm)
    bounds = score_bounds(query, key, heads=heads, seq_len=64, delta=delta, rotary=rotary)
    a, a0 = matrices(q, q_bias, heads, norm)
    b, b0 = (part.repeat_interleave(heads // kv_heads, 0) for part in matrices(k, k_bias, kv_heads, norm))
    return bounds, (a, a0, b, b0)


def sphere(count, seed=1):
    x = torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return RADIUS * x / x.norm(dim=-1, keepdim=True)


def climb(a, a0, b, b0, steps=300):
    """Return a large |(A n + a).(B n' + e)| over the sphere, (H,), by alternating maximisation from many starts."""
    best = torch.zeros(len(a), dtype=torch.float64)
    for sign in (1, -1):
        x, y = sphere(16, 2).expand(len(a), -1, -1), sphere(16, 3).expand(len(a), -1, -1)
        for _ in range(steps):
            x = (y @ b.mT + b0[:, None]) @ a
            x = RADIUS * sign * x / x.norm(dim=-1, keepdim=True)
            y = (x @ a.mT + a0[:, None]) @ b
            y = RADIUS * sign * y / y.norm(dim=-1, keepdim=True)
        scores = ((x @ a.mT + a0[:, None]) * (y @ b.mT + b0[:, None])).sum(-1)
        best = torch.maximum(best, scores.abs().amax(-1))
    return best


@pytest.mark.parametrize("kind", KINDS)
def test_interaction_bound_holds_and_is_tight(kind):
    """No score that a search finds exceeds the interaction bound.

    Without constants the bound is attained. With constants it is at most the sum of the norms.
    """
    bounds, parts = bounds_of(kind)
    found = climb(*parts)
    assert (found <= bounds.interaction * (1 + 1e-12)).all()
    assert (bounds.interaction <= bounds.naive * (1 + 1e-9)).all()
    if kind in ("plain", "rms"):
        torch.testing.assert_close(bounds.interaction, found, rtol=2e-6, atol=0)
    a, a0, b, b0 = parts
    terms = (
        RADIUS**2 * torch.linalg.matrix_norm(a.mT @ b, 2)
        + RADIUS * (torch.einsum("hpd,hp->hd", a, b0).norm(dim=-1) + torch.einsum("hpd,hp->hd", b, a0).norm(dim=-1))
        + (a0 * b0).sum(-1).abs()
    )
    assert (bounds.interaction <= terms * (1 + 2e-6)).all(), "augmentation is never looser than the triangle inequality"


@pytest.mark.parametrize("kind", KINDS)
def test_naive_bound_holds_under_every_rotation(kind):
    """The naive bound is above the product of the longest q and the longest k, which a rotation may make parallel.

    It is never looser than the triangle inequality.
    """
    bounds, (a, a0, b, b0) = bounds_of(kind)
    longest = []
    for linear, constant in ((a, a0), (b, b0)):
        n = sphere(64, 4).expand(len(linear), -1, -1)
        for _ in range(500):
            n = (n @ linear.mT + constant[:, None]) @ linear
            n = RADIUS * n / n.norm(dim=-1, keepdim=True)
        longest.append((n @ linear.mT + constant[:, None]).norm(dim=-1).amax(-1))
    product = longest[0] * longest[1]
    assert (product <= bounds.naive * (1 + 1e-12)).all()
    norms = [
        RADIUS * torch.linalg.matrix_norm(linear, 2) + constant.norm(dim=-1) for linear, constant in ((a, a0), (b, b0))
    ]
    assert (bounds.naive <= norms[0] * norms[1] * (1 + 2e-6)).all(), "never looser than the triangle inequality"


@pytest.mark.parametrize("kind", KINDS)
def test_certified_norm_is_above_the_exact_one_and_next_to_it(kind):
    q, q_bias, k, k_bias, norm = layer(kind, 4, 4)
    query, key = project(q, q_bias, 4, norm), project(k, k_bias, 4, norm)
    a, b = matrices(q, q_bias, 4, norm)[0], matrices(k, k_bias, 4, norm)[0]
    exact, product = torch.linalg.matrix_norm(a.mT @ b, 2), geometry.interaction_norm(query, key)
    assert (exact <= product).all()
    assert (product <= exact * (1 + 1e-6)).all()
    single = geometry.spectral_norm(query.gram, query.slack)
    assert (torch.linalg.matrix_norm(a, 2) <= single).all()
    torch.testing.assert_close(single, torch.linalg.matrix_norm(a, 2), rtol=1e-9, atol=0)


def test_certificate_covers_a_product_that_vanishes():
    """The certified bound stays above the rounding errors of FP64, and small, if AᵀB = 0 by cancellation."""
    q, _, k, _, norm = layer("plain", 1, 1)
    basis = torch.linalg.qr(torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(2), dtype=torch.float64))[0]
    q, k = basis[:, :2] @ q[:2], basis[:, 2:] @ k[2:]
    query, key = project(q, None, 1, norm), project(k, None, 1, norm)
    product = geometry.interaction_norm(query, key)
    assert torch.linalg.matrix_norm(q.mT @ k, 2) <= product
    assert product <= 1e-4 * (query.gram.norm() * key.gram.norm()).sqrt()


@pytest.mark.parametrize("kind", KINDS)
def test_probable_bound_holds_on_uniform_directions(kind):
    """No score exceeds the probable bound for inputs of uniform direction, and all diagonal scores exceed `certain`.

    There are 64 tokens and 4 heads, with delta = 1e-3.
    """
    bounds, (a, a0, b, b0) = bounds_of(kind)
    for seed in range(20):
        n = sphere(64, 100 + seed)
        q, k = n @ a.mT + a0[:, None], n @ b.mT + b0[:, None]
        assert ((q @ k.mT).abs().amax((-2, -1)) <= bounds.probable).all()
        assert ((q * k).sum(-1).abs().amin(-1) >= bounds.certain).all()
    if kind == "large bias":
        assert (bounds.certain > 0.0).any()


def absolute(query, key):
    """Return what the absolute parts of roundings (2^-25 each, where FP16's steps no longer shrink) add to scores."""
    (_, q), (_, k) = geometry._lengths(query), geometry._lengths(key)
    groups = len(q) // len(k)
    both = (each.repeat_interleave(groups, 0) for each in (k, key.absolute))
    k, added = both
    return (q + query.absolute) * (k + added) - q * k


def test_without_constants_the_probable_bound_is_the_papers():
    """Without constants the probable bound is the paper's, alpha * |M| * d.

    If alpha is above 1, as for the few dimensions of the other tests, it is the proven bound instead.
    """
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2 * DIM, 800, generator=generator, dtype=torch.float64) for _ in range(2))
    norm = Norm(math.sqrt(800))
    query, key = project(q, None, 2, norm), project(k, None, 2, norm)
    bounds = score_bounds(query, key, heads=2, seq_len=64, delta=1e-3)
    alpha = minimum_alpha(800, DIM, 2, 64, 1e-3)
    expected = alpha * 800 * torch.linalg.matrix_norm(q.view(2, DIM, 800).mT @ k.view(2, DIM, 800), 2)
    assert alpha < 0.2
    torch.testing.assert_close(bounds.probable - absolute(query, key), expected, rtol=1e-6, atol=0)
    assert (absolute(query, key) < 1e-5 * bounds.probable).all()
    q, _, k, _, norm = layer("plain")
    query, key = project(q, None, 4, norm), project(k, None, 2, norm)
    small = score_bounds(query, key, heads=4, seq_len=64, delta=1e-3)
    assert minimum_alpha(HIDDEN, DIM, 4, 64, 1e-3) > 1
    torch.testing.assert_close(small.probable - absolute(query, key), small.interaction, rtol=1e-12, atol=0)


def test_constant_part_covers_every_rotation_of_its_planes():
    generator = torch.Generator().manual_seed(5)
    a, e = (torch.randn(3, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    largest = geometry._rotated_product(a, e, 4)
    angles = torch.rand(5000, 2, generator=generator, dtype=torch.float64) * 2 * math.pi
    first, second = e[:, None, :2], e[:, None, 2:4]
    cos, sin = angles.cos(), angles.sin()
    turned = torch.cat(
        [first * cos - second * sin, first * sin + second * cos, e[:, None, 4:].expand(-1, 5000, -1)], -1
    )
    found = (a[:, None] * turned).sum(-1).abs().amax(-1)
    assert (found <= largest * (1 + 1e-12)).all()
    assert geometry._rotated_product(a, e, 0).equal((a * e).sum(-1).abs())


def test_rounding_is_part_of_the_proven_bound():
    """The proven bound includes 8 roundings of q and 8 of k; here neither centring nor a shift adds to them."""
    q, q_bias, k, k_bias, norm = layer("bias")
    query, key = project(q, q_bias, 4, norm), project(k, k_bias, 2, norm)
    assert not query.hidden.any()
    share = (1 + 2**-11) ** 8 * (1 + 2**-24)
    ones = [x.abs().sum(-1).unflatten(0, (-1, DIM)).norm(dim=-1) for x in (q, k)]  # errors have any direction
    added = [share * 2**-25 * (2 * each + 3 * DIM**0.5) for each in ones]
    (_, longest), (_, longest_key) = geometry._lengths(query), geometry._lengths(key)
    rounded, rounded_key = share * longest + added[0], (share * longest_key + added[1]).repeat_interleave(2, 0)
    for rotary in (0, 4):
        bounds = score_bounds(query, key, heads=4, seq_len=64, delta=1e-3, rotary=rotary)
        exact = bounds.naive if rotary else bounds.interaction
        torch.testing.assert_close(bounds.proven, exact + rounded * rounded_key - bounds.naive, rtol=1e-12, atol=0)


def test_roundings_that_centring_hides_are_in_the_bound():
    """The bound includes roundings of a layer norm's output that centring cancels in exact arithmetic.

    The output sums to zero, so equal weights give scores of 0; but its elements in FP16 do not sum to zero. Story: the
    bound was 0 here, because it was formed from weights without their part along the vector of ones.
    """
    q = torch.full((3, 64), 2048.0)
    norm = Norm(8.0, torch.ones(64), None, centred=True)
    bounds = score_bounds(project(q, None, 1, norm), project(q, None, 1, norm), heads=1, seq_len=4, delta=1e-3)
    x = torch.randn(1000, 64, generator=torch.Generator().manual_seed(0))
    stored = torch.nn.functional.layer_norm(x, (64,)).half().double() @ q.double().T
    assert bounds.interaction.item() < 1e-3
    assert 1 < stored.square().sum(-1).max() <= bounds.proven.item()


def test_roundings_that_the_shift_hides_are_in_the_bound():
    """The bound includes roundings of x with the norm's shift, even if the projected shift cancels in q."""
    q = torch.tensor([[1.0, -1.0, 0.0, 0.0]])
    shift = torch.tensor([4095.0, 4095.0, 0.0, 0.0])
    norm = Norm(2.0, torch.full((4,), 0.1), shift)
    bounds = score_bounds(project(q, None, 1, norm), project(q, None, 1, norm), heads=1, seq_len=4, delta=1e-3)
    n = torch.nn.functional.rms_norm(torch.randn(1000, 4, generator=torch.Generator().manual_seed(0)), (4,))
    stored = (0.1 * n + shift).half().double() @ q.double().T
    assert bounds.naive.item() < 0.1
    assert 1 < stored.square().max() <= bounds.proven.item()


def test_probable_bound_holds_at_every_distance():
    """The probable bound holds at every distance between query and key under rotary embeddings.

    q lies in the first half of the dimensions of its planes and k in the second half, so q.k = 0 at the same position
    only. After a quarter turn they are parallel. Story: scores were judged to be certainly 0.
    """
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(4, 400, generator=generator, dtype=torch.float64) for _ in range(2))
    q[2:], k[:2] = 0, 0
    q_bias, k_bias = torch.tensor([3.0, 0, 0, 0]), torch.tensor([0, 0, 3.0, 0])
    norm = Norm(20.0)
    query, key = project(q, q_bias, 1, norm), project(k, k_bias, 1, norm)
    bounds = score_bounds(query, key, heads=1, seq_len=64, delta=1e-3, rotary=4)
    n = torch.randn(64, 400, generator=generator, dtype=torch.float64)
    n = 20 * n / n.norm(dim=-1, keepdim=True)
    longest_q, first_k = n @ q.T + q_bias, n @ k.T + k_bias
    turned = torch.cat([first_k[:, 2:], -first_k[:, :2]], -1)  # a quarter turn
    assert (longest_q @ first_k.T).abs().max() < 1e-9
    assert bounds.interaction.item() < bounds.probable.item() < bounds.naive.item()
    assert (longest_q @ turned.T).abs().max() <= bounds.probable.item()
    assert bounds.certain.item() == 0


@pytest.mark.parametrize("part", ["constant", "linear in q", "linear in k", "inputs"])
def test_every_part_of_the_probable_bound_is_turned(part):
    """Every part of the probable bound takes the worst rotation into account.

    Each part is tested alone. q lies in the first half of the dimensions of its planes and k in the second half, or the
    other way round. So the part is 0 until a rotation makes them parallel, and then it is most of the bound.
    """
    generator = torch.Generator().manual_seed(8)
    d, half = 2000, 2
    q, k = torch.zeros(2, 2 * half, d, dtype=torch.float64)
    a, e = torch.zeros(2, 2 * half, dtype=torch.float64)
    first, second = slice(0, half), slice(half, 2 * half)
    if part in ("linear in q", "inputs"):
        q[first] = torch.randn(half, d, generator=generator, dtype=torch.float64)
    if part in ("linear in k", "inputs"):
        k[second] = torch.randn(half, d, generator=generator, dtype=torch.float64)
    if part in ("constant", "linear in k"):
        a[first] = 300.0
    if part in ("constant", "linear in q"):
        e[second] = 300.0
    norm = Norm(math.sqrt(d))
    query, key = project(q, a, 1, norm), project(k, e, 1, norm)
    how = {"heads": 1, "seq_len": 64, "delta": 1e-3}
    straight, turned = (score_bounds(query, key, **how, rotary=rotary) for rotary in (0, 2 * half))
    n, m = (math.sqrt(d) * torch.nn.functional.normalize(x, dim=-1) for x in torch.randn(2, 64, d, generator=generator))
    k_turned = (m.double() @ k.T + e).roll(half, -1)  # a quarter turn, up to a sign
    found = float(((n.double() @ q.T + a) @ k_turned.T).abs().max())
    assert straight.probable.item() < 1e-3 * found
    assert found <= turned.probable.item() <= turned.naive.item() + absolute(query, key).item()
    assert found >= 0.05 * turned.probable.item()


def test_the_probable_bound_under_rotations_is_its_formula():
    """The probable bound under rotations equals its formula.

    The union bound is over all pairs of tokens, because each distance has its own rotation. Half of delta is for the
    product of the inputs.
    """
    generator = torch.Generator().manual_seed(9)
    d, dim, heads, tokens, delta = 3000, 4, 3, 50, 1e-4
    q, k = torch.randn(2, dim, d, generator=generator, dtype=torch.float64)
    a, e = torch.randn(2, dim, generator=generator, dtype=torch.float64)
    norm = Norm(math.sqrt(d))
    query, key = project(q, a, 1, norm), project(k, e, 1, norm)
    bounds = score_bounds(query, key, heads=heads, seq_len=tokens, delta=delta, rotary=dim)
    pairs = [torch.stack((x[:2], x[2:]), -1).norm(dim=-1) for x in (a, e)]
    alpha = minimum_alpha(d, dim, heads, tokens, delta / 2)
    linear = math.sqrt(2 * math.log(8 * heads * tokens**2 / delta))

    def spread(matrix, vector):
        """Return the smaller of the bound plane by plane and the product of norms."""
        planes = sum(
            float(torch.linalg.matrix_norm(matrix[[i, i + 2]], 2) * vector[[i, i + 2]].norm()) for i in range(2)
        )
        return min(planes, float(torch.linalg.matrix_norm(matrix, 2) * vector.norm()))

    norms = float(torch.linalg.matrix_norm(q, 2) * torch.linalg.matrix_norm(k, 2))
    expected = float((pairs[0] * pairs[1]).sum()) + alpha * d * norms + linear * (spread(q, e) + spread(k, a))
    assert (bounds.probable - absolute(query, key)).item() == pytest.approx(expected, rel=1e-6)
    assert bounds.probable.item() < 0.5 * bounds.naive.item()


def test_linear_part_covers_every_rotation_of_its_planes():
    generator = torch.Generator().manual_seed(6)
    a = torch.randn(2, 5, 9, generator=generator, dtype=torch.float64)
    a[1, :4] *= torch.tensor([9.0, 0.1, 9.0, 0.1], dtype=torch.float64)[:, None]
    e = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    norms = torch.linalg.matrix_norm(a, 2)
    largest = geometry._rotated_quadratic(a @ a.mT, norms, e, 4)
    angles = torch.rand(5000, 2, generator=generator, dtype=torch.float64) * 2 * math.pi
    first, second, cos, sin = e[:, None, :2], e[:, None, 2:4], angles.cos(), angles.sin()
    turned = [first * cos - second * sin, first * sin + second * cos, e[:, None, 4:].expand(-1, 5000, -1)]
    found = (torch.cat(turned, -1) @ a).norm(dim=-1).amax(-1)
    assert (found <= largest).all()
    assert (largest <= norms * e.norm(dim=-1) * (1 + 1e-12)).all()
    assert (found >= 0.5 * largest).all()


@pytest.mark.parametrize("rotary", [0, 4])
@pytest.mark.parametrize("case", ["zero", "rank one", "1 x 1", "tiny", "huge", "bf16"])
def test_bounds_hold_on_odd_weights(case, rotary):
    """Bounds hold for odd sizes, d = 7 and head dimension 5, whose last dimension is not rotated.

    Samples are on the sphere, with random rotations.
    """
    generator = torch.Generator().manual_seed(4)
    dim, hidden = (1, 1) if case == "1 x 1" else (5, 7)
    rotary = min(rotary, dim // 2 * 2)
    q, k = (torch.randn(2 * dim, hidden, generator=generator, dtype=torch.float64) for _ in range(2))
    factor = {"zero": 0.0, "tiny": 1e-30, "huge": 1e30}.get(case, 1.0)
    q, k = factor * q, k[:dim]
    if case == "rank one":
        k = k[:, :1] * k[:1]
    if case == "bf16":
        q, k = q.bfloat16(), k.bfloat16()
    norm = Norm(math.sqrt(hidden), torch.full((hidden,), -2.0))
    query, key = project(q, None, 2, norm), project(k, None, 1, norm)
    bounds = score_bounds(query, key, heads=2, seq_len=9, delta=1e-3, rotary=rotary)
    n = torch.randn(500, hidden, generator=generator, dtype=torch.float64)
    n = -2 * norm.radius * n / n.norm(dim=-1, keepdim=True)
    left, right = (n @ q.double().T).unflatten(-1, (2, dim)), (n.flip(0) @ k.double().T)[:, None]
    if rotary:
        angle = torch.rand(500, 1, rotary // 2, generator=generator, dtype=torch.float64) * 2 * math.pi
        x, y = right[..., : rotary // 2], right[..., rotary // 2 : rotary]
        turned = [x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos(), right[..., rotary:]]
        right = torch.cat(turned, -1)
    found = (left * right).sum(-1).abs().amax(0)
    assert (found <= bounds.proven).all()
    assert (found >= 0.2 * (bounds.naive if rotary else bounds.interaction)).all()
    assert all(part.isfinite().all() for part in vars(bounds).values())
