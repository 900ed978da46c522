"""What README.md shows of the stored speed run."""

from __future__ import annotations

from pasa.eval.kit.stored import stored, table
from pasa.eval.kit.tables import number, short
from pasa.eval.speed import report
from pasa.eval.speed.cases import DATA
from pasa.eval.speed.implementations import CUDNN, FLASH, PAGES


def speed() -> str:
    """Our default and portable kernels beside torch's attention, unbiased data and many rows."""
    result = stored("speed")
    rows = []
    for case in result["cases"]:
        if case["decode"]:
            continue
        for how in report.ways(result, case["name"]):
            own = report.lines(result, case["name"], how)
            ours, portable, peer = (own.get(name, {}) for name in ("pasa", "pasa-portable", CUDNN))
            rows.append(
                [
                    report.label(case["name"], how),
                    case["shape"],
                    *(report.milliseconds(each) for each in (peer, ours)),
                    number(ours.get("tflops"), ".0f"),
                    *(report.cell(ours, field) for field in ("to_cudnn", "to_flash")),
                    report.cell(portable, "to_cudnn"),
                    *(short(each["rmse"]) if "rmse" in each else "-" for each in (peer, ours)),
                ]
            )
    header = ["case", "shape", "cuDNN ms", "ours ms", "TFLOPS", "x cuDNN", "x flash", "portable x cuDNN", "RMSE cuDNN"]
    bias = "; ".join(f"+{name}: {what}" for name, what in DATA.items() if name != "randn")
    names = f"{bias}; portable: our kernels without the one for Hopper"
    return f"{report.METHOD} {names}.\n\n{table([*header, 'RMSE ours'], rows)}\n\n{report.origin(result)}"


def decode() -> str:
    """Decoding, over the time of reading K and V once."""
    found = report.decode_table(stored("speed"))
    columns = [i for i, name in enumerate(found.header) if name in ("case", "pasa", CUDNN, FLASH)]
    rows = [[row[i] for i in columns] for row in found.rows]
    beside = report.reading_table(stored("speed"))
    ratios = ", ".join(f"{row[0]} {row[2]} µs ({row[3]})" for row in beside.rows)
    alone = f"A kernel that only reads K and V, and our time over its time: {ratios}. {beside.note}"
    said = f"{found.title} (1 is the floor: {found.note[0].lower()}{found.note[1:-1]})."
    return f"{said}\n\n{table([found.header[i] for i in columns], rows)}\n\n{alone}\n\n{_decoding_with_bias()}"


def paged() -> str:
    """Decoding from pages beside that of contiguous keys, in microseconds."""
    result = stored("paged")
    names = {"pasa": "contiguous", **{f"pasa-paged-{n}": f"pages of {n}" for n in PAGES}, CUDNN: "cuDNN, contiguous"}
    rows = []
    for case in result["cases"]:
        found = report.lines(result, case["name"], "graph")
        rows.append([case["name"], case["shape"], *(f"{1e3 * found[name]['median_ms']:.1f}" for name in names)])
    data = "; ".join(f"+{name}: {what}" for name, what in DATA.items() if name != "randn")
    said = f"Microseconds of a call in a CUDA graph. Pages are in random order, with anchors. {data}."
    return f"{said}\n\n{table(['case', 'shape', *names.values()], rows)}\n\n{report.origin(result)}"


def _decoding_with_bias() -> str:
    """How much longer it takes where keys share a bias."""
    result, ratios = stored("speed"), []
    for case in result["cases"]:
        if case["decode"] and case["data"] != "randn":
            own, plain = (
                report.lines(result, name, "graph")["pasa"]["median_ms"]
                for name in (case["name"], case["name"].partition("+")[0])
            )
            ratios.append(f"{case['name']} {own / plain:.1f}")
    return f"Times as long as without the bias, in a CUDA graph: {', '.join(ratios)}."
