"""Routes by which a trainer stops, empties and starts the engine, under vLLM's and SGLang's names."""

from __future__ import annotations

import asyncio
import logging

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ...core.sleep import CannotSleep
from ...memory.pages.block import Medium
from ..engine.backend import Backend
from ..errors import ApiError, JsonResponse, clipped, read_body, validated
from ..http.gate import Gate
from .fields import unsupported

audit = logging.getLogger("chorus.audit")

LEVEL = "1"
"""The only level of sleep."""

TAGS: frozenset[str] = frozenset(("weights", "kv_cache"))
"""Parts of a sleeping engine that can be woken one by one."""

_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


MAX_BODY_BYTES = 64 << 10


class PauseGeneration(BaseModel):
    """POST /pause_generation."""

    mode: str = "abort"


class EngineControl:
    """Handlers; all of them need the admin right where one is set."""

    def __init__(self, worker: Backend, gate: Gate) -> None:
        self._worker, self._gate = worker, gate
        self._asleep: set[str] = set()
        """Tags that have not been woken yet."""
        self._is_paused = False
        self._changing = asyncio.Lock()

    # --- pause ---

    async def pause(self, request: Request) -> Response:
        """vLLM's pause: begin no step until `resume`. Requests in progress are kept, and new ones wait."""
        if (mode := request.query_params.get("mode", "abort")) != "keep":
            message = (
                f"mode is {clipped(mode)!r}; only keep is supported, which neither ends requests nor waits for them"
            )
            raise unsupported("mode", message)
        return JsonResponse({"status": await self._freeze(request, frozen=True)})

    async def resume(self, request: Request) -> Response:
        return JsonResponse({"status": await self._freeze(request, frozen=False)})

    async def pause_generation(self, request: Request) -> Response:
        """SGLang's pause."""
        async with read_body(request, MAX_BODY_BYTES) as body:
            mode = validated(PauseGeneration, body or b"{}").mode
        if mode != "in_place":
            message = f"mode is {clipped(mode)!r}; only in_place is supported, which keeps requests and their KV"
            raise unsupported("mode", message)
        return JsonResponse({"status": "ok", "message": f"Generation {await self._freeze(request, frozen=True)}."})

    async def continue_generation(self, request: Request) -> Response:
        return JsonResponse({"status": "ok", "message": f"Generation {await self._freeze(request, frozen=False)}."})

    async def _freeze(self, request: Request, *, frozen: bool) -> str:
        async with self._changing:
            if self._asleep and not frozen:
                raise ApiError(409, "the engine is asleep; POST /wake_up wakes it, and resumes it", code="asleep")
            await asyncio.wrap_future(self._worker.freeze(frozen=frozen))
            self._is_paused = frozen
        status = "paused" if frozen else "resumed"
        audit.info("%s %s the engine", request.state.caller, status)
        return status

    # --- sleep ---

    async def sleep(self, request: Request) -> Response:
        """Free the memory of KV and of adapters' pages, and refuse requests until `wake_up`.

        Requests in progress wait, and continue then.
        """
        if (level := request.query_params.get("level", LEVEL)) != LEVEL:
            message = (
                f"level is {clipped(level)!r}; only 1 is supported: level 2 discards the weights of the base model, "
                "which this server can't load again while it runs"
            )
            raise unsupported("level", message)
        async with self._changing:
            try:
                await asyncio.wrap_future(self._worker.sleep())
            except CannotSleep as error:
                raise ApiError(503, str(error), code="busy", retry_after=1) from None
            self._asleep, self._gate.asleep = set(TAGS), True
        audit.info("%s put the engine to sleep", request.state.caller)
        return Response(status_code=200)

    async def wake_up(self, request: Request) -> Response:
        """Accept requests again, once all tags have been woken; without tags, at once."""
        tags = request.query_params.getlist("tags")
        for tag in tags:
            if tag not in TAGS:
                raise ApiError(400, f"tags is {clipped(tag)!r}; give {' or '.join(sorted(TAGS))}", param="tags")
        async with self._changing:
            if self._asleep:
                asleep = self._asleep - (set(tags) or TAGS)
                if not asleep:
                    await asyncio.wrap_future(self._worker.wake())
                    await asyncio.wrap_future(self._worker.freeze(frozen=self._is_paused))
                    self._gate.asleep = False
                    audit.info("%s woke the engine", request.state.caller)
                self._asleep = asleep  # only now: a wake that failed can be tried again
        return Response(status_code=200)

    async def is_sleeping(self, _: Request) -> Response:
        return JsonResponse({"is_sleeping": bool(self._asleep)})

    # --- the prefix cache ---

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Forget cached prefixes: in all tiers, or in those of `?tiers=`; with `?reset_running_requests=true`, also the
        KV of running requests.
        """
        name = "reset_running_requests"
        given = request.query_params.get(name, "false")
        if (resets := _BOOLEANS.get(given.lower())) is None:
            raise ApiError(400, f"{name} is {clipped(given)!r}; it must be true or false", param=name)
        words = request.query_params.get("tiers", ",".join(Medium)).split(",")
        if wrong := [each for each in words if each not in set(Medium)]:
            allowed = ", ".join(Medium)
            raise ApiError(400, f"tiers names {clipped(wrong[0])!r}; give some of {allowed}", param="tiers")
        tiers = [Medium(each) for each in words]
        future = self._worker.reset_prefix_cache(reset_running_requests=resets, tiers=tiers)
        count = await asyncio.wrap_future(future)
        audit.info("%s reset the prefix cache (%s): %d blocks", request.state.caller, ", ".join(tiers), count)
        return JsonResponse({"success": True})

    async def flush_cache(self, request: Request) -> Response:
        """SGLang's name."""
        await self.reset_prefix_cache(request)
        return PlainTextResponse("Cache flushed.")
