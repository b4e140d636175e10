"""Decode steps and prefill of a mixture of experts: the base model, and adapters on attention and on experts.

Weights are random, in Qwen3-30B-A3B's shapes and with fewer layers, so that the start is short. A captured step doesn't
tell the host which experts were chosen. So floors count those that its tokens are expected to go to if routers choose
with equal chances (`MixtureShape.experts_in_use`).

Tests: tests/perf/bench/test_sections.py
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ....memory.files.module_paths import ExpertForm
from ...report.table import Table, rows_table
from ..context import Context
from ..models.random_mixture import MixtureShape, MixtureSize, write_adapter
from ..subject import Subject

RANK, EXPERTS_RANK = 16, 8
"""Of adapters on attention alone, and of those on attention and all experts."""

LAYERS = 12
"""Layers of a quick run; a complete one has all that fit."""

SHARE = 0.6
"""Weights take at most this share of the device's memory."""

TINY = MixtureShape(layers=2, hidden=128, size=64, count=8, per_token=2, heads=4, kv_heads=2, head_dim=32, vocab=512)


def run(context: Context) -> dict[str, Any]:
    """Milliseconds of whole engine steps and of first tokens, with the bytes that steps read at least."""
    rows = context.pick((1, 2), (1, 8, 32, 64), (1, 2, 4, 8, 16, 32, 64))
    most_on_experts = context.pick(1, 8, 8)
    prompts = context.pick((8,), (512, 2048), (128, 512, 2048, 8192))
    shape = _shape(context)
    adapters = _adapters(context, shape, max(rows), most_on_experts)
    found: dict[str, Any] = {
        "layers": shape.layers,
        "weights": context.engine.get("quantization", context.dtype_name),
        "ranks": {"attention": RANK, "experts": EXPERTS_RANK},
        "rows": [],
        "prefill": [],
    }
    size = {"max_seqs": max(rows), "max_batched": max(prompts), "max_len": max(*prompts, 2 * context.prompt) + 16}
    named = MixtureSize(f"mixture-{shape.layers}", shape)
    everything = {name: path for each in adapters.values() for name, path in each.items()}
    with Subject(context, everything, size=named, **size) as subject:
        for count in rows:
            _decode_rows(context, subject, shape, adapters, found, count)
        for tokens in prompts:
            with context.row(found, f"experts, prefill of {tokens} tokens", subject.abort_all):
                found["prefill"].append(_prefill(context, subject, shape, tokens))
        found["startup"] = subject.startup()
    return found


def _shape(context: Context) -> MixtureShape:
    """As many layers as there is room for, at most those of this kind of run."""
    if context.smoke:
        return TINY
    whole = MixtureShape()
    layers = LAYERS if context.quick else whole.layers
    if context.device == "cuda":
        _, memory = torch.cuda.mem_get_info()
        head = 2 * whole.vocab * whole.hidden * context.dtype.itemsize  # and embeddings
        of_layer = whole.layer_params // whole.layers * context.dtype.itemsize
        layers = min(layers, max(1, int(SHARE * memory - head) // of_layer))
    return MixtureShape(layers=layers)


def _adapters(context: Context, shape: MixtureShape, most: int, most_on_experts: int) -> dict[str, dict[str, Path]]:
    """By case and name, as many as sequences may have; made on first use."""
    made = {}
    for kind, rank, form, count in (
        ("attention", RANK, None, most),
        ("experts", EXPERTS_RANK, ExpertForm.TOGETHER, most_on_experts),
    ):
        source = context.work_dir / "mixture" / f"{kind}-{shape.layers}-r{rank}"
        if not source.exists():
            part = source.with_name(source.name + ".part")
            shutil.rmtree(part, ignore_errors=True)
            part.parent.mkdir(parents=True, exist_ok=True)
            write_adapter(part, shape, rank, form).rename(source)
        made[f"{kind} r{rank}"] = context.links(source, source.name, count)
    return made


def _decode_rows(
    context: Context,
    subject: Subject,
    shape: MixtureShape,
    adapters: Mapping[str, Mapping[str, Path]],
    found: dict[str, Any],
    count: int,
) -> None:
    """The rows of `count` sequences: without adapters, and with another one for each on attention, and on experts."""
    base, (attention, on_experts) = None, adapters
    cases: dict[str, tuple[int, int]] = {"base": (0, 0), attention: (RANK, 0)}
    if count == len(adapters[on_experts]):
        cases[on_experts] = EXPERTS_RANK, EXPERTS_RANK
    for case, (rank, experts_rank) in cases.items():
        names: list[str | None] = [*adapters.get(case, [None] * count)][:count]
        with context.row(found, f"experts, decode, {count} rows, {case}", subject.abort_all):
            steps = context.pick(2, 24, 100)
            seconds, device = subject.median_seconds(names, context.prompt, steps, experts=experts_rank > 0)
            base = seconds if case == "base" else base
            its: dict[str, Any] = {"kv_itemsize": context.kv_itemsize, "quantiser": context.quantiser}
            its |= {"rank": rank, "experts_rank": experts_rank}
            step = shape.step(context.dtype.itemsize, count, 1, context.prompt, **its)
            num_bytes = step.num_bytes + step.adapter_bytes
            floor = num_bytes / context.bandwidth()
            found["rows"].append(
                {
                    "case": case,
                    "rows": count,
                    "context_tokens": context.prompt,
                    "ms": seconds * 1e3,
                    "device_ms": device * 1e3,
                    "experts": step.experts,
                    "bytes": num_bytes,
                    "adapter_bytes": step.adapter_bytes,
                    "floor_ms": floor * 1e3,
                    "share": floor / seconds,
                    "device_share": floor / device,
                    "over_base": None if base is None else seconds / base,
                }
            )


def _prefill(context: Context, subject: Subject, shape: MixtureShape, tokens: int) -> dict[str, Any]:
    """Time to first token of the base model on an idle engine. Its floor is that of its operations, or of reading the
    weights if that takes longer.
    """
    subject.first_token_seconds(tokens)
    seconds = median(subject.first_token_seconds(tokens) for _ in range(context.pick(1, 3, 7)))
    step = shape.step(
        context.dtype.itemsize, 1, tokens, 0, kv_itemsize=context.kv_itemsize, quantiser=context.quantiser
    )
    floor = max(step.flops / context.limits()["matmul"]["flops_per_s"], step.num_bytes / context.bandwidth())
    return {
        "tokens": tokens,
        "ms": seconds * 1e3,
        "tokens_per_s": tokens / seconds,
        "flops": step.flops,
        "floor_ms": floor * 1e3,
        "over_floor": seconds / floor,
    }


def tables(values: dict[str, Any]) -> list[Table]:
    steps = (
        "rows | adapters: case | ms | replay ms: device_ms | experts, expected: experts | MB: bytes * 1e-6 | "
        "adapters' MB: adapter_bytes * 1e-6 | floor ms: floor_ms | share | replay's share: device_share | "
        "ms/base: over_base"
    )
    prefill = "tokens | ms | tokens/s: tokens_per_s | floor ms: floor_ms | time/floor: over_floor"
    of = f"of a mixture, {values['layers']} layers, weights {values['weights']}"
    found = [rows_table(f"(t) decode step {of}", steps, values["rows"])]
    return [*found, rows_table(f"(t) prefill {of}", prefill, values["prefill"])] if values["prefill"] else found
