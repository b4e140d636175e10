"""The CUDA executor on a CPU: Triton's kernels interpreted, copies as late as a GPU's, a graph's replay a call.

Run in a process that interprets, see `tests/interpreted.py`. The interpreter takes some milliseconds per program of a
launch, so everything is tiny.
"""

from __future__ import annotations

import gc
import itertools
import logging
import re
import sys
import weakref
from dataclasses import dataclass, field, replace
from functools import partialmethod
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.engine_stats import EAGER_REASONS
from chorus.core.executors import cuda, cuda_gemm_backends, cuda_steps
from chorus.core.executors.cpu import CpuExecutor
from chorus.core.executors.cuda import CudaExecutor
from chorus.core.executors.cuda_memory import OutOfDeviceMemory
from chorus.core.executors.cuda_piecewise import token_buckets
from chorus.core.executors.cuda_steps import CudaSteps
from chorus.core.model import decoder
from chorus.core.model.batch import BY_LIBRARY, GemmBackend
from chorus.core.model.decoder import DecoderModel
from chorus.core.model.lora import lora_launches, lora_state_cuda
from chorus.core.model.lora.lora_state_cuda import MAX_PARTS
from chorus.core.model.program.torch_gemm import kind_of
from chorus.core.requests.pooling import from_bytes
from chorus.core.requests.request_params import InvalidRequest
from chorus.graphs.device import DeviceError
from chorus.graphs.runner import NO_TAIL, USUAL_ROOM, EagerReason, LaunchSize, StepForm, StepMode, StepPart
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.host.images import ThreadReads
from chorus.memory.pages.pool import PageKind
from chorus.ops.attention import attention_flashinfer
from chorus.ops.attention.attention_flashinfer import FlashInferBackend
from chorus.ops.attention.attention_triton import TritonBackend
from chorus.ops.attention.attention_xqa import XqaBackend
from chorus.ops.gemm import small_gemm_triton
from chorus.ops.lora import sgmv_triton
from chorus.ops.lora.merge import merge as ops_merge
from chorus.perf.inline_reads import InlineReads

from ...conftest import ATTENTION, MLP, ModelSpec, Subject, save_adapter, save_model
from ...graphs.late_device import LateDevice
from ...ops.attention.fake_flashinfer import FakeFlashInfer, Stream
from ..conftest import Driver, RecordingExecutor, ticking
from ..entered import entered

SPEC = ModelSpec(seed=7, hidden=32, ffn=48, layers=2, heads=2, kv_heads=1, vocab=96, positions=64)
PATTERN = {"rank_pattern": {"layers.1.self_attn.q_proj": 3, "layers.0.self_attn.v_proj": 2}}


@dataclass
class Recipe:
    rank: int
    alpha: float
    targets: list[str]
    rslora: bool = False
    more: dict = field(default_factory=dict)


RECIPES = {
    "r1-qv": Recipe(1, 4, ["q_proj", "v_proj"]),
    "r17-all": Recipe(17, 12, ATTENTION + MLP, rslora=True),
    "r5-o-down": Recipe(5, 7, ["o_proj", "down_proj"]),
    "pattern": Recipe(4, 8, ["q_proj", "v_proj"], more=PATTERN),
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Subject:
    return saved(tmp_path_factory.mktemp("tiny"), SPEC)


def saved(root: Path, spec: ModelSpec) -> Subject:
    """A model of these shapes, with an adapter of each recipe."""
    save_model(spec, root / "model")
    for seed, (name, it) in enumerate(RECIPES.items()):
        save_adapter(root / "model", root / name, it.rank, it.alpha, it.targets, it.rslora, seed, **it.more)
    return Subject(root / "model", {name: root / name for name in RECIPES})


@pytest.fixture
def drive(tiny):
    """`drive(adapters=[…], **config)`: an engine on a late device with those adapters registered."""
    engines = []

    def make(adapters=tuple(RECIPES), reads=None, **config) -> Driver:
        settings = make_config(tiny, **config)
        executor = RecordingExecutor(CudaExecutor(settings, LateDevice()))
        engine = Engine(settings, executor, ticking(), reads or InlineReads())
        engines.append(engine)
        for name in adapters:
            engine.store.register(name, tiny.adapters[name])
        return Driver(engine, executor)

    yield make
    for engine in engines:
        engine.close()


def make_config(tiny: Subject, **config) -> EngineConfig:
    defaults = {
        "dtype": "float32",
        "device": "cuda",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 12,
        "block_tokens": 4,
        "memory_bytes": 2 << 20,
        "max_lora_rank": 32,
        "threads": 1,
        "mixed_graph_tokens": 0,
    }
    return EngineConfig(model=tiny.model, **{**defaults, **config})


def ask(driver: Driver, tiny: Subject, *requests: tuple[str | None, int, int]) -> dict[str, list[int]]:
    """Add requests of (adapter, prompt length, tokens); the answers that transformers and peft give alone."""
    want = {}
    for adapter, length, count in requests:
        name = f"{len(driver.answers)}-{adapter}"
        prompt = tiny.prompt(adapter, length, count, seed=len(driver.answers))
        driver.add(name, adapter, prompt, max_tokens=count)
        want[name] = tiny.greedy(adapter, prompt, count)
    return want


def check(driver: Driver, want: dict[str, list[int]]) -> None:
    answers = driver.drain()
    assert {name: answers[name].tokens for name in want} == want


def test_mixed_ranks_and_the_base_model_share_steps(drive, tiny):
    """Chunked prompts, decode rows in larger buckets, one and several parts; every graph is captured once, and ahead
    unless it has room for several parts.
    """
    driver = drive()
    executor = driver.executor.inner
    keys = [(bucket, mode) for bucket in (4, 2, 1) for mode in (StepMode.BASE, StepMode.LORA)]
    assert [(step.bucket, step.mode) for step in executor.captured] == keys
    check(driver, ask(driver, tiny, ("r17-all", 15, 4), (None, 5, 7), ("pattern", 3, 4), ("r1-qv", 6, 2)))
    plans = driver.plans
    assert any(row.start and len(row.tokens) > 1 for plan in plans for row in plan.sequences), "no prompt was chunked"
    assert any(plan.bucket == 4 and len(plan.sequences) == 3 for plan in plans), "no padding"
    assert any(plan.bucket and plan.num_adapters > 1 for plan in plans)
    assert any(plan.bucket and not plan.adapters for plan in plans)
    more = executor.captured[len(keys) :]
    assert {(step.bucket, step.form.room) for step in more} == {(step.bucket, LaunchSize(1)) for step in more}
    assert len({step.bucket for step in more}) == len(more) > 0, "captured twice"


class Launches(LateDevice):
    """Counts replays, and checks that captured steps are always replayed."""

    def __init__(self):
        super().__init__()
        self.num_replays = 0

    def capture(self, work):
        captured = super().capture(work)

        def replay():
            self.num_replays += 1
            captured()

        return replay


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["ahead", "lazy", "off"])
def test_pieces_of_mixed_steps_give_the_references_tokens(drive, tiny, monkeypatch, setting):
    """Chunks of prompts and decode rows of several adapters and of none, padded to buckets of 8 and 15 tokens."""
    monkeypatch.setattr(sys.modules[__name__], "LateDevice", Launches)
    monkeypatch.setattr(cuda_steps, "token_buckets", lambda most: (8, most))
    monkeypatch.setattr(DecoderModel, "forward", only_decode_rows(DecoderModel.forward))
    driver = drive(mixed_graph_tokens=15, max_num_batched_tokens=15, graph_capture=setting)
    executor = driver.executor.inner
    steps, device = executor.steps, executor._device  # noqa: SLF001
    modes = [(StepMode.BASE, USUAL_ROOM), (StepMode.LORA, USUAL_ROOM), (StepMode.LORA, NO_TAIL)]
    keys = [(bucket, *mode) for bucket in (15, 8) for mode in modes]
    captured = [(step.bucket, step.mode, step.form.room) for step in steps.mixed.graphs.report]
    assert captured == (keys if setting == "ahead" else [])
    device.num_replays = 0
    want = ask(driver, tiny, ("r17-all", 18, 3), (None, 5, 5))
    driver.step()
    driver.step()
    check(driver, want | ask(driver, tiny, ("r5-o-down", 3, 4), ("r1-qv", 6, 2), (None, 9, 3)))
    mixed = [plan for plan in driver.plans if plan.bucket is None]
    assert any(plan.num_tokens not in (8, 15) for plan in mixed), "no padding"
    assert any(row.start and len(row.tokens) == 1 for plan in mixed for row in plan.sequences), (
        "no decode row among prompts"
    )
    assert {bool(plan.adapters) for plan in mixed} == {True}
    layers = SPEC.layers
    decoded = len(driver.plans) - len(mixed)
    assert device.num_replays == (0 if setting == "off" else len(mixed) * (layers + 1) + decoded)
    assert {key[0] for key in steps.mixed.graphs.keys} <= {8, 15}


