"""One request, explained by three lengths: `num_prompt_tokens`, `num_tokens` and `num_computed_tokens`."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from .sampling_params import SamplingParams
from .types import FinishReason, SamplerState, TokenLogprobs

if TYPE_CHECKING:
    from ...memory.adapters.adapter import Adapter
    from ...memory.files.format import AdapterManifest
    from ...memory.pages.prefix import Block, BlockTable
    from ...memory.transfers.swapped_kv import KvImage
    from ...memory.transfers.transfer import Transfer
    from .types import ScheduledSequence


class RequestState(StrEnum):
    """A request's place in its life cycle."""

    WAITING = "waiting"  # in the queue, and has not begun
    LOADING = "loading"  # running while its adapter is still being loaded, or its KV comes back from host memory
    RUNNING = "running"
    LATE = "late"  # back in the queue, without pages, until its adapter, which did not arrive in time, is complete
    SWAPPED = "swapped"  # back in the queue after preemption; it goes on from host memory, or from what is still cached
    DONE = "done"


class BoundVersion(Protocol):
    """A version of an adapter: its name, the version's label and what it computes."""

    @property
    def name(self) -> str: ...
    @property
    def label(self) -> str: ...
    @property
    def manifest(self) -> AdapterManifest: ...


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """A generation in progress.

    There is no prefill phase, only `num_computed_tokens` (tokens with KV in the cache) trailing `num_tokens`
    (prompt plus generated). `adapter_name` is what the client asked for; `adapter` the version that it got.

    token_ids: the prompt, followed by what is generated. tenant: the client, empty if unknown. fairness_key: the tenant
    whose share is charged, or the adapter with `fair_by` adapter; the engine sets it. cache_salt: prefix-cache blocks
    are shared only between requests of equal salt. call: shared by the requests of one call, which take turns beside
    other calls; empty for a request alone.
    """

    id: str
    token_ids: list[int]
    params: SamplingParams
    adapter_name: str | None = None
    arrival_time: float = 0.0
    tenant: str = ""
    cache_salt: str = ""
    choice_group: str = ""
    _: KW_ONLY
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    state: RequestState = RequestState.WAITING
    queue_position: int = 0  # queue position
    is_later_choice: bool = False  # came behind another answer of its call
    began_at: int = 0  # tokens that were cached when it was last admitted
    fairness_key: str = ""
    charged: float = 0.0  # cost that its tenant has been charged for what it runs now
    num_paid_tokens: int = 0  # tokens that its tenant has paid for in runs before
    start_time: float | None = None  # of its first admission
    num_preemptions: int = 0
    seed: int = 0  # its parameters'
    adapter: Adapter | None = None
    bound: BoundVersion | None = None  # the version that all of its steps compute with, once it is accepted
    sibling: Request | None = None  # of the same call, accepted before it: it is bound to the same version
    block_table: BlockTable = field(init=False)  # while it runs
    room: int = 0  # tokens that its pages can hold
    kv_image: KvImage | None = None  # its KV in host memory, until that is back
    restoring: Transfer | None = None  # what brings that into its pages; it computes nothing until then
    sequence: ScheduledSequence | None = (
        None  # its row of decode steps, reused from step to step; None before its first
    )
    sampler: SamplerState = field(default_factory=SamplerState)
    max_length: int = 0  # tokens, prompt included, at which it ends; set by the engine
    end_ids: frozenset[int] = frozenset()  # tokens that end it earlier
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # chunk by chunk until the first output
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache when it was admitted
    prompt_hash: int | None = None  # computed on demand
    caching: bool = False  # True if blocks it completes go into the prefix cache
    num_known_blocks: int = 0
    last_block: Block | None = None
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.seed = self.params.seed or 0

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
        """True if it holds a slot, pages and its adapter's pin."""
        return self.state is RequestState.RUNNING or self.state is RequestState.LOADING

    def __repr__(self) -> str:
        return (
            f"Request({self.id!r}, adapter={self.adapter_name!r}, prompt={self.num_prompt_tokens}, "
            f"tokens={self.num_tokens}, computed={self.num_computed_tokens})"
        )
