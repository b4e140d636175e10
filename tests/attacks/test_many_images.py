"""Floods of images: memory stays bounded, others are answered meanwhile, and nothing is kept."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.media import encoder
from chorus.core.media.decoder import THREADS, ImageDecoder
from chorus.core.media.processor import ImageProcessor, Prepared
from chorus.server.api.images import request_images
from chorus.server.text.tokenizer import Tokenizer

from ..core.media.tiny_vision import Reference, needs_vision
from ..server.conftest import Live, live_server
from ..server.test_image_requests import COUNT, GREEDY, HI, SEEN, as_part, file_of, picture, url_of

pytestmark = [pytest.mark.vision, needs_vision]

MANY, CACHE, FILES = 100, 256 << 10, 1 << 20
PIXELS, READY = 3 * 32 * 32 * 4 * 2, 8
"""Bytes of an image's pixels, with its masks, and the most images that wait for the encoder."""

SMALL = {"do_image_splitting": False}


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference("smolvlm")


@pytest.fixture(scope="module")
def live(reference: Reference) -> Iterator[Live]:
    path = reference.path
    config = EngineConfig(
        model=path,
        adapters=path / "adapters",
        memory_bytes=64 << 20,
        threads=1,
        cpu_kernels="torch",
        dtype="float32",
        device="cpu",
        limit_mm_per_prompt={"image": 128},
        encoder_cache_bytes=CACHE,
    )
    settings = {
        "model": path,
        "served_model_name": "base",
        "limit_mm_per_prompt": {"image": 128},
        "max_held_image_bytes": FILES,
        "max_body_bytes": FILES // 2,
    }
    engine: Any = Engine.from_config(config)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(request_images, "READY_BYTES", READY * PIXELS)
        yield stack.enter_context(live_server(engine, Tokenizer.load(path), settings=settings))


class Watched:
    """How many prepared images there are at once, and how many bytes of rows and pixels."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = self.num = self.most_bytes = 0
        self._lock, self._encoder = threading.Lock(), engine.encoder
        prepare = ImageProcessor._of_pixels  # noqa: SLF001 - to count

        def counted(*args: Any) -> Prepared:
            found = prepare(*args)
            with self._lock:
                self.num += 1
                self.most = max(self.most, self.num)
                self.most_bytes = max(self.most_bytes, self._encoder._held())  # noqa: SLF001
            weakref.finalize(found.tensors["pixel_values"], self._gone)
            return found

        monkeypatch.setattr(ImageProcessor, "_of_pixels", counted)

    def _gone(self) -> None:
        with self._lock:
            self.num -= 1


def images(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [url_of(picture((40, 40), f"#{rng.randrange(1 << 24):06x}")) for _ in range(count)]


def ask(live: Live, urls: list[str], adapter: str = "base", **fields: Any) -> Any:
    messages = [{"role": "user", "content": [*map(as_part, urls), HI]}]
    return live.post("/v1/chat/completions", messages=messages, model=adapter, mm_processor_kwargs=SMALL, **fields)


def is_given_back(live: Live) -> None:
    """Nothing is held of images, once the scheduler looks at other requests."""
    assert ask(live, [], max_tokens=1).status_code == 200
    gc.collect()
    live.wait_until(lambda: live.app.state.gate.images.total == 0, 60)


def test_a_hundred_images_in_many_requests(live: Live, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = live.engine
    watched = Watched(engine, monkeypatch)
    _, text = reference.answer(None, [{"role": "user", "content": "hi"}], [], COUNT)
    floods = [images(MANY, seed) for seed in range(3)]
    with ThreadPoolExecutor(8) as clients:
        asked = [
            clients.submit(ask, live, floods[number % 3], ("base", "tower", "linear")[number % 3], **GREEDY)
            for number in range(9)
        ]
        told = live.post("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], model="base", **GREEDY)
        assert told.json()["choices"][0]["token_ids"] == text
        answers = [each.result() for each in asked]
    assert {each.status_code for each in answers} <= {200, 429, 503}
    served = {each.json()["model"]: each.json() for each in answers if each.status_code == 200}
    assert served and all(each["usage"]["prompt_tokens"] > 4 * MANY for each in served.values())
    assert watched.most <= THREADS + encoder.THREADS + READY, "each thread has one, and some are in between"
    rows = MANY * 4 * 64 * 4  # of a request, which may have more than the cache
    assert watched.most_bytes <= CACHE + rows + PIXELS
    live.wait_until(lambda: not engine.has_work(), 60)
    is_given_back(live)
    engine.check_integrity()


def test_answers_of_a_hundred_images_are_those_of_transformers(live: Live, reference: Reference) -> None:
    colours = [f"#{number:02x}{255 - number:02x}80" for number in range(MANY)]
    seen = [picture((40, 40), colour) for colour in colours]
    prompt, answer = reference.answer("tower", [{"role": "user", "content": [SEEN] * MANY + [HI]}], seen, COUNT, SMALL)
    told = ask(live, [url_of(each) for each in seen], "tower", **GREEDY).json()
    assert told["choices"][0]["token_ids"] == answer and told["usage"]["prompt_tokens"] == len(prompt)


def test_files_beyond_the_limit_are_refused_and_given_back(live: Live) -> None:
    noise = random.Random(1).randbytes(3 * 280 * 280)
    from PIL import Image

    large = as_part(f"data:image/png;base64,{file_of(Image.frombytes('RGB', (280, 280), noise))}")
    gate, asked = live.app.state.gate, {"messages": [{"role": "user", "content": [large]}], "model": "base"}
    gate.images.take("another", FILES - (100 << 10))
    refused = live.post("/v1/chat/completions", **asked, max_tokens=2)
    assert refused.status_code in (429, 503) and "bytes of images" in refused.json()["error"]["message"]
    gate.images.give_back("another", FILES - (100 << 10))
    assert live.post("/v1/chat/completions", **asked, max_tokens=2).status_code == 200
    for broken in ("data:image/png;base64,aGVsbG8=", url_of(picture((9, 9), "red"))[:-30]):
        content = [large, as_part(broken)]
        answer = live.post("/v1/chat/completions", messages=[{"role": "user", "content": content}], model="base")
        assert answer.status_code == 400
    is_given_back(live)


def test_one_image_too_many_is_refused_before_any_is_decoded(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageDecoder, "decode", lambda *_: pytest.fail("it was decoded"))
    answer = ask(live, images(1, 7) * 129, max_tokens=2)
    assert answer.status_code == 400 and "is image 129, at most 128" in answer.json()["error"]["message"]