def only_decode_rows(forward):
    """The forward pass of a step of the model, which no mixed step may take."""

    def checked(self, batch, logits=None):
        assert batch.logit_tokens is None, "a mixed step was computed as a whole"
        return forward(self, batch, logits)

    return checked


def test_padding_changes_no_bits_of_other_tokens(drive, tiny, monkeypatch):
    """Whatever an earlier, longer step has left in the buffers, NaN among it."""
    driver = drive(mixed_graph_tokens=12, adapters=["r17-all"], async_scheduling=False)
    check(driver, ask(driver, tiny, ("r17-all", 5, 1)))
    plan = next(plan for plan in driver.plans if plan.bucket is None and plan.num_tokens == 5)
    steps = driver.executor.inner.steps
    logits = []
    for left in (0.0, 7.5, torch.nan):
        flow = steps.mixed._flow  # noqa: SLF001
        for values in (flow.x, *flow.kept.values()):
            values.fill_(left)
        steps.columns.values.fill_(3)
        driver.executor.inner.execute(plan)
        logits.append(steps.outputs.logits[0].clone())
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    assert torch.isfinite(steps.mixed._flow.x).all()  # noqa: SLF001


def test_a_mixed_step_of_more_tiles_than_captured_is_captured_with_more(drive, tiny, monkeypatch):
    """More decode rows after the prompt than the usual tail has tiles for, and more prompts than the usual tiles."""
    monkeypatch.setattr(lora_state_cuda, "_MOST_TAIL", 1)
    monkeypatch.setattr(lora_state_cuda, "_MORE_TILES", 0)
    monkeypatch.setattr(sys.modules[__name__], "LateDevice", Launches)
    driver = drive(mixed_graph_tokens=12, adapters=["r1-qv", "r5-o-down"], async_scheduling=False)
    steps, device = driver.executor.inner.steps, driver.executor.inner._device  # noqa: SLF001
    ahead = len(steps.mixed.graphs.keys)
    want = ask(driver, tiny, ("r1-qv", 2, 6), ("r5-o-down", 3, 6))
    driver.step()
    driver.step()
    want |= ask(driver, tiny, ("r1-qv", 4, 1))
    device.num_replays = 0
    driver.step()
    assert driver.plans[-1].bucket is None
    assert device.num_replays == SPEC.layers + 1
    check(driver, want)
    rooms = [key[1].room for key in steps.mixed.graphs.keys[ahead:]]
    assert rooms == [LaunchSize(1, NO_TAIL.tail), LaunchSize(tail=1)]
    assert not steps.eager


def test_merged_mixed_steps_are_captured(drive, tiny, monkeypatch):
    """With the merged weights where they lie: of their adapter alone, and with others; in the next one's, too."""
    monkeypatch.setattr(sys.modules[__name__], "LateDevice", Addresses)
    monkeypatch.setattr(Addresses, "replays_merged", False)
    driver = drive(mixed_graph_tokens=12, adapters=["r1-qv", "pattern"], graph_capture="lazy", max_num_seqs=2)
    steps, device = driver.executor.inner.steps, driver.executor.inner._device  # noqa: SLF001
    device.steps = steps
    for name in ("r1-qv", "pattern"):
        merge(driver, name)
        device.replays_merged = True
        driver.plans.clear()
        check(driver, ask(driver, tiny, (name, 5, 2)))
        check(driver, ask(driver, tiny, (name, 5, 2), (None, 3, 2), ("r1-qv", 2, 2)))
        assert [plan for plan in driver.plans if plan.bucket is None]
        device.replays_merged = False
        driver.engine.unmerge()
    pieces = [step.form for step in steps.captured if step.form.part is StepPart.PIECES]
    assert {form.mode for form in pieces} == {StepMode.MERGED, StepMode.MIXTURE}
    assert not steps.eager


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"graph_capture": "off", "mixed_graph_tokens": 12}, EagerReason.OFF),
        ({"mixed_graph_tokens": 4}, EagerReason.TOKENS),
        ({"mixed_graph_tokens": 12}, None),
    ],
)
def test_eager_steps_are_counted_by_reason(drive, tiny, config, reason):
    driver = drive(adapters=["r1-qv"], async_scheduling=False, **config)
    check(driver, ask(driver, tiny, ("r1-qv", 5, 2)))
    counts = dict(zip(EAGER_REASONS, driver.engine.stats().eager_steps, strict=True))
    prompts, decodes = (sum((plan.bucket is None) is is_prompt for plan in driver.plans) for is_prompt in (True, False))
    many = {EagerReason.OFF: prompts + decodes, EagerReason.TOKENS: prompts}
    assert counts == {**dict.fromkeys(EAGER_REASONS, 0), **({reason: many[reason]} if reason else {})}


def test_steps_of_more_parts_than_any_captured_launch_are_eager(drive, tiny, monkeypatch):
    monkeypatch.setattr(lora_launches, "_FACTORS", (1,))
    driver = drive(adapters=["pattern"], max_num_seqs=1, mixed_graph_tokens=12)
    check(driver, ask(driver, tiny, ("pattern", 2, 2)))
    assert set(driver.executor.inner.steps.eager) == {EagerReason.TILES}


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (0, ()),
        (1, (1,)),
        (32, (32,)),
        (50, (32, 50)),
        (64, (32, 64)),
        (200, (32, 64, 128, 192, 200)),
        (512, (32, *range(64, 513, 64))),
    ],
)
def test_buckets_of_tokens(most, sizes):
    assert token_buckets(most) == sizes


