"""An adapter's weights in the layout of its device pages, and the jobs that read them from its file.

Tests: tests/memory/adapters/test_row_jobs.py, tests/memory/files/test_adapter_files.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, product
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from ..files.adapter_weights import matrices_of
from ..files.composed import ComposedWeights
from ..files.error import AdapterFormatError
from ..files.identity import ContentHash, Weights, open_unchanged
from ..files.manifest import AdapterManifest
from ..files.module_paths import ModulePaths
from ..files.peft_names import tensor_shapes
from ..files.tensor_file import ITEM_BYTES, TensorSpans, digest_of
from ..files.trained_rows import module_of, row_runs
from ..pages.adapter_layout import AdapterLayout, AdapterPart, PartLayout
from ..pages.projections import Projection, Projections
from .layer_hashes import LayerHashes
from .vectors import BaseWeights, VectorReader

if TYPE_CHECKING:
    import torch

    from ..files.adapter_weights import AdapterWeights
    from ..host.buffers import Buffers
    from ..host.image import HostImage

# Bytes read at once, in whole layers; layers of one read wait for each other.
_FIRST_READ_BYTES = 256 << 10
_LAST_READ_BYTES = 8 << 20


_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

_MERGE_BYTES = 64 << 10  # bytes between two spans are read along when they are this few


@dataclass(frozen=True, slots=True, eq=False)
class RowJobs:
    """A row per module of a layer, the layers in order; some layers at once are read together, as a group.

    table: `[jobs, 11]` int64: where A `[rank, d_in]` and B `[d_out, rank]` begin in the file, the element types of both
    (numbers in `ITEM_BYTES`' order), rank, d_in, d_out, the element of the image where the layer's slabs begin,
    slab_elems, and where in a slab the rows of A and of Bᵀ begin. layers: of each group. groups: `[groups, 4]` int64:
    where its spans begin and end, then its jobs. spans: `[spans, 2]` int64: from which byte of the file to which. The
    first group has the file's header too.
    """

    table: np.ndarray
    layers: tuple[range, ...]
    groups: np.ndarray
    spans: np.ndarray


class RowsInFile(Protocol):
    """Reads an open file's groups one after another; the first is on its way from the beginning."""

    def next(self, out: torch.Tensor) -> object | None:
        """Lay out the next group's rows in `out`, flat. None when done; else the error, and the group is passed."""
        ...

    def bytes(self, start: int, end: int) -> memoryview:
        """Bytes of the file, of the group that was read last, until `close` or the second `next` from now. LookupError
        when they were not read.
        """
        ...

    def close(self) -> None: ...


def _jobs_by_layer(
    parts: tuple[AdapterPart, ...], tensor_spans: TensorSpans, layout: AdapterLayout, projections: Projections
) -> list[list[tuple[int, ...]]]:
    by_layer: list[list[tuple[int, ...]]] = [[] for _ in range(layout.num_layers)]
    starts = iter(tensor_spans)
    for part, part_layout in zip(parts, layout.parts, strict=True):
        slabs = part_layout.slabs
        for layer, name in product(part.layers, part.targets):
            m, first = projections.id(name), part_layout.first_elem[layer]
            if part.token_ids:
                tensor, _ = next(starts), next(starts)
                by_layer[layer] += _jobs_of_rows(part, part_layout, layer, tensor, projections[name])
                continue
            for index in range(max(1, len(part.experts))):
                (a_start, a_type), (b_start, b_type) = next(starts), next(starts)
                by_layer[layer].append(
                    (
                        a_start,
                        b_start,
                        a_type,
                        b_type,
                        part.rank,
                        *projections[name].dims,
                        first + index * part.rank * slabs.slab_elems,
                        slabs.slab_elems,
                        slabs.a_offset[m],
                        slabs.b_offset[m],
                    )
                )
    return by_layer


def _jobs_of_rows(
    part: AdapterPart, part_layout: PartLayout, layer: int, tensor: tuple[int, int], projection: Projection
) -> Iterator[tuple[int, ...]]:
    """Of whole rows, those side by side in the file at once: A alone, and nothing of B. tensor: where it begins, and
    its element type.
    """
    (start, kind), slab_elems = tensor, part_layout.slabs.slab_elems
    bytes_each = projection.inputs * tuple(ITEM_BYTES.values())[kind]
    for first, file_row, count in row_runs(part):
        at = start + file_row * bytes_each
        to = part_layout.first_elem[layer] + first * slab_elems
        yield at, at, kind, kind, count, *projection.dims, to, slab_elems, 0, 0


@lru_cache(64)
def row_jobs(
    parts: tuple[AdapterPart, ...],
    tensor_spans: TensorSpans,
    layout: AdapterLayout,
    projections: Projections,
) -> RowJobs:
    """The jobs of an adapter; adapters of equal shape and file layout share them."""
    by_layer = _jobs_by_layer(parts, tensor_spans, layout, projections)
    spans = [list(chain.from_iterable(map(_spans, jobs))) for jobs in by_layer]
    layers = tuple(_groups([sum(end - start for start, end in found) for found in spans]))
    groups: list[tuple[int, int, int, int]] = []
    merged: list[tuple[int, int]] = []
    num_jobs = 0
    for index, group in enumerate(layers):
        first_span, first_job = len(merged), num_jobs
        wanted = [span for layer in group for span in spans[layer]]
        merged += _merged([*wanted, (0, tensor_spans.header_bytes)] if index == 0 else wanted)
        num_jobs += sum(len(by_layer[layer]) for layer in group)
        groups.append((first_span, len(merged), first_job, num_jobs))
    return RowJobs(
        np.array(list(chain.from_iterable(by_layer)), dtype=np.int64).reshape(-1, 11),
        layers,
        np.array(groups, dtype=np.int64).reshape(-1, 4),
        np.array(merged, dtype=np.int64).reshape(-1, 2),
    )


def _spans(job: Sequence[int]) -> tuple[tuple[int, int], tuple[int, int]]:
    a_start, b_start, a_type, b_type, rank, d_in, d_out, *_ = job
    item_bytes = tuple(ITEM_BYTES.values())
    a_bytes, b_bytes = rank * d_in * item_bytes[a_type], rank * d_out * item_bytes[b_type]
    return (a_start, a_start + a_bytes), (b_start, b_start + b_bytes)


def _groups(num_bytes: list[int]) -> Iterator[range]:
    """Layers to read at once: few at first, so that they come soon, then ever more, so that the disk is kept busy."""
    first, most = 0, _FIRST_READ_BYTES
    while first < len(num_bytes):
        last, total = first + 1, num_bytes[first]
        while last < len(num_bytes) and total + num_bytes[last] <= most:
            total += num_bytes[last]
            last += 1
        yield range(first, last)
        first, most = last, min(2 * most, _LAST_READ_BYTES)


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The spans in order, nearby spans merged."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1] + _MERGE_BYTES:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


#: Begins to read an open file's jobs for a flat image of so many elements of a dtype.
OpenRows = Callable[[int, RowJobs, int, "torch.dtype"], RowsInFile]


class ImageForm(NamedTuple):
    """Form of an adapter's image: `[layout.num_pages, page_elems]` of a dtype. projections: the base model's."""

    layout: AdapterLayout
    projections: Projections
    page_elems: int
    dtype: torch.dtype


def read_image(
    manifest: AdapterManifest,
    form: ImageForm,
    image: HostImage,
    buffers: Buffers,
    open_rows: OpenRows | None = None,
    *,
    base: BaseWeights | None = None,
    content: ContentHash | None = None,
) -> None:
    """Read the adapter's weights into `image`, cast to the model's dtype.

    Layers are published as they are read; bytes between rows may be anything. open_rows: a faster way than torch's;
    rows that it refuses are read again here, to say why. base: the weights for vectors; None: they are only checked.
    content: gets the bytes as they are read, and has the hash afterwards if `open_rows` has read them.
    AdapterFormatError when the file can't be read, is no longer the inspected one, or holds NaN or infinity, before or
    after the cast.
    """
    layout, projections, page_elems, dtype = form
    shape = (layout.num_pages, page_elems)

    def take() -> list[_PartReader]:
        data = image.take(buffers, shape, dtype)
        return [
            _PartReader(file, part, part_layout, data.view(-1), projections=projections, modules=manifest.modules)
            for part, part_layout in zip(manifest.parts, layout.parts, strict=True)
        ]

    if not manifest.parts and not manifest.sources:  # it changes a vision tower alone
        import torch

        image.data = torch.empty(shape, dtype=dtype)
        image.publish(layout.num_layers)
        return
    with open_unchanged(manifest) as file:
        done = _begun(file, manifest, form, take, open_rows, content)
        vectors = None  # a composed adapter has none
        if not isinstance(file, ComposedWeights):
            vectors = VectorReader.of(file, manifest, layout, base, projections=projections)
        with closing(done):  # here and now: dropping an open generator would wait for the disk
            for num_ready in done:
                if vectors is not None and image.data is not None:
                    vectors.read_up_to(num_ready, image.data)
                if num_ready == layout.num_layers and not file.is_unchanged():
                    raise file.changed()
                image.publish(num_ready)


def _begun(
    file: Weights,
    manifest: AdapterManifest,
    form: ImageForm,
    take: Callable[[], list[_PartReader]],
    open_rows: OpenRows | None,
    content: ContentHash | None,
) -> Generator[int]:
    """Begin to read, by rows if that can be done; yields how many layers are in the image."""
    layout, projections, page_elems, dtype = form
    if open_rows is None or manifest.tensor_spans is None or isinstance(file, ComposedWeights):
        return _read_by_torch(take(), range(layout.num_layers))
    jobs = row_jobs(manifest.parts, manifest.tensor_spans, layout, projections)
    rows = open_rows(file.fd, jobs, layout.num_pages * page_elems, dtype)
    hashes = None if content is None else LayerHashes(content, file)
    return _read_by_rows(file, manifest.tensor_spans, jobs, take, rows, hashes)


def _read_by_rows(
    file: AdapterWeights,
    tensor_spans: TensorSpans,
    jobs: RowJobs,
    take: Callable[[], list[_PartReader]],
    rows: RowsInFile,
    hashes: LayerHashes | None = None,
) -> Generator[int]:
    """Some layers at once, as they come from the disk; yields how many are in the image. take: makes room for it."""
    with closing(rows), nullcontext() if hashes is None else closing(hashes):
        parts = take()  # while the disk is busy
        for layers, (first_span, last_span, *_) in zip(jobs.layers, jobs.groups.tolist(), strict=True):
            fault = rows.next(parts[0].data)
            if layers.start == 0 and _is_other_header(rows, tensor_spans, fault):
                raise file.changed()
            if fault is not None:
                deque(_read_by_torch(parts, layers), maxlen=0)  # raises the error
            if hashes is not None:
                hashes.add(layers, rows, jobs.spans[first_span:last_span].tolist())
                if layers is jobs.layers[-1]:
                    hashes.finish()
            yield layers.stop


def _read_by_torch(parts: list[_PartReader], layers: range) -> Generator[int]:
    """Layer by layer; yields how many are in the image."""
    for layer in layers:
        for part in parts:
            part.read(layer)
        yield layer + 1


def _is_other_header(rows: RowsInFile, tensor_spans: TensorSpans, fault: object | None) -> bool:
    """True if the header that was read is not the one that was inspected; unknown where it could not be read."""
    try:
        return digest_of(rows.bytes(0, tensor_spans.header_bytes)) != tensor_spans.digest
    except LookupError:
        if fault is None:
            raise
        return False


@dataclass(eq=False)
class _PartReader:
    """Reads a part's slabs, layer by layer, by way of torch. data: `[elems]`, the adapter's run."""

    _file: Weights
    _part: AdapterPart
    _part_layout: PartLayout
    data: torch.Tensor
    projections: Projections
    modules: ModulePaths | None
    """Where the file has them; None of a part without experts, if it is not known."""

    def read(self, layer: int) -> None:
        """By way of buffers small enough for the caches, so that every byte is read and written once."""
        part, slabs, first = self._part, self._part_layout.slabs, self._part_layout.first_elem[layer]
        if first < 0:
            return
        buffer, rows = self._buffers
        if part.token_ids:
            self._read_rows(rows)
        for name in () if part.token_ids else part.targets:
            m, (d_in, d_out) = self.projections.id(name), self.projections[name].dims
            first_row = 0
            for (a, a_shape), (b, b_shape) in _matrices(part, layer, name, self.projections, self.modules):
                own = rows[first_row : first_row + a_shape[0]]
                own[:, slabs.a_offset[m] :][:, :d_in] = self._file.matrix(a, a_shape, buffer)
                b_rows = self._file.matrix(b, b_shape, buffer).T
                own_b = own[:, slabs.b_offset[m] :][:, :d_out]
                if a_shape[0] > part.rank:  # of all experts at once: B's columns have expert after expert for each rank
                    b_rows = b_rows.unflatten(0, (part.rank, -1)).transpose(0, 1)
                    own_b = own_b.unflatten(0, (-1, part.rank))
                own_b.copy_(b_rows)
                first_row += a_shape[0]
        if not _all_finite(rows):
            raise _not_finite(self._file, part, layer, self.projections, self.modules, dtype=rows.dtype, buffer=buffer)
        self.data[first : first + rows.numel()] = rows.view(-1)

    def _read_rows(self, rows: torch.Tensor) -> None:
        """Read whole rows, without the bytes between them."""
        assert not isinstance(self._file, ComposedWeights), "a composed adapter has no rows of its own"
        _, info = self._file.rows_tensor(module_of(self._part))
        dtype, width = _DTYPES[info.dtype], info.shape[1]
        for first, file_row, count in row_runs(self._part):
            data = bytearray(count * width * ITEM_BYTES[info.dtype])
            self._file.read_into(memoryview(data), info.offset + file_row * width * ITEM_BYTES[info.dtype])
            rows[first : first + count, :width] = _values(data, dtype).view(count, width)

    @cached_property
    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For the largest tensor in the widest type, bytes; and for a layer `[rank, slab_elems]`."""
        import torch

        part = self._part
        widest = max(max(self.projections[name].dims) for name in part.targets)
        rows = torch.zeros(part.num_rows, self._part_layout.slabs.slab_elems, dtype=self.data.dtype)
        return torch.empty(part.num_rows * widest * 4, dtype=torch.uint8), rows


def _matrices(
    part: AdapterPart, layer: int, target: str, projections: Projections, modules: ModulePaths | None
) -> Iterator[tuple[tuple[str, tuple[int, int]], tuple[str, tuple[int, int]]]]:
    """See `matrices_of`."""
    if modules is None:
        return iter((tensor_shapes(layer, projections[target], part.rank),))
    return matrices_of(part, layer, target, modules)


def _values(data: bytearray, dtype: str) -> torch.Tensor:
    """Bytes as numbers of a dtype."""
    import torch

    return torch.frombuffer(data, dtype=getattr(torch, dtype))


def _all_finite(values: torch.Tensor) -> bool:
    """True if no value is NaN or infinite: such have all bits of the exponent set. Far cheaper than `isfinite`."""
    import torch

    exponents = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
    mask = exponents[values.dtype]
    bits = values.view(torch.int32 if values.itemsize == 4 else torch.int16)
    return int((bits & mask).amax()) != mask


def _not_finite(
    file: Weights,
    part: AdapterPart,
    layer: int,
    projections: Projections,
    modules: ModulePaths | None,
    dtype: torch.dtype,
    buffer: torch.Tensor,
) -> AdapterFormatError:
    """Find the tensor at fault among a layer's."""
    if part.token_ids and not isinstance(file, ComposedWeights):
        name, _ = file.rows_tensor(module_of(part))
        return AdapterFormatError(
            f"{file.path}: tensor {name} holds NaN or infinity, or a value beyond the range of {dtype}, in a trained "
            "row; the training diverged or the file is corrupt"
        )
    for module in part.targets:
        for name, shape in chain.from_iterable(_matrices(part, layer, module, projections, modules)):
            tensor = file.matrix(name, shape, buffer)
            given = name if isinstance(file, ComposedWeights) else file.given_name(name)
            at = f"{file.path}: tensor {given} holds"
            if not _all_finite(tensor):
                return AdapterFormatError(f"{at} NaN or infinity; the training diverged or the file is corrupt")
            if not _all_finite(tensor.to(dtype)):
                return AdapterFormatError(f"{at} a value beyond the range of {dtype}; serve the model in a wider dtype")
    return file.changed()
