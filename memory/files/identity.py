"""Checks that an adapter's file is still the registered one, and computes content hashes.

Tests: tests/memory/files/test_adapter_identity.py
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import numpy as np

from ..pages.adapter_layout import AdapterPart
from ..pages.projections import Projection
from .adapter_weights import AdapterWeights, matrices_of
from .composed import ComposedWeights, composed
from .format import open_weights
from .manifest import AdapterManifest
from .module_paths import ModulePaths
from .peft_names import vector_names
from .score_head import TENSORS
from .tensor_file import ITEM_BYTES, digest_of
from .tensor_info import TensorInfo
from .trained_rows import module_of
from .whole_copies import row_bytes

_CHUNK_BYTES = 1 << 20
_GLANCE_BYTES = 4096


Weights = AdapterWeights | ComposedWeights


def open_unchanged(manifest: AdapterManifest) -> Weights:
    """Open the weights that were inspected, for a `with` block. Raises AdapterFormatError if the file has changed.

    A new mode, owner or link also updates a file's change time. If the file seems changed only by that, or was copied,
    it is read again, provided that the hash of the registered content is known.
    """
    return ComposedWeights(manifest, _open_file) if manifest.sources else _open_file(manifest)


def _open_file(manifest: AdapterManifest) -> AdapterWeights:
    """The same, for an adapter with files of its own."""
    file = open_weights(manifest.path, _modules(manifest))
    try:
        same_size_and_time = (file.size, file.mtime_ns) == (manifest.file_size, manifest.mtime_ns)
        if same_size_and_time and manifest.identity in (None, file.identity):
            return file
        if manifest.content_hash is None or not _is_copy(file, manifest):
            raise file.changed()
    except BaseException:
        file.__exit__()
        raise
    return file


def with_effect(manifest: AdapterManifest) -> AdapterManifest:
    """Determine whether the adapter has any effect. A few KiB suffice, unless they are zeros."""
    if manifest.sources:
        return composed([(with_effect(source), scale) for source, scale in manifest.sources])
    with _open_file(manifest) as file:
        return replace(manifest, no_effect=not _Reader(file).has_effect(manifest))


def with_content(manifest: AdapterManifest) -> AdapterManifest:
    """Compute the content hash of the adapter, and whether it has any effect.

    The hash covers every target's rank, scale and weights in the order of layers and modules, then the vectors in this
    order, the tokens that activate the adapter, its tokenizer if that has tokens of its own, and its head. Two adapters
    with equal hashes give the same outputs, wherever they are stored and in whatever order their tensors were saved. It
    reads all weights.
    """
    if manifest.sources:
        return composed([(with_content(source), scale) for source, scale in manifest.sources])
    with _open_file(manifest) as file:
        reader = _Reader(file)
        content_hash, has_effect = reader.hash(manifest), reader.has_effect(manifest)
        if not file.is_unchanged():
            raise file.changed()
        return replace(manifest, content_hash=content_hash, no_effect=not has_effect)


def _modules(manifest: AdapterManifest) -> ModulePaths:
    if manifest.modules is None:
        raise ValueError(f"{manifest.path} was not inspected: its manifest has no projections")
    return manifest.modules


def _is_copy(file: AdapterWeights, manifest: AdapterManifest) -> bool:
    """True if the file has the registered bytes."""
    return (
        file.size == manifest.file_size
        and manifest.tensor_spans is not None
        and digest_of(file.header) == manifest.tensor_spans.digest
        and _Reader(file).hash(manifest) == manifest.content_hash
    )


class _Digest(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...


class _Reader:
    """Reads a file's tensors through its own buffer."""

    def __init__(self, file: AdapterWeights) -> None:
        self._file = file
        self._buffer = bytearray(_CHUNK_BYTES)

    def has_effect(self, manifest: AdapterManifest) -> bool:
        """True if it has a head, or any target changes anything: its scale is not zero, and neither all of its A nor
        all of its B is. Only the base model's weights could tell that vectors are without effect.
        """
        modules = _modules(manifest)
        if manifest.tower and any(map(self._has_values, self._tower(manifest))):
            return True
        if manifest.vectors or manifest.head is not None or any(part.token_ids for part in manifest.parts):
            return True
        return any(
            all(self._has_values(self._file.tensor(name)) for name, _ in pair)
            for part in manifest.parts
            if part.scale != 0
            for layer in part.layers
            for module in part.targets
            for pair in matrices_of(part, layer, module, modules)
        )

    def hash(self, manifest: AdapterManifest) -> str:
        projections = _modules(manifest).projections
        targets = {
            (layer, projections.id(module), part.experts): (part, projections[module])
            for part in manifest.parts
            for layer in part.layers
            for module in part.targets
        }
        digest = hashlib.sha256(b"chorus adapter 1\n")
        if manifest.invocation_tokens:
            digest.update(f"from {manifest.invocation_tokens}\n".encode())
        if manifest.tokens is not None:
            digest.update(f"tokens {manifest.tokens.digest}\n".encode())
        for (layer, *_), (part, projection) in sorted(targets.items(), key=lambda item: item[0]):
            if part.token_ids:
                self._hash_rows(digest, part)
                continue
            for pair in matrices_of(part, layer, projection.name, _modules(manifest)):
                a, b = (self._file.tensor(name) for name, _ in pair)
                self._add(digest, f"{layer} {_named(projection, part)} {_form_of(a)} {_form_of(b)}\n", a, b)
        for each, info in zip(manifest.tower, self._tower(manifest), strict=True):
            self._add(digest, f"{each.module} {each.part} {each.scale.hex()} {_form_of(info)}\n", info)
        for name in self._others(manifest):
            info = self._file.tensor(name)
            self._add(digest, f"{name} {info.dtype}{info.shape}\n", info)
        return digest.hexdigest()

    def _tower(self, manifest: AdapterManifest) -> list[TensorInfo]:
        """The tensors of its tower part, in the order of the manifest."""
        _ = self._file.tensors
        if any(each.name not in self._file.tower for each in manifest.tower):
            raise self._file.changed()
        return [self._file.tower[each.name] for each in manifest.tower]

    def _others(self, manifest: AdapterManifest) -> Iterator[str]:
        """Names of the tensors of vectors and of a score head."""
        for target in manifest.vectors:
            yield from vector_names(target, _modules(manifest).projections)
        if manifest.head is not None:
            yield from (name for name in TENSORS if name in self._file.tensors)

    def _add(self, digest: _Digest, head: str, *tensors: TensorInfo) -> None:
        digest.update(head.encode())
        for info in tensors:
            for stored in info.stored:
                for chunk in self._chunks(stored):
                    digest.update(chunk)

    def _hash_rows(self, digest: _Digest, part: AdapterPart) -> None:
        """Add whole rows, with their tokens."""
        _, info = self._file.rows_tensor(module_of(part))
        digest.update(f"{part.targets[0]} {part.token_ids} {info.dtype} {info.shape[1]}\n".encode())
        for row in part.file_rows:
            digest.update(row_bytes(self._file, info, row))

    def _has_values(self, info: TensorInfo) -> bool:
        """True if any value is not zero; for most tensors the first values decide."""
        if info.computed is not None:
            formula, parts = info.computed.formula, info.computed.parts
            return not formula.is_zero(*(not self._has_values(part) for part in parts))
        glance = replace(info, num_bytes=min(info.num_bytes, _GLANCE_BYTES))
        return any(_any(chunk, info.dtype) for part in (glance, info) for chunk in self._chunks(part))

    def _chunks(self, info: TensorInfo) -> Iterator[memoryview]:
        """A tensor's bytes in chunks; a chunk is valid until the next one."""
        for start in range(0, info.num_bytes, _CHUNK_BYTES):
            chunk = memoryview(self._buffer)[: min(_CHUNK_BYTES, info.num_bytes - start)]
            self._file.read_into(chunk, info.offset + start)
            yield chunk


def _named(projection: Projection, part: AdapterPart) -> str:
    """A part's target, with its experts, rank and scale."""
    experts = f" of {part.experts}" if part.experts else ""
    return f"{projection.name}{experts} {part.rank} {part.scale.hex()}"


def _form_of(info: TensorInfo) -> str:
    """The meaning of a tensor's bytes."""
    arranged = "" if info.arrangement is None else f" arranged {tuple(info.arrangement)}"
    if info.computed is not None:
        arranged += f" as {info.computed.formula} of {', '.join(map(_form_of, info.stored))}"
    return f"{info.dtype}{info.shape}{arranged}"


def _any(chunk: memoryview, dtype: str) -> bool:
    """True if any value is not zero; minus zero counts as zero."""
    wide = ITEM_BYTES[dtype] == 4
    values = np.frombuffer(chunk, dtype=np.uint32 if wide else np.uint16)
    return bool((values & (0x7FFFFFFF if wide else 0x7FFF)).any())
