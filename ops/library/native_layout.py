"""The native library's structures and numbers, made of what it says of itself: see `native/layout.h`.

Tests: tests/ops/library/test_native_layout.py
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import Structure, c_char, c_char_p, c_double, c_float, c_int32, c_int64, c_uint8, c_void_p
from functools import cache
from typing import Any

_ELEMENTS = {"P": c_void_p, "f": c_float, "d": c_double, "i": c_int32, "q": c_int64, "B": c_uint8}


class Field(Structure):
    """A structure, a field of one, or an enumerator, as the library lists them."""

    _fields_ = [
        ("name", c_char_p),
        ("offset", c_int64),
        ("bytes", c_int64),
        ("type", c_char),
        ("of", c_char_p),
    ]


class NativeLayout:
    """The structures and enumerators of a library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        count = c_int64()
        entries = library.chorus_layout(count)[: count.value]
        self._sizes: dict[str, int] = {}
        self._fields: dict[str, list[tuple[str, int, int, str, str]]] = {}
        self._numbers: dict[str, int] = {}
        for entry in entries:
            name, kind, of = entry.name.decode(), entry.type.decode(), (entry.of or b"").decode()
            owner, _, field = name.partition(".")
            if kind == "E":
                self._numbers[name] = entry.offset
            elif field:
                self._fields.setdefault(owner, []).append((field, entry.offset, entry.bytes, kind, of))
            else:
                self._sizes[name] = entry.bytes
        self._made: dict[str, type[Structure]] = {}

    def number(self, name: str) -> int:
        """The number of an enumerator, such as `OpKind.kGemm`."""
        return self._numbers[name]

    def structure(self, name: str) -> type[Structure]:
        """A structure, with its fields where the library has them."""
        found = self._made.get(name)
        if found is None:
            found = self._made[name] = self._structure(name)
        return found

    def _structure(self, name: str) -> type[Structure]:
        fields: list[tuple[str, Any]] = []
        end = 0
        for field, offset, size, kind, of in sorted(self._fields[name], key=lambda each: each[1]):
            if offset > end:
                fields.append((f"_before_{field}", c_char * (offset - end)))
            element = self.structure(of) if of else _ELEMENTS.get(kind, c_char)
            count = size // ctypes.sizeof(element)
            fields.append((field, element if count == 1 else element * count))
            end = offset + size
        if self._sizes[name] > end:
            fields.append(("_behind", c_char * (self._sizes[name] - end)))
        return type(name, (Structure,), {"_pack_": 1, "_layout_": "ms", "_fields_": fields})

    def filled(self, name: str, values: Mapping[str, Any]) -> Structure:
        """A structure with these values; fields without any are 0. Raises AttributeError for one that it lacks."""
        found = self.structure(name)()
        own = {field for field, *_ in self._fields[name]}
        for field, value in values.items():
            if field not in own:
                raise AttributeError(f"the native library's {name} has no field {field!r}; reinstall Chorus")
            setattr(found, field, self._nested(name, field, value) if isinstance(value, Mapping) else value)
        return found

    def _nested(self, name: str, field: str, values: Mapping[str, Any]) -> Structure:
        of = next(of for own, *_, of in self._fields[name] if own == field)
        return self.filled(of, values)


@cache
def layout_of(library: ctypes.CDLL) -> NativeLayout:
    """What a library says of itself."""
    return NativeLayout(library)
