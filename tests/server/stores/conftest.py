"""Stores for tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .store_server import StoreServer, store_server


@pytest.fixture
def store() -> Iterator[StoreServer]:
    with store_server() as server:
        yield server
