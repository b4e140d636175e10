"""The cache of answers: who finds them, when they leave, and how many there are."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorus.core.config import EngineConfig
from chorus.core.policies import Policies
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.core.requests.types import FinishReason
from chorus.core.speculation.answer_cache import FEWEST_TOKENS, LEAD, AnswerCache
from chorus.core.speculation.ngram_table import BREAK
from chorus.core.speculation.ngrams import NgramProposer

from .stand_ins import Free

WHO = [("", "", None), ("a", "", None), ("a", "salt", None), ("a", "", 1), ("a", "", 2), ("b", "", 1)]
"""Tenant, cache salt and adapter version."""


def ended(answer, who=WHO[0], prompt=(1, 2, 3, 4, 5, 6), reason=FinishReason.STOP, **params):
    tenant, salt, version = who
    request = Request("r", list(prompt), RequestParams(**params), tenant=tenant, cache_salt=salt)
    request.adapter = cast(Any, None if version is None else SimpleNamespace(version=version))
    request.token_ids += answer
    request.finish_reason = reason
    return request


def kept(cache, who):
    return [token for table in cache.tables(ended([], who)) for token in table.tokens if token != BREAK]


@pytest.mark.parametrize("who", WHO, ids=str)
def test_only_the_same_adapter_tenant_and_salt_find_an_answer(who):
    cache = AnswerCache(1000)
    cache.add(ended([10, 11, 12], who))
    assert kept(cache, who) == [3, 4, 5, 6, 10, 11, 12]
    assert not any(kept(cache, other) for other in WHO if other != who)


def test_errors_and_vectors_are_no_answers():
    cache = AnswerCache(1000)
    cache.add(ended([10, 11, 12], reason=FinishReason.ERROR))
    cache.add(ended([10]))
    cache.add(ended([10, 11], pooling="last", max_tokens=1))
    assert not cache.num_tokens and not kept(cache, WHO[0])
    cache.add(ended([10, 11], reason=FinishReason.ABORT))  # such as by a stop string
    assert kept(cache, WHO[0])[LEAD:] == [10, 11]


def test_a_version_that_is_gone_is_forgotten():
    cache = AnswerCache(1000)
    for who in WHO:
        cache.add(ended([10, 11, 12], who))
    cache.drop_version(1)
    assert [bool(kept(cache, who)) for who in WHO] == [True, True, True, False, True, False]
    assert cache.num_tokens == 4 * FEWEST_TOKENS


@given(st.integers(0, 500), st.lists(st.tuples(st.sampled_from(WHO), st.integers(0, 300)), max_size=40))
def test_the_cache_is_bounded_and_the_latest_answers_stay(most, answers):
    cache, number = AnswerCache(most), 10
    for who, length in answers:
        answer = list(range(number, number + length))
        number += length
        cache.add(ended(answer, who))
        assert cache.num_tokens <= most
        held = {who: kept(cache, who) for who in WHO}
        assert sum(map(len, held.values())) <= most
        if length > 1 and most >= 2 * FEWEST_TOKENS:
            assert held[who][-1:] == answer[-1:] or answer[-1] in held[who]


def test_an_answer_is_proposed_from_its_beginning_and_not_beyond_its_end():
    """The prompt's last tokens, which a chat template puts before every answer, tell where answers begin."""
    cache = AnswerCache(1000)
    cache.add(ended([10, 11, 12, 13], prompt=[1, 7, 7, 8, 9]))
    cache.add(ended([20, 21, 22], prompt=[1, 2, 3, 4]))
    request = ended([10, 11], prompt=[5, 6, 7, 8, 9])
    assert NgramProposer(cache).propose({request: 8}) == {request: [12, 13]}
    request = ended([10], prompt=[5, 6, 7, 7, 8, 9])
    assert NgramProposer(cache).propose({request: 8}) == {request: [11, 12, 13]}
    request.proposing = None
    assert not NgramProposer().propose({request: 8})


# -- in an engine


def run(driver, name, adapter, prompt, tenant="", **params):
    driver.add(name, adapter, prompt, tenant=tenant, max_tokens=30, **params)
    return driver.drain()[name].tokens


def proposed(driver):
    return driver.engine.stats().num_proposed_tokens


@pytest.mark.native(needed=False)
def test_an_engine_proposes_a_tenants_own_recent_answers(subject, drive, kernels):
    """The second time, the answer is found; another tenant, and another adapter, has no proposals from it."""
    it = subject("gqa")
    prompt = [random.Random(5).randrange(3, it.vocab_size) for _ in range(12)]
    without = drive(it)
    wanted = {adapter: run(without, "a", adapter, prompt) for adapter in (None, "r8-attention")}
    driver = drive(it, speculation="ngram", speculation_cache_tokens=4096)
    driver.engine.speculation.cost = Free()
    assert run(driver, "a", None, prompt, "one") == wanted[None]
    first = proposed(driver)
    counts = {}
    for name, adapter, tenant in (("b", None, "one"), ("c", None, "two"), ("d", "r8-attention", "one")):
        before = driver.engine.stats()
        assert run(driver, name, adapter, prompt, tenant) == wanted[adapter]
        after = driver.engine.stats()
        counts[name] = after.num_accepted_tokens - before.num_accepted_tokens
    assert counts["b"] > 20
    assert counts["c"] <= first and counts["c"] < counts["b"]
    assert counts["d"] < counts["b"]


@pytest.mark.native(needed=False)
def test_unloading_and_replacing_an_adapter_forgets_its_answers(subject, drive):
    it = subject("gqa")
    driver = drive(it, speculation="ngram", speculation_cache_tokens=4096)
    run(driver, "a", "r8-attention", [5, 6, 7, 8])
    run(driver, "b", None, [5, 6, 7, 8])
    cache = driver.engine.answers
    before = cache.num_tokens
    driver.engine.adapters.remove("r8-attention")
    assert 0 < cache.num_tokens < before


def test_without_speculation_there_is_no_cache(subject, drive):
    driver = drive(subject("gqa"), policies=Policies())
    assert driver.engine.answers is None and driver.engine.scheduler.lifecycle.note_answer is None


def test_a_cache_without_speculation_is_refused(subject):
    with pytest.raises(ValueError, match="speculation_cache_tokens is 5, but speculation is 'off'"):
        EngineConfig(model=subject("gqa").model, speculation="off", speculation_cache_tokens=5)
