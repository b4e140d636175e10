"""Responses and stream events of POST /v1/messages, in Anthropic's format."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

from pydantic_core import from_json

from ..text.output_parts import PartKind
from .blocks import BlockFormat, ContentBlock
from .responses import Body

_BEGINNINGS: dict[PartKind, Body] = {
    PartKind.CONTENT: {"type": "text", "text": ""},
    PartKind.REASONING: {"type": "thinking", "thinking": "", "signature": ""},
}

_DELTAS = {
    PartKind.CONTENT: ("text_delta", "text"),
    PartKind.REASONING: ("thinking_delta", "thinking"),
    PartKind.CALL: ("input_json_delta", "partial_json"),
}


def signature_of(thinking: str) -> str:
    """The signature of a block of thinking: a digest of its text. Clients send thinking back only if it has one; nobody
    verifies it.
    """
    return base64.b64encode(blake2b(thinking.encode("utf-8", "surrogatepass"), digest_size=24).digest()).decode()


class MessagesFormat(BlockFormat):
    """Blocks in the format of Anthropic's messages."""

    def opening(self) -> Iterator[Body]:
        yield {"type": "message_start", "message": self._message([])}

    def closing(self) -> Iterator[Body]:
        ended = self._ended()
        yield {"type": "message_delta", "delta": ended, "usage": self._counts()}
        yield {"type": "message_stop"}

    def whole(self) -> Body:
        return {**self._message([self._block(block) for block in self._blocks]), **self._ended()}

    def _opened(self, block: ContentBlock) -> Iterator[Body]:
        begun = _BEGINNINGS.get(block.kind) or self._call(block, {})
        yield {"type": "content_block_start", "index": block.index, "content_block": begun}

    def _added(self, block: ContentBlock, text: str, scores: list[Body]) -> Iterator[Body]:
        kind, name = _DELTAS[block.kind]
        yield {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, name: text}}

    def _closed(self, block: ContentBlock) -> Iterator[Body]:
        if block.kind is PartKind.REASONING:
            signed = {"type": "signature_delta", "signature": signature_of(block.text)}
            yield {"type": "content_block_delta", "index": block.index, "delta": signed}
        yield {"type": "content_block_stop", "index": block.index}

    def _block(self, block: ContentBlock) -> Body:
        """The block with all of its text."""
        if block.kind is not PartKind.CALL:
            signed = {"signature": signature_of(block.text)} if block.kind is PartKind.REASONING else {}
            return {**_BEGINNINGS[block.kind], _DELTAS[block.kind][1]: block.text, **signed}
        try:
            arguments = from_json(block.text or "{}", allow_partial="trailing-strings")  # of a truncated tool call
        except ValueError:
            arguments = {}
        return self._call(block, arguments)

    def _call(self, block: ContentBlock, arguments: Any) -> Body:
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}

    def _ended(self) -> Body:
        (choice,) = self._generation.choices
        stopped = choice.stop_reason if isinstance(choice.stop_reason, str) else None
        if choice.finish_reason == "length":
            produced = choice.request.params.max_tokens
            is_cut = produced is not None and produced < (self._asked.asked_tokens or 0)
            reason = "model_context_window_exceeded" if is_cut else "max_tokens"
        elif stopped is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if any(block.kind is PartKind.CALL for block in self._blocks) else "end_turn"
        return {"stop_reason": reason, "stop_sequence": stopped}

    def _counts(self) -> Body:
        usage = self.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "output_tokens": usage["completion_tokens"],
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
        }

    def _message(self, content: list[Body]) -> Body:
        return {
            "id": self._generation.id,
            "type": "message",
            "role": "assistant",
            "model": self._generation.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._counts(),
        }
