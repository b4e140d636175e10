"""The processes of a cluster: plans that can't be carried out, and replicas that are replaced or hang."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from chorus.server.cluster import processes as module
from chorus.server.cluster.address import AddressFile
from chorus.server.cluster.plan import Plan
from chorus.server.cluster.processes import ClusterDirectory, Processes
from chorus.server.settings import Settings

SECONDS = 60
"""A deadline, not an expectation."""


@pytest.fixture(autouse=True)
def _directory(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (Plan(listen="tcp://0.0.0.0:0"), "not loopback"),
        (Plan(listen="127.0.0.1:7000"), "no address"),
        (Plan(listen="unix:/run/r0.sock"), "leave --listen out"),
        (Plan(registry="tcp://127.0.0.1:7000"), "--secret-file"),
        (Plan(tls=Path("/nowhere")), r"/nowhere must hold tls\.crt, tls\.key and ca\.crt"),
        (Plan(secret_file=Path("/nowhere/secret")), "No such file"),
        (Plan(secret_file=Path(__file__)), "holds no secret"),
        (Plan(ray="127.0.0.1:6379"), "--secret-file"),
    ],
)
def test_a_plan_that_can_t_be_carried_out_leaves_nothing(tmp_path, plan, text):
    if plan.ray is not None:
        pytest.importorskip("ray")
    with pytest.raises(Exception, match=text):
        Processes(plan, Settings())
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path):
    living = ClusterDirectory.new()
    program = f"""
import os, tempfile
tempfile.tempdir = {str(tmp_path)!r}
from chorus.server.cluster.processes import ClusterDirectory
directory = ClusterDirectory.new()
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", program], check=False)
    foreign = tmp_path / "chorus-of-something-else"
    foreign.mkdir()
    before = set(tmp_path.iterdir())
    assert len(before) == 3
    new = ClusterDirectory.new()
    assert set(tmp_path.iterdir()) == {living.path, foreign, new.path}


class Replica:
    """A replica that only notes its signals."""

    def __init__(self) -> None:
        self.signals: list[tuple[int, int | None]] = []
        self.came = threading.Semaphore(0)

    def signal(self, number: int, pid: int | None = None) -> None:
        self.signals.append((number, pid))
        self.came.release()

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def join(self, seconds: float) -> None:
        pass

    def trouble(self) -> str | None:
        return None


class Launcher:
    def threads(self, count: int) -> int:
        return 1

    def replica(self, index: int, settings: str) -> Replica:
        return Replica()

    def close(self) -> None:
        pass


@pytest.fixture
def processes(monkeypatch):
    monkeypatch.setattr(module, "_launcher_of", lambda plan, directory: Launcher())
    monkeypatch.setattr(module, "LAST_RETRY_SECONDS", 0.01)
    made = Processes(Plan(replicas=3), Settings())
    yield made
    made.stop()


def test_replicas_are_replaced_one_after_another_and_not_past_one_that_does_not_listen(processes):
    files = [AddressFile(processes.directory.replica_file(index)) for index in range(3)]
    for file in files:
        file.write("unix:/old")
    processes.restart_replicas()
    for index, replica in enumerate(processes.replicas):
        assert replica.came.acquire(timeout=SECONDS)
        assert [len(one.signals) for one in processes.replicas] == [1] * (index + 1) + [0] * (2 - index)
        assert replica.signals == [(signal.SIGTERM, None)]
        files[index].write("unix:/new")


def test_the_process_of_a_replica_that_hangs_for_a_front_is_ended_once(processes):
    processes.directory.stuck_file("r1").write_text("4711")
    processes.kill_stuck()
    processes.kill_stuck()
    assert [one.signals for one in processes.replicas] == [[], [(signal.SIGKILL, 4711)], []]