def test_replays_with_other_adapters_than_at_capture(drive, tiny, monkeypatch):
    """Captured with one adapter; then another rank, two, none, one that was reloaded into other pages.

    The graph without LoRA launches no LoRA kernel.
    """
    driver = drive(adapters=["r1-qv"], graph_capture="lazy", max_num_seqs=2)
    store, executor = driver.engine.store, driver.executor.inner
    check(driver, ask(driver, tiny, ("r1-qv", 2, 2), ("r1-qv", 3, 2)))
    assert [(step.bucket, step.mode) for step in executor.captured] == [(2, StepMode.LORA)]
    places = [id(executor.steps.lora.tables), executor.steps.lora.tables.pages.data_ptr()]
    store.register("r5-o-down", tiny.adapters["r5-o-down"])
    check(driver, ask(driver, tiny, ("r5-o-down", 4, 2), (None, 2, 2)))
    driver.engine.reclaimer.reclaim_all()
    store.register("r1-qv", tiny.adapters["r5-o-down"])
    want = ask(driver, tiny, ("r5-o-down", 2, 2))
    prompt = tiny.prompt("r5-o-down", 3, 2, seed=50)
    driver.add("replaced", "r1-qv", prompt, max_tokens=2)
    check(driver, {**want, "replaced": tiny.greedy("r5-o-down", prompt, 2)})
    monkeypatch.setattr(sgmv_triton.Sgmv, "__call__", None)
    check(driver, ask(driver, tiny, (None, 2, 2), (None, 3, 2)))
    assert [(step.bucket, step.mode) for step in executor.captured] == [(2, StepMode.LORA), (2, StepMode.BASE)]
    assert places == [id(executor.steps.lora.tables), executor.steps.lora.tables.pages.data_ptr()]


def test_a_step_of_more_tiles_than_captured_is_captured_with_more(drive, tiny):
    """A token of an adapter of several parts; and the largest tables, which nobody fills."""
    driver = drive(adapters=["pattern"], max_lora_rank=256, max_num_seqs=1)
    steps = driver.executor.inner.steps
    parts = len(driver.engine.store.get("pattern").manifest.parts)
    assert parts > steps.decoding.launches[1].num_tiles
    check(driver, ask(driver, tiny, ("pattern", 2, 2)))
    assert steps.decoding.graphs.keys[-1] == (1, StepForm(StepMode.LORA, room=LaunchSize(1)))
    assert set(steps.eager) == {EagerReason.TOKENS}, "of the prompt"


class Addresses(LateDevice):
    """A device whose replays must read the weights that the step was captured with, as a graph does."""

    steps: CudaSteps

    def _merged_weights(self):
        return [layer["qkv"].data_ptr() for layer in self.steps.decoder._merged if "qkv" in layer]  # noqa: SLF001

    def capture(self, work):
        captured = super().capture(work)
        begun = self._merged_weights() if hasattr(self, "steps") else []

        def replay():
            if self.replays_merged:
                assert self._merged_weights() == begun, "the graph reads weights that were elsewhere"
            captured()

        return replay

    replays_merged = False


def merge(driver: Driver, name: str) -> None:
    """Get an adapter merged while a request of the base model runs."""
    driver.run(f"load {name} {len(driver.answers)}", name, [3], max_tokens=1)
    driver.engine.merge(name)
    driver.add(beside := f"beside {name} {len(driver.answers)}", None, [5, 6], max_tokens=60)
    while driver.engine.merging.is_under_way:
        driver.step()
    driver.engine.abort(beside)
    assert driver.engine.stats().merged_adapter == name


class Operators(TorchDispatchMode):
    """Notes PyTorch's operators with the dtype of their results, and of sums the shape, in which the rank is not."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            name = str(func)
            self.found.add(
                (name, result.dtype, tuple(result.shape) if name.startswith(("aten.addmm", "aten.copy")) else ())
            )
        return result


def test_the_first_merge_runs_no_operator_for_the_first_time(drive, tiny, monkeypatch):
    """A GPU's libraries load a kernel at its first use, and torch asks the device for memory: each stops all steps for
    longer than a step takes. One capture a pause is left.
    """
    at = {"start": set(), "merge": set()}
    inner, when = ops_merge, "start"

    def noting(*args, **kwargs):
        with Operators() as noted:
            found = inner(*args, **kwargs)
        at[when] |= noted.found
        return found

    monkeypatch.setattr(decoder, "merge", noting)
    driver = drive(adapters=["r17-all"])
    assert at["start"]
    assert not driver.executor.inner.arena.pages[1:].any(), "page 0 is of padding"
    when = "merge"
    captures = []
    advance = driver.executor.shadow.advance

    def pause(seconds):
        before = len(driver.executor.inner.captured)
        found = advance(seconds)
        captures.append(len(driver.executor.inner.captured) - before)
        return found

    monkeypatch.setattr(driver.executor.shadow, "advance", pause)
    merge(driver, "r17-all")
    assert any(name.startswith("aten.addmm") for name, *_ in at["merge"])
    assert at["merge"] <= at["start"]
    assert max(captures) == 1
    assert sum(captures) == 9


@pytest.mark.slow
def test_merged_steps_of_the_adapter_alone_and_of_others(drive, tiny):
    """Chunks of prompts and decode rows; the merged adapter's own rows launch nothing of LoRA."""
    driver = drive(graph_capture="off", adapters=["r17-all", "pattern"])
    merge(driver, "r17-all")
    plans = driver.plans
    plans.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sgmv_triton.Sgmv, "__call__", None)
        check(driver, ask(driver, tiny, ("r17-all", 15, 4), ("r17-all", 3, 6)))
    check(driver, ask(driver, tiny, ("r17-all", 13, 2), (None, 2, 4), ("pattern", 2, 3)))
    assert {plan.mode for plan in plans} == {StepMode.MERGED}
    assert any(plan.bucket and len(plan.sequences) < plan.bucket for plan in plans), "no padding"


@pytest.mark.slow
def test_an_adapter_of_several_parts_is_taken_off_the_rows_of_others(drive, tiny):
    driver = drive(graph_capture="lazy", adapters=["pattern", "r1-qv"], max_num_seqs=3)
    merge(driver, "pattern")
    check(driver, ask(driver, tiny, ("r1-qv", 3, 3), (None, 2, 3), ("pattern", 2, 2)))


def test_merged_steps_have_launches_for_a_quarter_of_their_rows(drive, tiny):
    """Captured once weights are merged, with those for all rows; a step has the fewest that it needs."""
    driver = drive(adapters=["r1-qv", "r17-all"], max_num_seqs=4)
    merge(driver, "r1-qv")
    steps = driver.executor.inner.steps
    tiles = {room: steps.decoding.mixture_launches[4].variant((), LaunchSize(room)).num_tiles for room in (0, 1)}
    assert tiles == {0: 1, 1: 4}
    captured = len(steps.captured)
    with pytest.MonkeyPatch.context() as patch:
        used = []
        replay = type(steps.merged_graphs).replay
        patch.setattr(type(steps.merged_graphs), "replay", lambda self, *key: used.append(key) or replay(self, *key))
        check(driver, ask(driver, tiny, *[("r1-qv", 2, 2)] * 3, ("r17-all", 2, 2)))
        check(driver, ask(driver, tiny, *[("r17-all", 2, 2)] * 2, (None, 2, 2), ("r1-qv", 2, 2)))
    rooms = [form.room for bucket, form in used if bucket == 4 and form.mode is StepMode.MIXTURE]
    assert set(rooms) == {LaunchSize(0), LaunchSize(1)}
    assert len(steps.captured) == captured


