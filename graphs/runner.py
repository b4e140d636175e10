"""Decode steps by batch size and mode: the sizes that they are padded to, capture and replay."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, NamedTuple, NoReturn, TypeVar

Output = TypeVar("Output")


def padded(num_rows: int) -> int:
    """Return the bucket for more than 64 sequences, without the limit of `max_num_seqs`."""
    step = 1 << (num_rows - 1).bit_length() - 4
    return -(-num_rows // step) * step


class DecodeBuckets:
    """1, 2, 4, 8, 16, 24, … 128, 144, … 256, 288, … ending exactly at `max_num_seqs`.

    Buckets are 8 apart, and from 64 on an eighth of the power of two below. Therefore at most an eighth is padding, and
    the number of graphs, with their time and memory, grows logarithmically.
    """

    def __init__(self, max_num_seqs: int, most_tokens: int = 0) -> None:
        """most_tokens: of a step with drafts; if there may be more than `max_num_seqs`, the sizes go on to it."""
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs is {max_num_seqs}; at least 1 is needed")
        ladder, size, most = [1, 2, 4], 8, max(max_num_seqs, most_tokens)
        while size < most:
            ladder.append(size)
            size += max(8, 1 << size.bit_length() - 4)
        self.sizes = tuple(sorted({size for size in [*ladder, max_num_seqs, most] if size <= most}))

    def pick(self, num_rows: int) -> int:
        """Return the smallest bucket that holds `num_rows` sequences. Raises ValueError above the largest."""
        index = bisect_left(self.sizes, num_rows)
        if num_rows < 1 or index == len(self.sizes):
            raise ValueError(f"no bucket holds {num_rows} sequences; the largest holds {self.sizes[-1]}")
        return self.sizes[index]


class StepMode(StrEnum):
    """How a step applies adapters."""

    BASE = "base"
    """No sequence has an adapter: no LoRA work is captured, so base traffic pays nothing for LoRA."""
    LORA = "lora"
    MERGED = "merged"
    """One adapter is merged into a copy of the weights; sequences of other adapters add the difference."""
    MIXTURE = "mixture"
    """For captured launches only: a merged step with such sequences. A captured `MERGED` step then has no LoRA work."""


class StepPart(StrEnum):
    """The part of a step that one key of a `GraphRunner` captures."""

    WHOLE = "whole"
    """From token ids to logits, of a decode step."""
    LAYERS = "layers"
    """The layers alone, of a decode step: an adapter of it changes embeddings or logits, which are computed eagerly."""
    PIECES = "pieces"
    """What lies between the layers' mixers, of a step with prompts; its bucket counts tokens."""


class LaunchSize(NamedTuple):
    """Size of the captured LoRA launches, beyond the usual one, 0; see `lora_launches`."""

    prompts: int = 0
    """Of prompts, or of all sequences of a decode step."""
    tail: int = 0
    """Of decoding sequences after prompts."""


USUAL_ROOM, NO_TAIL = LaunchSize(), LaunchSize(tail=-1)


class StepForm(NamedTuple):
    """A kind of step that is captured for each bucket. Those with default values may be captured ahead, others are
    when the first such step runs.
    """

    mode: StepMode
    part: StepPart = StepPart.WHOLE
    scales: tuple[bool, ...] = ()
    """Launches that scale and shift outputs, for adapters with vectors: True undoes those of a merged adapter."""
    room: LaunchSize = USUAL_ROOM
    mixture: tuple[str, ...] = ()
    """The products of mixtures of experts that adapters change."""


class EagerReason(StrEnum):
    """Why a step that could be captured runs eagerly: the host launches each kernel."""

    OFF = "off"
    """`graph_capture` is off, or attention can't be captured."""
    TOKENS = "tokens"
    """It has prompts, and more tokens than `mixed_graph_tokens`."""
    TILES = "tiles"
    """Its adapters have more parts than the widest captured launches have tiles for."""
    OFFLOAD = "offload"
    """Other processes compute a part of its adapters' products."""
    EXPERTS = "experts"
    """It has prompts, and its adapters change a mixture of experts."""
    LATENTS = "latents"
    """Its adapters scale keys and values of latents, as DoRA's do, or heads are not as wide as kernels take."""
    IMAGES = "images"
    """It has rows of images."""


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """The cost of capturing a step: seconds, and bytes of device memory."""

    bucket: int
    form: StepForm
    seconds: float
    num_bytes: int

    @property
    def mode(self) -> StepMode:
        return self.form.mode


class GraphRunner(Generic[Output]):
    """Captures a step function once per key over static buffers, then replays it.

    `capture(bucket, form)` returns the replayable step. On a CPU, capturing is a closure over the bucket's buffers and
    a replay is a call. Therefore mistakes of padding and staleness show there as they would with CUDA graphs.
    """

    def __init__(
        self, capture: Callable[[int, StepForm], Callable[[], Output]], free_bytes: Callable[[], int] = lambda: 0
    ) -> None:
        """free_bytes: returns free device memory, to measure the memory of a capture."""
        self._capture = capture
        self._free_bytes = free_bytes
        self._captured: dict[tuple[int, StepForm], Callable[[], Output]] = {}
        self.report: list[CapturedStep] = []

    @property
    def keys(self) -> tuple[tuple[int, StepForm], ...]:
        return tuple(self._captured)

    def capture(self, bucket: int, form: StepForm) -> CapturedStep:
        """Capture the step of (bucket, form) now. Capture large buckets first: smaller ones reuse their memory."""
        self._new(bucket, form)
        return self.report[-1]

    def replay(self, bucket: int, form: StepForm) -> Output:
        """Run the step of (bucket, form), capturing it first if it is new."""
        step = self._captured.get((bucket, form))
        if step is None:
            step = self._new(bucket, form)
        return step()

    def clear(self) -> None:
        """Drop every captured step and the report."""
        self._captured.clear()
        self.report.clear()

    def close(self) -> None:
        """Drop every captured step and the capturing function. Without that cycle the owner of this runner is freed at
        once, instead of by the garbage collector.
        """
        self.clear()
        self._capture = _closed

    def _new(self, bucket: int, form: StepForm) -> Callable[[], Output]:
        free, begin = self._free_bytes(), time.perf_counter()
        step = self._captured[bucket, form] = self._capture(bucket, form)
        seconds = time.perf_counter() - begin
        self.report.append(CapturedStep(bucket, form, seconds, max(0, free - self._free_bytes())))
        return step


def _closed(bucket: int, form: StepForm) -> NoReturn:
    raise RuntimeError(f"the step of bucket {bucket} ({form.mode}) was requested after the executor was closed")
