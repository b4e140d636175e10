"""Replicas on a Ray cluster: Ray chooses their nodes, and starts them elsewhere when a node is gone.

An actor keeps one replica's process running on its node, as `Child` does here, and reports its address. Requests,
tokens and secrets do not go through Ray: each node has its own files of secrets at the same paths.
"""

# Ray is an extra: types are checked without it, too.
# pyright: reportMissingImports=false

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from ...memory.host.child_python import SAFE_PATH, python_command
from ..start.checks import LaunchError
from .address import LOOPBACK, AddressFile
from .child import STOP_SECONDS
from .directory import ClusterDirectory
from .plan import ClusterPlan
from .replica_process import ReplicaSettings

log = logging.getLogger(__name__)

LOCAL = "local"
"""Address of a Ray cluster that is started here and ends with this process."""

POLL_SECONDS = 0.5
"""Seconds between checks of the address of an actor's replica."""

DRAIN_SECONDS = 3600.0
"""Seconds that an actor waits for a replica that drains; `RayReplica.join` ends both sooner."""

PLACING_SECONDS = 20.0
"""Seconds after which the log says that a replica has not been placed."""

OBJECT_STORE_BYTES = 200 << 20
"""Bytes for Ray's own objects, of which there are hardly any."""

ENVIRONMENT = {
    SAFE_PATH: "1",  # for the processes that Ray starts
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # Ray's own value, 15, would apply to the replicas, too
    "RAY_agent_register_timeout_ms": "300000",  # Ray's own 30 s are too short for a node that is starting replicas
}


class ReplicaHost:
    """The actor of one replica."""

    def __init__(self, name: str, settings: str, secret_file: str, tls: str | None, *, is_local: bool) -> None:
        """settings: as JSON. is_local: the whole cluster is on this machine, so a unix socket is enough."""
        import ray

        self._directory = directory = ClusterDirectory.new(Path(secret_file))
        self._address = AddressFile(directory.replica_file(0))
        listen = directory.socket(name) if is_local else f"tcp://{_in_url(ray.util.get_node_ip_address())}:0"
        self._child = directory.replica(name, listen, self._address.path, None if tls is None else Path(tls), settings)
        self._child.start()

    def state(self) -> tuple[tuple[str, int] | None, str | None, bool]:
        """The replica's address, as `AddressFile.stamp`, the reason why it will not run, and whether it serves."""
        return self._address.stamp(), self._child.trouble(), self._child.is_serving()

    def signal(self, number: int, pid: int | None) -> None:
        self._child.signal(number, pid)

    def finish(self) -> None:
        """Have the replica's process drain and end, and wait for it."""
        self._child.finish()
        self._child.join(DRAIN_SECONDS)
        shutil.rmtree(self._directory.path, ignore_errors=True)

    def stop(self) -> None:
        """End the replica's process, and wait for it."""
        self._child.stop()
        self._child.join(STOP_SECONDS)
        shutil.rmtree(self._directory.path, ignore_errors=True)


