"""A server that streams as many tokens as a request asks for: a script, so that its endings can be chosen."""

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

    fail: model → "http" or "cut". bodies: all that was asked.
    """

    url: str = ""
    fail: dict[str, str] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": CARDS})

    async def answer(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.bodies.append(body)
        self.paths.append(request.url.path)
        if self.fail.get(body["model"]) == "http":
            return JSONResponse({"error": {"message": "no room", "code": None}}, status_code=503)
        if not body["stream"]:
            return JSONResponse({"choices": [{"text": "x" * body["max_tokens"]}]})
        return StreamingResponse(self._stream(body), media_type="text/event-stream")

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        for index in range(body["max_tokens"]):
            await asyncio.sleep(0.001)
            if index == 1 and self.fail.get(body["model"]) == "cut":
                return
            yield _event(choices=[{"text": "x"}])
        if body.get("stream_options"):
            yield _event(choices=[], usage={"prompt_tokens": 5, "completion_tokens": body["max_tokens"]})
        yield b"data: [DONE]\n\n"


def _event(**fields: Any) -> bytes:
    return b": comment\ndata: " + json.dumps({"id": "c", "object": "text_completion", **fields}).encode() + b"\n\n"


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
    assert not thread.is_alive(), "the server did not end"
