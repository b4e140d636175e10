"""The header that tells which version of an adapter answered, and what it computes."""

from __future__ import annotations

from urllib.parse import quote

from ...memory.adapters.versions import versioned

ADAPTER = "x-chorus-adapter"
"""Header of an answer: `name@version; sha256=…`."""


def adapter_header(name: str, label: str, content_hash: str | None) -> str:
    """The header's value. content_hash: left out while it is not known. What no header holds is percent-encoded."""
    shown = quote(versioned(name, label), safe="@/!#$&'()*+,:=[]~ ")
    return shown if content_hash is None else f"{shown}; sha256={content_hash}"
