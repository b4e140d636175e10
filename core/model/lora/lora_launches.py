"""The LoRA launches of a GPU's step: those of a captured step, with room for other adapters, or of one step alone.

Tests: tests/core/model/lora/test_lora_state_cuda.py, tests/core/executors/test_cuda_interpreted.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from ....graphs.runner import NO_TAIL, USUAL_ROOM, EagerReason, LaunchSize
from ....ops.attention.latents import AbsorbedLora
from ....ops.lora.sgmv_schedule import Schedule
from ....ops.lora.sgmv_tables import MAX_GRID, SgmvTables
from ..moe.mixture_launches import MixtureForm, MixtureLaunches
from .step_lora import PER_LAYER_GEMM, HeadLora

if TYPE_CHECKING:
    from ....ops.attention.latents_triton import LaunchedLora
    from ....ops.lora.sgmv_triton import Sgmv, Shrunk

#: Captured launches have as many tiles as a usual step needs, or this many times as many.
_FACTORS = 1, 4, 16, 64


class StepOffload(Protocol):
    """The part of a step that offload workers compute, chosen while the step is launched."""

    def takes(self, lora_index: int, layer: int, /) -> bool:
        """True if they compute a layer of an adapter that is not in its pages; from now on the tables leave that layer
        out.
        """
        ...

    def offload(self, gemm: int, x: torch.Tensor, layer: int, /) -> None:
        """Send them their rows of x."""
        ...

    def collect(self, gemm: int, y: torch.Tensor, layer: int, /) -> None:
        """Add their LoRA terms to y."""
        ...


class LaunchState(Protocol):
    """What launches read of a step: `CudaLoraState`."""

    tables: SgmvTables
    offloaded: StepOffload | None

    def sgmvs(self, schedule: Schedule, terms: int, /) -> dict[int, Sgmv]: ...

    def scale(self, gemm: int, y: torch.Tensor, layer: int, *, undo: bool, compile_only: bool = False) -> None: ...

    def embed(self, rows: torch.Tensor, token_ids: torch.Tensor, /) -> None: ...

    def add(self, gemm: int, y: torch.Tensor, x: torch.Tensor, layer: int, /) -> None: ...

    def use_logits(self, sampled: Sequence[int], scored: Sequence[int], /) -> None: ...

    def logits(self) -> HeadLora | None: ...

    def prompt_logits(self) -> HeadLora | None: ...

    def absorbed(self, layer: int, /) -> AbsorbedLora | None: ...

    def launched_latents(
        self, layer: int, tiles: torch.Tensor, num_tiles: int, terms: int, /
    ) -> LaunchedLora | None: ...

    def mixture_launches(self, layer: int, form: MixtureForm, /) -> MixtureLaunches | None: ...


_NO_MIXTURE = MixtureForm()


class Variant(NamedTuple):
    """What launches with one schedule differ in."""

    scales: tuple[bool, ...] = ()
    """Launches for vectors, each True if it undoes them."""
    room: LaunchSize = USUAL_ROOM
    """Of captured ones."""
    eager: EagerReason | None = None
    """Why a step with them is not captured; None if it may be."""
    mixture: MixtureForm = _NO_MIXTURE
    """Of mixtures of experts."""
    latents: bool = False
    """Adapters change keys and values of latents by PyTorch's operators: such launches are of one step alone."""


_USUAL = Variant()


class Tail(NamedTuple):
    """The last tokens of a step, from `border` on, with their own schedule and `num_tiles` tiles after the others.

    Their tiles count tokens from `border`.
    """

    schedule: Schedule
    num_tiles: int
    border: int


