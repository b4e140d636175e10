"""Threads that prepare and encode images stand back behind those of steps.

Tests: tests/core/media/test_background.py
"""

from __future__ import annotations

import torch

from ...memory.host.daemon_pool import stand_back

_STEPS = 10
"""Added to the encoder thread's niceness: on a processor that it shares with steps, it gets a tenth of the time."""


def work_in_background(threads: int) -> None:
    """Have the calling thread, and the threads of torch that it starts, let steps go first."""
    stand_back(_STEPS)
    torch.set_num_threads(threads)