class RayReplica:
    """A replica in an actor, for the launcher: the counterpart of `Child` on this machine."""

    def __init__(self, name: str, actor: Any, address: AddressFile) -> None:
        self._name = name
        self._actor = actor
        self._address = address
        self._trouble: str | None = None
        self._is_serving = False
        self._stopping = threading.Event()
        self._ending: Any = None
        self._thread = threading.Thread(target=self._follow, name=f"chorus-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def trouble(self) -> str | None:
        return self._trouble

    def is_serving(self) -> bool:
        return self._is_serving

    def signal(self, number: int, pid: int | None = None) -> None:
        self._actor.signal.remote(int(number), pid)

    def finish(self) -> None:
        self._stopping.set()
        self._ending = self._actor.finish.remote()

    def stop(self) -> None:
        self._stopping.set()
        self._ending = self._actor.stop.remote()

    def join(self, seconds: float) -> None:
        import ray
        from ray.exceptions import RayError

        with suppress(RayError):
            ray.get(self._ending, timeout=seconds)
        ray.kill(self._actor)
        self._thread.join(seconds)

    def _follow(self) -> None:
        """Publish the replica's address: the replica, its actor and its node may be replaced at any time."""
        import ray
        from ray.exceptions import ActorDiedError, GetTimeoutError, RayError

        seen, is_gone = None, False
        while not self._stopping.wait(POLL_SECONDS):
            try:
                stamp, self._trouble, self._is_serving = ray.get(self._actor.state.remote(), timeout=PLACING_SECONDS)
            except GetTimeoutError:
                log.warning("replica %s waits for a node of the Ray cluster that has room for it", self._name)
                continue
            except ActorDiedError as error:  # for good: it could not start
                if not self._stopping.is_set():
                    self._trouble = f"replica {self._name} can't be placed: {' '.join(str(error).split())}"
                    log.error("%s", self._trouble)
                return
            except RayError as error:
                self._is_serving = False
                if not is_gone:
                    log.warning("replica %s is restarted elsewhere: %s", self._name, str(error).partition("\n")[0])
                is_gone = True
                continue
            is_gone = False
            if stamp not in (None, seen):
                seen = stamp
                self._address.write(stamp[0])


def _connect(options: Mapping[str, Any], attempts: int) -> None:
    """Join a cluster, or start one, whose first node may take longer on a busy machine than Ray waits for it."""
    import ray

    for left in reversed(range(attempts)):
        try:
            ray.init(**options, logging_level=logging.WARNING)
            return
        except Exception as error:  # Ray has no class for a node that is late
            if "timed out" not in str(error):
                raise
            ray.shutdown()
            if not left:
                raise TimeoutError(str(error)) from None
            log.warning("Ray did not start in time, and is started once more: %s", error)


class RayLauncher:
    """Replicas as actors of a Ray cluster; raises LaunchError without one."""

    def __init__(self, directory: ClusterDirectory, plan: ClusterPlan) -> None:
        import_ray()
        import ray

        self._directory = directory
        self._plan = plan
        self._is_local = plan.ray == LOCAL
        if not self._is_local and plan.secret_file is None:
            raise LaunchError("--ray needs --secret-file, a file with the same secret on all nodes, unless it is local")
        options: dict[str, Any] = {"address": plan.ray}
        if self._is_local:
            options |= {
                "include_dashboard": False,
                "_node_ip_address": LOOPBACK,
                "object_store_memory": OBJECT_STORE_BYTES,
            }
        try:
            with _own_signals():
                _connect(options, 2 if self._is_local else 1)
        except (ConnectionError, TimeoutError, ValueError, RuntimeError) as error:
            raise LaunchError(f"no Ray cluster at {plan.ray}: {error}") from None
        self._nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]

    def threads(self, count: int) -> int:
        return even_share([int(node.get("CPU", 0)) for node in self._nodes], count)

    def replica(self, index: int, settings: str) -> RayReplica:
        import ray

        plan, directory = self._plan, self._directory
        engine = ReplicaSettings.model_validate_json(settings).engine
        needs_gpu = engine.device.startswith("cuda") or (
            engine.device == "auto" and any("GPU" in node for node in self._nodes)
        )
        remote = ray.remote(ReplicaHost).options(
            # on one machine no node with more processors will appear: its replicas share them, as without Ray
            num_cpus=0 if self._is_local else engine.threads or 1,
            name=None,
            num_gpus=int(needs_gpu),
            max_restarts=-1,
            scheduling_strategy="SPREAD",
        )
        tls = None if plan.tls is None else str(plan.tls.absolute())
        # not resolved: files of a mounted secret are links to different paths on each node
        secret = str((plan.secret_file or directory.secret_file).absolute())
        actor = remote.remote(f"r{index}", settings, secret, tls, is_local=self._is_local)
        return RayReplica(f"r{index}", actor, AddressFile(directory.replica_file(index)))

    def close(self) -> None:
        import ray

        ray.shutdown()


def join(address: str, cpus: int | None, gpus: int | None) -> NoReturn:
    """Become a node of a Ray cluster until a signal; replaces this process by Ray's. Raises LaunchError without Ray."""
    import_ray()
    counts = {"cpus": cpus, "gpus": gpus}
    more = [f"--num-{name}={count}" for name, count in counts.items() if count is not None]
    command = python_command("ray.scripts.scripts", "start", f"--address={address}", "--block", *more)
    os.execv(command[0], command)


def even_share(cpus: Sequence[int], count: int) -> int:
    """Most processors per replica with which so many replicas all find nodes; 1 if none do. cpus: by node."""
    most = max(cpus, default=0)
    return next((share for share in range(most, 1, -1) if sum(one // share for one in cpus) >= count), 1)


def import_ray() -> None:
    """Import Ray with the settings of a cluster. Raises LaunchError if it is not installed."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray  # noqa: F401
    except ImportError:
        raise LaunchError("Ray is not installed: pip install 'chorus-lora[ray]'") from None


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this process's signal handlers, which Ray replaces."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
