"""Memory of requests: pages, cached prefixes and adapter pins while they run, KV in host memory while they wait.

Tests: tests/core/test_swapping.py, tests/core/test_engine.py, tests/simulation.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

from ...memory.adapters.adapter import Adapter
from ...memory.adapters.reclaimer import Reclaimer
from ...memory.adapters.store import AdapterStore
from ...memory.disk.tier import DiskTier
from ...memory.pages.block import BASE_VERSION, Block
from ...memory.pages.block_table import BlockTable
from ...memory.pages.eviction import RestoreCosts
from ...memory.pages.layout import PageLayout
from ...memory.pages.pool import PageKind, PagePool
from ...memory.pages.prefix import PrefixCache
from ...memory.pages.states import StateSlots
from ...memory.transfers.cached_pages import CachedPages
from ...memory.transfers.swapped_kv import KvImage, SwappedKv
from ...memory.transfers.transfer import ExecutorLost
from ..requests.prefix_fetch import Fetch
from ..requests.request import Request, RequestState
from .prefix_copies import CopyFailed, PrefixCopies

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class RequestMemory:
    """Allocates and frees pages, prefix blocks and adapter pins for requests; it decides nothing about their order.

    max_chunk: the most tokens of a request in a step. checkpoint_tokens: see
    `EngineConfig.state_checkpoint_tokens`. share_prefix_cache: also between tenants.
    may_swap: whether to keep a preempted request's KV in host memory.
    host, disk: where cached pages go from the pool, and from there; None: nowhere.
    arriving: requests with KV being copied back.
    """

    pool: PagePool
    store: AdapterStore
    prefix: PrefixCache
    reclaimer: Reclaimer
    layout: PageLayout
    max_chunk: int
    checkpoint_tokens: int
    use_prefix_cache: bool
    share_prefix_cache: bool
    swapped: SwappedKv
    may_swap: Callable[[], bool]
    costs: RestoreCosts
    clock: Callable[[], float]
    host: CachedPages | None = None
    disk: DiskTier | None = None
    arriving: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.block_tokens = self.layout.block_tokens
        self.copies = PrefixCopies(
            self.host,
            self.pool,
            self.prefix,
            self.reclaimer,
            self.swapped,
            self.layout,
            self.costs,
            self.clock,
            self.layout.pages_per_token(self.checkpoint_tokens),
        )

    @property
    def num_available_pages(self) -> int:
        """Pages that are free or can be evicted."""
        return self.reclaimer.available

    def match(self, request: Request) -> list[Block]:
        """Return the cached blocks of the request's prefix; none if it needs all of its prompt's hidden states."""
        if not self.use_prefix_cache or request.needs_prompt_states:
            return []
        blocks = self._matched(request)
        if self._needs_copies(blocks):
            resident = self._resident(request, blocks)
            is_copied = request.kv_image is None and self.copies.are_worth_it(blocks, resident)
            request.num_passed_tokens = 0 if is_copied else (len(blocks) - len(resident)) * self.block_tokens
            if not is_copied:
                blocks = resident
        if blocks and self.layout.state_pages and not self.fits(request, blocks) and self.fits(request, []):
            return []  # the pages of the checkpoint and of the request's own states don't fit at the same time
        return blocks

    def _matched(self, request: Request) -> list[Block]:
        """Return the cached blocks that the request can go on from, in the page pool or not."""
        version, scope = _version(request.adapter), self.scope(request)
        return self.prefix.match(version, request.keys(), scope, request.lora_from, _cut_at(request))

    def _needs_copies(self, blocks: list[Block]) -> bool:
        """True if some pages of a request's cached prefix are only in host memory."""
        if not blocks or self.host is None:
            return False
        state = blocks[-1].checkpoint
        return bool(self.prefix.absent(blocks)) or (state is not None and not state.pages)

    def _resident(self, request: Request, blocks: list[Block]) -> list[Block]:
        """Return the most of a run's first blocks that the request can go on from without copying any."""
        return self.prefix.usable(blocks, _cut_at(request), with_images=False)

    def shareable(self, request: Request) -> int:
        """Return how many prompt tokens are in full blocks that an equal prompt could start from."""
        size, blocks = self.block_tokens, request.blocks
        count = (request.num_prompt_tokens - 1) // size  # at least one token is left to compute
        return size * (blocks.cached(count, size) if blocks.spans else count)

    def read_ahead(self, request: Request) -> None:
        """Begin to read the blocks of a new request's prompt that are in files only."""
        if self.disk is None or not self.use_prefix_cache or request.needs_prompt_states:
            return
        version, scope = _version(request.adapter), self.scope(request)
        request.reading = self.disk.read_ahead(
            version,
            request.keys(),
            scope,
            request.lora_from,
            self.block_tokens,
            lambda: request.state is not RequestState.DONE,
            lambda: request.state is RequestState.WAITING,
        )

    def is_read_ahead(self, request: Request) -> bool:
        """True while blocks of a request's prompt are being read, and it is worth waiting for them."""
        job = request.reading
        if job is None or self.disk is None:
            return False
        if self.disk.is_coming(job):
            return True
        if not self.disk.may_begin(job):
            request.reading = None
        return False

    def fetched_by(self, blocks: list[Block]) -> Request | None:
        """Return a request that is copying some of these blocks from host memory: their pages come with it."""
        if not self.arriving or not any(block.holds for block in blocks):
            return None
        wanted = set(blocks)
        return next((each for each in self.arriving if each.fetch and not wanted.isdisjoint(each.fetch.blocks)), None)

    def scope(self, request: Request) -> tuple[str, str]:
        """Return the key within which blocks are shared: the request's tenant and its salt."""
        return ("" if self.share_prefix_cache else request.tenant, request.cache_salt)

    def fits(self, request: Request, blocks: list[Block], spare: int = 0) -> bool:
        """True if there are pages for all known tokens and for the adapter, and `spare` more.

        blocks: the request's cached prefix.
        """
        chunk = min(self.max_chunk, request.num_tokens)
        wanted = self.layout.pages_for_tokens(request.num_tokens, chunk) + spare
        wanted -= sum(map(bool, self.prefix.pages_of(blocks)))
        if blocks and self.layout.state_pages and (state := blocks[-1].checkpoint) is not None and not state.pages:
            wanted += self.layout.state_pages  # a checkpoint in host memory, next to the request's own states
        adapter = request.adapter
        if adapter is not None and not adapter.pages:
            wanted += adapter.num_pages
        if wanted <= self.pool.num_free:  # then nothing has to be evicted
            return True
        available = self.num_available_pages
        if blocks:
            available -= self.prefix.unused(blocks)
        if adapter is not None and adapter.is_idle:
            available -= len(adapter.pages)
        return wanted <= available

    def start(self, request: Request, blocks: list[Block], count: int) -> bool:
        """Take the matched prefix, pin the adapter and allocate pages for `count` more tokens; the request `fits`.

        An adapter may still be being read: its layers arrive during the prefill. Returns False, and nothing is held, if
        KV can't be copied from host memory, where it is forgotten: the request then begins elsewhere, which `match`
        tells, with another number of tokens. Raises the errors of loading the adapter; then nothing is held, too.
        """
        try:
            self._start(request, blocks, count)
        except CopyFailed:
            return False
        if request.num_passed_tokens:
            self.copies.pass_over(request.num_passed_tokens)
        return True

    def _start(self, request: Request, blocks: list[Block], count: int) -> None:
        fetch = self.copies.plan(blocks) if self._needs_copies(blocks) else None
        taken, windows = self.prefix.take(blocks, request.num_tokens), self.layout.group_windows
        image = request.kv_image
        if image is not None:
            self.swapped.hold(image)  # making room for the request may evict adapters, whose images need host memory
        table = BlockTable(self.pool, self.prefix, self.block_tokens, taken, windows)
        try:
            if self.layout.state_pages:
                table.states = self._states_after(blocks, fetch)
            self._pin_adapter(request)
        except Exception:
            table.free()
            if image is not None:
                self.swapped.let_go(image)
            self.copies.end(fetch)
            raise
        if table.states is not None:
            self._add_state_slots(table.states)
        request.block_table = table
        request.num_computed_tokens = request.room = len(blocks) * self.block_tokens
        request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        request.num_known_blocks = len(blocks)
        self._go_on_from(request, blocks[-1] if blocks else None)
        request.caching = self.use_prefix_cache
        request.leaves_at = self.layout.first_leaving(request.num_computed_tokens)
        kept = self.kept_tokens(request, blocks)
        if fetch is not None:
            self._copy(request, fetch)
        elif image is not None and kept > request.num_computed_tokens:
            self._restore(request, image, len(blocks))
        elif image is not None:
            self._drop_image(request, image)
        request.note_pages(table.num_held, self.clock())
        if request.restoring is None:
            self.grow(request, request.num_computed_tokens + count)

    def _copy(self, request: Request, fetch: Fetch) -> None:
        """Begin to copy the request's blocks from host memory. Raises CopyFailed; then nothing is held."""
        try:
            self.copies.begin(request, fetch)
        except CopyFailed:
            self.release(request)
            self.copies.end(fetch)
            self.copies.give_up(fetch)
            request.fetch = None
            raise
        if request.restoring is not None:
            self.arriving.append(request)

    def _pin_adapter(self, request: Request) -> None:
        """Pin the request's adapter, with room made for it. Raises the errors of loading it."""
        adapter = request.adapter
        if adapter is not None:
            if not adapter.pages:
                self.reclaimer.make_room(adapter.num_pages)
            self.store.acquire(adapter)

    def _states_after(self, blocks: list[Block], fetch: Fetch | None) -> StateSlots:
        """The checkpoint that a request begins with, if it has a cached prefix, and no slots of its own yet. It gets
        pages for one that is only in host memory.
        """
        if not blocks:
            return StateSlots([])
        state = blocks[-1].checkpoint
        assert state is not None
        if fetch is not None and not state.pages:
            self.reclaimer.make_room(self.layout.state_pages)
            fetch.checkpoint = self.pool.allocate(self.layout.state_pages, PageKind.KV)
            return StateSlots([list(fetch.checkpoint)], accepted=state.accepted)
        checkpoint = self.prefix.take_checkpoint(blocks[-1])
        return StateSlots([list(checkpoint.pages)], accepted=checkpoint.accepted)

    def _add_state_slots(self, states: StateSlots) -> None:
        """Give a request pages of its own for its states. A checkpoint that it begins with stays its first slot until
        its first step has read it.
        """
        size, count = self.layout.state_pages, self.layout.state_slots
        self.reclaimer.make_room(size * count)
        pages = self.pool.allocate(size * count, PageKind.KV)
        own = [pages[first : first + size] for first in range(0, len(pages), size)]
        if states.slots:
            states.share(own.pop())
        states.slots += own

    def limit_chunk(self, request: Request, computed: int, count: int) -> int:
        """Return how many of `count` tokens after `computed` a step may compute: up to the next checkpoint."""
        if count < 2 or not (self.layout.state_pages and self.use_prefix_cache and self.checkpoint_tokens):
            return count
        return min(count, self._next_checkpoint(request, computed) - computed)

    def _next_checkpoint(self, request: Request, computed: int) -> int:
        """The number of computed tokens at which the next checkpoint is due.

        That is every multiple of `checkpoint_tokens`, and the end of what an equal prompt could start from.
        """
        every, prompt = self.checkpoint_tokens, self.shareable(request)
        following = (computed // every + 1) * every
        return prompt if computed < prompt < following else following

    def _keep_state(self, request: Request, states: StateSlots) -> None:
        """Keep the request's state as a checkpoint if it is after the last block that it knows, and one is due."""
        computed, block = request.num_computed_tokens, request.last_block
        if block is None or not request.caching or not self.checkpoint_tokens:
            return
        if states.spare:  # the slot is a checkpoint already, after fewer of the step's drafts
            return
        is_due = computed == self._next_checkpoint(request, computed - 1)
        if (
            not is_due
            or computed != request.num_known_blocks * self.block_tokens
            or (block.checkpoint is not None and block.checkpoint.pages)
        ):
            return
        size = self.layout.state_pages
        if self.reclaimer.make_room(size) and self.prefix.keep_checkpoint(block, states.current, states.accepted):
            states.share(self.pool.allocate(size, PageKind.KV))

    def _make_room(self, request: Request, missing: int) -> bool:
        """Evict unused pages, or else take the request's own checkpoint back; False if there are not enough."""
        if self.reclaimer.make_room(missing):
            return True
        return self._take_back_checkpoint(request) and self.reclaimer.make_room(missing)

    def _take_back_checkpoint(self, request: Request) -> bool:
        """Make the checkpoint that the request has not left yet its own again, and free the pages that were to replace
        it; False if there is none, or if another request uses it.
        """
        states = request.block_table.states
        if states is None or not states.spare or not self.prefix.forget_checkpoint(states.shared):
            return False
        spare, states.spare = states.spare, []
        self.prefix.release(spare)
        return True

    def kept_tokens(self, request: Request, blocks: list[Block]) -> int:
        """Return the number of tokens with KV when a request starts: in `blocks`, its cached prefix, or on the host."""
        cached, image = len(blocks) * self.block_tokens, request.kv_image
        if image is None or image.is_dropped or len(blocks) < image.blocks.start:
            return cached
        return max(cached, image.num_tokens)

    def swap_out(self, request: Request) -> bool:
        """Begin to copy the KV of a request that is about to be released to host memory; False if the KV is dropped.

        Blocks that others use stay where they are, and are looked for in the prefix cache when the request comes back.
        """
        if request.restoring is not None:
            return True
        num_tokens = request.num_computed_tokens
        if not num_tokens or not self.may_swap():
            return False
        first, last = 0, -(-num_tokens // self.block_tokens)
        # with states, a request can begin in the prefix cache only at a checkpoint, which may be elsewhere
        if not self.layout.state_pages and self.use_prefix_cache and not request.needs_prompt_states:
            leaving = self.swapped.leaving()
            used = takewhile(lambda block: self._is_shared(block, leaving), self._matched(request))
            first = len(self._resident(request, list(used)))
        try:
            request.kv_image = self.swapped.swap_out(request.block_table, range(first, last), num_tokens)
        except ExecutorLost:
            raise
        except Exception:
            logger.exception("the KV of request %s could not be copied to host memory", request.id)
        return request.kv_image is not None

    def _is_shared(self, block: Block, leaving: Counter[int]) -> bool:
        """True if a request other than the one that is about to leave uses a block. leaving: copies of each page."""
        page = block.pages[0]
        return bool(page) and self.pool.references(page) > 1 + leaving[page]

    def finish_copies(self) -> list[Request]:
        """Complete finished copies; return the requests with lost KV, which the caller sends back to the queue."""
        done, failed = self.swapped.finish_copies()
        lost = []
        for request in list(self.arriving):
            if request.restoring in done:
                request.restoring = None
                self.arriving.remove(request)
                if request.fetch is not None:
                    self.copies.finish(request, request.fetch)
                else:
                    request.kv_image = None
            elif request.restoring in failed:
                lost.append(request)
        for request in lost:
            if request.fetch is not None:
                self.copies.give_up(request.fetch)
            elif request.kv_image is not None:
                self.swapped.drop(request.kv_image)
        return lost

    def forget_image(self, request: Request) -> None:
        """Drop the KV of an ended request from host memory."""
        if request.kv_image is not None:
            self.swapped.forget(request.kv_image)
            request.kv_image = None

    def _restore(self, request: Request, image: KvImage, num_blocks: int) -> None:
        """Copy a request's image into its pages after its cached prefix. Raises CopyFailed; then the image is dropped,
        and nothing is held.
        """
        step = self.layout.pages_per_block
        skip = (num_blocks - image.blocks.start) * step
        held = image.held[skip:]
        if (missing := sum(held)) > self.pool.num_free and not self.reclaimer.make_room(missing):
            self._drop_image(request, image)
            self.release(request)
            raise CopyFailed
        table = request.block_table
        table.add_some(held)
        pages = [page for page in table.pages[num_blocks * step :] if page]
        if table.states is not None:
            pages += table.states.spare or table.states.current
        try:
            request.restoring = self.swapped.restore(image, pages, sum(image.held[:skip]))
        except ExecutorLost:
            raise
        except Exception:
            logger.exception("the KV of request %s could not be copied back", request.id)
            self._drop_image(request, image)
            self.release(request)
            raise CopyFailed from None
        if table.states is not None:
            self.prefix.release(table.states.leave_checkpoint())
            table.states.accepted = image.accepted
        request.room = image.blocks.stop * self.block_tokens
        request.num_computed_tokens = image.num_tokens
        if request.restoring is None:
            request.kv_image = None
        else:
            self.arriving.append(request)

    def _drop_image(self, request: Request, image: KvImage) -> None:
        """Let a request continue without its image; the results of its prompt are computed again."""
        self.swapped.drop(image)
        request.kv_image = None
        request.forget_prompt()

    def make_spare_room(self, num_pages: int, wanted: int) -> bool:
        """Free `num_pages` if at least `wanted` more could still be freed; False, and nothing done, if not."""
        return self.reclaimer.spare - wanted >= num_pages and self.reclaimer.make_room(num_pages)

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Make the block table cover `num_tokens`, evicting unused pages if needed; False if there are not enough."""
        short = num_tokens - request.room
        if short > 0:
            blocks = -(-short // self.block_tokens)
            missing = blocks * self.layout.pages_per_block
            if missing > self.pool.num_free and not self._make_room(request, missing):
                return False
            request.block_table.add_pages(missing)
            request.room += blocks * self.block_tokens
            request.note_pages(request.block_table.num_held, self.clock())
        return True

    def grow_by_one(self, requests: Sequence[Request]) -> bool:
        """True if each request has a page for its next token now; False, and nothing done, if pages run short."""
        short = [request for request in requests if request.room <= request.num_computed_tokens]
        return not short or self.grow_each(short)

    def grow_each(self, requests: list[Request]) -> bool:
        """Add pages of a block to each of `requests`, evicting unused pages if needed.

        False, and nothing done, if there are not enough for all.
        """
        step, block = self.layout.pages_per_block, self.block_tokens
        count = step * len(requests)
        if count > self.pool.num_free and not self.reclaimer.make_room(count):
            return False
        pages = self.pool.allocate(count, PageKind.KV)
        now = self.clock()
        for index, request in enumerate(requests):
            request.block_table.pages += pages[index * step : (index + 1) * step]
            request.room += block
            request.note_pages(request.held.num_pages + step, now)
        return True

    def move_on(self, request: Request, *, was_draft: bool = False) -> None:
        """Release the request's pages that no later token sees, and let its state follow its computed tokens; what the
        prefix cache knows stays cached. was_draft: the last one is an accepted draft of a step that is counted already.
        """
        computed, table = request.num_computed_tokens, request.block_table
        if computed >= request.leaves_at:
            table.leave(computed)
            request.note_pages(table.num_held, self.clock())
            request.leaves_at = self.layout.first_leaving(computed)
        if table.states is not None:
            if was_draft:
                table.states.accepted += 1
            elif left := table.states.advance():
                self.prefix.release(left)
            self._keep_state(request, table.states)

    def remember(self, request: Request) -> None:
        """Insert the blocks that the request has completed into the prefix cache."""
        step = self.block_tokens
        while request.caching and request.num_known_blocks < request.num_computed_tokens // step:
            index = request.num_known_blocks
            tokens = request.keys(index * step, (index + 1) * step)
            pages = request.block_table.of_blocks(range(index, index + 1))
            version, scope = _version(request.adapter), self.scope(request)
            block = self.prefix.insert(
                version, request.last_block, tokens, pages, scope=scope, changed_from=request.lora_from
            )
            if block is None:
                request.caching = False
                return
            self._go_on_from(request, block)
            request.num_known_blocks += 1

    def _go_on_from(self, request: Request, block: Block | None) -> None:
        """Note the last block of a request that the prefix cache knows; None: it knows none, or the request ends."""
        self.prefix.follow(request.last_block, block)
        request.last_block = block

    def page_seconds(self, request: Request) -> float:
        """Pages times the seconds that a request has held them so far."""
        return request.page_seconds_until(self.clock())

    def release(self, request: Request) -> None:
        """Free the request's pages and its adapter's pin."""
        if request.restoring is not None:
            fetch = request.fetch
            image = request.kv_image if fetch is None else fetch.image
            assert image is not None
            self.arriving.remove(request)
            self.swapped.cancel(image, request.block_table)
            self.copies.end(fetch)
            request.restoring = request.fetch = None
        request.block_table.free()
        request.note_pages(0, self.clock())
        del request.block_table
        self._go_on_from(request, None)
        request.sequence = None
        if request.adapter is not None:
            self.store.release(request.adapter)


def swaps(setting: Literal["auto", "swap", "recompute"], costs: RestoreCosts) -> bool:
    """Return whether a request's KV is to be swapped; `auto` chooses the way that was measured as faster.

    Both grow with the pages, so that a page of the one is compared with a page of the other. A copy is taken to cost
    its whole time, though a GPU computes meanwhile: the estimate errs on the side of computing again. Blocks
    that the prefix cache may keep by chance are not counted.
    """
    return setting == "swap" or (setting == "auto" and costs.swapped_page < costs.prefix_page)


def _cut_at(request: Request) -> Callable[[int], object] | None:
    """See `PrefixCache.usable`."""
    return request.blocks.around if request.blocks.spans else None


def _version(adapter: Adapter | None) -> int:
    return BASE_VERSION if adapter is None else adapter.version
