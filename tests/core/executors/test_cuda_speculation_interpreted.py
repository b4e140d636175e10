"""Steps with drafts on the CUDA executor: a draft is a row of a captured decode step, with the page table of its
sequence. Run in a process that interprets, see `tests/interpreted.py`.
"""

from __future__ import annotations

import random

import pytest

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.executors import choice, cuda
from chorus.core.executors.cuda import CudaExecutor
from chorus.core.policies import Policies
from chorus.core.requests.request import Request
from chorus.graphs.runner import StepMode
from chorus.ops.attention import attention_flashinfer
from chorus.ops.attention.attention_flashinfer import FlashInferBackend
from chorus.ops.attention.attention_triton import TritonBackend
from chorus.ops.attention.attention_xqa import XqaBackend
from chorus.perf.inline_reads import InlineReads

from ...conftest import Subject
from ...graphs.late_device import LateDevice
from ...ops.attention.fake_flashinfer import FakeFlashInfer, Stream
from ..conftest import Driver, RecordingExecutor, ticking
from ..speculation.stand_ins import Answer, Drawn, Free, Right
from .test_cuda_interpreted import RECIPES, Launches, make_config, merge, tiny  # noqa: F401 - a fixture

pytestmark = pytest.mark.wide

NAMES = (None, "r17-all", "pattern", "r1-qv")


class PartlyRight(Right):
    """Proposes tokens that will be generated, of which mostly one is replaced by another."""

    def __init__(self, answer: Answer, seed: int) -> None:
        super().__init__(answer)
        self._rng = random.Random(seed)

    def of(self, request: Request, count: int) -> list[int]:
        found = super().of(request, count)
        if (at := self._rng.randrange(count + 1)) < count:
            found[at] ^= 1
        return found


@pytest.fixture
def drive(tiny):  # noqa: F811
    """`drive(proposer, **config)`: an engine that speculates, on a late device that counts replays; None: it doesn't.

    Draft lengths don't depend on the time that steps take here.
    """
    engines = []

    def make(proposer, adapters=tuple(RECIPES), **config) -> Driver:
        speculation = "off" if proposer is None else "ngram"
        settings = make_config(tiny, speculation=speculation, **{"max_num_batched_tokens": 24, **config})
        executor = RecordingExecutor(CudaExecutor(settings, Launches()))
        engine = Engine(settings, executor, ticking(), InlineReads(), Policies(proposer=proposer))
        if engine.speculation is not None:
            engine.speculation.cost = Free()
        engines.append(engine)
        for name in adapters:
            engine.store.register(name, tiny.adapters[name])
        return Driver(engine, executor)

    yield make
    for engine in engines:
        engine.close()


def asked(subject: Subject, count: int, **params):
    """A request of each of `NAMES`: its prompt and parameters."""
    found = {}
    for index, name in enumerate(NAMES):
        prompt = subject.prompt(name, 3 + 2 * index, count, seed=index)
        found[f"r{index}"] = name, prompt, {"max_tokens": count, "seed": index, **params}
    return found


def answers(driver: Driver, requests):
    for key, (name, prompt, params) in requests.items():
        driver.add(key, name, prompt, **params)
    found = driver.drain()
    return {key: found[key] for key in requests}


def of_reference(subject: Subject, requests):
    """The tokens of transformers and peft."""
    return {key: subject.greedy(name, prompt, params["max_tokens"]) for key, (name, prompt, params) in requests.items()}


def decodes(driver: Driver):
    """The steps with drafts and without prompts."""
    return [plan for plan in driver.plans if plan.num_drafts and plan.bucket is not None]


def replays(driver: Driver) -> int:
    return driver.executor.inner._device.num_replays  # noqa: SLF001


@pytest.mark.slow
def test_drafts_are_rows_of_captured_steps(drive, tiny):  # noqa: F811
    """Of mixed adapters; each decode step is one replay, in the buckets of tokens, of which the largest are padded."""
    requests = asked(tiny, 12)
    want = of_reference(tiny, requests)
    driver = drive(Right(lambda request: want[request.id]))
    executor = driver.executor.inner
    sizes = (1, 2, 4, 8, 16, 24)
    keys = [(bucket, mode) for bucket in reversed(sizes) for mode in (StepMode.BASE, StepMode.LORA)]
    assert [(step.bucket, step.mode) for step in executor.captured] == keys
    before = replays(driver)
    assert {key: answer.tokens for key, answer in answers(driver, requests).items()} == want
    stats, drafted = driver.engine.stats(), decodes(driver)
    assert stats.num_accepted_tokens == stats.num_proposed_tokens > 20
    assert any(plan.num_tokens not in sizes for plan in drafted), "no padding"
    assert max(plan.bucket for plan in drafted) > 8 and any(plan.num_adapters > 2 for plan in drafted)
    assert replays(driver) - before == sum(plan.bucket is not None for plan in driver.plans)
    assert not any(reason != "tokens" for reason in executor.eager_steps)


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "pieces"), [("lazy", 24), ("off", 0)])
def test_rejected_drafts_change_nothing(drive, tiny, setting, pieces):  # noqa: F811
    """Also beside chunks of prompts, in pieces or not, and with blocks that proposals begin and leave."""
    requests = asked(tiny, 14)
    want = of_reference(tiny, requests)
    driver = drive(PartlyRight(lambda request: want[request.id], 5), graph_capture=setting, mixed_graph_tokens=pieces)
    for key, (name, prompt, params) in list(requests.items())[:2]:
        driver.add(key, name, prompt, **params)
    for _ in range(3):
        driver.step()
    rest = {key: requests[key] for key in list(requests)[2:]}
    answers(driver, rest)
    assert {key: driver.answers[key].tokens for key in want} == want
    stats = driver.engine.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_proposed_tokens
    assert any(plan.num_drafts and plan.bucket is None for plan in driver.plans), "no drafts beside a prompt"
    assert decodes(driver)


