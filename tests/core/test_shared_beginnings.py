"""Conversations that begin as earlier ones and go on otherwise: each is cached, and answered as by a cold server."""

from __future__ import annotations

import pytest

from .test_prefix_tiers import assert_same, config_of, exact, few, names_of, prompts_of

__all__ = ["exact"]

pytestmark = pytest.mark.wide

FAMILIES = ["qwen3.5", "nemotron-h", "gemma-3", "gemma-4", "gpt-oss", "mistral-window", "llama3"]
SHARED = 32


def talk(driver, name, adapter, prompt):
    """Tokens and log-probabilities of an answer, and how much of the prompt was cached."""
    driver.run(name, adapter, prompt, max_tokens=4, logprobs=2)
    answer = driver.answers[name]
    return (answer.tokens, answer.logprobs), answer.num_cached_tokens


@pytest.mark.wide
@pytest.mark.parametrize("family", FAMILIES)
def test_each_conversation_with_a_known_beginning_is_cached(tiny, drive, family):
    """Asked again, and a turn later."""
    subject, config = tiny(family), {**config_of(family), "block_tokens": 16, "state_checkpoint_tokens": 1024}
    cold = drive(subject, adapters=few(subject), prefix_cache=False, **config)
    warm = drive(subject, adapters=few(subject), **config)
    beginning = prompts_of(count=1, length=SHARED)[0]
    for adapter in names_of(subject):
        for number, own in enumerate(prompts_of(seed=3, count=3, length=20)):
            prompt, least = [*beginning, *own], 0
            for turn in ("first", "again", "later"):
                name = f"{adapter} {number} {turn}"
                found, cached = talk(warm, name, adapter, prompt)
                assert cached >= least, name
                wanted, _ = talk(cold, name, adapter, prompt)
                assert_same(found, wanted)
                least = (len(prompt) - 1) // 16 * 16
                if turn == "again":
                    prompt = [*prompt, *found[0], 17, 18, 19]
