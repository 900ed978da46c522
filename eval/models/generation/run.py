"""The command `pasa bench model`: a whole model that generates, with patched attention and with torch's own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch

from pasa.eval.kit import output
from pasa.eval.kit.cases_file import CasesFile
from pasa.eval.kit.device import describe, pick_device
from pasa.eval.kit.experiment import Experiment, gate
from pasa.eval.kit.options import Minutes, at_least, stages
from pasa.eval.kit.random_model import CONFIGS, SEED, SMALL, build
from pasa.eval.models.generation.accuracy import LAYERS, judge, passes, wrong
from pasa.eval.models.generation.measuring import FAILED, NEW, NOT_RUN, OK, PROMPT, TOKEN, Case, free, measure
from pasa.eval.models.generation.profiling import FIRST, functions, kernels
from pasa.eval.models.generation.report import profile_report, report
from pasa.eval.models.generation.runs import ATTENTIONS, COMPILED, PASA, PLAIN, SDPA, WAYS, Marks, Prompts, Run
from pasa.eval.models.generation.weights import describe_spreads, set_bias, spread_scores

Record = dict[str, Any]
MOST_TOKEN = {PLAIN: 1.05, COMPILED: 0.95}  # of SDPA's time for a token
MOST_PROMPT = 1.02  # of SDPA's time for a prompt
MOST_ENTRIES = 60  # kernels and functions of a step that are stored
BATCHES = {"1": (1, False), "8": (8, False), "8-padded": (8, True)}
NOTE = "random weights; nothing was run on an NPU"
ACCURACY, SPREADS = "accuracy", "spreads"  # records of the file of cases that are none of a case
BESIDE = tuple(name for name in ATTENTIONS if name not in (PASA, SDPA))

Config = Annotated[str, "Configuration: qwen2-7b (on an accelerator), or tiny."]
Layers = Annotated[int | None, "Layers, instead of all."]
Bias = Annotated[int, "Number added to q and k, so that its square is added to every score; 362 is beyond FP16."]
NONE = "none"
Beside = Annotated[Sequence[str], f"Attentions besides pasa and sdpa: {', '.join(BESIDE)}; or {NONE}."]


def run_model(
    config: Config = "qwen2-7b",
    tokens: Annotated[Sequence[int], "Lengths of the prompts."] = (1024, 8192, 32768),
    batches: Annotated[Sequence[str], f"Batches: {', '.join(BATCHES)}."] = tuple(BATCHES),
    ways: Annotated[Sequence[str], "plain, or compiled with a static cache."] = tuple(WAYS),
    beside: Beside = ("sdpa-flash", "sdpa-cudnn"),
    layers: Layers = None,
    bias: Bias = 0,
    new_tokens: Annotated[int, "Tokens to write."] = 32,
    turns: Annotated[int, "Timed turns of each attention; fewer where they take minutes."] = 9,
    minutes: Minutes = None,
    folder: Path | None = None,
    progress: output.Report = output.silent,
) -> Record:
    """Time a whole model that generates, patched and not, accuracy first; exit 1 if patched it is slower or wrong.

    Cases that are in `folder` are not run again. The result has ``accuracy`` (a record for each attention and way)
    and ``records`` (a case each, with the times of all attentions in ``runs``).
    """
    at_least(FIRST + 1, new_tokens=new_tokens)
    at_least(1, turns=turns, layers=layers, tokens=min(tokens))
    cases = {case.name: case for case in select_cases(tokens, batches, ways)}
    attentions = select_attentions(beside)
    device = check_device(config)
    environment = describe(device, "transformers")
    sizes = {"config": config, "layers": layers or CONFIGS[config]["num_hidden_layers"], "bias": bias}
    settings = sizes | {"new_tokens": new_tokens, "turns": turns, "beside": list(beside), "seed": SEED}
    kept = CasesFile(folder, settings, environment)
    if missing := [way for way in ways if f"{ACCURACY}, {way}" not in kept.records]:
        progress(0, len(cases), "accuracy, beside FP32")
        for way, records in measure_accuracy(sizes, device, attentions, missing).items():
            kept.add(f"{ACCURACY}, {way}", {"records": records})
    accuracy = [each for way in ways for each in kept.records[f"{ACCURACY}, {way}"]["records"]]
    accurate = passes(accuracy)
    if accurate and not all(name in kept.records for name in cases):
        model, spreads = make_model(sizes, device)
        kept.add(SPREADS, spreads)

        def measure_case(name: str) -> Record:
            case = cases[name]
            excluded = [each for each in attentions if wrong(accuracy, each, case.way)]
            timed = [each for each in attentions if each not in excluded]
            record = measure(case, model, timed, turns, new_tokens)
            record["runs"] |= {each: {"status": FAILED, "why": "its logits are wrong"} for each in excluded}
            return record

        kept.fill(list(cases), measure_case, minutes, progress)
    records = kept.present(cases)
    return {
        "settings": settings,
        "spreads": kept.records.get(SPREADS),
        "accuracy": accuracy,
        "gate": judge_records(records, len(cases), accurate),
        "records": records,
        "note": NOTE,
        "environment": environment,
    }


def run_profile(
    config: Config = "qwen2-7b",
    tokens: Annotated[Sequence[int], "Lengths of the prompts."] = (8192,),
    batches: Annotated[Sequence[str], f"Batches: {', '.join(BATCHES)}."] = ("1",),
    ways: Annotated[Sequence[str], "plain, or compiled with a static cache."] = (PLAIN,),
    beside: Beside = (),
    layers: Layers = None,
    bias: Bias = 0,
    new_tokens: Annotated[int, "Tokens to write."] = 32,
    progress: output.Report = output.silent,
) -> Record:
    """Show where the time of a decoding step goes: kernels by name, and the host's time by function."""
    at_least(FIRST + 1, new_tokens=new_tokens)
    at_least(1, layers=layers, tokens=min(tokens))
    cases = select_cases(tokens, batches, ways)
    attentions = select_attentions(beside)
    device = check_device(config)
    sizes = {"config": config, "layers": layers or CONFIGS[config]["num_hidden_layers"], "bias": bias}
    model, _ = make_model(sizes, device)
    say = stages(progress, len(cases) * len(attentions))
    records = []
    for case, name in product(cases, attentions):
        say(f"{case.name}, {name}")
        records.append(profile_case(case, model, name, new_tokens))
    return {
        "settings": sizes | {"new_tokens": new_tokens, "seed": SEED},
        "records": records,
        "note": NOTE,
        "environment": describe(device, "transformers"),
    }


