"""The time that each test may take, by pytest-timeout, and the clock that all tests of a process share."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st


def test_time_that_is_up_is_no_counterexample(monkeypatch):
    """A machine that stood still ended a test while it drew an example: its strategy was said to be flaky."""
    if not callable(signal.getsignal(signal.SIGALRM)):
        pytest.skip("no test's time is limited by a signal")
    monkeypatch.setattr("pytest_timeout.dump_stacks", lambda terminal: None)
    monkeypatch.setattr("threading.enumerate", lambda: [None])  # the stacks of threads are printed, too
    examples = []

    @given(st.integers())
    def drawn(number):
        examples.append(number)
        signal.raise_signal(signal.SIGALRM)

    with pytest.raises(BaseException, match="Timeout") as found:
        drawn()
    assert len(examples) == 1
    assert not isinstance(found.value, Exception | pytest.fail.Exception)


#: Sets a function of `time`, or of `asyncio`, for the whole process instead of one module of ours.
CLOCK_OF_ALL = re.compile(r"""setattr\(\s*(?:"[\w.]*\b(?:time|asyncio)\.\w+"|(?:\w+\.)?(?:time|asyncio),)""")


def test_no_test_sets_the_clock_of_all():
    """The loop of a server that other tests share would take the time that is left until its next tick from two clocks,
    and wait for hours. Set `time` of the module under test.
    """
    assert CLOCK_OF_ALL.search('patch.setattr("chorus.core.engine.time.monotonic", clock)')
    assert CLOCK_OF_ALL.search('patch.setattr(asyncio, "sleep", sleep)')
    paths = Path(__file__).parent.rglob("*.py")
    found = [path.name for path in paths if path != Path(__file__) and CLOCK_OF_ALL.search(path.read_text())]
    assert not found
