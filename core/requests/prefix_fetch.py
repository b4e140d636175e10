"""A request's copy of the cached blocks that it begins with, from host memory into pages of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...memory.pages.block import Block
from ...memory.transfers.swapped_kv import KvImage


@dataclass(eq=False)
class Fetch:
    """What a request that begins with cached blocks copies from host memory."""

    blocks: list[Block]
    places: list[tuple[int, Block, int]]
    """Places in the request's pages, with block and page group."""
    begun: float
    """Time in seconds."""
    checkpoint: list[int] = field(default_factory=list)
    """Pages for the state after the last block, if that is in host memory."""
    image: KvImage | None = None
    """The images, once the copy has begun."""
