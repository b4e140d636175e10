"""Checks that an adapter's file is still the registered one, and computes content hashes.

Tests: tests/memory/files/test_adapter_identity.py
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..pages.adapter_layout import AdapterPart
from ..pages.numbered_products import number_of
from ..pages.projections import Projection, Projections
from .adapter_weights import AdapterWeights, matrices_of
from .composed import ComposedWeights, composed
from .format import open_weights
from .manifest import AdapterManifest
from .module_paths import ModulePaths
from .peft_names import vector_names
from .score_head import TENSORS
from .tensor_file import ITEM_BYTES, FileIdentity, digest_of
from .tensor_info import TensorInfo
from .trained_rows import module_of

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
    """The manifest with the content hash of the adapter, and whether it has any effect; see `ContentHash`.

    It reads all weights, unless both are known.
    """
    if manifest.content_hash is not None and manifest.no_effect is not None:
        return manifest
    if manifest.sources:
        return composed([(with_content(source), scale) for source, scale in manifest.sources])
    with _open_file(manifest) as file:
        content_hash, has_effect = _hash(file, manifest), _Reader(file).has_effect(manifest)
        if not file.is_unchanged():
            raise file.changed()
        return replace(manifest, content_hash=content_hash, no_effect=not has_effect)


def moved(manifest: AdapterManifest, path: Path, copied: FileIdentity | None = None) -> AdapterManifest:
    """The manifest of an adapter whose directory was renamed to `path`, or whose content another directory has there.

    A renamed file is recognised without reading it; so is a copy that the caller has made. copied: of which file.
    Raises AdapterFormatError if other content lies there.
    """
    with open_weights(path, _modules(manifest)) as file:
        inspected = manifest.identity and (*manifest.identity[:2], manifest.file_size, manifest.mtime_ns)
        is_own = copied is not None and copied == manifest.identity and file.size == manifest.file_size
        is_renamed = inspected == (*file.identity[:2], file.size, file.mtime_ns)
        if not (is_renamed or is_own or _is_copy(file, manifest)):
            raise file.changed()
        found = replace(manifest, path=path, mtime_ns=file.mtime_ns, identity=file.identity)
        if not file.is_unchanged():
            raise file.changed()
        return found


def _modules(manifest: AdapterManifest) -> ModulePaths:
    if manifest.modules is None:
        raise ValueError(f"{manifest.path} was not inspected: its manifest has no projections")
    return manifest.modules


def _is_copy(file: AdapterWeights, manifest: AdapterManifest) -> bool:
    """True if the file has the registered bytes."""
    spans = manifest.tensor_spans
    return (
        file.size == manifest.file_size
        and (spans is None or digest_of(file.header) == spans.digest)
        and _hash(file, manifest) == manifest.content_hash
    )


def _hash(file: AdapterWeights, manifest: AdapterManifest) -> str:
    content = ContentHash(manifest)
    for layer in content.layers:
        content.add(layer, file)
    return content.finish(file)


BytesAt = Callable[[int, int], memoryview]
"""Returns the file's bytes from one position to another, if they have just been read. Raises LookupError."""


