"""The native library's structures, records and enumerators, built from the layout that it exports.

The library lists them in `native/program/layout.h`.

Tests: tests/ops/library/test_native_layout.py
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import Array, Structure, c_char, c_char_p, c_double, c_float, c_int32, c_int64, c_uint8, c_void_p
from functools import cache
from typing import Any

import numpy as np

_ELEMENTS: dict[str, Any] = {"P": c_void_p, "f": c_float, "d": c_double, "i": c_int32, "q": c_int64, "B": c_uint8}


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
        self._fields: dict[str, dict[str, tuple[int, int, str, str]]] = {}
        self._numbers: dict[str, int] = {}
        for entry in entries:
            name, kind, of = entry.name.decode(), entry.type.decode(), (entry.of or b"").decode()
            owner, _, field = name.partition(".")
            if kind == "E":
                self._numbers[name] = entry.offset
            elif field:
                self._fields.setdefault(owner, {})[field] = (entry.offset, entry.bytes, kind, of)
            else:
                self._sizes[name] = entry.bytes
        self._made: dict[str, type[Structure]] = {}

    def has(self, name: str) -> bool:
        """True if there is such an enumerator or constant."""
        return name in self._numbers

    def number(self, name: str) -> int:
        """The number of an enumerator, such as `OpKind.kGemm`, or a constant, such as `kPanel`."""
        if name not in self._numbers:
            raise AttributeError(f"the native library has no {name}; reinstall Chorus")
        return self._numbers[name]

    def lacking(self, tables: Mapping[str, Sequence[str]]) -> list[str]:
        """The names by which a library differs from this source code; empty if it fits.

        They are tables with other columns, and fields that hold a structure without naming it.

        tables: columns of each table.
        """
        other = [name for name, columns in tables.items() if tuple(self._fields.get(name, ())) != tuple(columns)]
        named = ((f"{name}.{field}", *own) for name, fields in self._fields.items() for field, own in fields.items())
        return other + [name for name, _, _, kind, of in named if kind == "S" and not of]

    def length(self, name: str) -> int:
        """The elements of a field that is an array, such as `Adapter.a_offset`."""
        owner, _, field = name.partition(".")
        return getattr(self.structure(owner), field).size // ctypes.sizeof(self._element(owner, field))

    def structure(self, name: str) -> Any:
        """The class of a structure: its fields are the library's, and it takes no other attributes."""
        found = self._made.get(name)
        if found is None:
            found = self._made[name] = self._structure(name)
        return found

    def _structure(self, name: str) -> type[Structure]:
        fields: list[tuple[str, Any]] = []
        end = 0
        for field, (offset, size, *_) in sorted(self._fields_of(name).items(), key=lambda each: each[1]):
            if offset > end:
                fields.append((f"_before_{field}", c_char * (offset - end)))
            element = self._element(name, field)
            count = size // ctypes.sizeof(element)
            fields.append((field, element if count == 1 else element * count))
            end = offset + size
        if self._sizes[name] > end:
            fields.append(("_behind", c_char * (self._sizes[name] - end)))
        return type(name, (Structure,), {"__slots__": (), "_pack_": 1, "_layout_": "ms", "_fields_": fields})

    def _fields_of(self, name: str) -> Mapping[str, tuple[int, int, str, str]]:
        if name not in self._sizes:
            raise AttributeError(f"the native library has no {name}; reinstall Chorus")
        return self._fields[name]

    def _element(self, name: str, field: str) -> Any:
        *_, kind, of = self._fields[name][field]
        return self.structure(of) if kind == "S" else _ELEMENTS[kind]

    def record(self, name: str) -> np.dtype:
        """A structure as rows of numpy arrays have it; addresses are int64."""
        made, formats = self.structure(name), []
        fields = sorted(self._fields_of(name).items(), key=lambda each: each[1])
        for field, (_, size, kind, _) in fields:
            element = np.dtype("i8" if kind == "P" else self._element(name, field))
            count = size // element.itemsize
            formats.append(element if count == 1 else (element, count))
        offsets = [offset for _, (offset, *_) in fields]
        names = [field for field, _ in fields]
        return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": ctypes.sizeof(made)})

    def filled(self, name: str, /, **values: Any) -> Any:
        """A structure with these values; fields without any are 0.

        A mapping is a structure within, a text the name of an enumerator. Raises AttributeError for a field that the
        library does not have.
        """
        found, fields = self.structure(name)(), self._fields_of(name)
        for field, value in values.items():
            if field not in fields:
                raise AttributeError(f"the native library's {name} has no field {field!r}; reinstall Chorus")
            own = value
            if isinstance(value, Mapping):
                own = self.filled(fields[field][3], **value)
            elif isinstance(value, str):
                own = self.number(f"{fields[field][3]}.{value}")
            setattr(found, field, own)
        return found

    def array(self, name: str, items: Sequence[Mapping[str, Any]]) -> Array[Any]:
        """Structures one after the other, each with its values."""
        return (self.structure(name) * len(items))(*(self.filled(name, **each) for each in items))


@cache
def layout_of(library: ctypes.CDLL) -> NativeLayout:
    """What a library says of itself."""
    return NativeLayout(library)
