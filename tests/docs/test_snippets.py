"""The pages as a newcomer reads them: every Python snippet is run, or listed here with the reason why not."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.docs.pages import DOCS, README, ROOT, blocks, name_of

QWEN, VIDEO = "Qwen/Qwen2-7B-Instruct", "stabilityai/stable-video-diffusion-img2vid-xt"
GEMMA = "google/gemma-3-1b-it"
# Python that cannot be run, and what it needs.
NEEDS_MORE = {
    "vllm.register()": "vLLM; tests/pasa/patching/vllm_itself.py runs it",
    "generate_batch": "most of the memory; tests/pasa/patching/test_transformers_batching.py runs it with less",
    "transformers.cli.serve": "fastapi and uvicorn; tests/pasa/patching/transformers_serve.py runs it",
    "get_local_kernel": "the package kernels; tests/scripts/hf_kernel_itself.py runs it",
    'set_attention_backend("pasa")': "a model of the dispatcher; tests/pasa/patching/test_registration.py runs three",
}
RANKS = "# long_prompt.py"  # first line of the script that torchrun starts
# Replacements for text that needs a network, weights or GPUs: small models of the same classes.
INSTEAD = {
    f'"{QWEN}"': '"qwen"',
    f'"{GEMMA}"': '"gemma"',
    f'"{VIDEO}"': '"svd"',
    '.to("cuda")': "",
    "num_frames=25": "num_frames=2, height=64, width=64, num_inference_steps=1",
    '"num_frames": 25': '"num_frames": 2, "height": 64, "width": 64',
    '"nccl"': '"gloo"',
    'torch.device("cuda", int(os.environ["LOCAL_RANK"]))': 'torch.device("cpu")',
    "torch.cuda.set_device(device)\n": "",
}
PAGES = {name_of(page): page for page in [README, *DOCS] if blocks(page, "python")}
# Shell commands begin with one of these; `pasa` and paths are checked, the others need a network or a device.
PROGRAMS = (
    "pasa ", "pip install ", "bash scripts/", ".venv/bin/", "pytest ", "vllm serve ", "python -m sglang.", "source /",
    "docker run ",
)  # fmt: skip


def runnable(snippet):
    for text, ours in INSTEAD.items():
        snippet = snippet.replace(text, ours)
    return snippet


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with what the snippets expect: both models in small, a picture and a long text."""
    import transformers as hf
    from PIL import Image
    from tokenizers import Tokenizer, models, pre_tokenizers

    from pasa.eval.models.video.tiny import tiny_pipeline

    path = tmp_path_factory.mktemp("newcomer")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path / "qwen")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = hf.Qwen2Config(**sizes, num_key_value_heads=2, vocab_size=len(letters))
    hf.Qwen2ForCausalLM(config).save_pretrained(path / "qwen")
    gemma = hf.Gemma3TextConfig(**sizes, num_key_value_heads=1, head_dim=16, vocab_size=len(letters), pad_token_id=0)
    hf.Gemma3ForCausalLM(gemma).save_pretrained(path / "gemma")
    tiny_pipeline().save_pretrained(path / "svd")
    Image.new("RGB", (64, 64), "navy").save(path / "rocket.png")
    (path / "long.txt").write_text("It was a dark and stormy night. " * 8)
    return path


def run(name, folder):
    """Return the names and the output of a page's snippets, run in one session, as users type them."""
    names, said, before = {}, io.StringIO(), Path.cwd()
    os.chdir(folder)
    try:
        for snippet in blocks(PAGES[name], "python"):
            if snippet.startswith(RANKS) or any(each in snippet for each in NEEDS_MORE):
                continue
            with contextlib.redirect_stdout(said):
                exec(compile(runnable(snippet), name, "exec"), names)
    finally:
        os.chdir(before)
    return names, said.getvalue()


@pytest.mark.parametrize("name", sorted({*PAGES} - {"README.md", "docs/index.md", "docs/hosts/diffusers.md"}))
def test_snippets_run(name, folder):
    run(name, folder)


def test_readme_shows_a_finite_output_and_a_report(folder):
    names, said = run("README.md", folder)
    scores = names["q"].float() @ names["k"].float().repeat_interleave(7, 1).mT
    assert names["out"].isfinite().all()
    assert scores.abs().max() > 65504
    assert "2 of 2 attention modules run PASA" in said


def test_quick_start_shows_scores_before_and_after(folder):
    names, said = run("docs/index.md", folder)
    before, after = (float(value) for value in re.findall(r"tensor\(([\d.]+)", said))
    assert before > 65504 > after
    assert names["lse"].shape == (1, 28, 1024)
    assert not names["handle"].active


def test_video_has_frames(folder):
    frames = run("docs/hosts/diffusers.md", folder)[0]["frames"]
    assert [frame.size for frame in frames] == [(64, 64)] * 2


def test_two_ranks_agree_with_one(folder):
    """Two ranks agree with one: `torchrun --nproc-per-node 2 long_prompt.py`, on CPUs."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    page = PAGES["docs/hosts/several-devices.md"]
    assert "torchrun --nproc-per-node 2 long_prompt.py" in page.read_text("utf-8")
    (script,) = (each for each in blocks(page, "python") if each.startswith(RANKS))
    (folder / "long_prompt.py").write_text(runnable(script))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "long_prompt.py"]
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    ids = AutoTokenizer.from_pretrained(folder / "qwen")((folder / "long.txt").read_text(), return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(folder / "qwen", dtype=torch.float16)
    with torch.no_grad():
        expected = int(model(ids.input_ids).logits[0, -1].argmax())
    assert f"next token: {expected}" in done.stdout.splitlines()


def test_every_substitution_stands_for_something():
    text = "".join(snippet for page in PAGES.values() for snippet in blocks(page, "python"))
    assert [each for each in (*INSTEAD, *NEEDS_MORE, RANKS) if each not in text] == []


def test_shell_commands_name_files_that_exist():
    text = "\n".join(block for page in [README, *DOCS] for block in blocks(page, "bash")).replace("\\\n", "")
    for line in text.splitlines():
        command = re.sub(r"^(\w+=\S+ )+", "", line.partition("#")[0]).strip()
        assert not command or command.startswith(PROGRAMS), line
        for path in re.findall(r"(?<![\w/.])(?:scripts|tests|docs|examples)/[\w/.]+", command):
            assert (ROOT / path).exists(), line


def test_extras_that_are_named_exist(monkeypatch):
    text = "".join(page.read_text("utf-8") for page in [README, *DOCS])
    named = {name for group in re.findall(r"'\.\[([\w,]+)\]'", text) for name in group.split(",")}
    assert {"transformers", "diffusers", "triton", "npu", "eval", "video", "longbench"} <= named
    kept = {}
    monkeypatch.setattr("setuptools.setup", lambda **given: kept.update(given))
    exec(compile((ROOT / "setup.py").read_text(), "setup.py", "exec"), {"__file__": str(ROOT / "setup.py")})
    assert named <= set(kept["extras_require"])


def test_commands_that_run_a_part_of_the_tests_find_some():
    text = "\n".join(block for page in DOCS for block in blocks(page, "bash"))
    commands = re.findall(r"pytest -q (\S+) -k (\w+)", text)
    assert len(commands) >= 3
    assert [(file, name) for file, name in commands if name not in (ROOT / file).read_text("utf-8")] == []
