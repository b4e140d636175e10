"""The simulator's classes override public hooks of the serving ones, and only those."""

from __future__ import annotations

import pytest

from chorus.perf.simulate import adapters, engine, link, scheduler

SIMULATED = [
    kind
    for module in (adapters, engine, link, scheduler)
    for kind in vars(module).values()
    if isinstance(kind, type) and kind.__module__ == module.__name__
]


def serving_bases(kind: type) -> list[type]:
    return [base for base in kind.__mro__[1:] if base.__module__.startswith(("chorus.core", "chorus.memory"))]


@pytest.mark.parametrize("kind", [kind for kind in SIMULATED if serving_bases(kind)], ids=lambda kind: kind.__name__)
def test_what_is_overridden_is_public(kind):
    private = {name for name in vars(kind) if name.startswith("_") and not name.startswith("__")}
    overridden = {name for name in private for base in serving_bases(kind) if callable(vars(base).get(name))}
    assert overridden == set()


def test_no_method_calls_a_method_that_its_base_lacks():
    """`super().name()` of a hook that is gone would raise, should it ever be called."""
    for kind in SIMULATED:
        bases = serving_bases(kind)
        for name, method in vars(kind).items():
            code = getattr(method, "__code__", None)
            if bases and code is not None and "super" in code.co_names and not name.startswith("__"):
                assert any(name in vars(base) for base in bases), f"{kind.__name__}.{name}"
