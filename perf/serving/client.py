"""Sending one request and timing its stream.

aiohttp, for speed: a client on httpx takes ten times as long per chunk once hundreds of streams are open, and would
measure itself.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .plan import PlannedRequest
from .record import AnswerReader, LoadError, Record, StreamError

if TYPE_CHECKING:
    import aiohttp

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


def need_aiohttp() -> ModuleType:
    """aiohttp; raises LoadError."""
    try:
        import aiohttp
    except ImportError:
        raise LoadError("the load client needs aiohttp: pip install 'chorus-lora[bench]'") from None
    return aiohttp


class Client:
    """Requests to one server. Use as an async context manager. clock: seconds since the load began."""

    def __init__(self, url: str, endpoint: str, *, timeout: float, api_key: str | None, extra: dict[str, Any]) -> None:
        self._aiohttp = need_aiohttp()
        self._url = url.rstrip("/").removesuffix("/v1")
        self._endpoint = endpoint
        self._extra = extra
        self._timeout = timeout
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.chunks = 0

    async def __aenter__(self) -> Client:
        # no limit, or requests would queue in here; connections that were not used for long may be closed by a server
        connector = self._aiohttp.TCPConnector(limit=0, keepalive_timeout=15, ttl_dns_cache=300)
        self._http: aiohttp.ClientSession = self._aiohttp.ClientSession(
            connector=connector, timeout=self._aiohttp.ClientTimeout(total=self._timeout), read_bufsize=1 << 18
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def models(self) -> list[dict[str, Any]]:
        """The cards of what is served. Raises LoadError."""
        url = f"{self._url}/v1/models"
        try:
            async with self._http.get(url, headers=self._headers) as response:
                body = await response.read()
            if response.status != 200:
                raise LoadError(f"{url} answered {response.status}: {_message(body)}")
            return json.loads(body)["data"]
        except (self._aiohttp.ClientError, TimeoutError, OSError) as error:
            raise LoadError(f"{url} can't be reached: {error or type(error).__name__}; is the server up?") from None
        except (ValueError, KeyError, TypeError):
            raise LoadError(f"{url} did not answer with a list of models: {body[:200]!r}") from None

    def body(self, request: PlannedRequest) -> bytes:
        """The request as it is sent."""
        if self._endpoint == "chat":
            what: dict[str, Any] = {"messages": [{"role": "user", "content": request.prompt}]}
        else:
            what = {"prompt": request.prompt}
        limit = {"max_tokens": request.max_tokens}
        fields = {"model": request.model, **what, **limit, "stream": True, **self._extra, **request.extra}
        return json.dumps(fields).encode()

    async def ask(self, body: bytes, record: Record, clock: Callable[[], float]) -> None:
        """Send a request's body and fill the record; a failure is noted there, never raised."""
        record.sent = clock()
        try:
            await self._stream(body, record, clock)
        except StreamError as error:
            record.error, record.detail = error.kind, str(error)
        except TimeoutError:
            record.error, record.detail = "timeout", f"no complete answer within {self._timeout:g} s"
        except self._aiohttp.ClientConnectorError as error:
            record.error, record.detail = "connect", str(error)
        except (self._aiohttp.ClientError, OSError) as error:
            record.error, record.detail = "connection lost", f"{type(error).__name__}: {error}"
        except asyncio.CancelledError:
            record.error, record.detail = "cancelled", "the load was stopped"
            raise
        finally:
            if record.error:
                record.ended = clock()

    async def _stream(self, body: bytes, record: Record, clock: Callable[[], float]) -> None:
        url = self._url + PATHS[self._endpoint]
        async with self._http.post(url, data=body, headers=self._headers) as response:
            if response.status != 200:
                record.error, record.detail = f"http {response.status}", _message(await response.read())
                return
            answer = AnswerReader(record)
            async for data in response.content.iter_any():
                self.chunks += answer.feed(data, clock())
            answer.close()


def _message(body: bytes) -> str:
    """Text of an error's body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:300].decode(errors="replace")
