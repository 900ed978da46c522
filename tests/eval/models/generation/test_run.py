"""A tiny model that generates: what is timed, what is refused, and what fails the gate."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from pasa.eval.commands import app
from pasa.eval.models.generation import accuracy, measuring, profiling, report, run
from pasa.eval.models.generation.runs import ATTENTIONS, COMPILED, PASA, PLAIN, SDPA, Attention, Marks, Prompts, Run

CPU = torch.device("cpu")
TINY: dict[str, Any] = {"config": "tiny", "tokens": (24,), "batches": ("1",), "ways": (PLAIN,), "beside": ()}
SHORT = TINY | {"new_tokens": 4, "turns": 2}


@pytest.fixture(scope="module")
def model() -> Any:
    return run.make_model({"config": "tiny", "layers": 2, "bias": 0}, CPU)[0]


@pytest.fixture
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lift the limits of time: so small a model takes longer on a CPU when it is patched."""
    monkeypatch.setattr(run, "MOST_TOKEN", dict.fromkeys((PLAIN, COMPILED), 1e9))
    monkeypatch.setattr(run, "MOST_PROMPT", 1e9)


def planted(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Let an attention return other numbers than it should."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attend(*arguments: Any, **options: Any) -> tuple[Tensor, None]:
        return change(sdpa_attention_forward(*arguments, **options)[0]), None

    AttentionInterface.register("planted", attend)
    monkeypatch.setitem(ATTENTIONS, name, Attention("planted"))


def test_every_way_is_judged_and_timed(unlimited: None, tmp_path: Path) -> None:
    options = ["--config", "tiny", "--tokens", "24", "--batches", "1,8-padded", "--beside", "eager,sdpa-cudnn"]
    options += ["--new-tokens", "5", "--turns", "2", "--output-dir", str(tmp_path)]
    done = CliRunner().invoke(app, ["bench", "model", *options])
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "model.json").read_text(encoding="utf-8"))
    names = [f"24 x {batch}, {way}" for batch in ("1", "8 padded") for way in run.WAYS]
    assert [each["case"] for each in result["records"]] == names
    for record in result["records"]:
        assert list(record["runs"]) == ["pasa", "sdpa", "eager", "sdpa-cudnn"]
        assert record["runs"]["sdpa-cudnn"]["status"] == "not run"
        assert record["compiled_while_timed"] == 0
        for name in ("pasa", "sdpa", "eager"):
            timed = record["runs"][name]
            assert timed["token_p20_ms"] <= timed["token_median_ms"] <= timed["token_p80_ms"]
            assert timed["prompt_median_ms"] > 0
            assert timed["added_bytes"] is timed["kernel_ms"] is None, "there is no GPU"
        assert record["runs"]["sdpa"]["token_ratio"] == record["runs"]["sdpa"]["prompt_ratio"] == 1
        assert ("new_token_ratio" in record["runs"]["pasa"]) == (record["way"] == PLAIN)
    judged = [each for each in result["accuracy"] if each["attention"] == PASA]
    assert [(each["way"], each["padded"]) for each in judged] == [
        (PLAIN, False), (PLAIN, True), (COMPILED, False), (COMPILED, True)
    ]  # fmt: skip
    assert all(each["equal"] == each["of"] == 36 for each in judged)
    page = (tmp_path / "model.md").read_text(encoding="utf-8")
    assert "| 24 x 8 padded, compiled | pasa |" in page
    assert "sdpa-cudnn: not run on 24 x 1, plain; " in page
    assert "4 cases are done. All checks hold." in page
    assert "| 24 x 8 padded, compiled | pasa |" in report.summary(result)


def test_patched_attention_is_what_is_timed(model: Any) -> None:
    """All runs share their parameters, and only one of them is patched."""
    runs = {name: Run.of(model, name, PLAIN) for name in (PASA, SDPA)}
    pointers = [{x.data_ptr() for x in (*each.model.parameters(), model.lm_head.weight)} for each in runs.values()]
    assert pointers[0] == pointers[1]
    prompts = Prompts.draw(1, 20, False, 97, CPU)
    used = {
        name: {each.name for each in profiling.kernels(own, prompts, 4)} & {"pasa::attention"}
        for name, own in runs.items()
    }
    assert used == {PASA: {"pasa::attention"}, SDPA: set()}


def test_no_other_attention_can_be_asked_for() -> None:
    assert run.select_attentions(["none"]) == run.select_attentions([]) == [PASA, SDPA]
    assert run.select_attentions(["sdpa-flash"]) == [PASA, SDPA, "sdpa-flash"]


