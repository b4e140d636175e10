"""A run of blocks that is read from files for waiting requests.

Tests: tests/core/test_prefix_tiers.py, tests/simulation
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ..pages.block import Block, Key
from .folder import BlockFile, SealedBlock


@dataclass(frozen=True, slots=True)
class Prompt:
    """What names the blocks of a prompt. tokens: all of it; at least one is left to compute."""

    version: int
    tokens: Sequence[Key]
    scope: tuple[str, str]
    changed_from: int
    block_tokens: int

    @property
    def num_blocks(self) -> int:
        return (len(self.tokens) - 1) // self.block_tokens


@dataclass(frozen=True, slots=True)
class Reader:
    """A request that a run is read for."""

    is_wanted: Callable[[], bool]
    """Returns False once it has ended: then the adapter's version may be gone."""
    is_waiting: Callable[[], bool]
    """Returns True until it begins."""


@dataclass(eq=False)
class ReadAhead:
    """The blocks of a prompt that come after those that the prefix cache knows.

    It waits until the content hash of its adapter is known and there is room in host memory; then it is read.
    """

    prompt: Prompt
    readers: list[Reader]
    deadline: float | None = None
    """When to compute the tokens instead; None before its request is next, or it begins."""
    learn_until: float | None = None
    """The same, while its adapter's content hash is not known."""
    content: Future[Any] | None = None
    """Finds out the content hash of its adapter."""
    instead: ReadAhead | None = None
    """Another run that reads the same."""
    is_second: bool = False
    """True if the first one made room for a request that was next."""
    has_begun: bool = False
    tokens: list[tuple[Key, ...]] = field(default_factory=list)
    """Of each block that is read."""
    files: list[BlockFile] = field(default_factory=list)
    parent: Block | None = None
    num_reserved: int = 0
    kept: list[Block] = field(default_factory=list)
    """The blocks that its requests begin with, whose images are dropped last until then."""
    found: dict[int, SealedBlock] = field(default_factory=dict)
    """What was read, by its index, until it is taken in."""
    futures: list[Future[None]] = field(default_factory=list)
    """Calls on reading threads, each of which reads the next few blocks."""
    indices: Iterator[int] = field(default_factory=itertools.count)
    end: int = 0
    """The index of the first block that could not be read."""
    num_taken: int = 0
    has_ended: bool = False
    num_pages: int = 0
    seconds: float = 0.0
    """Time that threads spent reading it; a step may notice the end much later."""

    @property
    def needs_content(self) -> bool:
        """True until the content hash of its adapter was found, or can't be."""
        return self.content is not None and not self.content.done()

    @property
    def is_over(self) -> bool:
        """True if all was taken in, or no more is to be."""
        return self.has_ended or (self.has_begun and self.num_taken >= self.end)

    @property
    def is_wanted(self) -> bool:
        return any(each.is_wanted() for each in self.readers)

    @property
    def is_awaited(self) -> bool:
        """True while any of its requests has not begun."""
        return any(each.is_waiting() for each in self.readers)
