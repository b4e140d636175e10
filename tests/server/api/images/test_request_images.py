"""Images of requests, with a processor that decodes nothing: turns, what is known, and what waits for the encoder."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chorus.core.media.decoder import image_threads
from chorus.core.requests.media import MediaItem
from chorus.memory.files.given_up import check_wanted
from chorus.server.api.images.image_parts import ImageFile
from chorus.server.api.images.request_images import ImageText, RequestImages, items_of

MODEL: Any = SimpleNamespace(why_blind=None, most_images=None)


class Processor:
    """Takes files in order; it waits until it may go, or nobody waits for it."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.taken: list[str] = []
        self.may_go, self.began = threading.Event(), threading.Event()
        self.num_given_up = 0

    def of_file(self, data: bytes, settings: Any) -> Any:
        self.started.append(data.decode())
        self.began.set()
        while not self.may_go.wait(0.01):
            try:
                check_wanted()
            except Exception:
                self.num_given_up += 1
                raise
        self.taken.append(data.decode() + "".join(f" {name}={value}" for name, value in settings.items()))
        tensors = {"pixel_values": torch.zeros(len(data), 256)}
        return SimpleNamespace(digest=data.decode(), text="", num_rows=1, grid=(), settings=settings, tensors=tensors)


@pytest.fixture
def processor() -> Processor:
    return Processor()


@pytest.fixture
def images(processor: Processor, tmp_path: Path) -> RequestImages:
    found = RequestImages(tmp_path, most=16)
    found._processor = processor  # noqa: SLF001 - in the place of a model's  # pyright: ignore[reportAttributeAccessIssue]
    return found


def sent(*names: str, low: bool = False) -> list[tuple[str, Any]]:
    return [(f"messages[0].content[{at}]", ImageFile(name.encode(), low)) for at, name in enumerate(names)]


async def begun(processor: Processor) -> None:
    while not processor.began.is_set():
        await asyncio.sleep(0.005)


def test_tenants_take_turns(images: RequestImages, processor: Processor) -> None:
    async def run() -> None:
        flood = [asyncio.ensure_future(images.prepared(sent(f"a{n}0", f"a{n}1"), MODEL, "a")) for n in range(3)]
        await begun(processor)
        other = asyncio.ensure_future(images.prepared(sent("b"), MODEL, "b"))
        async with asyncio.timeout(60):
            while "b" not in processor.started:  # though none of the other's has ended
                await asyncio.sleep(0.005)
        assert processor.started == ["a00", "b"]
        processor.may_go.set()
        await asyncio.gather(*flood, other)

    asyncio.run(run())
    assert len(processor.taken) == 7


def test_a_client_that_leaves_ends_its_images(images: RequestImages, processor: Processor) -> None:
    async def run() -> None:
        leaves = asyncio.ensure_future(images.prepared(sent("a", "b", "c"), MODEL, "a"))
        await begun(processor)
        leaves.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaves
        while not processor.num_given_up:
            await asyncio.sleep(0.005)
        processor.may_go.set()
        await images.prepared(sent("d"), MODEL, "a")

    asyncio.run(run())
    assert processor.taken == ["d"] and processor.num_given_up == 1
    gc.collect()
    assert images.files.total == 0


def test_what_is_known_is_a_tenants_and_a_salts(images: RequestImages, processor: Processor) -> None:
    processor.may_go.set()
    for tenant, salt, low, is_decoded in (
        ("a", "", False, True),
        ("a", "", False, False),
        ("b", "", False, True),
        ("a", "s", False, True),
        ("a", "s", False, False),
        ("a", "", True, True),
        ("a", "", True, False),
    ):
        before = len(processor.taken)
        asyncio.run(images.prepared(sent("x", low=low), MODEL, tenant, salt=salt))
        assert (len(processor.taken) > before) == is_decoded, (tenant, salt, low)
    assert processor.taken[-1] == "x detail=low"


def test_the_encoder_gets_what_was_prepared(
    images: RequestImages, processor: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor.may_go.set()
    images.ready.most = 8 * 1024
    made: list[list[ImageText]] = [asyncio.run(images.prepared(sent(name), MODEL, "a")) for name in ("xyz", "uvw", "k")]
    (first,), (second,), (third,) = [items_of([7], each, 7) for each in made]
    assert first.ready is not None and second.ready is None, "a tenant leaves as much as it has"
    assert third.ready is not None and images.ready.total == 4 * 1024
    prepared = first.ready.take()
    assert prepared.digest == "xyz" and first.ready.take() is None
    assert images.ready.total == 1024, "it is the encoder's from then on"
    (again,) = asyncio.run(images.prepared(sent("xyz"), MODEL, "a"))
    assert again.ready is None, "it was not decoded"
    wire = third.to_wire()
    assert images.ready.total == 0 and MediaItem.from_wire(wire) == third, "another process decodes it itself"


def test_images_are_prepared_apart() -> None:
    """Their thread lets steps go first."""
    own = asyncio.run(image_threads().run(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
    steps = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert own == min(steps + 10, 19) > steps
