"""Several adapters in one request give the tokens of PEFT's `add_weighted_adapter` with the combination `cat`."""

from __future__ import annotations

import random

import pytest

from chorus.core.requests.request_params import AdapterPaused, InvalidRequest
from chorus.graphs.runner import StepMode
from chorus.memory.adapters.composed_names import MAX_COMPOSED
from chorus.memory.files.error import LoadFailure
from chorus.memory.files.identity import with_content

from ...conftest import quiet
from .adapter_zoo import kept_zoo

pytestmark = [pytest.mark.native, pytest.mark.wide]

#: Name → adapters and scales. PEFT takes the first one's `use_rslora` for the composed one, too, so none is first.
COMPOSED = {
    "plain*0.7+rslora*0.5": (["plain", "rslora"], [0.7, 0.5]),
    "patterns*1.5+rslora*-0.4": (["patterns", "rslora"], [1.5, -0.4]),
    "patterns*0.3+plain*0.3+rslora*0.3": (["patterns", "plain", "rslora"], [0.3, 0.3, 0.3]),
    "plain*0.25": (["plain"], [0.25]),
    "plain*0.5+embed-and-head*0.6": (["plain", "embed-and-head"], [0.5, 0.6]),
    "embed-and-head*0.4": (["embed-and-head"], [0.4]),
}
ALONE = ("plain", "rslora", "patterns", "embed-and-head")
NAMES = (None, *ALONE, *COMPOSED)


@quiet()
def _with_several(zoo):
    """A model of PEFT's with the adapters that are composed."""
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    base = LlamaForCausalLM.from_pretrained(zoo.model)
    base.generation_config.eos_token_id = None
    base.generation_config.pad_token_id = 0
    first, *others = ALONE
    model = PeftModel.from_pretrained(base, zoo.adapters[first], adapter_name=first)
    for name in others:
        model.load_adapter(zoo.adapters[name], name)
    return model.eval()


class ComposedZoo:
    """A zoo whose PEFT model also has the composed adapters."""

    def __init__(self, zoo):
        self.zoo, self.model = zoo, zoo.model
        self.adapters = {name: zoo.adapters[name] for name in (*ALONE, "alora")}
        use, peft = zoo._use, _with_several(zoo)  # noqa: SLF001
        for name, (adapters, weights) in COMPOSED.items():
            peft.add_weighted_adapter(adapters, weights, name.replace(".", "_"), combination_type="cat")

        def use_composed(name):
            if name not in peft.peft_config:
                return use(name)
            peft.set_adapter(name)
            return peft

        zoo._use = use_composed  # noqa: SLF001

    def case(self, name, length, count, seed):
        rng = random.Random(f"{name} {length} {seed}")
        peft_name = name.replace(".", "_") if name else None
        while True:
            prompt = [rng.randrange(12, self.zoo.vocab_size) for _ in range(length)]
            tokens, margin = self.zoo.greedy(peft_name, prompt, count)
            if margin >= 1e-4:
                return prompt, tokens


@pytest.fixture(scope="module")
def zoo():
    return ComposedZoo(kept_zoo())


def ask(zoo, driver, seed, names=NAMES, lengths=(3, 40), tokens=8):
    rng, want = random.Random(seed), {}
    for name in names:
        prompt, want[f"{seed}.{name}"] = zoo.case(name, rng.randint(*lengths), tokens, seed)
        driver.add(f"{seed}.{name}", name, prompt, max_tokens=tokens)
    return want


def told(driver, want):
    answered = driver.drain()
    return {name: answered[name].tokens for name in want}


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("chunk", [7, 64])
def test_in_one_batch_with_others(zoo, drive, chunk):
    driver = drive(zoo, block_tokens=8, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 16))
    for seed in (1, 2):
        want = ask(zoo, driver, seed)
        assert told(driver, want) == want


@pytest.mark.parametrize("kernels", ["native"])
def test_two_ranks(zoo, drive):
    driver = drive(zoo, tensor_parallel_size=2, max_num_seqs=8, max_num_batched_tokens=24)
    want = ask(zoo, driver, 3)
    assert told(driver, want) == want


