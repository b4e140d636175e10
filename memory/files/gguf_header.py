"""The header of a GGUF file from an untrusted source: metadata and tensors, read with limits.

The gguf package maps the file, which kills the process if the file is cut while it is read, and has no limits.

Tests: tests/memory/files/test_gguf_header.py.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

from .error import AdapterFormatError, shown
from .tensor_file import ITEM_BYTES, MAX_DIMENSIONS, MAX_HEADER_BYTES, MAX_TENSORS, TensorFile
from .tensor_info import TensorInfo

MAX_FIELDS = 1024

_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_TYPES = {0: "F32", 1: "F16", 30: "BF16"}
_MAX_ALIGNMENT = 1 << 16


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata by name, and tensors with their places in the file; a shape is in numpy's order."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @classmethod
    def read(cls, file: TensorFile) -> GgufHeader:
        """Raises AdapterFormatError for a file that is broken, too large, or stored in other types."""
        data = bytearray(min(file.size, MAX_HEADER_BYTES))
        file.read_into(memoryview(data), 0)
        try:
            return _HeaderReader(bytes(data), file.size).header()
        except _Broken as error:
            raise AdapterFormatError(f"{file.path}: {error}") from None


class _Broken(ValueError):
    """The reason why a file is refused."""


class _HeaderReader:
    """Reads values one after another. size: of the whole file."""

    def __init__(self, data: bytes, size: int) -> None:
        self._data = data
        self._size = size
        self._at = 0

    def header(self) -> GgufHeader:
        if self._take(4) != b"GGUF":
            raise _Broken("is not a GGUF file, by its first bytes; download it again")
        version = self._number("I")
        if version not in _VERSIONS:
            raise _Broken(f"is GGUF of version {version}; versions 2 and 3 are read, of little-endian machines")
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        if num_tensors > MAX_TENSORS or num_fields > MAX_FIELDS:
            raise _Broken(
                f"has {num_tensors} tensors and {num_fields} fields, at most {MAX_TENSORS} and {MAX_FIELDS} are read; "
                "it is no adapter"
            )
        metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            name, kind = self._text(), self._number("I")
            if name in metadata:
                raise _Broken(f"field {shown(name)} occurs twice; it is corrupt")
            metadata[name] = self._value(kind)
        found = [self._tensor() for _ in range(num_tensors)]
        return GgufHeader(metadata, self._placed(found, metadata.get("general.alignment", 32)))

    def _placed(self, found: list[tuple[str, TensorInfo]], alignment: Any) -> dict[str, TensorInfo]:
        """The tensors with places from the file's beginning, which must not overlap."""
        if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT:
            raise _Broken(f"general.alignment is {shown(alignment)}: a number up to {_MAX_ALIGNMENT} is needed")
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        end = start
        for name, info in sorted(found, key=lambda each: each[1].offset):
            at = start + info.offset
            if name in tensors or at < end or at + info.num_bytes > self._size:
                raise _Broken(
                    f"tensor {shown(name)} occurs twice, overlaps another or ends after the file's {self._size} bytes; "
                    "it is cut off or corrupt"
                )
            end = at + info.num_bytes
            tensors[name] = TensorInfo(info.dtype, info.shape, at, info.num_bytes)
        return tensors

    def _tensor(self) -> tuple[str, TensorInfo]:
        name, num_dims = self._text(), self._number("I")
        if num_dims > MAX_DIMENSIONS:
            raise _Broken(f"tensor {shown(name)} has {num_dims} dimensions, at most {MAX_DIMENSIONS} are read")
        shape = tuple(reversed([self._number("Q") for _ in range(num_dims)]))
        kind, offset = self._number("I"), self._number("Q")
        if kind not in _TYPES:
            raise _Broken(
                f"tensor {shown(name)} has GGUF's type {kind}; {', '.join(_TYPES.values())} are read: convert the "
                "adapter with convert_lora_to_gguf.py --outtype f16"
            )
        return name, TensorInfo(_TYPES[kind], shape, offset, math.prod(shape) * ITEM_BYTES[_TYPES[kind]])

    def _value(self, kind: int) -> Any:
        if kind != _ARRAY:
            return self._text() if kind == _STRING else self._number(self._format(kind))
        inner, count = self._number("I"), self._number("Q")
        if inner == _STRING:
            if count > len(self._data) // 8:
                raise self._too_short()
            return [self._text() for _ in range(count)]
        format_ = self._format(inner)
        if count > len(self._data):
            raise self._too_short()
        return list(struct.unpack(f"<{count}{format_}", self._take(count * struct.calcsize(f"<{format_}"))))

    def _format(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise _Broken(f"has a field of type {kind}, which is unknown or an array of arrays; it is corrupt")
        return _SCALARS[kind]

    def _text(self) -> str:
        try:
            return self._take(self._number("Q")).decode()
        except UnicodeDecodeError:
            raise _Broken("has a name or text that is not UTF-8; it is corrupt") from None

    def _number(self, format_: str) -> Any:
        return struct.unpack(f"<{format_}", self._take(struct.calcsize(f"<{format_}")))[0]

    def _take(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise self._too_short()
        self._at += count
        return self._data[self._at - count : self._at]

    def _too_short(self) -> _Broken:
        return _Broken(
            f"its header goes on after {len(self._data)} bytes; it is cut off or corrupt, or longer than an adapter's"
        )
