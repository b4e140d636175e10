"""`chorus serve` compared with other servers over HTTP: one random model, its adapters and prompts, on the same
processors, in rotation.

A peer's server is given with `--beside`: `vllm=ENV/bin/vllm` (see `vllm_process`) and `llamacpp=TREE`, the source tree
of llama.cpp with its server built in `build/` (`pip download --no-binary :all: --no-deps llama-cpp-python` has it as
`vendor/llama.cpp`; its conversion scripts need sentencepiece). With `--engine quantization=int8 --beside
llamacpp=TREE`, llama.cpp's weights have about as many bits (its program `llama-quantize` must be built, too). All
requests of a case arrive at once. A server is suspended while another is measured.

Tests: tests/perf/bench/test_peers.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch

from ...report.table import Goal, Table, rows_table
from ...serving.server_process import LaunchedServer, free_port, launched, started
from ...serving.streams import read_streams
from ...serving.vllm_process import vllm_process
from ..context import RANKS, Context
from ..machine import family
from ..models.random_model import RandomModel, checkpoint
from .http import bodies

REQUESTS = 8
#: Case → whether the server has LoRA on, and the adapters of the requests in rotation.
CASES: dict[str, tuple[bool, Sequence[int | None]]] = {
    "plain": (False, [None]),
    "base": (True, [None]),
    "mixed": (True, range(REQUESTS)),
    "one": (True, [4]),
}

GGUF_TYPES = {"int8": "Q8_0", "int4": "Q4_K_S", "w8a8": "Q8_0", "w4a8": "Q4_K_S", "fp8": "Q8_0"}
"""Types of llama.cpp by `--quantization`. They have the activations of products in 8 bits."""

_RATES = {"output": "rate", "prefill": "prefill_rate", "decode": "decode_rate"}
_BATCH = 1024
_SETTLE_SECONDS = 0.5  # until the threads of the previous server have stopped spinning


@dataclass(frozen=True)
class Load:
    """Inputs that all servers get."""

    model: Path
    files: dict[str, Path]
    """The adapters by name."""
    room: int
    """Most tokens of a request."""
    dtype: str
    threads: int
    engine: Mapping[str, str] = field(default_factory=dict)
    """Fields of EngineConfig that Chorus gets; `quantization` sets the peers' weights, too."""
    requests: int = REQUESTS
    """Most at once."""

    @property
    def quantization(self) -> str | None:
        return self.engine.get("quantization")


@dataclass(frozen=True)
class Served:
    """A running server."""

    server: LaunchedServer
    more: Callable[[int | None], dict[str, Any]] = lambda index: {}
    """Fields of a request for an adapter, by its index, if its name is not enough."""

    def signal(self, suspend: bool) -> None:
        for process in family([self.server.pid]):
            process.suspend() if suspend else process.resume()


def chorus(load: Load, path: Path, lora: bool, stack: ExitStack) -> Served:
    flags = ["--model", load.model, "--max-model-len", load.room, "--max-num-seqs", load.requests]
    flags += ["--threads", load.threads, "--max-num-batched-tokens", _BATCH]
    flags += ["--speculation", "off"]  # a random model repeats itself
    for name, value in load.engine.items():
        flags += [f"--{name.replace('_', '-')}", *([] if value == "true" else [value])]
    if lora:
        (folder,) = {each.parent for each in load.files.values()}
        flags += ["--adapters", folder]
    return Served(stack.enter_context(launched([*map(str, flags)])))


def vllm(load: Load, path: Path, lora: bool, stack: ExitStack) -> Served:
    if load.quantization is not None:
        raise ValueError(f"quantization is {load.quantization}, which only llamacpp is compared with; leave out vllm")
    flags: list[object] = ["--dtype", load.dtype, "--max-model-len", load.room, "--max-num-seqs", load.requests]
    flags += ["--max-num-batched-tokens", _BATCH]
    if lora:
        named = [f"{name}={file}" for name, file in load.files.items()]
        flags += ["--enable-lora", "--max-lora-rank", max(RANKS), "--max-loras", len(named), "--lora-modules", *named]
    return Served(stack.enter_context(vllm_process(path, load.model, flags, load.threads)))


