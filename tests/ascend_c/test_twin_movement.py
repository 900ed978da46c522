"""Copies with padding and gaps, products that stay on the chip, queues on the cube core, SyncAll."""

import numpy as np
import pytest

MODES = [("eager", 0), ("eager", 1), ("deferred", 0), ("deferred", 1)]


@pytest.mark.parametrize("right", [0, 3])
@pytest.mark.parametrize(("rows", "columns", "gap"), [(1, 5, 0), (7, 63, 2), (9, 80, 34), (4, 16, 0)])
def test_padded_rows(twin, rows, columns, gap, right):
    """Without padding the rest of a 32-byte row repeats its first element; with padding it is paddingValue."""
    step = columns + gap // 2
    x = np.random.default_rng(rows).standard_normal((rows, step)).astype(np.float16)
    for mode, seed in MODES:
        report = twin.run("padded", {"x": x}, rows=rows, columns=columns, gap=gap, right=right, mode=mode, seed=seed)
        assert report["ok"], report["fault"]
        dense = x[:, :columns] * np.float16(2)
        np.testing.assert_array_equal(twin.load("z", np.float16).reshape(rows, columns), dense)
        padded = twin.load("w", np.float16).reshape(rows, -1)
        fill = np.full((rows, 1), 18, np.float16) if right else dense[:, :1]
        np.testing.assert_array_equal(padded[:, columns:], np.broadcast_to(fill, padded[:, columns:].shape))


def test_strided_blocks(twin):
    x = np.arange(1024, dtype=np.float16)
    assert twin.run("strided", {"x": x})["ok"]
    blocks = x.reshape(-1, 2, 16).copy()
    blocks[:, 1] = 0
    np.testing.assert_array_equal(twin.load("z", np.float16), blocks.ravel())


def test_product_stays_on_chip_and_is_rounded_once(twin):
    rng = np.random.default_rng(11)
    a, b, d = (rng.integers(-9, 10, (64, 64)).astype(np.float16) for _ in range(3))
    a[:, 0], b[:, 0] = 60, 50  # sums beyond 2048, where half rounds
    for mode, seed in MODES:
        report = twin.run("chain", {"a": a, "b": b, "d": d}, mode=mode, seed=seed)
        assert report["ok"], report["fault"]
        product = (a.astype(np.float64) @ b.T.astype(np.float64)).astype(np.float16).astype(np.float64)
        np.testing.assert_array_equal(twin.load("z", np.float32).reshape(64, 64), product @ d.astype(np.float64))
    assert (product != a.astype(np.float64) @ b.T.astype(np.float64)).any()


@pytest.mark.parametrize(("mode", "seed"), MODES)
def test_constants_in_l0(twin, mode, seed):
    """Fill counts fractals of 512 bytes, and the gap from the end of a run to the next one's start."""
    report = twin.run("fill", mode=mode, seed=seed)
    assert report["ok"], report["fault"]
    expected = np.tile(np.repeat(np.float32([2 * 3 * 16, 2 * 5 * 16]), 16), (16, 2))
    np.testing.assert_array_equal(twin.load("z", np.float32).reshape(16, 64), expected)
    assert report["aic"]["bytes"]["MTE1"] == 5 * 512


@pytest.mark.parametrize("seed", range(4))
def test_sync_all_orders_all_cores(twin, seed):
    report = twin.run("sync_all", groups=4, seed=seed)
    assert report["ok"], report["fault"]
    assert set(twin.load("sums", np.int32)) == {12 * 13 // 2}
    fault = twin.run("sync_all", groups=4, seed=seed, bug="skip")["fault"]
    assert fault["kind"] in ("race", "uninitialised")


def test_persistent_memory_outlives_a_launch(twin):
    report = twin.run("two_launches")
    assert report["ok"], report["fault"]
    assert set(twin.load("z", np.int32)) == {8}
