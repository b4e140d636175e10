"""The queues: running requests by adapter and choice group, waiting ones by tenant and adapter.

Tests: tests/core/scheduling/test_queues.py, tests/core/scheduling/test_queue_order.py.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from types import MappingProxyType

from ...graphs.runner import DecodeBuckets
from ...memory.adapters.adapter import Adapter
from ..requests.request import Request
from ..requests.types import BASE_LORA_INDEX, PENDING, ScheduledSequence, StepPlan

_BEFORE_ALL = 1 << 62  # subtracted from the queue positions of requests that have run

#: Requests by adapter. Adapters are in the order of their first requests.
RequestsByAdapter = dict[Adapter | None, list[Request]]


def group_by_adapter(requests: Iterable[Request]) -> RequestsByAdapter:
    groups: RequestsByAdapter = {}
    for request in requests:
        groups.setdefault(request.adapter, []).append(request)
    return groups


def num_missing(request: Request) -> int:
    """Return the number of known tokens that have no KV yet."""
    return len(request.token_ids) - request.num_computed_tokens


def split_prompts(requests: Sequence[Request]) -> tuple[list[Request], Sequence[Request]]:
    """Return the requests with a prompt to compute, and the requests that decode."""
    prompts = [each for each in requests if len(each.token_ids) - each.num_computed_tokens > 1]
    return prompts, [each for each in requests if num_missing(each) == 1] if prompts else requests


class Running(list[Request]):
    """Running requests in order of admission. Change it by `append` and `remove` only: they update the other fields."""

    def __init__(self) -> None:
        super().__init__()
        self._groups: RequestsByAdapter | None = None
        self.choice_groups: dict[str, dict[Request, None]] = {}
        """Choices of requests with n > 1, by choice group; `ChoiceBudget` reorders both levels to give turns."""
        self.single_requests: dict[Request, None] = {}
        """Requests without a choice group."""
        self.plan: StepPlan | None = None
        """The last step's plan, if every request decoded a token in it and none joined or left: its sequences are
        reused."""
        self.tenants: dict[str, int] = {}
        """Number of running requests by tenant."""
        self.chosen: list[Request] | None = None
        """The scheduled requests, if there are more requests than slots; None once a request joins or leaves."""

    @property
    def num_groups(self) -> int:
        return len(self.choice_groups) + len(self.single_requests)

    def append(self, request: Request) -> None:
        list.append(self, request)
        self.plan = self.chosen = self._groups = None
        self.tenants[request.fairness_key] = self.tenants.get(request.fairness_key, 0) + 1
        (self.choice_groups.setdefault(request.choice_group, {}) if request.choice_group else self.single_requests)[
            request
        ] = None

    def remove(self, request: Request) -> None:
        list.remove(self, request)
        self.plan = self.chosen = self._groups = None
        self.tenants[request.fairness_key] -= 1
        if not self.tenants[request.fairness_key]:
            del self.tenants[request.fairness_key]
        members = self.choice_groups[request.choice_group] if request.choice_group else self.single_requests
        del members[request]
        if request.choice_group and not members:
            del self.choice_groups[request.choice_group]

    def by_adapter(self) -> RequestsByAdapter:
        """Return the requests grouped by adapter; callers must not change it."""
        if self._groups is None:
            self._groups = group_by_adapter(self)
        return self._groups

    def count_by_adapter(self) -> dict[Adapter | None, int]:
        """Return the number of requests by adapter; None: of the base model."""
        return {adapter: len(group) for adapter, group in self.by_adapter().items()}


class AdapterQueue(OrderedDict[Request, None]):
    """Waiting requests of one tenant for one adapter, in order."""

    def __init__(self, adapter: Adapter | None) -> None:
        super().__init__()
        self.adapter = adapter
        self.first_choices: OrderedDict[Request, None] = OrderedDict()
        """Without the later choices of each choice group."""


class WaitingQueue(OrderedDict[Request, None]):
    """Waiting requests in order. Change it by its methods only: they update the queues per tenant and adapter.

    Methods take constant time, except that `append_first` and `release` scan the earlier requests.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last = 0
        self._last_choice_group = ""  # of the newest request: choices of one request arrive one after another
        self.tenants: dict[str, dict[Adapter | None, AdapterQueue]] = {}
        self.num_of: dict[Adapter | None, int] = {}
        """Number of requests by adapter (None: the base model), including held-back requests."""
        self.by_adapter: dict[Adapter | None, dict[str, None]] = {}
        """Tenants with candidates, by adapter (None: the base model)."""
        self._new_tenants: dict[str, None] = {}
        self._held_back: dict[Request, None] = {}
        self._absent: Adapter | None = None  # the adapter without pages that was found last

    def has(self, tenant: str) -> bool:
        """True if a tenant has a waiting request, held back or not."""
        return tenant in self.tenants or any(request.fairness_key == tenant for request in self._held_back)

    def count(self, tenant: str) -> int:
        """Return the number of a tenant's waiting requests, except held-back ones; from any thread."""
        return sum(map(len, [*self.tenants.get(tenant, {}).values()]))

    def append(self, request: Request) -> None:
        """Add a new request at the end."""
        self._number(request)
        self[request] = None
        self._count(request)
        follows = request.sibling is not None or request.choice_group == self._last_choice_group
        request.is_later_choice = request.choice_group != "" and follows
        self._last_choice_group = request.choice_group
        for line in self._lines(request):
            line[request] = None

    def append_first(self, request: Request) -> None:
        """Add a request that has run before. It goes before all new requests, in order of arrival among its like."""
        if not request.queue_position:  # it ran on another engine
            self._number(request)
        if request.queue_position > 0:
            request.queue_position -= _BEFORE_ALL
        _insert(self, request)
        self._count(request)
        self._rejoin(request)

    def remove(self, request: Request) -> None:
        del self[request]
        self.num_of[request.adapter] -= 1
        if not self.num_of[request.adapter]:
            del self.num_of[request.adapter]
        if request in self._held_back:
            del self._held_back[request]
        else:
            self._leave_group(request)

    def hold_back(self, request: Request) -> None:
        """Keep a request in the queue, but exclude it from admission until it is released."""
        if request not in self._held_back:
            self._leave_group(request)
            self._held_back[request] = None

    def release(self, request: Request) -> None:
        """Make a held-back request a candidate again, at its old position, unless it has left the queue."""
        if request in self._held_back:
            del self._held_back[request]
            self._rejoin(request)

    def pop_new_tenants(self) -> list[str]:
        """Return the tenants that have become waiting since the last call, in order of arrival."""
        new, self._new_tenants = self._new_tenants, {}
        return list(new)

    def has_first_choices(self) -> bool:
        """True if a first choice is a candidate."""
        return any(group.first_choices for groups in self.tenants.values() for group in groups.values())

    def has_absent(self) -> bool:
        """True if a request waits for an adapter without pages. One such adapter is remembered, to find it fast."""
        last = self._absent
        if last is None or last.pages or last not in self.num_of:
            self._absent = next((each for each in self.num_of if each is not None and not each.pages), None)
        return self._absent is not None

    def adapters(self) -> set[Adapter]:
        """Return the adapters of all candidates for admission."""
        return {adapter for adapter in self.by_adapter if adapter is not None}

    def _number(self, request: Request) -> None:
        self._last += 1
        request.queue_position = self._last

    def _count(self, request: Request) -> None:
        self.num_of[request.adapter] = self.num_of.get(request.adapter, 0) + 1

    def _rejoin(self, request: Request) -> None:
        for line in self._lines(request):
            _insert(line, request)

    def _lines(self, request: Request) -> Sequence[OrderedDict[Request, None]]:
        """Return the queues that a request belongs to: its adapter's and, for a first choice, their first choices."""
        groups = self.tenants.get(request.fairness_key)
        if groups is None:
            groups = self.tenants[request.fairness_key] = {}
            self._new_tenants[request.fairness_key] = None
        group = groups.get(request.adapter)
        if group is None:
            group = groups[request.adapter] = AdapterQueue(request.adapter)
            self.by_adapter.setdefault(request.adapter, {})[request.fairness_key] = None
        return (group,) if request.is_later_choice else (group, group.first_choices)

    def _leave_group(self, request: Request) -> None:
        groups = self.tenants[request.fairness_key]
        group = groups[request.adapter]
        del group[request]
        group.first_choices.pop(request, None)
        if not group:
            del groups[request.adapter]
            tenants = self.by_adapter[request.adapter]
            del tenants[request.fairness_key]
            if not tenants:
                del self.by_adapter[request.adapter]
            if not groups:
                del self.tenants[request.fairness_key]
                self._new_tenants.pop(request.fairness_key, None)


