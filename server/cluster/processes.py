"""A cluster's processes: replicas (perhaps on Ray), the registry and API servers; and their directory."""

from __future__ import annotations

import logging
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ...core.cpus import available_cpus
from ..engine.loaded_adapters import NAMES_FILE
from .address import AddressError, AddressFile, TcpSocket, UnixSocket, parse_address, tls_context
from .child import STOP_SECONDS, Child
from .directory import ClusterDirectory
from .listener import Listener
from .plan import ClusterPlan
from .replica_process import ReplicaSettings
from .stream import LAST_RETRY_SECONDS, read_secret

if TYPE_CHECKING:
    from ..settings import Settings

log = logging.getLogger(__name__)

RESTART_POLL_SECONDS = 0.1


class Kept(Protocol):
    """A process that is kept running, on this machine or elsewhere; see `Child`."""

    def start(self) -> None: ...
    def trouble(self) -> str | None: ...
    def is_serving(self) -> bool: ...
    def signal(self, number: int, pid: int | None = None) -> None: ...
    def finish(self) -> None: ...
    def stop(self) -> None: ...
    def join(self, seconds: float) -> None: ...


class ReplicaLauncher(Protocol):
    """Makes replicas' processes. threads: of each of so many replicas, unless the settings give a number."""

    def threads(self, count: int) -> int: ...
    def replica(self, index: int, settings: str) -> Kept:
        """A replica that is not yet started, and that will write its address to the cluster's directory."""
        ...

    def close(self) -> None:
        """Called when all replicas have ended."""
        ...


