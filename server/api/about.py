"""Routes about the server: health, models, limits, metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial

from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from ...core.executors.base import EngineLimits
from ...core.media.images import BACKEND
from ...memory.adapters.store import UnknownAdapter
from ..access.grants import NOWHERE, Grant
from ..checkpoints.pull import hub_name
from ..engine.backend import Backend
from ..engine.engine_view import AdapterState, EngineView
from ..engine.metrics import Metrics, Write, tenants_text
from ..engine.usage import Usage
from ..errors import EngineUnavailable, JsonResponse
from ..executors import DaemonPool
from ..http.gate import Gate
from ..settings import Settings
from ..version import VERSION
from .near import no_model_like

audit = logging.getLogger("chorus.audit")

PLAIN, OPENMETRICS = "text/plain", "application/openmetrics-text"
FORMATS: dict[str, Write] = {PLAIN: generate_latest, OPENMETRICS: partial(generate_openmetrics, escaping="allow-utf-8")}
"""Formats of metrics, and their writers. The library's own escaping would lose the colon in vLLM's names."""

VERSIONS = {PLAIN: "0.0.4", OPENMETRICS: "1.0.0"}
OPENMETRICS_END = b"# EOF\n"
"""The last line of OpenMetrics; Prometheus' own format has none."""

SCRAPE_SECONDS = 2.0
"""Seconds that a scrape waits for the engine before it shows the previous values."""


