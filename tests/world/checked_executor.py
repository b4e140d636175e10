"""An executor without tensors that remembers what every place of the arena holds and checks each step against it."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from chorus.core.config import EngineConfig
from chorus.core.executors.base import ModelInfo
from chorus.core.requests.types import BASE_SLOT, CannotMerge, ScheduledRow, StepPlan, StepResult, TokenLogprobs
from chorus.memory.adapters.adapter import Adapter
from chorus.memory.files.format import AdapterFormatError, AdapterManifest
from chorus.memory.host.image import HostImage, LayerStream
from chorus.memory.pages.adapter_layout import AdapterLayout, AdapterPart
from chorus.memory.pages.layout import MODULES, PageLayout
from chorus.memory.pages.pool import PageKind, PagePool

from .asked import Violation, promise
from .checked_swaps import CheckedSwaps
from .virtual_reads import VirtualReads, World

VOCAB = 48
EOS = (0, 1)
MAX_MODEL_LEN = 40
BASE_CONTENT = 0


def next_token(content: int, tokens: Sequence[int], seed: int | None) -> int:
    """The made-up model: what follows `tokens` with the adapter content; `seed` only when it samples."""
    return zlib.crc32(repr((content, list(tokens), seed)).encode()) % VOCAB


def kv_of(content: int, tokens: Sequence[int]) -> list[int]:
    """The KV of `tokens`, position by position: it depends on the adapter's content and on every token so far."""
    return list(itertools.accumulate(tokens, lambda before, token: hash((before, token)), initial=hash(content)))[1:]


@dataclass
class Fate:
    """Course of a directory's next read: seconds for all of it, and what becomes of it."""

    seconds: float
    outcome: str  # good, fails, short, stuck
    hangs_at: int = 0  # layer, if it is stuck


class Disk:
    """Adapter directories: which content lies in each, how large it is, and how reads go."""

    def __init__(self, rng: random.Random, speed: float, patience: float) -> None:
        """patience: seconds without anything after which the engine may give up a read."""
        self._rng = rng
        self._patience = patience
        self._speed = speed
        self._contents = itertools.count(1)
        self.content: dict[Path, int] = {}
        self.pages: dict[int, int] = {}
        self.layers: dict[int, int] = {}
        self.broken: set[Path] = set()
        self.unlucky: set[int] = set()
        """Contents of which a read failed, hung, or met another content."""
        self.has_hung = False
        self.trouble = rng.choice([0.0, 0.0, 0.1, 0.3])

    def write(self, path: Path, pages: int) -> int:
        """Put a new content into a directory, even while a read of the old one is pending."""
        content = self.content[path] = next(self._contents)
        self.pages[content], self.layers[content] = pages, self._rng.randint(1, 4)
        return content

    def fate(self, path: Path, content: int) -> Fate:
        """Course of a read of `content`, which the directory held when it was registered."""
        fate = Fate(self._speed * 10 ** self._rng.uniform(-1, 1.5), "good")
        if path in self.broken:
            fate.outcome = "fails"
        elif self._rng.random() < self.trouble:
            fate.outcome, fate.hangs_at = self._rng.choice(["fails", "short", "stuck"]), self._rng.randrange(4)
        hangs = fate.outcome == "stuck" or fate.seconds / self.layers[content] > self._patience
        self.has_hung |= hangs
        if hangs or fate.outcome != "good":
            self.unlucky.add(content)
        return fate


