"""A replica: an engine's worker that any number of API servers share through a socket.

It knows adapters by content hash, under which they are registered here. Everything that an API server has sent ends
with its connection. A peer that breaks the protocol loses its connection; nothing else is affected.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.engine_stats import adapter_names_of, tenants_of
from ...core.requests.grammar import Grammar
from ...core.requests.record import NotHere
from ...core.requests.request_params import InvalidRequest
from ...core.requests.types import FinishReason, RequestOutput, StepInfo
from ...memory.adapters.adapter import Tier
from ...memory.adapters.adapter_costs import AdapterCosts, merged
from ...memory.files.error import AdapterFormatError, LoadFailure
from ...memory.files.identity import open_unchanged
from ...memory.host.image import HostImage
from ...memory.pages.pool import OutOfPages
from ..engine.engine_adapters import MOST_OVERFLOWS
from ..errors import EngineUnavailable
from ..executors import DaemonPool, PoolFull
from ..rare_log import RareLog
from .commands import FREEZE, RESET_ROWS, SLEEP, WAKE, failure_of, tiers_of
from .report import Hello, LearnedCosts, Report
from .rows import to_row
from .stream import FrameStream, accept
from .wire import Frame, Malformed, WireError

if TYPE_CHECKING:
    from ...core.engine import Engine
    from ...memory.files.manifest import AdapterManifest
    from ..engine.worker import EngineWorker

log = logging.getLogger(__name__)

TO_REPLICA = ("submit", "abort", "load", "pin", "prefetch", "forget", "drain", "control")
FROM_REPLICA = ("hello", "taken", "refused", "out", "loaded", "pinned", "stats", "controlled")

REPORT_SECONDS = 0.1
"""Seconds between two reports of a busy replica."""

IDLE_REPORTS = 10
"""Reports that an idle replica skips before it sends one again."""

MOST_SPENT = 1 << 10
"""Adapters whose costs a report names, those with the most loads; the others' are added up."""

PIN_SECONDS = 0.05
"""Seconds between two checks of whether an adapter to be pinned has been read."""

LOAD_THREADS = 2
MAX_LOADS = 1 << 16

MALFORMED = "malformed"
NOT_HERE = "not_here"
DRAINING = "draining"
BROKEN = "broken"
"""Reasons of a refusal, in addition to the names of wrong fields."""


class WrongContent(AdapterFormatError):
    """The directory does not hold the adapter with the content hash that was given."""

    failure = LoadFailure.CHANGED


