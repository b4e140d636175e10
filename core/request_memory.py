"""What a running request holds: its pages, the prefix it started from, and its adapter's pin."""

from __future__ import annotations

import itertools
from operator import itemgetter

from ..memory.adapter import Adapter
from ..memory.adapter_store import AdapterStore
from ..memory.kv import BlockTable
from ..memory.pages import PageKind, PagePool
from ..memory.prefix import BASE_VERSION, Block, PrefixCache
from ..memory.reclaim import Reclaimer
from .request import Request


class RequestMemory:
    """Gives requests their pages and takes them back; decides nothing about who goes first."""

    def __init__(
        self,
        pool: PagePool,
        store: AdapterStore,
        prefix: PrefixCache,
        reclaimer: Reclaimer,
        block_tokens: int,
        use_prefix_cache: bool,
        share_prefix_cache: bool = False,
    ) -> None:
        """share_prefix_cache: between tenants, too."""
        self._pool = pool
        self._store = store
        self._prefix = prefix
        self._reclaimer = reclaimer
        self._block_tokens = block_tokens
        self._use_prefix_cache = use_prefix_cache
        self._share_prefix_cache = share_prefix_cache

    def match(self, request: Request) -> list[Block]:
        """Known blocks that the request can start from; none when it wants every prompt token's log-probability."""
        if not self._use_prefix_cache or request.params.prompt_logprobs is not None:
            return []
        return self._prefix.match(_version(request.adapter), request.token_ids, self.scope(request))

    def scope(self, request: Request) -> tuple[str, str]:
        """Whom a request shares its blocks with: its own tenant, and of that the requests of equal salt."""
        return ("" if self._share_prefix_cache else request.tenant, request.cache_salt)

    def fits(self, request: Request, blocks: list[Block], spare: int = 0) -> bool:
        """True if pages for all known tokens and for the adapter can be had without taking any in use.

        spare: so many more pages must then still be left.
        """
        wanted = -(-request.num_tokens // self._block_tokens) - len(blocks) + spare
        available = self._reclaimer.available
        if blocks:
            available -= self._prefix.unused(blocks)
        adapter = request.adapter
        if adapter is not None:
            if not adapter.pages:
                wanted += adapter.num_pages
            elif adapter.is_idle:
                available -= len(adapter.pages)
        return wanted <= available

    def start(self, request: Request, blocks: list[Block], count: int) -> None:
        """Take the matched prefix, pin the adapter and take pages for `count` more tokens; the request `fits`.

        An adapter that is still being read is taken as it is: its bytes go on coming.
        Raises what loading the adapter raises; then nothing is held.
        """
        table = BlockTable(self._pool, self._prefix, self._block_tokens, self._prefix.take(blocks, request.num_tokens))
        adapter = request.adapter
        if adapter is not None:
            try:
                if not adapter.pages:
                    self._reclaimer.make_room(adapter.num_pages)
                self._store.acquire(adapter)
            except Exception:
                table.free()
                raise
        request.block_table = table
        request.num_computed_tokens = request.room = len(blocks) * self._block_tokens
        request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        request.num_known_blocks = len(blocks)
        request.last_block = blocks[-1] if blocks else None
        request.caching = self._use_prefix_cache
        self.grow(request, request.num_computed_tokens + count)

    def make_spare_room(self, num_pages: int, wanted: int) -> bool:
        """Free `num_pages` while at least `wanted` more could still be freed. False, and nothing done, if not."""
        return self._reclaimer.available - wanted >= num_pages and self._reclaimer.make_room(num_pages)

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Make the block table cover `num_tokens`, evicting what nobody uses if need be; False if that can't be had."""
        short = num_tokens - request.room
        if short > 0:
            missing = -(-short // self._block_tokens)
            if missing > self._pool.num_free and not self._reclaimer.make_room(missing):
                return False
            request.block_table.add_pages(missing)
            request.room += missing * self._block_tokens
        return True

    def grow_each(self, requests: list[Request]) -> bool:
        """Add a page to each of `requests`, evicting what nobody uses if need be.

        False, and nothing done, if that can't be had for all.
        """
        count, block = len(requests), self._block_tokens
        if count > self._pool.num_free and not self._reclaimer.make_room(count):
            return False
        for request, page in zip(requests, self._pool.allocate(count, PageKind.KV), strict=True):
            request.block_table.pages.append(page)
            request.room += block
        return True

    @property
    def caches_prefixes(self) -> bool:
        return self._use_prefix_cache

    def most_steps(self, requests: list[Request], steps: int, wanted: set[Adapter | None]) -> int:
        """How many decode steps of all of `requests` there are pages for, at most `steps`; the first one has its own.

        wanted: adapters whose pages are not to be taken; they are evicted after all others.
        """
        available = self._reclaimer.available
        if wanted:
            available -= sum(len(adapter.pages) for adapter in wanted if adapter is not None and adapter.is_idle)
        if len(requests) * -(-steps // self._block_tokens) <= available:
            return steps
        least = 1
        while least < steps:
            middle = (least + steps + 1) // 2
            if self._missing_pages(requests, middle - 1) <= available:
                least = middle
            else:
                steps = middle - 1
        return least

    def _missing_pages(self, requests: list[Request], steps: int) -> int:
        """Pages to allocate before every one of `requests`, each about to compute a token, can compute `steps` more."""
        return sum(r.block_table.missing_pages(r.num_computed_tokens + 1 + steps) for r in requests)

    def catch_up(self, requests: list[Request], steps: int) -> None:
        """Do what `steps` decode steps of all of `requests`, then planning one more, would have done to their pages.

        Their tokens are known already. Blocks become known, and others are evicted for new ones, in the order of these
        steps.
        """
        block = self._block_tokens
        if not self._use_prefix_cache or not any(request.caching for request in requests):
            for _ in range(0, steps, block):
                requests = [request for request in requests if request.room < len(request.token_ids)]
                self.grow_each(requests)
            return
        starts = [request.num_computed_tokens for request in requests]
        ends = sorted(
            (end, index)
            for index, start in enumerate(starts)
            for end in range(-(start + 1) % block, steps, block)  # the steps that complete a block
        )
        for end, group in itertools.groupby(ends, itemgetter(0)):
            indices = [index for _, index in group]
            for index in indices:
                requests[index].num_computed_tokens = starts[index] + end + 1
                self.remember(requests[index])
            for index in indices:
                self.grow(requests[index], starts[index] + end + 2)
        for request, start in zip(requests, starts, strict=True):
            request.num_computed_tokens = start + steps

    def remember(self, request: Request) -> None:
        """Make the blocks that the request has completed known to the prefix cache."""
        step = self._block_tokens
        while request.caching and request.num_known_blocks < request.num_computed_tokens // step:
            index = request.num_known_blocks
            tokens = request.token_ids[index * step : (index + 1) * step]
            page = request.block_table.pages[index]
            version, scope = _version(request.adapter), self.scope(request)
            block = self._prefix.insert(version, request.last_block, tokens, page, scope)
            if block is None:
                request.caching = False
                return
            request.last_block = block
            request.num_known_blocks += 1

    def release(self, request: Request) -> None:
        """Give back pages and pin."""
        request.block_table.free()
        request.block_table = request.last_block = request.row = None
        request.quiet_until = 0
        if request.adapter is not None:
            self._store.release(request.adapter)


def _version(adapter: Adapter | None) -> int:
    return BASE_VERSION if adapter is None else adapter.version
