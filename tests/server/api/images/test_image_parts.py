"""Content parts that are images, in each API's format."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from chorus.server.api.images.image_parts import ImageFile, ImageUrl, image_of, images_in

DATA = b"\x89PNG some bytes"
TEXT = base64.b64encode(DATA).decode()
URL = f"data:image/png;base64,{TEXT}"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "image_url", "image_url": {"url": URL, "detail": "high"}, "cache_control": {"type": "ephemeral"}},
        {"type": "image_url", "image_url": URL},
        {"type": "image_url", "image_url": {"url": f"data:image/png;name=a.png;base64,{TEXT}"}},
        {"type": "image_url", "image_url": {"url": f"data:;base64,{TEXT}"}},
        {"type": "image_url", "image_url": {"url": f"Data:image/PNG;BASE64,{TEXT}"}},
        {"type": "input_image", "image_url": URL, "detail": "auto"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": TEXT}},
        {"type": "image", "source": {"type": "url", "url": URL}},
    ],
)
def test_each_form_has_the_file(part: dict) -> None:
    assert image_of(part).data == DATA


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "https://images.example/a.png"}},
        {"type": "input_image", "image_url": "https://images.example/a.png"},
        {"type": "image", "source": {"type": "url", "url": "https://images.example/a.png"}},
    ],
)
def test_a_url_stays_where_it_is(part: dict) -> None:
    found = image_of(part)
    assert isinstance(found, ImageUrl) and found.url == "https://images.example/a.png"
    assert image_of({"type": "image", "image": found}) is found, "one API's part as another's"


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"type": "image_url"}, "has no image_url"),
        ({"type": "image_url", "image_url": {"url": URL, "size": 3}}, "'size'"),
        ({"type": "image_url", "image_url": {"url": URL}, "image": "x"}, "'image'"),
        ({"type": "image_url", "image_url": f"https://images.example/{'a' * 5000}"}, "characters"),
        ({"type": "input_image", "file_id": "file-1"}, "keeps no files"),
        ({"type": "input_image", "image_url": URL, "detail": "tiny"}, "auto, high, original, low"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAAA"}}, "is not base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=A"}}, "is not base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,====\n"}}, "is empty"),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "base64"),
        ({"type": "image", "source": {"type": "base64"}}, "no data"),
        ({"type": "image", "image": "/etc/passwd"}, "source"),
        ({"type": "image", "path": "/etc/passwd"}, "'path'"),
    ],
)
def test_what_is_wrong_is_named(part: dict, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        image_of(part)


@pytest.mark.parametrize("length", [1, 2, 3, 57, 58, 200])
@pytest.mark.parametrize("encode", [base64.encodebytes, base64.urlsafe_b64encode, base64.b64encode])
@pytest.mark.parametrize("padded", [True, False])
def test_base64_as_libraries_write_it(length: int, encode: Any, padded: bool) -> None:
    """With MIME's breaks of lines, in the alphabet of URLs, and without padding."""
    data = bytes(250 + each % 6 for each in range(length))
    text = encode(data).decode().replace("\n", "\r\n")
    text = text if padded else text.replace("=", "")
    assert image_of({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}).data == data
    assert image_of({"type": "image", "source": {"type": "base64", "data": text}}).data == data


def test_low_detail_is_an_images_own() -> None:
    for part in (
        {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
        {"type": "input_image", "image_url": "https://images.example/a.png", "detail": "low"},
    ):
        assert image_of(part).low
    assert not image_of({"type": "image_url", "image_url": {"url": URL, "detail": "high"}}).low


def test_images_are_named_by_message_and_part() -> None:
    one, other = ImageFile(b"1"), ImageFile(b"2")
    messages = [
        {"content": "text"},
        {"content": [{"type": "text", "text": "a"}, {"type": "image", "image": one}]},
        {"content": [{"type": "image", "image": other}]},
    ]
    assert images_in(messages) == [("messages[1].content[1]", one), ("messages[2].content[0]", other)]
