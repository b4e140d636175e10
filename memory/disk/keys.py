"""Keys of cached blocks in files: they cover everything that a block's KV depends on.

Tests: tests/memory/disk/test_keys.py
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..pages.block import Key

LAYOUT_VERSION = 3
"""To be raised whenever the code computes other KV, or lays it out otherwise, for the same model and tokens."""

BASE = "base"
"""The owner of blocks that no adapter changed."""


_PART_DIGITS = 16


def owner_name(content_hash: str, parts: Sequence[str] = ()) -> str:
    """The name of an owner's folder. parts: content hashes of the adapters that it is composed of."""
    return ".".join([content_hash, *(part[:_PART_DIGITS] for part in parts)])


def is_of(owner: str, content_hash: str) -> bool:
    """True if an owner's name is that of an adapter, or of one that is composed of it."""
    whole, *parts = owner.split(".")
    return content_hash == whole or content_hash[:_PART_DIGITS] in parts


class BlockKeys:
    """Hashes over a chain: the server's identity, the owner and scope, then block after block."""

    def __init__(self, identity: Mapping[str, str]) -> None:
        """identity: of the model, its dtypes and its pages, by name."""
        digest = _hash(b"identity")
        for name, value in sorted({**identity, "layout version": str(LAYOUT_VERSION)}.items()):
            _add(digest, name.encode())
            _add(digest, value.encode())
        self.identity = digest.digest()
        self.mark = self.identity[:8].hex()
        """What the names of files of this identity begin with, before a hyphen."""

    def name_of(self, key: bytes) -> str:
        """The name of a block's file, which says whose identity it is of."""
        return f"{self.mark}-{key.hex()}"

    def key_of(self, name: str) -> bytes | None:
        """The key of the block that a file of this name has; None for a file of another identity."""
        mark, _, key = name.partition("-")
        if mark != self.mark:
            return None
        try:
            return bytes.fromhex(key)
        except ValueError:
            return None

    def root(self, owner: str, scope: tuple[str, str]) -> bytes:
        """Before a prompt's first block. owner: an adapter's content hash, or `BASE`. scope: tenant and salt."""
        digest = _hash(b"root")
        for part in (self.identity, owner.encode(), *(each.encode("utf-8", "surrogatepass") for each in scope)):
            _add(digest, part)
        return digest.digest()

    def after(self, parent: bytes, tokens: Sequence[Key], owner: str = "", changed_from: int = 0) -> bytes:
        """Of a block. owner: the adapter that begins to act in it, from its token `changed_from` on; empty: none."""
        images = [(at, *each) for at, each in enumerate(tokens) if not isinstance(each, int)]
        digest = _hash(b"images" if images else b"block")
        _add(digest, parent)
        _add(digest, array("q", [each if isinstance(each, int) else 0 for each in tokens]).tobytes())
        if images:
            _add(digest, repr(images).encode())
        if owner:
            _add(digest, owner.encode())
            _add(digest, struct.pack("<q", changed_from))
        return digest.digest()


def _hash(kind: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=32, person=kind)


def _add(digest: hashlib.blake2b, part: bytes) -> None:
    """Add a part with its length, so that no two lists of parts have the same bytes."""
    digest.update(struct.pack("<Q", len(part)))
    digest.update(part)
