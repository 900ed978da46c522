"""Numbers of the CPU twin against numpy: one rounding per call, both overflow modes, tree sums, exact integer GEMMs."""

import numpy as np
import pytest

from tests.ascend_c.twin_build import FAST

EVERY_HALF = np.arange(65536, dtype=np.uint16).view(np.float16)
UFUNCS = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide}


def saturated(values):
    """Return half results as CTRL[48] = 0 changes them: saturated, and 0 for NaN."""
    values = np.where(np.isnan(values), np.float16(0), values)
    return np.clip(values, np.float16(-65504), np.float16(65504))


def overflows(result, *operands):
    """Results that are not finite although all operands are: what the twin counts, in either overflow mode."""
    return int((~np.isfinite(result) & np.all([np.isfinite(x) for x in operands], axis=0)).sum())


def same_bits(actual, expected):
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), nan)
    np.testing.assert_array_equal(actual.view(np.uint16)[~nan], expected.view(np.uint16)[~nan])


@pytest.mark.parametrize("overflow", ["inf_nan", "saturate"])
@pytest.mark.parametrize("op", UFUNCS)
def test_half_arithmetic_rounds_once_in_both_overflow_modes(twin, op, overflow):
    rng = np.random.default_rng(0)
    x, y = (rng.choice(EVERY_HALF, 4096) for _ in range(2))
    for mode in ("eager", "deferred"):
        report = twin.run("half_op", {"x": x, "y": y}, op=op, y="y", overflow=overflow, mode=mode)
        assert report["ok"], report["fault"]
        with np.errstate(all="ignore"):
            expected = UFUNCS[op](x, y)
        same_bits(twin.load("z", np.float16), expected if overflow == "inf_nan" else saturated(expected))
        assert report["aiv"]["overflows"] == {op: overflows(expected, x, y)}


@pytest.mark.parametrize("overflow", ["inf_nan", "saturate"])
@pytest.mark.parametrize(("op", "exact"), [("Exp", np.exp), ("Ln", np.log), ("Reciprocal", np.reciprocal)])
def test_half_functions_are_correctly_rounded_for_every_input(twin, op, exact, overflow):
    for x in EVERY_HALF.reshape(4, -1):
        report = twin.run("half_op", {"x": x}, op=op, overflow=overflow)
        assert report["ok"], report["fault"]
        with np.errstate(all="ignore"):
            expected = exact(x.astype(np.float64)).astype(np.float16)
        same_bits(twin.load("z", np.float16), expected if overflow == "inf_nan" else saturated(expected))
        assert report["aiv"]["overflows"].get(op, 0) == overflows(expected, x)


def test_float_exp_and_ln_are_correctly_rounded(twin):
    x = np.random.default_rng(13).uniform(-80, 80, 4096).astype(np.float32)
    assert twin.run("float_op", {"x": x}, op="Exp")["ok"]
    np.testing.assert_array_equal(twin.load("z", np.float32), np.exp(x.astype(np.float64)).astype(np.float32))
    x = np.exp(x)
    assert twin.run("float_op", {"x": x}, op="Ln")["ok"]
    np.testing.assert_array_equal(twin.load("z", np.float32), np.log(x.astype(np.float64)).astype(np.float32))


def test_jitter_moves_exp_by_at_most_one_ulp_and_is_reproducible(twin):
    x = np.linspace(-8, 8, 4096).astype(np.float16)
    exact = np.exp(x.astype(np.float64)).astype(np.float16).view(np.int16).astype(int)
    seen = []
    for seed in (1, 1, 2):
        assert twin.run("half_op", {"x": x}, op="Exp", jitter=1, seed=seed)["ok"]
        seen.append(twin.load("z", np.float16).view(np.int16).astype(int))
    assert set(np.unique(seen[0] - exact)) == {-1, 0, 1}
    np.testing.assert_array_equal(seen[0], seen[1])
    assert (seen[0] != seen[2]).any()


