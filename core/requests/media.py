"""Images of a prompt: each is a file's bytes, and the positions of the prompt that its rows stand at.

No tensors here, and nothing is decoded.

Tests: tests/core/media/test_items.py
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...memory.pages.block import Key


@dataclass(slots=True)
class Ready:
    """A prepared image on its way to the encoder."""

    prepared: Any
    held: object
    """What accounts for its memory as long as it is referred to."""

    def take(self) -> Any:
        """The prepared image, for its one use; None afterwards."""
        prepared, self.prepared, self.held = self.prepared, None, None
        return prepared


@dataclass(frozen=True, slots=True)
class MediaItem:
    """An image in a prompt."""

    data: bytes
    """The file, as the client gave it."""
    digest: str
    """Of its pixels and of everything that decides what becomes of them before the encoder."""
    runs: tuple[tuple[int, int], ...]
    """First position in the prompt, and number of positions, of each run of its rows; in order. Between runs there are
    ordinary tokens, such as those that tell rows and columns of tiles."""
    grid: tuple[int, ...] = ()
    """Rows by time, height and width, of a model whose positions have these axes: see `axis_positions`. Then its rows
    are one run. Empty: each row has the next position."""

    settings: Mapping[str, Any] = field(default_factory=dict, kw_only=True, hash=False)
    """Of its image processor, where they are not the model's own: see `ImageSettings`."""
    held: object = field(default=None, kw_only=True, compare=False, repr=False)
    """What accounts for the file's memory as long as it is referred to."""

    ready: Ready | None = field(default=None, kw_only=True, compare=False, repr=False)
    """What the encoder needs of it, if it was decoded in this process a moment ago."""

    ends: tuple[int, int] = field(default=(0, 0), kw_only=True)
    """Tokens before its first row and behind its last one that experts of images take, too: see `VisionSpec.ends`."""

    @property
    def num_rows(self) -> int:
        return sum(count for _, count in self.runs)

    @property
    def position_shift(self) -> int:
        """What positions behind it differ by from those of as much text: they go on after its longer side."""
        return max(self.grid[1:]) - self.num_rows if self.grid else 0

    def places(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The runs within positions `begin … end`: the first position, the first row, and how many."""
        row = 0
        for first, count in self.runs:
            low, high = max(first, begin), min(first + count, end)
            if low < high:
                yield low, row + low - first, high - low
            row += count

    def spans(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """The positions within `begin … end` of its rows and ends: the first of each run, and how many."""
        last = len(self.runs) - 1
        for at, (first, count) in enumerate(self.runs):
            low, high = first - (at == 0) * self.ends[0], first + count + (at == last) * self.ends[1]
            low, high = max(low, begin), min(high, end)
            if low < high:
                yield low, high - low

    def with_ends(self, tokens: Sequence[int], ends: tuple[int, int]) -> MediaItem:
        """The item with those of its ends that a prompt has. ends: the tokens of both."""
        before, behind = self.runs[0][0] - 1, sum(self.runs[-1])
        has_first = before >= 0 and tokens[before] == ends[0]
        has_last = behind < len(tokens) and tokens[behind] == ends[1]
        return replace(self, ends=(int(has_first), int(has_last)))

    def to_wire(self) -> dict[str, Any]:
        """The item as plain data, for another process, which decodes it itself."""
        if self.ready is not None:
            self.ready.take()
        runs, settings = [list(run) for run in self.runs], dict(self.settings)
        return {"data": self.data, "digest": self.digest, "runs": runs, "grid": list(self.grid), "settings": settings}

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> MediaItem:
        runs = tuple((first, count) for first, count in data["runs"])
        return cls(data["data"], data["digest"], runs, tuple(data["grid"]), settings=data["settings"])


def position_shift(media: Sequence[MediaItem], place: int) -> int:
    """What is added to the place of a token in its sequence to get its position; by the images before it. At most 0."""
    return sum(item.position_shift for item in media if item.grid and sum(item.runs[-1]) <= place)


def keys_of(tokens: Sequence[int], media: Sequence[MediaItem], begin: int, scope: str = "") -> list[Key]:
    """The tokens from position `begin` on, with pairs at the positions of images: of their ends those of the token.
    scope: tells apart rows that an adapter changes.
    """
    found: list[Key] = list(tokens)
    for item in media:
        digest = item.digest + scope
        for position, count in item.spans(begin, begin + len(tokens)) if any(item.ends) else ():
            at = position - begin
            found[at : at + count] = [("", token) for token in tokens[at : at + count]]
        for position, row, count in item.places(begin, begin + len(tokens)):
            at = position - begin
            found[at : at + count] = [(digest, each) for each in range(row, row + count)]
    return found


def placed(
    tokens: Sequence[int], placeholder: int, rows: Sequence[int], marks: Collection[int] = ()
) -> list[tuple[tuple[int, int], ...]]:
    """The runs of images with so many rows each, which are all the placeholders among the tokens, in order.

    marks: further tokens that stand for rows. Raises ValueError if there are more or fewer placeholders than rows.
    """
    places = [position for position, token in enumerate(tokens) if token == placeholder or token in marks]
    if len(places) != sum(rows):
        raise ValueError(f"the prompt has {len(places)} places of images, and the images have {sum(rows)} rows")
    ends = list(accumulate(rows, initial=0))
    return [_runs(places[begin:end]) for begin, end in pairwise(ends)]


def _runs(places: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Rising positions as first positions and numbers of consecutive ones."""
    found: list[tuple[int, int]] = []
    for place in places:
        if found and sum(found[-1]) == place:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((place, 1))
    return tuple(found)
