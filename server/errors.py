"""Errors for clients, in OpenAI's, Anthropic's or TGI's format."""

from __future__ import annotations

import difflib
import errno
import json
import math
import os
import re
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route

from ..core.requests.request_params import InvalidRequest
from ..core.scheduling.overload import Overloaded
from ..memory.files.error import LoadFailure
from .executors import PoolFull
from .wanted import problem_of

T = TypeVar("T", bound=BaseModel)

REQUEST_ID = "x-request-id"
"""Header with a request's id."""

MAX_ECHO = 200
"""Characters of a client's own text that an error repeats."""

MAX_MESSAGE = 400
ABSOLUTE_PATH = re.compile(r"(?<![\w./])(?:/[^\s/:'\",;]+)*/([^\s/:'\",;]+)")


MAX_ANSWER = 1000
"""Most characters of an error's message."""

_LONG_WORD = re.compile(rf"(\S{{{MAX_ECHO}}})\S+")


def clipped(text: str) -> str:
    """A client's text, shortened for an error."""
    return text if len(text) <= MAX_ECHO else text[: MAX_ECHO - 1] + "…"


def _without_paths(text: str) -> str:
    """The engine's message for a client: absolute paths are reduced to their last part, and the length is limited."""
    return ABSOLUTE_PATH.sub(r"\1", text)[:MAX_MESSAGE]


def _bounded(message: str) -> str:
    """A message with long words and the total length shortened."""
    message = _LONG_WORD.sub(r"\1…", message)
    return message if len(message) <= MAX_ANSWER else message[: MAX_ANSWER - 1] + "…"


class PrivatePaths:
    """Makes paths in messages relative to the known directories of this machine."""

    def __init__(self, directories: Iterable[str | Path]) -> None:
        directories = list(directories)
        relative = {str(one) for one in directories if not os.path.isabs(one)} - {"."}
        begins = "|".join(re.escape(one) for one in sorted(relative, key=len, reverse=True))
        # what is quoted is a name, which may begin like a directory
        self._relative = re.compile(rf"(?<![^\s(])(?:{begins})/") if relative else None
        absolute = {form for one in directories for form in (os.path.abspath(one), os.path.realpath(one))}
        self._directories = sorted((one for one in absolute if one != "/"), key=len, reverse=True)

    def hide(self, text: str) -> str:
        """The text with each path below one of the directories made relative."""
        for directory in self._directories:
            if directory in text:
                text = text.replace(f"{directory}/", "").replace(directory, os.path.basename(directory))
        return text if self._relative is None else self._relative.sub("", text)

    def shown(self, path: Path) -> str:
        """A path relative to its directory; elsewhere only the file's name."""
        text = str(path)
        hidden = self.hide(text)
        return hidden if hidden != text else os.path.basename(text)


class JsonResponse(JSONResponse):
    """JSON for any string: characters that UTF-8 can't encode, such as in odd file names, are escaped."""

    def render(self, content: Any) -> bytes:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8", "backslashreplace")  # a lone surrogate, as JSON's own escape


DISK_FAULTS = frozenset(
    {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENODEV, errno.ENXIO, errno.EMFILE, errno.ENFILE}
)
"""Errors that say nothing about a file except that it can't be read at the moment."""


_TYPES = {429: "rate_limit_error", **dict.fromkeys((424, 500, 503, 504), "server_error")}
"""OpenAI's error types by status; all others are the client's fault."""

ANTHROPICS = "/v1/messages"
"""Routes below this path return errors in Anthropic's format."""

GENERATES = ("/", "/generate", "/generate_stream")
"""Routes that return errors in TGI's format."""

_GENERATES_TYPES = {
    **dict.fromkeys((400, 413), "validation"),
    424: "generation",
    **dict.fromkeys((429, 503), "overloaded"),
}
"""TGI's error types by status; errors about keys, routes or models have none: the status suffices."""

_ANTHROPICS_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's error types by status; other errors of the client are `invalid_request_error`."""


