"""Draws and log-probabilities from rows of logits by the native library; the same tokens as `sampling` draws."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence

import numpy as np
import torch

from .sampling import Chances, Scores, inverse_temperature

#: Mirror the structures of ops/native/panels.h and sampling.h.
_DRAW = np.dtype(
    [("inverse_temperature", "f8"), ("u", "f8"), ("top_p", "f8"), ("min_p", "f8"), ("top_k", "i8"), ("logits", "i8"),
     ("token", "i8")]
)  # fmt: skip
_SCORE = np.dtype([("logits", "i8"), ("token", "i8"), ("count", "i8"), ("ids", "i8"), ("values", "i8"), ("own", "f8")])


class NativeSampling:
    """Uses a decoder's threads; between its steps only."""

    def __init__(self, library: ctypes.CDLL, decoder: int) -> None:
        self._run = library.chorus_decoder_sample
        self._decoder = decoder

    def sample(self, logits: torch.Tensor, rows: Sequence[int], chances: Sequence[Chances]) -> list[int]:
        """A token for each of `rows` of the logits; -1 where no logit is above -inf, or one is NaN or +inf."""
        first, stride = _rows_of(logits)
        draws = draws_of(chances)
        draws["logits"] = first + np.asarray(rows) * stride
        self._run(self._decoder, draws.ctypes.data, len(draws), None, 0)
        return draws["token"].tolist()

    def score(self, logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[int], counts: Sequence[int]) -> Scores:
        """Log-probabilities of a token of each of `rows`, and of as many of the row's most likely tokens."""
        most = min(max(counts), logits.shape[1])
        scores = np.empty(len(rows), _SCORE)
        ids, values = np.empty((len(rows), most), np.int64), np.empty((len(rows), most))
        first, stride = _rows_of(logits)
        scores["logits"] = first + np.asarray(rows) * stride
        scores["token"], scores["count"] = tokens, counts
        scores["ids"] = ids.ctypes.data + 8 * most * np.arange(len(rows))
        scores["values"] = values.ctypes.data + 8 * most * np.arange(len(rows))
        self._run(self._decoder, None, 0, scores.ctypes.data, len(scores))
        return Scores(scores["own"].tolist(), ids.tolist(), values.tolist())


def draws_of(chances: Collection[Chances]) -> np.ndarray:
    """Descriptors of draws, without logits."""
    draws = np.zeros(len(chances), _DRAW)
    temperature, draws["u"], draws["top_k"], draws["top_p"], draws["min_p"] = zip(*chances, strict=True)
    draws["inverse_temperature"] = [inverse_temperature(it) for it in temperature]
    return draws


def _rows_of(logits: torch.Tensor) -> tuple[int, int]:
    """Address of the first row, and bytes from row to row."""
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError("the native library takes rows of float32")
    return logits.data_ptr(), 4 * logits.stride(0)
