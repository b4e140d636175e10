"""The dispatcher over links without sockets: the messages that it sends, and the client's results."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest

from chorus.core.executors.base import ModelInfo
from chorus.core.requests.request_params import InvalidRequest
from chorus.core.requests.types import FinishReason
from chorus.memory.files.error import LoadFailure
from chorus.server.cluster.address import UnixSocket
from chorus.server.cluster.dispatcher import DIED_TWICE, Dispatcher
from chorus.server.cluster.fleet import RETRY_SECONDS
from chorus.server.cluster.link import Link
from chorus.server.cluster.report import Hello, ModelIdentity
from chorus.server.cluster.router import Consolidate, Estimates, FirstFit, LeastDelay, MostIdle
from chorus.server.cluster.router.scale import STEADY_SECONDS
from chorus.server.cluster.wire import Frame

SAME = ModelIdentity("model", "float32", "avx512", "1")
OTHER = ModelIdentity("model", "float32", "avx512", "2")


class Wired(Link):
    """A link whose frames are kept."""

    def __init__(self, name: str) -> None:
        super().__init__(name, UnixSocket(Path("nowhere")), b"", 1.0)
        self.sent: list[tuple] = []
        self.behind = False

    @property
    def is_behind(self):
        return self.behind

    def send(self, kind, *fields):
        if kind == "submit":
            record, attempt = fields
            fields = record["id"], attempt, len(record["tokens"])
        self.sent.append((kind, *fields))


class ApiServer:
    def __init__(self, count: int = 2, policy=None, estimates=None) -> None:
        self.links = [Wired(f"r{index}") for index in range(count)]
        self.outputs = []
        self.now = 0.0
        self.dispatcher = Dispatcher(
            self.links, policy or MostIdle(), self.outputs.extend, 30.0, lambda: self.now, estimates
        )
        for link in self.links:
            self.up(link)

    def up(self, link, identity=SAME, max_num_seqs=8, **hello):
        link.hello = Hello(identity, ModelInfo(300, 512, (2,)), max_num_seqs, 8, 16, 1 / 16, 1, **hello)
        self.dispatcher.on_up(link)

    def down(self, link, *, stuck=False):
        link.hello = None
        self.dispatcher.on_down(link, stuck=stuck)
        link.reset()  # as the link does

    def ask(self, name="q", content=None, adapter=None, call="", tokens=(1, 2), media=()) -> Future:
        accepted: Future = Future()
        record = {
            "id": name,
            "tokens": list(tokens),
            "num_prompt_tokens": len(tokens),
            "content_hash": content,
            "adapter": adapter,
            "tenant": "",
            "choice_group": call,
            "media": list(media),
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
def api_server():
    return ApiServer()


PROMPTS = [[number, *range(300)] for number in range(4)]


def finish(api_server, name):
    api_server.frame(api_server.at(name), "out", None, [[name, 1, [2], {"finish": "stop", "stop": 2}]])


def test_a_prompt_goes_to_the_replica_whose_memory_has_its_beginning():
    api_server = ApiServer(3, LeastDelay(Estimates()))
    homes = {}
    for turn in range(4):
        for number, prompt in enumerate(PROMPTS):
            name = f"{turn} {number}"
            api_server.ask(name, tokens=[*prompt, turn])
            assert homes.setdefault(number, api_server.at(name)) is api_server.at(name)
            api_server.ask(f"between {name}")  # so that the others are not always idle
            finish(api_server, name)
            finish(api_server, f"between {name}")


def test_a_prompt_whose_replica_is_gone_goes_to_one_that_shares_its_files():
    api_server = ApiServer(4, LeastDelay(Estimates()))
    for link, folder in zip(api_server.links, ("x", "y", "x", "y"), strict=True):
        api_server.up(link, kv_folder=folder, page_bytes=64)
    for number, prompt in enumerate(PROMPTS):
        api_server.ask(f"{number}", tokens=prompt)
        first = api_server.at(f"{number}")
        finish(api_server, f"{number}")
        folder = first.hello.kv_folder
        api_server.down(first)
        api_server.ask(f"again {number}", tokens=prompt)
        second = api_server.at(f"again {number}")
        assert second is not first
        assert second.hello.kv_folder == folder
        finish(api_server, f"again {number}")
        api_server.up(first, kv_folder=folder, page_bytes=64)


def test_policies_that_are_baselines_follow_no_prefix():
    api_server = ApiServer(2, MostIdle())
    api_server.ask("a", tokens=PROMPTS[0])
    first = api_server.at("a")
    api_server.ask("b", tokens=PROMPTS[0])
    assert api_server.at("b") is not first


def test_a_dead_replicas_request_goes_on_elsewhere_with_what_the_client_has(api_server):
    accepted = api_server.ask()
    first = api_server.at()
    api_server.frame(first, "taken", "q", 1)
    assert accepted.done()
    api_server.frame(first, "out", None, [["q", 1, [10]], ["q", 1, [11]]])
    api_server.down(first)
    second = api_server.at()
    assert second is not first
    assert second.sent == [("submit", "q", 2, 4)]
    api_server.frame(first, "out", None, [["q", 1, [12]]])  # too late
    api_server.frame(second, "out", None, [["q", 2, [12], {"finish": "stop", "stop": 2}]])
    assert api_server.tokens() == [10, 11, 12]
    (end,) = api_server.ends()
    assert (end.finish_reason, end.stop_token_id) == (FinishReason.STOP, 2)
    assert len(api_server.dispatcher.in_flight) == 0


def test_images_wait_while_their_replica_has_yet_to_read_others(api_server):
    """A replica that is sent more than it reads would count as stuck; text goes on."""
    for link in api_server.links:
        link.behind = True
    api_server.ask("seeing", media=[{}])
    api_server.ask("text")
    assert api_server.dispatcher.in_flight.get("seeing").replica is None
    assert api_server.at("text").sent[-1][:2] == ("submit", "text")
    for link in api_server.links:
        link.behind = False
    api_server.now += 60.0
    api_server.dispatcher.look()
    assert api_server.at("seeing").sent[-1][:2] == ("submit", "seeing")
    assert not api_server.outputs


def test_the_log_names_a_replicas_process_as_the_tutorial_shows(api_server, caplog):
    tutorial = (Path(__file__).resolve().parents[3] / "docs" / "tutorial.md").read_text("utf-8")
    link = api_server.links[1]
    link.pid = 4711
    with caplog.at_level("INFO"):
        api_server.dispatcher.on_up(link)
    (line,) = (each.getMessage() for each in caplog.records if "process" in each.getMessage())
    assert f"`{line}`" in tutorial and f"kill -9 {link.pid}" in tutorial


def test_a_replica_that_was_to_end_has_not_died(api_server, caplog):
    first, second = api_server.links[:2]
    first.draining = True
    with caplog.at_level("INFO"):
        api_server.down(first)
    assert api_server.dispatcher.num_deaths == 0 and "as requested" in caplog.text
    api_server.down(second)
    assert api_server.dispatcher.num_deaths == 1


def test_after_two_deaths_a_request_ends_with_an_error(api_server):
    api_server.ask()
    api_server.down(api_server.at())
    api_server.down(api_server.at())
    (end,) = api_server.ends()
    assert (end.finish_reason, end.error) == (FinishReason.ERROR, DIED_TWICE)


def test_a_request_waits_for_a_replica_and_not_for_ever(api_server):
    for link in api_server.links:
        api_server.down(link)
    accepted = api_server.ask()
    api_server.dispatcher.look()
    api_server.now = 29.0
    api_server.dispatcher.look()
    assert not api_server.outputs and not accepted.done()
    api_server.now = 31.0
    api_server.dispatcher.look()
    assert "within 30 s" in api_server.ends()[0].error


def test_a_replica_of_another_kind_takes_new_requests_only(api_server):
    api_server.ask()
    first = api_server.at()
    api_server.frame(first, "out", None, [["q", 1, [10]]])
    other = next(link for link in api_server.links if link is not first)
    api_server.down(other)
    api_server.up(other, OTHER)
    api_server.down(first)
    assert api_server.dispatcher.in_flight.num_waiting == 1, "another level's tokens may differ"
    api_server.ask("new")
    assert api_server.at("new") is other
    api_server.up(first)
    assert api_server.at() is first


def test_a_refusal_reaches_the_client_before_the_answer_begins_and_never_after(api_server):
    accepted = api_server.ask()
    api_server.frame(api_server.at(), "refused", "q", 1, "field:prompt", "too long")
    with pytest.raises(InvalidRequest, match="too long") as raised:
        accepted.result(0)
    assert raised.value.field == "prompt" and not api_server.outputs
    api_server.ask("r")
    first = api_server.at("r")
    api_server.frame(first, "out", None, [["r", 1, [10]]])
    api_server.down(first)
    second = api_server.at("r")
    api_server.frame(second, "refused", "r", 2, "field:max_tokens", "no room")
    assert api_server.dispatcher.in_flight.num_waiting == 1 and not api_server.ends("r")
    api_server.up(first)
    assert api_server.at("r") is first and api_server.tokens("r") == [10]


def test_adapters_are_loaded_everywhere_and_requests_wait_for_the_first(api_server):
    api_server.ask(content="h1")
    assert [link.sent for link in api_server.links] == [[("load", "h1", "/adapters/h1")]] * 2
    a, b = api_server.links
    api_server.frame(b, "loaded", "h1", None, None)
    assert api_server.at() is b
    api_server.frame(a, "loaded", "h1", "adapter_changed", "it changed")
    api_server.down(b)
    end = api_server.ends()
    assert end[0].failure is LoadFailure.CHANGED and end[0].error == "it changed"


def test_a_replica_tries_again_what_may_pass_and_nothing_else(api_server):
    a, b = api_server.links
    for content in ("passing", "wrong"):
        api_server.ask(content, content)
        api_server.frame(a, "loaded", content, None, None)
    api_server.frame(b, "loaded", "passing", "adapter_unreadable", "Too many open files")
    api_server.frame(b, "loaded", "wrong", "adapter_changed", "it changed")
    b.sent.clear()
    api_server.now = RETRY_SECONDS / 2
    api_server.dispatcher.look()
    api_server.ask("soon", "passing")
    assert not b.sent, "it would be read again for each request"
    api_server.now = RETRY_SECONDS
    api_server.dispatcher.look()
    api_server.ask("later", "passing")
    api_server.ask("other", "wrong")
    assert b.sent == [("load", "passing", "/adapters/passing")]
    api_server.frame(b, "loaded", "passing", None, None)
    api_server.ask("last", "passing")
    assert api_server.at("last") is b


def test_a_pinned_adapter_is_tried_again_without_a_request(api_server):
    a, b = api_server.links
    api_server.dispatcher.fleet.pin({"h1": Path("/adapters/h1")})
    api_server.frame(a, "loaded", "h1", None, None)
    api_server.frame(b, "loaded", "h1", "adapter_unreadable", "Too many open files")
    b.sent.clear()
    api_server.now = RETRY_SECONDS
    api_server.dispatcher.look()
    assert b.sent == [("load", "h1", "/adapters/h1")]


def test_a_replaced_content_is_forgotten_with_its_last_request(api_server):
    api_server.ask(content="old")
    for link in api_server.links:
        api_server.frame(link, "loaded", "old", None, None)
    api_server.dispatcher.retire("old")
    assert not any(("forget", "old") in link.sent for link in api_server.links)
    api_server.frame(api_server.at(), "out", None, [["q", 1, [5], {"finish": "length"}]])
    assert all(("forget", "old") in link.sent for link in api_server.links)
    assert not any(link.loaded for link in api_server.links)


def test_requests_leave_a_draining_replica(api_server):
    api_server.ask()
    first = api_server.at()
    api_server.frame(first, "out", None, [["q", 1, [10]]])
    first.draining = True
    api_server.frame(first, "stats", {})
    assert api_server.at() is not first and ("abort", "q") in first.sent
    assert api_server.dispatcher.in_flight.get("q").deaths == 0


def test_what_a_policy_has_wait_is_no_fault(api_server):
    api_server = ApiServer(1, FirstFit())
    api_server.up(api_server.links[0], max_num_seqs=1)
    api_server.ask("a")
    api_server.ask("b")
    api_server.now = 1000.0
    api_server.dispatcher.look()
    assert api_server.dispatcher.in_flight.num_waiting == 1 and not api_server.outputs
    api_server.frame(api_server.links[0], "out", None, [["a", 1, [5], {"finish": "length"}]])
    assert api_server.at("b") is api_server.links[0]


def test_prompt_scores_reach_the_client_once(api_server):
    api_server.ask()
    first = api_server.at()
    api_server.frame(first, "out", None, [["q", 1, [10], {"prompt": [[2, -0.5, []]]}]])
    api_server.down(first)
    api_server.frame(api_server.at(), "out", None, [["q", 2, [11], {"prompt": [[2, -0.5, []]]}]])
    assert [output.prompt_logprobs is not None for output in api_server.outputs] == [True, False]


def test_reports_of_other_fronts_requests_count_and_own_are_known(api_server):
    link = api_server.links[0]
    stats = SimpleNamespace(num_running=5, num_waiting=1, num_free_pages=10, num_cached_pages=2, num_kv_pages=3)
    link.report = SimpleNamespace(stats=stats, num_yours=2, tiers={}, tenants=[], costs={})
    api_server.frame(link, "stats")
    state = api_server.dispatcher.fleet.state_of(link)
    assert (state.num_requests, state.free_tokens, state.kv_tokens) == (4, 192, 48)
    api_server.ask("a")  # goes to the other, which has none
    api_server.ask("b")
    assert api_server.dispatcher.fleet.state_of(api_server.links[1]).num_requests == 2
    assert api_server.dispatcher.fleet.state_of(api_server.links[1]).pending_tokens == 4


def test_answers_of_one_call_stay_together_while_there_is_room():
    api_server = ApiServer(3)
    for name in ("a", "b", "c"):
        api_server.ask(name, call="one")
    together = {api_server.at(name).name for name in "abc"}
    assert len(together) == 1
    api_server.ask("other")
    assert api_server.at("other").name not in together
    for index in range(8):
        api_server.ask(f"d{index}", call="two")
    assert len({api_server.at(f"d{index}").name for index in range(8)}) == 1
    api_server.ask("d8", call="two")
    assert api_server.at("d8") is not api_server.at("d0"), "a replica has 8 slots"
    api_server.down(api_server.at("a"))
    assert len({api_server.at(name).name for name in "abc"}) == 1
    for name in ("a", "b", "c"):
        assert api_server.dispatcher.abort(name)
    assert "one" not in api_server.dispatcher.placer._last_of_group  # noqa: SLF001 - nothing is kept of it


def test_while_the_policy_has_a_request_wait_none_overtakes_it():
    api_server = ApiServer(2, Consolidate())
    for link in api_server.links:
        api_server.up(link, max_num_seqs=1)
    for name in "abcd":
        api_server.ask(name)
    assert [api_server.at(name).name for name in "ab"] == ["r1", "r0"], "ties go to the highest index"
    api_server.dispatcher.abort("a")
    api_server.ask("e")
    assert api_server.dispatcher.in_flight.get("e").replica is None
    api_server.dispatcher.look()
    assert api_server.at("c").name == "r1"
    api_server.frame(api_server.links[0], "out", None, [["b", 1, [5], {"finish": "length"}]])
    assert api_server.at("d").name == "r0" and api_server.dispatcher.in_flight.get("e").replica is None


def test_a_request_that_fits_no_replica_holds_up_none():
    api_server = ApiServer(1, FirstFit())
    api_server.dispatcher.fleet.state_of(api_server.links[0]).free_tokens = 1
    api_server.ask("large")
    assert api_server.at("large") is api_server.links[0], "it refuses by name what it can't serve"
    api_server.ask("b")
    assert api_server.dispatcher.in_flight.get("b").replica is None
    api_server.frame(api_server.links[0], "refused", "large", 1, "field:prompt", "too long")
    api_server.dispatcher.look()
    assert api_server.at("b") is api_server.links[0]


def test_an_adapter_that_is_on_its_way_counts_as_there_and_answers_are_learned():
    estimates = Estimates()
    api_server = ApiServer(2, LeastDelay(estimates), estimates)
    api_server.ask("a", "h1")
    for link in api_server.links:
        api_server.frame(link, "loaded", "h1", None, None)
    link = api_server.at("a")
    state = api_server.dispatcher.fleet.state_of(link)
    assert "h1" in state.resident and "h1" in state.on_host
    api_server.frame(link, "out", None, [["a", 1, [5, 6, 7]]])
    api_server.frame(link, "out", None, [["a", 1, [8], {"finish": "length"}]])
    assert estimates.answers.expected("h1") == 4


def test_requests_are_priced_by_what_replicas_say_of_their_steps():
    estimates = Estimates()
    api_server = ApiServer(2, MostIdle(), estimates)
    for link, base in zip(api_server.links, (0.02, 0.04), strict=True):
        told = {"base": base, "per_row": 1e-3, "per_token": 1e-4, "disk": 1e-8, "link": 1e-9}
        link.report = SimpleNamespace(costs=told)
    api_server.dispatcher.look()
    assert estimates.costs.batch_seconds(1, 0, 0, 0) == pytest.approx(0.0311)
    assert estimates.slo == pytest.approx(1.5 * 0.0311)
    assert estimates.costs.disk.seconds(10**6) == pytest.approx(0.01)


def test_an_abort_ends_it_here_and_there(api_server):
    api_server.ask()
    link = api_server.at()
    assert api_server.dispatcher.abort("q") and not api_server.dispatcher.abort("q")
    assert ("abort", "q") in link.sent
    api_server.frame(link, "out", None, [["q", 1, [10]]])
    assert not api_server.outputs


def test_a_front_asks_for_a_replica_while_requests_wait_but_for_none_that_is_being_started():
    api_server = ApiServer(2, FirstFit())
    for link in api_server.links:
        api_server.up(link, max_num_seqs=1)
    for name in "abc":
        api_server.ask(name)
    assert api_server.dispatcher.in_flight.num_waiting == 1

    def hint_after(seconds):
        api_server.dispatcher.look()
        api_server.now += seconds
        api_server.dispatcher.look()
        return api_server.dispatcher.scale.value

    assert hint_after(STEADY_SECONDS - 1) == 0
    assert hint_after(1) == 1
    api_server.down(api_server.links[1])
    assert hint_after(STEADY_SECONDS) == 0


def test_links_to_replicas_that_are_not_to_be_count_for_nothing_and_a_hint_is_about_those_that_are():
    api_server, told = ApiServer(3), []
    dispatcher, wanted = api_server.dispatcher, 2
    dispatcher.count_replicas = lambda: wanted
    dispatcher.on_hint = lambda hint, about: told.append((hint, about))
    api_server.down(api_server.links[2])

    def look(seconds):
        api_server.now += seconds
        dispatcher.look()
        return told[-1]

    assert look(0) == (0, 2) and look(1) == (0, 2)
    assert look(STEADY_SECONDS) == (-1, 2)
    wanted = 1
    assert look(1) == (0, 1)  # the hint was about two
    api_server.down(api_server.links[1])
    assert look(1) == (0, 1) and look(STEADY_SECONDS) == (0, 1)
    for name in "abcde":
        api_server.ask(name)
    assert look(1) == (0, 1) and look(STEADY_SECONDS) == (1, 1)
    wanted = 2
    assert look(1) == (0, 2) and look(2 * STEADY_SECONDS) == (0, 2)  # it is being started
    api_server.up(api_server.links[1])
    assert look(1) == (0, 2) and look(STEADY_SECONDS - 2) == (0, 2)
