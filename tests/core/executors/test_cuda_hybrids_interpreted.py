"""Models with recurrent states that speculate on the CUDA executor: states take in accepted drafts only, in captured
steps, too. Run in a process that interprets, see `tests/interpreted.py`.
"""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.executors.cuda import CudaExecutor
from chorus.core.executors.cuda_ranks import CudaRanksExecutor
from chorus.core.policies import Policies
from chorus.core.requests.grammar import Grammar
from chorus.core.speculation.ngrams import NgramProposer
from chorus.graphs.runner import StepMode
from chorus.ops.library import native_library
from chorus.perf.inline_reads import InlineReads

from ...tiny_tokenizer import save_tokenizer
from ..conftest import Driver, RecordingExecutor, ticking
from ..merging.test_merged import merge
from ..speculation.stand_ins import Free, Right, Wrong
from ..tiny_families import make_tiny
from .test_cuda_interpreted import Launches
from .test_cuda_ranks_interpreted import DEVICES, one_launch_at_a_time  # noqa: F401 - a fixture
from .test_cuda_speculation_interpreted import PartlyRight, decodes, replays

NAMES = (None, "r3-all", "r8-qv")


@pytest.fixture
def drive():
    """`drive(it, proposer, **config)`: an engine that speculates by default; draft lengths don't depend on
    the time of steps.
    """
    engines = []

    def make(it, proposer, adapters=NAMES[1:], **config) -> Driver:
        defaults = {
            "dtype": "float32",
            "device": "cuda",
            "max_num_seqs": 3,
            "max_num_batched_tokens": 24,
            "block_tokens": 8,
            "memory_bytes": 8 << 20,
            "max_lora_rank": 32,
            "threads": 1,
            "mixed_graph_tokens": 0,
            "max_model_len": 128,
            "graph_capture": "lazy",
            "speculation": "ngram",
        }
        settings = EngineConfig(model=it.model, **{**defaults, **config})
        if settings.tensor_parallel_size > 1:
            executor = RecordingExecutor(CudaRanksExecutor(settings, DEVICES))
        else:
            executor = RecordingExecutor(CudaExecutor(settings, Launches()))
        engine = Engine(settings, executor, ticking(), InlineReads(), Policies(proposer=proposer))
        if engine.speculation is not None:
            engine.speculation.cost = Free()
        engines.append(engine)
        for name in adapters:
            engine.store.register(name, it.adapters[name])
        return Driver(engine, executor)

    yield make
    for engine in engines:
        engine.close()


def asked(it, count, names=NAMES, length=5):
    """For each name a prompt, and what transformers and peft answer."""
    return {
        f"r{index}": (name, *it.case(name, length + 3 * index, seed=index, count=count))
        for index, name in enumerate(names)
    }


def check(driver, requests):
    for key, (name, prompt, want) in requests.items():
        driver.add(key, name, prompt, max_tokens=len(want))
    answers = driver.drain()
    assert {key: answers[key].tokens for key in requests} == {key: want for key, (_, _, want) in requests.items()}


def answer_of(requests):
    return lambda request: requests[request.id][2] if request.id in requests else []


def test_drafts_are_accepted_in_part(tiny, drive):
    """Of mixed adapters in captured steps, one replay each, padded with sequences of one token and of none."""
    it = tiny("qwen3.5-tied")
    requests = asked(it, 6, NAMES[:2])
    driver = drive(it, PartlyRight(answer_of(requests), 3), ["r3-all"], max_num_seqs=2)
    assert driver.engine.executor.layout.state_slots == 2
    check(driver, requests)
    stats, drafted = driver.engine.stats(), decodes(driver)
    assert 1 < stats.num_accepted_tokens < stats.num_proposed_tokens
    assert any(len(plan.sequences) + 1 < plan.num_tokens for plan in drafted), "no empty entry"
    assert replays(driver) == sum(plan.bucket is not None for plan in driver.plans)
    assert not any(reason != "tokens" for reason in driver.executor.eager_steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "proposer", "setting"),
    [
        ("qwen3.5-tied", PartlyRight, "off"),
        ("qwen3.5-tied", Right, "lazy"),
        ("qwen3.5-tied", Wrong, "lazy"),
        ("qwen3.5", PartlyRight, "lazy"),
        ("qwen3.5-moe", Right, "lazy"),
        ("lfm2", PartlyRight, "lazy"),
        ("granite-4-h", PartlyRight, "lazy"),
        ("nemotron-h", PartlyRight, "lazy"),
    ],
)
def test_rejected_drafts_leave_no_trace_in_a_state(tiny, drive, family, proposer, setting):
    """All accepted, none, or some; in decode steps, and next to the prompts of later requests."""
    it, names = tiny(family), NAMES if family != "qwen3.5-moe" else (None, "r3-all")
    requests = asked(it, 8, names)
    more = [5] if proposer is PartlyRight else []
    steps = {"graph_capture": setting, "mixed_graph_tokens": 24 if setting == "lazy" else 0}
    driver = drive(it, proposer(answer_of(requests), *more), names[1:], **steps)
    first, rest = dict(list(requests.items())[:1]), dict(list(requests.items())[1:])
    for key, (name, prompt, want) in first.items():
        driver.add(key, name, prompt, max_tokens=len(want))
    for _ in range(2 if proposer is Right else 3):
        driver.step()
    check(driver, rest)
    assert {key: driver.answers[key].tokens for key in first} == {key: want for key, (_, _, want) in first.items()}
    stats = driver.engine.stats()
    assert decodes(driver) and stats.num_proposed_tokens > 0
    assert (stats.num_accepted_tokens > 0) == (proposer is not Wrong)
    assert (stats.num_accepted_tokens == stats.num_proposed_tokens) == (proposer is Right)
    assert any(plan.num_drafts and plan.bucket is None for plan in driver.plans), "no drafts next to a prompt"


