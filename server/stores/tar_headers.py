"""Checks the headers of a tar file before the standard library reads them."""

from __future__ import annotations

import tarfile
from typing import Protocol

from .errors import StoreRefused

MAX_HEADER_BYTES = 64 << 10
"""Most bytes of one extended header, which the library reads whole."""

MAX_EXTENDED_BYTES = 1 << 20
"""Most bytes of all extended headers of an archive: the library keeps them."""

MAX_CHAIN = 8
"""Most extended headers of one member: the library reads a chain by recursion."""

_PAX_TYPES = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
_EXTENDED_TYPES = (*_PAX_TYPES, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_MOVES_MEMBERS = (b"GNU.sparse", b" size=")
"""Records of a PAX header that move the begin or end of a member's content away from its own header."""


class Readable(Protocol):
    """A stream of bytes."""

    def read(self, size: int, /) -> bytes: ...


class CheckedHeaders:
    """A tar file as `tarfile` reads it from its beginning; reading raises StoreRefused at a header that is not
    accepted.

    It refuses sparse members, whose maps the library keeps without a limit; extended headers that are long, many or in
    long chains; and more members than `max_members`.
    """

    def __init__(self, inner: Readable, max_members: int) -> None:
        self._inner = inner
        self._members_left = max_members
        self._extended_left = MAX_EXTENDED_BYTES
        self._chain = 0  # extended headers since the last member
        self._header = bytearray()  # a part of a header
        self._content_left = 0  # bytes before the next header
        self._pax: bytearray | None = None  # content of a PAX header
        self._is_over = False

    def read(self, size: int) -> bytes:
        data = self._inner.read(size)
        view = memoryview(data)
        while view and not self._is_over:
            view = view[self._pass_content(view) if self._content_left else self._pass_header(view) :]
        return data

    def _pass_content(self, view: memoryview) -> int:
        count = min(self._content_left, len(view))
        self._content_left -= count
        if self._pax is not None:
            self._pax += view[:count]
            if not self._content_left:
                self._check_pax(bytes(self._pax))
                self._pax = None
        return count

    def _pass_header(self, view: memoryview) -> int:
        count = min(tarfile.BLOCKSIZE - len(self._header), len(view))
        self._header += view[:count]
        if len(self._header) == tarfile.BLOCKSIZE:
            self._check(bytes(self._header))
            self._header.clear()
        return count

    def _check(self, header: bytes) -> None:
        if header.count(0) == tarfile.BLOCKSIZE:  # the library stops here
            self._is_over = True
            return
        try:
            found = tarfile.TarInfo.frombuf(header, tarfile.ENCODING, "surrogateescape")
        except tarfile.HeaderError as error:
            raise StoreRefused("its archive is broken", f"a header can't be read: {error}") from None
        if found.type == tarfile.GNUTYPE_SPARSE:
            raise StoreRefused("its archive has a sparse member")
        if found.size < 0:
            raise StoreRefused("its archive is broken", f"a member has {found.size} bytes")
        if found.type in _EXTENDED_TYPES:
            self._check_extended(found)
        else:
            self._chain = 0
            self._members_left -= 1
            if self._members_left < 0:
                raise StoreRefused("its archive has too many members")
        has_content = found.isreg() or found.type in _EXTENDED_TYPES or found.type not in tarfile.SUPPORTED_TYPES
        self._content_left = -(-found.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE if has_content else 0

    def _check_extended(self, found: tarfile.TarInfo) -> None:
        self._chain += 1
        self._extended_left -= found.size
        if found.size > MAX_HEADER_BYTES or self._extended_left < 0 or self._chain > MAX_CHAIN:
            raise StoreRefused("its archive has an extended header that is too long, or too many of them")
        self._pax = bytearray() if found.type in _PAX_TYPES and found.size else None

    def _check_pax(self, content: bytes) -> None:
        for record in _MOVES_MEMBERS:
            if record in content:
                raise StoreRefused(
                    "its archive has a sparse member, or one whose size is in an extended header",
                    f"a PAX header has {record.decode().strip()}",
                )
