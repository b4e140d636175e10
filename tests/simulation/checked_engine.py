"""An engine over an executor that checks every plan, in time that goes by only with steps: for tests of one policy."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.policies import Policies
from chorus.core.requests.blocks import Blocks
from chorus.core.requests.media import MediaItem
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.core.requests.types import RequestOutput
from chorus.memory.host.images import Reads
from chorus.perf.inline_reads import InlineReads

from .asked import Asked
from .checked_adapters import CheckedAdapters, Disk
from .checked_blocks import CheckedBlocks
from .checked_executor import CheckedExecutor
from .checked_shadow import CheckedShadow
from .checked_swaps import CheckedSwaps
from .late_results import LateResults
from .made_up_images import EncodesAtOnce
from .made_up_model import answer_alone, empty_memory
from .virtual_reads import VirtualClock


class CheckedEngine:
    """adapters: names, of two pages each. is_async: steps are launched ahead. swap_seconds: typical, of a copy of KV.
    state_pages: of a recurrent state, if the model has layers with one. windows: of its other layers. image_blocks: the
    positions that see each other, if it takes images. config: options that differ from a small
    engine's.
    """

    def __init__(
        self,
        reads: Reads | None = None,
        adapters: Iterable[str] = (),
        policies: Policies | None = None,
        *,
        is_async: bool = False,
        swap_seconds: float = 0.0,
        state_pages: int = 0,
        windows: tuple[int | None, ...] = (None,),
        image_blocks: Blocks | None = None,
        **config: Any,
    ) -> None:
        defaults = {
            "num_pages": 200,
            "block_tokens": 4,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "prefix_cache": False,
        }
        self.config = EngineConfig(model=Path("made-up"), **{**defaults, **config})
        self.clock, self.asked, self.plans = VirtualClock(), dict[str, Asked](), list[list[tuple[str, int]]]()
        assert self.config.num_pages is not None
        memory = empty_memory(self.config.num_pages, self.config.block_tokens)
        rng, reached = random.Random(0), Counter[str]()
        self.disk = Disk(rng)
        backend = CheckedAdapters(self.disk, lambda seconds: None, self.clock, memory, rng, reached)
        swaps = CheckedSwaps(memory, self.clock, rng, reached, swap_seconds)
        shadow = CheckedShadow(memory, self.clock)
        layers = windows, state_pages, image_blocks
        self.executor = CheckedExecutor(
            self.config, backend, self.clock, memory, self.asked, reached, shadow, swaps, *layers
        )
        executor: Any = LateResults(self.executor) if is_async else self.executor
        encoder = EncodesAtOnce()
        make_encoder: Any = None if image_blocks is None else lambda wake, budget: encoder
        self.engine = Engine(self.config, executor, self.clock, reads or InlineReads(), policies, make_encoder)
        encoder.engine = self.engine
        self.blocks = CheckedBlocks(self.engine, self.executor, reached)
        self.executor.pool, self.executor.prefix = self.engine.pool, self.engine.prefix
        self.executor.on_plan = lambda plan: self.plans.append(
            [(row.request_id, len(row.tokens)) for row in plan.sequences]
        )
        for name in adapters:
            self.load(name)

    def load(self, name: str) -> None:
        """Have an adapter a new version, in the directory of the one before."""
        self.disk.write(Path(name), 2, 2)
        self.engine.store.register(name, Path(name))

    def add(
        self,
        name: str,
        adapter: str | None = None,
        prompt: Iterable[int] = (3, 4, 5),
        max_tokens: int = 3,
        tenant: str = "",
        media: tuple[MediaItem, ...] = (),
        choice_group: str = "",
        **params: Any,
    ) -> Request:
        wanted = RequestParams(max_tokens, temperature=0, ignore_eos=True, **params)
        request = Request(name, list(prompt), wanted, adapter, tenant=tenant, media=media, choice_group=choice_group)
        self.engine.add_request(request)
        self.asked[name] = Asked(request, request.adapter, list(prompt), (tenant, ""))
        return request

    def step(self) -> list[RequestOutput]:
        outputs = self.engine.step()
        assert not self.executor.violations, self.executor.violations
        self.engine.check_integrity()
        self.blocks.check()
        for output in outputs:
            self.asked[output.request_id].told.add(output)
        return outputs

    def first_layer(self, name: str) -> None:
        """Have a read under way bring one layer."""
        self.engine.store.images.peek(self.engine.store.get(name)).publish(1)

    def drain(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.engine.has_work():
                break
            if not self.step():
                self.clock.advance(0.001)  # a copy may be under way
        assert not self.engine.has_work()
        for asked in self.asked.values():
            if asked.told.reason is not None:
                asked.check_end(answer_alone(asked))

    @property
    def computed(self) -> int:
        return sum(count for plan in self.plans for _, count in plan)
