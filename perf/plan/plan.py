"""A plan: the candidates tried for a load, the cheapest that meets its SLO, and the commands to start it.

Tests: tests/perf/plan/test_command.py
"""

from __future__ import annotations

import argparse
import itertools
import math
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast, get_args

from ...core.costs.profile import load_profile
from ...core.executors.choice import gpu_batch
from ...core.model.checkpoints.quantization.round_to_nearest import Name
from ...server.checkpoints.pull import resolve_model
from ...server.cluster.router import POLICIES
from ...server.settings import read_size
from .prediction import gpu_named, predicted_profile
from .requests import PlanError, Slo
from .search import Fleet, Tried, cheapest, search

PROFILE = "profile:"

FOLLOWED = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "chunked_prefill",
    "block_tokens",
    "kv_cache_dtype",
    "quantization",
    "preemption",
    "eviction",
    "lookahead",
    "prefetch",
    "max_adapters_per_step",
    "max_overtake_seconds",
    "fair_by",
    "max_turn_seconds",
    "max_turn_steps",
    "max_load_stall_seconds",
    "adapter_read_seconds",
)
"""Fields of `EngineConfig` that `--engine` accepts: a simulation follows them, and no other flag sets them."""
_GIB = 1 << 30


@dataclass(frozen=True)
class Plan:
    """The inputs and the result of a search."""

    fleet: Fleet
    model: str
    """The model's name for the commands."""
    engine: dict[str, str]
    """Fields of its configuration that were given."""
    tried: Sequence[Tried]
    best: Tried | None
    most: int
    """Most replicas."""
    seeds: int
    predicted: bool
    note: str
    """A note about the GPU."""
    made_by: str
    """The command that made the plan."""

    @property
    def origin(self) -> str:
        return "predicted" if self.predicted else "from a measured profile"

    @property
    def unit(self) -> str:
        """Price per hour of a replica; a measured profile may have no GPU."""
        return "GPU-hours" if self.predicted else "replica-hours"

    def command(self) -> str | None:
        """Commands that start the best candidate."""
        if self.best is None:
            return None
        candidate = self.best.candidate
        words = ["chorus cluster up", shlex.quote(self.model), f"--policy {candidate.policy}"]
        if self.fleet.requests().ranks:
            words.append("--adapters ADAPTERS")
        if self.fleet.slo.tpot < math.inf:
            words.append(f"--slo-tpot {self.fleet.slo.tpot:g}")  # some policies route by it
        words.append(f"--host-cache-bytes {size(candidate.host)}")
        if candidate.arena != self.fleet.profile.memory_bytes.value:
            words.append(f"--memory-bytes {size(candidate.arena)}")
        words += itertools.starmap(self._flag, self.engine.items())
        if self.predicted and candidate.replicas > 1:
            words.append("--ray auto")  # each replica gets a GPU
        whole = " ".join(words)
        scale = "" if self.fleet.least is None else f" --min-replicas {min(self.fleet.least, candidate.replicas)}"
        return f"{whole} --replicas {candidate.replicas}{scale}"

    def _flag(self, name: str, value: str) -> str:
        flag, meant = name.replace("_", "-"), getattr(self.fleet.config(), name)
        if isinstance(meant, bool):
            return f"--{flag}" if meant else f"--no-{flag}"
        return f"--{flag} {shlex.quote(value)}"

    def summary(self) -> str:
        """One sentence: the plan, or that there is none."""
        slo = self.fleet.slo
        limits = [
            f"{name} within {value * 1e3:g} ms"
            for name, value in (("TTFT", slo.ttft), ("TPOT", slo.tpot))
            if value < math.inf
        ]
        asked = f"{slo.attainment:.1%} of the requests with {' and '.join(limits)}"
        if self.best is None:
            near = max(self.tried, key=lambda one: (one.candidate.replicas, one.attainment.low))
            return (
                f"No candidate, with up to {self.most} replicas, meets the SLO: {asked}. Reason with "
                f"{near.candidate.replicas} by {near.candidate.policy}: {near.trouble}."
            )
        one = self.best.candidate
        replicas = "1 replica" if one.replicas == 1 else f"{one.replicas} replicas"
        return (
            f"{replicas} of {self.fleet.profile.device}, policy {one.policy}, page pool {size(one.arena)} and "
            f"host cache {size(one.host)} each: {self.best.attainment.text(100, '.2f')} % meet the SLO ({asked}), for "
            f"{self.best.hours or 0:.3g} {self.unit} ({self.origin})."
        )

    def assumptions(self) -> list[str]:
        profile, scale = self.fleet.profile, self.fleet.scale
        said = [
            f"Costs: {profile.source}. {'No step was measured on this GPU.' if self.predicted else ''}",
            f"Adapters change {', '.join(self.fleet.targets)} in every layer. No prefix is cached: none is recorded.",
            *map(str, self.fleet.adapter_sizes()),
            f"{'Seed 0 is the trace itself; the others draw' if scale == 1 else 'Seeds draw'} each request 0, 1, 2 … "
            f"times, {scale:g} times on average (a Poisson bootstrap). A candidate meets the SLO where the low end of "
            "its interval does; one that can't any more is not simulated to its end.",
            "TTFT and TPOT are the engine's: delays of HTTP, the network and a router's stale reports are not "
            "included.",
        ]
        return said + ([self.note + "."] if self.note else [])

    def to_json(self) -> dict[str, Any]:
        return {
            "summary": self.summary(),
            "predicted": self.predicted,
            "unit": self.unit,
            "command": self.command(),
            "profile": self.fleet.profile.name,
            "adapters": [size._asdict() for size in self.fleet.adapter_sizes()],
            "best": None if self.best is None else _row(self.best),
            "candidates": [_row(one) for one in self.tried],
        }


