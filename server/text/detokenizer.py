"""Converts tokens to text as they arrive: never half a character, and never a part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
UTF8 = codecs.getincrementaldecoder("utf-8")

MAX_EXACT_RUN = 32
"""Bytes of a run from which on only its new text is decoded, rather than all of it again."""

MAX_OPEN = 32
"""Most tokens in the window while their text is incomplete; beyond it, the earliest are dropped."""

CONTEXT = 8
"""Tokens that are kept then: more than a character has bytes."""


class Decoder(Protocol):
    """Turns tokens into text one by one."""

    tail: str
    """Text of the tokens held back, as if none followed."""

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that is now certain."""
        ...

    def finish(self) -> str:
        """The text held back, when no token follows."""
        ...


class ByteDetokenizer:
    """Incremental UTF-8 decoding of tokens that are byte strings; holds back at most three bytes."""

    __slots__ = ("_bytes_of", "_utf8", "tail")

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        """bytes_of: the bytes that a token adds to any text; empty if none."""
        self._bytes_of = bytes_of
        self._utf8 = UTF8("replace")
        self.tail = ""

    def push(self, token_id: int) -> str:
        spelt = self._bytes_of(token_id)
        if not self.tail and spelt.isascii():  # most tokens; this takes a fifth of the time
            return spelt.decode()
        text = self._utf8.decode(spelt)
        self.tail = REPLACEMENT if self._utf8.getstate()[0] else ""
        return text

    def finish(self) -> str:
        self.tail = ""
        return self._utf8.decode(b"", True)


class Detokenizer:
    """Incremental decoding: the pieces, joined, equal the decoding of all tokens at once.

    Text is returned once no later token can change it. A token's text is found by decoding it after a few earlier
    tokens, because decoders treat the first token of a text specially. A trailing replacement character is held back:
    it may be a part of a character.

    decode: text of a list of tokens. is_silent: whether a token adds nothing to any text (special tokens that are
    skipped, unknown ids). byte_of: the byte of a token that is one raw byte of a byte-fallback vocabulary, else None.
    The text of a run of such tokens is uncertain until the run ends, since one invalid byte turns every byte of the run
    into a replacement character; after an invalid byte it is certain.
    """

    __slots__ = (
        "_before",
        "_byte_of",
        "_decode",
        "_is_silent",
        "_read",
        "_run",
        "_run_text",
        "_shown",
        "_spoiled",
        "_utf8",
        "_window",
        "tail",
    )

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        is_silent: Callable[[int], bool],
        byte_of: Callable[[int], int | None],
    ) -> None:
        self._decode = decode
        self._is_silent = is_silent
        self._byte_of = byte_of
        self._window: list[int] = []
        self._read = 0  # tokens of the window that were only context when the others came
        self._shown = ""  # text at the beginning of the window that has been returned already
        self._run = 0  # bytes of the run of byte tokens at the end of the window
        self._spoiled = False  # one of them is invalid
        self._before = ""  # the tail when the run began
        self._run_text = ""  # the tail up to the run's last whole character
        self._utf8 = UTF8()
        self.tail = ""

    def push(self, token_id: int) -> str:
        if self._is_silent(token_id):
            return ""
        byte = self._byte_of(token_id)
        if byte is not None:
            return self._push_byte(token_id, byte)
        self._run, self._spoiled = 0, False
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.startswith(self._shown) and len(self._window) - self._read < MAX_OPEN:
            self.tail = text[len(self._shown) :]
            return ""
        certain = len(text) - text.endswith(REPLACEMENT)
        piece, self.tail = text[len(self._shown) : certain], text[certain:]
        self._shown = text[:certain]
        if not self.tail:
            self._let_go(self._read)
            self._read = len(self._window)
        elif len(self._window) > MAX_OPEN:
            self._let_go(len(self._window) - CONTEXT)
            self._read = 0
        return piece

    def finish(self) -> str:
        tail = self.tail
        if self._run > MAX_EXACT_RUN and not self._spoiled:
            tail = self._decode(self._window)[len(self._shown) :]
        self.tail = ""
        return tail

    def _let_go(self, count: int) -> None:
        """Drop the window's first tokens if the others have some text of their own, which is context enough."""
        recent = self._decode(self._window[count:])
        if recent:
            del self._window[:count]
            self._shown = recent[: len(recent) - len(self.tail)]

    def _push_byte(self, token_id: int, byte: int) -> str:
        if self._spoiled:
            self._window[-1] = token_id
            self._shown = self._decode(self._window)
            return REPLACEMENT
        if self._run == 0:
            self._before = self._run_text = self.tail
            self._utf8.reset()
        self._run += 1
        try:
            character = self._utf8.decode(bytes([byte]))
        except UnicodeDecodeError:
            piece = self._before + REPLACEMENT * self._run
            del self._window[len(self._window) - self._run + 1 :]
            self._window.append(token_id)
            self._shown = self._decode(self._window)
            self._spoiled = True
            self._read = 0
            self.tail = ""
            return piece
        self._window.append(token_id)
        if self._run > MAX_EXACT_RUN:
            if character:
                self._run_text += character
            self.tail = self._run_text
            return ""
        self.tail = self._decode(self._window)[len(self._shown) :]
        if character:
            self._run_text = self.tail
        return ""


