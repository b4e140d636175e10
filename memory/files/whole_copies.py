"""Whole copies of the token embeddings and of the output projection, which trainers save with adapters.

PEFT writes them where `modules_to_save` names the module, where the vocabulary was resized, and where LoRA targets the
module. Mostly they are the base model's own rows.

Tests: tests/core/adapters/test_whole_copies.py
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from .error import AdapterChanged, AdapterFormatError, shown
from .tensor_file import TensorFile
from .tensor_info import TensorInfo
from .unserved import mend_of

if TYPE_CHECKING:
    import torch

#: The modules of a model that may be copied whole, by their paths in Llama.
COPIED = {"embed_tokens": "model.embed_tokens", "lm_head": "lm_head"}

MAX_TRAINED_ROWS = 4096
"""The most rows of such a module that an adapter may have of its own."""

#: In the order in which one is taken where a file has several.
_KINDS = (
    "",
    "modules_to_save.",
    "modules_to_save.default.",
    "base_layer.",
    "token_adapter.base_layer.",
    "original_module.",
)
_COPY = re.compile(
    rf"base_model\.model\.({'|'.join(map(re.escape, COPIED.values()))})\.({'|'.join(map(re.escape, _KINDS))})weight"
)
_VECTOR_COPY = re.compile(
    rf"base_model\.model\.({'|'.join(map(re.escape, COPIED.values()))})\.(?:{'|'.join(map(re.escape, _KINDS))})"
    r"(bias|[a-z_]*norm\.weight)"
)
_VECTORS = ("norm of the embeddings", "bias of the output projection")
_DELTA = re.compile(
    rf"base_model\.model\.({'|'.join(map(re.escape, COPIED.values()))})\.token_adapter\.trainable_tokens_delta"
)
_MODULE_OF = {path: name for name, path in COPIED.items()}

_CHUNK_BYTES = 4 << 20


class BaseRows(Protocol):
    """The base model's own rows of these modules, as its checkpoint has them."""

    def shape(self, module: str, /) -> tuple[int, int] | None:
        """Rows and columns of a module; None if they can't be read."""
        ...

    def read(self, module: str, begin: int, end: int, /) -> torch.Tensor:
        """Some rows, in the dtype that they are stored in."""
        ...

    def vector(self, module: str, path: str, /) -> torch.Tensor | None:
        """The `bias` of the output projection, or the weight of a norm in the embeddings, such as `embed_norm.weight`;
        None if there is none.
        """
        ...


class WholeCopy(NamedTuple):
    """A tensor that is a whole copy of a module."""

    kind: int
    """Which one is taken where a file has several: the lowest."""
    name: str
    info: TensorInfo

    @property
    def is_original(self) -> bool:
        """True if it was not trained itself: beside it there is a trained one, or trained rows."""
        return _KINDS[self.kind] in ("token_adapter.base_layer.", "original_module.")

    @property
    def is_shared(self) -> bool:
        """True if PEFT reads it into the base model's own module, which may be tied to another."""
        return _KINDS[self.kind] in ("", "base_layer.")


class VectorCopy(NamedTuple):
    """A tensor that is a copy of a vector in a module: the head's bias, or the weight of a norm of embeddings."""

    module: str
    path: str
    """Its place in the module."""
    info: TensorInfo

    @property
    def title(self) -> str:
        return "bias" if self.path == "bias" else "norm"


def copy_of(name: str, info: TensorInfo) -> tuple[str, WholeCopy] | None:
    """The module of which a tensor is a whole copy, and the copy; None for any other tensor."""
    found = _COPY.fullmatch(name)
    return (_MODULE_OF[found[1]], WholeCopy(_KINDS.index(found[2]), name, info)) if found else None


def rows_of(name: str) -> str | None:
    """The module of which a tensor has trained rows alone; None for any other tensor."""
    found = _DELTA.fullmatch(name)
    return _MODULE_OF[found[1]] if found else None


