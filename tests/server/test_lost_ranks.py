"""A rank of a server's process that dies or stops answering, as seen by clients, `/health` and the supervisor."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch

from chorus.ops.library import native_library
from chorus.server.demo.builtin import BUILTIN_MODEL

from ..processes import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not native_library.available(torch.float32), reason="ranks add up by the native library"),
]

SECONDS = 120.0


@contextmanager
def served(kind: str, size: int) -> Iterator[tuple[subprocess.Popen[str], httpx.Client, list[int]]]:
    """A server of so many ranks, a client, and the processes of the other ranks."""
    flags = ["--port", "0", "--dtype", "float32", "--threads", "1", "--tensor-parallel-size", str(size)]
    small = [] if kind == "cpu" else ["--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--num-pages", "60"]
    command = [sys.executable, "-m", "tests.server.ranks_server", kind, str(BUILTIN_MODEL), *flags, *small]
    interpreted = {"TRITON_INTERPRET": "1"} if kind == "gloo" else {}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **interpreted}
    ) as process:
        try:
            lines: list[str] = []
            while not (found := re.search(r"listening on (\S+)", "".join(lines))):
                lines.append(process.stderr.readline())
                assert lines[-1], f"the server ended before it listened: {''.join(lines)}"
            url = found[1]
            children = Path(f"/proc/{process.pid}/task").glob("*/children")
            pids = [int(pid) for each in children for pid in each.read_text().split()]
            others = [pid for pid in pids if b"executors.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()]
            assert len(others) == size - 1
            with httpx.Client(base_url=url, timeout=SECONDS) as client:
                yield process, client, others
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("kind", "size", "number", "is_busy", "why"),
    [
        ("cpu", 2, signal.SIGKILL, True, r"rank 1 of 2 has ended \(signal SIGKILL\)"),
        ("cpu", 2, signal.SIGKILL, False, r"rank 1 of 2 has ended \(signal SIGKILL\)"),
        ("cpu", 4, signal.SIGSTOP, True, "rank 3 of 4 kept the others waiting for too long"),
        pytest.param(
            "gloo",
            2,
            signal.SIGSTOP,
            True,
            "a collective with the other ranks failed",
            marks=pytest.mark.triton,
        ),
    ],
)
def test_a_rank_that_is_lost_ends_the_server(kind, size, number, is_busy, why):
    """Requests end with an error, `/health` says why, and the exit status is that of a fault."""
    body = {"prompt": "hello", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with served(kind, size) as (process, client, others):
        assert client.get("/health").status_code == 200
        body["model"] = client.get("/v1/models").json()["data"][0]["id"]
        if is_busy:
            with client.stream("POST", "/v1/completions", json=body) as answer:
                lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
                assert "choices" in next(lines)
                os.kill(others[-1], number)
                rest = list(lines)
            assert "error" in rest[-1]
            assert re.search(why, rest[-1]), rest[-1]
        else:
            os.kill(others[-1], number)
        deadline = time.monotonic() + SECONDS
        while (health := client.get("/health")).status_code == 200:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert health.status_code == 503
        assert re.search(why, health.text), health.text
        assert process.wait(SECONDS) == 1
        if number == signal.SIGSTOP:
            with pytest.raises(OSError):  # it was killed
                os.kill(others[-1], 0)