@pytest.mark.slow
def test_drafts_of_merged_steps(tiny, drive):
    it = tiny("qwen3.5-tied")
    requests = asked(it, 8, ("r3-all", None, "r3-all"))
    driver = drive(it, PartlyRight(answer_of(requests), 2), ["r3-all"])
    merge(driver, "r3-all")
    check(driver, requests)
    assert {plan.mode for plan in decodes(driver)} == {StepMode.MERGED}
    assert driver.engine.stats().num_accepted_tokens > 4


@pytest.mark.slow
@pytest.mark.parametrize("proposer", [Right, PartlyRight])
def test_a_checkpoint_may_lie_between_accepted_drafts(tiny, drive, proposer):
    """A second turn begins where the prefix cache has the first one's answer."""
    it, requests = tiny("qwen3.5-tied"), {}
    more = [9] if proposer is PartlyRight else []
    driver = drive(it, proposer(answer_of(requests), *more), (), block_tokens=16, state_checkpoint_tokens=16)
    prompt, whole = it.case(None, 9, seed=0, count=48)
    kept, keep = [], driver.engine.prefix.keep_checkpoint

    def noted(block, pages, accepted):
        kept.append(accepted)
        return keep(block, pages, accepted)

    driver.engine.prefix.keep_checkpoint = noted
    for cut in (0, 30, 42):
        requests[f"{cut}"] = None, prompt + whole[:cut], whole[cut:]
        check(driver, {f"{cut}": requests[f"{cut}"]})
    assert driver.engine.stats().num_prefix_hit_tokens >= 2 * 32
    assert any(kept)


@pytest.mark.slow
@pytest.mark.usefixtures("crowded")
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preempted_requests_keep_their_accepted_drafts(tiny, drive, preemption):
    it = tiny("qwen3.5-tied")
    requests = asked(it, 30, [None] * 5)
    limits = {"preemption": preemption, "max_num_seqs": 5, "max_model_len": 64, "memory_bytes": None}
    layout = drive(it, Right(answer_of(requests)), (), num_pages=200, **limits).engine.executor.layout
    pages = 2 * layout.pages_for_tokens(50, chunk=24)
    driver = drive(it, PartlyRight(answer_of(requests), 6), (), num_pages=pages, **limits)
    check(driver, requests)
    stats = driver.engine.stats()
    assert stats.num_preemptions > 0
    assert (stats.num_swaps_out > 0) == (preemption == "swap")
    assert stats.num_accepted_tokens > 20


@pytest.mark.slow
def test_drafts_that_a_grammar_allows(tmp_path, drive):
    """Forced text, and proposals of which it allows a part; the answers are those without speculation."""
    kept, found = make_tiny("qwen3.5-tied", {"vocab_size": 300}), []
    it = replace(kept, model=shutil.copytree(kept.model, tmp_path / "model"))
    save_tokenizer(it.model)
    grammar = Grammar("regex", "the sum is [0-9]{2,5}!")
    for setting in ("off", "ngram"):
        driver = drive(it, NgramProposer(), ["r3-all"], speculation=setting, max_num_seqs=2)
        for key, (name, way) in {"a": (None, {}), "b": ("r3-all", {"temperature": 1.0, "seed": 3})}.items():
            driver.add(key, name, [5, 6, 7], max_tokens=20, grammar=grammar, ignore_eos=False, **way)
        found.append({key: answer.tokens for key, answer in driver.drain().items()})
    assert found[0] == found[1]
    assert driver.engine.stats().num_accepted_tokens > 8 and decodes(driver)


@pytest.mark.slow
@pytest.mark.skipif(not native_library.available(torch.float32), reason="ranks meet by the native library")
def test_ranks_take_in_drafts(tiny, drive):
    it = tiny("qwen3.5-tied")
    requests = asked(it, 6, NAMES[:2], length=3)
    driver = drive(it, PartlyRight(answer_of(requests), 1), ["r3-all"], tensor_parallel_size=2, max_num_seqs=2)
    check(driver, requests)
    assert driver.engine.stats().num_accepted_tokens > 0 and decodes(driver)
    assert driver.executor.inner.first.captured
