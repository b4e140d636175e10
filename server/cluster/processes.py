"""The processes of a cluster: replicas, which may be a Ray cluster's, the registry and fronts; their directory."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

from ...core.cpus import available_cpus
from .address import AddressError, AddressFile, TcpSocket, UnixSocket, parse_address, tls_context
from .child import Child
from .link import Link
from .listener import Listener
from .plan import Plan
from .reconnect import LAST_RETRY_SECONDS
from .replica_settings import ReplicaSettings
from .stream import new_secret, read_secret

if TYPE_CHECKING:
    from ..settings import Settings

log = logging.getLogger(__name__)

STOP_SECONDS = 5.0
"""Seconds that processes may take to end before they are killed."""

RESTART_POLL_SECONDS = 0.1


class Kept(Protocol):
    """A process that is kept running, wherever it is; see `Child`."""

    def start(self) -> None: ...
    def trouble(self) -> str | None: ...
    def signal(self, number: int, pid: int | None = None) -> None: ...
    def finish(self) -> None: ...
    def stop(self) -> None: ...
    def join(self, seconds: float) -> None: ...


class Launcher(Protocol):
    """Makes replicas' processes. threads: of each of so many replicas, where the settings do not say."""

    def threads(self, count: int) -> int: ...
    def replica(self, index: int, settings: str) -> Kept:
        """A replica that is not yet started, and that will tell its address to the cluster's directory."""
        ...

    def close(self) -> None:
        """Called when all replicas have ended."""
        ...


class ClusterDirectory:
    """Addresses and secrets of a cluster, in a directory that only this user may enter."""

    _PREFIX, _LOCK = "chorus-", "lock"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.secret_file = path / "secret"
        self.settings_file = path / "replica.json"
        self.given_file = path / "front.json"
        self.registry_file = path / "registry.address"
        self._locked: IO[str] | None = None
        self._count_file = path / "replicas"

    @classmethod
    def new(cls, secret_file: Path | None = None) -> ClusterDirectory:
        """A directory that is locked while this object lives. Directories of killed processes are removed.

        secret_file: of a secret that machines share; None: a new secret.
        """
        cls._remove_abandoned()
        # a socket's path has at most 107 bytes, which a name of the user's choice may exceed
        directory = cls(Path(tempfile.mkdtemp(prefix=cls._PREFIX)))
        draft = directory.path / "lock.draft"  # no other process finds it before it is locked
        directory._locked = draft.open("w")
        fcntl.flock(directory._locked, fcntl.LOCK_EX)
        draft.rename(directory.path / cls._LOCK)
        if secret_file is None:
            new_secret(directory.secret_file)
        else:
            directory.secret_file.symlink_to(secret_file.absolute())
        return directory

    @classmethod
    def _remove_abandoned(cls) -> None:
        for file in Path(tempfile.gettempdir()).glob(f"{cls._PREFIX}*/{cls._LOCK}"):
            with suppress(OSError):  # its process lives, or another one removes it
                if file.parent.lstat().st_uid == os.getuid():
                    with file.open() as lock:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        shutil.rmtree(file.parent)

    @property
    def secret(self) -> bytes:
        return read_secret(self.secret_file)

    def socket(self, name: str) -> str:
        """Address of the unix socket of a process."""
        return f"unix:{self.path / name}.sock"

    def replica_file(self, index: int) -> Path:
        """The file that tells where a replica listens."""
        return self.path / f"r{index}.address"

    def ready_file(self, front: int) -> Path:
        """The file that a front makes once it listens."""
        return self.path / f"f{front}.ready"

    def stuck_file(self, name: str) -> Path:
        """The file in which a front names the process of a replica that hangs."""
        return self.path / f"{name}.stuck"

    @property
    def num_replicas(self) -> int:
        """Number of replicas that there are to be now, from `r0` on; further replicas may still have files."""
        return int(self._count_file.read_text())

    def tell_replicas(self, count: int) -> None:
        _replace(self._count_file, str(count))

    def hint(self, front: int) -> tuple[int, int] | None:
        """A front's scale hint and the number of replicas that it is about; None before the first."""
        with suppress(FileNotFoundError):
            hint, about = map(int, self._hint_file(front).read_text().split())
            return hint, about
        return None

    def tell_hint(self, front: int, hint: int, about: int) -> None:
        if self.hint(front) != (hint, about):
            _replace(self._hint_file(front), f"{hint} {about}")

    def _hint_file(self, front: int) -> Path:
        return self.path / f"f{front}.hint"

    def links(self, count: int, silent_seconds: float, tls: Path | None = None) -> list[Link]:
        """Links to so many replicas."""
        addresses = [AddressFile(self.replica_file(index), tls) for index in range(count)]
        return [Link(f"r{index}", one, self.secret, silent_seconds) for index, one in enumerate(addresses)]

    def replica(self, name: str, listen: str, address_file: Path, tls: Path | None, settings: str) -> Child:
        """A replica's process of this machine. settings: as JSON."""
        self.settings_file.write_text(settings)
        listener = Listener(listen, self.secret_file, address_file, tls)
        return Child(f"replica {name}", ["replica", *listener.flags(), "--settings", str(self.settings_file)])


