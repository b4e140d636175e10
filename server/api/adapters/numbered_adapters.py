"""Numbers of adapters, as llama.cpp's requests name them.

A number is a version's: 0, 1, … in the order in which adapters were registered. A replaced or removed adapter's number
is never given again, so a number never comes to mean another adapter. For a restricted key, gaps would tell how many
others there are: its numbers are random ones, the same as long as the process runs.

Tests: tests/server/api/adapters/test_scaled_adapters.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets

from ...access.grants import Grant
from ...engine.backend import Backend
from ...engine.engine_view import AdapterState
from ...errors import ApiError
from ...executors import DaemonPool

_SECRET = secrets.token_bytes(32)


async def numbered(worker: Backend, threads: DaemonPool, grant: Grant) -> dict[int, AdapterState]:
    """The adapters that a key may use, by number. threads: pool that lists them.

    Raises ApiError if several API servers number them, each in its own order.
    """
    if worker.shared is not None or await asyncio.wrap_future(worker.adapters.registry()) is not None:
        raise ApiError(
            400,
            "lora: adapters have numbers only with one API server and without a registry of adapters; give their names",
            param="lora",
            code="unsupported_parameter",
        )
    listing = await asyncio.wrap_future(worker.adapters.listing())
    states = await threads.run(listing.adapters)  # on a thread: thousands take a while
    number = _hidden if grant.limited else _plain
    return {number(one.version): one for one in states if grant.allows(one.name)}


def _plain(version: int) -> int:
    return version - 1


def _hidden(version: int) -> int:
    """A number of 53 bits, which JSON's readers keep, that says nothing about the version."""
    digest = hashlib.blake2b(version.to_bytes(8, "big"), key=_SECRET, digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 11
