"""Prepares the images of conversations: fetched, decoded, counted, and told apart, one at a time and by tenants' turns.

Tests: tests/server/test_image_requests.py
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from ....core.media.decoder import image_threads
from ....core.media.images import BadImage
from ....core.media.settings import DETAIL, LOW, BadSetting
from ....core.requests.media import MediaItem, Ready, placed
from ....core.requests.request_params import InvalidRequest
from ....memory.host.daemon_pool import give_up
from ...errors import ApiError
from ...http.gate import Held, SharedLimit
from .image_fetch import ImageFetcher, Room
from .image_parts import ImageFile, ImageUrl
from .known_images import KnownImages, Owner

if TYPE_CHECKING:
    from ....core.executors.base import ModelInfo
    from ....core.media.places import ImagePlaces
    from ....core.media.processor import ImageProcessor, Prepared

T = TypeVar("T")

MOST_KNOWN = 1024
"""Images whose numbers of tokens are remembered."""

READY_BYTES = 96 << 20
"""Of prepared images that wait for the encoder; those beyond it are decoded once more."""


class ImageText(NamedTuple):
    """What a prompt needs to know of an image."""

    data: bytes
    digest: str
    text: str
    num_rows: int
    grid: tuple[int, ...] = ()
    settings: Mapping[str, Any] = MappingProxyType({})
    """See `MediaItem.settings`."""
    held: object = None
    """See `MediaItem.held`."""
    ready: Ready | None = None
    """See `MediaItem.ready`."""


@dataclass(slots=True)
class RequestImages:
    """The images of a server's requests."""

    directory: Path
    """The model's."""
    most: int
    """Images of one request."""
    most_bytes: int = 8 << 20
    """That are fetched for one request."""
    max_tokens: int | None = None
    """Of an image; None: any number."""
    files: SharedLimit = field(default_factory=lambda: SharedLimit("bytes of images"))
    """Limits the bytes of files that requests hold."""
    fetcher: ImageFetcher = field(default_factory=lambda: ImageFetcher(()))
    ready: SharedLimit = field(default_factory=lambda: SharedLimit("bytes of prepared images", READY_BYTES))
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _processor: ImageProcessor | None = None
    _known: KnownImages[ImageText] = field(default_factory=lambda: KnownImages(MOST_KNOWN))
    _turns: WeakValueDictionary[str, asyncio.Semaphore] = field(default_factory=WeakValueDictionary)

    async def prepared(
        self,
        images: Sequence[tuple[str, ImageFile | ImageUrl]],
        model: ModelInfo,
        tenant: str = "",
        asked: Mapping[str, Any] | None = None,
        salt: str = "",
    ) -> list[ImageText]:
        """Fetch and prepare images, each with its name for errors. Raises InvalidRequest, which names the image.

        tenant: whose turn it is. asked: the request's `mm_processor_kwargs`. salt: its `cache_salt`.
        """
        if model.why_blind is not None:
            name = images[0][0]
            raise InvalidRequest(name, f"{name} is an image, and images are not served: {model.why_blind}")
        most = self.most if model.most_images is None else min(self.most, model.most_images)
        if len(images) > most:
            name = images[most][0]
            raise InvalidRequest(name, f"{name} is image {most + 1}, at most {most} are taken in a request; send fewer")
        room, settings = Room(self.most_bytes), await self._in_turn(tenant, self._checked, asked) if asked else {}
        owner, held = Owner(tenant, salt), Held(self.files, tenant)
        try:
            held.take(sum(len(image.data) for _, image in images if isinstance(image, ImageFile)))
            found = await asyncio.gather(*(self._one(*each, owner, room, settings, held) for each in images))
        except BaseException:  # its traceback refers to them
            held.give_back()
            raise
        return [image._replace(held=held) for image in found]

    def _checked(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return self._processor_now().settings.checked(asked)
        except BadSetting as error:
            raise InvalidRequest("mm_processor_kwargs", f"mm_processor_kwargs: {error}") from None

    async def _one(
        self, name: str, image: ImageFile | ImageUrl, owner: Owner, room: Room, settings: Mapping[str, Any], held: Held
    ) -> ImageText:
        if isinstance(image, ImageUrl):
            try:
                image = ImageFile(await self.fetcher.fetched(owner.tenant, image.url, room), image.low)
            except BadImage as error:
                raise InvalidRequest(name, f"{name}: the image {error}") from None
            held.take(len(image.data))
        return await self._in_turn(owner.tenant, self._prepare, name, image, settings, owner)

    async def _in_turn(self, tenant: str, work: Callable[..., T], *arguments: Any) -> T:
        """Work of the thread for images, which has one call of a tenant at a time. It is given up with the client."""
        async with self._turns.setdefault(tenant, asyncio.Semaphore(1)):
            future = image_threads().submit(work, *arguments)
            try:
                return await asyncio.wrap_future(future)
            except asyncio.CancelledError:
                give_up(future)
                raise

    def places(self) -> ImagePlaces:
        """How images are written in a prompt."""
        return self._processor_now().places

    def _prepare(self, name: str, file: ImageFile, settings: Mapping[str, Any], owner: Owner) -> ImageText:
        if file.low:
            settings = {**settings, DETAIL: LOW}
        key = hashlib.blake2b(file.data, digest_size=20).digest() + json.dumps(settings, sort_keys=True).encode()
        if (known := self._known.find(owner, key)) is not None:
            return known._replace(data=file.data)
        try:
            found = self._processor_now().of_file(file.data, settings)
        except BadImage as error:
            raise InvalidRequest(name, f"{name}: the image {error}") from None
        image = ImageText(b"", found.digest, found.text, found.num_rows, found.grid, found.settings)
        self._known.add(owner, key, image)
        return image._replace(data=file.data, ready=self._ready(found, owner.tenant))

    def _ready(self, found: Prepared, tenant: str) -> Ready | None:
        """The prepared image for the encoder, if there is room."""
        held, tensors = Held(self.ready, tenant), found.tensors.values()
        try:
            held.take(sum(getattr(each, "nbytes", 0) for each in tensors))
        except ApiError:
            return None
        return Ready(found, held)

    def _processor_now(self) -> ImageProcessor:
        with self._lock:
            if self._processor is None:
                from ....core.media.processor import ImageProcessor

                self._processor = ImageProcessor(self.directory, self.max_tokens)
            return self._processor


def items_of(
    tokens: Sequence[int], images: Sequence[ImageText], placeholder: int, marks: Sequence[int] = ()
) -> tuple[MediaItem, ...]:
    """The images of a prompt, at their places among its tokens. marks: see `placed`.

    Raises InvalidRequest if they don't fit.
    """
    try:
        runs = placed(tokens, placeholder, [image.num_rows for image in images], marks)
    except ValueError as error:
        raise InvalidRequest("messages", f"messages: {error}; the chat template or a text has placeholders") from None
    return tuple(
        MediaItem(each.data, each.digest, own, each.grid, settings=each.settings, held=each.held, ready=each.ready)
        for each, own in zip(images, runs, strict=True)
    )
