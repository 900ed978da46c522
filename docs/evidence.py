"""The questions that docs/evidence.md answers, a line each; every number is one of a stored run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pasa.eval.kit.stored import pick, stored
from pasa.eval.kit.tables import markdown, percent
from pasa.eval.speed.implementations import DEFAULT, GUARDED, UNGUARDED
from pasa.eval.speed.report import lines

Result = dict[str, Any]
Record = dict[str, Any]
GPU, CPU, EMULATED, MODELLED, NOT_RUN = "measured", "CPU", "emulated on a CPU", "modelled", "not run"
FEW, MANY, BIAS = 8192, 16384, 362  # tokens and bias of `pasa bench model`
LARGEST = 131072  # offset of `pasa eval ppl` that FP16 cannot hold
PAPER, QWEN = "paper", "1x28/4x8192x128"  # shapes of `pasa bench speed` and `pasa bench gradients`
GIB = 2**30


@dataclass(frozen=True)
class Line:
    """One question.

    `run` names the stored run, `answer` makes the answer of it, and `link` is a heading of docs/evidence.md or a file,
    as seen from there. `kind` says how the numbers were obtained: "measured" (on the GPU that the run names), "CPU"
    (models' arithmetic there), "emulated on a CPU", "modelled", "not run".
    """

    question: str
    run: str
    answer: Callable[[Result], str]
    kind: str
    link: str


def overview() -> str:
    """Return the table."""
    rows = []
    for line in LINES:
        result = stored(line.run)
        how = f"{line.kind}: {result['environment']['device']}" if line.kind == GPU else line.kind
        rows.append([line.question, line.answer(result), f"[{how}]({line.link})"])
    return markdown(["question", "answer", "how"], rows).replace("---:", "---")  # text, to the left


def _span(values: Iterable[float], form: str = ".2f") -> str:
    ordered = sorted(values)
    return f"{ordered[0]:{form}} to {ordered[-1]:{form}}"


def _to_fp32(result: Result, arithmetic: str) -> str:
    """Compare errors on the paper's cases with those of FP32 scores, where the output is finite."""
    ratios, broken = [], 0
    for case in result["cases"]:
        ours, fp32 = (
            pick(result["records"], case=case["name"], overflow="inf", arithmetic=a) for a in (arithmetic, "fp32")
        )
        if any(each["nonfinite_share"] for each in ours):
            broken += 1
        else:
            ratios.append(max(each["rmse"] for each in ours) / max(each["rmse"] for each in fp32))
    nan = f"NaN in {broken} of {len(result['cases'])} cases; " if broken else ""
    return f"{nan}{_span(ratios, '.3g')} times the RMSE of FP32 scores"


def _biased(result: Result) -> str:
    ratios = _span((each["pooled_to_fp32"] for each in result["ratios"]), ".2g")
    return f"{ratios} times the RMSE of FP32 scores and softmax"


def _backends(result: Result) -> str:
    """Compare the backend sdpa with torch's attention on the same FP16 tensors."""
    ratios = {row["case"]: row["to_fp16"]["sdpa"] for row in result["ratios"]}
    paper = _span((ratio for case, ratio in ratios.items() if "bias" not in case), ".3g")
    both, keys = (ratio for case, ratio in ratios.items() if "bias" in case)
    biased = f"if Q and K share a bias {both:.3g} times, if K alone has it {keys:.3g} times"
    return f"{paper} times the RMSE of torch's attention on FP16 tensors; {biased}"


def _layers(result: Result) -> str:
    said = []
    for model in dict.fromkeys(each["model"] for each in result["records"]):
        layers = pick(result["records"], model=model)
        columns, heads = (percent(sum(each[name] for each in layers) / len(layers)) for name in ("columns", "heads"))
        errors = _span((each["with"] / each["without"] for each in layers), ".3g")
        said.append(f"{model}: {columns} of K's columns, {heads} of its heads; {errors} times the RMSE without")
    return "; ".join(said)


def _hostile(result: Result) -> str:
    settings = {each["setting"] for each in result["records"]}
    calls, faults, outside = (sum(each[name] for each in result["records"]) for name in ("calls", "faults", "outside"))
    return f"{calls:,} calls, {len(settings)} settings: {faults:.0f} faults, {outside:.0f} outside the values"


def _side(result: Result, case: str, shift: str, sums: str = "stored") -> tuple[float, float]:
    """Return the share of the scores beyond FP16, and RMSE: worst seed."""
    selected = pick(result["records"], case=case, shift=shift, sums=sums)
    batch, heads, positions, _ = result["shape"]
    beyond, rmse = (max(each[field] for each in selected) for field in ("overflowed", "rmse"))
    return beyond / (batch * heads * positions**2), rmse


def _sides(result: Result) -> str:
    said = []
    for case, name in (("K", "bias in K"), ("Q", "in Q"), ("both", "in both")):
        shares = ", ".join(f"{shift} {percent(_side(result, case, shift)[0])}" for shift in ("none", "K", "Q", "both"))
        said.append(f"{name}: {shares}")
    return f"scores beyond FP16 by shift: {'; '.join(said)}"


def _fp16_sums(result: Result) -> str:
    rmse, once = (_side(result, "none", "none", sums)[1] for sums in ("fp16 sums", "stored"))
    beyond, stored_once = (_side(result, "K", "none", sums)[0] for sums in ("fp16 sums", "stored"))
    shifted, _ = _side(result, "K", "K", "fp16 sums")
    return (
        f"{rmse / once:.2g} times the RMSE of one rounding; under a bias in K {percent(beyond)} of the scores overflow "
        f"(one rounding: {percent(stored_once)}), {percent(shifted)} with K shifted"
    )


def _bf16(result: Result) -> str:
    perplexity = {each["precision"]: each["perplexity"] for each in pick(result["perplexities"], offset=LARGEST)}
    return (
        f"finite, but wrong where BF16 stores scores: perplexity {perplexity['bf16-eager']:.0f}; BF16 with scores in "
        f"FP32 {perplexity['bf16']:.2f}, PASA in FP16 {perplexity['pasa']:.2f}, FP32 {perplexity['fp32']:.2f}"
    )


def _speeds(result: Result, plain: bool) -> str:
    """Compare our default with each peer on all cases with many rows, short ones in a CUDA graph; above 1 is faster."""
    names = [c["name"] for c in result["cases"] if not c["decode"] and (c["data"] == "randn") == plain]
    ours = [(lines(result, name, "graph") or lines(result, name, "eager"))[DEFAULT.name] for name in names]
    fields = (("cuDNN", "to_cudnn"), ("flash", "to_flash"))
    return ", ".join(f"{_span(each[field] for each in ours)} times as fast as SDPA's {name}" for name, field in fields)


def _gpu_error(result: Result) -> str:
    """Compare errors on the cases that both computed."""
    ours, peer = (
        {(e["case"], e["how"]): e["rmse"] for e in pick(result["records"], implementation=name, status="ok")}
        for name in ("pasa", "sdpa-cudnn")
    )
    return f"{_span([ours[key] / peer[key] for key in ours.keys() & peer.keys()])} times the RMSE of SDPA's cuDNN"


def _missing(result: Result) -> str:
    names = dict.fromkeys(e["implementation"] for e in result["records"] if e["status"] == "not installed")
    return (
        f"{', '.join(names)}: not installed where speed was measured, so neither their speed nor their errors are known"
    )


def _runs(result: Result, tokens: int, bias: int = 0) -> dict[str, Record]:
    """Return one prompt's runs of a model by attention."""
    runs = {each["attention"]: each for each in pick(result["records"], tokens=tokens, bias=bias)}
    return {name: runs[name] for name in ("pasa", "sdpa", "eager")}


def _memory(result: Result) -> str:
    pasa, sdpa, eager = (run["peak_bytes"] / GIB for run in _runs(result, MANY).values())
    return f"peak {pasa:.1f} GiB at {MANY:,} tokens; SDPA {sdpa:.1f}, eager {eager:.1f}"


def _tokens(result: Result, bias: int = 0) -> str:
    runs = _runs(result, FEW, bias)
    prefill, decode = (
        ", ".join(f"{name} {run[f'{part}_tokens_per_s']:,.0f}" for name, run in runs.items())
        for part in ("prefill", "decode")
    )
    broken = ", ".join(name for name, run in runs.items() if run["nonfinite_logits"])
    wrong = f"; logits not finite: {broken}" if broken else ""
    return f"tokens/s at {FEW:,}: prefill {prefill}; decoding without a graph {decode}{wrong}"


def _counters(result: Result) -> str:
    """Return the times of one call's kernels, each alone."""
    anchors, main, second = (e["us"] for e in pick(result["records"], case=PAPER, by="pasa"))
    whole = anchors + main + second
    parts = (("anchors of K", anchors), ("attention", main), ("its second launch", second))
    return "each alone: " + ", ".join(f"{name} {us:.1f} µs ({percent(round(us / whole, 3))})" for name, us in parts)


def _prepass(result: Result) -> str:
    shares = [each["pre-pass"] / each["whole"] for each in result["parts"] if each.get("pre-pass")]
    low, high = min(shares), max(shares)
    return f"{100 * low:.2g} % to {100 * high:.2g} % of a call in a CUDA graph, {len(shares)} shapes"


def _profiled(result: Result) -> str:
    kernels = {each["kernel"]: each["ms"] for each in pick(result["kernels"], shape=QWEN)}
    whole, forward = sum(kernels.values()), kernels["anchor_kernel"] + kernels["attention_kernel"]
    return (
        f"anchors {100 * kernels['anchor_kernel'] / forward:.2g} % of the forward pass; centring K "
        f"{100 * kernels['centre_kernel'] / whole:.2g} % of forward and backward"
    )


def _npu_split(result: Result) -> str:
    said = []
    for name in ("paper", "exact"):
        selected = pick(result["records"], allocation=name)
        [tile] = pick(result["tiles"], dim=128, allocation=name)
        means = tile["vector_ns"]["row reductions"] / tile["ns"]["vector"]
        shift = [100 * each["shift_ms"] / each["overlap_ms"] for each in selected]
        rows = percent(round(means, 3))
        said.append(f"{name}: shifting K {_span(shift, '.3g')} % of the time, row reductions {rows} of vector time")
    return "; ".join(said)


def _npu_speed(result: Result) -> str:
    names = ("paper-fp16", "paper", "exact", "exact, anchors")
    ratios = {name: [e["ratio_lazy"] for e in pick(result["records"], allocation=name)] for name in names}
    low, high = result["claims"]["speedup"]
    spans = "; ".join(f"{name} {_span(values)}" for name, values in ratios.items())
    return (
        f"times as fast as FP32 scores with the same tricks: {spans}; published for paper-fp16: {low} to {high} over a "
        f"vendor kernel"
    )


def _rescue(result: Result) -> str:
    proof = result["proof"]
    fp16, pasa, fp32 = (
        "not finite" if value is None else f"{value:.2f}"
        for value in (proof[f"perplexity_{name}"] for name in ("fp16", "pasa", "fp32"))
    )
    return (
        f"scores reach {proof['max_score_before']:,.0f}; perplexity in FP16 {fp16}, with PASA {pasa}, in FP32 {fp32}; "
        f"{proof['tokens_equal_to_fp32']} of {proof['tokens_fp32']} tokens as in FP32"
    )


def _prompts(result: Result) -> str:
    precisions = result["precisions"]
    names = ("pasa", "fp16-sdpa", "bf16", "fp16-eager")
    shares = ", ".join(f"{name} {percent(precisions[name]['agreement'])}" for name in names)
    counts = f"{precisions['pasa']['items']} prompts of {len(result['datasets'])} data sets"
    return f"{counts}, answers equal to FP32's: {shares}"


def _models(result: Result) -> str:
    records = result["records"]
    heads, beyond = (sum(each[field] for each in records) for field in ("heads", "beyond_proven"))
    return f"{len(records)} models and shapes, {heads} heads: {beyond} beyond the proven bound"


def _video(result: Result) -> str:
    patched, broken = result["runs"]["pasa"], result["runs"]["fp16"]
    return (
        f"small random model, {len(patched['psnr'])} frames beside FP32: PSNR at least {min(patched['psnr']):.1f} dB, "
        f"SSIM at least {min(patched['ssim']):.7f}; FP16 scores: {broken['black_frames']} black frames"
    )


def _step(result: Result) -> str:
    said = []
    for offset in sorted({each["offset"] for each in result["records"]}):
        ms = {e["way"]: e["median_ms"] for e in pick(result["records"], model="UNet", offset=offset)}
        said.append(f"scores + {offset:,.0f}: PASA {ms['pasa']:.0f} ms, SDPA {ms['sdpa']:.0f}, eager {ms['eager']:.0f}")
    return f"a step of the full UNet, random weights; {'; '.join(said)}"


def _soak(result: Result) -> str:
    gate = result["gate"]
    return f"{gate['run'] - gate['failed']} of {gate['run']} random calls within all bounds of FP64"


def _gradients(result: Result) -> str:
    gate = result["gate"]
    return f"{gate['judged'] - len(gate['failures'])} of {gate['judged']} errors within twice a plain backward pass's"


def _ring(result: Result) -> str:
    plain, biased = (each["one_s"] / each["ring_s"] for each in result["records"])
    errors = [each["ring_rmse"] / each["one_rmse"] for each in result["records"]]
    faster = f"{plain:.2f} times as fast as one, {biased:.2f} times if keys share a bias"
    return f"{result['settings']['ranks']} GPUs are {faster}; {_span(errors)} times the RMSE"


def _guards(result: Result) -> str:
    """Compare guarded with unguarded attention in CUDA graphs."""
    graph = pick(result["records"], how="graph")
    plain, guarded = (
        {each["case"]: each["median_ms"] for each in pick(graph, implementation=name)} for name in (UNGUARDED, GUARDED)
    )
    said = [
        f"{name} {_span((guarded[case] / plain[case] for case in plain if case.startswith('decode') == decode), '.2f')}"
        for name, decode in (("many rows", False), ("decoding", True))
    ]
    return f"in a CUDA graph, times as long as the kernel alone: {'; '.join(said)}"


def _paged(result: Result) -> str:
    """Compare every page size with contiguous keys of the same case."""
    graph = pick(result["records"], how="graph")
    contiguous = {each["case"]: each["median_ms"] for each in pick(graph, implementation="pasa")}
    paged = [each for each in graph if each["implementation"].startswith("pasa-paged")]
    plain, biased = (
        _span(each["median_ms"] / contiguous[each["case"]] for each in paged if ("+" in each["case"]) == with_bias)
        for with_bias in (False, True)
    )
    return f"in a CUDA graph {plain} times as long as from contiguous keys; if keys share a bias {biased}"


ACCURACY, BIAS_SECTION, DEVICE, SPEED, NPU = (
    "#the-papers-benchmark",
    "#a-bias-that-all-keys-share",
    "#a-devices-own-attention",
    "#on-a-gpu",
    "#on-an-npu-a-model",
)


def _whole(result: Result) -> str:
    (record,) = result["records"]
    arms = {each["arm"]: each for each in record["arms"]}
    ours, upcast = arms["to-fp16"], arms["upcast"]
    slower = upcast["phases"][0]["wall_ms"] / ours["phases"][0]["wall_ms"]
    return (
        f"SVD's VAE: NaN in FP16; after to_fp16 {ours['psnr']:.1f} dB from FP32, "
        f"{record['overheads'][0]['amortised']['median']:.3f} times plain FP16's time; an upcast to FP32 for each call "
        f"takes {slower:.2f} times as long and {upcast['bytes'] / ours['bytes']:.2f} times the memory"
    )


LINES: Sequence[Line] = (
    Line("Ours on the paper's cases", "rmse", partial(_to_fp32, arithmetic="pasa-exact"), EMULATED, ACCURACY),
    Line("PASA as published, all in FP16", "rmse", partial(_to_fp32, arithmetic="pasa-paper-fp16"), EMULATED, ACCURACY),
    Line("The same, row vectors in FP32", "rmse", partial(_to_fp32, arithmetic="pasa-paper"), EMULATED, ACCURACY),
    Line("Baseline: scores stored in FP16", "rmse", partial(_to_fp32, arithmetic="partial"), EMULATED, ACCURACY),
    Line("Baseline: Q scaled first", "rmse", partial(_to_fp32, arithmetic="prescaled"), EMULATED, ACCURACY),
    Line(
        "Baseline: K smoothed as in SageAttention, scores in FP16",
        "rmse",
        partial(_to_fp32, arithmetic="smooth_k"),
        EMULATED,
        ACCURACY,
    ),
    Line("Baseline: Q Kᵀ accumulated in FP16, as FlashInfer can", "sides", _fp16_sums, EMULATED, BIAS_SECTION),
    Line("Baselines as packages", "speed", _missing, NOT_RUN, "../eval/speed/README.md"),
    Line("A bias shared by Q and K", "bias", _biased, EMULATED, BIAS_SECTION),
    Line("Shift K, Q or both?", "sides", _sides, EMULATED, BIAS_SECTION),
    Line("Errors of `sdpa`", "backends on cpu", _backends, CPU, DEVICE),
    Line("The same on a GPU", "backends on h200", _backends, GPU, DEVICE),
    Line("Keys with anchors in `sdpa`, SmolLM2", "layers on cpu", _layers, CPU, DEVICE),
    Line("Hostile calls of `sdpa`", "hostile on cpu", _hostile, CPU, DEVICE),
    Line("The same on a GPU, each kernel forced", "hostile on h200", _hostile, GPU, DEVICE),
    Line("Is BF16 enough?", "perplexity", _bf16, EMULATED, "#long-prompts"),
    Line("Errors on a GPU", "speed", _gpu_error, GPU, SPEED),
    Line("Speed on a GPU", "data", partial(_speeds, plain=True), GPU, SPEED),
    Line("Speed on a GPU, 14 other kinds of data", "data", partial(_speeds, plain=False), GPU, SPEED),
    Line("Memory, Qwen2-7B's shape", "throughput", _memory, GPU, "#long-prompts"),
    Line("End to end, Qwen2-7B's shape", "throughput", _tokens, GPU, "#long-prompts"),
    Line("The same, scores beyond FP16", "throughput", partial(_tokens, bias=BIAS), GPU, "#long-prompts"),
    Line("Overhead: the paper's shape", "counters", _counters, GPU, "../eval/speed/results/counters.md"),
    Line("Overhead: the pass over K", "speed", _prepass, GPU, "../eval/speed/results/speed.md"),
    Line(
        "Overhead: profile, 8192 tokens", "gradients", _profiled, GPU, "../eval/accuracy/gradients/results/gradients.md"
    ),
    Line("Overhead on an NPU", "npu_model", _npu_split, MODELLED, NPU),
    Line("Speed on an NPU", "npu_model", _npu_speed, MODELLED, NPU),
    Line("A language model that overflows", "rescue", _rescue, EMULATED, "#a-language-model"),
    Line("Whole models: time and memory", "whole_model on svd-vae", _whole, GPU, "#a-whole-model"),
    Line("Tasks (LongBench's kinds)", "longbench_fp16", _prompts, GPU, "#long-prompts"),
    Line("More than one model", "soundness", _models, CPU, "#predicted-from-weights"),
    Line("Video", "video", _video, EMULATED, "#a-video"),
    Line("Video at full size", "step", _step, GPU, "#a-video"),
    Line("Guards of `sdpa` on a GPU", "guards", _guards, GPU, "devices.md"),
    Line("Decoding from pages", "paged", _paged, GPU, SPEED),
    Line("Several devices", "ring", _ring, GPU, "../eval/speed/ring/README.md"),
    Line("Random calls", "soak", _soak, GPU, "#random-calls"),
    Line("Random calls of `sdpa`", "soak_sdpa", _soak, GPU, "#random-calls"),
    Line("Gradients", "gradients", _gradients, GPU, "#gradients-and-rounding"),
)
