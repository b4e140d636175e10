"""The health checker while a server stops; tests/server/api/adapters/test_adapter_limits.py tests its work."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import CancelledError
from types import SimpleNamespace

import pytest

from chorus.server.engine.adapter_health import AdapterHealthChecker
from chorus.server.engine.backend_adapters import done

SECONDS = 10


@pytest.mark.parametrize("error", [CancelledError(), RuntimeError("Event loop is closed")])
@pytest.mark.parametrize("stops", [True, False])
def test_an_event_loop_that_ends_under_a_look_is_no_error(caplog, monkeypatch, error, stops):
    monkeypatch.setattr("chorus.server.engine.adapter_health.TURN_SECONDS", 0.01)
    caplog.set_level(logging.DEBUG, "chorus")
    asked, ended = threading.Event(), threading.Event()

    def sweep():
        asked.set()
        assert ended.wait(SECONDS)
        raise error

    adapters = SimpleNamespace(quarantined=lambda: done([]), overflowing=lambda: done([]), unhashed=lambda: done([]))
    checker = AdapterHealthChecker(SimpleNamespace(adapters=adapters, failure=None), SECONDS, (), sweep)
    before = set(threading.enumerate())
    checker.start()
    (thread,) = [one for one in set(threading.enumerate()) - before if one.name == "chorus-adapter-health"]
    assert asked.wait(SECONDS)
    if stops:
        checker.stop()
    ended.set()
    if not stops:  # the next look comes all the same
        asked.clear()
        assert asked.wait(SECONDS)
        checker.stop()
    thread.join(SECONDS)
    errors = [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert bool(errors) == (not stops)
