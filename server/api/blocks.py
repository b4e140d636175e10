"""A completion as a sequence of blocks: the common part of OpenAI's Responses and Anthropic's messages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

from ..engine.generation import Choice, Delta, Generation
from ..text.output_parts import Part, PartKind
from .logprobs import LogprobFormat
from .openai import GenerationRequest
from .responses import Body, BodyFormat, Echo


@dataclass(slots=True)
class ContentBlock:
    """A stretch of content or of reasoning, or a tool call."""

    kind: PartKind
    index: int
    call_id: str = ""
    name: str = ""
    """Of a tool call."""
    pieces: list[str] = field(default_factory=list)
    """Pieces of its text, or of a tool call's arguments."""
    scores: list[Body] = field(default_factory=list)
    """Logprobs of the content's tokens, in the format of chat completions."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class BlockFormat(BodyFormat):
    """Makes blocks from the deltas of one choice, and events from the blocks."""

    end = b""

    def __init__(
        self, asked: GenerationRequest, generation: Generation, scores: LogprobFormat, echoes: Sequence[Echo]
    ) -> None:
        super().__init__(asked, generation, scores, echoes)
        self._blocks: list[ContentBlock] = []

    def answer(self) -> Body:
        (choice,) = self._generation.choices
        for _ in self.chunks(choice):
            pass
        return self.whole()

    def chunks(self, delta: Delta | Choice) -> Iterator[Body]:
        """Events of a delta, or of a whole completion; each closes the block that it does not continue."""
        block = self._blocks[-1] if self._blocks else None
        for part in delta.parts or ():
            block = yield from self._with_part(block, part)
        if delta.finish_reason is not None:
            if block is None:
                block = yield from self._begun_block(Part(PartKind.CONTENT, ""))
            yield from self._closed(block)

    def _with_part(self, block: ContentBlock | None, part: Part) -> Generator[Body, None, ContentBlock]:
        """Events of a part, and its block: the last one or a new one."""
        if block is None or part.kind is PartKind.CALL or part.kind not in (block.kind, PartKind.ARGUMENTS):
            if block is not None:
                yield from self._closed(block)
            block = yield from self._begun_block(part)
        if part.kind is not PartKind.CALL:
            block.pieces.append(part.text)
            scores = list(self._scores.chat(part.scores, self._logprobs or 0)["content"])
            block.scores += scores
            yield from self._added(block, part.text, scores)
        return block

    def _begun_block(self, part: Part) -> Generator[Body, None, ContentBlock]:
        name = part.text if part.kind is PartKind.CALL else ""
        block = ContentBlock(part.kind, len(self._blocks), part.id, name)
        self._blocks.append(block)
        yield from self._opened(block)
        return block

    @abstractmethod
    def whole(self) -> Body:
        """The whole response."""

    @abstractmethod
    def _opened(self, block: ContentBlock) -> Iterator[Body]:
        """Events at the start of a block."""

    @abstractmethod
    def _added(self, block: ContentBlock, text: str, scores: list[Body]) -> Iterator[Body]:
        """Events for a piece of a block's text."""

    @abstractmethod
    def _closed(self, block: ContentBlock) -> Iterator[Body]:
        """Events at the end of a block."""
