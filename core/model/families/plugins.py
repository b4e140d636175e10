"""Families that other distributions provide: entry points of `chorus.families`, each named by an architecture.

Tests: tests/core/model/families/test_plugins.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import EntryPoint, entry_points

from ..specs.config import UnsupportedModel
from ..specs.family import Family

GROUP = "chorus.families"


def plugin(architecture: str) -> Family | None:
    """The family that another distribution has for an architecture; None: none has.

    Raises UnsupportedModel, which names the distributions, if several have one or the only one can't be used.
    """
    found = list(entry_points(group=GROUP, name=architecture))
    if len(found) > 1:
        raise UnsupportedModel(
            f"{' and '.join(map(_source, found))} both provide {architecture}: uninstall one of them"
        )
    return _loaded(found[0]) if found else None


def plugins(served: Iterable[str]) -> Iterator[tuple[str, Family | str]]:
    """The architectures of all such families, each with its family or with the reason why it is not used.

    served: architectures of Chorus's own families, which take precedence.
    """
    own = set(served)
    for name in sorted({entry.name for entry in entry_points(group=GROUP)}):
        if name in own:
            yield name, "is not used: Chorus has a family of its own for this architecture"
            continue
        try:
            family = plugin(name)
        except UnsupportedModel as error:
            yield name, f"is not used: {error}"
        else:
            assert family is not None, "an entry point has this name"
            yield name, family


def _loaded(entry: EntryPoint) -> Family:
    """What an entry point names, checked."""
    try:
        family = entry.load()
    except Exception as error:
        raise UnsupportedModel(f"{_source(entry)} can't be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(family, Family):
        raise UnsupportedModel(f"{_source(entry)} is {type(family).__name__}: a Family is needed")
    if entry.name not in family.architectures:
        names = ", ".join(family.architectures)
        raise UnsupportedModel(f"{_source(entry)} has the architectures {names}, and {entry.name} is not among them")
    if family.model_types:
        raise UnsupportedModel(
            f"{_source(entry)} has model_types {', '.join(family.model_types)}: families of other distributions are "
            "found by architecture alone"
        )
    return family


def _source(entry: EntryPoint) -> str:
    """An entry point and its distribution, for people."""
    distribution = "" if entry.dist is None else f" of {entry.dist.name} {entry.dist.version}"
    return f"the entry point {entry.name} = {entry.value}{distribution}"
