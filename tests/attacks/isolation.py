"""Tries to tell another tenant's adapter from one that does not exist by how long the refusal takes.

    python -m tests.attacks.isolation --samples 400

A key that may use no adapter asks for an adapter that exists, and for one that does not, in random order over one
connection. For each route a threshold on the seconds is chosen by half of the samples and judged by the other half, and
vice versa; guessing gives 0.5. Exits with 1 if it is right more often than in 55 of 100 samples.
"""

from __future__ import annotations

import http.client
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chorus.perf.report.command import judge, parser
from chorus.perf.report.table import Goal
from chorus.perf.serving.server_process import launched
from chorus.server.demo.builtin import BUILTIN_ADAPTERS

MOST_RIGHT = 0.55
THEIRS, ABSENT = "theirs", "absent"
KEY = "limited-tenants-key"
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "model": None},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "model": None},
    "/generate": {"inputs": "hi", "parameters": {"adapter_id": None}},
    "/tokenize": {"prompt": "hi", "model": None},
}

Sample = tuple[float, bool]


def measure(
    address: tuple[str, int], path: str, body: dict[str, Any], samples: int, draw: random.Random
) -> list[Sample]:
    """Seconds of each refusal, and whether the adapter exists; as many of either."""
    connection = http.client.HTTPConnection(*address, timeout=60)
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    sent = {exists: json.dumps(body).replace("null", f'"{THEIRS if exists else ABSENT}"') for exists in (True, False)}
    order = [True, False] * (samples // 2 + 20)
    draw.shuffle(order)
    found = []
    for exists in order:
        start = time.perf_counter()
        connection.request("POST", path, sent[exists], headers)
        answer = connection.getresponse()
        answer.read()
        found.append((time.perf_counter() - start, exists))
        if answer.status != 404:
            raise RuntimeError(f"{path} answered {answer.status}, which tells everything")
    connection.close()
    return found[40:]  # the first ones warm caches up


def accuracy(samples: Sequence[Sample]) -> float:
    """Share that a threshold tells right which was chosen by other samples."""
    half = len(samples) // 2
    parts = samples[:half], samples[half:]
    right = sum(_right(parts[1 - which], *_threshold(parts[which])) for which in range(2))
    return right / len(samples)


def _threshold(samples: Sequence[Sample]) -> tuple[float, bool]:
    """The best threshold, and whether the slower answers mean that the adapter exists."""
    choices = ((seconds, longer) for seconds, _ in samples for longer in (True, False))
    return max(choices, key=lambda choice: _right(samples, *choice))


def _right(samples: Sequence[Sample], threshold: float, longer: bool) -> int:
    return sum((seconds > threshold) == (exists is longer) for seconds, exists in samples)


def main(argv: Sequence[str] | None = None) -> int:
    flags = parser(__spec__, __doc__ or "")
    flags.add_argument("--samples", type=int, default=400, help="refusals of each route")
    flags.add_argument("--seed", type=int, default=1)
    given = flags.parse_args(argv)
    draw, result = random.Random(given.seed), {}
    with tempfile.TemporaryDirectory() as directory:
        keys = Path(directory) / "keys"
        keys.write_text(f"{KEY} limited adapters=none\n")
        adapter = sorted(BUILTIN_ADAPTERS.iterdir())[0]
        modules = ["--lora-modules", f"{THEIRS}={adapter}"]
        with launched(["--threads", "1", "--api-key-file", str(keys), *modules]) as server:
            for path, body in ROUTES.items():
                result[path] = accuracy(measure(server.address, path, body, given.samples, draw))
    return judge(
        result, [Goal(f"{path}: told right", share, MOST_RIGHT, at_most=True) for path, share in result.items()]
    )


if __name__ == "__main__":
    sys.exit(main())
