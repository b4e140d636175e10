"""Texts of images in a prompt. That they are transformers' is tested with each family that sees."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorus.core.media.places import ImagePlaces


def test_each_image_has_its_own_text() -> None:
    places = ImagePlaces("@")
    assert places.count("a@b@") == 2
    assert places.written("a@b@", ["1", "2"]) == "a1b2"
    assert places.written("text", []) == "text"


def test_images_are_numbered_within_a_prompt() -> None:
    places = ImagePlaces("@", number=("<n>", "</n>"))
    assert places.written("@ and @", ["x", "y"]) == "<n>0</n>x and <n>1</n>y"


@pytest.mark.parametrize(
    ("prompt", "written"),
    [
        ("@@", "<f><1><f><2><f>"),
        ("a@ b@c", "a<f><1><f> b<f><2><f> c"),
        ("@<s>@\n", "<f><1><f><s><f><2><f>\n"),
    ],
)
def test_images_next_to_each_other_share_a_mark(prompt: str, written: str) -> None:
    assert ImagePlaces("@", mark="<f>").written(prompt, ["<f><1><f>", "<f><2><f>"]) == written


@given(st.text("ab <\n@\x1c\u00a0f>", max_size=12))
def test_marks_are_parted_as_in_transformers(prompt: str) -> None:
    """Idefics 2's processor, by its own expressions."""
    mark = "<f>"
    texts = [f"{mark}1{mark}"] * prompt.count("@")
    wanted = prompt.replace("@", f"{mark}1{mark}").replace(mark * 2, mark)
    wanted = re.sub(rf"{re.escape(mark)}(?=[^\s<])", f"{mark} ", wanted)
    assert ImagePlaces("@", mark=mark).written(prompt, texts) == wanted
