"""The CUDA executor on a GPU: the CPU's tokens in float32, graphs like eager steps bit for bit in bfloat16."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from chorus.core.cold_start import ColdStart
from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.executors.base import Executor
from chorus.core.executors.cpu import CpuExecutor
from chorus.core.executors.cuda import CudaExecutor
from chorus.core.executors.cuda_memory import OutOfDeviceMemory
from chorus.core.model.batch import GemmBackend
from chorus.core.model.weights.shadow import MOST_GROWTH
from chorus.graphs.runner import StepMode
from chorus.memory.adapters.adapter import Tier
from chorus.memory.host.images import Reads, ThreadReads
from chorus.ops.library import native_library
from chorus.perf.bench.models.random_model import RandomModel, adapters, checkpoint
from chorus.perf.bench.models.sizes import Geometry
from chorus.perf.inline_reads import InlineReads

from ...greedy import MIN_MARGIN
from ..conftest import Answer, Driver, RecordingExecutor, ticking

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

GEOMETRY = Geometry(hidden=256, ffn=512, layers=3, heads=4, kv_heads=2, vocab=512, positions=256)
RANKS = (1, 8, 16, 33, 64, 256)
ALL_KEYS = [(bucket, mode) for bucket in (8, 4, 2, 1) for mode in (StepMode.BASE, StepMode.LORA)]

#: Of a device with a clock of 1 to 2 GHz.
_HELD_UP_CYCLES = 400_000_000


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Callable[[str], tuple[Path, dict[str, Path]]]:
    """`files("bfloat16")`: a random model with heads of 64, and an adapter of each rank on all projections."""
    root = tmp_path_factory.mktemp("random")

    def make(dtype: str) -> tuple[Path, dict[str, Path]]:
        model = RandomModel(GEOMETRY, ranks=RANKS, dtype=dtype, seed=11)
        return checkpoint(model, root), adapters(model, root)

    return make


@pytest.fixture
def drive(files) -> Iterator[Callable[..., Driver]]:
    """`drive("bfloat16", **config)`: an engine on the GPU, or on the CPU with `device="cpu"`."""
    engines: list[Engine] = []

    def make(dtype: str, *, reads: Reads | None = None, **config) -> Driver:
        model, paths = files(dtype)
        config.setdefault("small_gemm", "on")  # two engines must agree, and two measurements may choose differently
        settings = EngineConfig(
            model=model, **{"device": "cuda", "memory_bytes": 64 << 20, "max_num_seqs": 8, "threads": 1, **config}
        )
        executor: Executor = CudaExecutor(settings) if settings.device == "cuda" else CpuExecutor(settings)
        recording = RecordingExecutor(executor)
        engine = Engine(settings, recording, ticking(), reads or InlineReads())
        engines.append(engine)
        for name, path in paths.items():
            engine.store.register(name, path)
        return Driver(engine, recording)

    yield make
    for engine in engines:
        engine.close()


def prompts(count: int, longest: int = 60, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    return [[draw(3, GEOMETRY.vocab) for _ in range(draw(1, longest))] for _ in range(count)]


def names(driver: Driver) -> list[str | None]:
    return [*driver.engine.store.names(), None]


def add_all(driver: Driver, asked: list[tuple[str | None, list[int]]], count: int) -> None:
    for index, (adapter, prompt) in enumerate(asked):
        driver.add(str(index), adapter, prompt, max_tokens=count + index % 3)


def margin(answer: Answer) -> float:
    """Margin by which the greedy tokens were chosen."""
    return min(entry.top[0][1] - entry.top[1][1] for entry in answer.logprobs)


def test_float32_tokens_equal_the_cpus(drive):
    """Mixed ranks, chunked prompts, base rows; float32 is our attention's, so decode steps are captured."""
    reference = drive("float32", device="cpu", cpu_kernels="torch", max_num_seqs=1)
    gpu = drive("float32", max_num_batched_tokens=48)
    asked = []
    for index, (adapter, prompt) in enumerate(zip(itertools.cycle(names(gpu)), prompts(40), strict=False)):
        answer = reference.run(f"r{index}", adapter, prompt, max_tokens=12, logprobs=2)
        if margin(answer) >= MIN_MARGIN:
            asked.append((adapter, prompt, answer.tokens))
    assert len(asked) >= 20, "too few clear choices to compare"
    for index, (adapter, prompt, want) in enumerate(asked):
        gpu.add(str(index), adapter, prompt, max_tokens=len(want))
    answers = gpu.drain()
    for index, (adapter, _, want) in enumerate(asked):
        assert answers[str(index)].tokens == want, f"request {index} on {adapter}"
    assert [(step.bucket, step.mode) for step in gpu.executor.inner.captured] == ALL_KEYS