class ApiError(Exception):
    """An error response. `param` names the wrong field, the message says how to fix it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _bounded(message)
        self.type = _TYPES.get(status, "invalid_request_error")
        self.param = None if param is None else clipped(param)
        self.code = code
        self.retry_after = retry_after
        self.headers = headers or {}

    @property
    def unforeseen(self) -> bool:
        """True if only the log gives the details."""
        return self.code == "internal_error"

    def body(self, path: str = "") -> dict[str, Any]:
        """The error in the format of a path's clients: OpenAI's; Anthropic's, TGI's or LoRAX's add field and code."""
        told = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        if path.startswith(ANTHROPICS):
            kind = _ANTHROPICS_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
            details = {} if self.code is None else {"details": {"error_code": self.code}}
            return {"type": "error", "error": {**told, "type": kind, **details}}
        if path in GENERATES:
            kind = _GENERATES_TYPES.get(self.status, "generation" if self.status >= 500 else None)
            typed = {} if kind is None else {"error_type": kind}
            return {"error": self.message, **typed, "param": self.param, "code": self.code}
        return {"error": told}

    def response(self, path: str = "") -> JSONResponse:
        """path: of the request."""
        retry = {} if self.retry_after is None else {"retry-after": str(max(1, math.ceil(self.retry_after)))}
        status = 422 if self.status == 400 and path in GENERATES else self.status
        if self.status == 501:  # clients of OpenAI repeat every other 5xx
            retry["x-should-retry"] = "false"
        return JsonResponse(self.body(path), status_code=status, headers={**self.headers, **retry})


class EngineUnavailable(Exception):
    """The engine accepts no more requests: it was stopped or broke down for good."""


class GenerationFailed(Exception):
    """The engine ended a request that it had accepted. failure: how adapters are involved, if they are."""

    def __init__(self, message: str, failure: LoadFailure | None = None) -> None:
        super().__init__(message)
        self.failure = failure


def no_model(name: str, near: str | None = None) -> ApiError:
    """The error for a name that is neither the base model's nor an adapter's. near: a similar name."""
    hint = (
        "GET /v1/models lists the models there are; an adapter's directory that is newer than the server's start is "
        "loaded by POST /v1/adapters (chorus adapters add NAME DIR)"
        if near is None
        else f"did you mean {clipped(near)!r}?"
    )
    message = f"there is no model {clipped(name)!r}; {hint}"
    return ApiError(404, message, param="model", code="model_not_found")


def not_served(message: str) -> ApiError:
    """The error for a quarantined adapter."""
    return ApiError(424, message, param="model", code="adapter_quarantined")


def too_long(limit: int, what: str, length: str, window: int | None = None) -> ApiError:
    """The error for a prompt that exceeds the context, in the words that clients know from OpenAI.

    what: the field. length: its length, with the unit. window: the model's sliding window, if that is the limit.
    """
    message = f"This model's maximum context length is {limit} tokens. However, your {what} resulted in {length}. "
    message += f"Please reduce the length of the {what}."
    if window is not None:
        message += f" The limit is the model's sliding window of {window} tokens; attention beyond it is not supported."
    return ApiError(400, message, param=what, code="context_length_exceeded")


def no_room(limit: int, field: str, asked: int, prompt: int) -> ApiError:
    """The error for more tokens than the context has room for after the prompt.

    field: the one that asks for them. asked: their number. prompt: tokens of the prompt.
    """
    message = (
        f"{field} is too large: {asked}. This model's maximum context length is {limit} tokens and your prompt has "
        f"{prompt}; lower {field} to {limit - prompt}, shorten the prompt, or leave {field} out"
    )
    return ApiError(400, message, param=field, code="context_length_exceeded")


def as_api_error(error: Exception) -> ApiError:
    """The response for an exception of a handler; unforeseen ones are a 500 without details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequest):
        return ApiError(400, str(error)[:MAX_MESSAGE], param=error.field)
    text = _without_paths(str(error))
    if isinstance(error, Overloaded):
        return ApiError(429, text, code="overloaded", retry_after=error.retry_after)
    if isinstance(error, PoolFull):
        return ApiError(503, f"{error}; try again later", code="overloaded", retry_after=1)
    if isinstance(error, TimeoutError):
        return ApiError(503, "the server took too long; try again later", code="timeout", retry_after=1)
    if isinstance(error, OSError):  # a failing or full disk is not a fault of the server's code
        message = f"the server's files can't be read at the moment: {error.strerror or type(error).__name__}"
        return ApiError(503, message, code="storage_unavailable")
    if isinstance(error, EngineUnavailable):
        return ApiError(503, text, code="engine_unavailable")
    if isinstance(error, GenerationFailed):
        if (failure := error.failure) is None:
            return ApiError(500, text, code="generation_failed")
        status = 503 if failure.may_pass else 424  # clients repeat a 409 by themselves, which would not help
        param = None if failure is LoadFailure.NO_ROOM else "model"
        return ApiError(status, text, param=param, code=failure, retry_after=1 if failure.may_pass else None)
    return ApiError(500, "the server failed; see its log for the reason", code="internal_error")


def from_validation(error: ValidationError) -> ApiError:
    """The first fault of a body, as a 400 that names the field."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body must be valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    param = field_path(first["loc"])
    if not param:
        return ApiError(400, "the body must be a JSON object")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"there is no field {param}; leave it out", param=param)
    return ApiError(400, f"{param}{problem_of(first)}", param=param)


