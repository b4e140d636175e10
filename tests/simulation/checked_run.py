"""A simulated run in virtual time, over an executor that checks every step, with options drawn from all there are."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.policies import Policies
from chorus.core.requests.blocks import Blocks
from chorus.core.requests.request_params import RequestParams, Seeds
from chorus.memory.adapters.adapter import Adapter
from chorus.memory.adapters.composition import Composition
from chorus.memory.disk.folder import KEY_BYTES
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.host.image import HostImage
from chorus.memory.pages.block import Medium
from chorus.memory.pages.layout import page_groups
from chorus.perf.inline_reads import InlineReads

from ..core.speculation.stand_ins import Drawn, Free
from .asked import Asked, Told, promise
from .checked_adapters import CheckedAdapters, Disk, contents_read
from .checked_blocks import CheckedBlocks
from .checked_executor import CheckedExecutor
from .checked_order import CheckedOrder
from .checked_shadow import CheckedShadow
from .checked_swaps import CheckedSwaps
from .engine_run import EngineRun
from .faulty_disk import FileImage, FilesInVirtualTime
from .invariants import Invariants
from .late_results import late_results
from .made_up_grammar import made_up
from .made_up_images import EncodesAtOnce, Prompt, with_images
from .made_up_model import MAX_MODEL_LEN, VOCAB, answer_alone, empty_memory
from .virtual_reads import VirtualClock, VirtualReads

PATIENCE = 120.0
"""Virtual seconds within which every request must have ended once nothing new comes."""
CAPACITIES = [1 << 10, 1 << 13, *[1 << 20] * 4]
"""Bytes that files may have; those of a small page have about a hundred."""
LONGEST_NAP = 0.5
"""Virtual seconds between two steps at most while only reads are waited for and nothing new comes."""


class CheckedRun(EngineRun):
    """One engine in virtual time, all of it drawn from `rng`."""

    names = ("alto", "bass", "tenor", "soprano")
    acts = {**EngineRun.acts, "preempt": 2, "pin": 3, "load_checked": 1, "load_nothing": 1}
    has_files = False
    """True to keep cached prefixes in files in each run, not only in some."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.clock = VirtualClock()
        own = random.Random(rng.getrandbits(32))  # of events between the acts, on threads that read
        apart = random.Random(repr(own.getstate()))  # of speculation; it changes no other draw
        self.prompts = [[own.randrange(2, VOCAB) for _ in range(own.randint(1, 30))] for _ in range(3)]
        self._windows = rng.choice([(None,), (None,), (3,), (None, 1), (None, 5, 5), (7, None, 7, 2), (9, None)])
        self._state_pages = rng.choice([0, 0, 2, 3])
        if self._state_pages and random.Random(repr(apart.getstate())).random() < 0.3:  # no draw of the other runs
            self._windows = ()
        config = self._draw_config()
        if apart.random() < 0.4:
            cached = apart.choice([0, 200, 2000])
            drafted = 3 * bool(self._state_pages)  # pages for the inputs of drafts
            config = config.model_copy(
                update={
                    "speculation": "ngram",
                    "speculation_cache_tokens": cached,
                    "num_pages": (config.num_pages or 0) + drafted,
                }
            )
        self.seeds = Seeds(config.seed)
        self._images = random.Random(f"images {config.seed}")
        """What draws images: a source of its own, too."""
        self._image_blocks = self._images.choice([None, None, None, Blocks.IMAGES, Blocks.IMAGES, Blocks.PROMPT])
        self.beginnings = [Prompt(each) for each in self.prompts]
        if self._image_blocks is not None:
            self.beginnings = [with_images(each, VOCAB, self._images) for each in self.prompts]
            longest = MAX_MODEL_LEN if self._image_blocks is Blocks.PROMPT else self._images.choice([3, 8, 8, 8])
            room = max(config.max_num_batched_tokens, config.max_num_seqs + longest)
            config = config.model_copy(update={"max_num_batched_tokens": room})
        self._composing = random.Random(config.seed) if (config.seed or 0) % 2 else None
        """What draws composed adapters: a source of its own, so that the other runs stay what they are."""
        speed, trouble = rng.choice([0.0002, 0.002, 0.02, 0.2]), rng.choice([0.0, 0.0, 0.1, 0.3])
        self.disk = Disk(own, speed, config.adapter_read_seconds, trouble)
        self.disk.has_activated = True
        self._own, self._apart = own, apart
        self._start(self._with_disk(config), rng)
        for name in self.names[: rng.randint(1, len(self.names))]:
            self._register(name, self._new_directory())

    def _start(self, config: EngineConfig, rng: random.Random) -> None:
        """Make the engine, over an executor of its own. rng: what draws how reads and copies go."""
        own, apart = self._own, self._apart
        assert config.num_pages is not None
        memory = empty_memory(config.num_pages, config.block_tokens)
        is_inline = rng.random() < 0.1  # reads that a step asks for are there at once
        reads = InlineReads() if is_inline else VirtualReads(self.clock, rng.randint(1, 3))
        pause = reads.pause if isinstance(reads, VirtualReads) else lambda seconds: None
        adapters = CheckedAdapters(self.disk, pause, self.clock, memory, own, self.reached)
        shadow = CheckedShadow(memory, self.clock) if rng.random() < 0.7 else None
        delay, trouble = rng.choice([0.0, 0.005, 0.005, 0.1, 0.1, 0.1]), rng.choice([0.0, 0.3, 0.3])
        if config.kv_cache_dir is not None:  # what is copied seldom is found seldom
            trouble = self._disk_rng.choice([0.0, 0.0, trouble])
        swaps = CheckedSwaps(memory, self.clock, own, self.reached, delay, trouble)
        swaps = None if config.preemption == "recompute" else swaps
        if swaps is not None and (config.kv_cache_dir is not None or (config.seed or 0) % 5):  # no draw of its own
            config = config.model_copy(update={"host_prefix_cache": "on"})
        self.executor = CheckedExecutor(
            config,
            adapters,
            self.clock,
            memory,
            self.asked,
            self.reached,
            shadow,
            swaps,
            self._windows,
            self._state_pages,
            self._image_blocks,
        )
        proposer = Drawn(lambda request: self._alone(self.asked[request.id]).tokens, apart)
        encoder = EncodesAtOnce()
        make_encoder: Any = None if self._image_blocks is None else lambda wake, budget: encoder
        policies = Policies(proposer=proposer)
        self.engine = Engine(config, late_results(self.executor, rng), self.clock, reads, policies, make_encoder)
        encoder.engine = self.engine
        proposer.use(self.engine)
        if self.engine.disk is not None:
            self.files = FilesInVirtualTime(self.engine, self.clock, self._disk_rng, self.reached)
        self.predict = lambda: proposer.predict(VOCAB)
        self._grammars = random.Random(repr(apart.getstate())) if config.speculates else None
        """What draws grammars: a source of its own, too."""
        if self.engine.speculation is not None and apart.random() < 0.8:
            self.engine.speculation.cost = cast(Any, Free())
        self.executor.pool, self.executor.prefix = self.engine.pool, self.engine.prefix
        self.invariants = Invariants(self.engine, self.reached)
        self.blocks = CheckedBlocks(self.engine, self.executor, self.reached)
        self.order = CheckedOrder(self.engine, self.clock, self.asked, self.reached)
        self.executor.on_plan = self.order.on_plan
        self._num_preemptions = self._num_given_up = 0
        self._note_sent_back()
        self._let_images_wait()

    def _with_disk(self, config: EngineConfig) -> EngineConfig:
        """Keep cached prefixes in files in some runs; it draws from a source of its own, as the other draws stay."""
        self._disk_rng = random.Random(f"disk {config.seed}")
        FileImage.known = []
        if self.has_files:
            copied = "swap" if config.preemption == "recompute" else config.preemption
            config = config.model_copy(update={"prefix_cache": True, "preemption": copied, "host_cache_bytes": 1})
        can_copy = config.preemption != "recompute" and config.prefix_cache and bool(config.host_bytes)
        can_copy = can_copy and bool(self._windows)
        if not can_copy or (not self.has_files and self._disk_rng.random() < 0.5):
            return config
        self._folder = tempfile.TemporaryDirectory()
        with open(os.open(f"{self._folder.name}/key", os.O_WRONLY | os.O_CREAT, 0o600), "wb") as key:
            key.write(bytes(KEY_BYTES))  # names of files follow from it, and with them the run
        rng = self._disk_rng
        files = {"kv_cache_dir": Path(self._folder.name), "kv_cache_disk_bytes": rng.choice(CAPACITIES)}
        host_bytes, more_pages = rng.choice([4000, 1 << 16, 1 << 20, 1 << 20]), rng.choice([0, 40, 80])
        assert config.num_pages is not None
        room = {"host_cache_bytes": host_bytes, "num_pages": config.num_pages + more_pages}
        return config.model_copy(update={**files, **room})

    def _let_images_wait(self) -> None:
        """Check that the engine waits for reads only while it has some."""
        images, scheduler = self.engine.store.images, self.engine.scheduler
        wait, is_inline = images.wait, isinstance(images.reads, InlineReads)

        def checked(timeout: float, beside: Sequence[Future[Any]] = ()) -> None:
            counts = images.counts()
            has_reads = counts.num_under_way or self.engine.store.loads.under_way or beside
            was_changed = (  # in this very step: the rest starts, or fails, in the next one
                scheduler.lifecycle.num_preemptions > self._num_preemptions
                or counts.num_given_up > self._num_given_up
                or images.has_failures  # at once: an earlier read of the same directory hangs
            )
            promise(
                bool(has_reads) or bool(beside) or was_changed or is_inline,
                "it has work, runs nothing and waits for nothing",
            )
            self.reached["waited for a read"] += 1
            wait(timeout, beside)

        images.wait = checked

    def _draw_config(self) -> EngineConfig:
        """Mostly the arena holds little more than one long request and the largest adapter, so that all compete."""
        rng = self.rng
        block = rng.choice([1, 2, 4, 8])
        seqs = rng.choice([1, 2, 3, 4, 6, 9])
        max_turn = rng.choice([(0.2, 1000), (1000.0, 4), (10.0, 1000)])
        tokens = rng.choice([24, 24, MAX_MODEL_LEN, MAX_MODEL_LEN, 64, 64, 120, 600])
        return EngineConfig(
            model=Path("made-up"),
            block_tokens=block,
            num_pages=2
            - (-tokens // block) * len(page_groups(self._windows))
            + 3 * self._state_pages
            + rng.randint(1, 12),
            max_num_seqs=seqs,
            max_num_batched_tokens=max(seqs, rng.choice([4, 8, 16, 64])),
            chunked_prefill=rng.random() < 0.8,
            host_cache_bytes=rng.choice([0, 1, 500, 2000, 1 << 20, 1 << 20]),
            eviction=rng.choice(["cost", "lru"]),
            prefix_cache=rng.random() < 0.7,
            state_checkpoint_tokens=rng.choice([0, 4, 8, 1024]),
            lookahead=rng.choice([1, 2, 8]),
            prefetch=rng.choice([0, 1, 3]),
            max_adapters_per_step=rng.choice([None, None, 1, 2]),
            max_overtake_seconds=rng.choice([0.0, 0.05, 1.0, 1000.0]),
            max_waiting=rng.choice([None, None, 3, 12]),
            max_load_stall_seconds=rng.choice([0.0, 0.001, 0.02]),
            share_prefix_cache=rng.random() < 0.3,
            adapter_read_seconds=rng.choice([0.05, 1.0, 30.0]),
            fair_by=rng.choice(["tenant", "tenant", "adapter"]),
            weights=rng.choice([{}, {}, {"a": 0.01, self.names[0]: 100.0}]),
            max_turn_seconds=max_turn[0],
            max_turn_steps=max_turn[1],
            preemption=rng.choice(["recompute", "swap", "swap", "auto"]),
            seed=(seed := rng.randrange(1 << 30)),
            target_step_ms=(0.0, "auto", 1.0, 10.0)[seed // 2 % 4],  # no draw: the other runs stay what they are
        )

    def _now(self) -> float:
        return self.clock()

    def _span(self) -> range:
        return range(self.rng.randint(20, 90))

    # -- requests

    def _ask(self) -> None:
        """One request, several with a common prefix, several choices of one request, or one that may not fit."""
        if self.engine.disk is not None and self._disk_rng.random() < 0.5:
            self._leave_only_files()
        rng = self.rng
        name = rng.choice([None, *self.current, *self.current]) if rng.random() < 0.95 else rng.choice(self.names)
        if (source := self._composing) is not None and name is not None and source.random() < 0.3:
            name = self._composed_with(name, source)
        beginning = self._beginning()
        tenant, salt = rng.choice(["", "", "a", "b"]), rng.choice(["", "", "", "salt"])
        longest = rng.choice([12, 12, 12, 60])
        count = rng.choice([1, 1, 1, 3, 6])
        call = f"c{len(self.asked)}" if count > 1 and rng.random() < 0.5 else ""
        own, is_one_prompt = [rng.randrange(2, VOCAB)], bool(call) or rng.random() < 0.3
        params = RequestParams(
            max_tokens=rng.choice([None, *range(1, longest + 1)]),
            temperature=rng.choice([0.0, 1.0]),
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=tuple(rng.sample(range(VOCAB), rng.randint(0, 2))),
            prompt_logprobs=rng.choice([None, None, None, 0]),
            logprobs=rng.choice([None, None, None, 0]),
            seed=rng.choice([None, 7]),
            presence_penalty=rng.choice([0.0, 0.0, 0.0, 0.5]),
        )
        if (source := self._grammars) is not None and source.random() < 0.4:
            params = replace(params, grammar=made_up(source.randint(0, 4), VOCAB))
        for _ in range(count):
            if not is_one_prompt:
                own = [rng.randrange(2, VOCAB) for _ in range(rng.choice([1, 6]))]
            self._submit(name, beginning.then(own), self.seeds.fill(params), tenant, salt, call)

    def _composed_with(self, name: str, rng: random.Random) -> str | None:
        """An adapter with a scale, and mostly another one beside it; the first one's name if that is all there is."""
        others = rng.sample(self.names, rng.choice([0, 1, 1, 1, 2]))
        return Composition.of((each, rng.choice([0.5, 1.0, -2.0])) for each in (name, *others)).model

    def _beginning(self) -> Prompt:
        """A beginning that other prompts share, or an earlier prompt with its answer."""
        if self.asked and self.rng.random() < 0.15:
            asked = self.rng.choice(list(self.asked.values()))
            return Prompt(asked.tokens, asked.request.media)
        shared = self.rng.choice(self.beginnings)
        count = len(shared.tokens)
        shown = shared.first(self.rng.choice([0, count // 2, count]))
        if shared.media and self._images.random() < 0.5:  # up to an image, which pages seldom end with
            return shared.first(sum(self._images.choice(shared.media).runs[-1]))
        return shown

    def _alone(self, asked: Asked) -> Told:
        return answer_alone(asked)

    # -- files

    def _leave_only_files(self) -> None:
        """Forget all that nothing uses, once it had the time to be written, or begin anew with the same files, which
        may have been damaged; then ask again what was asked before.
        """
        rng = self._disk_rng
        for _ in range(rng.choice([0, 10, 300, 300])):
            if not self.engine.has_work():
                break
            self._step()
            self._check_invariants()
        before = [each for each in self.asked.values() if each.told.tokens][-4:]
        if rng.random() < 0.9:
            self.engine.reclaimer.reclaim_all()
            self.clock.advance(rng.choice([0.001, 0.05, 2.0]))
            self._check_invariants()
        if rng.random() < 0.3:
            self.files.damage()
        if rng.random() < 0.4:
            self._restart()
        elif rng.random() < 0.2:
            self.engine.reset_prefix_cache(tiers=[Medium.POOL, Medium.HOST])
        else:
            budget = self.engine.store.images.budget
            budget.make_room(budget.capacity_bytes)
        for each in rng.sample(before, min(len(before), rng.choice([0, 1, 3]))):
            self._ask_again(each)

    def _restart(self) -> None:
        """Stop or kill the engine, and start another over the same files. Adapters may change meanwhile, and so may the
        dtype.
        """
        rng, kept = self._disk_rng, list(self.current.items())
        was_stopped = rng.random() < 0.5
        for id in list(self.active):
            self.active.pop(id).aborted = True
        self._count_files()
        if was_stopped:
            self.files.stop()
        else:
            self.files.kill()
        self.engine.close()
        self.reached["stopped and begun anew" if was_stopped else "killed and begun anew"] += 1
        self.current.clear()
        self.pinned.clear()
        dtype = rng.choice(["auto", "auto", "auto", "bfloat16"])
        self._start(self.engine.config.model_copy(update={"dtype": dtype}), rng)
        for name, adapter in kept:
            path = adapter.manifest.path
            if rng.random() < 0.3:
                self.disk.write(path, rng.randint(1, 7))
            self._register(name, path)

    def _ask_again(self, asked: Asked) -> None:
        """A request that begins with the prompt of an earlier one: mostly of the same tenant, for the same name."""
        rng, before = self._disk_rng, asked.request
        params = RequestParams(max_tokens=rng.randint(1, 6), temperature=0.0, ignore_eos=True)
        prompt = asked.tokens if rng.random() < 0.5 else [*asked.prompt, rng.randrange(2, VOCAB)]
        name, tenant, salt = before.adapter_name, before.tenant, before.cache_salt
        match rng.randrange(8):
            case 0:
                name = rng.choice([None, *self.names])
            case 1:
                tenant = rng.choice(["", "a", "b"])
            case 2:
                salt = rng.choice(["", "salt"])
        self._submit(name, Prompt(prompt, before.media), self.seeds.fill(params), tenant, salt)

    def _count_files(self) -> None:
        disk = self.engine.disk
        assert disk is not None
        self.reached["prefix from a file"] += disk.num_hit_tokens
        self.reached["damaged file"] += disk.folder.num_bad
        self.reached["hit of host memory"] += self.engine.memory.copies.num_hit_tokens
        capacity = disk.folder.capacity_bytes
        promise(disk.folder.num_bytes <= capacity, "files are counted as more bytes than they may have")
        promise(
            self.files.num_bytes() <= capacity + self.files.num_foreign_bytes, "files have more bytes than they may"
        )

    def _preempt(self) -> None:
        """One after another, so that copies out and back overlap, or with steps between them, which copies outlast."""
        has_steps = self.rng.choice([False, True])
        for _ in range(self.rng.choice([1, 1, 2, 4])):
            if has_steps:
                self._step()
                self._check_invariants()
            self._note()  # its tenant may have had nothing waiting until now
            super()._preempt()

    # -- adapters

    def _new_directory(self) -> Path:
        self.num_directories += 1
        path = Path(f"directory-{self.num_directories}")
        self.disk.write(path, self.rng.randint(1, 7))
        return path

    def _directory(self, name: str) -> Path:
        """A new directory, or the adapter's own, overwritten in place."""
        adapter = self.current.get(name)
        if adapter is None or self.rng.random() >= 0.6:
            return self._new_directory()
        path = adapter.manifest.path
        self.disk.write(path, self.rng.randint(1, 7))
        self.reached["reloaded in place"] += adapter.requests > 0
        return path

    def _load_checked(self) -> None:
        """Register an adapter together with the weights that were read to check it."""
        name = self.rng.choice(self.names)
        old, path, image, backend = self.current.get(name), self._new_directory(), HostImage(), self.executor.adapters
        manifest = backend.inspect(path)
        try:
            layout = self.engine.store.layout_of(manifest)
        except AdapterFormatError:
            promise(manifest.rank >= self.engine.pool.num_usable, "an adapter that fits was refused")
            return
        image.data = manifest.mtime_ns
        image.publish(layout.num_layers)
        self._replace(name, self.engine.store.register(name, manifest, image), old)

    def _load_nothing(self) -> None:
        """An unreadable adapter replaces none."""
        try:
            self.engine.store.register(self.rng.choice(self.names), Path("nowhere"))
        except AdapterFormatError:
            store = self.engine.store
            promise({name: store.get(name) for name in store.names()} == self.current, "another version is served")
            return
        promise(False, "an adapter of no directory was registered")

    def _break_files(self, path: Path) -> None:
        self.disk.broken.add(path)
        self.disk.unlucky.add(self.disk.content[path])

    def _outweighs(self, adapter: Adapter) -> bool:
        assert self.executor.shadow is not None
        return self.executor.shadow.outweighs(adapter)

    @property
    def has_hung(self) -> bool:
        return self.disk.has_hung

    def _is_unlucky(self, adapter: Adapter | None) -> bool:
        return adapter is not None and not self.disk.unlucky.isdisjoint(contents_read(adapter.manifest))

    # -- time

    def _wait(self) -> None:
        self.clock.advance(self.rng.choice([0.001, 0.05, 2.0]))

    def _pause(self) -> None:
        self.clock.advance(0.0005)

    def _drain(self) -> None:
        end, nap = self.clock.now + PATIENCE, 0.0
        while self.engine.has_work():
            promise(self.clock.now < end, f"requests never end: {list(self.active)}")
            if self._step():
                nap = 0.0
                self._check_invariants()
            else:  # the next step would do the same, until a read goes on or was waited for long enough
                nap = min(LONGEST_NAP, 2 * nap + 0.0005)
                self.clock.advance(min(nap, max(0.0, self.clock.next_time - self.clock.now)))
        self._remove_adapters()
        self.clock.advance(1.0)

    # -- invariants

    def _note(self) -> None:
        self.order.note()

    def _before_step(self) -> None:
        self.executor.begins_anew = True
        self.order.before()

    def _after_step(self) -> None:
        self.order.after()
        if self.order.has_run:
            self.blocks.check()

    def _check_invariants(self) -> None:
        super()._check_invariants()
        if (shadow := self.executor.shadow) is not None:
            adapter = self.engine.merging.shadowed
            promise(adapter is shadow.adapter, f"the shadow is of {shadow.adapter}, not of {adapter}")
            shadow.check_taken(self.engine.reclaimer.shadow.runs)

    def finish(self) -> None:
        super().finish()
        if self.engine.disk is not None:
            self._count_files()
        promise(self.has_hung or not self.engine.store.images.num_bytes, "host memory holds an adapter that is gone")


class FilesRun(CheckedRun):
    """A run in which cached prefixes are kept in files."""

    has_files = True
