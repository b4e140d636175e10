"""Turns of conversations with one beginning: each finds what its last one has computed, and what is lost is noticed."""

import pytest

from chorus.core.scheduling.request_memory import RequestMemory
from chorus.memory.pages.prefix import PrefixCache

from .asked import Violation
from .conversations import converse


@pytest.mark.parametrize("first", range(0, 160, 20))
def test_each_turn_of_conversations_with_one_beginning_finds_its_last_one(first):
    assert sum(map(converse, range(first, first + 20))) > 40


def one_by_one(patch):
    """A request that computes what is known stops caching."""
    insert = PrefixCache.insert

    def only_new(self, version, parent, tokens, pages, scope=None, changed_from=0):
        before = len(self)
        block = insert(self, version, parent, tokens, pages, scope, changed_from)
        return block if len(self) > before or not self.num_groups else None

    patch.setattr(PrefixCache, "insert", only_new)


def no_checkpoints_of_prompts(patch):
    patch.setattr(RequestMemory, "shareable", lambda self, request: 0)


@pytest.mark.parametrize("plant", [one_by_one, no_checkpoints_of_prompts])
def test_a_planted_fault_is_found(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(Violation, match="found"):
        for seed in range(60):
            converse(seed)