def validated(kind: type[T], body: bytes | dict[str, Any], context: Any = None) -> T:
    """Parse a request's body; raises an ApiError that names the wrong field."""
    try:
        if isinstance(body, dict):
            return kind.model_validate(body, context=context)
        return kind.model_validate_json(body, context=context)
    except ValidationError as error:
        raise from_validation(error) from None


def field_path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "role")` as `messages[0].role`; the client's own names are shortened."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return clipped(path)


def client_gone() -> Response:
    """The response to a client that disconnected, with nginx's status for it; only logs ever show it."""
    return Response(status_code=499)


@asynccontextmanager
async def read_body(request: Request, limit: int) -> AsyncIterator[bytes]:
    """Read a request's body; within the `with` block its bytes count for its tenant. Raises an ApiError if it exceeds
    `limit` bytes, or the bytes that may be held.
    """
    room, tenant, body = request.app.state.gate.bodies, request.state.tenant, bytearray()
    try:
        async for part in request.stream():
            if len(body) + len(part) > limit:
                raise ApiError(413, f"the body is larger than the {limit} bytes that this server accepts")
            room.take(tenant, len(part))
            body += part
        yield bytes(body)
    finally:
        room.give_back(tenant, len(body))


async def on_disconnect(_: Request, __: Exception) -> Response:
    """Starlette's handler for clients that disconnect before their request has arrived."""
    return client_gone()


async def on_error(request: Request, error: Exception) -> JSONResponse:
    """Starlette's handler for every exception that a route raises."""
    answer = as_api_error(error)
    if answer.status == 424 and not request.state.sees_paths:
        answer.message = _without_paths(answer.message)  # a reason may name files anywhere on this machine
    answer.message = request.app.state.private_paths.hide(answer.message)
    response = answer.response(request.url.path)
    if answer.unforeseen:  # Starlette sends these itself, outside of all middleware
        response.headers[REQUEST_ID] = request.state.request_id
    return response


FOREIGN_ROUTES = {
    "/api/chat": "/v1/chat/completions",
    "/api/generate": "/v1/completions",
    "/api/tags": "/v1/models",
    "/api/show": "/v1/models",
    "/api/version": "/version",
    "/completion": "/v1/completions",
    "/infill": "/v1/completions",
    "/props": "/info",
}
"""Routes of Ollama and llama.cpp, each with its nearest equivalent here."""


def near_route(path: str, routes: Collection[str]) -> str | None:
    """The route that a wrong path probably means: without /v1 or with two of them, with another prefix, or mistyped."""
    path = "/" + path[:MAX_ECHO].strip("/")
    if path in FOREIGN_ROUTES:
        return FOREIGN_ROUTES[path]
    plain = [route for route in routes if "{" not in route and route != "/"]
    for route in sorted(plain, key=len, reverse=True):
        if path.endswith(route) or path == route.removeprefix("/v1"):
            return route
    near = difflib.get_close_matches(path, plain, n=1, cutoff=0.8)
    return near[0] if near else None


def _methods(request: Request) -> set[str]:
    """Methods that the routes of a request's path accept."""
    found = (
        one for one in request.app.routes if isinstance(one, Route) and one.matches(request.scope)[0] != Match.NONE
    )
    return {method for one in found for method in one.methods or () if method != "HEAD"}


async def on_http_error(request: Request, error: Exception) -> JSONResponse:
    """Starlette's handler for its own errors: unknown route, wrong method."""
    assert isinstance(error, HTTPException)  # it is registered only for these
    path = clipped(request.url.path)
    if error.status_code == 404:
        served = (one for one in request.app.routes if isinstance(one, Route) and getattr(one, "is_served", True))
        near = near_route(request.url.path, {one.path for one in served})
        hint = "GET /openapi.json lists them" if near is None else f"did you mean {near}?"
        message = f"there is no route {clipped(request.method)} {path}; {hint}"
    elif error.status_code == 405:
        taken = sorted(_methods(request))
        message = f"{path} does not accept {clipped(request.method)}; it accepts {' and '.join(taken)}"
    else:
        message = error.detail
    answer = ApiError(error.status_code, message).response(request.url.path)
    answer.headers.update(error.headers or {})
    return answer
