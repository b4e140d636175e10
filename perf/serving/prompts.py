"""Prompts of given lengths in tokens, with the shared prefixes that a trace asks for."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

#: Words that most vocabularies spell, with the space before them, as one token.
WORDS = (
    "the of and to in is you that it he was for on are as with his they I at be this have from or one had by word but "
    "not what all were we when your can said there use an each which she do how their if will up other about out many "
    "then them these so some her would make like him into time has look two more write go see number no way could"
).split()


class Prompts(Protocol):
    """Makes a prompt of about `length` tokens; exactly so many if `exact`.

    blocks: one id per `block_tokens` tokens; prompts begin alike as far as their ids are the same.
    """

    exact: bool

    def make(self, length: int, seed: int, blocks: Sequence[int] = (), block_tokens: int = 0) -> str | list[int]: ...


class TokenPrompts:
    """Random tokens of a vocabulary, as ids; as text where the endpoint takes no ids, which may change their number."""

    def __init__(self, token_ids: Sequence[int], decode: object = None, *, seed: int = 0) -> None:
        self._ids = token_ids
        self._decode = decode
        self._seed = seed
        self.exact = decode is None

    @classmethod
    def read(cls, path: Path, *, as_text: bool, seed: int = 0) -> TokenPrompts:
        """From a directory with a tokenizer.json, or such a file. FileNotFoundError if there is none."""
        from tokenizers import Tokenizer

        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise FileNotFoundError(f"there is no {file}; give --tokenizer a directory that holds a tokenizer.json")
        backend = Tokenizer.from_file(str(file))
        special = {index for index, token in backend.get_added_tokens_decoder().items() if token.special}
        ids = sorted(set(backend.get_vocab().values()) - special)
        return cls(ids, backend.decode if as_text else None, seed=seed)

    def make(self, length: int, seed: int, blocks: Sequence[int] = (), block_tokens: int = 0) -> str | list[int]:
        ids = _pieces(self._ids, length, self._seed, seed, blocks, block_tokens)
        return ids if self._decode is None else self._decode(ids)


class WordPrompts:
    """Common words, for servers whose vocabulary is not at hand: about a token each."""

    exact = False

    def __init__(self, *, seed: int = 0) -> None:
        self._seed = seed

    def make(self, length: int, seed: int, blocks: Sequence[int] = (), block_tokens: int = 0) -> str:
        return " ".join(_pieces(WORDS, length, self._seed, seed, blocks, block_tokens))


def _pieces(choices: Sequence, length: int, run: int, seed: int, blocks: Sequence[int], block_tokens: int) -> list:
    """`length` of the choices: each block drawn by its id, the rest by the request's own seed."""
    pieces: list = []
    for block in blocks:
        pieces += random.Random(f"{run}:block:{block}").choices(choices, k=block_tokens)
    del pieces[length:]
    return pieces + random.Random(f"{run}:{seed}").choices(choices, k=length - len(pieces))


def find_prompts(card: dict, tokenizer: Path | None, *, as_text: bool, seed: int) -> Prompts:
    """By the tokenizer that is named, else by that of the served model where it lies on this machine, else words."""
    if tokenizer is not None:
        return TokenPrompts.read(tokenizer, as_text=as_text, seed=seed)
    root = Path(str(card.get("root") or card.get("id") or "."))
    if (root / "tokenizer.json").is_file() and _is_that_model(root):
        return TokenPrompts.read(root, as_text=as_text, seed=seed)
    return WordPrompts(seed=seed)


def _is_that_model(root: Path) -> bool:
    """Whether a directory is a model's, so that a relative name can't pick any folder that has a tokenizer."""
    try:
        return "model_type" in json.loads((root / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False
