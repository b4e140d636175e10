"""Simulation tests of the real engine: it passes them, and a wrong token, a lost request and a lost page are found."""

import pytest

from chorus.core.scheduling.scheduler import Scheduler
from chorus.memory.pages.pool import PagePool

from ..core.media.tiny_vision import needs_vision
from . import real_run
from .real_run import Calm, simulate


@pytest.fixture(scope="module")
def calm():
    return Calm()


@pytest.fixture(autouse=True)
def few_answers(monkeypatch):
    monkeypatch.setattr(real_run, "ANSWERS_PER_ENGINE", {"auto": 30, "torch": 12})


@pytest.mark.wide
def test_the_engine_keeps_its_promises(calm):
    runs = [simulate(seed, calm) for seed in range(4)]
    assert [cause for _, cause, _ in runs if cause is not None] == []
    assert all(reached["answered"] >= 12 for *_, reached in runs)


@pytest.mark.wide
def test_engines_that_share_files_of_prefixes_keep_their_promises(calm, tmp_path):
    """Each is begun twice, and finds what it wrote, some of it damaged meanwhile."""
    runs = [simulate(seed, calm, files=tmp_path) for seed in range(3)]
    assert [cause for _, cause, _ in runs if cause is not None] == []
    assert sum(reached["tokens from files"] for *_, reached in runs) > 0
    assert sum(reached["damaged files"] for *_, reached in runs) > 0


def another_token(monkeypatch):
    execute = real_run.Faulty.execute

    def wrong(self, plan):
        result = execute(self, plan)
        result.tokens = {id: (token + (plan.step_id == 20)) % 100 for id, token in result.tokens.items()}
        return result

    monkeypatch.setattr(real_run.Faulty, "execute", wrong)


def deaf_aborts(monkeypatch):
    monkeypatch.setattr(Scheduler, "abort", lambda self, request_id: True)


def lasting_pages(monkeypatch):
    release = PagePool.release
    monkeypatch.setattr(PagePool, "release", lambda self, pages: release(self, pages[1:]))


@pytest.mark.parametrize("plant", [another_token, deaf_aborts, lasting_pages])
def test_a_planted_fault_is_found(plant, calm, monkeypatch):
    plant(monkeypatch)
    assert any(simulate(seed, calm)[1] is not None for seed in range(4))


@pytest.mark.wide
@pytest.mark.vision
@needs_vision
@pytest.mark.parametrize("family", ["gemma3", "gemma4", "paligemma"])
def test_engines_that_see_keep_their_promises(family):
    """Images whose positions see each other, windows, and cached prefixes in host memory."""
    seen = Calm(real_run.seeing_base(family))
    runs = [simulate(seed, seen) for seed in range(2)]
    assert [cause for _, cause, _ in runs if cause is not None] == []
    assert sum(reached["asked about an image"] for *_, reached in runs) > 20
