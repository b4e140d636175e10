"""CUDA graphs and their memory pools as torch keeps them, without a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch


class FakePools:
    """Counts each pool's graphs; a pool whose last graph is gone can't be captured into, as in torch's allocator."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._uses: dict[int, int] = {}
        self.log: list[str] = []

    def handle(self) -> int:
        return next(self._ids)

    def begin(self, pool: int) -> None:
        if self._uses.get(pool) == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self._uses[pool] = self._uses.get(pool, 0) + 1

    def end(self, pool: int) -> None:
        self._uses[pool] -= 1

    def uses(self, pool: int) -> int:
        return self._uses.get(pool, 0)

    def graph(self) -> FakeGraph:
        return FakeGraph(self)


class FakeGraph:
    """Keeps its pool in use from its capture to its end."""

    def __init__(self, pools: FakePools) -> None:
        self._pools = pools
        self.pool: int | None = None

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self._pools.begin(pool)
        self.pool = pool
        self._pools.log.append("begin")

    def capture_end(self) -> None:
        self._pools.log.append("end")

    def replay(self) -> None:
        self._pools.log.append("replay")

    def __del__(self) -> None:
        if self.pool is not None:
            self._pools.end(self.pool)


def fake_graphs(monkeypatch: pytest.MonkeyPatch) -> FakePools:
    """Put fake graphs and streams in torch.cuda's place."""
    pools = FakePools()
    fakes: dict[str, Callable] = {
        "Stream": object,
        "stream": lambda stream: nullcontext(),
        "synchronize": lambda *device: None,
        "device": lambda device: nullcontext(),
        "graph_pool_handle": pools.handle,
        "CUDAGraph": pools.graph,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "empty_cache": lambda: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return pools
