"""The interface of executors, and the part that all executors with a real model share.

Tests: tests/core/executors/test_cpu_executor.py, tests/core/executors/test_watched.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from ...graphs.runner import EagerReason
from ...memory.adapters.adapter import Adapter, AdapterBackend
from ...memory.files.config import MAX_RANK
from ...memory.pages.layout import KvShape, PageLayout
from ...memory.pages.states import StateShape
from ...memory.transfers.swap_backend import SwapBackend
from ...memory.transfers.transfer import ExecutorLost
from ..cold_start import ColdStarts
from ..config import EngineConfig
from ..media.serving import why_blind, with_tower
from ..model.checkpoints.quantization.round_to_nearest import quantiser_of
from ..model.read_config import read_model_config
from ..model.specs.attention import AttentionSpec
from ..model.specs.config import ModelConfig, UnsupportedModel
from ..model.specs.recurrent import RecurrentSpec
from ..model.weights.shard import WHOLE, Shard
from ..requests.blocks import Blocks
from ..requests.draft_length import MOST_DRAFTS
from ..requests.grammars import Grammars, grammars_of
from ..requests.types import StepPlan, StepResult

if TYPE_CHECKING:
    import torch

    from ...memory.files.score_head import ScoreHead

logger = logging.getLogger(__name__)

_ON_GPUS = "GPUs unless small_gemm is off"


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of an engine's steps and adapters, which its device may set."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_lora_rank: int
    """Largest rank of an adapter."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Properties of the model that callers need."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    window: int | None = None
    """The sliding window, if it limits `max_model_len`."""
    grammars: Grammars | None = field(default=None, compare=False)
    """Grammars over its tokens; None if no tokens are sampled, as in a simulation."""
    generates: bool = True
    """False for a model without an output projection."""
    head: ScoreHead | None = field(default=None, compare=False)
    """Its score head; None if it has none."""
    speculates: bool = False
    """True if steps may verify proposed tokens."""
    expert_share: float = field(default=0.0, compare=False)
    """Share of its experts that a token goes to; 0: it has no mixture of experts."""
    limits: EngineLimits | None = field(default=None, compare=False)
    """None in a simulation, and for replicas of earlier versions."""
    why_blind: str | None = field(default="this engine does not say that it takes any", compare=False)
    """Why images are refused; None: they are served."""
    image_token: int | None = field(default=None, compare=False)
    """The token at images' positions, where they are served."""
    image_marks: tuple[int, ...] = field(default=(), compare=False)
    """See `ModelConfig`."""
    image_ends: tuple[int, int] | None = field(default=None, compare=False)
    """See `VisionSpec.ends`; None where images are not served, too."""
    image_blocks: Blocks | None = field(default=None, compare=False)
    """Which positions of a prompt with images see each other, where images are served."""
    most_images: int | None = field(default=None, compare=False)
    """See `VisionSpec`."""


class ShadowBackend(Protocol):
    """Makes merged weights (a shadow): a copy of the weights that an adapter changes, with the adapter added."""

    def sizes(self, adapter: Adapter) -> list[int]:
        """Return the lengths of the runs of pages that an adapter's merged weights take."""
        ...

    def wished_runs(self, adapter: Adapter) -> list[range] | None:
        """Return the preferred runs of `sizes` for an adapter's merged weights, or None if it does not matter.

        Merged weights are ready sooner there, because steps were captured with these addresses.
        """
        ...

    def begin(self, adapter: Adapter, runs: Sequence[range]) -> None:
        """Begin the merged weights of an adapter that is complete in the arena, in runs of `sizes`; drop the present
        ones.
        """
        ...

    def advance(self, max_seconds: float) -> bool:
        """Do some of the work, for at most about `max_seconds`; return True once plans may name the adapter as
        `merged`.

        Raises CannotMerge; then the caller must drop the shadow.
        """
        ...

    @property
    def share_made(self) -> float:
        """Share of the merged weights that are made, 0 to 1."""
        ...

    def drop(self) -> None:
        """Drop the merged weights; their pages may then get another owner."""
        ...


class StartedStep(Protocol):
    """A step that was launched."""

    def sample(self) -> None:
        """Launch the sampling of an async step with entries that look back (`ScheduledSequence.looks_back`).

        Other steps were launched whole. Call it once the requests have the tokens of the previous step, and before the
        next step is launched. Raises the errors of `Executor.execute`.
        """
        ...

    def result(self) -> StepResult:
        """Wait for the step. Call it at most once, and before the step after next is launched.

        Raises the errors of `Executor.execute`.
        """
        ...


