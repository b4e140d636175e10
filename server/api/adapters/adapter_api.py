"""Routes that show and change adapters: Chorus's own, and vLLM's two."""

from __future__ import annotations

import asyncio
import difflib
import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, model_validator
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ....core.requests.request_params import InvalidRequest
from ....memory.adapters.adapter import MAX_NAME_CHARACTERS
from ....memory.adapters.publishing import LabelTaken
from ....memory.adapters.registry_store import RegistryFull
from ....memory.adapters.store import UnknownAdapter
from ....memory.adapters.versions import LABEL, MARK, number_of, split_version, versioned
from ....memory.files.directory import MAX_PATH_BYTES
from ....memory.files.error import AdapterFormatError, shown
from ....memory.files.format import is_one_file
from ....memory.files.peft_names import STEM
from ...access.grants import NOWHERE
from ...engine.adapter_loader import AdapterLoader
from ...engine.backend import Backend
from ...engine.backend_adapters import BackendAdapters
from ...engine.engine_view import AdapterState
from ...engine.load_source import LoadSource
from ...engine.sourced_adapters import SourcedAdapters
from ...errors import DISK_FAULTS, ApiError, JsonResponse, T, clipped, read_body, validated
from ...executors import DaemonPool
from ...settings import AdapterName, Settings
from ..control_fields import read_fields, refuse_query
from .adapter_bytes import CONFIG, WEIGHTS, read_adapter, told_of_files
from .adapter_header import ADAPTER, adapter_header
from .numbered_adapters import numbered
from .upload import AdapterUpload

audit = logging.getLogger("chorus.audit")

MAX_DRAIN_SECONDS = 3600.0

MOST_VERSIONS = 1000
"""Most versions of a name that a load may keep."""

DRAIN_SECONDS = 0.02
"""Seconds between two checks whether an adapter's requests have ended."""

PIN_SECONDS = 0.02
"""Seconds between two checks whether an adapter to be pinned has been read."""


def _check_path(path: str) -> str:
    if "\0" in path or len(path.encode(errors="surrogatepass")) > MAX_PATH_BYTES:
        raise ValueError(f"a path must have at most {MAX_PATH_BYTES} bytes, none of them zero")
    return path


AdapterPath = Annotated[str, Field(min_length=1, max_length=MAX_PATH_BYTES), AfterValidator(_check_path)]


NAMES = frozenset(("name", "lora_name", "adapter_name", "adapter_id", "lora_id", "model", "served_model_name"))
PATHS = frozenset(("path", "lora_path", "adapter_path", "lora_local_path", "source", "adapter_source", "model_path"))

IN_CONFIG = frozenset(("alpha", "lora_alpha", "r", "rank", "lora_rank", "scale", "scaling", "target_modules"))

ELSEWHERE = {
    **dict.fromkeys(IN_CONFIG, "the adapter's adapter_config.json says it: leave it out"),
    "force": "DELETE /v1/adapters/NAME?force=true and POST /v1/unload_lora_adapter take it",
    "load_inplace": "POST /v1/adapters replaces an adapter of the same name: leave it out",
    "lora_int_id": "adapters have names here, no numbers: leave it out",
    "pinned": 'PATCH /v1/adapters/NAME with {"pinned": true} keeps an adapter resident, once it is loaded',
    "paused": 'PATCH /v1/adapters/NAME with {"paused": true} does it',
    "timeout": "the field of POST /v1/adapters/NAME/drain is seconds",
}
"""Fields that other routes or servers have, each with advice."""


