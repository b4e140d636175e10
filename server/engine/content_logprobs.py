"""Assigns log-probabilities to the content of a choice that also has reasoning and tool calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ...core.requests.types import TokenLogprobs
from ..text.output_parts import Part, PartKind


class ContentLogprobs:
    """Assigns each piece of content its tokens' log-probabilities, once it is known to be content.

    A token belongs to the first piece that contains any of its text. Tokens without text (parts of a character) belong
    to the piece at their position; at the end, to the last piece. The stop token that ends a choice is not given.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, int, TokenLogprobs]] = deque()  # each with the begin and end of its text
        self._ends_with = PartKind.CONTENT

    def given(
        self,
        parts: Sequence[Part],
        offsets: Sequence[int],
        scores: Sequence[TokenLogprobs],
        position: int,
        *,
        final: bool,
    ) -> list[Part]:
        """The parts with their log-probabilities. offsets, scores: of new tokens. position: the end of the last of
        these tokens' text. final: no tokens follow.
        """
        self._waiting.extend(zip(offsets, (*offsets[1:], position), scores, strict=False))
        scored = [self._with_logprobs(part) if part.kind is PartKind.CONTENT else part for part in parts]
        if scored:
            self._ends_with = scored[-1].kind
        if final and self._waiting and self._ends_with is PartKind.CONTENT:
            last = scored.pop() if scored else Part(PartKind.CONTENT, "")
            scored.append(last._replace(scores=(*last.scores, *(score for _, _, score in self._waiting))))
        return scored

    def _with_logprobs(self, part: Part) -> Part:
        """A piece of content with its tokens' log-probabilities; those of tokens before it belong to no content."""
        waiting, scores = self._waiting, []
        while waiting and waiting[0][0] < part.at + len(part.text):
            begin, end, score = waiting.popleft()
            if end > part.at or begin >= part.at:
                scores.append(score)
        return part._replace(scores=tuple(scores))