@pytest.mark.parametrize("small_gemm", ["on", "fused"])
def test_products_of_more_rows_in_graphs_equal_those_of_eager_steps(drive, small_gemm):
    """In the buckets of the larger tile: attention is the kind whose sums no other row changes."""
    config = {"small_gemm": small_gemm, "attention": "triton", "max_num_seqs": 64, "mixed_graph_tokens": 0}
    captured, eager = drive("bfloat16", **config), drive("bfloat16", graph_capture="off", **config)
    for driver in (captured, eager):
        backends = driver.executor.inner.steps.decoding.backends
        assert {size: set(of.values()) for size, of in backends.items() if size > 16} == {
            size: {GemmBackend.SMALL} if small_gemm == "on" or size > 32 else {GemmBackend.SMALL, GemmBackend.EXPANDED}
            for size in (24, 32, 40, 48, 56, 64)
        }
    asked = list(zip(itertools.cycle(names(captured)), prompts(64, longest=8), strict=False))
    add_all(captured, asked, 6)
    add_all(eager, asked, 6)
    buckets = set()
    while captured.engine.has_work():
        captured.step()
        eager.step()
        buckets.add(captured.plans[-1].bucket)
        mine, its = (
            each.executor.inner.steps.outputs.logits[: len(captured.plans[-1].sequences)] for each in (captured, eager)
        )
        assert torch.equal(mine, its), f"bucket {captured.plans[-1].bucket}"
    assert 64 in buckets
    assert captured.drain() == eager.drain()


@pytest.mark.parametrize(
    "config", [{"small_gemm": "on"}, {"small_gemm": "fused"}, {"small_gemm": "off"}, {"attention": "triton"}], ids=str
)
def test_graphs_equal_eager_steps_bit_for_bit(drive, config):
    """The same plans, captured and not: every step's logits are the same bits, of decode rows and of prompts."""
    captured, eager = drive("bfloat16", **config), drive("bfloat16", graph_capture="off", **config)
    assert [(step.bucket, step.mode) for step in captured.executor.inner.captured] == ALL_KEYS
    asked = list(zip(itertools.cycle(names(captured)), prompts(24), strict=False))
    add_all(captured, asked, 10)
    add_all(eager, asked, 10)
    decoded = mixed = 0
    while captured.engine.has_work():
        captured.step()
        eager.step()
        plan, other = captured.plans[-1], eager.plans[-1]
        assert [replace(row, seed=0) for row in plan.sequences] == [replace(row, seed=0) for row in other.sequences]
        decoded += plan.bucket is not None
        mixed += plan.bucket is None and any(len(row.tokens) == 1 for row in plan.sequences)
        mine, its = (driver.executor.inner.steps.outputs.logits[: len(plan.sequences)] for driver in (captured, eager))
        assert torch.equal(mine, its), f"step {plan.step_id}, bucket {plan.bucket}, {plan.num_tokens} tokens"
    assert decoded > 10
    assert mixed > 5
    assert captured.drain() == eager.drain()
    assert len(captured.executor.inner.captured) == len(ALL_KEYS)
    assert eager.executor.inner.captured == []
    graphs = [driver.executor.inner.steps.mixed.graphs.report for driver in (captured, eager)]
    ways = 3  # of the base model, of prompts alone with adapters, and with decode rows that have some too
    assert [len(report) for report in graphs] == [ways * len(captured.executor.inner.steps.mixed.sizes), 0]


def test_padding_changes_no_bits_of_other_tokens(drive):
    """Whatever an earlier, longer step has left in the buffers, NaN among it."""
    driver = drive("bfloat16", async_scheduling=False)
    driver.run("x", "a02-r16", list(range(3, 24)), max_tokens=1)
    plan, executor = driver.plans[0], driver.executor.inner
    steps = executor.steps
    logits = []
    for left in (0.0, 7.5, torch.nan):
        flow = steps.mixed._flow  # noqa: SLF001
        for values in (flow.rows, *flow.q, *flow.attended):
            values.fill_(left)
        steps.columns.values.fill_(3)
        torch.cuda.synchronize()
        executor.execute(plan)
        logits.append(steps.outputs.logits[0].clone())
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_mixed_steps_in_pieces_have_the_tokens_of_whole_ones(drive):
    """In float32, where rounding tells none apart but close logits."""
    pieces, whole = drive("float32"), drive("float32", mixed_graph_tokens=0)
    asked = list(zip(itertools.cycle(names(pieces)), prompts(24, seed=16), strict=False))
    for driver in (pieces, whole):
        add_all(driver, asked, 8)
    mine, its = pieces.drain(), whole.drain()
    assert pieces.executor.inner.steps.mixed.graphs.keys
    assert not whole.executor.inner.steps.mixed.graphs.keys
    same = sum(mine[name].tokens == its[name].tokens for name in mine)
    assert same >= 0.9 * len(mine), "all but those where two logits are as close as rounding"


