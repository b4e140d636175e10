"""One request, explained by three lengths: `num_prompt_tokens`, `num_tokens` and `num_computed_tokens`.

Tests: tests/core/test_engine.py, tests/core/scheduling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ...memory.pages.layout import NEVER
from .blocks import NO_BLOCKS, PromptBlocks
from .media import MediaItem, keys_of
from .request_params import RequestParams
from .types import FinishReason, SamplerState, TokenLogprobs

if TYPE_CHECKING:
    from ...memory.adapters.adapter import Adapter
    from ...memory.disk.tier import ReadAhead
    from ...memory.files.manifest import AdapterManifest
    from ...memory.files.score_head import ScoreHead
    from ...memory.pages.block import Block, Key
    from ...memory.pages.block_table import BlockTable
    from ...memory.transfers.swapped_kv import KvImage
    from ...memory.transfers.transfer import Transfer
    from .draft_length import DraftLength
    from .pooling import PooledSum
    from .prefix_fetch import Fetch
    from .types import ScheduledSequence


class RequestState(StrEnum):
    """State of a request."""

    WAITING = "waiting"  # in the queue; it has not begun
    LOADING = "loading"  # running while its adapter is still being loaded, or its KV is restored from host memory
    RUNNING = "running"
    LATE = "late"  # back in the queue, without pages, until its adapter, which missed its deadline, is loaded
    SWAPPED = "swapped"  # preempted: back in the queue; it continues from host memory, or from the prefix cache
    DONE = "done"


class BoundVersion(Protocol):
    """A version of an adapter: its name, the version's label and its manifest."""

    @property
    def name(self) -> str: ...
    @property
    def label(self) -> str: ...
    @property
    def manifest(self) -> AdapterManifest: ...
    @property
    def sources(self) -> Sequence[BoundVersion]:
        """The versions that it is composed of."""
        ...


class HeldPages(NamedTuple):
    """The pages that a request holds; replaced as a whole, so that other threads may read it."""

    num_pages: int
    since: float
    """When their number last changed."""
    page_seconds: float
    """Pages times the seconds that they were held before."""


