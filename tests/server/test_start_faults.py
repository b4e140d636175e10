"""The n-th open, read, allocation and thread start of a server's start fails, for every n.

It serves all the same, or serves with an adapter in quarantine, or ends with a line that says why and a code that is
not 0. It never hangs, shows a traceback or leaves a thread.
"""

from __future__ import annotations

import builtins
import errno
import gc
import io
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from chorus.server.cli import command as cli
from chorus.server.demo.builtin import BUILTIN_ADAPTERS, BUILTIN_MODEL
from chorus.server.http.server import HttpServer
from chorus.server.start.exits import ExitDeadline

SECONDS = 60
"""In which any start ends, on a busy machine, too."""

NAMES = ("reverse", "upper")


class Faults:
    """Counts calls that may fail, and fails the one at `turn`."""

    def __init__(self, monkeypatch, roots):
        self.count, self.turn, self.fired = 0, 0, ""
        names = {"adapter_config.json", "adapter_model.safetensors"}

        def is_ours(path):
            text = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
            return text in names or text.startswith(roots)

        def failing(kind, plain, error, applies=lambda *args: True):
            def call(*args, **kwargs):
                if applies(*args):
                    self.point(kind, error)
                return plain(*args, **kwargs)

            return call

        disk = OSError(errno.EIO, "Input/output error")
        first_is_ours = lambda path, *args: is_ours(path)  # noqa: E731
        for module, name in ((os, "open"), (builtins, "open"), (io, "open"), (os, "scandir")):
            monkeypatch.setattr(module, name, failing("open", getattr(module, name), disk, first_is_ours))
        for name in ("read", "preadv"):
            monkeypatch.setattr(os, name, failing("read", getattr(os, name), disk))
        for name in ("empty", "zeros"):
            monkeypatch.setattr(torch, name, failing("allocation", getattr(torch, name), MemoryError("no memory")))
        thread = RuntimeError("can't start new thread")
        monkeypatch.setattr(threading.Thread, "start", failing("thread", threading.Thread.start, thread))

    def point(self, kind, error):
        if self.turn < 0:
            return
        self.count += 1
        if self.count == self.turn:
            self.fired = kind
            raise type(error)(*error.args)

    def begin(self, turn):
        self.count, self.turn, self.fired = 0, turn, ""


@pytest.fixture
def roots(tmp_path):
    shutil.copytree(BUILTIN_MODEL, tmp_path / "model")
    for name in NAMES:
        shutil.copytree(BUILTIN_ADAPTERS / name, tmp_path / "adapters" / name)
    return tmp_path


@pytest.fixture
def start(roots, monkeypatch, capfd):
    """`start()`: the exit code of `chorus serve`, its adapters and quarantine once it served, and its output."""
    seen = []
    plain = HttpServer.on_tick

    async def stop_at_once(server, counter):
        engine = server.worker.call(lambda engine: (engine.store.names(), sorted(engine.adapters.quarantine))).result(
            SECONDS
        )
        seen.append(engine)
        server.should_exit = True
        return await plain(server, counter)

    def never_exit(code):
        raise AssertionError(f"os._exit({code}): a thread that is no daemon is left")

    monkeypatch.setattr(HttpServer, "on_tick", stop_at_once)
    monkeypatch.setattr(ExitDeadline, "start", lambda self: None)  # it lasts as long as the process
    monkeypatch.setattr("chorus.server.start.launch.take_short_turns", lambda: None)  # so does this
    monkeypatch.setattr(os, "_exit", never_exit)
    # On a busy machine a start lasts longer than the time after which a quarantined adapter is tried again.
    monkeypatch.setattr("chorus.server.engine.adapter_health.TURN_SECONDS", 600.0)

    def run():
        seen.clear()
        capfd.readouterr()
        code = cli.main(
            [
                "serve",
                "--model",
                str(roots / "model"),
                "--adapters",
                str(roots / "adapters"),
                "--port",
                "0",
                "--threads",
                "1",
                "--memory-bytes",
                "2MiB",
                "--max-num-seqs",
                "2",
            ]
        )
        return code, seen[0] if seen else None, capfd.readouterr().err

    return run


@pytest.mark.slow
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_every_point_of_a_start_may_fail(start, roots, monkeypatch):
    def too_long(*args):
        raise AssertionError("the start hangs")

    faults = Faults(monkeypatch, str(roots))
    before, handler = set(threading.enumerate()), signal.signal(signal.SIGALRM, too_long)
    handlers, level = logging.root.handlers[:], logging.getLogger("chorus").level
    kinds, outcomes, turn = set(), set(), 0
    try:
        while True:
            faults.begin(turn)
            signal.alarm(SECONDS)
            code, served, text = start()
            signal.alarm(0)
            fired, faults.turn = faults.fired, -1
            what = f"fault {turn} ({fired}): {code}, {served}\n{text}"
            assert "Traceback" not in text, what
            if turn and not fired:
                break
            if served is None:
                assert code == 1, what
                assert "chorus: error: " in text, what
                outcomes.add("refused")
            else:
                assert code == 0, what
                names, quarantined = served
                assert sorted([*names, *quarantined]) == sorted(NAMES), what
                outcomes.add("quarantined" if quarantined else "served")
            deadline = time.monotonic() + SECONDS
            while left := {thread for thread in threading.enumerate() if thread not in before}:
                assert time.monotonic() < deadline, f"{left} left by {what}"
                time.sleep(0.002)
            kinds.add(fired)
            turn += 1
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        logging.root.handlers[:] = handlers
        logging.getLogger("chorus").setLevel(level)
        gc.collect()
    assert kinds >= {"open", "read", "allocation", "thread"}
    assert outcomes == {"served", "quarantined", "refused"}


@pytest.mark.slow
def test_a_replica_that_can_not_begin_says_why_in_a_line(tmp_path):
    """In a process of its own; the API server ends with its own line, too, and looks for no replica afterwards."""
    command = [sys.executable, "-m", "chorus.server", "serve", str(BUILTIN_MODEL), "--port", "0"]
    command += ["--device", "cuda", "--tensor-parallel-size", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=10 * SECONDS, cwd=tmp_path)
    assert ended.returncode == 1
    assert "chorus: error: can't serve" in ended.stderr
    assert "tensor_parallel_size is 2, but each rank needs a GPU and PyTorch finds 0; set it" in ended.stderr, (
        ended.stderr
    )
    assert "could not start (exit status 1); its messages are above" in ended.stderr
    assert "Traceback" not in ended.stderr
