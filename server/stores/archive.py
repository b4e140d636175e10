"""Extracts an adapter's files from an untrusted archive.

No name in the archive is used for writing: the contents of an adapter's files go into a staged upload, and all
other members are skipped. So paths and links in the archive have no effect. Archives with paths that lead outside are
refused anyway, as are archives that unpack to more than allowed.

Tests: tests/server/stores/test_download.py
"""

from __future__ import annotations

import errno
import gzip
import math
import os
import stat
import tarfile
import zipfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, BinaryIO

from ...memory.files.uploads.content_store import StagedUpload, TooLarge
from .deadline import Deadline
from .errors import StoreError, StoreRefused
from .tar_headers import CheckedHeaders

SUFFIXES = (".tar.gz", ".tgz", ".tar", ".zip")
MAX_MEMBERS = 4096
MAX_ZIP_DIRECTORY_BYTES = 1 << 20
"""Most bytes of a zip file's directory, which is read whole."""

_UNPACKS_TO_TOO_MUCH = "its archive unpacks to more than an adapter may have (adapter_source_bytes)"
_DISK_ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT)
_CHUNK_BYTES = 1 << 20
_ZIP_MEMBER, _ZIP_END, _ZIP_END_BYTES = b"PK\1\2", b"PK\5\6", 22
_ZIP64_END, _ZIP64_LOCATOR, _ZIP64_LOCATOR_BYTES = b"PK\6\6", b"PK\6\7", 20


@dataclass(frozen=True, slots=True)
class Archive:
    """An untrusted archive.

    kind: its suffix. max_bytes: limit on all unpacked bytes, including skipped members.
    """

    file: BinaryIO
    kind: str
    max_bytes: int
    deadline: Deadline

    def unpack(self, needed: tuple[str, ...], more: Collection[str], draft: StagedUpload, aside: BinaryIO) -> None:
        """Write the files `needed`, all from one of its directories, and those of `more` that are beside them into a
        staged upload. Raises StoreRefused for an invalid archive.

        aside: an empty file that holds those of `more` until the directory is known.
        """
        places: dict[str, str] = {}
        kept: dict[tuple[str, str], tuple[int, int]] = {}
        with _refused_if_broken():
            for parent, name, content in self._files({*needed, *more}):
                if name in places or (parent, name) in kept:
                    raise StoreRefused(f"{name} appears twice in its archive")
                if name in needed:
                    places[name] = parent
                    _write(draft, name, content)
                else:
                    kept[parent, name] = self._keep(aside, content)
        if len(places) < len(needed) or len(set(places.values())) > 1:
            raise StoreRefused(f"its archive does not have {' and '.join(needed)} in one directory")
        (parent,) = set(places.values())
        for (own, name), place in kept.items():
            if own == parent:
                _write(draft, name, _kept(aside, *place))

    def _files(self, names: Collection[str]) -> Iterator[tuple[str, str, Iterator[bytes]]]:
        """Directory, name and content of each member with one of these names."""
        for count, (path, content) in enumerate(self._members(), 1):
            if count > MAX_MEMBERS:
                raise StoreRefused(f"its archive has more than {MAX_MEMBERS} members")
            parent, name = _split(path)
            if name in names:
                yield parent, name, self._chunks(name, content)

    def _members(self) -> Iterator[tuple[str, IO[bytes] | None]]:
        if self.kind == ".zip":
            return _zip_members(self.file)
        return _tar_members(self.file, self.kind, self.max_bytes, self.deadline)

    def _keep(self, aside: BinaryIO, content: Iterator[bytes]) -> tuple[int, int]:
        """Copy a member to the end of `aside`; returns where it begins and ends there."""
        begin = end = aside.seek(0, os.SEEK_END)
        for chunk in content:
            end += len(chunk)
            if end > self.max_bytes:
                raise StoreRefused(_UNPACKS_TO_TOO_MUCH)
            aside.write(chunk)
        return begin, end

    def _chunks(self, name: str, content: IO[bytes] | None) -> Iterator[bytes]:
        if content is None:
            raise StoreRefused(f"{name} in its archive is not a regular file")
        while chunk := content.read(_CHUNK_BYTES):
            self.deadline.left()
            yield chunk


