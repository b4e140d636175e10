"""States that an API server keeps up to date as requests come and go are those of a recount."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from chorus.core.executors.base import ModelInfo
from chorus.server.cluster.address import UnixSocket
from chorus.server.cluster.cluster_view import NOTHING
from chorus.server.cluster.fleet import Fleet
from chorus.server.cluster.in_flight_table import InFlightTable
from chorus.server.cluster.link import Link
from chorus.server.cluster.report import Hello, ModelIdentity, Report
from chorus.server.cluster.router import ReplicaState

HELLO = Hello(ModelIdentity("model", "float32", "avx512", "1"), ModelInfo(300, 512, (2,)), 8, 8, 16, 1 / 16, 1)
COUNT = 3

acts = st.tuples(
    st.sampled_from(["ask", "ask", "place", "token", "end", "back", "down", "report"]),
    st.integers(0, 99),
    st.integers(0, COUNT - 1),
    st.sampled_from([0, 8, 64]),
)


def made_fleet(count=COUNT):
    links = [Link(f"r{index}", UnixSocket(Path("nowhere")), b"", 1.0) for index in range(count)]
    fleet = Fleet(links)
    for link in links:
        link.hello = HELLO
        fleet.note_up(link)
    return fleet, InFlightTable(fleet)


def record(number, content=None, tokens=1):
    return {
        "id": str(number),
        "tokens": [1] * tokens,
        "num_prompt_tokens": tokens,
        "content_hash": content,
        "tenant": "",
        "adapter": content,
        "choice_group": "",
    }


@given(st.lists(acts, max_size=60))
def test_what_is_kept_up_to_date_is_what_a_recount_finds(moves):
    fleet, in_flight = made_fleet()
    others, near, asked = Counter(), {}, []
    for number, (act, which, at, rank) in enumerate(moves):
        link = fleet.links[at]
        request = asked[which % len(asked)] if asked else None
        if act == "ask":
            asked.append(in_flight.add(record(number, f"h{which % 4}" if rank else None, 1 + which), rank))
        elif act == "down":
            for ended in in_flight.lose(link.name):
                asked.remove(ended)
            fleet.note_down(link)
            others[link.name], near[link.name] = 0, set()
        elif act == "report":
            link.note_report(
                Report(replace(NOTHING, num_running=which + 1), which, tiers={f"h{rank}": "device", "h9": "host"})
            )
            fleet.note_report(link)
            others[link.name], near[link.name] = 1, {f"h{rank}"}
        elif request is not None:
            if act == "place" and request.replica is None:
                in_flight.place(request, link.name, "kind")
            elif act == "back" and request.replica is not None:
                in_flight.take_back(request)
            elif act in ("token", "end") and request.replica is not None:
                in_flight.receive(request.id, request.attempt, [7], last=act == "end")
                if act == "end":
                    asked.remove(request)
    _, replicas = fleet.candidates(in_flight.add(record("last")))
    for link in fleet.links:
        expected = ReplicaState(8, name=link.name)
        for request in in_flight.at(link.name):
            expected.add(request.rank)
            if not request.is_started:
                expected.add_waiting(len(request.record["tokens"]), request.rank)
        expected.num_requests += others[link.name]
        state = fleet.state_of(link)
        adapters = {request.content_hash for request in in_flight.at(link.name)} - {None}
        assert near.get(link.name, set()) | adapters <= state.resident <= state.on_host
        for adapter in ("h0", "h1", "h2", "h3", "h8", "h64", "h9"):
            assert (link.name in replicas.holders(adapter)) == (adapter in state.on_host)
        told = ("max_num_seqs", "free_tokens", "kv_tokens", "resident", "on_host")
        assert state == replace(expected, **{name: getattr(state, name) for name in told})


def test_replicas_that_may_take_all_adapters_are_one_view_though_no_request_was_for_the_base_model():
    """Otherwise each adapter has a view and homes of its own, which grow with the replicas."""
    fleet, in_flight = made_fleet()
    for link in fleet.links:
        link.loaded.update(("h0", "h1"))
    first, second = (fleet.candidates(in_flight.add(record(n, f"h{n}")))[1] for n in range(2))
    assert first is second
