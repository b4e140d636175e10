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
    """The text a client sees of a stream of tokens, cut before, or behind, the first stop string.

    Text is held back only as long as it could be the beginning of a stop string. The text after every token counts:
    the stream ends with the first token that completes a stop string, at the place where that string begins.
    """

    __slots__ = ("_begun", "_detokenizer", "_exempt", "_held", "_include_stop", "_min_tokens", "_stops", "stopped_by")

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """include_stop: show the stop string, too. min_tokens: what they complete is no stop string."""
        self._detokenizer = detokenizer
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._begun = 0  # characters before the held ones
        self._held = ""
        self._exempt = 0  # how many of the held characters are within `min_tokens`
        self.stopped_by: str | None = None

    @property
    def position(self) -> int:
        """How many characters the text of the tokens taken has, shown or not; half characters don't count."""
        return self._begun + len(self._held) + len(self._detokenizer.tail.rstrip(REPLACEMENT))

    def push(self, token_ids: Iterable[int]) -> tuple[str, int]:
        """Takes tokens up to a stop string; returns the new text and the number of tokens taken."""
        shown, taken = "", 0
        for token_id in token_ids:
            if self.stopped_by is not None:
                break
            taken += 1
            certain = self._detokenizer.push(token_id)
            uncertain = self._detokenizer.tail.rstrip(REPLACEMENT)
            if self._min_tokens > 0:
                self._min_tokens -= 1
                self._exempt = len(self._held) + len(certain) + len(uncertain)
            shown += self._advance(certain, uncertain)
        return shown, taken

    def finish(self) -> str:
        """The rest of the text, once no token follows."""
        if self.stopped_by is not None:
            return ""
        shown = self._advance(self._detokenizer.finish(), "")
        if self.stopped_by is None:
            shown += self._show(len(self._held))
        return shown

    def _advance(self, certain: str, uncertain: str) -> str:
        """New text that may be shown; sets `stopped_by`. Uncertain text can stop the stream but isn't shown yet."""
        self._held += certain
        if not self._stops:
            return self._show(len(self._held))
        text = self._held + uncertain
        hits = [(at, stop) for stop in self._stops if (at := self._find(text, stop)) >= 0]
        if hits:
            end, self.stopped_by = min(hits)
            return text[: end + len(self.stopped_by) if self._include_stop else end]
        return self._show(len(self._held) - max(_overlap(self._held, stop) for stop in self._stops))

    def _find(self, text: str, stop: str) -> int:
        return text.find(stop, max(0, self._exempt - len(stop) + 1))

    def _show(self, count: int) -> str:
        """Takes that many characters off the held ones."""
        shown, self._held = self._held[:count], self._held[count:]
        self._begun += count
        self._exempt = max(0, self._exempt - count)
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
