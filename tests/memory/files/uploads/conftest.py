"""What tests of uploads share."""

import pytest


class Clock:
    """Tells the time that a test sets."""

    now = 1e9

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()
