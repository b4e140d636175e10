"""Response bodies. They are plain dictionaries, because one is built per token."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...core.requests.types import StepInfo, TokenLogprobs
from ..engine.generation import Choice, Delta, Generation
from ..errors import ApiError
from ..text.output_parts import ParsedMessage, Part, PartKind
from .logprobs import Body, LogprobFormat
from .openai import GenerationRequest
from .sse import DONE

TOKENS_PER_LOGPROB = 16
TEXT_PER_LOGPROB = 1024


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that its completion begins with: the text, and where its tokens begin in it."""

    text: str
    offsets: Sequence[int] = ()


class BodyFormat(ABC):
    """Builds the response, or the chunks of a stream, for one API request."""

    end = DONE
    """The end of a stream, after its last chunk."""

    def __init__(
        self, asked: GenerationRequest, generation: Generation, scores: LogprobFormat, echoes: Sequence[Echo]
    ) -> None:
        """echoes: one per choice, or none at all."""
        self._asked = asked
        self._generation = generation
        self._scores = scores
        self._echoes = echoes
        self._logprobs = asked.num_logprobs
        self._created = int(time.time())
        self._begun: set[int] = set()
        self._steps: list[StepInfo] = []

    def note(self, delta: Delta) -> None:
        """Remember a delta's step for `answer`."""
        if self._asked.return_step_info and delta.step is not None:
            self._steps.append(delta.step)

    @abstractmethod
    def answer(self) -> Body:
        """The whole response, once all deltas were read."""

    def opening(self) -> Iterator[Body]:
        """Chunks to stream before the first delta."""
        return iter(())

    @abstractmethod
    def chunks(self, delta: Delta) -> Iterator[Body]:
        """Chunks to stream for a delta."""

    def closing(self) -> Iterator[Body]:
        """Chunks to stream after the last delta."""
        return iter(())

    def failed(self, error: ApiError, path: str) -> Body:
        """The last chunk of a stream that ends with an error. path: of the request."""
        return error.body(path)

    @property
    def num_logprobs(self) -> float:
        """Amount to write of the whole response, see `logprobs_of`."""
        return sum(map(self.logprobs_of, self._generation.choices))

    def logprobs_of(self, part: Delta | Choice) -> float:
        """Amount to write of a choice or of a delta's chunks: alternatives of all tokens, plus some for the tokens
        themselves and for text.
        """
        asked, choice = self._asked, self._generation.choices[part.index]
        count, of_ids = (self._logprobs or 0) + 1, asked.return_token_ids / TOKENS_PER_LOGPROB
        scores = len(part.logprobs) * count + len(part.token_ids) * of_ids + len(part.text) / TEXT_PER_LOGPROB
        if part.index not in self._begun:
            of_prompt = max((asked.prompt_logprobs or 0) + 1, count if self._echoes else 0)
            scores += len(part.prompt_logprobs or ()) * of_prompt + len(choice.prompt_token_ids) * of_ids
        return scores

    def usage(self, to_come: int = 0) -> Body:
        """The token counts so far. to_come: generated tokens reserved for a later chunk."""
        generation = self._generation
        prompt, generated = generation.num_prompt_tokens, generation.num_generated_tokens - to_come
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": generation.num_accepted_drafts,
                "rejected_prediction_tokens": generation.num_rejected_drafts,
            },
        }


