"""What an Ascend 910B3 does per second, as published; each number with its source."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2.0**30
INI = "Ascend910B3.ini of CANN's platform configuration (github.com/hicann/runtime, src/platform/platform_config/cann)"
PTO = "cost model for A2/A3 of CANN's PTO-ISA (gitcode.com/cann/pto-isa, include/pto/costmodel"
ARCH = f"{PTO}/arch_config.hpp)"
HEADER = f"{PTO}/pto_isa_costmodel.hpp)"
PROFILES = f"{PTO}/a2a3/cce_costmodel/cce_cycle_profiles.csv)"


@dataclass(frozen=True)
class Rate:
    """One published number.

    Attributes
    ----------
    value : float
        In `unit`.
    source : str
    inferred : str
        What the source does not say and this model assumes; empty where it says all.
    """

    value: float
    unit: str
    source: str
    inferred: str = ""


CLOCK = Rate(1.8e9, "Hz", INI, "of the vector cores as well: the file has no vec_freq")
GROUPS = Rate(20, "cube cores", INI)
VECTORS = Rate(2, "vector cores per cube core", INI)
CUBE = Rate(4096, "FP16 multiplications/cycle/cube core", INI, "")
TO_L0 = Rate(
    2 / (1 / 256 + 1 / 128), "bytes/cycle/cube core", HEADER,
    "256 into L0A and 128 into L0B, one after the other, half of the bytes each (the platform file says 512 and 256)",
)  # fmt: skip
L2_READ = Rate(110, "bytes/cycle/group", INI, "a cube core and its two vector cores share it")
L2_WRITE = Rate(86, "bytes/cycle/group", INI, "a cube core and its two vector cores share it")
HBM = Rate(32, "bytes/cycle/group", INI, "read and write together; 1.15 TB/s on 20 cube cores")
BARRIER = Rate(18, "cycles after a PipeBarrier<PIPE_V>", HEADER)

SUSTAINED = {
    "MTE2 cube": Rate(135.0 * GIB, "bytes/s/core", ARCH, "GM_TO_L1"),
    "FIX": Rate(70.0 * GIB, "bytes/s/core", ARCH, "L0C_TO_GM; counted in bytes as stored"),
    "MTE2 vector": Rate(100.9 * GIB, "bytes/s/core", ARCH, "GM_TO_UB"),
    "MTE3": Rate(188.46 * GIB, "bytes/s/core", ARCH, "UB_TO_GM"),
}
PEAK = {
    "MTE2 cube": Rate(256 * CLOCK.value, "bytes/s/core", HEADER, "256 bytes/cycle"),
    "FIX": Rate(128 * CLOCK.value, "bytes/s/core", HEADER, "128 bytes/cycle, given for L0C to L1"),
    "MTE2 vector": Rate(128 * CLOCK.value, "bytes/s/core", HEADER, "128 bytes/cycle"),
    "MTE3": Rate(128 * CLOCK.value, "bytes/s/core", HEADER, "128 bytes/cycle, given for the other direction"),
}

CALLS = {
    "Abs": (1, 1), "Add": (2.07, 2.07), "Adds": (1, 1), "And": (2, 2), "Brcb": (1, 1), "Cast": (1, 1),
    "Compare": (2, 2), "Compares": (1, 1), "CreateVecIndex": (1, 1), "Div": (4, 8),
    "Duplicate": (1, 1), "Exp": (2, 4), "Ln": (2, 4), "Max": (2, 2), "Maxs": (1, 1), "Min": (2, 2), "Mins": (1, 1),
    "Mul": (2.13, 2.13), "Muls": (1, 1), "ReduceDataBlock": (1, 7), "ReduceRepeat": (7, 7), "Select": (2, 2),
    "ShiftLeft": (1, 1), "ShiftRight": (1, 1), "Sub": (2.07, 2.07),
}  # fmt: skip
"""Cycles of a repeat of 256 bytes, FP32 and FP16 (`PROFILES`, column slope; FP16 stands for integers too).

Cast takes 1 a repeat whichever side is FP16: inferred, the file has 1 or 2 for it. Select of two tensors by bits takes
what it takes by a mask register: inferred. CreateVecIndex is what it is made of, Adds, without the scalar writes of
its first block: inferred.
"""


def cycles_of(call: str) -> float:
    """Cycles of a repeat of a call such as ``"Add float"``.

    Raises
    ------
    KeyError
        For a call without a published rate.
    """
    name, _, dtype = call.partition(" ")
    return CALLS[name][0 if dtype == "float" else 1]


def table() -> dict[str, Rate]:
    """Every rate by name."""
    named = {"clock": CLOCK, "groups": GROUPS, "vector cores": VECTORS, "cube": CUBE, "MTE1": TO_L0}
    shared = {"L2 read": L2_READ, "L2 write": L2_WRITE, "HBM": HBM, "vector barrier": BARRIER}
    return {**named, **SUSTAINED, **{f"{name}, peak": rate for name, rate in PEAK.items()}, **shared}