class Executor(Protocol):
    """Owns the model's weights and the arena, and runs steps; it knows nothing about queues."""

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
        """None if no adapter can be merged."""
        ...

    @property
    def swaps(self) -> SwapBackend | None:
        """None if the KV of preempted requests can't be kept."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Running the same plan again gives the same result, because a step only writes its own KV slots.

        Raises ExecutorLost if no step can run any more.
        """
        ...

    @property
    def start(self) -> Callable[[StepPlan], StartedStep] | None:
        """Launch a step without waiting for it; None for an executor that gains nothing by it.

        The next step may be launched, with `sources` in its plan, before a decode step's result is read. All steps, and
        copies to and from the arena, run in the order in which they were launched.
        """
        ...

    @property
    def cold_starts(self) -> ColdStarts:
        """Counts how prompts start while their adapter is being loaded."""
        ...

    @property
    def eager_steps(self) -> Mapping[EagerReason, int]:
        """Steps on a GPU that were not captured, by reason."""
        ...

    def watch(self, on_lost: Callable[[ExecutorLost], None]) -> None:
        """Register `on_lost`, which is called, from any thread, when the executor is lost while no step runs."""
        ...

    @property
    def release_pages(self) -> Callable[[], None] | None:
        """Give the memory of the pool's pages, all of which are free, back to the system; None if the executor can't.

        They are zero when they are used again.
        """
        ...

    def close(self) -> None: ...


class ExecutorBase:
    """Defaults for executors that are never lost between steps."""

    def __init__(self) -> None:
        self.cold_starts = ColdStarts()
        self.eager_steps: Mapping[EagerReason, int] = {}

    def watch(self, on_lost: Callable[[ExecutorLost], None]) -> None:
        """Nothing: only a step can fail, and `execute` raises."""

    @property
    def release_pages(self) -> Callable[[], None] | None:
        return None


class ModelExecutor(ExecutorBase):
    """The shapes of the configured checkpoint: everything that an executor knows before it reads weights."""

    on_gpu = False
    """Whether it computes on a GPU."""

    state_slots = 2
    """Slots of a request for its recurrent states: one more than steps that are under way at once."""

    def __init__(self, config: EngineConfig, shard: Shard = WHOLE) -> None:
        """shard: the share of the model that the executor computes. Raises UnsupportedModel."""
        import torch

        from ..model.weights.base_weights import CheckpointWeights  # needs torch
        from ..model.weights.score_head import read_score_head

        super().__init__()
        self.whole, self.shard = read_model_config(config.model, config.tokenizer), shard
        """Shapes of the share; `whole` has those of the whole model."""
        blind = why_blind(config, self.whole, on_gpu=self.on_gpu)
        if blind is None:
            self.whole = with_tower(config, self.whole)
        elif self.whole.vision is not None:
            logger.info("images are not served: %s", blind)
        if blind is not None and self.whole.image_blocks is Blocks.PROMPT:
            raise UnsupportedModel(
                f"{config.model}: all tokens of a prompt see each other, which is computed only where images are "
                f"served: {blind}"
            )
        self.config = model = shard.config(self.whole)
        stored = self.whole.weight_format
        self.quantiser = quantiser_of(config.quantization, config.quantize_lm_head, stored)
        self._dtype: torch.dtype = getattr(torch, model.dtype if config.dtype == "auto" else config.dtype)
        self.base_weights = CheckpointWeights(config, self.whole, self._dtype, self.quantiser)
        """Reads adapters with DoRA or biases."""
        grammars = grammars_of(config.tokenizer_dir, model.vocab_size, model.eos_token_ids)
        limit = max_model_len_of(config, model, within_window=self._within_window(config))
        window = model.window if limit == model.window else None
        has_head = model.is_classifier and not shard.rank and config.load_format == "auto"
        head = read_score_head(config.model, model.hidden_size) if has_head else None
        self.model = ModelInfo(
            model.vocab_size,
            limit,
            model.eos_token_ids,
            window,
            grammars,
            generates=model.has_lm_head,
            head=head,
            speculates=config.speculates,
            expert_share=model.experts.share_per_token if model.experts else 0.0,
            limits=EngineLimits(config.max_num_seqs, config.max_num_batched_tokens, self._max_lora_rank(config)),
            why_blind=blind,
            image_token=None if blind else model.image_token,
            image_marks=() if blind else model.image_marks,
            image_ends=None if blind else model.image_ends,
            image_blocks=None if blind else model.image_blocks,
            most_images=None if model.vision is None else model.vision.most_images,
        )
        self.layout = self._page_layout(config, limit)

    def _page_layout(self, config: EngineConfig, max_model_len: int) -> PageLayout:
        """Raises UnsupportedModel."""
        model, block_tokens = self.config, config.block_tokens
        if config.kv_cache_dtype == "fp8" and (kept := model.why_no_float8_kv) is not None:
            raise UnsupportedModel(f"kv_cache_dtype is 'fp8', but {kept}; set it to 'auto'")
        windows = tuple(mixer.window_within(max_model_len) for mixer in model.kv_layers)
        if model.chunked and (unfit := {each for each in windows if each is not None and each % block_tokens}):
            raise UnsupportedModel(
                f"block_tokens is {block_tokens}, and the model's layers attend to chunks of {min(unfit)} tokens; set "
                "it to a divisor of that"
            )
        state = _state_shape(model, speculates=config.speculates)
        shapes = _kv_shapes(model.kv_layers)
        try:
            return PageLayout(
                num_layers=len(model.kv_layers),
                kv_heads=model.kv_shape.heads,
                head_dim=model.kv_shape.head_dim,
                block_tokens=block_tokens,
                itemsize=self._dtype.itemsize,
                state_slots=self.state_slots,
                state=state,
                state_page_bytes=0 if state is None or model.kv_layers else state.page_bytes,
                float8_kv=config.kv_cache_dtype == "fp8",
                value_dim=model.cached_value_dim,
                windows=windows,
                chunked=model.chunked,
                shapes=shapes if len(set(shapes)) > 1 else (),
            )
        except ValueError as error:
            size = self.shard.size
            fix = "raise it" if size == 1 else f"raise it, or lower tensor_parallel_size, which is {size}"
            raise UnsupportedModel(f"block_tokens is {block_tokens}, but {error}; {fix}") from error

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""
        return self._dtype

    @property
    def torch_device(self) -> torch.device:
        """Where images are encoded."""
        import torch

        return torch.device("cpu")

    def warn_if_dequantised(self, who: str, which: str = "weights", *, only_float8: bool = False) -> None:
        """Say that quantised weights are kept dequantised, if there are any. who: the library that multiplies them;
        only_float8: which keeps all but FP8.
        """
        if self.quantiser is not None and (self.quantiser.is_float or not only_float8):
            logger.warning(
                "quantization is %s, but %s dequantised %s: they take as much memory as the checkpoint's own; %s, keep "
                "them quantised",
                self.quantiser.name,
                who,
                which,
                _ON_GPUS if self.quantiser.is_float else f"the native CPU decoder, and {_ON_GPUS}",
            )

    def _within_window(self, config: EngineConfig) -> bool:
        """Whether requests are by default no longer than the model's attention window."""
        return False

    def _max_lora_rank(self, config: EngineConfig) -> int:
        """The largest rank of an adapter: only tables of GPUs limit it further than an adapter's files."""
        return MAX_RANK


