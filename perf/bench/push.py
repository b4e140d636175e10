"""Time from a trainer's push to the first token of the new version: `python -m chorus.perf.bench.push`.

A server of a random model gets new versions of an adapter one after another: as a form over HTTP, as a directory in
shared memory, and as a descriptor over a Unix socket. After each push one streamed request names the adapter. The goal
compares the median time from the push to its first token with the time that hashing the weights and copying them
twice takes on this machine, measured between the pushes.

Tests: tests/perf/bench/test_push.py
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import httpx

from ..report.command import count, judge, parser, say
from ..report.table import Goal, Table
from ..serving.errors import LoadError
from ..serving.server_process import launched
from .machine import processor
from .models.random_model import RandomModel, adapters, checkpoint
from .models.sizes import SIZES

NAME = "policy"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LOAD = "/v1/load_lora_adapter"
MOST = 1.3
"""The goal, in multiples of one hash and two copies."""

SHARED_MEMORY = "/dev/shm"
_TIMEOUT = 600.0


@dataclass(frozen=True)
class Target:
    """A server to push to. folder: in shared memory, below its adapter roots."""

    http: httpx.Client
    unix_socket: Path
    folder: Path

    def load(self, **sent: object) -> None:
        _check(self.http.post(LOAD, **sent))  # pyright: ignore[reportArgumentType]

    def first_token(self, prompt: Sequence[int]) -> None:
        """Return once the first token of an answer has come."""
        body = {"model": NAME, "prompt": list(prompt), "max_tokens": 2, "stream": True, "ignore_eos": True}
        with self.http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise LoadError(f"a request failed: {answer.read().decode()}")
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    return


def _check(answer: httpx.Response) -> None:
    if answer.status_code != 200:
        raise LoadError(f"a push failed: {answer.text}")


@contextmanager
def _form(to: Target, config: bytes, weights: bytes) -> Iterator[Callable[[], None]]:
    files = {CONFIG: (CONFIG, config), WEIGHTS: (WEIGHTS, weights)}
    yield lambda: to.load(data={"lora_name": NAME}, files=files)


@contextmanager
def _directory(to: Target, config: bytes, weights: bytes) -> Iterator[Callable[[], None]]:
    path = Path(tempfile.mkdtemp(dir=to.folder))
    (path / CONFIG).write_bytes(config)
    (path / WEIGHTS).write_bytes(weights)
    yield lambda: to.load(json={"lora_name": NAME, "lora_path": str(path), "load_inplace": True})
    shutil.rmtree(path)


@contextmanager
def _descriptor(to: Target, config: bytes, weights: bytes) -> Iterator[Callable[[], None]]:
    fd = os.memfd_create("adapter", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(fd, "wb") as file:
        file.write(weights)
        file.flush()
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
        yield lambda: send_descriptor(to.unix_socket, json.loads(config), fd)


def send_descriptor(path: Path, config: dict, fd: int) -> None:
    """Push a memory file over a Unix socket. Raises LoadError."""
    sent = {"lora_name": NAME, "adapter_config": config, "adapter_model": {"descriptor": 0}}
    body = json.dumps(sent).encode()
    head = (
        f"POST {LOAD} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(_TIMEOUT)
        client.connect(str(path))
        socket.send_fds(client, [head.encode() + body], [fd])
        answer = http.client.HTTPResponse(client)
        answer.begin()
        text = answer.read().decode()
    if answer.status != 200:
        raise LoadError(f"a push failed: {text}")


WAYS = {"form": _form, "directory": _directory, "descriptor": _descriptor}


def versions(weights: bytes) -> Iterator[bytes]:
    """The weights, each time with another last byte but one: the low byte of a bfloat16 value."""
    for number in range(256):
        yield b"".join((memoryview(weights)[:-2], bytes([weights[-2] ^ number]), weights[-1:]))


def floor_seconds(weights: bytes) -> float:
    """Seconds to hash the weights once and to copy them twice, to memory that was touched before."""
    place = memoryview(bytearray(len(weights)))
    place[:] = weights
    began = time.perf_counter()
    hashlib.sha256(weights).digest()
    for _ in range(2):
        place[:] = weights
    return time.perf_counter() - began


def measured(to: Target, source: Path, pushes: int, ways: Sequence[str]) -> dict[str, list[float]]:
    """Seconds of each push by its way, and of the floor; the ways take turns."""
    config, weights = (source / CONFIG).read_bytes(), (source / WEIGHTS).read_bytes()
    found: dict[str, list[float]] = {way: [] for way in (*ways, "floor")}
    made = versions(weights)
    for turn in range(pushes + 1):
        say(f"turn {turn}")
        floor = floor_seconds(weights)
        seconds = {"floor": floor}
        for number, name in enumerate(ways):
            with WAYS[name](to, config, next(made)) as push:
                began = time.perf_counter()
                push()
                to.first_token([5 + turn, 6 + number, 7, 8])
                seconds[name] = time.perf_counter() - began
        if turn:  # the first one warms up
            for name, value in seconds.items():
                found[name].append(value)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--model-size", choices=SIZES, default="125m", metavar="NAME")
    command.add_argument("--rank", type=count, default=256, help="of the adapter")
    command.add_argument("--pushes", type=count, default=5, help="measured pushes of each way")
    command.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS], metavar="WAY", help="of a push, in turns")
    command.add_argument("--memory", help="for KV and adapters; default: 2 GiB, or three times the adapter")
    command.add_argument("--work-dir", type=Path, default=Path("build/push"))
    args = command.parse_args(argv)
    model = RandomModel(SIZES[args.model_size].geometry, (args.rank,))
    served = checkpoint(model, args.work_dir)
    (source,) = adapters(model, args.work_dir).values()
    num_bytes = (source / WEIGHTS).stat().st_size
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as shared:
        folder = Path(shared)
        unix_socket = folder / "socket"
        flags: dict[str, object] = {"--model": served, "--memory-bytes": args.memory or max(2 << 30, 3 * num_bytes)}
        flags |= {"--max-adapter-bytes": num_bytes + (1 << 20), "--host-cache-bytes": 4 * num_bytes}
        flags |= {"--adapter-roots": shared, "--adapter-uploads": folder / "uploads", "--unix-socket": unix_socket}
        try:
            with (
                launched([str(part) for flag in flags.items() for part in flag]) as server,
                httpx.Client(base_url=server.url, timeout=_TIMEOUT, trust_env=False) as client,
            ):
                found = measured(Target(client, unix_socket, folder), source, args.pushes, args.ways)
        except LoadError as error:
            print(f"push: {error}", file=sys.stderr)
            return 2
    floor = median(found.pop("floor"))
    table = Table(f"push of {num_bytes / 1e6:.0f} MB to the first token", ["way", "ms", "times hash and two copies"])
    table.add("hash and two copies", 1e3 * floor, 1.0)
    goals = []
    for way, seconds in found.items():
        ratio = median(seconds) / floor
        table.add(way, 1e3 * median(seconds), ratio)
        if way != "form":
            goals.append(Goal(f"{way}: times hash and two copies", ratio, MOST, at_most=True))
    table.show()
    about = {"device": processor(), "model_size": args.model_size, "rank": args.rank, "bytes": num_bytes}
    return judge({**about, "floor": floor, "seconds": found}, goals)


if __name__ == "__main__":
    sys.exit(main())