@pytest.mark.slow
def test_merging_another_adapter_captures_nothing(drive, tiny, monkeypatch):
    """Graphs have the addresses of weights in them: the next shadow of the same matrices lies where the last one did.

    Another set of matrices has graphs of its own; the base model's and unmerged ones stay. Those with more room, for
    the adapter of several parts, are captured when it comes.
    """
    monkeypatch.setattr(sys.modules[__name__], "LateDevice", Addresses)
    monkeypatch.setattr(Addresses, "replays_merged", False)
    driver = drive(adapters=["r1-qv", "pattern", "r5-o-down"], max_num_seqs=2)
    executor = driver.executor.inner
    device = executor._device  # noqa: SLF001
    device.steps = executor.steps
    unmerged = len(executor.captured)
    counts = []
    for name in ("r1-qv", "pattern", "r5-o-down", "r1-qv"):
        merge(driver, name)
        device.replays_merged = True
        check(driver, ask(driver, tiny, (name, 2, 2), (None, 2, 2)))
        device.replays_merged = False
        counts.append(sum(step.form.room == USUAL_ROOM for step in executor.captured) - unmerged)
        driver.engine.unmerge()
    assert counts == [4, 4, 8, 8]
    assert driver.engine.stats().num_merges == 4


@pytest.mark.parametrize(("name", "mixed_graph_tokens"), [("r1-qv", 0), ("r17-all", 12)])
def test_a_first_merge_captures_nothing_between_steps(drive, tiny, name, mixed_graph_tokens):
    """Nor do the steps after it, with prompts and with others beside, where a policy may merge."""
    driver = drive(
        adapters=[name, "r5-o-down"], max_num_seqs=2, graph_capture="ahead", mode_policy="fastest",
        mixed_graph_tokens=mixed_graph_tokens,
    )  # fmt: skip
    driver.engine.modes = None  # this test merges
    executor = driver.executor.inner
    places, captures = executor.steps.merged_graphs.addresses, executor._device.num_captures  # noqa: SLF001
    merge(driver, name)
    assert executor.steps.merged_graphs.addresses[0] in places
    check(driver, ask(driver, tiny, (name, 2, 3), (None, 3, 2), ("r5-o-down", 3, 2)))
    assert executor._device.num_captures == captures  # noqa: SLF001
    assert StepMode.MERGED in {plan.mode for plan in driver.plans}


def test_a_shadow_elsewhere_has_graphs_of_its_own(drive, tiny):
    """Others have taken the pages in which the last one was."""
    driver = drive(adapters=["r1-qv"], max_num_seqs=1, graph_capture="ahead")
    merge(driver, "r1-qv")
    graphs = driver.executor.inner.steps.merged_graphs
    first = graphs.addresses[0]
    driver.engine.unmerge()
    driver.engine.reclaimer.reclaim_all()
    driver.engine.pool.take([run for *_, run in first], PageKind.ADAPTER)  # without the engine's knowledge
    driver.engine.check_integrity = lambda: None
    merge(driver, "r1-qv")
    assert graphs.addresses[1] == first
    assert graphs.addresses[0] != first
    check(driver, ask(driver, tiny, ("r1-qv", 2, 3)))


@pytest.mark.slow
def test_switches_between_steps(drive, tiny):
    """One step ahead where nothing is being made: merged, unmerged and merged again while requests run."""
    driver = drive(adapters=["r1-qv", "r5-o-down"], max_num_seqs=2, graph_capture="lazy")
    driver.run("load", "r5-o-down", [3], max_tokens=1)
    merge(driver, "r1-qv")
    want = ask(driver, tiny, ("r1-qv", 3, 12), (None, 4, 12))
    for index in range(6):
        if driver.engine.stats().merged_adapter:
            driver.engine.unmerge()
        elif not driver.engine.merging.is_under_way:
            driver.engine.merge("r5-o-down" if index % 4 < 2 else "r1-qv")
        driver.step()
        driver.step()
    check(driver, want)
    assert {plan.mode for plan in driver.plans} >= {StepMode.MERGED, StepMode.LORA}


class ComingTransfer:
    """Notes the layers that it is asked for; from `missing` on they don't come."""

    address = 0

    def __init__(self, missing: int = 99):
        self.asked: list[int] = []
        self.missing = missing

    def wait_layer(self, layer, timeout):
        self.asked.append(layer)
        return layer < self.missing


def test_steps_wait_for_their_own_adapters_alone(drive, tiny):
    """A prefill waits layer by layer, a decode step for all layers before it begins; late results are discarded."""
    driver = drive(adapters=["r1-qv"], max_num_seqs=2)
    check(driver, ask(driver, tiny, ("r1-qv", 3, 2), (None, 2, 3)))
    execute = driver.executor.inner.execute
    ragged = next(plan for plan in driver.plans if plan.bucket is None)
    decode = next(plan for plan in driver.plans if plan.bucket and len(plan.sequences) == 2)
    base = driver.plans[-1]
    assert not base.adapters
    adapter, calls = decode.adapters[0], []
    forward = driver.executor.inner.steps.decoder.forward

    def noted(batch, logits=None):
        calls.append(list(adapter.transfer.asked))
        return forward(batch, logits)

    driver.executor.inner.steps.decoder.forward = noted
    for plan, before, after in ((ragged, [], [0, 1]), (decode, [0, 1], [0, 1]), (base, [], [])):
        adapter.transfer = ComingTransfer()
        assert not execute(plan).unready
        assert (calls.pop(), adapter.transfer.asked) == (before, after)
    row = next(row for row in decode.sequences if row.lora_index >= 0)
    for plan in (ragged, decode):
        adapter.transfer = ComingTransfer(missing=1)
        result = execute(plan)
        assert result.unready == {row.request_id}
        assert row.request_id not in result.tokens
    assert execute(base).tokens.keys() == {row.request_id for row in base.sequences}
    adapter.transfer = None


@pytest.mark.parametrize("capture", ["lazy", "off"])
def test_pieces_wait_for_a_layer_of_their_own_adapters_before_it(drive, tiny, capture):
    """And pieces of the base model for none, as for the adapter of the step before, which is still coming."""
    driver = drive(adapters=["r1-qv"], max_num_seqs=2, mixed_graph_tokens=12, graph_capture=capture)
    check(driver, ask(driver, tiny, ("r1-qv", 3, 2)))
    check(driver, ask(driver, tiny, (None, 4, 2)))
    lora, base = (plan for plan in driver.plans if plan.bucket is None)
    assert lora.adapters and not base.adapters
    transfer = lora.adapters[0].transfer = ComingTransfer()
    steps, before = driver.executor.inner.steps, []
    piece = steps.decoder.piece
    steps.decoder.piece = lambda index, *rest: (before.append((index, list(transfer.asked))), piece(index, *rest))
    for plan, asked in ((lora, [0, 1]), (base, []), (lora, [0, 1])):
        transfer.asked.clear()
        assert not driver.executor.inner.execute(plan).unready
        assert transfer.asked == asked
    if capture == "off":  # captured pieces are others, and replayed in the same place
        assert before == [
            (0, [0]),
            (1, [0, 1]),
            (2, [0, 1]),
            (0, []),
            (1, []),
            (2, []),
            (0, [0]),
            (1, [0, 1]),
            (2, [0, 1]),
        ]
    lora.adapters[0].transfer = None


