"""The size of a cluster, and how its processes connect."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ..start.flags import UsageError, read_seconds
from .listener import add_secret_flag, add_tls_flag
from .placement.settings import PLANNERS
from .router import POLICIES
from .router.scale import STEADY_SECONDS


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """A cluster."""

    replicas: int = 2
    """At the start; then from `min_replicas` to `max_replicas` (None: the same), following hints that have held for
    `scale_seconds`.
    """
    min_replicas: int | None = None
    max_replicas: int | None = None
    scale_seconds: float = STEADY_SECONDS
    api_servers: int = 1
    policy: str = "least-delay"
    """A name of `POLICIES`."""
    slo_tpot: float | None = None
    """Target of seconds per token; None: derived from the costs."""
    registry: str | None = None
    """The registry's file, or the address of one that runs elsewhere; None: no registry, or a temporary one."""
    ray: str | None = None
    """Address of the Ray cluster that runs the replicas, `local` for one on this machine only; None: replicas are
    children of this process.
    """
    listen: str | None = None
    """Address of replicas, for TCP on one machine; None: unix sockets, or, on a Ray cluster of several machines, TCP at
    the nodes' own addresses.
    """
    secret_file: Path | None = None
    tls: Path | None = None
    """Paths that are the same on all nodes."""
    migration: str = "off"
    """A name of `PLANNERS`, or `off`."""
    migration_setting: tuple[str, ...] = ()
    """See `MigrationSettings.of`."""
    preload: bool = False
    """See `Preloader`."""

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> ClusterPlan:
        """The plan from flags. Raises UsageError."""
        given = {name: getattr(arguments, name) for name in cls.__slots__ if hasattr(arguments, name)}
        plan = cls(**{**given, "migration_setting": tuple(given.get("migration_setting", ()))})
        for flag, value, fits in (
            ("min", plan.min_replicas, plan.least <= plan.replicas),
            ("max", plan.max_replicas, plan.replicas <= plan.most),
        ):
            if not fits:
                side = "above" if flag == "min" else "below"
                raise UsageError(
                    f"chorus cluster up: error: --{flag}-replicas is {value}, {side} --replicas {plan.replicas}, which "
                    "it starts with; change one of them"
                )
        return plan

    @property
    def least(self) -> int:
        """The minimum number of replicas."""
        return self.replicas if self.min_replicas is None else self.min_replicas

    @property
    def most(self) -> int:
        """The maximum number of replicas: API servers have addresses for so many."""
        return self.replicas if self.max_replicas is None else self.max_replicas

    def to_json(self) -> dict[str, Any]:
        """As JSON, for the file that API servers read."""
        return _PLAN.dump_python(self, mode="json")

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ClusterPlan:
        return _PLAN.validate_python(data)


_PLAN = TypeAdapter(ClusterPlan)


def add_up_flags(parser: argparse.ArgumentParser, count: Callable[[str], int]) -> None:
    """Flags of `chorus cluster up`. count: parses a number above 0."""
    parser.add_argument("--replicas", type=count, default=2, metavar="N", help="replicas (default: 2)")
    parser.add_argument(
        "--policy",
        choices=tuple(POLICIES),
        default="least-delay",
        help="which replica gets a request (default: least-delay)",
    )
    parser.add_argument(
        "--slo-tpot",
        type=_seconds,
        metavar="SECONDS",
        help="time per token, such as 0.05 or 50ms, above which rank-aware and least-delay count a replica as full "
        "(default: 1.5 times that of a single request)",
    )
    parser.add_argument(
        "--migration",
        choices=("off", *PLANNERS),
        default="off",
        help="planner that moves running requests to other replicas when the load is uneven; ilp and "
        "rounding need chorus-lora[plan] (default: off)",
    )
    parser.add_argument(
        "--migration-setting",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a trigger or constant of migration, such as interval_seconds=5; may be given several times",
    )
    parser.add_argument(
        "--preload",
        action="store_true",
        help="load adapters into the replicas' page pools before requests ask for them",
    )
    parser.add_argument(
        "--scale-seconds",
        type=_seconds,
        default=STEADY_SECONDS,
        metavar="SECONDS",
        help="how long a scale hint must hold before it is reported, and followed within "
        "--min-replicas and --max-replicas "
        f"(default: {STEADY_SECONDS:g})",
    )
    add_tls_flag(parser)
    for name, what in (("min", "fewest"), ("max", "most")):
        parser.add_argument(
            f"--{name}-replicas",
            type=count,
            metavar="N",
            help=f"{what} replicas, when the number follows the scale hints (default: as many as --replicas)",
        )
    add_secret_flag(parser, required=False)
    parser.add_argument(
        "--api-servers",
        "--api-server-count",
        "--fronts",
        dest="api_servers",
        type=count,
        default=1,
        metavar="N",
        help="API server processes (default: 1)",
    )
    parser.add_argument(
        "--registry",
        metavar="FILE",
        help="SQLite file that stores the adapters added over HTTP, or unix:PATH or tcp://HOST:PORT of a "
        "registry that runs elsewhere; default: they last as long as the cluster",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="place replicas on a Ray cluster: local starts one on this machine, auto finds one that runs here, "
        "HOST:PORT connects to another's",
    )
    where.add_argument(
        "--listen",
        metavar="ADDRESS",
        help="tcp://HOST:PORT at which replicas listen, replica N at PORT + N; port 0: the operating system chooses "
        "(default: unix sockets)",
    )


def _seconds(text: str) -> float:
    """Seconds, from a number with or without a unit."""
    try:
        seconds = float(text)
    except ValueError:
        return read_seconds(text)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be a number of seconds above 0")
    return seconds
