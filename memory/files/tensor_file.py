"""A safetensors file from an untrusted source, read with plain reads.

A mapped file that gets truncated kills the process that touches it; a read only fails. The header is checked as
strictly as by the safetensors library: every byte of the file belongs to exactly one tensor.

Tests: tests/memory/files/test_adapter_files.py.
"""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Self

from . import strict_json
from .error import AdapterFormatError, shown, unreadable
from .tensor_info import TensorInfo

#: Twice the need of 200 layers with seven targets, and small enough that no other thread waits while it is parsed.
MAX_HEADER_BYTES = 1 << 20
MAX_TENSORS = 1 << 13
MAX_DIMENSIONS = 8

#: Bytes per element of the supported element types.
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}

_METADATA = "__metadata__"


class FileIdentity(NamedTuple):
    """Identity of a file, which differs for a replaced or overwritten one, even of equal size and time."""

    device: int
    inode: int
    changed_ns: int


class TensorFile:
    """An open safetensors file, closed at the end of a `with` block. fd: a descriptor of a regular file.

    `size`, `mtime_ns` and `identity` describe the opened state. `header` has the bytes before the first tensor, and
    `tensors` the tensors that it lists; both raise AdapterFormatError if they are inconsistent.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd
        self._given: dict[str, str] = {}  # the file's own names of tensors that have another plain name
        self.max_tensors = MAX_TENSORS
        """The most tensors that are read; the limits of the header grow with it."""
        try:
            self.size, self.mtime_ns, self.identity = self._state()
        except OSError as error:
            os.close(fd)
            raise unreadable(self.path, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self.fd)

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target` (bytes) from `offset`. Raises AdapterFormatError if the file ends early, or can't be read."""
        done = 0
        try:
            while done < len(target):
                count = os.preadv(self.fd, [target[done:]], offset + done)
                if count == 0:
                    raise self._refuse("ends before its last tensor; it was cut while it was read. Register it again")
                done += count
        except OSError as error:
            raise unreadable(self.path, error) from error

    def is_unchanged(self) -> bool:
        """True if the file is still the one that was opened, judged by its size and times of change."""
        try:
            return self._state() == (self.size, self.mtime_ns, self.identity)
        except OSError as error:
            raise unreadable(self.path, error) from error

    def _state(self) -> tuple[int, int, FileIdentity]:
        status = os.fstat(self.fd)
        identity = FileIdentity(status.st_dev, status.st_ino, status.st_ctime_ns)
        return status.st_size, status.st_mtime_ns, identity

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """Tensors that the header lists, by name."""
        return self.listed()

    def listed(self) -> dict[str, TensorInfo]:
        """Read the header's list of tensors, by plain name."""
        tensors: dict[str, TensorInfo] = {}
        for name, info in self.entries().items():
            self.add(tensors, name, info)
        return tensors

    def entries(self) -> dict[str, TensorInfo]:
        """Read the header's list of tensors, by the file's own names."""
        raw = self.header[8:]
        try:
            most = strict_json.MAX_CONTAINERS * self.max_tensors // MAX_TENSORS
            header = strict_json.loads(raw, most, self._info_or_fields)
        except ValueError as error:
            raise self._refuse(f"the header is not JSON: {error}") from None
        if not raw.startswith(b"{") or not isinstance(header, dict):
            raise self._refuse("the header is not a JSON object; it is corrupt")
        self._check_metadata(header.pop(_METADATA, {}))
        if len(header) > self.max_tensors:
            raise self._refuse(f"lists {len(header)} tensors, at most {self.max_tensors} are read; it is no adapter")
        for name, entry in header.items():
            if not isinstance(entry, TensorInfo):
                raise self._refuse(f"tensor {shown(name)}{self._why_no_tensor(entry)}")
        self._check_coverage(header, len(self.header))
        return header

    def add(self, tensors: dict[str, TensorInfo], name: str, info: TensorInfo, given: str | None = None) -> None:
        """Add a tensor under its plain name. given: the file's name, where `name` is not. Raises AdapterFormatError if
        it is there already.
        """
        plain = self._plain(name)
        if plain in tensors:
            raise self._refuse(
                f"tensor {shown(name)} occurs twice, once under another prefix or name: "
                f"{shown(self.given_name(plain))}; "
                "keep one of them: save it with PEFT's save_pretrained"
            )
        tensors[plain] = info
        if plain != (given or name):
            self._given[plain] = given or name

    def given_name(self, name: str) -> str:
        """The file's own name of a tensor."""
        return self._given.get(name, name)

    def _plain(self, name: str) -> str:
        """A tensor's name in the form that `tensors` has. A subclass may normalise it."""
        return name

    @cached_property
    def header(self) -> bytes:
        """The file's bytes before its first tensor."""
        if self.size < 8:
            raise self._refuse(f"has {self.size} bytes, not even a safetensors header; it is cut off")
        length = int.from_bytes(self._bytes(0, 8), "little")
        most = MAX_HEADER_BYTES * self.max_tensors // MAX_TENSORS
        if length > most:
            raise self._refuse(f"claims a header of {length} bytes, at most {most} are read; it is corrupt")
        start = 8 + length
        if start > self.size:
            raise self._refuse(f"claims a header of {length} bytes in a file of {self.size}; it is cut off or corrupt")
        return self._bytes(0, start)

    def _bytes(self, offset: int, count: int) -> bytes:
        data = bytearray(count)
        self.read_into(memoryview(data), offset)
        return bytes(data)

    def _check_metadata(self, metadata: Any) -> None:
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise self._refuse(f"the header's {_METADATA} is not a map of strings; it is corrupt")

    def _info_or_fields(self, fields: dict[str, Any]) -> TensorInfo | dict[str, Any]:
        """A tensor for its entry in the header, so that none of the entries is kept; other objects as they are."""
        found = _tensor(fields, len(self.header))
        return found if isinstance(found, TensorInfo) else fields

    def _why_no_tensor(self, entry: Any) -> str:
        if not isinstance(entry, dict):
            return ": the header's entry is not an object; it is corrupt"
        return str(_tensor(entry, len(self.header)))

    def _check_coverage(self, tensors: dict[str, TensorInfo], start: int) -> None:
        expected = start
        for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
            if info.offset != expected:
                raise self._refuse(
                    f"tensor {shown(name)} begins at byte {shown(info.offset)}, the one before ends at {expected}; "
                    "it is corrupt"
                )
            expected += info.num_bytes
        if expected != self.size:
            raise self._refuse(f"the tensors end at byte {expected} of {self.size}; it is cut off or corrupt")

    def _refuse(self, why: str) -> AdapterFormatError:
        return AdapterFormatError(f"{self.path}: {why}")


