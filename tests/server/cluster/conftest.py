"""A cluster of real replica processes of the built-in model with one API server."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from chorus.server.demo.builtin import BUILTIN_ADAPTERS
from tests.server.stores.store_server import StoreServer, store_server

SECONDS = 120
"""For events that must happen, on a machine however busy."""


@dataclass
class Up:
    """A running `chorus cluster up`. lines: of its log."""

    process: subprocess.Popen[str]
    client: httpx.Client
    lines: list[str]

    @property
    def replicas(self) -> list[int]:
        """Process ids of the replicas that are there."""
        return self.children("replica")

    def children(self, word: str) -> list[int]:
        """Process ids of the descendants with this word in their command."""
        parents, found = {}, []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                status = (entry / "stat").read_text().rpartition(")")[2].split()
                command = self.command(int(entry.name))
            except OSError:
                continue
            parents[int(entry.name)] = int(status[1])
            if status[0] != "Z" and re.search(f"chorus.* {word} ", command):
                found.append(int(entry.name))

        def is_ours(pid: int) -> bool:
            return pid == self.process.pid or (pid in parents and is_ours(parents[pid]))

        return sorted(filter(is_ours, found))

    @staticmethod
    def command(pid: int) -> str:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().decode().replace("\0", " ")

    def metric(self, name: str) -> float:
        """Sum of the series of a name, or the value of one with its labels."""
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    def wait_until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, "timed out"
            time.sleep(0.02)


@contextmanager
def cluster_up(replicas: int, *flags: str, command: tuple[str, ...] = ("cluster", "up"), key: str = "") -> Iterator[Up]:
    """A cluster until the end of the block. key: that its client sends."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CHORUS_")}
    arguments = [*command, "--replicas", str(replicas), "--port", "0", "--threads", "1", *flags]
    with subprocess.Popen(
        [sys.executable, "-m", "chorus.server", *arguments], stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r'listening on (http[^\s"]+)', line):
                break
        else:
            pytest.fail(f"the cluster ended before it listened: {''.join(lines)}")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        reader = threading.Thread(target=lambda: lines.extend(process.stderr), daemon=True)
        reader.start()
        with httpx.Client(base_url=found[1], timeout=SECONDS, headers=headers) as client:
            up = Up(process, client, lines)
            try:
                yield up
            finally:
                children = up.replicas + up.children("api-server") + up.children("registry")
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                process.wait(SECONDS)
                reader.join(SECONDS)
                rest = "".join(lines)
                assert "Traceback" not in rest, rest
                for pid in children:
                    assert not running(pid), "a child outlived its parent"


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory from which adapters may be loaded, with two of the built-in ones."""
    root = tmp_path_factory.mktemp("roots")
    for name in ("upper", "reverse"):
        shutil.copytree(BUILTIN_ADAPTERS / name, root / name)
    return root


@pytest.fixture(scope="module")
def store() -> Iterator[StoreServer]:
    """A web server that has the adapters `upper` and `reverse`."""
    with store_server() as server:
        for name in ("upper", "reverse"):
            for file in (BUILTIN_ADAPTERS / name).iterdir():
                server.paths[f"/{name}/{file.name}"] = file.read_bytes()
        yield server


@pytest.fixture
def source_flags(store: StoreServer, tmp_path: Path) -> tuple[str, ...]:
    """Flags by which `stored/NAME` comes from the store."""
    return flags_of(store, tmp_path / "cache")


def flags_of(store: StoreServer, cache: Path) -> tuple[str, ...]:
    rule, hosts = ("--adapter-source", f"stored/*={store.url}/*"), ("--adapter-source-hosts", store.url)
    return (*rule, *hosts, "--adapter-cache", str(cache))


@pytest.fixture(scope="module")
def up(roots: Path, store: StoreServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(
        "sk-operator-key ops admin=yes\n"
        "sk-limited-key limited adapters=upper base=no requests=1\n"
        "sk-frugal-key frugal tokens_per_minute=6\n"
    )
    # replicas may take long to start again on a busy machine, and requests wait for them
    flags = "--slo-tpot", "0.5", "--give-up-seconds", str(SECONDS)
    flags = *flags, "--adapter-roots", str(roots), "--api-key-file", str(keys)
    flags = *flags, *flags_of(store, tmp_path_factory.mktemp("cache"))
    with cluster_up(2, *flags, key="sk-operator-key") as running:
        yield running


def running(pid: int) -> bool:
    """True if there is a process of this id that has not ended: its sockets are open until its last thread has."""
    process = Path("/proc") / str(pid)
    try:
        ended = (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        return not ended or sum(1 for _ in (process / "task").iterdir()) > 1
    except OSError:
        return False
