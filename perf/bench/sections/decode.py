"""Decode steps per bucket: base, a different adapter for every request, and the base model of an engine without
LoRA.

Tests: tests/perf/bench/test_sections.py
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any

import torch

from ....core.executors.cuda_memory import OutOfDeviceMemory
from ...report.table import Table, rows_table
from ..context import Context
from ..subject import Subject
from ..timer import in_turns, ratio

RANK = 16


def run(context: Context) -> dict[str, Any]:
    """Milliseconds of whole engine steps (schedule, execute, sample, update), compared with the byte floor."""
    buckets = context.pick(
        (1, 2), (1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 96, 128), cpu=(1, 8)
    )
    most = max(buckets)
    found: dict[str, Any] = {"rank": RANK, "buckets": []}
    size = context.engine_size(most)
    adapters = context.adapters(RANK, most)
    base: dict[int, dict[str, Any]] = {}
    with Subject(context, adapters, **size) as subject:
        with ExitStack() as stack:
            engines = {"base": subject}
            if context.engine:  # to be compared with a run without these fields, which has the second engine
                found["plain_absent"] = "the engine has fields of its own"
            else:
                try:
                    engines["plain"] = stack.enter_context(Subject(context, {}, **size))
                except (OutOfDeviceMemory, torch.OutOfMemoryError) as error:
                    found["plain_absent"] = f"no room for a second engine: {error}"
            for bucket in buckets:
                with context.row(found, f"decode, base, {bucket} rows", partial(_clear, engines)):
                    base[bucket] = _base(context, engines, bucket)
        for bucket in base:
            with context.row(found, f"decode, {bucket} adapters", subject.abort_all):
                lora = subject.median_seconds(list(adapters)[:bucket], context.prompt, context.pick(4, 24, 100))
                found["buckets"].append(_row(context, bucket, base[bucket], *(each * 1e3 for each in lora)))
        found["startup"] = subject.startup()
    return found


def _clear(engines: Mapping[str, Subject]) -> None:
    for engine in engines.values():
        engine.abort_all()


def _base(context: Context, engines: Mapping[str, Subject], bucket: int) -> dict[str, Any]:
    """Base steps of the engine with adapters, and of one without if there is room for it, in rotation."""
    per_round, rounds = context.pick(2, 8, 16), context.pick(2, 6, 10)
    requests = {
        name: engine.decoding([None] * bucket, context.prompt, per_round * rounds) for name, engine in engines.items()
    }
    seconds = in_turns({name: partial(_median, each, per_round, bucket) for name, each in engines.items()}, rounds)
    device = engines["base"].replay_seconds(bucket, lora=False)
    for name, engine in engines.items():
        engine.clear(requests[name])
    has_plain = "plain" in engines
    return {
        "base_ms": median(seconds["base"]) * 1e3,
        "base_device_ms": device * 1e3,
        "plain_ms": median(seconds["plain"]) * 1e3 if has_plain else None,
        "base_over_plain": ratio(seconds, "base", "plain") if has_plain else None,
    }


def _median(engine: Subject, steps: int, rows: int) -> float:
    return median(engine.step_seconds(steps, rows))


def _row(context: Context, bucket: int, base: dict[str, Any], step: float, device: float) -> dict[str, Any]:
    floor = context.floors(bucket, context.prompt, (RANK,) * bucket)
    adapters_ms = floor.adapters * 1e3
    base_floor_ms = floor.decode * 1e3 - adapters_ms
    return {
        "bucket": bucket,
        "context_tokens": context.prompt,
        **base,
        "lora_ms": step,
        "lora_device_ms": device,
        "base_floor_ms": base_floor_ms,
        "adapters_floor_ms": adapters_ms,
        "step_bytes": floor.step_bytes,
        "base_over_floor": base["base_ms"] / base_floor_ms,
        "base_device_over_floor": base["base_device_ms"] / base_floor_ms,
        "lora_over_base": step / base["base_ms"],
        "lora_less_floor_over_base": (step - adapters_ms) / base["base_ms"],
        "lora_device_less_floor_over_base": (device - adapters_ms) / base["base_device_ms"],
        "lora_over_floor": step / (floor.decode * 1e3),
        "tokens_per_s": bucket / step * 1e3,
    }


def tables(values: dict[str, Any]) -> list[Table]:
    steps = (
        "bucket | no LoRA: plain_ms | base: base_ms | floor: base_floor_ms | base/floor: base_over_floor | "
        "base/no LoRA: base_over_plain | LoRA: lora_ms | adapters' floor: adapters_floor_ms | "
        "LoRA/base: lora_over_base | less floor: lora_less_floor_over_base"
    )
    device = (
        "bucket | base: base_device_ms | base/floor: base_device_over_floor | LoRA: lora_device_ms | "
        "(LoRA less adapters' floor)/base: lora_device_less_floor_over_base"
    )
    title = f"(c) decode step, ms; LoRA: every request another r{values['rank']} adapter on all projections"
    rows = values["buckets"]
    return [rows_table(title, steps, rows), rows_table("(c) the same, replays alone", device, rows)]
