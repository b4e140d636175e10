"""Prompts: lengths, shared prefixes, and questions with answers."""

from __future__ import annotations

import pytest

from chorus.perf.workload import TraceRequest, WorkloadError
from chorus.perf.workload.prompts import SkillPrompts, filler, token_ids
from chorus.server.demo.skills import SKILLS, held_out


def request(number: int, tokens: int, hash_ids: tuple[int, ...] = (), adapter: str | None = None) -> TraceRequest:
    return TraceRequest(number, 0.0, adapter, tokens, 1, hash_ids=hash_ids, hash_block_tokens=512 if hash_ids else 0)


def test_lengths_and_determinism():
    for tokens in (1, 7, 3000):
        assert len(token_ids(request(3, tokens), 32_000, 300)) == tokens
        assert len(filler(request(3, tokens)).text.split()) == tokens
    one = token_ids(request(3, 500), 1000, 900)
    assert one == token_ids(request(3, 500), 1000, 900) != token_ids(request(3, 500), 1000, 900, seed=1)
    assert min(one) >= 900 and max(one) < 1000
    assert one != token_ids(request(4, 500), 1000, 900)
    assert filler(request(3, 50)) != filler(request(4, 50))


def test_prompts_share_what_their_hashes_share():
    one, other = request(1, 1100, (5, 6, 7)), request(2, 1500, (5, 6, 8))
    first, second = token_ids(one, 32_000), token_ids(other, 32_000)
    assert first[:1024] == second[:1024]
    assert first[1024:] != second[1024:1100]
    assert filler(one).text.split()[:1024] == filler(other).text.split()[:1024]


def test_bad_vocabulary():
    with pytest.raises(WorkloadError, match="first is 10 and vocab 10"):
        token_ids(request(1, 5), 10, 10)


def test_skill_questions_have_right_answers():
    ask = SkillPrompts(seed=2)
    for name, skill in SKILLS.items():
        for adapter in (name, f"{name}-00017"):
            asked = ask(request(9, 1, adapter=adapter))
            text = asked.text.removesuffix("\n")
            assert asked.answer == skill.apply(text)
            assert held_out(text)
    base = ask(request(9, 1))
    assert base.text == f"{base.answer}\n"
    assert ask(request(1, 1, adapter="sort")) != ask(request(2, 1, adapter="sort"))
    assert SkillPrompts(seed=2)(request(1, 1, adapter="sort")) == ask(request(1, 1, adapter="sort"))


def test_an_adapter_without_skill():
    with pytest.raises(WorkloadError, match="'adapter-00001' is named after no skill"):
        SkillPrompts()(request(1, 1, adapter="adapter-00001"))
