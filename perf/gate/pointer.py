"""Finding values in a result by JSON pointer (RFC 6901)."""

from __future__ import annotations

from typing import Any

_NOTHING = object()


def find(document: Any, pointer: str, default: Any = None) -> Any:
    """Value that a pointer such as `/cases/mixed/0` points at; `default` if nothing is there."""
    found = document
    for token in pointer.split("/")[1:]:
        token = token.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(token, _NOTHING)
        elif isinstance(found, list) and token.isdigit() and int(token) < len(found):
            found = found[int(token)]
        else:
            found = _NOTHING
        if found is _NOTHING:
            return default
    return found


def is_pointer(text: str) -> bool:
    return text == "" or text.startswith("/")
