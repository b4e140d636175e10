"""Files of images as they are decoded: colours, turns, bits and transparency."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import pytest

from chorus.core.media import images
from chorus.core.media.images import BadImage, encoded, open_image

from .tiny_vision import needs_vision

pytestmark = [pytest.mark.vision, needs_vision]


def file_of(image: Any, format: str = "PNG", **more: Any) -> bytes:
    file = BytesIO()
    image.save(file, format, **more)
    return file.getvalue()


def colours(height: int = 5, width: int = 7, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, (height, width, channels), dtype=np.uint8)


def test_grey_palettes_and_rgb_are_the_same_pixels_in_rgb() -> None:
    from PIL import Image

    rgb = Image.fromarray(colours())
    for mode in ("RGB", "L", "P", "1", "CMYK"):
        image = rgb.convert(mode)
        found = open_image(file_of(image, "TIFF" if mode == "CMYK" else "PNG"))
        assert found.mode == "RGB" and np.array_equal(np.asarray(found), np.asarray(image.convert("RGB")))


def test_transparency_becomes_white() -> None:
    from PIL import Image

    values = colours(channels=4)
    values[0, :, 3], values[1, :, 3] = 0, 255
    found = np.asarray(open_image(file_of(Image.fromarray(values, "RGBA"))))
    assert (found[0] == 255).all() and np.array_equal(found[1], values[1, :, :3])
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    found = np.asarray(open_image(file_of(palette, transparency=0)))
    assert found.tolist() == [[[255, 255, 255], [40, 50, 60]]]


def test_of_sixteen_bits_the_upper_eight_are_kept() -> None:
    from PIL import Image

    values = np.array([[0, 255, 256, 0x7F80, 0xFFFF]], dtype=np.uint16)
    found = np.asarray(open_image(file_of(Image.fromarray(values))))
    assert found[0, :, 0].tolist() == [0, 0, 1, 0x7F, 0xFF]


@pytest.mark.parametrize("turn", range(1, 9))
def test_images_are_turned_as_their_exif_says(turn: int) -> None:
    from PIL import Image, ImageOps

    image = Image.fromarray(colours())
    exif = image.getexif()
    exif[0x0112] = turn
    data = file_of(image, exif=exif)
    found = open_image(data)
    assert np.array_equal(np.asarray(found), np.asarray(ImageOps.exif_transpose(Image.open(BytesIO(data)))))
    assert found.size == ((7, 5) if turn < 5 else (5, 7))


def test_an_image_is_the_same_after_it_was_made_a_file() -> None:
    from PIL import Image

    for values in (colours(), colours(channels=4)):
        image = Image.fromarray(values)
        assert np.array_equal(np.asarray(open_image(encoded(image))), np.asarray(images.in_rgb(image)))


def test_the_first_frame_of_an_animation_is_read() -> None:
    from PIL import Image

    frames = [Image.new("RGB", (4, 3), colour) for colour in ("red", "blue")]
    found = open_image(file_of(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    assert found.getpixel((0, 0)) == (255, 0, 0)


def test_an_image_beyond_the_limits_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    monkeypatch.setattr(images, "MAX_PIXELS", 34)
    monkeypatch.setattr(Image.Image, "load", lambda _: pytest.fail("it was decoded"))
    with pytest.raises(BadImage, match="7 x 5 = 35 pixels, at most 34"):
        open_image(_saved)
    monkeypatch.setattr(images, "MAX_BYTES", 10)
    with pytest.raises(BadImage, match="at most 10 are taken"):
        open_image(_saved)


_saved = b""


@pytest.fixture(autouse=True)
def _a_file() -> None:
    from PIL import Image

    global _saved
    _saved = file_of(Image.fromarray(colours()))
