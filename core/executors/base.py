"""Interface of executors, and the common part of executors that load a model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ...memory.adapters.adapter import Adapter, AdapterBackend
from ...memory.pages.layout import PageLayout
from ...memory.transfers.swapped_kv import SwapBackend
from ...memory.transfers.transfer import ExecutorLost
from ..config import EngineConfig
from ..model.config import ModelConfig, UnsupportedModel
from ..model.shard import WHOLE, Shard
from ..requests.grammars import Grammars, grammars_of
from ..requests.types import StepPlan, StepResult

if TYPE_CHECKING:
    import torch

    from ..cold_start import ColdStarts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Properties of the model that callers need."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    window: int | None = None
    """The sliding window, where it is what bounds `max_model_len`."""
    grammars: Grammars | None = field(default=None, compare=False)
    """Grammars over its tokens; None where no tokens are drawn, as in a simulation."""


class ShadowBackend(Protocol):
    """Makes shadow weights: a copy of the weights that an adapter changes, with the adapter in it."""

    def sizes(self, adapter: Adapter) -> list[int]:
        """Return the lengths of the runs of pages that an adapter's shadow takes."""
        ...

    def wished_runs(self, adapter: Adapter) -> list[range] | None:
        """Return runs of `sizes` where an adapter's shadow is made sooner than elsewhere, because steps have been
        captured with these places in them; None if it does not matter.
        """
        ...

    def begin(self, adapter: Adapter, runs: Sequence[range]) -> None:
        """Begin the shadow of an adapter that is complete in the arena, in runs of `sizes`; drop the present one."""
        ...

    def advance(self, max_seconds: float) -> bool:
        """Do some of the work, for about `max_seconds` at most; True when plans may name the adapter as `merged`.

        Raises CannotMerge; the caller must then drop the shadow.
        """
        ...

    @property
    def share_made(self) -> float:
        """Share of the shadow's weights that are made, 0 to 1."""
        ...

    def drop(self) -> None:
        """Drop the shadow; its pages may then have another owner."""
        ...


class StartedStep(Protocol):
    """A step that was launched."""

    def sample(self) -> None:
        """Launch the sampling of a step ahead with rows that look back (`ScheduledRow.looks_back`); other steps have
        been launched whole. Call it once the rows' requests have the tokens of the step before, and before the next
        step is launched. Raises what `Executor.execute` raises.
        """
        ...

    def result(self) -> StepResult:
        """Wait for the step. Call it at most once, and before the step after next is launched.

        Raises what `Executor.execute` raises.
        """
        ...


class Executor(Protocol):
    """Owns the model's weights and the arena, and runs steps; it knows nothing of queues."""

    @property
    def model(self) -> ModelInfo: ...
    @property
    def layout(self) -> PageLayout: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def adapters(self) -> AdapterBackend: ...
    @property
    def shadow(self) -> ShadowBackend | None:
        """None where no adapter can be merged."""
        ...

    @property
    def swaps(self) -> SwapBackend | None:
        """None where KV of preempted requests can't be kept."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Running the same plan again gives the same result: a step only writes its own KV slots.

        Raises ExecutorLost when no step can run any more.
        """
        ...

    @property
    def start(self) -> Callable[[StepPlan], StartedStep] | None:
        """Launch a step without waiting for it; None for an executor that gains nothing by that.

        Before a decode step's result is asked for, the next one may be launched, with `sources` in its plan. All steps,
        and copies from and into the arena, do their work in the order in which they were launched.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class Watchable(Protocol):
    """An executor that can be lost while no step runs."""

    def watch(self, on_lost: Callable[[ExecutorLost], None]) -> None:
        """Have `on_lost` called, from any thread, when that happens."""
        ...


@runtime_checkable
class Assisted(Protocol):
    """An executor that chooses how prompts begin with an adapter on its way."""

    @property
    def cold_starts(self) -> ColdStarts: ...


class ModelExecutor:
    """Shapes of the checkpoint that a configuration names: what an executor knows before it reads any weight."""

    def __init__(self, config: EngineConfig, shard: Shard = WHOLE) -> None:
        """shard: the share of the model that the executor computes. Raises UnsupportedModel.

        whole: shapes of the model; config: of the share.
        """
        import torch

        self.whole, self.shard = ModelConfig.read(config.model), shard
        self.config = model = shard.config(self.whole)
        self._dtype: torch.dtype = getattr(torch, model.dtype if config.dtype == "auto" else config.dtype)
        grammars = grammars_of(config.tokenizer_dir, model.vocab_size, model.eos_token_ids)
        limit = max_model_len_of(config, model)
        window = model.sliding_window if limit == model.sliding_window else None
        self.model = ModelInfo(model.vocab_size, limit, model.eos_token_ids, window, grammars)
        self.layout = PageLayout(
            model.num_layers, model.num_kv_heads, model.head_dim, config.block_tokens, self._dtype.itemsize
        )


def max_model_len_of(config: EngineConfig, model: ModelConfig) -> int:
    """The configured limit, or else the model's: its positions, or its sliding window where that is shorter.

    Within the window, windowed attention is plain causal attention; beyond it is not served.
    """
    limit = model.max_context
    name = "max_position_embeddings" if limit == model.max_position_embeddings else "sliding_window"
    if config.max_model_len is None:
        if limit < model.max_position_embeddings:
            logger.info(
                "max_model_len is %d, the model's sliding window, not its %d positions",
                limit,
                model.max_position_embeddings,
            )
        return limit
    if config.max_model_len > limit:
        raise UnsupportedModel(f"max_model_len is {config.max_model_len}, the model's {name} {limit}; lower it")
    return config.max_model_len
