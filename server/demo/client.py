"""The demo's HTTP client."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx

from .questions import Question


@dataclass(slots=True)
class Answer:
    """A response, as far as it has come."""

    text: str = ""
    tokens: int = 0
    seconds: float = 0.0
    adapters: int = 0
    """Most different adapters that shared a step with it, including its own."""
    requests: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def take_step(self, step: dict[str, int] | None) -> None:
        """Record how many adapters and requests shared a step with it."""
        if step:
            self.adapters = max(self.adapters, step["adapters"])
            self.requests = max(self.requests, step["requests"])


class DemoError(Exception):
    """The server responded with an error."""


class DemoClient(httpx.AsyncClient):
    """Asks a server questions, each as a real HTTP request. Use it as an async context manager."""

    def __init__(self, url: str, connections: int) -> None:
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        super().__init__(base_url=url, limits=limits, timeout=120, trust_env=False)

    async def models(self) -> list[dict[str, Any]]:
        """The base model's card, then the adapters'."""
        return _checked(await self.get("/v1/models"))["data"]

    async def weights(self) -> dict[str, Any]:
        """The mode of the steps, and the merged adapter."""
        return _checked(await self.get("/v1/adapters"))["weights"]

    async def takes_chat(self, model: str) -> bool:
        """True if the model has a chat template."""
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        response = await self.post("/v1/chat/completions", json=body)
        return response.status_code == 200

    async def ask(self, question: Question) -> Answer:
        """The whole response at once."""
        started = time.perf_counter()
        body = _checked(await self.post(question.path, json=question.body()))
        choice = body["choices"][0]
        text = choice["message"]["content"] if question.chat else choice["text"]
        answer = Answer(text, body["usage"]["completion_tokens"], time.perf_counter() - started)
        answer.take_step(body.get("step"))
        return answer

    async def watch(self, question: Question) -> AsyncIterator[Answer]:
        """The response as it grows: the same object, again after every chunk."""
        answer, started = Answer(), time.perf_counter()
        body = {**question.body(), "stream": True}
        async with self.stream("POST", question.path, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                _checked(response)
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise DemoError(chunk["error"]["message"])
                choice = chunk["choices"][0]
                answer.text += choice["delta"].get("content", "") if question.chat else choice["text"]
                answer.tokens += len(choice.get("token_ids", ()))
                answer.seconds = time.perf_counter() - started
                answer.take_step(chunk.get("step"))
                yield answer


def _checked(response: httpx.Response) -> dict[str, Any]:
    """The response's body. Raises DemoError for an error."""
    if response.status_code == 200:
        return response.json()
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.content[:200].decode(errors="replace")
    raise DemoError(f"the server answered {response.status_code}: {message}")
