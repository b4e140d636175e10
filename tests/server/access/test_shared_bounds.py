"""Bounds of keys that several processes count together."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from chorus.server.access.grants import Grant
from chorus.server.access.shared_bounds import MERGE_SECONDS, MOST_SEATS, Seats, TokenBudgets
from chorus.server.errors import ApiError
from chorus.server.http.gate import Gate

TAKE = """
import json, signal, sys
from chorus.server.access.shared_bounds import Seats
seats, (tenant, most, count) = Seats(sys.argv[1]), json.loads(sys.argv[2])
print(json.dumps([seats.take(tenant, most) for _ in range(count)]), flush=True)
signal.pause()
"""


@contextmanager
def another_process(file, tenant, most, count):
    """Gives the seats that another process has taken, and the process."""
    command = [sys.executable, "-c", TAKE, str(file), json.dumps([tenant, most, count])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield json.loads(process.stdout.readline()), process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_tenant_has_so_many_seats_and_those_it_gives_back(tmp_path, is_shared):
    seats = Seats(tmp_path / "seats" if is_shared else None)
    taken = [seats.take("a", 2) for _ in range(3)]
    assert taken == [0, 1, None] and seats.take("b", 1) == 0
    seats.give_back("a", 0)
    assert seats.take("a", 2) == 0 and seats.num_taken() == 3
    assert seats.take("a", 1) is None, "a bound that was lowered counts those in progress"


def test_processes_share_seats_and_the_seats_of_one_that_is_killed_are_free(tmp_path):
    seats = Seats(tmp_path / "seats")
    assert seats.take("a", 3) == 0
    with another_process(tmp_path / "seats", "a", 3, 3) as (taken, process):
        assert taken == [1, 2, None]
        assert seats.take("a", 3) is None and seats.take("b", 3) == 0
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert [seats.take("a", 3) for _ in range(3)] == [1, 2, None]


def test_a_bound_that_is_too_large_to_share_is_each_process_s_own(tmp_path):
    most = MOST_SEATS + 1
    with another_process(tmp_path / "seats", "a", most, 2) as (taken, _):
        seats = Seats(tmp_path / "seats")
        assert taken == [0, 1] == [seats.take("a", most) for _ in range(2)]


def test_processes_add_up_the_tokens_that_they_spend(tmp_path):
    now = [100.0]
    one, other = (TokenBudgets(lambda: now[0], tmp_path / "tokens") for _ in range(2))
    one.spend("a", 60, 50)
    other.spend("a", 60, 5)
    other.check("a", 60)
    one.spend("a", 60, 5)  # not in the file yet
    other.check("a", 60)
    now[0] += MERGE_SECONDS
    one.spend("a", 60, 5)
    with pytest.raises(ApiError) as caught:
        other.check("a", 60)
    assert caught.value.retry_after == pytest.approx(6, abs=0.2) and caught.value.status == 429
    other.check("b", 60)
    now[0] += 6
    one.check("a", 60)
    other.check("a", 60)


def test_what_a_request_spent_at_last_is_known_to_other_processes_when_it_has_ended(tmp_path):
    async def test():
        gates = [Gate(shared=tmp_path) for _ in range(2)]
        grant = Grant(tokens_per_minute=6)
        with gates[0].passing("POST", "/v1/completions", "a", "a", grant):
            for _ in range(8):  # all but the first within `MERGE_SECONDS`
                gates[0].tokens.spend("a", 6, 1)
        with pytest.raises(ApiError), gates[1].passing("POST", "/v1/completions", "a", "a", grant):
            pass

    asyncio.run(test())