class ChoiceFormat(BodyFormat):
    """A response that lists its choices."""

    object: str
    chunk_object: str
    more: Body = {}
    """Fields of a whole response that only their types require."""

    def answer(self) -> Body:
        """The whole response, once all deltas were read; `step` holds the maximum of its steps."""
        body = self._body(self.object, [self._with_tokens(c) for c in self._generation.choices])
        body["usage"] = self.usage()
        body.update(self.more)
        if self._steps:
            body["step"] = _most(self._steps)
        return body

    def chunks(self, delta: Delta) -> Iterator[Body]:
        """Chunks to stream for a delta; none while its text is held back, unless more than text is requested."""
        asked = self._asked
        first = delta.index not in self._begun
        if not self._shows(delta, first):
            return
        self._begun.add(delta.index)
        *openings, last = self._chunks(delta, first)
        for chunk in (*openings, last):
            if asked.stream_options.include_usage:
                to_come = 0 if chunk is last else len(delta.token_ids)
                chunk["usage"] = self.usage(to_come) if asked.continuous_usage else None
            if asked.return_step_info and delta.step is not None:
                chunk["step"] = _most([delta.step])
            yield chunk

    def _shows(self, delta: Delta, first: bool) -> bool:
        asked = self._asked
        return bool(
            (delta.text if delta.parts is None else delta.parts)
            or delta.finish_reason
            or asked.return_step_info
            or (delta.token_ids and (asked.return_token_ids or asked.continuous_usage))
            or (delta.parts is None and delta.logprobs)
            or (first and (self._echoes or asked.prompt_logprobs is not None))
        )

    def closing(self) -> Iterator[Body]:
        """The stream's usage, if requested."""
        if self._asked.stream_options.include_usage:
            yield {**self._body(self.chunk_object, []), "usage": self.usage()}

    def _body(self, kind: str, choices: list[Body]) -> Body:
        return {
            "id": self._generation.id,
            "object": kind,
            "created": self._created,
            "model": self._generation.model,
            "choices": choices,
            "system_fingerprint": None,
        }

    def _with_tokens(self, choice: Choice) -> Body:
        return {**self._choice(choice), "token_ids": choice.token_ids if self._asked.return_token_ids else None}

    def _about_prompt(self, choice: Choice) -> Body:
        """The prompt's tokens and log-probabilities as requested: once per choice, or with its first chunk."""
        asked, body = self._asked, {}
        if asked.return_token_ids:
            body["prompt_token_ids"] = choice.prompt_token_ids
        if asked.prompt_logprobs is not None:
            body["prompt_logprobs"] = self._scores.prompt(choice.prompt_logprobs or (), asked.prompt_logprobs)
        return body

    @abstractmethod
    def _choice(self, choice: Choice) -> Body:
        """A choice of a whole response."""

    @abstractmethod
    def _chunks(self, delta: Delta, first: bool) -> Iterator[Body]:
        """The choices in the chunks of one delta."""


def _most(steps: Sequence[StepInfo]) -> Body:
    """The maximum of these steps."""
    return {
        "id": max(step.step_id for step in steps),
        "requests": max(step.num_requests for step in steps),
        "adapters": max(step.num_adapters for step in steps),
        "tokens": max(step.num_tokens for step in steps),
    }


class CompletionFormat(ChoiceFormat):
    """POST /v1/completions."""

    object = chunk_object = "text_completion"

    def _choice(self, choice: Choice) -> Body:
        return {**self._part(choice, begins=True), **NOTHING_OF_PROMPT, **self._about_prompt(choice)}

    def _chunks(self, delta: Delta, first: bool) -> Iterator[Body]:
        body = self._part(delta, begins=first)
        if self._asked.return_token_ids:
            body["token_ids"] = delta.token_ids
        if first:
            body.update(self._about_prompt(self._generation.choices[delta.index]))
        yield self._body(self.chunk_object, [body])

    def _part(self, part: Choice | Delta, *, begins: bool) -> Body:
        """A choice or a part of it. begins: it is the choice's beginning, which echoes the prompt."""
        text = part.text
        if begins and self._echoes:
            text = self._echoes[part.index].text + text
        return {
            "index": part.index,
            "text": text,
            "logprobs": self._scores_of(part, begins=begins),
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }

    def _scores_of(self, part: Choice | Delta, *, begins: bool) -> Body | None:
        count = self._logprobs
        if count is None:
            return None
        token_ids, scores, offsets = list(part.token_ids), list(part.logprobs), list(part.offsets)
        if self._echoes:
            echo, choice = self._echoes[part.index], self._generation.choices[part.index]
            offsets = [len(echo.text) + offset for offset in offsets]
            if begins:
                token_ids = [*choice.prompt_token_ids, *token_ids]
                scores = [None, *(choice.prompt_logprobs or ()), *scores]
                offsets = [*echo.offsets, *offsets]
        return self._scores.completion(token_ids, scores, offsets, count)


