"""An adapter's weights in the layout of its device pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from . import hugepages
from .adapter_error import AdapterFormatError
from .adapter_format import AdapterManifest, open_weights, tensor_shapes
from .adapter_layout import AdapterLayout, AdapterPart, PartLayout
from .layout import MODULES, ModuleDims

if TYPE_CHECKING:
    import torch

    from .host_image import HostImage
    from .tensor_file import TensorFile, TensorInfo

_STALE = "it changed on disk since the adapter was registered; register the adapter again"


class RowTask(NamedTuple):
    """One module of one layer, from the file to the image; all in elements of the image, but the file's in bytes.

    A `[rank, d_in]` begins at `a_start`, B `[d_out, rank]` at `b_start`, in the safetensors types `a_dtype`, `b_dtype`.
    Row i of A goes to `first + i · slab_elems + a_offset`, row i of Bᵀ to `first + i · slab_elems + b_offset`.
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


#: Reads tasks from an open file into a flat image; False when that can't be done, or a value is not finite.
RowReader = Callable[[int, list[RowTask], "torch.Tensor"], bool]


def read_image(
    manifest: AdapterManifest,
    layout: AdapterLayout,
    dims: ModuleDims,
    page_elems: int,
    dtype: torch.dtype,
    image: HostImage,
    read_rows: RowReader | None = None,
) -> None:
    """Read the adapter's weights into `image`: `[layout.num_pages, page_elems]`, cast to the model's dtype.

    Layers are published as they are read. read_rows: a faster way than torch's; what it refuses is read again here, to
    say why. AdapterFormatError when the file can't be read, is no longer what was inspected, or holds NaN or infinity,
    before or after the cast.
    """
    with open_weights(manifest.path) as file:
        if (file.size, file.mtime_ns) != (manifest.file_size, manifest.mtime_ns):
            raise AdapterFormatError(f"{file.path}: {_STALE}")
        file.read_soon()
        image.data = hugepages.zeros((layout.num_pages, page_elems), dtype)
        data = image.data.view(-1)
        parts = [
            _PartReader(file, part, place, data, dims) for part, place in zip(manifest.parts, layout.parts, strict=True)
        ]
        for layer in range(layout.num_layers):
            tasks = [] if read_rows is None else [task for part in parts for task in part.tasks(layer)]
            if not (tasks and read_rows(file.fd, tasks, data)):
                for part in parts:
                    part.read(layer)
            if layer == layout.num_layers - 1 and not file.is_unchanged():
                raise AdapterFormatError(f"{file.path}: {_STALE}")
            image.publish(layer + 1)


class _PartReader:
    """Reads a part's slabs, layer by layer. data: `[elems]`, the adapter's run."""

    def __init__(
        self, file: TensorFile, part: AdapterPart, place: PartLayout, data: torch.Tensor, dims: ModuleDims
    ) -> None:
        self._file = file
        self._part = part
        self._place = place
        self._data = data
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
        self._data[first : first + rows.numel()] = rows.view(-1)

    @cached_property
    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For the largest tensor in the widest type, bytes; and for a layer `[rank, slab_elems]`."""
        import torch

        part = self._part
        widest = max(max(self._dims[name]) for name in part.targets)
        rows = torch.zeros(part.rank, self._place.slabs.slab_elems, dtype=self._data.dtype)
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
