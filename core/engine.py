"""The engine: builds everything from a configuration and runs the step loop.

Tests: tests/core/test_engine.py, tests/core/test_parity.py, tests/core/test_async_steps.py, tests/simulation.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..memory.adapters.adapter import Adapter
from ..memory.adapters.reclaimer import Reclaimer
from ..memory.adapters.store import AdapterStore
from ..memory.host.images import HostImages, Reads, ThreadReads
from ..memory.pages.block import Medium
from ..memory.pages.eviction import EvictionOrder, RestoreCosts
from ..memory.pages.pool import PagePool
from ..memory.pages.prefix import PrefixCache
from ..memory.pages.shadow import ShadowPages
from ..memory.transfers.swapped_kv import SwappedKv
from ..memory.transfers.transfer import ExecutorLost
from .async_steps import AsyncSteps
from .config import EngineConfig
from .cpus import reading_threads
from .engine_stats import EngineStats, stats_of
from .executors.alone import run_rows_alone
from .executors.base import Executor, ModelInfo
from .kv_events import KvEvents
from .media.serving import open_encoder
from .merging.merging import Merging
from .merging.mode_policy import ModePolicy
from .merging.modes import Modes, mode_policy
from .merging.step_samples import StepSample, StepSamples
from .policies import Policies
from .prefix_tiers import open_disk_tier, open_host_tier
from .requests.record import NotHere, from_record
from .requests.request import Request
from .requests.request_params import InvalidRequest
from .requests.types import NOT_FINITE, FinishReason, RequestOutput, StepPlan, StepResult
from .scheduling.load_ahead import LoadPolicy
from .scheduling.request_memory import RequestMemory, swaps
from .scheduling.scheduler import Scheduler
from .servable import Servable
from .served_adapters import ServedAdapters
from .speculation.answer_cache import AnswerCache
from .speculation.ngrams import NgramProposer
from .speculation.speculation import Speculation

if TYPE_CHECKING:
    from ..memory.files.error import LoadFailure
    from ..memory.host.budget import HostBudget
    from .media.encoder import ImageEncoder

logger = logging.getLogger(__name__)

IDLE_CHECK_SECONDS = 1.0
READ_WAIT_SECONDS = 0.005


class Engine:
    """Schedule → execute → update, one step at a time, on one thread.

    The executor and the clock are injected: the same policy code serves and simulates. A subclass, such as the
    simulator's, may name its own `scheduler_type`.
    """

    scheduler_type: type[Scheduler] = Scheduler

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        clock: Callable[[], float] = time.monotonic,
        reads: Reads | None = None,
        policies: Policies | None = None,
        encoder: Callable[[Callable[[], None], HostBudget], ImageEncoder] | None = None,
    ) -> None:
        """encoder: makes what encodes images, of a function that wakes the engine and of host memory's budget;
        None: they are not served.
        """
        self.config = config
        self.model: ModelInfo = executor.model
        self.executor = executor
        self.clock = clock
        layout = executor.layout
        self.block_tokens = layout.block_tokens
        """Tokens of a block, whose KV fills a page of each page group."""
        self.pages_per_token = layout.pages_per_token(config.state_checkpoint_tokens)
        self.pool = PagePool(executor.num_pages)
        order = EvictionOrder(lru=config.eviction == "lru")
        costs = self.costs = RestoreCosts()
        images = HostImages(
            config.host_bytes,
            reads or ThreadReads(reading_threads()),
            clock,
            config.adapter_read_seconds,
            lru=config.eviction == "lru",
        )
        executor.adapters.keep_within(images.budget.free_bytes)
        self.store = AdapterStore(
            self.pool,
            backend=executor.adapters,
            images=images,
            order=order,
            costs=costs,
            page_bytes=layout.page_bytes,
            clock=clock,
        )
        self.prefix = PrefixCache(
            self.pool, order, costs, self.block_tokens, layout.group_windows, has_states=layout.states is not None
        )
        self.kv_events: KvEvents | None = None
        shadow = ShadowPages(self.pool, order)
        self._servable = Servable(self.model, config, self.pool, self.store, layout)
        self.reclaimer = Reclaimer(self.pool, order, self.store, self.prefix, shadow)
        self.merging = Merging(executor.shadow, self.reclaimer, self.store, clock)
        self.store.on_leaving = self._leave
        if executor.swaps is not None:
            costs.swapped_page = executor.swaps.page_seconds
            costs.host_prefix_page = executor.swaps.page_seconds / 2
        elif config.preemption == "swap":
            raise ValueError("preemption is 'swap', which this executor can't do; set it to 'auto' or 'recompute'")
        self.swapped = SwappedKv(executor.swaps, images.budget, layout.page_bytes, costs)
        self.host = open_host_tier(self)
        self.disk = open_disk_tier(self)
        checkpoint_blocks = config.state_checkpoint_tokens // self.block_tokens if config.chunked_prefill else 0
        memory = self.memory = RequestMemory(
            pool=self.pool,
            store=self.store,
            prefix=self.prefix,
            reclaimer=self.reclaimer,
            layout=layout,
            max_chunk=config.max_num_batched_tokens,
            checkpoint_tokens=checkpoint_blocks * self.block_tokens,
            use_prefix_cache=config.prefix_cache,
            share_prefix_cache=config.share_prefix_cache,
            swapped=self.swapped,
            may_swap=lambda: swaps(config.preemption, costs),
            costs=costs,
            clock=clock,
            host=self.host,
            disk=self.disk,
        )
        self.starts = executor.cold_starts
        loads = LoadPolicy(self.store, costs, self.starts, self.pages_per_token, config.max_load_stall_seconds)
        policies = policies or Policies()
        self.answers: AnswerCache | None = None
        self.speculation: Speculation | None = None
        if config.speculates:
            if config.speculation_cache_tokens:
                self.answers = AnswerCache(config.speculation_cache_tokens)
            proposer = policies.proposer or NgramProposer(self.answers)
            self.speculation = Speculation(proposer, self.model.grammars)
        self.scheduler = self.scheduler_type(
            config, self.store, memory, loads, clock, queue=policies.queue, speculation=self.speculation
        )
        if self.answers is not None:
            self.scheduler.lifecycle.note_answer = self.answers.add
        self.adapters = ServedAdapters(
            config, executor.adapters, self.reclaimer, self.scheduler, requests=self.requests, end=self.end
        )
        self.modes = self._modes(policies.mode)
        if executor.start is not None and config.async_scheduling and not config.launches_ahead:
            logger.info("async scheduling is off: speculation needs the tokens of a step before it plans the next one")
        start = executor.start if config.launches_ahead else None
        self.async_steps = (
            None if start is None else AsyncSteps(start, executor, self._plan_ahead, self.scheduler.rollback)
        )
        self.encoder = None if encoder is None else encoder(self.wake, images.budget)
        self.samples = StepSamples()
        self._decode_seconds = 0.0  # of the last decode step; they bound the time that a merge takes between two steps
        self._next_check = 0.0

    @classmethod
    def from_config(
        cls, config: EngineConfig, reads: Reads | None = None, modules: Sequence[tuple[str, Path]] = ()
    ) -> Engine:
        """Load the model and register the adapters directory.

        reads: runs reads of adapters; default: in threads. modules: further adapters, each a name and its directory.

        Raises UnsupportedModel for a checkpoint, and the errors of `open_executor` and
        `ServedAdapters.register_directories`.
        """
        from .executors.choice import completed, open_executor

        config = completed(config)
        executor = open_executor(config)
        engine = cls(config, executor, reads=reads, encoder=_encoder_of(config, executor))
        engine.adapters.register_directories(modules)
        return engine

    def _modes(self, policy: ModePolicy | None) -> Modes | None:
        """Return the chooser of step modes; None if only `merge` and `unmerge` change the mode."""
        policy = policy or mode_policy(self.config.mode_policy, expert_share=self.model.expert_share)
        if policy is None:
            return None
        if self.executor.shadow is None:
            logger.warning("mode_policy has no effect: this device has no merged mode")
            return None
        return Modes(policy, self.merging, self.scheduler, self.config, self.clock)

    def _leave(self, adapter: Adapter, is_gone: bool) -> None:
        """Drop an adapter's shadow and, if the version is gone, its cached prefixes and answers."""
        self.merging.leave(adapter)
        if is_gone:
            self.prefix.drop_version(adapter.version)
            if self.answers is not None:
                self.answers.drop_version(adapter.version)

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises InvalidRequest, naming the field, if it can't be served as asked, and Overloaded if too many wait.
        """
        self._accept(request)
        waiting = 0 if self.encoder is None else self.encoder.num_waiting(request.fairness_key)
        self.scheduler.check_room(request.fairness_key, 1 + waiting)
        request.arrival_time = request.arrival_time or self.clock()
        self._add(request)

    def check_room(self, tenant: str, adapter_name: str | None, count: int) -> None:
        """Raise Overloaded if `count` more requests would not be queued now; from any thread."""
        self.scheduler.check_room(self._servable.fairness_key(tenant, adapter_name), count)

    def resume(self, record: Mapping[str, Any]) -> Request | NotHere:
        """Queue a request of another engine, however long the queue is; it continues after its last token.

        record: from `to_record`. The request keeps its age and pays for no token twice. If it has a token, it goes
        before requests without one. Returns NotHere, and queues nothing, unless an adapter with the same content is
        registered under any name.

        Raises InvalidRequest if the request can't be served here, and ValueError for a record of another version.
        """
        request = from_record(record, self.clock())
        if request.adapter_name is not None:
            request.adapter = self.store.find(record["content_hash"])
            if request.adapter is None:
                return NotHere(request.adapter_name, record["content_hash"])
        self._accept(request)
        self._add(request)
        return request

    def _add(self, request: Request) -> None:
        """Queue an accepted request: one with images once they are encoded."""
        if not request.media:
            self.scheduler.add(request)
            return
        assert self.encoder is not None, "the request was accepted"
        if request.adapter is not None:
            self.store.hold(request.adapter)
        self.encoder.submit(request)

    def _add_encoded(self) -> None:
        """Queue the requests whose images have been encoded; end those whose images can't be."""
        for request, error, failure, _ in () if self.encoder is None else self.encoder.take():
            if error is None:
                self.scheduler.add(request)
                self._leave_encoder(request)
            else:
                self._end_before_steps(request, error, failure)

    def _leave_encoder(self, request: Request) -> None:
        if request.adapter is not None:
            self.store.let_go(request.adapter)

    def _end_before_steps(self, request: Request, error: str, failure: LoadFailure | None) -> None:
        """End a request with an error that the encoder no longer has, and that has not been queued."""
        ended = RequestOutput(request.id, (), FinishReason.ERROR, error=error, failure=failure)
        self.scheduler.lifecycle.ended_outside_steps.append(ended)
        self._leave_encoder(request)

    def requests(self) -> list[Request]:
        """All requests in progress: those in the queues, and those that wait for their images."""
        waiting = () if self.encoder is None else self.encoder.pending()
        return [*self.scheduler.lifecycle.requests.values(), *waiting]

    def end(self, request: Request, error: str, failure: LoadFailure | None) -> None:
        """End a request in progress with an error, which `pop_ended` or the next step returns."""
        if self.encoder is not None and self.encoder.cancel(request.id) is not None:
            self._end_before_steps(request, error, failure)
        else:
            self.scheduler.lifecycle.end(request, error, failure)

    def abort(self, request_id: str) -> bool:
        """End a request and free its pages; it has no further output. False if it is unknown or done."""
        if self.encoder is not None and (request := self.encoder.cancel(request_id)) is not None:
            self._leave_encoder(request)
            return True
        return self.scheduler.abort(request_id)

    def reset_prefix_cache(
        self, *, reset_running_requests: bool = False, tiers: Collection[Medium] = tuple(Medium)
    ) -> int:
        """Forget the cached prefixes in some tiers; return how many blocks were forgotten.

        Running requests keep their KV, which no other request will use if the page pool and host memory are cleared.
        Files are removed in the background, and not counted. reset_running_requests: preempt running requests, too.
        """
        if Medium.DISK in tiers and self.disk is not None:
            self.disk.writer.clear()
        if reset_running_requests:
            self.scheduler.reset_running()
        if not {Medium.POOL, Medium.HOST} <= {*tiers}:
            return self.prefix.clear(frozenset(tiers))
        count = self.prefix.drop_all()
        self.scheduler.stop_caching()
        return count

    def reset_image_rows(self) -> int:
        """Forget the rows of images that no request holds; return of how many images."""
        return 0 if self.encoder is None else self.encoder.cache.clear()

    def has_work(self) -> bool:
        return self.scheduler.has_work() or self.is_encoding

    @property
    def is_encoding(self) -> bool:
        """True while a request waits for its images."""
        return self.encoder is not None and self.encoder.has_work()

    def pop_ended(self) -> list[RequestOutput]:
        """Return the outputs of requests that ended outside of a step, once. For a driver that pauses its steps."""
        return self.scheduler.pop_failed()

    def wake(self) -> None:
        """Interrupt a step that only waits for reads; from any thread."""
        self.store.images.reads.wake()

    def step(self) -> list[RequestOutput]:
        """Run one step and return the new outputs. A failing request gets an error output; the others continue.

        If nothing can run until an adapter has been read, it sleeps for a moment, or until `wake`. Raises ExecutorLost
        if no step can run any more.
        """
        return self.end_step(self.begin_step())

    def begin_step(self) -> StepPlan | None:
        """Plan the next step without running it, for a driver in virtual time; or return the one that still runs."""
        if self.async_steps is not None and self.async_steps.plan is not None:
            return self.async_steps.plan
        merging = self.merging
        self._add_encoded()
        if self.modes is not None:
            self.modes.decide()
        if merging.is_under_way:
            merging.advance(self._decode_seconds)
        plan = self.scheduler.schedule()
        if plan is not None:
            plan.merged = merging.merged
            if plan.bucket is None and self.modes is not None:
                plan.merged = self.modes.of_prefill(plan)
        return plan

    def end_step(self, plan: StepPlan | None) -> list[RequestOutput]:
        """Run the plan of `begin_step`; between the two calls the engine must not be used."""
        if plan is None:
            return self._wait()
        sample = self._sample_of(plan)
        start = self.clock()
        self.scheduler.note_begin(plan, start)
        result = self._execute(plan)
        seconds = self.clock() - start
        if result is not None and result.errors:
            self._note_overflows(plan, result)
        outputs = self.scheduler.pop_failed()
        if result is None:
            return outputs
        if self.speculation is not None:
            self.speculation.note_step(plan, seconds)
        if plan.bucket is None:
            self._measure_prefill(plan, sample, seconds)
        elif not plan.num_drafts:
            self._decode_seconds = seconds
            if sample is not None:
                sample.seconds, self.samples.decode = seconds, sample
            if self.modes is not None and not result.unready:
                self.modes.note(plan, seconds)
        return outputs + self.scheduler.update(plan, result)

    def _wait(self) -> list[RequestOutput]:
        """Sleep for a moment unless there are outputs already: nothing can run."""
        self.scheduler.note_pause()
        outputs = self.scheduler.pop_failed()
        if not outputs and self.has_work() and not self.swapped.wait(READ_WAIT_SECONDS):
            self.store.images.wait(READ_WAIT_SECONDS, () if self.disk is None else self.disk.reads)
        return outputs

    def _note_overflows(self, plan: StepPlan, result: StepResult) -> None:
        """Count requests with non-finite logits by adapter, unless another adapter was merged into the weights.

        The step before has already counted a request that has ended since this step was launched.
        """
        for request_id, error in result.errors.items():
            tells = error == NOT_FINITE and request_id in self.scheduler
            adapter = self.scheduler.get(request_id).adapter if tells else None
            if adapter is not None and adapter.num_overflows is not None and plan.merged in (None, adapter):
                adapter.num_overflows += 1

    def _sample_of(self, plan: StepPlan) -> StepSample | None:
        """The sample of a step that is about to run; None if none of its kind is needed."""
        if plan.bucket is None:
            is_needed = self.samples.prefill is None and self._is_prefill(plan)
            return StepSample.of(plan) if is_needed else None
        return StepSample.of(plan) if self.samples.decode is None and not plan.num_drafts else None

    def _is_prefill(self, plan: StepPlan) -> bool:
        """True of a step with a block of tokens per sequence or more."""
        return plan.num_tokens - plan.num_drafts >= self.block_tokens * len(plan.sequences)

    def _measure_prefill(self, plan: StepPlan, sample: StepSample | None, seconds: float) -> None:
        """Update the estimated cost of recomputing a cached page from the time of a prefill step."""
        if self._is_prefill(plan):
            if sample is not None:
                sample.seconds, self.samples.prefill = seconds, sample
            self.costs.observe("prefix_page", seconds / plan.num_tokens / self.pages_per_token)

    def check_when_idle(self) -> None:
        """Run `check_integrity` when idle, at most once a second, and have prefixes written that are about to leave.

        A driver calls it after it has delivered the outputs: a failed check then loses no output.
        """
        if not self.scheduler.has_work() and (now := self.clock()) >= self._next_check:
            self._next_check = now + IDLE_CHECK_SECONDS
            if self.disk is not None:
                self.disk.write_paths()
            self.check_integrity()

    def check_integrity(self) -> None:
        """Raise IntegrityError if the accounting of pages or of host memory is violated.

        The page pool must agree with the pages of requests and adapters, and host memory with the KV of waiting
        requests.
        """
        holders = self.scheduler, self.store, self.reclaimer.shadow, self.swapped
        self.pool.check_integrity(itertools.chain.from_iterable(holder.holders() for holder in holders))
        requests = self.scheduler.lifecycle.requests.values()
        self.swapped.check_integrity(each.kv_image for each in requests if each.kv_image is not None)
        if self.host is not None:
            self.host.check_integrity()

    def stats(self) -> EngineStats:
        return stats_of(self)

    def merge(self, name: str) -> None:
        """Merge an adapter into shadow weights, a part between any two steps, and use them once they are complete.

        The adapter's sequences then have no LoRA work; the sequences of other adapters and of the base model add the
        difference. It lasts until `unmerge`, or until its memory is needed.

        Raises UnknownAdapter, or CannotMerge if the adapter is not resident, outweighs the weights, or has no room.
        """
        self.merging.merge(self.store.get(name))

    def unmerge(self) -> None:
        """Compute steps with the model's own weights again."""
        self.merging.unmerge()

    def record_kv_events(self) -> KvEvents:
        """Record the blocks that enter and leave the prefix cache from now on. The cache must be empty."""
        keys = None if self.disk is None else self.disk.keys
        events = self.kv_events = self.prefix.listener = KvEvents(self.store, keys=keys)
        if self.disk is not None:
            self.disk.tell(events)
        return events

    def close(self) -> None:
        """Write cached prefixes to files, if there are to be any, and let go of everything."""
        if self.disk is not None and self.host is not None:
            self.disk.close(self.host.copy_of)
        if self.encoder is not None:
            self.encoder.close()
        self.store.close()
        self.executor.close()

    def _accept(self, request: Request) -> None:
        """Raise InvalidRequest unless a request can be served; bind it to its adapter, tenant and ends."""
        if self.encoder is not None and request.id in self.encoder:
            raise InvalidRequest("request_id", f"request id {request.id!r} is in use; choose another")
        self.scheduler.check_new(request.id)
        self._servable.accept(request, self.adapters.find)

    def _plan_ahead(self, plan: StepPlan) -> StepPlan | None:
        """Return the plan after one that still runs; None if it may depend on its tokens."""
        if self.modes is not None or self.merging.is_under_way:
            return None
        following = self.scheduler.plan_ahead(plan)
        if following is not None:
            following.merged = self.merging.merged
        return following

    def _execute(self, plan: StepPlan) -> StepResult | None:
        """Execute a plan; if that raises, run its sequences one by one. None: see `AsyncSteps.run`.

        Raises ExecutorLost.
        """
        try:
            return self.executor.execute(plan) if self.async_steps is None else self.async_steps.run(plan)
        except ExecutorLost:
            raise
        except Exception:
            logger.exception("step %d failed; running its %d requests alone", plan.step_id, len(plan.sequences))
        return run_rows_alone(self.executor, plan)


def _encoder_of(
    config: EngineConfig, executor: Executor
) -> Callable[[Callable[[], None], HostBudget], ImageEncoder] | None:
    """What makes the encoder of images; None where they are not served."""
    from .executors.base import ModelExecutor

    shapes = getattr(executor, "shapes", executor)  # of several ranks: images are encoded in the first one's process
    if executor.model.why_blind is not None or not isinstance(shapes, ModelExecutor):
        return None
    whole, dtype, device = shapes.whole, shapes.dtype, shapes.torch_device
    return lambda wake, budget: open_encoder(config, whole, dtype, wake, budget, device)
