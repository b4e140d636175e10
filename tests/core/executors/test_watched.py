"""Errors of a device's work: told as they are, unless they have ended the device."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import pytest

from chorus.core.executors.cuda import watched
from chorus.memory.transfers.transfer import ExecutorLost


class Device:
    def __init__(self, failure: str | None, scope=nullcontext) -> None:
        self.scope = scope
        self.failure = lambda: failure


@contextmanager
def no_scope():
    raise RuntimeError("no stream")
    yield


def test_an_error_is_told_as_it_is_while_the_device_works():
    with pytest.raises(ValueError, match="bad"), watched(Device(None)):
        raise ValueError("bad")
    with pytest.raises(RuntimeError, match="no stream"), watched(Device(None, no_scope)):
        pass


@pytest.mark.parametrize("scope", [nullcontext, no_scope])
def test_an_error_that_ended_the_device_is_told_by_its_name(scope):
    with pytest.raises(ExecutorLost, match="illegal address") as caught, watched(Device("illegal address", scope)):
        raise RuntimeError("no stream")
    assert str(caught.value.__cause__) == "no stream"


def test_what_is_no_error_goes_through():
    with pytest.raises(KeyboardInterrupt), watched(Device("illegal address")):
        raise KeyboardInterrupt
