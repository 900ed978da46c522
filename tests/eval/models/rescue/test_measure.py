"""One prefill gives the text that `generate` gives and the perplexity that the loss gives."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from pasa.eval.models.rescue import measure

IDS = torch.arange(3, 80)[None]


def reader(end=None):
    return SimpleNamespace(eos_token_id=end, decode=lambda tokens: " ".join(map(str, tokens)))


def test_tokens_and_perplexity(tiny):
    run = measure.generate(tiny, reader(), IDS, 9)
    expected = tiny.generate(IDS, max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert run.tokens == expected[0, IDS.shape[1] :].tolist()
    with torch.no_grad():
        assert run.perplexity == pytest.approx(math.exp(tiny(IDS, labels=IDS).loss), rel=1e-6)
    assert run.nonfinite_logits == 0
    assert (run.stopped, len(run.tokens), run.scores) == ("length", 9, [])


@pytest.mark.parametrize("length", [2, 127, 128, 129, 257])
def test_chunks_do_not_change_the_loss(length):
    generator = torch.Generator().manual_seed(length)
    logits = torch.randn(length, 11, generator=generator)
    ids = torch.randint(0, 11, (length,), generator=generator)
    losses, nonfinite = measure.token_losses(logits, ids)
    assert losses.mean() == pytest.approx(torch.nn.functional.cross_entropy(logits[:-1], ids[1:]).item(), rel=1e-5)
    assert nonfinite == 0


def test_it_stops_at_the_end_of_text(tiny):
    first = measure.generate(tiny, reader(), IDS, 1).tokens[0]
    run = measure.generate(tiny, reader(end=first), IDS, 9)
    assert (run.tokens, run.stopped) == ([first], "end of text")


def test_it_stops_when_logits_are_no_numbers(tiny):
    with torch.no_grad():
        tiny.model.norm.weight.fill_(float("nan"))
    run = measure.generate(tiny, reader(), IDS, 9)
    assert (run.perplexity, run.nonfinite_logits, run.stopped) == (None, 1.0, "logits not finite")
    assert len(run.tokens) == 1
