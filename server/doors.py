"""Middleware around every route: the request's id, and checks of its host, origin, key and content type."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .addresses import place_of
from .errors import REQUEST_ID, ApiError, clipped
from .gate import ALWAYS_OPEN, Gate
from .hosts import Hosts, is_same_origin
from .keys import READING, TENANT, Identity, Keys, changes_adapters

_random = random.Random()
"""Not the system's, which is asked without the interpreter's lock: getting that back takes half a millisecond or more
beside an engine at work.
"""

VALID_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class RequestId:
    """Middleware that answers with the client's id, or with a new one where it sent none that can be repeated."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = asked if VALID_ID.fullmatch(asked) else f"{_random.getrandbits(128):032x}"
        scope.setdefault("state", {})["request_id"] = request_id

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        await self._app(scope, receive, with_id)


class Doors:
    """Middleware that refuses, in OpenAI's error shape, what must not come in.

    Routes find in `request.state` the `tenant` to be fair to: whom the tenant header names, where one is configured,
    else the key's tenant, or without a key the address that the request came from; and `sees_paths`: whether it may be
    told where on this machine files lie.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        hosts: Hosts,
        origins: Collection[str],
        gate: Gate,
        tenant_header: str | None = None,
    ) -> None:
        """tenant_header: header that may name the tenant."""
        self._app = app
        self._tenant_header = tenant_header
        self._keys = keys
        self._hosts = hosts
        self._origins = origins
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method, path = scope["method"], scope["path"]
        answer = _Answer(send)
        try:
            headers = Headers(scope=scope)
            identity = self._admit(method, path, headers)
            named = self._named_tenant(headers)
            tenant = named or identity.tenant or place_of((scope.get("client") or ("",))[0])
            scope.setdefault("state", {}).update(
                tenant=tenant,
                sees_paths=identity.may_change_adapters and (bool(identity.tenant) or self._hosts.only_this_machine),
            )
            with self._gate.passing(method, path, tenant):
                await self._app(scope, receive, answer.send)
        except ApiError as error:
            await error.response()(scope, receive, send)
        except asyncio.CancelledError:
            if not self._gate.cutting:
                raise
            if not answer.begun:
                error = ApiError(503, "the server is shutting down", code="engine_unavailable")
                await error.response()(scope, receive, send)

    def _admit(self, method: str, path: str, headers: Headers) -> Identity:
        host = headers.get("host")
        if not self._hosts.serves(host):
            message = (
                f"this server does not answer to the host {clipped(host or '')!r}; use a name it serves, or start it "
                "with --allowed-hosts"
            )
            raise ApiError(400, message, code="invalid_host")
        if path in ALWAYS_OPEN and method in READING:
            return Identity(may_change_adapters=False)
        if method not in READING and (origin := headers.get("origin")) is not None:
            allowed = "*" in self._origins or origin in self._origins or is_same_origin(origin, host)
            if not allowed:
                message = f"pages of {clipped(origin)!r} may not call this server; --cors-origins allows them"
                raise ApiError(403, message, code="origin_not_allowed")
        identity = self._keys.identify(headers.get("authorization"))
        if changes_adapters(method, path) and not identity.may_change_adapters:
            raise ApiError(403, "changing adapters needs an admin key of this server", code="admin_key_required")
        if method in ("POST", "PATCH") and not _is_json(headers.get("content-type", "")):
            given = clipped(headers.get("content-type", "")) or "nothing"
            raise ApiError(415, f"the content-type is {given!r}, the body must be application/json",
                           code="unsupported_media_type")  # fmt: skip
        return identity

    def _named_tenant(self, headers: Headers) -> str:
        """Return the tenant that a request's header names, or "" where none may or does."""
        name = headers.get(self._tenant_header, "") if self._tenant_header is not None else ""
        if name and not TENANT.fullmatch(name):
            raise ApiError(
                400,
                f"the header {self._tenant_header} is {clipped(name)!r}; a tenant's name has up to 128 letters, digits "
                "and ._:/+=@-",
                code="invalid_tenant",
            )
        return name


class _Answer:
    """A way to send that remembers whether the answer has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

    async def send(self, message: Message) -> None:
        self.begun = True
        await self._send(message)


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