def test_tokens_by_our_attention_are_those_of_other_backends(drive, caplog):
    """Of FlashInfer, where it serves, and of torch; in float32, where rounding tells none apart."""
    with caplog.at_level(logging.INFO, "chorus"):
        ours, torchs = drive("float32", attention="triton"), drive("float32", attention="torch")
    assert "attention by triton" in caplog.text
    assert "attention by torch: attention is torch" in caplog.text
    assert torchs.executor.inner.captured == []
    asked = list(zip(itertools.cycle(names(ours)), prompts(24, seed=14), strict=False))
    for driver in (ours, torchs):
        add_all(driver, asked, 8)
    mine, its = ours.drain(), torchs.drain()
    same = sum(mine[name].tokens == its[name].tokens for name in mine)
    assert same >= 0.9 * len(mine), "all but those where two logits are as close as rounding"


@pytest.mark.parametrize("company", [1, 7])
def test_our_attention_serves_bfloat16_captured_and_eager(drive, company):
    """The same tokens, alone in a bucket and with others."""
    captured = drive("bfloat16", attention="triton")
    eager = drive("bfloat16", attention="triton", graph_capture="off")
    assert len(captured.executor.inner.captured) == len(ALL_KEYS)
    asked = list(zip(itertools.cycle(names(captured)), prompts(company, seed=15), strict=False))
    for driver in (captured, eager):
        add_all(driver, asked, 16)
    assert captured.drain() == eager.drain()


def test_whoever_multiplies_is_chosen_by_time(drive, caplog):
    """And gives logits that are the library's up to rounding."""
    with caplog.at_level(logging.INFO, "chorus"):
        chosen, library = drive("bfloat16", small_gemm="auto"), drive("bfloat16", small_gemm="off")
    assert "base products of 1 rows: qkv " in caplog.text
    assert "is not used" not in caplog.text
    assert set(chosen.executor.inner.steps.decoding.backends) == {1, 2, 4, 8}
    for driver in (chosen, library):
        driver.run("x", None, [5, 6, 7], max_tokens=2)
    mine, its = (driver.executor.inner.steps.outputs.logits[0] for driver in (chosen, library))
    assert float((mine - its).abs().max()) <= 0.1 * float(its.abs().max())


def test_loads_and_evictions_between_replays(drive):
    """An arena in which not all adapters fit: their pages change hands, and nothing is captured again."""
    roomy = drive("bfloat16", graph_capture="off")
    pages = roomy.engine.store.get("a05-r256").num_pages
    tight = drive("bfloat16", num_pages=pages + 40)
    asked = list(zip(itertools.cycle(names(roomy)), prompts(30, seed=3), strict=False))
    for index, (adapter, prompt) in enumerate(asked):
        want = roomy.run(str(index), adapter, prompt, max_tokens=6).tokens
        assert tight.run(str(index), adapter, prompt, max_tokens=6).tokens == want, f"request {index} on {adapter}"
    assert tight.engine.stats().num_adapter_evictions > len(RANKS)
    assert len(tight.executor.inner.captured) == len(ALL_KEYS)


def test_adapters_that_come_while_others_decode(drive):
    """Read in threads and copied during compute: a cold adapter's tokens are a warm one's."""
    warm, cold = drive("bfloat16"), drive("bfloat16", reads=ThreadReads())
    asked = list(zip(itertools.cycle(names(warm)), prompts(21, seed=5), strict=False))
    for index, (adapter, prompt) in enumerate(asked):
        want = warm.run(str(index), adapter, prompt, max_tokens=5).tokens
        cold.engine.reclaimer.reclaim_all()
        assert cold.run(str(index), adapter, prompt, max_tokens=5).tokens == want, f"request {index} on {adapter}"
    add_all(cold, [(adapter, prompt) for adapter, prompt in asked], 8)
    answers = cold.drain()
    assert all(answer.error is None for answer in answers.values())


