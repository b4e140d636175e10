"""The API as an OpenAPI document, made from the routes and from the models of their bodies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import cache

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..version import VERSION
from .absent import absent
from .adapters.adapter_api import (
    AddAdapter,
    ChangeAdapter,
    DrainAdapter,
    LoadLoraAdapter,
    RemoveAdapter,
    UnloadLoraAdapter,
)
from .engine_control import FIELDS
from .generation_api import ROUTES
from .json_text import dumps
from .logprobs import Body
from .messages_request import MessagesToCount
from .pooling.pooling_api import BODIES as POOLING
from .responses_request import ResponsesBody
from .text_api import ChatToTokens, TextToTokens, TokensToText

_REF = "#/components/schemas/{model}"
_TEXT = {"type": "string"}
_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"anyOf": [{"type": "object"}, _TEXT]}}}

BODIES: dict[tuple[str, str], tuple[type[BaseModel], ...]] = {
    **{("POST", path): (body,) for path, (_, body) in ROUTES.items() if body is not None},
    **{("POST", path): (body,) for path, body in POOLING.items()},
    ("POST", "/v1/messages/count_tokens"): (MessagesToCount,),
    ("POST", "/v1/responses/input_tokens"): (ResponsesBody,),
    ("POST", "/tokenize"): (TextToTokens, ChatToTokens),
    ("POST", "/detokenize"): (TokensToText,),
    ("POST", "/v1/adapters"): (AddAdapter,),
    ("PATCH", "/v1/adapters/{name}"): (ChangeAdapter,),
    ("POST", "/v1/adapters/{name}/drain"): (DrainAdapter,),
    ("POST", "/v1/load_lora_adapter"): (LoadLoraAdapter,),
    ("POST", "/v1/unload_lora_adapter"): (UnloadLoraAdapter,),
}
"""Bodies by method and path: the body is any one of the models. Fields under other servers' names are accepted, too,
but are not in the document.
"""

QUERIES: dict[tuple[str, str], type[BaseModel]] = {**FIELDS, ("DELETE", "/v1/adapters/{name}"): RemoveAdapter}
"""Query parameters by method and path."""


def openapi_route(routes: Sequence[Route]) -> Callable[[Request], Awaitable[Response]]:
    """GET /openapi.json for these routes."""

    @cache
    def written() -> bytes:
        return dumps(document(routes))

    async def show_openapi(_: Request) -> Response:
        """The document."""
        return Response(written(), media_type="application/json")

    return show_openapi


def document(routes: Sequence[Route]) -> Body:
    """The OpenAPI document of the API's routes, without the page and the routes that are `absent`."""
    models = sorted({model for body in BODIES.values() for model in body}, key=lambda model: model.__name__)
    _, shared = models_json_schema([(model, "validation") for model in models], ref_template=_REF)
    paths: dict[str, Body] = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        if route.endpoint is absent or path.startswith("/ui"):
            continue
        for method in sorted(set(route.methods or ()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = _operation(method, path, route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Chorus", "version": VERSION},
        "paths": paths,
        "components": {
            "schemas": {**shared.get("$defs", {}), "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _operation(method: str, path: str, route: Route) -> Body:
    summary = (route.endpoint.__doc__ or "").strip().partition("\n")[0]
    failed = {"description": "an error", "content": {"application/json": {"schema": {"$ref": _named("Error")}}}}
    operation: Body = {
        "operationId": f"{method.lower()} {path}",
        **({"summary": summary} if summary else {}),
        "responses": {"2XX": {"description": "the answer"}, "4XX": failed, "5XX": failed},
    }
    parameters = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in route.param_convertors]
    if (query := QUERIES.get((method, path))) is not None:
        schemas = query.model_json_schema()["properties"]
        parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in schemas.items()]
    if parameters:
        operation["parameters"] = parameters
    if (body := BODIES.get((method, path))) is not None:
        refs = [{"$ref": _named(model.__name__)} for model in body]
        schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def _named(model: str) -> str:
    return _REF.format(model=model)
