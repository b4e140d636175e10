"""Greedy tokens equal those of transformers + peft exactly, whatever shares the batch."""

from __future__ import annotations

import gzip
import json
import random
import time
from dataclasses import dataclass

import pytest
import torch

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.core.requests.types import FinishReason
from chorus.memory.host.images import ThreadReads

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]

MODELS = ("gqa", "mha", "tied", "wide_heads")


@pytest.fixture(params=[False, True], ids=["", "ahead"])
def ahead(request):
    return request.param


@dataclass(frozen=True)
class Case:
    """One request and the reference's answer."""

    id: str
    adapter: str | None
    prompt: list[int]
    want: list[int]


def make_cases(subject, count, *, adapters=None, seed=0, longest=40, tokens=(4, 20)):
    """`count` requests of mixed lengths that go round the adapters and the base model."""
    rng = random.Random(seed)
    names = [*subject.adapters, None] if adapters is None else adapters
    cases = []
    for index in range(count):
        adapter, number = names[index % len(names)], rng.randint(*tokens)
        prompt = subject.prompt(adapter, rng.randint(1, longest), number, seed=1000 * seed + index)
        cases.append(Case(f"{seed}-{index}", adapter, prompt, subject.greedy(adapter, prompt, number)))
    return cases


def make_families(subject, *, adapters, stems, seed=0, tokens=(4, 20)):
    """For every adapter and every length in `stems`, four requests whose prompts share their first tokens with those of
    all adapters: the first 16 tokens of a stem, half of it, all of it, and all of it with more tokens.
    """
    rng = random.Random(seed)
    cases = []
    for number, length in enumerate(stems):
        stem = [rng.randrange(3, subject.vocab_size) for _ in range(length)]
        for adapter in adapters:
            for index, shared in enumerate((16, length // 2, length, length)):
                count = rng.randint(*tokens)
                while True:
                    tail = [rng.randrange(3, subject.vocab_size) for _ in range(rng.randint(1, 30) if index else 1)]
                    prompt = stem[:shared] + tail
                    if subject.is_clear(adapter, prompt, count):
                        break
                want = subject.greedy(adapter, prompt, count)
                cases.append(Case(f"{seed}-{number}-{adapter}-{index}", adapter, prompt, want))
    rng.shuffle(cases)
    return cases


def add_all(driver, cases):
    for case in cases:
        driver.add(case.id, case.adapter, case.prompt, max_tokens=len(case.want))


def check(driver, cases):
    answers = driver.drain()
    for case in cases:
        answer = answers[case.id]
        assert answer.tokens == case.want, f"{case.id} on {case.adapter}"
        assert answer.finish_reason is FinishReason.LENGTH


def decodes(plan):
    return [row for row in plan.sequences if row.start > 0 and len(row.tokens) == 1 and row.samples]


@pytest.mark.parametrize("model", MODELS)
def test_reference_tells_adapters_apart(subject, model):
    """Comparisons below mean something: outputs are varied and every adapter changes them."""
    it = subject(model)
    prompt = it.prompt(None, 12, 16, seed=5)
    outputs = [it.greedy(adapter, prompt, 16) for adapter in (None, *it.adapters)]
    assert len({tuple(output) for output in outputs}) == len(outputs) == 9
    assert all(len(set(output)) >= 5 for output in outputs)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "whole"])
def test_32_concurrent_requests_over_8_adapters(subject, drive, model, chunked):
    it = subject(model)
    cases = make_cases(it, 32, longest=60, tokens=(30, 40))
    driver = drive(it, chunked_prefill=chunked, max_num_batched_tokens=56 if chunked else 2048)
    add_all(driver, cases)
    check(driver, cases)
    plans = driver.plans
    assert max(len(plan.sequences) for plan in plans) == 32
    assert max(plan.num_adapters for plan in plans) == 8
    assert all(plan.num_tokens <= driver.engine.config.max_num_batched_tokens for plan in plans)
    chunks = [row for plan in plans for row in plan.sequences if not row.samples]
    if chunked:
        assert any(row.start > 0 and len(row.tokens) > 1 for row in chunks), "no prompt was cut in three"
        assert any(len(plan.sequences[0].tokens) > 1 and decodes(plan) for plan in plans), "no mixed step"
    else:
        assert not chunks
        assert all(row.start == 0 or len(row.tokens) == 1 for plan in plans for row in plan.sequences)


