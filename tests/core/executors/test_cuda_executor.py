"""The CUDA executor without a GPU: every test of `interpreted_cuda.py`, in processes of their own."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from chorus.core.executors.cuda import watched
from chorus.memory.transfers.transfer import ExecutorLost

from ...graphs.host_device import HostDevice
from ...processes import PYTEST, run_python

HERE = Path(__file__).parent


@pytest.mark.timeout(1200)
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.long
def test_interpreted():
    """Kernels of a process that interprets can't be compiled, so this one must not import them."""
    result = run_python(*PYTEST, str(HERE / "interpreted_cuda.py"), TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]


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
