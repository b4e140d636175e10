"""A cluster as the app sees it: the same `Backend` as an engine's worker, with replicas reached through sockets."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ...core.base_name import names_of, with_base
from ...core.executors.choice import uses_gpu
from ...core.media.lacking import why_lacking
from ...core.media.serving import why_blind, with_tower
from ...core.model.read_config import read_model_config
from ...core.quarantine import register_directories
from ...core.requests.record import to_record
from ...core.requests.request_params import InvalidRequest
from ...core.requests.types import FinishReason, RequestOutput
from ...core.scheduling.overload import Overloaded, check_bounds
from ...memory.adapters.adapter_costs import AdapterCost, added
from ...memory.files.error import AdapterFormatError
from ...memory.files.format import inspect_adapter
from ...memory.files.identity import with_content
from ...memory.files.manifest import AdapterManifest
from ...memory.pages.block import Medium
from ..engine.backend import SHUTTING_DOWN, OnOutput, Settle, in_place
from ..engine.backend_adapters import done
from ..engine.engine_view import EngineView, Picture
from ..engine.subscribers import Subscribers
from ..errors import EngineUnavailable
from ..executors import DaemonPool, PoolFull
from .address import Address
from .catalog import Catalog, CatalogEntry, Cluster, failed
from .cluster_view import (
    NOTHING,
    ClusterCollector,
    counted,
    picture_of,
    total,
    view_of,
)
from .control import Control, chained
from .dispatcher import Dispatcher
from .link import Link
from .registered_catalog import RegisteredCatalog
from .replica_loads import ReplicaLoads, ReplicaRefused
from .router import Estimates, Policy
from .wire import MAX_FILES

if TYPE_CHECKING:
    from ...core.engine_stats import EngineStats
    from ...core.executors.base import ModelInfo
    from ...core.kv_events import KvEvents
    from ...core.model.specs.config import ModelConfig
    from ...core.requests.request import Request
    from ...memory.host.image import HostImage
    from ..settings import Settings

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_SECONDS = 0.5
"""Seconds between checks of requests that wait for a replica."""

UP_POLL_SECONDS = 0.02
"""Seconds between checks, during the start, whether a replica is connected."""

HASH_THREADS = 4
MAX_HASHES = 1024


class ClusterWorker:
    """Links and dispatcher on an event loop: the server's from `take_loop` on, and until then one on its own thread.

    All methods may be called from any thread; results that `check_adapter` waits for arrive on the loop.
    """

    progress: int | None = None  # the links themselves find replicas that hang
    stalled: str | None = None
    shared: Path | None = None

    def __init__(
        self,
        links: Sequence[Link],
        policy: Policy,
        settings: Settings,
        on_stop: Callable[[], None] = lambda: None,
        registry: Address | None = None,
        estimates: Estimates | None = None,
    ) -> None:
        """on_stop: called once, at the end of `stop`. registry: address of the registry that several API servers share.
        estimates: the policy's.
        """
        self.links = links
        self.failure: str | None = None
        self._settings = settings
        self._on_stop = on_stop
        self._subscribers = Subscribers()
        self.dispatcher = Dispatcher(links, policy, self._deliver, settings.give_up_seconds, estimates=estimates)
        self.dispatcher.on_change = self._changed
        self.control = Control(links)
        self.lookers: list[Callable[[], None]] = [self.dispatcher.look]
        """Called every `LOOK_SECONDS` on the loop; append to it before `start`."""
        self.collector = ClusterCollector(self.dispatcher)
        cluster = Cluster(self.dispatcher, self.soon, self._call, self._learn, lambda: self.stats)
        self.adapters, self._follow = Catalog(cluster), None
        if registry is not None:
            rules = settings.adapter_rules
            self.adapters = registered = RegisteredCatalog(
                cluster, self.check_adapter, is_sourced=lambda name: rules.find(name) is not None
            )
            self._follow = partial(registered.follow, registry)
        self._has_copy = registry is None  # names in the registry
        self._config = _with_tower(settings)
        self._base_names = names_of(settings.model, settings.base_name)
        self._hashes = DaemonPool("cluster-hash", HASH_THREADS, MAX_HASHES)
        self._change = threading.Condition()
        self._loads = ReplicaLoads(links, self._change, self._call, lambda: self.failure)
        self._gone = NOTHING
        self._gone_costs: list[AdapterCost] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="chorus-cluster", daemon=True)
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self._model: ModelInfo  # once a replica has connected

    # --- start and stop ---

    def start(self) -> None:
        """Begin to connect, and register the adapters of the start; see `wait_until_ready`.

        Raises AdapterFormatError for an adapter that can't be served if the settings say that it stops the start.
        """
        settings = self._settings
        self.adapters.quarantine |= register_directories(self.adapters, self._inspect, settings, settings.lora_modules)
        self._tasks = [
            self._loop.create_task(one)
            for one in (
                *(link.run(self) for link in self.links),
                self._look(),
                self._follow_registry(),
            )
        ]
        self._thread.start()

    def wait_until_ready(self, trouble: Callable[[], str | None] = lambda: None, *, was_whole: bool = False) -> None:
        """Return once all replicas are connected. Raises EngineUnavailable with `trouble`'s text as soon as it has one.

        was_whole: all were connected before, so one is enough: another's absence must not keep an API server from its
        clients.
        """
        with self._change:
            while not self._has_copy or self._num_up() < (1 if was_whole else self.dispatcher.num_replicas):
                if (text := trouble()) is not None:
                    raise EngineUnavailable(text)
                self._change.wait(0.1)

    def take_loop(self) -> asyncio.AbstractEventLoop:
        """The loop of the links, so no frame changes threads on its way to a client. Frames that arrive before the
        caller runs the loop wait.
        """
        self.soon(self._loop.stop)
        self._thread.join()
        return self._loop

    def _num_up(self) -> int:
        return sum(link.is_up for link in self.links)

    def stop(self, timeout: float | None = 10.0) -> None:
        with self._change:
            if self._stopping:
                return
            self._stopping = True
        self.failure = self.failure or SHUTTING_DOWN
        self.cancel_all(SHUTTING_DOWN)
        if self._thread.is_alive():  # no server has taken the loop
            loop = self.take_loop()
            with asyncio.Runner(loop_factory=lambda: loop):
                pass  # its end ends all tasks
        else:
            self.soon(self._cancel)
        self._on_stop()

    def cancel_all(self, reason: str) -> int:
        ended, _ = self._subscribers.end_all(FinishReason.ABORT, reason)
        self.soon(self.dispatcher.end_all)
        return len(ended)

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _follow_registry(self) -> None:
        if self._follow is None:
            return
        while not self._num_up():  # a replica must check the adapters that have names
            await asyncio.sleep(UP_POLL_SECONDS)
        client = self._follow(self.links[0].secret)
        try:
            await client.wait_for_copy()
            self._has_copy = True
            self._changed()
            await self._loop.create_future()
        finally:
            await client.stop()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for look in self.lookers:
                try:
                    look()
                except Exception:
                    log.exception("the periodic check of requests failed")

    # --- Backend ---

    @property
    def model(self) -> ModelInfo:
        return self._model

    @property
    def stats(self) -> EngineStats:
        """The sum over the replicas; requests that wait at the API server count as waiting."""
        here = total([self._gone, *(link.stats for link in self.links if link.stats is not None)])
        return replace(here, num_waiting=here.num_waiting + self.dispatcher.in_flight.num_waiting)

    @property
    def healthy(self) -> bool:
        return self.failure is None and any(link.takes_requests for link in self.links)

    @property
    def trouble(self) -> str | None:
        return self.failure or (None if self.healthy else "no replica is connected; they are being started")

    def submit(
        self, request: Request, on_output: OnOutput, loop: asyncio.AbstractEventLoop | None = None
    ) -> Future[None]:
        if self.failure is not None:
            return failed(EngineUnavailable(self.failure))
        if (held := sum(len(item.data) for item in request.media)) > MAX_FILES:
            limit = f"replicas take {MAX_FILES} bytes of images in a request"
            return failed(InvalidRequest("messages", f"{limit}, and these have {held}; send fewer, or smaller ones"))
        accepted: Future[None] = Future()
        if request.adapter_name is None:
            self._add(request, None, on_output, loop, accepted)
            return accepted
        try:
            with self.adapters.using(request.adapter_name, request.tenant) as newest:
                bound = request.sibling and request.sibling.bound
                entry = bound if isinstance(bound, CatalogEntry) else newest
                if entry.manifest.content_hash is not None:
                    self._add(request, entry, on_output, loop, accepted)
                else:  # it has not been requested before
                    add = partial(self._hash_and_add, request, entry, on_output, loop, accepted=accepted)
                    self._hashes.submit(add)
        except (ValueError, PoolFull) as error:
            return failed(error)
        return accepted

    def abort(self, request_id: str) -> Future[bool]:
        self._subscribers.discard(request_id)
        return self._call(self.dispatcher.abort, request_id, otherwise=False)

    def check_room(self, tenant: str, adapter_name: str | None, count: int) -> None:
        if self._settings.max_waiting is None:
            return
        most = self._settings.max_waiting * self.dispatcher.num_replicas
        unstarted = self.dispatcher.in_flight.unstarted
        own = unstarted[tenant] + count - 1 if tenant else 0
        check_bounds(sum(unstarted.copy().values()) + count - 1, own, most, lambda: 1.0)

    def record_kv_events(self) -> Future[tuple[KvEvents, int]]:
        return failed(RuntimeError("kv_events_endpoint is for one engine: a cluster routes by itself; leave it out"))

    def freeze(self, *, frozen: bool) -> Future[int]:
        return self._alone("mode") or self._control(partial(self.control.freeze, frozen))

    def sleep(self) -> Future[int]:
        return self._alone("level") or self._control(self.control.sleep)

    def wake(self) -> Future[int]:
        return self._control(self.control.wake)

    def reset_prefix_cache(
        self, *, reset_running_requests: bool, tiers: Collection[Medium] = tuple(Medium)
    ) -> Future[int]:
        return self._control(partial(self.control.reset, reset_running_requests, tiers))

    def reset_image_rows(self) -> Future[int]:
        return self._control(self.control.reset_image_rows)

    def _alone(self, field: str) -> Future[int] | None:
        """A failure if other API servers serve the same clients: they would not know that the engines stand still."""
        if self.shared is None:
            return None
        return failed(InvalidRequest(field, "the cluster has several API servers; start it with --api-servers 1"))

    def _control(self, begin: Callable[[], Future[int]]) -> Future[int]:
        """Begin a command on the loop; its result."""
        if self.failure is not None:
            return failed(EngineUnavailable(self.failure))
        result: Future[int] = Future()
        self.soon(chained, begin, result)
        return result

    def view(self) -> Future[EngineView]:
        return done(view_of(self.dispatcher.fleet, self.adapters, self._gone_costs))

    def picture(self) -> Future[Picture]:
        open_requests = self.dispatcher.in_flight.open
        return self._call(
            lambda: picture_of(self.dispatcher.fleet, self.adapters, open_requests(), self._gone_costs),
            otherwise=Picture(),
        )

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
        """Have the replicas check the weights, too, where `settle` has moved them, and keep them under their hash.

        everywhere: raise ReplicaRefused unless every replica that takes requests has them; otherwise one is enough.
        """
        if self.failure is not None:
            raise EngineUnavailable(self.failure)
        manifest = self._inspect(path, roots)
        manifest.check_size(max_bytes)
        manifest = settle(with_content(manifest))
        content = manifest.content_hash
        if content is not None:
            try:
                self._loads.load(content, manifest.path, is_push=everywhere)
            except ReplicaRefused:
                if not self.adapters.names_of(content):
                    self.soon(self.dispatcher.retire, content)
                raise
        return manifest

    def check_weights(self, manifest: AdapterManifest) -> AdapterManifest:
        """Nothing: the replicas check the weights when they load them."""
        return manifest

    # --- events of links, on the loop ---

    def on_up(self, link: Link) -> None:
        if link.hello is not None:
            told = link.hello.model_info
            self._model = replace(told, why_blind=told.why_blind or why_lacking())  # images are prepared here
        self.control.on_up(link)
        self.dispatcher.on_up(link)

    def on_frame(self, link: Link, frame: Any) -> None:
        if frame.kind == "controlled":
            self.control.on_reply(link, *frame.fields)
        else:
            self.dispatcher.on_frame(link, frame)

    def on_down(self, link: Link, *, stuck: bool) -> None:
        self.control.on_down(link)
        if link.stats is not None:
            self._gone = total((self._gone, counted(link.stats)))
            self._gone_costs = added([*self._gone_costs, *link.spent])
        if not self._stopping:  # otherwise the link ends with the cluster, and no replica has died
            self.dispatcher.on_down(link, stuck=stuck)

    # --- common ---

    def _inspect(self, path: Path, roots: Sequence[Path] = ()) -> AdapterManifest:
        config = self._config
        manifest = inspect_adapter(path, config.module_paths, roots)
        return with_base(manifest, self._base_names, strict=self._settings.strict_base)

    def _learn(self, entry: CatalogEntry) -> Future[bool]:
        def learn() -> bool:
            self.adapters.note(entry.name, entry.version, with_content(entry.manifest))
            return False

        return self._hashes.submit(learn)

    def _hash_and_add(
        self,
        request: Request,
        entry: CatalogEntry,
        on_output: OnOutput,
        loop: asyncio.AbstractEventLoop | None,
        accepted: Future[None],
    ) -> None:
        try:
            known = with_content(entry.manifest)
        except AdapterFormatError as error:
            if not accepted.set_running_or_notify_cancel():
                return
            self._subscribers.add(request.id, on_output, loop)
            accepted.set_result(None)
            end = RequestOutput(request.id, (), FinishReason.ERROR, error=str(error), failure=error.failure)
            self._deliver([end])
            return
        except Exception as error:
            if accepted.set_running_or_notify_cancel():
                accepted.set_exception(error)
            return
        self.adapters.note_content(entry, known, request.tenant)
        self._add(request, replace(entry, manifest=known), on_output, loop, accepted)
        if known.content_hash is not None and not self.adapters.names_of(known.content_hash):
            self.soon(self.dispatcher.retire, known.content_hash)  # it was replaced meanwhile

    def _add(
        self,
        request: Request,
        entry: CatalogEntry | None,
        on_output: OnOutput,
        loop: asyncio.AbstractEventLoop | None,
        accepted: Future[None],
    ) -> None:
        record = to_record(request, time.monotonic())
        path, rank, num_bytes, version = None, 0, 0, ""
        if entry is not None:
            request.bound, version, manifest = entry, entry.versions, entry.manifest
            record["adapter"] = entry.name
            record["content_hash"], path = manifest.content_hash, manifest.path
            rank, num_bytes = manifest.rank, manifest.file_size
        arrival = request.arrival_time or time.monotonic()
        add = partial(self.dispatcher.add, record, path, rank, arrival, accepted, num_bytes, version)
        self.soon(self._queue, request, add, partial(self._subscribers.add, request.id, on_output, loop), accepted)

    def _queue(
        self, request: Request, add: Callable[[], None], subscribe: Callable[[], None], accepted: Future[None]
    ) -> None:
        """Give a request to the dispatcher, on the loop, unless it has no room or the client has left meanwhile."""
        try:
            self.check_room(request.tenant, request.adapter_name, 1)
        except Overloaded as error:
            if accepted.set_running_or_notify_cancel():
                accepted.set_exception(error)
            return
        subscribe()
        add()
        if request.id not in self.dispatcher.in_flight:
            self._subscribers.discard(request.id)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for request_id in self._subscribers.deliver(outputs):
            self.abort(request_id)

    def _changed(self) -> None:
        with self._change:
            self._change.notify_all()

    def soon(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function on the loop, from any thread."""
        with suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(function, *arguments)

    def _call(self, function: Callable[..., T], *arguments: Any, otherwise: T) -> Future[T]:
        """Run a function on the loop. otherwise: the result if the loop has ended."""
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(function(*arguments))
            except Exception as error:
                result.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(run)
        except RuntimeError:
            result.set_result(otherwise)
        return result


def _with_tower(settings: Settings) -> ModelConfig:
    """The model as replicas have it, so that they and this process read an adapter alike."""
    config, model = settings.engine_config(), read_model_config(settings.model, settings.tokenizer)
    if model.vision is None:
        return model
    return model if why_blind(config, model, on_gpu=uses_gpu(config.device)) else with_tower(config, model)
