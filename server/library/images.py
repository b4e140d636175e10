"""Images in the conversations that a program gives: PIL images, files and bytes, besides what the HTTP API takes.

Tests: tests/server/test_image_requests.py
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.media.images import BadImage, check_size, encoded
from ...core.media.lacking import why_lacking
from ...core.requests.request_params import InvalidRequest
from ..api.images.image_parts import ImageFile, ImageUrl, of_url

_URLS = ("http://", "https://", "data:")

_GIVEN = ("image", "image_pil", "path", "url")
"""Fields of a part that may have the image, as in Hugging Face's and vLLM's messages."""


def with_files(messages: Any) -> Any:
    """The messages with images as files that were read. Raises InvalidRequest, which names the part."""
    if not isinstance(messages, list):
        return messages
    return [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _message(message: Any, where: str) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return message
    parts = [_part(part, f"{where}.content[{index}]") for index, part in enumerate(content)]
    return {**message, "content": parts}


def _part(part: Any, where: str) -> Any:
    if not isinstance(part, Mapping) or part.get("type") not in ("image", "image_pil") or "source" in part:
        return part
    given = [(name, part[name]) for name in _GIVEN if part.get(name) is not None]
    if len(given) != 1 or part.keys() - {"type", *_GIVEN}:
        names = ", ".join(map(repr, sorted({*part} - {"type"}))) or "nothing"
        raise InvalidRequest(where, f"{where} has {names}; an image has one of {', '.join(_GIVEN)}, and nothing else")
    ((name, value),) = given
    try:
        return {"type": "image", "image": _file(name, value)}
    except BadImage as error:
        raise InvalidRequest(where, f"{where}: the image {error}") from None
    except OSError as error:
        raise InvalidRequest(where, f"{where}: the image can't be read: {error.strerror}") from None
    except TypeError as error:
        raise InvalidRequest(where, f"{where}: {error}") from None
    except ValueError as error:
        raise InvalidRequest(where, f"{where} {error}") from None


def _file(name: str, value: Any) -> ImageFile | ImageUrl:
    """Raises BadImage, OSError, TypeError for what is no image, or ValueError for a URL that is none of an image."""
    if isinstance(value, ImageFile | ImageUrl):
        return value
    if isinstance(value, bytes):
        return ImageFile(value)
    if isinstance(value, str) and (name == "url" or value.startswith(_URLS)):
        return of_url(value)
    if isinstance(value, str | os.PathLike):
        path = Path(value)
        check_size(path.stat().st_size)
        return ImageFile(path.read_bytes())
    if hasattr(value, "getbands") and hasattr(value, "convert"):
        if (lacking := why_lacking()) is not None:
            raise TypeError(lacking)
        return ImageFile(encoded(value))
    raise TypeError(f"a PIL image, a path or bytes are needed, not {type(value).__name__}")
