"""A cluster on this machine: one API server in this process, or several in their own processes, and the processes that
they need.

Tests: tests/server/cluster/test_cluster.py
"""

from __future__ import annotations

import json
import logging
import signal
import threading
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from ..engine.adapter_loader import NotAlone
from ..engine.backend import Backend
from ..log_lines import log_to_stderr
from ..settings import Settings
from ..start.checks import LaunchError, check_model
from ..start.exits import DEADLINE_SECONDS
from ..start.flags import read_settings
from ..start.launch import bind, serve, url_of
from ..text.tokenizer import Tokenizer
from .address import AddressFile
from .child import end_with_parent
from .cluster_worker import ClusterWorker
from .directory import ClusterDirectory
from .directory_files import DirectoryFiles
from .link import Link
from .placement.plan import NEED_HIGHS, has_highs
from .placement.settings import MigrationSettings
from .plan import ClusterPlan
from .planned import Mover, Preloader
from .processes import Processes
from .router import POLICIES, Estimates
from .router.scale import SteadyHint

log = logging.getLogger(__name__)

READY_POLL_SECONDS = 0.1
STUCK_POLL_SECONDS = 1.0


def up(plan: ClusterPlan, settings: Settings, given: dict[str, Any]) -> int:
    """Serve a cluster until a signal; return the exit code. given: settings given as flags, for API servers."""
    check_model(settings)
    if plan.migration in NEED_HIGHS and not has_highs():
        raise LaunchError(f"--migration {plan.migration} needs highspy: pip install 'chorus-lora[plan]'")
    if plan.migration_setting and plan.migration == "off":
        raise LaunchError(
            f"--migration-setting {plan.migration_setting[0]} changes nothing while --migration is off; give "
            "--migration greedy, or leave the setting out"
        )
    if settings.adapter_as_base is not None and (plan.api_servers > 1 or plan.registry is not None):
        raise LaunchError(str(NotAlone("--adapter-as-base")))
    if settings.unix_socket is not None and plan.api_servers > 1:
        raise LaunchError("--unix-socket: one process listens there; start with --api-servers 1, or leave it out")
    try:
        MigrationSettings.of(plan.migration_setting)
    except ValueError as error:
        raise LaunchError(f"--migration-setting: {error}") from None
    if plan.api_servers == 1:
        return serve(settings, partial(_open_one, plan))
    return _supervise(plan, settings, given)


def api_server(directory: ClusterDirectory, index: int) -> int:
    """Run one of several API servers of a cluster, until a signal."""
    end_with_parent()
    given = json.loads(directory.given_file.read_text())
    plan, settings = ClusterPlan.from_json(given["plan"]), read_settings(Namespace(**given["settings"]))
    log_to_stderr(settings.log_level, settings.log_format)
    ready = directory.ready_file(index)
    was_whole = ready.exists()
    open_api_server = partial(_open_api_server, directory, index, plan, was_whole)
    return serve(settings, open_api_server, shares_port=True, on_listening=ready.touch)


def _open_one(plan: ClusterPlan, settings: Settings) -> tuple[Backend, Tokenizer]:
    """Start everything except API servers; the backend's `stop` ends it."""
    # until the server handles the signal: by default the process would end without ending its children
    signal.signal(signal.SIGTERM, _interrupt)
    processes = _start(plan, settings)
    try:
        registry = None if plan.registry is None else AddressFile(processes.directory.registry_file, plan.tls)
        owner = _Owner(
            lambda link: processes.kill(link.name, link.pid), processes.scale, processes.trouble, processes.stop
        )
        return _open(processes.directory, plan, settings, registry, owner)
    except BaseException:
        processes.stop()
        raise


def _open_api_server(
    directory: ClusterDirectory, index: int, plan: ClusterPlan, was_whole: bool, settings: Settings
) -> tuple[Backend, Tokenizer]:
    """was_whole: an earlier process of this API server has served the cluster."""
    files = DirectoryFiles(directory)
    registry = AddressFile(directory.registry_file, plan.tls)
    owner = _Owner(lambda link: files.tell_stuck(link.name, link.pid), partial(files.tell_hint, index))
    worker, tokenizer = _open(directory, plan, settings, registry, owner, was_whole=was_whole)
    worker.shared = directory.path
    return worker, tokenizer