def _kv_shapes(mixers: Sequence[AttentionSpec]) -> tuple[KvShape, ...]:
    """The shape of each layer's keys, with the number of its queries' heads where layers differ in that."""
    differ = len({mixer.num_heads for mixer in mixers}) > 1
    return tuple(mixer.kv_shape._replace(queries=mixer.num_heads if differ else 0) for mixer in mixers)


def _state_shape(model: ModelConfig, *, speculates: bool) -> StateShape | None:
    if model.recurrent is None:
        return None
    further = None if model.lookup is None else _shape_of(model.lookup, model.num_lookups, speculates=speculates)
    return replace(_shape_of(model.recurrent, model.num_recurrent_layers, speculates=speculates), further=further)


def _shape_of(recurrent: RecurrentSpec, num_layers: int, *, speculates: bool) -> StateShape:
    heads, *head = recurrent.recurrent_shape
    return StateShape(
        num_layers,
        conv_elems=math.prod(recurrent.conv_shape),
        num_heads=heads,
        head_elems=math.prod(head) if heads else 0,
        draft_elems=recurrent.draft_size,
        most_drafts=MOST_DRAFTS if speculates else 0,
    )


def max_model_len_of(config: EngineConfig, model: ModelConfig, *, within_window: bool = False) -> int:
    """The configured limit, or else the model's own: with longrope its original positions, and with `within_window` its
    attention window where that is shorter, within which windowed attention is plain causal attention.
    """
    most, limit = model.max_position_embeddings, model.max_context
    if config.max_model_len is not None:
        if config.max_model_len > most:
            raise UnsupportedModel(
                f"max_model_len is {config.max_model_len}, the model's max_position_embeddings {most}; lower it"
            )
        return config.max_model_len
    message = "max_model_len is %d, %s, not the model's %d positions: %s; set max_model_len to serve more"
    if within_window and model.window is not None and model.window < limit:
        logger.info(message, model.window, "its attention window", most, "attention is faster within it")
        return model.window
    if limit < most:
        why = "all requests have longrope's short factors within them, and its long ones beyond"
        logger.info(message, limit, "longrope's original positions", most, why)
    return limit
