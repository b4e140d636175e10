"""The ledger: whatever dies, and in whatever order rows come, no token is lost or doubled."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chorus.server.cluster.ledger import MAX_DEATHS, Ledger

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
    ledger = Ledger()
    request = ledger.add(record())
    first = ledger.place(request, "A", "kind")
    assert ledger.receive("a", first, [100], last=False) is request
    ledger.lose("A")
    second = ledger.place(request, "B", "kind")
    ledger.take_back(request)
    third = ledger.place(request, "A", "kind")
    assert len({first, second, third}) == 3
    for life in (first, second):
        assert ledger.receive("a", life, [101], last=True) is None
        assert ledger.note_accepted("a", life) is None and ledger.give_back("a", life) is None
    assert ledger.receive("a", third, [101], last=False) is request
    assert request.record["tokens"] == [*PROMPT, 100, 101]
    assert (ledger.num_moves, ledger.num_stale) == (2, 6)


def test_a_request_that_saw_two_replicas_die_is_not_tried_on_a_third():
    ledger = Ledger()
    deadly, other = ledger.add(record("deadly")), ledger.add(record("other"))
    ledger.place(deadly, "A", "kind")
    assert ledger.lose("A") == []
    ledger.place(deadly, "B", "kind")
    ledger.place(other, "B", "kind")
    assert ledger.lose("B") == [deadly]
    assert "deadly" not in ledger
    assert ledger.waiting() == [other]


def test_a_move_that_no_death_asked_for_counts_as_none():
    ledger = Ledger()
    request = ledger.add(record())
    for replica in "ABABAB":
        ledger.place(request, replica, "kind")
        ledger.take_back(request)
    assert request.deaths == 0 and ledger.num_moves == 5


def test_only_replicas_of_the_kind_that_drew_its_tokens_go_on_with_a_request():
    ledger = Ledger()
    request = ledger.add(record())
    ledger.place(request, "A", "old")
    ledger.lose("A")
    life = ledger.place(request, "B", "new")
    assert request.kind == "new", "nothing had been drawn"
    ledger.receive("a", life, [100], last=False)
    ledger.take_back(request)
    ledger.place(request, "C", "newer")
    assert request.kind == "new"


def test_requests_whose_clients_read_already_wait_in_front():
    ledger = Ledger()
    ledger.add(record("fresh"))
    begun = ledger.add(record("begun"))
    ledger.receive("begun", ledger.place(begun, "A", "kind"), [100], last=False)
    ledger.lose("A")
    assert [one.id for one in ledger.waiting()] == ["begun", "fresh"]


def test_an_id_in_use_is_refused():
    ledger = Ledger()
    ledger.add(record())
    with pytest.raises(ValueError, match="already"):
        ledger.add(record())


class World(RuleBasedStateMachine):
    """Replicas that draw the next token of what they were given, and whose rows may come late, or after their death."""

    @initialize()
    def begin(self) -> None:
        self.ledger = Ledger()
        self.received: dict[str, list[int]] = {}
        self.ended: dict[str, bool] = {}  # False: by an error
        self.deaths: dict[str, int] = {}
        self.runs: dict[tuple[str, int], tuple[str, int]] = {}  # request and life: its replica and next position
        self.rows: list[tuple[str, int, list[int], bool]] = []  # under way
        self.count = 0

    @rule()
    def come(self) -> None:
        name = f"q{self.count}"
        self.count += 1
        self.ledger.add(record(name))
        self.received[name], self.deaths[name] = [], 0

    @precondition(lambda self: self.ledger.num_waiting)
    @rule(data=st.data(), replica=st.sampled_from("ABC"))
    def place(self, data, replica) -> None:
        request = data.draw(st.sampled_from(self.ledger.waiting()))
        life = self.ledger.place(request, replica, "kind")
        assert (request.id, life) not in self.runs, "a life is lived once"
        self.runs[request.id, life] = replica, len(request.record["tokens"]) - len(PROMPT)

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), count=st.integers(1, 3))
    def step(self, data, count) -> None:
        """A replica draws tokens, and may go on after the front took the request from it."""
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
        """Rows of one life come in order, those of several in any."""
        lives = sorted({row[:2] for row in self.rows})
        life = data.draw(st.sampled_from(lives))
        index = next(index for index, row in enumerate(self.rows) if row[:2] == life)
        name, number, tokens, last = self.rows.pop(index)
        if self.ledger.receive(name, number, tokens, last=last) is not None:
            assert name not in self.ended
            self.received[name] += tokens
            if last:
                self.ended[name] = True

    @rule(replica=st.sampled_from("ABC"))
    def die(self, replica) -> None:
        for request in list(self.ledger.at(replica)):
            self.deaths[request.id] += 1
        for request in self.ledger.lose(replica):
            self.ended[request.id] = False
        for key in [key for key, (at, _) in self.runs.items() if at == replica]:
            del self.runs[key]

    @precondition(lambda self: any(one.replica for one in map(self.ledger.get, self.received) if one))
    @rule(data=st.data())
    def move(self, data) -> None:
        placed = [one for one in map(self.ledger.get, self.received) if one is not None and one.replica]
        self.ledger.take_back(data.draw(st.sampled_from(placed)))

    @precondition(lambda self: self.received)
    @rule(data=st.data())
    def abort(self, data) -> None:
        name = data.draw(st.sampled_from(sorted(self.received)))
        if self.ledger.remove(name) is not None:
            self.ended[name] = False

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        for name, tokens in self.received.items():
            assert tokens == ANSWER[: len(tokens)]
            request = self.ledger.get(name)
            if request is None:
                assert name in self.ended
                assert not self.ended[name] or tokens == ANSWER
            else:
                assert request.record["tokens"] == [*PROMPT, *tokens]
                assert request.deaths == self.deaths[name] < MAX_DEATHS

    @invariant()
    def requests_without_a_token_are_counted(self) -> None:
        without = {name for name, tokens in self.received.items() if name in self.ledger and not tokens}
        assert self.ledger.unstarted == dict.fromkeys(without, 1)

    @invariant()
    def each_is_in_one_place(self) -> None:
        places = [one.id for place in (None, *"ABC") for one in self.ledger.at(place)]
        assert sorted(places) == sorted(name for name in self.received if name in self.ledger)
        assert len(places) == len(self.ledger)


TestWorld = World.TestCase


@given(st.lists(st.sampled_from(["place", "lose", "back"]), max_size=30))
def test_a_life_never_comes_again(events):
    ledger, lives = Ledger(), []
    request = ledger.add(record())
    for event in events:
        if request.id not in ledger:
            break
        if request.replica is None and event == "place":
            lives.append(ledger.place(request, "A", "kind"))
        elif request.replica is not None and event == "lose":
            ledger.lose("A")
        elif request.replica is not None and event == "back":
            ledger.take_back(request)
    assert lives == list(range(1, len(lives) + 1))
