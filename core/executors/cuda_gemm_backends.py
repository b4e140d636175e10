"""Choice of the GEMM backend in decode steps of few rows: cuBLAS, or our kernel where it is faster."""

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
from ..model.decoder import HEAD, DecoderModel
from ..model.lora_state_cuda import CudaLoraState, LoraLaunches
from ..model.weights import LayerWeights

logger = logging.getLogger(__name__)

SmallGemm = Literal["auto", "on", "fused", "off"]

#: Names of the GEMMs for logs, by their index in a step's backends.
NAMES = {QKV: "qkv", ATTN_O: "o", GATE_UP: "gate and up", DOWN: "down", HEAD: "logits"}

#: GEMM backends of a product in a tile that have been found wrong.
Refused = set[tuple[int, int, GemmBackend]]

#: Data types that our kernel serves, with the largest difference from the library's values as a share of the largest:
#: two units in the last place.
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
    """GEMM backends of each bucket's products; to be called before anything is captured, or any adapter is in the
    arena, which is zeros again in the end.

    setting: `off` for the library's alone; `on` for ours, and `fused` for ours with adapters expanded in them, wherever
    they give the library's values; `auto` for whatever takes the device least in a step of the base model and one with
    an adapter in every row, product by product and bucket by bucket. One way serves both, so that a row's product does
    not depend on other rows' adapters.
    captures: decode steps will be captured, as what is measured is; eager ones wait for the host's launches.
    """
    backends = dict.fromkeys(sizes, BY_LIBRARY)
    dtype = decoder.weight(QKV).dtype
    if (obstacle := _obstacle(setting, dtype, captures)) is not None:
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


def _obstacle(setting: SmallGemm, dtype: torch.dtype, captures: bool) -> str | None:
    if setting == "off":
        return "small_gemm is off"
    if setting == "auto" and not captures:
        return "steps are not captured, so the host's launches take longer than what there is to choose from"
    if dtype not in TOLERANCE:
        return (
            f"the kernel for few rows takes bfloat16 and float16, the model is in {str(dtype).removeprefix('torch.')}"
        )
    return None if find_spec("triton") is not None else "triton is not installed"


def asked_backends(setting: SmallGemm, group: int, rows: int) -> list[GemmBackend]:
    """GEMM backends of ours that a product of so many rows is to be tried with; `fused` beyond MAX_EXPANDED_ROWS is
    `on`.
    """
    asked = [GemmBackend.SMALL, *([] if group == HEAD or rows > MAX_EXPANDED_ROWS else [GemmBackend.EXPANDED])]
    if setting == "auto":
        return asked
    return asked[-1:] if setting == "fused" else asked[:1]


def compile_ahead(setting: SmallGemm, decoder: DecoderModel, lora: CudaLoraState, buckets: Sequence[int]) -> None:
    """Compile whatever steps of such buckets may launch of each GEMM's backends, with adapters or without, as many
    kernels at once as there are processors. What fails here fails again where it is tried, and is refused there.
    """
    from ...ops.launch_triton import compiling  # needs triton
    from ...ops.small_gemm_triton import multiply

    layer, launches = decoder.layers[0], lora.bucket(MAX_ROWS)
    biases = layer.qkv_bias, layer.o_bias, layer.gate_up_bias, layer.down_bias, None
    tiles = {tile_rows(rows): rows for rows in reversed(buckets)}  # the least rows of each, which have all its backends
    with suppress(Exception), compiling(available_cpus()):
        for rows, (group, bias) in itertools.product(tiles.values(), enumerate(biases)):
            weight, is_gate = decoder.weight(group), group == GATE_UP
            x = torch.zeros(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
            for silu in {False, is_gate}:  # adapters may be added behind the product, and before the activation
                multiply(x, weight, bias, silu=silu, compile_only=True)
            if GemmBackend.EXPANDED in asked_backends(setting, group, rows):
                shrunk = launches.shrink(group, x, 0, compile_only=True)
                multiply(x, weight, bias, silu=is_gate, shrunk=shrunk, compile_only=True)


def _choose(setting: SmallGemm, rows: _Rows, device: CudaDevice, refused: Refused) -> tuple[GemmBackend, str]:
    """GEMM backend of a product, and why: the times, if any. refused: what has been found wrong before, and is found
    now.
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
    """A GEMM's rows to try backends with, drawn from a seed; all layers' products with them, or one's."""

    def __init__(self, decoder: DecoderModel, launches: LoraLaunches, group: int, count: int) -> None:
        self._decoder, self._launches, self.group, self.count = decoder, launches, group, count
        # the logits' weight is one for all layers, and no adapter changes it
        self._layers, self.steps = (decoder.layers[:1], (False,)) if group == HEAD else (decoder.layers, (False, True))
        self.num_layers = len(self._layers)
        weight = decoder.weight(group)
        generator = torch.Generator().manual_seed(group)
        sampled = torch.randn(2, count, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
        self._x, self._residual = sampled.unbind(0)

    def work(self, backend: GemmBackend, has_lora: bool) -> Callable[[], torch.Tensor]:
        """The product in a step without adapters, or with."""
        return lambda: self._gemm(backend, has_lora, self._residual, self._layers)

    def problem(self, backend: GemmBackend, device: CudaDevice) -> str | None:
        """Reason why a way can't serve: it does not compile, or gives other values than the library."""
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
        return self._decoder.run_gemms(self.group, backend, self._x, residual, layers, lora)