class AdapterBody(BaseModel):
    """A body of a route that changes adapters; a field that it does not have is an error."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _only_what_it_has(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name in fields:
            if name not in known and fields[name] is not None:
                hint = _meant(name, known)
                raise ApiError(400, f"there is no field {clipped(name)!r}; {hint}", param=name)
        return {name: value for name, value in fields.items() if name in known}


class NamedAdapter(AdapterBody):
    """An adapter to be loaded under a name. `path` is a directory on the server; it is absent if the request contains
    the files.
    """

    keeps_labels: ClassVar[bool] = False
    """Without `keep_versions`, `NAME@LABEL` is a name of its own, as for other servers: a load retires nothing else."""

    name: AdapterName
    path: AdapterPath | None = None
    keep_versions: Annotated[int, Field(ge=1, le=MOST_VERSIONS)] | None = None
    """Number of versions to keep of the name, including the newest."""
    takes_files: ClassVar[bool] = True
    """The request may contain the files."""
    to_replace: ClassVar[str] = ""
    """What to do about an adapter of the same name, for the error of a load that may not replace it."""
    as_base: bool | None = None
    """Whether the adapter serves requests for the base model's name until it is removed; None: as before."""


class AddAdapter(NamedAdapter):
    """POST /v1/adapters."""


def _none_if_empty(name: str | None) -> str | None:
    """Some clients send an empty name for none (the inference extension's lora-syncer)."""
    return name or None


class LoadLoraAdapter(NamedAdapter):
    """POST /v1/load_lora_adapter. Which form an adapter on experts has (`is_3d_lora_weight`) its tensors tell."""

    keeps_labels: ClassVar[bool] = True
    to_replace: ClassVar[str] = " To replace it, set 'load_inplace' to true."

    name: AdapterName = Field(alias="lora_name")
    path: AdapterPath | None = Field(default=None, alias="lora_path")
    load_inplace: bool | None = None
    """Replace an adapter of the same name; None: only if the request contains the files."""
    base_model_name: Annotated[str | None, Field(max_length=MAX_PATH_BYTES), AfterValidator(_none_if_empty)] = None
    is_3d_lora_weight: bool | None = None


class LoadForSkyrl(LoadLoraAdapter):
    """POST /skyrl/v1/load_lora_adapter, which replaces an adapter of the same name unless `load_inplace` is false."""

    takes_files: ClassVar[bool] = False


class UnloadLoraAdapter(AdapterBody):
    """POST /v1/unload_lora_adapter. The name alone says which adapter."""

    lora_name: Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]
    force: bool | None = False


def _meant(name: str, known: Collection[str]) -> str:
    """Advice for a field that a body does not have. known: the fields that it has."""
    if name in ELSEWHERE:
        return ELSEWHERE[name]
    same = next((same for same in (NAMES, PATHS) if name in same), frozenset())
    if meant := sorted(same & set(known)) or difflib.get_close_matches(name[:64], known, n=1):
        return f"did you mean {meant[0]}?"
    if same is NAMES:
        return "the route's path has the adapter's name"
    return f"the fields are {', '.join(sorted(known))}"


class ChangeAdapter(AdapterBody):
    """PATCH /v1/adapters/NAME."""

    pinned: StrictBool | None = None
    paused: StrictBool | None = None


class RemoveAdapter(BaseModel):
    """DELETE /v1/adapters/NAME."""

    force: bool = False


class DrainAdapter(AdapterBody):
    """POST /v1/adapters/NAME/drain."""

    seconds: Annotated[float, Field(ge=0, le=MAX_DRAIN_SECONDS)] = 60.0


