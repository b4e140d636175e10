"""Limits of the device: copying, reading, transfers from the host, multiplying."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ....memory.host.bandwidth import Bandwidth
from ....memory.pages import hugepages
from ...report.table import Table
from ..context import Context

PAGE_BYTES = 2 << 20


def run(context: Context) -> dict[str, Any]:
    """Rates in bytes or FLOP per second; each has a note of what it counts."""

    def rate(counted: str, amount: float, work: Callable[[], Any], *, unit: str, capture: bool = True) -> dict:
        sample = context.timer.time(work, capture=capture)
        return {unit: amount / sample.seconds, "seconds": sample.seconds, "counted": counted, "count": sample.count}

    found: dict[str, Any] = {"method": context.timer.method}
    for case, measure in (("device memory", _device_memory), ("host to device", _host_to_device), ("matmul", _matmul)):
        with context.row(found, case):
            found |= measure(context, rate)
    return found


def _device_memory(context: Context, rate: Callable[..., dict]) -> dict[str, Any]:
    """Copying, and reading by the better of two reductions."""
    if context.device == "cpu":
        return _host_memory(context)
    num_bytes = context.pick(1 << 20, 4 << 30, 8 << 30)
    source = torch.empty(num_bytes // 4, dtype=torch.float32, device=context.device).normal_()
    target = torch.empty_like(source)
    what = "bytes read + bytes written, device to device"
    copy = rate(what, 2 * num_bytes, lambda: target.copy_(source), unit="bytes_per_s")
    reads = {
        name: rate("bytes read", num_bytes, work, unit="bytes_per_s")
        for name, work in (("sum", source.sum), ("amax", source.amax))
    }
    best = max(reads, key=lambda name: reads[name]["bytes_per_s"])
    return {"copy": copy, "read": {**reads[best], "by": best}}


def _host_memory(context: Context) -> dict[str, Any]:
    """The same for the host's memory, with all of its threads, through huge pages like the engine's."""
    buffer = hugepages.zeros((context.pick(1 << 20, 0, 0, cpu=512 << 20),), torch.uint8).zero_()
    bandwidth = Bandwidth(buffer, torch.get_num_threads(), context.pick(0.0, 0, 0, cpu=0.3))
    return {
        "copy": {"bytes_per_s": bandwidth.copy() * 1e9, "counted": "bytes read + bytes written"},
        "read": {"bytes_per_s": bandwidth.read() * 1e9, "counted": "bytes read"},
    }


def _host_to_device(context: Context, rate: Callable[..., dict]) -> dict[str, Any]:
    """From pinned memory: at once, and in pages, like adapters."""
    num_bytes = context.pick(4 << 20, 1 << 30, 1 << 30, cpu=64 << 20)
    pinned = context.device == "cuda"
    host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=pinned)
    target = torch.empty(num_bytes, dtype=torch.uint8, device=context.device)
    pairs = list(zip(target.split(PAGE_BYTES), host.split(PAGE_BYTES), strict=True))

    def pages() -> None:
        for page, image in pairs:
            page.copy_(image, non_blocking=True)

    what = f"bytes copied from {'pinned' if pinned else 'pageable'} host memory"
    return {
        "host_to_device": rate(
            what, num_bytes, lambda: target.copy_(host, non_blocking=True), unit="bytes_per_s", capture=False
        ),
        "host_to_device_pages": rate(
            f"{what}, {PAGE_BYTES} bytes at a time", num_bytes, pages, unit="bytes_per_s", capture=False
        ),
    }


def _matmul(context: Context, rate: Callable[..., dict]) -> dict[str, Any]:
    """In bf16, for large squares; on a CPU for the matrices of a layer, one after the other, and in float32 if that is
    faster, as without bf16 instructions.
    """
    shapes, dtypes = [(8192, 8192, 8192)], [torch.bfloat16]
    if context.device == "cpu":
        groups, dtypes = context.size.geometry.groups.values(), [torch.bfloat16, torch.float32]
        shapes = [(context.pick(8, 0, 0, cpu=1024), d_in, sum(width for *_, width in all_)) for d_in, all_ in groups]
    found = []
    for dtype in dtypes:
        operands = [
            [torch.randn(*shape, device=context.device).to(dtype) for shape in ((rows, d_in), (d_in, d_out))]
            for rows, d_in, d_out in shapes
        ]
        outs = [a.new_empty(len(a), b.shape[1]) for a, b in operands]

        def work(operands: list = operands, outs: list = outs) -> None:
            for (a, b), out in zip(operands, outs, strict=True):
                torch.matmul(a, b, out=out)

        counted = f"2 · rows, inputs, outputs of {shapes}, {str(dtype).removeprefix('torch.')}, random data"
        found.append(rate(counted, 2 * sum(map(math.prod, shapes)), work, unit="flops_per_s"))
    return {"matmul": max(found, key=lambda each: each["flops_per_s"])}


def tables(values: dict[str, Any]) -> list[Table]:
    table = Table("(a) limits", ["what", "rate", "unit", "counted"])
    for name in ("copy", "read", "host_to_device", "host_to_device_pages"):
        if name in values:
            table.add(name, values[name]["bytes_per_s"] / 1e9, "GB/s", values[name]["counted"])
    if "matmul" in values:
        table.add("matmul", values["matmul"]["flops_per_s"] / 1e12, "TFLOP/s", values["matmul"]["counted"])
    return [table]