def test_marks_are_those_of_the_steps(model: Any) -> None:
    steps: list[int] = []
    marks = Marks(CPU, steps.append)
    own = Run.of(model, SDPA, PLAIN)
    made = own.generate(Prompts.draw(2, 20, True, 97, CPU), 5, marks)
    assert steps == [0, 1, 2, 3, 4]
    assert made.shape == (2, 25)
    assert len(marks.ms()) == len(marks.host_ms()) == 5
    assert min(marks.ms()) > 0


def test_a_gpu_has_a_clock_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host marks a step when it is enqueued; the device, when its logits are there."""
    clock = iter([5.0, 12.0, 14.0])

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = next(clock)

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    marks = Marks(torch.device("cuda"))
    for _ in range(3):
        marks.note()
    assert marks.ms() == [7.0, 2.0]
    assert len(marks.host_ms()) == 2


def test_prompts_are_padded_at_the_left() -> None:
    prompts = Prompts.draw(8, 100, True, 97, CPU)
    lengths = prompts.mask.sum(1)
    assert lengths[0] == 100
    assert 50 <= lengths.min() < 100
    assert torch.equal(prompts.mask, prompts.mask.cummax(1).values)
    assert Prompts.draw(8, 100, False, 97, CPU).mask.all()


def test_wrong_patched_attention_fails_before_any_time(monkeypatch: pytest.MonkeyPatch, unlimited: None) -> None:
    planted(monkeypatch, PASA, lambda out: 1.01 * out)
    result = run.run_model(**SHORT)
    assert result["gate"]["checks"] == {"accuracy": False, "every case": False}
    assert result["records"] == []


def test_a_wrong_peer_is_shown_without_a_time(monkeypatch: pytest.MonkeyPatch, unlimited: None) -> None:
    planted(monkeypatch, "sdpa-flash", lambda out: 1.01 * out)
    result = run.run_model(**SHORT | {"beside": ("sdpa-flash", "eager")})
    runs = result["records"][0]["runs"]
    assert {name: each["status"] for name, each in runs.items()} == {
        "pasa": "ok", "sdpa": "ok", "eager": "ok", "sdpa-flash": "failed gate"
    }  # fmt: skip
    assert result["gate"]["passed"], "peers decide nothing"
    assert "sdpa-flash: not run on 24 x 1, plain: its logits are wrong" in "\n".join(report.absences(result))


def test_nan_in_one_logit_is_wrong(model: Any) -> None:
    golden = torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 3, 4)
    broken = golden[0], golden[1].clone()
    broken[1][0, 2, 1] = torch.nan
    assert accuracy.logit_errors(broken, golden) == {"error": None, "nonfinite": 1, "equal": 3, "of": 3}


def test_logits_are_compared_until_the_texts_part() -> None:
    golden = torch.tensor([[1, 2, 3, 4]]), torch.ones(1, 4, 2)
    made = torch.tensor([[1, 0, 3, 4]]), torch.tensor([[[1, 1], [1.5, 1], [9, 9], [9, 9.0]]])
    found = accuracy.logit_errors(made, golden)
    assert found["equal"] == 1
    assert found["error"] == pytest.approx(0.5 / 2)


RIGHT = {"attention": PASA, "way": PLAIN, "error": 1e-3, "limit": 1e-3, "why": ""}


@pytest.mark.parametrize("changes", [{"error": 1.1e-3}, {"error": None}, {"limit": None}, {"attention": SDPA}])
def test_patched_attention_must_be_as_accurate_in_every_way(changes: dict[str, Any]) -> None:
    assert accuracy.passes([RIGHT])
    assert not accuracy.passes([RIGHT | changes])


def test_a_static_cache_that_compiles_nothing_does_not_run(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pasa.eval.models.generation.runs._compile_options", lambda way, device: {})
    record = measuring.measure(measuring.Case(24, 1, False, COMPILED), model, [PASA], 2, 4)["runs"][PASA]
    assert record == {
        "status": "not run",
        "why": "RuntimeError: generate compiled nothing, although the cache is static",
    }


def test_a_backend_of_sdpa_is_not_held_in_compiled_code(model: Any) -> None:
    """Story: held to flash, a compiled model ran code that had been compiled for the backend of torch's choice."""
    record = measuring.measure(measuring.Case(24, 1, False, COMPILED), model, [SDPA, "sdpa-flash"], 2, 4)["runs"]
    assert record[SDPA]["status"] == "ok"
    assert record["sdpa-flash"]["status"] == "not run"
    assert "compiled code keeps the backend" in record["sdpa-flash"]["why"]


