"""Positions on axes of time, height and width: those of transformers, whole prompts and chunks of them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from chorus.core.requests.axis_positions import axis_positions
from chorus.core.requests.media import MediaItem, position_shift
from chorus.memory.files.tokens.torchvision import mend_torchvision

FAMILIES = {
    "qwen2_vl": "Qwen2VL",
    "qwen2_5_vl": "Qwen2_5_VL",
    "qwen3_vl": "Qwen3VL",
    "qwen3_vl_moe": "Qwen3VLMoe",
    "qwen3_5": "Qwen3_5",
    "qwen3_5_moe": "Qwen3_5Moe",
    "glm4v": "Glm4v",
    "glm46v": "Glm46V",
    "glm_ocr": "GlmOcr",
    "glm4v_moe": "Glm4vMoe",
    "paddleocr_vl": "PaddleOCRVL",
    "ernie4_5_vl_moe": "Ernie4_5_VLMoe",
}


def reference(name: str) -> Any:
    """A model without weights, of which `get_rope_index` is asked."""
    mend_torchvision()
    import transformers

    config = getattr(transformers, f"{name}Config")()
    config.text_config.num_hidden_layers = config.vision_config.depth = 0
    with torch.device("meta"):
        return getattr(transformers, f"{name}Model")(config)


def prompt(draw: random.Random) -> tuple[list[int], list[MediaItem]]:
    """For each token whether it stands for an image's row, and the images."""
    kinds, media = [0] * draw.randint(0, 5), list[MediaItem]()
    for _ in range(draw.randint(0, 4)):
        grid = 1, draw.randint(1, 9), draw.randint(1, 9)
        count = grid[1] * grid[2]
        media.append(MediaItem(b"", "", ((len(kinds), count),), grid))
        kinds += [1] * count + [0] * draw.randint(1, 6)
    return kinds or [0], media


@pytest.mark.parametrize("name", FAMILIES.values(), ids=list(FAMILIES))
def test_positions_are_those_of_transformers(name: str) -> None:
    model, draw = reference(name), random.Random(name)
    merge = model.config.vision_config.spatial_merge_size
    for _ in range(60):
        kinds, media = prompt(draw)
        grids = torch.tensor([[1, item.grid[1] * merge, item.grid[2] * merge] for item in media]).view(-1, 3)
        found, delta = model.get_rope_index(
            torch.tensor([kinds]), torch.tensor([kinds], dtype=torch.int32), image_grid_thw=grids
        )
        wanted = found[-3:, 0].numpy()
        end = len(kinds)
        assert np.array_equal(axis_positions(media, 0, end), wanted)
        assert position_shift(media, end) == delta.item() <= 0
        begin = draw.randrange(end)
        last = draw.randint(begin, end)
        assert np.array_equal(axis_positions(media, begin, last), wanted[:, begin:last])
        for place in (each for each in range(end) if not kinds[each]):
            assert position_shift(media, place) == wanted[0, place] - place


def test_answers_go_on_behind_the_images() -> None:
    media = [MediaItem(b"", "", ((2, 6),), (1, 2, 3)), MediaItem(b"", "", ((9, 4),), (1, 1, 4))]
    assert axis_positions(media, 13, 16).tolist() == [[10, 11, 12]] * 3
    assert position_shift(media, 13) == -3 and position_shift(media, 8) == -3 and position_shift(media, 7) == 0


def test_images_without_axes_are_ordinary_positions() -> None:
    media = [MediaItem(b"", "", ((2, 6),))]
    assert axis_positions(media, 0, 9).tolist() == [list(range(9))] * 3 and position_shift(media, 9) == 0
