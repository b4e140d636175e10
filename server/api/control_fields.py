"""Fields of routes that control the server: in the query, as vLLM's clients send them, or in a JSON body, as SGLang's.

Each field is honoured or refused. If one were ignored, the engine would not be in the state that a trainer asked for.

Tests: tests/server/api/test_engine_control.py
"""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel, RootModel
from starlette.requests import Request

from ..errors import ApiError, T, clipped, read_body, validated

MAX_BODY_BYTES = 64 << 10


class NoFields(BaseModel):
    """The fields of a route that has none."""


async def read_fields(kind: type[T], request: Request) -> T:
    """The fields of a request. A field with a list as its default may come several times in the query.

    Raises an ApiError for a field that `kind` does not have, or that is given twice; `null` counts as absent.
    """
    given = _from_query(kind, request)
    async with read_body(request, MAX_BODY_BYTES) as body:
        in_body = validated(RootModel[dict[str, Any] | None], body).root or {} if body.strip() else {}
    for name, value in in_body.items():
        if value is None:
            continue
        if name in given:
            raise _twice(name)
        given[name] = value
    for name in given:
        if name not in kind.model_fields:
            raise _unknown(name, kind)
    return validated(kind, given)


def refuse_query(request: Request) -> None:
    """Raise an ApiError for a query where fields come in the body only."""
    for name in request.query_params:
        shown = clipped(name)
        message = f"there is no query parameter {shown!r}; give the fields in the body"
        raise ApiError(400, message, param=shown, code="unknown_parameter")


def _from_query(kind: type[BaseModel], request: Request) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        field = kind.model_fields.get(name)
        if field is not None and isinstance(field.default, list):
            given.setdefault(name, []).append(value)
        elif name in given:
            raise _twice(name)
        else:
            given[name] = value
    return given


def _twice(name: str) -> ApiError:
    return ApiError(400, f"{clipped(name)} is given twice; give it once", param=name)


def _unknown(name: str, kind: type[BaseModel]) -> ApiError:
    known = list(kind.model_fields)
    if near := difflib.get_close_matches(name[:64], known, n=1):
        hint = f"did you mean {near[0]}?"
    else:
        hint = f"the fields are {', '.join(known)}" if known else "leave it out"
    shown = clipped(name)
    return ApiError(400, f"there is no field {shown!r}; {hint}", param=shown, code="unknown_parameter")
