"""Chooses who multiplies narrow weights and experts in steps of many rows. Narrow weights that are one matrix: Chorus's
kernel with operands swapped, or the library, which has them widened. Experts: one of Chorus's ways.

Tests: tests/core/executors/test_cuda_quantised_interpreted.py
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec

from ...graphs.device import CudaDevice
from ...ops.gemm.narrow_weights import NarrowWeight
from ...ops.gemm.swapped_gemm_schedule import TILE_ROWS
from ..cpus import available_cpus
from ..model.batch import GemmBackend, GemmKind, RowBackends
from ..model.decoder import DecoderModel, GemmUse
from .cuda_gemm_backends import TOLERANCE, GemmRows, SmallGemm, asked_backends, sample_inputs
from .cuda_gemm_races import GemmRaces

logger = logging.getLogger(__name__)

#: Chorus's kernel must take a smaller share of the library's time than this: times vary by less.
_CLEAR = 0.98

#: The least rows for which a choice is made; steps of fewer have the same.
_LEAST = TILE_ROWS[0]

#: The most rows of the mixtures that are timed.
_TIMED_ROWS = 2048

#: The choice so far: for steps of up to so many rows.
ByRows = dict[int, dict[GemmKind, GemmBackend]]


def choose_row_backends(
    setting: SmallGemm,
    decoder: DecoderModel,
    device: CudaDevice,
    *,
    most_rows: int,
    most_logits: int,
    captures: bool,
) -> RowBackends:
    """Choose the GEMM backends of steps with up to `most_rows` rows, for each power of 2 from 16 on.

    Call it before anything is captured and before the arena is allocated: it uses free memory. most_logits: of a step.

    setting:
    - `auto`: Chorus's kernel for each GEMM with narrow weights, up to the most rows with which it is faster than the
      library, which widens them in memory first. captures: steps are captured, so GEMMs may be timed. For experts the
      fastest of Chorus's ways, by the time of whole mixtures, also if steps are not captured.
    - `swapped`: the kernel with operands swapped for all narrow weights, wherever it gives the library's values, and
      for other experts as `on`.
    - `on`, `fused`: for experts, launches joined; for others the library, as no measurement shows that the kernel is
      faster.
    - `off`: the library, and no launches joined.
    """
    gemms = {} if setting == "off" else _ours(decoder)
    joined = {kind: GemmBackend.SMALL for kind in gemms if kind.experts}
    chosen_by_rows = {kind: uses for kind, uses in gemms.items() if _is_by_rows(setting, kind, captures=captures)}
    if not chosen_by_rows:
        return RowBackends(always=joined)
    _compile(decoder, {kind: uses for kind, uses in chosen_by_rows.items() if not kind.experts})
    by_rows: ByRows = {size: {} for size in _sizes(most_rows)}
    for kind, uses in chosen_by_rows.items():
        if kind.experts:
            _choose_for_experts(setting, decoder, device, kind, uses[0], by_rows)
        else:
            _choose_for_matrix(setting, decoder, device, kind, uses, by_rows, most_logits)
    return RowBackends(by_rows, joined)


def _ours(decoder: DecoderModel) -> dict[GemmKind, list[GemmUse]]:
    """The GEMMs of many rows that Chorus's kernels may compute."""
    if decoder.dtype not in TOLERANCE or find_spec("triton") is None:
        return {}
    return {kind: uses for kind, uses in decoder.gemms(every=True).items() if kind.is_narrow or kind.experts}


def _is_by_rows(setting: SmallGemm, kind: GemmKind, *, captures: bool) -> bool:
    """Whether a GEMM's backend is chosen for each number of rows."""
    if setting == "auto":
        return captures or kind.experts > 0
    return setting == "swapped" and kind.is_narrow


def _choose_for_matrix(
    setting: SmallGemm,
    decoder: DecoderModel,
    device: CudaDevice,
    kind: GemmKind,
    uses: Sequence[GemmUse],
    by_rows: ByRows,
    most_logits: int,
) -> None:
    """Choose Chorus's kernel for a GEMM up to the most rows with which it works and is faster."""
    for size, chosen in by_rows.items():
        count = min(size, most_logits) if kind.is_head else size
        if not _is_chosen(setting, decoder, device, uses, GemmRows(decoder, None, kind, uses[0], count)):
            return
        chosen[kind] = GemmBackend.SWAPPED


def _choose_for_experts(
    setting: SmallGemm,
    decoder: DecoderModel,
    device: CudaDevice,
    kind: GemmKind,
    use: GemmUse,
    by_rows: ByRows,
) -> None:
    """Choose the backend of mixtures for each size, among those that work. Larger steps than `_TIMED_ROWS` have that of
    the largest that is timed. use: one of the kind's.
    """
    races, found = GemmRaces(decoder, device, []), GemmBackend.LIBRARY
    for size, chosen in by_rows.items():
        if size <= _TIMED_ROWS or size == min(by_rows):
            rows = GemmRows(decoder, None, kind, use, size)
            asked = [each for each in asked_backends(setting, kind, size) if _works(rows, each, device)]
            found = races.fastest(kind, size, asked) if setting == "auto" else next(iter(asked), GemmBackend.LIBRARY)
        chosen[kind] = found


def _works(rows: GemmRows, backend: GemmBackend, device: CudaDevice) -> bool:
    problem = rows.problem(backend, device)
    if problem is not None:
        logger.warning("%s of %s is not used: %s", backend, rows.name, problem)
    return problem is None


def _is_chosen(
    setting: SmallGemm, decoder: DecoderModel, device: CudaDevice, uses: Sequence[GemmUse], rows: GemmRows
) -> bool:
    """Whether Chorus's kernel computes a GEMM of so many rows: it works, and if they are timed, is faster."""
    is_new = rows.count <= TILE_ROWS[-1]  # steps of more rows have the same kernel
    if is_new and not _works(rows, GemmBackend.SWAPPED, device):
        return False
    return setting != "auto" or _is_faster(decoder, device, rows, uses)


def _sizes(most: int) -> list[int]:
    """16, 32, 64, … ending exactly at `most`."""
    doubled = itertools.takewhile(lambda size: size < most, (_LEAST << power for power in itertools.count()))
    return [*doubled, most]


def _compile(decoder: DecoderModel, gemms: Mapping[GemmKind, Sequence[GemmUse]]) -> None:
    """Compile every kernel that may be launched, as many at once as there are processors. One that fails here fails
    again when it is tried, and is refused then.
    """
    from ...ops.gemm.swapped_gemm_triton import multiply
    from ...ops.launch_triton import compiling  # needs triton

    with compiling(available_cpus()):
        for rows, uses in itertools.product(TILE_ROWS, gemms.values()):
            with suppress(Exception):
                x, weight, bias = sample_inputs(decoder, uses[0], rows)
                assert isinstance(weight, NarrowWeight)
                multiply(x, weight, bias, compile_only=True)


def _is_faster(decoder: DecoderModel, device: CudaDevice, rows: GemmRows, uses: Sequence[GemmUse]) -> bool:
    """Whether Chorus's kernel is: all of the model's uses of a GEMM in turn, so that weights come from memory."""

    def run(backend: GemmBackend) -> None:
        for use in uses:
            decoder.run_gemm(use, backend, rows.x)

    own, library = (device.seconds(partial(run, each)) for each in (GemmBackend.SWAPPED, GemmBackend.LIBRARY))
    logger.info(
        "%s, %d rows: µs of %d uses %.0f with operands swapped, widened %.0f",
        rows.name,
        rows.count,
        len(uses),
        1e6 * own,
        1e6 * library,
    )
    return own < _CLEAR * library
