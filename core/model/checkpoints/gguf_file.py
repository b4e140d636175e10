"""GGUF files: their metadata, and their tensors as they are stored, dequantised.

Tests: tests/core/test_gguf.py
"""

from __future__ import annotations

import json
import math
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ....ops.cpu import gguf_blocks
from ..config_json import UnsupportedModel

if TYPE_CHECKING:
    import numpy as np

SUFFIX = ".gguf"

MEND = "download the file again"


def gguf_in(directory: Path) -> Path | None:
    """The GGUF file of a model directory that has no safetensors files; None where there are some, or no such file."""
    files = sorted(directory.glob(f"*{SUFFIX}"))
    if not files or any(directory.glob("*.safetensors")):
        return None
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise UnsupportedModel(f"{directory}: has several GGUF files ({names}); give the file itself as the model")
    return files[0]


class Stored(NamedTuple):
    """A tensor of a file, or a part of it, as a matrix or a vector."""

    tensor: str

    expert: int | None = None
    """Of a tensor of all experts' matrices: whose it is."""

    heads: bool = False
    """It is `[heads, rows, columns]`; the rows of all heads follow one another."""

    transposed: bool = False
    """It is `[columns, rows]`, or of a tensor of heads `[heads, columns, rows]`."""

    row: bool = False
    """It is a vector that stands for a matrix of one row."""

    flat: bool = False
    """It is a matrix that stands for a vector, row after row."""


class GgufFile:
    """Reads a file's header when it is made. Raises UnsupportedModel for one that is broken."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            from .gguf_header import Header
        except ImportError as error:
            raise UnsupportedModel(
                f"{path}: the package gguf is needed ({error}); run: pip install 'chorus-lora[gguf]'"
            ) from error
        try:
            self._reader = Header(path)
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
        ) as error:  # numpy raises some of these beyond a file's end, too
            raise UnsupportedModel(f"{path}: cannot be read as GGUF: {error}; {MEND}") from error
        self._check_places()
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._asked: set[str] = set()
        if (count := self.get("split.count", 1)) != 1:
            raise UnsupportedModel(f"{path}: is one of {count} files; merge them: llama-gguf-split --merge {path} NEW")

    @cached_property
    def architecture(self) -> str:
        return str(self.get("general.architecture", ""))

    @cached_property
    def config(self) -> dict[str, Any]:
        """The fields of config.json, next to the file, that describe the text model; empty without that file."""
        path = self.path.parent / "config.json"
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found.get("text_config", found) if isinstance(found, dict) else {}

    def get(self, name: str, default: Any = None) -> Any:
        """The metadata called `name`, in which `{arch}` stands for the architecture."""
        name = name.replace("{arch}", self.architecture) if "{" in name else name
        self._asked.add(name)
        field = self._reader.get_field(name)
        return default if field is None else field.contents()

    def never_asked(self) -> dict[str, Any]:
        """The metadata of the architecture that `get` was not asked for, by name."""
        begin, fields = f"{self.architecture}.", self._reader.fields
        return {name: fields[name].contents() for name in fields if name.startswith(begin) and name not in self._asked}

    def of_others(self) -> list[str]:
        """Names of metadata that are those of fields that `get` was asked for, but not of this architecture."""
        begin = f"{self.architecture}."
        asked = tuple(name.removeprefix(begin) for name in self._asked if name.startswith(begin))
        return [name for name in self._reader.fields if not name.startswith(begin) and name.endswith(asked)]

    def _check_places(self) -> None:
        """Refuse a table of tensors that is damaged: they follow one another, as llama.cpp asks for, too, up to the
        file's end.
        """
        reader = self._reader
        at = reader.data_offset
        for tensor in reader.tensors:
            if tensor.data_offset != at:
                raise UnsupportedModel(
                    f"{self.path}: tensor {tensor.name} begins at byte {tensor.data_offset}, and the tensors before it "
                    f"end at {at}: the file's table of tensors is damaged; {MEND}"
                )
            at = -(-(at + tensor.n_bytes) // reader.alignment) * reader.alignment
        if (beyond := self.path.stat().st_size - at) > 0:
            raise UnsupportedModel(f"{self.path}: has {beyond} bytes after its last tensor; {MEND}")

    def length(self, name: str) -> int:
        """Elements of an array of the metadata."""
        field = self._reader.get_field(name)
        return 0 if field is None else len(field.data)

    def num_rows(self, part: Stored) -> int:
        """Rows of a tensor as a matrix."""
        columns, *others = map(int, self.tensors[part.tensor].shape)
        return math.prod((columns, *others[1:])) if part.transposed else math.prod(others)

    def read(self, name: str, rows: slice | torch.Tensor) -> torch.Tensor:
        """Rows of a tensor, dequantised in float32."""
        return self.rows_of(Stored(name), rows)

    def rows_of(self, part: Stored, rows: slice | torch.Tensor) -> torch.Tensor:
        """Rows of a tensor as a matrix, or elements of a vector, dequantised in float32."""
        data = self.tensors[part.tensor].data
        if part.transposed:
            return self._of_columns(part, torch.arange(self.num_rows(part))[rows])
        if part.flat:
            return self._dequantised(part.tensor, data).flatten()[rows]
        if part.heads:
            data = data.reshape(-1, data.shape[-1])
        if part.row:
            data = data[None]
        if part.expert is not None:
            data = data[part.expert]
        return self._dequantised(part.tensor, data[rows if isinstance(rows, slice) else rows.numpy()])

    def _of_columns(self, part: Stored, rows: torch.Tensor) -> torch.Tensor:
        """Rows of a tensor that has them as columns, head by head."""
        data = self.tensors[part.tensor].data
        data = data if part.heads else data[None]
        heads, columns, _ = data.shape
        each = self.num_rows(part) // heads
        found = torch.empty(len(rows), columns)
        for head in (rows // each).unique().tolist():
            own = rows // each == head
            found[own] = self._dequantised(part.tensor, data[head]).T[rows[own] % each]
        return found

    def _dequantised(self, name: str, data: np.ndarray) -> torch.Tensor:
        """Values of a tensor's rows as they are stored, in float32."""
        from gguf import GGML_QUANT_SIZES, dequantize

        how = self.tensors[name].tensor_type
        if (found := gguf_blocks.dequantised(data, int(how), *GGML_QUANT_SIZES[how])) is not None:
            values, finite = found
        else:
            try:
                values = torch.from_numpy(dequantize(data, how).astype("float32"))
            except NotImplementedError as error:
                raise UnsupportedModel(f"{self.path}: tensor {name} is stored as {how.name}: {error}") from None
            finite = bool(values.isfinite().all())
        if not finite:
            raise UnsupportedModel(f"{self.path}: tensor {name} has values that are not finite numbers; {MEND}")
        return values
