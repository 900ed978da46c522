"""Tables and the figure of the NPU model. Every number is a model's, but for the published measurements beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pasa.eval.kit.device import origin
from pasa.eval.kit.stored import pick
from pasa.eval.kit.tables import Column, Table, percent
from pasa.eval.npu import roofline as model
from pasa.eval.npu.calibration import worst
from pasa.eval.npu.shares import LANGUAGE, NORMAL

Record = dict[str, Any]
MODEL = "Model, not measured."
VECTOR_PARTS = ("row reductions", "barriers")  # that the table of engines shows beside the whole
LEAST_CHANGE = 0.005  # of a ratio: rates that change no ratio by as much share a line of the sensitivity table
PUBLISHED = ("pto, long", "torch_npu")  # series of full attention on all cores, drawn over the number of keys
LAZY = ("fp32 lazy", "fp32 lazy, shared keys")
DATA = ("exact", "exact, anchors", NORMAL, LANGUAGE, "exact, qwen-like, 180 deg")
CURVES = "paper-"  # cases drawn over the number of keys: the paper's heads and head dimension at greater lengths


def report(result: Record) -> list[Table | str]:
    """Return the tables and paragraphs of the terminal."""
    tables = [range_table(result), decoding_table(result), series_table(result), sensitivity_table(result)]
    tables.append(tile_table(result, 128))
    return [*tables, share_table(result), case_table(result), claim(result), origin(result)]


def appendix(result: Record) -> list[Table]:
    """Return the tables that the Markdown file alone holds."""
    return [
        prefill_table(result),
        point_table(result),
        tile_table(result, 64),
        rounding_table(result),
        *input_tables(result),
    ]


def shown(result: Record) -> list[str]:
    """Return the allocations, the exact one on some data of those in the table of shares."""
    flows = ["fp32", *LAZY, "partial", "paper", "paper-fp16", "exact before"]
    return [*flows, *(name for name in result["shares"] if name in DATA)]


def range_table(result: Record) -> Table:
    """Return the ratio to the flow with FP32 scores, the highest rate and the bound, over all cases."""
    rows = []
    for name in shown(result):
        chosen = pick(result["records"], allocation=name)
        best = max(each["tflops"] for each in chosen)
        bounds = ", ".join(sorted({each["bound"] for each in chosen}))
        share = percent(best / result["peak_tflops"])
        spans = [_span(chosen, ratio) for ratio in ("lazy", "overlap", "none")]
        rows.append([name, *spans, f"{best:.0f}", share, bounds])
    note = (
        f"{MODEL} Time of fp32 lazy and of fp32 over that of the allocation, lowest to highest of "
        f"{len(result['cases'])} cases, with perfect overlap of the engines, and for fp32 with none. The most TFLOPS "
        f"of a case, their share of the cube's peak ({result['peak_tflops']:.0f} TFLOPS), and what bounds, are with "
        f"perfect overlap."
    )
    header = ["allocation", "of fp32 lazy", "of fp32", "without overlap", "TFLOPS", "of the peak", "bound by"]
    return Table("Against FP32 scores", header, rows, note)


def decoding_table(result: Record) -> Table:
    """Return what bounds decoding, how much of its time reads K and V, and its time beside the kernel of prefill."""
    rows = []
    for each in result["decode_records"]:
        keys = "in pages" if each["slots"] else "in a row"
        engines = ", ".join(f"{name} {us:.0f}" for name, us in each["engines_us"].items())
        cells = [f"{each['us']:.0f}", each["bound"], percent(each["reading"]), f"{each['ratio']:.1f}", engines]
        rows.append([each["case"], each["shape"], keys, each["kernel"], *cells])
    note = (
        f"{MODEL} `prefill`: the kernel of prefill, after the pass that shifts the keys, and after pages were gathered."
        " Reading K, V: the time in which HBM gives them once, over the whole time, with launches. Ratio: times as fast"
        " as `prefill`. us of the slowest engines with perfect overlap, in the attention kernel alone. Bytes are"
        " counted and not copies, so pages of any size take as long."
    )
    header = ["case", "shape", "keys", "kernel", "us", "bound by", "reading K, V", "ratio", "engines, us"]
    return Table("Decoding", header, rows, note)


def prefill_table(result: Record) -> Table:
    """Return what bounds the kernel of prefill, as it was and as it is."""
    rows = []
    for case in result["cases"]:
        for name in ("exact before", "exact"):
            (each,) = pick(result["records"], case=case["name"], allocation=name)
            (before,) = pick(result["records"], case=case["name"], allocation="exact before")
            share = percent(each["tflops"] / result["peak_tflops"])
            ratio = f"{before['overlap_ms'] / each['overlap_ms']:.2f}"
            rows.append([case["name"], case["shape"], name, f"{each['overlap_ms']:.3g}", each["bound"], share, ratio])
    note = f"{MODEL} Share of the cube's peak, and times as fast as the kernel before, with perfect overlap."
    return Table("Prefill", ["case", "shape", "kernel", "ms", "bound by", "of the peak", "ratio"], rows, note)


def _span(records: Sequence[Record], overlap: str) -> str:
    ratios = [each[f"ratio_{overlap}"] for each in records]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def series_table(result: Record) -> Table:
    """Return how far the model is from each series of published measurements."""
    rows = []
    for name in dict.fromkeys(each["series"] for each in result["calibration"]):
        chosen = pick(result["calibration"], series=name)
        residuals = [each["residual"] for each in chosen]
        mean = math.sqrt(sum(math.log1p(each) ** 2 for each in residuals) / len(residuals))
        span = f"{_signed(min(residuals))} to {_signed(max(residuals))}"
        fitted = "yes" if chosen[0]["fitted"] else "no"
        rows.append([name, chosen[0]["device"], str(len(chosen)), fitted, percent(mean), span])
    launch, efficiency = (result["rates"][name]["value"] for name in ("launch", "efficiency"))
    limit = percent(worst(result["calibration"]))
    note = (
        f"Modelled time over measured time, less 1: root mean square (of logarithms), and lowest to highest. Two "
        f"rates are fitted: every engine runs at {efficiency:.3f} of its documented rate, and a kernel takes "
        f"{1e6 * launch:.1f} us besides. The largest residual of a fitted point is {limit}."
    )
    return Table("Calibration", ["published", "chip", "points", "fitted", "rms", "residuals"], rows, note)


def _signed(share: float) -> str:
    return f"{100 * share:+.0f} %"


def point_table(result: Record) -> Table:
    """Return every published point beside the model."""
    columns: dict[str, Column] = {
        "published": "series",
        "queries x keys, or size": "point",
        "us": ("us", ".4g"),
        "modelled us": ("modelled_us", ".4g"),
        "TFLOPS": ("tflops", ".4g"),
        "modelled TFLOPS": ("modelled_tflops", ".4g"),
        "residual": lambda each: _signed(each["residual"]),
    }
    data = result["measurements"]
    series = [each for kind in ("attention", "products", "shares") for each in data[kind]]
    sources = " ".join(f"{each['name']}: {each['what']} ({data['sources'][each['source']]})." for each in series)
    left_out = " ".join(f"Left out: {each}." for each in data["left out"])
    return Table.of("Published measurements", result["calibration"], columns, f"{sources} {left_out}")


def sensitivity_table(result: Record) -> Table:
    """Return the ratios to FP32 scores where one rate is 30 % lower or higher."""
    names = [name for name in shown(result) if name != "fp32 lazy"]
    base = [_span(pick(result["records"], allocation=name), "lazy") for name in names]
    rows, without_effect = [["as calibrated", *base]], []
    for rate in dict.fromkeys(each["rate"] for each in result["sensitivity"]):
        lines, largest = [], 0.0
        for factor in dict.fromkeys(each["factor"] for each in result["sensitivity"]):
            changed = [pick(result["sensitivity"], rate=rate, factor=factor, allocation=name)[0] for name in names]
            cells = [f"{each['lowest_to_lazy']:.2f} to {each['highest_to_lazy']:.2f}" for each in changed]
            lines.append([f"{rate} x {factor:g}", *cells])
            largest = max([largest, *(_change(result, each) for each in changed)])
        if largest < LEAST_CHANGE:
            without_effect.append(rate)
        else:
            rows += lines
    note = (
        f"{MODEL} Times as fast as fp32 lazy, lowest to highest of {len(result['cases'])} cases, one rate changed and "
        f"the others kept; `vector barrier` and `launch` are times. No effect: {', '.join(without_effect)}."
    )
    return Table("Sensitivity", ["rate", *names], rows, note)


def _change(result: Record, changed: Record) -> float:
    """Return how far a changed rate moves the ends of an allocation's ratios."""
    ratios: list[float] = [each["ratio_lazy"] for each in pick(result["records"], allocation=changed["allocation"])]
    lowest, highest = float(changed["lowest_to_lazy"]), float(changed["highest_to_lazy"])
    return max(abs(lowest - min(ratios)), abs(highest - max(ratios)))


