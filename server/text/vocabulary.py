"""The bytes of single tokens, independent of the surrounding text."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .own_tokenizer import CalledTokenizer

BYTE_LEVEL_PROBE = ("aĊa", "a\na")


class Vocabulary:
    r"""The bytes and the name of every token of a tokenizer.

    A token's bytes are the bytes that it adds in the middle of a text, or a special token's spelling. Joined, they give
    the text, even if tokens divide a character. The token's name is its bytes as text, or `bytes:\xe2\x82` for a part
    of a character; two tokens may share a name, and an id without a token is `token_id:5`.
    """

    def __init__(self, backend: CalledTokenizer) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._added = {i: token.content for i, token in added.items()}
        self.specials = frozenset(i for i, token in added.items() if token.special)
        probe, meaning = BYTE_LEVEL_PROBE
        self._is_byte_level = backend.decoder is not None and backend.decoder.decode([probe]) == meaning
        self.is_bytes = type(backend.decoder).__name__ == "ByteLevel"
        """True if a text is its tokens' `spelt` bytes as UTF-8, with replacement characters for invalid bytes."""
        self._byte_of = {character: byte for byte, character in enumerate(byte_characters())}
        letter = backend.token_to_id("<0x41>")
        has_byte_fallback = letter is not None and backend.decode([letter]) == "A"
        self.byte_tokens: dict[int, int] = {
            token_id: byte
            for byte in range(256 if has_byte_fallback else 0)
            if (token_id := backend.token_to_id(f"<0x{byte:02X}>")) is not None
        }
        """The byte of each token that is one raw byte of a byte-fallback vocabulary."""
        self._anchor = None if self._is_byte_level else self._find_anchor()
        self.longest_token = max(map(len, backend.get_vocab()), default=1)
        """Characters of the longest token: a text has at most that many times its number of tokens."""
        self.bytes_of = lru_cache(1 << 16)(self._bytes)
        self.name_of = lru_cache(1 << 16)(self._name)
        self.spelt = lru_cache(1 << 16)(self._spelt)

    def _spelt(self, token_id: int) -> bytes | None:
        """The bytes that a byte-level decoder makes of a token, special or not; None for an id without a token."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return None
        if any(character not in self._byte_of for character in token):
            return token.encode()
        return bytes(self._byte_of[character] for character in token)

    def _name(self, token_id: int) -> str:
        if self._backend.id_to_token(token_id) is None:
            return f"token_id:{token_id}"
        spelt = self.bytes_of(token_id)
        try:
            return spelt.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelt)

    def _bytes(self, token_id: int) -> bytes:
        if (content := self._added.get(token_id)) is not None:
            return content.encode()
        if (byte := self.byte_tokens.get(token_id)) is not None:
            return bytes([byte])
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level and all(character in self._byte_of for character in token):
            return bytes(self._byte_of[character] for character in token)
        return self._decoded(token_id).encode()

    def _decoded(self, token_id: int) -> str:
        """Text of a token that follows another: many decoders treat the first of a text specially."""
        if self._anchor is None:
            return self._backend.decode([token_id], skip_special_tokens=False)
        anchor, shown = self._anchor
        return self._backend.decode([anchor, token_id], skip_special_tokens=False).removeprefix(shown)

    def _find_anchor(self) -> tuple[int, str] | None:
        """A token to put before others when decoding, and its text."""
        for token_id in range(min(self._backend.get_vocab_size(), 4096)):
            if token_id in self._added or token_id in self.byte_tokens:
                continue
            text = self._backend.decode([token_id], skip_special_tokens=False)
            if text.isascii() and text.isalnum():
                return token_id, text
        return None


def byte_characters() -> list[str]:
    """The character for each byte in byte-level vocabularies: the byte's own, or a substitute if that is blank."""
    plain = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]