def _write(draft: StagedUpload, name: str, content: Iterator[bytes]) -> None:
    for chunk in content:
        draft.write(name, chunk)


def _kept(aside: BinaryIO, begin: int, end: int) -> Iterator[bytes]:
    """What `Archive._keep` put between two places."""
    aside.seek(begin)
    for start in range(begin, end, _CHUNK_BYTES):
        yield aside.read(min(_CHUNK_BYTES, end - start))


@contextmanager
def _refused_if_broken() -> Iterator[None]:
    """Turns what the libraries raise for a broken archive, which is all sorts of errors, into StoreRefused."""
    try:
        yield
    except (TooLarge, StoreError):
        raise
    except Exception as error:
        if getattr(error, "errno", None) in _DISK_ERRORS:
            raise
        message = f"the archive can't be read: {type(error).__name__}: {error}"
        raise StoreRefused("its archive is broken", message) from None


def _split(path: str) -> tuple[str, str]:
    """Directory and name of a member. Raises StoreRefused for a path that leads out of the archive."""
    if path.startswith("/") or "\\" in path or ".." in path.split("/"):
        raise StoreRefused("its archive has a path that leads out of it")
    return os.path.split(os.path.normpath(path))


def _tar_members(
    archive: BinaryIO, kind: str, max_bytes: int, deadline: Deadline
) -> Iterator[tuple[str, IO[bytes] | None]]:
    archive.seek(0)
    raw: Any = _BoundedReader(archive, math.inf, deadline)
    plain: Any = raw if kind == ".tar" else gzip.GzipFile(fileobj=raw)
    reader: Any = CheckedHeaders(_BoundedReader(plain, max_bytes, deadline), MAX_MEMBERS)
    with tarfile.open(fileobj=reader, mode="r|") as tar:
        for member in tar:
            is_file = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE)
            yield member.name, tar.extractfile(member) if is_file else None


def _zip_members(archive: BinaryIO) -> Iterator[tuple[str, IO[bytes] | None]]:
    _check_zip_directory(archive)
    with zipfile.ZipFile(archive) as file:
        for member in file.infolist():
            if member.is_dir() or stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG):
                yield member.filename, None
                continue
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise StoreRefused("its archive must be compressed with deflate")
            with file.open(member) as content:
                yield member.filename, content


def _check_zip_directory(archive: BinaryIO) -> None:
    """Raises StoreRefused for a zip directory that the library would not find by the single record at its end, and for
    a long one: the library turns all of it into objects before the first member can be read.
    """
    size = archive.seek(0, os.SEEK_END)
    begin = max(0, size - (1 << 16) - _ZIP_END_BYTES - _ZIP64_LOCATOR_BYTES)
    archive.seek(begin)
    tail = archive.read()
    end = tail.find(_ZIP_END)
    if end < 0 or tail.count(_ZIP_END) > 1 or len(tail) < end + _ZIP_END_BYTES:
        raise StoreRefused("its archive has no directory, or more than one")
    if _ZIP64_LOCATOR in tail or _ZIP64_END in tail:
        raise StoreRefused("its archive is a zip64 file, which is not supported")
    num_bytes = int.from_bytes(tail[end + 12 : end + 16], "little")
    if num_bytes > min(MAX_ZIP_DIRECTORY_BYTES, begin + end):
        raise StoreRefused("its archive has a directory that is too long")
    archive.seek(begin + end - num_bytes)
    if archive.read(num_bytes).count(_ZIP_MEMBER) > MAX_MEMBERS:
        raise StoreRefused(f"its archive has more than {MAX_MEMBERS} members")
    archive.seek(0)


class _BoundedReader:
    """A stream's contents, up to `max_bytes` and until the deadline."""

    def __init__(self, inner: BinaryIO | IO[bytes], max_bytes: float, deadline: Deadline) -> None:
        self._inner = inner
        self._left = max_bytes + (MAX_MEMBERS << 10)
        self._deadline = deadline

    def read(self, size: int) -> bytes:
        self._deadline.left()
        data = self._inner.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise StoreRefused(_UNPACKS_TO_TOO_MUCH)
        return data
