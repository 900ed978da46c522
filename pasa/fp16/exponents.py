"""Solve for the powers of two by which a model's tensors may be scaled without changing what it computes.

A scaled tensor holds ``x * 2**-e``. Its exponent e is a linear form in unknowns, one for each parameter that can be
scaled. Every operation of a forward pass gives linear equations between the exponents of its operands: a sum needs
equal exponents, a product adds them, a softmax needs 0. What is left free by all equations can be chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

Form = dict[int, Fraction]
"""A linear form in unknowns: the coefficient of each unknown by its index. The empty form is the exponent 0."""


def add(first: Form, second: Form, factor: Fraction | int = 1) -> Form:
    """Return ``first + factor * second``."""
    total = dict(first)
    for unknown, coefficient in second.items():
        value = total.get(unknown, Fraction(0)) + factor * coefficient
        if value:
            total[unknown] = value
        else:
            total.pop(unknown, None)
    return total


def multiply(form: Form, factor: Fraction | int) -> Form:
    """Return ``factor * form``."""
    return {unknown: coefficient * factor for unknown, coefficient in form.items()} if factor else {}


@dataclass
class Equations:
    """Linear equations between exponents, solved one by one as they are added.

    Attributes
    ----------
    names : list of str
        Name of each unknown, in the order in which the forward pass met them.
    solved : dict of int to Form
        Each unknown that the equations fix, in terms of others.
    reasons : dict of int to str
        The equation that fixed each of them, as text.
    parents : dict of int to tuple of int
        The other unknowns in that equation.
    """

    names: list[str] = field(default_factory=list)
    solved: dict[int, Form] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    parents: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def unknown(self, name: str) -> Form:
        """Return the form of a new unknown."""
        self.names.append(name)
        return {len(self.names) - 1: Fraction(1)}

    def resolve(self, form: Form) -> Form:
        """Return the form in terms of unknowns that are still free."""
        total: Form = {}
        for unknown, coefficient in form.items():
            total = add(total, self._free(unknown), coefficient)
        return total

    def _free(self, unknown: int) -> Form:
        """Return an unknown in terms of free ones, and keep the answer for the next time."""
        if unknown not in self.solved:
            return {unknown: Fraction(1)}
        self.solved[unknown] = self.resolve(self.solved[unknown])
        return self.solved[unknown]

    def equate(self, first: Form, second: Form, reason: str) -> None:
        """Add the equation ``first == second``.

        Of the unknowns in it, the one that the forward pass met last is solved for. So what is met first stays free:
        the embedding of a residual stream, and not one of the many layers that write to it later.
        """
        written = add(first, second, -1)
        difference = self.resolve(written)
        if not difference:
            return
        last = max(difference, key=lambda unknown: (abs(difference[unknown]) == 1, unknown))
        coefficient = difference.pop(last)
        self.solved[last] = multiply(difference, -1 / coefficient)
        self.reasons[last] = reason
        self.parents[last] = tuple(sorted(written.keys() | difference.keys() - {last}))

    def why(self, form: Form) -> str:
        """Return the equation that leaves a form no freedom: of those on the ways from it to 0, the one met first."""
        behind, met, reason = list(form), set(form), "no parameter before it can be scaled"
        roots = []
        while behind:
            unknown = behind.pop(0)
            reason = self.reasons.get(unknown, reason)
            others = [each for each in self.parents.get(unknown, ()) if each not in met]
            if unknown in self.solved and not self.parents[unknown]:
                roots.append(unknown)
            behind += others
            met.update(others)
        return self.reasons[min(roots)] if roots else reason
