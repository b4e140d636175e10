"""Measuring a cost model: made-up steps on a real executor, timed and fitted.

Every step is run once per round, in another order each round, so that a machine that is slow for a while is so for any
steps. A step's median over rounds counts. Means are to be predicted, hence all are scaled by how far means are above
medians. How far medians are above the least times is reported as noise.
"""

from __future__ import annotations

import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import mean, median, median_low

from ...graphs.runner import DecodeBuckets
from ...memory.adapters.adapter import Adapter
from ...memory.files.form import WEIGHTS_FILE
from ...memory.host.image import HostImage
from ...memory.host.images import ThreadReads
from ...memory.pages.pool import PageKind, PagePool
from ..executors.base import Executor
from ..expert_share import share_of_experts
from ..requests.request_params import RequestParams
from ..requests.types import BASE_LORA_INDEX, ScheduledSequence, StepPlan
from .fit import Fit, fit
from .models import Kernel, StepCost, StepWork
from .work import STEP_TERMS, step_work, term_values

_PARAMS = RequestParams(temperature=0.0)
_KV_SHARE = 0.8  # of the pages that adapters leave, how many a step's rows may hold
_BASE_SHARE = 0.15  # of rows, how many use no adapter
_SPIKE = 1.5
_AGREED = 1.08  # the median of a step's rounds and the least of them, at most
_ALONE_STEPS = 3  # before each read
_MOST_CONTENTION = 0.9
_KNEE_GAIN = 1e-3  # of the mean error, below which a knee explains nothing


#: Seconds since any moment, such as `time.perf_counter`; `time.thread_time` counts the processor's only.
Clock = Callable[[], float]


class MeasureError(ValueError):
    """The input can't be measured; the text names the need."""


@dataclass(frozen=True, slots=True)
class Transfers:
    """Bytes and typical seconds of each adapter's way.

    contention: share of the reads' time by which concurrent steps took longer. uncached: the files were read from
    the disk itself.
    """

    num_bytes: list[int]
    read: list[float]
    place: list[float]
    contention: float
    uncached: bool


@dataclass(frozen=True, slots=True)
class Samples:
    """Steps with the typical seconds of each. noise: the median over steps of median / least - 1."""

    work: list[StepWork]
    seconds: list[float]
    noise: float

    def __add__(self, other: Samples) -> Samples:
        return Samples(self.work + other.work, self.seconds + other.seconds, max(self.noise, other.noise))


