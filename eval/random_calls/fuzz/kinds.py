"""All kinds of case."""

from __future__ import annotations

from pasa.eval.random_calls.fuzz import attention, calls, others, paged
from pasa.eval.random_calls.fuzz.cases import Kind

KINDS: dict[str, Kind] = {"attention": attention.KIND} | calls.KINDS | paged.KINDS | others.KINDS