@pytest.mark.slow
def test_draws_and_logprobs_are_those_without_drafts(drive, tiny):  # noqa: F811
    ways = (
        {"temperature": 1.0},
        {"temperature": 0.9, "top_k": 7, "logprobs": 2},
        {"logprobs": 1},
        {"temperature": 1.0, "logit_bias": {7: 3.0}, "min_tokens": 3},
    )
    requests = asked(tiny, 8)
    for (_, _, params), way in zip(requests.values(), ways, strict=True):
        params.update(way)
    plain = answers(drive(None), requests)
    driver = drive(Drawn(lambda request: plain[request.id].tokens, random.Random(6)))
    found = answers(driver, requests)
    assert {key: answer.tokens for key, answer in found.items()} == {
        key: answer.tokens for key, answer in plain.items()
    }
    for key, answer in found.items():
        assert [one.logprob for one in answer.logprobs] == pytest.approx(
            [one.logprob for one in plain[key].logprobs], abs=1e-4
        )
    assert driver.engine.stats().num_accepted_tokens > 3


@pytest.mark.slow
def test_drafts_of_merged_steps(drive, tiny):  # noqa: F811
    """Drafts of the merged adapter, and of others, from whose rows it is subtracted."""
    requests = asked(tiny, 8)
    want = of_reference(tiny, requests)
    driver = drive(Right(lambda request: want.get(request.id, ())), adapters=["r17-all", "pattern", "r1-qv"])
    merge(driver, "r17-all")
    driver.plans.clear()
    assert {key: answer.tokens for key, answer in answers(driver, requests).items()} == want
    assert {plan.mode for plan in decodes(driver)} == {StepMode.MERGED}
    assert driver.engine.stats().num_accepted_tokens > 10


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["flashinfer", "xqa", "triton"])
def test_attention_takes_drafts_as_rows_of_their_sequence(drive, tiny, monkeypatch, backend):  # noqa: F811
    """With plans that are kept between steps, over blocks of sequences that grow by several tokens and go back."""
    monkeypatch.setattr(attention_flashinfer, "FLOAT_WORKSPACE_BYTES", 1)
    fake = FakeFlashInfer(Stream())

    def choose(setup, wanted):
        if backend == "triton":
            return TritonBackend(setup, num_sms=2, reason="a test", new_event=fake.stream.new_event)
        prompts = FlashInferBackend(setup, num_sms=2, module=fake, new_event=fake.stream.new_event)
        return XqaBackend(setup, 2, prompts, module=fake) if backend == "xqa" else prompts

    monkeypatch.setattr(cuda, "choose_attention", choose)
    requests = {key: each for key, each in asked(tiny, 16).items() if each[0] in (None, "r1-qv")}
    want = of_reference(tiny, requests)
    driver = drive(PartlyRight(lambda request: want[request.id], 7), adapters=["r1-qv"], max_num_seqs=2)
    assert {key: answer.tokens for key, answer in answers(driver, requests).items()} == want
    stats = driver.engine.stats()
    assert decodes(driver) and 4 < stats.num_accepted_tokens < stats.num_proposed_tokens


def test_few_sequences_have_room_for_their_drafts(tiny):  # noqa: F811
    config = make_config(tiny, speculation="ngram", max_num_seqs=1, max_num_batched_tokens=12, graph_capture="lazy")
    executor = CudaExecutor(config, LateDevice())
    try:
        assert len(executor.steps.outputs.logits) == 9
        assert list(executor.steps.decoding.launches) == [1, 2, 4, 8, 9]
    finally:
        executor.close()


def test_a_gpu_is_no_obstacle(tiny, monkeypatch):  # noqa: F811
    opened = []
    monkeypatch.setattr("chorus.core.executors.cuda.CudaExecutor", opened.append)
    config = EngineConfig(model=tiny.model, device="cuda", speculation="ngram")
    choice.open_executor(config)
    assert opened == [config]