def _insert(requests: OrderedDict[Request, None], request: Request) -> None:
    """Insert a request by its position. Few earlier requests are expected."""
    before = list(itertools.takewhile(lambda other: other.queue_position < request.queue_position, requests))
    requests[request] = None
    for earlier in (request, *reversed(before)):
        requests.move_to_end(earlier, last=False)


def plan_step(
    step_id: int,
    groups: RequestsByAdapter,
    counts: Mapping[Request, int],
    buckets: DecodeBuckets,
    drafts: Mapping[Request, list[int]] = MappingProxyType({}),
) -> StepPlan:
    """Return the plan of a step in which each request of `groups` computes `counts[request]` tokens, 1 by default, and
    `drafts[request]` after them.

    Prefills, and sequences with drafts, come first. Within these and within decodes, sequences of one adapter are
    adjacent (Punica §6).
    """
    if None in groups:
        groups = {None: groups[None], **groups}  # base-model sequences come first
    prefills: list[ScheduledSequence] = []
    decodes: list[ScheduledSequence] = []
    unchanged: list[ScheduledSequence] = []  # chunks before their adapter's first token
    is_ragged = False
    for lora_index, group in enumerate(groups.values(), BASE_LORA_INDEX if None in groups else 0):
        for request in group:
            reused, sequence = request.sequence, _sequence_of(request, counts, drafts)
            if sequence is not reused:
                is_ragged = is_ragged or sequence.is_ragged
                (decodes if len(sequence.tokens) == 1 else prefills).append(sequence)
                unchanged += [sequence] * (sequence.kv_len <= sequence.lora_from)
            else:
                decodes.append(sequence)
            sequence.lora_index = lora_index
    bucket = None if is_ragged else _bucket_of(prefills, decodes, buckets)
    adapters = [adapter for adapter in groups if adapter is not None]
    if unchanged:
        adapters = _leave_to_base(unchanged, prefills, decodes, adapters)
    return StepPlan(step_id, prefills + decodes, adapters, bucket)


