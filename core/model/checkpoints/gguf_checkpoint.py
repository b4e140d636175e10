"""A GGUF file as the checkpoint that it was made from.

Tests: tests/core/test_gguf.py
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from ..config_json import UnsupportedModel
from .checkpoint import Checkpoint, TensorEntry
from .gguf_file import MEND, GgufFile
from .gguf_sources import GgufSource, sources
from .quantization.group_scaled import row_chunks


class GgufCheckpoint(Checkpoint):
    """The tensors of a GGUF file under the names of transformers, with its order of rows and its values."""

    def __init__(self, path: Path, wanted: Collection[str]) -> None:
        """wanted: names of transformers that may be asked for."""
        self._file = GgufFile(path)
        self._places = sources(self._file, wanted)
        super().__init__(path, {name: TensorEntry(path, source.shape, "F32") for name, source in self._places.items()})

    def read_into(self, target: torch.Tensor, name: str, part: Sequence[slice] = ()) -> None:
        first_part = self._places[name].parts[0]
        if target.ndim != 2 or (first_part.transposed and not first_part.heads):
            super().read_into(target, name, part)
            return
        rows, *others = part or (slice(None),)
        first = rows.indices(self[name].shape[0])[0]
        for chunk in row_chunks(target):
            target[chunk].copy_(self.read(name, (slice(first + chunk.start, first + chunk.stop), *others)))

    def read(self, name: str, part: Sequence[slice] = ()) -> torch.Tensor:
        rows, *others = part or (slice(None),)
        source = self._places[name]
        if len(source.parts) == 1:
            values = self._file.rows_of(source.parts[0], rows if source.order is None else source.order()[rows])
        else:
            values = self._of_several(source, rows)
        if source.values is not None:
            values = source.values(values)
            if not bool(values.isfinite().all()):
                raise UnsupportedModel(
                    f"{self._file.path}: tensor {source.parts[0].tensor} has values that {name} cannot have; {MEND}"
                )
        return values.view(-1, *source.shape[1:])[(slice(None), *others)]

    def _of_several(self, source: GgufSource, rows: slice) -> torch.Tensor:
        """Rows of a tensor whose rows are in several."""
        every = torch.arange(source.shape[0]) if source.order is None else source.order()
        wanted = every[rows]
        found = torch.empty((len(wanted), *source.shape[1:]))
        first = 0
        for part in source.parts:
            count = self._file.num_rows(part)
            own = (wanted >= first) & (wanted < first + count)
            if bool(own.any()):
                found[own] = self._file.rows_of(part, wanted[own] - first).view(-1, *source.shape[1:])
            first += count
        return found