def case_table(result: Record) -> Table:
    """Return ratio and rate of each case."""
    rows = []
    for case in result["cases"]:
        chosen = {each["allocation"]: each for each in pick(result["records"], case=case["name"])}
        cells = [
            f"{each['ratio_lazy']:.2f} / {each['ratio_overlap']:.2f} ({each['tflops']:.0f})"
            for each in (chosen[name] for name in shown(result))
        ]
        rows.append([case["name"], case["shape"], f"{chosen['fp32']['overlap_ms']:.3g}", *cells])
    note = f"{MODEL} Times as fast as fp32 lazy / as fp32 (TFLOPS), with perfect overlap. The pass over K is included."
    return Table("Cases", ["case", "shape", "fp32 ms", *shown(result)], rows, note)


def tile_table(result: Record, dim: int) -> Table:
    """Return the time of each engine per score tile."""
    engines = [name for name in (*model.PIPES, *model.SHARED) if name != "HBM"]
    rows = []
    for tile in pick(result["tiles"], dim=dim):
        if tile["allocation"] in shown(result):
            slowest, longest = model.bound(tile["ns"])
            ns = [*(tile["ns"][name] for name in engines), *(tile["vector_ns"][name] for name in VECTOR_PARTS)]
            serial = sum(tile["ns"][name] for name in model.PIPES)
            rows.append([tile["allocation"], *(f"{x:.0f}" for x in ns), slowest, f"{longest:.0f}", f"{serial:.0f}"])
    note = (
        f"{MODEL} ns for 128 queries against 128 keys on one cube core and its two vector cores, D = {dim}, kernels as "
        "written. Row reductions and the gaps after barriers are parts of vector."
    )
    header = ["allocation", *engines, *VECTOR_PARTS, "bound by", "overlap", "none"]
    return Table(f"Engines per tile, D = {dim}", header, rows, note)


