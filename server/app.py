"""The ASGI app.

Tests: tests/server/test_serve.py
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from ..core.model.pooling_config import PoolingConfig
from ..core.requests.request_params import InvalidRequest
from ..core.scheduling.overload import Overloaded
from .access.addresses import Networks
from .access.hosts import Hosts
from .access.keys import KeyWatch, Right
from .api.about import Api
from .api.absent import ABSENT, absent, no_tokenizer_info
from .api.adapters.adapter_api import AdapterApi
from .api.adapters.sglang_adapters import SglangAdapters
from .api.engine_control import EngineControl
from .api.generation_api import ROUTES, GenerationApi
from .api.generation_builder import GenerationBuilder
from .api.openapi import openapi_route
from .api.pooling.pooling_api import ROUTES as POOLING
from .api.pooling.pooling_api import PoolingApi
from .api.pooling.pooling_builder import PoolingBuilder
from .api.responder import Responder
from .api.sampling_defaults import SamplingDefaults
from .api.text_api import TextApi
from .engine.adapter_loader import AdapterLoader
from .engine.adapter_tokenizers import AdapterTokenizers
from .engine.backend import Backend
from .engine.kv_publisher import KvPublisher
from .engine.loaded_adapters import LoadedAdapters
from .engine.sourced_adapters import SourcedAdapters
from .engine.telemetry import NO_TELEMETRY, Telemetry
from .engine.usage import Usage
from .engine.watchdog import Watchdog
from .errors import (
    ApiError,
    EngineUnavailable,
    GenerationFailed,
    PrivatePaths,
    on_disconnect,
    on_error,
    on_http_error,
)
from .executors import Executors, PoolFull
from .http.access_log import AccessLog
from .http.doors import Doors, GuardedRoute, RequestId, RootPath
from .http.gate import Gate
from .http.statuses import Statuses
from .http.tenant_header import TenantHeader
from .settings import Settings
from .text.tokenizer import Tokenizer
from .ui.page import FILES, static
from .ui.watchers import Watchers

log = logging.getLogger(__name__)

STOP_SECONDS = 1.0


def create_app(
    worker: Backend,
    tokenizer: Tokenizer,
    settings: Settings,
    defaults: SamplingDefaults,
    kv_publisher: KvPublisher | None = None,
    telemetry: Telemetry = NO_TELEMETRY,
) -> Starlette:
    """An app over a started worker, which it stops at its own end. Its state has `gate`, `worker`, `executors` and
    `key_watch`.

    defaults: sampling parameters of requests that leave them out. kv_publisher, and the parts
    of telemetry: run as long as the app. Raises RuntimeError if no more threads can be started.
    """
    least = 2 * settings.max_body_bytes  # so that each body finds room
    gate = Gate(max(settings.max_held_body_bytes, least), worker.shared, max(settings.max_held_image_bytes, least))
    executors = Executors()
    tokenizer.window = worker.model.window
    keys = settings.client_keys()
    origins = settings.cors_origins or []
    hosts = Hosts(settings.host, settings.allowed_hosts, origins, guarded=keys.guarded)
    private = PrivatePaths([settings.model, *settings.adapter_places])
    files = [path for path in (settings.api_key_file, settings.admin_key_file) if path is not None]
    key_watch = KeyWatch(keys, settings.client_keys, files)
    watchdog = Watchdog(worker, settings.stall_seconds, settings.give_up_seconds)
    api = Api(worker, settings, gate, executors.scrapes, executors.text, Usage(telemetry.usage_file))
    loaded = LoadedAdapters.of(settings, worker.adapters)
    tokenizers = AdapterTokenizers(tokenizer, worker.adapters, executors.text, used=settings.adapter_chat_templates)
    loads = AdapterLoader(worker, settings.adapter_load_seconds, settings.adapter_places, loaded, tokenizers)
    if settings.adapter_as_base is not None:
        loads.serve_as_base(settings.adapter_as_base)
    sourced = SourcedAdapters(settings, worker.adapters, loads)
    tokenizers.bring = sourced.bring
    telemetry = telemetry._replace(metrics=api.metrics)
    builder = GenerationBuilder(
        worker=worker,
        tokenizer=tokenizer,
        settings=settings,
        defaults=defaults,
        telemetry=telemetry,
        threads=executors.text,
        tokenizers=tokenizers,
    )
    builder.images.files = gate.images
    responder = Responder(
        worker=worker,
        settings=settings,
        telemetry=telemetry,
        threads=executors.text,
        sourced=sourced,
    )
    generation = GenerationApi(builder, responder)
    pooling = PoolingApi(
        PoolingBuilder(builder, PoolingConfig.read(settings.model, settings.classifier_from_token)), responder
    )
    texts = TextApi(worker, tokenizer, builder, executors.text)
    control = EngineControl(worker, gate)
    adapters = AdapterApi(worker, settings, loads, sourced, executors.text)
    of_sglang = SglangAdapters(adapters)
    statuses = Statuses()
    watchers = Watchers(
        worker,
        metrics=api.metrics,
        pool=executors.page,
        gate=gate,
        base=settings.base_name,
        statuses=statuses,
        private=private,
    )

    stops = ExitStack()  # things that run as long as the app

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        api.metrics.start()
        if settings.ui:
            watchers.start()
        try:
            yield
        finally:
            watchers.stop()
            api.metrics.stop()
            sourced.stop()
            stops.close()
            try:
                await executors.stop.run(worker.stop, STOP_SECONDS)
            except Exception as error:
                log.warning("the engine was not stopped (%r); the process ends all the same", error)
            if telemetry.tracer is not None:
                with suppress(Exception):
                    await asyncio.wait_for(executors.stop.run(telemetry.tracer.stop), STOP_SECONDS)
            executors.shutdown()

    routes = [
        GuardedRoute("GET", "/", api.index, Right.OPEN),
        GuardedRoute("GET", "/health", api.health, Right.OPEN),
        GuardedRoute("GET", "/version", api.version, Right.KEY),
        GuardedRoute("GET", "/metrics", api.scrape, Right.KEY),
        GuardedRoute("GET", "/v1/models", api.models, Right.KEY),
        GuardedRoute("GET", "/v1/models/{name:path}", api.model, Right.KEY),
        *(GuardedRoute("POST", path, generation.endpoint(path), Right.KEY) for path in ROUTES),
        *(GuardedRoute("POST", path, pooling.endpoint(path), Right.KEY) for path in POOLING),
        GuardedRoute("POST", "/v1/messages/count_tokens", texts.count_tokens, Right.KEY),
        GuardedRoute("POST", "/v1/responses/input_tokens", texts.input_tokens, Right.KEY),
        GuardedRoute("GET", "/info", api.info, Right.KEY),
        GuardedRoute("POST", "/tokenize", texts.tokenize, Right.KEY),
        GuardedRoute("POST", "/detokenize", texts.detokenize, Right.KEY),
        GuardedRoute(
            "GET",
            "/tokenizer_info",
            texts.tokenizer_info if settings.enable_tokenizer_info_endpoint else no_tokenizer_info,
            Right.KEY,
        ),
        GuardedRoute("GET", "/ping", api.ping, Right.OPEN),
        GuardedRoute("POST", "/ping", api.ping, Right.KEY),
        GuardedRoute("GET", "/load", api.load, Right.KEY),
        GuardedRoute("GET", "/server_info", api.server_info, Right.ADMIN),
        GuardedRoute("GET", "/get_world_size", api.world_size, Right.ADMIN),
        GuardedRoute("POST", "/pause", control.pause, Right.ADMIN, reads_json=False),
        GuardedRoute("POST", "/resume", control.resume, Right.ADMIN, reads_json=False),
        GuardedRoute("POST", "/pause_generation", control.pause_generation, Right.ADMIN, reads_json=False),
        GuardedRoute("POST", "/continue_generation", control.continue_generation, Right.ADMIN, reads_json=False),
        GuardedRoute("POST", "/sleep", control.sleep, Right.ADMIN, reads_json=False),
        GuardedRoute("POST", "/wake_up", control.wake_up, Right.ADMIN, reads_json=False),
        GuardedRoute("GET", "/is_sleeping", control.is_sleeping, Right.ADMIN),
        GuardedRoute("GET", "/is_paused", control.is_paused, Right.ADMIN),
        GuardedRoute("POST", "/reset_prefix_cache", control.reset_prefix_cache, Right.ADMIN, reads_json=False),
        *(
            GuardedRoute(method, "/flush_cache", control.flush_cache, Right.ADMIN, reads_json=False)
            for method in ("GET", "POST")
        ),
        *(
            GuardedRoute("POST", path, control.reset_image_rows, Right.ADMIN, reads_json=False)
            for path in ("/reset_mm_cache", "/reset_encoder_cache")  # vLLM has a cache of pixels, too
        ),
        GuardedRoute("GET", "/model_info", api.model_info, Right.KEY),
        GuardedRoute("GET", "/get_model_info", api.model_info, Right.KEY),  # SGLang's older names
        GuardedRoute("GET", "/get_server_info", api.server_info, Right.ADMIN),
        GuardedRoute("GET", "/health_generate", api.health, Right.OPEN),
        GuardedRoute("GET", "/v1/adapters", adapters.list_all, Right.KEY),
        GuardedRoute("POST", "/v1/adapters", adapters.add, Right.ADMIN, takes_forms=True),
        GuardedRoute("POST", "/v1/adapters/{name:path}/drain", adapters.drain, Right.ADMIN),
        GuardedRoute("GET", "/v1/adapters/{name:path}", adapters.show, Right.KEY),
        GuardedRoute("PATCH", "/v1/adapters/{name:path}", adapters.change, Right.ADMIN),
        GuardedRoute("DELETE", "/v1/adapters/{name:path}", adapters.remove, Right.ADMIN),
        GuardedRoute("GET", "/lora-adapters", adapters.list_numbered, Right.KEY),
        GuardedRoute("POST", "/v1/load_lora_adapter", adapters.load_lora_adapter, Right.ADMIN, takes_forms=True),
        GuardedRoute("POST", "/skyrl/v1/load_lora_adapter", adapters.load_for_skyrl, Right.ADMIN),
        GuardedRoute("POST", "/v1/unload_lora_adapter", adapters.unload_lora_adapter, Right.ADMIN),
        GuardedRoute("POST", "/load_lora_adapter", of_sglang.load, Right.ADMIN),
        GuardedRoute("POST", "/unload_lora_adapter", of_sglang.unload, Right.ADMIN),
        *(
            GuardedRoute(method, path, absent, Right.KEY, reads_json=False, is_served=False)
            for path, (methods, _) in ABSENT.items()
            for method in methods
        ),
        *(GuardedRoute("GET", path, static(path), Right.OPEN) for path in FILES if settings.ui),
        *([GuardedRoute("GET", "/ui/events", watchers.events, Right.OPERATOR)] if settings.ui else []),
    ]
    routes.append(GuardedRoute("GET", "/openapi.json", openapi_route(routes), Right.KEY))
    app = Starlette(
        routes=routes,
        exception_handlers={
            HTTPException: on_http_error,
            ClientDisconnect: on_disconnect,
            **dict.fromkeys(
                (ApiError, InvalidRequest, Overloaded, PoolFull, EngineUnavailable, GenerationFailed, Exception),
                on_error,
            ),
        },
        middleware=[
            *([Middleware(RootPath, prefix=settings.root_path)] if settings.root_path else []),
            Middleware(RequestId, statuses=statuses),
            Middleware(AccessLog, writes=settings.access_log),
            *(
                [Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])]
                if origins
                else []
            ),
            Middleware(
                Doors,
                routes=routes,
                keys=keys,
                hosts=hosts,
                proxies=Networks(settings.trusted_proxies or ()),
                gate=gate,
                tenants=TenantHeader.of(settings.tenant_header, settings.tenant_gateways),
            ),
        ],
        lifespan=lifespan,
    )
    app.state.gate, app.state.worker, app.state.executors, app.state.key_watch = gate, worker, executors, key_watch
    app.state.watchers, app.state.statuses = watchers, statuses
    app.state.private_paths = private
    with ExitStack() as starting:  # not in the lifespan: the command line would show its errors as tracebacks
        for part in (watchdog, key_watch, loads, *((kv_publisher,) if kv_publisher is not None else ())):
            starting.callback(part.stop)
            part.start()
        if telemetry.usage_file is not None:
            starting.callback(telemetry.usage_file.stop)
            telemetry.usage_file.start()
        if telemetry.recorder is not None:
            starting.callback(telemetry.recorder.stop)
            telemetry.recorder.start(worker.adapters)
        stops.push(starting.pop_all())
    return app