class Replica:
    """Serves API servers. worker: a started one. hello: the first frame, which describes the replica. roots:
    directories that must contain the adapters.
    """

    def __init__(self, worker: EngineWorker, hello: Hello, secret: bytes, roots: Sequence[Path]) -> None:
        self.worker = worker
        self.draining = False
        self._secret = secret
        self._refusals, self._troubles = RareLog(log), RareLog(log)
        self._roots = tuple(roots)
        self._hello = hello.to_wire()
        self._api_servers: set[_ApiServer] = set()
        self._loads = DaemonPool("replica-loads", threads=LOAD_THREADS, max_waiting=MAX_LOADS)
        self._compiler = DaemonPool("replica-grammars", threads=1, max_waiting=MAX_LOADS)
        self._loading: dict[str, asyncio.Future[None]] = {}
        self._loaded: set[str] = set()
        self._pinned: set[str] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one API server's connection until it closes; the handler for an address's `listen`."""
        with suppress(asyncio.CancelledError):  # at the process's end; asyncio would log it as an error
            await self._serve(reader, writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            stream = await accept(reader, writer, self._secret, TO_REPLICA)
        except (WireError, OSError) as error:
            self._refusals.warning("a connection was refused: %s: %s", type(error).__name__, error)
            return
        api_server = _ApiServer(self, stream)
        self._api_servers.add(api_server)
        try:
            stream.send("hello", self._hello)
            await api_server.run()
        except (WireError, OSError) as error:
            log.warning("closing an API server's connection: %s: %s", type(error).__name__, error)
            stream.close(f"{type(error).__name__}: {error}")
        finally:
            self._api_servers.discard(api_server)
            api_server.end()

    async def report(self) -> None:
        """Report this replica's state to the API servers periodically."""
        count, told, seen, costs = 0, 0, None, LearnedCosts(self.worker.model.expert_share)
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            count += 1
            stats = self.worker.stats
            if (stats, self.draining) == seen and count % IDLE_REPORTS:
                continue
            seen = stats, self.draining
            try:
                about = await asyncio.wrap_future(self.worker.call(partial(_about, costs)))
                stats = self.worker.stats  # as the call has found them: an idle engine takes no steps that do
                seen = stats, self.draining
                spent: AdapterCosts = about.pop("spent")
                if count - told >= IDLE_REPORTS:
                    about["spent"], told = merged(spent.so_far(), MOST_SPENT), count
            except EngineUnavailable:
                return
            except Exception:  # an error of this process itself: the API servers must not lose sight of it for good
                self._troubles.warning("a report failed; the next one follows: %s", traceback.format_exc())
                continue
            for api_server in list(self._api_servers):
                api_server.send("stats", Report(stats, api_server.num_open, self.draining, **about).to_wire())

    def drain(self) -> None:
        """Take no more requests; the API servers move the running requests."""
        self.draining = True

    @property
    def is_empty(self) -> bool:
        return not any(api_server.num_open for api_server in self._api_servers)

    async def load(self, content_hash: str, path: Path) -> None:
        """Register the adapter with this content hash from a path. Errors: AdapterFormatError, PoolFull."""
        if content_hash not in self._loaded:
            loading = self._loading.get(content_hash)
            if loading is None:
                loading = self._loading[content_hash] = asyncio.ensure_future(self._load(content_hash, path))
                loading.add_done_callback(lambda _: self._loading.pop(content_hash, None))
            await asyncio.shield(loading)

    async def _load(self, content_hash: str, path: Path) -> None:
        manifest, image = await self._loads.run(partial(self._read, content_hash, path))
        await asyncio.wrap_future(self.worker.adapters.put(content_hash, manifest, image, replace=True))
        self._loaded.add(content_hash)

    def _read(self, content_hash: str, path: Path) -> tuple[AdapterManifest, HostImage]:
        image = HostImage()
        manifest = self.worker.check_adapter(path, self._roots, image)
        if manifest.content_hash != content_hash:
            raise WrongContent(f"{path}: now holds another adapter; register it again")
        with open_unchanged(manifest):
            return manifest, image

    async def pin(self, content_hash: str) -> None:
        """Keep a registered adapter resident until `unpin`. Raises AdapterFormatError; InvalidRequest without room."""
        self._pinned.add(content_hash)
        adapters = self.worker.adapters
        while content_hash in self._pinned and not await asyncio.wrap_future(adapters.pin(content_hash)):
            await asyncio.sleep(PIN_SECONDS)

    def unpin(self, content_hash: str) -> None:
        self._pinned.discard(content_hash)
        if content_hash in self._loaded:
            self.worker.adapters.unpin(content_hash)

    def control(self, kind: str, argument: bool) -> Future[Any]:
        """Carry out a command of `Control`."""
        worker = self.worker
        if kind == FREEZE:
            return worker.freeze(frozen=argument)
        if kind in (SLEEP, WAKE):
            return worker.sleep() if kind == SLEEP else worker.wake()
        if kind == RESET_ROWS:
            return worker.reset_image_rows()
        return worker.reset_prefix_cache(reset_running_requests=argument, tiers=tiers_of(kind))

    def compile(self, grammar: Mapping[str, Any]) -> Future[None]:
        """Compile a request's grammar while steps go on, before the engine needs it; the compiler reports faults."""
        return self._compiler.submit(self._compile, grammar)

    def _compile(self, grammar: Mapping[str, Any]) -> None:
        grammars = self.worker.model.grammars
        if grammars is not None:
            grammars.compile(Grammar(**grammar))

    def forget(self, content_hash: str) -> None:
        """Unregister an adapter that no API server has a request for; requests that hold it finish with it."""
        if content_hash in self._loaded:
            self._loaded.discard(content_hash)
            self._pinned.discard(content_hash)
            self.worker.adapters.remove(content_hash, force=False)


