"""The caller of a request: rights, limits and records that do not depend on the request's fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from starlette.requests import Request
from starlette.types import Receive

from ..access.grants import ALL, Grant


class Caller(NamedTuple):
    """The sender of a request over HTTP; the default is the program that runs the engine, which may do anything."""

    tenant: str = ""
    grant: Grant = ALL
    headers: Mapping[str, str] = MappingProxyType({})
    """Headers of the request, for traces."""
    spend: Callable[[int], None] | None = None
    """Called with the number of accepted prompt tokens, and then of generated tokens."""

    receive: Receive | None = None
    """Of the request's connection, which tells that the client has left; None: it can't leave."""

    @classmethod
    def of(cls, request: Request) -> Caller:
        state = request.state
        return cls(state.tenant, state.identity.grant, request.headers, state.spend, request.receive)
