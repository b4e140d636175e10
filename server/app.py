"""The ASGI app."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from ..core.sampling_params import InvalidRequest
from .adapter_api import AdapterApi
from .api import Api
from .errors import ApiError, EngineUnavailable, GenerationFailed, on_disconnect, on_error, on_http_error
from .generation_api import GenerationApi
from .served_model import ServedModel
from .tokenizer import Tokenizer
from .worker import EngineWorker


def create_app(worker: EngineWorker, tokenizer: Tokenizer, served: ServedModel) -> Starlette:
    """An app over a started worker, which it stops at its own end."""
    api = Api(worker, served)
    generation = GenerationApi(worker, tokenizer, served, api.metrics)
    adapters = AdapterApi(worker, served)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.to_thread(worker.stop)

    return Starlette(
        routes=[
            Route("/health", api.health, methods=["GET"]),
            Route("/version", api.version, methods=["GET"]),
            Route("/metrics", api.scrape, methods=["GET"]),
            Route("/v1/models", api.models, methods=["GET"]),
            Route("/v1/models/{name:path}", api.model, methods=["GET"]),
            Route("/v1/completions", generation.completions, methods=["POST"]),
            Route("/v1/chat/completions", generation.chat_completions, methods=["POST"]),
            Route("/v1/adapters", adapters.list_all, methods=["GET"]),
            Route("/v1/adapters", adapters.add, methods=["POST"]),
            Route("/v1/adapters/{name:path}", adapters.show, methods=["GET"]),
            Route("/v1/adapters/{name:path}", adapters.remove, methods=["DELETE"]),
            Route("/v1/load_lora_adapter", adapters.load_lora_adapter, methods=["POST"]),
            Route("/v1/unload_lora_adapter", adapters.unload_lora_adapter, methods=["POST"]),
        ],
        exception_handlers={
            HTTPException: on_http_error,
            ClientDisconnect: on_disconnect,
            **dict.fromkeys((ApiError, InvalidRequest, EngineUnavailable, GenerationFailed, Exception), on_error),
        },
        lifespan=lifespan,
    )
