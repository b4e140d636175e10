"""The columns of the table: every way in which an engine serves requests."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.executors.base import ModelExecutor
from chorus.core.executors.cpu import CpuExecutor
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import ModelConfig
from chorus.core.policies import Policies
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.core.requests.types import TokenLogprobs
from chorus.memory.host.images import ThreadReads

from ...kept import kept_files
from ..conftest import Driver, moved
from ..speculation.stand_ins import Drawn, Free, Right, Wrong
from ..tiny_families import load_model, save_family
from .asked import ANSWERS, CROWD, LONG
from .path import TORCH_BITS, Cell, Path
from .subject import Subject


class Mixed(Path):
    """Chunks of prompts beside decode rows, of all adapters at once."""

    def verify(self, cell: Cell, driver: Driver) -> None:
        chunks = [row for plan in driver.plans for row in plan.sequences if row.start > 0 and len(row.tokens) > 1]
        assert chunks, "no prompt was cut"
        rows = [[len(row.tokens) for row in plan.sequences] for plan in driver.plans]
        assert any(each[0] > 1 and each[-1] == 1 for each in rows), "no mixed step"
        assert any(plan.bucket is not None for plan in driver.plans), "no decode step in a bucket"
        named = len({name for name in cell.subject.adapters if name})
        assert max(plan.num_adapters for plan in driver.plans) >= min(named, 3)


class Twice(Path):
    """Prompts are asked again, and begin where the cache has them."""

    def ask(self, cell: Cell, driver: Driver) -> None:
        for turn in ("", "again "):
            cell.check(driver, self.asked, turn)

    def verify(self, cell: Cell, driver: Driver) -> None:
        assert driver.engine.stats().num_prefix_hit_tokens > 40


class LongPrompts(Twice):
    """Of several windows and chunks of attention: pages leave as soon as no later token sees them."""

    def ask(self, cell: Cell, driver: Driver) -> None:
        layout, most = driver.engine.executor.layout, [0]
        step = driver.step

        def noted() -> Any:
            outputs = step()
            for request in driver.engine.scheduler.running:
                held, chunk = len(request.block_table.held), request.room - request.num_computed_tokens + 1
                states = request.block_table.states
                held -= 0 if states is None else len(states.spare)  # a slot that is a checkpoint until the next step
                assert held <= layout.pages_for_tokens(request.room, chunk)
                most.append(held)
            return outputs

        if layout.has_windows:
            driver.step = noted
        super().ask(cell, driver)
        assert not layout.groups or max(most) < layout.table_width(self.asked.lengths[0])


class Preempted(Path):
    """Requests of a small arena are preempted, for want of pages and at random, and go on."""

    def drive(self, cell: Cell) -> Driver:
        cell.fixture("crowded")
        limits = {"max_model_len": 64, "prefix_cache": False, **self.limits}
        probe = cell.drive(**limits).engine
        largest = max(adapter.num_pages for _, adapter in probe.store.registered())
        return cell.drive(num_pages=1 + largest + probe.executor.layout.pages_for_tokens(48, chunk=24), **limits)

    def ask(self, cell: Cell, driver: Driver) -> None:
        rng, scheduler, step = random.Random(0), driver.engine.scheduler, driver.step

        def disturbed() -> Any:
            for request in [each for each in scheduler.running if rng.random() < 0.1]:
                scheduler.lifecycle.preempt(request)
            return step()

        driver.step = disturbed
        super().ask(cell, driver)

    def verify(self, cell: Cell, driver: Driver) -> None:
        stats = driver.engine.stats()
        assert stats.num_preemptions > 0
        assert (stats.num_swaps_in > 0) == (driver.engine.config.preemption == "swap")


class Async(Path):
    """Steps are launched before the tokens of the one before are read."""

    def drive(self, cell: Cell) -> Driver:
        cell.fixture("monkeypatch").setattr(ModelExecutor, "state_slots", 3)
        return super().drive(cell)

    def verify(self, cell: Cell, driver: Driver) -> None:
        assert driver.engine.stats().num_async_steps > 5


@dataclass(frozen=True)
class Drafts(Path):
    """Tokens are proposed by a stand-in for n-grams: all right, all wrong, or drawn."""

    proposer: Callable[..., Any] = Right

    def serve(self, cell: Cell) -> None:
        want: dict[str, list[int]] = {}
        proposer = self.proposer(lambda request: want.get(request.id, []))
        driver = cell.drive(speculation="ngram", policies=Policies(proposer=proposer), **self.limits)
        driver.engine.speculation.cost = Free()
        if self.merges:
            cell.merge(driver)
        want |= self.asked.add(cell.subject, driver)
        answered = driver.drain()
        assert {name: answered[name].tokens for name in want} == want
        stats = driver.engine.stats()
        assert stats.num_proposed_tokens > 0
        assert (stats.num_accepted_tokens > 0) == (self.proposer is not Wrong)
        assert (driver.plans[-1].merged is not None) == self.merges


class Moved(Path):
    """Requests go on in another engine, in the middle of prompts and of answers."""

    def serve(self, cell: Cell) -> None:
        here, there = (cell.drive(**self.limits) for _ in range(2))
        want = self.asked.add(cell.subject, here)
        assert moved(here, there, want, steps=8) == want


class Streamed(Path):
    """Layers of adapters come while steps run, and a row that misses one runs again; later they are loaded anew."""

    def drive(self, cell: Cell) -> Driver:
        return cell.drive(reads=ThreadReads(2), max_load_stall_seconds=0.001, clock=None, **self.limits)

    def ask(self, cell: Cell, driver: Driver) -> None:
        super().ask(cell, driver)
        driver.engine.reclaimer.reclaim_all()
        assert not any(adapter.pages for adapter in driver.engine.store.versions())
        cell.check(driver, self.asked, "again ")

    def verify(self, cell: Cell, driver: Driver) -> None:
        assert driver.engine.stats().num_adapter_loads >= 2 * len({name for name in cell.subject.adapters if name})


class Bits(Path):
    """Log-probabilities have the same bits whatever is beside a sequence: on the native decoder, whatever shares its
    steps and however its prompt is cut; by PyTorch's operators those of the base model, whichever adapters others use.
    """

    own_needs = ("bits",)

    def runs(self, subject: Subject, kernels: str) -> bool:
        return super().runs(subject, kernels) and (kernels == "native" or TORCH_BITS not in subject.untold)

    def serve(self, cell: Cell) -> None:
        adapters = cell.subject.adapters
        others = [name for name in adapters if name]
        if cell.why_not_native(cell.subject.config, self.limits) is None:
            whole, cut = self._open(cell, 64), self._open(cell, 7)
            for name in (None, cell.subject.merged):
                alone = self._scores(whole, name, [])
                assert alone == self._scores(whole, name, [*adapters]), "beside others"
                assert alone == self._scores(cut, name, []), "in chunks"
        else:
            driver, count = self._open(cell, 48), max(5, len(others))
            plain = self._scores(driver, None, [None] * count)
            beside = [None] * count if TORCH_BITS in cell.subject.untold else others * count
            assert plain == self._scores(driver, None, beside[:count])

    def _open(self, cell: Cell, chunk: int) -> Driver:
        limits = {"prefix_cache": False, "state_checkpoint_tokens": 0, "max_num_batched_tokens": chunk}
        return cell.drive(**{**limits, **self.limits, "max_num_seqs": min(8, chunk)})

    def _scores(self, driver: Driver, name: str | None, others: list[str | None]) -> list[TokenLogprobs]:
        rng, turn = random.Random(0), f"{len(driver.answers)}."
        driver.add(f"{turn}it", name, [rng.randrange(3, 150) for _ in range(30)], max_tokens=6, logprobs=4)
        for index, other in enumerate(others):
            prompt = [rng.randrange(3, 150) for _ in range(rng.randint(5, 40))]
            driver.add(f"{turn}{index}", other, prompt, max_tokens=6)
        answer = driver.drain()[f"{turn}it"]
        assert len(answer.logprobs) == 6, answer.error
        return answer.logprobs


class Rounded(Path):
    """Logits in bfloat16 are those in float32 by PyTorch's operators, within the row's bound."""

    own_needs = ("bfloat16",)

    def runs(self, subject: Subject, kernels: str) -> bool:
        return bool(subject.family) and super().runs(subject, kernels)

    def serve(self, cell: Cell) -> None:
        family, generator = cell.subject.family, torch.Generator().manual_seed(0)
        changes = {"initializer_range": 0.1, **cell.subject.changes}
        model = kept_files(f"bfloat16 {family}", partial(save_family, family, dtype=torch.bfloat16, **changes))
        prompts = [torch.randint(3, 150, (length,), generator=generator).tolist() for length in (5, 17, 40, 90)]
        want = _logits(model, prompts, dtype="float32", cpu_kernels="torch")
        config = read_model_config(model)
        kernels = cell.cpu_kernels(cell.why_not_native(config, {"dtype": "bfloat16"}))
        found = _logits(model, prompts, dtype="auto", cpu_kernels=kernels)
        bound = torch.tensor(_bound(config))
        if (own := _errors(_transformers(model, prompts), want)).max() > bound:
            bound = (1.5 * own).clamp(min=bound)  # where transformers' own are far, as they are with some weights
        # a router's near tie may go the other way
        assert int((_errors(found, want) >= bound).sum()) <= (1 if config.num_experts else 0)


def _bound(config: ModelConfig) -> float:
    """Relative L2 error of bfloat16 logits that is taken for rounding."""
    if config.num_experts:
        return 8e-2
    return 3e-2 if config.recurrent is None and len(config.attention_shapes) == 1 else 5e-2


def _errors(found: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    return (found - want).norm(dim=-1) / want.norm(dim=-1)


def _logits(model: Any, prompts: list[list[int]], **config: Any) -> torch.Tensor:
    """Logits `[prompts, vocab]` after prompts, all in one step."""
    settings = EngineConfig(model=model, memory_bytes=4 << 20, threads=1, state_checkpoint_tokens=0, **config)
    executor = CpuExecutor(settings)
    assert executor.layout.itemsize == (4 if config["dtype"] == "float32" else 2), "dtype auto is the checkpoint's"
    seen: list[torch.Tensor] = []
    forward = executor.decoder.forward
    executor.decoder.forward = lambda batch: seen.append(forward(batch).clone()) or seen[-1]
    engine = Engine(settings, executor)
    for index, prompt in enumerate(prompts):
        engine.add_request(Request(str(index), prompt, RequestParams(1, temperature=0, logprobs=0)))
    engine.step()
    engine.close()
    return seen[0].float()


def _transformers(model: Any, prompts: list[list[int]]) -> torch.Tensor:
    """Transformers' own logits after prompts, in the checkpoint's dtype."""
    reference = load_model(model, dtype="auto")
    with torch.inference_mode():
        return torch.stack([reference(torch.tensor([prompt])).logits[0, -1].float() for prompt in prompts])


def drawn(answer: Any) -> Drawn:
    """Proposals at random, the same ones whichever cells ran before."""
    return Drawn(answer, random.Random(0))


TWO = {"tensor_parallel_size": 2}

PATHS: dict[str, Path] = {
    path.name: path
    for path in (
        Mixed("mixed steps"),
        Path("whole prompts", {"max_num_batched_tokens": 2048, "chunked_prefill": False}),
        Path("chunks of 1", {"max_num_seqs": 1, "max_num_batched_tokens": 1}),
        Path("chunks of 7", {"max_num_seqs": 4, "max_num_batched_tokens": 7}),
        Path("chunks of 64", {"max_num_seqs": 4, "max_num_batched_tokens": 64}),
        Twice("cached", {"max_num_batched_tokens": 40, "state_checkpoint_tokens": 32}),
        LongPrompts("long prompts", {"max_num_seqs": 4, "max_num_batched_tokens": 48}, LONG),
        Preempted("swapped", {"preemption": "swap"}, CROWD),
        Preempted("recomputed", {"preemption": "recompute"}, CROWD),
        Preempted("swapped on two ranks", {"preemption": "swap", **TWO}, CROWD),
        Streamed("streamed adapters"),
        Streamed("streamed adapters on two ranks", TWO),
        Moved("moved", {"max_num_batched_tokens": 12}),
        Path("merged", merges=True),
        Path("two ranks", TWO),
        Path("merged on two ranks", TWO, merges=True),
        Async("async steps", {"is_async": True, "max_num_seqs": 4, "max_num_batched_tokens": 40}, ANSWERS),
        Async("async steps, merged", {"is_async": True}, merges=True),
        Async("async steps on two ranks", {"is_async": True, **TWO}, ANSWERS),
        Drafts("right drafts", {"max_num_seqs": 4, "max_num_batched_tokens": 40}, ANSWERS),
        Drafts("wrong drafts", {"max_num_seqs": 4, "max_num_batched_tokens": 40}, ANSWERS, proposer=Wrong),
        Drafts("drawn drafts, merged", {"max_num_seqs": 4}, ANSWERS, merges=True, proposer=drawn),
        Drafts("drawn drafts on two ranks", {"max_num_seqs": 4, **TWO}, ANSWERS, proposer=drawn),
        Bits("bits"),
        Bits("bits in bfloat16", {"dtype": "bfloat16"}),
        Bits("bits on two ranks", TWO),
        Rounded("bfloat16"),
    )
}
