"""A checkpoint without weights, and traces."""

from __future__ import annotations

from pathlib import Path

import pytest

from chorus.perf.bench.models.sizes import SIZES
from chorus.server.engine.recorder import HEADER


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SIZES["llama-3.1-8b"].write_config(tmp_path_factory.mktemp("llama"), "bfloat16")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """60 requests in half a minute, most of them for three adapters, as they end."""
    rows = [
        f"{1000 + 0.5 * i:.4f},{['', 'a', 'b', 'c'][i % 4]},{[0, 8, 16, 64][i % 4]},{100 + i},20,t{i % 2}"
        for i in range(60)
    ]
    rows[3], rows[5] = rows[5], rows[3]
    path = tmp_path / "fleet.csv"
    path.write_text("\n".join([HEADER, *rows]) + "\n")
    return path
