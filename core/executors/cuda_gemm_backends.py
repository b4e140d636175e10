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
from ...ops.gemm.narrow_weights import NarrowWeight
from ...ops.gemm.small_gemm_schedule import MAX_EXPANDED_ROWS, MAX_ROWS, tile_rows
from ...ops.gemm.split_gemm_schedule import is_split
from ...ops.moe.expert_tiles_schedule import FEW_ROWS
from ..cpus import available_cpus
from ..model.batch import BY_LIBRARY, GemmBackend, GemmBackends, GemmKind
from ..model.decoder import DecoderModel, GemmUse
from ..model.lora.lora_launches import LoraLaunches
from ..model.lora.lora_state_cuda import CudaLoraState
from ..model.lora.sample_adapters import SampleAdapters
from ..model.weights.rounding_weight import RoundingWeight
from .cuda_gemm_races import NEAR, GemmRaces, with_each

logger = logging.getLogger(__name__)

SmallGemm = Literal["auto", "on", "fused", "swapped", "off"]

#: Device seconds of a whole captured step: of a bucket, with backends and with adapters, or None.
StepSeconds = Callable[[int, GemmBackends, SampleAdapters | None], float]

#: `fused` must take a smaller share of a step with adapters than the first, and save a larger share of what they add to
#: a step than the second: two times of one step differ by less.
_CLEAR, _SAVED = 0.99, 0.25

#: GEMM backends found to be wrong, by GEMM and tile.
Refused = set[tuple[GemmKind, int, GemmBackend]]

#: Dtypes that Chorus's kernel supports, with the largest difference from the library's values, relative to the largest
#: value: two units in the last use.
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
    steps, captured, next to sample adapters; None if they will not be captured.

    setting:
    - `off`: only the library.
    - `on`: Chorus's kernel wherever it gives the library's values.
    - `fused`: the same, with adapters expanded in it.
    - `swapped`: the same, but narrow weights by the kernels that have them as the first operand.
    - `auto`: the fastest of a few combinations, per bucket (`choose_combination`). One serves both kinds of steps, so a
      sequence's result does not depend on other sequences' adapters. Eager steps get Chorus's kernel for narrow weights
      alone.
    """
    backends = dict.fromkeys(sizes, BY_LIBRARY)
    gemms = _served(setting, decoder.gemms(), captures=seconds is not None)
    if (obstacle := _obstacle(setting, decoder.dtype, gemms)) is not None:
        logger.info("base products by the library: %s", obstacle)
        return backends
    few = [size for size in sizes if size <= MAX_ROWS]
    compile_ahead(setting, decoder, lora, few)
    refused: Refused = set()
    races = GemmRaces(decoder, device, few)
    free, _ = device.memory()
    with SampleAdapters(lora, max(few), free) as samples:
        for bucket in few:
            launches = samples.launches(bucket)
            rows = {kind: GemmRows(decoder, launches, kind, uses[0], bucket) for kind, uses in gemms.items()}
            asked = {kind: _usable(setting, each, device, refused) for kind, each in rows.items()}
            combinations, why = combinations_of(asked), ""
            if setting != "auto" or seconds is None:
                backends[bucket] = combinations.get(setting, combinations["on"])
            else:
                combinations = with_each(combinations, races.of(bucket, asked))
                timed, expands = partial(_step_seconds, seconds, bucket, samples), bucket <= MAX_EXPANDED_ROWS
                backends[bucket], why = choose_combination(combinations, timed, expands=expands)
            said = (f"{each.name} {backends[bucket].get(kind, GemmBackend.LIBRARY)}" for kind, each in rows.items())
            logger.info("base products of %d rows: %s%s", bucket, ", ".join(said), why)
    return backends


def _served(
    setting: SmallGemm, gemms: Mapping[GemmKind, list[GemmUse]], *, captures: bool
) -> dict[GemmKind, list[GemmUse]]:
    """GEMMs that Chorus's kernel may compute. Eager steps wait for the host's launches, so a kernel for few rows gains
    nothing there; but the library would widen a narrow weight in memory first, one launch more in every step.
    """
    return {
        kind: uses
        for kind, uses in gemms.items()
        if captures or setting != "auto" or isinstance(uses[0].weight, NarrowWeight)
    }


def _obstacle(setting: SmallGemm, dtype: torch.dtype, gemms: Mapping[GemmKind, list[GemmUse]]) -> str | None:
    if setting == "off":
        return "small_gemm is off"
    if not gemms:
        return "steps are not captured, so launches from the host take longer than any kernel"
    if dtype not in TOLERANCE:
        return f"the kernel for few rows needs bfloat16 or float16, the model is in {str(dtype).removeprefix('torch.')}"
    return None if find_spec("triton") is not None else "triton is not installed"


def asked_backends(setting: SmallGemm, kind: GemmKind, rows: int) -> list[GemmBackend]:
    """Backends other than the library to try for a GEMM of so many rows.

    Beyond MAX_EXPANDED_ROWS, `fused` means `on`. Programs that share inputs, and wide tiles of experts, are tried by
    `auto` alone.
    """
    swapped = [GemmBackend.SWAPPED] * kind.is_narrow
    if kind.is_float4 and not kind.experts:
        return swapped
    alone = kind.is_head or kind.experts > 0
    asked = [GemmBackend.SMALL, *([] if alone or rows > MAX_EXPANDED_ROWS else [GemmBackend.EXPANDED])]
    if setting == "auto":
        wide = [GemmBackend.WIDE] * (kind.experts > 0 and rows > FEW_ROWS)
        return [*asked, *([GemmBackend.SPLIT] if _can_split(kind, rows) else []), *swapped, *wide]
    if setting == "swapped" and swapped:
        return swapped
    return asked[-1:] if setting == "fused" else asked[:1]


def _can_split(kind: GemmKind, rows: int) -> bool:
    """Whether programs may share a GEMM's inputs: of a plain weight, with no activation after it."""
    is_plain = getattr(torch, kind.form, None) in TOLERANCE
    is_alone = not (kind.silu or kind.is_head or kind.experts)
    return is_plain and is_alone and is_split(kind.outputs, kind.inputs, rows)