class StepProfiler:
    """Runs steps on an executor that it uses exclusively; it fills the arena as it likes."""

    def __init__(
        self,
        executor: Executor,
        adapters: Sequence[Path],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        seed: int = 0,
        clock: Clock = time.perf_counter,
    ) -> None:
        """adapters: directories, of as many ranks as may be. clock: of steps. Raises AdapterFormatError, and
        MeasureError for none.
        """
        if not adapters:
            raise MeasureError("there are no adapters to measure with; name a directory of some, of several ranks")
        self._executor = executor
        self._max_num_seqs = max_num_seqs
        self._max_tokens = max_num_batched_tokens
        self._random = random.Random(seed)
        self._clock = clock
        self._buckets = DecodeBuckets(max_num_seqs)
        self._pool = PagePool(executor.num_pages)
        self.adapters = [self._adapter(path, version) for version, path in enumerate(adapters, 1)]
        room = self._pool.num_free - sum(adapter.num_pages for adapter in self.adapters)
        if room < 2 * max_num_seqs:
            raise MeasureError(
                f"the adapters leave {max(0, room)} pages of {self._pool.num_usable} for KV; raise memory_bytes"
            )
        self._steps = 0
        self._images: deque[tuple[HostImage, int]] = deque()  # kept, with their bytes

    # -- adapters

    def place_adapters(self) -> None:
        """Bring every adapter into the arena, where it stays; their images are kept."""
        backend, page_bytes = self._executor.adapters, self._executor.layout.page_bytes
        for adapter in self.adapters:
            adapter.pages = self._pool.allocate(adapter.num_pages, PageKind.ADAPTER)
            backend.read(adapter.manifest, adapter.layout, image := HostImage())
            self._place(adapter, image)
            self._images.append((image, adapter.num_pages * page_bytes))

    def measure_transfers(self, rounds: int, host_bytes: int = 1 << 30) -> Transfers:
        """Read every adapter during decode steps, as a server does, and place it again, `rounds` times.

        host_bytes: of images that are kept, as in a server's host memory: until there are so many every read is into
        fresh memory, which takes the system several times as long. To be done last: memory that was freed a moment
        ago is fast to get, in a virtual machine all the more.
        """
        sizes = [adapter.num_pages * self._executor.layout.page_bytes for adapter in self.adapters]
        count = min(4, self._max_num_seqs)
        decode = self._plan([(1, [BASE_LORA_INDEX] * count)], count)
        read: list[list[float]] = [[] for _ in self.adapters]
        place: list[list[float]] = [[] for _ in self.adapters]
        lost = 0.0
        uncached = True
        reads = ThreadReads(1)
        try:
            for _ in range(rounds):
                for index, (adapter, size) in enumerate(zip(self.adapters, sizes, strict=True)):
                    uncached &= forget_file(adapter.manifest.path / WEIGHTS_FILE)
                    while self._images and sum(num_bytes for _, num_bytes in self._images) + size > host_bytes:
                        self._images.popleft()
                    self._images.append((image := HostImage(), size))
                    seconds, longer = self._read(reads, adapter, image, decode)
                    read[index].append(seconds)
                    lost += longer
                    place[index].append(self._place(adapter, image))
        finally:
            reads.shutdown()
        contention = min(_MOST_CONTENTION, max(0.0, lost / sum(map(sum, read))))
        return Transfers(sizes, list(map(typical, read)), list(map(typical, place)), contention, uncached)

    def _place(self, adapter: Adapter, image: HostImage) -> float:
        """Seconds to write an image that has been read into the adapter's pages."""
        began = time.perf_counter()
        transfer = self._executor.adapters.load(image, adapter.layout, adapter.pages)
        while transfer is not None and not transfer.is_done():
            time.sleep(0)
        return time.perf_counter() - began

    def _read(self, reads: ThreadReads, adapter: Adapter, image: HostImage, decode: StepPlan) -> tuple[float, float]:
        """Seconds to read an adapter on a thread while this one runs steps, and by how much that prolongs the steps."""

        def read() -> float:
            began = time.perf_counter()
            self._executor.adapters.read(adapter.manifest, adapter.layout, image)
            return time.perf_counter() - began

        alone = median(self._run(decode) for _ in range(_ALONE_STEPS))
        reading = reads.submit(read)
        longer = 0.0
        while not reading.done():
            longer += self._run(decode) - alone
        return reading.result(), longer

    def _run(self, plan: StepPlan, clock: Clock = time.perf_counter) -> float:
        """Seconds of a step."""
        began = clock()
        self._executor.execute(plan)
        return clock() - began

    def _adapter(self, path: Path, version: int) -> Adapter:
        backend = self._executor.adapters
        manifest = backend.inspect(path)
        return Adapter(path.name, version, manifest, backend.layout(manifest))

    # -- steps

    def decode_plans(self, count: int) -> list[StepPlan]:
        """Decode batches of every size, of few and of many adapters, over short and long KV."""
        sizes = [1 + index % self._max_num_seqs for index in range(count)]
        return [self._plan([(1, self._lora_indices(size))], size) for size in sizes]

    def prefill_plans(self, count: int) -> list[StepPlan]:
        """One to four prompts or chunks of them, some together with decoding requests; more prompts where the model's
        length is short of the step's tokens.
        """
        limit = self._executor.model.max_model_len
        plans = []
        for _ in range(count):
            prompts = min(self._random.choice([1, 1, 2, 4]), self._max_num_seqs)
            decodes = self._random.choice([0, 0, self._random.randrange(self._max_num_seqs)])
            decodes = min(decodes, self._max_num_seqs - prompts)
            tokens = int((self._max_tokens - decodes) * self._random.random() ** 2)
            prompts = min(max(prompts, -(-tokens // limit)), self._max_num_seqs - decodes)
            length = min(max(2, tokens // prompts), limit)
            groups = [(length, self._lora_indices(prompts))]
            if decodes > 0:
                groups.append((1, self._lora_indices(decodes)))
            plans.append(self._plan(groups, None))
        return plans

    def measure(
        self, plans: Sequence[StepPlan], kernel: Kernel, rounds: int, progress: Callable[[], None] = lambda: None
    ) -> Samples:
        """Typical seconds of each plan over `rounds`; adapters must have been placed. progress: called per step.

        Plans with disagreeing rounds are run up to `rounds` more times.
        """
        every: list[list[float]] = [[] for _ in plans]
        order = list(range(len(plans)))
        for _ in range(rounds):
            self._random.shuffle(order)
            for index in order:
                every[index].append(self._run(plans[index], self._clock))
                progress()
        for _ in range(rounds):
            order = [index for index in order if median_low(every[index]) > _AGREED * min(every[index])]
            self._random.shuffle(order)
            for index in order:
                every[index].append(self._run(plans[index], self._clock))
        noise = median(median(times) / min(times) - 1 for times in every)
        return Samples([step_work(plan, kernel) for plan in plans], steady(every), noise)

    def _lora_indices(self, count: int) -> list[int]:
        """Adapter of each of `count` rows: a few adapters or many, and some rows of the base model."""
        choices = self._random.sample(range(len(self.adapters)), self._random.randint(1, len(self.adapters)))
        if self._random.random() < _BASE_SHARE:
            return [BASE_LORA_INDEX] * count
        return [
            BASE_LORA_INDEX if self._random.random() < _BASE_SHARE else self._random.choice(choices)
            for _ in range(count)
        ]

    def _plan(self, groups: list[tuple[int, list[int]]], size: int | None) -> StepPlan:
        """groups: (tokens of each row, adapter of each row). size: rows of a decode batch, None with prefill."""
        used = sorted({lora_index for _, lora_indices in groups for lora_index in lora_indices} - {BASE_LORA_INDEX})
        number = {lora_index: index for index, lora_index in enumerate(used)} | {BASE_LORA_INDEX: BASE_LORA_INDEX}
        pages = self._page_lists([count for count, lora_indices in groups for _ in lora_indices])
        rows = []
        for count, lora_indices in groups:
            for lora_index in sorted(number[lora_index] for lora_index in lora_indices):
                tokens = [self._random.randrange(self._executor.model.vocab_size) for _ in range(count)]
                table, start = next(pages)
                rows.append(
                    ScheduledSequence(
                        request_id=f"row{len(rows)}",
                        lora_index=lora_index,
                        tokens=tokens,
                        start=start,
                        pages=table,
                        params=_PARAMS,
                        seed=0,
                        samples=True,
                        token_ids=tokens,
                        num_prompt_tokens=start + count,
                    )
                )
        self._steps += 1
        bucket = None if size is None else self._buckets.pick(size)
        return StepPlan(self._steps, rows, [self.adapters[lora_index] for lora_index in used], bucket)

    def _page_lists(self, counts: list[int]) -> Iterator[tuple[list[int], int]]:
        """Pages of each row, its own, and how many tokens it has already, for rows of so many new tokens."""
        block = self._executor.layout.block_tokens
        limit = self._executor.model.max_model_len
        adapter_pages = sum(adapter.num_pages for adapter in self.adapters)
        free = range(1 + adapter_pages, self._executor.num_pages)
        most = int(len(free) * _KV_SHARE / len(counts)) * block
        fill = self._random.random()
        starts = [int(max(0, min(most, limit) - count) * fill * self._random.random()) for count in counts]
        needed = [-(-(start + count) // block) for start, count in zip(starts, counts, strict=True)]
        if sum(needed) > len(free):
            raise MeasureError("a step of max_num_batched_tokens does not fit the page pool; raise memory_bytes")
        pages = iter(self._random.sample(free, sum(needed)))
        return ((list(islice(pages, number)), start) for number, start in zip(needed, starts, strict=True))


def typical(times: Sequence[float]) -> float:
    """The mean, with samples capped at _SPIKE times the median."""
    most = _SPIKE * median_low(times)
    return mean(min(seconds, most) for seconds in times)


def steady(every: Sequence[Sequence[float]]) -> list[float]:
    """Return the typical seconds of each of several things timed in turns: medians, scaled to the sum of the means."""
    medians = list(map(median_low, every))
    scale = sum(map(typical, every)) / sum(medians)
    return [scale * seconds for seconds in medians]


def fit_steps(samples: Samples, expert_share: float = 0.0) -> Fit:
    """The terms of `StepCost`, with the knee of decode batches that explains the most; none where none helps.

    expert_share: see `StepCost`; 0 for a model without experts.
    """
    best, at = None, 0.0
    names = (*STEP_TERMS, "experts") if expert_share else STEP_TERMS
    for knee in (0.0, *sorted({work.tokens for work in samples.work if not work.ragged})):
        values = [term_values(work, knee) for work in samples.work]
        if expert_share:
            values = [
                (*row, share_of_experts(expert_share, work.tokens))
                for row, work in zip(values, samples.work, strict=True)
            ]
        found = fit(names, values, samples.seconds)
        if best is None or found.mean_error < best.mean_error - _KNEE_GAIN:
            best, at = found, float(knee)
    assert best is not None
    shares = {"expert_share": expert_share} if expert_share else {}
    return replace(best, terms={**best.terms, "weights": at * best.terms["per_token"], **shares})


def r2_of(cost: StepCost, samples: Samples) -> float:
    """Share of the variance of `samples` that `cost` explains."""
    middle = mean(samples.seconds)
    left = sum((cost.seconds(work) - took) ** 2 for work, took in zip(samples.work, samples.seconds, strict=True))
    spread = sum((took - middle) ** 2 for took in samples.seconds)
    return 1.0 - left / spread if spread else 1.0


def fit_transfer(num_bytes: Sequence[int], seconds: Sequence[float]) -> Fit:
    """Latency and seconds per byte; all is put on the bytes where the sizes are too few to tell the two apart."""
    if len(set(num_bytes)) > 1 and len(num_bytes) > 2:
        return fit(("latency", "per_byte"), [(1.0, size) for size in num_bytes], seconds)
    rate = sum(seconds) / sum(num_bytes)
    errors = [abs(rate * size - took) / took for size, took in zip(num_bytes, seconds, strict=True)]
    return Fit({"latency": 0.0, "per_byte": rate}, 0.0, sum(errors) / len(errors), len(num_bytes))


def forget_file(path: Path) -> bool:
    """Ask the system to drop a file's cached pages; False if it can't be asked."""
    if not hasattr(os, "posix_fadvise"):
        return False
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True
