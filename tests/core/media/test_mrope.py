"""Images on axes of time, height and width: faults that would give other tokens, drafts, small chunks, older names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from chorus.core.config import EngineConfig
from chorus.core.executors import base
from chorus.core.media.processor import ImageProcessor
from chorus.core.media.serving import with_tower
from chorus.core.model.specs.config import ModelConfig
from chorus.core.requests import types
from chorus.memory.files.peft_names import PREFIX

from . import tiny_mrope
from .test_served_images import COUNT, KERNELS, Asked, answers, engine_of, picture
from .tiny_vision import needs_vision

pytestmark = [pytest.mark.native(needed=False), pytest.mark.vision, needs_vision]


@pytest.fixture(scope="module", params=list(tiny_mrope.FAMILIES))
def asked(request: pytest.FixtureRequest) -> Asked:
    return Asked(request.param)


def served(asked: Asked, count: int = COUNT, **fields: Any) -> tuple[list[int], list[int]]:
    """The answer about two images, and the one that is wanted."""
    engine = engine_of(asked, **fields)
    request = asked.request("two", None, [picture(1, (90, 30)), picture(2, (20, 60))], count=count)
    engine.add_request(request)
    found = answers(engine)["two"]
    engine.close()
    return found, asked.wanted["two"]


def swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = ImageProcessor.grid

    def other(*args: Any) -> tuple[int, ...]:
        time, height, width = grid(*args)
        return time, width, height

    monkeypatch.setattr(ImageProcessor, "grid", other)


def without_shift(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(types, "position_shift", lambda *_: 0)


def without_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageProcessor, "grid", lambda *_: ())


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("plant", [swapped, without_shift, without_axes])
def test_planted_faults_are_found(
    asked: Asked, plant: Callable[[pytest.MonkeyPatch], None], kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 12
    found, wanted = served(asked, count, kernels=kernels)
    assert found == wanted
    plant(monkeypatch)
    assert served(asked, count, kernels=kernels)[0] != wanted


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("parts", [(0, 1, 2, 0), (2, 1, 0, 0), (1, 0, 0, 0), (0, 0, 0, 0)], ids=str)
def test_additions_behind_other_layers_are_found(
    parts: tuple[int, ...], kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer off, in another order, one of them alone, and none."""
    asked = Asked("qwen3_vl")
    found, wanted = served(asked, kernels=kernels)
    assert found == wanted

    def planted(config: EngineConfig, model: ModelConfig) -> ModelConfig:
        model = with_tower(config, model)
        assert [layer.media_part for layer in model.layers] == [1, 2, 0, 0]
        pairs = zip(model.layers, parts, strict=True)
        return replace(model, layers=tuple(replace(layer, media_part=part) for layer, part in pairs))

    monkeypatch.setattr(base, "with_tower", planted)
    assert served(asked, kernels=kernels)[0] != wanted


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_small_chunks(asked: Asked, kernels: str, tokens: int) -> None:
    """A chunk of one token is a decode step's, also between two images."""
    found, wanted = served(asked, kernels=kernels, max_num_batched_tokens=tokens, max_num_seqs=1)
    assert found == wanted


@pytest.mark.parametrize("kernels", KERNELS)
def test_drafts_stand_behind_the_images(asked: Asked, kernels: str) -> None:
    """The answer is expected, but for a token in its middle."""
    engine = engine_of(asked, kernels, speculation="ngram")
    request = asked.request("told", None, [picture(3, (90, 30)), picture(4, (20, 60))], count=16)
    wanted = asked.wanted["told"]
    request.prediction = [*wanted[:8], (wanted[8] + 1) % 50, *wanted[9:]]
    engine.add_request(request)
    found = answers(engine)["told"]
    stats = engine.stats()
    engine.close()
    assert found == wanted and stats.num_accepted_tokens > 2


def older(path: Path, to: Path, pattern: str | None) -> None:
    """An adapter as an earlier transformers and peft saved it. pattern: its `target_modules` then."""
    shutil.copytree(path, to)
    names = {f"{PREFIX}model.visual.": f"{PREFIX}visual.", f"{PREFIX}model.projector.": f"{PREFIX}mlp_AR."}
    names |= {
        f"{PREFIX}model.vision_tower.": f"{PREFIX}vision_model.",
        f"{PREFIX}model.language_model.": f"{PREFIX}model.",
    }

    def of(name: str) -> str:
        for now, then in names.items():
            if name.startswith(now):
                return then + name.removeprefix(now)
        return name

    tensors = load_file(to / "adapter_model.safetensors")
    save_file({of(name): each for name, each in tensors.items()}, to / "adapter_model.safetensors")
    config = json.loads((to / "adapter_config.json").read_text())
    if pattern is not None:
        config["target_modules"] = pattern
    (to / "adapter_config.json").write_text(json.dumps(config))


def test_adapters_with_older_names(asked: Asked, tmp_path: Path) -> None:
    adapters = asked.reference.path / "adapters"
    tower = tiny_mrope.adapters(asked.reference.family)["tower"]["target_modules"]
    older_tower = tower.removeprefix(".*").replace("projector", "mlp_AR").replace("vision_tower", "vision_model")
    older_tower = older_tower.replace("resampler_model", "model.resampler_model")
    patterns = {"seven": None, "tower": older_tower, "copied": None}
    for name, pattern in patterns.items():
        older(adapters / name, tmp_path / name, pattern)
    engine = engine_of(asked, adapters=tmp_path)
    assert not engine.adapters.quarantine
    wanted = {}
    for name in patterns:
        engine.add_request(asked.request(name, name, [picture(1, (90, 30))]))
        wanted[name] = asked.wanted[name]
    found = answers(engine)
    engine.close()
    assert found == wanted