class CheckedAdapters:
    """The adapter backend: reads take virtual time, layers come one by one, copies write to the checked memory."""

    def __init__(self, disk: Disk, reads: VirtualReads, world: World, memory: dict, rng: random.Random) -> None:
        self._disk = disk
        self._reads = reads
        self._world = world
        self._memory = memory
        self._rng = rng

    def inspect(self, path: Path) -> AdapterManifest:
        if path not in self._disk.content:
            raise AdapterFormatError(f"{path}: no such directory")
        content = self._disk.content[path]
        part = AdapterPart(self._disk.pages[content], 1.0, (0,), MODULES)
        return AdapterManifest(path, (part,), mtime_ns=content, content_hash=str(content))

    def layout(self, manifest: AdapterManifest) -> AdapterLayout:
        pages = manifest.rank
        return AdapterLayout((), num_elems=pages, num_pages=pages, num_layers=self._disk.layers[manifest.mtime_ns])

    def read(self, manifest: AdapterManifest, layout: AdapterLayout, image: HostImage) -> None:
        disk, path, content = self._disk, manifest.path, manifest.mtime_ns
        fate = disk.fate(path, content)
        for layer in range(layout.num_layers):
            self._reads.pause(fate.seconds / layout.num_layers)
            if fate.outcome == "stuck" and layer == fate.hangs_at % layout.num_layers:
                self._reads.pause(float("inf"))
            if fate.outcome in ("fails", "short") and layer == layout.num_layers // 2:
                kind = OSError(5, "Input/output error") if fate.outcome == "fails" else AdapterFormatError("cut short")
                raise kind
            if disk.content.get(path) != content:
                disk.unlucky.add(content)
                raise AdapterFormatError(f"{path}: it changed on disk")
            image.data = content
            image.publish(layer + 1)

    def save(self, layout: AdapterLayout, pages: list[int]) -> HostImage:
        held = [self._memory[page, -1] for page in pages]
        content = held[0][0]
        promise(held == [(content, index, layout.num_layers) for index in range(len(pages))], "not whole, yet saved")
        image = HostImage()
        image.data = content
        image.publish(layout.num_layers)
        return image

    def place(self, image: HostImage, layout: AdapterLayout, pages: list[int]) -> CheckedTransfer | None:
        transfer = CheckedTransfer(image, layout, pages, self._memory, self._world, self._rng)
        return None if transfer.is_done() else transfer


class CheckedTransfer:
    """Layers on their way into pages. After `cancel` a copy may still be writing, until `is_quiet`."""

    def __init__(
        self, image: HostImage, layout: AdapterLayout, pages: list[int], memory: dict, world: World, rng: random.Random
    ) -> None:
        self._image = image
        self._num_layers = layout.num_layers
        self._pages = pages
        self._memory = memory
        self._world = world
        self._rng = rng
        self._copied = 0
        self._cancelled = False
        self._quiet = True
        image.follow(self._advance)
        self._advance()

    def _advance(self) -> None:
        ready = self._image.stream.num_ready
        if self._cancelled or ready == LayerStream.FAILED or ready <= self._copied:
            return
        self._copied = ready
        for index, page in enumerate(self._pages):
            self._memory[page, -1] = (self._image.data, index, ready)
        if self.is_done():
            self._image.unfollow(self._advance)

    def wait_layer(self, layer: int, timeout: float) -> bool:
        end = self._world.now + timeout
        while self._copied <= layer and not self.has_failed() and self._world.next_time <= end:
            self._world.next_event()
        return self._copied > layer

    def is_done(self) -> bool:
        return self._copied == self._num_layers

    def has_failed(self) -> bool:
        return self._image.stream.num_ready == LayerStream.FAILED

    def cancel(self) -> None:
        self._cancelled = True
        if self._rng.random() < 0.5:
            self._quiet = False
            self._world.after(self._rng.uniform(0, 0.02), self._end)

    def _end(self) -> None:
        for page in self._pages:
            for key in [key for key in self._memory if key[0] == page]:
                self._memory[key] = "a late copy"
        self._quiet = True

    def is_quiet(self) -> bool:
        return self._quiet