def test_adapters_are_read_while_others_run(drive, tiny):
    driver = drive(adapters=["r1-qv", "r5-o-down"], reads=ThreadReads(), max_num_seqs=2)
    check(driver, ask(driver, tiny, ("r1-qv", 4, 2), (None, 3, 3), ("r5-o-down", 5, 2)))
    assert driver.engine.stats().num_adapter_loads >= 2


def test_flashinfer_is_planned_before_every_replay(drive, tiny, monkeypatch):
    monkeypatch.setattr(attention_flashinfer, "FLOAT_WORKSPACE_BYTES", 1)
    fake = FakeFlashInfer(Stream())

    def choose(setup, wanted):
        return FlashInferBackend(setup, num_sms=2, module=fake, new_event=fake.stream.new_event)

    monkeypatch.setattr(cuda, "choose_attention", choose)
    driver = drive(adapters=["r1-qv"], max_num_seqs=3)
    check(driver, ask(driver, tiny, (None, 14, 4), (None, 3, 3), ("r1-qv", 2, 2)))
    assert fake.fast_plans, "no bucket was planned twice"


def test_xqa_is_planned_before_every_replay(drive, tiny, monkeypatch):
    """Its table is of the step's rows, and prompts are FlashInfer's."""
    monkeypatch.setattr(attention_flashinfer, "FLOAT_WORKSPACE_BYTES", 1)
    fake = FakeFlashInfer(Stream())

    def choose(setup, wanted):
        assert wanted == "xqa"
        eager = FlashInferBackend(setup, num_sms=2, module=fake, new_event=fake.stream.new_event)
        return XqaBackend(setup, 2, eager, module=fake)

    monkeypatch.setattr(cuda, "choose_attention", choose)
    driver = drive(adapters=["r1-qv"], max_num_seqs=3, attention="xqa")
    check(driver, ask(driver, tiny, (None, 14, 4), (None, 3, 3), ("r1-qv", 2, 2)))
    assert not fake.fast_plans, "decode steps have no plan of FlashInfer's"
    assert any(name == "xqa_batch_decode_with_kv_cache" for name, *_ in fake.calls)


@pytest.mark.parametrize(("factor", "wins"), [(0.9, True), (0.99, False)])
def test_the_faster_attention_of_whole_steps_serves(drive, tiny, monkeypatch, float32_products, caplog, factor, wins):
    """Bucket by bucket; and the same tokens either way."""
    monkeypatch.setattr(attention_flashinfer, "FLOAT_WORKSPACE_BYTES", 1)
    monkeypatch.setattr(
        XqaBackend, "__init__", partialmethod(XqaBackend.__init__, module=(fake := FakeFlashInfer(Stream())))
    )

    def choose(setup, wanted):
        return FlashInferBackend(setup, num_sms=2, module=fake, new_event=fake.stream.new_event)

    class Timed(LateDevice):
        def seconds(self, work, count=5):
            fake.calls.clear()
            work()
            return 1e-3 * (factor if any("xqa" in name for name, *_ in fake.calls) else 1.0)

    monkeypatch.setattr(cuda, "choose_attention", choose)
    monkeypatch.setattr(cuda, "rival_attention", lambda setup, chosen: XqaBackend(setup, 2, chosen))
    monkeypatch.setattr(sys.modules[__name__], "LateDevice", Timed)
    with caplog.at_level(logging.INFO, "chorus"):
        driver = drive(adapters=["r1-qv"], max_num_seqs=2, small_gemm="off")
    name = "xqa of flashinfer 0.0.fake" if wins else "flashinfer 0.0.fake"
    assert f"attention of 2 rows by {name} (µs a step: flashinfer 0.0.fake 1000, xqa" in caplog.text
    fake.calls.clear()
    check(driver, ask(driver, tiny, (None, 9, 4), ("r1-qv", 2, 3)))
    assert any("xqa" in name for name, *_ in fake.calls) == wins


def test_an_attention_with_other_values_does_not_serve(drive, tiny, monkeypatch, float32_products, caplog):
    monkeypatch.setattr(attention_flashinfer, "FLOAT_WORKSPACE_BYTES", 1)
    fake = FakeFlashInfer(Stream())
    right = fake.decode.xqa_batch_decode_with_kv_cache
    fake.decode.xqa_batch_decode_with_kv_cache = lambda **given: right(**given).mul_(1.01)
    monkeypatch.setattr(XqaBackend, "__init__", partialmethod(XqaBackend.__init__, module=fake))

    def choose(setup, wanted):
        return FlashInferBackend(setup, num_sms=2, module=fake, new_event=fake.stream.new_event)

    monkeypatch.setattr(cuda, "choose_attention", choose)
    monkeypatch.setattr(cuda, "rival_attention", lambda setup, chosen: XqaBackend(setup, 2, chosen))
    driver = drive(adapters=[], max_num_seqs=1, small_gemm="off")
    assert "attention of 1 rows is not by xqa of flashinfer 0.0.fake: it differs by 1.0e-02" in caplog.text
    check(driver, ask(driver, tiny, (None, 3, 3)))


