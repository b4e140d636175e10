"""Prepares the images of conversations: fetched, decoded, counted, and told apart, on threads of their own.

Tests: tests/server/test_image_requests.py
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ...core.media.images import BadImage
from ...core.media.settings import BadSetting
from ...core.requests.media import MediaItem, placed
from ...core.requests.request_params import InvalidRequest
from ..executors import DaemonPool
from ..http.gate import Held, SharedLimit
from .image_fetch import ImageFetcher, Room
from .image_parts import ImageFile, ImageUrl

if TYPE_CHECKING:
    from ...core.executors.base import ModelInfo
    from ...core.media.places import ImagePlaces
    from ...core.media.processor import ImageProcessor

THREADS = 1
"""Images that are decoded at once: each may take hundreds of megabytes."""

MOST_KNOWN = 1024


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
    threads: DaemonPool = field(default_factory=lambda: DaemonPool("images", THREADS, initializer=_apart))
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _processor: ImageProcessor | None = None
    _known: OrderedDict[bytes, ImageText] = field(default_factory=OrderedDict)  # by the hash of a file's bytes

    async def prepared(
        self,
        images: Sequence[tuple[str, ImageFile | ImageUrl]],
        model: ModelInfo,
        tenant: str = "",
        asked: Mapping[str, Any] | None = None,
    ) -> list[ImageText]:
        """Fetch and prepare images, each with its name for errors. Raises InvalidRequest, which names the image.

        tenant: whose turn it is to fetch. asked: the request's `mm_processor_kwargs`.
        """
        if model.why_blind is not None:
            name = images[0][0]
            raise InvalidRequest(name, f"{name} is an image, and images are not served: {model.why_blind}")
        most = self.most if model.most_images is None else min(self.most, model.most_images)
        if len(images) > most:
            name = images[most][0]
            raise InvalidRequest(name, f"{name} is image {most + 1}, at most {most} are taken in a request; send fewer")
        room, settings = Room(self.most_bytes), await self.threads.run(self._checked, asked or {})
        held = Held(self.files, tenant)
        try:
            held.take(sum(len(image.data) for _, image in images if isinstance(image, ImageFile)))
            found = await asyncio.gather(*(self._one(*each, tenant, room, settings, held) for each in images))
        except BaseException:  # its traceback refers to them
            held.give_back()
            raise
        return [image._replace(held=held) for image in found]

    def _checked(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return self._processor_now().settings.checked(asked) if asked else {}
        except BadSetting as error:
            raise InvalidRequest("mm_processor_kwargs", f"mm_processor_kwargs: {error}") from None

    async def _one(
        self, name: str, image: ImageFile | ImageUrl, tenant: str, room: Room, settings: Mapping[str, Any], held: Held
    ) -> ImageText:
        if isinstance(image, ImageUrl):
            try:
                image = ImageFile(await self.fetcher.fetched(tenant, image.url, room))
            except BadImage as error:
                raise InvalidRequest(name, f"{name}: the image {error}") from None
            held.take(len(image.data))
        return await self.threads.run(self._prepare, name, image, settings)

    def places(self) -> ImagePlaces:
        """How images are written in a prompt."""
        return self._processor_now().places

    def _prepare(self, name: str, file: ImageFile, settings: Mapping[str, Any]) -> ImageText:
        key = hashlib.blake2b(file.data, digest_size=20).digest() + json.dumps(settings, sort_keys=True).encode()
        with self._lock:
            if (known := self._known.get(key)) is not None:
                self._known.move_to_end(key)
                return known._replace(data=file.data)
        try:
            found = self._processor_now().of_file(file.data, settings)
        except BadImage as error:
            raise InvalidRequest(name, f"{name}: the image {error}") from None
        image = ImageText(b"", found.digest, found.text, found.num_rows, found.grid, found.settings)
        with self._lock:
            self._known[key] = image
            while len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)
        return image._replace(data=file.data)

    def _processor_now(self) -> ImageProcessor:
        with self._lock:
            if self._processor is None:
                from ...core.media.processor import ImageProcessor

                self._processor = ImageProcessor(self.directory, self.max_tokens)
            return self._processor


def _apart() -> None:
    """Let steps of an engine in this process go first."""
    from ...core.media.apart import work_apart  # torch: with the first image alone

    work_apart(1)


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
        MediaItem(image.data, image.digest, own, image.grid, settings=image.settings, held=image.held)
        for image, own in zip(images, runs, strict=True)
    )