def compile_ahead(setting: SmallGemm, decoder: DecoderModel, lora: CudaLoraState, buckets: Sequence[int]) -> None:
    """Compile every kernel that steps of these buckets may launch, as many at once as there are processors.

    It covers all backends of each GEMM, with and without adapters. A kernel that fails here fails again when it is
    tried, and is refused then.
    """
    from ...ops.launch_triton import compiling  # needs triton

    launches = lora.bucket(MAX_ROWS)
    tiles = {tile_rows(rows): rows for rows in reversed(buckets)}  # by tile, the least rows: all backends
    with compiling(available_cpus()):
        for rows, (kind, uses) in itertools.product(tiles.values(), decoder.gemms().items()):
            for use in () if kind.experts else uses:
                with suppress(Exception):
                    _compile_use(decoder, launches, use, kind, rows, asked_backends(setting, kind, rows))


def _compile_use(
    decoder: DecoderModel,
    launches: LoraLaunches,
    use: GemmUse,
    kind: GemmKind,
    rows: int,
    backends: Collection[GemmBackend],
) -> None:
    """Compile a GEMM's kernels for these backends."""
    from ...ops.gemm.small_gemm_triton import multiply
    from ...ops.gemm.split_gemm_triton import multiply as multiply_split  # need triton

    x, weight, bias = sample_inputs(decoder, use, rows)
    # adapters may be added after the GEMM and before the activation
    for silu in {False, kind.silu} if GemmBackend.SMALL in backends or GemmBackend.EXPANDED in backends else ():
        multiply(x, weight, bias, silu=silu, compile_only=True)
    if GemmBackend.SPLIT in backends and isinstance(weight, torch.Tensor):
        multiply_split(x, weight, bias, compile_only=True)
    if GemmBackend.EXPANDED in backends and use.op is not None and use.layer is not None:
        gemm = decoder.config.projections.gemm_shape_of[use.layer][use.op.weight]
        shrunk = launches.shrink(gemm, x, use.layer, compile_only=True)
        multiply(x, weight, bias, silu=kind.silu, shrunk=shrunk, compile_only=True)


