"""Tables of the model. Every number is a model's, not a measurement."""

from __future__ import annotations

from typing import Any

from pasa.eval.kit.tables import Table, percent
from pasa.eval.npu.precision_variants import exact_name
from pasa.eval.npu.roofline import PIPES, SHARED, bound

Record = dict[str, Any]
MODEL = "Model, not measured."
PLAIN = ("fp32", "partial", "paper", "paper-fp16", "exact 0 %")


def report(result: Record) -> list[Table | str]:
    """Return the tables and paragraphs of the terminal."""
    tables = [range_table(result), tile_table(result, 128), share_table(result), case_table(result, "as written")]
    return [*tables, claim(result), origin(result)]


def appendix(result: Record) -> list[Table]:
    """Return the tables that the Markdown file alone holds."""
    others = [case_table(result, scenario) for scenario in result["scenarios"] if scenario != "as written"]
    inputs = [rounding_table(result), fit_table(result), line_table(result), rate_table(result)]
    return [tile_table(result, 64), *others, *inputs]


def range_table(result: Record) -> Table:
    """Return the ratio to the flow with FP32 scores and the highest rate, over all cases, by scenario."""
    rows = [[name, *(_range(result, each, name) for each in result["scenarios"])] for name in shown(result)]
    what = "; ".join(f"{name}: {text}" for name, text in result["scenarios"].items())
    note = (
        f"{MODEL} Time of fp32 over that of the allocation with perfect overlap, lowest to highest of "
        f"{len(result['cases'])} cases; in brackets the most TFLOPS of a case (the cube's peak is "
        f"{result['peak_tflops']:.0f}). {what}."
    )
    return Table("Against FP32 scores", ["allocation", *result["scenarios"]], rows, note)


def _range(result: Record, scenario: str, name: str) -> str:
    chosen = select(result, scenario=scenario, allocation=name)
    low, high = (pick(each["ratio_overlap"] for each in chosen) for pick in (min, max))
    return f"{low:.2f} to {high:.2f} ({max(each['tflops'] for each in chosen):.0f})"


def shown(result: Record) -> list[str]:
    """Return the allocations, the exact one without rescued tiles and with the share of a language model's shape."""
    return [*PLAIN, exact_name(result["shares"]["qwen-like, 180 deg"])]


def select(result: Record, **fields: str) -> list[Record]:
    """Return the predictions that have these values."""
    return [each for each in result["records"] if all(each[key] == value for key, value in fields.items())]


def case_table(result: Record, scenario: str) -> Table:
    """Return ratio and rate of each case."""
    rows = []
    for case in result["cases"]:
        chosen = {each["allocation"]: each for each in select(result, case=case["name"], scenario=scenario)}
        cells = [
            f"{chosen[n]['ratio_overlap']:.2f} / {chosen[n]['ratio_none']:.2f} ({chosen[n]['tflops']:.0f})"
            for n in shown(result)
        ]
        rows.append([case["name"], case["shape"], f"{chosen['fp32']['overlap_ms']:.3g}", *cells])
    note = (
        f"{MODEL} Times as fast as fp32 with perfect overlap / with none (TFLOPS with perfect overlap). "
        "The pass over K is included."
    )
    return Table(f"Cases, {scenario}", ["case", "shape", "fp32 ms", *shown(result)], rows, note)


def tile_table(result: Record, dim: int) -> Table:
    """Return the time of each engine per score tile."""
    engines = [name for name in (*PIPES, *SHARED) if name != "HBM"]
    rows = []
    for each in result["tiles"]:
        if each["dim"] == dim and each["allocation"] in shown(result):
            slowest, longest = bound(each["ns"])
            ns = [*(each["ns"][e] for e in engines), *(each["vector_ns"][p] for p in ("row reductions", "barriers"))]
            serial = sum(each["ns"][name] for name in PIPES)
            rows.append([each["allocation"], *(f"{x:.0f}" for x in ns), slowest, f"{longest:.0f}", f"{serial:.0f}"])
    note = (
        f"{MODEL} ns for 128 queries against 128 keys on one cube core and its two vector cores, D = {dim}, kernels as "
        "written. Row reductions and the gaps after barriers are parts of vector."
    )
    header = ["allocation", *engines, "row reductions", "barriers", "bound by", "overlap", "none"]
    return Table(f"Engines per tile, D = {dim}", header, rows, note)


