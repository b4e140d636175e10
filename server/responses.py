"""The bodies we answer with. Plain dictionaries: they are built once per token."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from ..core.types import StepInfo
from .generation import Choice, Delta, Generation

Body = dict[str, Any]


class AnswerFormat:
    """Builds the answer, or the chunks of a streamed answer, to one call."""

    object: str
    chunk_object: str

    def __init__(
        self, generation: Generation, *, token_ids: bool = False, step_info: bool = False, usage_chunk: bool = False
    ) -> None:
        """token_ids, step_info: what to add to every answer; usage_chunk: whether a stream ends with its usage."""
        self._generation = generation
        self._token_ids = token_ids
        self._step_info = step_info
        self._usage_chunk = usage_chunk
        self._created = int(time.time())
        self._begun: set[int] = set()
        self._steps: list[StepInfo] = []

    def note(self, delta: Delta) -> None:
        """Remembers a delta's step for `answer`."""
        if self._step_info and delta.step is not None:
            self._steps.append(delta.step)

    def answer(self) -> Body:
        """The whole answer, once all deltas were read; `step` is the most that any of its steps held."""
        body = self._body(self.object, [self._with_tokens(c) for c in self._generation.choices])
        body["usage"] = self.usage()
        if self._steps:
            body["step"] = {
                "id": max(step.step_id for step in self._steps),
                "requests": max(step.num_requests for step in self._steps),
                "adapters": max(step.num_adapters for step in self._steps),
                "tokens": max(step.num_tokens for step in self._steps),
            }
        return body

    def chunks(self, delta: Delta) -> Iterator[Body]:
        """What to stream for a delta; nothing while its text is held back, unless its tokens or step are asked for."""
        wanted = delta.text or delta.finish_reason or self._step_info or (self._token_ids and delta.token_ids)
        if not wanted:
            return
        first = delta.index not in self._begun
        self._begun.add(delta.index)
        for chunk in self._chunks(delta, first):
            if self._usage_chunk:
                chunk["usage"] = None
            if self._step_info and delta.step is not None:
                step = delta.step
                chunk["step"] = {
                    "id": step.step_id,
                    "requests": step.num_requests,
                    "adapters": step.num_adapters,
                    "tokens": step.num_tokens,
                }
            yield chunk

    def last_chunk(self) -> Body | None:
        """The stream's usage, if it was asked for."""
        if not self._usage_chunk:
            return None
        return {**self._body(self.chunk_object, []), "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        prompt, generated = self._generation.num_prompt_tokens, self._generation.num_generated_tokens
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}

    def _body(self, kind: str, choices: list[Body]) -> Body:
        return {
            "id": self._generation.id,
            "object": kind,
            "created": self._created,
            "model": self._generation.model,
            "choices": choices,
        }

    def _with_tokens(self, choice: Choice) -> Body:
        body = self._choice(choice)
        if self._token_ids:
            body["token_ids"] = choice.token_ids
        return body

    def _choice(self, choice: Choice) -> Body:
        raise NotImplementedError

    def _chunks(self, delta: Delta, first: bool) -> Iterator[Body]:
        raise NotImplementedError


class CompletionFormat(AnswerFormat):
    """POST /v1/completions."""

    object = chunk_object = "text_completion"

    def _choice(self, choice: Choice) -> Body:
        body = {"index": choice.index, "text": choice.text, "logprobs": None, "finish_reason": choice.finish_reason}
        if self._token_ids:
            body["prompt_token_ids"] = choice.prompt_token_ids
        return body

    def _chunks(self, delta: Delta, first: bool) -> Iterator[Body]:
        choice = {"index": delta.index, "text": delta.text, "logprobs": None, "finish_reason": delta.finish_reason}
        if self._token_ids:
            choice["token_ids"] = delta.token_ids
            if first:
                choice["prompt_token_ids"] = self._generation.choices[delta.index].prompt_token_ids
        yield self._body(self.chunk_object, [choice])


class ChatFormat(AnswerFormat):
    """POST /v1/chat/completions."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def answer(self) -> Body:
        body = super().answer()
        if self._token_ids:
            body["prompt_token_ids"] = self._generation.choices[0].prompt_token_ids
        return body

    def _choice(self, choice: Choice) -> Body:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {"index": choice.index, "message": message, "logprobs": None, "finish_reason": choice.finish_reason}

    def _chunks(self, delta: Delta, first: bool) -> Iterator[Body]:
        if first:
            opening = self._chunk(delta.index, {"role": "assistant", "content": ""}, None)
            if self._token_ids:
                opening["prompt_token_ids"] = self._generation.choices[delta.index].prompt_token_ids
            yield opening
        chunk = self._chunk(delta.index, {"content": delta.text} if delta.text else {}, delta.finish_reason)
        if self._token_ids:
            chunk["choices"][0]["token_ids"] = delta.token_ids
        yield chunk

    def _chunk(self, index: int, delta: Body, finish_reason: str | None) -> Body:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self._body(self.chunk_object, [choice])
