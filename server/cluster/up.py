"""A cluster of this machine: its replicas' processes, and the worker that its front's app asks."""

from __future__ import annotations

import logging
import signal

from ..backend import Backend
from ..checks import LaunchError, check_model
from ..settings import Settings
from ..tokenizer import Tokenizer
from .cluster_worker import ClusterWorker
from .link import Link
from .processes import ReplicaProcesses
from .router import POLICIES

log = logging.getLogger(__name__)


def open_cluster(count: int, policy: str, settings: Settings) -> tuple[Backend, Tokenizer]:
    """Start replicas; return once all are there. Raises LaunchError. The worker's `stop` ends them."""
    check_model(settings)
    # SIGTERM's default would leave the replicas to find out by themselves, until the server takes the signal over
    signal.signal(signal.SIGTERM, _end)
    processes = ReplicaProcesses(count, settings)
    try:
        processes.start()
        links = [Link(one.name, one.socket, processes.secret, settings.give_up_seconds) for one in processes.replicas]
        worker = ClusterWorker(links, POLICIES[policy](), settings, on_stop=processes.stop)
        worker.dispatcher.on_stuck = lambda link: processes.kill(link.name)
        tokenizer = Tokenizer.load(settings.model)
        worker.start()
        worker.wait_until_ready(processes.trouble)
    except BaseException as error:
        processes.stop()
        if isinstance(error, Exception):
            log.debug("starting failed", exc_info=True)
            raise LaunchError(f"can't serve {settings.model}: {error}") from error
        raise
    return worker, tokenizer


def _end(*_: object) -> None:
    raise KeyboardInterrupt
