"""The process that decodes images: its limits of time and memory, and when it starts and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import numpy as np
import pytest

from chorus.core.media.decode import MEMORY_BYTES, decode_seconds
from chorus.core.media.decoder import ImageDecoder
from chorus.core.media.images import MAX_PIXELS, MAX_SCANS, BadImage, open_image
from chorus.memory.files.given_up import GivenUp, wanted_while

from ...attacks import image_bombs
from .tiny_vision import needs_vision

pytestmark = [pytest.mark.vision, needs_vision]


@pytest.fixture
def decoder() -> Iterator[ImageDecoder]:
    found = ImageDecoder()
    yield found
    found.close()


def file_of(image: Any, format: str = "PNG", **more: Any) -> bytes:
    file = BytesIO()
    image.save(file, format, **more)
    return file.getvalue()


def noise(size: tuple[int, int] = (70, 50), mode: str = "RGB") -> Any:
    from PIL import Image

    channels = len(mode)
    values = np.random.default_rng(5).integers(0, 256, (size[1], size[0], channels), dtype=np.uint8)
    return Image.fromarray(values.squeeze(), mode)


def planes(image: Any) -> np.ndarray:
    return np.asarray(image).transpose(2, 0, 1)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_pixels_are_those_of_this_process(decoder: ImageDecoder, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = file_of(noise(mode="RGBA" if format in ("PNG", "WEBP") else "RGB"), format)
    found, own = decoder.decode(data), open_image(data)
    assert np.array_equal(found, planes(own))
    monkeypatch.setattr(
        "chorus.core.media.images.STRIP_PIXELS", 3 * 70
    )  # strips of three rows, of which the last has two
    assert np.array_equal(np.asarray(open_image(data)), np.asarray(own))


def test_one_process_decodes_all_and_starts_with_the_first(decoder: ImageDecoder) -> None:
    assert decoder.pid is None
    decoder.decode(file_of(noise()))
    first = decoder.pid
    with pytest.raises(BadImage, match="no image that is read"):
        decoder.decode(b"text")
    with pytest.raises(BadImage, match=r"can't be decoded: .*; send the whole file"):
        decoder.decode(file_of(noise())[:-500])
    decoder.decode(file_of(noise()))
    assert decoder.pid == first


def test_a_process_that_was_killed_is_replaced(decoder: ImageDecoder) -> None:
    decoder.decode(file_of(noise()))
    assert decoder.pid is not None
    os.kill(decoder.pid, signal.SIGKILL)
    os.waitid(os.P_PID, decoder.pid, os.WEXITED | os.WNOWAIT)
    assert decoder.decode(file_of(noise())).shape == (3, 50, 70)


def test_the_check_of_a_size_comes_before_the_pixels(decoder: ImageDecoder) -> None:
    seen: list[tuple[int, int]] = []

    def check(size: tuple[int, int]) -> None:
        seen.append(size)
        raise BadImage("is too wide")

    data = file_of(noise())[:200]  # there are no pixels to decode
    with pytest.raises(BadImage, match="is too wide"):
        decoder.decode(data, check)
    assert seen == [(70, 50)]
    assert decoder.decode(file_of(noise())).shape == (3, 50, 70), "the process waits for the next"


def test_an_image_is_reduced_to_a_side(decoder: ImageDecoder) -> None:
    assert decoder.decode(file_of(noise((700, 300))), most_side=512).shape == (3, 219, 512)
    small = noise((60, 30))
    assert np.array_equal(decoder.decode(file_of(small), most_side=512), planes(small))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (lambda: image_bombs.jpeg_of_scans(MAX_SCANS + 9, 64), rf"has \d+ scans, at most {MAX_SCANS} are taken"),
        (lambda: image_bombs.tiff_of_one_tile(2000), "tiles of 2000 x 2000 pixels, far larger than the image"),
        (lambda: image_bombs.tiff_of_one_blob(length=16), "has 63 tiles or strips at the place of another"),
    ],
)
def test_work_is_bounded_before_it_begins(data: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    file = data()
    Image.init()  # a plugin that is imported loads an image
    monkeypatch.setattr(Image.Image, "load", lambda _: pytest.fail("it was decoded"))
    with pytest.raises(BadImage, match=why):
        open_image(file)


def test_ordinary_scans_and_tiles_are_taken() -> None:
    image = noise((300, 200))
    assert open_image(file_of(image, "JPEG", progressive=True)).size == (300, 200)
    for packing in ("raw", "tiff_deflate", "tiff_lzw", "packbits"):
        assert np.array_equal(np.asarray(open_image(file_of(image, "TIFF", compression=packing))), np.asarray(image))


def test_a_file_that_takes_too_long_ends_the_process_alone(decoder: ImageDecoder) -> None:
    """A bitmap of runs is decoded in Python: no count of scans or tiles tells how long it takes."""
    with pytest.raises(BadImage, match="takes too long to decode for its pixels"):
        decoder.decode(image_bombs.bitmap_of_runs())
    assert decoder.pid is None
    assert decoder.decode(file_of(noise())).shape == (3, 50, 70)


def test_a_file_that_takes_too_much_memory_is_refused(decoder: ImageDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if its tiles were not looked at."""
    program = (
        "import chorus.core.media.images as images; images._check_tiles = lambda _: None\n"
        "import sys, chorus.core.media.decode as decode; decode.main(int(sys.argv[1]))"
    )

    def command(_: str, link: str) -> list[str]:
        return [sys.executable, "-P", "-c", program, link]

    monkeypatch.setattr("chorus.core.media.decoder.python_command", command)
    with pytest.raises(BadImage, match="decode"):
        decoder.decode(image_bombs.tiff_of_one_tile())
    pid = decoder.pid
    assert pid is not None, "it goes on"
    with open(f"/proc/{pid}/status") as status:
        (peak,) = [int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM:")]
    assert peak < MEMORY_BYTES // 4, "it never had the tile"


def test_nobody_waits_for_it_any_longer(decoder: ImageDecoder) -> None:
    decoder.decode(file_of(noise()))
    began, pid = threading.Event(), decoder.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)

    def is_wanted() -> bool:
        began.set()
        return False

    with wanted_while(is_wanted), pytest.raises(GivenUp):
        decoder.decode(file_of(noise()))
    assert began.is_set() and decoder.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_process_that_is_silent_is_killed(decoder: ImageDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder.decode(file_of(noise()))
    assert decoder.pid is not None
    os.kill(decoder.pid, signal.SIGSTOP)
    monkeypatch.setattr("chorus.core.media.decoder.WALL_SECONDS", 0.2)
    with pytest.raises(BadImage, match="was not decoded within"):
        decoder.decode(file_of(noise()))
    assert decoder.pid is None


def test_a_process_that_can_not_start_is_no_fault_of_the_image(
    decoder: ImageDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "chorus.core.media.decoder.python_command", lambda *_: [sys.executable, "-c", "raise SystemExit(3)"]
    )
    with pytest.raises(RuntimeError, match="ended with 3"):
        decoder.decode(file_of(noise()))


def test_it_ends_with_its_parent() -> None:
    program = (
        "import os, sys; from chorus.core.media.decoder import image_decoder\n"
        "image_decoder().decode(sys.stdin.buffer.read()); print(image_decoder().pid, flush=True); os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", program], input=file_of(noise()), capture_output=True, check=True)
    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{int(done.stdout)}"):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_seconds_grow_with_pixels() -> None:
    assert decode_seconds(64) < 1.01 and decode_seconds(MAX_PIXELS) < 4.2, "less than others should wait"


def test_the_process_imports_no_torch() -> None:
    """It takes tens of megabytes, and starts in a fraction of a second."""
    program = (
        "import sys, chorus.core.media.decode; print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
