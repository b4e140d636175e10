"""The processes of a cluster on one machine: replicas, the registry and fronts, over sockets in a private directory."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.cpus import available_cpus
from .child import Child
from .link import Link
from .replica_settings import ReplicaSettings
from .stream import new_secret, read_secret

if TYPE_CHECKING:
    from ..settings import Settings

STOP_SECONDS = 5.0
"""Seconds that processes may take to end before they are killed."""


class ClusterDirectory:
    """Sockets and secrets of a cluster, in a directory that only this user may enter."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.secret_file = path / "secret"
        self.settings_file = path / "replica.json"
        self.given_file = path / "front.json"
        self.registry_socket = path / "registry.sock"

    @classmethod
    def new(cls) -> ClusterDirectory:
        # a socket's path has at most 107 bytes, which a name of the user's choice may exceed
        directory = cls(Path(tempfile.mkdtemp(prefix="chorus-")))
        new_secret(directory.secret_file)
        return directory

    @property
    def secret(self) -> bytes:
        return read_secret(self.secret_file)

    def socket(self, index: int) -> Path:
        """Where a replica listens."""
        return self.path / f"r{index}.sock"

    def ready_file(self, front: int) -> Path:
        """The file that a front makes once it listens."""
        return self.path / f"f{front}.ready"

    def links(self, count: int, silent_seconds: float) -> list[Link]:
        """Links to so many replicas."""
        return [Link(f"r{index}", self.socket(index), self.secret, silent_seconds) for index in range(count)]


class Processes:
    """The children of a cluster's first process; see `stop`."""

    def __init__(self, count: int, settings: Settings, registry: Path | None, *, several_fronts: bool = False) -> None:
        """count: of replicas. registry: its file. several_fronts: they need one, which lasts as long as the cluster."""
        self.directory = directory = ClusterDirectory.new()
        replica = ReplicaSettings.of(settings)
        if replica.engine.threads is None:
            replica.engine.threads = max(1, available_cpus() // count)
        directory.settings_file.write_text(replica.model_dump_json())
        secret = ["--secret-file", str(directory.secret_file)]
        self.replicas = [
            Child(
                f"replica r{index}",
                ["replica", "--socket", str(directory.socket(index)), *secret,
                 "--settings", str(directory.settings_file)],
            )
            for index in range(count)
        ]  # fmt: skip
        self.fronts: list[Child] = []
        self._registry: list[Child] = []
        if registry is None and several_fronts:
            registry = directory.path / "registry.sqlite"
        if registry is not None:
            where = ["--file", str(registry.absolute()), "--socket", str(directory.registry_socket)]
            self._registry = [Child("the registry", ["cluster", "registry", *where, *secret])]
        for child in (*self._registry, *self.replicas):
            child.start()

    def start_fronts(self, count: int, arguments: Sequence[str]) -> None:
        for index in range(count):
            where = ["--directory", str(self.directory.path), "--index", str(index)]
            self.fronts.append(Child(f"front f{index}", ["cluster", "front", *where, *arguments]))
            self.fronts[-1].start()

    @property
    def fronts_ready(self) -> bool:
        return all(self.directory.ready_file(index).exists() for index in range(len(self.fronts)))

    def trouble(self) -> str | None:
        """Why the cluster will not be there: a child that could not start."""
        for child in (*self._registry, *self.replicas, *self.fronts):
            if (text := child.trouble()) is not None:
                return text
        return None

    def kill(self, link: Link) -> None:
        """End a replica that hangs; it is started again."""
        self.replicas[int(link.name.removeprefix("r"))].signal(signal.SIGKILL)

    def drain_fronts(self, seconds: float) -> None:
        """Have the fronts end their answers, within so many seconds."""
        for front in self.fronts:
            front.finish()
        _join(self.fronts, seconds)

    def stop(self) -> None:
        """End all of them, and wait for it."""
        everything = [*self.fronts, *self.replicas, *self._registry]
        for child in everything:
            child.stop()
        _join(everything, STOP_SECONDS)
        shutil.rmtree(self.directory.path, ignore_errors=True)


def _join(children: Sequence[Child], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
