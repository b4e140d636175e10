"""Simulation tests under both drivers: runs pass, reach every rare event, and find the faults that are planted."""

from __future__ import annotations

from collections import Counter

import pytest

from chorus.core.requests.request import RequestState

from . import machine, seeds
from .checked_run import CheckedRun
from .faults import FAULTS, IN_FILES, found_after

#: A checkpoint once took the pages that its request needed, which was preempted again and again.
LACKS_PAGES_FOR_ITS_CHECKPOINT = 1078

#: In a step ahead a prompt lacked its last token, which counts as decoding: those that owe time to its tenant wait.
DECODES_ITS_LAST_PROMPT_TOKEN = 51133

FAILED = {
    "a prompt of one token waits with its tenant's others": 201510,
    "an adapter whose prompts got no tokens kept its turn": 204618,
    "prompts that owe time leave the step in which another tenant begins": 211269,
    "nothing holds the adapter of a request that moves": 206994,
}
"""Seeds that once failed, by cause."""

EVERYWHERE = {
    "prefix hit",
    "prefix hit of an adapter",
    "asked about an image",
    "image after a cached prefix",
    "a copy that could not begin",
    "block in host memory",
    "checkpoint in host memory",
    "copied ahead",
    "copied ahead in vain",
    "disk: full",
    "page that left",
    "checkpoint",
    "shared page",
    "preempted",
    "overtaken",
    "reload in use",
    "waited for a read",
    "no room beside pinned",
    "streamed",
    "saved",
    "computed in vain",
    "refused: overloaded",
    "a tenant's turn",
    "reads given up",
    "sat out",
    "begun beyond the slots",
    "late for its turn",
    "a turn that was late",
    "a step ahead",
    "a step ahead without those that end",
    "a step ahead while others wait",
    "a step ahead that looks back",
    "a step of prompts ahead",
    "begun in a step ahead",
    "a step ahead of some answers of a call",
    "dropped: it had ended",
    "dropped: it was aborted or sent back",
    "run again, with none ahead",
    "sat out for another tenant",
    "a prompt waited for answers",
    "went on after sitting out",
    "room for all",
    "merged step",
    "shadow kept",
    "shadow gone",
    "ended by force",
    "swaps out",
    "swaps in",
    "swaps dropped",
    "waited for a copy",
    "moved",
    "no room to pin",
    "no room for a shadow",
    "reloaded in place",
    "answered",
    "answered from the prefix cache",
    "drafts",
    "accepted draft",
    "forced draft",
    "accepted draft of a grammar",
    "state that takes in drafts",
    "checkpoint after accepted drafts",
    *(f"state {state}" for state in RequestState if state is not RequestState.DONE),
}
"""Events that the runs must reach, or they check little."""

WITH_FILES = {
    "prefix from a file",
    "hit of host memory",
    "stopped and begun anew",
    "killed and begun anew",
    "damaged file",
    "disk: failed write",
    "disk: full",
    "disk: short write",
    *(f"file: {how}" for how in ("cut", "empty", "flip", "folder", "gone", "longer", "swap")),
}
"""Those that forty runs with files must reach."""


@pytest.mark.wide
def test_runs_from_seeds_keep_every_promise():
    assert [(seed, cause) for seed, cause, _ in map(seeds.simulate, range(30)) if cause is not None] == []


def test_a_seed_gives_the_same_run():
    assert seeds.simulate(7) == seeds.simulate(7)


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_runs_of_hypothesis_keep_every_promise_and_reach_every_event():
    """Some events are rare: more runs follow, up to a limit, until each was reached."""
    reached = set()

    class Noted(CheckedRun):
        def finish(self) -> None:
            super().finish()
            reached.update(+self.reached)

    for attempt in range(40):
        machine.run(Noted, attempt, 30)
        if attempt and reached >= EVERYWHERE:
            return
    pytest.fail(f"it was never there: {sorted(EVERYWHERE - reached)}")


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    """By the seeds; `python -m tests.simulation.faults` says how soon by hypothesis, too, which takes minutes."""
    assert found_after(fault, seeds.runs_until_one_fails, 600) is not None


@pytest.mark.slow
@pytest.mark.parametrize("fault", IN_FILES)
def test_a_fault_planted_in_files_is_found(fault):
    assert found_after(fault, seeds.runs_of_files_until_one_fails, 1000) is not None


@pytest.mark.wide
def test_runs_with_files_keep_every_promise_and_reach_what_may_happen_to_files():
    found = [seeds.simulate_files(seed) for seed in range(150)]  # few of them hit what is in files
    assert [(seed, cause) for seed, cause, _ in found if cause is not None] == []
    assert sum((reached for *_, reached in found), Counter()) >= Counter(dict.fromkeys(WITH_FILES, 1))


def test_a_checkpoint_takes_no_pages_that_its_request_needs():
    assert seeds.simulate(LACKS_PAGES_FOR_ITS_CHECKPOINT)[1] is None


def test_prompts_wait_for_one_that_decodes_its_last_prompt_token():
    assert seeds.simulate(DECODES_ITS_LAST_PROMPT_TOKEN)[1] is None


@pytest.mark.parametrize("cause", FAILED)
def test_what_once_failed(cause):
    assert seeds.simulate(FAILED[cause])[1] is None
