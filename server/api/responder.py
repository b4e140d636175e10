"""Responses: sends a generation to its client, whole or as a stream.

Tests: tests/server/test_answer_shapes.py
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ...core.requests.request_params import HEAD, AdapterPaused, InvalidRequest, NotServed, UnknownModel
from ...memory.adapters.composition import is_composition
from ..engine.backend import Backend
from ..engine.generation import Generation
from ..engine.sourced_adapters import SourcedAdapters
from ..engine.telemetry import Telemetry
from ..errors import ApiError, as_api_error, client_gone, not_served
from ..executors import DaemonPool
from ..settings import Settings
from .adapters.adapter_header import ADAPTER, adapter_header
from .json_text import dumps, encode
from .logprobs import Body, LogprobFormat
from .near import no_model_like
from .openai import GenerationRequest, StreamOptions
from .responses import BodyFormat, Echo
from .sse import EventStream, event, while_connected

log = logging.getLogger(__name__)
access = logging.getLogger("chorus.access")

MakeFormat = Callable[[GenerationRequest, Generation, LogprobFormat, Sequence[Echo]], BodyFormat]

IGNORED = "x-ignored-fields"
"""Response header: fields without an effect, because the model's chat template does not use them."""

WARNING = "x-chorus-warning"
"""Response header: what is probably a mistake in the request."""

LOAD, LOAD_FORMAT = "endpoint-load-metrics", "endpoint-load-metrics-format"
"""ORCA's headers: the response's with the server's load, for load balancers, and the request's that asks for it."""

THREAD_LOGPROBS = 500
"""Log-probabilities in a response or chunk above which a thread writes it."""


