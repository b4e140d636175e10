"""Chooses the GEMM backend for decode steps of few sequences: cuBLAS, or Chorus's kernel if it is faster."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from typing import Literal

import torch

from ...graphs.device import CudaDevice
from ...ops import dependent_launch
from ...ops.small_gemm_schedule import MAX_EXPANDED_ROWS, MAX_ROWS, tile_rows
from ..cpus import available_cpus
from ..model.batch import BY_LIBRARY, GemmBackend, GemmBackends
from ..model.config import ModelConfig
from ..model.decoder import DecoderModel
from ..model.layers import UngatedSpec
from ..model.lora_launches import LoraLaunches
from ..model.lora_state_cuda import CudaLoraState
from ..model.program.torch_ops import HEAD
from ..model.sample_adapters import SampleAdapters
from ..model.step_lora import ATTN_O, DOWN, GATE_UP, QKV

logger = logging.getLogger(__name__)

SmallGemm = Literal["auto", "on", "fused", "off"]

#: Names of the GEMMs in logs, by their index in a step's backends.
NAMES = {QKV: "qkv", ATTN_O: "o", GATE_UP: "gate and up", DOWN: "down", HEAD: "logits"}

#: Device seconds of a whole captured step: of a bucket, with backends and with adapters, or None.
StepSeconds = Callable[[int, GemmBackends, SampleAdapters | None], float]

#: Times of whole steps within this factor of the least count as equal: they vary by as much.
NEAR = 1.02

#: GEMM backends found to be wrong, by GEMM and tile.
Refused = set[tuple[int, int, GemmBackend]]

#: Dtypes that Chorus's kernel supports, with the largest difference from the library's values, relative to the largest
#: value: two units in the last place.
TOLERANCE = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


def choose_gemm_backends(
    setting: SmallGemm,
    decoder: DecoderModel,
    lora: CudaLoraState,
    sizes: Sequence[int],
    device: CudaDevice,
    *,
    seconds: StepSeconds | None,
) -> Mapping[int, GemmBackends]:
    """Choose the GEMM backends of each bucket.

    Call it before anything is captured and before the arena is allocated: it uses free memory. seconds: times decode
    steps, captured, next to sample adapters; None if they will not be captured: eager steps would wait for the host's
    launches.

    setting:
    - `off`: only the library.
    - `on`: Chorus's kernel wherever it gives the library's values.
    - `fused`: the same, with adapters expanded in it.
    - `auto`: the fastest of a few combinations, per bucket (`choose_combination`). One serves both kinds of steps, so a
      sequence's result does not depend on other sequences' adapters.
    """
    backends = dict.fromkeys(sizes, BY_LIBRARY)
    dtype = decoder.weight(QKV).dtype
    if (obstacle := _obstacle(setting, decoder.config, dtype, seconds is not None)) is not None:
        logger.info("base products by the library: %s", obstacle)
        return backends
    few = [size for size in sizes if size <= MAX_ROWS]
    compile_ahead(setting, decoder, lora, few)
    refused: Refused = set()
    groups = _groups(decoder.config)
    free, _ = device.memory()
    with SampleAdapters(lora, max(few), free) as samples:
        for bucket in few:
            launches = samples.launches(bucket)
            asked = {
                group: _usable(setting, _Rows(decoder, launches, group, bucket), device, refused)
                if group in groups
                else []
                for group in NAMES
            }
            combinations, why = combinations_of(asked), ""
            if setting != "auto":
                backends[bucket] = combinations[setting]
            elif seconds is not None:
                timed, expands = partial(_step_seconds, seconds, bucket, samples), bucket <= MAX_EXPANDED_ROWS
                backends[bucket], why = choose_combination(combinations, timed, expands=expands)
            said = (f"{name} {backend}" for name, backend in zip(NAMES.values(), backends[bucket], strict=True))
            logger.info("base products of %d rows: %s%s", bucket, ", ".join(said), why)
    return backends


def _obstacle(setting: SmallGemm, model: ModelConfig, dtype: torch.dtype, captures: bool) -> str | None:
    if setting == "off":
        return "small_gemm is off"
    if model.recurrent is not None or model.attention_shapes[1:]:
        return "the kernel for few rows needs mixers of one kind"
    if not all(layer.is_whole for layer in model.layers):
        return "the kernel for few rows needs layers with a mixer and a feed-forward part"
    if setting == "auto" and not captures:
        return "steps are not captured, so launches from the host take longer than any kernel"
    if dtype not in TOLERANCE:
        return f"the kernel for few rows needs bfloat16 or float16, the model is in {str(dtype).removeprefix('torch.')}"
    return None if find_spec("triton") is not None else "triton is not installed"


def _groups(model: ModelConfig) -> list[int]:
    """The products for which a backend is chosen: those that all layers have. With experts, layers may have no others
    behind attention.
    """
    return [group for group in NAMES if model.experts is None or group not in (GATE_UP, DOWN)]


def asked_backends(setting: SmallGemm, group: int, rows: int) -> list[GemmBackend]:
    """Backends other than the library to try for a GEMM of so many rows.

    Beyond MAX_EXPANDED_ROWS, `fused` means `on`.
    """
    asked = [GemmBackend.SMALL, *([] if group == HEAD or rows > MAX_EXPANDED_ROWS else [GemmBackend.EXPANDED])]
    if setting == "auto":
        return asked
    return asked[-1:] if setting == "fused" else asked[:1]


def compile_ahead(setting: SmallGemm, decoder: DecoderModel, lora: CudaLoraState, buckets: Sequence[int]) -> None:
    """Compile every kernel that steps of these buckets may launch, as many at once as there are processors.

    It covers all backends of each GEMM, with and without adapters. A kernel that fails here fails again when it is
    tried, and is refused then.
    """
    from ...ops.launch_triton import compiling  # needs triton
    from ...ops.small_gemm_triton import multiply

    layer, launches = decoder.layers[0], lora.bucket(MAX_ROWS)
    biases = layer.qkv_bias, layer.o_bias, layer.gate_up_bias, layer.down_bias, None
    groups = _groups(decoder.config)
    tiles = {tile_rows(rows): rows for rows in reversed(buckets)}  # by tile, the least rows: all backends
    with suppress(Exception), compiling(available_cpus()):
        for rows, group in itertools.product(tiles.values(), groups):
            weight, bias, is_gate = decoder.weight(group), biases[group], _has_gate(decoder, group)
            x = torch.zeros(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
            for silu in {False, is_gate}:  # adapters may be added after the GEMM and before the activation
                multiply(x, weight, bias, silu=silu, compile_only=True)
            if GemmBackend.EXPANDED in asked_backends(setting, group, rows):
                shrunk = launches.shrink(group, x, 0, compile_only=True)
                multiply(x, weight, bias, silu=is_gate, shrunk=shrunk, compile_only=True)


def _has_gate(decoder: DecoderModel, group: int) -> bool:
    """True if the kernel for few rows computes a gated activation with a product."""
    return group == GATE_UP and not isinstance(decoder.config.layers[0].feed_forward, UngatedSpec)


def compile_late(decoder: DecoderModel, backends: Mapping[int, GemmBackends]) -> None:
    """Compile the kernels that base steps with these backends launch if none begins early, as `compile_ahead` does."""
    from ...ops.launch_triton import compiling  # needs triton
    from ...ops.small_gemm_triton import multiply

    layer = decoder.layers[0]
    biases = layer.qkv_bias, layer.o_bias, layer.gate_up_bias, layer.down_bias, None
    used = {
        (tile_rows(bucket), group)
        for bucket, chosen in backends.items()
        for group, backend in zip(NAMES, chosen, strict=True)
        if backend is not GemmBackend.LIBRARY
    }
    with suppress(Exception), dependent_launch.only(False), compiling(available_cpus()):
        for rows, group in sorted(used):
            weight = decoder.weight(group)
            x = torch.zeros(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
            multiply(x, weight, biases[group], silu=_has_gate(decoder, group), compile_only=True)


def combinations_of(asked: Mapping[int, Collection[GemmBackend]]) -> dict[str, GemmBackends]:
    """Return the combinations of backends to choose from, those of Chorus's kernel first.

    asked: by GEMM, the backends that it may use instead of the library's.
    """
    library, small, expanded = GemmBackend.LIBRARY, GemmBackend.SMALL, GemmBackend.EXPANDED

    def first_of(group: int, *wanted: GemmBackend) -> GemmBackend:
        return next((each for each in wanted if each in asked[group]), library)

    return {
        "on": tuple(first_of(group, small) for group in NAMES),
        "fused": tuple(first_of(group, expanded, small) for group in NAMES),
        "on, logits by the library": tuple(first_of(group, *[small] * (group != HEAD)) for group in NAMES),
        "off": BY_LIBRARY,
    }


def choose_combination(
    combinations: Mapping[str, GemmBackends], seconds: Callable[[GemmBackends, bool], float], *, expands: bool
) -> tuple[GemmBackends, str]:
    """Return the first combination within `NEAR` of the fastest, and a note of all times.

    A time is that of a whole step of the base model and of one with an adapter for every sequence. Alone, GEMMs differ
    by less than they vary. With the earlier combinations preferred, an engine chooses the same ones each time it
    starts. seconds: called with backends, and whether the step has adapters; for every combination, whatever is
    refused, so that ranks, whose steps wait for each other, call it alike. `fused` is timed only where it can differ
    from `on`: with adapters. expands: Chorus's kernel can expand those of so many rows.
    """
    times: dict[str, tuple[float, float]] = {}
    for name, each in combinations.items():
        if name == "fused":
            base, lora = times["on"]
            times[name] = base, seconds(each, True) if expands else lora
        else:
            times[name] = seconds(each, False), seconds(each, True)
    least = min(map(sum, times.values()))
    chosen = next(name for name, took in times.items() if sum(took) <= NEAR * least)
    note = ", ".join(f"{name} {1e6 * base:.0f} + {1e6 * lora:.0f}" for name, (base, lora) in times.items())
    return combinations[chosen], f" (µs a step, base + LoRA: {note})"


def _step_seconds(
    seconds: StepSeconds, bucket: int, samples: SampleAdapters, backends: GemmBackends, has_lora: bool
) -> float:
    return seconds(bucket, backends, samples if has_lora else None)


def _usable(setting: SmallGemm, rows: _Rows, device: CudaDevice, refused: Refused) -> list[GemmBackend]:
    """Return the backends to try for a GEMM that work. refused: those found to be wrong before; it adds more. Where
    Chorus's kernel doesn't work, neither does it with adapters expanded: without any, both are one launch.
    """
    usable = []
    for backend in asked_backends(setting, rows.group, rows.count):
        key = rows.group, tile_rows(rows.count), backend
        if backend is GemmBackend.EXPANDED and (*key[:2], GemmBackend.SMALL) in refused:
            continue
        if key not in refused and (problem := rows.problem(backend, device)) is not None:
            logger.warning("%s of %s is not used: %s", backend, NAMES[rows.group], problem)
            refused.add(key)
        if key not in refused:
            usable.append(backend)
    return usable


class _Rows:
    """Random input rows of a GEMM of the first layer, from a seed, to try backends with."""

    def __init__(self, decoder: DecoderModel, launches: LoraLaunches, group: int, count: int) -> None:
        self._decoder, self._launches, self.group, self.count = decoder, launches, group, count
        self._layers, self._steps = decoder.layers[:1], (False,) if group == HEAD else (False, True)
        weight = decoder.weight(group)
        generator = torch.Generator().manual_seed(group)
        sampled = torch.randn(2, count, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
        self._x, self._residual = sampled.unbind(0)

    def problem(self, backend: GemmBackend, device: CudaDevice) -> str | None:
        """Why a backend can't be used: it does not compile, or its values differ from the library's; None if it can."""
        try:
            errors = [self._error(backend, has_lora) for has_lora in self._steps]
        except Exception as error:  # of any part of the compiler
            if device.failure() is not None:
                raise
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        limit, error = TOLERANCE[self._x.dtype], max(errors, key=lambda error: math.inf if math.isnan(error) else error)
        return None if error <= limit else f"it differs by {error:.1e} of the largest value, more than {limit:.1e}"

    def _error(self, backend: GemmBackend, has_lora: bool) -> float:
        want, got = (self._gemm(each, has_lora).float() for each in (GemmBackend.LIBRARY, backend))
        return float((got - want).abs().max() / want.abs().max())

    def _gemm(self, backend: GemmBackend, has_lora: bool) -> torch.Tensor:
        lora, residual = self._launches if has_lora else None, self._residual.clone()
        return self._decoder.run_gemms(
            self.group, backend, x=self._x, residual=residual, layers=self._layers, lora=lora
        )
