"""The thread that owns the engine, and the queue by which other threads reach it."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ...core.requests.record import NotHere
from ...core.requests.types import FinishReason, RequestOutput
from ...core.sleep import Sleep
from ...memory.pages.block import Medium
from ...memory.pages.pool import IntegrityError
from ...memory.transfers.transfer import ExecutorLost
from ..errors import EngineUnavailable
from .backend import SHUTTING_DOWN, OnOutput, Settle, in_place
from .engine_adapters import EngineAdapters
from .engine_view import EngineView, Picture
from .inbox import Inbox
from .subscribers import Subscribers

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from ...core.engine import Engine
    from ...core.engine_stats import EngineStats
    from ...core.executors.base import ModelInfo
    from ...core.kv_events import KvEvents
    from ...core.requests.request import Request
    from ...memory.files.manifest import AdapterManifest
    from ...memory.host.image import HostImage

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_FAILED_STEPS = 5
"""Steps that may fail one after another before the engine counts as broken."""


class WorkerState(Enum):
    """What the engine's thread is doing."""

    STARTING = auto()
    """It builds the engine."""
    RUNNING = auto()
    """It steps whenever there is work."""
    FROZEN = auto()
    """It begins no step; requests keep their resources and new ones wait."""
    BROKEN = auto()
    """It begins no step and refuses everything, as `failure` says, until it is stopped."""
    STOPPING = auto()
    """It ends after the current turn."""
    ENDED = auto()
    """It has ended."""