def _tensor(fields: Mapping[str, Any], start: int) -> TensorInfo | str:
    """A tensor by its entry in the header, or what is wrong with it, after its name. start: bytes before the first
    tensor.
    """
    dtype, given, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        return f" has dtype {shown(dtype)}; {', '.join(ITEM_BYTES)} are served: convert the adapter to one of them"
    if (shape := _counts(given)) is None:
        return f" has shape {shown(given)}, not a list of sizes; it is corrupt"
    if (span := _counts(offsets)) is None or len(span) != 2:
        return f" has data_offsets {shown(offsets)}, not two positions; it is corrupt"
    begin, end = span
    num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
    if end - begin != num_bytes:
        needs = f"shape {shown(given)} in {dtype} needs {shown(num_bytes)}"
        return f" has {end - begin} bytes, {needs}; it is corrupt"
    return TensorInfo(dtype, shape, start + begin, num_bytes)


def _counts(value: Any) -> tuple[int, ...] | None:
    """A short list of numbers from 0 on; None for anything else."""
    if not isinstance(value, list) or len(value) > MAX_DIMENSIONS:
        return None
    for item in value:
        if type(item) is not int or item < 0:
            return None
    return tuple(value)


_TYPES = tuple(ITEM_BYTES)
_TYPE_BITS = 2


@dataclass(frozen=True, slots=True)
class TensorSpans:
    """Iterates over (first byte, index of the element type in `ITEM_BYTES`) of each tensor."""

    header_bytes: int
    """Bytes from the file's beginning to its data."""
    digest: bytes
    """Of the header: a file with another header is recognised without parsing."""
    packed: bytes
    """The positions, 8 bytes each."""

    @classmethod
    def pack(cls, header_bytes: int, digest: bytes, tensors: Iterable[TensorInfo]) -> TensorSpans:
        numbers = array("q", (info.offset << _TYPE_BITS | _TYPES.index(info.dtype) for info in tensors))
        return cls(header_bytes, digest, numbers.tobytes())

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for number in array("q", self.packed):
            yield number >> _TYPE_BITS, number & (1 << _TYPE_BITS) - 1


def digest_of(header: bytes | memoryview) -> bytes:
    return blake2b(header, digest_size=16).digest()
