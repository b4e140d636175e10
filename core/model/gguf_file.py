"""GGUF files: their metadata, and their tensors as the checkpoint that the file was made from has them.

Tests: tests/core/test_gguf.py
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .checkpoint import Checkpoint, TensorEntry
from .config_json import UnsupportedModel
from .quantization.group_scaled import row_chunks

if TYPE_CHECKING:
    from gguf import GGUFReader

SUFFIX = ".gguf"

#: Architectures for which llama.cpp stores the halves of rotary pairs next to each other, in rows of q and k.
_INTERLEAVED = {"llama", "arcee", "granite", "mistral3", "olmo", "smollm3"}

#: Architectures whose norms it stores with 1 added.
_ONE_PLUS = {"gemma", "gemma2", "gemma3", "nemotron"}

#: Architectures whose tensors it stores as transformers has them.
_AS_THEY_ARE = {
    "chatglm", "cohere2", "command-r", "ernie4_5", "exaone", "exaone4", "glm4", "olmo2", "olmoe", "phi2", "phi3",
    "qwen2", "qwen3", "qwen3moe", "seed_oss", "stablelm", "starcoder2",
}  # fmt: skip

_KNOWN = sorted(_INTERLEAVED | _ONE_PLUS | _AS_THEY_ARE)

#: Tensors that config.json's fields say.
_FROM_CONFIG = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}

#: The number of an expert in transformers' names; the file has the matrices of all experts in one tensor.
_EXPERT = re.compile(r"\.experts\.(\d+)\.")

#: The end of a router's correction in transformers' names, and as the file's table of names has it.
_CORRECTION = ("e_score_correction_bias", "e_score_correction.bias")

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

    def read(self, name: str, rows: slice | torch.Tensor, expert: int | None = None) -> torch.Tensor:
        """Rows of a tensor, dequantised in float32. expert: of a tensor of all experts' matrices: whose rows."""
        from gguf import dequantize

        tensor = self.tensors[name]
        data = tensor.data if expert is None else tensor.data[expert]
        data = data[rows if isinstance(rows, slice) else rows.numpy()]
        try:
            values = torch.from_numpy(dequantize(data, tensor.tensor_type).astype("float32"))
        except NotImplementedError as error:
            how = tensor.tensor_type.name
            raise UnsupportedModel(f"{self.path}: tensor {name} is stored as {how}: {error}") from None
        if not bool(values.isfinite().all()):
            raise UnsupportedModel(f"{self.path}: tensor {name} has values that are not finite numbers; {_MEND}")
        return values


class _Place(NamedTuple):
    """Where a file has a tensor."""

    tensor: str
    expert: int | None = None
    """Of a tensor of all experts' matrices: whose it is."""


class GgufCheckpoint(Checkpoint):
    """The tensors of a GGUF file under the names of transformers, with its order of rows and its norms."""

    def __init__(self, path: Path, wanted: Collection[str]) -> None:
        """wanted: names of transformers that may be asked for."""
        self._file = GgufFile(path)
        self._names = _names_of(self._file, wanted)
        self._one_plus = self._file.architecture in _ONE_PLUS
        shapes = {name: self._shape(place) for name, place in self._names.items()}
        super().__init__(path, {name: TensorEntry(path, shape, "F32") for name, shape in shapes.items()})

    def _shape(self, place: _Place) -> tuple[int, ...]:
        shape = tuple(map(int, reversed(self._file.tensors[place.tensor].shape)))
        return shape if place.expert is None else shape[1:]

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
        order = self._order(name)
        tensor, expert = self._names[name]
        values = self._file.read(tensor, rows if order is None else order[rows], expert)
        if self._one_plus and name.endswith("norm.weight"):
            values -= 1
        return values[(slice(None), *others)]

    def _order(self, name: str) -> torch.Tensor | None:
        """Where the file has each row of a tensor. None: where transformers has it."""
        module = name.split(".")[-2]
        if self._file.architecture not in _INTERLEAVED or module not in ("q_proj", "k_proj"):
            return None
        heads = self._file.get("{arch}.attention.head_count")
        if module == "k_proj":
            heads = self._file.get("{arch}.attention.head_count_kv", heads)
        rows = torch.arange(self[name].shape[0])
        return rows.view(int(heads), -1, 2).transpose(1, 2).flatten()


def _names_of(file: GgufFile, wanted: Collection[str]) -> dict[str, _Place]:
    """Names of transformers → where the file has them; tensors that are not wanted have the file's name in both."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    by_name = {name: architecture for architecture, name in MODEL_ARCH_NAMES.items()}
    if file.architecture not in _KNOWN:
        raise UnsupportedModel(
            f"{file.path}: general.architecture is {file.architecture!r}: not supported as GGUF; supported: "
            f"{', '.join(_KNOWN)}; use the original checkpoint"
        )
    if file.architecture not in by_name:
        raise UnsupportedModel(
            f"{file.path}: general.architecture is {file.architecture!r}, which the installed gguf does not know; run: "
            "pip install -U gguf"
        )
    table = get_tensor_name_map(by_name[file.architecture], int(file.get("{arch}.block_count", 0)))
    names: dict[str, _Place] = {}
    for name in wanted:
        expert = _EXPERT.search(name)
        together = name if expert is None else f"{name[: expert.start()]}.experts.{name[expert.end() :]}"
        found = table.get_name(together.replace(*_CORRECTION), (".weight", ".bias"))
        if found in file.tensors:
            names[name] = _Place(found, None if expert is None else int(expert[1]))
    others = file.tensors.keys() - {place.tensor for place in names.values()} - _FROM_CONFIG
    return names | {name: _Place(name) for name in others}