class LocalLauncher:
    """Replicas as children of this process."""

    def __init__(self, directory: ClusterDirectory, plan: ClusterPlan) -> None:
        self._directory = directory
        self._plan = plan
        base = None if plan.listen is None else parse_address(plan.listen, plan.tls)
        if isinstance(base, UnixSocket):
            raise AddressError(f"{base} is the address of one replica; leave --listen out for unix sockets")
        self._base = base

    def threads(self, count: int) -> int:
        return max(1, available_cpus() // count)

    def replica(self, index: int, settings: str) -> Child:
        base, directory = self._base, self._directory
        listen = directory.socket(f"r{index}")
        if base is not None:
            listen = str(TcpSocket(base.host, base.port and base.port + index, base.tls))
        return directory.replica(f"r{index}", listen, directory.replica_file(index), self._plan.tls, settings)

    def close(self) -> None:
        pass


class Processes:
    """The children of a cluster's first process; see `stop`."""

    def __init__(self, plan: ClusterPlan, settings: Settings) -> None:
        """Raises OSError, including AddressError and TlsError, or ValueError for a plan that can't be carried out."""
        self.directory = directory = ClusterDirectory.new(plan.secret_file)
        self.replicas: list[Kept] = []
        self._leaving: list[Kept] = []  # a replica that no longer belongs to `replicas`, while it drains
        self._plan = plan
        self._grace_seconds = settings.grace_seconds
        self.api_servers: list[Child] = []
        self._registry: list[Child] = []
        self._stopping = threading.Event()
        self._changing = threading.Lock()  # see `is_changing`
        self._launcher: ReplicaLauncher | None = None
        try:
            read_secret(directory.secret_file)
            if plan.tls is not None:
                tls_context(plan.tls, is_client=True)
            self._launcher = launcher = _launcher_of(plan, directory)
            replica = ReplicaSettings.of(settings)
            if replica.engine.threads is None:
                replica.engine.threads = launcher.threads(plan.most)
            self._settings = replica.model_dump_json(exclude_unset=True)
            self.replicas = [launcher.replica(index, self._settings) for index in range(plan.replicas)]
            directory.tell_replicas(plan.replicas)
            self._registry = _registry_of(plan, directory, settings)
            for child in (*self._registry, *self.replicas):
                child.start()
        except BaseException:
            self.stop()
            raise

    def start_api_servers(self, count: int) -> None:
        for index in range(count):
            where = ["--directory", str(self.directory.path), "--index", str(index)]
            command = ["cluster", "api-server", *where]
            self.api_servers.append(Child(f"api server {index}", command, self.directory.ready_file(index)))
            self.api_servers[-1].start()

    @property
    def api_servers_ready(self) -> bool:
        return all(self.directory.ready_file(index).exists() for index in range(len(self.api_servers)))

    def trouble(self) -> str | None:
        """The reason why the cluster can't run: a child that could not start."""
        for child in (*self._registry, *self.replicas, *self.api_servers):
            if (text := child.trouble()) is not None:
                return text
        return None

    def kill(self, name: str, pid: int | None) -> None:
        """End a replica's process that hangs, unless another one has replaced it; it is restarted."""
        found = dict(enumerate((*self.replicas, *self._leaving))).get(int(name.removeprefix("r")))
        if found is not None:
            found.signal(signal.SIGKILL, pid)

    def kill_stuck(self) -> None:
        """End the replicas' processes that API servers have named in their directory."""
        for index in range(self._plan.most):
            file = self.directory.stuck_file(f"r{index}")
            with suppress(FileNotFoundError, ValueError):
                pid = int(file.read_text())
                file.unlink()
                self.kill(f"r{index}", pid)

    def follow_hints(self) -> None:
        """Follow the API servers' hints: add a replica if any of them asks for one, remove one if all of them agree."""
        count = len(self.replicas)
        told = [self.directory.hint(api_server) for api_server in range(len(self.api_servers))]
        hints = [found[0] for found in told if found is not None and found[1] == count]
        if len(hints) == len(self.api_servers):
            self.scale(max(hints), count)

    def scale(self, hint: int, about: int) -> None:
        """Add a replica, or remove the last one, within the plan's limits; returns at once.

        about: the number of replicas that the hint refers to. Every change changes this number, so a late or repeated
        hint has no effect. Hints are also ignored while replicas are being replaced.
        """
        wanted = min(max(about + hint, self._plan.least), self._plan.most)
        if wanted == about or not self._changing.acquire(blocking=False):
            return
        if about != len(self.replicas) or self._stopping.is_set():
            self._changing.release()
            return
        change = self._start_one if wanted > about else self._give_back
        threading.Thread(target=self._change, args=(change,), name="chorus-scale", daemon=True).start()

    @property
    def is_changing(self) -> bool:
        """True while replicas are replaced, added or removed."""
        return self._changing.locked()

    def _change(self, change: Callable[[], None]) -> None:
        """The caller holds `_changing`."""
        try:
            change()
        except Exception:
            log.exception("the number of replicas could not be changed")
        finally:
            self._changing.release()

    def _start_one(self) -> None:
        assert self._launcher is not None
        index = len(self.replicas)
        log.info("adding replica r%d: the load needs it", index)
        replica = self._launcher.replica(index, self._settings)
        replica.start()
        self.replicas.append(replica)
        self.directory.tell_replicas(index + 1)

    def _give_back(self) -> None:
        """Remove the last replica: the API servers move its requests to others, and it ends."""
        replica = self.replicas.pop()
        self._leaving.append(replica)
        index = len(self.replicas)
        log.info("removing replica r%d: the load does not need it", index)
        self.directory.tell_replicas(index)
        self.directory.replica_file(index).unlink(missing_ok=True)
        replica.finish()
        replica.join(self._grace_seconds + STOP_SECONDS)
        self._leaving.clear()

    def restart_replicas(self) -> None:
        """Replace the replicas' processes, one after another, while requests continue; returns at once."""
        threading.Thread(target=self._restart_replicas, name="chorus-restart", daemon=True).start()

    def _restart_replicas(self) -> None:
        with self._changing:
            for index, replica in enumerate(self.replicas):
                if not self._others_serve(index):
                    return
                address = AddressFile(self.directory.replica_file(index))
                before = address.stamp()
                log.info("replacing replica r%d", index)
                replica.signal(signal.SIGTERM)
                # if a new process can't start, the others are not replaced
                while address.stamp() in (before, None):
                    if self._stopping.wait(RESTART_POLL_SECONDS):
                        return
                if self._stopping.wait(2 * LAST_RETRY_SECONDS):  # API servers connect again
                    return
            log.info("all replicas have been replaced")

    def _others_serve(self, index: int) -> bool:
        """Wait until all replicas but this one serve; False if the cluster stops before."""
        others = [other for at, other in enumerate(self.replicas) if at != index]
        is_told = False
        while not all(other.is_serving() for other in others):
            if not is_told:
                log.info("replica r%d is replaced once the others serve", index)
            is_told = True
            if self._stopping.wait(RESTART_POLL_SECONDS):
                return False
        return True

    def drain_api_servers(self, seconds: float) -> None:
        """Have the API servers finish their requests within so many seconds."""
        for api_server in self.api_servers:
            api_server.finish()
        _join(self.api_servers, seconds)

    def stop(self) -> None:
        """End all of them, and wait for it."""
        self._stopping.set()
        everything = [*self.api_servers, *self.replicas, *self._leaving, *self._registry]
        for child in everything:
            child.stop()
        _join(everything, STOP_SECONDS)
        if self._launcher is not None:
            self._launcher.close()
        shutil.rmtree(self.directory.path, ignore_errors=True)


def _launcher_of(plan: ClusterPlan, directory: ClusterDirectory) -> ReplicaLauncher:
    if plan.ray is None:
        return LocalLauncher(directory, plan)
    from .ray_actors import RayLauncher

    return RayLauncher(directory, plan)


def _registry_of(plan: ClusterPlan, directory: ClusterDirectory, settings: Settings) -> list[Child]:
    """The registry's process, unless it runs elsewhere or none is needed.

    With uploads, the names are stored next to the files, so the cluster has both again after a restart.
    """
    file = plan.registry
    if file is None and plan.api_servers == 1:
        return []
    if file is not None and file.startswith(("unix:", "tcp://")):
        if plan.secret_file is None:
            raise ValueError("a registry that runs elsewhere needs its secret: give --secret-file FILE")
        AddressFile(directory.registry_file).write(str(parse_address(file, plan.tls)))
        return []
    if (uploads := settings.adapter_uploads) is not None:
        uploads.mkdir(parents=True, exist_ok=True)
    where = Path(file or (directory.path / "registry.sqlite" if uploads is None else uploads / NAMES_FILE)).absolute()
    listener = Listener(directory.socket("registry"), directory.secret_file, directory.registry_file)
    command = ["cluster", "registry", "--file", str(where), "--log-format", settings.log_format, *listener.flags()]
    return [Child("the registry", command, directory.registry_file)]


def _join(children: Sequence[Kept], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
