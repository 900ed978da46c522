"""All kinds of case."""

from __future__ import annotations

from pasa.eval.fuzz import attention, calls, others, paged
from pasa.eval.fuzz.cases import Kind

KINDS: dict[str, Kind] = {"attention": attention.KIND} | calls.KINDS | paged.KINDS | others.KINDS
