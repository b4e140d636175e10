"""One request, explained by three lengths: `num_prompt_tokens`, `num_tokens` and `num_computed_tokens`."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from .sampling_params import SamplingParams
from .types import FinishReason, TokenLogprobs


class RequestState(StrEnum):
    """Where a request is in its life; `Request.state` says it, whatever it holds."""

    WAITING = "waiting"  # in the queue, and has not begun
    LOADING = "loading"  # runs while its adapter's bytes are still coming
    RUNNING = "running"
    LATE = "late"  # in the queue until all of its adapter is there, which did not come in time; it holds nothing
    SWAPPED = "swapped"  # in the queue after it had to give its pages to others; it goes on from what is still cached
    DONE = "done"


if TYPE_CHECKING:
    from ..memory.adapter import Adapter
    from ..memory.kv import BlockTable
    from ..memory.prefix import Block
    from .types import ScheduledRow


class Request:
    """A generation in progress.

    There is no prefill phase, only `num_computed_tokens` (tokens whose KV is in the cache) trailing `num_tokens`
    (prompt plus generated). `adapter_name` is what was asked; `adapter` the version held while the request runs.
    """

    __slots__ = (
        "adapter",
        "adapter_name",
        "arrival_time",
        "began_at",
        "block_table",
        "cache_salt",
        "caching",
        "charged",
        "end_ids",
        "finish_reason",
        "id",
        "last_block",
        "max_length",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_known_blocks",
        "num_prompt_tokens",
        "params",
        "place",
        "prompt_hash",
        "prompt_logprobs",
        "room",
        "row",
        "seed",
        "start_time",
        "state",
        "tenant",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        adapter_name: str | None = None,
        arrival_time: float = 0.0,
        tenant: str = "",
        cache_salt: str = "",
    ) -> None:
        """A request that waits.

        tenant: identity of the client that pays for it, empty if unknown. cache_salt: prefix-cache blocks are shared
        only between requests of equal salt.
        """
        self.id = request_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.params = params
        self.adapter_name = adapter_name
        self.arrival_time = arrival_time
        self.tenant = tenant
        self.cache_salt = cache_salt
        self.state = RequestState.WAITING
        self.place = 0  # in the queue
        self.began_at = 0  # tokens that were cached when it was last admitted
        self.charged = 0  # tokens of work that its tenant has been charged for since
        self.start_time: float | None = None  # when it was admitted first
        self.seed = params.seed
        self.adapter: Adapter | None = None
        self.block_table: BlockTable | None = None
        self.room = 0  # tokens that its pages hold
        self.row: ScheduledRow | None = None  # its part of every step since it began to decode; None before
        self.max_length = 0  # tokens, prompt included, with which it ends; known once it is queued
        self.end_ids: frozenset[int] = frozenset()  # tokens that end it before that
        self.prompt_logprobs: list[TokenLogprobs] = []  # gathered chunk by chunk until the first output
        self.num_cached_tokens = 0  # of its tokens, how many the prefix cache had when it was admitted
        self.prompt_hash: int | None = None  # once it was asked for
        self.caching = False  # whether blocks it completes are made known to the prefix cache
        self.num_known_blocks = 0
        self.last_block: Block | None = None
        self.finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_running(self) -> bool:
        """True if it has a seat, pages and its adapter's pin."""
        return self.state is RequestState.RUNNING or self.state is RequestState.LOADING

    def __repr__(self) -> str:
        return (
            f"Request({self.id!r}, adapter={self.adapter_name!r}, prompt={self.num_prompt_tokens}, "
            f"tokens={self.num_tokens}, computed={self.num_computed_tokens})"
        )