@dataclass(slots=True)
class Responder:
    """Submits a generation to the engine, and sends the response in its route's format, whole or as a stream."""

    worker: Backend
    settings: Settings
    telemetry: Telemetry
    threads: DaemonPool
    """Pool for writing long responses."""
    sourced: SourcedAdapters
    """Brings adapters that are not registered."""

    async def to(
        self,
        request: Request,
        asked: GenerationRequest,
        generation: Generation,
        make_format: MakeFormat,
        echoed: Sequence[str | list[int]] = (),
    ) -> Response:
        if (gone := await self._start(request, generation)) is not None:
            return gone
        try:  # the engine has accepted the prompts, so they can be decoded
            echoes = await self.threads.run(self._echoes, asked, echoed, generation) if echoed else ()
        except BaseException:
            generation.close()
            raise
        if asked.stream and self.settings.enable_force_include_usage:
            asked.stream_options = StreamOptions(include_usage=True, continuous_usage_stats=True)
        as_token_ids = asked.return_tokens_as_token_ids or self.settings.return_tokens_as_token_ids
        scores = LogprobFormat(generation.tokenizer.vocabulary, as_token_ids=as_token_ids)
        answer = make_format(asked, generation, scores, echoes)
        headers = self._headers(request, generation)
        if asked.stream:
            return EventStream(self._events(generation, answer, request), generation.close, headers)
        try:
            await while_connected(request.receive, _read(generation, answer))
            body = await self._written(answer)
        except ClientDisconnect:
            return client_gone()
        finally:
            generation.close()
        return Response(body, media_type="application/json", headers=headers)

    async def pooled(self, request: Request, generation: Generation, body: Callable[[], Body]) -> Response:
        """Submit a generation that has no text, and send what `body` makes of its results at its end."""
        if (gone := await self._start(request, generation)) is not None:
            return gone
        try:
            await while_connected(request.receive, generation.finish())
            written = await self.threads.run(lambda: encode(body()))
        except ClientDisconnect:
            return client_gone()
        finally:
            generation.close()
        return Response(written, media_type="application/json", headers=self._headers(request, generation))

    async def _start(self, request: Request, generation: Generation) -> Response | None:
        """Submit a generation; returns a response if its client has gone. Raises an ApiError or InvalidRequest."""
        try:
            with self.telemetry.counting_rejections():
                await self.sourced.start(generation, partial(while_connected, request.receive))
        except ClientDisconnect:
            return client_gone()
        except NotServed as error:
            raise not_served(str(error)) from None
        except AdapterPaused as error:
            raise ApiError(503, str(error), param="model", code="adapter_paused", retry_after=1) from None
        except InvalidRequest as error:
            if error.field == HEAD:
                raise ApiError(400, str(error), param="model") from None
            if error.field != "model":
                raise
            base, grant = self.settings.base_name, request.state.identity.grant
            unknown = _unknown(error, generation)
            raise await no_model_like(unknown, self.worker.adapters, base, grant, self.threads) from None
        return None

    def _echoes(self, asked: GenerationRequest, given: Sequence[str | list[int]], generation: Generation) -> list[Echo]:
        """An entry per choice. A prompt that was sent as text is returned unchanged."""
        echoes = []
        tokenizer = generation.tokenizer
        skip = asked.skip_special_tokens
        for prompt, choice in zip(given, generation.choices[:: asked.n], strict=True):
            token_ids = choice.prompt_token_ids
            text = prompt if isinstance(prompt, str) else tokenizer.decode(token_ids, skip_special_tokens=skip)
            offsets: list[int] = []
            if asked.num_logprobs is not None:
                offsets = [min(offset, len(text)) for offset in tokenizer.offsets(token_ids, skip_special_tokens=skip)]
            echoes += [Echo(text, offsets)] * asked.n
        return echoes

    def _headers(self, request: Request, generation: Generation) -> dict[str, str]:
        headers = {IGNORED: ", ".join(generation.ignored)} if generation.ignored else {}
        if generation.warnings:
            headers[WARNING] = "; ".join(generation.warnings).encode("ascii", "backslashreplace").decode()
        grant = request.state.identity.grant
        if not grant.limited:  # the load of all clients
            headers |= self._load_report(request.headers.get(LOAD_FORMAT, ""))
        if versions := _versions(generation):
            shown = [each for name, each in versions.items() if grant.allows(name)]  # not who serves as the base model
            if shown:
                headers[ADAPTER] = ", ".join(shown)
            if self.settings.access_log:
                access.info("%s uses adapter %s", request.state.request_id, ", ".join(versions.values()))
        return headers

    def _load_report(self, form: str) -> dict[str, str]:
        """The server's load as a header in ORCA's format, under vLLM's names; nothing unless the client asks for it."""
        if (kind := form.upper()) not in ("TEXT", "JSON"):
            return {}
        stats = self.worker.stats
        load = {
            "kv_cache_usage_perc": stats.kv_usage,
            "num_requests_waiting": float(stats.num_waiting),
            "num_requests_running": float(stats.num_running),
        }
        text = json.dumps({"named_metrics": load})
        if kind == "TEXT":
            text = ", ".join(f"named_metrics.{name}={value}" for name, value in load.items())
        return {LOAD: f"{kind} {text}"}

    async def _written(self, answer: BodyFormat) -> bytes:
        """The whole response; a thread writes a long one, to keep the event loop free."""
        if answer.num_logprobs > THREAD_LOGPROBS:
            return await self.threads.run(lambda: encode(answer.answer()))
        return dumps(answer.answer())

    async def _events(self, generation: Generation, answer: BodyFormat, request: Request) -> AsyncIterator[bytes]:
        """The deltas as events; deltas that are ready together are sent together.

        The status line has been sent by now, so an error is an event, too.
        """
        ready = list(map(event, answer.opening()))
        try:
            async for delta in generation:
                heavy = answer.logprobs_of(delta) > THREAD_LOGPROBS
                if heavy:
                    ready += [await self.threads.run(event, chunk, encode) for chunk in answer.chunks(delta)]
                else:
                    ready += map(event, answer.chunks(delta))
                if ready and (heavy or not generation.goes_on):
                    yield b"".join(ready)
                    ready.clear()
            ready += map(event, answer.closing())
        except Exception as error:
            answer_to_error = as_api_error(error)
            if answer_to_error.unforeseen:
                log.exception("a stream failed")
            request.app.state.statuses.note(answer_to_error.status)
            ready.append(event(answer.failed(answer_to_error, request.url.path)))
        yield b"".join((*ready, answer.end))


def _unknown(error: InvalidRequest, generation: Generation) -> str:
    """The name that is not registered: the model's, or one of several adapters'."""
    whole = generation.choices[0].request.adapter_name
    return error.name if isinstance(error, UnknownModel) and error.name != whole else generation.model


def _versions(generation: Generation) -> dict[str, str]:
    """The adapter versions that the response was computed with, by name: one, unless the version changed between its
    choices.
    """
    bound = [choice.request.bound for choice in generation.choices]
    versions = [
        each for one in bound if one is not None for each in (one.sources if is_composition(one.name) else (one,))
    ]
    told: dict[str, list[str]] = {}
    for one in versions:
        told.setdefault(one.name, []).append(adapter_header(one.name, one.label, one.manifest.content_hash))
    return {name: ", ".join(dict.fromkeys(each)) for name, each in told.items()}


async def _read(generation: Generation, answer: BodyFormat) -> None:
    async for delta in generation:
        answer.note(delta)