def make_plan(arguments: argparse.Namespace) -> Plan:
    """The plan for the flags of `chorus plan`. Raises PlanError, ProfileError, PullError,
    WorkloadError or UnsupportedModel.
    """
    engine, note = dict(_pairs(arguments.engine)), ""
    predicted = not arguments.gpu.startswith(PROFILE)
    if predicted:
        gpu = gpu_named(arguments.gpu)
        if arguments.model is None:
            raise PlanError(
                f"--model is missing: {arguments.gpu} is predicted from the model's config.json; give the model's "
                "directory or name"
            )
        model = resolve_model(arguments.model)
        profile = predicted_profile(model, gpu, quantization=_quantization(engine), float8_kv=_is_float8(engine))
        note = gpu.note
        rows, tokens = gpu_batch(int(gpu.memory)) or (None, None)
        defaults = {"max_num_seqs": rows, "max_num_batched_tokens": tokens} if rows else {}
    else:
        profile, defaults = load_profile(arguments.gpu.removeprefix(PROFILE)), {}
        if "quantization" in engine:
            raise PlanError(
                f"--engine quantization is {engine['quantization']!r}, but {profile.name} has measured steps; leave it "
                "out, and measure a profile with it"
            )
        if profile.geometry.float8_kv and "kv_cache_dtype" not in engine:
            engine["kv_cache_dtype"] = "fp8"
        if profile.geometry.float8_kv != _is_float8(engine):
            measured = "fp8" if profile.geometry.float8_kv else "auto"
            raise PlanError(
                f"--engine kv_cache_dtype is {engine['kv_cache_dtype']!r}, but {profile.name} was measured with "
                f"{measured!r}; leave it out, or measure a profile with it"
            )
    slo = Slo(arguments.slo_ttft or math.inf, arguments.slo_tpot or math.inf, arguments.attainment)
    table = profile.geometry.projections
    known = table.names if arguments.targets is None else table.names_with_mixtures
    targets = _names(arguments.targets, known, "--targets")
    policies = _names(arguments.policy, POLICIES, "--policy")
    fleet = Fleet(
        arguments.trace,
        profile,
        slo=slo,
        targets=targets,
        engine={**defaults, **engine},
        rank=arguments.rank,
        scale=arguments.scale,
        least=arguments.min_replicas,
        boot_seconds=arguments.boot_seconds,
    )
    config, requests = fleet.config(), fleet.requests()
    _check_lengths(fleet, min(config.max_model_len or math.inf, profile.geometry.max_model_len))
    slo.check(requests, profile.costs())
    sizes = {each.rank: each.num_bytes for each in fleet.adapter_sizes()}
    wanted = sum(sizes[rank] for rank in requests.ranks.values())
    whole, least = profile.memory_bytes.value, config.host_bytes
    arenas = _sizes(arguments.memory_bytes, "--memory-bytes") or [whole, whole // 2]
    hosts = _sizes(arguments.host_cache_bytes, "--host-cache-bytes") or sorted(
        {least, max(least, wanted)}, reverse=True
    )
    if too_large := [one for one in arenas if one > whole]:
        raise PlanError(
            f"--memory-bytes is {too_large[0]}, but {profile.device} has room for {whole}; give that or less"
        )
    tried = search(
        fleet,
        [(arena, host) for arena in arenas for host in hosts],
        policies=policies,
        most_replicas=arguments.max_replicas,
        seeds=arguments.seeds,
        jobs=arguments.jobs,
        progress=_progress if sys.stderr.isatty() else lambda tried: None,
    )
    return Plan(
        fleet,
        str(arguments.model or "MODEL"),
        engine=engine,
        tried=tried,
        best=cheapest(tried),
        most=arguments.max_replicas,
        seeds=arguments.seeds,
        predicted=predicted,
        note=note,
        made_by=shlex.join(["chorus", *sys.argv[1:]]),
    )


def _quantization(engine: Mapping[str, str]) -> Name | None:
    """Raises PlanError for a name that is none."""
    found = engine.get("quantization")
    if found not in (None, *get_args(Name)):
        raise PlanError(f"--engine quantization is {found!r}; use one of {', '.join(get_args(Name))}")
    return cast("Name | None", found)


def _is_float8(engine: Mapping[str, str]) -> bool:
    return engine.get("kv_cache_dtype") in ("fp8", "fp8_e4m3")


def _check_lengths(fleet: Fleet, most: float) -> None:
    items = fleet.requests().items
    too_long = [one for one in items if one.prompt_tokens + one.output_tokens > most]
    if len(too_long) > (1 - fleet.slo.attainment) * len(items):
        one = too_long[0]
        raise PlanError(
            f"--trace {fleet.trace}: prompt_tokens is {one.prompt_tokens} and output_tokens {one.output_tokens}, and "
            f"the model takes {most:g} tokens of a request; {len(too_long) / len(items):.1%} of them are too long: "
            "leave them out, or plan with a model of a longer context"
        )


def _progress(tried: Tried) -> None:
    one = tried.candidate
    verdict = "meets the SLO" if tried.meets else tried.trouble
    print(f"{one.replicas} by {one.policy}: {verdict}", file=sys.stderr)


def _row(tried: Tried) -> dict[str, Any]:
    """Times in seconds; each with the ends of its interval."""
    found: dict[str, Any] = {**asdict(tried.candidate), "meets": tried.meets, "seeds": len(tried.outcomes)}
    found["attainment"] = tried.attainment
    for name, at in itertools.product(("ttft", "tpot"), (0.5, 0.99)):
        spread = tried.quantile(name, at)
        found[f"{name}_p{100 * at:g}"] = spread
    return {**found, "hours": tried.hours, "trouble": tried.trouble}


def size(num_bytes: int) -> str:
    """A size in the form that `--memory-bytes` accepts."""
    unit, name = (_GIB, "GiB") if num_bytes >= _GIB else (1 << 20, "MiB")
    return f"{num_bytes / unit:.4g}{name}"


def _names(text: str | None, known: Iterable[str], flag: str) -> tuple[str, ...]:
    """The names that are given, or all known names."""
    if text is None:
        return tuple(known)
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if wrong := [name for name in names if name not in known]:
        raise PlanError(f"{flag} is {wrong[0]!r}; use some of {', '.join(known)}")
    return names


def _sizes(text: str | None, flag: str) -> list[int]:
    """Sizes, largest first."""
    try:
        return sorted({read_size(part) for part in text.split(",")} if text else (), reverse=True)
    except ValueError as error:
        raise PlanError(f"{flag} is {text!r}: {error}") from None


def _pairs(texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise PlanError(f"--engine is {text!r}; give NAME=VALUE, such as max_num_seqs=64")
        name = name.strip().replace("-", "_")
        if name not in FOLLOWED:
            raise PlanError(f"--engine is {text!r}, which plans do not simulate; use some of {', '.join(FOLLOWED)}")
        yield name, value.strip()
