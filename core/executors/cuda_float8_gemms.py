"""Chooses how a GPU multiplies activations in FP8 with weights in FP8: as they are, or both widened for cuBLAS.

Both multiply the same rounded activations, so the choice changes outputs by rounding alone.

Tests: tests/core/executors/test_cuda_float8_gemms.py
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from ...graphs.device import CudaDevice
from ...ops.gemm.float8_rows import is_multiplied
from ...ops.gemm.narrow_weights import NarrowWeight
from ..model.batch import GemmBackend, GemmKind
from ..model.decoder import DecoderModel, GemmUse
from ..model.specs.config import UnsupportedModel
from ..model.weights.layer_weights import LayerWeights
from .cuda_gemm_backends import TOLERANCE
from .cuda_gemm_races import NEAR

logger = logging.getLogger(__name__)

DTYPES = {torch.bfloat16}
"""Dtypes of GEMMs of FP8 with FP8 with a scale per row."""

LEAST_CAPABILITY = (8, 9)
"""Compute capability from which GPUs multiply FP8."""

SAMPLED = 4
"""Layers whose GEMMs are timed: together their weights are larger than a GPU's cache."""

Seconds = Callable[[Callable[[], object]], float]
"""Device seconds of some work, captured."""


def check_float8_gemms(dtype: torch.dtype, device: torch.device) -> None:
    """Raise UnsupportedModel if activations of a dtype in FP8 can't be multiplied as they are on a device."""
    if dtype not in DTYPES:
        name = str(dtype).removeprefix("torch.")
        raise UnsupportedModel(f"fp8_activations is true, but dtype is {name}; leave it out, or set dtype to bfloat16")
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < LEAST_CAPABILITY:
        least, its = (".".join(map(str, each)) for each in (LEAST_CAPABILITY, found))
        raise UnsupportedModel(
            f"fp8_activations is true, but it needs compute capability {least}, {device} has {its}; leave it out"
        )


def choose_float8_gemms(decoder: DecoderModel, rows: int, device: CudaDevice, seconds: Seconds | None = None) -> None:
    """Choose for each kind of GEMM, for the library's GEMMs of any number of rows.

    Weights are multiplied as they are where that gives the values of widened ones, and steps of `rows` tokens are not
    slower by more than they vary. Call it before anything is captured. seconds: default: the device's.
    """
    seconds = device.seconds if seconds is None else seconds
    for kind, uses in decoder.gemms(every=True).items():
        if not _can_be_float8(uses[0]):
            continue
        chosen, why = _is_better(decoder, kind, uses[:SAMPLED], rows=rows, device=device, seconds=seconds)
        for use in uses if chosen else ():
            _use_float8(decoder.layers, use)
        how, name = "in FP8" if chosen else "widened", f"{uses[0].name} {kind.inputs} → {kind.outputs}"
        logger.info("products of %s with activations in FP8: %s (%s)", name, how, why)


def _can_be_float8(use: GemmUse) -> bool:
    weight = use.weight
    if use.layer is None or not isinstance(weight, NarrowWeight):
        return False
    return weight.rounds_inputs and is_multiplied(weight)


def _use_float8(layers: Sequence[LayerWeights], use: GemmUse) -> None:
    """Have the library multiply one of a layer's matrices as it is."""
    assert use.op is not None and use.layer is not None, "it is a layer's"
    layers[use.layer][use.op.weight] = _in_float8(use)


def _in_float8(use: GemmUse) -> NarrowWeight:
    assert isinstance(use.weight, NarrowWeight), "it is narrow"
    return replace(use.weight, multiplies_float8=True)


def _is_better(
    decoder: DecoderModel,
    kind: GemmKind,
    uses: Sequence[GemmUse],
    *,
    rows: int,
    device: CudaDevice,
    seconds: Seconds,
) -> tuple[bool, str]:
    """Whether to multiply weights as they are, and why. Ranks time no collective, and may choose apart."""
    generator = torch.Generator().manual_seed(kind.outputs)
    x = torch.randn(rows, kind.inputs, generator=generator).to(decoder.arena.pages.device, decoder.dtype)

    def run(in_float8: bool, count: int) -> torch.Tensor:
        y = x
        for use in uses[:count]:
            assert use.op is not None and use.layer is not None, "it is a layer's"
            own = decoder.layers[use.layer]
            weights = {**own, use.op.weight: _in_float8(use)} if in_float8 else own
            y = decoder.run_gemm(use, GemmBackend.LIBRARY, x, weights=weights)
        return y

    if (problem := _problem(partial(run, count=1), TOLERANCE[decoder.dtype], device)) is not None:
        logger.warning("products of FP8 with FP8 of %s are not used: %s", uses[0].name, problem)
        return False, problem
    widened, float8 = (seconds(partial(run, each, len(uses))) for each in (False, True))
    return float8 <= NEAR * widened, f"µs of {rows} rows, {len(uses)} layers: {1e6 * float8:.0f}, {1e6 * widened:.0f}"


def _problem(run: Callable[[bool], torch.Tensor], limit: float, device: CudaDevice) -> str | None:
    """Why weights can't be multiplied as they are: it fails, or values differ by more than `limit` of the largest; None
    if they can.
    """
    try:
        want, got = (run(in_float8).float() for in_float8 in (False, True))
        error = float((got - want).abs().max() / want.abs().max())
    except Exception as failed:  # of any part of a library
        if device.failure() is not None:
            raise
        return f"{type(failed).__name__}: {str(failed).partition(chr(10))[0]}"
    return None if error <= limit else f"they differ by {error:.1e} of the largest value, more than {limit:.1e}"
