"""The parts of README.md that come from the stored speed runs."""

from __future__ import annotations

from pasa.eval.kit.stored import stored
from pasa.eval.kit.tables import markdown, number, short
from pasa.eval.speed import report
from pasa.eval.speed.cases import DATA
from pasa.eval.speed.implementations import CUDNN, FLASH, PAGES

BIASES = "; ".join(f"+{name}: {what}" for name, what in DATA.items() if name != "randn")


def speed() -> str:
    """Return our default and portable kernels beside torch's attention, on many rows."""
    result = stored("speed")
    shapes = {case["name"]: case["shape"] for case in result["cases"]}
    rows = []
    for case, how in report.places(result, decode=False):
        by_name = report.lines(result, case, how)
        ours, portable, peer = (by_name.get(name, {}) for name in ("pasa", "pasa-portable", CUDNN))
        times = [report.milliseconds(peer), report.milliseconds(ours), number(ours.get("tflops"), ".0f")]
        ratios = [report.cell(ours, "to_cudnn"), report.cell(ours, "to_flash"), report.cell(portable, "to_cudnn")]
        errors = [short(each["rmse"]) if "rmse" in each else "-" for each in (peer, ours)]
        rows.append([report.label(case, how), shapes[case], *times, *ratios, *errors])
    header = ["case", "shape", "cuDNN ms", "ours ms", "TFLOPS", "x cuDNN", "x flash", "portable x cuDNN", "RMSE cuDNN"]
    names = f"{BIASES}; portable: our kernels without the one for Hopper"
    table = markdown([*header, "RMSE ours"], rows)
    return f"{report.METHOD} {names}.\n\n{table}\n\n{report.origin(result)}"


def decode() -> str:
    """Return decoding over the time of reading K and V once, beside reading alone, and with a bias."""
    result = stored("speed")
    table = report.decode_table(result)
    columns = [i for i, name in enumerate(table.header) if name in ("case", "pasa", CUDNN, FLASH)]
    rows = [[row[i] for i in columns] for row in table.rows]
    beside = report.reading_table(result)
    ratios = ", ".join(f"{row[0]} {row[2]} µs ({row[3]})" for row in beside.rows)
    alone = f"A kernel that only reads K and V, and our time over its time: {ratios}. {beside.note}"
    title = f"{table.title} (1 is the floor: {table.note[0].lower()}{table.note[1:-1]})."
    slower = []
    for case, how in report.places(result, decode=True, biased=True):
        if how == "graph":
            biased, plain = (report.lines(result, name, how)["pasa"]["median_ms"] for name in (case, report.base(case)))
            slower.append(f"{case} {biased / plain:.1f}")
    added = f"Times as long as without the bias, in a CUDA graph: {', '.join(slower)}."
    return "\n\n".join([title, markdown([table.header[i] for i in columns], rows), alone, added])


def paged() -> str:
    """Return decoding from pages beside that of contiguous keys, in microseconds."""
    result = stored("paged")
    names = {"pasa": "contiguous", **{f"pasa-paged-{n}": f"pages of {n}" for n in PAGES}, CUDNN: "cuDNN, contiguous"}
    rows = []
    for case in result["cases"]:
        by_name = report.lines(result, case["name"], "graph")
        rows.append([case["name"], case["shape"], *(f"{1e3 * by_name[name]['median_ms']:.1f}" for name in names)])
    method = f"Microseconds of a call in a CUDA graph. Pages are in random order, with anchors. {BIASES}."
    return f"{method}\n\n{markdown(['case', 'shape', *names.values()], rows)}\n\n{report.origin(result)}"
