"""The static files of the operator's page."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

STATIC = Path(__file__).parent / "static"

FILES = {
    "/ui": ("ui.html", "text/html"),
    "/ui/ui.js": ("ui.js", "text/javascript"),
    "/ui/ui.css": ("ui.css", "text/css"),
}
"""Files by path, and their types."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Nothing from other hosts, no inline script or style, and no text that becomes HTML."""

HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


def static(path: str) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint of one of the files, which is read here."""
    name, kind = FILES[path]
    content = (STATIC / name).read_bytes()

    async def show(_: Request) -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    return show