class LocalLauncher:
    """Replicas as children of this process."""

    def __init__(self, directory: ClusterDirectory, plan: Plan) -> None:
        self._directory = directory
        self._plan = plan
        base = None if plan.listen is None else parse_address(plan.listen, plan.tls)
        if isinstance(base, UnixSocket):
            raise AddressError(f"{base} is of one replica; leave --listen out for unix sockets")
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

    def __init__(self, plan: Plan, settings: Settings) -> None:
        """OSError, AddressError and TlsError among them, or ValueError for a plan that can't be carried out."""
        self.directory = directory = ClusterDirectory.new(plan.secret_file)
        self.replicas: list[Kept] = []
        self._leaving: list[Kept] = []  # the replica behind `replicas`, while it is given back
        self._plan = plan
        self._grace_seconds = settings.grace_seconds
        self.fronts: list[Child] = []
        self._registry: list[Child] = []
        self._stopping = threading.Event()
        self._changing = threading.Lock()  # see `is_changing`
        self._launcher: Launcher | None = None
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
            self._registry = _registry_of(plan, directory)
            for child in (*self._registry, *self.replicas):
                child.start()
        except BaseException:
            self.stop()
            raise

    def start_fronts(self, count: int, flags: Sequence[str]) -> None:
        for index in range(count):
            where = ["--directory", str(self.directory.path), "--index", str(index)]
            self.fronts.append(Child(f"front f{index}", ["cluster", "front", *where, *flags]))
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

    def kill(self, name: str, pid: int | None) -> None:
        """End a replica's process that hangs, unless another one has taken its place; it is started again."""
        found = dict(enumerate((*self.replicas, *self._leaving))).get(int(name.removeprefix("r")))
        if found is not None:
            found.signal(signal.SIGKILL, pid)

    def kill_stuck(self) -> None:
        """End the replicas' processes that fronts have named in their directory."""
        for index in range(self._plan.most):
            file = self.directory.stuck_file(f"r{index}")
            with suppress(FileNotFoundError, ValueError):
                pid = int(file.read_text())
                file.unlink()
                self.kill(f"r{index}", pid)

    def follow_hints(self) -> None:
        """Obey the fronts: one more replica where any of them asks for it, one less where all of them say so."""
        count = len(self.replicas)
        told = [self.directory.hint(front) for front in range(len(self.fronts))]
        hints = [found[0] for found in told if found is not None and found[1] == count]
        if len(hints) == len(self.fronts):
            self.scale(max(hints), count)

    def scale(self, hint: int, about: int) -> None:
        """Start one more replica, or give the last one back, within the plan's bounds; returns at once.

        about: the number of replicas that the hint is about. As every change changes it, a hint that comes late, or
        again, does nothing; nor does one while replicas are being replaced.
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
        """True while replicas are replaced, or one comes or goes."""
        return self._changing.locked()

    def _change(self, change: Callable[[], None]) -> None:
        """The caller has locked `_changing`."""
        try:
            change()
        except Exception:
            log.exception("the number of replicas could not be changed")
        finally:
            self._changing.release()

    def _start_one(self) -> None:
        assert self._launcher is not None
        index = len(self.replicas)
        log.info("replica r%d is started, as the load asks for it", index)
        replica = self._launcher.replica(index, self._settings)
        replica.start()
        self.replicas.append(replica)
        self.directory.tell_replicas(index + 1)

    def _give_back(self) -> None:
        """The fronts move the last replica's requests to others, and it ends."""
        replica = self.replicas.pop()
        self._leaving.append(replica)
        index = len(self.replicas)
        log.info("replica r%d is given back, as the load does without it", index)
        self.directory.tell_replicas(index)
        self.directory.replica_file(index).unlink(missing_ok=True)
        replica.finish()
        replica.join(self._grace_seconds + STOP_SECONDS)
        self._leaving.clear()

    def restart_replicas(self) -> None:
        """Replace the replicas' processes, one after another, while answers go on; returns at once."""
        threading.Thread(target=self._restart_replicas, name="chorus-restart", daemon=True).start()

    def _restart_replicas(self) -> None:
        with self._changing:
            for index, replica in enumerate(self.replicas):
                address = AddressFile(self.directory.replica_file(index))
                before = address.stamp()
                log.info("replica r%d is replaced", index)
                replica.signal(signal.SIGTERM)
                # a new process that can't start stops the others' being replaced
                while address.stamp() in (before, None):
                    if self._stopping.wait(RESTART_POLL_SECONDS):
                        return
                if self._stopping.wait(2 * LAST_RETRY_SECONDS):  # fronts connect again
                    return
            log.info("all replicas have been replaced")

    def drain_fronts(self, seconds: float) -> None:
        """Have the fronts end their answers, within so many seconds."""
        for front in self.fronts:
            front.finish()
        _join(self.fronts, seconds)

    def stop(self) -> None:
        """End all of them, and wait for it."""
        self._stopping.set()
        everything = [*self.fronts, *self.replicas, *self._leaving, *self._registry]
        for child in everything:
            child.stop()
        _join(everything, STOP_SECONDS)
        if self._launcher is not None:
            self._launcher.close()
        shutil.rmtree(self.directory.path, ignore_errors=True)


def _launcher_of(plan: Plan, directory: ClusterDirectory) -> Launcher:
    if plan.ray is None:
        return LocalLauncher(directory, plan)
    from .ray_actors import RayLauncher

    return RayLauncher(directory, plan)


def _registry_of(plan: Plan, directory: ClusterDirectory) -> list[Child]:
    """The registry's process, unless it runs elsewhere or none is needed."""
    file = plan.registry
    if file is None and plan.fronts == 1:
        return []
    if file is not None and file.startswith(("unix:", "tcp://")):
        if plan.secret_file is None:
            raise ValueError("a registry that runs elsewhere needs its secret: give --secret-file FILE")
        AddressFile(directory.registry_file).write(str(parse_address(file, plan.tls)))
        return []
    where = Path(file or directory.path / "registry.sqlite").absolute()
    listener = Listener(directory.socket("registry"), directory.secret_file, directory.registry_file)
    return [Child("the registry", ["cluster", "registry", "--file", str(where), *listener.flags()])]


def _replace(file: Path, text: str) -> None:
    """Readers see what was there, or all of this."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)


def _join(children: Sequence[Kept], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
