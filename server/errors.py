"""What can go wrong towards a client, and OpenAI's shape for saying so."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..core.sampling_params import InvalidRequest


class ApiError(Exception):
    """An answer other than success. `param` names the wrong field, the message says how to mend it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code

    @property
    def unforeseen(self) -> bool:
        """Whether only the log can say what happened."""
        return self.code == "internal_error"

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), status_code=self.status)


class EngineUnavailable(Exception):
    """The engine takes no more requests: it is stopped or broke down for good."""


class GenerationFailed(Exception):
    """The engine gave up a request that it had accepted."""


def no_model(name: str) -> ApiError:
    """The answer to a name that is neither the base model's nor an adapter's."""
    message = f"there is no model {name!r}; GET /v1/models lists those there are"
    return ApiError(404, message, param="model", code="model_not_found")


def as_api_error(error: Exception) -> ApiError:
    """The answer to an exception of a handler; anything unforeseen is a 500 without details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequest):
        return ApiError(400, str(error), param=error.field)
    if isinstance(error, EngineUnavailable):
        return ApiError(503, str(error), type="server_error", code="engine_unavailable")
    if isinstance(error, GenerationFailed):
        return ApiError(500, str(error), type="server_error", code="generation_failed")
    return ApiError(500, "the server failed to answer; its log says why", type="server_error", code="internal_error")


def from_validation(error: ValidationError) -> ApiError:
    """The first thing wrong with a body, as a 400 that names the field."""
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no valid JSON: {first['ctx']['error']}")
    param = field_path(first["loc"])
    if not param:
        return ApiError(400, "the body must be a JSON object")
    message = "it is missing" if first["type"] == "missing" else first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{param}: {message}", param=param)


def field_path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "role")` as `messages[0].role`."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def client_gone() -> Response:
    """The answer to a client that left, with nginx's status for it; only logs ever see it."""
    return Response(status_code=499)


async def read_body(request: Request, limit: int) -> bytes:
    """A request's body; raises an ApiError once it exceeds `limit` bytes."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise ApiError(413, f"the body is larger than the {limit} bytes this server takes")
    return bytes(body)


async def on_disconnect(_: Request, __: Exception) -> Response:
    """Starlette's handler of clients that leave before their request has arrived."""
    return client_gone()


async def on_error(_: Request, error: Exception) -> JSONResponse:
    """Starlette's handler of every exception a route lets through."""
    return as_api_error(error).response()


async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
    """Starlette's handler of its own errors: no such route, wrong method."""
    if error.status_code == 404:
        message = f"there is no route {request.method} {request.url.path}"
    elif error.status_code == 405:
        message = f"{request.url.path} does not take {request.method}"
    else:
        message = error.detail
    answer = ApiError(error.status_code, message).response()
    answer.headers.update(error.headers or {})
    return answer
