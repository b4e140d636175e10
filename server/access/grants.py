"""Grants: which models a key's holder may use, and how much."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ...memory.adapters.versions import split_version

NOWHERE = "\0"
"""A name that no adapter may have. A request for a model that its key may not use continues with this name, so it ends
like one for an unknown adapter.
"""

_ANSWERS = {"yes": True, "no": False}


class InvalidKey(ValueError):
    """A key that can't be used; the text never contains the key."""


@dataclass(frozen=True, slots=True)
class Grant:
    """A key's rights and limits; the defaults are everything that API keys may do."""

    adapters: tuple[str, ...] | None = None
    """Globs of the adapters that the key may use; None: all."""
    base: bool = True
    """The key may use the base model."""
    requests: int | None = None
    """Most requests at once."""
    tokens_per_minute: int | None = None
    weight: float | None = None
    """Share of a busy engine."""
    admin: bool = False
    """The key is an admin key."""

    @property
    def limited(self) -> bool:
        """True if the key may not use some models; it then sees nothing of them."""
        return self.adapters is not None or not self.base

    def allows(self, adapter: str | None) -> bool:
        """True if the key may use an adapter, or the base model (None)."""
        if adapter is None:
            return self.base
        names = (adapter, split_version(adapter)[0])  # rights to a name include its versions
        return self.adapters is None or any(fnmatchcase(name, glob) for glob in self.adapters for name in names)

    @classmethod
    def parse(cls, words: Iterable[str]) -> Grant:
        """The grant written after the tenant on a line of a key file. Raises InvalidKey."""
        values: dict[str, object] = {}
        for word in words:
            name, equals, text = word.partition("=")
            if name in values or not equals or not text:
                raise InvalidKey(f"after the tenant, give each right once, as NAME=VALUE, not {word[:80]!r}")
            try:
                values[name] = _READ[name](text)
            except (KeyError, ValueError):
                raise InvalidKey(f"there is no right {word[:80]!r}; {_RIGHTS}") from None
        grant = cls(**values)  # pyright: ignore[reportArgumentType] - each was read by its own parser
        if grant.admin and grant.limited:
            raise InvalidKey("an admin key may use every adapter and the base model; leave out adapters= and base=no")
        return grant

    def words(self) -> Iterator[str]:
        """The grant in words that `parse` reads."""
        for name in _READ:
            value = getattr(self, name)
            if value != getattr(ALL, name):
                text = ",".join(value) if isinstance(value, tuple) else f"{value:g}" if name == "weight" else value
                yield f"{name}={'yes' if value is True else 'no' if value is False else text}"


def _globs(text: str) -> tuple[str, ...]:
    return tuple(glob for glob in text.split(",") if glob)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 0 < int(text) < 1 << 53:
        raise ValueError
    return int(text)


def _weight(text: str) -> float:
    if not 0 < (weight := float(text)) < math.inf:
        raise ValueError
    return weight


_READ: dict[str, Callable[[str], object]] = {
    "adapters": _globs,
    "base": _ANSWERS.__getitem__,
    "requests": _count,
    "tokens_per_minute": _count,
    "weight": _weight,
    "admin": _ANSWERS.__getitem__,
}
_RIGHTS = (
    "there are adapters=GLOB,GLOB, base=yes|no, requests=N, tokens_per_minute=N, weight=W and admin=yes|no, N and W "
    "above zero"
)
ALL = Grant()
"""The grant of a key without rights on its line."""