def _start(plan: ClusterPlan, settings: Settings) -> Processes:
    """Start the replicas, and the registry. Raises LaunchError."""
    try:
        processes = Processes(plan, settings)
    except (OSError, ValueError) as error:
        raise LaunchError(str(error)) from None
    signal.signal(signal.SIGUSR1, lambda *_: processes.restart_replicas())
    return processes


class _Owner(NamedTuple):
    """The owner of the replicas' processes, for an API server: in this process, or through files."""

    kill: Callable[[Link], None]
    hint: Callable[[int, int], None]
    trouble: Callable[[], str | None] = lambda: None
    stop: Callable[[], None] = lambda: None


def _open(
    directory: ClusterDirectory,
    plan: ClusterPlan,
    settings: Settings,
    registry: AddressFile | None,
    owner: _Owner,
    *,
    was_whole: bool = False,
) -> tuple[ClusterWorker, Tokenizer]:
    """Connect to a cluster's processes. Raises LaunchError."""
    try:
        links = directory.links(plan.most, settings.give_up_seconds, plan.tls)
        estimates = Estimates(slo=plan.slo_tpot)
        policy = POLICIES[plan.policy](estimates, None)
        worker = ClusterWorker(links, policy, settings, on_stop=owner.stop, registry=registry, estimates=estimates)
        dispatcher = worker.dispatcher
        dispatcher.on_stuck, dispatcher.on_hint = owner.kill, owner.hint
        dispatcher.scale = SteadyHint(plan.scale_seconds)
        dispatcher.count_replicas = DirectoryFiles(directory).num_replicas
        dispatcher.num_replicas = directory.num_replicas
        if plan.migration != "off":
            mover = Mover(dispatcher, plan.migration, MigrationSettings.of(plan.migration_setting), worker.soon)
            worker.lookers.append(mover.look)
        if plan.preload:
            worker.lookers.append(Preloader(dispatcher).look)
        tokenizer = Tokenizer.load(
            settings.model, settings.tokenizer, settings.chat_template, settings.tool_call_format
        )
        worker.start()
        try:
            worker.wait_until_ready(owner.trouble, was_whole=was_whole)
        except BaseException:
            worker.stop()  # before its directory is removed, which it watches
            raise
    except Exception as error:
        log.debug("starting failed", exc_info=True)
        raise LaunchError(f"can't serve {settings.model}: {error}") from error
    return worker, tokenizer


def _supervise(plan: ClusterPlan, settings: Settings, given: dict[str, Any]) -> int:
    """Keep the processes of a cluster with several API servers running, until SIGTERM or SIGINT."""
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: told.set())
    with bind(settings.host, settings.port, settings.send_seconds, shares_port=True) as bound:  # it never listens
        processes = _start(plan, settings)
        try:
            directory = processes.directory
            directory.given_file.touch(mode=0o600)
            flags = {**given, **_keys(settings), "port": str(bound.getsockname()[1])}
            settings_flags = {f"setting_{name}": value for name, value in flags.items()}
            directory.given_file.write_text(json.dumps({"plan": plan.to_json(), "settings": settings_flags}))
            processes.start_api_servers(plan.api_servers)
            while not processes.api_servers_ready and not told.wait(READY_POLL_SECONDS):
                if (text := processes.trouble()) is not None:
                    raise LaunchError(f"can't serve {settings.model}: {text}")
            if not told.is_set():
                log.info("listening on %s", url_of(bound))
            while not told.wait(STUCK_POLL_SECONDS):
                processes.kill_stuck()
                processes.follow_hints()
            processes.drain_api_servers(settings.grace_seconds + 2 * DEADLINE_SECONDS)
        finally:
            processes.stop()
    return 0


def _keys(settings: Settings) -> dict[str, Any]:
    """Settings about keys, as flags: the environment variables that hold keys are not inherited."""
    keys = {name: [key.get_secret_value() for key in getattr(settings, name)] for name in ("api_key", "admin_key")}
    files = {name: getattr(settings, name) for name in ("api_key_file", "admin_key_file")}
    told = {**keys, **{name: str(path.absolute()) for name, path in files.items() if path is not None}}
    return {name: value for name, value in told.items() if value}


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
