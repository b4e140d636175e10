"""Files of images, decoded under bounds: turned as their EXIF says, on white where they are transparent, in RGB.

Tests: tests/core/media/test_images.py, tests/attacks/test_images.py
"""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from PIL.Image import Image

MAX_BYTES = 20 << 20
MAX_PIXELS = 50_000_000
MAX_ITEMS = 16
"""Images of one request, unless the server says otherwise."""

BACKEND = "torchvision"
"""What resizes, for all families: others differ by a grey level."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""What is decoded: no format here runs programs or refers to other files."""

_NAMED = "PNG, JPEG, WebP, GIF, BMP or TIFF"


class BadImage(ValueError):
    """An image that can't be served; the text says why, without naming the image."""


def check_size(num_bytes: int) -> None:
    """Raise BadImage for a file that is too large to be looked at."""
    if num_bytes > MAX_BYTES:
        raise BadImage(f"has {num_bytes} bytes, at most {MAX_BYTES} are taken; send a smaller file")


def open_image(data: bytes, check: Callable[[tuple[int, int]], object] | None = None) -> Image:
    """The image of a file, in RGB; of an animation the first frame.

    Its size is checked before any pixel is decoded. check: raises BadImage for a width and height, too.
    Raises BadImage.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

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
    if check is not None:
        try:
            check((height, width))  # as a turn, which is known once it is decoded, may make it
        except BadImage:
            check((width, height))
    try:
        image.load()
        return in_rgb(ImageOps.exif_transpose(image))
    except Exception as error:
        raise BadImage(f"can't be decoded: {_shown(error)}; send the whole file") from None


def in_rgb(image: Image) -> Image:
    """An image in RGB: on white where it is transparent, and of 16 bits the upper eight."""
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
