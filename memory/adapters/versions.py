"""Names of adapters and versions: `name` is the newest version, `name@version` an older version that is kept."""

from __future__ import annotations

import re
from collections.abc import ItemsView, Iterator, ValuesView
from typing import Generic, Protocol, TypeVar

MARK = "@"
"""Separates a name from a version."""


LABEL = re.compile(r"[A-Za-z0-9._+-]{1,64}")
"""A version label as clients may give it."""


class HasLabel(Protocol):
    """Anything with a version label."""

    @property
    def label(self) -> str: ...


V = TypeVar("V", bound=HasLabel)

MAX_NUMBER = 10**15 - 1
"""The largest version number that a client may choose."""

MAX_COUNTED = 100_000
"""Names without an adapter whose last version number is remembered."""


def number_of(label: str) -> int | None:
    """The number of a numeric version; None for a text label such as `step-3` or `007`."""
    return int(label) if label.isdecimal() and (label == "0" or label[0] != "0") else None


def versioned(name: str, label: str) -> str:
    return f"{name}{MARK}{label}"


def split_version(name: str) -> tuple[str, str]:
    """Split a name into the plain name and the version; the version is "" if there is none."""
    plain, mark, label = name.rpartition(MARK)
    return (plain, label) if mark and plain and label else (name, "")


def plain_of(name: str, label: str | None) -> str:
    """The name without the version, if it ends with this one."""
    plain, own = split_version(name)
    return plain if own and own == label else name


def full_name(name: str, label: str) -> str:
    """`name@label` of a version, which may be its own name already."""
    return versioned(plain_of(name, label), label)


class VersionNames(Generic[V]):
    """Maps names to versions. Iterates over names; kept versions are names, too, oldest first."""

    def __init__(self) -> None:
        self._all: dict[str, V] = {}
        self._kept: dict[str, dict[str, None]] = {}
        self._last: dict[str, int] = {}
        self._first = 0  # no name whose last number was forgotten had a higher number

    def last_number(self, name: str) -> int:
        """The highest version number that a name has had; 0 before its first."""
        return self._last.get(name, self._first)

    def find(self, name: str) -> V | None:
        """The version of a name; `name@version` may also name the newest version."""
        one = self._all.get(name)
        if one is None:
            plain, label = split_version(name)
            is_own = plain_of(plain, label) != plain  # `name@label` is an adapter of its own, and no version of it is
            newest = self._all.get(plain) if label and not is_own else None
            one = newest if newest is not None and newest.label == label else None
        return one

    def latest(self, name: str) -> V | None:
        """The same; a name without a version of its own means the latest kept one."""
        kept = self._kept.get(name)
        return self._all[next(reversed(kept))] if kept and name not in self._all else self.find(name)

    def put(self, name: str, one: V, keep: int | None = 1) -> list[V]:
        """Make a name mean `one`; return the versions that no name means any more.

        keep: number of versions of the name to keep, including the newest. None: leave the kept versions alone, and
        don't keep the present newest version.
        """
        gone, before = [], self._all.get(name)
        self._set(name, one)
        if before is not None:
            alias = versioned(name, before.label)
            if keep is None or keep == 1 or alias in self._all:
                gone.append(before)
            else:
                self._set(alias, before)
        kept = self.kept(name) if keep is not None else ()
        return gone + [self.pop(alias) for alias in kept[: max(0, len(kept) + 1 - (keep or 1))]]

    def pop(self, name: str) -> V:
        """Forget a name, but not its kept versions. Raises KeyError."""
        one = self._all.pop(name)
        self._forget_counts()
        plain, _ = split_version(name)
        if name in (kept := self._kept.get(plain, {})):
            del kept[name]
            if not kept:
                del self._kept[plain]
        return one

    def promote(self, name: str) -> V:
        """Forget the newest version of a name; the latest kept version, if there is one, becomes the newest."""
        kept = self.kept(name)
        if not kept:
            return self.pop(name)
        newest, self._all[name] = self._all[name], self._all[kept[-1]]
        self.pop(kept[-1])
        return newest

    def kept(self, name: str) -> list[str]:
        """Names of the kept versions of a name, oldest first."""
        return list(self._kept.get(name, ()))

    def items(self) -> ItemsView[str, V]:
        return self._all.items()

    def values(self) -> ValuesView[V]:
        return self._all.values()

    def __contains__(self, name: str) -> bool:
        return name in self._all

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def _set(self, name: str, one: V) -> None:
        self._all[name] = one
        plain, label = split_version(name)
        is_kept = bool(label) and one.label == label
        if is_kept:
            self._kept.setdefault(plain, {})[name] = None
        if (number := number_of(one.label)) is not None:
            counted = plain if is_kept else name
            self._last[counted] = max(number, self._last.get(counted, self._first))

    def _forget_counts(self) -> None:
        """Once there are many names without an adapter, forget their numbers; no number of theirs is given again."""
        if len(self._last) > 2 * len(self._all) + MAX_COUNTED:
            gone = [name for name in self._last if name not in self._all]
            self._first = max(self._first, *(self._last.pop(name) for name in gone))
