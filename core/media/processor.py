"""The model's own image processor: an image's tensors, the text that takes its placeholder's place, and its rows.

Tests: tests/core/media/test_served_images.py
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...memory.files.given_up import check_wanted
from ...memory.files.tokens.torchvision import mend_torchvision
from ..model.read_config import read_model_config
from .decoder import image_decoder
from .images import BACKEND, BadImage, check_turned, strips
from .places import ImagePlaces
from .settings import DETAIL, LOW, LOW_SIDE, ImageSettings, TokenLimit

if TYPE_CHECKING:
    from PIL.Image import Image


LARGE_PIXELS = 1 << 23
"""Beyond it images are prepared one at a time in a process: each may take hundreds of megabytes."""

_large = threading.Lock()
_LOOK_SECONDS = 0.05


@contextmanager
def _only_large() -> Iterator[None]:
    """Wait until no other large image is prepared. Raises GivenUp if nobody waits for this one any longer."""
    while not _large.acquire(timeout=_LOOK_SECONDS):
        check_wanted()
    try:
        yield
    finally:
        _large.release()


@dataclass(frozen=True, slots=True)
class Prepared:
    """An image, ready for the encoder."""

    digest: str
    text: str
    """What stands in the prompt's text in the placeholder's place."""
    num_rows: int
    """Placeholders in that text."""
    tensors: dict[str, Any]
    """The image processor's output."""
    grid: tuple[int, ...] = ()
    """See `MediaItem.grid`."""
    settings: dict[str, Any] = field(default_factory=dict)
    """See `MediaItem.settings`."""
    marks: tuple[int, ...] = ()
    """The number of each row's mark, -1 for a row of the image itself; empty for models without `VisionSpec.marks`."""


