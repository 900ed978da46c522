"""Every check of the CPU twin fires on a seeded bug, and the same kernel without the bug passes in every interleaving.

The programs run under AddressSanitizer and UndefinedBehaviorSanitizer: an abandoned launch must leave nothing behind.
"""

import numpy as np
import pytest

from tests.ascend_c.twin_build import PROGRAMS, SANITIZED, refuses

SEEDS = range(4)

# The snippets of misuse.cpp and the fault that each mistake must give.
MISUSE = {
    "ub_capacity": "capacity",
    "l0c_capacity": "capacity",
    "vector_on_cube": "core",
    "event_on_wrong_core": "core",
    "mmad_position": "position",
    "gm_to_l0c": "position",
    "ub_alignment": "alignment",
    "copy_alignment": "alignment",
    "l0_alignment": "alignment",
    "mmad_alignment": "alignment",
    "repeat_range": "range",
    "mask_range": "range",
    "nd2nz_range": "range",
    "fixpipe_range": "range",
    "tensor_bounds": "bounds",
    "gm_bounds": "bounds",
    "gm_foreign": "bounds",
    "fixpipe_quant": "type",
    "cast_mode": "type",
    "unwritten": "uninitialised",
    "unwritten_copy": "uninitialised",
    "nd2nz_tail_rows": "uninitialised",
    "pad_undefined": "uninitialised",
    "odd_bytes_handed_on": "uninitialised",
    "overlap_partial": "overlap",
    "overlap_next_repeat": "overlap",
    "accumulate_in_place": "overlap",
    "event_id_range": "event_id",
    "event_id_raw": "event_id",
    "event_id_release": "event_id",
    "event_id_exhausted": "event_id",
    "flag_unset": "deadlock",
    "flag_reuse": "flag",
    "cross_core_aiv_only": "cross_core",
    "cross_core_pipe": "cross_core",
    "scalar_auto_sync": "race",
    "nan_into_mmad": "nan",
    "input_written": "guard",
    "guard": "guard",
}

# case -> bug -> the kinds of fault that it may give, by interleaving.
SEEDED = {
    "tiled": {
        "no_mte2_v": {"race"},
        "no_v_mte3": {"race"},
        "no_v_mte2": {"race"},
        "no_mte3_v": {"race"},
        "no_barrier": {"race"},
        "double_set": {"flag"},
        "leaked_flag": {"flag"},
    },
    "queued": {
        "no_free": {"queue"},
        "deque_empty": {"queue"},
        "depth": {"queue"},
        "still_queued": {"queue"},
        "double_free": {"queue"},
        "foreign": {"queue"},
        "use_after_free": {"race"},
    },
    "cube": {
        "no_mte2_mte1": {"race"},
        "no_m_mte1": {"race"},
        "no_mte1_m": {"race"},
        "no_barrier_m": {"race"},
        "no_m_fix": {"race"},
        "own_event": {"event_id"},
    },
    "mixed": {
        "no_ready_wait": {"race", "uninitialised"},
        "no_free_wait": {"race"},
        "wrong_pipe": {"race", "uninitialised"},
        "deadlock": {"deadlock"},
        "one_sided": {"deadlock"},
        "leftover": {"cross_core"},
        "no_pair_wait": {"cross_core"},
        "too_many": {"cross_core"},
    },
}
# A missing barrier within one pipe cannot show in the numbers: a deferred pipe still works in order. A set on the wrong
# pipe shows only if the scheduler is unlucky enough; the checker finds both.
WRONG_NUMBERS = [
    *[("tiled", bug) for bug in ("no_mte2_v", "no_v_mte3", "no_v_mte2", "no_mte3_v")],
    *[("cube", bug) for bug in ("no_mte2_mte1", "no_m_mte1", "no_mte1_m", "no_m_fix")],
    *[("mixed", bug) for bug in ("no_ready_wait", "no_free_wait")],
]


@pytest.fixture
def misuse(twin_program):
    return twin_program("misuse", optimise=SANITIZED)


@pytest.fixture
def discipline(twin_program):
    return twin_program("discipline", optimise=SANITIZED)


def numbers(program, case):
    """What the program gave and what it should have given."""
    if case in ("tiled", "queued"):
        x = program.load("x", np.float16)
        return program.load("z", np.float16), x * np.float16(2) + np.float16(1)
    if case == "cube":
        a, b = (program.load(name, np.float16).reshape(32, 128).astype(np.float64) for name in "ab")
        return program.load("c", np.float32).reshape(32, 32), a @ b.T
    a = program.load("a", np.float16).reshape(-1, 32, 32).astype(np.float64)
    return program.load("z", np.float16).reshape(-1, 32, 32), a @ a.transpose(0, 2, 1) + 1


def test_every_snippet_is_listed(misuse):
    reports = misuse.run_all([("snippet", {"name": name, "bug": 0}) for name in MISUSE])
    assert [r.get("fault") for r in reports] == [None] * len(MISUSE)
    reports = misuse.run_all([("snippet", {"name": name, "bug": 0, "mode": "deferred", "seed": 1}) for name in MISUSE])
    assert [r.get("fault") for r in reports] == [None] * len(MISUSE)


def test_every_misuse_is_reported_with_its_place(misuse):
    reports = misuse.run_all([("snippet", {"name": name, "bug": 1}) for name in MISUSE])
    kinds = {name: r["fault"]["kind"] if "fault" in r else None for name, r in zip(MISUSE, reports, strict=True)}
    assert kinds == MISUSE
    for name, report in zip(MISUSE, reports, strict=True):
        fault = report["fault"]
        assert fault["kernel"] == name
        assert fault["core"].split()[0] in ("aic", "aiv")
        assert fault["sentence"]
        if fault["call"] != "end of kernel":
            assert fault["file"].endswith("misuse.cpp"), fault
            assert fault["line"] > 0


