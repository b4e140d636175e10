"""Choice of the GEMM backend in decode steps of few rows: cuBLAS, or our kernel where it is faster."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Literal

import torch

from ...graphs.device import CudaDevice
from ...ops.small_gemm_schedule import MAX_ROWS
from ..cpus import available_cpus
from ..model.batch import BY_LIBRARY, Way, Ways
from ..model.decoder import HEAD, DecoderModel
from ..model.lora_state import ATTN_O, DOWN, GATE_UP, QKV

logger = logging.getLogger(__name__)

SmallGemm = Literal["auto", "on", "fused", "off"]

#: Names of the products for logs, by their place among a step's ways.
NAMES = {QKV: "qkv", ATTN_O: "o", GATE_UP: "gate and up", DOWN: "down", HEAD: "logits"}

#: Data types that our kernel serves, with the largest difference from the library's values as a share of the largest:
#: two units in the last place.
TOLERANCE = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


def choose_ways(
    setting: SmallGemm, decoder: DecoderModel, sizes: Sequence[int], device: CudaDevice, *, captures: bool
) -> Mapping[int, Ways]:
    """Ways of each bucket's products; to be called before anything is captured.

    setting: `off` for the library's alone; `on` for ours, and `fused` for ours with norms in them, wherever they give
    the library's values; `auto` for whatever takes the device least, product by product and bucket by bucket.
    captures: decode steps will be captured, as what is measured is; eager ones wait for the host's launches.
    """
    ways = dict.fromkeys(sizes, BY_LIBRARY)
    dtype = decoder.weight(QKV).dtype
    if (obstacle := _obstacle(setting, dtype, captures)) is not None:
        logger.info("base products by the library: %s", obstacle)
        return ways
    compile_ahead(decoder, {group: _asked(setting, group) for group in NAMES})
    refused: set[tuple[int, Way]] = set()
    for bucket in (size for size in sizes if size <= MAX_ROWS):
        chosen, said = [], []
        for group, name in NAMES.items():
            way, why = _choose(setting, decoder, device, group, bucket, refused)
            chosen.append(way)
            said.append(f"{name} {way}{why}")
        ways[bucket] = tuple(chosen)
        logger.info("base products of %d rows: %s", bucket, ", ".join(said))
    return ways


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


def _asked(setting: SmallGemm, group: int) -> list[Way]:
    """Ways of ours that a product is to be tried with."""
    asked = [Way.SMALL, *([Way.NORMED] if group in (QKV, GATE_UP) else [])]
    if setting == "auto":
        return asked
    return asked[-1:] if setting == "fused" else asked[:1]


def compile_ahead(decoder: DecoderModel, asked: Mapping[int, Sequence[Way]]) -> None:
    """Compile whatever a step may launch of the ways of each product, with LoRA behind it or without, as many kernels
    at once as there are processors. What fails here fails again where it is tried, and is refused there.
    """
    from ...ops.launch_triton import compiling  # needs triton
    from ...ops.small_gemm_triton import compile_variant

    layer = decoder.layers[0]
    parts = {
        QKV: (layer.qkv, layer.qkv_bias, layer.input_norm), ATTN_O: (layer.o, layer.o_bias, None),
        GATE_UP: (layer.gate_up, layer.gate_up_bias, layer.post_attention_norm),
        DOWN: (layer.down, layer.down_bias, None), HEAD: (decoder.weight(HEAD), None, None),
    }  # fmt: skip
    with suppress(Exception), compiling(available_cpus()):
        for group, ways in asked.items():
            weight, bias, norm = parts[group]
            x, before = torch.zeros(2, MAX_ROWS, weight.shape[1], dtype=weight.dtype, device=weight.device).unbind(0)
            for has_lora in (False, True):
                silu = group == GATE_UP and not has_lora
                if Way.SMALL in ways:
                    compile_variant(x, weight, bias, None, None, silu=silu, keep=False)
                if Way.NORMED in ways:
                    for residual in (before, *([None] if group == QKV else [])):  # the first layer's has none
                        compile_variant(x, weight, bias, norm, residual, silu=silu, keep=has_lora)


def _choose(
    setting: SmallGemm,
    decoder: DecoderModel,
    device: CudaDevice,
    group: int,
    bucket: int,
    refused: set[tuple[int, Way]],
) -> tuple[Way, str]:
    """Way of a product, and why: the times, if any. refused: what has been found wrong before, and is found now."""
    asked = _asked(setting, group)
    rows = _Rows(decoder, group, bucket)
    for way in asked:
        if (group, way) not in refused and (problem := rows.problem(way, device)) is not None:
            logger.warning("%s of %s is not used: %s", way, NAMES[group], problem)
            refused.add((group, way))
    asked = [way for way in asked if (group, way) not in refused]
    if setting != "auto" or not asked:
        return (asked or [Way.LIBRARY])[0], ""
    seconds = {way: device.seconds(rows.work(way)) for way in (Way.LIBRARY, *asked)}
    times = ", ".join(f"{way} {1e6 * took / rows.num_layers:.1f}" for way, took in seconds.items())
    return min(seconds, key=lambda way: seconds[way]), f" (µs: {times})"


class _Rows:
    """A product's rows to try ways with, drawn from a seed; all layers' products with them, or one's."""

    def __init__(self, decoder: DecoderModel, group: int, count: int) -> None:
        self._decoder, self._group = decoder, group
        # the logits' weight is one for all layers
        self._layers = decoder.layers[:1] if group == HEAD else decoder.layers
        self.num_layers = len(self._layers)
        weight = decoder.weight(group)
        generator = torch.Generator().manual_seed(group)
        drawn = torch.randn(2, count, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
        self._x, self._residual = drawn.unbind(0)

    def work(self, way: Way) -> Callable[[], torch.Tensor]:
        return lambda: self._decoder.run_products(self._group, way, self._x, self._residual, self._layers)

    def problem(self, way: Way, device: CudaDevice) -> str | None:
        """Reason why a way can't serve: it does not compile, or gives other values than the library."""
        first = self._layers[:1]
        try:
            want, got = (
                self._decoder.run_products(self._group, each, self._x, self._residual.clone(), first).float()
                for each in (Way.LIBRARY, way)
            )
            error = float((got - want).abs().max() / want.abs().max())
        except Exception as error:  # of any part of the compiler
            if device.failure() is not None:
                raise
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        limit = TOLERANCE[self._x.dtype]
        return None if error <= limit else f"it differs by {error:.1e} of the largest value, more than {limit:.1e}"
