"""Text requests beside a flood of images; see `images`.

Tests: tests/perf/bench/test_images.py
"""

from __future__ import annotations

import threading
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from ....core.engine import Engine
from ....core.media.serving import open_encoder
from ....core.requests.request import Request
from ....core.requests.request_params import RequestParams
from ...report.command import say
from ..machine import queued_seconds
from ..models.random_seeing import SEEING_SIZES
from ..timer import in_turns
from .pictures import Pictures, open_engine

if TYPE_CHECKING:
    from ....core.media.encoder import ImageEncoder

FIRST, ALONE, IMAGES, REQUESTS = "first", "alone", "images", "requests"
"""The first image, with which the tower is read; no images, images alone, whole requests with images."""

_TEXTS = 4
"""Text requests at once."""
_FLOOD = 2
"""Images, or requests with one, at once."""
_PROMPT = 8
"""Tokens of a text's prompt: few, so that the longest step without images is not much longer than the others."""
_WAIT = 0.002


@dataclass(frozen=True, slots=True)
class Pace:
    """Tokens a second, and seconds of steps."""

    rate: float
    median_step: float
    longest_step: float

    @classmethod
    def of(cls, tokens: int, steps: Sequence[float], seconds: float) -> Pace:
        return cls(tokens / seconds, median(steps), max(steps))

    @property
    def longest(self) -> float:
        """The longest step over the median."""
        return self.longest_step / self.median_step


@dataclass(slots=True)
class Turn:
    """Text beside images, for a while."""

    clock: Pace
    unqueued: Pace
    """Without the time in which the thread of steps could have run, and other processes had all processors."""
    images: int
    """That were encoded meanwhile."""


class Flood:
    """Images that an encoder beside the engine always has to encode, and whose rows nobody takes."""

    def __init__(self, encoder: ImageEncoder, next_request: Callable[[], Request]) -> None:
        self._encoder, self._next = encoder, next_request
        self._waiting: list[Request] = []

    def fill(self, most: int) -> None:
        for done in self._encoder.take():
            self._waiting.remove(done.request)
        while len(self._waiting) < most:
            self._waiting.append(self._next())
            self._encoder.submit(self._waiting[-1])

    def end(self) -> None:
        """Wait until all of them are encoded: the next turn shall have none."""
        while self._waiting:
            self.fill(0)
            time.sleep(_WAIT)

    @property
    def num_encoded(self) -> int:
        return self._encoder.num_encoded


class Texts:
    """An engine with as many text requests as it shall always have, and requests with images beside them."""

    def __init__(self, engine: Engine, vocab: int, output_tokens: int) -> None:
        self._engine, self._vocab, self._output_tokens = engine, vocab, output_tokens
        self._random, self._ids = np.random.default_rng(1), count()
        self._texts, self._others = set[str](), set[str]()

    def run(self, seconds: float, flood: Flood | None, next_request: Callable[[], Request] | None) -> Turn:
        """A turn. flood: images alone. next_request: makes whole requests with images."""
        end = time.perf_counter() + seconds

        def fill() -> bool:
            self._fill(next_request)
            if flood is not None:
                flood.fill(_FLOOD)
            return time.perf_counter() < end

        before = 0 if flood is None else flood.num_encoded
        turn = self._turn(fill)
        if flood is not None:
            turn.images += flood.num_encoded - before
            flood.end()
        self._end()
        return turn

    def first(self, request: Request) -> Turn:
        """A turn that lasts until the tower is read, and has encoded an image."""
        self._engine.add_request(request)
        self._others.add(request.id)

        def fill() -> bool:
            self._fill(None)
            return self._engine.is_encoding

        turn = self._turn(fill)
        self._end()
        return turn

    def _turn(self, fill: Callable[[], bool]) -> Turn:
        """fill: adds what is to be added before a step; false at the end."""
        encoder, steps, tokens = self._engine.encoder, list[float](), 0
        assert encoder is not None
        self._fill(None)
        for _ in range(8):  # past their prompts, so that turns begin alike
            self._step()
        images, began, queued = encoder.num_encoded, time.perf_counter(), queued_seconds()
        own = list[float]()
        while fill():
            at, queued_then = time.perf_counter(), queued_seconds()
            tokens += self._step()
            steps.append(time.perf_counter() - at)
            own.append(max(0.0, steps[-1] - (queued_seconds() - queued_then)))
        seconds, queued = time.perf_counter() - began, queued_seconds() - queued
        paces = Pace.of(tokens, steps, seconds), Pace.of(tokens, own, seconds - queued)
        return Turn(*paces, encoder.num_encoded - images)

    def _fill(self, next_request: Callable[[], Request] | None) -> None:
        while len(self._texts) < _TEXTS:
            prompt = [int(each) for each in self._random.integers(300, self._vocab, _PROMPT)]
            params = RequestParams(max_tokens=self._output_tokens, temperature=0.0, ignore_eos=True)
            request = Request(f"t{next(self._ids)}", prompt, params, tenant="text")
            self._engine.add_request(request)
            self._texts.add(request.id)
        while next_request is not None and len(self._others) < _FLOOD:
            request = next_request()
            self._engine.add_request(request)
            self._others.add(request.id)

    def _step(self) -> int:
        """Run a step; return how many tokens texts got."""
        tokens = 0
        for output in self._engine.step():
            if output.error is not None:
                raise RuntimeError(output.error)
            if output.request_id in self._texts:
                tokens += len(output.token_ids)
            if output.finish_reason is not None:
                self._texts.discard(output.request_id)
                self._others.discard(output.request_id)
        return tokens

    def _end(self) -> None:
        while self._others:  # the encoder is idle in the next turn
            self._step()
        for name in self._texts:
            self._engine.abort(name)
        self._texts.clear()
        while self._engine.has_work():
            self._engine.step()


def beside(args: Namespace, path: Path, adapters: Path) -> dict[str, list[Turn]]:
    """Turns of text beside the first image, without images, beside images alone, and beside whole requests."""
    size = SEEING_SIZES[args.model_size]
    pictures = Pictures(path, size.pixels)
    made = [pictures.request(pictures.file()) for _ in range(args.images)]
    with open_engine(args, path, adapters, 1, 1) as engine:
        executor: Any = engine.executor
        wake, budget = threading.Event().set, engine.store.images.budget
        alone = open_encoder(engine.config, executor.whole, executor.dtype, wake, budget, executor.torch_device)
        flood = Flood(alone, made.pop)
        texts = Texts(engine, size.text.vocab, args.output_tokens)
        work: dict[str, Callable[[], Turn]] = {
            ALONE: partial(texts.run, args.seconds, None, None),
            IMAGES: partial(texts.run, args.seconds, flood, None),
            REQUESTS: partial(texts.run, args.seconds, None, made.pop),
        }
        try:
            first = texts.first(made.pop())
            flood.fill(1)
            while alone.num_encoded == 0:
                time.sleep(_WAIT)
            flood.fill(0)
            say("text beside images")
            return {FIRST: [first], **in_turns(work, args.rounds)}
        except IndexError:
            raise SystemExit(f"all of {args.images} images have been encoded; set --images higher") from None
        finally:
            alone.close()
