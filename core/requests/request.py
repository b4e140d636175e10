"""One request, explained by three lengths: `num_prompt_tokens`, `num_tokens` and `num_computed_tokens`."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from .sampling_params import SamplingParams
from .types import FinishReason, TokenLogprobs


class RequestState(StrEnum):
    """A request's place in its life cycle."""

    WAITING = "waiting"  # in the queue, and has not begun
    LOADING = "loading"  # running while its adapter is still being loaded
    RUNNING = "running"
    LATE = "late"  # back in the queue, without pages, until its adapter, which did not arrive in time, is complete
    SWAPPED = "swapped"  # back in the queue after preemption; it restarts from what is still cached
    DONE = "done"


if TYPE_CHECKING:
    from ...memory.adapters.adapter import Adapter
    from ...memory.pages.block_table import BlockTable
    from ...memory.pages.prefix import Block
    from .types import ScheduledRow


class Request:
    """A generation in progress.

    There is no prefill phase, only `num_computed_tokens` (tokens whose KV is in the cache) trailing `num_tokens`
    (prompt plus generated). `adapter_name` is what the client asked for; `adapter` the version that it got.
    """

    __slots__ = (
        "adapter",
        "adapter_name",
        "arrival_time",
        "began_at",
        "block_table",
        "cache_salt",
        "caching",
        "call",
        "charged",
        "end_ids",
        "finish_reason",
        "id",
        "is_further",
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
        call: str = "",
    ) -> None:
        """tenant: the client that is charged, empty if unknown. cache_salt: prefix-cache blocks are shared only between
        requests of equal salt. call: shared by the requests of one call, which take turns beside other calls; empty for
        a request alone.
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
        self.call = call
        self.state = RequestState.WAITING
        self.place = 0  # queue position
        self.is_further = False  # came behind another answer of its call
        self.began_at = 0  # tokens that were cached when it was last admitted
        self.charged = 0  # tokens that its tenant has been charged since
        self.start_time: float | None = None  # of its first admission
        self.seed = params.seed or 0  # the engine draws one for a request without
        self.adapter: Adapter | None = None
        self.block_table: BlockTable  # while it runs
        self.room = 0  # tokens that its pages can hold
        self.row: ScheduledRow | None = None  # its row of decode steps, reused from step to step; None before those
        self.max_length = 0  # tokens, prompt included, at which it ends; set when it is queued
        self.end_ids: frozenset[int] = frozenset()  # tokens that end it earlier
        self.prompt_logprobs: list[TokenLogprobs] = []  # collected chunk by chunk until the first output
        self.num_cached_tokens = 0  # prompt tokens found in the prefix cache when it was admitted
        self.prompt_hash: int | None = None  # computed on demand
        self.caching = False  # True if blocks it completes go into the prefix cache
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
        """True if it holds a seat, pages and its adapter's pin."""
        return self.state is RequestState.RUNNING or self.state is RequestState.LOADING

    def __repr__(self) -> str:
        return (
            f"Request({self.id!r}, adapter={self.adapter_name!r}, prompt={self.num_prompt_tokens}, "
            f"tokens={self.num_tokens}, computed={self.num_computed_tokens})"
        )