class AdapterRoots:
    """Directories that must contain a resolved path; without any, adapters can't be changed."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = tuple(root.resolve() for root in roots)

    def require(self) -> None:
        """Raises an ApiError unless adapters may be changed over HTTP."""
        if not self.roots:
            raise ApiError(
                403,
                "this server's adapters can't be changed over HTTP: adapter_roots is not set; "
                "start it with --adapter-roots DIR (or --adapters DIR) to allow directories below DIR",
                code="adapter_loading_disabled",
            )

    def find(self, path: str, field: str) -> Path:
        """The directory that `path` names, resolved; a relative path is tried below each root.

        This reads the disk, which may take any time: do not call it on the event loop's thread.

        Raises an ApiError that names `field`: 403 for a path outside the roots, whether it exists or not, 404 for one
        that doesn't exist. Passes on the OSError of a failing disk.
        """
        self.require()
        try:
            candidates = [(root / path).resolve() for root in self.roots]
            allowed = [found for found in candidates if any(found.is_relative_to(root) for root in self.roots)]
            found = next((found for found in allowed if found.is_dir() or is_one_file(found)), None)
        except (OSError, ValueError, RuntimeError) as error:
            if getattr(error, "errno", None) in DISK_FAULTS:
                raise
            raise ApiError(400, f"{field} must be a path: {error}", param=field) from None
        if found is not None:
            return found
        if not allowed:
            raise ApiError(
                403,
                f"{field} {path!r} lies outside the directories that adapters may be loaded from; "
                "put the adapter there, or start the server with --adapter-roots",
                param=field,
                code="path_not_allowed",
            )
        raise ApiError(
            404,
            f"No adapter found for {field} {path!r}: the server has no such directory",
            param=field,
            code="adapter_not_found",
        )


class AdapterApi:
    """Handlers of the routes that show and change adapters."""

    def __init__(
        self,
        worker: Backend,
        settings: Settings,
        loads: AdapterLoader,
        sourced: SourcedAdapters,
        threads: DaemonPool,
    ) -> None:
        """threads: pool for the list of the adapters."""
        self._worker = worker
        self.names = worker.adapters
        self._settings = settings
        self._roots = AdapterRoots(settings.loadable_from)
        self._loads = loads
        self._sourced = sourced
        self.threads = threads
        self.load_seconds = settings.adapter_load_seconds

    # --- our own ---

    async def list_all(self, request: Request) -> Response:
        listing = await asyncio.wrap_future(self.names.listing())
        stats, grant = listing.stats, request.state.identity.grant
        weights = {
            "mode_policy": self._settings.mode_policy,
            "mode": stats.mode.value,
            "merged_adapter": stats.merged_adapter,
            "merges": stats.num_merges,
            "switches": stats.num_mode_switches,
        }
        hide = request.app.state.private_paths.hide
        broken = [
            {"name": one.name, "path": shown_path(one.path, request), "reason": hide(one.reason)}
            for one in listing.quarantined
            if grant.allows(one.name)
        ]
        about = {} if grant.limited else {"weights": weights}  # the merged adapter may be another tenant's

        def respond() -> Response:
            data = [_body(one, request) for one in listing.adapters() if grant.allows(one.name)]
            return JsonResponse({"object": "list", "data": data, "quarantined": broken, **about})

        return await self.threads.run(respond)  # on a thread: thousands take a while

    async def show(self, request: Request) -> Response:
        name = request.path_params["name"]
        asked = name if request.state.identity.grant.allows(name) else NOWHERE
        with known_name(name):
            seen = await asyncio.wrap_future(self.names.state(asked))
        return JsonResponse(_body(seen, request))

    async def add(self, request: Request) -> Response:
        """Register an adapter, or replace one; answers 201 or 200."""
        async with read_adapter(request, self._loads, self._settings) as (fields, upload):
            asked = validated(AddAdapter, fields)
            seen, replaced = await self.load(request, asked, upload, replace=True)
        headers = {ADAPTER: adapter_header(seen.name, seen.label, seen.manifest.content_hash)}
        return JsonResponse(_body(seen, request), status_code=200 if replaced else 201, headers=headers)

    async def remove(self, request: Request) -> Response:
        """Remove an adapter, once the last request that uses it has ended, or with `?force=true` at once."""
        name = request.path_params["name"]
        asked = await read_fields(RemoveAdapter, request)
        ended = await self.unload(request, name, None, force=asked.force)
        return JsonResponse({"object": "adapter", "name": name, "deleted": True, "ended_requests": ended})

    async def change(self, request: Request) -> Response:
        """Pin an adapter, which loads it, or unpin it; pause or resume all of its versions."""
        asked = await self.read(ChangeAdapter, request)
        if asked.pinned is None and asked.paused is None:
            raise ApiError(400, "give pinned or paused, or both", param="pinned")
        name = request.path_params["name"]
        with known_name(name):
            if asked.paused is not None:
                if await asyncio.wrap_future(self.names.is_version(name)):
                    plain = split_version(name)[0]
                    message = f"paused: all versions of an adapter are paused together; PATCH /v1/adapters/{plain}"
                    raise ApiError(400, message, param="paused")
                await self._loads.pause(name, paused=asked.paused)
            if asked.pinned:
                await pin_adapter(self.names, name, self._settings.adapter_load_seconds)
            elif asked.pinned is False:
                await asyncio.wrap_future(self.names.unpin(name))
            seen = await asyncio.wrap_future(self.names.state(name))
        changes = [("unpinned", "pinned")[asked.pinned]] if asked.pinned is not None else []
        changes += [("resumed", "paused")[asked.paused]] if asked.paused is not None else []
        audit.info("%s %s adapter %s", request.state.caller, " and ".join(changes), name)
        return JsonResponse(_body(seen, request))

    async def drain(self, request: Request) -> Response:
        """Answer once no request of any version of an adapter is in progress."""
        asked, name = await self.read(DrainAdapter, request), request.path_params["name"]
        with known_name(name):
            await asyncio.wrap_future(self.names.state(name))
        loop = asyncio.get_running_loop()
        end = loop.time() + asked.seconds
        while left := await asyncio.wrap_future(self.names.num_requests(name)):
            if loop.time() >= end:
                message = f"{left} requests of adapter {name!r} have not ended; pause it, or ask again"
                raise ApiError(504, message, code="drain_timed_out")
            await asyncio.sleep(DRAIN_SECONDS)
        return JsonResponse({"object": "adapter", "name": name, "drained": True})

    # --- vLLM's ---

    async def load_lora_adapter(self, request: Request) -> Response:
        async with read_adapter(request, self._loads, self._settings) as (fields, upload):
            asked = validated(LoadLoraAdapter, fields)
            self._check_base(asked.base_model_name)
            replace = upload is not None if asked.load_inplace is None else asked.load_inplace
            seen, _ = await self.load(request, asked, upload, replace=replace)
        headers = {ADAPTER: adapter_header(seen.name, seen.label, seen.manifest.content_hash)}
        return PlainTextResponse(f"Success: LoRA adapter '{asked.name}' added successfully.", headers=headers)

    async def load_for_skyrl(self, request: Request) -> Response:
        """SkyRL's name of it, which replaces an adapter of the same name."""
        asked = await self.read(LoadForSkyrl, request)
        self._check_base(asked.base_model_name)
        await self.load(request, asked, None, replace=asked.load_inplace is not False)
        return JsonResponse({"status": "ok", "lora_name": asked.name})

    def _check_base(self, name: str | None) -> None:
        """Raise an ApiError if a load names another base model."""
        base = self._settings.base_name
        if name not in (None, base, str(self._settings.model)):
            message = f"base_model_name is {name!r}, this server's base model is {base!r}"
            raise ApiError(400, message, param="base_model_name")

    async def unload_lora_adapter(self, request: Request) -> Response:
        asked = await self.read(UnloadLoraAdapter, request)
        await self.unload(request, asked.lora_name, "lora_name", force=bool(asked.force))
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")

    # --- llama.cpp's ---

    async def list_numbered(self, request: Request) -> Response:
        found = await numbered(self._worker, self.threads, request.state.identity.grant)
        entries = [
            {"id": number, "name": one.name, "path": shown_path(one.manifest.path, request), "scale": 0.0}
            for number, one in sorted(found.items())
        ]
        return JsonResponse(entries)

    # --- common ---

    async def find(self, path: str, field: str) -> Path:
        """See `AdapterRoots.find`, on a thread; an ApiError if the disk takes too long."""
        try:
            async with asyncio.timeout(self.load_seconds):
                return await self._loads.beside(self._roots.find, path, field)
        except TimeoutError:
            message = f"the disk did not answer within {self.load_seconds:g} seconds (adapter_load_seconds)"
            raise ApiError(504, message, code="load_timed_out") from None

    async def read(self, kind: type[T], request: Request) -> T:
        refuse_query(request)
        async with read_body(request, self._settings.max_body_bytes) as body:
            return validated(kind, body)

    async def load(
        self, request: Request, asked: NamedAdapter, upload: AdapterUpload | None, *, replace: bool
    ) -> tuple[AdapterState, bool]:
        """The registered adapter once requests may use it, and whether it replaced another. upload: its files, if the
        request contains them.
        """
        name_field, path_field = (type(asked).model_fields[name].alias or name for name in ("name", "path"))
        path = asked.path
        if (path is None) == (upload is None):
            files = f"or the files {CONFIG} and {WEIGHTS}, and not both"
            what = files if asked.takes_files else "the adapter's directory"
            raise ApiError(400, f"give {path_field}, {what}", param=path_field)
        name, label = checked_name(self._settings, asked.name, name_field)
        replace = replace or bool(label and asked.keeps_labels)  # it replaces no version: a label means one content
        if upload is None:
            self._roots.require()
            find = partial(self._roots.find, path or "", path_field)
            source = LoadSource(find, self._roots.roots, is_push=True)
        else:
            source = upload.source
        if asked.as_base:
            await self._loads.beside(self._loads.check_alone, "as_base")
        keep = self._keep(asked)
        own = versioned(name, label) if label and keep is None else name
        with _load_errors(asked, name_field, path_field, uploaded=upload is not None):
            load = self._loads.load(
                name, source, replace=replace, by=request.state.caller, label=label or None, keep=keep
            )
            if asked.as_base is not None:
                load.add_done_callback(partial(self._loads.loaded_as_base, own, request.state.caller, asked.as_base))
            if upload is not None:
                upload.load = load
            state, replaced = await asyncio.wrap_future(load)
        self.names.loaded_names.add(name, state.label)
        return state, replaced

    def _keep(self, asked: NamedAdapter) -> int | None:
        """Number of versions of the name to keep; None: see `plan_load`."""
        if asked.keep_versions is not None:
            return asked.keep_versions
        if asked.keeps_labels and "keep_versions" not in self._settings.model_fields_set:
            return None
        return self._settings.keep_versions

    async def unload(self, request: Request, name: str, field: str | None, *, force: bool) -> int:
        """Remove an adapter; return how many requests were cancelled for it."""
        if self._loads.loaded is None:
            self._roots.require()
        with known_name(name, field):
            removed = await self._loads.remove(name, force=force)
        self._sourced.forget(name)
        plain = split_version(name)[0]
        if not await asyncio.wrap_future(self.names.versions(plain)):
            self.names.loaded_names.discard(plain)
        version = f"version {removed.label}, content {removed.content_hash}"
        text = "%s removed adapter %s: %s; %d requests were ended"
        audit.info(text, request.state.caller, name, version, removed.ended)
        return removed.ended


