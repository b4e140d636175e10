"""Several adapters in one request, each with a scale, written as `A*0.7+B*0.5`.

All that they add is summed: PEFT's `add_weighted_adapter` with the combination `cat`.

Tests: tests/memory/adapters/test_composition.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

MAX_TERMS = 16
MAX_SCALE = 1e4

_TERM = r"([^*+]+)(?:\*\s*(-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*)?"
_TERMS = re.compile(rf"{_TERM}(?:\+{_TERM})*")
_ONE = re.compile(_TERM)
_CODES = {"%25": "%", "%2A": "*", "%2B": "+"}
_CODE = re.compile("|".join(_CODES), re.IGNORECASE)


class InvalidComposition(ValueError):
    """Scales or numbers of adapters that can't be served; the message says why."""


class Composition(NamedTuple):
    """Adapters of a request."""

    terms: tuple[tuple[str, float], ...]
    """Name and scale of each: sorted by name, each name once, no scale zero."""

    named: tuple[str, ...]
    """All names that were given, those with the scale zero, too."""

    @classmethod
    def of(cls, given: Iterable[tuple[str, float]]) -> Composition:
        """The composition of names and scales; those of one name add up. Raises InvalidComposition."""
        scales: dict[str, float] = {}
        for name, scale in given:
            if not math.isfinite(scale) or abs(scale) > MAX_SCALE:
                raise InvalidComposition(
                    f"the scale of {name[:80]!r} is {scale}; a number from {-MAX_SCALE:g} to {MAX_SCALE:g} is needed"
                )
            scales[name] = scales.get(name, 0.0) + scale
        if len(scales) > MAX_TERMS:
            raise InvalidComposition(f"{len(scales)} adapters are named, at most {MAX_TERMS} can serve one request")
        terms = tuple((name, scale) for name, scale in sorted(scales.items()) if scale)
        return cls(terms, tuple(sorted(scales)))

    @property
    def model(self) -> str | None:
        """The one name for it: two compositions of it are equal. A single adapter with the scale 1 has its own name;
        None: nothing is added to the base model.
        """
        if not self.terms:
            return None
        if len(self.terms) == 1 and self.terms[0][1] == 1:
            return self.terms[0][0]
        return "+".join(f"{_coded(name)}*{_shortest(scale)}" for name, scale in self.terms)


def read_composition(name: str) -> Composition | None:
    """The composition that a model's name is; None if it is no composition: no term of it has a scale.

    In names of adapters, `*`, `+` and `%` are written as %2A, %2B and %25. Raises InvalidComposition.
    """
    if "*" not in name or _TERMS.fullmatch(name) is None:
        return None
    found = [(each[1].strip(), each[2]) for each in _ONE.finditer(name)]
    return Composition.of(
        (_CODE.sub(lambda code: _CODES[code[0].upper()], term), 1.0 if scale is None else float(scale))
        for term, scale in found
    )


def is_composition(name: str) -> bool:
    """True if a name can't be an adapter's, because it is a composition or would be one with other scales."""
    try:
        return read_composition(name) is not None
    except InvalidComposition:
        return True


def without_scales(model: str) -> str:
    """The name of the same adapters, each with the scale 1; a name that is no composition is itself."""
    try:
        composition = read_composition(model)
    except InvalidComposition:
        return model
    if composition is None:
        return model
    return Composition.of((name, 1.0) for name, _ in composition.terms).model or model


def _coded(name: str) -> str:
    return name.replace("%", "%25").replace("*", "%2A").replace("+", "%2B")


def _shortest(scale: float) -> str:
    return repr(scale).removesuffix(".0")
