"""The time that each test may take, by pytest-timeout."""

from __future__ import annotations

import signal

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