def checked_name(settings: Settings, full_name: str, field: str) -> tuple[str, str]:
    """Name and version of an adapter to be loaded. Raises an ApiError."""
    name, label = split_version(full_name)
    if label and not LABEL.fullmatch(label):
        raise ApiError(400, f"a version must have at most 64 letters, digits and ._+-, not {label!r}", param=field)
    if MARK in name:
        message = (
            f"{field} {clipped(full_name)!r}: a name must not contain {MARK}, which precedes a version; choose another"
        )
        raise ApiError(400, message, param=field)
    if settings.is_reserved(name):
        message = (
            f"{field} {name!r} is the base model's, or begins with it; choose another, and set as_base to have it "
            "serve that one"
        )
        raise ApiError(400, message, param=field)
    return name, label


async def pin_adapter(adapters: BackendAdapters, name: str, seconds: float) -> None:
    """Pin an adapter once it has been read. seconds: time limit. Raises an ApiError, and UnknownAdapter."""
    try:
        async with asyncio.timeout(seconds):
            while not await asyncio.wrap_future(adapters.pin(name)):
                await asyncio.sleep(PIN_SECONDS)
    except InvalidRequest as error:
        raise ApiError(400, str(error), param="pinned", code="no_room_to_pin") from None
    except AdapterFormatError as error:
        status, again = (503, 1) if error.failure.may_pass else (424, None)
        raise ApiError(status, str(error), code=error.failure, retry_after=again) from None
    except TimeoutError:
        adapters.unpin(name)  # otherwise a cluster's replicas would pin it later
        message = f"the disk did not answer within {seconds:g} seconds (adapter_load_seconds); nothing is pinned"
        raise ApiError(504, message, code="load_timed_out") from None