@pytest.mark.parametrize("capture", ["ahead", "off"])
def test_our_attention_is_planned_before_every_replay(drive, tiny, monkeypatch, caplog, capture):
    """Captured and eager, for several rows, padding and prompts; and the message names the fix."""
    stream = Stream()

    def choose(setup, wanted):
        assert wanted == "auto"
        more = {"reason": "FlashInfer is not installed", "fix": "install it", "new_event": stream.new_event}
        return TritonBackend(setup, num_sms=8, **more)

    monkeypatch.setattr(cuda, "choose_attention", choose)
    with caplog.at_level(logging.INFO, "chorus"):
        driver = drive(adapters=["r1-qv"], max_num_seqs=3, graph_capture=capture)
    assert "attention by triton" in caplog.text
    (warning,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert warning.getMessage().endswith("FlashInfer; FlashInfer is not installed: install it")
    check(driver, ask(driver, tiny, (None, 14, 4), (None, 3, 3), ("r1-qv", 2, 2)))
    assert bool(driver.executor.inner.captured) == (capture == "ahead")


@pytest.mark.parametrize("name", ["triton", "flashinfer", "torch"])
def test_a_kv_cache_in_float8(drive, tiny, monkeypatch, name):
    """The tokens of the CPU executor whose cache rounds alike, whoever attends."""
    monkeypatch.setattr(attention_flashinfer, "FLOAT_WORKSPACE_BYTES", 1)
    fake = FakeFlashInfer(stream := Stream())

    def choose(setup, wanted):
        assert setup.float8_kv
        if name == "flashinfer":
            return FlashInferBackend(setup, num_sms=2, module=fake, new_event=stream.new_event)
        return TritonBackend(setup, num_sms=8, reason="", new_event=stream.new_event)

    if name != "torch":
        monkeypatch.setattr(cuda, "choose_attention", choose)
    asked = [(None, [5, 6, 7, 8] * 3, 5), ("r1-qv", [9, 5, 11], 6), (None, [3], 4)]
    gpu = drive(adapters=["r1-qv"], max_num_seqs=3, kv_cache_dtype="fp8")
    settings = make_config(tiny, device="cpu", cpu_kernels="torch", kv_cache_dtype="fp8")
    cpu = Driver(engine := Engine(settings, RecordingExecutor(CpuExecutor(settings)), ticking(), InlineReads()), None)
    engine.store.register("r1-qv", tiny.adapters["r1-qv"])
    for driver in (gpu, cpu):
        for index, (adapter, prompt, count) in enumerate(asked):
            driver.add(str(index), adapter, prompt, max_tokens=count)
        driver.drain()
    assert gpu.executor.layout.page_bytes == cpu.engine.executor.layout.page_bytes
    assert {key: each.tokens for key, each in gpu.answers.items()} == {
        key: each.tokens for key, each in cpu.answers.items()
    }
    engine.close()


def test_attention_that_cannot_serve_is_refused(tiny):
    with pytest.raises(DeviceError, match="attention is triton, but the decode kernel needs a CUDA device"):
        CudaExecutor(make_config(tiny, attention="triton"), LateDevice())


@pytest.fixture
def drawing_kernels(monkeypatch):
    """Tokens are drawn by the kernels."""
    monkeypatch.setattr("chorus.ops.sampling.sampling._on_host", lambda logits: False)


@pytest.mark.usefixtures("drawing_kernels")
def test_rows_may_ask_for_more_than_the_likeliest_token(drive, tiny):
    """Draws, penalties and log-probabilities are those of the CPU executor."""
    asked = [
        {"temperature": 0.8, "top_k": 5, "min_p": 0.01},
        {"temperature": 1.2, "top_p": 0.7, "logit_bias": {7: 2.0}},
        {"presence_penalty": 0.5, "repetition_penalty": 1.3, "logprobs": 2},
        {"prompt_logprobs": 1, "logprobs": 0},
    ]
    gpu = drive(adapters=[])
    settings = make_config(tiny, device="cpu", cpu_kernels="torch")
    cpu = Driver(engine := Engine(settings, RecordingExecutor(CpuExecutor(settings)), ticking(), InlineReads()), None)
    for driver in (gpu, cpu):
        for index, params in enumerate(asked):
            request = driver.add(str(index), None, [5, 6, 7 + index, 5, 9], max_tokens=4, seed=index, **params)
            assert request.seed == index
        driver.drain()
    for name, answer in cpu.answers.items():
        got = gpu.answers[name]
        assert got.tokens == answer.tokens
        assert len(got.logprobs) == len(answer.logprobs)
        for mine, other in zip(
            got.logprobs + list(got.prompt_logprobs or ()),
            answer.logprobs + list(answer.prompt_logprobs or ()),
            strict=True,
        ):
            assert mine.token_id == other.token_id
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
    engine.close()


def test_a_replayed_step_leaves_nothing_to_score(drive, monkeypatch):
    """On a GPU a replay runs no Python, so values kept by the step before would be taken for its own."""
    driver = drive(adapters=[])
    steps = driver.executor.inner.steps
    monkeypatch.setattr(steps.decoding.graphs, "replay", lambda bucket, mode: None)
    driver.add("a", None, [5, 6, 7], max_tokens=2, prompt_logprobs=0)
    driver.step()
    assert driver.plans[-1].bucket is None
    assert len(steps.decoder.prompt_logits(0, 2)) == 2
    driver.step()
    assert driver.plans[-1].bucket == 1
    with pytest.raises(RuntimeError, match="kept no hidden states"):
        steps.decoder.prompt_logits(0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("config", [{}, {"mixed_graph_tokens": 12}, {"async_scheduling": False}], ids=str)
def test_pooled_vectors_beside_generated_text(drive, tiny, config):
    driver = drive(**config)
    wanted = {}
    for index, (adapter, pooling) in enumerate(product((None, "r17-all", "pattern"), ("last", "mean", "cls"))):
        prompt = [(7 * index + 5 * at) % 90 + 3 for at in range(2 + 3 * index)]
        driver.add(f"p{index}", adapter, prompt, max_tokens=1, pooling=pooling)
        model = tiny.use(adapter)  # loaded outside of inference mode, where its parameters could not be switched
        with torch.inference_mode():
            states = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0]
        wanted[f"p{index}"] = {"last": states[-1], "mean": states.mean(0), "cls": states[0]}[pooling]
    tokens = ask(driver, tiny, ("r1-qv", 6, 5), (None, 3, 4))
    answers = driver.drain()
    for name, vector in wanted.items():
        torch.testing.assert_close(torch.tensor(from_bytes(answers[name].pooled)), vector, rtol=1e-3, atol=1e-3)
    assert {name: answers[name].tokens for name in tokens} == tokens


@pytest.mark.slow
@pytest.mark.usefixtures("drawing_kernels")
def test_async_steps_take_tokens_that_were_drawn_on_the_device(drive, tiny):
    asked = [
        {"temperature": 0.8, "top_k": 5, "logprobs": 1},
        {"temperature": 1.2, "top_p": 0.8},
        {"temperature": 1.0, "logit_bias": {7: 2.0}},
        {"max_tokens": 5},
        {"max_tokens": 3, "logprobs": 2},
        {"frequency_penalty": 1.5, "max_tokens": 6},
        {"repetition_penalty": 1.5, "temperature": 0.7, "logprobs": 1},
    ]
    answers, drivers = [], [drive(adapters=[]), drive(adapters=[], async_scheduling=False)]
    for driver in drivers:
        for index, params in enumerate(asked):
            driver.add(str(index), None, [5, 6, 7 + index, 5, 9], **{"max_tokens": 9, "seed": index, **params})
        answers.append(driver.drain())
    assert answers[0] == answers[1]
    ahead = [plan for plan in drivers[0].plans if plan.sources is not None]
    assert any(list(plan.sources) != list(range(len(plan.sequences))) for plan in ahead), "no row was left out"
    assert any(row.looks_back for plan in ahead for row in plan.sequences), "none was drawn behind the host's tokens"
    assert not any(plan.sources is not None for plan in drivers[1].plans)


@pytest.mark.parametrize("padded", [0, 12])
def test_steps_of_prompts_are_ahead_of_tokens_too(drive, tiny, padded):
    """Chunks of prompts in steps with rows that continue from a sampled token; choices with and without a turn."""
    found, plans = [], []
    for is_async in (True, False):
        driver = drive(adapters=[], mixed_graph_tokens=padded, async_scheduling=is_async, prefix_cache=False)
        shares = driver.engine.scheduler._choices  # noqa: SLF001
        shares._clock = lambda driver=driver: sum(len(plan.sequences) for plan in driver.plans)  # noqa: SLF001
        want = ask(driver, tiny, (None, 3, 14), (None, 17, 3))
        driver.add("looks back", None, [5, 6, 7, 5, 9] * 3, frequency_penalty=1.5, max_tokens=3)
        for index in range(2):
            driver.add(
                f"answer {index}", None, [5, 6, 7], choice_group="call", temperature=1.0, seed=index, max_tokens=6
            )
        check(driver, want)
        plans.append(driver.plans)
        found.append({name: answer.tokens for name, answer in driver.answers.items()})
    assert found[0] == found[1]
    ahead = [plan for plan in plans[0] if plan.sources is not None]
    for captured in (True, False):  # decode steps, and steps of prompts
        sources = [plan.sources for plan in ahead if (plan.bucket is not None) is captured]
        assert any(-1 in each and max(each) >= 0 for each in sources), "none has both"


def test_logits_that_are_not_finite_fail_their_row_alone(drive, tiny):
    driver = drive(adapters=[])
    steps = driver.executor.inner.steps
    forward = steps.decoder.forward

    def broken(batch, logits=None):
        found = forward(batch, logits)
        found[0] = torch.nan
        return found

    want = ask(driver, tiny, (None, 2, 3), (None, 3, 3))
    driver.step()
    steps.decoder.forward = broken
    driver.step()
    steps.decoder.forward = forward
    answers = driver.drain()
    broken_one, other = want
    assert "not finite" in answers[broken_one].error
    assert answers[other].tokens == want[other]


def test_refuses_adapters_that_the_tables_do_not_hold(drive, tiny, tmp_path):
    driver = drive(adapters=[], max_lora_rank=16)
    with pytest.raises(AdapterFormatError, match="has rank 17, above max_lora_rank 16; raise max_lora_rank"):
        driver.engine.store.register("a", tiny.adapters["r17-all"])
    for name in "abcd":
        driver.engine.store.register(name, tiny.adapters["r5-o-down"])
    assert driver.run("1", "a*1+b*0.5+c*2", [5, 6], max_tokens=1).error is None
    with pytest.raises(InvalidRequest, match="has rank 20, above max_lora_rank 16"):
        driver.run("2", "a*1+b*0.5+c*2+d*1", [5, 6], max_tokens=1)
    backend = driver.executor.adapters
    parts = [SimpleNamespace(token_ids=())] * (MAX_PARTS + 1)
    manifest = SimpleNamespace(rank=4, num_tokens=0, unmerged_targets=(), parts=parts)
    assert isinstance(backend.inspect(tiny.adapters["r1-qv"]).rank, int)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chorus.core.executors.adapters.inspect_adapter", lambda *args: manifest)
        with pytest.raises(AdapterFormatError, match=f"make {MAX_PARTS + 1} different parts"):
            backend.inspect(Path("many-parts"))


def test_refuses_what_does_not_fit(tiny):
    with pytest.raises(OutOfDeviceMemory, match="the weights take"):
        CudaExecutor(make_config(tiny), LateDevice(memory_bytes=50_000))
    with pytest.raises(OutOfDeviceMemory, match="set a page pool of"):
        CudaExecutor(make_config(tiny, num_pages=1 << 20), LateDevice(memory_bytes=8 << 20))
    with pytest.raises(OutOfDeviceMemory, match=r"one request of max_model_len needs .* \(17 pages\)"):
        CudaExecutor(make_config(tiny, memory_bytes=None, gpu_memory_utilization=0.001), LateDevice(8 << 20))


@pytest.mark.parametrize(
    ("limits", "lengths"),
    [((1, 12), [12]), ((1, 100), [64]), ((4, 12), [11, 1]), ((4, 100), [64, 35, 1]), ((2, 200), [64, 1])],
)
def test_profiles_the_largest_step(tiny, monkeypatch, limits, lengths):
    seen = []
    ragged = CudaSteps.ragged

    def noted(self, rows, adapters, **how):
        seen.append([len(row.tokens) for row in rows])
        return ragged(self, rows, adapters, **how)

    monkeypatch.setattr(CudaSteps, "ragged", noted)
    rows, tokens = limits
    config = make_config(tiny, max_num_seqs=rows, max_num_batched_tokens=tokens, graph_capture="off")
    CudaExecutor(config, LateDevice()).close()
    assert seen == [lengths]


def test_the_arena_takes_what_there_is(tiny):
    executor = CudaExecutor(make_config(tiny, memory_bytes=None, gpu_memory_utilization=0.5), LateDevice(8 << 20))
    assert executor.num_pages == (4 << 20) // executor.layout.page_bytes
    executor.close()
    assert not hasattr(executor, "_arena")


def test_a_closed_executor_frees_its_arena_at_once(tiny):
    """By reference counts alone: on a GPU the next engine needs the memory before the collector runs."""
    executor = CudaExecutor(make_config(tiny), LateDevice())
    arena = weakref.ref(executor.arena.pages)
    assert executor.captured
    gc.collect()
    gc.disable()
    try:
        executor.close()
        assert arena() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(("arrives", "most"), [(False, 24), (True, 44)])
def test_a_step_enters_few_files(drive, tiny, arrives, most):
    """A replay here calls the captured functions, so the kernels' launches are counted, too."""
    driver = drive(adapters=["r1-qv"], max_num_seqs=3, async_scheduling=not arrives)
    ask(driver, tiny, ("r1-qv", 2, 8), (None, 2, 8))
    for _ in range(4):
        driver.step()
    if arrives:
        ask(driver, tiny, ("r1-qv", 3, 2))
    counts = entered(driver.engine.step)
    assert "ops/lora/sgmv_triton.py" in counts
    assert len(counts) <= most, sorted(counts)


class TimedDevice(LateDevice):
    """Returns the times that the test has planted for whole steps; records each measurement."""

    def __init__(self, planted, product=lambda kind, rows, backend: 1.0):
        """product: the time of a GEMM by itself."""
        super().__init__()
        self.planted, self.product = planted, product
        self.asked = []

    def seconds(self, work, count=5):
        """Of the step that `work` computes, as its decoder is called, or of a GEMM's uses. A step writes KV, which may
        be anything.
        """
        steps, products = [], []

        def run_gemm(decoder, use, backend, x):
            products.append((kind_of(use.weight, silu=use.op is not None and use.op.silu), len(x), backend))

        def forward(decoder, batch, logits):
            steps.append(batch)
            decoder.arena.pages.fill_(torch.nan)
            return logits

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DecoderModel, "forward", forward)
            patch.setattr(DecoderModel, "run_gemm", run_gemm)
            work()
        if products:
            return sum(itertools.starmap(self.product, products))
        (batch,) = steps
        asked = batch.backends, len(batch.token_ids), batch.lora is not None
        self.asked.append((*asked, self.num_captures))
        return self.planted(*asked)


