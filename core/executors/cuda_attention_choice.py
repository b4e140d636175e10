"""Chooses the attention of decode steps where two backends can serve: by values, then by the time of whole steps.

Tests: tests/core/executors/test_cuda_interpreted.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence

import torch

from ...graphs.device import CudaDevice
from ...ops.attention.attention import GroupedAttention
from ..model.decoder import DecoderModel
from .cuda_gemm_backends import TOLERANCE
from .cuda_gemm_races import NEAR

logger = logging.getLogger(__name__)


def choose_decode_attention(
    usual: Mapping[int, GroupedAttention],
    rival: Mapping[int, GroupedAttention],
    names: Sequence[str],
    decoder: DecoderModel,
    device: CudaDevice,
    *,
    plan: Callable[[int, GroupedAttention], None],
    seconds: Callable[[int], float],
) -> dict[int, GroupedAttention]:
    """Return the attention of each bucket.

    The rival serves the buckets whose captured steps it makes faster by more than steps vary, if its values are the
    usual one's. names: of both. plan: fills a bucket with sample sequences for an attention, which is the bucket's from
    then on. seconds: times the bucket's step. Ranks, whose steps wait for each other, call it alike.
    """
    chosen = dict(usual)
    for bucket, other in rival.items():
        first = usual[bucket]
        if (problem := _problem(bucket, (first, other), decoder, device, plan)) is not None:
            logger.warning("attention of %d rows is not by %s: %s", bucket, names[1], problem)
            plan(bucket, first)
            continue
        times = []
        for attention in (first, other):
            plan(bucket, attention)
            times.append(seconds(bucket))
        is_better = times[0] > NEAR * times[1]
        if is_better:
            chosen[bucket] = other
        note = ", ".join(f"{name} {1e6 * took:.0f}" for name, took in zip(names, times, strict=True))
        logger.info("attention of %d rows by %s (µs a step: %s)", bucket, names[is_better], note)
    return chosen


def _problem(
    bucket: int,
    pair: tuple[GroupedAttention, GroupedAttention],
    decoder: DecoderModel,
    device: CudaDevice,
    plan: Callable[[int, GroupedAttention], None],
) -> str | None:
    """Why the second attention can't be used: it fails, or its values differ from the first's; None if it can."""
    config, dtype = decoder.config, decoder.dtype
    generator = torch.Generator().manual_seed(bucket)
    queries = [
        (index, torch.randn(bucket, it.num_heads, it.head_dim, generator=generator).to(device.torch_device, dtype))
        for index, layer in enumerate(config.layers)
        if (it := layer.attention) is not None
    ]
    try:
        found = []
        for attention in pair:
            plan(bucket, attention)
            found.append(torch.cat([decoder.attend(index, attention, q).float().flatten() for index, q in queries]))
    except Exception as error:  # of any part of a library
        if device.failure() is not None:
            raise
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    error = float((found[1] - found[0]).abs().max() / found[0].abs().max())
    limit = TOLERANCE[dtype]
    is_near = error <= limit and not math.isnan(error)
    return None if is_near else f"it differs by {error:.1e} of the largest value, more than {limit:.1e}"
