"""A list of modules in a quantisation's configuration, such as those that are not quantised."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

_REGEX = "re:"


class ModuleList:
    """Names, ends or beginnings of names, patterns with `*`, and regular expressions, which begin with `re:`.

    Tools disagree on the modules that a partial name matches. Such a match only counts if the file agrees.
    """

    def __init__(self, entries: Sequence[str] = ()) -> None:
        self._names = [entry.strip(".") for entry in entries if not entry.startswith(_REGEX)]
        self._patterns = [re.compile(entry.removeprefix(_REGEX)) for entry in entries if entry.startswith(_REGEX)]

    def __bool__(self) -> bool:
        return bool(self._names or self._patterns)

    def has(self, module: str) -> bool:
        """True if an entry is the module's name, its first or last parts, or a pattern or expression that matches."""
        return any(_names(each, module) for each in self._names) or any(each.match(module) for each in self._patterns)

    def may_have(self, module: str) -> bool:
        """True if an entry is some part of the module's name, or matches it as an expression."""
        return self.has(module) or any(each in module or _matches(each, module) for each in self._names)


def _names(entry: str, module: str) -> bool:
    dotted = f".{module}."
    return fnmatchcase(module, entry) or dotted.startswith(f".{entry}.") or dotted.endswith(f".{entry}.")


def _matches(pattern: str, module: str) -> bool:
    try:
        return re.match(pattern, module) is not None
    except re.error:
        return False