SMALL, EXPANDED = GemmBackend.SMALL, GemmBackend.EXPANDED


def used(backends):
    """The backend of all GEMMs of layers, and that of the logits'; None: the library."""
    layers = {each for kind, each in backends.items() if not kind.is_head}
    (layer,) = layers or {None}
    return layer, next((each for kind, each in backends.items() if kind.is_head), None)


@pytest.fixture
def float32_products(monkeypatch):
    """Our kernel serves float32, too, which the interpreter multiplies as it is."""
    monkeypatch.setitem(cuda_gemm_backends.TOLERANCE, torch.float32, 1e-4)


@pytest.mark.slow
def test_products_are_by_what_takes_least_time_of_whole_steps(tiny, float32_products, caplog):
    """Bucket by bucket, with adapters and without, before anything is captured; the log says the times."""
    on, fused, mixed, off = "on", "fused", "mixed", "off"

    def name_of(backends):
        names = {(SMALL, SMALL): on, (EXPANDED, SMALL): fused, (SMALL, None): mixed, (None, None): off}
        return names[used(backends)]

    def planted(backends, rows, lora):
        times = {
            1: {on: (6e-3, 7e-3), fused: (6e-3, 6e-3), mixed: (6e-3, 7e-3), off: (7e-3, 7e-3)},
            2: {on: (6.1e-3, 6e-3), fused: (6e-3, 6e-3), mixed: (6e-3, 6e-3), off: (6e-3, 6e-3)},  # within 2 %
            4: {on: (6e-3, 9e-3), fused: (6e-3, 9e-3), mixed: (6e-3, 8e-3), off: (7e-3, 6e-3)},
        }
        return times[rows][name_of(backends)][lora]

    device = TimedDevice(planted)
    caplog.set_level(logging.INFO)
    executor = CudaExecutor(make_config(tiny), device)
    chosen = {rows: name_of(each) for rows, each in executor.steps.decoding.backends.items()}
    assert chosen == {1: fused, 2: on, 4: off}
    assert {captures for *_, captures in device.asked} == {0}, "graphs were captured before the choice"
    assert device.num_captures
    found = {(name_of(backends), lora) for backends, rows, lora, _ in device.asked if rows == 4}
    assert found == {(backends, lora) for backends in (on, fused, mixed, off) for lora in (False, True)} - {
        (fused, False)
    }
    times = (
        "(µs a step, base + LoRA: on 6000 + 7000, fused 6000 + 6000, on, logits by the library 6000 + 7000, "
        "each by its own race 6000 + 7000, off 7000"
    )
    assert f" in float32 small {times}" in caplog.text
    assert all(f"{group} " in caplog.text for group in ("qkv", "o", "gate_up", "down", "head"))
    executor.close()


