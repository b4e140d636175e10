"""The safetensors files of a checkpoint as one mapping from tensor name to tensor.

Tests: tests/core/model/weights/test_weight_loader.py
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..config_json import ConfigJson, UnsupportedModel

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_SHARED_BYTES = 1 << 20
"""Bytes of tensors that are read before their file is opened anew. To open it reads the names of all its tensors."""

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_STORED = {
    **_DTYPES,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor's file, offset, dtype and shape, from the file's header."""

    path: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return _STORED.get(self.dtype, torch.uint8).itemsize

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.itemsize

    @property
    def is_plain(self) -> bool:
        """True if it holds floating-point numbers of at least 16 bits."""
        return self.dtype in _DTYPES


class Checkpoint:
    """Reads headers at once, and weights on demand, one tensor at a time.

    Raises UnsupportedModel for files that are missing or broken.
    """

    def __init__(
        self,
        directory: Path,
        entries: Mapping[str, TensorEntry] | None = None,
        joined: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """entries: the tensors. None: those of the directory's safetensors files. joined: ends of names of small
        tensors → those of the tensors whose rows follow one another in them; where the files have these, the
        checkpoint has that one instead.
        """
        self.directory = directory
        self._entries = _read_headers(directory) if entries is None else dict(entries)
        self._parts: dict[str, dict[str, TensorEntry]] = {}
        for end, ends in (joined or {}).items():
            self._join(end, ends)
        self._opened: tuple[Path, Any, int] | None = None  # a file, and the bytes that it may still give

    def _join(self, end: str, ends: Sequence[str]) -> None:
        found = {name.removesuffix(each) for each in ends for name in self._entries if name.endswith(f".{each}")}
        for at in sorted(found):
            names = [at + each for each in ends]
            if missing := [name for name in names if name not in self._entries]:
                other = next(name for name in names if name in self._entries)
                raise UnsupportedModel(
                    f"{self.directory}: tensor {missing[0]} is missing from its weight files, which have {other}"
                )
            parts = {name: self._entries.pop(name) for name in names}
            self._parts[at + end] = parts
            self._entries[at + end] = _joined(parts)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> TensorEntry:
        return self._entries[name]

    def names(self) -> list[str]:
        return sorted(self._entries)

    def check(self, shapes: Mapping[str, tuple[int, ...]], dtypes: Collection[str] = tuple(_DTYPES)) -> None:
        """Raise UnsupportedModel unless every tensor of `shapes` is here as described, in one of `dtypes`."""
        for name, shape in shapes.items():
            entry = self._entries.get(name)
            if entry is None:
                raise UnsupportedModel(f"{self.directory}: tensor {name} is missing from its weight files")
            if entry.shape != shape:
                raise UnsupportedModel(
                    f"{entry.path}: tensor {name} has shape {list(entry.shape)}, config.json needs {list(shape)}"
                )
            if entry.dtype not in dtypes:
                raise UnsupportedModel(
                    f"{entry.path}: tensor {name} is stored as {entry.dtype}; supported: {', '.join(dtypes)}"
                )

    def read_into(self, target: torch.Tensor, name: str, part: Sequence[slice] = ()) -> None:
        """Copy `part` of tensor `name`, slices of its first dimensions, into `target`, which has its shape, casting to
        its dtype. Nothing else of it is read.
        """
        target.copy_(self.read(name, part))

    def read(self, name: str, part: Sequence[slice] = ()) -> torch.Tensor:
        """Return `part` of tensor `name` in the dtype that it is stored in."""
        if name not in self._parts:
            return self._read(name, self._entries[name], part)
        if not part:
            return torch.cat([self._read(each, entry) for each, entry in self._parts[name].items()])
        found, begin, rows = list[torch.Tensor](), 0, range(*part[0].indices(self._entries[name].shape[0]))
        for each, entry in self._parts[name].items():
            count = entry.shape[0]
            own = (min(max(at - begin, 0), count) for at in (rows.start, rows.stop))
            found.append(self._read(each, entry, (slice(*own), *part[1:])))
            begin += count
        return torch.cat(found)

    def parts(self, name: str) -> Iterator[torch.Tensor]:
        """The tensors whose rows follow one another in tensor `name`, in memory that the files map."""
        for each, entry in (self._parts.get(name) or {name: self._entries[name]}).items():
            yield self._read(each, entry)

    def _read(self, name: str, entry: TensorEntry, part: Sequence[slice] = ()) -> torch.Tensor:
        try:
            file = self._open(entry)
            return file.get_slice(name)[tuple(part)] if part else file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UnsupportedModel(
                f"{entry.path}: tensor {name} cannot be read: {error}; download the checkpoint again"
            ) from error

    def _open(self, entry: TensorEntry) -> Any:
        """Return a tensor's file, opened. Small tensors share one; else it is opened anew, so that its pages leave
        memory with the tensor.
        """
        path, file, left = self._opened or (None, None, 0)
        if path != entry.path or left < entry.num_bytes:
            file, left = safe_open(entry.path, framework="pt"), _SHARED_BYTES
        left -= entry.num_bytes
        self._opened = (entry.path, file, left) if left > 0 else None
        return file


def _joined(parts: Mapping[str, TensorEntry]) -> TensorEntry:
    """The tensor that has the rows of all parts."""
    (first, one), *others = parts.items()
    for name, each in others:
        if each.shape[1:] != one.shape[1:]:
            what = f"has shape {list(each.shape)}, its neighbour {first} {list(one.shape)}"
        elif each.dtype != one.dtype:
            what = f"is stored as {each.dtype}, its neighbour {first} as {one.dtype}"
        else:
            continue
        raise UnsupportedModel(f"{each.path}: tensor {name} {what}; their rows must make one tensor")
    rows = sum(each.shape[0] if each.shape else 1 for each in parts.values())
    return TensorEntry(one.path, (rows, *one.shape[1:]), one.dtype)


def _read_headers(directory: Path) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    for path in _files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    header = file.get_slice(name)
                    entries[name] = TensorEntry(path, tuple(header.get_shape()), header.get_dtype())
        except (SafetensorError, OSError) as error:
            raise UnsupportedModel(f"{path}: cannot be read: {error}; download the checkpoint again") from error
    return entries


def _files(directory: Path) -> list[Path]:
    """The weight files: the index's shards, or the single file."""
    index = directory / INDEX
    if not index.is_file():
        others = list(directory.glob("*.safetensors"))
        if not (directory / SINGLE).is_file() and len(others) == 1:
            return others  # older tools put the method into the name of the file
        if not (directory / SINGLE).is_file():
            pickled = any(directory.glob("pytorch_model*.bin"))
            hint = "; pickle files are never read: convert pytorch_model.bin to safetensors" if pickled else ""
            raise UnsupportedModel(f"{directory}: no {SINGLE}, nor {INDEX}, nor a GGUF file{hint}")
        return [directory / SINGLE]
    raw = ConfigJson.read(index)
    weight_map = raw.object("weight_map")
    if weight_map is None:
        raise raw.refuse("weight_map", "a mapping from tensor to file is needed")
    paths = sorted({directory / weight_map.text(name) for name in weight_map.raw})
    for path in paths:
        if not path.is_file():
            raise UnsupportedModel(f"{index}: names {path.name}, which is not there")
    return paths
