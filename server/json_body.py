"""Size of a JSON text's contents, before anything is made of it."""

from __future__ import annotations

from .errors import ApiError

MAX_DEPTH = 64
NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


def check_json(body: bytes, max_values: int) -> None:
    """Raises an ApiError for a text with more values, or deeper ones, than are taken. Takes a few passes over it."""
    at_most = body.count(b",") + body.count(b"[") + body.count(b"{") + 1
    if at_most <= MAX_DEPTH:
        return
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if body.count(b'"') > 4 * max_values:  # each string has two quotes and is a value or the name of one
        raise _too_many(max_values)
    outside = b"".join(body.split(b'"')[::2])
    if outside.count(b",") + outside.count(b"[") + outside.count(b"{") + 1 > max_values:
        raise _too_many(max_values)
    depth = 0
    for bracket in outside.translate(None, NOT_BRACKETS):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_DEPTH:
            raise ApiError(400, f"the body's JSON is nested more than {MAX_DEPTH} deep")


def _too_many(limit: int) -> ApiError:
    return ApiError(400, f"the body's JSON has more than the {limit} values this server takes", code="too_many_values")
