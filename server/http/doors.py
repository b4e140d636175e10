"""Middleware around every route: request ids, and checks of client, host, origin, right and body."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..access.addresses import Networks, forwarded_client, network_of
from ..access.hosts import Hosts
from ..access.keys import Keys, RequestIdentity, Right
from ..errors import REQUEST_ID, ApiError, clipped
from ..log_lines import note_request
from .gate import Gate
from .statuses import Statuses
from .tenant_header import TenantHeader

_random = random.Random()
"""Random request ids without a system call: the call releases the interpreter's lock, and getting the lock back next to
a busy engine takes half a millisecond or more.
"""

READING = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing."""

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
VALID_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class GuardedRoute(Route):
    """A route for one method, and the right that it requires.

    reads_json: bodies must be declared as JSON. takes_forms: bodies may be forms, too. is_served: False if it only says
    why it is not served.
    """

    def __init__(
        self,
        method: str,
        path: str,
        endpoint: Callable[..., Any],
        right: Right,
        *,
        reads_json: bool = True,
        takes_forms: bool = False,
        is_served: bool = True,
    ) -> None:
        super().__init__(path, endpoint, methods=[method])
        self.is_served = is_served
        self.right = right
        self.reads_json = reads_json
        self.takes_forms = takes_forms


class RootPath:
    """Middleware that removes the prefix that a proxy left in front of the path."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and f"{scope['path']}/".startswith(f"{self._prefix}/"):
            scope["path"] = scope["path"][len(self._prefix) :] or "/"
        await self._app(scope, receive, send)


class RequestId:
    """Middleware that returns the client's request id, or a new one if the client sent none that can be repeated."""

    def __init__(self, app: ASGIApp, statuses: Statuses) -> None:
        """statuses: counts the responses."""
        self._app = app
        self._statuses = statuses

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
                self._statuses.note(message["status"])
            await send(message)

        await self._app(scope, receive, with_id)


@dataclass(slots=True)
class Doors:
    """Middleware that refuses requests, in OpenAI's error shape, by host, origin, key and content type.

    It sets these in `request.state`:

    * `caller`: the key's tenant, or without a key the client's address, for the log
    * `tenant`: the one in the tenant header if that header counts, else the caller
    * `identity`: None at an open route without a key
    * `spend`: takes tokens from the key's budget; None without one
    * `sees_paths`: whether responses may show paths of this machine

    proxies: may name the client in X-Forwarded-For. tenants: may name the tenant.
    """

    app: ASGIApp
    routes: Sequence[GuardedRoute]
    keys: Keys
    hosts: Hosts
    proxies: Networks
    gate: Gate
    tenants: TenantHeader | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        method, path = scope["method"], scope["path"]
        begun = False

        async def answer(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            headers = Headers(scope=scope)
            peer = (scope.get("client") or ("",))[0]
            self._find_client(scope, headers)
            identity = self._admit(scope, headers)
            known = identity or RequestIdentity(may_change_adapters=False, sees_tenants=False)
            caller = known.tenant or network_of((scope.get("client") or ("",))[0])
            tenant = (self.tenants and self.tenants.tenant(headers, peer, known.tenant)) or caller
            note_request(tenant=tenant)
            budget = known.grant.tokens_per_minute
            scope.setdefault("state", {}).update(
                spend=None if budget is None else partial(self.gate.tokens.spend, caller, budget),
                tenant=tenant,
                caller=caller,
                identity=identity,
                sees_paths=known.may_change_adapters and (bool(known.tenant) or self.hosts.only_this_machine),
            )
            with self.gate.passing(method, path, tenant, caller, known.grant):
                await self.app(scope, receive, answer)
        except ApiError as error:
            await error.response(path)(scope, receive, send)
        except asyncio.CancelledError:
            if not self.gate.cutting:
                raise
            if not begun:
                error = ApiError(503, "the server is shutting down", code="engine_unavailable")
                await error.response(path)(scope, receive, send)

    def _find_client(self, scope: Scope, headers: Headers) -> None:
        """Take the client's address and the scheme from a trusted proxy's headers."""
        peer = (scope.get("client") or ("",))[0]
        if peer in self.proxies:
            forwarded = ",".join(headers.getlist("x-forwarded-for"))
            if (client := forwarded_client(peer, forwarded, self.proxies)) != peer:
                scope["client"] = (client, 0)
            if (scheme := headers.get("x-forwarded-proto")) in ("http", "https"):
                scope["scheme"] = scheme

    def _route(self, scope: Scope) -> GuardedRoute | None:
        return next((one for one in self.routes if one.matches(scope)[0] is Match.FULL), None)

    def _admit(self, scope: Scope, headers: Headers) -> RequestIdentity | None:
        """Return the caller; None at an open route without a valid key. Raises an ApiError for a refusal."""
        if CONTROL.search(scope["path"]):
            raise ApiError(400, "the path holds a control character", code="invalid_path")
        self._check_host(scope["method"], headers)
        route = self._route(scope)
        identity = self._identify(headers, Right.KEY if route is None else route.right)
        if scope["method"] in ("POST", "PATCH"):
            _check_kind(headers, route)
        return identity

    def _check_host(self, method: str, headers: Headers) -> None:
        host, origin = headers.get("host"), headers.get("origin")
        if not self.hosts.serves(host):
            message = (
                f"this server does not answer to the host {clipped(host or '')!r}; use a name it serves, or start it "
                "with --allowed-hosts"
            )
            raise ApiError(400, message, code="invalid_host")
        if method not in READING and origin is not None and not self.hosts.admits(origin, host):
            message = f"pages of {clipped(origin)!r} may not call this server; --cors-origins allows them"
            raise ApiError(403, message, code="origin_not_allowed")

    def _identify(self, headers: Headers, right: Right) -> RequestIdentity | None:
        anthropics = headers.get("x-api-key")
        try:
            identity = self.keys.identify(headers.get("authorization", anthropics and f"Bearer {anthropics}"))
        except ApiError:
            if right is not Right.OPEN:
                raise
            return None
        if identity is not None and not identity.has(right):
            raise ApiError(403, self._needed(right), code="admin_key_required")
        return identity

    def _needed(self, right: Right) -> str:
        """Why a key lacks a right, and what gives it."""
        message = "this needs an admin key of this server"
        if self.keys.has_admins or right is not Right.ADMIN:
            return message
        return (
            f"{message}, which has none: its operator gives a key admin=yes or sets --admin-key-file; "
            "--tenants-change-adapters lets the keys of tenants change adapters"
        )


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _check_kind(headers: Headers, route: GuardedRoute | None) -> None:
    """Raises an ApiError if the route does not read bodies of this content type or encoding. route: None if there is
    none, which the router says.
    """
    kind, coding = headers.get("content-type", ""), headers.get("content-encoding", "identity").strip().lower()
    if route is None:
        return
    if coding not in ("", "identity"):
        message = f"the body's content-encoding is {clipped(coding)!r}; send it uncompressed, without that header"
        raise ApiError(415, message, code="unsupported_encoding", headers={"accept-encoding": "identity"})
    if not route.reads_json or (route.takes_forms and kind.startswith("multipart/form-data;")):
        return
    if not _is_json(kind):
        given = clipped(kind) or "nothing"
        raise ApiError(
            415, f"the content-type is {given!r}, the body must be application/json", code="unsupported_media_type"
        )