class ContentHash:
    """The content hash of an adapter, computed as its file is read, layer by layer.

    It covers every target's rank, scale and weights in the order of layers and modules, then the vectors in this order,
    the tokens that activate the adapter, its tokenizer if that has tokens of its own, and its head. Two adapters with
    equal hashes give the same outputs, wherever they are stored and in whatever order their tensors were saved.
    """

    def __init__(self, manifest: AdapterManifest) -> None:
        self._manifest = manifest
        self._modules = _modules(manifest)
        projections = self._modules.projections
        targets = {
            (layer, _place(projections, module), part.experts): (part, projections[module])
            for part in manifest.parts
            for layer in part.layers
            for module in part.targets
        }
        self._targets: dict[int, list[tuple[AdapterPart, Projection]]] = {}
        for (layer, *_), target in sorted(targets.items(), key=lambda item: item[0]):
            self._targets.setdefault(layer, []).append(target)
        self._digest = hashlib.sha256(b"chorus adapter 1\n")
        self.value: str | None = None
        """The hash, once `finish` was called."""
        if manifest.invocation_tokens:
            self._digest.update(f"from {manifest.invocation_tokens}\n".encode())
        if manifest.tokens is not None:
            self._digest.update(f"tokens {manifest.tokens.digest}\n".encode())

    @property
    def layers(self) -> Iterable[int]:
        """The layers that it has weights in, in the order in which `add` takes them."""
        return self._targets

    def add(self, layer: int, file: AdapterWeights, bytes_at: BytesAt | None = None) -> None:
        """Add the weights of the next layer, if it has any. bytes_at: has some of them; others are read."""
        reader = _Reader(file, bytes_at)
        for part, projection in self._targets.get(layer, ()):
            if part.token_ids:
                self._add_rows(reader, part)
                continue
            for pair in matrices_of(part, layer, projection.name, self._modules):
                a, b = (file.tensor(name) for name, _ in pair)
                self._add(reader, f"{layer} {_named(projection, part)} {_form_of(a)} {_form_of(b)}\n", a, b)

    def finish(self, file: AdapterWeights) -> str:
        """Add what is of no layer; returns the hash."""
        reader, manifest = _Reader(file), self._manifest
        for each, info in zip(manifest.tower, reader.tower(manifest), strict=True):
            self._add(reader, f"{each.module} {each.part} {each.scale.hex()} {_form_of(info)}\n", info)
        for name in self._others(file):
            info = file.tensor(name)
            self._add(reader, f"{name} {info.dtype}{info.shape}\n", info)
        self.value = self._digest.hexdigest()
        return self.value

    def _others(self, file: AdapterWeights) -> Iterator[str]:
        """Names of the tensors of vectors and of a score head."""
        table = self._modules.projections
        for target in sorted(self._manifest.vectors, key=lambda each: (each.layer, _place(table, each.module))):
            yield from vector_names(target, table)
        if self._manifest.head is not None:
            yield from (name for name in TENSORS if name in file.tensors)

    def _add(self, reader: _Reader, head: str, *tensors: TensorInfo) -> None:
        self._digest.update(head.encode())
        for info in tensors:
            for stored in info.stored:
                for chunk in reader.chunks(stored):
                    self._digest.update(chunk)

    def _add_rows(self, reader: _Reader, part: AdapterPart) -> None:
        """Add whole rows, with their tokens."""
        _, info = reader.file.rows_tensor(module_of(part))
        self._digest.update(f"{part.targets[0]} {part.token_ids} {info.dtype} {info.shape[1]}\n".encode())
        size = info.num_bytes // info.shape[0]
        for row in part.file_rows:
            for chunk in reader.chunks(replace(info, offset=info.offset + row * size, num_bytes=size)):
                self._digest.update(chunk)


def _place(projections: Projections, module: str) -> tuple[bool, bool, int, int]:
    """What targets in a layer are hashed by: an order that is the same in all versions."""
    own = projections[module]
    return own.is_of_mixture, own.is_of_model, number_of(own.product), projections.id(module)


class _Reader:
    """Reads a file's tensors through its own buffer."""

    def __init__(self, file: AdapterWeights, bytes_at: BytesAt | None = None) -> None:
        """bytes_at: has some of the bytes, which are then not read."""
        self.file = file
        self._bytes_at = bytes_at
        self._buffer = bytearray()

    def has_effect(self, manifest: AdapterManifest) -> bool:
        """True if it has a head, or any target changes anything: its scale is not zero, and neither all of its A nor
        all of its B is. Only the base model's weights could tell that vectors are without effect.
        """
        modules = _modules(manifest)
        if manifest.tower and any(map(self._has_values, self.tower(manifest))):
            return True
        if manifest.vectors or manifest.head is not None or any(part.token_ids for part in manifest.parts):
            return True
        return any(
            all(self._has_values(self.file.tensor(name)) for name, _ in pair)
            for part in manifest.parts
            if part.scale != 0
            for layer in part.layers
            for module in part.targets
            for pair in matrices_of(part, layer, module, modules)
        )

    def tower(self, manifest: AdapterManifest) -> list[TensorInfo]:
        """The tensors of its tower part, in the order of the manifest."""
        _ = self.file.tensors
        if any(each.name not in self.file.tower for each in manifest.tower):
            raise self.file.changed()
        return [self.file.tower[each.name] for each in manifest.tower]

    def _has_values(self, info: TensorInfo) -> bool:
        """True if any value is not zero; for most tensors the first values decide."""
        if info.computed is not None:
            formula, parts = info.computed.formula, info.computed.parts
            return not formula.is_zero(*(not self._has_values(part) for part in parts))
        glance = replace(info, num_bytes=min(info.num_bytes, _GLANCE_BYTES))
        return any(_any(chunk, info.dtype) for part in (glance, info) for chunk in self.chunks(part))

    def _found(self, info: TensorInfo) -> memoryview | None:
        if self._bytes_at is not None:
            with suppress(LookupError):
                return self._bytes_at(info.offset, info.offset + info.num_bytes)
        return None

    def chunks(self, info: TensorInfo) -> Iterator[memoryview]:
        """A tensor's bytes in chunks; a chunk is valid until the next one."""
        if (found := self._found(info)) is not None:
            yield found
            return
        if not self._buffer:
            self._buffer = bytearray(_CHUNK_BYTES)
        for start in range(0, info.num_bytes, _CHUNK_BYTES):
            chunk = memoryview(self._buffer)[: min(_CHUNK_BYTES, info.num_bytes - start)]
            self.file.read_into(chunk, info.offset + start)
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