class RowsFile(TensorFile):
    """An adapter's tensors, with those that are whole rows of modules apart."""

    def __init__(self, path: Path, fd: int) -> None:
        super().__init__(path, fd)
        self.copies: dict[str, list[WholeCopy]] = {}
        """Whole copies of modules, once `tensors` was read: by module, the one that is taken first."""
        self.trained: dict[str, tuple[str, TensorInfo]] = {}
        """Trained rows of modules, likewise: by module, the tensor and its place."""
        self.vectors: dict[str, VectorCopy] = {}
        """Copies of vectors in modules, likewise: by name."""

    def _is_of_rows(self, name: str, info: TensorInfo, *, compares: bool) -> bool:
        """Keep a tensor of whole rows; False for any other. compares: the base model's own rows are at hand."""
        if (module := rows_of(name)) is not None:
            self.trained[module] = name, info
            return True
        if compares and (vector := _VECTOR_COPY.fullmatch(name)):
            self.vectors[name] = VectorCopy(_MODULE_OF[vector[1]], vector[2], info)
            return True
        found = copy_of(name, info) if compares else None
        if found is None:
            return False
        self.copies.setdefault(found[0], []).append(found[1])
        self.copies[found[0]].sort()
        return True

    def rows_tensor(self, module: str) -> tuple[str, TensorInfo]:
        """The tensor that has the rows of a module, by name; a tied head's may be the embeddings'."""
        _ = self.tensors
        for each in (module, "embed_tokens"):
            if each in self.trained:
                return self.trained[each]
            if each in self.copies:
                return self.copies[each][0].name, self.copies[each][0].info
        raise self.changed()

    def changed(self) -> AdapterChanged:
        """The error for a file that is not the registered one."""
        stale = "it changed on disk since the adapter was registered; register the adapter again"
        return AdapterChanged(f"{self.path}: {stale}")


def differing_rows(file: TensorFile, copy: WholeCopy, module: str, base: BaseRows) -> list[int]:
    """The rows of a whole copy that are not the base model's, in rising order.

    Rows beyond the base model's are passed over: no token of a prompt or an answer has them. Raises
    AdapterFormatError for a copy of another model.
    """
    import torch

    name, info, shape = copy.name, copy.info, base.shape(module)
    if shape is None:
        raise AdapterFormatError(
            f"{file.path}: tensor {shown(name)} is a copy of the whole {module}, and the base model's is quantised "
            "or can't be read, to compare them; save with save_pretrained(DIR, save_embedding_layers=False)"
        )
    rows, columns = shape
    if len(info.shape) != 2 or info.shape[1] != columns or info.shape[0] < rows:
        raise AdapterFormatError(
            f"{file.path}: tensor {shown(name)} has shape {shown(list(info.shape))}, the base model's is "
            f"{list(shape)}; {mend_of(info.shape)}"
        )
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[info.dtype]
    row_bytes = columns * dtype.itemsize
    step = max(1, _CHUNK_BYTES // row_bytes)
    buffer = bytearray(min(step, rows) * row_bytes)
    found: list[int] = []
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        chunk = memoryview(buffer)[: (end - begin) * row_bytes]
        file.read_into(chunk, info.offset + begin * row_bytes)
        own = torch.frombuffer(chunk, dtype=dtype).view(end - begin, columns)
        differs = (own.float() != base.read(module, begin, end).float()).any(1)
        found += (differs.nonzero()[:, 0] + begin).tolist()
    return found


def check_vectors(file: RowsFile, base: BaseRows) -> None:
    """Raise AdapterFormatError unless a file's copies of vectors in modules are the base model's."""
    import torch

    for name, (module, path, info) in file.vectors.items():
        own = base.vector(module, path)
        data = bytearray(info.num_bytes)
        file.read_into(memoryview(data), info.offset)
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[info.dtype]
        if own is None or not torch.equal(torch.frombuffer(data, dtype=dtype).float(), own.float()):
            raise AdapterFormatError(
                f"{file.path}: tensor {shown(name)} is a {_VECTORS[path == 'bias']}, and the base model has "
                f"{'none' if own is None else 'another'}; a trained one is not served: train with bias='none' and "
                f"without {'the head' if module == 'lm_head' else module} in modules_to_save"
            )


def row_bytes(file: TensorFile, info: TensorInfo, row: int) -> bytes:
    """The bytes of a row of a tensor."""
    size = info.num_bytes // info.shape[0]
    data = bytearray(size)
    file.read_into(memoryview(data), info.offset + row * size)
    return bytes(data)