@pytest.mark.parametrize(("case", "dtype"), [("half_op", np.float16), ("float_op", np.float32)])
def test_exp_and_ln_keep_subnormal_numbers_or_flush_them(twin, case, dtype):
    """A flushed result of Exp is 0, and Ln of a flushed operand is -inf."""
    normal, smallest = (float(x) for x in (np.finfo(dtype).tiny, np.finfo(dtype).smallest_subnormal))
    x = np.linspace(np.log(smallest), np.log(normal) + 1, 128).astype(dtype)
    subnormal = np.exp(x.astype(np.float64)).astype(dtype)
    for op, operand in (("Exp", x), ("Ln", subnormal)):
        kept = (np.exp if op == "Exp" else np.log)(operand.astype(np.float64)).astype(dtype)
        gone, zero = subnormal < normal, {"Exp": 0, "Ln": -np.inf}[op]
        assert 0 < gone.sum() < len(x)
        for flush, expected in ((0, kept), (1, np.where(gone, dtype(zero), kept))):
            assert twin.run(case, {"x": operand}, op=op, flush=flush)["ok"]
            np.testing.assert_array_equal(twin.load("z", dtype), expected)


def test_half_does_not_keep_excess_precision(twin):
    x, one = np.full(128, 2048, np.float16), np.full(128, 1, np.float16)
    assert twin.run("half_op", {"x": one, "y": x}, op="AddSub", y="y")["ok"]
    assert not twin.load("z", np.float16).any()


