"""Errors of the CUDA executor's device, without a GPU; `test_cuda_interpreted.py` tests its steps."""

from __future__ import annotations

import pytest

from chorus.core.executors.cuda import watched
from chorus.memory.transfers.transfer import ExecutorLost

from ...graphs.host_device import HostDevice


class Failing(HostDevice):
    """Works until it has failed."""

    reason = None

    def failure(self):
        return self.reason


def test_an_error_after_which_the_device_works_is_the_callers():
    with pytest.raises(ZeroDivisionError), watched(Failing()):
        raise ZeroDivisionError


def test_an_error_after_which_the_device_does_nothing_more_is_final():
    """The error of any library counts: Triton's and CuPy's errors are classes of their own."""
    device = Failing()
    with pytest.raises(ExecutorLost, match="an illegal memory access") as caught, watched(device):
        device.reason = "CUDA error: an illegal memory access was encountered"
        raise ZeroDivisionError
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
