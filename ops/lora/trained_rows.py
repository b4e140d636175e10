"""Rows of the token embeddings and of the output projection that adapters have in place of, or beyond, the model's.

Tests: tests/core/adapters/test_trained_rows.py, tests/core/adapters/test_added_tokens.py
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch

from .sgmv import AdapterRows, Segments, stacked


class TrainedRows:
    """Applies the rows of a step's adapters, which are in pages; each rank-row of A is the row of a token."""

    def __init__(self, embedding: int, head: int, hidden: int) -> None:
        """embedding, head: module ids. hidden: width of a row."""
        self._embedding, self._head, self._hidden = embedding, head, hidden
        self._tokens: WeakKeyDictionary[AdapterRows, torch.Tensor] = WeakKeyDictionary()

    def replace_embeddings(
        self, y: torch.Tensor, token_ids: torch.Tensor, arena: torch.Tensor, segments: Segments
    ) -> None:
        """Write the adapters' rows to embeddings y `[tokens, hidden]`, where a token has one. token_ids: `[tokens]`."""
        for begin, end, rows in segments:
            if (own := self._rows(arena, rows, self._embedding, layer=0)) is None:
                continue
            tokens, wanted = self._tokens_of(rows, y.device), token_ids[begin:end]
            at = torch.searchsorted(tokens, wanted).clamp_(max=len(tokens) - 1)
            found = (tokens[at] == wanted)[:, None]
            y[begin:end] = torch.where(found, own[at].to(y.dtype), y[begin:end])

    def replace_logits(
        self, logits: torch.Tensor, x: torch.Tensor, arena: torch.Tensor, segments: Segments, layer: int, first: int
    ) -> None:
        """Write the logits of the adapters' rows to `[rows, columns]`; column i is token `first + i`."""
        for begin, end, rows in segments:
            if (own := self._rows(arena, rows, self._head, layer=layer)) is None:
                continue
            tokens = self._tokens_of(rows, logits.device) - first
            here = (tokens >= 0) & (tokens < logits.shape[1])
            products = x[begin:end].float() @ own[here].float().T
            logits[begin:end].index_copy_(1, tokens[here], products.to(logits.dtype))

    def added_logits(
        self, x: torch.Tensor, arena: torch.Tensor, parts: Sequence[AdapterRows], layer: int, columns: range
    ) -> torch.Tensor:
        """Logits `[rows, columns]` float32 of an adapter's tokens beyond the model's, before they are scaled or capped;
        -inf for a token without a row. x: `[rows, hidden]` float32. A row's bits do not depend on the others.
        """
        logits = torch.full((len(x), len(columns)), -torch.inf)
        for part in parts:
            begin = bisect_left(part.token_ids, columns.start)
            if begin == len(part.token_ids) or (own := self._rows(arena, part, self._head, layer=layer)) is None:
                continue
            weights = own[begin:].float()
            at = self._tokens_of(part, x.device)[begin:] - columns.start
            for row, state in zip(logits, x, strict=True):
                row[at] = torch.mv(weights, state)
        return logits

    def _rows(self, arena: torch.Tensor, rows: AdapterRows, module: int, *, layer: int) -> torch.Tensor | None:
        """An adapter's rows `[rank, hidden]` of a module; None if it has none."""
        blocks, _ = rows.blocks(arena, layer, module, self._hidden, 0)
        return stacked(blocks) if blocks else None

    def _tokens_of(self, rows: AdapterRows, device: torch.device) -> torch.Tensor:
        """The tokens of an adapter's rows, in rising order."""
        if (found := self._tokens.get(rows)) is None:
            found = self._tokens[rows] = torch.tensor(rows.token_ids, dtype=torch.long, device=device)
        return found
