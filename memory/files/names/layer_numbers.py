"""Numbers of layers of which several stand under one in a checkpoint, as in adapters of it.

Tests: tests/memory/files/names/test_layer_numbers.py
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
from typing import Protocol

_NAME = re.compile(r"^(|.*?\.)(layers\.)([0-9]{1,6})(\..*)$")


@dataclass(frozen=True, slots=True)
class LayerNumbers:
    """Some layers stand under one number, and paths of their parts tell them apart by a further one (LongCat-Flash).

    A path that has none is of the first of them.
    """

    layers: int
    """Layers under one number."""

    paths: tuple[tuple[str, str], ...]
    """Beginnings of paths of parts that each layer has → their names there, with `{}` for the further number."""

    def given(self, name: str) -> str:
        """The name there of what a layer with a number of its own has."""
        if (match := _NAME.match(name)) is None:
            return name
        number, place = divmod(int(match[3]), self.layers)
        path = match[4].removeprefix(".")
        for own, other in self.paths:
            if _begins(path, own):
                path = other.format(place) + path.removeprefix(own)
                break
        return f"{match[1]}{match[2]}{number}.{path}"

    def own(self, name: str) -> str:
        """The name, with the layer's own number, of what has this name there."""
        if (match := _NAME.match(name)) is None:
            return name
        first, path = int(match[3]) * self.layers, match[4].removeprefix(".")
        for place in range(self.layers):
            for own, other in self.paths:
                if _begins(path, other.format(place)):
                    return f"{match[1]}{match[2]}{first + place}.{own}{path.removeprefix(other.format(place))}"
        return f"{match[1]}{match[2]}{first}.{path}"

    def named(self, names: Container[str]) -> Container[str]:
        """The names by which `given` finds something among `names`."""
        return GivenNames(self, names)


class Renumbers(Protocol):
    """Tells names of parts of layers there and here apart."""

    def given(self, name: str, /) -> str:
        """The name there."""
        ...

    def own(self, name: str, /) -> str:
        """The name here."""
        ...

    def named(self, names: Container[str], /) -> Container[str]:
        """The names by which `given` finds something among `names`."""
        ...


@dataclass(frozen=True, slots=True)
class GivenNames:
    """The names here of what has some names there."""

    numbers: Renumbers
    names: Container[str]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.numbers.given(name) in self.names


def _begins(path: str, own: str) -> bool:
    return path == own or path.startswith(f"{own}.")