def _bucket_of(drafted: list[ScheduledSequence], decodes: list[ScheduledSequence], buckets: DecodeBuckets) -> int:
    """The bucket of a step without prompts; see `StepPlan.bucket`."""
    if not drafted:
        return buckets.pick(len(decodes))
    return sum([len(sequence.tokens) for sequence in drafted]) + len(decodes)


def _leave_to_base(
    unchanged: list[ScheduledSequence],
    prefills: list[ScheduledSequence],
    decodes: list[ScheduledSequence],
    adapters: list[Adapter],
) -> list[Adapter]:
    """Make sequences the base model's; return the adapters of the others, numbered anew."""
    for sequence in unchanged:
        sequence.lora_index = BASE_LORA_INDEX
    used = sorted({sequence.lora_index for sequence in prefills + decodes} - {BASE_LORA_INDEX})
    number = {before: index for index, before in enumerate(used)} | {BASE_LORA_INDEX: BASE_LORA_INDEX}
    for sequences in (prefills, decodes):
        for sequence in sequences:
            sequence.lora_index = number[sequence.lora_index]
        sequences.sort(key=attrgetter("lora_index"))
    return [adapters[before] for before in used]


@contextmanager
def as_if_finished(plan: StepPlan, find: Callable[[ScheduledSequence], Request | None]) -> Iterator[list[Request]]:
    """Change requests as if a plan that still runs had finished, until the context ends.

    Sampled tokens are `PENDING`. Yields the requests that sample one. find: returns the request of a sequence, None if
    the sequence is stale.
    """
    sampled, moved = [], []
    for sequence in plan.sequences:
        if (request := find(sequence)) is not None:
            moved.append((request, len(sequence.tokens)))
            request.num_computed_tokens += len(sequence.tokens)
            if request.block_table.states is not None:
                request.block_table.states.steps += 1
            if sequence.samples:
                sampled.append(request)
                request.token_ids += PENDING
    try:
        yield sampled
    finally:
        for request, count in moved:
            request.num_computed_tokens -= count
            if request.is_running and request.block_table.states is not None:
                request.block_table.states.steps -= 1
        for request in sampled:
            request.token_ids.pop()


def _sequence_of(
    request: Request, counts: Mapping[Request, int], drafts: Mapping[Request, list[int]]
) -> ScheduledSequence:
    """Return a request's decoding sequence, or a new one: for its first steps, and for a step with drafts."""
    sequence = request.sequence or _new_sequence(request, counts.get(request, 1))
    if proposed := drafts.get(request):
        return replace(sequence, tokens=sequence.tokens + proposed, drafts=len(proposed))
    return sequence


def _new_sequence(request: Request, count: int) -> ScheduledSequence:
    """Return a new sequence for a request. If it decodes, the request keeps it for its next steps."""
    start, token_ids, states = request.num_computed_tokens, request.token_ids, request.block_table.states
    tokens = token_ids[start : start + count]
    samples = start + count == len(token_ids) and request.params.pooling is None
    sequence = ScheduledSequence(
        request_id=request.id,
        lora_index=BASE_LORA_INDEX,
        tokens=tokens,
        start=start,
        pages=request.block_table.pages,
        params=request.params,
        seed=request.seed,
        samples=samples,
        token_ids=token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        state=request.sampler,
        states=states,
        state_step=0 if states is None else states.steps,
        lora_from=request.lora_from,
        media=request.media,
        media_rows=request.media_rows,
        blocks=request.blocks,
    )
    if count == 1 and samples:
        request.sequence = sequence
    return sequence