@pytest.mark.parametrize("case", SEEDED)
def test_correct_kernels_pass_in_both_modes_and_every_interleaving(discipline, case):
    for mode in ("eager", "deferred"):
        for seed in SEEDS:
            report = discipline.run(case, bug="none", mode=mode, seed=seed)
            assert report["ok"], report["fault"]
            assert set(report["undefined"].values()) == {0}
            actual, expected = numbers(discipline, case)
            np.testing.assert_array_equal(actual, expected, err_msg=f"{case} {mode} {seed}")


@pytest.mark.parametrize(("case", "bug"), [(case, bug) for case, bugs in SEEDED.items() for bug in bugs])
def test_seeded_bug_is_reported_in_every_interleaving(discipline, case, bug):
    reports = discipline.run_all([(case, {"bug": bug, "seed": seed}) for seed in SEEDS])
    for report in reports:
        assert not report["ok"], bug
        assert report["fault"]["kind"] in SEEDED[case][bug], report["fault"]


@pytest.mark.parametrize(("case", "bug"), WRONG_NUMBERS)
def test_missing_synchronisation_gives_wrong_numbers_when_work_is_deferred(discipline, case, bug):
    wrong = 0
    for seed in SEEDS:
        report = discipline.run(case, bug=bug, mode="deferred", seed=seed)
        assert report["ok"], report["fault"]
        actual, expected = numbers(discipline, case)
        wrong += not np.array_equal(actual, expected)
    assert wrong


def test_race_report_names_both_sides(discipline):
    fault = discipline.run("tiled", bug="no_mte2_v")["fault"]
    assert (fault["core"], fault["pipe"], fault["call"]) == ("aiv 0", "V", "Muls")
    assert fault["buffer"] == "UB+0x0 (VECIN)"
    assert "DataCopy on pipe MTE2 of aiv 0" in fault["sentence"]
    assert "discipline.cpp:" in fault["sentence"]


def test_deadlock_report_says_who_waits_for_what(discipline):
    sentence = discipline.run("mixed", bug="one_sided")["fault"]["sentence"]
    assert "aic 0 waits for cross-core flag 1" in sentence
    assert "aiv 0 waits for cross-core flag 0" in sentence


def test_vector_barrier_may_be_left_to_the_compiler(discipline):
    assert discipline.run("tiled", bug="no_barrier", strict=0)["ok"]


def test_unit_flag_orders_mmad_and_fixpipe(discipline):
    for mode in ("eager", "deferred"):
        for seed in SEEDS:
            assert discipline.run("cube", bug="unit_flag", mode=mode, seed=seed)["ok"]
            np.testing.assert_array_equal(*numbers(discipline, "cube"))


def test_a_seed_gives_the_same_run_again(discipline):
    first, again = discipline.run_all([("mixed", {"bug": "no_ready_wait", "seed": 7})] * 2)
    assert first == again


def test_counters(discipline):
    """Bytes, fractals and lanes of the tiled vector kernel and of the cube kernel, by hand."""
    vector = discipline.run("tiled", bug="none")["aiv"]
    assert vector["bytes"] == {"MTE1": 0, "MTE2": 6 * 1024 * 2, "MTE3": 6 * 1024 * 2, "FIX": 0}
    assert vector["vector"] == {"half": {"instructions": 12, "repeats": 12 * 8, "lanes": 12 * 1024}}
    assert vector["syncs"]["PipeBarrier<V>"] == 6
    cube = discipline.run("cube", bug="none")["aic"]
    assert cube["bytes"] == {"MTE1": 2 * 32 * 128 * 2, "MTE2": 2 * 32 * 128 * 2, "MTE3": 0, "FIX": 32 * 32 * 4}
    assert (cube["macs"], cube["mmads"]) == (32 * 32 * 128, 4)
    mixed = discipline.run("mixed", bug="none")
    assert mixed["aic"]["cross_core_sets"] == 3 * 5
    assert mixed["aiv"]["cross_core_waits"] == 6 * (5 + 2)
    assert sorted(mixed["cores"]) == [*(f"aic {i}" for i in range(3)), *(f"aiv {i}" for i in range(6))]


REFUSED = {
    "L0C is float": "void f(LocalTensor<half> c, LocalTensor<half> a, MmadParams p) { Mmad(c, a, a, p); }",
    "no bfloat16 arithmetic": "void f(LocalTensor<bfloat16_t> x) { Add(x, x, x, 16); }",
    "Fixpipe to L1 is 16 bits": "void f(LocalTensor<float> d, LocalTensor<float> c, FixpipeParamsV220 p) "
    "{ Fixpipe<float, float, CFG_NZ>(d, c, p); }",
    "no bfloat16 to half": "void f(LocalTensor<half> d, LocalTensor<bfloat16_t> s) "
    "{ Cast(d, s, RoundMode::CAST_RINT, 16); }",
    "mode 4 is the 950's": "void f() { CrossCoreSetFlag<4, PIPE_MTE3>(0); }",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_device_lacks_does_not_compile(name, tmp_path):
    said = refuses(REFUSED[name], tmp_path)
    assert said is not None
    assert "static assertion failed" in said


def test_every_overload_compiles_with_the_vendors_argument_order(tmp_path):
    assert refuses((PROGRAMS / "overloads.cpp").read_text(), tmp_path) is None
