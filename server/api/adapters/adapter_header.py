"""The response header that names the adapter version used, and its content hash."""

from __future__ import annotations

from urllib.parse import quote

from ....memory.adapters.versions import full_name

ADAPTER = "x-chorus-adapter"
"""The header's name; its value is `name@version; sha256=…`."""


def adapter_header(name: str, label: str, content_hash: str | None) -> str:
    """The header's value, percent-encoded where needed. content_hash: left out while unknown."""
    shown = quote(full_name(name, label), safe="@/!#$&'()*+,:=[]~ ")
    return shown if content_hash is None else f"{shown}; sha256={content_hash}"
