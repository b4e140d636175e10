"""Routers prefer replicas that have a prompt's beginning in memory, then those that share files with it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from chorus.server.cluster.router import MostIdle, Replicas
from chorus.server.cluster.router.prefixes import MAX_RUNS, RUN_TOKENS, PrefixPlaces, runs_of

from ..replica_states import replica_state

LONG = list(range(4 * RUN_TOKENS + 1))


@dataclass(frozen=True)
class Asked:
    adapter: str | None = "a"
    prompt_tokens: int = len(LONG)
    rank: int | None = 8


def record(tokens=LONG, content_hash="a", tenant="", salt="", media=()):
    return {
        "tokens": list(tokens),
        "content_hash": content_hash,
        "tenant": tenant,
        "cache_salt": salt,
        "media": list(media),
    }


def replicas(*loads, seats=8):
    return Replicas([replica_state(seats, [8] * load, name=f"r{index}") for index, load in enumerate(loads)])


def choose(places, states, keys):
    return places.choose(MostIdle(), Asked(), keys, states)


def test_a_run_is_known_by_all_that_its_kv_depends_on():
    keys = runs_of(record())
    assert len(keys) == len(set(keys)) == 4
    assert runs_of(record(LONG[: 2 * RUN_TOKENS + 1])) == keys[:2]
    assert runs_of(record([7, *LONG[1:]]))[3] != keys[3]
    others = [record(content_hash=None), record(content_hash="b"), record(tenant="t"), record(salt="s")]
    assert not {*keys}.intersection(key for other in others for key in runs_of(other))


def test_short_prompts_and_images_decide_nothing():
    assert runs_of(record(range(RUN_TOKENS))) == runs_of(record(media=[{}])) == []
    assert len(runs_of(record(range(1 << 15)))) == MAX_RUNS


def test_memory_comes_first_then_a_shared_folder_then_the_policy():
    places, states, keys = PrefixPlaces(), replicas(1, 1, 1, 0), runs_of(record())
    for name, folder in (("r0", "x"), ("r1", "x"), ("r2", "x"), ("r3", "y")):
        places.note_folder(name, folder)
    assert choose(places, states, keys) == 3, "nobody has it: the fewest requests"
    places.note("r2", keys)
    assert choose(places, states, keys) == 2, "its memory has it"
    places.forget("r2")
    places.note_folder("r2", "x")
    assert choose(places, states, keys) == 0, "it shares the files"
    assert choose(places, states, runs_of(record(content_hash="b"))) == 3


def test_the_longest_beginning_in_memory_wins():
    places, states, keys = PrefixPlaces(), replicas(0, 0, 0), runs_of(record())
    places.note("r1", keys[:1])
    places.note("r2", keys[:3])
    assert choose(places, states, keys) == 2


def test_files_win_if_memory_has_less_than_half_of_what_they_have():
    places, states, keys = PrefixPlaces(), replicas(0, 0, 0), runs_of(record())
    for name in ("r0", "r1"):
        places.note_folder(name, "x")
    places.note("r1", keys)
    places.forget("r1")
    places.note("r2", keys[:1])
    assert choose(places, states, keys) == 0


@pytest.mark.parametrize("load", [5, 8])
def test_an_overloaded_replica_is_left_out(load):
    """One that has no room, or far more requests than the others."""
    places, states, keys = PrefixPlaces(), replicas(1, 1, load), runs_of(record())
    places.note("r2", keys)
    assert choose(places, states, keys) == 0


def test_what_a_replica_has_no_room_for_has_left_it_the_oldest_and_the_ends_first():
    places, states = PrefixPlaces(), replicas(0, 0)
    old, new = runs_of(record(tenant="old")), runs_of(record(tenant="new"))
    places.note("r1", old)
    places.note("r1", new)
    places.limit("r1", 5 * RUN_TOKENS)
    assert choose(places, states, new) == 1
    assert choose(places, states, old) == 1, "its first run is there"
    places.limit("r1", 2 * RUN_TOKENS)
    assert choose(places, states, new) == 1
    assert choose(places, states, old) == 0
