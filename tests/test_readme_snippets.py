"""README.md as a newcomer reads it: every snippet is run, or listed here with the reason why not."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
QWEN, VIDEO = "Qwen/Qwen2-7B-Instruct", "stabilityai/stable-video-diffusion-img2vid-xt"

# Shell commands that are not run here, and where they are run instead.
NOT_RUN = {
    "bash scripts/run.sh": "takes minutes and an environment; tests of its experiments run its parts",
    "bash scripts/test.sh": "this is what runs these tests",
    "pip install .": "tests/test_package.py does, without a network",
    "pip install '.[transformers]'": "asks a package index; the extras that the line names are looked up below",
}
# Python that cannot be run, and what it needs.
NEEDS_MORE = {"vllm.register()": "vLLM; tests/pasa/patching/test_vllm.py runs it on a fake"}
RANKS = "# long_prompt.py"  # first line of the script that torchrun starts
# Replacements for text of README.md that needs a network, weights or GPUs: small models of the same classes.
INSTEAD = {
    f'"{QWEN}"': '"qwen"',
    f'"{VIDEO}"': '"svd"',
    '.to("cuda")': "",
    "num_frames=25": "num_frames=2, height=64, width=64, num_inference_steps=1",
    '"nccl"': '"gloo"',
    'torch.device("cuda", dist.get_rank())': 'torch.device("cpu")',
    "torch.cuda.set_device(device)\n": "",
}


def snippets(language):
    """Return the fenced blocks of README.md in one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


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
    tiny_pipeline().save_pretrained(path / "svd")
    Image.new("RGB", (64, 64), "navy").save(path / "rocket.png")
    (path / "long.txt").write_text("It was a dark and stormy night. " * 8)
    return path


@pytest.fixture(scope="module")
def told(folder):
    """Return (names, output) after each Python snippet, run in one session of one process, as users type them."""
    names, found = {}, []
    before = Path.cwd()
    os.chdir(folder)
    try:
        for snippet in snippets("python"):
            if snippet.startswith(RANKS) or any(each in snippet for each in NEEDS_MORE):
                continue
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                exec(compile(runnable(snippet), "README.md", "exec"), names)
            found.append((dict(names), said.getvalue()))
    finally:
        os.chdir(before)
    return found


def test_every_shell_command_is_accounted_for():
    lines = [line.partition("#")[0].strip() for block in snippets("bash") for line in block.splitlines()]
    assert lines == list(NOT_RUN)
    for script in re.findall(r"scripts/\S+", " ".join(lines)):
        subprocess.run(["bash", "-n", ROOT / script], check=True)


def test_extras_that_are_named_exist(monkeypatch):
    named = set(re.findall(r"'\.\[(\w+)\]'", (ROOT / "README.md").read_text()))
    assert {"transformers", "diffusers", "triton", "eval", "video", "longbench"} <= named
    kept = {}
    monkeypatch.setattr("setuptools.setup", lambda **given: kept.update(given))
    exec(compile((ROOT / "setup.py").read_text(), "setup.py", "exec"), {"__file__": str(ROOT / "setup.py")})
    assert named <= set(kept["extras_require"])


def test_every_substitution_stands_for_something():
    text = "".join(snippets("python"))
    assert [each for each in (*INSTEAD, *NEEDS_MORE, RANKS) if each not in text] == []


def test_attention_of_the_first_snippet(told):
    names, said = told[0]
    assert names["out"].isfinite().all()
    assert names["lse"].shape == (1, 28, 1024)
    before, after = (float(value) for value in re.findall(r"tensor\(([\d.]+)", said))
    assert before > 65504 > after


def test_model_of_the_second_snippet(told):
    names, said = told[1]
    assert "2 of 2 attention modules run PASA" in said
    assert not names["handle"].active


def test_counters_of_the_third_snippet(told):
    assert "model.layers.1.self_attn" in told[2][1]


def test_video_of_the_fourth_snippet(told):
    frames = told[3][0]["frames"]
    assert [frame.size for frame in frames] == [(64, 64)] * 2


def test_pages_of_the_fifth_snippet(told):
    names, _ = told[4]
    assert names["out"].shape == (2, 28, 128)
    assert names["out"].isfinite().all()
    assert torch.equal(names["k_cache"][7, 4], names["k"][0])


def test_two_ranks_agree_with_one(folder, told):
    """Two ranks agree with one: `torchrun --nproc-per-node 2 long_prompt.py`, on CPUs."""
    assert "torchrun --nproc-per-node 2 long_prompt.py" in (ROOT / "README.md").read_text()
    (script,) = (each for each in snippets("python") if each.startswith(RANKS))
    (folder / "long_prompt.py").write_text(runnable(script))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "long_prompt.py"]
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    names = told[1][0]
    ids = names["tokenizer"]((folder / "long.txt").read_text(), return_tensors="pt").input_ids
    with torch.no_grad():
        expected = int(names["model"](ids).logits[0, -1].argmax())
    assert f"next token: {expected}" in done.stdout.splitlines()