def recorded(case: str = "c", way: str = PLAIN, compiled: int = 0, **own: Any) -> dict[str, Any]:
    times = {f"{new}{phase}_ratio": 1.0 for new in ("", "new_") for phase in ("token", "prompt")}
    base = {"status": "ok", "why": ""} | times
    runs = {PASA: base | own, SDPA: base}
    return {"case": case, "way": way, "compiled_while_timed": compiled, "runs": runs}


@pytest.mark.parametrize(
    ("record", "failing"),
    [
        (recorded(token_ratio=1.05, prompt_ratio=1.02), []),
        (recorded(way=COMPILED, token_ratio=0.95), []),
        (recorded(token_ratio=1.051), ["c: token"]),
        (recorded(way=COMPILED, token_ratio=0.951), ["c: token"]),
        (recorded(prompt_ratio=1.021), ["c: prompt"]),
        (recorded(new_token_ratio=1.051), ["c, new length: token"]),
        (recorded(new_prompt_ratio=1.021), ["c, new length: prompt"]),
        (recorded(way=COMPILED, token_ratio=0.95, new_token_ratio=2.0), []),
        (recorded(status="not run"), ["c: runs"]),
        (recorded(compiled=1), ["c: nothing compiled while timed"]),
    ],
)
def test_each_check_fails_for_its_own_reason(record: dict[str, Any], failing: Sequence[str]) -> None:
    checks = run.judge_records([record], 1, True)["checks"]
    assert [name for name, passed in checks.items() if not passed] == failing


def test_cases_that_are_left_or_cannot_run_without_patching() -> None:
    without = recorded()
    without["runs"][SDPA] = {"status": "not run", "why": "OutOfMemoryError"}
    assert run.judge_records([without], 1, True)["passed"], "there is nothing to compare with"
    assert run.judge_records([recorded()], 2, True)["checks"]["every case"] is False
    assert run.judge_records([recorded()], 1, False)["passed"] is False


def test_a_slow_patch_is_named(monkeypatch: pytest.MonkeyPatch, unlimited: None) -> None:
    """The patched model sleeps on every token, not on the prompt."""
    monkeypatch.setitem(run.MOST_TOKEN, PLAIN, 2.0)
    real = Run.generate

    def slow(self: Run, prompts: Prompts, tokens: int, marks: Marks, **options: Any) -> Any:
        if self.attention.patched and marks.on_step is None:
            marks.on_step = lambda step: time.sleep(0.05)
        return real(self, prompts, tokens, marks, **options)

    monkeypatch.setattr(Run, "generate", slow)
    checks = run.run_model(**SHORT)["gate"]["checks"]
    assert [name for name, passed in checks.items() if not passed] == [
        f"24 x 1, plain{new}: token" for new in ("", ", new length")
    ]


