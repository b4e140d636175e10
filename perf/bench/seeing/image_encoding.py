"""Images a second of the engine's encoder, and of the same tower in transformers; see `images`.

Tests: tests/perf/bench/test_images.py
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from ....core.engine import Engine
from ....core.media.background import work_in_background
from ....core.media.images import BACKEND
from ....core.requests.request import Request
from ....memory.host.daemon_pool import DaemonPool
from ...report.command import say
from ..models.random_seeing import SEEING_SIZES
from ..timer import in_turns
from .pictures import Pictures, open_engine

ADAPTERS = 8

_AGAIN = 4
"""Images that are sent twice."""
_WAIT = 0.002


@dataclass(frozen=True, slots=True)
class Rate:
    """Images a second, and a second of processors."""

    wall: float
    processors: float

    @classmethod
    def of(cls, images: int, work: Callable[[], object]) -> Rate:
        began, used = time.perf_counter(), time.process_time()
        work()
        return cls(images / (time.perf_counter() - began), images / (time.process_time() - used))


class Transformers:
    """The same tower in transformers, one image a call, on a thread with the encoder's priority."""

    def __init__(self, path: Path, dtype: str, threads: int) -> None:
        import transformers

        kind = transformers.Idefics3ForConditionalGeneration
        self._model: Any = kind.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
        images = transformers.AutoImageProcessor
        self._images: Any = images.from_pretrained(path, backend=BACKEND, local_files_only=True)
        self._pool = DaemonPool("transformers", 1, initializer=lambda: work_in_background(threads))

    def encode(self, files: Sequence[bytes]) -> None:
        self._pool.submit(self._encode, files).result()

    def _encode(self, files: Sequence[bytes]) -> None:
        from PIL import Image

        for data in files:
            image = Image.open(BytesIO(data)).convert("RGB")
            given = self._images(images=[[image]], return_tensors="pt")
            pixels = given["pixel_values"].to(self._model.dtype)
            with torch.inference_mode():
                self._model.model.get_image_features(pixels, given["pixel_attention_mask"])


def encode(engine: Engine, requests: Sequence[Request]) -> None:
    """Wait until the encoder has the rows of all the requests, which take no part in steps."""
    encoder, left = engine.encoder, len(requests)
    assert encoder is not None
    for request in requests:
        engine.add_request(request)
    while left:
        for done in encoder.take():
            if done.error is not None:
                raise RuntimeError(done.error)
            if done.request.adapter is not None:
                engine.store.let_go(done.request.adapter)
            left -= 1
        time.sleep(_WAIT)


def encoding(args: Namespace, path: Path, adapters: Path) -> tuple[dict[str, list[Rate]], int]:
    """Images a second of each way, in turns; and images that a second use has encoded."""
    pictures = Pictures(path, SEEING_SIZES[args.model_size].pixels)
    theirs, names = Transformers(path, args.dtype, args.threads), [f"t{index}" for index in range(ADAPTERS)]
    with open_engine(args, path, adapters, args.threads, args.threads) as engine:

        def ours(wanted: Sequence[str | None]) -> Rate:
            requests = [pictures.request(pictures.file(), name) for name in wanted]
            return Rate.of(len(requests), lambda: encode(engine, requests))

        def other() -> Rate:
            files = [pictures.file() for _ in names]
            return Rate.of(len(files), lambda: theirs.encode(files))

        work: dict[str, Callable[[], Rate]] = {
            "transformers": other,
            "base": lambda: ours([None] * len(names)),
            "adapters": lambda: ours(names),
        }
        theirs.encode([pictures.file()])
        ours(names[:1])
        say("encoding")
        rates = in_turns(work, args.rounds)
        files = [pictures.file() for _ in range(_AGAIN)]
        encode(engine, [pictures.request(data) for data in files])
        encoder = engine.encoder
        assert encoder is not None
        before = encoder.num_encoded
        encode(engine, [pictures.request(data) for data in files])
        again = encoder.num_encoded - before
    return rates, again
