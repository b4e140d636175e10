"""Bounds of keys that several processes count together."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import struct
import subprocess
import sys
from contextlib import contextmanager

import pytest

from chorus.server.access.grants import Grant
from chorus.server.access.shared_bounds import MAX_SHARED_SLOTS, MERGE_SECONDS, RequestSlots, TokenBudgets
from chorus.server.errors import ApiError
from chorus.server.http.gate import Gate

TAKE = """
import json, signal, sys
from chorus.server.access.shared_bounds import RequestSlots
seats, (tenant, most, count) = RequestSlots(sys.argv[1]), json.loads(sys.argv[2])
print(json.dumps([seats.take(tenant, most) for _ in range(count)]), flush=True)
signal.pause()
"""


@contextmanager
def another_process(file, tenant, most, count):
    """Yields the request slots that another process has taken, and the process."""
    command = [sys.executable, "-c", TAKE, str(file), json.dumps([tenant, most, count])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield json.loads(process.stdout.readline()), process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_tenant_has_so_many_seats_and_those_it_gives_back(tmp_path, is_shared):
    seats = RequestSlots(tmp_path / "seats" if is_shared else None)
    taken = [seats.take("a", 2) for _ in range(3)]
    assert taken == [0, 1, None] and seats.take("b", 1) == 0
    seats.give_back("a", 0)
    assert seats.take("a", 2) == 0 and sum(map(len, seats._held.values())) == 3  # noqa: SLF001
    assert seats.take("a", 1) is None, "a bound that was lowered counts those in progress"


def test_processes_share_seats_and_the_seats_of_one_that_is_killed_are_free(tmp_path):
    seats = RequestSlots(tmp_path / "seats")
    assert seats.take("a", 3) == 0
    with another_process(tmp_path / "seats", "a", 3, 3) as (taken, process):
        assert taken == [1, 2, None]
        assert seats.take("a", 3) is None and seats.take("b", 3) == 0
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert [seats.take("a", 3) for _ in range(3)] == [1, 2, None]


def test_a_bound_that_is_too_large_to_share_is_each_process_s_own(tmp_path):
    most = MAX_SHARED_SLOTS + 1
    with another_process(tmp_path / "seats", "a", most, 2) as (taken, _):
        seats = RequestSlots(tmp_path / "seats")
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


class TestTheFileOfTokens:
    """It is of fixed size, written in place, and whatever happens to it turns nobody away."""

    @pytest.fixture
    def file(self, tmp_path):
        return tmp_path / "tokens"

    @pytest.fixture
    def budgets(self, file):
        self.now = [1000.0]
        return [TokenBudgets(lambda: self.now[0], file) for _ in range(2)]

    def test_a_request_reads_and_writes_its_tenant_s_bytes_alone(self, file, budgets, monkeypatch):
        size, read, written = file.stat().st_size, [], []
        pread, pwrite = os.pread, os.pwrite
        monkeypatch.setattr(os, "pread", lambda fd, count, at: read.append(count) or pread(fd, count, at))
        monkeypatch.setattr(os, "pwrite", lambda fd, data, at: written.append(len(data)) or pwrite(fd, data, at))
        for index in range(500):
            budgets[0].spend(f"tenant{index}", 100, 7)
            budgets[0].share()
        assert file.stat().st_size == size and set(written) == {16} and max(read) <= 128
        count = len(read)
        budgets[1].check("tenant3", 100)
        assert len(read) == count + 1
        assert all(budgets[1].used_by(f"tenant{index}", 100) == 0 for index in range(3))

    @pytest.mark.wide
    def test_ten_thousand_tenants_keep_their_own(self, budgets):
        for index in range(10_000):
            budgets[0].spend(f"tenant{index}", 100, 50 + 100 * (index % 2))
        budgets[0].share()
        turned_away = 0
        for index in range(10_000):
            try:
                budgets[1].check(f"tenant{index}", 100)
            except ApiError:
                turned_away += 1
                assert index % 2, "by what another tenant spent"
        assert turned_away >= 4998

    @pytest.mark.parametrize("content", [b"", b"{", b'{"a": [1e300, 0.0]}', os.urandom(1 << 20), b"\xff" * (1 << 20)])
    def test_what_is_unreadable_counts_as_nothing_spent_and_is_logged(self, file, budgets, caplog, content):
        one, other = budgets
        one.spend("a", 60, 100)
        file.write_bytes(content)
        other.check("a", 60)
        one.spend("a", 60, 70)
        one.share()
        with pytest.raises(ApiError):
            other.check("a", 60)
        if len(content) < 1 << 20:
            assert "damaged" in caplog.text

    @pytest.mark.parametrize("used", [float("nan"), float("inf"), -5.0])
    def test_a_slot_that_makes_no_sense_counts_as_nothing_spent_and_is_logged(self, file, budgets, caplog, used):
        budgets[0].spend("a", 60, 100)
        data = file.read_bytes()
        at = next(index for index in range(0, len(data), 16) if data[index : index + 16] != bytes(16))
        file.write_bytes(data[: at + 8] + struct.pack("<d", used) + data[at + 16 :])
        budgets[1].check("a", 60)
        assert "damaged" in caplog.text

    def test_a_full_disk_turns_nobody_away_and_is_over_when_it_is_over(self, budgets, monkeypatch, caplog):
        one, other = budgets

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", full)
            for _ in range(10):
                one.spend("a", 60, 5)
                one.share()
                one.check("a", 60)
            one.spend("a", 60, 20)
            with pytest.raises(ApiError):
                one.check("a", 60)
            other.check("a", 60)
        assert caplog.text.count("No space left") == 1
        one.share()
        with pytest.raises(ApiError):
            other.check("a", 60)

    def test_tokens_come_back_evenly_however_often_they_are_merged(self, budgets):
        one, other = budgets
        one.spend("a", 600, 600)
        for step in range(3000):
            self.now[0] = 1000.0 + step * 0.0173
            one.share()
            other.spend("a", 600, 0)
            other.share()
        assert other.used_by("a", 600) == pytest.approx(600 - 2999 * 0.0173 * 10, abs=0.5)