def _body(one: AdapterState, request: Request) -> dict[str, Any]:
    as_base = request.app.state.worker.adapters.as_base
    manifest, base = one.manifest, one.manifest.base_model
    return {
        "name": one.name,
        "version": one.label if (number := number_of(one.label)) is None else number,
        "rank": manifest.rank,
        "num_labels": None if manifest.head is None else manifest.head.num_labels,
        "target_modules": list(manifest.targets),
        "tier": one.tier,
        "pages": one.pages,
        "references": one.references,
        "pinned": one.pinned,
        "paused": one.paused,
        "credit": one.credit,
        "path": shown_path(manifest.path, request),
        "content_hash": manifest.content_hash,
        "no_effect": manifest.no_effect,
        "dropped_tensors": list(manifest.dropped),
        "stem": None if manifest.stem == STEM else manifest.stem,
        "base_model": base if base is None or base[0] != "/" else shown_path(Path(base), request),
        "names_other_base": manifest.names_other_base,
        **({"as_base": True} if one.name == as_base else {}),
    }


def shown_path(path: Path, request: Request) -> str:
    """A path as valid JSON text: bytes that are not UTF-8 and unprintable characters are escaped.

    A client that may not see this machine's paths gets the path relative to its root.
    """
    text = str(path) if request.state.sees_paths else request.app.state.private_paths.shown(path)
    return text if text.isprintable() else shown(text)


