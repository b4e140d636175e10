"""Images in a conversation: content parts of OpenAI's, Anthropic's and Hugging Face's formats, read into files.

Nothing is fetched, opened or decoded here. A part's file is in a data URL or in base64, or at an http(s) URL; `LLM`
gives files and PIL images itself.

Tests: tests/server/api/images/test_image_parts.py
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ....core.media.images import BadImage, check_size
from ....core.media.settings import LOW
from ...errors import clipped

IMAGE_PARTS = ("image_url", "input_image", "image")
"""Values of `type` of parts that are images."""

DETAILS = ("auto", "high", "original", LOW)
"""Values of `detail`; all but the last ask for what the model's own processor does."""

_FIELDS = {
    "image_url": frozenset({"type", "image_url", "cache_control", "uuid"}),
    "input_image": frozenset({"type", "image_url", "detail", "file_id"}),
    "image": frozenset({"type", "source", "image", "cache_control"}),
}

_DATA_URL = re.compile(r"data:(?P<kind>[-\w.+]+/[-\w.+]+)?(?:;[-\w]+=[-\w.]+)*;base64,", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True, eq=False)
class ImageFile:
    """A file of an image that a client sent, or a program gave."""

    data: bytes = field(repr=False)
    low: bool = False
    """True if it shall be reduced: see `LOW_SIDE`."""


@dataclass(frozen=True, slots=True, eq=False)
class ImageUrl:
    """Where an image is that a client did not send."""

    url: str
    low: bool = False
    """As of the file."""


_LETTERS, _BREAKS = bytes.maketrans(b"-_", b"+/"), b" \t\r\n"

MAX_URL = 4096
"""Characters of an http(s) URL."""


def is_image(part: Any) -> bool:
    """True if a content part is an image."""
    return isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS


def image_of(part: Mapping[str, Any]) -> ImageFile | ImageUrl:
    """The file of an image's part, or where it is. Raises ValueError, whose text goes on after the part's name."""
    kind = part["type"]
    for name, value in part.items():
        if name not in _FIELDS[kind] and value is not None:
            raise ValueError(f"has a field {clipped(str(name))!r}, which an {kind} does not have; leave it out")
    if isinstance(given := part.get("image"), ImageFile | ImageUrl):
        return given
    if kind == "image":
        return _of_source(part.get("source"))
    if part.get("file_id") is not None:
        raise ValueError("names a file_id, and this server keeps no files; send the image itself as a data URL")
    url, detail = part.get("image_url"), part.get("detail")
    if isinstance(url, Mapping):
        if others := url.keys() - {"url", "detail"}:
            raise ValueError(f"has a field {clipped(min(others))!r} in image_url; it may have url and detail")
        url, detail = url.get("url"), url.get("detail")
    if detail is not None and detail not in DETAILS:
        shown = clipped(repr(detail))
        raise ValueError(f"has detail {shown}; it may be {', '.join(DETAILS)}")
    if not isinstance(url, str):
        raise ValueError("has no image_url; send a data URL")
    return replace(of_url(url), low=detail == LOW)


def _of_source(source: Any) -> ImageFile | ImageUrl:
    """The file of Anthropic's `source`."""
    if not isinstance(source, Mapping) or source.get("type") not in ("base64", "url"):
        raise ValueError("needs a source of type base64, with media_type and data, or of type url")
    if source["type"] == "url":
        return of_url(str(source.get("url")))
    if not isinstance(data := source.get("data"), str):
        raise ValueError("has no data in its source; send base64")
    return _of_base64(data)


def of_url(url: str) -> ImageFile | ImageUrl:
    """The file of a data URL, or where an image is. Raises ValueError, as `image_of` does."""
    if match := _DATA_URL.match(url):
        return _of_base64(url[match.end() :])
    scheme = url.partition(":")[0].lower()[:16] if ":" in url[:20] else ""
    if scheme in ("http", "https"):
        if len(url) > MAX_URL:
            raise ValueError(f"has a URL of {len(url)} characters, at most {MAX_URL} are taken; send a data URL")
        return ImageUrl(url)
    raise ValueError("is no data URL: it must begin with data:image/png;base64, or the like")


def _of_base64(text: str) -> ImageFile:
    """The file of base64 in either alphabet, with or without padding and breaks of lines."""
    try:
        letters = text.encode("ascii").translate(_LETTERS, _BREAKS).rstrip(b"=")
        check_size(len(letters) * 3 // 4)
        data = base64.b64decode(letters + b"=" * (-len(letters) % 4), validate=True)
        check_size(len(data))
    except BadImage as error:
        raise ValueError(str(error)) from None
    except (binascii.Error, ValueError):
        raise ValueError("is not base64; encode the file's bytes") from None
    if not data:
        raise ValueError("is empty; send the file's bytes")
    return ImageFile(data)


def images_in(messages: Iterable[Mapping[str, Any]]) -> list[tuple[str, ImageFile | ImageUrl]]:
    """The images of a conversation in order, each with the name of its part."""
    return [
        (f"messages[{number}].content[{index}]", part["image"])
        for number, message in enumerate(messages)
        if isinstance(content := message.get("content"), list)
        for index, part in enumerate(content)
        if part["type"] == "image"
    ]
