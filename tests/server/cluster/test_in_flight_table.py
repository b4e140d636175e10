"""The in-flight table: whatever dies, and in whatever order rows come, no token is lost or doubled."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chorus.server.cluster.in_flight_table import MAX_DEATHS, InFlightTable

PROMPT = [7, 8, 9]
ANSWER = [100 + position for position in range(12)]


def record(request_id: str = "a") -> dict:
    return {
        "id": request_id,
        "tokens": list(PROMPT),
        "num_prompt_tokens": len(PROMPT),
        "content_hash": None,
        "tenant": request_id,
    }


def test_rows_of_an_earlier_life_are_dropped():
    in_flight = InFlightTable()
    request = in_flight.add(record())
    first = in_flight.place(request, "A", "kind")
    assert in_flight.receive("a", first, [100], last=False) is request
    in_flight.lose("A")
    second = in_flight.place(request, "B", "kind")
    in_flight.take_back(request)
    third = in_flight.place(request, "A", "kind")
    assert len({first, second, third}) == 3
    for attempt in (first, second):
        assert in_flight.receive("a", attempt, [101], last=True) is None
        assert in_flight.note_accepted("a", attempt) is None and in_flight.give_back("a", attempt) is None
    assert in_flight.receive("a", third, [101], last=False) is request
    assert request.record["tokens"] == [*PROMPT, 100, 101]
    assert (in_flight.num_moves, in_flight.num_stale) == (2, 6)


def test_a_request_that_saw_two_replicas_die_is_not_tried_on_a_third():
    in_flight = InFlightTable()
    deadly, other = in_flight.add(record("deadly")), in_flight.add(record("other"))
    in_flight.place(deadly, "A", "kind")
    assert in_flight.lose("A") == []
    in_flight.place(deadly, "B", "kind")
    in_flight.place(other, "B", "kind")
    assert in_flight.lose("B") == [deadly]
    assert "deadly" not in in_flight
    assert in_flight.waiting() == [other]


def test_a_move_that_no_death_asked_for_counts_as_none():
    in_flight = InFlightTable()
    request = in_flight.add(record())
    for replica in "ABABAB":
        in_flight.place(request, replica, "kind")
        in_flight.take_back(request)
    assert request.deaths == 0 and in_flight.num_moves == 5


def test_only_replicas_of_the_kind_that_drew_its_tokens_go_on_with_a_request():
    in_flight = InFlightTable()
    request = in_flight.add(record())
    in_flight.place(request, "A", "old")
    in_flight.lose("A")
    attempt = in_flight.place(request, "B", "new")
    assert request.kind == "new", "nothing had been drawn"
    in_flight.receive("a", attempt, [100], last=False)
    in_flight.take_back(request)
    in_flight.place(request, "C", "newer")
    assert request.kind == "new"


def test_requests_whose_clients_read_already_wait_in_front():
    in_flight = InFlightTable()
    in_flight.add(record("fresh"))
    begun = in_flight.add(record("begun"))
    in_flight.receive("begun", in_flight.place(begun, "A", "kind"), [100], last=False)
    in_flight.lose("A")
    assert [one.id for one in in_flight.waiting()] == ["begun", "fresh"]


def test_an_id_in_use_is_refused():
    in_flight = InFlightTable()
    in_flight.add(record())
    with pytest.raises(ValueError, match="already"):
        in_flight.add(record())


class World(RuleBasedStateMachine):
    """Replicas that sample the next token after their input, and whose tokens may come late, or after their death."""

    @initialize()
    def begin(self) -> None:
        self.in_flight = InFlightTable()
        self.received: dict[str, list[int]] = {}
        self.ended: dict[str, bool] = {}  # False: by an error
        self.deaths: dict[str, int] = {}
        self.runs: dict[tuple[str, int], tuple[str, int]] = {}  # request and attempt: its replica and next position
        self.rows: list[tuple[str, int, list[int], bool]] = []  # under way
        self.count = 0

    @rule()
    def come(self) -> None:
        name = f"q{self.count}"
        self.count += 1
        self.in_flight.add(record(name))
        self.received[name], self.deaths[name] = [], 0

    @precondition(lambda self: self.in_flight.num_waiting)
    @rule(data=st.data(), replica=st.sampled_from("ABC"))
    def place(self, data, replica) -> None:
        request = data.draw(st.sampled_from(self.in_flight.waiting()))
        attempt = self.in_flight.place(request, replica, "kind")
        assert (request.id, attempt) not in self.runs, "an attempt is made once"
        self.runs[request.id, attempt] = replica, len(request.record["tokens"]) - len(PROMPT)

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), count=st.integers(1, 3))
    def step(self, data, count) -> None:
        """A replica draws tokens, and may go on after the API server took the request from it."""
        key = data.draw(st.sampled_from(sorted(self.runs)))
        replica, position = self.runs[key]
        tokens = ANSWER[position : position + count]
        last = position + count >= len(ANSWER)
        self.rows.append((*key, tokens, last))
        if last:
            del self.runs[key]
        else:
            self.runs[key] = replica, position + count

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def arrive(self, data) -> None:
        """Rows of one attempt come in order, those of several in any."""
        attempts = sorted({row[:2] for row in self.rows})
        attempt = data.draw(st.sampled_from(attempts))
        index = next(index for index, row in enumerate(self.rows) if row[:2] == attempt)
        name, number, tokens, last = self.rows.pop(index)
        if self.in_flight.receive(name, number, tokens, last=last) is not None:
            assert name not in self.ended
            self.received[name] += tokens
            if last:
                self.ended[name] = True

    @rule(replica=st.sampled_from("ABC"))
    def die(self, replica) -> None:
        for request in list(self.in_flight.at(replica)):
            self.deaths[request.id] += 1
        for request in self.in_flight.lose(replica):
            self.ended[request.id] = False
        for key in [key for key, (at, _) in self.runs.items() if at == replica]:
            del self.runs[key]

    @precondition(lambda self: any(one.replica for one in map(self.in_flight.get, self.received) if one))
    @rule(data=st.data())
    def move(self, data) -> None:
        placed = [one for one in map(self.in_flight.get, self.received) if one is not None and one.replica]
        self.in_flight.take_back(data.draw(st.sampled_from(placed)))

    @precondition(lambda self: self.received)
    @rule(data=st.data())
    def abort(self, data) -> None:
        name = data.draw(st.sampled_from(sorted(self.received)))
        if self.in_flight.remove(name) is not None:
            self.ended[name] = False

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        for name, tokens in self.received.items():
            assert tokens == ANSWER[: len(tokens)]
            request = self.in_flight.get(name)
            if request is None:
                assert name in self.ended
                assert not self.ended[name] or tokens == ANSWER
            else:
                assert request.record["tokens"] == [*PROMPT, *tokens]
                assert request.deaths == self.deaths[name] < MAX_DEATHS

    @invariant()
    def requests_without_a_token_are_counted(self) -> None:
        without = {name for name, tokens in self.received.items() if name in self.in_flight and not tokens}
        assert self.in_flight.unstarted == dict.fromkeys(without, 1)

    @invariant()
    def each_is_in_one_place(self) -> None:
        places = [one.id for place in (None, *"ABC") for one in self.in_flight.at(place)]
        assert sorted(places) == sorted(name for name in self.received if name in self.in_flight)
        assert len(places) == len(self.in_flight)


TestWorld = World.TestCase


@given(st.lists(st.sampled_from(["place", "lose", "back"]), max_size=30))
def test_a_life_never_comes_again(events):
    in_flight, attempts = InFlightTable(), []
    request = in_flight.add(record())
    for event in events:
        if request.id not in in_flight:
            break
        if request.replica is None and event == "place":
            attempts.append(in_flight.place(request, "A", "kind"))
        elif request.replica is not None and event == "lose":
            in_flight.lose("A")
        elif request.replica is not None and event == "back":
            in_flight.take_back(request)
    assert attempts == list(range(1, len(attempts) + 1))