@contextmanager
def _load_errors(asked: NamedAdapter, name_field: str, path_field: str, *, uploaded: bool) -> Iterator[None]:
    """Convert the error of a failed load into an ApiError that names the field to fix."""
    try:
        yield
    except AdapterFormatError as error:
        text, field = told_of_files(str(error)) if uploaded else (str(error), path_field)
        if getattr(error.__cause__, "errno", None) in DISK_FAULTS:
            message = f"{text}; try again later"
            raise ApiError(503, message, param=field, code=error.failure, retry_after=1) from None
        raise ApiError(400, text, param=field, code="invalid_adapter") from None
    except LabelTaken as error:
        raise ApiError(400, f"{name_field}: {error}", param=name_field, code="adapter_already_loaded") from None
    except FileExistsError as error:
        message = f"The lora adapter '{error}' has already been loaded.{asked.to_replace}"
        raise ApiError(400, message, param=name_field, code="adapter_already_loaded") from None
    except RegistryFull as error:
        raise ApiError(503, str(error), param=name_field, code="registry_full") from None


@contextmanager
def known_name(name: str, field: str | None = None) -> Iterator[None]:
    """Turn UnknownAdapter into a 404 response."""
    try:
        yield
    except UnknownAdapter:
        message = f"The lora adapter '{name}' cannot be found."
        raise ApiError(404, message, param=field, code="adapter_not_found") from None
