"""A server that streams what the prompt asks for: a script, so that a client's every reaction can be seen."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

CARDS = [
    {"id": "base", "parent": None, "max_model_len": 64},
    {"id": "left", "parent": "base"},
    {"id": "right", "parent": "base"},
]


@dataclass
class ScriptedServer:
    """Answers with `max_tokens` tokens, one per chunk, unless `fail` names another ending for the model.

    fail: model → "http", "event", "cut", "garbage", "hang", or "together": wait until `awaited` streams are open.
    bodies: all that was asked. open, most_open: streams.
    """

    url: str = ""
    fail: dict[str, str] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    open: int = 0
    most_open: int = 0
    awaited: int = 0

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": CARDS})

    async def answer(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.bodies.append(body)
        self.paths.append(request.url.path)
        if self.fail.get(body["model"]) == "http":
            return JSONResponse({"error": {"message": "no room", "code": None}}, status_code=503)
        return StreamingResponse(self._stream(body, "messages" in body), media_type="text/event-stream")

    async def _stream(self, body: dict[str, Any], chat: bool) -> AsyncIterator[bytes]:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            count, ending = body["max_tokens"], self.fail.get(body["model"])
            for index in range(count):
                await asyncio.sleep(0.001)
                if index == 1 and ending == "event":
                    yield _event({"error": {"message": "out of pages"}})
                    return
                if index == 1 and ending == "cut":
                    return
                if index == 1 and ending == "garbage":
                    yield b"data: {nonsense\n\n"
                    return
                if index == 1 and ending == "hang":
                    await asyncio.sleep(30)
                while ending == "together" and self.most_open < self.awaited:
                    await asyncio.sleep(0.001)
                last = "length" if index == count - 1 else None
                part = {"delta": {"content": "x"}} if chat else {"text": "x"}
                chunk: dict[str, Any] = {"choices": [{"index": 0, **part, "finish_reason": last}]}
                if body["stream_options"].get("continuous_usage_stats"):
                    chunk["usage"] = {"prompt_tokens": 5, "completion_tokens": index + 1}
                yield _event(chunk)
            if body["stream_options"]["include_usage"]:
                yield _event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": count}})
            yield b"data: [DONE]\n\n"
        finally:
            self.open -= 1


def _event(chunk: dict[str, Any]) -> bytes:
    return b": comment\ndata: " + json.dumps(chunk).encode() + b"\n\n"


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    app = Starlette(
        routes=[
            Route("/v1/models", server.models),
            Route("/v1/completions", server.answer, methods=["POST"]),
            Route("/v1/chat/completions", server.answer, methods=["POST"]),
        ]
    )
    running = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started:
        time.sleep(0.002)
    server.url = f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    yield server
    running.should_exit = True
    thread.join(10)
