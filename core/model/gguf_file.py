"""GGUF files: their metadata, and their tensors as the checkpoint that the file was made from has them.

Tests: tests/core/test_gguf.py
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .checkpoint import Checkpoint, TensorEntry
from .config_json import UnsupportedModel
from .gguf_places import Place, Stored, places
from .quantization.group_scaled import row_chunks

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader

SUFFIX = ".gguf"

_MEND = "download the file again"


def gguf_in(directory: Path) -> Path | None:
    """The GGUF file of a model directory that has no safetensors files; None where there are some, or no such file."""
    files = sorted(directory.glob(f"*{SUFFIX}"))
    if not files or any(directory.glob("*.safetensors")):
        return None
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise UnsupportedModel(f"{directory}: has several GGUF files ({names}); give the file itself as the model")
    return files[0]


class GgufFile:
    """Reads a file's header when it is made. Raises UnsupportedModel for one that is broken."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise UnsupportedModel(
                f"{path}: the package gguf is needed ({error}); run: pip install 'chorus-lora[gguf]'"
            ) from error
        try:
            self._reader: GGUFReader = GGUFReader(path)
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
        ) as error:  # numpy raises some of these beyond a file's end, too
            raise UnsupportedModel(f"{path}: cannot be read as GGUF: {error}; {_MEND}") from error
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._asked: set[str] = set()
        if (count := self.get("split.count", 1)) != 1:
            raise UnsupportedModel(f"{path}: is one of {count} files; merge them: llama-gguf-split --merge {path} NEW")

    @cached_property
    def architecture(self) -> str:
        return str(self.get("general.architecture", ""))

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

    def length(self, name: str) -> int:
        """Elements of an array of the metadata."""
        field = self._reader.get_field(name)
        return 0 if field is None else len(field.data)

    def num_rows(self, part: Stored) -> int:
        """Rows of a tensor as a matrix."""
        columns, *others = map(int, self.tensors[part.tensor].shape)
        return columns * others[1] if part.transposed else math.prod(others)

    def read(self, name: str, rows: slice | torch.Tensor) -> torch.Tensor:
        """Rows of a tensor, dequantised in float32."""
        return self.rows_of(Stored(name), rows)

    def rows_of(self, part: Stored, rows: slice | torch.Tensor) -> torch.Tensor:
        """Rows of a tensor as a matrix, or elements of a vector, dequantised in float32."""
        data = self.tensors[part.tensor].data
        if part.transposed:
            return self._of_columns(part, torch.arange(self.num_rows(part))[rows])
        if part.heads:
            data = data.reshape(-1, data.shape[-1])
        if part.row:
            data = data[None]
        if part.expert is not None:
            data = data[part.expert]
        return self._dequantised(part.tensor, data[rows if isinstance(rows, slice) else rows.numpy()])

    def _of_columns(self, part: Stored, rows: torch.Tensor) -> torch.Tensor:
        """Rows of a tensor that has them as columns, head by head."""
        heads, columns, _ = self.tensors[part.tensor].data.shape
        each = self.num_rows(part) // heads
        found = torch.empty(len(rows), columns)
        for head in (rows // each).unique().tolist():
            own = rows // each == head
            found[own] = self._dequantised(part.tensor, self.tensors[part.tensor].data[head]).T[rows[own] % each]
        return found

    def _dequantised(self, name: str, data: np.ndarray) -> torch.Tensor:
        """Values of a tensor's rows as they are stored, in float32."""
        from gguf import dequantize

        how = self.tensors[name].tensor_type
        try:
            values = torch.from_numpy(dequantize(data, how).astype("float32"))
        except NotImplementedError as error:
            raise UnsupportedModel(f"{self.path}: tensor {name} is stored as {how.name}: {error}") from None
        if not bool(values.isfinite().all()):
            raise UnsupportedModel(f"{self.path}: tensor {name} has values that are not finite numbers; {_MEND}")
        return values


class GgufCheckpoint(Checkpoint):
    """The tensors of a GGUF file under the names of transformers, with its order of rows and its values."""

    def __init__(self, path: Path, wanted: Collection[str]) -> None:
        """wanted: names of transformers that may be asked for."""
        self._file = GgufFile(path)
        self._places = places(self._file, wanted)
        super().__init__(path, {name: TensorEntry(path, place.shape, "F32") for name, place in self._places.items()})

    def read_into(self, target: torch.Tensor, name: str, part: Sequence[slice] = ()) -> None:
        if target.ndim != 2:
            super().read_into(target, name, part)
            return
        rows, *others = part or (slice(None),)
        first = rows.indices(self[name].shape[0])[0]
        for chunk in row_chunks(target):
            target[chunk].copy_(self.read(name, (slice(first + chunk.start, first + chunk.stop), *others)))

    def read(self, name: str, part: Sequence[slice] = ()) -> torch.Tensor:
        rows, *others = part or (slice(None),)
        place = self._places[name]
        if len(place.parts) == 1:
            values = self._file.rows_of(place.parts[0], rows if place.order is None else place.order()[rows])
        else:
            values = self._of_several(place, rows)
        if place.values is not None:
            values = place.values(values)
            if not bool(values.isfinite().all()):
                raise UnsupportedModel(
                    f"{self._file.path}: tensor {place.parts[0].tensor} has values that {name} cannot have; {_MEND}"
                )
        return values.view(-1, *place.shape[1:])[(slice(None), *others)]

    def _of_several(self, place: Place, rows: slice) -> torch.Tensor:
        """Rows of a tensor whose rows are in several."""
        every = torch.arange(place.shape[0]) if place.order is None else place.order()
        wanted = every[rows]
        found = torch.empty((len(wanted), *place.shape[1:]))
        first = 0
        for part in place.parts:
            count = self._file.num_rows(part)
            own = (wanted >= first) & (wanted < first + count)
            if bool(own.any()):
                found[own] = self._file.rows_of(part, wanted[own] - first)
            first += count
        return found
