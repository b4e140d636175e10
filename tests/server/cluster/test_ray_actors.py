"""Replicas that Ray places: `chorus cluster up --ray local`, and one is killed."""

from __future__ import annotations

import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from types import ModuleType

import pytest

from chorus.server.cluster import ray_actors
from chorus.server.cluster.directory import ClusterDirectory
from chorus.server.cluster.plan import ClusterPlan
from chorus.server.start.checks import LaunchError
from tests.server.cluster.conftest import SECONDS, cluster_up
from tests.server.cluster.test_cluster import read


def test_without_ray_it_is_said_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LaunchError, match=r"chorus-lora\[ray\]"):
        ray_actors.RayLauncher(ClusterDirectory(tmp_path), ClusterPlan(ray="local"))
    with pytest.raises(LaunchError, match=r"chorus-lora\[ray\]"):
        ray_actors.join("127.0.0.1:6379", None, None)


class SlowRay(ModuleType):
    """Ray on a busy machine: its first node is late so many times."""

    def __init__(self, late, error=None):
        super().__init__("ray")
        self.late, self.asked = late, 0
        self.error = error or Exception("The current node timed out during startup.")

    def init(self, **options):
        self.asked += 1
        if self.asked <= self.late:
            raise self.error

    def shutdown(self):
        pass

    def nodes(self):
        return [{"Alive": True, "Resources": {"CPU": 2.0}}]


def test_ray_that_starts_late_is_started_once_more(monkeypatch, tmp_path):
    monkeypatch.setattr(ray_actors, "import_ray", lambda: None)

    def launched(ray):
        monkeypatch.setitem(sys.modules, "ray", ray)
        return ray_actors.RayLauncher(ClusterDirectory(tmp_path), ClusterPlan(ray="local"))

    late = SlowRay(1)
    assert launched(late).threads(1) == 2 and late.asked == 2
    for ray, asked in ((SlowRay(2), 2), (SlowRay(9, ValueError("there is no room for an object store")), 1)):
        with pytest.raises(LaunchError, match=f"no Ray cluster at local: {ray.error}"):
            launched(ray)
        assert ray.asked == asked


@pytest.mark.parametrize(
    ("cpus", "count", "share"),
    [
        ([2], 2, 1),
        ([16], 2, 8),
        ([4, 4, 4], 2, 4),
        ([8, 2], 2, 4),
        ([0, 8, 8], 3, 4),
        ([2], 4, 1),
        ([], 2, 1),
        ([0], 1, 1),
    ],
)
def test_replicas_get_shares_with_which_all_of_them_find_nodes(cpus, count, share):
    assert ray_actors.even_share(cpus, count) == share


@pytest.mark.integration
@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")
def test_answers_of_replicas_on_ray_go_on_as_if_none_had_been_killed():
    every = str(len(os.sched_getaffinity(0)))  # processors of a replica: two replicas share them
    flags = ("--ray", "local", "--threads", every, "--give-up-seconds", str(SECONDS))
    with cluster_up(2, *flags) as up, ThreadPoolExecutor(2) as threads:
        assert len(up.replicas) == 2
        unbroken = list(threads.map(lambda index: read(up.client, index), range(2)))
        while up.metric("chorus_requests_moved_total") == 0:  # an answer may end before the signal comes
            up.wait_until(lambda: up.metric("chorus_replicas_up") == 2)
            began = threading.Semaphore(0)
            answers = [threads.submit(read, up.client, index, began) for index in range(2)]
            began.acquire()
            os.kill(up.replicas[0], signal.SIGKILL)
            assert [answer.result() for answer in answers] == unbroken
        up.wait_until(lambda: up.metric("chorus_replicas_up") == 2)
        assert list(threads.map(lambda index: read(up.client, index), range(2))) == unbroken
