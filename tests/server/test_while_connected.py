"""Work for a client that may leave."""

from __future__ import annotations

import asyncio
import logging
import sys

import pytest
from starlette.requests import ClientDisconnect

from chorus.server.api import sse
from chorus.server.api.sse import while_connected


async def stays():
    await asyncio.Event().wait()


async def leaves():
    return {"type": "http.disconnect"}


async def answer():
    return "answer"


async def breaks():
    raise ValueError("broken")


async def breaks_when_it_is_ended():
    try:
        await asyncio.Event().wait()
    finally:
        raise ValueError("broken at its end")


def test_what_it_returns_or_raises_is_the_callers(caplog):
    assert asyncio.run(while_connected(stays, answer())) == "answer"
    with pytest.raises(ValueError, match="broken"):
        asyncio.run(while_connected(stays, breaks()))
    assert not caplog.records


def test_work_whose_client_left_is_ended(caplog):
    with caplog.at_level(logging.DEBUG, "chorus"), pytest.raises(ClientDisconnect):
        asyncio.run(while_connected(leaves, stays()))
    assert not caplog.records


def test_what_work_raises_after_its_client_left_is_logged(monkeypatch):
    said = []
    monkeypatch.setattr(sse.log, "exception", lambda message: said.append((message, str(sys.exception()))))
    with pytest.raises(ClientDisconnect):
        asyncio.run(while_connected(leaves, breaks_when_it_is_ended()))
    assert said == [("a request failed after its client had left", "broken at its end")]