def sample_inputs(
    decoder: DecoderModel, use: GemmUse, rows: int
) -> tuple[torch.Tensor, torch.Tensor | NarrowWeight, torch.Tensor | None]:
    """Rows for a GEMM, its weight and its bias."""
    weight, bias = use.weight, None
    if isinstance(weight, RoundingWeight):
        raise TypeError("a GPU's weights round no inputs but to FP8")
    if use.op is not None and use.layer is not None:
        bias = decoder.layers[use.layer].get(use.op.bias)
    return torch.zeros(rows, weight.shape[1], dtype=decoder.dtype, device=weight.device), weight, bias


def compile_late(decoder: DecoderModel, backends: Mapping[int, GemmBackends]) -> None:
    """Compile the kernels that base steps with these backends launch if none begins early, as `compile_ahead` does."""
    from ...ops.gemm.small_gemm_triton import multiply
    from ...ops.gemm.split_gemm_triton import multiply as multiply_split
    from ...ops.launch_triton import compiling  # needs triton

    gemms = decoder.gemms()
    used = {
        (tile_rows(bucket), kind, backend)
        for bucket, chosen in backends.items()
        for kind, backend in chosen.items()
        if backend in (GemmBackend.SMALL, GemmBackend.EXPANDED, GemmBackend.SPLIT) and not kind.experts
    }
    with dependent_launch.only(False), compiling(available_cpus()):
        for rows, kind, backend in sorted(used):
            with suppress(Exception):
                x, weight, bias = sample_inputs(decoder, gemms[kind][0], rows)
                if backend is GemmBackend.SPLIT and isinstance(weight, torch.Tensor):
                    multiply_split(x, weight, bias, compile_only=True)
                else:
                    multiply(x, weight, bias, silu=kind.silu, compile_only=True)


def combinations_of(asked: Mapping[GemmKind, Collection[GemmBackend]]) -> dict[str, GemmBackends]:
    """Return the combinations of backends to choose from, those of Chorus's kernel first.

    asked: by GEMM, the backends that it may use instead of the library's.
    """
    small, expanded, swapped = GemmBackend.SMALL, GemmBackend.EXPANDED, GemmBackend.SWAPPED

    def with_first(*wanted: GemmBackend, head: bool = True) -> GemmBackends:
        found = {kind: next((each for each in wanted if each in own), None) for kind, own in asked.items()}
        return {kind: each for kind, each in found.items() if each is not None and (head or not kind.is_head)}

    return {
        "on": with_first(small, swapped),
        "fused": with_first(expanded, small, swapped),
        "on, logits by the library": with_first(small, swapped, head=False),
        **({"swapped": with_first(swapped, small)} if any(kind.is_narrow for kind in asked) else {}),
        "off": BY_LIBRARY,
    }