@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "whole"])
def test_staggered_arrivals_join_a_running_batch(subject, drive, chunked):
    it = subject("gqa")
    cases = make_cases(it, 24, seed=2)
    driver = drive(it, chunked_prefill=chunked, max_num_seqs=16, max_num_batched_tokens=64)
    arrivals = random.Random(2)
    waiting = list(cases)
    while waiting:
        for _ in range(arrivals.randint(0, 2)):
            if waiting:
                add_all(driver, [waiting.pop(0)])
        driver.step()
    check(driver, cases)
    assert any(len(plan.sequences[0].tokens) > 1 and decodes(plan) for plan in driver.plans), "no mixed step"


def test_batches_of_every_kind_on_one_engine(subject, drive):
    """A replay with other adapters than the capture's, with more of them, with fewer, with none."""
    it = subject("gqa")
    few, others = ["r2-qv", "r8-attention"], ["r33-all", "r1-all"]
    driver = drive(it)
    kinds = [few, few, others, [*it.adapters, None], ["r64-qkv-up"], [None], [*it.adapters], [None], few]
    for seed, adapters in enumerate(kinds):
        cases = make_cases(it, 9, adapters=adapters, seed=10 + seed, tokens=(6, 6))
        first = len(driver.plans)
        add_all(driver, cases)
        check(driver, cases)
        widest = max(driver.plans[first:], key=lambda plan: len(plan.sequences))
        assert {adapter.name for adapter in widest.adapters} == {name for name in adapters if name}


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 9, 17, 30])
def test_small_batch_in_a_large_bucket_after_a_full_one(subject, drive, rows):
    """Padding rows, and values that an earlier step left in the static buffers, change nothing."""
    it = subject("tied")
    driver = drive(it, max_num_seqs=31)
    full = make_cases(it, 31, seed=30, tokens=(3, 6))
    add_all(driver, full)
    check(driver, full)
    first = len(driver.plans)
    cases = make_cases(it, rows, seed=31, tokens=(8, 8), longest=12)
    add_all(driver, cases)
    check(driver, cases)
    buckets = [plan.bucket for plan in driver.plans[first:] if plan.bucket is not None and len(plan.sequences) == rows]
    assert buckets
    assert set(buckets) == {min(size for size in (1, 2, 4, 8, 16, 24, 31) if size >= rows)}


@pytest.mark.usefixtures("crowded")
@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "whole"])
def test_small_arena_preempts_requests_and_evicts_adapters(subject, drive, chunked):
    it = subject("gqa")
    cases = make_cases(it, 32, seed=4, tokens=(24, 48))
    driver = drive(it, chunked_prefill=chunked, max_num_batched_tokens=64 if chunked else 512, num_pages=46)
    add_all(driver, cases)
    check(driver, cases)
    stats = driver.engine.stats()
    assert stats.num_preemptions > 3
    assert stats.num_adapter_evictions > 3
    for name in it.adapters:
        driver.run(f"again {name}", name, [3], max_tokens=1)
    assert driver.engine.stats().num_adapter_loads > len(it.adapters), "no adapter was loaded twice"


FEW = ["r1-all", "r8-attention", "r16-down", None]


@pytest.fixture(scope="module")
def families(subject):
    """Requests on the gqa model that share beginnings, for three adapters and the base."""
    return make_families(subject("gqa"), adapters=FEW, stems=(48, 90), seed=60)


def arrive(driver, cases, seed, between=lambda: None):
    """Add a few at a time while steps go on, `between` called before each step; then check all."""
    rng, waiting = random.Random(seed), list(cases)
    while waiting or driver.engine.has_work():
        for _ in range(rng.randint(0, 4)):
            if waiting:
                add_all(driver, [waiting.pop()])
        between()
        driver.step()
    check(driver, cases)


@pytest.mark.parametrize("block_tokens", [8, 16])
@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "whole"])
def test_shared_beginnings_start_from_the_cache(subject, drive, families, chunked, block_tokens):
    driver = drive(
        subject("gqa"),
        chunked_prefill=chunked,
        block_tokens=block_tokens,
        max_num_batched_tokens=48 if chunked else 512,
    )
    arrive(driver, families, seed=1)
    hits = driver.engine.stats().num_prefix_hit_tokens
    assert hits > 200
    for case in families:
        driver.add(f"again {case.id}", case.adapter, case.prompt, max_tokens=len(case.want))
    answers = driver.drain()
    known = full = 0
    for case in families:
        answer = answers[f"again {case.id}"]
        assert answer.tokens == case.want
        full += (len(case.prompt) - 1) // block_tokens * block_tokens
        known += answer.num_cached_tokens
    assert 0.8 * full < known <= full, "only what equal prompts of one step computed twice may be unknown"
    stats = driver.engine.stats()
    assert stats.num_prefix_hit_tokens > hits
    assert stats.num_preemptions == 0


