"""Rows of a checkpoint's token embeddings and output projection, for comparison with adapters' copies.

Tests: tests/core/adapters/test_whole_copies.py
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ..specs.config import ModelConfig, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from ..checkpoints.checkpoint import Checkpoint
    from .tensor_parts import Source


@dataclass(eq=False)
class CheckpointRows:
    """Opens the checkpoint when it is first asked; see `BaseRows`."""

    directory: Path
    config: ModelConfig

    def shape(self, module: str) -> tuple[int, int] | None:
        name = self._tensor(module)
        if name is None:
            return None
        rows, columns = self._checkpoint[name].shape
        return rows, columns

    def read(self, module: str, begin: int, end: int) -> torch.Tensor:
        name = self._tensor(module)
        if name is None:
            raise ValueError(f"the checkpoint has no rows of {module}")
        return self._checkpoint.read(name, (slice(begin, end),))

    def vector(self, module: str, path: str) -> torch.Tensor | None:
        part = self._vectors.get((module, path))
        try:
            name = None if part is None else self._sources[part].name
        except UnsupportedModel:
            return None
        return self._checkpoint.read(name, (slice(None),)) if name is not None and name in self._checkpoint else None

    @property
    def _vectors(self) -> dict[tuple[str, str], str]:
        """Parts of the model, by the module that has them and their place in it."""
        from .tensor_parts import EMBED_NORM, LM_HEAD_BIAS  # needs torch

        found = {("lm_head", "bias"): LM_HEAD_BIAS} if self.config.head_bias else {}
        if self.config.embedding_rows_scaled:
            norm = self.config.tensors.embedding_norm.rpartition(".")[2]
            found["embed_tokens", f"{norm}.weight"] = EMBED_NORM
        return found

    def _tensor(self, module: str) -> str | None:
        """The tensor that has a module's rows, of two tied modules the other's where it has none of its own."""
        from .tensor_parts import EMBED, LM_HEAD  # needs torch

        parts = {"embed_tokens": EMBED, "lm_head": LM_HEAD}
        wanted = [parts[module], *(parts.values() if self.config.tie_word_embeddings else ())]
        try:
            names = [self._sources[part].name for part in wanted]
            found = next((name for name in names if name in self._checkpoint), None)
        except UnsupportedModel:
            return None
        return found if found is not None and self._checkpoint[found].is_plain else None

    @cached_property
    def _checkpoint(self) -> Checkpoint:
        from ..checkpoints.open_checkpoint import open_checkpoint
        from .tensor_parts import sources

        wanted = {source.name for source in sources(self.config, ()).values()}
        return open_checkpoint(self.directory, wanted, self.config.tensors.joined)

    @cached_property
    def _sources(self) -> Mapping[str, Source]:
        from .tensor_parts import sources

        return sources(self.config, self._checkpoint)