def choose_combination(
    combinations: Mapping[str, GemmBackends], seconds: Callable[[GemmBackends, bool], float], *, expands: bool
) -> tuple[GemmBackends, str]:
    """Return the first combination within `NEAR` of the fastest, and a note of all times.

    A time is that of a whole step of the base model and of one with an adapter for every sequence. Alone, GEMMs differ
    by less than they vary, so a combination of their own races (`with_each`) is timed as a whole, too. With the earlier
    combinations preferred, an engine chooses the same ones each time it
    starts. `fused` differs from `on` only in what adapters add, a few percent of a step: only that is compared, and
    the better one stands for both.

    seconds: called with backends, and whether the step has adapters; for every combination, whatever is refused, so
    that ranks, whose steps wait for each other, call it alike. `fused` is timed only where it can differ from `on`:
    with adapters. expands: Chorus's kernel can expand those of so many rows.
    """
    times: dict[str, tuple[float, float]] = {}
    for name, each in combinations.items():
        if name == "fused":
            base, lora = times["on"]
            times[name] = base, seconds(each, True) if expands else lora
        else:
            times[name] = seconds(each, False), seconds(each, True)
    (base, launched), (_, fused) = times["on"], times["fused"]
    is_better = fused < _CLEAR * launched and launched - fused > _SAVED * (launched - base)
    compared = {name: sum(took) for name, took in times.items() if name != ("on" if is_better else "fused")}
    least = min(compared.values())
    chosen = next(name for name, took in compared.items() if took <= NEAR * least)
    note = ", ".join(f"{name} {1e6 * base:.0f} + {1e6 * lora:.0f}" for name, (base, lora) in times.items())
    return combinations[chosen], f" (µs a step, base + LoRA: {note})"


def _step_seconds(
    seconds: StepSeconds, bucket: int, samples: SampleAdapters, backends: GemmBackends, has_lora: bool
) -> float:
    return seconds(bucket, backends, samples if has_lora else None)


def _usable(setting: SmallGemm, rows: GemmRows, device: CudaDevice, refused: Refused) -> list[GemmBackend]:
    """Return the backends to try for a GEMM that work. refused: those found to be wrong before; it adds more. Where
    Chorus's kernel doesn't work, neither does it with adapters expanded: without any, both are one launch.
    """
    usable = []
    for backend in asked_backends(setting, rows.kind, rows.count):
        key = rows.kind, tile_rows(rows.count), backend
        if backend is GemmBackend.EXPANDED and (*key[:2], GemmBackend.SMALL) in refused:
            continue
        if key not in refused and (problem := rows.problem(backend, device)) is not None:
            logger.warning("%s of %s is not used: %s", backend, rows.name, problem)
            refused.add(key)
        if key not in refused:
            usable.append(backend)
    return usable


class GemmRows:
    """Random input rows of a GEMM, from a seed, to try backends with."""

    def __init__(
        self, decoder: DecoderModel, launches: LoraLaunches | None, kind: GemmKind, use: GemmUse, count: int
    ) -> None:
        """launches: of adapters; None: none are added."""
        self._decoder, self._launches, self._use, self.kind, self.count = decoder, launches, use, kind, count
        self._steps = (False,) if use.op is None or launches is None else (False, True)
        self.name = f"{use.name} {kind.inputs} → {kind.outputs} in {kind.form}"
        generator = torch.Generator().manual_seed(kind.outputs)
        sampled = torch.randn(count, kind.inputs, generator=generator)
        self.x = sampled.to(decoder.arena.pages.device, decoder.dtype)

    def problem(self, backend: GemmBackend, device: CudaDevice) -> str | None:
        """Why a backend can't be used: it does not compile, or its values differ from the library's; None if it can."""
        try:
            errors = [self._error(backend, has_lora) for has_lora in self._steps]
        except Exception as error:  # of any part of the compiler
            if device.failure() is not None:
                raise
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        limit, error = TOLERANCE[self.x.dtype], max(errors, key=lambda error: math.inf if math.isnan(error) else error)
        return None if error <= limit else f"it differs by {error:.1e} of the largest value, more than {limit:.1e}"

    def _error(self, backend: GemmBackend, has_lora: bool) -> float:
        want, got = (self._gemm(each, has_lora).float() for each in (GemmBackend.LIBRARY, backend))
        return float((got - want).abs().max() / want.abs().max())

    def _gemm(self, backend: GemmBackend, has_lora: bool) -> torch.Tensor:
        return self._decoder.run_gemm(self._use, backend, self.x, self._launches if has_lora else None)
