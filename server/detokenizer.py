"""From tokens to text while they come: never half a character, never any part of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

REPLACEMENT = "\ufffd"


class Detokenizer:
    """Incremental decoding whose pieces, joined, equal the decoding of all tokens at once.

    Text is given out when no later token can change it. What a token adds is read off by decoding it behind a few
    earlier ones, because decoders treat the first token of a text in a special way.

    decode: text of a list of tokens.
    is_silent: whether a token adds nothing to any text (special tokens that are skipped, unknown ids).
    is_byte: whether a token is one raw byte of a byte-fallback vocabulary; the meaning of a run of these is open
    until the run ends, since one invalid byte spoils the run as a whole.
    """

    __slots__ = ("_decode", "_is_byte", "_is_silent", "_read", "_shown", "_window", "tail")

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        is_silent: Callable[[int], bool],
        is_byte: Callable[[int], bool],
    ) -> None:
        self._decode = decode
        self._is_silent = is_silent
        self._is_byte = is_byte
        self._window: list[int] = []
        self._read = 0  # tokens of the window whose text was given out
        self._shown = ""  # that text
        self.tail = ""
        """What the tokens held back would be if none followed."""

    def push(self, token_id: int) -> str:
        """Takes the next token and returns the text that is now certain."""
        if self._is_silent(token_id):
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        piece = text[len(self._shown) :]
        if text.endswith(REPLACEMENT) or self._is_byte(token_id) or not text.startswith(self._shown):
            self.tail = piece
            return ""
        recent = self._decode(self._window[self._read :])
        if recent:  # a window with some text of its own is context enough
            del self._window[: self._read]
            text = recent
        self._shown = text
        self._read = len(self._window)
        self.tail = ""
        return piece

    def finish(self) -> str:
        """The text held back, once no token follows."""
        tail, self.tail = self.tail, ""
        return tail


class TextStream:
    """The text a client sees of a stream of tokens, cut before the first stop string.

    Text is held back only as long as it could be the beginning of a stop string. The text after every token counts:
    the stream ends with the first token that completes a stop string, at the place where that string begins.
    """

    __slots__ = ("_detokenizer", "_held", "_stops", "stopped_by")

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._stops = tuple(stops)
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, token_ids: Iterable[int]) -> tuple[str, int]:
        """Takes tokens up to a stop string; returns the new text and the number of tokens taken."""
        shown, taken = "", 0
        for token_id in token_ids:
            if self.stopped_by is not None:
                break
            taken += 1
            shown += self._advance(self._detokenizer.push(token_id), self._detokenizer.tail.rstrip(REPLACEMENT))
        return shown, taken

    def finish(self) -> str:
        """The rest of the text, once no token follows."""
        if self.stopped_by is not None:
            return ""
        shown = self._advance(self._detokenizer.finish(), "")
        if self.stopped_by is None:
            shown, self._held = shown + self._held, ""
        return shown

    def _advance(self, certain: str, uncertain: str) -> str:
        """New text that may be shown; sets `stopped_by`. Uncertain text can stop the stream but isn't shown yet."""
        if not self._stops:
            return certain
        self._held += certain
        text = self._held + uncertain
        hits = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            end, self.stopped_by = min(hits)
            return text[:end]
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        end = len(self._held) - keep
        shown, self._held = self._held[:end], self._held[end:]
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
