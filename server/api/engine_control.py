"""Routes by which a trainer stops, empties and starts the engine, under vLLM's and SGLang's names."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ...core.requests.request_params import InvalidRequest
from ...core.sleep import CannotSleep
from ...memory.pages.block import Medium
from ..engine.backend import Backend
from ..errors import ApiError, JsonResponse, clipped
from ..http.gate import Gate
from ..wanted import shown
from .control_fields import NoFields, read_fields
from .fields import unsupported

audit = logging.getLogger("chorus.audit")

LEVEL = 1
"""The only level of sleep."""

TAGS: frozenset[str] = frozenset(("weights", "kv_cache"))
"""Parts of a sleeping engine that can be woken one by one."""

OTHER_LEVELS = {
    0: "level 0, which frees nothing, is POST /pause?mode=keep",
    2: "level 2 discards the weights of the base model, which this server can't load again while it runs",
}
"""Levels of vLLM's, each with the reason why it is not supported."""


class Pause(BaseModel):
    """POST /pause."""

    mode: str = "abort"
    clear_cache: bool = True
    """Has no effect with `keep`, as in vLLM: requests that are kept keep their KV."""
    wait_for_inflight_requests: bool = False
    """vLLM's older name of the mode `wait`."""


class PauseGeneration(BaseModel):
    """POST /pause_generation."""

    mode: str = "abort"


class ContinueGeneration(BaseModel):
    """POST /continue_generation."""

    torch_empty_cache: bool = True


class SleepFields(BaseModel):
    """POST /sleep."""

    level: int = LEVEL
    mode: str = "keep"
    """vLLM's; what happens to requests in progress."""
    tags: list[str] = []
    """Parts that shall sleep, as SkyRL names them: all or none."""


class WakeUp(BaseModel):
    """POST /wake_up."""

    tags: list[str] = []


class ResetPrefixCache(BaseModel):
    """POST /reset_prefix_cache."""

    reset_running_requests: bool = False
    tiers: list[str] = [",".join(Medium)]
    """Each may name several, with commas between them."""
    reset_external: bool = True
    """vLLM's: whether tiers other than the page pool are reset, too."""

    def mediums(self) -> list[Medium]:
        """Raises an ApiError, and InvalidRequest."""
        if "reset_external" in self.model_fields_set:
            if "tiers" in self.model_fields_set:
                message = "reset_external and tiers both say which tiers are reset; give one of them"
                raise ApiError(400, message, param="reset_external")
            return list(Medium) if self.reset_external else [Medium.POOL]
        words = [word for each in self.tiers for word in each.split(",")]
        return mediums_of(words)


class FlushCache(BaseModel):
    """SGLang's GET and POST /flush_cache."""

    timeout: float = Field(default=0.0, ge=0)
    """Longest wait until no request runs; a reset need not wait for that here."""


FIELDS: dict[tuple[str, str], type[BaseModel]] = {
    ("POST", "/pause"): Pause,
    ("POST", "/pause_generation"): PauseGeneration,
    ("POST", "/sleep"): SleepFields,
    ("POST", "/wake_up"): WakeUp,
    ("POST", "/reset_prefix_cache"): ResetPrefixCache,
    ("GET", "/flush_cache"): FlushCache,
    ("POST", "/flush_cache"): FlushCache,
}
"""Fields by method and path, in the query or in a JSON body; the other routes have none."""