def test_without_the_cache_nothing_is_kept(subject, drive, families):
    driver = drive(subject("gqa"), prefix_cache=False, max_num_batched_tokens=48)
    arrive(driver, families, seed=1)
    stats = driver.engine.stats()
    assert (stats.num_prefix_hit_tokens, stats.num_cached_pages) == (0, 0)


def test_conversations_go_on_from_their_answers(subject, drive):
    """The KV of generated tokens is reused too."""
    it = subject("tied")
    driver = drive(it, block_tokens=8)
    prompts = {adapter: it.prompt(adapter, 12, 12, seed=70) for adapter in ("r2-qv", "r33-all", None)}
    for turn in range(4):
        for adapter, prompt in prompts.items():
            assert it.is_clear(adapter, prompt, 12)
            driver.add(f"{adapter} {turn}", adapter, prompt, max_tokens=12)
        answers = driver.drain()
        for adapter, prompt in prompts.items():
            answer, want = answers[f"{adapter} {turn}"], it.greedy(adapter, prompt, 12)
            assert answer.tokens == want
            if turn:
                assert answer.num_cached_tokens >= (len(prompt) - 4) // 8 * 8, "the answer was computed again"
            more = 3
            while not it.is_clear(adapter, [*prompt, *want, more], 12):
                more += 1
            prompts[adapter] = [*prompt, *want, more]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"prefix_cache": False},
        {"num_pages": 50, "max_num_batched_tokens": 40},
        {"chunked_prefill": False, "max_num_batched_tokens": 512},
    ],
    ids=["cache", "no cache", "small arena", "whole"],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_preemption_at_any_step(subject, drive, families, config, seed):
    adapters = {name: subject("gqa").adapters[name] for name in FEW if name}
    driver = drive(subject("gqa"), adapters=adapters, **config)
    rng, scheduler = random.Random(seed), driver.engine.scheduler

    def preempt():
        for request in list(scheduler.running):
            if rng.random() < 0.12:
                scheduler.lifecycle.preempt(request)

    arrive(driver, families, seed, preempt)
    assert driver.engine.stats().num_preemptions > 20


@pytest.mark.parametrize("what", ["adapters", "everything"])
@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "whole"])
def test_eviction_before_every_step(subject, drive, families, what, chunked):
    driver = drive(subject("gqa"), chunked_prefill=chunked, max_num_batched_tokens=48 if chunked else 512)
    engine = driver.engine

    def evict():
        if what == "adapters":
            for adapter in map(engine.store.get, engine.store.names()):
                if adapter.pages and not adapter.references:
                    engine.store.evict(adapter)
        else:
            engine.reclaimer.reclaim_all()
            assert engine.stats().num_cached_pages == 0
        assert engine.store.num_idle_pages == 0

    waves = [families[i : i + 4] for i in range(0, len(families), 4)]
    for seed, wave in enumerate(waves):
        arrive(driver, wave, seed, evict)
    assert engine.stats().num_adapter_loads > 4 * (len(FEW) - 1), "adapters were not loaded again and again"


@pytest.mark.parametrize(
    "config",
    [
        {"max_adapters_per_step": 2},
        {"max_adapters_per_step": 1, "max_overtake_seconds": 0},
        {"host_cache_bytes": 0},
        {"host_cache_bytes": 0, "num_pages": 46, "lookahead": 1, "max_num_batched_tokens": 64},
        {"num_pages": 46, "max_adapters_per_step": 2, "max_overtake_seconds": 0.02},
    ],
    ids=["two adapters", "one adapter", "no host cache", "no room at all", "two adapters, small arena"],
)
@pytest.mark.parametrize("threads", [False, True], ids=["inline", "threads"])
def test_limits_and_reads_change_no_token(subject, drive, config, threads):
    it = subject("gqa")
    cases = make_cases(it, 27, seed=80, tokens=(8, 16))
    driver = drive(it, reads=ThreadReads() if threads else None, **config)
    arrive(driver, cases, seed=3)
    most = config.get("max_adapters_per_step", len(it.adapters))
    assert max(plan.num_adapters for plan in driver.plans) <= most
    assert driver.engine.stats().num_adapter_loads >= len(it.adapters)


def test_threads_read_beside_random_preemption_and_eviction(subject, drive, families):
    """Everything at once, on the real clock."""
    driver = drive(
        subject("gqa"),
        reads=ThreadReads(),
        clock=time.monotonic,
        num_pages=60,
        max_num_batched_tokens=40,
        host_cache_bytes=0,
        max_adapters_per_step=2,
        max_overtake_seconds=0.05,
        block_tokens=8,
        adapters={name: subject("gqa").adapters[name] for name in FEW if name},
    )
    rng, engine = random.Random(5), driver.engine

    def disturb():
        if rng.random() < 0.2:
            engine.reclaimer.reclaim_all()
        for request in list(engine.scheduler.running):
            if rng.random() < 0.05:
                engine.scheduler.lifecycle.preempt(request)

    arrive(driver, families, 5, disturb)
    assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("block_tokens", [8, 16, 64])
