"""Chooses how a GPU multiplies activations in FP8 with weights in FP8: as they are, or both widened for cuBLAS.

Both multiply the same rounded activations, so the choice changes outputs by rounding alone.

Tests: tests/core/executors/test_cuda_float8_products.py
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from ...graphs.device import CudaDevice
from ...ops.float8_rows import is_multiplied
from ...ops.narrow_weights import NarrowWeight
from ..model.batch import GemmBackend
from ..model.config import UnsupportedModel
from ..model.decoder import DecoderModel
from ..model.layer_weights import MATRICES, LayerWeights
from .cuda_gemm_backends import NAMES, NEAR, TOLERANCE

logger = logging.getLogger(__name__)

DTYPES = {torch.bfloat16}
"""Dtypes of products of FP8 with FP8 with a scale per row."""

LEAST_CAPABILITY = (8, 9)
"""Compute capability from which GPUs multiply FP8."""

SAMPLED_LAYERS = 4
"""Layers whose products are timed: together their weights are larger than a GPU's cache."""

Seconds = Callable[[Callable[[], object]], float]
"""Device seconds of some work, captured."""


def check_float8_products(dtype: torch.dtype, device: torch.device) -> None:
    """Raise UnsupportedModel if activations of a dtype in FP8 can't be multiplied as they are on a device."""
    if dtype not in DTYPES:
        name = str(dtype).removeprefix("torch.")
        raise UnsupportedModel(f"fp8_activations is true, but dtype is {name}; leave it out, or set dtype to bfloat16")
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < LEAST_CAPABILITY:
        least, its = (".".join(map(str, each)) for each in (LEAST_CAPABILITY, found))
        raise UnsupportedModel(
            f"fp8_activations is true, but it needs compute capability {least}, {device} has {its}; leave it out"
        )


def choose_float8_products(
    decoder: DecoderModel, rows: int, device: CudaDevice, seconds: Seconds | None = None
) -> None:
    """Choose for each group of projections, for the library's products of any number of rows.

    A group's weights are multiplied as they are where that gives the values of widened ones, and steps of `rows` tokens
    are not slower by more than they vary. Call it before anything is captured. seconds: default: the device's.
    """
    seconds = device.seconds if seconds is None else seconds
    for group, name in enumerate(MATRICES):
        layers = [layer for layer in decoder.layers if _can_be_float8(getattr(layer, name))]
        if not layers:
            continue
        chosen, why = _is_better(decoder, group, _samples(layers, name), rows=rows, device=device, seconds=seconds)
        for layer in layers if chosen else ():
            _use_float8(layer, name)
        how = "in FP8" if chosen else "widened"
        logger.info("products of %s with activations in FP8: %s (%s)", NAMES[group], how, why)


def _samples(layers: Sequence[LayerWeights], name: str) -> list[LayerWeights]:
    """A few layers whose matrix has the shape of the first one's."""
    alike = [layer for layer in layers if getattr(layer, name).shape == getattr(layers[0], name).shape]
    return alike[:SAMPLED_LAYERS]


def _can_be_float8(weight: object) -> bool:
    return isinstance(weight, NarrowWeight) and weight.rounds_inputs and is_multiplied(weight)


def _use_float8(layer: LayerWeights, name: str) -> LayerWeights:
    """Have the library multiply one of a layer's matrices as it is."""
    setattr(layer, name, replace(getattr(layer, name), multiplies_float8=True))
    return layer


def _is_better(
    decoder: DecoderModel,
    group: int,
    layers: Sequence[LayerWeights],
    *,
    rows: int,
    device: CudaDevice,
    seconds: Seconds,
) -> tuple[bool, str]:
    """Whether to multiply a group's weights as they are, and why. Ranks time no collective, and may choose apart."""
    weight: NarrowWeight = getattr(layers[0], MATRICES[group])
    generator = torch.Generator().manual_seed(group)
    x = torch.randn(rows, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
    residual = torch.zeros_like(x)

    def run(its: Sequence[LayerWeights]) -> torch.Tensor:
        return decoder.run_gemms(group, GemmBackend.LIBRARY, x, residual.zero_(), its)

    in_float8 = [_use_float8(replace(layer), MATRICES[group]) for layer in layers]
    if (problem := _problem(run, layers[:1], in_float8[:1], TOLERANCE[weight.dtype], device)) is not None:
        logger.warning("products of FP8 with FP8 of %s are not used: %s", NAMES[group], problem)
        return False, problem
    widened, float8 = (seconds(partial(run, its)) for its in (layers, in_float8))
    return float8 <= NEAR * widened, f"µs of {rows} rows, {len(layers)} layers: {1e6 * float8:.0f}, {1e6 * widened:.0f}"


def _problem(
    run: Callable[[Sequence[LayerWeights]], torch.Tensor],
    widened: Sequence[LayerWeights],
    in_float8: Sequence[LayerWeights],
    limit: float,
    device: CudaDevice,
) -> str | None:
    """Why weights can't be multiplied as they are: it fails, or values differ by more than `limit` of the largest; None
    if they can.
    """
    try:
        want, got = run(widened).float(), run(in_float8).float()
        error = float((got - want).abs().max() / want.abs().max())
    except Exception as failed:  # of any part of a library
        if device.failure() is not None:
            raise
        return f"{type(failed).__name__}: {str(failed).partition(chr(10))[0]}"
    return None if error <= limit else f"they differ by {error:.1e} of the largest value, more than {limit:.1e}"
