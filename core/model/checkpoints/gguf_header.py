"""The header of a GGUF file: the package's reader, with arrays read at once: tokenizers have 100,000s of elements.

Imported where a file is read: the package `gguf` is an extra.

Tests: tests/core/model/checkpoints/test_gguf_header.py, tests/core/test_gguf.py
"""

from __future__ import annotations

from struct import Struct
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType

_LENGTH = Struct("<Q")

#: Bytes of an array's type and length, which stand before its elements.
_ARRAY_HEAD = 12


class Header(GGUFReader):
    """Reads a file's metadata, and where it has its tensors. Raises ValueError for a file that ends too early."""

    @property
    def data(self) -> np.ndarray:
        """The file's bytes, as an array: each view of a memmap costs ten times as much."""
        return self._bytes

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._bytes = mapped.view(np.ndarray)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        kind = GGUFValueType(self._get(orig_offs, np.uint32)[0])
        (count,) = self._get(orig_offs + 4, np.uint64).tolist()
        first = orig_offs + _ARRAY_HEAD
        if kind in self.gguf_scalar_to_np:
            values = self._get(first, self.gguf_scalar_to_np[kind], count)
            end, elements = first + values.nbytes, [*values.reshape(-1, 1)]
        elif kind == GGUFValueType.STRING:
            end, elements = self._texts(first, count)
        else:
            return super()._get_field_parts(orig_offs, raw_type)
        if len(elements) < count or end > len(self.data):
            raise ValueError(f"the array at byte {orig_offs} goes beyond the file's end")
        return end - orig_offs, elements, [*range(count)], [GGUFValueType.ARRAY, kind]

    def _texts(self, at: int, count: int) -> tuple[int, list[memoryview]]:
        """Where an array's texts end, and as many of them as begin in the file."""
        texts, whole = [], memoryview(self.data.data)
        while len(texts) < count and at + _LENGTH.size <= len(whole):
            first = at + _LENGTH.size
            at = first + _LENGTH.unpack_from(whole, at)[0]
            texts.append(whole[first:at])
        return at, texts
