"""Events of the operator's page: a snapshot and its deltas give a browser the state that the pictures show."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from chorus.memory.adapters.adapter import Tier
from chorus.memory.pages.pool import PageKind
from chorus.server.cluster.cluster_view import NOTHING
from chorus.server.engine.engine_view import Holding, Phase, Picture, PrefixRow, ReplicaRow
from chorus.server.ui import frames
from chorus.server.ui.frames import Frames, changes, pairs, runs

pages = st.lists(st.integers(0, 3), max_size=40)


def expand(encoded):
    return np.repeat(encoded[::2], encoded[1::2].astype(int)).tolist() if len(encoded) else []


def apply(before, encoded):
    after, page = list(before), 0
    for gap, count, value in np.reshape(encoded, (-1, 3)).tolist():
        page += gap
        after[page : page + count] = [value] * count
        page += count
    return after


@given(pages)
def test_runs_are_the_pages(values):
    encoded = runs(np.array(values, np.uint32))
    assert expand(encoded) == values
    assert all(one != two for one, two in zip(encoded[::2], encoded[2::2], strict=False)), (
        "equal neighbours are one run"
    )


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=40))
def test_changes_make_one_the_other(values):
    before, after = ([one[side] for one in values] for side in (0, 1))
    encoded = changes(np.array(before, np.uint32), np.array(after, np.uint32))
    assert apply(before, encoded) == after
    assert len(encoded) <= 3 * sum(one != two for one, two in values)


class Reader:
    """A browser's state."""

    def __init__(self):
        self.pages, self.owners, self.adapters, self.requests = [], {}, {}, {}

    def take(self, data):
        name, text = data.decode().rstrip("\n").split("\n")
        body = json.loads(text.removeprefix("data: "))
        if name == "event: snapshot":
            self.__init__()
            self.pages = expand(np.array(body["pages"]))
        else:
            self.pages = apply(self.pages, body.get("pages", []))
        self.owners.update((number, tuple(key)) for number, *key in body.get("owners", []))
        self.adapters.update((row[0], row) for row in body.get("adapters", []))
        self.requests.update((tuple(row[:2]), row[2:]) for row in body.get("requests", []))
        for name in body.get("gone_adapters", []):
            del self.adapters[name]
        for pair in body.get("gone_requests", []):
            del self.requests[tuple(pair)]
        return body

    def owner(self, page):
        return self.owners.get(self.pages[page], (self.pages[page], None, None))


names = st.sampled_from(["a", "b", "<img src=x onerror=alert(1)>", 'c"d', "é\u2028"])


@st.composite
def pictures(draw):
    kinds = bytearray(draw(st.lists(st.sampled_from([0, 2, 3, 4]), min_size=12, max_size=12)))
    holdings = []
    for kind in (PageKind.KV, PageKind.ADAPTER):
        held = [page for page, one in enumerate(kinds) if one == kind and draw(st.booleans())]
        if held:
            holdings.append(Holding(kind, draw(names), draw(names) if kind is PageKind.KV else "", held))
    adapters = [
        (name, draw(st.sampled_from([Tier.DEVICE, Tier.DISK])), 8, 2, draw(st.integers(0, 3)), False)
        for name in sorted(draw(st.sets(names)))
    ]
    phases = Counter({(draw(names), draw(names), draw(st.sampled_from(Phase))): draw(st.integers(1, 3))})
    return Picture(lambda: adapters, phases, bytes(kinds), holdings)


@given(st.lists(pictures(), min_size=1, max_size=5), st.integers(0, 4))
def test_a_reader_of_deltas_sees_what_a_new_one_sees(seen, most_owners):
    """Also where owners are numbered anew."""
    limit, frames.MAX_OWNERS = frames.MAX_OWNERS, most_owners
    try:
        encoder, reader = Frames(), Reader()
        for picture in seen:
            data, everything = encoder.encode(picture, NOTHING, {"point": [1]}, {"model": "base"})
            body, new = reader.take(data), Reader()
            assert {"cached_pages", "host_cached_bytes", "disk_bytes"} <= body["stats"].keys()
            assert body["stats"]["running"] == 0 and new.take(everything)["model"] == "base"
            for one in (reader, new):
                assert [one.owner(page)[0] for page in range(12)] == list(picture.kinds)
                for kind, adapter, tenant, held in picture.holdings:
                    assert {one.owner(page) for page in held} == {(kind, adapter, tenant)}
                assert one.adapters == {row[0]: list(row) for row in picture.adapters()}
                assert sum(map(sum, one.requests.values())) == picture.phases.total()
    finally:
        frames.MAX_OWNERS = limit


def test_what_has_not_changed_is_not_sent():
    encoder = Frames()
    picture = Picture(lambda: [("a", Tier.HOST, 8, 2, 1, False)], Counter({("a", "t", Phase.RUNNING): 2}), bytes(1000))
    first, _ = encoder.encode(picture, NOTHING, {}, None)
    second, everything = encoder.encode(picture, NOTHING, {}, None)
    assert b"snapshot" in first and not everything
    assert set(json.loads(second.split(b"data: ")[1])) == {"stats", "replicas"}


def test_prefixes_are_rows_and_then_only_those_that_changed():
    encoder, rows = Frames(), [PrefixRow("", 64, 0, 0), PrefixRow("a", 32, 48, 80), PrefixRow("b", 0, 16, 0)]
    first, _ = encoder.encode(Picture(prefixes=lambda: rows), NOTHING, {}, None)
    assert json.loads(first.split(b"data: ")[1])["prefixes"] == [["", 64, 0, 0], ["a", 32, 48, 80], ["b", 0, 16, 0]]
    second, _ = encoder.encode(Picture(prefixes=lambda: [rows[0], PrefixRow("a", 0, 48, 80)]), NOTHING, {}, None)
    body = json.loads(second.split(b"data: ")[1])
    assert (body["prefixes"], body["gone_prefixes"]) == ([["a", 0, 48, 80]], ["b"])


def test_another_number_of_pages_is_a_new_snapshot():
    encoder = Frames()
    encoder.encode(Picture(kinds=bytes(3)), NOTHING, {}, None)
    assert b"snapshot" in encoder.encode(Picture(), NOTHING, {}, None)[0]


def test_pairs_beyond_the_most_are_one(monkeypatch):
    monkeypatch.setattr(frames, "MAX_PAIRS", 2)
    phases = Counter({("a", "t", Phase.RUNNING): 3, ("a", "t", Phase.PAUSED): 1, ("b", "t", Phase.WAITING): 2})
    phases.update({("c", "t", Phase.WAITING): 1, ("d", "u", Phase.RUNNING): 1})
    found = pairs(phases)
    assert found["a", "t"] == ["a", "t", 3, 0, 1] and found["b", "t"] == ["b", "t", 0, 2, 0]
    assert found[frames.OTHERS] == [*frames.OTHERS, 1, 1, 0] and len(found) == 3


def test_replicas_come_with_their_counts():
    replicas = [ReplicaRow("r0", "up", NOTHING), ReplicaRow("r1", "down", None)]
    body = Reader().take(Frames().encode(Picture(replicas=replicas), NOTHING, {}, None)[0])
    assert body["replicas"][0][2]["kv_pages"] == 0 and body["replicas"][1] == ["r1", "down", None]