def llamacpp(load: Load, path: Path, lora: bool, stack: ExitStack) -> Served:
    model = quantised(load, path, converted(load, path, "convert_hf_to_gguf.py", load.model))
    flags = [path / "build" / "bin" / "llama-server", "-m", model, "--host", "127.0.0.1", "--port", free_port()]
    flags += ["-np", load.requests, "-c", load.requests * (load.room + 64), "-t", load.threads, "-tb", load.threads]
    flags += ["-b", _BATCH, "-ub", _BATCH, "--no-cache-prompt"]
    if lora:
        script = "convert_lora_to_gguf.py"
        base = "--base", load.model
        files = [converted(load, path, script, file, *base) for file in load.files.values()]
        flags += ["--lora", ",".join(map(str, files)), "--lora-init-without-apply"]

    def more(index: int | None) -> dict[str, Any]:  # an empty list would apply all of them
        scales = [{"id": number, "scale": float(number == index)} for number in range(len(load.files))]
        return {"lora": scales} if lora else {}

    return Served(stack.enter_context(started([*map(str, flags)])), more)


def converted(load: Load, tree: Path, script: str, path: Path, *arguments: str | Path) -> Path:
    """A model or an adapter in llama.cpp's format, converted by its own scripts; made on first use."""
    kind = {"bfloat16": "bf16", "float32": "f32"}[load.dtype]
    target = load.model.parent / "gguf" / f"{path.name}.{kind}.gguf"
    if not target.is_file():
        target.parent.mkdir(exist_ok=True)
        draft = target.with_name(f".draft-{target.name}")
        command = [sys.executable, tree / script, *arguments, path, "--outtype", kind, "--outfile", draft]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tree / "gguf-py")}, check=True)
        os.replace(draft, target)
    return target


def quantised(load: Load, tree: Path, plain: Path) -> Path:
    """The model in the type of llama.cpp that has about as many bits a weight; made on first use."""
    if load.quantization is None:
        return plain
    kind = GGUF_TYPES[load.quantization]
    target = plain.with_name(f"{plain.stem}.{kind}.gguf")
    if not target.is_file():
        draft = target.with_name(f".draft-{target.name}")
        command = [tree / "build" / "bin" / "llama-quantize", plain, draft, kind]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        os.replace(draft, target)
    return target


def suspended(served: Served, stack: ExitStack) -> Served:
    """A server that has started, and waits for its turns."""
    stack.callback(served.signal, suspend=False)  # it must be able to end
    served.signal(suspend=True)
    return served


PEERS = {"chorus": chorus, "vllm": vllm, "llamacpp": llamacpp}


def run(context: Context) -> dict[str, Any]:
    """Tokens per second of each case and server, medians over rounds; limits follow from the machine's measured
    rates.
    """
    prompt, output = context.pick((8, 4), (128, 64), (300, 48))
    size = {"requests": REQUESTS, "prompt_tokens": prompt, "output_tokens": output}
    found: dict[str, Any] = {**size, "ranks": RANKS, "limits": {}, "rows": []}
    files = context.mixed_adapters()
    model = checkpoint(RandomModel(context.size.geometry, dtype=context.dtype_name), context.work_dir)
    room, dtype = prompt + output + 16, context.dtype_name
    load = Load(model, files, room, dtype, torch.get_num_threads(), context.engine)
    found["quantization"] = load.quantization
    for case, (_, chosen) in CASES.items():
        ranks = [rank for rank in RANKS for _ in range(2)]
        found["limits"][case] = _limit(context, size, [ranks[index] for index in chosen if index is not None])
    with ExitStack() as stack:
        servers: dict[tuple[str, bool], Served] = {}
        for name, peer in PEERS.items():
            if name == "chorus" or name in context.beside:
                with context.row(found, f"start of {name}"):
                    for lora in (False, True):
                        servers[name, lora] = suspended(
                            peer(load, context.beside.get(name, Path()), lora, stack), stack
                        )
        samples: dict[tuple[str, str], list[dict[str, float]]] = {}
        for index in range(context.pick(2, 4, 8)):  # the first is not counted
            for case, name in _turns(servers, index):
                with context.row(found, f"round {index}, {case} of {name}"):
                    lora, chosen = CASES[case]
                    sample = measure(
                        context, load, servers[name, lora], chosen=chosen, seed=f"{index} {case}", size=size
                    )
                    kept = samples.setdefault((case, name), [])
                    kept[:] = [*(kept if index > 1 else ()), sample]
                    found["rows"] = [row(*key, its) for key, its in samples.items()]
    return found


def _turns(servers: dict[tuple[str, bool], Served], index: int) -> Iterator[tuple[str, str]]:
    """Cases and servers of a round: for each case all servers, in reverse order every second time."""
    for case, (lora, _) in CASES.items():
        names = [name for name, has_lora in servers if has_lora == lora]
        yield from ((case, name) for name in (names if index % 2 else reversed(names)))