def test_new_lengths_are_new_to_every_attention(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prompt, and each token after it, has keys of a length that no call before had."""
    seen: list[tuple[int, int]] = []
    real = Run.generate

    def watched(self: Run, prompts: Prompts, tokens: int, marks: Marks, **options: Any) -> Any:
        seen.append((prompts.ids.shape[1], tokens))
        return real(self, prompts, tokens, marks, **options)

    monkeypatch.setattr(Run, "generate", watched)
    measuring.measure(measuring.Case(24, 1, False, PLAIN), model, (PASA, SDPA), 2, 4)
    new = seen[-measuring.NEW_TURNS * 2 :]
    compiled = [start for start, _ in seen[: -len(new)] if start != 24]
    assert {start % 16 for start in compiled} == {0, 4, 9, 13}
    assert min(compiled) > max(start + tokens for start, tokens in new)
    lengths = [length for start, tokens in [(24, 4), *new] for length in range(start, start + tokens)]
    assert len(lengths) == len(set(lengths)) == 4 + len(new) * measuring.NEW_TOKENS


def test_a_stopped_run_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch, unlimited: None, tmp_path: Path) -> None:
    begun: list[str] = []
    real = measuring.measure

    def measure(case: measuring.Case, *arguments: Any) -> dict[str, Any]:
        begun.append(case.name)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return real(case, *arguments)

    monkeypatch.setattr(run, "measure", measure)
    options = SHORT | {"tokens": (16, 24, 32), "folder": tmp_path}
    with pytest.raises(KeyboardInterrupt):
        run.run_model(**options)
    result = run.run_model(**options)
    assert begun == [f"{tokens} x 1, plain" for tokens in (16, 24, 24, 32)]
    assert [each["tokens"] for each in result["records"]] == [16, 24, 32]
    assert result["gate"]["passed"]
    with pytest.raises(ValueError, match=r"holds another run \(bias was 0 and is 3\): choose another folder"):
        run.run_model(**options | {"bias": 3})


def test_no_case_begins_after_the_last_minute(unlimited: None, tmp_path: Path) -> None:
    options = SHORT | {"tokens": (16, 24), "folder": tmp_path}
    result = run.run_model(**options, minutes=0.0)
    assert result["records"] == []
    assert result["gate"]["checks"]["every case"] is False
    assert len(run.run_model(**options)["records"]) == 2


def test_a_bias_beyond_fp16_breaks_attention_that_stores_scores(unlimited: None) -> None:
    result = run.run_model(**SHORT | {"beside": ("eager",), "bias": 362})
    assert {each["attention"]: each["nonfinite"] > 0 for each in result["accuracy"]} == {
        "pasa": False, "sdpa": False, "eager": True
    }  # fmt: skip
    assert result["records"][0]["runs"]["eager"]["status"] == "failed gate"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": "gpt"}, "config='gpt' is not one of qwen2-7b, tiny"),
        ({"config": "qwen2-7b"}, "too large for a CPU"),
        ({"batches": ("2",)}, "batches: '2' is not one of 1, 8, 8-padded"),
        ({"ways": ("eager",)}, "ways: 'eager' is not one of plain, compiled"),
        ({"beside": ("flash",)}, "beside: 'flash' is not one of sdpa-flash, sdpa-cudnn, eager"),
        ({"new_tokens": 2}, "new_tokens=2 must be at least 3"),
        ({"layers": 0}, "layers=0 must be at least 1"),
    ],
)
def test_what_is_no_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run.run_model(**SHORT | options)


def test_the_profile_shows_kernels_and_functions_by_attention(tmp_path: Path) -> None:
    options = ["--config", "tiny", "--tokens", "24", "--new-tokens", "4", "--beside", "sdpa-cudnn"]
    done = CliRunner().invoke(app, ["bench", "model", "--profile", *options, "--output-dir", str(tmp_path)])
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "profile.json").read_text(encoding="utf-8"))
    pasa, sdpa, cudnn = result["records"]
    assert [each["attention"] for each in result["records"]] == ["pasa", "sdpa", "sdpa-cudnn"]
    assert cudnn["status"] == "not run"
    calls = [{each["name"]: each["calls"] for each in record["kernels"]} for record in (pasa, sdpa)]
    assert [each.get("pasa::attention") for each in calls] == [2, None], "a layer calls it once a step"
    assert [each.get("aten::scaled_dot_product_attention") for each in calls] == [None, 2]
    assert any("transformers_attention.py" in each["name"] for each in pasa["functions"])
    assert not any("transformers_attention.py" in each["name"] for each in sdpa["functions"])
    assert pasa["functions_us"] > sum(each["us"] for each in pasa["functions"][:5])
    page = (tmp_path / "profile.md").read_text(encoding="utf-8")
    assert "| pasa::attention |" in page
    assert "sdpa-cudnn: not run: RuntimeError" in page


def test_kernels_of_a_gpu_are_told_apart_from_its_host_calls(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's profiler lists cudaLaunchKernel too, which is the host's."""

    class Event:
        def __init__(self, key: str, kind: str, us: float) -> None:
            self.key, self.count, self.self_device_time_total, self.self_cpu_time_total = key, 4, us, 7.0
            self.device_type = type("", (), {"name": kind})

    class Profiler:
        def __init__(self, activities: list[Any]) -> None:
            self.calls: list[str] = []

        def start(self) -> None:
            self.calls.append("start")

        def stop(self) -> None:
            assert self.calls == ["start"]

        def key_averages(self) -> list[Event]:
            return [Event("gemm", "CUDA", 10.0), Event("cudaLaunchKernel", "CPU", 3.0), Event("attend", "CUDA", 40.0)]

    class OnGpu:
        device = type("", (), {"type": "cuda"})

    own = Run.of(model, SDPA, PLAIN)
    monkeypatch.setattr(profiling, "profile", Profiler)
    monkeypatch.setattr(profiling, "_watch", lambda run, prompts, new_tokens, start, stop: (start(), stop(), 2)[2])
    prompts = Prompts(OnGpu(), OnGpu())  # type: ignore[arg-type]
    assert [(each.name, each.us, each.calls) for each in profiling.kernels(own, prompts, 4)] == [
        ("attend", 20.0, 2.0), ("gemm", 5.0, 2.0)
    ]  # fmt: skip