def share_table(result: Record) -> Table:
    """Return the cost of rescued and flushed tiles for the exact recovery, on the paper's shape and a longer one."""
    rows = []
    for data, tiles in result["shares"].items():
        row = [data, *(percent(tiles[share]) for share in ("guesses", "rescued", "flushed", "anchors"))]
        for case in ("paper", "paper-16k"):
            (chosen,) = pick(result["records"], case=case, allocation=data)
            (before,) = pick(result["records"], case=case, allocation="exact before")
            times = before["overlap_ms"] / chosen["overlap_ms"]
            row += [f"{times:.2f}", f"{chosen['ratio_lazy']:.2f}", f"{chosen['tflops']:.0f}"]
        rows.append(row)
    note = (
        f"{MODEL} Times as fast as the exact recovery before, without rescued tiles, and as fp32 lazy, and TFLOPS: on "
        f"(1, 16, 1280, 128) and (1, 16, 16384, 128), with perfect overlap. Shares: of tiles of 64 queries, on the "
        f"reference: kept in FP32 of the first two blocks and of the others, flushed of the others; anchors: of blocks "
        f"of keys that need references of their own."
    )
    header = ["data", "first in FP32", "in FP32", "flushed", "anchors", *("of before", "of fp32 lazy", "TFLOPS") * 2]
    return Table("Exact recovery by its tiles", header, rows, note)


def rounding_table(result: Record) -> Table:
    """Return what unbiased rounding adds to the vector work of a task."""
    rows = []
    for each in result["roundings"]:
        base, *longer = each["vector_us"].values()
        cells = [f"{base:.1f}", *(f"{us:.1f} ({percent(us / base - 1)})" for us in longer)]
        rows.append([each["kernel"], str(each["dim"]), str(each["keys"]), *cells])
    note = f"{MODEL} us of a vector core for two query tiles of a head, and what they are longer."
    return Table("Unbiased rounding", ["kernel", "D", "keys", *result["roundings"][0]["vector_us"]], rows, note)