class TextStream:
    """The text of a stream of tokens for a client, cut before, or after, the first stop string.

    Text is held back only while it could be the beginning of a stop string. The text after every token counts: the
    stream ends with the first token that completes a stop string, at the position where that string begins.
    """

    __slots__ = ("_begun", "_detokenizer", "_exempt", "_held", "_min_tokens", "_stops", "shows_stop", "stopped_by")

    def __init__(
        self,
        detokenizer: Decoder,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """include_stop: show the stop string, too. min_tokens: stop strings completed by these first tokens don't
        count.
        """
        self._detokenizer = detokenizer
        self._stops = tuple(stops)
        self.shows_stop = include_stop
        self._min_tokens = min_tokens
        self._begun = 0  # characters before the held ones
        self._held = ""
        self._exempt = 0  # number of held characters within `min_tokens`
        self.stopped_by: str | None = None

    @property
    def position(self) -> int:
        """Number of characters of the tokens taken, shown or not; incomplete characters don't count."""
        begun, tail = self._begun + len(self._held), self._detokenizer.tail
        return begun + len(tail.rstrip(REPLACEMENT)) if tail else begun

    def push(self, token_id: int) -> str:
        """Take the next token, unless a stop string has ended the text; return the new text."""
        if self.stopped_by is not None:
            return ""
        certain = self._detokenizer.push(token_id)
        if not self._stops:  # nothing is ever held
            self._begun += len(certain)
            return certain
        uncertain = self._detokenizer.tail.rstrip(REPLACEMENT)
        if self._min_tokens > 0:
            self._min_tokens -= 1
            self._exempt = len(self._held) + len(certain) + len(uncertain)
        return self._advance(certain, uncertain)

    def finish(self) -> str:
        """The rest of the text, when no token follows."""
        if self.stopped_by is not None:
            return ""
        rest = self._detokenizer.finish()
        if not self._stops:
            self._begun += len(rest)
            return rest
        shown = self._advance(rest, "")
        if self.stopped_by is None:
            shown += self._show(len(self._held))
        return shown

    def _advance(self, certain: str, uncertain: str) -> str:
        """New text that may be shown; sets `stopped_by`. Uncertain text can stop the stream but isn't shown yet."""
        self._held += certain
        text = self._held + uncertain
        hits = [(at, stop) for stop in self._stops if (at := self._find(text, stop)) >= 0]
        if hits:
            end, self.stopped_by = min(hits)
            return text[: end + len(self.stopped_by) if self.shows_stop else end]
        return self._show(len(self._held) - max(overlap(self._held, stop) for stop in self._stops))

    def _find(self, text: str, stop: str) -> int:
        return text.find(stop, max(0, self._exempt - len(stop) + 1))

    def _show(self, count: int) -> str:
        """Remove so many characters from the held ones."""
        shown, self._held = self._held[:count], self._held[count:]
        self._begun += count
        self._exempt = max(0, self._exempt - count)
        return shown


def overlap(text: str, word: str) -> int:
    """Length of the longest end of `text` that is a beginning of `word`, but not all of it."""
    at = max(0, len(text) - len(word) + 1)
    while (at := text.find(word[0], at)) >= 0:
        if word.startswith(text[at:]):
            return len(text) - at
        at += 1
    return 0
