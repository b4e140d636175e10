"""Thousands of adapters on disk, asked for by Zipf's law: `python -m chorus.perf.bench.many_adapters`.

A server of a random model is started with a directory of adapters that all differ. Clients ask one after another,
adapter i with a weight of i to the power of -1.1. A request is cold if it is the first for its adapter, and hot
otherwise. The tables have the times to the first token, the seconds to the start, and the memory of the processes.

`--vllm ENV/bin/vllm`: vLLM (see `vllm_process`) gets the same requests afterwards. It finds adapters in the directory
by its own resolver, and has `--vllm-loras` of them in its batches, and 1,024 in memory.

Tests: tests/perf/bench/test_many_adapters.py
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from ...core.cpus import available_cpus
from ..report.command import conclude, count, parser, say
from ..report.table import rows_table
from ..serving.errors import LoadError
from ..serving.server_process import LaunchedServer, launched
from ..serving.streams import Address, send
from ..serving.vllm_process import vllm_process
from ..workload.popularity import PowerLaw
from .machine import family, need_psutil, processor
from .models.random_model import RandomModel, adapters, checkpoint
from .models.sizes import SIZES

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TIMEOUT = 300.0
_VALUE_BITS = 0x3F
"""Bits of a low byte of a bfloat16 value, which may take any value."""


def directory_of(source: Path, model: Path, number: int, path: Path) -> Path:
    """A directory of so many adapters of a model, made on first use; each differs from `source` in its last values."""
    if path.is_dir():
        return path
    weights = bytearray((source / WEIGHTS).read_bytes())
    config = json.loads((source / CONFIG).read_bytes()) | {"base_model_name_or_path": str(model)}  # as vLLM looks for
    draft = path.with_name(f"{path.name}.draft")
    for index in range(number):
        for digit in range(4):
            weights[-2 - 2 * digit] = index >> 6 * digit & _VALUE_BITS
        one = draft / f"a{index:05d}"
        one.mkdir(parents=True)
        (one / CONFIG).write_text(json.dumps(config))
        (one / WEIGHTS).write_bytes(weights)
    draft.rename(path)
    return path


async def ask_all(
    address: Address, order: Sequence[int], vocab: int, clients: int
) -> tuple[dict[str, list[float]], list[str]]:
    """Ask for adapters in an order, by clients that ask as soon as their last answer has ended: seconds to the first
    token, and errors.
    """
    firsts: dict[str, list[float]] = {"hot": [], "cold": []}
    errors, asked, turns = list[str](), set[int](), enumerate(order)

    async def client() -> None:
        for turn, index in turns:
            kind = "hot" if index in asked else "cold"
            asked.add(index)
            prompt = [8 + (turn * 31 + place * 7) % (vocab - 8) for place in range(32)]
            body = {"model": f"a{index:05d}", "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
            try:
                async with asyncio.timeout(_TIMEOUT):
                    firsts[kind].append((await send(address, body)).times[0])
            except (OSError, RuntimeError) as error:
                errors.append(f"{type(error).__name__}: {error}")

    await asyncio.gather(*(client() for _ in range(clients)))
    return firsts, errors


def resident_bytes(pid: int) -> int:
    """Memory of a process and its descendants."""
    psutil, found = need_psutil(), 0
    for process in family([pid]):
        with suppress(psutil.NoSuchProcess):
            found += process.memory_info().rss
    return found


def measured(args: Any) -> dict[str, Any]:
    geometry = SIZES[args.model_size].geometry
    model = RandomModel(geometry, (args.rank,))
    served = checkpoint(model, args.work_dir)
    (source,) = adapters(model, args.work_dir).values()
    say(f"{args.adapters} adapters")
    folder = args.work_dir / f"many-{served.name}-{args.rank}-{args.adapters}"
    directory_of(source, served, args.adapters, folder)
    law = PowerLaw(kind="power_law", exponent=args.exponent)
    order = law.choose(args.seed, args.adapters, lambda: args.requests).take(args.requests).tolist()
    flags = ["--model", str(served), "--adapters", str(folder), "--memory-bytes", args.memory, "--speculation", "off"]
    servers: dict[str, Callable[[], AbstractContextManager[LaunchedServer]]] = {"chorus": lambda: launched(flags)}
    if args.vllm is not None:
        servers["vllm"] = lambda: _vllm(args, served, folder)
    found = {name: _of_server(make, name, args, order, geometry.vocab) for name, make in servers.items()}
    own = found.pop("chorus")
    return {"adapters": args.adapters, "requests": args.requests, **own, **({"beside": found} if found else {})}


def _vllm(args: Any, model: Path, folder: Path) -> AbstractContextManager[LaunchedServer]:
    least_rank = max(8, args.rank)
    flags = ["--enable-lora", "--max-lora-rank", least_rank, "--dtype", "bfloat16"]
    flags += ["--max-loras", args.vllm_loras, "--max-cpu-loras", 1024, "--max-num-seqs", args.clients]
    finds = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_PLUGINS": "lora_filesystem_resolver",
        "VLLM_LORA_RESOLVER_CACHE_DIR": str(folder),
    }
    return vllm_process(args.vllm, model, flags, available_cpus(), finds)


def _of_server(
    make: Callable[[], AbstractContextManager[LaunchedServer]], name: str, args: Any, order: Sequence[int], vocab: int
) -> dict[str, Any]:
    """What a server does with the requests."""
    began = time.monotonic()
    with make() as server:
        started = time.monotonic() - began
        at_start = resident_bytes(server.pid)
        say(f"{name} started in {started:.1f} s")
        began = time.monotonic()
        firsts, errors = asyncio.run(ask_all(server.address, order, vocab, args.clients))
        seconds = time.monotonic() - began
        at_end = resident_bytes(server.pid)
    return {
        "start_seconds": started,
        "seconds": seconds,
        "bytes_at_start": at_start,
        "bytes_at_end": at_end,
        "errors": len(errors),
        "first_error": next(iter(errors), None),
        **{kind: _marks(seconds) for kind, seconds in firsts.items()},
    }


def _marks(seconds: Sequence[float]) -> dict[str, Any]:
    p50, p99 = np.percentile(seconds, (50, 99)).tolist() if seconds else (None, None)
    return {"requests": len(seconds), "p50": p50, "p99": p99}


def main(argv: Sequence[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    add = command.add_argument
    add("--model-size", choices=SIZES, default="tiny", metavar="NAME")
    add("--adapters", type=count, default=10_000)
    add("--rank", type=count, default=4)
    add("--requests", type=count, default=2000)
    add("--clients", type=count, default=4, help="requests at once")
    add("--exponent", type=float, default=1.1, help="of Zipf's law")
    add("--memory", default="1GiB", help="for KV and adapters")
    add("--seed", type=int, default=0)
    add("--vllm", type=Path, default=None, metavar="PATH", help="its command")
    add("--vllm-loras", type=count, default=8, help="its --max-loras")
    add("--work-dir", type=Path, default=Path("build/many-adapters"))
    try:
        found = measured(command.parse_args(argv))
    except LoadError as error:
        print(f"many_adapters: {error}", file=sys.stderr)
        return 2
    servers = {"chorus": found, **found.get("beside", {})}
    firsts = [
        {"server": name, "kind": kind, **each[kind]} for name, each in servers.items() for kind in ("hot", "cold")
    ]
    columns = "server | requests: kind | number: requests | TTFT p50, ms: p50 * 1e3 | TTFT p99, ms: p99 * 1e3"
    rows_table(f"{found['adapters']} adapters on disk", columns, firsts).show()
    costs = [{"server": name, "rate": found["requests"] / each["seconds"], **each} for name, each in servers.items()]
    columns = "server | start, s: start_seconds | requests/s: rate | MB at the start: bytes_at_start * 1e-6"
    rows_table("server", f"{columns} | MB at the end: bytes_at_end * 1e-6 | errors", costs).show()
    return conclude({"device": processor(), **found}, not found["errors"])


if __name__ == "__main__":
    sys.exit(main())
