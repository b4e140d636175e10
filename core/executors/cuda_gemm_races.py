"""Times GEMMs by themselves, for one of the combinations of backends that whole steps are timed with.

Tests: tests/core/executors/test_cuda_interpreted.py
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

import torch

from ...graphs.device import CudaDevice
from ...ops.gemm.small_gemm_schedule import tile_rows
from ..model.batch import GemmBackend, GemmBackends, GemmKind
from ..model.decoder import DecoderModel

logger = logging.getLogger(__name__)

#: Backends that are raced with the library, those that are preferred first.
RACED = GemmBackend.SMALL, GemmBackend.SPLIT, GemmBackend.SWAPPED, GemmBackend.WIDE

#: Times of whole steps within this factor of the least count as equal: they vary by as much.
NEAR = 1.02


def with_each(combinations: Mapping[str, GemmBackends], each: GemmBackends) -> dict[str, GemmBackends]:
    """The combinations with one more before the library's: of the GEMMs' own races."""
    others = {name: own for name, own in combinations.items() if name != "off"}
    return {**others, "each by its own race": each, "off": combinations["off"]}


class GemmRaces:
    """GEMMs timed by themselves: all of the model's uses of a kind in turn, so that weights come from memory.

    Chorus's kernels and the library only: without adapters an expanding launch is the same. One race serves all steps
    of a tile, at the most of its rows.
    """

    def __init__(self, decoder: DecoderModel, device: CudaDevice, buckets: Sequence[int]) -> None:
        self._decoder, self._device = decoder, device
        self._rows = {tile_rows(bucket): bucket for bucket in sorted(buckets)}
        self._uses = decoder.gemms(every=True)
        self._times: dict[tuple[GemmKind, int, GemmBackend], float] = {}

    def of(self, bucket: int, asked: Mapping[GemmKind, Collection[GemmBackend]]) -> GemmBackends:
        """For each GEMM the fastest backend, see `fastest`, but for the library's. asked: see `combinations_of`."""
        rows = self._rows[tile_rows(bucket)]
        found = {kind: self.fastest(kind, rows, own) for kind, own in asked.items()}
        return {kind: each for kind, each in found.items() if each is not GemmBackend.LIBRARY}

    def fastest(self, kind: GemmKind, rows: int, asked: Collection[GemmBackend]) -> GemmBackend:
        """The first of `RACED` for so many rows that none of the others, which are asked for or the library's, is
        clearly faster than.
        """
        times = {each: self._seconds(kind, rows, each) for each in RACED if each in asked}
        if not times:
            return GemmBackend.LIBRARY
        times[GemmBackend.LIBRARY] = self._seconds(kind, rows, GemmBackend.LIBRARY)
        note = ", ".join(f"{each} {1e6 * took:.0f}" for each, took in times.items())
        name, uses = self._uses[kind][0].name, len(self._uses[kind])
        logger.info("%s %d → %d, %d rows: µs of %d uses: %s", name, kind.inputs, kind.outputs, rows, uses, note)
        return next(each for each, took in times.items() if took <= NEAR * min(times.values()))

    def _seconds(self, kind: GemmKind, rows: int, backend: GemmBackend) -> float:
        """Device seconds of all uses by a backend, timed once."""
        if (found := self._times.get((kind, rows, backend))) is None:
            generator = torch.Generator().manual_seed(kind.outputs)
            x = torch.randn(rows, kind.inputs, generator=generator)
            x = x.to(self._decoder.arena.pages.device, self._decoder.dtype)

            def run() -> None:
                for use in self._uses[kind]:
                    self._decoder.run_gemm(use, backend, x)

            found = self._times[kind, rows, backend] = self._device.seconds(run)
        return found
