"""Chooses the GEMM backend for decode steps of few sequences: cuBLAS, or Chorus's kernel if it is faster."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Literal

import torch

from ...graphs.device import CudaDevice
from ...ops.small_gemm_schedule import MAX_EXPANDED_ROWS, MAX_ROWS, tile_rows
from ..cpus import available_cpus
from ..model.batch import ATTN_O, BY_LIBRARY, DOWN, GATE_UP, QKV, GemmBackend, GemmBackends
from ..model.config import ModelConfig
from ..model.decoder import DecoderModel
from ..model.layer import HEAD
from ..model.lora_state_cuda import CudaLoraState, LoraLaunches
from ..model.weights import LayerWeights

logger = logging.getLogger(__name__)

SmallGemm = Literal["auto", "on", "fused", "off"]

#: Names of the GEMMs in logs, by their index in a step's backends.
NAMES = {QKV: "qkv", ATTN_O: "o", GATE_UP: "gate and up", DOWN: "down", HEAD: "logits"}

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
    captures: bool,
) -> Mapping[int, GemmBackends]:
    """Choose the GEMM backends of each bucket.

    Call it before anything is captured and before any adapter is in the arena, which it leaves zeroed. captures: decode
    steps will be captured, as the measurements are; eager steps would wait for the host's launches.

    setting:
    - `off`: only the library.
    - `on`: Chorus's kernel wherever it gives the library's values.
    - `fused`: the same, with adapters expanded in it.
    - `auto`: the backend with the least device time, summed over a step of the base model and a step with an adapter
      for every sequence. It is chosen per GEMM and bucket. One backend serves both kinds of steps, so a sequence's
      result does not depend on other sequences' adapters.
    """
    backends = dict.fromkeys(sizes, BY_LIBRARY)
    dtype = decoder.weight(QKV).dtype
    if (obstacle := _obstacle(setting, decoder.config, dtype, captures)) is not None:
        logger.info("base products by the library: %s", obstacle)
        return backends
    few = [size for size in sizes if size <= MAX_ROWS]
    compile_ahead(setting, decoder, lora, few)
    refused: Refused = set()
    with lora.samples():
        for bucket in few:
            launches = lora.sample(bucket)
            chosen, said = [], []
            for group, name in NAMES.items():
                backend, why = _choose(setting, _Rows(decoder, launches, group, bucket), device, refused)
                chosen.append(backend)
                said.append(f"{name} {backend}{why}")
            backends[bucket] = tuple(chosen)
            logger.info("base products of %d rows: %s", bucket, ", ".join(said))
    return backends


def _obstacle(setting: SmallGemm, model: ModelConfig, dtype: torch.dtype, captures: bool) -> str | None:
    if setting == "off":
        return "small_gemm is off"
    if model.delta is not None:
        return "the kernel for few rows needs layers of one kind"
    if setting == "auto" and not captures:
        return "steps are not captured, so launches from the host take longer than any kernel"
    if dtype not in TOLERANCE:
        return f"the kernel for few rows needs bfloat16 or float16, the model is in {str(dtype).removeprefix('torch.')}"
    return None if find_spec("triton") is not None else "triton is not installed"


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
    tiles = {tile_rows(rows): rows for rows in reversed(buckets)}  # by tile, the least rows: all backends
    with suppress(Exception), compiling(available_cpus()):
        for rows, (group, bias) in itertools.product(tiles.values(), enumerate(biases)):
            weight, is_gate = decoder.weight(group), group == GATE_UP
            x = torch.zeros(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
            for silu in {False, is_gate}:  # adapters may be added after the GEMM and before the activation
                multiply(x, weight, bias, silu=silu, compile_only=True)
            if GemmBackend.EXPANDED in asked_backends(setting, group, rows):
                shrunk = launches.shrink(group, x, 0, compile_only=True)
                multiply(x, weight, bias, silu=is_gate, shrunk=shrunk, compile_only=True)


def _choose(setting: SmallGemm, rows: _Rows, device: CudaDevice, refused: Refused) -> tuple[GemmBackend, str]:
    """Return the backend of a GEMM and the reason: the measured times, if any.

    refused: backends found to be wrong before; it adds those found now.
    """
    asked = []
    for backend in asked_backends(setting, rows.group, rows.count):
        key = rows.group, tile_rows(rows.count), backend
        if key not in refused and (problem := rows.problem(backend, device)) is not None:
            logger.warning("%s of %s is not used: %s", backend, NAMES[rows.group], problem)
            refused.add(key)
        if key not in refused:
            asked.append(backend)
    if setting != "auto" or not asked:
        return (asked or [GemmBackend.LIBRARY])[0], ""
    seconds = {
        backend: [device.seconds(rows.work(backend, has_lora)) for has_lora in rows.steps]
        for backend in (GemmBackend.LIBRARY, *asked)
    }
    times = ", ".join(
        f"{backend} {' + '.join(f'{1e6 * each / rows.num_layers:.1f}' for each in took)}"
        for backend, took in seconds.items()
    )
    return min(seconds, key=lambda backend: sum(seconds[backend])), f" (µs: {times})"


class _Rows:
    """Random input rows of a GEMM, from a seed, to try backends with, in all layers or in one."""

    def __init__(self, decoder: DecoderModel, launches: LoraLaunches, group: int, count: int) -> None:
        self._decoder, self._launches, self.group, self.count = decoder, launches, group, count
        # all layers share the logits' weight, and no adapter changes it
        self._layers, self.steps = (decoder.layers[:1], (False,)) if group == HEAD else (decoder.layers, (False, True))
        self.num_layers = len(self._layers)
        weight = decoder.weight(group)
        generator = torch.Generator().manual_seed(group)
        sampled = torch.randn(2, count, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
        self._x, self._residual = sampled.unbind(0)

    def work(self, backend: GemmBackend, has_lora: bool) -> Callable[[], torch.Tensor]:
        """The GEMM in a step with or without adapters."""
        return lambda: self._gemm(backend, has_lora, self._residual, self._layers)

    def problem(self, backend: GemmBackend, device: CudaDevice) -> str | None:
        """Why a backend can't be used: it does not compile, or its values differ from the library's; None if it can."""
        try:
            errors = [self._error(backend, has_lora) for has_lora in self.steps]
        except Exception as error:  # of any part of the compiler
            if device.failure() is not None:
                raise
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        limit, error = TOLERANCE[self._x.dtype], max(errors, key=lambda error: math.inf if math.isnan(error) else error)
        return None if error <= limit else f"it differs by {error:.1e} of the largest value, more than {limit:.1e}"

    def _error(self, backend: GemmBackend, has_lora: bool) -> float:
        want, got = (
            self._gemm(each, has_lora, self._residual.clone(), self._layers[:1]).float()
            for each in (GemmBackend.LIBRARY, backend)
        )
        return float((got - want).abs().max() / want.abs().max())

    def _gemm(
        self, backend: GemmBackend, has_lora: bool, residual: torch.Tensor, layers: Sequence[LayerWeights]
    ) -> torch.Tensor:
        lora = self._launches if has_lora else None
        return self._decoder.run_gemms(self.group, backend, x=self._x, residual=residual, layers=layers, lora=lora)
