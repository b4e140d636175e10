"""Stores that other packages provide: an entry point of `chorus.adapter_sources` makes a URL scheme of its name."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from .errors import NoAccess, NotInStore, StoreAway, StoreError, StoreRefused

if TYPE_CHECKING:
    from .deadline import Deadline

GROUP = "chorus.adapter_sources"

logger = logging.getLogger(__name__)


def plugin(scheme: str) -> EntryPoint | None:
    """Return the entry point of a URL scheme. The first of two packages with the same one provides it."""
    return next(iter(entry_points(group=GROUP, name=scheme)), None)


def schemes() -> list[str]:
    return sorted({each.name for each in entry_points(group=GROUP)})


class PluginStore:
    """A directory, or one file, in a store that another package reads.

    The entry point is called with the URL and the seconds left, and returns an object with
    `read(name) -> Iterable[bytes]`: the file `name` of the adapter, or what the URL names for an empty name. It raises
    FileNotFoundError where there is none, PermissionError or ValueError where a retry is useless, and any other
    exception where it may help.
    """

    def __init__(self, scheme: str, url: str, deadline: Deadline) -> None:
        self._deadline = deadline
        found = plugin(scheme)
        if found is None:
            raise StoreRefused("the server lacks the package that reads its store", f"no plugin for {scheme}")
        with _Translated(found.name):
            self._store: Any = found.load()(url, deadline.left(float("inf")))

    def read(self, name: str) -> Iterator[bytes]:
        with _Translated(name):
            chunks: Iterable[bytes] = self._store.read(name)
            for chunk in chunks:
                if not isinstance(chunk, bytes | bytearray | memoryview):
                    raise TypeError(f"read({name!r}) gave {type(chunk).__name__}, bytes are needed")
                self._deadline.left()
                yield bytes(chunk)


class _Translated:
    """Turns a plugin's exceptions into StoreErrors; clients are told no more than the kind."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, StoreError) or not isinstance(error, Exception):
            return
        detail = f"{type(error).__name__}: {error}"
        if isinstance(error, FileNotFoundError):
            raise NotInStore("its store does not have it", detail) from None
        if isinstance(error, PermissionError):
            raise NoAccess("its store refuses access", detail) from None
        if isinstance(error, ValueError):
            raise StoreRefused("its store refuses access", detail) from None
        logger.warning("a plugin of %s failed for %r", GROUP, self._name, exc_info=error)
        raise StoreAway("its store does not answer, or breaks off", detail) from None
