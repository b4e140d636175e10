"""The dispatcher of a front: which replica runs which request, and what becomes of the requests of one that dies.

All of it runs on one event loop. Requests wait here while no replica may take them: none is up, none has their adapter
yet, none is of the kind that drew their tokens, or the policy has them wait.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.requests.sampling_params import InvalidRequest
from ...core.requests.types import FinishReason, RequestOutput
from ...memory.files.error import LoadFailure
from .fleet import Fleet
from .ledger import Ledger, OpenRequest
from .link import Link
from .replica import BROKEN, DRAINING, MALFORMED
from .router.replica_state import Policy
from .router.scale import SteadyHint, scale_hint
from .rows import from_row, read_step
from .wire import Frame, Malformed

log = logging.getLogger(__name__)

HINTS = {1: "one more replica is needed", 0: "there are replicas enough", -1: "one replica could be given back"}

DIED_TWICE = "two replicas ended while they ran this request; it is not tried on a third"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request as a routing policy sees it; adapters are content hashes."""

    adapter: str | None
    prompt_tokens: int
    rank: int | None


@dataclass(slots=True)
class Asked:
    """What the dispatcher keeps of a request beside the ledger's.

    path: of its adapter. accepted: ends once a replica has taken the request, or with InvalidRequest. arrival: on this
    process's clock. stuck_since: when no replica was left that may take it.
    """

    path: Path | None
    rank: int
    accepted: Future[None]
    arrival: float
    refused_by: set[str]
    stuck_since: float | None = None