class EngineWorker:
    """Runs an engine on its own thread. All methods may be called from any thread.

    A step that raises ends the requests in progress with an error, and the worker continues. The worker becomes
    unhealthy for good, with the reason in `failure`, if the engine can't be cleared after such a step, if
    `MAX_FAILED_STEPS` steps in a row fail, if the device is lost, or if an accounting invariant is violated.

    `Watchdog` detects a hanging engine from outside: `progress` no longer changes. It then calls `cancel_all`.
    """

    collector: Collector | None = None
    shared: Path | None = None

    def __init__(self, build: Callable[[], Engine]) -> None:
        """`build` makes the engine. Only the worker's thread touches the engine, and it also calls `build`; the
        exceptions are `check_adapter` and `check_weights`.
        """
        self._build = build
        self.adapters = EngineAdapters(self.call, self._tell_ended, get=lambda name: self._engine.store.latest(name))
        self.progress: int | None = None
        """Changes with every step and while adapters are being read; None while the engine is idle."""
        self.stalled: str | None = None
        """Why the engine does not respond at the moment; the watchdog sets and clears it."""
        self._marks = itertools.count()
        self._steps = 0  # at the end of the latest turn
        self._wake = threading.Condition()
        self._inbox = Inbox()
        self._state = WorkerState.STARTING
        self._subscribers = Subscribers()
        self._cancelled: deque[str] = deque()  # requests to abort once the engine responds
        self._failed_steps = 0
        self._slept: Sleep | None = None
        self._thread = threading.Thread(target=self._run, name="chorus-engine", daemon=True)
        self._started: Future[None] = Future()
        self._lost: ExecutorLost | None = None  # raised in an action; ends the thread
        self.failure: str | None = None
        """Why the engine accepts no more requests; None while it does."""
        self.model: ModelInfo
        """The model that the engine serves; set once started."""
        self.stats: EngineStats
        """The engine's state after its latest step; set once started."""

    # --- any thread ---

    @property
    def healthy(self) -> bool:
        return self.failure is None and self.stalled is None and self._thread.is_alive()

    @property
    def trouble(self) -> str | None:
        """Why it is not healthy."""
        return self.failure or self.stalled

    def start(self) -> None:
        """Builds the engine and begins to step. Returns when it is ready; raises the error of `build`."""
        atexit.register(self.stop)  # C++ calls abort() if the interpreter is torn down during a step
        self._thread.start()
        self._started.result()

    def take_loop(self) -> asyncio.AbstractEventLoop:
        """A new event loop: the engine needs none."""
        return asyncio.new_event_loop()

    def stop(self, timeout: float | None = 10.0) -> None:
        """Ends the requests in progress, closes the engine and waits for the thread, at most `timeout` seconds."""
        with self._wake:
            if self._state is not WorkerState.ENDED:
                self._state = WorkerState.STOPPING
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout)
        if not self._thread.is_alive():
            atexit.unregister(self.stop)
            return
        log.warning("the engine did not end within %s s", timeout)
        self.cancel_all(SHUTTING_DOWN)

    def cancel_all(self, reason: str) -> int:
        """End all requests in progress and all waiting calls of an engine that does not respond; return their number.

        Once the engine responds again, it aborts the requests.
        """
        with self._wake:
            calls = self._inbox.take_all()
        ended, _ = self._subscribers.end_all(FinishReason.ABORT, reason)
        self._cancelled.extend(ended)
        for call in calls:
            call(reason)
        return len(ended) + len(calls)

    def submit(
        self, request: Request, on_output: OnOutput, loop: asyncio.AbstractEventLoop | None = None
    ) -> Future[None]:
        """Gives a request to the engine. The future completes when the engine accepts it, or with its InvalidRequest.

        `on_output` is then called with every output: on `loop`, or on the worker's thread if `loop` is None. All
        outputs of a step reach a loop in one call.
        """
        return self._enqueue(partial(self._submit, request, on_output, loop), of=request)

    def resume(
        self, record: Mapping[str, Any], on_output: OnOutput, loop: asyncio.AbstractEventLoop | None = None
    ) -> Future[NotHere | None]:
        """Gives the engine a request that another process exported, like `submit`. NotHere: see `Engine.resume`."""
        return self._enqueue(partial(self._resume, record, on_output, loop))

    def check_room(self, tenant: str, adapter_name: str | None, count: int) -> None:
        """Raises Overloaded if `count` more requests would not be accepted now."""
        self._engine.check_room(tenant, adapter_name, count)

    def abort(self, request_id: str) -> Future[bool]:
        """Ends a request; only the current step may still include it. The future's result: whether it was running.

        An abort is never refused. An engine that hangs aborts the request once it responds; one that ended runs none.
        """
        return self._enqueue(partial(self._abort, request_id), unless_running=False)

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Runs `function(engine)` between two steps; the future holds its result, and `stats` shows its effect."""
        return self._enqueue(partial(self._act, lambda: function(self._engine)))

    def record_kv_events(self) -> Future[tuple[KvEvents, int]]:
        return self.call(lambda engine: (engine.record_kv_events(), engine.block_tokens))

    def freeze(self, *, frozen: bool) -> Future[None]:
        """Stop stepping, or continue. While stopped, requests in progress keep their resources, and new ones wait."""
        return self._enqueue(partial(self._freeze, frozen))

    def sleep(self) -> Future[None]:
        return self._enqueue(partial(self._act, self._sleep))

    def wake(self) -> Future[None]:
        return self._enqueue(partial(self._act, self._wake_up))

    def reset_prefix_cache(
        self, *, reset_running_requests: bool, tiers: Collection[Medium] = tuple(Medium)
    ) -> Future[int]:
        return self.call(
            lambda engine: engine.reset_prefix_cache(reset_running_requests=reset_running_requests, tiers=tiers)
        )

    def reset_image_rows(self) -> Future[int]:
        return self.call(lambda engine: engine.reset_image_rows())

    def view(self) -> Future[EngineView]:
        return self.call(EngineView.of)

    def picture(self) -> Future[Picture]:
        return self.call(Picture.of)

    def check_adapter(
        self,
        path: Path,
        roots: Sequence[Path] = (),
        image: HostImage | None = None,
        settle: Settle = in_place,
        *,
        everywhere: bool = False,
        max_bytes: int | None = None,
    ) -> AdapterManifest:
        """Reads and checks an adapter on the caller's thread, while steps go on. Raises AdapterFormatError.

        roots: directories that must contain its files; empty: any. image: receives the weights, for `register`. settle:
        see `Backend.check_adapter`.
        """
        if self.failure is not None:
            raise EngineUnavailable(self.failure)
        return settle(self._engine.adapters.check(path, roots, image, max_bytes=max_bytes))

    def check_weights(self, manifest: AdapterManifest) -> AdapterManifest:
        """Reads and checks the weights of an adapter with a checked header; otherwise like `check_adapter`."""
        if self.failure is not None:
            raise EngineUnavailable(self.failure)
        return self._engine.adapters.check_weights(manifest)

    def _enqueue(
        self, action: Callable[[], T], unless_running: T | None = None, of: Request | None = None
    ) -> Future[T]:
        """Run an action on the engine's thread.

        unless_running: the result if the engine has ended, instead of an EngineUnavailable. With it, the action also
        waits for an engine that hangs. of: the request that it submits.
        """
        future: Future[T] = Future()
        settling = [future]

        def run(refusal: str | None = None) -> None:
            error = _settle(settling, action, refusal or self.failure, unless_running)
            if isinstance(error, ExecutorLost):
                self._lost = error

        with self._wake:
            stalled = self.stalled if unless_running is None else None
            trouble = self.failure or stalled or (SHUTTING_DOWN if self._state is WorkerState.STOPPING else None)
            if trouble is None:
                if of is None:
                    self._inbox.put(run)
                else:
                    self._inbox.put_request(of.id, of.tenant, run)
                self._wake.notify()
                self._engine.wake()
                return future
        run(trouble)
        return future

    # --- the worker's thread ---

    def _run(self) -> None:
        try:
            self._engine = self._build()
            self.model = self._engine.model
            self.stats = self._engine.stats()
        except BaseException as error:
            self.failure = f"the engine could not be built: {error}"
            self._state = WorkerState.ENDED
            self._started.set_exception(error)
            return
        self._engine.executor.watch(self._executor_lost)
        with self._wake:
            if self._state is WorkerState.STARTING:  # else it was stopped meanwhile
                self._state = WorkerState.RUNNING
        self._started.set_result(None)
        ending = FinishReason.ERROR
        try:
            while self._turn():
                pass
            ending = FinishReason.ABORT
        except IntegrityError as error:
            log.critical("accounting invariant violated, so the engine stops: %s", error)
            self.failure = "accounting invariant violated; the server ends and has to be started again"
        except ExecutorLost as error:
            log.critical("the engine stops", exc_info=True)
            self.failure = f"{error}; the server ends and has to be started again"
        except Exception:
            log.exception("the engine's thread ended")
            self.failure = "the engine broke down"
        with self._wake:
            self._state = WorkerState.ENDED
            rest = self._inbox.take_all()
        self.failure = self.failure or SHUTTING_DOWN
        for run in rest:
            run()
        self._subscribers.end_all(ending, self.failure)
        self.progress = None
        try:
            self._engine.close()
        except Exception:
            log.exception("closing the engine failed")

    def _executor_lost(self, error: ExecutorLost) -> None:
        """End the worker's thread, even if it is idle. Called from any thread."""

        def fail() -> None:
            raise error

        self._enqueue(fail)

    def _turn(self) -> bool:
        """Waits for work and does it; False once the worker must end."""
        with self._wake:
            while not (self._inbox or self._state is WorkerState.STOPPING or self._has_work()):
                self._wake.wait()
            if self._state is WorkerState.STOPPING:
                return False
            actions = self._inbox.take()
        if self.progress is None:
            self.progress = next(self._marks)
        for action in actions:
            action()
        if self._lost is not None:  # by an action, whose caller has the error, too
            raise self._lost
        if self._has_work():
            self._step()
        elif actions:
            self.stats = self._engine.stats()
        if self._cancelled:
            self._abort_cancelled()
        self._note_progress()
        return True

    def _note_progress(self) -> None:
        """Show the watchdog that steps or reads make progress; None when idle."""
        if self._has_work():
            if self.stats.num_steps != self._steps or self.stats.num_reads or self.stats.num_waiting_for_images:
                self.progress = next(self._marks)
        else:
            if self.failure is None:
                self._engine.check_when_idle()
            self.progress = None
        self._steps = self.stats.num_steps

    def _abort_cancelled(self) -> None:
        """Abort, in the engine, the requests that were cancelled while it hung."""
        cancelled = self._cancelled
        log.warning("the engine responds again; aborting %d requests that were ended meanwhile", len(cancelled))
        while cancelled:
            self._engine.abort(cancelled.popleft())
        self.stats = self._engine.stats()

    def _has_work(self) -> bool:
        return self.failure is None and self._state is WorkerState.RUNNING and self._engine.has_work()

    def _act(self, function: Callable[[], T]) -> T:
        result = function()
        self.stats = self._engine.stats()  # before the caller is answered, who may look
        return result

    def _freeze(self, frozen: bool) -> None:
        with self._wake:
            if self._state in (WorkerState.RUNNING, WorkerState.FROZEN):
                self._state = WorkerState.FROZEN if frozen else WorkerState.RUNNING

    def _sleep(self) -> None:
        if self._slept is None:
            was_frozen = self._state is WorkerState.FROZEN
            self._freeze(True)
            try:
                self._slept = Sleep(self._engine)
            except BaseException:
                self._freeze(was_frozen)
                raise

    def _wake_up(self) -> None:
        if self._slept is not None:
            self._slept.wake()
            self._slept = None

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except ExecutorLost:
            raise
        except Exception as error:
            log.exception("a step failed; ending the requests in progress")
            self._recover(error)
        else:
            self._failed_steps = 0
            self.stats = self._engine.stats()
            self._deliver(outputs)

    def _recover(self, error: Exception) -> None:
        self._failed_steps += 1
        reason = f"the engine failed while this request was running: {type(error).__name__}"
        try:
            for request_id in self._subscribers.ids():
                self._engine.abort(request_id)
            stuck = self._engine.has_work()
        except ExecutorLost:
            raise
        except Exception:
            log.exception("the engine could not be cleared after a failed step")
            stuck = True
        if stuck or self._failed_steps >= MAX_FAILED_STEPS:
            self.failure = "the engine broke down and has to be restarted"
            with self._wake:
                if self._state is not WorkerState.STOPPING:
                    self._state = WorkerState.BROKEN
            log.critical(self.failure)
        else:
            self.stats = self._engine.stats()
        self._subscribers.end_all(FinishReason.ERROR, reason)

    def _submit(self, request: Request, on_output: OnOutput, loop: asyncio.AbstractEventLoop | None) -> None:
        if request.id in self._subscribers:
            raise ValueError(f"there is a request {request.id} already")
        self._engine.add_request(request)
        self._subscribers.add(request.id, on_output, loop)

    def _resume(
        self, record: Mapping[str, Any], on_output: OnOutput, loop: asyncio.AbstractEventLoop | None
    ) -> NotHere | None:
        request = self._engine.resume(record)
        if isinstance(request, NotHere):
            return request
        self._subscribers.add(request.id, on_output, loop)
        return None

    def _abort(self, request_id: str) -> bool:
        with self._wake:
            waiting = self._inbox.take_request(request_id)
        if waiting is not None:
            waiting("the request was aborted")
            return True
        self._subscribers.discard(request_id)
        return self._engine.abort(request_id)

    def _tell_ended(self, engine: Engine) -> None:
        """While frozen, deliver the outputs of requests that ended outside a step; otherwise the next step does."""
        if self._state is WorkerState.FROZEN:
            self._deliver(engine.pop_ended())

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        for request_id in self._subscribers.deliver(outputs):
            self._abort(request_id)


def _settle(
    settling: list[Future[T]], action: Callable[[], T], refusal: str | None, unless_running: T | None
) -> Exception | None:
    """Run an action for the one future of a list, and take that out; return the action's error.

    A future whose error has a frame that refers to it would be a cycle.
    """
    if not settling[0].set_running_or_notify_cancel():
        return None
    try:
        if refusal is None:
            result = action()
        elif unless_running is not None:
            result = unless_running
        else:
            raise EngineUnavailable(refusal)
        settling.pop().set_result(result)
    except Exception as error:
        settling.pop().set_exception(error)
        return error
    return None
