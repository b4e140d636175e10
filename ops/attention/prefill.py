"""A prompt's tokens in a step, and the keys that each of them sees.

Tests: tests/ops/attention/test_attention.py, tests/ops/attention/test_blocks.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..upload import on_device
from .blocks import BlockMask, BlockSpans
from .scores import Scores

#: Of a mask that is a tensor, without a window.
_ALL_SEEN = None, True


class Prefill:
    """A row with more than one token. tokens: its last tokens of `kv_len`, among the step's; pages: that hold them.
    blocks: of the step's tokens.
    """

    __slots__ = ("_blocks", "_device", "_masks", "kv_len", "pages", "tokens")

    def __init__(
        self,
        tokens: slice,
        pages: torch.Tensor,
        kv_len: int,
        device: torch.device,
        blocks: BlockSpans | None = None,
    ) -> None:
        self.tokens, self.pages, self.kv_len, self._device = tokens, pages, kv_len, device
        own = None if blocks is None else BlockSpans(*(each[tokens] for each in blocks))
        self._blocks = own if own is not None and (own.before.any() or own.behind.any()) else None
        self._masks: dict[tuple[int | None, bool] | Scores, torch.Tensor | None] = {}

    def mask(self, scores: Scores) -> torch.Tensor | None:
        """What its tokens see of their keys, made once a plan for each window; None: plain causal attention of a whole
        sequence.
        """
        if self.has_blocks(scores):
            return self.seen_with_blocks(scores)
        window = scores.window
        explicit = scores.softcap is not None or scores.has_sinks or scores.has_slopes
        if window is not None and window >= self.kv_len:
            window = None
        if (key := (window, explicit)) not in self._masks:
            self._masks[key] = self._make(window, explicit)
        return self._masks[key]

    @property
    def own(self) -> torch.Tensor:
        """The index of each of its tokens among the row's, `[1, length]`."""
        length = self.tokens.stop - self.tokens.start
        return torch.arange(self.kv_len - length, self.kv_len, device=self._device)[None]

    def has_blocks(self, scores: Scores) -> bool:
        """True if some of its tokens see others behind them, in layers with these scores."""
        return self._blocks is not None and scores.blocks is not BlockMask.NONE

    def seen_with_blocks(self, scores: Scores) -> torch.Tensor:
        """True where one of its tokens `[length, kv_len]` sees a token, with blocks; made once a plan for each kind of
        scores.
        """
        if (found := self._masks.get(scores)) is not None:
            return found
        assert self._blocks is not None
        before, behind = (torch.from_numpy(each).long()[:, None] for each in self._blocks)
        own = torch.arange(self.kv_len - len(before), self.kv_len)[:, None]
        first = torch.zeros_like(own) if scores.window is None else own - scores.window + 1
        if scores.blocks is BlockMask.WHOLE:
            first = torch.minimum(first, own - before)
        every = torch.arange(self.kv_len)
        found = on_device((every >= first) & (every <= own + behind), self._device)
        self._masks[scores] = found
        return found

    @property
    def visible(self) -> torch.Tensor:
        """True where one of its tokens `[length, kv_len]` sees a token."""
        if (found := self._masks.get(_ALL_SEEN)) is None:
            length = self.tokens.stop - self.tokens.start
            found = self._masks[_ALL_SEEN] = _visible(length, self.kv_len, None, self._device)
        return found

    def _make(self, window: int | None, explicit: bool) -> torch.Tensor | None:
        length = self.tokens.stop - self.tokens.start
        if window is None and not explicit:
            if length == self.kv_len:
                return None
            if self._device.type != "cpu":
                return _bias()(length, self.kv_len)
        return _visible(length, self.kv_len, window, self._device)


def _visible(length: int, kv_len: int, window: int | None, device: torch.device) -> torch.Tensor:
    """True where one of a row's last tokens `[length, kv_len]` sees a token."""
    seen = torch.ones(length, kv_len, dtype=torch.bool, device=device).tril(kv_len - length)
    return seen if window is None else seen.triu(kv_len - length - window + 1)


def _bias() -> Callable[[int, int], torch.Tensor]:
    """Masks for a GPU, by which torch takes kernels that make no scores."""
    from torch.nn.attention.bias import causal_lower_right  # takes a second, which nothing else needs

    return causal_lower_right