def test_each_gemm_may_be_by_what_takes_least_time_for_it(tiny, float32_products, caplog):
    """Where no combination of all of them is as fast: the sum is timed, as a whole step."""

    def product(kind, rows, backend):
        return 2.0 if kind.silu and backend is SMALL else 1.0

    def planted(backends, rows, lora):
        of = {kind.silu: each for kind, each in backends.items() if not kind.is_head}
        return 6e-3 if of.get(False) is SMALL and True not in of else 7e-3

    caplog.set_level(logging.INFO)
    executor = CudaExecutor(make_config(tiny, max_num_seqs=2), TimedDevice(planted, product))
    for backends in executor.steps.decoding.backends.values():
        silu, *others = sorted(executor.steps.decoder.gemms(), key=lambda kind: not kind.silu)
        assert silu not in backends
        assert {backends[kind] for kind in others} == {SMALL}
    assert "each by its own race 6000 + 6000" in caplog.text
    assert "gate_up 32 → 96, 2 rows: µs of 2 uses: small 4000000, library 2000000" in caplog.text
    executor.close()


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["on", "fused"])
def test_our_products_give_the_references_tokens(drive, tiny, float32_products, setting):
    """In steps with adapters and without, captured; adapters of one part, and of several."""
    driver = drive(small_gemm=setting, adapters=["r17-all", "r5-o-down", "pattern"])
    backend = SMALL if setting == "on" else EXPANDED
    backends = driver.executor.inner.steps.decoding.backends
    assert {used(each) for each in backends.values()} == {(backend, SMALL)}
    check(driver, ask(driver, tiny, ("r17-all", 5, 4), (None, 6, 5), ("r5-o-down", 3, 3), ("pattern", 4, 2)))
    assert {bool(plan.adapters) for plan in driver.plans if plan.bucket} == {True, False}


@pytest.mark.slow
def test_our_products_of_more_rows_give_the_references_tokens(drive, tiny, float32_products):
    """Of rows that the larger tile holds, which are more than are expanded at once."""
    driver = drive(
        small_gemm="fused",
        adapters=["r17-all", "r5-o-down"],
        max_num_seqs=18,
        max_num_batched_tokens=40,
        graph_capture="lazy",
    )
    names = [("r17-all", None, "r5-o-down")[index % 3] for index in range(18)]
    check(driver, ask(driver, tiny, *((name, 2, 3 + index % 2) for index, name in enumerate(names))))
    assert used(driver.executor.inner.steps.decoding.backends[18]) == (EXPANDED, SMALL)
    assert 18 in {plan.bucket for plan in driver.plans}


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["on", "fused"])
def test_products_of_a_row_are_the_same_with_and_without_adapters_in_the_step(
    drive, tiny, float32_products, monkeypatch, setting
):
    """Those of the first layer's qkv, which come before attention: on a CPU that depends on the other rows."""
    driver = drive(small_gemm=setting, adapters=["r17-all"], async_scheduling=False)
    check(driver, ask(driver, tiny, ("r17-all", 3, 3), (None, 4, 3)))
    mixed = next(plan for plan in driver.plans if plan.bucket and len(plan.sequences) == 2)
    row = next(row for row in mixed.sequences if row.lora_index < 0)
    inner, products = small_gemm_triton.multiply, []

    def noted(*args, **kwargs):
        products.append(inner(*args, **kwargs))
        return products[-1]

    monkeypatch.setattr(small_gemm_triton, "multiply", noted)
    first = []
    for plan in (mixed, replace(mixed, sequences=[row], adapters=[], bucket=1)):
        products.clear()
        driver.executor.inner.execute(plan)
        first.append(products[0][plan.sequences.index(row)].clone())
    assert torch.equal(*first)


@pytest.mark.slow
def test_terms_of_two_adapters_are_not_expanded_in_a_product(drive, tiny, float32_products, monkeypatch):
    """With one adapter in the weights, rows of another subtract it and add their own, in launches of their own
    after the GEMM.
    """
    driver = drive(small_gemm="fused", adapters=["r17-all", "r1-qv"], graph_capture="off")
    merge(driver, "r17-all")
    driver.plans.clear()
    with monkeypatch.context() as patch:
        patch.setattr(sgmv_triton.Sgmv, "shrink", None)
        check(driver, ask(driver, tiny, ("r17-all", 3, 3), (None, 2, 4), ("r1-qv", 2, 3)))
    assert {plan.mode for plan in driver.plans} == {StepMode.MERGED}


def test_a_product_with_other_values_is_not_used(tiny, float32_products, monkeypatch, caplog):
    right = small_gemm_triton.multiply
    monkeypatch.setattr(small_gemm_triton, "multiply", lambda x, *rest, **joined: 1.01 * right(x, *rest, **joined))
    executor = CudaExecutor(make_config(tiny, small_gemm="on", max_num_seqs=1), LateDevice())
    assert all(each == BY_LIBRARY for each in executor.steps.decoding.backends.values())
    assert re.search(r"small of qkv \d+ → \d+ in float32 is not used: it differs by 1\.0e-02 of", caplog.text)
    executor.close()


def test_steps_that_are_timed_leave_the_sample_adapters_alone(tiny, float32_products, caplog):
    """They write KV of any values to the model's arena, where the sample adapters of the next bucket must not be."""
    executor = CudaExecutor(make_config(tiny, max_num_seqs=2), TimedDevice(lambda *asked: 1.0))
    assert "is not used" not in caplog.text
    assert [used(executor.steps.decoding.backends[rows]) for rows in (1, 2)] == [(SMALL, SMALL)] * 2
    executor.close()


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"small_gemm": "on"}, "the kernel for few rows needs bfloat16 or float16, the model is in float32"),
        ({"small_gemm": "off"}, "small_gemm is off"),
        ({"graph_capture": "off"}, "steps are not captured"),
    ],
)
def test_says_why_products_are_the_librarys(tiny, caplog, config, why):
    caplog.set_level(logging.INFO)
    executor = CudaExecutor(make_config(tiny, max_num_seqs=1, **config), LateDevice())
    assert all(each == BY_LIBRARY for each in executor.steps.decoding.backends.values())
    assert f"base products by the library: {why}" in caplog.text
    executor.close()
