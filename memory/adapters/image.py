"""An adapter's weights in the layout of its device pages."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cached_property
from typing import TYPE_CHECKING

from ..files.error import AdapterChanged, AdapterFormatError
from ..files.format import AdapterManifest, tensor_shapes
from ..files.identity import STALE, open_unchanged
from ..files.tensor_places import digest_of
from ..pages.adapter_layout import AdapterLayout, AdapterPart, PartLayout
from ..pages.layout import MODULES, ModuleDims
from .row_jobs import RowJobs, RowsInFile, row_jobs

if TYPE_CHECKING:
    import torch

    from ..files.tensor_file import TensorFile, TensorInfo
    from ..files.tensor_places import TensorPlaces
    from ..host.buffers import HostBuffers
    from ..host.image import HostImage

#: Begins to read an open file's jobs for a flat image of so many elements of a dtype.
OpenRows = Callable[[int, RowJobs, int, "torch.dtype"], RowsInFile]


def read_image(
    manifest: AdapterManifest,
    layout: AdapterLayout,
    dims: ModuleDims,
    page_elems: int,
    dtype: torch.dtype,
    image: HostImage,
    buffers: HostBuffers,
    open_rows: OpenRows | None = None,
) -> None:
    """Read the adapter's weights into `image`: `[layout.num_pages, page_elems]`, cast to the model's dtype.

    Layers are published as they are read; what lies between rows may be anything. open_rows: a faster way than torch's;
    what it refuses is read again here, to say why. AdapterFormatError when the file can't be read, is no longer what
    was inspected, or holds NaN or infinity, before or after the cast.
    """
    shape = (layout.num_pages, page_elems)

    def take() -> list[_PartReader]:
        data = image.data = buffers.take(shape, dtype)
        return [
            _PartReader(file, part, place, data.view(-1), dims)
            for part, place in zip(manifest.parts, layout.parts, strict=True)
        ]

    with open_unchanged(manifest) as file:
        if open_rows is None or manifest.places is None:
            done = _read_by_torch(take(), range(layout.num_layers))
        else:
            jobs = row_jobs(manifest.parts, manifest.places, layout, tuple(dims.items()))
            rows = open_rows(file.fd, jobs, math.prod(shape), dtype)
            done = _read_by_rows(file, manifest.places, jobs, take, rows)
        with closing(done):  # here and now: whoever drops an open one would wait for the disk
            for num_ready in done:
                if num_ready == layout.num_layers and not file.is_unchanged():
                    raise AdapterChanged(f"{file.path}: {STALE}")
                image.publish(num_ready)


def _read_by_rows(
    file: TensorFile,
    places: TensorPlaces,
    jobs: RowJobs,
    take: Callable[[], list[_PartReader]],
    rows: RowsInFile,
) -> Iterator[int]:
    """Some layers at once, as they come from the disk; yields how many are in the image. take: makes room for it."""
    with closing(rows):
        parts = take()  # while the disk is busy
        for layers in jobs.layers:
            fault = rows.next(parts[0].data)
            if layers.start == 0 and _is_other_header(rows, places, fault):
                raise AdapterChanged(f"{file.path}: {STALE}")
            if fault is not None:
                deque(_read_by_torch(parts, layers), maxlen=0)  # says what is wrong
            yield layers.stop


def _read_by_torch(parts: list[_PartReader], layers: range) -> Iterator[int]:
    """Layer by layer; yields how many are in the image."""
    for layer in layers:
        for part in parts:
            part.read(layer)
        yield layer + 1


def _is_other_header(rows: RowsInFile, places: TensorPlaces, fault: object | None) -> bool:
    """True if the header that was read is not the one that was inspected; unknown where it could not be read."""
    try:
        return digest_of(rows.bytes(0, places.header_bytes)) != places.digest
    except LookupError:
        if fault is None:
            raise
        return False


class _PartReader:
    """Reads a part's slabs, layer by layer, by way of torch. data: `[elems]`, the adapter's run."""

    def __init__(
        self, file: TensorFile, part: AdapterPart, place: PartLayout, data: torch.Tensor, dims: ModuleDims
    ) -> None:
        self._file = file
        self._part = part
        self._place = place
        self.data = data
        self.dims = dims

    def read(self, layer: int) -> None:
        """By way of buffers small enough for the caches, so that every byte is read and written once."""
        part, slabs, first = self._part, self._place.slabs, self._place.first_elem[layer]
        if first < 0:
            return
        buffer, rows = self._buffers
        for name in part.targets:
            m = MODULES.index(name)
            d_in, d_out = self.dims[name]
            (a, a_shape), (b, b_shape) = tensor_shapes(layer, name, part.rank, self.dims)
            rows[:, slabs.a_offset[m] :][:, :d_in] = _read(self._file, a, a_shape, buffer)
            rows[:, slabs.b_offset[m] :][:, :d_out] = _read(self._file, b, b_shape, buffer).T
        if not _all_finite(rows):
            raise _not_finite(self._file, part, layer, self.dims, rows.dtype, buffer)
        self.data[first : first + rows.numel()] = rows.view(-1)

    @cached_property
    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For the largest tensor in the widest type, bytes; and for a layer `[rank, slab_elems]`."""
        import torch

        part = self._part
        widest = max(max(self.dims[name]) for name in part.targets)
        rows = torch.zeros(part.rank, self._place.slabs.slab_elems, dtype=self.data.dtype)
        return torch.empty(part.rank * widest * 4, dtype=torch.uint8), rows


def _info(file: TensorFile, name: str, shape: tuple[int, int]) -> TensorInfo:
    info = file.tensors.get(name)
    if info is None or info.shape != shape:
        raise AdapterChanged(f"{file.path}: {STALE}")
    return info


def _read(file: TensorFile, name: str, shape: tuple[int, int], buffer: torch.Tensor) -> torch.Tensor:
    """One tensor in the file's element type, as a view of `buffer`."""
    import torch

    info = _info(file, name, shape)
    data = buffer[: info.num_bytes]
    file.read_into(memoryview(data.numpy()), info.offset)
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[info.dtype]
    return data.view(dtype).view(shape)


def _all_finite(values: torch.Tensor) -> bool:
    """True if no value is NaN or infinite: such have all bits of the exponent set. Far cheaper than `isfinite`."""
    import torch

    exponents = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
    mask = exponents[values.dtype]
    bits = values.view(torch.int32 if values.itemsize == 4 else torch.int16)
    return int((bits & mask).amax()) != mask


def _not_finite(
    file: TensorFile, part: AdapterPart, layer: int, dims: ModuleDims, dtype: torch.dtype, buffer: torch.Tensor
) -> AdapterFormatError:
    """Find the tensor at fault among a layer's."""
    for module in part.targets:
        for name, shape in tensor_shapes(layer, module, part.rank, dims):
            tensor = _read(file, name, shape, buffer)
            at = f"{file.path}: tensor {name} holds"
            if not _all_finite(tensor):
                return AdapterFormatError(f"{at} NaN or infinity; the training diverged or the file is corrupt")
            if not _all_finite(tensor.to(dtype)):
                return AdapterFormatError(f"{at} a value beyond the range of {dtype}; serve the model in a wider dtype")
    return AdapterChanged(f"{file.path}: {STALE}")