class CheckedShadow:
    """Shadow weights of as many matrices as an adapter has pages, at most three; a call makes one. Some adapters weigh
    too much.
    """

    def __init__(self, memory: dict, world: World) -> None:
        self.adapter: Adapter | None = None
        self.runs: list[range] = []
        self._last: list[range] = []
        self._made = 0
        self._memory = memory
        self._world = world

    def sizes(self, adapter: Adapter) -> list[int]:
        return [1, 2, 3][: adapter.num_pages]

    def wished_runs(self, adapter: Adapter) -> list[range] | None:
        """The last ones, as of steps that were captured with them."""
        return self._last if [len(run) for run in self._last] == self.sizes(adapter) else None

    def begin(self, adapter: Adapter, runs: list[range]) -> None:
        promise(bool(adapter.pages) and adapter.transfer is None, f"{adapter} is merged before it is there")
        promise([len(run) for run in runs] == self.sizes(adapter), "the shadow has too many pages, or too few")
        self.adapter, self.runs, self._last, self._made = adapter, runs, runs, 0

    def advance(self, max_seconds: float) -> bool:
        self._world.advance(0.0003)
        adapter = self.adapter
        if adapter is None or not adapter.pages:
            raise Violation(f"{adapter} was evicted while it is merged")
        if adapter.manifest.mtime_ns % 7 == 0:
            raise CannotMerge("it outweighs the weights")
        for page in self.runs[self._made]:
            self._memory[page, -1] = ("shadow", adapter.manifest.mtime_ns)
        self._made += 1
        return self._made == len(self.runs)

    @property
    def share_made(self) -> float:
        return self._made / len(self.runs) if self.runs else 0.0

    def drop(self) -> None:
        self.adapter, self.runs, self._made = None, [], 0

    def check(self, merged: Adapter, pool: PagePool) -> None:
        """Raise Violation unless the whole of an adapter's shadow is in the arena."""
        promise(merged is self.adapter and self._made == len(self.runs), "a step with a shadow that is not whole")
        want = ("shadow", merged.manifest.mtime_ns)
        for page in itertools.chain.from_iterable(self.runs):
            if pool.kind(page) is not PageKind.SHADOW or self._memory.get((page, -1)) != want:
                raise Violation(f"page {page} of the shadow of {merged} is of another kind, or was overwritten")


