"""Prompts for a server's models: random tokens of their vocabulary, or common words."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ..workload.request import TraceRequest
from ..workload.seeds import hashed_uniform

#: Tokens that a chat template or a re-encoded text may add to a prompt.
_SLACK = 24

#: Positions that each request uses alone.
_ROOM = 1 << 24

#: Words that common tokenizers make one token of, with the space before it.
_TEXT = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city community name president team minute idea body information
back parent face others level office door health person art war history party result change morning reason
research girl guy moment air teacher force education
"""
_WORDS = _TEXT.split()


class TokenPrompts:
    """Random tokens of a vocabulary, with a request's length, as ids; or as text if `decode` is given.

    exact: the server sees exactly that number of tokens; in text it may change.
    """

    def __init__(self, ids: Sequence[int], seed: int, decode: Callable[[list[int]], str] | None = None) -> None:
        self._ids = ids
        self._seed = seed
        self._decode = decode
        self.exact = decode is None

    def make(self, request: TraceRequest) -> str | list[int]:
        ids = [self._ids[index] for index in _indices(request, len(self._ids), self._seed)]
        return ids if self._decode is None else self._decode(ids)


def word_prompts(seed: int) -> TokenPrompts:
    """Common words, for servers whose vocabulary is not available: about a token each."""
    return TokenPrompts(range(len(_WORDS)), seed, lambda ids: " ".join(_WORDS[index] for index in ids))


def find_prompts(card: Mapping[str, Any], seed: int, *, as_text: bool) -> TokenPrompts:
    """Tokens of the served model if it is on this machine, else words."""
    root = Path(str(card.get("root") or card["id"]))
    if not _is_model(root):
        return word_prompts(seed)
    tokenizer = Tokenizer.from_file(str(root / "tokenizer.json"))
    special = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    ids = sorted(set(tokenizer.get_vocab().values()) - special)
    return TokenPrompts(ids, seed, tokenizer.decode if as_text else None)


def shorten(request: TraceRequest, limit: int | None, *, exact: bool) -> TraceRequest:
    """The request with as many tokens as a context of `limit` allows; the completion is shortened only if it is the
    longer part.
    """
    if limit is None:
        return request
    room = limit if exact else max(2, limit - _SLACK)
    if request.prompt_tokens + request.output_tokens <= room:
        return request
    output = min(request.output_tokens, max(room // 2, room - request.prompt_tokens))
    return request._replace(prompt_tokens=room - output, output_tokens=output)


def _indices(request: TraceRequest, count: int, seed: int) -> list[int]:
    """A number below `count` per prompt token, determined by the request's id."""
    positions = np.arange(request.prompt_tokens, dtype=np.int64)
    drawn = hashed_uniform(seed, "prompt", request.id * _ROOM + positions)
    return (drawn * count).astype(np.int64).tolist()


def _is_model(path: Path) -> bool:
    """True for a model's directory with a tokenizer, so no model name matches an arbitrary directory."""
    try:
        return (path / "tokenizer.json").is_file() and "model_type" in json.loads(
            (path / "config.json").read_text("utf-8")
        )
    except (OSError, ValueError):
        return False