@pytest.mark.parametrize("op", ["Adds", "Muls", "Maxs", "Mins"])
@pytest.mark.parametrize(("case", "dtype"), [("half_op", np.float16), ("float_op", np.float32)])
def test_scalar_operands(twin, op, case, dtype):
    x = (np.random.default_rng(1).standard_normal(1000 // 16 * 16) * 50).astype(dtype)
    scalar = dtype(-1.37)
    f = {"Adds": np.add, "Muls": np.multiply, "Maxs": np.maximum, "Mins": np.minimum}[op]
    assert twin.run(case, {"x": x}, op=op, scalar=scalar)["ok"]
    np.testing.assert_array_equal(twin.load("z", dtype), f(x, scalar))


WORD_OPS = {
    "Add": lambda x, y, s: x + y,
    "Sub": lambda x, y, s: x - y,
    "Mul": lambda x, y, s: (x >> 16) * (y >> 16),
    "Max": lambda x, y, s: np.maximum(x, y),
    "Adds": lambda x, y, s: x + s,
    "Muls": lambda x, y, s: (x >> 8) * s,
    "ShiftLeft": lambda x, y, s: x << s,
    "ShiftRight": lambda x, y, s: (x & 0xFFFFFFFF) >> s,
    "And": lambda x, y, s: x & np.tile(y[:8], len(x) // 8),
}


@pytest.mark.parametrize("op", WORD_OPS)
def test_integers(twin, op):
    """Sums and products that fit; of negative words, shifts bring in zeros."""
    rng = np.random.default_rng(11)
    x, y = (rng.integers(-(2**30), 2**30, 640) for _ in range(2))
    operands = {"Mul": (x >> 16, y >> 16), "Muls": (x >> 8, y)}.get(op, (x, y))
    arrays = dict(zip("xy", (each.astype(np.int32) for each in operands), strict=True))
    report = twin.run("word_op", arrays, op=op, y="y", scalar=13)
    assert report["ok"], report["fault"]
    np.testing.assert_array_equal(twin.load("z", np.int32), WORD_OPS[op](x, y, 13).astype(np.uint32).view(np.int32))


def test_an_infinite_scalar_is_meant(twin):
    x = np.arange(128, dtype=np.float16)
    report = twin.run("half_op", {"x": x}, op="Adds", scalar="-inf")
    assert not np.isfinite(twin.load("z", np.float16)).any()
    assert report["aiv"]["overflows"] == {}


def rounded(x, mode):
    """float64 -> integer in the RoundMode of that number."""
    away = np.copysign(np.floor(np.abs(x) + 0.5), x)
    return {1: np.rint(x), 2: np.floor(x), 3: np.ceil(x), 4: away, 5: np.trunc(x)}[mode]


@pytest.mark.parametrize("mode", [0, 1, 2, 3, 4, 5, 6])
def test_float_to_half_in_every_round_mode(twin, mode):
    rng = np.random.default_rng(2)
    x = np.concatenate(
        [
            rng.standard_normal(4000) * 2.0 ** rng.integers(-26, 17, 4000),
            [1 + 2**-11, 1 + 3 * 2**-11, 70000, -70000, 65519, 65520],
        ]
    )
    x = np.resize(x, 4096).astype(np.float32)
    report = twin.run("cast", {"x": x}, **{"from": "float"}, to="half", round=mode)
    assert report["ok"], report["fault"]
    result = twin.load("z", np.float16)
    exact = x.astype(np.float64)
    exponent = np.maximum(np.frexp(exact)[1] - 1, -14)
    grid = np.exp2(exponent - 10.0)
    if mode == 6:
        low = np.floor(exact / grid)
        steps = np.where((low == exact / grid) | (low % 2 != 0), low, low + 1)
    else:
        steps = rounded(exact / grid, mode or 1)
    with np.errstate(over="ignore"):
        expected = (steps * grid).astype(np.float16)
    small = np.abs(exact) < 65504
    np.testing.assert_array_equal(result[small], expected[small])
    if mode in (0, 1):
        with np.errstate(over="ignore"):
            same_bits(result, x.astype(np.float16))
        assert report["aiv"]["overflows"] == {"Cast": overflows(result, x)}


def test_float_to_bfloat16_and_int32(twin):
    import torch

    x = (np.random.default_rng(3).standard_normal(4096) * 1e3).astype(np.float32)
    assert twin.run("cast", {"x": x}, **{"from": "float"}, to="bfloat16", round=1)["ok"]
    expected = torch.from_numpy(x).to(torch.bfloat16).view(torch.int16).numpy()
    np.testing.assert_array_equal(twin.load("z", np.int16), expected)
    for mode in (1, 2, 3, 4, 5):
        assert twin.run("cast", {"x": x + np.float32(0.5)}, **{"from": "float"}, to="int32", round=mode)["ok"]
        np.testing.assert_array_equal(twin.load("z", np.int32), rounded((x + np.float32(0.5)).astype(np.float64), mode))


def tree_sum(rows):
    """Adjacent pairs, rounded at every level, as the vendor's page on ReduceDataBlock draws it."""
    while rows.shape[-1] > 1:
        rows = rows[..., 0::2] + rows[..., 1::2]
    return rows[..., 0]


@pytest.mark.parametrize(("case", "dtype"), [("half_reduce", np.float16), ("float_reduce", np.float32)])
@pytest.mark.parametrize("mask", [None, 37])
def test_reductions(twin, case, dtype, mask):
    lanes = 128 if dtype is np.float16 else 64
    x = np.random.default_rng(4).standard_normal((20, lanes)).astype(dtype)
    active = np.arange(lanes) < (mask or lanes)
    summed, blocks = np.where(active, x, dtype(0)), x.reshape(20, 8, -1)
    live = active.reshape(8, -1).any(1)
    low = np.where(active, x, -np.inf).astype(dtype)
    expected = {
        "RepeatMax": low.max(1),
        "RepeatMin": np.where(active, x, np.inf).astype(dtype).min(1),
        "RepeatSum": tree_sum(summed),
        "BlockMax": np.where(live, low.reshape(blocks.shape).max(2), dtype(0)),
        "BlockSum": np.where(live, tree_sum(summed.reshape(blocks.shape)), dtype(0)),
        "PairSum": summed[:, 0::2] + summed[:, 1::2],
    }
    for op, values in expected.items():
        settings = {"mask": mask} if mask else {}
        report = twin.run(case, {"x": x}, op=op, **settings)
        assert report["ok"], (op, report["fault"])
        np.testing.assert_array_equal(twin.load("z", dtype), values.astype(dtype).ravel(), err_msg=op)
    assert (tree_sum(summed) != summed.sum(1, dtype=np.float64).astype(dtype)).any(), "the order of the sum must show"
    twin.run(case, {"x": x}, op="RepeatMaxIndex", **({"mask": mask} if mask else {}))
    pairs = twin.load("z", dtype).reshape(20, 2)
    np.testing.assert_array_equal(pairs[:, 0], low.max(1))
    np.testing.assert_array_equal(pairs[:, 1].copy().view(f"u{dtype().nbytes}"), low.argmax(1))


@pytest.mark.parametrize("op", ["BlockSum", "RepeatSum"])
def test_partial_sums_saturate(twin, op):
    """The example of the vendor's page: 60000 + 60000 is cut to 65504 before the other half of the tree is added."""
    x = np.zeros((1, 128), np.float16)
    x[0, :4] = 60000, 60000, -30000, 100
    for overflow, expected in (("saturate", np.float16(65504) + (x[0, 2] + x[0, 3])), ("inf_nan", np.inf)):
        report = twin.run("half_reduce", {"x": x}, op=op, overflow=overflow)
        assert twin.load("z", np.float16)[0] == expected
        assert list(report["aiv"]["overflows"].values()) == [1]


@pytest.mark.parametrize("rows", [8, 63, 128])
def test_row_broadcast_through_brcb(twin, rows):
    rng = np.random.default_rng(5)
    x = rng.standard_normal((rows, 128)).astype(np.float16)
    y = np.zeros((rows, 128), np.float16)
    y.ravel()[:rows] = rng.standard_normal(rows)
    report = twin.run("brcb_row_multiply", {"x": x, "y": y}, rows=rows, y="y")
    assert report["ok"], report["fault"]
    np.testing.assert_array_equal(twin.load("z", np.float16).reshape(rows, 128), x * y.ravel()[:rows, None])


def test_compare_and_select(twin):
    rng = np.random.default_rng(6)
    x, y = (rng.standard_normal(512).astype(np.float16) for _ in range(2))
    assert twin.run("masked_select", {"x": x, "y": y}, y="y", op="tensor")["ok"]
    np.testing.assert_array_equal(twin.load("z", np.float16), np.minimum(x, y))
    assert twin.run("masked_select", {"x": x, "y": y}, y="y", op="scalar")["ok"]
    np.testing.assert_array_equal(twin.load("z", np.float16), np.where(x > np.float16(0.5), x, np.float16(-1)))


def test_vec_index(twin):
    assert twin.run("vec_index", {"x": np.zeros(64, np.float32)})["ok"]
    np.testing.assert_array_equal(twin.load("z", np.float32), np.arange(5, 105))


@pytest.mark.parametrize("op", ["bits", "counter", "outside"])
def test_masks_leave_inactive_lanes_alone(twin, op):
    x, y = (np.random.default_rng(seed).standard_normal(256).astype(np.float16) for seed in (7, 8))
    assert twin.run("mask_state", {"x": x, "y": y}, y="y", op=op)["ok"]
    lane = np.arange(256) % 128
    active = {
        "bits": np.where(lane < 64, lane % 2 == 0, lane < 68),
        "counter": np.arange(256) < 200,
        "outside": lane < 100,
    }[op]
    np.testing.assert_array_equal(twin.load("z", np.float16), np.where(active, x + y, np.float16(7)))


SHAPES = [(16, 16, 16), (128, 128, 128), (30, 40, 70), (63, 127, 80), (127, 63, 129), (33, 17, 1), (128, 129, 96)]


@pytest.mark.parametrize("transposed", [1, 0])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_gemm_is_exact_on_integers_with_odd_tails(twin, m, n, k, transposed):
    """S = Q K^T needs no transpose in LoadData, P V transposes every fractal; tails are never multiples of 16."""
    rng = np.random.default_rng(m * n + k)
    a = rng.integers(-8, 9, (m, k)).astype(np.float16)
    b = rng.integers(-8, 9, (n, k) if transposed else (k, n)).astype(np.float16)
    columns = (n + 15) // 16 * 16
    for mode, seed in (("eager", 0), ("deferred", 0), ("deferred", 1)):
        report = twin.run(
            "gemm_half_float", {"a": a, "b": b}, m=m, n=n, k=k, transposed=transposed, mode=mode, seed=seed
        )
        assert report["ok"], report["fault"]
        c = twin.load("c", np.float32).reshape(m, columns)[:, :n]
        np.testing.assert_array_equal(c, a.astype(int) @ (b.T if transposed else b).astype(int))
    if mode == "eager":
        assert report["undefined"]["c"] == m * (columns - n) * 4, "columns beyond n hold nothing that is defined"
    assert report["aic"]["macs"] == -(-m // 16) * -(-n // 16) * -(-k // 16) * 16**3


def test_fp32_accumulates_in_the_order_of_k(twin):
    rng = np.random.default_rng(9)
    a, b = (rng.standard_normal((32, 200)).astype(np.float16) for _ in range(2))
    assert twin.run("gemm_half_float", {"a": a, "b": b}, m=32, n=32, k=200)["ok"]
    expected = np.zeros((32, 32), np.float32)
    for k in range(200):
        expected += np.outer(a[:, k].astype(np.float32), b[:, k].astype(np.float32))
    np.testing.assert_array_equal(twin.load("c", np.float32).reshape(32, 32), expected)


def test_fixpipe_rounds_once_to_even_and_obeys_the_overflow_mode(twin):
    sums = np.array(
        [2049, 2051, 4098, 4102, 65504, 65519, 65520, 70000, -70000, 1, 0, -2049, 2050, 8196, 33, 16], np.float64
    )
    a = np.stack([np.floor(sums / 64), np.sign(sums) * (np.abs(sums) % 64)], 1)
    a[:, 1] = sums - a[:, 0] * 64
    a = np.hstack([a, np.zeros((16, 14))]).astype(np.float16)
    b = np.zeros((16, 16), np.float16)
    b[:, 0], b[:, 1] = 64, 1
    for case, dtype in (("gemm_half_half", np.float16), ("gemm_half_bf16", np.uint16)):
        for overflow in ("inf_nan", "saturate"):
            report = twin.run(case, {"a": a, "b": b}, m=16, n=16, k=16, overflow=overflow)
            assert report["aic"]["overflows"] == ({"Fixpipe": 3 * 16} if dtype is np.float16 else {})
            c = twin.load("c", dtype).reshape(16, 16)[:, 0]
            if dtype is np.uint16:
                bits = sums.astype(np.float32).view(np.uint32)
                np.testing.assert_array_equal(c, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
            else:
                with np.errstate(over="ignore"):
                    expected = sums.astype(np.float16)
                same_bits(c, expected if overflow == "inf_nan" else saturated(expected))


@pytest.mark.parametrize("optimise", [("-O1",), ("-O2", *FAST[1:])], ids=["O1", "O2-f16c"])
def test_half_in_the_kernels_own_code_keeps_no_excess_precision(twin_program, optimise):
    """g++ computes _Float16 through float: without -fexcess-precision=16, (2048 + 1) - 2048 is 1."""
    program = twin_program("conversions", optimise=optimise)
    assert program.run("scalar_code")["ok"]
    assert program.load("z", np.float16)[0] == 0


def test_a_scalar_becomes_half_by_rounding_to_odd(twin_program):
    """A scalar that FP16 does not hold gets an odd last digit, whichever neighbour is nearer."""
    x = np.float32([1, 2.0**-24, 65504, 1 + 2.0**-12, 1 - 2.0**-13, 3.14159, -3.14159, 1 + 2.0**-10 + 2.0**-20])
    expected = [1, 2.0**-24, 65504, 1 + 2.0**-10, 1 - 2.0**-11, 3.142578125, -3.142578125, 1 + 2.0**-10]
    program = twin_program("conversions")
    assert program.run("scalar_to_half", {"x": x})["ok"]
    np.testing.assert_array_equal(program.load("z", np.float16), np.float16(expected))


@pytest.mark.parametrize("optimise", [("-O1",), ("-O2", *FAST[1:])], ids=["O1", "O2-f16c"])
def test_conversions_do_not_depend_on_f16c(twin_program, optimise):
    """Both builds write what they make of every half and of the float next to every rounding boundary."""
    program = twin_program("conversions", optimise=optimise)
    assert program.run("convert")["ok"]
    with np.errstate(invalid="ignore"):
        wide = EVERY_HALF.astype(np.float32)
    actual = program.load("widened", np.float32)
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(wide))
    np.testing.assert_array_equal(actual[~np.isnan(wide)], wide[~np.isnan(wide)])
    inputs = program.load("floats", np.float32)
    with np.errstate(all="ignore"):
        same_bits(program.load("narrowed", np.float16), inputs.astype(np.float16))
