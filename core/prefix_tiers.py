"""The tiers of cached prefixes below the page pool: host memory, and files below it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ..memory.disk.adapter_contents import AdapterContents
from ..memory.disk.folder import BlockFolder
from ..memory.disk.keys import BlockKeys
from ..memory.disk.remembered import RememberedHashes
from ..memory.disk.tier import DiskTier
from ..memory.transfers.cached_pages import CachedPages
from ..memory.transfers.pages_ahead import PagesAhead
from ..memory.transfers.swap_backend import CopyMode, SwapBackend

if TYPE_CHECKING:
    from ..memory.adapters.reclaimer import Reclaimer
    from ..memory.adapters.store import AdapterStore
    from ..memory.pages.eviction import RestoreCosts
    from ..memory.pages.pool import PagePool
    from ..memory.pages.prefix import PrefixCache
    from .config import EngineConfig
    from .executors.base import Executor


class Owner(Protocol):
    """The engine whose prefixes are kept."""

    config: EngineConfig
    executor: Executor
    clock: Callable[[], float]
    pool: PagePool
    prefix: PrefixCache
    store: AdapterStore
    reclaimer: Reclaimer
    costs: RestoreCosts
    host: CachedPages | None

    def wake(self) -> None: ...


def open_host_tier(engine: Owner) -> CachedPages | None:
    """Return the tier for cached pages that are evicted, which the prefix cache uses from now on; None if there is to
    be none. Raises ValueError if it was asked for, and steps would wait for its copies.
    """
    swaps, config, layout = engine.executor.swaps, engine.config, engine.executor.layout
    wish, mode = config.host_prefix_cache, CopyMode.WAITED if swaps is None else swaps.copying
    if wish == "on" and mode is CopyMode.WAITED:
        raise ValueError(
            "host_prefix_cache is 'on', but steps of this executor would wait for its copies: a GPU needs CuPy and "
            "pinned memory, and several GPUs have no such copies; leave it out"
        )
    if swaps is None or not config.prefix_cache or not config.host_bytes:
        return None
    if wish == "off" or (wish == "auto" and mode is not CopyMode.AT_ONCE):
        return None
    windowed = [group for group, window in enumerate(layout.group_windows) if window is not None]
    budget = engine.store.images.budget
    tier = CachedPages(swaps, budget, engine.prefix, engine.costs, layout.page_bytes, windowed, engine.clock)
    if mode is CopyMode.BACKGROUND:
        tier.ahead = _pages_ahead(engine, tier, swaps)
    engine.prefix.tier = tier
    return tier


def _pages_ahead(engine: Owner, tier: CachedPages, swaps: SwapBackend) -> PagesAhead:
    """Copy ahead what two of the largest steps may evict, but not most of the pool, nor more than host memory holds."""
    layout, pool, budget = engine.executor.layout, engine.pool, engine.store.images.budget
    step_pages = -(-engine.config.max_num_batched_tokens // layout.block_tokens) * layout.pages_per_block
    step_pages = max(step_pages, layout.fixed_pages(1))
    host_pages = budget.capacity_bytes // layout.page_bytes
    return PagesAhead(
        tier,
        pool,
        engine.reclaimer.order,
        swaps,
        budget,
        layout.page_bytes,
        horizon=min(2 * step_pages, pool.num_usable // 4, host_pages // 2),
        clock=engine.clock,
        pages_of=_pages_of,
    )


def _pages_of(item: Any) -> int:
    """The pages of an adapter or of merged weights, in the order of eviction."""
    return item.num_pages


def open_disk_tier(engine: Owner) -> DiskTier | None:
    """Return the tier of files below host memory, which that uses from now on; None if there is to be none. Raises
    ValueError if the folder can't be used.
    """
    config, executor, host = engine.config, engine.executor, engine.host
    swaps = executor.swaps
    if config.kv_cache_dir is None or config.kv_cache_disk_bytes is None:
        return None
    from .kv_identity import identity_of  # needs torch

    if not executor.layout.groups:
        raise ValueError(
            "kv_cache_dir is set, but files hold the KV cache of blocks of tokens, and no layer of the model has any; "
            "leave it out"
        )
    if host is None or swaps is None:
        raise ValueError(
            "kv_cache_dir is set, but this engine's executor copies no prefixes that leave the page pool to host "
            "memory, from where files are written; leave it out"
        )
    page_bytes = len(swaps.bytes_of(swaps.new_image()))
    folder = BlockFolder(config.kv_cache_dir, config.kv_cache_disk_bytes, page_bytes)
    remembered = RememberedHashes(config.kv_cache_dir / "hashes", folder.seal_of)
    keys = BlockKeys(identity_of(config, executor.layout, type(executor).__name__, remembered))
    host.disk = DiskTier(
        folder,
        keys,
        swaps,
        host=host,
        prefix=engine.prefix,
        budget=engine.store.images.budget,
        costs=engine.costs,
        page_bytes=executor.layout.page_bytes,
        content_of=engine.store.content_of,
        parts_of=engine.store.parts_of,
        contents=AdapterContents(engine.store, remembered, keys.identity, engine.wake),
        clock=engine.clock,
        wake=engine.wake,
    )
    return host.disk