class Dispatcher:
    """Events of links and requests come in as calls; outputs go to `deliver`."""

    def __init__(
        self,
        links: Sequence[Link],
        policy: Policy,
        deliver: Callable[[list[RequestOutput]], None],
        give_up_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """give_up_seconds: after which a request that no replica may take ends with an error."""
        self.links = links
        self.ledger = Ledger()
        self.num_deaths = 0
        self.scale = SteadyHint()
        self.num_replicas = len(links)
        """Replicas that there are to be, as of the last look; there are links for as many as there may ever be."""
        self.count_replicas: Callable[[], int] = lambda: len(links)
        self.on_hint: Callable[[int, int], None] = lambda hint, num_replicas: None
        """Called now and then with the hint that holds, and the number of replicas that it is about."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when a link came up, went down, or answered to a load."""
        self.on_stuck: Callable[[Link], None] = lambda link: None
        """Called with a replica that hangs, so that its process is ended."""
        self._policy = policy
        self._deliver = deliver
        self._give_up_seconds = give_up_seconds
        self._clock = clock
        self._asked: dict[str, Asked] = {}
        self.fleet = Fleet(links, self.ledger, lambda request: self._asked[request.id].rank)
        self._users: Counter[str] = Counter()  # open requests by content hash
        self._retired: set[str] = set()  # contents that no new request begins with

    # --- requests ---

    def add(self, record: dict[str, Any], path: Path | None, rank: int, arrival: float, accepted: Future[None]) -> None:
        """Take a request; `accepted` ends with ValueError when there is one of its id."""
        if not accepted.set_running_or_notify_cancel():
            return
        try:
            request = self.ledger.add(record)
        except ValueError as error:
            accepted.set_exception(error)
            return
        self._asked[request.id] = Asked(path, rank, accepted, arrival, set())
        if request.content_hash is not None:
            self._users[request.content_hash] += 1
        self._place(request)

    def abort(self, request_id: str) -> bool:
        """End a request, of which nothing more is delivered; False when it is unknown."""
        request = self.ledger.get(request_id)
        if request is None:
            return False
        self.fleet.abort(request)
        self._forget(request)
        return True

    def end_users(self, name: str, reason: str, failure: LoadFailure) -> int:
        """End the requests that asked for an adapter by a name; returns how many."""
        users = [one for one in self._all() if one.record["adapter"] == name]
        for request in users:
            self.fleet.abort(request)
            self._fail(request, reason, failure)
        return len(users)

    def end_all(self) -> None:
        """Forget all requests; their replicas abort them."""
        for request in self._all():
            self.abort(request.id)

    def move(self, request: OpenRequest) -> None:
        """Take a request from its replica and place it again, for a policy or because the replica drains."""
        self.fleet.abort(request)
        self.ledger.take_back(request)
        self._place(request)

    def retire(self, content_hash: str) -> None:
        """No new request has this content; replicas forget it with the last of those that do."""
        self._retired.add(content_hash)
        self._forget_content(content_hash)

    def revive(self, content_hash: str) -> None:
        self._retired.discard(content_hash)

    # --- links ---

    def on_up(self, link: Link) -> None:
        log.info("replica %s is there", link.name)
        self._place_waiting()
        self.on_change()

    def on_down(self, link: Link, *, stuck: bool) -> None:
        lost = list(self.ledger.at(link.name))
        ended = self.ledger.lose(link.name)
        self.num_deaths += 1
        log.warning("replica %s is gone; %d requests go on elsewhere", link.name, len(lost) - len(ended))
        if stuck:
            self.on_stuck(link)
        for request in ended:
            self._fail(request, DIED_TWICE)
        self._place_waiting()
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
        elif frame.kind == "stats":
            self._on_report(link)

    def _on_out(self, step: Any, rows: Any) -> None:
        if not isinstance(rows, list):
            raise Malformed("an out frame has no list of rows")
        info, outputs, ended = read_step(step), [], False
        for row in rows:
            output, life = from_row(row, info)
            request = self.ledger.get(output.request_id)
            had_tokens = request is not None and request.num_output_tokens > 0
            last = output.finish_reason is not None
            if self.ledger.receive(output.request_id, life, output.token_ids, last=last) is None or request is None:
                continue
            self._accept(request.id)
            if had_tokens and output.prompt_logprobs is not None:  # the client has them
                output = output._replace(prompt_logprobs=None)
            outputs.append(output)
            if last:
                ended = True
                self._forget(request)
        if outputs:
            self._deliver(outputs)
        if ended and self.ledger.num_waiting:
            self._place_waiting()

    def _on_taken(self, request_id: str, life: int) -> None:
        if self.ledger.take(request_id, life) is not None:
            self._accept(request_id)

    def _on_refused(self, link: Link, request_id: str, life: int, reason: str, text: str) -> None:
        request = self.ledger.give_back(request_id, life)
        if request is None:
            return
        asked = self._asked[request_id]
        if reason.startswith("field:") and not asked.accepted.done():
            asked.accepted.set_exception(InvalidRequest(reason.removeprefix("field:"), text))
            self._forget(request)
            return
        if reason == MALFORMED:
            self._fail(request, "a replica could not read this request")
            return
        if reason in (DRAINING, BROKEN):
            link.draining = True
        elif reason.startswith("field:"):
            asked.refused_by.add(link.name)  # in mid-answer it waits for another: never a refusal to the client
        elif request.content_hash is not None:
            link.loaded.discard(request.content_hash)
        self._place(request)

    def _on_loaded(self, link: Link, content_hash: str, failure: str | None, text: str | None) -> None:
        link.loading.discard(content_hash)
        if failure is None:
            link.loaded.add(content_hash)
        else:
            link.failed[content_hash] = failure, text or "no reason given"
            log.warning("replica %s can't load an adapter: %s", link.name, text)
        self._place_waiting()
        self._forget_content(content_hash)
        self.on_change()

    def _on_report(self, link: Link) -> None:
        if link.draining:
            for request in list(self.ledger.at(link.name)):
                if self.fleet.candidates(request, self._asked[request.id].refused_by):
                    self.move(request)
        if self.ledger.num_waiting:
            self._place_waiting()

    def look(self) -> None:
        """End requests that no replica has been able to take for too long, and see whether there are replicas enough.

        To be called now and then.
        """
        now = self._clock()
        # one that is being started again is not asked for, nor is another one given back meanwhile
        states = [self.fleet.state_of(link) for link in self.links if link.takes_requests]
        before, self.num_replicas = self.num_replicas, self.count_replicas()
        is_whole = len(states) == self.num_replicas == before
        if self.scale.update(scale_hint(states, self.ledger.num_waiting) if is_whole else None, now):
            log.info("scale hint: %s", HINTS[self.scale.value])
        self.on_hint(self.scale.value, self.num_replicas)
        for request in self.ledger.waiting():
            self._place(request)
            since = self._asked[request.id].stuck_since if request.id in self._asked else None
            if since is not None and now - since > self._give_up_seconds:
                text = f"no replica could take this request within {self._give_up_seconds:g} s"
                self._fail(request, text, LoadFailure.UNREADABLE if request.content_hash else None)

    # --- placing ---

    def _place_waiting(self) -> None:
        for request in self.ledger.waiting():
            self._place(request)

    def _place(self, request: OpenRequest) -> None:
        """Give a waiting request to a replica, if one may take it."""
        asked = self._asked[request.id]
        content = request.content_hash
        if content is not None and asked.path is not None:
            self.fleet.load(content, asked.path)
        candidates = self.fleet.candidates(request, asked.refused_by)
        if not candidates:
            if asked.stuck_since is None:
                asked.stuck_since = self._clock()
            if (failure := self.fleet.take_failure(content)) is not None:
                self._fail(request, failure[1], LoadFailure(failure[0]))
            return
        asked.stuck_since = None
        wanted = Wanted(content, len(request.record["tokens"]), asked.rank)
        index = self._policy(wanted, [self.fleet.state_of(link) for link in candidates])
        if index is None:
            return
        link = candidates[index]
        life = self.ledger.place(request, link.name, link.identity)
        request.record["age"] = self._clock() - asked.arrival
        request.record["num_paid_tokens"] = len(request.record["tokens"]) - 1 if request.num_output_tokens else 0
        link.send("submit", request.record, life)

    # --- ends ---

    def _all(self) -> list[OpenRequest]:
        return [request for request_id in list(self._asked) if (request := self.ledger.get(request_id)) is not None]

    def _accept(self, request_id: str) -> None:
        accepted = self._asked[request_id].accepted
        if not accepted.done():
            accepted.set_result(None)

    def _fail(self, request: OpenRequest, reason: str, failure: LoadFailure | None = None) -> None:
        if request.id in self._asked:
            self._accept(request.id)
            self._forget(request)
        self._deliver([RequestOutput(request.id, (), FinishReason.ERROR, error=reason, failure=failure)])

    def _forget(self, request: OpenRequest) -> None:
        self.ledger.remove(request.id)
        asked = self._asked.pop(request.id)
        if not asked.accepted.done():
            asked.accepted.set_result(None)
        content = request.content_hash
        if content is not None:
            self._users[content] -= 1
            if not self._users[content]:
                del self._users[content]
                self._forget_content(content)

    def _forget_content(self, content_hash: str) -> None:
        unused = content_hash in self._retired and content_hash not in self._users
        if unused and self.fleet.forget(content_hash):
            self._retired.discard(content_hash)