def profile_case(case: Case, model: Any, name: str, new_tokens: int) -> Record:
    """Return what a step of one attention takes, without a profiler and by two profilers, each in a run of its own."""
    described = {"case": case.name, "attention": name, "status": OK, "why": ""}
    prompts = Prompts.draw(case.batch, case.tokens, case.padded, model.config.vocab_size, model.device)
    try:
        run = Run.of(model, name, case.way)
        run.first(prompts, new_tokens, Marks(model.device))
        marks = Marks(model.device)
        run.generate(prompts, new_tokens, marks)
        entries = {"kernels": kernels(run, prompts, new_tokens), "functions": functions(run, prompts, new_tokens)}
    except Exception as error:  # a backend of torch may refuse a mask
        return described | {"status": NOT_RUN, "why": output.error_line(error)}
    steps = marks.ms()[FIRST:]
    listed = {name: [vars(each) for each in found[:MOST_ENTRIES]] for name, found in entries.items()}
    sums = {f"{name}_us": sum(each.us for each in found) for name, found in entries.items()}
    return described | {"us": 1e3 * sum(steps) / len(steps), **sums, **listed}


def select_cases(tokens: Sequence[int], batches: Sequence[str], ways: Sequence[str]) -> list[Case]:
    """Return all cases, those of short prompts first; ValueError names an unknown batch or way."""
    for kind, names, known in (("batches", batches, BATCHES), ("ways", ways, WAYS)):
        _check_names(kind, names, known)
    return [Case(length, *BATCHES[batch], way) for length, batch, way in product(tokens, batches, ways)]


def select_attentions(beside: Sequence[str]) -> list[str]:
    """Return the names of all attentions to time."""
    others = [] if list(beside) == [NONE] else list(beside)
    _check_names("beside", others, BESIDE)
    return [PASA, SDPA, *others]


def _check_names(option: str, names: Sequence[str], known: Any) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{option}: {name!r} is not one of {', '.join(known)}")


def check_device(config: str) -> torch.device:
    """Return the device; ValueError for an unknown configuration, or one that is too large for a CPU."""
    if config not in CONFIGS:
        raise ValueError(f"config={config!r} is not one of {', '.join(CONFIGS)}")
    device = pick_device()
    if device.type == "cpu" and config != SMALL:
        raise ValueError(
            f"config={config!r} is too large for a CPU, and there is no accelerator here: try --config {SMALL}"
        )
    return device


def make_model(sizes: Record, device: torch.device) -> tuple[Any, Record]:
    """Return a model whose scores spread as a trained model's, or are beyond FP16 by a bias; and those spreads."""
    model = build(CONFIGS[sizes["config"]] | {"num_hidden_layers": sizes["layers"]}, device)
    spreads = describe_spreads(spread_scores(model))
    if sizes["bias"]:
        set_bias(model, sizes["bias"])
    return model, spreads


def measure_accuracy(
    sizes: Record, device: torch.device, attentions: Sequence[str], ways: Sequence[str]
) -> dict[str, list[Record]]:
    """Judge a model of the same width with few layers, which fits the device in FP32; return records by way."""
    model, _ = make_model(sizes | {"layers": min(LAYERS, sizes["layers"])}, device)
    records = judge(model, attentions, ways)
    del model
    free(device)
    return {way: [each for each in records if each["way"] == way] for way in ways}


def judge_records(records: Sequence[Record], cases: int, accurate: bool) -> Record:
    """Return the gate: accuracy, every case done, patched attention runs where SDPA does and takes at most its time.

    A time during which something was compiled is no measure.
    """
    checks = {"accuracy": accurate, "every case": len(records) == cases}
    for record in records:
        own, base = record["runs"][PASA], record["runs"][SDPA]
        if base["status"] != OK:
            continue  # there is nothing to compare with; the table says why
        checks[f"{record['case']}: nothing compiled while timed"] = not record["compiled_while_timed"]
        checks[f"{record['case']}: runs"] = own["status"] == OK
        if own["status"] == OK:
            for new in ("", NEW) if record["way"] == PLAIN else ("",):
                where = f"{record['case']}, new length" if new else record["case"]
                checks[f"{where}: prompt"] = own[f"{new}{PROMPT}_ratio"] <= MOST_PROMPT
                checks[f"{where}: token"] = own[f"{new}{TOKEN}_ratio"] <= MOST_TOKEN[record["way"]]
    return gate(checks)


PROFILE = Experiment(
    name="profile",
    run=run_profile,
    report=profile_report,
    title="Where the time of a decoding step goes",
    needs_models=True,
)
EXPERIMENT = Experiment(
    name="model",
    run=run_model,
    report=report,
    title="A whole model that generates",
    needs_models=True,
    resume="start again with the same --output-dir to go on",
    variants=(PROFILE,),
)