def _limit(context: Context, size: dict[str, int], ranks: list[int]) -> dict[str, float]:
    requests, prompt, output = size.values()
    prefill = context.floors(requests, prompt, tuple(ranks)).prefill
    decode = context.floors(requests, prompt + output // 2, tuple(ranks)).decode
    return _rates(size, prefill, prefill + (output - 1) * decode)


def _rates(size: dict[str, int], first: float, whole: float) -> dict[str, float]:
    """Rates of requests that all have their first token after `first` seconds, and their last one after `whole`."""
    requests, prompt, output = size.values()
    steps = requests * (output - 1) / (whole - first)
    return {"rate": requests * output / whole, "prefill_rate": requests * prompt / first, "decode_rate": steps}


def measure(
    context: Context, load: Load, served: Served, chosen: Sequence[int | None], seed: str, size: dict[str, int]
) -> dict[str, float]:
    """Rates of a server."""
    served.signal(suspend=False)
    try:
        indices = [chosen[index % len(chosen)] for index in range(size["requests"])]
        names = [None if index is None else list(load.files)[index] for index in indices]
        asked = bodies(served.server.url, names, size, Random(seed), context.size.geometry.vocab)
        time.sleep(0.0 if context.smoke else _SETTLE_SECONDS)
        answered = read_streams(
            served.server.address,
            [{**body, **served.more(index)} for body, index in zip(asked, indices, strict=True)],
        )
    finally:
        served.signal(suspend=True)
    return _rates(size, max(answered.firsts), answered.seconds)


def row(case: str, peer: str, samples: list[dict[str, float]]) -> dict[str, Any]:
    rates = {name: median(each[name] for each in samples) for name in samples[0]}
    return {"case": case, "peer": peer, **rates, "samples": len(samples)}


#: Goals: a name, our case, the other case and whose, the rate that is compared, and the least ratio.
_RACES = (
    ("prefill: base / best peer's base", "base", "plain", "peers", "prefill_rate", 1.05),
    ("prefill: mixed / base", "mixed", "base", "chorus", "prefill_rate", 0.95),
    ("mixed / base", "mixed", "base", "chorus", "rate", 0.8),
    ("one / base", "one", "base", "chorus", "rate", 0.85),
    ("base / plain", "base", "plain", "chorus", "rate", 0.99),
    ("mixed / best peer's mixed", "mixed", "mixed", "peers", "rate", 2.5),
    ("mixed / vllm's mixed", "mixed", "mixed", "vllm", "rate", 4.0),
    ("base / best peer's plain", "base", "plain", "peers", "rate", 0.95),
)
#: With quantised weights. Not decode rates of mixed adapters: who serves one after another has decoded most before the
#: last prefill.
_QUANTISED = (
    ("decode: base / best peer's with as many bits", "base", "plain", "peers", "decode_rate", 1.2),
    ("output: mixed / best peer's with as many bits", "mixed", "mixed", "peers", "rate", 3.0),
    ("prefill: base / best peer's with as many bits", "base", "plain", "peers", "prefill_rate", 1.0),
)


def goals(values: dict[str, Any]) -> list[Goal]:
    rows = {(row["peer"], row["case"]): row for row in values["rows"]}
    found = []
    for name, ours, theirs, whose, rate, mark in _RACES if values.get("quantization") is None else _QUANTISED:
        own = rows.get(("chorus", ours))
        others = [
            row
            for (peer, case), row in rows.items()
            if case == theirs and (peer != "chorus" if whose == "peers" else peer == whose)
        ]
        found.append(Goal(name, min((own[rate] / each[rate] for each in others), default=None) if own else None, mark))
    if values.get("quantization") is None and (base := rows.get(("chorus", "base"))):
        limit = values["limits"]["base"]["prefill_rate"]
        found.append(Goal("prefill: base / its limit", base["prefill_rate"] / limit, 0.8))
    return found


def tables(values: dict[str, Any]) -> list[Table]:
    columns = "case | server: peer | samples"
    for title, rate in _RATES.items():
        columns += f" | {title}: {rate} | {title} / limit: {rate}_share"
    rows = [
        {**row, **{f"{rate}_share": row[rate] / values["limits"][row["case"]][rate] for rate in _RATES.values()}}
        for row in values["rows"]
    ]
    size = f"{values['requests']} requests of {values['prompt_tokens']} + {values['output_tokens']} tokens"
    return [rows_table(f"(r) tokens/s over HTTP, {size}", columns, rows)]
