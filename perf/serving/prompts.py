"""Prompts for the models that a server has: tokens of their vocabulary, or common words."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..workload.prompts import filler, token_ids
from ..workload.request import TraceRequest

#: Tokens that a chat template or a re-encoded text may add to a prompt.
_SLACK = 24


class PromptError(ValueError):
    """Prompts that can't be made; the message says what to give instead."""


class Prompts(Protocol):
    """Makes prompts of a request's length. exact: whether they have exactly as many tokens as it says."""

    exact: bool

    def make(self, request: TraceRequest) -> str | list[int]: ...


class TokenPrompts:
    """Random tokens of a vocabulary, as ids; as text if `decode` is given, which may change their number."""

    def __init__(self, ids: Sequence[int], seed: int, decode: Callable[[list[int]], str] | None = None) -> None:
        self._ids = ids
        self._seed = seed
        self._decode = decode
        self.exact = decode is None

    @classmethod
    def read(cls, path: Path, seed: int, *, as_text: bool) -> TokenPrompts:
        """From a tokenizer.json or a directory that holds one. Raises PromptError."""
        from tokenizers import Tokenizer

        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            backend = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more special
            raise PromptError(
                f"--tokenizer {path} can't be read ({error}); give a directory with a tokenizer.json"
            ) from None
        special = {index for index, token in backend.get_added_tokens_decoder().items() if token.special}
        ids = sorted(set(backend.get_vocab().values()) - special)
        return cls(ids, seed, backend.decode if as_text else None)

    def make(self, request: TraceRequest) -> str | list[int]:
        ids = [self._ids[index] for index in token_ids(request, len(self._ids), seed=self._seed)]
        return ids if self._decode is None else self._decode(ids)


class WordPrompts:
    """Common words, for servers whose vocabulary is not at hand: about a token each."""

    exact = False

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def make(self, request: TraceRequest) -> str:
        return filler(request, self._seed).text


def find_prompts(card: Mapping[str, Any], tokenizer: Path | None, seed: int, *, as_text: bool) -> Prompts:
    """By the tokenizer that is named, else that of the served model where it lies on this machine, else words."""
    if tokenizer is not None:
        return TokenPrompts.read(tokenizer, seed, as_text=as_text)
    root = Path(str(card.get("root") or card["id"]))
    if _is_model(root):
        return TokenPrompts.read(root, seed, as_text=as_text)
    return WordPrompts(seed)


def shorten(request: TraceRequest, limit: int | None, *, exact: bool) -> TraceRequest:
    """The request with as many tokens as a context of `limit` takes; the answer gives way only if it is the larger."""
    if limit is None:
        return request
    room = limit if exact else max(2, limit - _SLACK)
    if request.prompt_tokens + request.output_tokens <= room:
        return request
    output = min(request.output_tokens, max(room // 2, room - request.prompt_tokens))
    return request._replace(prompt_tokens=room - output, output_tokens=output)


def _is_model(path: Path) -> bool:
    """True if it is a model's directory with a tokenizer, so that no name of a model picks just any folder."""
    try:
        return (path / "tokenizer.json").is_file() and "model_type" in json.loads(
            (path / "config.json").read_text("utf-8")
        )
    except (OSError, ValueError):
        return False
