"""Memory of running requests: their pages, cached prefixes and adapter pins."""

from __future__ import annotations

from dataclasses import dataclass

from ...memory.adapters.adapter import Adapter
from ...memory.adapters.reclaimer import Reclaimer
from ...memory.adapters.store import AdapterStore
from ...memory.pages.block_table import BlockTable
from ...memory.pages.pool import PageKind, PagePool
from ...memory.pages.prefix import BASE_VERSION, Block, PrefixCache
from ..requests.request import Request


@dataclass(eq=False)
class RequestMemory:
    """Allocates and frees pages, prefix blocks and adapter pins for requests; it decides nothing about their order.

    share_prefix_cache: also between tenants.
    """

    _pool: PagePool
    _store: AdapterStore
    _prefix: PrefixCache
    _reclaimer: Reclaimer
    block_tokens: int
    use_prefix_cache: bool
    share_prefix_cache: bool

    @property
    def num_available_pages(self) -> int:
        """Pages that are free or can be evicted."""
        return self._reclaimer.available

    def match(self, request: Request) -> list[Block]:
        """Return the cached blocks of the request's prefix; none if it asks for its prompt's log-probabilities."""
        if not self.use_prefix_cache or request.params.prompt_logprobs is not None:
            return []
        return self._prefix.match(_version(request.adapter), request.token_ids, self.scope(request))

    def scope(self, request: Request) -> tuple[str, str]:
        """Return the key within which blocks are shared: the request's tenant and its salt."""
        return ("" if self.share_prefix_cache else request.tenant, request.cache_salt)

    def fits(self, request: Request, blocks: list[Block], spare: int = 0) -> bool:
        """True if there are pages for all known tokens and for the adapter, and `spare` more.

        blocks: the request's cached prefix.
        """
        wanted = -(-request.num_tokens // self.block_tokens) - len(blocks) + spare
        available = self.num_available_pages
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
        """Take the matched prefix, pin the adapter and allocate pages for `count` more tokens; the request `fits`.

        An adapter may still be being read: its layers arrive during the prefill.
        Raises what loading the adapter raises; then nothing is held.
        """
        table = BlockTable(self._pool, self._prefix, self.block_tokens, self._prefix.take(blocks, request.num_tokens))
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
        request.num_computed_tokens = request.room = len(blocks) * self.block_tokens
        request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        request.num_known_blocks = len(blocks)
        request.last_block = blocks[-1] if blocks else None
        request.caching = self.use_prefix_cache
        self.grow(request, request.num_computed_tokens + count)

    def make_spare_room(self, num_pages: int, wanted: int) -> bool:
        """Free `num_pages` if at least `wanted` more could still be freed; False, and nothing done, if not."""
        return self._reclaimer.spare - wanted >= num_pages and self._reclaimer.make_room(num_pages)

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Make the block table cover `num_tokens`, evicting unused pages if needed; False if there are not enough."""
        short = num_tokens - request.room
        if short > 0:
            missing = -(-short // self.block_tokens)
            if missing > self._pool.num_free and not self._reclaimer.make_room(missing):
                return False
            request.block_table.add_pages(missing)
            request.room += missing * self.block_tokens
        return True

    def grow_each(self, requests: list[Request]) -> bool:
        """Add a page to each of `requests`, evicting unused pages if needed.

        False, and nothing done, if there are not enough for all.
        """
        count, block = len(requests), self.block_tokens
        if count > self._pool.num_free and not self._reclaimer.make_room(count):
            return False
        for request, page in zip(requests, self._pool.allocate(count, PageKind.KV), strict=True):
            request.block_table.pages.append(page)
            request.room += block
        return True

    def remember(self, request: Request) -> None:
        """Insert the blocks that the request has completed into the prefix cache."""
        step = self.block_tokens
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
        """Free the request's pages and its adapter's pin."""
        request.block_table.free()
        del request.block_table
        request.last_block = request.row = None
        if request.adapter is not None:
            self._store.release(request.adapter)


def _version(adapter: Adapter | None) -> int:
    return BASE_VERSION if adapter is None else adapter.version
