"""Responses and stream events of POST /v1/responses, in OpenAI's format.

Tests: tests/server/api/test_responses.py
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from orjson import Fragment

from ..errors import ApiError
from ..text.output_parts import PartKind
from .blocks import BlockFormat, ContentBlock
from .response_tools import ResponseTools
from .responses import Body

_PREFIXES = {PartKind.CONTENT: "msg_", PartKind.REASONING: "rs_"}

_PARTS = {PartKind.CONTENT: "output_text", PartKind.REASONING: "reasoning_text"}
"""Types of the single part of a text item."""


class ResponsesFormat(BlockFormat):
    """Blocks as items of an output, and numbered events."""

    def __init__(self, told: Mapping[str, Fragment], tools: ResponseTools, *args: Any) -> None:
        """told: the fields of the request that the response repeats. tools: whose calls have types of their own."""
        super().__init__(*args)
        self._told = told
        self._tools = tools
        self._num_events = 0

    def opening(self) -> Iterator[Body]:
        for name in ("created", "in_progress"):
            yield self._event(name, response=self._response("in_progress"))

    def closing(self) -> Iterator[Body]:
        whole = self.whole()
        yield self._event(whole["status"], response=whole)

    def failed(self, error: ApiError, path: str) -> Body:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        told = {"error": {"code": code, "message": error.message}}
        return self._event("failed", response={**self._response("failed"), **told})

    def whole(self) -> Body:
        cut = self._generation.choices[0].finish_reason == "length"
        response = self._response("incomplete" if cut else "completed")
        response["output"] = [self._item(block, done=True) for block in self._blocks]
        response["usage"] = self._counts()
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        return response

    def _opened(self, block: ContentBlock) -> Iterator[Body]:
        yield self._event("output_item.added", output_index=block.index, item=self._item(block, done=False))
        if block.kind is not PartKind.CALL:
            yield self._event("content_part.added", part=self._part(block, ""), **self._position(block))

    def _added(self, block: ContentBlock, text: str, scores: list[Body]) -> Iterator[Body]:
        if block.kind is PartKind.CALL and self._tools.tool(block.name).kind != "function":
            return  # what the arguments are of is known at their end
        more = {"logprobs": scores} if block.kind is PartKind.CONTENT else {}
        yield self._event(f"{self._field(block)}.delta", delta=text, **self._position(block), **more)

    def _closed(self, block: ContentBlock) -> Iterator[Body]:
        text, position = block.text, self._position(block)
        if block.kind is PartKind.CALL:
            tool = self._tools.tool(block.name)
            if tool.kind == "function":
                yield self._event("function_call_arguments.done", name=tool.name, arguments=text, **position)
            elif tool.kind == "custom":
                said = tool.text(text)
                yield self._event("custom_tool_call_input.delta", delta=said, **position)
                yield self._event("custom_tool_call_input.done", input=said, **position)
        else:
            more = {"logprobs": block.scores} if block.kind is PartKind.CONTENT else {}
            yield self._event(f"{self._field(block)}.done", text=text, **position, **more)
            yield self._event("content_part.done", part=self._part(block, text), **position)
        yield self._event("output_item.done", output_index=block.index, item=self._item(block, done=True))

    def _event(self, name: str, /, **fields: Any) -> Body:
        number, self._num_events = self._num_events, self._num_events + 1
        return {"type": f"response.{name}", "sequence_number": number, **fields}

    def _field(self, block: ContentBlock) -> str:
        """The name of the block's text in events."""
        return _PARTS.get(block.kind, "function_call_arguments")

    def _position(self, block: ContentBlock) -> Body:
        position = {"item_id": self._id(block), "output_index": block.index}
        return position if block.kind is PartKind.CALL else {**position, "content_index": 0}

    def _id(self, block: ContentBlock) -> str:
        prefix = _PREFIXES.get(block.kind) or self._tools.tool(block.name).prefix
        return f"{prefix}{self._generation.id.removeprefix('resp_')}_{block.index}"

    def _part(self, block: ContentBlock, text: str) -> Body:
        part: Body = {"type": _PARTS[block.kind], "text": text}
        if block.kind is PartKind.CONTENT:
            part |= {"annotations": [], "logprobs": block.scores if text else []}
        return part

    def _item(self, block: ContentBlock, *, done: bool) -> Body:
        """The block as an item. done: all of its text has come; otherwise it is shown without text."""
        text = block.text if done else ""
        cut = block is self._blocks[-1] and self._generation.choices[0].finish_reason == "length"
        item: Body = {"id": self._id(block), "status": "incomplete" if cut else "completed" if done else "in_progress"}
        if block.kind is PartKind.CALL:
            tool = self._tools.tool(block.name)
            return {**item, "type": tool.call, "call_id": block.call_id, **tool.said(text)}
        parts = [self._part(block, text)] if done else []
        if block.kind is PartKind.REASONING:
            return {**item, "type": "reasoning", "summary": [], "content": parts}
        return {**item, "type": "message", "role": "assistant", "content": parts}

    def _counts(self) -> Body:
        usage = self.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._generation.num_reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }

    def _response(self, status: str) -> Body:
        """A response without output; it repeats the fields of the request."""
        params = self._generation.choices[0].request.params
        return {
            "id": self._generation.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "max_tool_calls": None,
            "model": self._generation.model,
            "output": [],
            "previous_response_id": None,
            "service_tier": None,
            "store": False,
            "temperature": params.temperature,
            "top_p": params.top_p if self._asked.top_p is None else self._asked.top_p,
            "usage": None,
            **self._told,
        }
