"""An adapter's vectors: for each output of a module a scale and an offset, computed once, when the adapter is read.

    y = scale · (W x + b + s·B A x) + offset

DoRA's scale is its magnitude / ‖W + s·B·A‖, of each output (arXiv 2402.09353, equation 5, as PEFT computes it). Without
DoRA it is 1. The offset turns the base model's bias, scaled, into the adapter's, and adds that of B. IA³'s
factors are of all that together.

Tests: tests/memory/adapters/test_vectors.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..files.adapter_weights import AdapterWeights
from ..files.error import AdapterFormatError
from ..files.manifest import AdapterManifest
from ..files.peft_names import tensor_names, vector_names
from ..files.values import read_values
from ..files.vectors import BIAS, INPUT_SCALE, LORA_BIAS, MAGNITUDE, OUTPUT_SCALE
from ..pages.adapter_layout import AdapterLayout, VectorTarget, vector_elems
from ..pages.projections import Projections

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

#: Elements of a base weight that are worked on at once.
_CHUNK_ELEMS = 1 << 22


class BaseWeights(Protocol):
    """The base model's projections as they are served. Any thread may ask."""

    def weight(self, layer: int, module: str, /) -> torch.Tensor:
        """Weight `[outputs, inputs]` of all ranks together, dequantised; valid in the caller's hands alone."""
        ...

    def bias(self, layer: int, module: str, /) -> torch.Tensor | None:
        """Bias `[outputs]` of all ranks together; None if there is none."""
        ...


class VectorReader:
    """Computes an adapter's vectors, layer by layer, from its open file."""

    def __init__(
        self,
        file: AdapterWeights,
        manifest: AdapterManifest,
        layout: AdapterLayout,
        base: BaseWeights | None,
        *,
        projections: Projections,
    ) -> None:
        """base: None: vectors are checked, and not computed."""
        if layout.vectors is None:
            raise ValueError(f"{manifest.path} has vectors, and its layout has none")
        self._file, self._base, self._projections = file, base, projections
        self._first_elem, self._num_read = layout.vectors.first_elem, 0
        self._targets: dict[int, list[VectorTarget]] = {}
        for target in manifest.vectors:
            self._targets.setdefault(target.layer, []).append(target)
        self._lora = {
            (layer, module): (part.rank, part.scale)
            for part in manifest.parts
            for layer in part.layers
            for module in part.targets
        }

    @classmethod
    def of(
        cls,
        file: AdapterWeights,
        manifest: AdapterManifest,
        layout: AdapterLayout,
        base: BaseWeights | None,
        *,
        projections: Projections,
    ) -> VectorReader | None:
        """Make one for an adapter with vectors; None for others."""
        return cls(file, manifest, layout, base, projections=projections) if manifest.vectors else None

    def read_up_to(self, num_layers: int, image: torch.Tensor) -> None:
        """Write the vectors of the layers before `num_layers` that are not yet in the image; AdapterFormatError for
        values that can't be served.
        """
        for layer in range(self._num_read, num_layers):
            self._read_layer(layer, image.view(-1))
        self._num_read = num_layers

    def _read_layer(self, layer: int, data: torch.Tensor) -> None:
        import torch

        for target in self._targets.get(layer, ()):
            found = self._read_tensors(target)
            if self._base is None:
                continue
            outputs = self._projections[target.module].outputs
            first = self._first_elem[layer][self._projections.id(target.module)]
            stride = vector_elems(outputs, data.itemsize)
            for at, vector in zip((first, first + stride), self._vectors(target, found), strict=True):
                data[at : at + stride].view(torch.float32)[:outputs] = vector

    def _vectors(
        self, target: VectorTarget, found: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor | float, torch.Tensor | float]:
        """Scale and offset, each a number where it is the same for all outputs."""
        assert self._base is not None
        scale = self._dora(target, found[MAGNITUDE]) if target.has_magnitude else 1.0
        own = self._base.bias(target.layer, target.module)
        offset: torch.Tensor | float = 0.0
        if own is not None:
            own = own.float()
            offset = found.get(BIAS, own) - own * scale
        if target.has_lora_bias:
            _, factor = self._lora[target.layer, target.module]
            offset = offset + factor * self._projections[target.module].bias_factor * found[LORA_BIAS]
        for end in (OUTPUT_SCALE, INPUT_SCALE):
            if (own := found.get(end)) is not None:
                scale, offset = scale * own, offset * own
        return scale, offset

    def _dora(self, target: VectorTarget, magnitude: torch.Tensor) -> torch.Tensor:
        """Magnitude / ‖W + s·B·A‖ of each output."""
        assert self._base is not None
        rank, factor = self._lora[target.layer, target.module]
        a_name, b_name = tensor_names(target.layer, self._projections[target.module])
        inputs, outputs = self._projections[target.module].dims
        a, b = self._read(a_name, (rank, inputs)), self._read(b_name, (outputs, rank))
        weight = self._base.weight(target.layer, target.module)
        scale = magnitude.clone()
        for rows in _chunks(outputs, max(1, _CHUNK_ELEMS // inputs)):
            norm = weight[rows].float().addmm(b[rows], a, alpha=factor).norm(dim=1)
            scale[rows] /= norm
        if not scale.isfinite().all():
            name = next(vector_names(target, self._projections))
            raise AdapterFormatError(
                f"{self._file.path}: tensor {name} can't be applied: the base model's weight with the adapter in it "
                "has an output of norm 0; the training diverged, or it was trained on another base model"
            )
        return scale

    def _read_tensors(self, target: VectorTarget) -> dict[str, torch.Tensor]:
        """The target's tensors by their names' ends."""
        outputs = self._projections[target.module].outputs
        names = vector_names(target, self._projections)
        return {_end(name): self._read(name, (outputs,)) for name in names}

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor in float32; AdapterFormatError if a value is not finite."""
        info = self._file.tensor(name)
        if not info.fits(shape):
            raise self._file.changed()
        values = read_values(self._file, info).float()
        if not values.isfinite().all():
            raise AdapterFormatError(
                f"{self._file.path}: tensor {name} holds NaN or infinity; the training diverged or the file is corrupt"
            )
        return values


def _end(name: str) -> str:
    return next(end for end in (MAGNITUDE, LORA_BIAS, BIAS, OUTPUT_SCALE, INPUT_SCALE) if name.endswith(f".{end}"))


def _chunks(count: int, size: int) -> Iterator[slice]:
    return (slice(first, min(first + size, count)) for first in range(0, count, size))
