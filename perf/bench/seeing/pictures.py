"""Files of images, requests with them, and an engine that serves them; see `images`.

Tests: tests/perf/bench/test_images.py
"""

from __future__ import annotations

from argparse import Namespace
from contextlib import AbstractContextManager
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ....core.engine import Engine
from ....core.media.processor import ImageProcessor
from ....core.model.read_config import read_model_config
from ....core.requests.media import MediaItem, placed
from ....core.requests.request import Request
from ....core.requests.request_params import RequestParams
from ..driving import opened


class Pictures:
    """Files of images that are all different, and requests with one of them."""

    def __init__(self, path: Path, pixels: int) -> None:
        self._processor, self._pixels = ImageProcessor(path), pixels
        self._placeholder = read_model_config(path).image_token
        self._random, self._ids = np.random.default_rng(0), count()
        self._tokenizer: Any = Tokenizer.from_file(str(path / "tokenizer.json"))

    def file(self) -> bytes:
        """A new image: a field of large squares, as large as the model sees it."""
        from PIL import Image

        squares = self._random.integers(0, 255, (16, 16, 3), dtype=np.uint8)
        image, file = Image.fromarray(squares).resize((self._pixels, self._pixels)), BytesIO()
        image.save(file, "JPEG", quality=90)
        return file.getvalue()

    def request(self, data: bytes, adapter: str | None = None) -> Request:
        """A request for a token behind an image."""
        found = self._processor.of_file(data)
        prompt = [1, *self._tokenizer.encode(found.text, add_special_tokens=False).ids, 300, 301, 302]
        assert self._placeholder is not None
        (runs,) = placed(prompt, self._placeholder, [found.num_rows])
        media = (MediaItem(data, found.digest, runs),)
        params = RequestParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        return Request(f"i{next(self._ids)}", prompt, params, adapter, tenant="images", media=media)


def open_engine(
    args: Namespace, path: Path, adapters: Path, threads: int, encoder_threads: int
) -> AbstractContextManager[Engine]:
    limits = {"memory_bytes": args.memory_mib << 20, "max_num_seqs": 16, "max_model_len": 512}
    threads_of = {"threads": threads, "encoder_threads": encoder_threads}
    own = {"dtype": args.dtype, "prefix_cache": False, "limit_mm_per_prompt": {"image": 1}}
    return opened(path, inline_reads=False, adapters=adapters, **limits, **threads_of, **own)
