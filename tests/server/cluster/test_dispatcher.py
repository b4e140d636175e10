"""The dispatcher over links without sockets: what it sends, and what the client gets."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest

from chorus.core.executors.base import ModelInfo
from chorus.core.requests.sampling_params import InvalidRequest
from chorus.core.requests.types import FinishReason
from chorus.memory.files.error import LoadFailure
from chorus.server.cluster.address import UnixSocket
from chorus.server.cluster.dispatcher import DIED_TWICE, Dispatcher
from chorus.server.cluster.link import Link
from chorus.server.cluster.report import Hello, Identity
from chorus.server.cluster.router import Consolidate, Estimates, FirstFit, LeastDelay, MostIdle
from chorus.server.cluster.router.scale import STEADY_SECONDS
from chorus.server.cluster.wire import Frame

SAME = Identity("model", "float32", "avx512", "1")
OTHER = Identity("model", "float32", "avx512", "2")


class Wired(Link):
    """A link whose frames are kept."""

    def __init__(self, name: str) -> None:
        super().__init__(name, UnixSocket(Path("nowhere")), b"", 1.0)
        self.sent: list[tuple] = []

    def send(self, kind, *fields):
        if kind == "submit":
            record, attempt = fields
            fields = record["id"], attempt, len(record["tokens"])
        self.sent.append((kind, *fields))


class Front:
    def __init__(self, count: int = 2, policy=None, estimates=None) -> None:
        self.links = [Wired(f"r{index}") for index in range(count)]
        self.outputs = []
        self.now = 0.0
        self.dispatcher = Dispatcher(
            self.links, policy or MostIdle(), self.outputs.extend, 30.0, lambda: self.now, estimates
        )
        for link in self.links:
            self.up(link)

    def up(self, link, identity=SAME, max_num_seqs=8):
        link.hello = Hello(identity, ModelInfo(300, 512, (2,)), max_num_seqs, 8, 16, 1)
        self.dispatcher.on_up(link)

    def down(self, link, *, stuck=False):
        link.hello = None
        self.dispatcher.on_down(link, stuck=stuck)
        link.reset()  # as the link does

    def ask(self, name="q", content=None, adapter=None, call="") -> Future:
        accepted: Future = Future()
        record = {
            "id": name,
            "tokens": [1, 2],
            "num_prompt_tokens": 2,
            "content_hash": content,
            "adapter": adapter,
            "tenant": "",
            "call": call,
        }
        path = None if content is None else Path("/adapters") / content
        self.dispatcher.add(record, path, 4, 0.0, accepted)
        return accepted

    def frame(self, link, kind, *fields):
        self.dispatcher.on_frame(link, Frame(kind, list(fields)))

    def at(self, name="q") -> Wired:
        request = self.dispatcher.in_flight.get(name)
        return next(link for link in self.links if link.name == request.replica)

    def tokens(self, name="q") -> list[int]:
        return [token for output in self.outputs if output.request_id == name for token in output.token_ids]

    def ends(self, name="q"):
        return [output for output in self.outputs if output.request_id == name and output.finish_reason is not None]


@pytest.fixture
def front():
    return Front()


def test_a_dead_replicas_request_goes_on_elsewhere_with_what_the_client_has(front):
    accepted = front.ask()
    first = front.at()
    front.frame(first, "taken", "q", 1)
    assert accepted.done()
    front.frame(first, "out", None, [["q", 1, [10]], ["q", 1, [11]]])
    front.down(first)
    second = front.at()
    assert second is not first
    assert second.sent == [("submit", "q", 2, 4)]
    front.frame(first, "out", None, [["q", 1, [12]]])  # too late
    front.frame(second, "out", None, [["q", 2, [12], {"finish": "stop", "stop": 2}]])
    assert front.tokens() == [10, 11, 12]
    (end,) = front.ends()
    assert (end.finish_reason, end.stop_token_id) == (FinishReason.STOP, 2)
    assert len(front.dispatcher.in_flight) == 0


def test_a_replica_that_was_to_end_has_not_died(front, caplog):
    first, second = front.links[:2]
    first.draining = True
    with caplog.at_level("INFO"):
        front.down(first)
    assert front.dispatcher.num_deaths == 0 and "as it was to" in caplog.text
    front.down(second)
    assert front.dispatcher.num_deaths == 1


def test_after_two_deaths_a_request_ends_with_an_error(front):
    front.ask()
    front.down(front.at())
    front.down(front.at())
    (end,) = front.ends()
    assert (end.finish_reason, end.error) == (FinishReason.ERROR, DIED_TWICE)


def test_a_request_waits_for_a_replica_and_not_for_ever(front):
    for link in front.links:
        front.down(link)
    accepted = front.ask()
    front.dispatcher.look()
    front.now = 29.0
    front.dispatcher.look()
    assert not front.outputs and not accepted.done()
    front.now = 31.0
    front.dispatcher.look()
    assert "within 30 s" in front.ends()[0].error


def test_a_replica_of_another_kind_takes_new_requests_only(front):
    front.ask()
    first = front.at()
    front.frame(first, "out", None, [["q", 1, [10]]])
    other = next(link for link in front.links if link is not first)
    front.down(other)
    front.up(other, OTHER)
    front.down(first)
    assert front.dispatcher.in_flight.num_waiting == 1, "another level's tokens may differ"
    front.ask("new")
    assert front.at("new") is other
    front.up(first)
    assert front.at() is first


def test_a_refusal_reaches_the_client_before_the_answer_begins_and_never_after(front):
    accepted = front.ask()
    front.frame(front.at(), "refused", "q", 1, "field:prompt", "too long")
    with pytest.raises(InvalidRequest, match="too long") as raised:
        accepted.result(0)
    assert raised.value.field == "prompt" and not front.outputs
    front.ask("r")
    first = front.at("r")
    front.frame(first, "out", None, [["r", 1, [10]]])
    front.down(first)
    second = front.at("r")
    front.frame(second, "refused", "r", 2, "field:max_tokens", "no room")
    assert front.dispatcher.in_flight.num_waiting == 1 and not front.ends("r")
    front.up(first)
    assert front.at("r") is first and front.tokens("r") == [10]


def test_adapters_are_loaded_everywhere_and_requests_wait_for_the_first(front):
    front.ask(content="h1")
    assert [link.sent for link in front.links] == [[("load", "h1", "/adapters/h1")]] * 2
    a, b = front.links
    front.frame(b, "loaded", "h1", None, None)
    assert front.at() is b
    front.frame(a, "loaded", "h1", "adapter_changed", "it changed")
    front.down(b)
    end = front.ends()
    assert end[0].failure is LoadFailure.CHANGED and end[0].error == "it changed"


def test_a_replaced_content_is_forgotten_with_its_last_request(front):
    front.ask(content="old")
    for link in front.links:
        front.frame(link, "loaded", "old", None, None)
    front.dispatcher.retire("old")
    assert not any(("forget", "old") in link.sent for link in front.links)
    front.frame(front.at(), "out", None, [["q", 1, [5], {"finish": "length"}]])
    assert all(("forget", "old") in link.sent for link in front.links)
    assert not any(link.loaded for link in front.links)


def test_requests_leave_a_draining_replica(front):
    front.ask()
    first = front.at()
    front.frame(first, "out", None, [["q", 1, [10]]])
    first.draining = True
    front.frame(first, "stats", {})
    assert front.at() is not first and ("abort", "q") in first.sent
    assert front.dispatcher.in_flight.get("q").deaths == 0


def test_what_a_policy_has_wait_is_no_fault(front):
    front = Front(1, FirstFit())
    front.up(front.links[0], max_num_seqs=1)
    front.ask("a")
    front.ask("b")
    front.now = 1000.0
    front.dispatcher.look()
    assert front.dispatcher.in_flight.num_waiting == 1 and not front.outputs
    front.frame(front.links[0], "out", None, [["a", 1, [5], {"finish": "length"}]])
    assert front.at("b") is front.links[0]


def test_prompt_scores_reach_the_client_once(front):
    front.ask()
    first = front.at()
    front.frame(first, "out", None, [["q", 1, [10], {"prompt": [[2, -0.5, []]]}]])
    front.down(first)
    front.frame(front.at(), "out", None, [["q", 2, [11], {"prompt": [[2, -0.5, []]]}]])
    assert [output.prompt_logprobs is not None for output in front.outputs] == [True, False]


def test_reports_of_other_fronts_requests_count_and_own_are_known(front):
    link = front.links[0]
    stats = SimpleNamespace(num_running=5, num_waiting=1, num_free_pages=10, num_cached_pages=2, num_kv_pages=3)
    link.report = SimpleNamespace(stats=stats, num_yours=2, tiers={}, tenants=[], costs={})
    front.frame(link, "stats")
    state = front.dispatcher.fleet.state_of(link)
    assert (state.num_requests, state.free_tokens, state.kv_tokens) == (4, 192, 48)
    front.ask("a")  # goes to the other, which has none
    front.ask("b")
    assert front.dispatcher.fleet.state_of(front.links[1]).num_requests == 2
    assert front.dispatcher.fleet.state_of(front.links[1]).pending_tokens == 4


def test_answers_of_one_call_stay_together_while_there_is_room():
    front = Front(3)
    for name in ("a", "b", "c"):
        front.ask(name, call="one")
    together = {front.at(name).name for name in "abc"}
    assert len(together) == 1
    front.ask("other")
    assert front.at("other").name not in together
    for index in range(8):
        front.ask(f"d{index}", call="two")
    assert len({front.at(f"d{index}").name for index in range(8)}) == 1
    front.ask("d8", call="two")
    assert front.at("d8") is not front.at("d0"), "a replica has 8 slots"
    front.down(front.at("a"))
    assert len({front.at(name).name for name in "abc"}) == 1
    for name in ("a", "b", "c"):
        assert front.dispatcher.abort(name)
    assert "one" not in front.dispatcher.placer._calls  # noqa: SLF001 - nothing is kept of it


def test_while_the_policy_has_a_request_wait_none_overtakes_it():
    front = Front(2, Consolidate())
    for link in front.links:
        front.up(link, max_num_seqs=1)
    for name in "abcd":
        front.ask(name)
    assert [front.at(name).name for name in "ab"] == ["r1", "r0"], "ties go to the highest index"
    front.dispatcher.abort("a")
    front.ask("e")
    assert front.dispatcher.in_flight.get("e").replica is None
    front.dispatcher.look()
    assert front.at("c").name == "r1"
    front.frame(front.links[0], "out", None, [["b", 1, [5], {"finish": "length"}]])
    assert front.at("d").name == "r0" and front.dispatcher.in_flight.get("e").replica is None


def test_a_request_that_fits_no_replica_holds_up_none():
    front = Front(1, FirstFit())
    front.dispatcher.fleet.state_of(front.links[0]).free_tokens = 1
    front.ask("large")
    assert front.at("large") is front.links[0], "it refuses by name what it can't serve"
    front.ask("b")
    assert front.dispatcher.in_flight.get("b").replica is None
    front.frame(front.links[0], "refused", "large", 1, "field:prompt", "too long")
    front.dispatcher.look()
    assert front.at("b") is front.links[0]


def test_an_adapter_that_is_on_its_way_counts_as_there_and_answers_are_learned():
    estimates = Estimates()
    front = Front(2, LeastDelay(estimates), estimates)
    front.ask("a", "h1")
    for link in front.links:
        front.frame(link, "loaded", "h1", None, None)
    link = front.at("a")
    state = front.dispatcher.fleet.state_of(link)
    assert "h1" in state.resident and "h1" in state.on_host
    front.frame(link, "out", None, [["a", 1, [5, 6, 7]]])
    front.frame(link, "out", None, [["a", 1, [8], {"finish": "length"}]])
    assert estimates.answers.expected("h1") == 4


def test_requests_are_priced_by_what_replicas_say_of_their_steps():
    estimates = Estimates()
    front = Front(2, MostIdle(), estimates)
    for link, base in zip(front.links, (0.02, 0.04), strict=True):
        told = {"base": base, "per_row": 1e-3, "per_token": 1e-4, "disk": 1e-8, "link": 1e-9}
        link.report = SimpleNamespace(costs=told)
    front.dispatcher.look()
    assert estimates.costs.batch_seconds(1, 0, 0, 0) == pytest.approx(0.0311)
    assert estimates.slo == pytest.approx(1.5 * 0.0311)
    assert estimates.costs.disk.seconds(10**6) == pytest.approx(0.01)


def test_an_abort_ends_it_here_and_there(front):
    front.ask()
    link = front.at()
    assert front.dispatcher.abort("q") and not front.dispatcher.abort("q")
    assert ("abort", "q") in link.sent
    front.frame(link, "out", None, [["q", 1, [10]]])
    assert not front.outputs


def test_a_front_asks_for_a_replica_while_requests_wait_but_for_none_that_is_being_started():
    front = Front(2, FirstFit())
    for link in front.links:
        front.up(link, max_num_seqs=1)
    for name in "abc":
        front.ask(name)
    assert front.dispatcher.in_flight.num_waiting == 1

    def hint_after(seconds):
        front.dispatcher.look()
        front.now += seconds
        front.dispatcher.look()
        return front.dispatcher.scale.value

    assert hint_after(STEADY_SECONDS - 1) == 0
    assert hint_after(1) == 1
    front.down(front.links[1])
    assert hint_after(STEADY_SECONDS) == 0


def test_links_to_replicas_that_are_not_to_be_count_for_nothing_and_a_hint_is_about_those_that_are():
    front, told = Front(3), []
    dispatcher, wanted = front.dispatcher, 2
    dispatcher.count_replicas = lambda: wanted
    dispatcher.on_hint = lambda hint, about: told.append((hint, about))
    front.down(front.links[2])

    def look(seconds):
        front.now += seconds
        dispatcher.look()
        return told[-1]

    assert look(0) == (0, 2) and look(1) == (0, 2)
    assert look(STEADY_SECONDS) == (-1, 2)
    wanted = 1
    assert look(1) == (0, 1)  # the hint was about two
    front.down(front.links[1])
    assert look(1) == (0, 1) and look(STEADY_SECONDS) == (0, 1)
    for name in "abcde":
        front.ask(name)
    assert look(1) == (0, 1) and look(STEADY_SECONDS) == (1, 1)
    wanted = 2
    assert look(1) == (0, 2) and look(2 * STEADY_SECONDS) == (0, 2)  # it is being started
    front.up(front.links[1])
    assert look(1) == (0, 2) and look(STEADY_SECONDS - 2) == (0, 2)
