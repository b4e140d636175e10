"""An adapter's weights in the layout of its device pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import hugepages
from .adapter_error import AdapterFormatError
from .adapter_format import AdapterManifest, open_weights, tensor_shapes
from .adapter_layout import AdapterLayout, AdapterPart, PartLayout
from .layout import MODULES, ModuleDims

if TYPE_CHECKING:
    import torch

    from .tensor_file import TensorFile

_STALE = "it changed on disk since the adapter was registered; register the adapter again"


def read_image(
    manifest: AdapterManifest, layout: AdapterLayout, dims: ModuleDims, page_elems: int, dtype: torch.dtype
) -> torch.Tensor:
    """The adapter's weights: `[layout.num_pages, page_elems]` on the host, cast to the model's dtype.

    Each layer passes through a buffer small enough for the caches, so every byte is read from the file once and
    written to the image once. AdapterFormatError when the file can't be read, is no longer what was inspected, or holds
    NaN or infinity, before or after the cast.
    """
    image = hugepages.zeros((layout.num_pages, page_elems), dtype)
    with open_weights(manifest.path) as file:
        if (file.size, file.mtime_ns) != (manifest.file_size, manifest.mtime_ns):
            raise AdapterFormatError(f"{file.path}: {_STALE}")
        for part, place in zip(manifest.parts, layout.parts, strict=True):
            _read_part(file, part, place, image.view(-1), dims)
        if not file.is_unchanged():
            raise AdapterFormatError(f"{file.path}: {_STALE}")
    return image


def _read_part(file: TensorFile, part: AdapterPart, place: PartLayout, image: torch.Tensor, dims: ModuleDims) -> None:
    """Fill a part's slabs, layer by layer. image: `[elems]`, the adapter's run."""
    import torch

    slabs = place.slabs
    widest = max(max(dims[name]) for name in part.targets)
    buffer = torch.empty(part.rank * widest * 4, dtype=torch.uint8)  # the largest tensor, in the widest element type
    rows = torch.zeros(part.rank, slabs.slab_elems, dtype=image.dtype)
    for layer in part.layers:
        for name in part.targets:
            m = MODULES.index(name)
            d_in, d_out = dims[name]
            (a, a_shape), (b, b_shape) = tensor_shapes(layer, name, part.rank, dims)
            rows[:, slabs.a_offset[m] :][:, :d_in] = _read(file, a, a_shape, buffer)
            rows[:, slabs.b_offset[m] :][:, :d_out] = _read(file, b, b_shape, buffer).T
        if not _all_finite(rows):
            raise _not_finite(file, part, layer, dims, image.dtype, buffer)
        image[place.first_elem[layer] :][: rows.numel()] = rows.view(-1)


def _read(file: TensorFile, name: str, shape: tuple[int, int], buffer: torch.Tensor) -> torch.Tensor:
    """One tensor in the file's element type, as a view of `buffer`."""
    import torch

    info = file.tensors.get(name)
    if info is None or info.shape != shape:
        raise AdapterFormatError(f"{file.path}: {_STALE}")
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
