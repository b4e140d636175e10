"""One answer in the making: from the engine's outputs to text."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.requests.request import Request
from ..core.requests.types import FinishReason, RequestOutput, StepInfo, TokenLogprobs
from .detokenizer import TextStream


@dataclass(frozen=True, slots=True)
class Delta:
    """Delta that one step added to one choice. `finish_reason` is OpenAI's word, on a choice's last delta only.

    stop_reason: vLLM's, the stop string or the asked-for stop token that ended the choice. offsets: where in the
    choice's text each token begins. logprobs: one per token, when asked for. prompt_logprobs: of the prompt tokens but
    the first, on a choice's first delta, when asked for.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    step: StepInfo | None
    stop_reason: int | str | None = None
    offsets: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


class Choice:
    """One engine request of a call and what has been generated for it so far."""

    def __init__(
        self,
        index: int,
        request: Request,
        text_stream: TextStream,
        *,
        prompt_token_ids: list[int] | None = None,
        shows_stop_token: bool = False,
        prompt_only: bool = False,
        keeps_all: bool = True,
    ) -> None:
        """prompt_token_ids: the request's, if the caller has them: they are not copied then. shows_stop_token: whether
        a stop token has text. prompt_only: what is generated is thrown away. keeps_all: text and scores are kept, and
        not only told delta by delta.
        """
        self.index = index
        self.request = request
        self.prompt_token_ids = list(request.token_ids) if prompt_token_ids is None else prompt_token_ids
        self.text = ""
        self.token_ids: list[int] = []
        self.offsets: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self.num_cached_tokens: int | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._keeps_all = keeps_all
        self._stream = text_stream
        self._shows_stop_token = shows_stop_token
        self._prompt_only = prompt_only

    def take(self, output: RequestOutput) -> Delta:
        """Adds the engine's output; what follows a stop string is dropped."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if self._prompt_only:
            self.finish_reason = FinishReason.LENGTH.value
            return Delta(self.index, "", (), self.finish_reason, output.step, prompt_logprobs=output.prompt_logprobs)
        text, offsets = self._push(output)
        tokens, logprobs = output.token_ids[: len(offsets)], output.logprobs[: len(offsets)]
        if self._stream.stopped_by is None and output.finish_reason is not None:
            text += self._stream.finish()
        if self._stream.stopped_by is not None:
            self.finish_reason = FinishReason.STOP.value
            self.stop_reason = self._stream.stopped_by
        elif output.finish_reason is not None:
            self.finish_reason = output.finish_reason.value
            if output.stop_token_id in self.request.params.stop_token_ids:
                self.stop_reason = output.stop_token_id
        self.token_ids += tokens
        if self._keeps_all:
            self.text += text
            self.offsets += offsets
            self.logprobs += logprobs
        return Delta(
            self.index,
            text,
            tokens,
            self.finish_reason,
            output.step,
            self.stop_reason,
            tuple(offsets),
            logprobs,
            output.prompt_logprobs,
        )

    def _push(self, output: RequestOutput) -> tuple[str, list[int]]:
        """The new text, and where each token up to a stop string begins."""
        text, offsets = "", []
        last = len(output.token_ids) - 1
        for position, token in enumerate(output.token_ids):
            offsets.append(self._stream.position)
            if position == last and output.stop_token_id == token and not self._shows_stop_token:
                break  # a stop token counts, but has no text
            text += self._stream.push([token])[0]
            if self._stream.stopped_by is not None:
                break
        return text, offsets
