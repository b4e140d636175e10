"""The dispatcher of an API server: takes requests from clients and frames from replicas until each request ends.

All of it runs on one event loop. The placer decides where a request goes.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from ...core.requests.request_params import InvalidRequest
from ...core.requests.types import FinishReason, RequestOutput
from ...memory.adapters.versions import split_version
from ...memory.files.error import LoadFailure
from .fleet import Fleet
from .in_flight_table import AND, InFlightTable, OpenRequest
from .link import Link
from .placer import Placer
from .replica import BROKEN, DRAINING, MALFORMED
from .report import mean_costs
from .router import Estimates, Policy
from .router.scale import SteadyHint, scale_hint
from .rows import from_row, read_step
from .wire import Frame, Malformed

log = logging.getLogger(__name__)

HINTS = {1: "one more replica is needed", 0: "there are enough replicas", -1: "one replica could be removed"}

PRICE_SECONDS = 5.0
"""Seconds for which routing policies keep the same costs, and the terms computed from them."""

DIED_TWICE = "two replicas ended while they ran this request; it is not tried on a third"


class Dispatcher:
    """Receives requests, and events of links, as method calls; passes outputs to `deliver`."""

    def __init__(
        self,
        links: Sequence[Link],
        policy: Policy,
        deliver: Callable[[list[RequestOutput]], None],
        give_up_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        estimates: Estimates | None = None,
    ) -> None:
        """give_up_seconds: a request that no replica may take for so long ends with an error. estimates: the policy's,
        which the dispatcher keeps up to date.
        """
        self.links = links
        self.fleet = Fleet(links)
        self.in_flight = InFlightTable(self.fleet)
        self.num_deaths = 0
        self.scale = SteadyHint()
        self.num_replicas = len(links)
        """Number of replicas wanted at the last look. There are links for the maximum number."""
        self.count_replicas: Callable[[], int] = lambda: len(links)
        self.on_hint: Callable[[int, int], None] = lambda hint, num_replicas: None
        """Called periodically with the scale hint and the number of replicas that it refers to."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when a link connected, disconnected, or replied to a load."""
        self.on_stuck: Callable[[Link], None] = lambda link: None
        """Called with a replica that hangs, to end its process."""
        self.on_arrival: Callable[[str, Path], None] = lambda content_hash, path: None
        """Called with the adapter of each new request that has one."""
        self.on_retire: Callable[[str], None] = lambda content_hash: None
        """Called with the content hash of an adapter that no new request has."""
        self.on_end: Callable[[str | None, float], None] = lambda content_hash, seconds: None
        """Called when a request has ended, with its adapter and the seconds since its arrival."""
        self._deliver = deliver
        self._give_up_seconds = give_up_seconds
        self._clock = clock
        self._estimates = Estimates() if estimates is None else estimates
        self.placer = Placer(self.in_flight, self.fleet, policy, self._fail, clock)
        self._next_prices = 0.0
        self._users: Counter[str] = Counter()  # open requests by content hash
        self._sizes: dict[str, int] = {}  # bytes of their adapters
        self._estimates.adapter_bytes = lambda content: self._sizes.get(content, 0)
        self._retired: set[str] = set()  # contents that no new request uses

    # --- requests ---

    def add(
        self,
        record: dict[str, Any],
        path: Path | None,
        rank: int,
        arrival: float,
        accepted: Future[None],
        num_bytes: int = 0,
        version: str = "",
    ) -> None:
        """Take a request; `accepted` fails with ValueError for a used id. rank, num_bytes, version: its adapter's."""
        if not accepted.set_running_or_notify_cancel():
            return
        try:
            request = self.in_flight.add(record, rank)
        except ValueError as error:
            accepted.set_exception(error)
            return
        request.path, request.version, request.accepted, request.arrival = path, version, accepted, arrival
        if request.content_hash is not None:
            self._users[request.content_hash] += 1
            self._sizes[request.content_hash] = num_bytes
            if path is not None:
                self.on_arrival(request.content_hash, path)
        self.placer.place(request)

    def abort(self, request_id: str) -> bool:
        """End a request, and deliver nothing more of it; False if it is unknown."""
        request = self.in_flight.get(request_id)
        if request is None:
            return False
        self.fleet.abort(request)
        self._forget(request)
        return True

    def end_users(self, name: str, reason: str, failure: LoadFailure) -> int:
        """End the requests of an adapter, or of `name@version` alone; returns how many."""
        users = self.users(name)
        for request in users:
            self.fleet.abort(request)
            self._fail(request, reason, failure)
        return len(users)

    def users(self, name: str) -> list[OpenRequest]:
        """Open requests of an adapter, or of `name@version` alone; also those of several adapters."""
        return [
            one for one in self._all() if any(name in (each, split_version(each)[0]) for each in one.version.split(AND))
        ]

    def paths(self) -> set[Path]:
        """Directories of the adapters of open requests."""
        return {one.path for one in self.in_flight.open() if one.path is not None}

    def end_all(self) -> None:
        """Forget all requests; their replicas abort them."""
        for request in self._all():
            self.abort(request.id)

    def move(self, request: OpenRequest, target: Link | None = None) -> None:
        """Take a request from its replica and place it again: on `target` if that may have it, else by the policy."""
        self.fleet.abort(request)
        self.in_flight.take_back(request)
        self.placer.place(request, target)

    def placed(self) -> list[tuple[OpenRequest, Link, list[Link]]]:
        """Requests on replicas, in order of arrival, with the replicas that each may move to."""
        links = {link.name: link for link in self.links}
        return [
            (one, links[one.replica], list(self.fleet.candidates(one)[0]))
            for one in self._all()
            if one.replica is not None
        ]

    def move_to(self, request_id: str, source: Link, target: Link) -> bool:
        """Carry out a migration plan; False if it is no longer valid."""
        request = self.in_flight.get(request_id)
        if request is None or request.replica != source.name:
            return False
        if target not in self.fleet.candidates(request)[0]:
            return False
        self.move(request, target)
        return True

    def retire(self, content_hash: str) -> None:
        """Retire a content: no new request has it; replicas forget it when its last request ends."""
        self._retired.add(content_hash)
        self.on_retire(content_hash)
        self._forget_content(content_hash)

    def revive(self, content_hash: str) -> None:
        self._retired.discard(content_hash)

    # --- links ---

    def on_up(self, link: Link) -> None:
        log.info("replica %s is connected, process %s", link.name, link.pid)
        self.fleet.note_up(link)
        self.placer.place_waiting()
        self.on_change()

    def on_down(self, link: Link, *, stuck: bool) -> None:
        lost = list(self.in_flight.at(link.name))
        ended = self.in_flight.lose(link.name)
        self.fleet.note_down(link)
        if link.draining and not lost:
            log.info("replica %s has ended, as requested", link.name)
        else:
            self.num_deaths += 1
            level = logging.INFO if link.draining else logging.WARNING
            log.log(level, "replica %s is gone; %d requests continue elsewhere", link.name, len(lost) - len(ended))
        if stuck:
            self.on_stuck(link)
        for request in ended:
            self._fail(request, DIED_TWICE)
        self.placer.place_waiting()
        self.on_change()

    def on_frame(self, link: Link, frame: Frame) -> None:
        if frame.kind == "out":
            self._on_out(*frame.fields)
        elif frame.kind == "taken":
            self._on_taken(*frame.fields)
        elif frame.kind == "refused":
            self._on_refused(link, *frame.fields)
        elif frame.kind == "loaded":
            self._on_loaded(link, *frame.fields)
        elif frame.kind == "pinned":
            link.note_pinned(*frame.fields)
        elif frame.kind == "stats":
            self._on_report(link)

    def _on_out(self, step: Any, rows: Any) -> None:
        if not isinstance(rows, list):
            raise Malformed("an out frame has no list of rows")
        info, outputs, ended = read_step(step), [], False
        for row in rows:
            output, attempt = from_row(row, info)
            request = self.in_flight.receive(
                output.request_id, attempt, output.token_ids, last=output.finish_reason is not None
            )
            if request is None:
                continue
            if request.num_output_tokens <= len(output.token_ids):
                self._accept(request)
            elif output.prompt_logprobs is not None:  # the client has them
                output = output._replace(prompt_logprobs=None)
            outputs.append(output)
            if output.finish_reason is not None:
                ended = True
                self.on_end(request.content_hash, self._clock() - request.arrival)
                self._forget(request)
        if outputs:
            self._deliver(outputs)
        if ended and self.in_flight.num_waiting:
            self.placer.place_waiting()

    def _on_taken(self, request_id: str, attempt: int) -> None:
        if (request := self.in_flight.note_accepted(request_id, attempt)) is not None:
            self._accept(request)

    def _on_refused(self, link: Link, request_id: str, attempt: int, reason: str, text: str) -> None:
        request = self.in_flight.give_back(request_id, attempt)
        if request is None:
            return
        if reason.startswith("field:") and not request.accepted.done():
            request.accepted.set_exception(InvalidRequest(reason.removeprefix("field:"), text))
            self._forget(request)
            return
        if reason == MALFORMED:
            self._fail(request, "a replica could not read this request")
            return
        if reason in (DRAINING, BROKEN):
            link.draining = True
            self.fleet.changed()
        elif reason.startswith("field:"):
            # in the middle of generation it waits for another replica: the client never sees a refusal
            request.refused_by.add(link.name)
        elif request.content_hash is not None:
            link.loaded.discard(request.content_hash)
            link.pinned.pop(request.content_hash, None)
            self.fleet.changed(request.content_hash)
        self.placer.place(request)

    def _on_loaded(self, link: Link, content_hash: str, failure: str | None, text: str | None) -> None:
        link.loading.discard(content_hash)
        self.fleet.changed(content_hash)
        if failure is None:
            link.loaded.add(content_hash)
            self.fleet.keep_pins(link)
        else:
            self.fleet.note_failure(link, content_hash, LoadFailure(failure), text or "no reason given", self._clock())
            log.warning("replica %s can't load an adapter: %s", link.name, text)
        self.placer.place_waiting()
        self._forget_content(content_hash)
        self.on_change()

    def _on_report(self, link: Link) -> None:
        self.fleet.note_report(link)
        if link.draining:
            for request in list(self.in_flight.at(link.name)):
                if self.fleet.candidates(request)[0]:
                    self.move(request)
        if self.in_flight.num_waiting:
            self.placer.place_waiting()

    def reported_costs(self) -> list[dict[str, float]]:
        """Learned costs of steps and transfers, for each replica that has reported some."""
        return [link.report.costs for link in self.links if link.report is not None and link.report.costs]

    def look(self) -> None:
        """Time out requests that no replica could take, retry loads, update the scale hint, and update the costs that
        price requests.

        Call this periodically.
        """
        now = self._clock()
        told = self.reported_costs()
        if told and now >= self._next_prices:
            self._next_prices = now + PRICE_SECONDS
            self._estimates.set_costs(mean_costs(told))
        # while a replica restarts, the hint neither asks for it nor gives another one back
        states = [self.fleet.state_of(link) for link in self.links if link.takes_requests]
        before, self.num_replicas = self.num_replicas, self.count_replicas()
        is_whole = len(states) == self.num_replicas == before
        if self.scale.update(scale_hint(states, self.in_flight.num_waiting) if is_whole else None, now):
            log.info("scale hint: %s", HINTS[self.scale.value])
        self.on_hint(self.scale.value, self.num_replicas)
        self.fleet.retry(now)
        self.placer.place_waiting()
        for request in self.in_flight.waiting():
            since = request.stuck_since
            if since is not None and now - since > self._give_up_seconds:
                text = f"no replica could take this request within {self._give_up_seconds:g} s"
                self._fail(request, text, LoadFailure.UNREADABLE if request.content_hash else None)

    # --- ends ---

    def _all(self) -> list[OpenRequest]:
        return list(self.in_flight.open())

    def _accept(self, request: OpenRequest) -> None:
        if not request.accepted.done():
            request.accepted.set_result(None)

    def _fail(self, request: OpenRequest, reason: str, failure: LoadFailure | None = None) -> None:
        self._forget(request)
        self._deliver([RequestOutput(request.id, (), FinishReason.ERROR, error=reason, failure=failure)])

    def _forget(self, request: OpenRequest) -> None:
        self.in_flight.remove(request.id)
        self._accept(request)
        self.placer.forget(request)
        content = request.content_hash
        if request.num_output_tokens:
            self._estimates.answers.end(content, request.num_output_tokens)
        if content is not None:
            self._users[content] -= 1
            if not self._users[content]:
                del self._users[content], self._sizes[content]
                self._forget_content(content)

    def _forget_content(self, content_hash: str) -> None:
        unused = content_hash in self._retired and content_hash not in self._users
        if unused and self.fleet.forget(content_hash):
            self._retired.discard(content_hash)
