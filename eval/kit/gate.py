"""Sums up the checks of a run: the gate, which decides the exit status, and a sentence about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def gate(checks: Mapping[str, bool], **more: Any) -> dict[str, Any]:
    """Return the gate of a result, which passes if all checks hold."""
    return {"passed": all(checks.values()), "checks": dict(checks), **more}


def outcome(result: Mapping[str, Any]) -> str:
    """Return the sentence that names the checks that failed, or says that all hold."""
    checks = result["gate"]["checks"]
    if failed := [name for name, passed in checks.items() if not passed]:
        return f"FAILED: {', '.join(failed)}."
    return "All checks hold." if len(checks) > 1 else f"One check holds ({', '.join(checks)}); no other applies."
