"""Opens the files of a model directory's weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from .checkpoint import Checkpoint
from .gguf_checkpoint import GgufCheckpoint
from .gguf_file import gguf_in


def open_checkpoint(
    directory: Path, wanted: Collection[str], joined: Mapping[str, Sequence[str]] | None = None
) -> Checkpoint:
    """The checkpoint in a directory: its safetensors files, or else its GGUF file.

    wanted: names of tensors that may be asked for. joined: see `Checkpoint`. Raises UnsupportedModel for files that are
    missing or broken.
    """
    file = gguf_in(directory)
    return Checkpoint(directory, joined=joined) if file is None else GgufCheckpoint(file, wanted)
