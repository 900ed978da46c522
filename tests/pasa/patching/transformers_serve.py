"""The server of the page on transformers answers with PASA; run by scripts/test_transformers.sh, which installs it."""

from __future__ import annotations

import json
import os
import socket
import string
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import torch
import transformers as hf
from tokenizers import Tokenizer, models

import pasa
from tests.docs.pages import ROOT, blocks

PAGE = ROOT / "docs/hosts/transformers.md"
PROMPTS = ["hello world", "a b c d", "the the the the the", "x"]
TOKENS = 8
COUNTER = """
calls, attention = [], pasa.attention_varlen
pasa.attention_varlen = lambda *args, **how: print("PASA attends", flush=True) or attention(*args, **how)
"""


def save_model(folder):
    """Write a model of letters in FP16 and its tokenizer."""
    letters = ["<end>", "<unknown>", *string.ascii_letters, *string.digits, " "]
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    names = {"eos_token": "<end>", "pad_token": "<end>", "unk_token": "<unknown>"}
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = hf.Qwen2Config(
        **sizes, num_key_value_heads=2, vocab_size=len(letters), initializer_range=0.2, eos_token_id=None,
        max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    hf.Qwen2ForCausalLM(config).half().save_pretrained(folder)


def expected(folder):
    """Return the texts that the patched model generates from each prompt alone."""
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16)
    texts = []
    with pasa.patch_pipeline(model):
        for prompt in PROMPTS:
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            out = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
            texts.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return texts


def ask(url, model, prompt):
    """Return the server's completion; wait up to two minutes for the server to start."""
    body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    for _ in range(120):
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["choices"][0]["text"]
        except urllib.error.HTTPError:
            raise
        except urllib.error.URLError:
            time.sleep(1)
    raise TimeoutError(url)


def test_the_server_of_the_page_gives_the_tokens_of_each_prompt_alone(tmp_path):
    save_model(tmp_path)
    (snippet,) = (each for each in blocks(PAGE, "python") if "transformers.cli.serve" in each)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    start = f'Serve("{tmp_path}", port={port}, device="cpu", cb_num_blocks=64, cb_max_batch_tokens=32,'
    script = snippet.replace('Serve("Qwen/Qwen2-7B-Instruct",', COUNTER + start)
    assert COUNTER in script
    log = (tmp_path / "log").open("w")
    server = subprocess.Popen([sys.executable, "-c", script], stdout=log, stderr=log, env={**os.environ}, cwd=ROOT)
    try:
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            url = f"http://localhost:{port}/v1/completions"
            texts = list(pool.map(lambda prompt: ask(url, str(tmp_path), prompt), PROMPTS))
    finally:
        server.terminate()
        server.wait(30)
    said = (tmp_path / "log").read_text()
    assert "PASA attends" in said, said
    assert texts == expected(tmp_path)
