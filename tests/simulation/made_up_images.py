"""Images of made-up prompts, whose positions see each other, and what the KV of a position tells of its input."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from chorus.core.requests.blocks import PromptBlocks
from chorus.core.requests.media import MediaItem
from chorus.core.requests.request import Request

if TYPE_CHECKING:
    from chorus.core.engine import Engine
    from chorus.memory.pages.block import Key

PICTURES = {"one": (1,), "short": (3,), "long": (8,), "of two rows": (4, 4)}
"""Numbers of positions of each run, by an image's digest; one ordinary token is between two runs."""
LONGEST_PROMPT = 34
"""Tokens of a prompt with images that others share: few others fit after it."""


class Prompt(NamedTuple):
    """A prompt's tokens, and its images."""

    tokens: list[int]
    media: tuple[MediaItem, ...] = ()

    def first(self, count: int) -> Prompt:
        """Its first tokens, at most `count`; it ends before an image that would be cut."""
        whole = tuple(item for item in self.media if sum(item.runs[-1]) <= count)
        end = self.media[len(whole)].runs[0][0] if len(whole) < len(self.media) else count
        return Prompt(self.tokens[: min(end, count)], whole)

    def then(self, tokens: Sequence[int]) -> Prompt:
        return Prompt([*self.tokens, *tokens], self.media)


def with_images(tokens: Sequence[int], token: int, rng: random.Random) -> Prompt:
    """Put images into a prompt, never next to each other. token: the one at their positions."""
    prompt, media = list[int](), list[MediaItem]()
    places = rng.sample(range(len(tokens) + 1), min(len(tokens), rng.choice([0, 1, 1, 2, 3])))
    for at in range(len(tokens) + 1):
        if at in places:
            digest = rng.choice(list(PICTURES))
            runs = list[tuple[int, int]]()
            for count in PICTURES[digest]:
                prompt += [2] * bool(runs)
                runs.append((len(prompt), count))
                prompt += [token] * count
            media.append(MediaItem(b"", digest, tuple(runs)))
        prompt += tokens[at : at + 1]
    return Prompt(prompt, tuple(media)).first(LONGEST_PROMPT)


def inputs_of(request: Request, tokens: Sequence[int]) -> Sequence[int]:
    """What the KV of each position tells of it: its token or its image's row, or all of a prompt that is one block.

    tokens: the request's, and those that may follow them.
    """
    if (prompt := request.blocks.prompt) and tokens:
        count = min(request.num_prompt_tokens, len(tokens))
        return [*(number_of(prompt, place) for place in range(count)), *tokens[count:]]
    if not request.media:
        return tokens
    found = list(tokens)
    for item in request.media:
        row = 0
        for first, count in item.runs:
            found[first : first + count] = [number_of(item.digest, row + each) for each in range(count)][
                : max(0, len(tokens) - first)
            ]
            row += count
    return found


def input_of(key: Key) -> int:
    """What the KV of a position of a cached block is to tell of it."""
    return key if isinstance(key, int) else number_of(*key)


def number_of(digest: str, row: int) -> int:
    """A number that no token has."""
    return (1 << 20) + zlib.crc32(f"{digest} {row}".encode())


def are_whole(blocks: PromptBlocks, start: int, end: int) -> bool:
    """True if a step with positions `start … end` has all of each block, or nothing of it."""
    return all(last <= start or first >= end or start <= first < last <= end for first, last in blocks.spans)


class EncodesAtOnce:
    """An encoder of images that has each image's rows at once: none are needed."""

    num_pending = num_encoded = num_found = 0
    engine: Engine

    @property
    def cache(self) -> Any:
        return self

    num_bytes = 0

    def __contains__(self, request_id: str) -> bool:
        return False

    def submit(self, request: Request) -> None:
        self.engine.scheduler.add(request)
        if request.adapter is not None:
            self.engine.store.let_go(request.adapter)

    def take(self) -> list[Any]:
        return []

    pending = take

    def cancel(self, request_id: str) -> None:
        """Nothing waits here."""

    def num_waiting(self, tenant: str) -> int:
        return 0

    def has_work(self) -> bool:
        return False

    def clear(self) -> int:
        return 0

    def close(self) -> None:
        """There is no thread."""
