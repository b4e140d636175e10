"""Files of images, decoded under bounds: turned as their EXIF says, on white where they are transparent, in RGB.

Tests: tests/core/media/test_images.py, tests/attacks/test_images.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

Check = Callable[[tuple[int, int]], object]
"""Raises BadImage for a width and height."""

MAX_BYTES = 20 << 20
MAX_PIXELS = 50_000_000
MAX_ITEMS = 16
"""Images of one request, unless the server says otherwise."""

BACKEND = "torchvision"
"""What resizes, for all families: others differ by a grey level."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""What is decoded: no format here runs programs or refers to other files."""

MAX_SCANS = 256
"""Of a progressive JPEG: encoders write ten or so, and each takes time for all of its pixels, even an empty one."""

STRIP_PIXELS = 1 << 21

_SCAN = b"\xff\xda"
_TILE_WIDTH, _TILE_LENGTH, _TILE_OFFSETS, _STRIP_OFFSETS = 322, 323, 324, 273  # tags of TIFF
_LARGE_TILE = 1 << 20
"""Pixels of a tile that an image of any size may have."""

_NAMED = "PNG, JPEG, WebP, GIF, BMP or TIFF"


class BadImage(ValueError):
    """An image that can't be served; the text says why, without naming the image."""


def check_size(num_bytes: int) -> None:
    """Raise BadImage for a file that is too large to be looked at."""
    if num_bytes > MAX_BYTES:
        raise BadImage(f"has {num_bytes} bytes, at most {MAX_BYTES} are taken; send a smaller file")


def open_image(data: bytes, check: Check | None = None, most_side: int | None = None) -> Image:
    """The image of a file, in RGB; of an animation the first frame.

    Its size, and what decoding it takes, are checked before any pixel is decoded; time is not: see `ImageDecoder`.
    check: raises BadImage for a width and height, too. most_side: a larger image is reduced to this longest side.
    Raises BadImage.
    """
    image = opened(data)
    if check is not None:
        check_turned(image.size, check)
    return decoded(image, most_side)


def check_turned(size: tuple[int, int], check: Check) -> None:
    """Raise BadImage unless a check takes an image of this size or, as its EXIF may say, of one turned."""
    try:
        check((size[1], size[0]))
    except BadImage:
        check(size)


def opened(data: bytes) -> Image:
    """The image of a file, of which only the header was read. Raises BadImage."""
    from PIL import Image, UnidentifiedImageError

    check_size(len(data))
    try:
        image = Image.open(BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise BadImage(f"is no image that is read: send {_NAMED}") from None
    except Image.DecompressionBombError:
        raise BadImage(f"has more than {MAX_PIXELS} pixels; send a smaller image") from None
    except Exception as error:  # whatever a decoder raises about a damaged header is the file's fault
        raise BadImage(f"can't be decoded: {_shown(error)}; send {_NAMED}") from None
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise BadImage(
            f"has {width} x {height} = {width * height} pixels, at most {MAX_PIXELS} are taken; send a smaller image"
        )
    _check_scans(image, data)
    _check_tiles(image)
    return image


def _check_scans(image: Image, data: bytes) -> None:
    """Raise BadImage for a progressive JPEG that goes over all of its pixels too often."""
    if image.info.get("progressive") and (count := data.count(_SCAN)) > MAX_SCANS:
        raise BadImage(f"has {count} scans, at most {MAX_SCANS} are taken; save it again")


def _check_tiles(image: Image) -> None:
    """Raise BadImage for a TIFF whose tiles are far larger than the image, or are the same bytes several times."""
    tags: Any = getattr(image, "tag_v2", {})
    try:
        width, height = (int(tags.get(tag, 0)) for tag in (_TILE_WIDTH, _TILE_LENGTH))
        offsets = tags.get(_TILE_OFFSETS) or tags.get(_STRIP_OFFSETS) or ()
        again = len(offsets) - len(set(offsets))
    except TypeError:
        raise BadImage("can't be decoded: its tiles have no size or offset; save it again") from None
    if width * height > max(4 * math.prod(image.size), _LARGE_TILE):
        raise BadImage(f"has tiles of {width} x {height} pixels, far larger than the image; save it again")
    if again:
        raise BadImage(f"has {again} tiles or strips at the place of another; save it again")


def decoded(image: Image, most_side: int | None = None) -> Image:
    """The pixels of an opened image; see `open_image`. Raises BadImage."""
    from PIL import ImageOps

    try:
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        image = in_rgb(image)
        if most_side is not None:
            image.thumbnail((most_side, most_side))
    except MemoryError:
        raise BadImage("takes more memory to decode than is allowed; send a smaller one") from None
    except Exception as error:
        raise BadImage(f"can't be decoded: {_shown(error)}; send the whole file") from None
    return image


def in_rgb(image: Image) -> Image:
    """An image in RGB: on white where it is transparent, and of 16 bits the upper eight."""
    from PIL import Image

    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    found = Image.new("RGB", image.size)
    for box in strips(image.size):
        found.paste(_strip_in_rgb(image.crop(box)), box)
    return found


def strips(size: tuple[int, int]) -> Iterator[tuple[int, int, int, int]]:
    """The boxes of rows that are worked on at a time, so that no copy of a whole image is made."""
    width, height = size
    rows = max(1, STRIP_PIXELS // width)
    for top in range(0, height, rows):
        yield 0, top, width, min(top + rows, height)


def _strip_in_rgb(image: Image) -> Image:
    from PIL import Image

    if image.mode.startswith("I"):
        image = _of_eight_bits(image)
    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def _of_eight_bits(image: Image) -> Image:
    import numpy as np
    from PIL import Image

    values = np.asarray(image).astype(np.int64).clip(0, 0xFFFF)
    return Image.fromarray((values >> 8).astype(np.uint8))


def encoded(image: Any) -> bytes:
    """A PIL image as a file, without loss of what is served of it."""
    from PIL import ImageOps

    width, height = image.size
    if width * height > MAX_PIXELS:
        raise BadImage(f"has {width * height} pixels, at most {MAX_PIXELS} are taken; give a smaller image")
    file = BytesIO()
    in_rgb(ImageOps.exif_transpose(image)).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _shown(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__