NO_PAGES = HeldPages(0, 0.0, 0.0)


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """A generation in progress.

    There is no prefill phase, only `num_computed_tokens` (tokens with KV in the cache) trailing `num_tokens` (prompt
    plus generated).
    """

    id: str
    token_ids: list[int]
    """The prompt, followed by the generated tokens."""
    params: RequestParams
    adapter_name: str | None = None
    """The name that the client asked for."""
    arrival_time: float = 0.0
    tenant: str = ""
    """The client; empty if unknown."""
    cache_salt: str = ""
    """Prefix-cache blocks are shared only between requests of equal salt."""
    choice_group: str = ""
    """Shared by the choices of one API request, which take turns; empty for a request with one choice."""
    media: tuple[MediaItem, ...] = ()
    """The images of its prompt, in order."""
    prediction: Sequence[int] = ()
    """Tokens that the client expects in the answer. They are a source of proposals and don't change the answer."""
    _: KW_ONLY
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    state: RequestState = RequestState.WAITING
    queue_position: int = 0
    is_later_choice: bool = False
    """True if it arrived after another choice of its group: directly, if that is not its sibling."""
    began_at: int = 0
    """Tokens that were cached when it was last admitted."""
    fairness_key: str = ""
    """The tenant whose share is charged, or the adapter with `fair_by` adapter; the engine sets it."""
    charged: float = 0.0
    """Cost that its tenant has been charged for the present run."""
    num_paid_tokens: int = 0
    """Tokens that its tenant has paid for in earlier runs."""
    start_time: float | None = None
    """Time of its first admission."""
    num_preemptions: int = 0
    seed: int = 0
    """The seed of its parameters."""
    adapter: Adapter | None = None
    lora_from: int = 0
    """Position of the first token that its adapter changes; before it, its KV is the base model's."""
    media_rows: list[Any] = field(default_factory=list)
    """The rows of each image, a tensor `[rows, hidden]`, once it is encoded."""
    media_scope: str = ""
    """Tells its images' rows apart from those of other adapters, where its adapter changes the tower."""
    blocks: PromptBlocks = NO_BLOCKS
    """Positions of its prompt that see each other."""
    bound: BoundVersion | None = None
    """The version that all of its steps compute with, once it is accepted."""
    sibling: Request | None = None
    """An earlier choice of its group: it is bound to the same version."""
    block_table: BlockTable = field(init=False)
    """Exists while it runs."""
    held: HeldPages = NO_PAGES
    """Its pages, also those that it shares with others."""
    room: int = 0
    """Tokens that its pages can hold."""
    leaves_at: int = NEVER
    """Computed tokens from which on pages may have left a window."""
    kv_image: KvImage | None = None
    """Its KV in host memory, until that is restored."""
    restoring: Transfer | None = None
    """The copy of its KV from host memory into its pages; it computes nothing until that ends."""
    reading: ReadAhead | None = None
    """The read of its prompt's blocks from files, while it is worth waiting for."""
    num_passed_tokens: int = 0
    """Prefix tokens in host memory that it computes again, because that takes less time."""
    fetch: Fetch | None = None
    """Cached blocks that this copy brings back; None if it brings `kv_image`."""
    sequence: ScheduledSequence | None = None
    """Its decoding sequence, reused from step to step; None before its first."""
    sampler: SamplerState = field(default_factory=SamplerState)
    max_length: int = 0
    """Tokens, prompt included, at which it ends; the engine sets it."""
    end_ids: frozenset[int] = frozenset()
    """Tokens that end it earlier."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """They grow chunk by chunk until the first output."""
    pooled: PooledSum | None = None
    """Of a pooling request: the sum over the pooled tokens computed so far."""
    head: ScoreHead | None = None
    """The head that scores its pooled vector; None if the vector itself is asked for."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when it was admitted."""
    prompt_hash: int | None = None
    """Computed on demand."""
    caching: bool = False
    """True if the blocks that it completes go into the prefix cache."""
    num_known_blocks: int = 0
    """Its blocks in the prefix cache."""
    last_block: Block | None = None
    draft_length: DraftLength | None = None
    """None until tokens are first proposed for it."""
    forced_length: DraftLength | None = None
    """The same of text that its grammar forces."""
    proposing: object = None
    """State of the proposer, if it keeps any."""
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.seed = self.params.seed or 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def keys(self, begin: int = 0, end: int | None = None) -> Sequence[Key]:
        """What the prefix cache compares of its tokens."""
        tokens = self.token_ids[begin:end]
        if self.blocks.prompt:
            places = range(begin, min(begin + len(tokens), self.num_prompt_tokens))
            return [*((self.blocks.prompt, place) for place in places), *tokens[len(places) :]]
        return keys_of(tokens, self.media, begin, self.media_scope) if self.media else tokens

    @property
    def changed_by(self) -> BoundVersion | None:
        """The version of an adapter that its result depends on; one that changes images alone is not its `adapter`."""
        return self.bound if self.media_scope else self.adapter

    @property
    def needs_prompt_states(self) -> bool:
        """True if results need hidden states of the prompt's earlier tokens, which a cached prefix does not have."""
        return self.params.prompt_logprobs is not None or self.params.pooling in ("mean", "cls")

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_running(self) -> bool:
        """True if it holds pages and a pin of its adapter; it may be descheduled."""
        return self.state is RequestState.RUNNING or self.state is RequestState.LOADING

    def note_pages(self, count: int, now: float) -> None:
        """It holds so many pages from now on."""
        self.held = HeldPages(count, now, self.page_seconds_until(now))

    def page_seconds_until(self, now: float) -> float:
        """Pages times the seconds that it has held them. Any thread may call it."""
        held = self.held
        return held.page_seconds + held.num_pages * (now - held.since)

    def forget_prompt(self) -> None:
        """Drop the results of prompt tokens that will be computed again."""
        self.prompt_logprobs.clear()
        self.pooled = None

    def __repr__(self) -> str:
        return (
            f"Request({self.id!r}, adapter={self.adapter_name!r}, prompt={self.num_prompt_tokens}, "
            f"tokens={self.num_tokens}, computed={self.num_computed_tokens})"
        )