class LoraLaunches:
    """A step's launches: one schedule over some of the tables' tiles, and perhaps another one for its last tokens.

    They hold no data of a step. wait: called before every layer. terms: records of a tile, see `SgmvTables`.
    """

    def __init__(
        self,
        state: LaunchState,
        schedule: Schedule,
        num_tiles: int,
        wait: Callable[[int], None] = lambda layer: None,
        terms: int = 1,
        *,
        tail: Tail | None = None,
        variant: Variant = _USUAL,
    ) -> None:
        self.schedule, self.num_tiles, self.wait, self.terms = schedule, num_tiles, wait, terms
        self.scales, self.room, self.eager, self._mixture, self._latents = variant
        self._state, self.tail = state, tail
        self._variant, self._variants = variant, dict[Variant, LoraLaunches]()
        self._tiles = state.tables.tiles
        self._tokens = (tail and tail.border) or None
        self._tail_tiles = self._tiles[num_tiles * terms :]

    @property
    def mixture_groups(self) -> tuple[str, ...]:
        """See `MixtureForm.groups`."""
        return self._mixture.groups

    def variant(self, scales: tuple[bool, ...], room: LaunchSize, mixture: tuple[str, ...] = ()) -> LoraLaunches:
        """Return captured launches with other launches for vectors and mixtures of experts, and room for more tiles,
        made once; of those of the usual room.
        """
        if (variant := Variant(scales, room, mixture=MixtureForm(mixture))) == self._variant:
            return self
        if (found := self._variants.get(variant)) is None:
            tail = self.tail
            if tail is not None:
                more = tail._replace(num_tiles=tail.num_tiles * _FACTORS[room.tail])
                tail = None if room.tail == NO_TAIL.tail else more
            found = self._variants[variant] = LoraLaunches(
                self._state,
                self.schedule,
                self.num_tiles * _FACTORS[room.prompts],
                self.wait,
                self.terms,
                tail=tail,
                variant=variant,
            )
        return found

    def with_room(
        self, num_tiles: int, tail_tiles: int, scales: tuple[bool, ...], mixture: MixtureForm = _NO_MIXTURE
    ) -> LoraLaunches | None:
        """Return captured launches for so many tiles, with as little more as there is; None if none have so many, or
        the tables don't.
        """
        usual_tail = 0 if self.tail is None else self.tail.num_tiles
        tail = _least_room(tail_tiles, usual_tail) if tail_tiles or not usual_tail else NO_TAIL.tail
        room = LaunchSize(_least_room(num_tiles, self.num_tiles), tail)
        if max(room) == len(_FACTORS):
            return None
        found = self.variant(scales, room, mixture.groups)
        most = found.num_tiles + (0 if found.tail is None else found.tail.num_tiles)
        return found if most <= min(self._state.tables.max_tiles, MAX_GRID) else None

    @cached_property
    def _sgmvs(self) -> dict[int, Sgmv]:
        return self._state.sgmvs(self.schedule, self.terms)

    @cached_property
    def _tail_sgmvs(self) -> dict[int, Sgmv]:
        return {} if self.tail is None else self._state.sgmvs(self.tail.schedule, self.terms)

    def add(self, gemm: int, y: torch.Tensor, x: torch.Tensor, layer: int, *, compile_only: bool = False) -> None:
        """Add the LoRA terms of the first `num_tiles` tiles for a GEMM's projections, and those of the tail. Captured
        steps have nothing of per-layer embeddings' GEMM: what adapters do to it runs before them, as `embed`.

        compile_only: see `sgmv_triton.Sgmv`.
        """
        if gemm == PER_LAYER_GEMM:
            self._state.add(gemm, y, x, layer)
            return
        if True in self.scales:
            self._state.scale(gemm, y, layer, undo=True)
        if (tail := self.tail) is not None:
            last = y[tail.border :], x[tail.border :]
            self._tail_sgmvs[gemm](*last, layer, self._tail_tiles, tail.num_tiles)
        self._sgmvs[gemm](
            y, x, layer, tiles=self._tiles, num_tiles=self.num_tiles, tokens=self._tokens, compile_only=compile_only
        )
        if (offloaded := self._state.offloaded) is not None:
            offloaded.collect(gemm, y, layer)
        if False in self.scales:
            self._state.scale(gemm, y, layer, undo=False)

    def shrink(self, gemm: int, x: torch.Tensor, layer: int, *, compile_only: bool = False) -> Shrunk | None:
        """Multiply with A only; return None if tiles have more than one token, or records of several adapters, or if
        adapters have vectors.
        """
        if gemm == PER_LAYER_GEMM or self.terms > 1 or self.tail is not None:
            return None
        if self.schedule.tensor_cores or self.scales:
            return None
        sgmv = self._sgmvs[gemm]
        return sgmv.shrink(x, layer, self._tiles, self.num_tiles, compile_only=compile_only)

    def embed(self, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """See `StepLora.embed`. Captured steps have nothing of it: what adapters do to embeddings runs before them."""
        self._state.embed(rows, token_ids)

    def known(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `StepLora.known`: a GPU serves no adapters that add tokens."""
        return token_ids

    def use_logits(self, sampled: Sequence[int], scored: Sequence[int]) -> None:
        """See `StepLora.use_logits`."""
        self._state.use_logits(sampled, scored)

    def logits(self) -> HeadLora | None:
        """See `StepLora.logits`."""
        return self._state.logits()

    def prompt_logits(self) -> HeadLora | None:
        """See `StepLora.prompt_logits`."""
        return self._state.prompt_logits()

    def absorbed(self, layer: int) -> AbsorbedLora | None:
        """See `StepLora.absorbed`."""
        if self._latents or self.schedule.tensor_cores:  # no such step attends in a captured graph
            return self._state.absorbed(layer)
        return self._state.launched_latents(layer, self._tiles, self.num_tiles, self.terms)

    def mixture(self, layer: int) -> MixtureLaunches | None:
        """See `StepLora.mixture`."""
        return self._state.mixture_launches(layer, self._mixture)

    def offload(self, gemm: int, x: torch.Tensor, layer: int) -> None:
        """See `StepLora.offload`."""
        if (offloaded := self._state.offloaded) is not None:
            offloaded.offload(gemm, x, layer)


def _least_room(tiles: int, usual: int) -> int:
    """Index of the least factor that makes room for so many tiles; that behind the last if none does."""
    return next((at for at, factor in enumerate(_FACTORS) if tiles <= usual * factor), len(_FACTORS))
