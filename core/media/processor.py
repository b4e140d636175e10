"""The model's own image processor: an image's tensors, the text that takes its placeholder's place, and its rows.

Tests: tests/core/media/test_served_images.py
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...memory.files.tokens.torchvision import mend_torchvision
from .images import BadImage, open_image

if TYPE_CHECKING:
    from PIL.Image import Image

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
                found = self._images([[image]], return_row_col_info=True, return_tensors="pt")
        except Exception as error:  # processors raise what they like about sizes that they don't take
            reason = " ".join(str(error).split())[:200]
            size = f"{image.size[0]} x {image.size[1]}"
            raise BadImage(f"of {size} pixels is refused by the model's image processor: {reason}") from None
        text = self._text.replace_image_token(found, 0)
        return Prepared(self.digest(image), text, text.count(self.placeholder), dict(found))

    def digest(self, image: Image) -> str:
        """Of an image's pixels, and of all that decides what the encoder is given of them."""
        found = hashlib.blake2b(self._settings, digest_size=16)
        found.update(f"\n{image.size}\n".encode())
        found.update(image.tobytes())
        return found.hexdigest()
