"""Decode steps per bucket: base, every request another adapter, and the base of an engine without LoRA."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from ....core.executors.cuda_memory import OutOfDeviceMemory
from ...report.table import Table
from ..context import Context
from ..subject import Subject
from ..timer import in_turns, ratio
from .registry import rows_table

RANK = 16


def run(context: Context) -> dict[str, Any]:
    """Milliseconds of whole engine steps (schedule, execute, draw, update), beside the byte floor."""
    buckets = context.pick(
        (1, 2), (1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 96, 128), cpu=(1, 8)
    )
    most = max(buckets)
    found: dict[str, Any] = {
        "timed": "engine steps by the host clock, median; they end with the tokens on the host. device: replays alone",
        "rank": RANK,
        "floor": context.stated_floors(),
        "buckets": [],
    }
    size = {"max_seqs": most, "max_batched": context.pick(64, 8192, 8192), "max_len": context.pick(64, 512, 1024)}
    adapters = context.adapters(RANK, most)
    base: dict[int, _Base] = {}
    with Subject(context, adapters, **size) as subject:
        with _plain(context, size, found) as plain:
            for bucket in buckets:
                with context.row(found, f"decode, base, {bucket} rows", partial(_clear, subject, plain)):
                    base[bucket] = _beside(context, subject, plain, bucket)
        for bucket in base:
            with context.row(found, f"decode, {bucket} adapters", subject.abort_all):
                lora = _steps(context, subject, list(adapters)[:bucket])
                found["buckets"].append(_row(context, bucket, base[bucket], lora))
        found["startup"] = subject.startup()
    return found


@contextmanager
def _plain(context: Context, size: dict[str, int], found: dict[str, Any]) -> Iterator[Subject | None]:
    """An engine without adapters; None, and why, where there is no room for a second one."""
    try:
        plain = Subject(context, {}, **size)
    except (OutOfDeviceMemory, torch.OutOfMemoryError) as error:
        found["plain_absent"] = f"no room for a second engine: {error}"
        yield None
        return
    with plain:
        yield plain


def _clear(*subjects: Subject | None) -> None:
    for subject in subjects:
        if subject is not None:
            subject.abort_all()


@dataclass(frozen=True)
class _Base:
    """Seconds of base steps: of the engine with adapters, of the one without, and the median ratio of the two."""

    step: float
    device: float
    plain: float | None = None
    ratio: float | None = None


def _beside(context: Context, subject: Subject, plain: Subject | None, bucket: int) -> _Base:
    """Base steps of both engines in turn, so that what drifts slowly meets both alike."""
    if plain is None:
        return _Base(*_steps(context, subject, [None] * bucket))
    per_round, rounds = context.pick(2, 8, 16), context.pick(2, 6, 10)
    engines = {"base": subject, "plain": plain}
    requests = {
        name: engine.decoding([None] * bucket, _prompt(context), per_round * rounds) for name, engine in engines.items()
    }
    seconds = in_turns(
        {
            name: lambda engine=engine: median(engine.step_seconds(per_round, bucket))
            for name, engine in engines.items()
        },
        rounds,
    )
    device = subject.replay_seconds(bucket, lora=False)
    for name, engine in engines.items():
        engine.clear(requests[name])
    return _Base(median(seconds["base"]), device, median(seconds["plain"]), ratio(seconds, "base", "plain"))


def _steps(context: Context, subject: Subject, adapters: Sequence[str | None]) -> tuple[float, float]:
    """Median seconds of a decode step, and of its replay alone."""
    count = context.pick(4, 24, 100)
    requests = subject.decoding(adapters, _prompt(context), count)
    try:
        seconds = subject.step_seconds(count, len(adapters))
        return median(seconds), subject.replay_seconds(len(adapters), lora=any(adapters))
    finally:
        subject.clear(requests)


def _row(context: Context, bucket: int, base: _Base, lora: tuple[float, float]) -> dict[str, Any]:
    floor = context.floors(bucket, _prompt(context), (RANK,) * bucket)
    base_floor = floor.decode - floor.adapters
    step, device = lora
    return {
        "bucket": bucket, "context_tokens": _prompt(context), "base_ms": base.step * 1e3,
        "plain_ms": None if base.plain is None else base.plain * 1e3, "lora_ms": step * 1e3,
        "base_device_ms": base.device * 1e3, "lora_device_ms": device * 1e3, "base_floor_ms": base_floor * 1e3,
        "adapters_floor_ms": floor.adapters * 1e3, "step_bytes": floor.step_bytes,
        "base_over_floor": base.step / base_floor, "base_device_over_floor": base.device / base_floor,
        "base_over_plain": base.ratio, "lora_over_base": step / base.step,
        "lora_less_floor_over_base": (step - floor.adapters) / base.step,
        "lora_device_less_floor_over_base": (device - floor.adapters) / base.device,
        "lora_over_floor": step / floor.decode, "tokens_per_s": bucket / step,
    }  # fmt: skip


def _prompt(context: Context) -> int:
    return context.pick(8, 256, 512, cpu=64)


def tables(values: dict[str, Any]) -> list[Table]:
    rows = values["buckets"]
    steps = {
        "bucket": "bucket", "no LoRA": "plain_ms", "base": "base_ms", "floor": "base_floor_ms",
        "base/floor": "base_over_floor", "base/no LoRA": "base_over_plain", "LoRA": "lora_ms",
        "adapters' floor": "adapters_floor_ms", "LoRA/base": "lora_over_base",
        "less floor": "lora_less_floor_over_base",
    }  # fmt: skip
    device = {
        "bucket": "bucket", "base": "base_device_ms", "base/floor": "base_device_over_floor", "LoRA": "lora_device_ms",
        "(LoRA less adapters' floor)/base": "lora_device_less_floor_over_base",
    }  # fmt: skip
    title = f"(c) decode step, ms; LoRA: every request another r{values['rank']} adapter on all projections"
    return [rows_table(title, steps, rows), rows_table("(c) the same, replays alone", device, rows)]
