"""Times GEMMs by themselves, for one of the combinations of backends that whole steps are timed with.

Tests: tests/core/executors/test_cuda_interpreted.py
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import torch

from ...graphs.device import CudaDevice
from ...ops.gemm.small_gemm_schedule import tile_rows
from ..model.batch import GemmBackend, GemmBackends, GemmKind
from ..model.decoder import DecoderModel

logger = logging.getLogger(__name__)

#: Times of whole steps within this factor of the least count as equal: they vary by as much.
NEAR = 1.02


def with_each(combinations: Mapping[str, GemmBackends], each: GemmBackends) -> dict[str, GemmBackends]:
    """The combinations with one more before the library's: of the GEMMs' own races."""
    others = {name: own for name, own in combinations.items() if name != "off"}
    return {**others, "each by its own race": each, "off": combinations["off"]}


class GemmRaces:
    """GEMMs timed by themselves: all of the model's uses of a kind in turn, so that weights come from memory.

    Chorus's kernel and the library only: without adapters an expanding launch is the same. One race serves all steps
    of a tile, at the most of its rows.
    """

    def __init__(self, decoder: DecoderModel, device: CudaDevice, buckets: Sequence[int]) -> None:
        self._decoder, self._device = decoder, device
        self._rows = {tile_rows(bucket): bucket for bucket in sorted(buckets)}
        self._uses = decoder.gemms(every=True)
        self._times: dict[tuple[GemmKind, int], bool] = {}

    def of(self, bucket: int, asked: Mapping[GemmKind, Collection[GemmBackend]]) -> GemmBackends:
        """Chorus's kernel for each GEMM that it may compute, unless the library is clearly faster. asked: see
        `combinations_of`.
        """
        small, rows = GemmBackend.SMALL, self._rows[tile_rows(bucket)]
        return {kind: small for kind, own in asked.items() if small in own and self.is_faster(kind, rows)}

    def is_faster(self, kind: GemmKind, rows: int) -> bool:
        """Whether the library is not clearly faster than Chorus's kernel for so many rows."""
        if (kind, rows) not in self._times:
            generator = torch.Generator().manual_seed(kind.outputs)
            x = torch.randn(rows, kind.inputs, generator=generator)
            x = x.to(self._decoder.arena.pages.device, self._decoder.dtype)

            def run(backend: GemmBackend) -> None:
                for use in self._uses[kind]:
                    self._decoder.run_gemm(use, backend, x)

            own, library = (
                self._device.seconds(partial(run, each)) for each in (GemmBackend.SMALL, GemmBackend.LIBRARY)
            )
            self._times[kind, rows] = own <= NEAR * library
            logger.info(
                "%s %d → %d, %d rows: µs of %d uses %.0f, by the library %.0f",
                self._uses[kind][0].name,
                kind.inputs,
                kind.outputs,
                len(x),
                len(self._uses[kind]),
                1e6 * own,
                1e6 * library,
            )
        return self._times[kind, rows]
