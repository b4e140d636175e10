"""The routes about the server: is it well, what does it serve, what has it counted."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response

from ... import __version__
from ..engine.backend import Backend
from ..engine.metrics import EngineView, Metrics, accounts_text
from ..errors import EngineUnavailable, JsonResponse, no_model
from ..executors import DaemonPool
from ..http.gate import Gate
from ..settings import Settings

SCRAPE_SECONDS = 2.0
"""Seconds that a scrape waits for the engine before it shows what the previous one saw."""


class Api:
    """Health, version, metrics and models."""

    def __init__(self, worker: Backend, settings: Settings, gate: Gate, scrapes: DaemonPool) -> None:
        self._worker = worker
        self._gate = gate
        self._scrapes = scrapes
        self._settings = settings
        self._view = EngineView()
        self._scraping: asyncio.Task[bytes] | None = None
        self.metrics = Metrics(lambda: worker.stats, lambda: self._view, settings.base_name)
        if worker.collector is not None:
            self.metrics.registry.register(worker.collector)
        self._started = int(time.time())

    async def health(self, request: Request) -> Response:
        """200 while the engine takes requests and gets on with them, 503 when it doesn't, or is about to end.

        Where keys are needed, a client without one gets the status alone.
        """
        healthy = self._worker.healthy and not self._gate.draining
        body: dict[str, object] = {"status": "ok" if healthy else "draining" if self._gate.draining else "unavailable"}
        if request.state.identity is not None:
            body["stats"] = asdict(self._worker.stats)
            if not healthy:
                body["reason"] = self._worker.trouble or "the server is shutting down"
        return JsonResponse(body, status_code=200 if healthy else 503)

    async def ping(self, _: Request) -> Response:
        """SageMaker's health check: only the status counts."""
        return Response(status_code=200 if self._worker.healthy else 503)

    async def load(self, _: Request) -> Response:
        """Number of calls that are being answered, as vLLM tells it."""
        return JsonResponse({"server_load": self._gate.num_generating})

    async def version(self, _: Request) -> Response:
        return JsonResponse({"version": __version__})

    async def scrape(self, request: Request) -> Response:
        """Prometheus' text; what a stuck engine can't tell is as it was. Scrapes at the same time share one, but for
        the tenants: a caller without an admin key sees its own alone.
        """
        if self._scraping is None or self._scraping.done():
            self._scraping = asyncio.ensure_future(self._scrape())
        text = await asyncio.shield(self._scraping)
        sees_all = request.state.identity.sees_tenants or self._settings.fair_by == "adapter"
        text += accounts_text(self._view, None if sees_all else request.state.tenant)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _scrape(self) -> bytes:
        with suppress(TimeoutError, EngineUnavailable):
            self._view = await asyncio.wait_for(asyncio.wrap_future(self._worker.view()), SCRAPE_SECONDS)
            self.metrics.forget_all_but(self._view.names)
        return await self._scrapes.run(self.metrics.render)  # beside the loop: a thousand adapters take a while

    async def models(self, _: Request) -> Response:
        return JsonResponse({"object": "list", "data": await self._model_cards()})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        for card in await self._model_cards():
            if card["id"] == name:
                return JsonResponse(card)
        raise no_model(name)

    async def _model_cards(self) -> list[dict[str, object]]:
        listing = await asyncio.wrap_future(self._worker.adapters.listing())
        base = self._settings.base_name

        def card(name: str, root: str, parent: str | None) -> dict[str, object]:
            limit = self._worker.model.max_model_len
            about = {"object": "model", "created": self._started, "owned_by": "chorus", "max_model_len": limit}
            return {"id": name, "root": root, "parent": parent, **about}

        return [
            card(base, self._settings.model.name, None),
            *({**card(one.name, one.manifest.path.name, base), "rank": one.manifest.rank} for one in listing.adapters),
        ]
