"""Places of an adapter's tensors in its weights file, in few bytes: thousands of adapters may be registered."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b

from .tensor_file import ITEM_BYTES, TensorInfo

_TYPES = tuple(ITEM_BYTES)
_TYPE_BITS = 2


@dataclass(frozen=True, slots=True)
class TensorPlaces:
    """Iterates over (first byte, number of the element type in `ITEM_BYTES`' order) of each tensor.

    header_bytes: from the file's beginning to its data. digest: of those bytes, so that a file with another header is
    told without being parsed. packed: the places, 8 bytes each.
    """

    header_bytes: int
    digest: bytes
    packed: bytes

    @classmethod
    def pack(cls, header_bytes: int, digest: bytes, tensors: Iterable[TensorInfo]) -> TensorPlaces:
        numbers = array("q", (info.offset << _TYPE_BITS | _TYPES.index(info.dtype) for info in tensors))
        return cls(header_bytes, digest, numbers.tobytes())

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for number in array("q", self.packed):
            yield number >> _TYPE_BITS, number & (1 << _TYPE_BITS) - 1


def digest_of(header: bytes) -> bytes:
    return blake2b(header, digest_size=16).digest()