NOTHING_OF_PROMPT = {"prompt_token_ids": None, "prompt_logprobs": None}
"""vLLM's fields about the prompt, null if not requested."""

REASONING = ("reasoning_content", "reasoning")
"""Names of reasoning: DeepSeek's, which most clients read, and the newer one of vLLM and OpenRouter."""

NO_REASONING = {REASONING[0]: None}
"""Fields of a message or delta without reasoning: clients read both."""

NOTHING_ELSE = {"refusal": None, "annotations": None, "audio": None, "function_call": None, "tool_calls": None}
"""Fields that a message can have in addition to its text, in OpenAI's types."""

NOTHING = Part(PartKind.CONTENT, "")


def _delta(part: Part) -> Body:
    """A part in the format of a stream's chunks."""
    if part.kind is PartKind.CONTENT:
        return {"content": part.text}
    if part.kind is PartKind.REASONING:
        return dict.fromkeys(REASONING, part.text)
    if part.kind is PartKind.CALL:
        function = {"name": part.text, "arguments": ""}
        return {"tool_calls": [{"index": part.call, "id": part.id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": part.call, "function": {"arguments": part.text}}]}


class ChatFormat(ChoiceFormat):
    """POST /v1/chat/completions."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    more = {"service_tier": None}

    def usage(self, to_come: int = 0) -> Body:
        usage = super().usage(to_come)
        usage["completion_tokens_details"]["reasoning_tokens"] = self._generation.num_reasoning_tokens
        return usage

    def answer(self) -> Body:
        return {**super().answer(), **NOTHING_OF_PROMPT, **self._about_prompt(self._generation.choices[0])}

    def _choice(self, choice: Choice) -> Body:
        said = ParsedMessage()
        said.add(choice.parts)
        begun = self._begun_with(choice.index)
        message = {"role": "assistant", "content": begun + said.content, **NOTHING_ELSE, **NO_REASONING}
        if said.reasoning:
            message.update(dict.fromkeys(REASONING, said.reasoning))
        if said.calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in said.calls
            ]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._named(self._shown_logprobs(choice)),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def _shown_logprobs(self, choice: Choice) -> Sequence[TokenLogprobs]:
        """Log-probabilities of the content's tokens; of all tokens if the deltas are not parsed into parts."""
        if self._asked.return_token_ids:
            return choice.logprobs
        return [score for part in choice.parts for score in part.scores]

    def _chunks(self, delta: Delta, first: bool) -> Iterator[Body]:
        if first:
            begun = self._begun_with(delta.index)
            opening = self._chunk(delta.index, {"role": "assistant", "content": begun, "refusal": None})
            yield {**opening, **self._about_prompt(self._generation.choices[delta.index])}
        *earlier, last = delta.parts or (NOTHING,)
        of_all = self._asked.return_token_ids
        yield from (self._chunk(delta.index, _delta(part), () if of_all else part.scores) for part in earlier)
        chunk = self._chunk(delta.index, _delta(last), delta.logprobs if of_all else last.scores, delta)
        if of_all:
            chunk["choices"][0]["token_ids"] = delta.token_ids
        yield chunk

    def _begun_with(self, index: int) -> str:
        """The text that `echo` puts before a message's content."""
        return self._echoes[index].text if self._echoes else ""

    def _named(self, scores: Sequence[TokenLogprobs]) -> Body | None:
        count = self._logprobs
        return None if count is None else self._scores.chat(scores, count)

    def _chunk(self, index: int, delta: Body, scores: Sequence[TokenLogprobs] = (), ended: Delta | None = None) -> Body:
        choice = {
            "index": index,
            "delta": {**NO_REASONING, **delta},
            "logprobs": self._named(scores) if scores else None,
            "finish_reason": ended and ended.finish_reason,
            "stop_reason": ended and ended.stop_reason,
        }
        return self._body(self.chunk_object, [choice])