@pytest.mark.skipif(not native_library.available(torch.float32), reason="assistants run the native library")
def test_offload_workers_begin_prompts_of_adapters_that_are_being_copied(drive):
    """Offloaded and collected by values in the stream, while a kernel delays the copies by some tenths of a second; in
    float32, where the two paths differ by rounding alone.
    """
    warm, cold = drive("float32"), drive("float32", offload_workers=2, host_cache_bytes=1 << 28)
    executor = cold.executor.inner
    offload = executor._offload  # noqa: SLF001
    offload.cold_start = ColdStart.OFFLOAD
    copies = torch.cuda.ExternalStream(executor.adapters.dma.copies.streams[True])
    asked = list(zip(itertools.cycle(cold.engine.store.names()), prompts(12, seed=17), strict=False))
    same = offloaded = 0
    for index, (adapter, prompt) in enumerate(asked):
        want = warm.run(str(index), adapter, prompt, max_tokens=4).tokens
        cold.engine.reclaimer.reclaim_all()
        offload.offloaded = None
        with torch.cuda.stream(copies):
            torch.cuda._sleep(_HELD_UP_CYCLES)  # noqa: SLF001
        same += cold.run(str(index), adapter, prompt, max_tokens=4).tokens == want
        offloaded += offload.offloaded is not None and max(offload.offloaded.layers) > 0
    assert offload.starts.num_offloaded == len(asked)
    assert offloaded >= len(asked) // 2, "all but those whose layers came while a kernel was loaded"
    assert same >= 0.9 * len(asked), "all but those where two logits are as close as rounding"


def merge(driver: Driver, name: str) -> None:
    """Get an adapter merged while a request of the base model runs."""
    driver.run(f"load {name}", name, [3], max_tokens=1)
    store = driver.engine.store
    while store.tier(store.get(name)) is not Tier.DEVICE:  # its last copies may outlast the step
        store.poll()
    driver.engine.merge(name)
    driver.add(f"beside {name}", None, [5, 6, 7], max_tokens=200)
    while driver.engine.merging.is_under_way:
        driver.step()
    driver.engine.abort(f"beside {name}")
    assert driver.engine.stats().merged_adapter == name


def test_merged_float32_tokens_equal_the_cpus(drive):
    reference = drive("float32", device="cpu", cpu_kernels="torch", max_num_seqs=1)
    gpu = drive("float32", max_num_batched_tokens=48)
    merge(gpu, "a03-r33")
    gpu.plans.clear()
    want = {}
    for index, (adapter, prompt) in enumerate(zip(itertools.cycle(names(gpu)), prompts(40, seed=9), strict=False)):
        answer = reference.run(f"r{index}", adapter, prompt, max_tokens=12, logprobs=2)
        if margin(answer) >= MIN_MARGIN:
            want[str(index)] = answer.tokens
            gpu.add(str(index), adapter, prompt, max_tokens=12)
    assert len(want) >= 20, "too few clear choices to compare"
    answers = gpu.drain()
    assert {name: answers[name].tokens for name in want} == want
    assert {plan.mode for plan in gpu.plans} == {StepMode.MERGED}


def test_merged_graphs_equal_eager_steps_bit_for_bit_and_outlive_their_adapter(drive):
    captured, eager = drive("bfloat16"), drive("bfloat16", graph_capture="off")
    places, counts = [], []
    for name in ["a02-r16", "a04-r64", "a02-r16"]:
        for driver in (captured, eager):
            merge(driver, name)
            asked = list(zip(itertools.cycle(names(driver)), prompts(16), strict=False))
            add_all(driver, [*asked, *[(name, prompt) for prompt in prompts(4)]], 10)
        answers, others = captured.drain(), eager.drain()
        mine, its = answers.pop(f"beside {name}").tokens, others.pop(f"beside {name}").tokens
        common = min(len(mine), len(its))  # it was aborted as soon as copying the shadow had ended
        assert mine[:common] == its[:common]
        assert answers == others
        counts.append(len(captured.executor.inner.captured))
        places.append({*captured.executor.inner.steps.merged_graphs.addresses})
        for driver in (captured, eager):
            driver.engine.unmerge()
            driver.answers.clear()
    assert places[1] == places[2], "steps of a merged adapter are captured again"
    assert counts[0] > len(ALL_KEYS)
    assert eager.executor.inner.captured == []


