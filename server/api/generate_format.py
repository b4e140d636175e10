"""Responses and stream events of POST /generate, in TGI's and LoRAX's format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...core.requests.types import TokenLogprobs
from ..engine.generation import Choice, Delta
from .generate_request import GenerateRequest
from .logprobs import LOWEST
from .responses import Body, BodyFormat


class GenerateFormat(BodyFormat):
    """One completion of one text."""

    end = b""

    def __init__(self, how: GenerateRequest, *args: Any) -> None:
        super().__init__(*args)
        self._how = how
        (self._choice,) = self._generation.choices
        self._text: list[str] = []
        self._num_tokens = 0

    def answer(self) -> Any:
        choice = self._choice
        body: Body = {"generated_text": self._echo + choice.text, "details": None}
        if self._how.details:
            ends = [*choice.offsets[1:], len(choice.text)]
            spelt = [choice.text[start:end] for start, end in zip(choice.offsets, ends, strict=True)]
            tokens = [
                self._token(token, score, text)
                for token, score, text in zip(choice.token_ids, choice.logprobs, spelt, strict=True)
            ]
            body["details"] = {**self._details(choice), "prefill": self._prefill(), "tokens": tokens}
        return [body] if self._how.in_list else body

    def chunks(self, delta: Delta) -> Iterator[Body]:
        """An event for each token; its text is the text that this token completed."""
        self._text.append(delta.text)
        *earlier, last = [
            self._token(token, score, "") for token, score in zip(delta.token_ids, delta.logprobs, strict=True)
        ] or [None]
        for token in earlier:
            yield self._event(token)
        if last is None and delta.finish_reason is None:
            return
        last = last or {"id": 0, "text": "", "logprob": 0.0, "special": False}
        if not (last["special"] and not delta.text):
            last["text"] = delta.text
        event = self._event(last)
        if delta.finish_reason is not None:
            event["generated_text"] = self._echo + "".join(self._text)
            event["details"] = self._details(self._choice)
        yield event

    def _event(self, token: Body | None) -> Body:
        self._num_tokens += 1
        return {"index": self._num_tokens, "token": token, "generated_text": None, "details": None}

    @property
    def _echo(self) -> str:
        return "".join(echo.text for echo in self._echoes)

    def _details(self, choice: Choice) -> Body:
        if choice.finish_reason == "length":
            reason = "length"
        else:
            reason = "stop_sequence" if isinstance(choice.stop_reason, str) else "eos_token"
        return {
            "finish_reason": reason,
            "prompt_tokens": self._generation.num_prompt_tokens,
            "input_length": self._generation.num_prompt_tokens,
            "generated_tokens": self._generation.num_generated_tokens,
            "seed": choice.request.params.seed if self._how.samples else None,
        }

    def _prefill(self) -> list[Body]:
        if self._asked.prompt_logprobs is None:
            return []
        scores = [None, *(self._choice.prompt_logprobs or ())]
        return [
            {"id": token, "text": self._scores.name(token), "logprob": None if score is None else score.logprob}
            for token, score in zip(self._choice.prompt_token_ids, scores, strict=False)
        ]

    def _token(self, token: int, score: TokenLogprobs, text: str) -> Body:
        special = self._scores.is_special(token)
        return {
            "id": token,
            "text": text or self._scores.name(token) if special else text,
            "logprob": max(score.logprob, LOWEST),
            "special": special,
        }
