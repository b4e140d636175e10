"""The processes of a cluster: plans that can't be carried out, and replicas that are replaced or hang."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from chorus.server.cluster import processes as module
from chorus.server.cluster.address import AddressFile
from chorus.server.cluster.child import Child
from chorus.server.cluster.directory import ClusterDirectory
from chorus.server.cluster.plan import ClusterPlan, add_up_flags
from chorus.server.cluster.processes import Processes
from chorus.server.settings import Settings
from chorus.server.start.flags import Parser, UsageError

SECONDS = 60
"""A deadline, not an expectation."""


@pytest.fixture(autouse=True)
def _directory(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (ClusterPlan(listen="tcp://0.0.0.0:0"), "not loopback"),
        (ClusterPlan(listen="127.0.0.1:7000"), "is not an address"),
        (ClusterPlan(listen="unix:/run/r0.sock"), "leave --listen out"),
        (ClusterPlan(registry="tcp://127.0.0.1:7000"), "--secret-file"),
        (ClusterPlan(tls=Path("/nowhere")), r"/nowhere must hold tls\.crt, tls\.key and ca\.crt"),
        (ClusterPlan(secret_file=Path("/nowhere/secret")), "No such file"),
        (ClusterPlan(secret_file=Path(__file__)), "must hold a secret"),
        pytest.param(ClusterPlan(ray="127.0.0.1:6379"), "--secret-file", marks=pytest.mark.integration),
    ],
)
def test_a_plan_that_can_t_be_carried_out_leaves_nothing(tmp_path, plan, text):
    if plan.ray is not None:
        pytest.importorskip("ray")
    with pytest.raises(Exception, match=text):
        Processes(plan, Settings())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("serves", [False, True], ids=["no", "yes"])
def test_the_first_end_of_a_child_is_told_as_what_it_is(tmp_path, caplog, serves):
    """A start that failed ends the launch of its cluster, so no next one is promised."""
    ready = tmp_path / "ready"
    ready.touch()  # by an earlier child
    child = Child("replica r0", ["nothing-of-this-name"], ready)
    if serves:
        program = "import os, sys; os.utime(sys.argv[1]); sys.stdin.read()"
        child.command = [sys.executable, "-c", program, str(ready)]
    assert not child.is_serving()
    child.start()
    if serves:
        wait_until(child.is_serving)
        child.signal(signal.SIGKILL)
    wait_until(lambda: caplog.messages)
    first = caplog.messages[0]
    child.stop()
    child.join(SECONDS)
    assert not child.is_serving()
    if serves:
        assert first == "replica r0 ended (signal SIGKILL); restarting in 0.1 s"
        assert child.trouble() is None
    else:
        assert first == child.trouble() == "replica r0 could not start (exit status 2); its messages are above"


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path):
    living = ClusterDirectory.new()
    program = f"""
import os, tempfile
tempfile.tempdir = {str(tmp_path)!r}
from chorus.server.cluster.directory import ClusterDirectory
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
        self.started, self.finished, self.ended = threading.Event(), threading.Event(), threading.Event()
        self.serving = True

    def signal(self, number: int, pid: int | None = None) -> None:
        self.signals.append((number, pid))
        self.came.release()

    def start(self) -> None:
        self.started.set()

    def finish(self) -> None:
        self.finished.set()

    def stop(self) -> None:
        self.ended.set()

    def join(self, seconds: float) -> None:
        if self.finished.is_set():
            assert self.ended.wait(SECONDS)

    def trouble(self) -> str | None:
        return None

    def is_serving(self) -> bool:
        return self.serving


class ReplicaLauncher:
    def threads(self, count: int) -> int:
        return 1

    def replica(self, index: int, settings: str) -> Replica:
        return Replica()

    def close(self) -> None:
        pass


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr(module, "_launcher_of", lambda plan, directory: ReplicaLauncher())
    monkeypatch.setattr(module, "LAST_RETRY_SECONDS", 0.01)
    with ExitStack() as stack:

        def made(plan):
            processes = Processes(plan, Settings())
            stack.callback(processes.stop)
            return processes

        yield made


@pytest.fixture
def processes(make):
    return make(ClusterPlan(replicas=3))


def wait_until(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.005)


