"""The command `pasa bench choice`, which makes the table of measured choices, and the runs from which it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from pasa.eval.kit import output
from pasa.eval.kit.cases_file import CasesFile
from pasa.eval.kit.device import describe
from pasa.eval.kit.experiment import Experiment
from pasa.eval.kit.options import Minutes, at_least
from pasa.eval.kit.stored import pick
from pasa.eval.kit.tables import Table
from pasa.eval.kit.timing import CudaClock, copy_bandwidth
from pasa.eval.speed import report as speed_report
from pasa.eval.speed.cases import SpeedCase
from pasa.eval.speed.choice import BACKENDS, WAYS, measurements, shape_of
from pasa.eval.speed.implementations import CUDNN, select_implementations
from pasa.eval.speed.random_cases import draw_case
from pasa.eval.speed.run import measure_case, summarise
from pasa.ops import measured
from pasa.ops.measured import OTHER, PREFERRED

# Of each kind of `pasa.ops.measured.kind_of_dim`, one.
DIMS = (40, 64, 80, 128, 192, 256)
HEADS, TOKENS = (8, 64), (16, 32, 128, 512, 2048, 8192)
MOST_HEADS = 512  # for few tokens
KINDS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {},
    "padded": {"causal": True, "padded": True},
    "full-padded": {"padded": True},
}
PROMPTS, CROSSES = ("causal", "full", "padded"), ("full", "full-padded")  # kinds with as many rows as keys, and others
# Batch, query heads, key heads, rows and keys of decoding, and whether sequences are padded.
DECODING = (
    *((batch, 32, 8, 1, keys, False) for batch in (1, 16) for keys in (16, 64, 256, 2048, 16384)),
    *((4, 32, 8, 8, keys, False) for keys in (512, 8192)),
    *((8, 32, 8, 1, keys, True) for keys in (512, 8192)),
    *((4, heads, kv_heads, 16, keys, False) for heads, kv_heads in ((32, 2), (16, 16)) for keys in (64, 1024, 16384)),
    (16, 16, 16, 1, 2048, False),
    *((1, 8, 1, 1, keys, False) for keys in (1024, 16384)),
    *((2, 4, 4, 8, keys, False) for keys in (1024, 16384)),
    *((batch, heads, heads, 1, 64, False) for batch, heads in ((1, 4), (32, 16))),
    (2, 16, 16, 16, 256, False),
    (16, 32, 1, 16, 8192, False),
    (64, 8, 1, 8, 1024, False),
    (1, 32, 4, 4, 4096, False),
    (8, 16, 16, 4, 512, False),
    (2, 32, 4, 8, 64, False),
    (1, 4, 4, 4, 64, False),
    (4, 16, 16, 8, 2048, True),
    (32, 32, 32, 1, 512, False),
    (16, 16, 2, 1, 512, False),
    (4, 8, 8, 1, 512, False),
    (8, 16, 1, 1, 4096, False),
    (8, 16, 16, 1, 64, True),
    (32, 4, 1, 1, 16, True),
    *((16, 32, 2, rows, keys, True) for rows, keys in ((8, 512), (16, 8192))),
)
DRAWN, SEED = 400, 1  # random shapes, and their seed: not that of the random cases whose run is stored
CASE_KEYS, RECORD_KEYS = {"name", "data", "shape"}, {"case", "implementation", "how", "status"}  # of a run
CROSS = (16384, 4), (2048, 16), (512, 1), (512, 64), (256, 8192)  # rows and keys


def _prefill(kind: str, heads: int, rows: int, keys: int, dim: int) -> SpeedCase:
    """Return a case with as many batch entries of up to 16 heads as make up `heads`, at least two of a padded batch."""
    batch = max(heads // 16, 2 if "padded" in kind else 1)
    tokens = f"{rows}" if rows == keys else f"{rows}x{keys}"
    sizes = batch, heads // batch, heads // batch, rows, keys, dim
    return SpeedCase(f"{kind}-{heads}x{tokens}-d{dim}", *sizes, graphed=True, **KINDS[kind])


def _decoding(batch: int, heads: int, kv_heads: int, rows: int, keys: int, padded: bool, dim: int) -> SpeedCase:
    name = f"decode-{batch}x{heads}x{rows}x{keys}" + "-padded" * padded
    sizes = batch, heads, kv_heads, rows, keys, dim
    return SpeedCase(f"{name}-d{dim}", *sizes, decode=True, graphed=True, padded=padded)


PLAIN = (
    *(
        _prefill(kind, heads, tokens, tokens, dim)
        for kind in PROMPTS
        for dim in DIMS
        for heads, tokens in (*product(HEADS, TOKENS), *((MOST_HEADS, each) for each in TOKENS[:3]))
    ),
    *(_prefill(kind, heads, *sizes, dim) for kind in CROSSES for dim in DIMS for heads in HEADS for sizes in CROSS),
    *(_decoding(*sizes, dim) for dim in DIMS for sizes in DECODING),
    *(replace(draw_case(SEED, index), data="randn") for index in range(DRAWN)),
)
# The time of our kernel for Hopper hardly depends on data. That of the others does.
BIASED = tuple(
    replace(case, name=f"{case.name}+channels", data="channels")
    for case in PLAIN
    if case.padded or case.decode or case.dim > 128
)
GRID = PLAIN + BIASED


def run_grid(
    rounds: Annotated[int, "Timed turns of each implementation."] = 3,
    minutes: Minutes = None,
    case: Annotated[list[str] | None, typer.Option(help="How names of cases begin, repeatable.")] = None,
    folder: Path | None = None,
    progress: output.Report = output.silent,
) -> dict[str, Any]:
    """Time backends `triton` and `sdpa` on the shapes of `pasa bench choice`; exit 1 if a slower one is chosen.

    Cases that are in `folder` are not run again. Without `case` all are run.
    """
    at_least(1, rounds=rounds)
    for start in case or ():
        if not any(each.name.startswith(start) for each in GRID):
            raise ValueError(f"no case of the grid begins with {start!r}, as decode-1x32x1x16-d40 does with decode-1x")
    clock = CudaClock()
    implementations = select_implementations([CUDNN, *BACKENDS])
    bandwidth = copy_bandwidth(clock)
    cases = {each.name: each for each in GRID if each.name.startswith(tuple(case or [""]))}
    kept = CasesFile(folder, {"rounds": rounds}, describe(clock.device))

    def measure(name: str) -> dict[str, Any]:
        return {"records": measure_case(cases[name], implementations, clock, bandwidth, rounds, split_up=False)[0]}

    with torch.inference_mode():
        done = kept.fill(list(cases), measure, minutes, progress)
    records = [record for each in done for record in each["records"]]
    measured_cases = [cases[name] for name in cases if name in kept.records]
    result = summarise(measured_cases, records, (), implementations, clock, bandwidth, rounds)
    if missing := len(cases) - len(measured_cases):
        failures = [f"{missing} of {len(cases)} cases are left", *result["gate"]["failures"]]
        result["gate"] = {"passed": False, "failures": failures}
    return result


def run_choice(
    run: Annotated[list[Path], typer.Option(help="JSON of a stored `pasa bench speed`, repeatable.", exists=True)],
    write: Annotated[bool, "Write the table that `pasa.attention` reads."] = False,
    progress: output.Report = output.silent,
) -> dict[str, Any]:
    """Show which backend serves which shapes faster, by stored runs; with --write, let `pasa.attention` follow it.

    The result has ``measurements``, and in ``to_measure`` the cases of the grid that no run speaks for.
    """
    found = measurements([_read_run(path) for path in run])
    if not found:
        both = " and ".join(BACKENDS)
        raise ValueError(f"{', '.join(map(str, run))}: no case has times of both {both}, so no backend can be chosen")
    if write:
        output.write_text(measured.FILE, measured.to_json(found))
    devices = sorted({each.capability for each in found})
    open_cases = {
        device: [case.name for case in GRID if measured.expected_gain(device, shape_of(case.described), found) is None]
        for device in devices
    }
    return {
        "measurements": [{**vars(each), "shape": vars(each.shape)} for each in found],
        "to_measure": open_cases,
        "written": str(measured.FILE) if write else None,
    }


def _read_run(path: Path) -> dict[str, Any]:
    run: dict[str, Any] = output.read_json(path)
    complete = isinstance(run, dict) and {"cases", "records", "environment"} <= run.keys()
    for name, needed in (("cases", CASE_KEYS), ("records", RECORD_KEYS)):
        complete = complete and isinstance(run[name], list) and all(needed <= _keys(each) for each in run[name])
    if not complete or run.get("experiment") not in ("speed", "grid"):
        raise ValueError(f"{path} holds no run of `pasa bench speed`: name the speed.json or grid.json of one")
    return run


def _keys(x: object) -> set[str]:
    """Return the keys of a dict, and none of anything else."""
    return set(x) if isinstance(x, dict) else set()


def report(result: dict[str, Any]) -> list[Table | str]:
    """Return the table, and what is still to be measured."""
    rows = []
    for each in result["measurements"]:
        shape, ratios = each["shape"], each["ratios"]
        size = f"{shape['heads']}/{shape['kv_heads']}, {shape['rows']} x {shape['keys']}, {shape['dim']}"
        kind = "causal" if shape["causal"] else "full" if shape["mask"] == "none" else f"{shape['mask']} mask"
        numbers = [f"{ratios[how]:.2f}" if how in ratios else "-" for how in WAYS]
        rows.append(
            [
                each["case"],
                each["capability"],
                f"({size}) {kind}",
                *numbers,
                *(measured.faster(each[how]) or "neither" for how in ("eager", "captured")),
            ]
        )
    header = ["case", "capability", "shape", *(f"{OTHER} / {PREFERRED}, {how}" for how in WAYS)]
    header += ["chosen eagerly", "chosen in a graph"]
    texts = [
        f"No run speaks for {len(names)} of {len(GRID)} cases of the grid on capability {device}: "
        f"`pasa bench speed --grid` measures them. For them, {PREFERRED} is chosen."
        for device, names in result["to_measure"].items()
        if names
    ]
    if result["written"]:
        texts.append(f"Written: {result['written']}")
    return [Table("Measured choices", header, rows), *texts]


def grid_table(result: dict[str, Any]) -> Table:
    """Return the speeds of both backends over kinds of cases of a stored grid, and which of them is chosen there."""
    names = tuple(BACKENDS)
    groups: dict[str, dict[tuple[str, bool], list[float]]] = {}
    chosen: dict[str, dict[str, list[str]]] = {}
    capability = result["environment"]["capability"]
    for case in result["cases"]:
        shape = shape_of(case)
        biased, label = case["data"] != "randn", _group(shape, drawn=case["name"].startswith(f"random-{SEED}-"))
        ratios = groups.setdefault(label, {})
        for each in pick(result["records"], case=case["name"], how="graph"):
            if each["implementation"] in names and each["to_cudnn"]:
                ratios.setdefault((each["implementation"], biased), []).append(each["to_cudnn"])
        plain = case["name"].removesuffix("+channels")
        chosen.setdefault(label, {})[plain] = [
            measured.chosen(capability, shape, captured) or PREFERRED for captured in (False, True)
        ]
    rows = []
    for label, ratios in groups.items():
        cells = [
            " / ".join(_range(ratios[name, b]) for b in (False, True) if (name, b) in ratios) or "-" for name in names
        ]
        for taken in zip(*chosen[label].values(), strict=True):
            cells.append(
                " and ".join(f"`{each}` in {taken.count(each)}" for each in BACKENDS.values() if each in taken)
            )
        rows.append([label, *cells])
    header = ["calls", "our kernels", f"`{OTHER}`", "chosen eagerly", "chosen in a graph"]
    note = (
        "Speed in a CUDA graph, as times that of cuDNN, on N(0, 1) / biased data, and the number of shapes. "
        "-: cuDNN does not serve them."
    )
    return Table("Speed by kind of call", header, rows, note)


def _group(shape: measured.Shape, *, drawn: bool) -> str:
    """Return the kind of a shape, with its sizes if they are not drawn."""
    dims = f"D {'up to' if shape.dim <= 128 else 'above'} 128"
    if drawn:
        padded = "left-padded " * (shape.mask != "none")
        kind = "prompts" if shape.rows == shape.keys else "decoding" if shape.decodes else "cross-attention"
        return f"{padded}{kind}, {dims}"
    if shape.decodes and shape.rows != shape.keys:
        return f"decoding, {'left-padded, ' if shape.mask != 'none' else ''}{dims}"
    if shape.rows != shape.keys:
        kind = f"cross-attention{'' if shape.mask == 'none' else ', left-padded'}"
        return f"{kind}, {dims}, {shape.rows:,} rows and {shape.keys:,} key{'s' * (shape.keys > 1)}"
    return f"{'causal or full' if shape.mask == 'none' else 'left-padded'}, {dims}, {shape.rows:,} tokens"


def _range(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


GRID_EXPERIMENT = Experiment(
    "grid", run_grid, speed_report.report, "Speed of our backends on a CUDA device", appendix=speed_report.appendix
)
EXPERIMENT = Experiment("choice", run_choice, report, "Backends by measurement")
