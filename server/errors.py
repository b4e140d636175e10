"""Errors towards clients, in OpenAI's shape or in Anthropic's."""

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

from ..core.requests.sampling_params import InvalidRequest
from ..core.scheduling.overload import Overloaded
from ..memory.files.error import LoadFailure
from .executors import PoolFull
from .wanted import problem_of

T = TypeVar("T", bound=BaseModel)

REQUEST_ID = "x-request-id"
"""Header with the id that a request is known by on its way."""

MAX_ECHO = 200
"""Characters of a client's own words that an error repeats."""

MAX_MESSAGE = 400
ABSOLUTE_PATH = re.compile(r"(?<![\w./])(?:/[^\s/:'\",;]+)*/([^\s/:'\",;]+)")


MAX_ANSWER = 1000
"""Most characters of an error's message."""

_LONG_WORD = re.compile(rf"(\S{{{MAX_ECHO}}})\S+")


def clipped(text: str) -> str:
    """A client's words as an error repeats them."""
    return text if len(text) <= MAX_ECHO else text[: MAX_ECHO - 1] + "…"


def _without_paths(text: str) -> str:
    """The engine's message for a client: of absolute paths only the last part is left, and its length is bounded."""
    return ABSOLUTE_PATH.sub(r"\1", text)[:MAX_MESSAGE]


def _bounded(message: str) -> str:
    """A message that repeats no endless word, and is not endless itself."""
    message = _LONG_WORD.sub(r"\1…", message)
    return message if len(message) <= MAX_ANSWER else message[: MAX_ANSWER - 1] + "…"


class PrivatePaths:
    """Makes paths in messages relative to the known directories of this machine."""

    def __init__(self, directories: Iterable[str | Path]) -> None:
        absolute = {form for one in directories for form in (os.path.abspath(one), os.path.realpath(one))}
        self._directories = sorted((one for one in absolute if one != "/"), key=len, reverse=True)

    def hide(self, text: str) -> str:
        """The text with every path below one of the directories relative to it."""
        for directory in self._directories:
            if directory in text:
                text = text.replace(f"{directory}/", "").replace(directory, os.path.basename(directory))
        return text

    def shown(self, path: Path) -> str:
        """A path relative to its directory; elsewhere only the file's name."""
        text = str(path)
        hidden = self.hide(text)
        return hidden if hidden != text else os.path.basename(text)


class JsonResponse(JSONResponse):
    """JSON that any string fits into: what UTF-8 does not have, such as odd file names, is written as an escape."""

    def render(self, content: Any) -> bytes:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8", "backslashreplace")  # of a lone surrogate that is JSON's own escape


DISK_FAULTS = frozenset(
    {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENODEV, errno.ENXIO, errno.EMFILE, errno.ENFILE}
)
"""Errors that say nothing about a file, only that it can't be had just now."""


_TYPES = {429: "rate_limit_error", **dict.fromkeys((424, 500, 503, 504), "server_error")}
"""OpenAI's types of errors by their status; all others are the client's."""

ANTHROPICS = "/v1/messages"
"""Routes below this path tell errors in Anthropic's shape."""

GENERATES = ("/", "/generate", "/generate_stream")
"""Routes that tell errors in TGI's shape."""

_GENERATES_TYPES = {
    **dict.fromkeys((400, 413), "validation"),
    424: "generation",
    **dict.fromkeys((429, 503), "overloaded"),
}
"""TGI's types of errors by their status; an error about keys, routes or models has none: its status says it."""

