"""Faults that give plausible rows of the wrong image, adapter or setting: each changes tokens, or ends the request.

Others are in the tests of what they are about: grids, shifts and additions in `test_mrope.py`, masks of blocks and
per-layer embeddings in `test_image_blocks.py`, numbers of tiles in `test_seeing_families.py`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from chorus.core import servable
from chorus.core.engine import Engine
from chorus.core.media.encoder import ImageEncoder
from chorus.core.media.processor import ImageProcessor
from chorus.core.media.serving import CheckpointRows
from chorus.core.requests import request as requests
from chorus.core.requests.media import MediaItem, keys_of
from chorus.core.requests.request import Request
from chorus.memory.files.identity import with_content

from .test_served_images import Asked, engine_of, picture
from .tiny_vision import needs_vision

pytestmark = [pytest.mark.native(needed=False), pytest.mark.vision, needs_vision]

Answers = dict[str, list[int] | str]
"""Tokens, or the error with which a request ended."""


def in_turn(engine: Engine, sent: list[Request]) -> Answers:
    """Answers to requests one after the other, so that each may find what those before have left in caches."""
    found: Answers = {}
    for request in sent:
        engine.add_request(request)
        tokens: list[int] = []
        error = None
        while engine.has_work():
            for output in engine.step():
                tokens += output.token_ids
                error = error or output.error
        found[request.id] = tokens if error is None else error
    engine.close()
    return found


def under_adapters(asked: Asked) -> list[Request]:
    """Requests about one image: of the base model, and of adapters that change the tower, or copy the projector."""
    image = picture(1, (40, 60))
    return [asked.request(f"{adapter}", adapter, [image]) for adapter in (None, "tower", "copied", "seven", None)]


def of_two_sizes(asked: Asked) -> list[Request]:
    """Requests about one image with other settings of the processor; fewer tiles make fewer rows."""
    image = picture(1, (90, 60))
    settings: list[dict[str, Any]] = [{}, {"size": {"longest_edge": 64}}, {"do_image_splitting": False}]
    return [asked.request(f"{number}", None, [image], settings=each) for number, each in enumerate(settings)]


def of_two_images(asked: Asked) -> list[Request]:
    return [asked.request(name, None, [picture(seed, (40, 60))]) for seed, name in enumerate(("one", "other"))]


def no_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter's tower is ignored."""
    monkeypatch.setattr(CheckpointRows, "changes", lambda *_: None)


def no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that an adapter has whole are ignored."""
    changes = CheckpointRows.changes

    def without(*args: Any) -> Any:
        found = changes(*args)
        return None if found is None else replace(found, copies={})

    monkeypatch.setattr(CheckpointRows, "changes", without)


def no_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that an adapter changes are kept as those of the base model."""
    monkeypatch.setattr(
        ImageEncoder, "_key", lambda self, request, item: (request.tenant, request.cache_salt, item.digest, "")
    )


def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest is of pixels alone."""
    digest = ImageProcessor.digest
    monkeypatch.setattr(ImageProcessor, "digest", lambda self, image, settings=None: digest(self, image))


def no_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefix cache compares placeholders, which are equal in all prompts."""

    def plain(self: Request, begin: int = 0, end: int | None = None) -> Any:
        return keys_of(self.token_ids[begin:end], (), begin)

    monkeypatch.setattr(requests.Request, "keys", plain)


def rows_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows begin one too late in each run."""
    places = MediaItem.places

    def later(self: MediaItem, begin: int, end: int) -> Any:
        for first, row, count in places(self, begin, end):
            yield first, max(0, row - 1), count

    monkeypatch.setattr(MediaItem, "places", later)


@pytest.mark.parametrize(
    ("plant", "sent"),
    [
        (no_changes, under_adapters),
        (no_copies, under_adapters),
        (no_scope, under_adapters),
        (no_settings, of_two_sizes),
        (no_pixels, of_two_images),
        (rows_of_another, of_two_images),
    ],
)
def test_a_planted_fault_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    sent: Callable[[Asked], list[Request]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = Asked("smolvlm")
    own = sent(asked)
    wanted = {request.id: asked.wanted[request.id] for request in own}
    assert in_turn(engine_of(asked), own) == wanted
    plant(monkeypatch)
    assert in_turn(engine_of(asked), sent(asked)) != wanted


@pytest.mark.parametrize("is_known", [True, False])
def test_prefixes_of_another_process_are_told_apart(
    is_known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of prefixes outlive a process; in the next one another adapter may have an adapter's number."""
    asked, image = Asked("smolvlm"), picture(1, (90, 60))
    found = []
    for number in range(3):
        (adapters := tmp_path / f"{number}").mkdir()
        shutil.copytree(asked.reference.path / "adapters" / "tower", own := adapters / "mine")
        if number == 1:
            values = load_file(own / "adapter_model.safetensors")
            save_file({key: each * 3 for key, each in values.items()}, own / "adapter_model.safetensors")
        monkeypatch.setattr(servable, "_PROCESS", f"process {number}")
        engine = engine_of(asked, adapters=adapters)
        (version,) = engine.store.versions()
        assert version.version == 1
        if is_known:
            engine.store.note(version, with_content(version.manifest))
        request = asked.request(f"{number}", "tower", [image])
        request.adapter_name = "mine"
        engine.add_request(request)
        found.append(request.keys())
        engine.close()
    assert found[0] != found[1] and (found[0] == found[2]) == is_known
