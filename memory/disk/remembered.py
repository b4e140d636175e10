"""Hashes of files that are read once, and recalled while nothing about the files has changed.

Tests: tests/memory/disk/test_remembered.py, tests/core/test_kv_identity.py
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from ..host.fault_log import FaultLog

logger = logging.getLogger(__name__)

MOST = 1 << 16
"""Hashes in a file; when it has more, the newer half stays."""

_MOST_BYTES = 1 << 26
"""That are read of a file, its last ones; a longer one is written anew."""


class RememberedHashes:
    """A file of hashes by marks, a line each, for any thread and for several servers at once.

    ```
    <hash of the marks> <hash of the content> <seal of both>
    ```

    A mark names all that changes when a file does. A line with another seal is not believed. If the file can't be read
    or written, hashes are computed again.
    """

    def __init__(self, path: Path, seal: Callable[[bytes], bytes], most: int = MOST) -> None:
        """seal: keyed hash of data, so that nobody else's lines are believed."""
        self._path, self._seal, self._most = path, seal, most
        self._lock = threading.Lock()
        self._known: dict[str, str] | None = None
        self._faults = FaultLog(logger)

    def recall(self, mark: str) -> str | None:
        """The hash of what has a mark; None if it is not known."""
        with self._lock:
            return self._read().get(_digest(mark))

    def remember(self, mark: str, content: str) -> None:
        """Keep the hash of what has a mark."""
        name = _digest(mark)
        with self._lock:
            known = self._read()
            if known.get(name) == content:
                return
            known[name] = content
            self._write([self._line(name, content)], os.O_APPEND, self._path)

    def _read(self) -> dict[str, str]:
        """All hashes; the file is read once. The caller holds the lock."""
        if self._known is None:
            found: dict[str, str] = {}
            size = 0
            with suppress(OSError), self._path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - _MOST_BYTES))
                text = file.read(_MOST_BYTES).decode("ascii", "backslashreplace")  # a damaged line spoils no other
                found = dict(self._sound(text.splitlines()))
            if len(found) > self._most or size > _MOST_BYTES:
                found = dict(list(found.items())[-(self._most // 2) :])
                self._rewrite(found)
            self._known = found
        return self._known

    def _sound(self, lines: list[str]) -> Iterator[tuple[str, str]]:
        for line in lines:
            name, _, rest = line.partition(" ")
            content, _, _ = rest.partition(" ")
            if hmac.compare_digest(line, self._line(name, content)):
                yield name, content

    def _line(self, name: str, content: str) -> str:
        return f"{name} {content} {self._seal(f'{name} {content}'.encode()).hex()}"

    def _rewrite(self, found: dict[str, str]) -> None:
        new = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        if self._write([self._line(*each) for each in found.items()], os.O_TRUNC, new):
            with suppress(OSError):  # the longer file stays
                new.replace(self._path)

    def _write(self, lines: list[str], flag: int, path: Path) -> bool:
        kind = f"writing {self._path}"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | flag, 0o600)
            with os.fdopen(fd, "ab") as file:  # a line that another process tore must not spoil this one
                file.write("".join(f"\n{line}\n" for line in lines).encode("ascii"))
        except OSError as error:
            reason = error.strerror or str(error)
            self._faults.failed(kind, reason, f"{path} could not be written: {reason}")
            return False
        self._faults.worked(kind)
        return True


def _digest(mark: str) -> str:
    return hashlib.blake2b(mark.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
