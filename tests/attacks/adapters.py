"""Loads hostile adapters into a real server while a neighbour streams: how soon each is decided, and at which cost.

    python -m tests.attacks.adapters
    python -m tests.attacks.adapters --mutated 1000 --seed 7

Prints a line for each kind of directory, and one line of JSON at the end. Exits with 1 unless all of this holds: each
directory is decided within 2 s and 64 MiB beyond its own size; no token of the neighbour comes more than 50 ms after
the one before; a server with 999 good adapters and a broken one serves the 999. The neighbour's streams follow each
other at once, and the wait for the next one counts. On a busy machine the gap means little, so the neighbour's gap over
the same time without loads is printed, too.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx

from chorus.perf.report.command import judge, parser
from chorus.perf.report.table import Goal, Table, spread
from chorus.perf.serving.server_process import LaunchedServer, launched
from chorus.server.demo.builtin import BUILTIN_ADAPTERS
from tests.processes import forget_peak, peak, rss

from .attacked_server import Neighbour
from .hostile_adapters import hostile

NUM_ADAPTERS = 1000
FLAGS = ["--threads", "1", "--memory-bytes", str(64 << 20)]


@dataclass
class Decided:
    """Result of one directory. extra_bytes: the server's peak, minus its memory before and the directory's own size."""

    name: str
    status: int
    code: str
    seconds: float
    extra_bytes: int
    gap: float


class Client:
    """Loads directories under one name while a neighbour streams, so at most one of them is loaded at a time."""

    def __init__(self, server: LaunchedServer) -> None:
        self.server, self.http = server, httpx.Client(base_url=server.url, timeout=120, trust_env=False)
        self.neighbour = Neighbour(server.address)

    def gaps(self, begin: float, end: float) -> list[float]:
        """Times between two of the neighbour's tokens, sorted, of the gaps that ended between `begin` and `end`."""
        return sorted(after - before for before, after in pairwise(self.neighbour) if begin <= after < end)

    def load(self, name: str, path: Path) -> Decided:
        with suppress(OSError):
            forget_peak(self.server.pid)
        before = rss(self.server.pid)
        time.sleep(0.02)  # a token that came while this process wrote the directory has been read
        start = time.monotonic()
        response = self.http.post("/v1/adapters", json={"name": "hostile", "path": str(path)})
        seconds = time.monotonic() - start
        extra = peak(self.server.pid) - before
        time.sleep(0.02)  # a step that waited for the last of it has delivered
        code = "" if response.is_success else response.json()["error"]["code"] or ""
        if response.is_success:
            with suppress(OSError):
                extra -= (path / "adapter_model.safetensors").stat().st_size
        gap = max(self.gaps(start, time.monotonic()), default=0.0)
        return Decided(name, response.status_code, code, seconds, max(0, extra), gap)


def attack(directory: Path, mutated: int, seed: int) -> tuple[list[Decided], list[float], list[float]]:
    """All hostile directories one after another; and the neighbour's gaps with them, and as long without."""
    good = sorted(BUILTIN_ADAPTERS.iterdir())
    root = directory / "hostile"
    root.mkdir()
    flags = [*FLAGS, "--adapters", str(BUILTIN_ADAPTERS), "--adapter-roots", str(root)]
    with launched(flags) as server:
        client = Client(server)
        try:
            for path in good[:3]:  # the first loads bring libraries and buffers into memory
                client.load("warm-up", Path(shutil.copytree(path, root / path.name)))
            begin, found = time.monotonic(), []
            for name, path in hostile(root, good, mutated, seed):
                found.append(client.load(name, path))
                shutil.rmtree(path)
            client.http.get("/health").raise_for_status()
            end = time.monotonic()
            time.sleep(end - begin)
            beside, alone = client.gaps(begin, end), client.gaps(end, time.monotonic())
        finally:
            client.neighbour.close()
            client.http.close()
    if min(len(beside), len(alone)) < 1000:
        raise RuntimeError(f"the neighbour had {len(beside)} and {len(alone)} gaps only; nothing was measured")
    return found, beside, alone


def many(directory: Path) -> tuple[int, int]:
    """Numbers of serving and of quarantined adapters, on a server that starts with one broken in a thousand."""
    good = sorted(BUILTIN_ADAPTERS.iterdir())
    root = directory / "many"
    for number in range(NUM_ADAPTERS):
        shutil.copytree(good[number % len(good)], root / f"a{number:04}", copy_function=os.link)
    broken = root / "a0500" / "adapter_model.safetensors"
    broken.unlink()
    broken.write_bytes(b"half")
    with (
        launched([*FLAGS, "--adapters", str(root)]) as server,
        httpx.Client(base_url=server.url, timeout=120, trust_env=False) as client,
    ):
        listed = client.get("/v1/adapters").json()
        body = {"prompt": "abc\n", "max_tokens": 1, "temperature": 0}
        answers = [
            client.post("/v1/completions", json={"model": one["name"], **body}).status_code for one in listed["data"]
        ]
        return answers.count(200), len(listed["quarantined"])


def show(found: Sequence[Decided], gaps: dict[str, list[float]]) -> None:
    table = Table("directories", ["directory", "answer", "code", "ms", "MiB more", "gap ms"])
    mutated = [one for one in found if one.name.startswith("mutated")]
    for one in found:
        if one not in mutated:
            table.add(one.name, one.status, one.code, 1e3 * one.seconds, one.extra_bytes / 2**20, 1e3 * one.gap)
    if mutated:
        worst = [max(getattr(one, name) for one in mutated) for name in ("seconds", "extra_bytes", "gap")]
        title = f"worst of {len(mutated)} mutated, {sum(one.status < 300 for one in mutated)} served"
        table.add(title, None, "", 1e3 * worst[0], worst[1] / 2**20, 1e3 * worst[2])
    table.show()
    table = Table("gaps between the neighbour's tokens, ms", ["", "gaps", "p99", "p99.9", "max"])
    for name, seconds in gaps.items():
        ms = spread((1e3 * gap for gap in seconds), (99, 99.9))
        assert ms is not None, f"no gaps of {name}"
        table.add(name, len(seconds), ms["p99"], ms["p99.9"], ms["max"])
    table.show()


def main() -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--mutated", type=int, default=200, help="damaged copies of good adapters to load as well")
    command.add_argument("--seed", type=int, default=0, help="what they are drawn from")
    args = command.parse_args()
    with tempfile.TemporaryDirectory(prefix="chorus-adapters-") as name:
        found, beside, alone = attack(Path(name).resolve(), args.mutated, args.seed)
        answering, quarantined = many(Path(name).resolve())
    show(found, {"beside the loads": beside, "without any": alone})
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
    goals = [
        Goal("unexpected answers", len(result["unexpected_answers"]), 0, at_most=True),
        Goal("seconds until a directory is decided", result["worst_seconds"], 2.0, at_most=True),
        Goal("MiB beyond its own size", result["worst_extra_mib"], 64, at_most=True),
        Goal("ms between a neighbour's tokens", result["worst_gap_ms"], 50, at_most=True),
        Goal("good adapters of 1,000 that answer", answering, NUM_ADAPTERS - 1),
        Goal("broken ones in quarantine", quarantined, 1),
    ]
    return judge(result, goals)


if __name__ == "__main__":
    sys.exit(main())
