"""Every check of the CPU twin fires on a seeded bug, and the same kernel without the bug passes in every interleaving.

The programs run under sanitizers: an abandoned launch must leave nothing behind.
"""

import re

import numpy as np
import pytest

from tests.ascend_c.twin_build import PROGRAMS, compiler_says

SEEDS = range(4)

# The snippets of misuse_*.cpp: the kind of fault that each mistake must give, and words of the check that finds it.
MISUSE = {
    "ub_capacity": ("capacity", "UB is full"),
    "l0c_capacity": ("capacity", "L0C is full"),
    "tensor_capacity": ("capacity", "the tensor ends at byte"),
    "too_many_buffers": ("capacity", "at most 64 buffers"),
    "select_workspace": ("capacity", "8 KiB of UB"),
    "vector_on_cube": ("core", "pipe V does not exist"),
    "event_on_wrong_core": ("core", "pipe MTE1 does not exist"),
    "event_pair": ("core", "MTE2_MTE1 does not exist"),
    "position_on_core": ("core", "A1 does not exist"),
    "queue_on_core": ("core", "position A1 does not exist"),
    "sync_all_on_cube": ("core", "for vector cores"),
    "mmad_position": ("position", "fm must lie in L0A"),
    "gm_to_l0c": ("position", "dst must lie in L1"),
    "copy_position": ("position", "documented positions"),
    "no_memory": ("position", "without memory"),
    "ub_alignment": ("alignment", "multiple of 32 bytes"),
    "copy_alignment": ("alignment", "126 bytes are not a multiple of 32"),
    "l0_alignment": ("alignment", "multiple of 512 bytes"),
    "mmad_alignment": ("alignment", "multiple of 1024 bytes"),
    "repeat_range": ("range", "repeatTime = 256"),
    "mask_range": ("range", "mask = 128"),
    "mask_bits": ("range", "bits beyond the 64 lanes"),
    "negative_count": ("range", "count = -1"),
    "nd2nz_range": ("range", "srcDValue = 65536"),
    "pad_block": ("range", "multiple of the element size"),
    "pad_block_out": ("range", "multiple of the element size"),
    "pad_width": ("range", "32 bytes each"),
    "compare_count": ("range", "whole repeats"),
    "integer_overflow": ("range", "2147483648 is beyond int32_t"),
    "shift_range": ("range", "scalarValue = 33"),
    "load_address_mode": ("range", "addrMode"),
    "unit_flag_range": ("range", "unitFlag is 0, 2 or 3"),
    "fixpipe_range": ("range", "nSize = 24"),
    "fixpipe_stride": ("range", "dstStride must not be 0"),
    "fixpipe_unit_flag": ("range", "unitFlag is 0, 2 or 3"),
    "queue_of_nothing": ("range", "InitBuffer of nothing"),
    "tensor_bounds": ("bounds", "writes 1056 bytes"),
    "buffer_bounds": ("bounds", "larger than the buffer"),
    "gm_bounds": ("bounds", "reads 192 bytes"),
    "gm_foreign": ("bounds", "not within any GM allocation"),
    "gm_beside": ("bounds", "lies beside GM x"),
    "gm_tensor_size": ("bounds", "ends at byte 8194"),
    "fixpipe_quant": ("type", "quantPre does not give half"),
    "fixpipe_to_l1": ("type", "L0C to L1 is NZ"),
    "cast_mode": ("type", "round mode 1"),
    "compare_int32": ("type", "EQ only"),
    "select_mode": ("type", "does not fit the type of src1"),
    "mask_mode": ("type", "SetMaskCount or SetMaskNorm"),
    "unwritten": ("uninitialised", "reads memory"),
    "unwritten_copy": ("uninitialised", "copies memory"),
    "nd2nz_tail_rows": ("uninitialised", "reads memory"),
    "pad_undefined": ("uninitialised", "reads memory"),
    "odd_bytes_handed_on": ("uninitialised", "reads memory"),
    "overlap_partial": ("overlap", "overlap in part"),
    "overlap_in_place_cast": ("overlap", "overlap in part"),
    "overlap_next_repeat": ("overlap", "repeat 1 reads what repeat 0"),
    "accumulate_in_place": ("overlap", "repeat 1 reads what repeat 0"),
    "brcb_overlap": ("overlap", "share memory"),
    "reduce_overlap": ("overlap", "repeat 1 reads what repeat 0"),
    "event_id_range": ("event_id", "ids are 0 to 7"),
    "event_id_raw": ("event_id", "neither allocated nor fetched"),
    "event_id_release": ("event_id", "is not allocated"),
    "event_id_exhausted": ("event_id", "all 8 event ids"),
    "flag_unset": ("deadlock", "is not set"),
    "flag_reuse": ("flag", "may be set again"),
    "unit_flag_kept": ("flag", "never taken away"),
    "unit_flag_unset": ("flag", "waits for a Mmad"),
    "unit_flag_twice": ("flag", "waits for a Fixpipe"),
    "unit_flag_one_sided": ("race", "writes what Fixpipe"),
    "write_after_write": ("race", "writes what Duplicate"),
    "two_readers": ("race", "writes what DataCopy on pipe MTE3"),
    "two_writers": ("race", "reads what Fixpipe"),
    "scalar_auto_sync": ("race", "reads what DataCopy on pipe MTE2"),
    "stale_line": ("race", "DataCacheCleanAndInvalid is missing"),
    "queue_uninitialised": ("queue", "InitBuffer was not called"),
    "buffer_uninitialised": ("queue", "InitBuffer was not called"),
    "queue_twice": ("queue", "has buffers already"),
    "queue_enqueue_twice": ("queue", "AllocTensor has not just given"),
    "queue_free_enqueued": ("queue", "still in the queue"),
    "queue_never_freed": ("queue", "never freed"),
    "cross_core_aiv_only": ("cross_core", "AIC_ONLY and AIV_ONLY"),
    "cross_core_wait_aiv_only": ("cross_core", "AIC_ONLY and AIV_ONLY"),
    "cross_core_pipe": ("cross_core", "PIPE_S and PIPE_ALL"),
    "cross_core_id": ("cross_core", "is cut to 0"),
    "cross_core_wait_id": ("cross_core", "is cut to 0"),
    "cross_core_shape": ("cross_core", "modes 1 and 2"),
    "cross_core_pair": ("cross_core", "between the two vector cores"),
    "cross_core_counter": ("cross_core", "exceeds 15"),
    "cross_core_partners": ("cross_core", "found no partners"),
    "nan_into_mmad": ("nan", "NaN in an operand"),
    "input_written": ("guard", "which is an input"),
    "guard": ("guard", "was overwritten"),
    "mmad_bias": ("program", "bias sources"),
    "fixpipe_channels": ("program", "channel splitting"),
    "second_pipe": ("program", "second TPipe"),
    "kernel_type": ("program", "another shape"),
    "host_exception": ("program", "the kernel's own words"),
    "310p_cross_core_set": ("core", "CrossCoreSetFlag does not exist on an Ascend 310P"),
    "310p_cross_core_wait": ("core", "CrossCoreWaitFlag does not exist on an Ascend 310P"),
    "310p_sync_all": ("core", "SyncAll does not exist on an Ascend 310P"),
    "310p_sub_block": ("core", "GetSubBlockIdx does not exist on an Ascend 310P"),
    "310p_overflow_mode": ("core", "SetSaturationFlag does not exist on an Ascend 310P"),
    "310p_read_overflow_mode": ("core", "GetSaturationFlag does not exist on an Ascend 310P"),
    "310p_fixpipe": ("core", "Fixpipe does not exist on an Ascend 310P"),
    "310p_copy_pad": ("core", "DataCopyPad does not exist on an Ascend 310P"),
    "310p_nd_to_nz": ("core", "ND-to-NZ copies of vector calls"),
    "310p_shift": ("core", "ShiftRight does not exist on an Ascend 310P"),
    "310p_pipe": ("core", "pipe FIX does not exist on the core of a 310P"),
    "310p_cast": ("type", "conversion with this round mode"),
    "310p_cast_float": ("type", "conversion with this round mode"),
    "310p_bfloat16": ("type", "conversion with this round mode"),
    "310p_load_bfloat16": ("type", "no bfloat16"),
    "310p_reduce_order": ("type", "this order"),
    "310p_unit_flag": ("range", "no unitFlag"),
    "310p_ub_capacity": ("capacity", "UB is full"),
    "310p_l0c_capacity": ("capacity", "L0C is full"),
    "310p_fill_blocks": ("uninitialised", "nobody has written"),
    "310p_fill_gap": ("uninitialised", "nobody has written"),
    "310p_weights_in_l0": ("position", "dst must lie in UB or L1"),
    "310p_no_m_v": ("race", "Mmad on pipe M"),
    "310p_no_v_m": ("race", "DataCopy on pipe V"),
    "310p_no_v_s": ("race", "DataCopy on pipe V"),
    "310p_no_mte3_mte1": ("race", "DataCopy on pipe MTE3"),
    "310p_l0c_bounds": ("bounds", "writes 2048 bytes"),
    "310p_l0c_alignment": ("alignment", "multiple of 1024 bytes"),
    "310p_l0c_mode": ("program", "whole fractals"),
    "310p_l0c_destination": ("position", "dst must lie in UB"),
    "310p_only": ("core", "pipe V does not exist"),
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


def numbers(program, case):
    """Return the result of the program and the expected one."""
    if case in ("tiled", "queued"):
        x = program.load("x", np.float16)
        return program.load("z", np.float16), x * np.float16(2) + np.float16(1)
    if case == "cube":
        a, b = (program.load(name, np.float16).reshape(32, 128).astype(np.float64) for name in "ab")
        return program.load("c", np.float32).reshape(32, 32), a @ b.T
    a = program.load("a", np.float16).reshape(-1, 32, 32).astype(np.float64)
    return program.load("z", np.float16).reshape(-1, 32, 32), a @ a.transpose(0, 2, 1) + 1


def test_every_snippet_is_listed():
    sources = [path.read_text() for path in PROGRAMS.glob("misuse_*.cpp")]
    result = [name for source in sources for name in re.findall(r'^ +\{"(\w+)",', source, re.MULTILINE)]
    assert sorted(result) == sorted(MISUSE)


@pytest.mark.parametrize("mode", ["eager", "deferred"])
def test_every_snippet_passes_without_its_mistake(twin, mode):
    reports = twin.run_all([("snippet", {"name": name, "bug": 0, "mode": mode, "seed": 1}) for name in MISUSE])
    assert [r.get("fault") for r in reports] == [None] * len(MISUSE)


def test_every_misuse_is_reported_with_its_place(twin):
    reports = twin.run_all([("snippet", {"name": name, "bug": 1}) for name in MISUSE])
    for (name, (kind, words)), report in zip(MISUSE.items(), reports, strict=True):
        fault = report["fault"]
        assert (fault["kind"], fault["kernel"], words in fault["sentence"]) == (kind, name, True), fault
        assert fault["core"].split()[0] in ("aic", "aiv", "ai")
        if fault["call"] not in ("end of kernel", "kernel"):
            assert re.search(r"/misuse\w*\.(cpp|h)$", fault["file"]), fault
            assert fault["line"] > 0


def test_a_launch_has_at_most_as_many_blocks_as_cores(twin):
    reports = twin.run_all([("blocks", {"n": n}) for n in (20, 21, 0)])
    assert [r.get("fault", {}).get("kind") for r in reports] == [None, "range", "range"]


@pytest.mark.parametrize("case", SEEDED)
def test_correct_kernels_pass_in_both_modes_and_every_interleaving(twin, case):
    for mode in ("eager", "deferred"):
        for seed in SEEDS:
            report = twin.run(case, bug="none", mode=mode, seed=seed)
            assert report["ok"], report["fault"]
            assert set(report["undefined"].values()) == {0}
            actual, expected = numbers(twin, case)
            np.testing.assert_array_equal(actual, expected, err_msg=f"{case} {mode} {seed}")


@pytest.mark.parametrize(("case", "bug"), [(case, bug) for case, bugs in SEEDED.items() for bug in bugs])
def test_seeded_bug_is_reported_in_every_interleaving(twin, case, bug):
    reports = twin.run_all([(case, {"bug": bug, "seed": seed}) for seed in SEEDS])
    for report in reports:
        assert not report["ok"], bug
        assert report["fault"]["kind"] in SEEDED[case][bug], report["fault"]


@pytest.mark.parametrize(("case", "bug"), WRONG_NUMBERS)
def test_missing_synchronisation_gives_wrong_numbers_when_work_is_deferred(twin, case, bug):
    wrong = 0
    for seed in SEEDS:
        report = twin.run(case, bug=bug, mode="deferred", seed=seed)
        assert report["ok"], report["fault"]
        actual, expected = numbers(twin, case)
        wrong += not np.array_equal(actual, expected)
    assert wrong


def test_race_report_names_both_sides(twin):
    fault = twin.run("tiled", bug="no_mte2_v")["fault"]
    assert (fault["core"], fault["pipe"], fault["call"]) == ("aiv 0", "V", "Muls")
    assert fault["buffer"] == "UB+0x0 (VECIN)"
    assert "DataCopy on pipe MTE2 of aiv 0" in fault["sentence"]
    assert "discipline.cpp:" in fault["sentence"]


def test_deadlock_report_says_who_waits_for_what(twin):
    sentence = twin.run("mixed", bug="one_sided")["fault"]["sentence"]
    assert "aic 0 waits for cross-core flag 1" in sentence
    assert "aiv 0 waits for cross-core flag 0" in sentence


def test_vector_barrier_may_be_left_to_the_compiler(twin):
    assert twin.run("tiled", bug="no_barrier", strict=0)["ok"]


def test_unit_flag_orders_mmad_and_fixpipe(twin):
    for mode in ("eager", "deferred"):
        for seed in SEEDS:
            assert twin.run("cube", bug="unit_flag", mode=mode, seed=seed)["ok"]
            np.testing.assert_array_equal(*numbers(twin, "cube"))


def test_a_seed_gives_the_same_run_again(twin):
    first, again = twin.run_all([("mixed", {"bug": "no_ready_wait", "seed": 7})] * 2)
    assert first == again


def test_counters(twin):
    """Bytes, fractals and lanes of the tiled vector kernel and of the cube kernel, by hand."""
    vector = twin.run("tiled", bug="none")["aiv"]
    assert vector["bytes"] == {"MTE1": 0, "MTE2": 6 * 1024 * 2, "MTE3": 6 * 1024 * 2, "FIX": 0}
    assert vector["vector"] == {"half": {"instructions": 12, "repeats": 12 * 8, "lanes": 12 * 1024}}
    assert vector["calls"] == {
        f"{name} half": {"instructions": 6, "repeats": 48, "lanes": 6144} for name in ("Adds", "Muls")
    }
    assert vector["syncs"]["PipeBarrier<V>"] == 6
    cube = twin.run("cube", bug="none")["aic"]
    assert cube["bytes"] == {"MTE1": 2 * 32 * 128 * 2, "MTE2": 2 * 32 * 128 * 2, "MTE3": 0, "FIX": 32 * 32 * 4}
    assert (cube["macs"], cube["mmads"]) == (32 * 32 * 128, 4)
    mixed = twin.run("mixed", bug="none")
    assert mixed["aic"]["cross_core_sets"] == 3 * 5
    assert mixed["aiv"]["cross_core_waits"] == 6 * (5 + 2)
    assert sorted(mixed["cores"]) == [*(f"aic {i}" for i in range(3)), *(f"aiv {i}" for i in range(6))]


# Words of the refusal -> code.
REFUSED = {
    "half and bfloat16 into float": "void f(LocalTensor<half> c, LocalTensor<half> a, MmadParams p) "
    "{ Mmad(c, a, a, p); }",
    "vector arithmetic takes half, float and int32_t": "void f(LocalTensor<bfloat16_t> x) { Add(x, x, x, 16); }",
    "And takes int16_t and uint16_t on A2": "void f(LocalTensor<uint32_t> x) { And(x, x, x, 16); }",
    "the twin shifts unsigned integers": "void f(LocalTensor<int32_t> x) { ShiftLeft(x, x, 1, 16); }",
    "A2 moves float as half or bfloat16": "void f(LocalTensor<float> d, LocalTensor<float> c, FixpipeParamsV220 p) "
    "{ Fixpipe<float, float, CFG_NZ>(d, c, p); }",
    "does not have this conversion": "void f(LocalTensor<half> d, LocalTensor<bfloat16_t> s) "
    "{ Cast(d, s, RoundMode::CAST_RINT, 16); }",
    "modes 0, 1 and 2": "void f() { CrossCoreSetFlag<4, PIPE_MTE3>(0); }",
    "is in order and has no barrier": "void f() { PipeBarrier<PIPE_S>(); }",
}


def test_what_the_device_lacks_does_not_compile(tmp_path):
    said = compiler_says("\n".join(f"namespace n{i} {{ {code} }}" for i, code in enumerate(REFUSED.values())), tmp_path)
    for reason in REFUSED:
        assert re.search(f"static assertion failed: .*{reason}", said), reason


def test_every_overload_compiles_with_the_vendors_argument_order(tmp_path):
    assert compiler_says((PROGRAMS / "overloads.cpp").read_text(), tmp_path) == ""
