"""A prefix cache with a host tier, over pages whose contents are Python objects."""

from __future__ import annotations

from chorus.memory.host.budget import HostBudget
from chorus.memory.pages.eviction import EvictionOrder, RestoreCosts
from chorus.memory.pages.pool import PageKind, PagePool
from chorus.memory.pages.prefix import PrefixCache
from chorus.memory.transfers.cached_pages import CachedPages
from chorus.memory.transfers.pages_ahead import PagesAhead
from chorus.memory.transfers.swap_backend import CopyMode

STEP, PAGE_BYTES = 4, 10


class Backend:
    """Copies contents of pages at once."""

    page_seconds = 1e-4
    copying = CopyMode.AT_ONCE

    def __init__(self, num_pages):
        self.arena = [None] * num_pages
        self.refuses = False

    def copy_out(self, pages, *, ahead=False):
        if self.refuses:
            raise MemoryError("no memory")
        return [self.arena[page] for page in pages], None

    def copy_in(self, image, skip, pages):
        for page, content in zip(pages, image[skip:], strict=True):
            self.arena[page] = content

    def wait(self, timeout):
        raise AssertionError("nothing is being copied")


class Memory:
    """A prefix cache over a pool, with a host tier of some pages."""

    backend_type = Backend

    def __init__(self, num_pages=20, host_pages=20, windows=(None,), has_states=False):
        self.pool = PagePool(num_pages)
        self.order, self.costs = EvictionOrder(), RestoreCosts()
        self.prefix = PrefixCache(self.pool, self.order, self.costs, STEP, windows, has_states=has_states)
        self.backend = self.backend_type(num_pages)
        self.budget = HostBudget(host_pages * PAGE_BYTES)
        windowed = [group for group, window in enumerate(windows) if window]
        self.tier = CachedPages(self.backend, self.budget, self.prefix, self.costs, PAGE_BYTES, windowed, lambda: 0.0)
        self.prefix.tier = self.tier
        self.num_groups = len(windows)

    def store(self, tokens, version=1, scope=None, states=0):
        """Cache the blocks of a prompt that nobody uses any more. states: pages of a checkpoint after it."""
        parent, held = None, []
        for start in range(0, len(tokens), STEP):
            pages = self.pool.allocate(self.num_groups, PageKind.KV)
            for group, page in enumerate(pages):
                self.backend.arena[page] = (version, tuple(tokens[: start + STEP]), group)
            parent = self.prefix.insert(version, parent, tokens[start : start + STEP], pages, scope)
            held += pages
        if states:
            pages = self.pool.allocate(states, PageKind.KV)
            for at, page in enumerate(pages):
                self.backend.arena[page] = ("state", tuple(tokens), at)
            self.prefix.keep_checkpoint(parent, pages)
            held += pages
        self.prefix.release(held)

    def evict(self, count):
        for _ in range(count):
            self.prefix.evict(self.order.pop())

    def match(self, tokens, version=1, scope=None):
        return self.prefix.match(version, [*tokens, 0], scope)


class LateBackend(Backend):
    """Copies when the test says so, what is there then."""

    copying = CopyMode.BACKGROUND

    def __init__(self, num_pages):
        super().__init__(num_pages)
        self.copies = []

    def copy_out(self, pages, *, ahead=False):
        assert ahead, "somebody waits for it"
        if self.refuses:
            raise MemoryError("no memory")
        self.copies.append(LateCopy(self.arena, list(pages)))
        return self.copies[-1].image, self.copies[-1]

    @property
    def coming(self):
        """The pages of copies that have neither ended nor been cancelled."""
        return [page for copy in self.copies for page in copy.pages if not (copy.has_ended or copy.is_cancelled)]

    def end(self, count=1 << 30):
        """Let the first copies end."""
        for copy in [each for each in self.copies if not each.has_ended][:count]:
            copy.end()


class LateCopy:
    address = 0

    def __init__(self, arena, pages):
        self.arena, self.pages = arena, pages
        self.image = []
        self.has_ended = self.is_cancelled = self.fails = False

    def end(self):
        self.has_ended = True
        self.image += [self.arena[page] for page in self.pages]

    def wait_layer(self, layer, timeout):
        raise AssertionError("nobody waits")

    def is_done(self):
        return self.has_ended and not self.has_failed()

    def has_failed(self):
        return self.is_cancelled or self.fails

    def cancel(self):
        self.is_cancelled = True

    def is_quiet(self):
        return self.has_ended


class LateMemory(Memory):
    """Its tier copies ahead. horizon: see `PagesAhead`."""

    backend_type = LateBackend

    def __init__(self, num_pages=20, host_pages=20, horizon=10, **shapes):
        super().__init__(num_pages, host_pages, **shapes)
        self.now = 0.0
        self.ahead = self.tier.ahead = PagesAhead(
            self.tier,
            self.pool,
            self.order,
            self.backend,
            self.budget,
            PAGE_BYTES,
            horizon=horizon,
            clock=lambda: self.now,
            pages_of=lambda item: item.num_pages,
        )

    def settle(self):
        """Let copies begin and end until there is nothing more to copy."""
        self.ahead.advance()
        while not all(copy.has_ended for copy in self.backend.copies):
            self.backend.end()
            self.ahead.advance()
