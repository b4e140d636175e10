"""Loads hostile adapters into a real server beside a neighbour's stream: how soon each is decided, and at what cost.

    python -m chorus.perf.chaos.adapters
    python -m chorus.perf.chaos.adapters --mutated 1000 --seed 7

Prints a line for each kind of directory, and at the end one line of JSON. Exits with 1 unless every directory is
decided within 2 s and 64 MiB beyond its own size, no token of the neighbour's comes more than 50 ms after the one
before, and a server with 999 good adapters and a broken one serves the 999. The gap means little on a machine that is
busy otherwise; what the neighbour sees in as long a time without any loads is printed beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from ...server.demo.builtin import BUILTIN_ADAPTERS, BUILTIN_MODEL
from ...server.turns import take_short_turns
from ..serving.server_process import launched
from .hostile_adapters import hostile

MAX_SECONDS = 2.0
MAX_BYTES = 64 << 20
MAX_GAP = 0.05
NUM_ADAPTERS = 1000


@dataclass
class Decided:
    """Result of one directory. extra_bytes: at the server's peak, beyond what it had and the directory's own size."""

    name: str
    status: int
    code: str
    seconds: float
    extra_bytes: int
    gap: float


class Neighbour:
    """Streams answers of the base model one after another, and notes the longest time between two of a stream's."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._worst = 0.0
        self._gaps: list[float] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def take_worst(self) -> float:
        worst, self._worst = self._worst, 0.0
        return worst

    def take_gaps(self) -> list[float]:
        """All gaps since the last time, sorted."""
        gaps, self._gaps = self._gaps, []
        return sorted(gaps)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(30)

    def _run(self) -> None:
        model = httpx.get(f"{self._url}/v1/models").json()["data"][0]["id"]
        body = {
            "model": model,
            "prompt": "hello world\n",
            "max_tokens": 400,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self._stop.is_set():
                with client.stream("POST", "/v1/completions", json=body) as response:
                    response.raise_for_status()
                    last = None
                    for _ in response.iter_raw():
                        now = time.perf_counter()
                        if last is not None:
                            self._worst = max(self._worst, now - last)
                            self._gaps.append(now - last)
                        last = now
                        if self._stop.is_set():
                            return


def child() -> int:
    """The process that was started last."""
    return int(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()[-1])


def memory(pid: int, field: str) -> int:
    """`VmRSS` or `VmHWM` of a process, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    raise LookupError(field)


def forget_peak(pid: int) -> None:
    with suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def load(client: httpx.Client, neighbour: Neighbour, pid: int, name: str, path: Path) -> Decided:
    """Load a directory under one name, so that no more than one of them is ever there."""
    forget_peak(pid)
    before = memory(pid, "VmRSS")
    time.sleep(0.02)  # a token that came while this process wrote the directory has been read
    neighbour.take_worst()
    start = time.perf_counter()
    response = client.post("/v1/adapters", json={"name": "hostile", "path": str(path)})
    seconds = time.perf_counter() - start
    extra = memory(pid, "VmHWM") - before
    time.sleep(0.02)  # a step that waited for the last of it has delivered
    code = "" if response.is_success else response.json()["error"]["code"] or ""
    if response.is_success:
        with suppress(OSError):
            extra -= (path / "adapter_model.safetensors").stat().st_size
    return Decided(name, response.status_code, code, seconds, max(0, extra), neighbour.take_worst())


@contextmanager
def served(*flags: str) -> Iterator[tuple[str, int]]:
    """URL and process of a server of the built-in model."""
    with launched(["--model", str(BUILTIN_MODEL), "--threads", "1", "--memory-bytes", str(64 << 20), *flags]) as url:
        yield url, child()


def attack(directory: Path, mutated: int, seed: int) -> tuple[list[Decided], list[float], list[float]]:
    """All hostile directories one after another; and the neighbour's gaps with them, and as long without."""
    good = sorted(BUILTIN_ADAPTERS.iterdir())
    root = directory / "hostile"
    root.mkdir()
    with served("--adapters", str(BUILTIN_ADAPTERS), "--adapter-roots", str(root)) as (url, pid):
        neighbour = Neighbour(url)
        try:
            with httpx.Client(base_url=url, timeout=120) as client:
                for path in good[:3]:  # the first loads bring libraries and buffers into memory
                    shutil.copytree(path, root / path.name)
                    load(client, neighbour, pid, "warm-up", root / path.name)
                neighbour.take_gaps()
                start = time.perf_counter()
                found = []
                for name, path in hostile(root, good, mutated, seed):
                    found.append(load(client, neighbour, pid, name, path))
                    shutil.rmtree(path)
                client.get("/health").raise_for_status()
                beside = neighbour.take_gaps()
                time.sleep(time.perf_counter() - start)
                alone = neighbour.take_gaps()
        finally:
            neighbour.stop()
    if min(len(beside), len(alone)) < 1000:
        raise RuntimeError(
            f"the neighbour's streams had {len(beside)} and {len(alone)} gaps only; nothing was measured"
        )
    return found, beside, alone


def show_gaps(label: str, gaps: list[float]) -> None:
    p99, p999, worst = (1e3 * gaps[int(share * (len(gaps) - 1))] for share in (0.99, 0.999, 1))
    print(f"{len(gaps)} gaps of the neighbour's {label}: p99 {p99:.1f}, p99.9 {p999:.1f}, worst {worst:.1f} ms")


def many(directory: Path) -> tuple[int, int]:
    """Adapters that answer, and those in quarantine, of a server that starts with one broken among a thousand."""
    good = sorted(BUILTIN_ADAPTERS.iterdir())
    root = directory / "many"
    for number in range(NUM_ADAPTERS):
        shutil.copytree(good[number % len(good)], root / f"a{number:04}", copy_function=os.link)
    broken = root / "a0500" / "adapter_model.safetensors"
    broken.unlink()
    broken.write_bytes(b"half")
    with served("--adapters", str(root)) as (url, _), httpx.Client(base_url=url, timeout=120) as client:
        listed = client.get("/v1/adapters").json()
        body = {"prompt": "abc\n", "max_tokens": 1, "temperature": 0}
        answers = [
            client.post("/v1/completions", json={"model": one["name"], **body}).status_code for one in listed["data"]
        ]
        return answers.count(200), len(listed["quarantined"])


def show(found: list[Decided]) -> None:
    print(f"{'directory':<30} {'answer':>6}  {'code':<18} {'ms':>7} {'MiB more':>9} {'gap ms':>7}")
    mutated = [one for one in found if one.name.startswith("mutated")]
    for one in found:
        if one not in mutated:
            print(
                f"{one.name:<30} {one.status:>6}  {one.code:<18} {1e3 * one.seconds:>7.1f} "
                f"{one.extra_bytes / (1 << 20):>9.1f} {1e3 * one.gap:>7.1f}"
            )
    if mutated:
        served = sum(one.status < 300 for one in mutated)
        print(
            f"{f'{len(mutated)} mutated, {served} served':<30} {'':>6}  {'worst of them':<18} "
            f"{1e3 * max(one.seconds for one in mutated):>7.1f} "
            f"{max(one.extra_bytes for one in mutated) / (1 << 20):>9.1f} {1e3 * max(one.gap for one in mutated):>7.1f}"
        )
        worst = max(mutated, key=lambda one: one.gap)
        others = sorted(1e3 * one.gap for one in mutated)[-4:-1]
        print(
            f"the longest gap was beside {worst.name}, which took {1e3 * worst.seconds:.1f} ms; "
            f"the next longest: {', '.join(f'{gap:.1f}' for gap in reversed(others))} ms"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutated", type=int, default=200, help="damaged copies of good adapters to load as well")
    parser.add_argument("--seed", type=int, default=0, help="what they are drawn from")
    arguments = parser.parse_args()
    take_short_turns()  # else the collector holds up the neighbour here, and the server is blamed
    with tempfile.TemporaryDirectory(prefix="chorus-adapters-") as name:
        found, beside, alone = attack(Path(name).resolve(), arguments.mutated, arguments.seed)
        answering, quarantined = many(Path(name).resolve())
    show(found)
    show_gaps("beside the loads", beside)
    show_gaps("without any", alone)
    result = {
        "directories": len(found),
        "unexpected_answers": sorted({one.status for one in found} - {200, 201, 400, 403, 404}),
        "worst_seconds": round(max(one.seconds for one in found), 3),
        "worst_extra_mib": round(max(one.extra_bytes for one in found) / (1 << 20), 1),
        "worst_gap_ms": round(1e3 * max(one.gap for one in found), 1),
        "worst_gap_idle_ms": round(1e3 * alone[-1], 1),
        "serving_of_1000": answering,
        "quarantined_of_1000": quarantined,
    }
    result["met"] = (
        not result["unexpected_answers"]
        and result["worst_seconds"] <= MAX_SECONDS
        and result["worst_extra_mib"] <= MAX_BYTES >> 20
        and result["worst_gap_ms"] <= 1e3 * MAX_GAP
        and (answering, quarantined) == (NUM_ADAPTERS - 1, 1)
    )
    print(f"of 1,000 adapters {answering} answer")
    print(json.dumps(result))
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