class ImageProcessor:
    """Prepares images as the checkpoint says. Safe to use from several threads."""

    def __init__(self, directory: Path, max_tokens: int | None = None) -> None:
        """max_tokens: of an image, which is made smaller, or else refused; None: as its settings say.

        Raises OSError or ValueError for a checkpoint without what is needed.
        """
        mend_torchvision()
        import PIL
        import torchvision  # pyright: ignore[reportMissingImports]  # only with the extra `vision`
        import transformers
        from transformers import AutoImageProcessor, AutoProcessor, ProcessorMixin

        # By its own class: a processor of all of a model's inputs may bring another backend.
        self._images: Any = AutoImageProcessor.from_pretrained(directory, backend=BACKEND, local_files_only=True)
        self._text: Any = AutoProcessor.from_pretrained(directory, local_files_only=True)
        # What resizes is fixed above; the other one knows with which arguments the model wants it.
        self._text.image_processor = self._images
        has_texts = type(self._text).replace_image_token is not ProcessorMixin.replace_image_token
        model = read_model_config(directory)
        rows = self._text.tokenizer.convert_ids_to_tokens([model.image_token, *model.image_marks])
        self._rows = {token: number for number, token in enumerate(rows, -1)}
        # Not public, and the only call that gives an image's tensors with the text that stands for it.
        self._prepare: Any = self._text._process_images if has_texts else self._prepare_alone  # noqa: SLF001
        self.places = self._places_of_images(has_texts)
        self._arguments = self._arguments_of_model()
        vision = model.vision
        self._least_rows = 1 if vision is None else vision.least_rows
        self._grid_name = "" if vision is None else vision.grid
        self.settings = ImageSettings.of(self._images)
        if not has_texts:  # which follow no setting
            self.settings.switches = ()
        self._limit = None if max_tokens is None else TokenLimit(max_tokens, self.settings, self.count)
        settings = {
            "class": type(self._images).__name__,
            "settings": self._images.to_dict(),
            "text": [type(self._text).__name__, self._text.to_dict()],
            "arguments": self._arguments,
            "versions": [BACKEND, PIL.__version__, torchvision.__version__, transformers.__version__],
        }
        self._settings = json.dumps(settings, sort_keys=True, default=str).encode()

    @property
    def name(self) -> str:
        """The processor's class."""
        return type(self._images).__name__

    def of_file(self, data: bytes, settings: Mapping[str, Any] | None = None) -> Prepared:
        """Prepare the image of a file. settings: a request's, or an item's; `DETAIL` is none of the processor's.

        Raises BadImage, and GivenUp: see `ImageDecoder`.
        """
        own = dict(settings or {})
        most_side = LOW_SIDE if own.pop(DETAIL, None) == LOW else None
        with ExitStack() as turn:

            def check(size: tuple[int, int]) -> None:
                if self._limit is not None and most_side is None:  # one that is reduced is checked later
                    check_turned(size, partial(self._limit.fitted, settings=own))
                if math.prod(size) > LARGE_PIXELS:
                    turn.enter_context(_only_large())

            found = self.of_image(image_decoder().decode(data, check, most_side), own)
        return found if most_side is None else replace(found, settings={**found.settings, DETAIL: LOW})

    def of_image(self, image: Image | np.ndarray, settings: Mapping[str, Any] | None = None) -> Prepared:
        """Prepare an image in RGB, or its pixels, `[3, height, width]` uint8, of which fewer copies are made.

        Raises BadImage for one that the model's processor refuses.
        """
        limit, own = self._limit, dict(settings or {})
        pixels = image if isinstance(image, np.ndarray) else pixels_of(image)
        if limit is None:
            return self._of_pixels(pixels, own)
        size = size_of(pixels)
        found = self._of_pixels(pixels, limit.fitted(size, own))
        if found.num_rows > limit.most:  # more than its size told
            smaller = self.settings.smaller(found.settings, lambda each: self._fits(pixels, each, limit.most))
            if smaller is None:
                raise limit.refusal(size, str(found.num_rows))
            found = self._of_pixels(pixels, smaller)
        return found

    def _fits(self, pixels: np.ndarray, settings: Mapping[str, Any], most: int) -> bool:
        try:
            return self._of_pixels(pixels, dict(settings)).num_rows <= most
        except BadImage:
            return False

    def count(self, size: tuple[int, int], settings: Mapping[str, Any]) -> int | None:
        """At most so many rows has an image of a width and height; None: the model's processors can't tell."""
        sizes = [size[::-1]]
        try:
            if counted := getattr(self._text, "_get_num_multimodal_tokens", None):
                return int(counted(image_sizes=sizes, **settings)["num_image_tokens"][0])
            tiles, *_ = self._images.get_number_of_image_patches(*sizes[0], {**self._arguments, **settings})
            return int(tiles) * int(self._text.image_seq_len)
        except Exception:  # a processor without these, or a size that it refuses
            return None

    def _of_pixels(self, pixels: np.ndarray, settings: dict[str, Any]) -> Prepared:
        import torch

        size = "{} x {}".format(*size_of(pixels))
        try:
            arguments = {**self._arguments, **settings, "input_data_format": "channels_first"}
            with torch.inference_mode():
                found, (text,) = self._prepare([[torch.from_numpy(pixels)]], **arguments)
        except Exception as error:  # processors raise what they like about sizes that they don't take
            reason = " ".join(str(error).split())[:200]
            raise BadImage(f"of {size} pixels is refused by the model's image processor: {reason}") from None
        marks = tuple(self._rows[each] for each in re.findall("|".join(map(re.escape, self._rows)), text))
        num_rows = len(marks)
        if num_rows < self._least_rows:
            least = self._least_rows
            raise BadImage(
                f"of {size} pixels makes {num_rows} tokens, and at least {least} are needed; send a larger one"
            )
        grid, digest = self.grid(found, num_rows), self.digest(pixels, settings)
        return Prepared(digest, text, num_rows, dict(found), grid, settings, marks if len(self._rows) > 1 else ())

    def _places_of_images(self, has_texts: bool) -> ImagePlaces:
        """How images are written in a prompt. has_texts: the processor has a text of each image by itself."""
        text = self._text
        placeholder = getattr(text, "image_placeholder_token", text.image_token)
        is_numbered = getattr(self._images, "use_image_id", False)
        number = (text.image_id_start_token, text.image_id_end_token) if is_numbered else None
        return ImagePlaces(placeholder, number, "" if has_texts else text.fake_image_token)

    def _prepare_alone(self, images: list[Any], **arguments: Any) -> tuple[Any, list[str]]:
        """The same of a processor that only writes whole prompts: an image's text is that of a prompt of it alone."""
        tokens = self._text.tokenizer
        (ids,) = self._text(text=[self._text.image_token], add_special_tokens=False)["input_ids"]
        return self._images(images, **arguments), ["".join(tokens.convert_ids_to_tokens(ids))]

    def grid(self, found: Mapping[str, Any], num_rows: int) -> tuple[int, ...]:
        """Rows of an image by time, height and width, where the model's positions have these axes."""
        if not self._grid_name:
            return ()
        (patches,) = found[self._grid_name].tolist()
        merge = self._images.merge_size
        grid = patches[0], patches[1] // merge, patches[2] // merge
        if math.prod(grid) != num_rows:
            raise RuntimeError(f"an image has {grid} rows by time, height and width, its text has {num_rows} places")
        return grid

    def _arguments_of_model(self) -> dict[str, Any]:
        """What the model's processor of text and images is called with if nobody says otherwise."""
        merged: dict[str, Any] = self._text._merge_kwargs(  # noqa: SLF001  # see `_prepare`
            tokenizer_init_kwargs=self._text.tokenizer.init_kwargs,
            images_kwargs={"return_tensors": "pt"},
        )
        own = signature(self._prepare).parameters.values()
        beside = {each.name: merged[each.name] for each in own if each.kind != each.VAR_KEYWORD and each.name in merged}
        return {**beside, **merged["images_kwargs"]}

    def digest(self, pixels: np.ndarray, settings: Mapping[str, Any] | None = None) -> str:
        """Of an image's pixels, and of all that decides what the encoder is given of them."""
        found = hashlib.blake2b(self._settings, digest_size=16)
        if settings:
            found.update(json.dumps(settings, sort_keys=True).encode())
        found.update(f"\n{size_of(pixels)}\n".encode())
        for _, top, _, bottom in strips(size_of(pixels)):
            found.update(pixels[:, top:bottom].transpose(1, 2, 0).tobytes())
        return found.hexdigest()


def size_of(pixels: np.ndarray) -> tuple[int, int]:
    """Width and height of `[3, height, width]`."""
    return pixels.shape[2], pixels.shape[1]


def pixels_of(image: Image) -> np.ndarray:
    """`[3, height, width]` uint8 of an image in RGB."""
    return np.array(np.asarray(image).transpose(2, 0, 1), order="C")