def test_page_size_does_not_matter(subject, drive, block_tokens):
    it = subject("wide_heads")
    cases = make_cases(it, 18, seed=6)
    driver = drive(it, block_tokens=block_tokens)
    assert driver.executor.layout.block_tokens == block_tokens
    add_all(driver, cases)
    check(driver, cases)


def test_engine_from_an_adapters_directory(subject):
    it = subject("tied")
    directory = next(iter(it.adapters.values())).parent
    engine = Engine.from_config(EngineConfig(model=it.model, adapters=directory, dtype="float32", memory_bytes=8 << 20))
    assert engine.store.names() == sorted(it.adapters)
    prompt = it.prompt("r33-all", 9, 7, seed=0)
    engine.add_request(Request("a", prompt, RequestParams(7, temperature=0, ignore_eos=True), "r33-all"))
    tokens = []
    while engine.has_work():
        tokens += [token for output in engine.step() for token in output.token_ids]
    assert tokens == it.greedy("r33-all", prompt, 7)


def test_bfloat16_choices_are_the_references_within_rounding(subject, drive):
    """Loss of the reference by the tokens that are chosen in bfloat16, in standard deviations of its logits."""
    it = subject("gqa")
    driver = drive(it, dtype="bfloat16")
    losses = []
    for seed in range(8, 14):
        prompts = {adapter: it.prompt(adapter, 20, 1, seed=seed) for adapter in (None, *it.adapters)}
        for adapter, prompt in prompts.items():
            driver.add(f"{adapter} {seed}", adapter, prompt, max_tokens=12)
        answers = driver.drain()
        for adapter, prompt in prompts.items():
            tokens = answers[f"{adapter} {seed}"].tokens
            logits = it.logits(adapter, prompt + tokens[:-1])[len(prompt) - 1 :]
            loss = logits.amax(-1) - logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
            losses.append(loss / logits.std())
    every = torch.cat(losses)
    assert float((every > 0).float().mean()) < 0.15, "most choices are the reference's"
    assert float(every.mean()) < 0.01
    assert float(every.quantile(0.99)) < 0.2
    assert float(every.max()) < 0.75


class TestStories:
    """A trained model with two trained adapters and a real tokenizer."""

    @pytest.fixture(scope="class")
    def prompts(self, shared_data):
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(shared_data / "models" / "stories260K-hf" / "tokenizer.json"))
        texts = []
        for name, key in (("dolly6400.jsonl", "instruction"), ("gsm8k_test.jsonl", "question")):
            with (shared_data / "prompts" / name).open(encoding="utf-8") as lines:
                texts += [json.loads(line)[key] for line, _ in zip(lines, range(40), strict=False)]
        with gzip.open(shared_data / "prompts" / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as lines:
            texts += [json.loads(line)["prompt"] for line, _ in zip(lines, range(10), strict=False)]
        return [tokenizer.encode(text).ids[:300] for text in texts]

    @pytest.fixture(scope="class")
    def cases(self, stories, prompts):
        """32 requests with clear choices, a third of them for the base model."""
        cases, names = [], [*stories.adapters, None]
        for index, prompt in enumerate(prompts):
            adapter, count = names[len(cases) % 3], 12 + index % 20
            if stories.is_clear(adapter, prompt, count):
                cases.append(Case(str(index), adapter, prompt, stories.greedy(adapter, prompt, count)))
        assert len(cases) >= 32
        return cases[:32]

    @pytest.mark.wide
    def test_adapters_change_the_answers(self, stories, cases):
        base = [stories.greedy(None, case.prompt, len(case.want)) for case in cases]
        changed = sum(case.want != plain for case, plain in zip(cases, base, strict=True) if case.adapter)
        assert changed >= 16

    @pytest.mark.parametrize(
        "config",
        [
            {"max_num_batched_tokens": 128},
            {"chunked_prefill": False, "max_num_batched_tokens": 2048},
            {"num_pages": 60, "max_num_batched_tokens": 256},
        ],
        ids=["chunked", "whole", "small arena"],
    )
    @pytest.mark.usefixtures("crowded")
    def test_32_concurrent_requests(self, stories, drive, cases, config):
        driver = drive(stories, **config)
        add_all(driver, cases)
        check(driver, cases)
        stats = driver.engine.stats()
        if "num_pages" in config:
            assert stats.num_preemptions > 0
        else:
            assert stats.num_preemptions == 0
            assert max(len(plan.sequences) for plan in driver.plans) == 32
