"""An adapter's weights in the layout of its device pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from .adapter_error import AdapterFormatError
from .adapter_format import AdapterManifest, open_weights, tensor_shapes
from .adapter_layout import AdapterLayout, AdapterPart, PartLayout
from .file_spans import FileSpans
from .layout import MODULES, ModuleDims
from .tensor_file import ITEM_BYTES

if TYPE_CHECKING:
    import torch

    from .host_buffers import HostBuffers
    from .host_image import HostImage
    from .tensor_file import TensorFile, TensorInfo

_STALE = "it changed on disk since the adapter was registered; register the adapter again"


class RowTask(NamedTuple):
    """One module of one layer, from the file's bytes to the image.

    A `[rank, d_in]` begins at `a_start`, in the file or in memory, B `[d_out, rank]` at `b_start`; a_dtype, b_dtype: as
    safetensors says it. Row i of A goes to `first + i · slab_elems + a_offset`, row i of Bᵀ there with `b_offset`.
    """

    a_start: int
    b_start: int
    a_dtype: str
    b_dtype: str
    rank: int
    d_in: int
    d_out: int
    first: int
    slab_elems: int
    a_offset: int
    b_offset: int

    @property
    def spans(self) -> tuple[tuple[int, int], tuple[int, int]]:
        a_bytes, b_bytes = ITEM_BYTES[self.a_dtype] * self.d_in, ITEM_BYTES[self.b_dtype] * self.d_out
        return (self.a_start, self.a_start + self.rank * a_bytes), (self.b_start, self.b_start + self.rank * b_bytes)

    @property
    def num_bytes(self) -> int:
        return sum(end - start for start, end in self.spans)

    def moved(self, address: Callable[[int], int]) -> RowTask:
        """The task with the file's bytes where `address` says they are."""
        return self._replace(a_start=address(self.a_start), b_start=address(self.b_start))


#: Does tasks of a flat image; False when a value is not finite.
RowReader = Callable[[list[RowTask], "torch.Tensor"], bool]

# How much is read at once, in whole layers; those of one read wait for each other.
_FIRST_READ_BYTES = 1 << 20
_LAST_READ_BYTES = 8 << 20


def read_image(
    manifest: AdapterManifest,
    layout: AdapterLayout,
    dims: ModuleDims,
    page_elems: int,
    dtype: torch.dtype,
    image: HostImage,
    buffers: HostBuffers,
    read_rows: RowReader | None = None,
) -> None:
    """Read the adapter's weights into `image`: `[layout.num_pages, page_elems]`, cast to the model's dtype.

    Layers are published as they are read; what lies between rows may be anything. read_rows: a faster way than torch's;
    what it refuses is read again here, to say why. AdapterFormatError when the file can't be read, is no longer what
    was inspected, or holds NaN or infinity, before or after the cast.
    """
    with open_weights(manifest.path) as file:
        if (file.size, file.mtime_ns) != (manifest.file_size, manifest.mtime_ns):
            raise AdapterFormatError(f"{file.path}: {_STALE}")
        image.data = buffers.take((layout.num_pages, page_elems), dtype)
        parts = [
            _PartReader(file, part, place, image.data.view(-1), dims)
            for part, place in zip(manifest.parts, layout.parts, strict=True)
        ]
        last = layout.num_layers - 1
        for layer in _read_layers(file, parts, layout.num_layers, read_rows):
            if layer == last and not file.is_unchanged():
                raise AdapterFormatError(f"{file.path}: {_STALE}")
            image.publish(layer + 1)


def _read_layers(
    file: TensorFile, parts: list[_PartReader], num_layers: int, read_rows: RowReader | None
) -> Iterator[int]:
    """Read layer by layer; yields each that is in the image."""
    if read_rows is None:
        for layer in range(num_layers):
            for part in parts:
                part.read(layer)
            yield layer
        return
    tasks = [[task for part in parts for task in part.tasks(layer)] for layer in range(num_layers)]
    groups = list(_groups([sum(task.num_bytes for task in found) for found in tasks]))
    with FileSpans(file.fd) as spans:
        wanted = [[span for layer in layers for task in tasks[layer] for span in task.spans] for layers in groups]
        for layers, address in zip(groups, spans.read(wanted), strict=True):
            for layer in layers:
                if address is None or not read_rows([task.moved(address) for task in tasks[layer]], parts[0].data):
                    for part in parts:
                        part.read(layer)  # says what is wrong
                yield layer


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


class _PartReader:
    """Reads a part's slabs, layer by layer. data: `[elems]`, the adapter's run."""

    def __init__(
        self, file: TensorFile, part: AdapterPart, place: PartLayout, data: torch.Tensor, dims: ModuleDims
    ) -> None:
        self._file = file
        self._part = part
        self._place = place
        self.data = data
        self._dims = dims

    def tasks(self, layer: int) -> Iterator[RowTask]:
        part, slabs, first = self._part, self._place.slabs, self._place.first_elem[layer]
        if first < 0:
            return
        for name in part.targets:
            m = MODULES.index(name)
            a, b = (_info(self._file, *it) for it in tensor_shapes(layer, name, part.rank, self._dims))
            yield RowTask(
                a.offset, b.offset, a.dtype, b.dtype, part.rank, *self._dims[name], first, slabs.slab_elems,
                slabs.a_offset[m], slabs.b_offset[m],
            )  # fmt: skip

    def read(self, layer: int) -> None:
        """By way of buffers small enough for the caches, so that every byte is read and written once."""
        part, slabs, first = self._part, self._place.slabs, self._place.first_elem[layer]
        if first < 0:
            return
        buffer, rows = self._buffers
        for name in part.targets:
            m = MODULES.index(name)
            d_in, d_out = self._dims[name]
            (a, a_shape), (b, b_shape) = tensor_shapes(layer, name, part.rank, self._dims)
            rows[:, slabs.a_offset[m] :][:, :d_in] = _read(self._file, a, a_shape, buffer)
            rows[:, slabs.b_offset[m] :][:, :d_out] = _read(self._file, b, b_shape, buffer).T
        if not _all_finite(rows):
            raise _not_finite(self._file, part, layer, self._dims, rows.dtype, buffer)
        self.data[first : first + rows.numel()] = rows.view(-1)

    @cached_property
    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For the largest tensor in the widest type, bytes; and for a layer `[rank, slab_elems]`."""
        import torch

        part = self._part
        widest = max(max(self._dims[name]) for name in part.targets)
        rows = torch.zeros(part.rank, self._place.slabs.slab_elems, dtype=self.data.dtype)
        return torch.empty(part.rank * widest * 4, dtype=torch.uint8), rows


def _info(file: TensorFile, name: str, shape: tuple[int, int]) -> TensorInfo:
    info = file.tensors.get(name)
    if info is None or info.shape != shape:
        raise AdapterFormatError(f"{file.path}: {_STALE}")
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
    """Whether no value is NaN or infinite: such have all bits of the exponent set. Far cheaper than `isfinite`."""
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
    return AdapterFormatError(f"{file.path}: {_STALE}")