@pytest.mark.parametrize("kernels", ["native"])
def test_merged(zoo, drive):
    driver = drive(zoo, max_num_seqs=8, max_num_batched_tokens=24)
    name = next(iter(COMPOSED))
    for each in (name, "plain"):
        driver.run(f"load {each}", each, [20, 21, 22], max_tokens=1)
    driver.engine.merge("plain")
    driver.add("beside", None, [5, 6, 7], max_tokens=60)
    while driver.engine.merging.is_under_way:
        driver.step()
    driver.engine.abort("beside")
    driver.plans.clear()
    want = ask(zoo, driver, 4)
    assert told(driver, want) == want
    assert {plan.mode for plan in driver.plans} == {StepMode.MERGED}


@pytest.mark.parametrize("kernels", ["native"])
class TestLife:
    def test_cached_prefixes_are_the_pairs_own(self, zoo, drive):
        driver = drive(zoo, block_tokens=8, max_num_batched_tokens=64)
        pair, other = "plain*0.7+rslora*0.5", "plain*0.25"
        prompt, tokens = zoo.case(pair, 40, 6, seed=9)
        assert driver.run("1", pair, prompt, max_tokens=6).num_cached_tokens == 0
        for name in ("plain", "rslora", other, None):
            assert driver.run(f"of {name}", name, prompt, max_tokens=1).num_cached_tokens == 0
        again = driver.run("2", pair, prompt, max_tokens=6)
        assert (again.tokens, again.num_cached_tokens >= 32) == (tokens, True)

    def test_its_rank_and_pages_are_the_sums(self, zoo, drive):
        driver = drive(zoo)
        request = driver.add("1", "plain*0.7+rslora*0.5", [20, 21], max_tokens=1)
        assert request.adapter.rank == 3 + 5
        assert request.adapter.manifest.targets == request.adapter.sources[0].manifest.targets
        driver.drain()

    @pytest.mark.parametrize("force", [False, True])
    def test_removing_one_ends_it(self, zoo, drive, force):
        """As for one adapter: running requests finish with it, or end at once; new ones are refused."""
        driver = drive(zoo, block_tokens=8)
        pair = "plain*0.7+rslora*0.5"
        prompt, tokens = zoo.case(pair, 30, 8, seed=5)
        driver.run("before", pair, prompt, max_tokens=8)
        driver.add("running", pair, [*prompt[:-1], 20], max_tokens=40)
        driver.step()
        ended = driver.engine.adapters.remove("rslora", force=force)
        assert ended == force
        with pytest.raises(InvalidRequest, match="'rslora' is not registered"):
            driver.add("new", pair, prompt, max_tokens=1)
        answer = driver.drain()["running"]
        assert (answer.failure == LoadFailure.REMOVED, len(answer.tokens) == 40) == (force, not force)
        assert all(not each.sources for each in driver.engine.store.versions())
        driver.engine.store.register("rslora", zoo.adapters["rslora"])
        driver.run("prefix", "plain", prompt, max_tokens=1)
        again = driver.run("again", pair, prompt, max_tokens=8)
        assert (again.tokens, again.num_cached_tokens) == (tokens, 0)

    def test_removing_one_by_force_ends_requests_on_its_earlier_versions(self, zoo, drive):
        """Only the composed adapter holds the version that a reload has replaced."""
        driver = drive(zoo, block_tokens=8)
        pair = "plain*0.7+rslora*0.5"
        prompt, _ = zoo.case(pair, 30, 8, seed=5)
        driver.add("running", pair, prompt, max_tokens=40)
        driver.step()
        driver.engine.store.register("rslora", zoo.adapters["rslora"])
        assert len(driver.engine.adapters.versions_with("rslora")) == 2
        assert driver.engine.adapters.remove("rslora", force=True) == 1
        assert driver.drain()["running"].failure is LoadFailure.REMOVED

    def test_a_reload_makes_another_version(self, zoo, drive):
        driver = drive(zoo, block_tokens=8)
        pair = "plain*0.7+rslora*0.5"
        prompt, _ = zoo.case(pair, 30, 8, seed=6)
        first = driver.add("1", pair, prompt, max_tokens=20)
        driver.step()
        driver.engine.store.register("rslora", zoo.adapters["patterns"])
        second = driver.add("2", pair, prompt, max_tokens=8)
        assert second.adapter.version != first.adapter.version
        assert driver.drain()["2"].num_cached_tokens == 0
        want, _ = zoo.zoo.greedy(pair.replace(".", "_"), prompt, 20)
        assert driver.answers["1"].tokens == want
        assert driver.answers["2"].tokens != want[:8]

    def test_equal_compositions_are_one(self, zoo, drive):
        driver = drive(zoo)
        one, other = (driver.add(str(index), "plain*0.7+rslora*0.5", [20, 21], max_tokens=1) for index in range(2))
        assert one.adapter is other.adapter
        driver.drain()

    def test_its_content_follows_that_of_its_sources(self, zoo, drive):
        driver = drive(zoo)
        store = driver.engine.store
        request = driver.add("1", "plain*0.7+rslora*0.5", [20, 21], max_tokens=1)
        assert request.adapter.manifest.content_hash is None
        for name in ("plain", "rslora"):
            store.note(store.get(name), with_content(store.get(name).manifest))
        content = request.adapter.manifest.content_hash
        assert content is not None and store.find(content) is request.adapter
        driver.drain()
        store.unregister("plain")
        assert store.find(content) is None

    def test_only_so_many_are_kept(self, zoo, drive):
        driver = drive(zoo)
        store = driver.engine.store
        parts = [(store.get("plain"), 1.0)]
        for index in range(MAX_COMPOSED + 20):
            store.compose(f"plain*{index}", parts)
        assert sum(bool(each.sources) for each in store.versions()) == MAX_COMPOSED
        assert len(store) == len(zoo.adapters) and all(not each.sources for _, each in store.registered())

    def test_only_so_many_are_kept_of_a_tenant(self, zoo, drive):
        driver = drive(zoo)
        store = driver.engine.store
        mine = driver.add("mine", "plain*0.5+rslora*0.5", [20, 21], max_tokens=1, tenant="a").adapter
        driver.drain()
        for index in range(1, MAX_COMPOSED + 20):
            driver.add(f"{index}", f"plain*{index / 100}", [20, 21], max_tokens=1, tenant="b")
            driver.drain()
        again = driver.add("again", "plain*0.5+rslora*0.5", [20, 21], max_tokens=1, tenant="a").adapter
        assert again is mine and sum(bool(each.sources) for each in store.versions()) == MAX_COMPOSED + 1
        driver.drain()

    def test_without_requests_none_has_a_host_image(self, zoo, drive):
        """Each set of scales would make one that takes the room of other adapters'."""
        driver = drive(zoo, memory_bytes=384 << 10, block_tokens=8, max_num_seqs=4)
        images = driver.engine.store.images
        for name in ALONE[:2]:
            driver.run(name, name, [20, 21], max_tokens=1)
        before, num_bytes = set(images.keys()), images.num_bytes
        assert len(before) == 2
        for index in range(1, 40):
            driver.add(f"{index}", f"plain*{index / 100}+rslora*0.5", [20, 21, 22], max_tokens=3)
            driver.add(f"{index} ended", f"plain*{index / 100}", [20, 21, 22], max_tokens=3)
            driver.step()
            driver.engine.abort(f"{index} ended")
            driver.drain()
            assert set(images.keys()) == before
        assert images.num_bytes == num_bytes
        want = ask(zoo, driver, 11)
        assert told(driver, want) == want

    def test_eviction_and_return(self, zoo, drive):
        """More adapters than fit: composed ones are evicted and read again like others."""
        driver = drive(zoo, memory_bytes=384 << 10, block_tokens=8, max_num_batched_tokens=24, max_num_seqs=2)
        for seed in (7, 8):
            want = ask(zoo, driver, seed)
            assert told(driver, want) == want
        assert driver.engine.store.num_evictions > 0

    def test_refusals(self, zoo, drive):
        driver = drive(zoo)
        for name, words in (
            ("plain*0.5+nobody*1", "'nobody' is not registered"),
            ("plain*0.5+alora*1", "activated LoRA"),
            ("plain*1e9", "10000"),
        ):
            with pytest.raises(InvalidRequest, match=words):
                driver.add("x", name, [20, 21], max_tokens=1)
        driver.engine.adapters.paused.add("plain")
        with pytest.raises(AdapterPaused):
            driver.add("x", "plain*0.5+rslora*1", [20, 21], max_tokens=1)

    def test_a_step_without_them_costs_nothing_new(self, zoo, drive):
        driver = drive(zoo)
        driver.run("1", "plain", [20, 21], max_tokens=1)
        assert not any(each.sources for each in driver.engine.store.versions())