class CheckedExecutor:
    """Executes plans on the memory of contents; raises Violation, kept in `violations`, where a plan is wrong.

    shadow, swaps: None where it has no merged mode, or KV is only computed again.
    """

    def __init__(
        self,
        config: EngineConfig,
        adapters: CheckedAdapters,
        world: World,
        memory: dict,
        shadow: CheckedShadow | None = None,
        swaps: CheckedSwaps | None = None,
    ) -> None:
        assert config.num_pages is not None
        self.config = config
        self.model = ModelInfo(VOCAB, MAX_MODEL_LEN, EOS)
        self.layout = PageLayout(1, 1, 8, config.block_tokens, 4)
        self.num_pages = config.num_pages
        self.shadow, self.swaps = shadow, swaps
        self.start = None
        self.adapters = adapters
        self.violations: list[Violation] = []
        self.raises_for: set[str] = set()
        self.sick: set[str] = set()
        self.glitches = 0
        self.pool: PagePool
        self.contents: dict[str, int] = {}
        """Content that each request must be computed with."""
        self._world = world
        self._memory = memory

    def execute(self, plan: StepPlan) -> StepResult:
        self._world.advance(0.0005 + 0.0005 * plan.num_tokens)
        if self.glitches:
            self.glitches -= 1
            raise RuntimeError("a passing fault")
        try:
            self._check(plan)
            return self._run(plan)
        except Violation as error:
            self.violations.append(error)
            raise

    def close(self) -> None:
        """Nothing is held."""

    def _check(self, plan: StepPlan) -> None:
        rows, block, pool = plan.rows, self.config.block_tokens, self.pool
        promise(0 < len(rows) <= self.config.max_num_seqs, "rows beyond max_num_seqs")
        promise(plan.num_tokens <= self.config.max_num_batched_tokens, "tokens beyond the step's budget")
        promise(len({row.request_id for row in rows}) == len(rows), "a request has two rows")
        most = self.config.max_adapters_per_step
        promise(most is None or plan.num_adapters <= most, "too many adapters in a step")
        owner: dict[int, str] = {PagePool.DUMMY: "padding"}
        for adapter in plan.adapters:
            if not adapter.references or len(adapter.pages) != adapter.num_pages:
                raise Violation(f"{adapter} is not resident")
            for page in adapter.pages:
                if pool.kind(page) is not PageKind.ADAPTER or owner.setdefault(page, adapter.name) != adapter.name:
                    raise Violation(f"page {page} of {adapter} is of another kind, or another's")
        if plan.merged is not None:
            promise(self.shadow is not None, "a merged step without a shadow")
            self.shadow.check(plan.merged, pool)
        for row in rows:
            promise(bool(row.tokens) and row.kv_len <= len(row.pages) * block, "pages don't cover the tokens")
            first = row.start // block  # the first page written
            for index, page in enumerate(row.pages):
                if page in owner or pool.kind(page) is not PageKind.KV:
                    raise Violation(f"page {page} of {row.request_id} is of another kind, or another's")
                if index >= first:
                    if pool.references(page) != 1:
                        raise Violation(f"{row.request_id} writes a shared page")
                    owner[page] = row.request_id

    def _run(self, plan: StepPlan) -> StepResult:
        result = StepResult()
        late = self._late(plan)
        for row in plan.rows:
            if row.request_id in self.raises_for:
                raise RuntimeError(f"a fault of {row.request_id}")
            content = BASE_CONTENT if row.slot == BASE_SLOT else plan.adapters[row.slot].manifest.mtime_ns
            if content != self.contents[row.request_id]:
                raise Violation(f"{row.request_id} runs with another adapter's content")
            places = [(row.pages[at // self.config.block_tokens], at % self.config.block_tokens)
                      for at in range(row.kv_len)]  # fmt: skip
            if row.slot in late:
                for place in places[row.start :]:
                    self._memory[place] = "void"
                result.retract(row.request_id)
                continue
            want = kv_of(content, row.token_ids[: row.kv_len])
            for position in range(row.start, row.kv_len):
                self._memory[places[position]] = want[position]
            if [self._memory.get(place) for place in places] != want:
                raise Violation(f"KV of {row.request_id} is not its own")
            self._answer(row, content, result)
        return result

    def _late(self, plan: StepPlan) -> set[int]:
        """Slots of adapters that don't load within `max_load_stall_seconds`; the other adapters' bytes are checked."""
        late = set()
        for slot, adapter in enumerate(plan.adapters):
            transfer = adapter.transfer
            if transfer is not None and not transfer.wait_layer(
                adapter.layout.num_layers - 1, self.config.max_load_stall_seconds
            ):
                late.add(slot)
                continue
            want = [(adapter.manifest.mtime_ns, i, adapter.layout.num_layers) for i in range(adapter.num_pages)]
            if [self._memory.get((page, -1)) for page in adapter.pages] != want:
                raise Violation(f"{adapter} was overwritten")
        return late

    def _answer(self, row: ScheduledRow, content: int, result: StepResult) -> None:
        if row.scores_prompt:
            positions = range(row.start + 1, min(row.kv_len + 1, row.num_prompt_tokens))
            scores = [TokenLogprobs(row.token_ids[position], -float(position)) for position in positions]
            result.prompt_logprobs[row.request_id] = scores
        if not row.samples:
            return
        if row.request_id in self.sick:
            result.errors[row.request_id] = "not finite"
            return
        seed = row.seed if row.params.temperature else None
        token = result.tokens[row.request_id] = next_token(content, row.token_ids, seed)
        if row.params.logprobs is not None:
            result.logprobs[row.request_id] = TokenLogprobs(token, -1.0)