_ANTHROPICS_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's types of errors by their status; of others the client's are `invalid_request_error`."""


class ApiError(Exception):
    """An answer other than success. `param` names the wrong field, the message says how to fix it."""

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
        """True if only the log can say what happened."""
        return self.code == "internal_error"

    def body(self, path: str = "") -> dict[str, Any]:
        """The error as clients of a path read it: OpenAI's or, with the field and the code beside theirs, Anthropic's,
        TGI's and LoRAX's.
        """
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
        return JsonResponse(self.body(path), status_code=status, headers={**self.headers, **retry})


class EngineUnavailable(Exception):
    """The engine takes no more requests: it is stopped or broke down for good."""


class GenerationFailed(Exception):
    """The engine ended a request that it had accepted. failure: what adapters have to do with it, if they have."""

    def __init__(self, message: str, failure: LoadFailure | None = None) -> None:
        super().__init__(message)
        self.failure = failure


def no_model(name: str, near: str | None = None) -> ApiError:
    """The answer to a name that is neither the base model's nor an adapter's. near: the one that may be meant."""
    hint = "GET /v1/models lists the models there are" if near is None else f"did you mean {clipped(near)!r}?"
    message = f"there is no model {clipped(name)!r}; {hint}"
    return ApiError(404, message, param="model", code="model_not_found")


def not_served(message: str) -> ApiError:
    """The answer to the name of an adapter in quarantine."""
    return ApiError(424, message, param="model", code="adapter_quarantined")


def too_long(limit: int, what: str, length: str, window: int | None = None) -> ApiError:
    """The answer to a prompt that the context can't hold, in the words that clients know from OpenAI.

    what: the field. length: how long it is, with its unit. window: the model's sliding window, if that is the limit.
    """
    message = f"This model's maximum context length is {limit} tokens. However, your {what} resulted in {length}. "
    message += f"Please reduce the length of the {what}."
    if window is not None:
        message += f" The limit is the model's sliding window of {window} tokens; attention beyond it is not served."
    return ApiError(400, message, param=what, code="context_length_exceeded")


def as_api_error(error: Exception) -> ApiError:
    """The answer to an exception of a handler; anything unforeseen is a 500 without details."""
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
    if isinstance(error, OSError):  # a disk that fails, or has no room, is no mistake of the server
        message = f"the server's files can't be read just now: {error.strerror or type(error).__name__}"
        return ApiError(503, message, code="storage_unavailable")
    if isinstance(error, EngineUnavailable):
        return ApiError(503, text, code="engine_unavailable")
    if isinstance(error, GenerationFailed):
        if (failure := error.failure) is None:
            return ApiError(500, text, code="generation_failed")
        status = 503 if failure.may_pass else 424  # clients repeat a 409 by themselves, which would not help
        param = None if failure is LoadFailure.NO_ROOM else "model"
        return ApiError(status, text, param=param, code=failure, retry_after=1 if failure.may_pass else None)
    return ApiError(500, "the server failed to answer; its log says why", code="internal_error")


def from_validation(error: ValidationError) -> ApiError:
    """The first thing wrong with a body, as a 400 that names the field."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    param = field_path(first["loc"])
    if not param:
        return ApiError(400, "the body must be a JSON object")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"there is no field {param}; leave it out", param=param)
    return ApiError(400, f"{param}{problem_of(first)}", param=param)


def validated(kind: type[T], body: bytes | dict[str, Any], context: Any = None) -> T:
    """A request's body as a model of its fields; raises an ApiError that names the wrong field."""
    try:
        if isinstance(body, dict):
            return kind.model_validate(body, context=context)
        return kind.model_validate_json(body, context=context)
    except ValidationError as error:
        raise from_validation(error) from None


def field_path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "role")` as `messages[0].role`; names that are the client's are cut short."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return clipped(path)


def client_gone() -> Response:
    """The answer to a client that left, with nginx's status for it; only logs ever see it."""
    return Response(status_code=499)


@asynccontextmanager
async def read_body(request: Request, limit: int) -> AsyncIterator[bytes]:
    """A request's body; inside, its bytes count as its tenant's. Raises an ApiError once it exceeds `limit` bytes, or
    what may be held.
    """
    room, tenant, body = request.app.state.gate.bodies, request.state.tenant, bytearray()
    try:
        async for part in request.stream():
            if len(body) + len(part) > limit:
                raise ApiError(413, f"the body is larger than the {limit} bytes this server takes")
            room.take(tenant, len(part))
            body += part
        yield bytes(body)
    finally:
        room.give_back(tenant, len(body))


async def on_disconnect(_: Request, __: Exception) -> Response:
    """Starlette's handler of clients that leave before their request has arrived."""
    return client_gone()


async def on_error(request: Request, error: Exception) -> JSONResponse:
    """Starlette's handler of every exception a route lets through."""
    answer = as_api_error(error)
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
"""Routes of Ollama and llama.cpp, each with the one that is nearest to it here."""


def near_route(path: str, routes: Collection[str]) -> str | None:
    """The route that a wrong path is meant for: without /v1 or with two of them, behind another prefix, mistyped."""
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
    """Methods that the routes of a request's path take."""
    found = (
        one for one in request.app.routes if isinstance(one, Route) and one.matches(request.scope)[0] != Match.NONE
    )
    return {method for one in found for method in one.methods or () if method != "HEAD"}


async def on_http_error(request: Request, error: Exception) -> JSONResponse:
    """Starlette's handler of its own errors: no such route, wrong method."""
    assert isinstance(error, HTTPException)  # it is registered for these alone
    path = clipped(request.url.path)
    if error.status_code == 404:
        near = near_route(request.url.path, {one.path for one in request.app.routes if isinstance(one, Route)})
        hint = "GET /openapi.json lists them" if near is None else f"did you mean {near}?"
        message = f"there is no route {clipped(request.method)} {path}; {hint}"
    elif error.status_code == 405:
        taken = sorted(_methods(request))
        message = f"{path} does not take {clipped(request.method)}; it takes {' and '.join(taken)}"
    else:
        message = error.detail
    answer = ApiError(error.status_code, message).response(request.url.path)
    answer.headers.update(error.headers or {})
    return answer
