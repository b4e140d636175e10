"""Activated LoRA begins at its invocation, and shares the base model's prefixes. For paths, see `paths`."""

from __future__ import annotations

import random

import pytest

from .adapter_zoo import FORMS, INVOCATION, kept_zoo

pytestmark = [pytest.mark.native, pytest.mark.wide]

ACTIVATED = [name for name, form in FORMS.items() if "alora_invocation_tokens" in form]


@pytest.fixture(scope="module")
def zoos():
    return {"plain base": kept_zoo(), "biased base": kept_zoo(biased=True)}


@pytest.fixture(params=["plain base", "biased base"])
def zoo(request, zoos):
    return zoos[request.param]


def ask_all(zoo, driver, seed, lengths=(1, 40), tokens=8, names=None, times=1):
    """Add requests of every form and the base model; return PEFT's answers."""
    rng, want = random.Random(seed), {}
    for turn in range(times):
        for name in (None, *zoo.forms) if names is None else names:
            request_id = f"{seed}.{turn}.{name}"
            prompt, want[request_id] = zoo.case(name, rng.randint(*lengths), tokens, seed=turn)
            driver.add(request_id, name, prompt, max_tokens=tokens)
    return want


def told(driver, want):
    answered = driver.drain()
    return {name: answered[name].tokens for name in want}


@pytest.mark.parametrize("zoo", ["plain base"], indirect=True)
class TestActivated:
    """aLoRA: the base model's KV before the invocation, the adapter's from there on."""

    @pytest.mark.parametrize("kernels", ["native", "torch"])
    @pytest.mark.parametrize("name", ACTIVATED)
    def test_where_the_invocation_is(self, zoo, drive, name):
        """At the beginning, at a block's border and around it, at the end, twice, cut off, and not at all."""
        driver = drive(zoo, block_tokens=8, max_num_batched_tokens=32, max_num_seqs=8)
        invocation, want = FORMS[name]["alora_invocation_tokens"], {}
        rng = random.Random(name)
        filler = [rng.randrange(12, zoo.vocab_size) for _ in range(40)]
        prompts = {f"at {at}": filler[:at] + invocation + filler[at : at + 3] for at in (0, 1, 7, 8, 9, 15, 16, 21)}
        prompts["last"] = filler[:20] + invocation
        prompts["twice"] = filler[:5] + invocation + filler[5:20] + invocation + filler[20:22]
        prompts["overlapping"] = filler[:9] + invocation + invocation[1:] + filler[9:11]
        prompts["none"] = filler[:19]
        prompts["begun"] = filler[:19] + (invocation[:-1] or filler[:1])
        for _ in range(2):  # the second time from the cache
            for key, prompt in prompts.items():
                want[key], _ = zoo.greedy(name, prompt, 8)
                driver.add(key, name, prompt, max_tokens=8)
            assert told(driver, want) == want
            driver.answers.clear()

    def test_the_base_models_prefix_is_shared(self, zoo, drive):
        """And never the other way round, nor among adapters from the invocation on."""
        driver = drive(zoo, block_tokens=16, max_num_batched_tokens=512, memory_bytes=32 << 20)
        rng = random.Random(5)
        prefix = [rng.randrange(12, zoo.vocab_size) for _ in range(240)]
        driver.run("base", None, prefix, max_tokens=1)
        for name in ACTIVATED:
            invocation = FORMS[name]["alora_invocation_tokens"]
            for turn, tail in enumerate(([20, 21], [20, 22])):
                prompt = prefix[:-5] + invocation + tail
                answer = driver.run(f"{name} {turn}", name, prompt, max_tokens=6)
                assert answer.num_cached_tokens == 224
                assert answer.tokens == zoo.greedy(name, prompt, 6)[0]
        plain = driver.run("plain", "plain", prefix, max_tokens=6)
        assert plain.num_cached_tokens == 0

    def test_two_invocation_points_share_no_block_after_the_first(self, zoo, drive):
        """The same tokens have another KV if the adapter begins later."""
        driver = drive(zoo, block_tokens=8, max_num_batched_tokens=512)
        rng = random.Random(6)
        filler = [rng.randrange(12, zoo.vocab_size) for _ in range(64)]
        first = filler[:10] + INVOCATION + filler[10:40]
        second = first + filler[40:45] + INVOCATION + filler[45:48]
        for name, prompt in (("first", first), ("second", second), ("first again", first)):
            answer = driver.run(name, "alora", prompt, max_tokens=8)
            assert answer.tokens == zoo.greedy("alora", prompt, 8)[0]
        assert driver.answers["second"].num_cached_tokens == 8
        assert driver.answers["first again"].num_cached_tokens == 40

    def test_a_removed_version_takes_its_branches_along(self, zoo, drive):
        driver = drive(zoo, block_tokens=8, max_num_batched_tokens=64)
        engine, store = driver.engine, driver.engine.store
        prompt, _ = zoo.case(None, 40, 4, seed=1)
        prompt = prompt[:30] + INVOCATION + prompt[30:]
        driver.run("one", "alora", prompt, max_tokens=4)
        known = len(engine.prefix)
        store.unregister("alora")
        driver.run("base", None, prompt[:20], max_tokens=1)
        assert len(engine.prefix) < known
        store.register("alora", zoo.adapters["alora"])
        answer = driver.run("two", "alora", prompt, max_tokens=4)
        assert answer.num_cached_tokens == 24
        assert answer.tokens == zoo.greedy("alora", prompt, 4)[0]
