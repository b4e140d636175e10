"""Hostile images: bombs, damaged and foreign files, strips, and references to files and hosts."""

from __future__ import annotations

import asyncio
import random
import struct
import time
import tracemalloc
import zlib
from io import BytesIO

import pytest

from chorus.core.media.images import MAX_BYTES, BadImage, open_image
from chorus.server.api.images.image_fetch import ImageFetcher, Room
from chorus.server.api.images.image_parts import ImageUrl, image_of

from ..core.media.tiny_vision import needs_vision, tiny

pytestmark = [pytest.mark.vision, needs_vision]


def png(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG whose header tells a size, whatever its data are."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(10_000, 10_000), (60_000, 60_000), (2**31 - 1, 2**31 - 1), (50_000_001, 1)])
def test_a_bomb_is_refused_by_its_header(size: tuple[int, int]) -> None:
    data = png(*size, zlib.compress(bytes(1 << 20)))
    tracemalloc.start()
    with pytest.raises(BadImage, match="pixels"):
        open_image(data)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 8 << 20


def test_truncated_and_damaged_files_are_refused() -> None:
    from PIL import Image

    rng = random.Random(4)
    image = Image.effect_noise((64, 48), 90).convert("RGB")
    for format in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"):
        file = BytesIO()
        image.save(file, format)
        whole = file.getvalue()
        for _ in range(30):
            data = bytearray(whole[: rng.randrange(len(whole))])
            for _ in range(rng.randrange(4)):
                if data:
                    data[rng.randrange(len(data))] = rng.randrange(256)
            try:
                assert open_image(bytes(data)).mode == "RGB"  # some damage shows in the pixels alone
            except BadImage as error:
                assert str(error)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GIF89a",
        b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
        b"%PDF-1.7\n",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        b"\x00\x00\x01\x00\x01\x00\x10\x10",
        b"\x89PNG\r\n\x1a\n",
        bytes(1000),
    ],
)
def test_other_files_are_no_images(data: bytes) -> None:
    with pytest.raises(BadImage):
        open_image(data)


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "/etc/passwd",
        "http://127.0.0.1:22/",
        "http://169.254.169.254/latest/meta-data",
        "https://example.org/cat.png",
        "ftp://example.org/cat.png",
        "data:image/svg+xml,<svg/>",
        "data:image/png;base64,not base64!",
        "data:image/png;base64,",
        "",
    ],
)
def test_nothing_is_fetched_or_opened(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    loop = asyncio.new_event_loop()
    monkeypatch.setattr(socket, "socket", lambda *_: pytest.fail("it was fetched"))
    for part in (
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": url},
        {"type": "input_image", "image_url": url},
        {"type": "image", "source": {"type": "url", "url": url}},
    ):
        with pytest.raises(ValueError, match=r"is|has"):
            found = image_of(part)
            assert isinstance(found, ImageUrl)
            loop.run_until_complete(ImageFetcher(()).fetched("acme", found.url, Room(1 << 20)))
    with pytest.raises(ValueError, match="source"):
        image_of({"type": "image", "image": url})
    loop.close()


def test_base64_beyond_the_limit_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    import base64

    monkeypatch.setattr(base64, "b64decode", lambda *_, **__: pytest.fail("it was decoded"))
    text = "A" * (MAX_BYTES * 4 // 3 + 8)
    with pytest.raises(ValueError, match="at most"):
        image_of({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}})


@pytest.mark.parametrize("size", [(10_000, 1), (1, 10_000)])
def test_a_strip_has_as_many_rows_as_another_image(size: tuple[int, int]) -> None:
    """A family whose processor refuses it says so; these make tiles of it."""
    from PIL import Image

    from chorus.core.media.processor import ImageProcessor

    began = time.process_time()
    found = ImageProcessor(tiny("smolvlm")).of_image(Image.new("RGB", size))
    assert 0 < found.num_rows <= 4 * 17
    assert time.process_time() - began < 60