def test_replicas_are_replaced_one_after_another_and_not_past_one_that_does_not_listen(processes, caplog):
    caplog.set_level("INFO")
    files = [AddressFile(processes.directory.replica_file(index)) for index in range(3)]
    for file in files:
        file.write("unix:/old")
    processes.restart_replicas()
    for index, replica in enumerate(processes.replicas):
        assert replica.came.acquire(timeout=SECONDS)
        assert [len(one.signals) for one in processes.replicas] == [1] * (index + 1) + [0] * (2 - index)
        assert replica.signals == [(signal.SIGTERM, None)]
        assert caplog.messages == [f"replacing replica r{each}" for each in range(index + 1)], "not that it has been"
        files[index].write("unix:/new")


def test_no_replica_is_replaced_while_another_one_is_down(processes, caplog):
    caplog.set_level("INFO")
    first, second, _ = processes.replicas
    second.serving = False
    processes.restart_replicas()
    wait_until(lambda: caplog.messages)
    assert caplog.messages == ["replica r0 is replaced once the others serve"]
    assert not first.signals
    second.serving = True
    assert first.came.acquire(timeout=SECONDS)


def test_the_process_of_a_replica_that_hangs_for_a_front_is_ended_once(processes):
    processes.directory.stuck_file("r1").write_text("4711")
    processes.kill_stuck()
    processes.kill_stuck()
    assert [one.signals for one in processes.replicas] == [[], [(signal.SIGKILL, 4711)], []]


def test_replicas_come_and_go_by_hints_about_as_many_as_there_are_within_bounds(make):
    processes = make(ClusterPlan(replicas=2, min_replicas=1, max_replicas=3))
    directory, (_, last) = processes.directory, processes.replicas
    processes.scale(0, 2)
    processes.scale(1, 1)  # it is late: there are two
    assert len(processes.replicas) == directory.num_replicas == 2
    processes.scale(1, 2)
    wait_until(lambda: directory.num_replicas == 3)
    added = processes.replicas[2]
    assert added.started.is_set()
    processes.scale(1, 3)
    AddressFile(directory.replica_file(2)).write("unix:/r2")
    wait_until(lambda: not processes.is_changing)
    processes.scale(-1, 3)
    assert added.finished.wait(SECONDS)
    wait_until(lambda: directory.num_replicas == 2)
    processes.scale(-1, 2)  # one at a time
    assert not directory.replica_file(2).exists() and not last.finished.is_set() and processes.replicas[1] is last
    processes.kill("r2", None)  # it hangs while it drains
    assert added.signals == [(signal.SIGKILL, None)]
    added.ended.set()
    wait_until(lambda: not processes.is_changing)
    processes.scale(-1, 2)
    assert last.finished.wait(SECONDS)
    last.ended.set()
    wait_until(lambda: directory.num_replicas == 1 and not processes.is_changing)
    processes.scale(-1, 1)
    assert len(processes.replicas) == 1


def test_one_front_is_enough_to_ask_for_a_replica_and_all_must_agree_to_give_one_back(make):
    processes = make(ClusterPlan(replicas=2, min_replicas=1, max_replicas=3))
    processes.api_servers = [Replica(), Replica()]
    directory = processes.directory

    def told(*hints):
        for api_server, (hint, about) in enumerate(hints):
            directory.tell_hint(api_server, hint, about)
        processes.follow_hints()
        wait_until(lambda: not processes.is_changing)
        return directory.num_replicas

    assert told((1, 2)) == 2  # the other has not said anything
    assert told((-1, 2), (0, 2)) == 2
    assert told((1, 2), (1, 3)) == 2
    assert told((1, 2), (-1, 2)) == 3
    processes.replicas[2].ended.set()
    assert told((1, 2), (1, 2)) == 3
    assert told((-1, 3), (-1, 3)) == 2


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--replicas", "2", "--min-replicas", "3"], "--min-replicas is 3, above --replicas 2"),
        (["--replicas", "4", "--max-replicas", "3"], "--max-replicas is 3, below --replicas 4"),
    ],
)
def test_bounds_hold_the_number_that_a_cluster_starts_with(flags, text):
    parser = Parser(prog="chorus cluster up")
    add_up_flags(parser, int)
    with pytest.raises(UsageError, match=text):
        ClusterPlan.of(parser.parse(flags))
    assert ClusterPlan.of(parser.parse([])).most == ClusterPlan.of(parser.parse([])).least == 2