def test_merged_bfloat16_logits_are_as_close_to_float32_as_unmerged_ones(drive):
    """Of rows of the merged adapter, of others and of none; rounding may be as much larger as weights may grow."""
    exact, rounded = drive("float32", graph_capture="off"), drive("bfloat16")
    asked = list(zip(itertools.cycle(names(exact)), prompts(14, seed=12), strict=False))

    def scores(driver: Driver) -> torch.Tensor:
        """Log-probabilities of the prompts' tokens, which are the same whatever is answered."""
        found = []
        for index, (adapter, prompt) in enumerate(asked):
            answer = driver.run(str(index), adapter, prompt, max_tokens=1, prompt_logprobs=0)
            found += [entry.logprob for entry in answer.prompt_logprobs or ()]
        driver.answers.clear()
        driver.engine.reclaimer.reclaim_all()
        return torch.tensor(found)

    want = scores(exact)
    unmerged = (scores(rounded) - want).abs().mean()
    merge(rounded, "a02-r16")
    rounded.plans.clear()
    distance = (scores(rounded) - want).abs().mean()
    assert {plan.mode for plan in rounded.plans[:3]} == {StepMode.MERGED}
    assert distance <= MOST_GROWTH[2] * unmerged


def test_draws_and_logprobs_come_from_device_logits(drive):
    params = {
        "temperature": 0.9,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.01,
        "logprobs": 3,
        "seed": 5,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.1,
        "logit_bias": {9: 1.0},
    }
    cpu, gpu = drive("float32", device="cpu", cpu_kernels="torch"), drive("float32")
    mine, its = (driver.run("x", "a02-r16", [5, 6, 7], max_tokens=6, **params) for driver in (gpu, cpu))
    assert mine.tokens == its.tokens
    assert gpu.engine.stats().num_async_steps == 5, "rows that look back are ahead, and drawn behind the host's tokens"
    for left, right in zip(mine.logprobs, its.logprobs, strict=True):
        assert left.logprob == pytest.approx(right.logprob, abs=1e-3)


def test_lazy_capture_captures_what_is_used(drive):
    driver = drive("bfloat16", graph_capture="lazy")
    assert driver.executor.inner.captured == []
    driver.run("base", None, [5, 6, 7], max_tokens=4)
    driver.run("lora", "a01-r8", [5, 6, 7], max_tokens=4)
    driver.run("other", "a04-r64", [5, 6, 7], max_tokens=4)
    assert [(step.bucket, step.mode) for step in driver.executor.inner.captured] == [
        (1, StepMode.BASE),
        (1, StepMode.LORA),
    ]


def test_reports_captures_and_memory(files, caplog):
    model, _ = files("bfloat16")
    with caplog.at_level(logging.INFO, "chorus"):
        executor = CudaExecutor(EngineConfig(model=model, device="cuda", memory_bytes=32 << 20, max_num_seqs=8))
    assert [(step.bucket, step.mode) for step in executor.captured] == ALL_KEYS
    assert all(step.seconds > 0 and step.num_bytes >= 0 for step in executor.captured)
    assert "captured 8 graphs in" in caplog.text
    assert "attention by flashinfer" in caplog.text
    assert "weights and static buffers take" in caplog.text
    executor.close()


def test_the_arena_takes_its_share_and_gives_it_back(files):
    model, _ = files("bfloat16")
    torch.cuda.empty_cache()
    before, total = torch.cuda.mem_get_info()
    share = (total - before + (4 << 30)) / total
    executor = CudaExecutor(EngineConfig(model=model, device="cuda", gpu_memory_utilization=share, max_num_seqs=8))
    arena = executor.num_pages * executor.layout.page_bytes
    assert 1 << 30 < arena <= 4 << 30
    assert torch.cuda.mem_get_info()[0] >= total * (1 - share) - (256 << 20)
    executor.close()
    del executor
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= before - (512 << 20), "contexts of libraries stay, the arena must not"


def test_refuses_what_does_not_fit(files):
    model, _ = files("bfloat16")
    with pytest.raises(OutOfDeviceMemory, match=r"one request of max_model_len needs .* \(17 pages\)"):
        CudaExecutor(EngineConfig(model=model, device="cuda", gpu_memory_utilization=1e-6, max_num_seqs=8))
    with pytest.raises(OutOfDeviceMemory, match="set a page pool of"):
        CudaExecutor(EngineConfig(model=model, device="cuda", memory_bytes=1 << 42, max_num_seqs=8))