class _ApiServer:
    """One API server's connection, and the requests that it has sent."""

    def __init__(self, replica: Replica, stream: FrameStream) -> None:
        self._replica = replica
        self._worker = replica.worker
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        self._open: dict[str, int] = {}  # attempts
        self._rows: list[list[Any]] = []
        self._step: StepInfo | None = None
        self._handlers: dict[str, Callable[..., None]] = {
            "submit": self._submit,
            "abort": self._abort,
            "load": self._load,
            "forget": self._forget,
            "pin": self._pin,
            "prefetch": self._prefetch,
            "drain": replica.drain,
            "control": self._control,
        }
        self._has_stopped = False

    @property
    def num_open(self) -> int:
        return len(self._open)

    async def run(self) -> None:
        """Execute the API server's frames until it closes the connection."""
        while (frame := await self._stream.read()) is not None:
            self._obey(frame)

    def send(self, kind: str, *fields: Any) -> None:
        try:
            self._stream.send(kind, *fields)
        except WireError as error:
            self._stream.close(str(error))

    def end(self) -> None:
        """Abort the API server's requests, and start an engine that it has stopped."""
        for request_id in self._open:
            self._worker.abort(request_id)
        self._open.clear()
        if self._has_stopped:  # nobody else would start the engine again
            self._replica.control(WAKE, True)
            self._replica.control(FREEZE, False)
        self._stream.close()

    def _obey(self, frame: Frame) -> None:
        try:
            self._handlers[frame.kind](*frame.fields)
        except (TypeError, ValueError, KeyError) as error:
            raise Malformed(f"a frame {frame.kind} can't be read: {error!r}") from None

    def _submit(self, record: Mapping[str, Any], attempt: int) -> None:
        request_id = record["id"]
        _check_text(request_id)
        if not isinstance(attempt, int):
            raise TypeError("an attempt must be an integer")
        if request_id in self._open:
            raise ValueError(f"request {request_id} is open here")
        _check_tokens(record["tokens"])
        if self._replica.draining:
            self.send("refused", request_id, attempt, DRAINING, "the replica is about to end")
            return
        self._open[request_id] = attempt
        params = record.get("params")
        if isinstance(params, Mapping) and isinstance(params.get("grammar"), Mapping):
            compiled = self._replica.compile(params["grammar"])
            compiled.add_done_callback(lambda _: self._call_soon(self._resume, record, request_id, attempt))
        else:
            self._resume(record, request_id, attempt)

    def _resume(self, record: Mapping[str, Any], request_id: str, attempt: int) -> None:
        if self._open.get(request_id) != attempt:  # aborted while its grammar was compiled
            return
        future = self._worker.resume(record, partial(self._put, attempt), self._loop)
        future.add_done_callback(partial(self._call_soon, self._answer, request_id, attempt))

    def _call_soon(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop has ended, and the process with it
            log.debug("an output came after the end")

    def _answer(self, request_id: str, attempt: int, future: Future[NotHere | None]) -> None:
        error = future.exception()
        if error is None and future.result() is None:
            self.send("taken", request_id, attempt)
            return
        if self._open.get(request_id) == attempt:
            del self._open[request_id]
        if error is None:
            reason, text = NOT_HERE, "no adapter of this content is registered here"
        elif isinstance(error, InvalidRequest):
            reason, text = f"field:{error.field}", str(error)
        elif isinstance(error, EngineUnavailable):
            reason, text = BROKEN, str(error)
        else:
            log.warning("a record was refused: %r", error)
            reason, text = MALFORMED, f"the record can't be read: {error!r}"
        self.send("refused", request_id, attempt, reason, text)

    def _put(self, attempt: int, output: RequestOutput) -> None:
        """Take an output, on the loop. All outputs of a step arrive in one turn and leave in one frame.

        If the engine ends, its requests do not end here: this process ends too, and the API server continues them
        elsewhere.
        """
        if output.finish_reason is FinishReason.ERROR and self._worker.failure is not None:
            return
        if output.finish_reason is not None and self._open.get(output.request_id) == attempt:
            del self._open[output.request_id]
        if not self._rows:
            self._loop.call_soon(self._flush)
        self._rows.append(to_row(output, attempt))
        self._step = output.step or self._step

    def _flush(self) -> None:
        rows, self._rows = self._rows, []
        self.send("out", self._step, rows)

    def _abort(self, request_id: str) -> None:
        _check_text(request_id)
        if self._open.pop(request_id, None) is not None:
            self._worker.abort(request_id)

    def _load(self, content_hash: str, path: str) -> None:
        _check_text(content_hash)
        _check_text(path)
        future = asyncio.ensure_future(self._replica.load(content_hash, Path(path)))
        future.add_done_callback(partial(self._tell, "loaded", content_hash))

    def _pin(self, content_hash: str, is_pinned: bool) -> None:
        _check_text(content_hash)
        if is_pinned:
            future = asyncio.ensure_future(self._replica.pin(content_hash))
            future.add_done_callback(partial(self._tell, "pinned", content_hash))
        else:
            self._replica.unpin(content_hash)

    def _tell(self, kind: str, content_hash: str, future: asyncio.Future[None]) -> None:
        """Answer that an adapter is loaded or pinned, or the reason why not."""
        error = None if future.cancelled() else future.exception()
        if error is None:
            self.send(kind, content_hash, None, None)
            return
        known = isinstance(error, AdapterFormatError | InvalidRequest | PoolFull | EngineUnavailable)
        if not known:
            log.error("an adapter could not be %s", kind, exc_info=error)
        failure = error.failure if isinstance(error, AdapterFormatError) else LoadFailure.UNREADABLE
        if isinstance(error, InvalidRequest):
            failure = LoadFailure.NO_ROOM
        self.send(kind, content_hash, failure.value, str(error) if known else "the replica's log says why")

    def _control(self, number: int, kind: str, argument: bool) -> None:
        if type(number) is not int or type(argument) is not bool:
            raise TypeError("a command must have a number and a boolean")
        self._has_stopped |= kind in (FREEZE, SLEEP)
        future = self._replica.control(kind, argument)
        future.add_done_callback(partial(self._call_soon, self._tell_control, number))

    def _tell_control(self, number: int, future: Future[Any]) -> None:
        error = future.exception()
        if error is None:
            self.send("controlled", number, future.result() or 0, None, "")
        else:
            self.send("controlled", number, 0, failure_of(error), str(error))

    def _prefetch(self, content_hash: str) -> None:
        _check_text(content_hash)
        self._worker.call(partial(_bring, content_hash))

    def _forget(self, content_hash: str) -> None:
        _check_text(content_hash)
        self._replica.forget(content_hash)


def _check_text(value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} must be text")


def _check_tokens(tokens: Any) -> None:
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise TypeError("tokens must be a list of integers")


def _bring(content_hash: str, engine: Engine) -> None:
    """Load an adapter from host memory into free pages, if there are enough, on the engine's thread."""
    store = engine.store
    if content_hash in store and store.tier(adapter := store.get(content_hash)) is Tier.HOST:
        with suppress(OutOfPages):
            store.prefetch(adapter)


def _about(costs: LearnedCosts, engine: Engine) -> dict[str, Any]:
    """Fields of a report in addition to the counters, read on the engine's thread."""
    store = engine.store
    near = [one for _, one in store.cached()]
    running, waiting = adapter_names_of(engine.scheduler)
    return {
        "tiers": {one.name: store.tier(one).value for one in near},
        "overflowing": [one.name for one in near if (one.num_overflows or 0) >= MOST_OVERFLOWS],
        "running": running,
        "waiting": waiting,
        "tenants": tenants_of(engine.scheduler),
        "costs": costs.observe(engine),
        "spent": store.spent,
    }