def mediums_of(words: Collection[str]) -> list[Medium]:
    """Tiers of the prefix cache by their names. Raises InvalidRequest."""
    allowed = ", ".join(Medium)
    for each in words:
        if each not in set(Medium):
            raise InvalidRequest("tiers", f"tiers names {clipped(str(each))!r}; give some of {allowed}")
    if not words:
        raise InvalidRequest("tiers", f"tiers is empty; give some of {allowed}")
    return [Medium(each) for each in words]


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
        asked = await read_fields(Pause, request)
        if asked.mode != "keep":
            message = (
                f"mode is {clipped(asked.mode)!r}; only keep is supported, which neither ends requests nor waits for "
                "them"
            )
            raise unsupported("mode", message)
        if asked.wait_for_inflight_requests:
            message = "wait_for_inflight_requests is true; with mode=keep a pause waits for none: leave it out"
            raise unsupported("wait_for_inflight_requests", message)
        return JsonResponse({"status": await self._freeze(request, frozen=True)})

    async def resume(self, request: Request) -> Response:
        await read_fields(NoFields, request)
        return JsonResponse({"status": await self._freeze(request, frozen=False)})

    async def pause_generation(self, request: Request) -> Response:
        """SGLang's pause."""
        if (mode := (await read_fields(PauseGeneration, request)).mode) != "in_place":
            message = f"mode is {clipped(mode)!r}; only in_place is supported, which keeps requests and their KV"
            raise unsupported("mode", message)
        return JsonResponse({"status": "ok", "message": f"Generation {await self._freeze(request, frozen=True)}."})

    async def continue_generation(self, request: Request) -> Response:
        """SGLang's; `torch_empty_cache` has no effect, since a pause leaves no memory to be freed."""
        await read_fields(ContinueGeneration, request)
        return JsonResponse({"status": "ok", "message": f"Generation {await self._freeze(request, frozen=False)}."})

    async def is_paused(self, request: Request) -> Response:
        await read_fields(NoFields, request)
        return JsonResponse({"is_paused": self._is_paused})

    async def _freeze(self, request: Request, *, frozen: bool) -> str:
        async with self._changing:
            if self._asleep and not frozen:
                message = "the engine is asleep; POST /wake_up wakes it"
                if self._is_paused:
                    message = "the engine is asleep, and was paused before; POST /wake_up, and then resume it"
                raise ApiError(409, message, code="asleep")
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
        asked = await read_fields(SleepFields, request)
        if asked.level != LEVEL:
            why = OTHER_LEVELS.get(asked.level)
            message = f"level is {shown(asked.level)}; only {LEVEL} is supported"
            raise unsupported("level", message if why is None else f"{message}: {why}")
        if asked.mode != "keep":
            message = (
                f"mode is {clipped(asked.mode)!r}; only keep is supported: requests in progress wait, and continue"
            )
            raise unsupported("mode", message)
        if asked.tags and set(asked.tags) != TAGS:
            raise unsupported("tags", f"tags is {shown(asked.tags)}; all of the engine sleeps: leave it out")
        async with self._changing:
            try:
                await asyncio.wrap_future(self._worker.sleep())
            except CannotSleep as error:
                raise ApiError(503, str(error), code="busy", retry_after=1) from None
            self._asleep, self._gate.asleep = set(TAGS), True
        audit.info("%s put the engine to sleep", request.state.caller)
        return JsonResponse({"status": "sleeping", "level": asked.level})

    async def wake_up(self, request: Request) -> Response:
        """Accept requests again, once all tags have been woken; without tags, at once."""
        tags = (await read_fields(WakeUp, request)).tags
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
            status = "sleeping" if self._asleep else "awake"
        return JsonResponse({"status": status, "tags": tags or None})

    async def is_sleeping(self, request: Request) -> Response:
        await read_fields(NoFields, request)
        return JsonResponse({"is_sleeping": bool(self._asleep)})

    # --- the prefix cache ---

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Forget cached prefixes: in all tiers, or in those of `tiers`; with `reset_running_requests`, also the KV of
        running requests.
        """
        asked = await read_fields(ResetPrefixCache, request)
        await self._reset(request, asked.mediums(), resets_running=asked.reset_running_requests)
        return JsonResponse({"success": True})

    async def flush_cache(self, request: Request) -> Response:
        """SGLang's name."""
        await read_fields(FlushCache, request)
        await self._reset(request, list(Medium), resets_running=False)
        return PlainTextResponse("Cache flushed.")

    async def _reset(self, request: Request, tiers: Sequence[Medium], *, resets_running: bool) -> None:
        future = self._worker.reset_prefix_cache(reset_running_requests=resets_running, tiers=tiers)
        count = await asyncio.wrap_future(future)
        audit.info("%s reset the prefix cache (%s): %d blocks", request.state.caller, ", ".join(tiers), count)

    # --- rows of images ---

    async def reset_image_rows(self, request: Request) -> Response:
        """Forget the rows of images that no request holds."""
        await read_fields(NoFields, request)
        count = await asyncio.wrap_future(self._worker.reset_image_rows())
        audit.info("%s reset the rows of images: %d images", request.state.caller, count)
        return Response(status_code=200)
