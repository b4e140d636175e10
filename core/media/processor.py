"""The model's own image processor: an image's tensors, the text that takes its placeholder's place, and its rows.

Tests: tests/core/media/test_served_images.py
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...memory.files.tokens.torchvision import mend_torchvision
from ..model.read_config import read_model_config
from .images import BadImage, open_image

if TYPE_CHECKING:
    from PIL.Image import Image

#: Options of image processors that know them.
_OPTIONS = {"return_row_col_info": True}

BACKEND = "torchvision"
"""What resizes, for all families: others differ by a grey level."""


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


class ImageProcessor:
    """Prepares images as the checkpoint says. Safe to use from several threads."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError or ValueError for a checkpoint without what is needed."""
        mend_torchvision()
        import PIL
        import torchvision  # pyright: ignore[reportMissingImports]  # only with the extra `vision`
        import transformers
        from transformers import AutoImageProcessor, AutoProcessor

        # By its own class: a processor of all of a model's inputs may bring another backend.
        self._images: Any = AutoImageProcessor.from_pretrained(directory, backend=BACKEND, local_files_only=True)
        self._text: Any = AutoProcessor.from_pretrained(directory, local_files_only=True)
        self.placeholder: str = self._text.image_token
        known = self._images.valid_kwargs.__annotations__
        self._options = {name: value for name, value in _OPTIONS.items() if name in known}
        spec = read_model_config(directory).vision
        self._grid_name = "" if spec is None else spec.grid
        settings = {
            "class": type(self._images).__name__,
            "settings": self._images.to_dict(),
            "text": [type(self._text).__name__, getattr(self._text, "image_seq_len", None)],
            "versions": [BACKEND, PIL.__version__, torchvision.__version__, transformers.__version__],
        }
        self._settings = json.dumps(settings, sort_keys=True, default=str).encode()

    @property
    def name(self) -> str:
        """The processor's class."""
        return type(self._images).__name__

    def of_file(self, data: bytes) -> Prepared:
        """Prepare the image of a file. Raises BadImage."""
        return self.of_image(open_image(data))

    def of_image(self, image: Image) -> Prepared:
        """Prepare an image in RGB. Raises BadImage for one that the model's processor refuses."""
        import torch

        try:
            with torch.inference_mode():
                found = self._images([[image]], return_tensors="pt", **self._options)
        except Exception as error:  # processors raise what they like about sizes that they don't take
            reason = " ".join(str(error).split())[:200]
            size = f"{image.size[0]} x {image.size[1]}"
            raise BadImage(f"of {size} pixels is refused by the model's image processor: {reason}") from None
        text = self._text.replace_image_token(found, 0)
        num_rows = text.count(self.placeholder)
        return Prepared(self.digest(image), text, num_rows, dict(found), self.grid(found, num_rows))

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

    def digest(self, image: Image) -> str:
        """Of an image's pixels, and of all that decides what the encoder is given of them."""
        found = hashlib.blake2b(self._settings, digest_size=16)
        found.update(f"\n{image.size}\n".encode())
        found.update(image.tobytes())
        return found.hexdigest()