def input_tables(result: Record) -> list[Table]:
    """Return how well lines fit the counts, the substitutions, and the rates with their sources."""
    residuals = result["fit_residuals"] | result["decode_residuals"]
    fits = [[name, percent(value)] for name, value in residuals.items()]
    lines = [
        [name, line["what"], ", ".join(f"{key} {value:+g}" for key, value in line["change"].items())]
        for name, of_name in result["substitutions"].items()
        for line in of_name
    ]
    rates = [
        [name, f"{rate['value']:.6g}", rate["unit"], rate["source"], rate["inferred"] or "-"]
        for name, rate in result["rates"].items()
    ]
    cycles = result["cycles_per_repeat"]
    calls = "; ".join(f"{name} {fp32:g}, {fp16:g}" for name, (fp32, fp16) in cycles["fp32, fp16"].items())
    of_fits = "Of any engine's count at any number of tiles, over that count."
    of_lines = "Per score tile and group, D = 128: repeats of vector calls, bytes of queues, barriers."
    of_rates = f"Cycles of a repeat of 256 bytes in FP32, FP16: {calls}. From {cycles['source']}."
    return [
        Table("Fits", ["kernel", "largest residual"], fits, of_fits),
        Table("Substitutions", ["allocation", "what", "change"], lines, of_lines),
        Table("Rates", ["rate", "value", "unit", "source", "inferred"], rates, of_rates),
    ]


def claim(result: Record) -> str:
    """Return the published figures beside the model's."""
    claims = result["claims"]
    low, high = claims["speedup"]
    chosen = pick(result["records"], allocation="paper-fp16")
    return (
        f"{MODEL} Published for PASA: {low} to {high} times as fast as a vendor attention, up to "
        f"{claims['tflops']:.0f} TFLOPS ({claims['source']}). The source names neither its chip nor the precision of "
        f"its baseline. Modelled for paper-fp16: {_span(chosen, 'overlap')} times as fast as fp32, up to "
        f"{max(each['tflops'] for each in chosen):.0f} TFLOPS."
    )


def figures(result: Record, folder: Path) -> list[Path]:
    """Draw the published measurements: against the model's times, and beside the modelled allocations."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 4.6), layout="constrained")
    times, shares = figure.subplots(1, 2)
    for name in dict.fromkeys(each["series"] for each in result["calibration"] if each["us"]):
        chosen = pick(result["calibration"], series=name)
        label = name if chosen[0]["fitted"] else f"{name} (not fitted)"
        us = [each["us"] for each in chosen], [each["modelled_us"] for each in chosen]
        times.plot(*us, marker="o" if chosen[0]["fitted"] else "x", linestyle="", markersize=5, label=label)
    ends = [10.0, 5000.0]
    times.plot(ends, ends, color="black", linewidth=0.8, linestyle="--")
    times.set(xscale="log", yscale="log", xlabel="measured us", ylabel="modelled us", title="Calibration")
    times.legend(fontsize=8)

    drawn = [each for each in result["cases"] if each["name"].startswith(CURVES)]
    for name in shown(result):
        tflops = [pick(result["records"], case=each["name"], allocation=name)[0]["tflops"] for each in drawn]
        heights = [100 * each / result["peak_tflops"] for each in tflops]
        shares.plot([each["keys"] for each in drawn], heights, label=f"{name}, modelled (16 heads)")
    for name, marker in zip(PUBLISHED, "o^", strict=True):
        chosen = pick(result["calibration"], series=name)
        heights = [100 * each["tflops"] / each["peak_tflops"] for each in chosen]
        keys = [int(each["point"].split(" x ")[1]) for each in chosen]
        shares.plot(keys, heights, marker=marker, linestyle="", color="black", label=f"{name}, measured (one head)")
        if chosen[0]["fitted"]:
            heights = [100 * each["modelled_tflops"] / each["peak_tflops"] for each in chosen]
            shares.plot(keys, heights, color="black", linewidth=0.8, linestyle="--", label=f"{name}, modelled")
    (amla,) = pick(result["calibration"], series="AMLA")
    height = 100 * amla["tflops"] / amla["peak_tflops"]
    shares.axhline(height, color="black", linewidth=0.8, linestyle=":", label="AMLA, measured (MLA decoding)")
    shares.set_xscale("log", base=2)
    shares.set(xlabel="keys", ylabel="% of the cube's peak", ylim=(0, 130), title="Full attention, D = 128")
    shares.set_yticks(range(0, 101, 20))
    shares.legend(fontsize=7, ncols=2, loc="upper left")
    path = folder / "npu_model.png"
    figure.savefig(path, dpi=110)
    return [path]
