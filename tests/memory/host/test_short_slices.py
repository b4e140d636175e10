import os
import platform
from concurrent.futures import ThreadPoolExecutor

import pytest

from chorus.memory.host.daemon_pool import ask_for_short_slices


@pytest.mark.parametrize(("system", "machine"), [("Darwin", "arm64"), ("Linux", "riscv64")])
def test_nothing_is_asked_where_it_is_not_known(monkeypatch, system, machine):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert ask_for_short_slices() is False


@pytest.mark.skipif(platform.system() != "Linux", reason="Linux")
def test_the_threads_policy_and_priority_stay():
    def policy():
        return os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)

    with ThreadPoolExecutor(1) as pool:
        before = pool.submit(policy).result()
        assert pool.submit(ask_for_short_slices).result() in (True, False)
        assert pool.submit(policy).result() == before
