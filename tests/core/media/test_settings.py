"""Settings that requests may give, and images that are made smaller to have fewer tokens: tokens of transformers."""

from __future__ import annotations

import random
from typing import Any

import pytest

from chorus.core.media.images import BadImage, encoded
from chorus.core.media.processor import ImageProcessor
from chorus.core.media.settings import BadSetting, ImageSettings, TokenLimit

from .seeing_families import SEEING
from .test_seeing_families import drain, wanted
from .test_served_images import Asked, picture
from .tiny_vision import needs_vision, tiny

NUMBERS = ImageSettings(
    {"min_patches": 4, "max_patches": 4, "max_pixels": 100, "min_pixels": 100}, ("crop_to_patches",)
)
EDGE = ImageSettings(edge=64)


@pytest.mark.parametrize(
    ("settings", "given", "why"),
    [
        (NUMBERS, {"max_pixels": 101}, "max_pixels must be a whole number from 1 to 100"),
        (NUMBERS, {"max_pixels": 0}, "from 1 to 100"),
        (NUMBERS, {"max_pixels": True}, "from 1 to 100"),
        (NUMBERS, {"max_pixels": 5.0}, "from 1 to 100"),
        (NUMBERS, {"max_pixels": None}, "from 1 to 100"),
        (NUMBERS, {"min_pixels": 9, "max_pixels": 8}, "min_pixels is 9, more than max_pixels"),
        (NUMBERS, {"min_patches": 5}, "from 1 to 4"),
        (NUMBERS, {"crop_to_patches": 1}, "must be true or false"),
        (NUMBERS, {"size": {"longest_edge": 9}}, "size is no setting of this model's images; it has crop_to_patches"),
        (NUMBERS, {"do_resize": False}, "do_resize is no setting"),
        (EDGE, {"size": {"longest_edge": 65}}, r"size\.longest_edge must be a whole number from 1 to 64"),
        (EDGE, {"size": {"longest_edge": 9, "height": 9}}, "an object with longest_edge alone"),
        (EDGE, {"size": 9}, "an object with longest_edge alone"),
        (ImageSettings(), {"max_pixels": 9}, "it has none"),
    ],
)
def test_what_is_unknown_or_unbounded_is_refused_by_name(settings: ImageSettings, given: Any, why: str) -> None:
    with pytest.raises(BadSetting, match=why):
        settings.checked(given)


def test_what_asks_for_less_is_taken() -> None:
    given = {"max_pixels": 50, "min_pixels": 10, "crop_to_patches": True}
    assert NUMBERS.checked(given) == given and EDGE.checked({"size": {"longest_edge": 9}})
    assert not NUMBERS.checked({})


@pytest.mark.parametrize("most", range(1, 120, 7))
def test_the_largest_setting_that_fits_is_found(most: int) -> None:
    def count(size: tuple[int, int], settings: Any) -> int:
        return min(size[0] * size[1], settings.get("max_pixels", 100))

    limit = TokenLimit(most, NUMBERS, count)
    for size in ((1, 1), (9, 9), (50, 50)):
        found = limit.fitted(size, {})
        assert count(size, found) == min(most, count(size, {}))
        assert found == ({} if count(size, {}) <= most else {"max_pixels": most})
    assert limit.fitted((50, 50), {"min_pixels": 90})["min_pixels"] <= max(90, most)
    with pytest.raises(
        BadImage, match=r"50 x 50 pixels makes up to 100 tokens, at most 1 are taken \(max_image_tokens"
    ):
        TokenLimit(1, ImageSettings(), count).fitted((50, 50), {})
    never = TokenLimit(most, NUMBERS, lambda *_: most + 1)
    with pytest.raises(BadImage, match="makes up to"):
        never.fitted((9, 9), {})


pytestmark = [pytest.mark.native(needed=False), pytest.mark.vision, needs_vision]

GIVEN: dict[str, list[dict[str, Any]]] = {
    "smolvlm": [{"size": {"longest_edge": 64}}, {"do_image_splitting": False}],
    "idefics3": [{"size": {"longest_edge": 64}}],
    "mistral3": [{"size": {"longest_edge": 32}}],
    "internvl": [{"max_patches": 2}, {"crop_to_patches": False}, {"min_patches": 3, "max_patches": 3}],
    "lfm2_vl": [{"max_tiles": 2}, {"do_image_splitting": False}, {"max_image_tokens": 3, "max_tiles": 3}],
    "aya": [{"max_patches": 1}],
    "cohere2_vision": [{"max_patches": 2}, {"crop_to_patches": False}],
    "lighton_ocr": [{"size": {"longest_edge": 48}}],
    "qianfan_ocr": [{"crop_to_patches": False}],
}


@pytest.mark.parametrize("family", list(GIVEN))
def test_settings_of_a_request_are_those_of_transformers(family: str) -> None:
    asked, image = Asked(family), picture(1, (90, 150))
    requests, rows = [asked.request("own", "linear", [image])], set[int]()
    for number, settings in enumerate(GIVEN[family]):
        checked = asked.processor.settings.checked(settings)
        requests.append(asked.request(f"{number}", "linear", [image], settings=checked))
    for request in requests:
        rows.add(request.media[0].num_rows)
    digests = {request.media[0].digest for request in requests}
    assert len(digests) == len(requests) and len(rows) > 1
    assert drain(asked, requests) == wanted(asked, requests)


@pytest.mark.parametrize("family", list(SEEING))
def test_the_count_by_size_is_enough(family: str) -> None:
    """And exact counts decide where it can't be had."""
    processor, rng = ImageProcessor(tiny(family)), random.Random(3)
    for number in range(12):
        size = rng.randint(1, 400), rng.choice([rng.randint(1, 400), rng.randint(1, 30)])
        try:
            rows = processor.of_image(picture(number, size)).num_rows
        except BadImage:
            continue
        count = processor.count(size, {})
        assert count is None or rows <= count <= rows + 25


OF_ONE_SIZE = {
    *("llava", "vipllava", "llava_next", "granite_vision", "deepseek_vl", "got_ocr2"),
    *("gemma3", "gemma4", "gemma4_inputs", "paligemma", "paligemma2"),
    *("granite4_vision", "llava_onevision", "janus", "idefics2", "minicpm_v"),
}
"""Families whose images no setting of the processor makes smaller; those with too many tokens are refused."""


@pytest.mark.parametrize("family", list(SEEING))
def test_an_image_has_at_most_the_tokens_that_are_taken(family: str) -> None:
    """It is made smaller, to what transformers makes of it with these settings, or refused."""
    asked, image, requests = Asked(family), picture(1, (160, 150)), []
    own = asked.processor.of_image(image).num_rows
    for most in {own * 2, own - 1, own // 2, 1}:
        asked.processor = ImageProcessor(asked.reference.path, most)
        try:
            found = asked.processor.of_file(encoded(image))
        except BadImage as error:
            assert "max_image_tokens" in str(error) or "larger" in str(error)
            assert most < own
            continue
        assert found.num_rows <= most and (not found.settings or most < own + 25)
        requests.append(asked.request(f"{most}", None, [image], settings=found.settings))
        assert requests[-1].media[0].settings == found.settings
    assert requests and drain(asked, requests) == wanted(asked, requests)
    assert any(request.media[0].settings for request in requests) == (family not in OF_ONE_SIZE)
