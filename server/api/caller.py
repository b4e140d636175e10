"""Who a call is for: what its price, its rights and its records depend on beside its fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from starlette.requests import Request

from ..access.grants import ALL, Grant


class Caller(NamedTuple):
    """The sender of a request over HTTP; by default the program that the engine runs in, which may do anything."""

    tenant: str = ""
    grant: Grant = ALL
    headers: Mapping[str, str] = MappingProxyType({})
    """Of the request, for traces."""
    spend: Callable[[int], None] | None = None
    """Called with the tokens of prompts that are taken, and then of answers."""

    @classmethod
    def of(cls, request: Request) -> Caller:
        state = request.state
        return cls(state.tenant, state.identity.grant, request.headers, state.spend)