class Api:
    """Health, version, metrics and models."""

    def __init__(
        self,
        worker: Backend,
        settings: Settings,
        gate: Gate,
        scrapes: DaemonPool,
        threads: DaemonPool,
        usage: Usage | None = None,
    ) -> None:
        """scrapes: pool for the metrics. threads: pool for the list of models. usage: the account of requests."""
        self._worker = worker
        self._gate = gate
        self._scrapes = scrapes
        self._threads = threads
        self._settings = settings
        self._view = EngineView()
        self._scraping: dict[str, asyncio.Task[bytes]] = {}  # by format
        self.metrics = Metrics(
            lambda: worker.stats,
            lambda: self._view,
            settings.base_name,
            worker.shared,
            usage=usage,
            most_series=settings.metric_series,
            budgets=gate.tokens.left,
        )
        if worker.collector is not None:
            self.metrics.counted.register(worker.collector)
        self._started = int(time.time())

    async def health(self, request: Request) -> Response:
        """200 while the engine makes progress, or is asleep, which `status` tells; 503 if it does neither, or is about
        to end.

        If keys are required, a client without one, or with a key for some models, gets only the status.
        """
        healthy = self._worker.healthy and not self._gate.draining
        body: dict[str, object] = {"status": self._status(healthy=healthy)}
        if request.state.identity is not None and not request.state.identity.grant.limited:
            body["stats"] = asdict(self._worker.stats)
            body["images"] = self._worker.model.why_blind or "served"
            if self._worker.model.why_blind is None:
                body["image_limits"] = {
                    "backend": BACKEND,
                    "max_image_tokens": self._settings.max_image_tokens,
                    "limit_mm_per_prompt": self._settings.limit_mm_per_prompt.get("image", 0),
                }
            if not healthy:
                body["reason"] = self._worker.trouble or "the server is shutting down"
        return JsonResponse(body, status_code=200 if healthy else 503)

    def _status(self, *, healthy: bool) -> str:
        if healthy:
            return "asleep" if self._gate.asleep else "ok"
        return "draining" if self._gate.draining else "unavailable"

    async def index(self, request: Request) -> Response:
        """The operator's page for a browser; links to the API for a program."""
        if self._settings.ui and "text/html" in request.headers.get("accept", ""):
            return RedirectResponse(f"{self._settings.root_path}/ui", status_code=307, headers={"vary": "accept"})
        page = {"ui": "/ui"} if self._settings.ui else {}
        routes = {
            "models": "/v1/models",
            "completions": "/v1/completions",
            "chat": "/v1/chat/completions",
            "responses": "/v1/responses",
            "messages": "/v1/messages",
            "adapters": "/v1/adapters",
            "health": "/health",
            "metrics": "/metrics",
            "openapi": "/openapi.json",
            **page,
        }
        return JsonResponse({"server": "chorus", "routes": routes}, headers={"vary": "accept"})

    async def ping(self, _: Request) -> Response:
        """SageMaker's health check: only the status counts."""
        return Response(status_code=200 if self._worker.healthy else 503)

    async def load(self, request: Request) -> Response:
        """Number of requests in progress, under vLLM's name; a key for some models sees its own tenant's only."""
        is_limited = request.state.identity.grant.limited
        load = self._gate.requests.held(request.state.tenant) if is_limited else self._gate.num_generating
        return JsonResponse({"server_load": load})

    async def server_info(self, _: Request) -> Response:
        """The server's limits under our names, and the fields that SGLang's router and TRL's trainers read."""
        model, settings = self._worker.model, self._settings
        given = EngineLimits(settings.max_num_seqs, settings.max_num_batched_tokens, settings.max_lora_rank)
        limits = model.limits or given
        body = {"version": VERSION, "model_path": settings.model_root, "served_model_name": settings.base_name}
        most = settings.max_adapters_per_step or limits.max_num_seqs
        lora = {"max_lora_rank": limits.max_lora_rank, "max_loras": most}
        vllms = {"lora_config": lora, "parallel_config": {"data_parallel_size": 1}}
        sizes = {"max_model_len": model.max_model_len, "vocab_size": model.vocab_size, "dp_size": 1}
        ranks = {"tp_size": settings.tensor_parallel_size}
        return JsonResponse({**body, **sizes, **ranks, **asdict(limits), "vllm_config": vllms})

    async def world_size(self, _: Request) -> Response:
        """Processes that hold a part of the model, under vLLM's name."""
        return JsonResponse({"world_size": self._settings.tensor_parallel_size})

    async def model_info(self, _: Request) -> Response:
        """The model's information for SGLang's router. Of directories it shows only names."""
        name = self._settings.model_root
        names = {"model_path": name, "tokenizer_path": name, "served_model_name": self._settings.base_name}
        sees = self._worker.model.why_blind is None
        lacks = {"has_image_understanding": sees, "has_audio_understanding": False}
        return JsonResponse({**names, "is_generation": True, "preferred_sampling_params": None, **lacks})

    async def info(self, _: Request) -> Response:
        """The model and its limits, in TGI's format."""
        settings, limit = self._settings, self._worker.model.max_model_len
        most = {
            "max_concurrent_requests": settings.max_waiting,
            "max_best_of": 1,
            "max_client_batch_size": 1,
            "max_stop_sequences": settings.max_stop_strings,
            "max_input_tokens": limit - 1,
            "max_total_tokens": limit,
        }
        names = {"model_id": settings.base_name, "model_sha": None, "model_pipeline_tag": "text-generation"}
        return JsonResponse({**names, **most, "router": "chorus", "version": VERSION, "sha": None})

    async def version(self, _: Request) -> Response:
        return JsonResponse({"version": VERSION})

    async def scrape(self, request: Request) -> Response:
        """Metrics in Prometheus' format, or in OpenMetrics for a scraper that accepts it. Values of a stuck engine are
        the last known.

        Simultaneous scrapes share one result, except for tenants: a caller without an admin key sees only its own. A
        caller with a key for some models sees only these models' series.
        """
        kind = OPENMETRICS if OPENMETRICS in request.headers.get("accept", "") else PLAIN
        write = FORMATS[kind]
        identity, by_adapter = request.state.identity, self._settings.fair_by == "adapter"
        allows: Callable[[str], bool] = partial(self._allows, identity.grant)
        if identity.grant.limited:
            text = await self._scrape(write, allows)
        else:
            if (scraping := self._scraping.get(kind)) is None or scraping.done():
                scraping = self._scraping[kind] = asyncio.ensure_future(self._scrape(write))
            text = await asyncio.shield(scraping)
        own: Callable[[str], bool] | None = request.state.tenant.__eq__
        if identity.sees_tenants:
            own = None
        shown = (allows if identity.grant.limited else None) if by_adapter else own
        used = await self._scrapes.run(self.metrics.render_tenants, write, own)
        tenants = used.removesuffix(OPENMETRICS_END) + tenants_text(self._view, write, shown)
        return Response(
            text.removesuffix(OPENMETRICS_END) + tenants, media_type=f"{kind}; version={VERSIONS[kind]}; charset=utf-8"
        )

    async def _scrape(self, write: Write, allows: Callable[[str], bool] | None = None) -> bytes:
        with suppress(TimeoutError, EngineUnavailable):
            self._view = await asyncio.wait_for(asyncio.wrap_future(self._worker.view()), SCRAPE_SECONDS)
            self.metrics.forget_all_but(await self._scrapes.run(self._view.labels))
        return await self._scrapes.run(
            self.metrics.render, write, allows
        )  # on a thread: a thousand adapters take a while

    def _allows(self, grant: Grant, model: str) -> bool:
        return grant.allows(None if model in ("", self._settings.base_name) else model)

    async def models(self, request: Request) -> Response:
        listing = await asyncio.wrap_future(self._worker.adapters.listing())
        grant = request.state.identity.grant

        def respond() -> Response:
            served = (self._adapter_card(one) for one in listing.adapters() if grant.allows(one.name))
            return JsonResponse({"object": "list", "data": [*self._base_cards(grant), *served]})

        return await self._threads.run(respond)  # on a thread: thousands take a while

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        grant = request.state.identity.grant
        for card in self._base_cards(grant):
            if card["id"] == name:
                return JsonResponse(card)
        try:
            state = await asyncio.wrap_future(self._worker.adapters.state(name if grant.allows(name) else NOWHERE))
        except UnknownAdapter:
            base, adapters = self._settings.base_name, self._worker.adapters
            raise await no_model_like(name, adapters, base, grant, self._threads) from None
        return JsonResponse(self._adapter_card(state))

    def _base_cards(self, grant: Grant) -> list[dict[str, object]]:
        base = self._settings.base_name
        if not grant.allows(None):
            return []
        card, adapter = self._card(base, self._settings.model_root, None), self._worker.adapters.as_base
        return [card if adapter is None or not grant.allows(adapter) else {**card, "adapter": adapter}]

    def _adapter_card(self, one: AdapterState) -> dict[str, object]:
        root = hub_name(one.manifest.path) or one.manifest.path.name
        return {**self._card(one.name, root, self._settings.base_name), "rank": one.manifest.rank}

    def _card(self, name: str, root: str, parent: str | None) -> dict[str, object]:
        limit = self._worker.model.max_model_len
        about = {"object": "model", "created": self._started, "owned_by": "chorus", "max_model_len": limit}
        return {"id": name, "root": root, "parent": parent, **about}