def share_table(result: Record) -> Table:
    """Return the cost of tiles in FP32 for the exact recovery, on the paper's shape."""
    rows = []
    for data, share in [*result["shares"].items(), ("every tile", 1.0)]:
        chosen = select(result, case="paper", allocation=exact_name(share))
        cells = [f"{each['ratio_overlap']:.2f} ({each['tflops']:.0f})" for each in chosen]
        rows.append([data, percent(share), *cells])
    note = f"{MODEL} Times as fast as fp32 on (1, 16, 1280, 128), and TFLOPS. Shares: stored RMSE runs."
    return Table("Exact recovery by its tiles in FP32", ["data", "tiles in FP32", *result["scenarios"]], rows, note)


def rounding_table(result: Record) -> Table:
    """Return what unbiased rounding adds to the vector work of a task."""
    rows = []
    for each in result["roundings"]:
        base = each["vector_us"]["to nearest"]
        cells = [
            f"{us:.1f} ({percent(us / base - 1)})" if us != base else f"{us:.1f}" for us in each["vector_us"].values()
        ]
        rows.append([each["kernel"], str(each["dim"]), str(each["keys"]), *cells])
    note = f"{MODEL} us of a vector core for two query tiles of a head, and what they are longer."
    return Table("Unbiased rounding", ["kernel", "D", "keys", *result["roundings"][0]["vector_us"]], rows, note)


def rate_table(result: Record) -> Table:
    """Return the rates and where they come from."""
    rows = [
        [name, f"{rate['value']:.6g}", rate["unit"], rate["source"], rate["inferred"] or "-"]
        for name, rate in result["rates"].items()
    ]
    cycles = result["cycles_per_repeat"]
    calls = "; ".join(f"{name} {fp32:g}, {fp16:g}" for name, (fp32, fp16) in cycles["fp32, fp16"].items())
    note = f"Cycles of a repeat of 256 bytes in FP32, FP16: {calls}. From {cycles['source']}."
    return Table("Rates", ["rate", "value", "unit", "source", "inferred"], rows, note)


def line_table(result: Record) -> Table:
    """Return the substitutions, a line each."""
    rows = [
        [name, line["what"], ", ".join(f"{key} {value:+g}" for key, value in line["change"].items())]
        for name, lines in result["substitutions"].items()
        for line in lines
    ]
    note = "Per score tile and group, D = 128: repeats of vector calls, bytes of queues, barriers."
    return Table("Substitutions", ["allocation", "what", "change"], rows, note)


def fit_table(result: Record) -> Table:
    """Return how well a line fits the counts."""
    rows = [[name, percent(value)] for name, value in result["fit_residuals"].items()]
    note = "Of any engine's count at any number of tiles, over that count."
    return Table("Fits", ["kernel", "largest residual"], rows, note)


def claim(result: Record) -> str:
    """Return the published figures beside the model's."""
    claims = result["claims"]
    low, high = claims["speedup"]
    parts = [f"{scenario} {_range(result, scenario, 'paper-fp16')}" for scenario in result["scenarios"]]
    return (
        f"{MODEL} Published for PASA: {low} to {high} times a vendor attention, up to {claims['tflops']:.0f} TFLOPS "
        f"({claims['source']}; its chip and its baseline's precision are not named). The model's paper-fp16 over fp32: "
        f"{'; '.join(parts)}."
    )


def origin(result: Record) -> str:
    """Return where the numbers come from, in one line."""
    machine = result["environment"]
    return (
        f"Counts of the CPU twin, {machine['processor']}; pasa {machine['pasa']}, commit "
        f"{machine['commit'] or 'unknown'}; {result['duration_s']} s. {result['note']}."
    )
