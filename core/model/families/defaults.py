"""Values of fields that `config.json` leaves out: those of transformers' configuration classes, from `defaults.json`.

`docs/generate.py` writes the file, for the classes that families name: `config.json` is read without transformers.

Tests: tests/core/model/families/test_defaults.py
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

FILE = Path(__file__).with_name("defaults.json")

#: In place of a default that the class has: transformers' model does not read the field from it.
UNREAD = object()

#: The shape of a text part. A model of text alone has all of it in `config.json`; transformers saves a part beside
#: others without fields that equal its class's defaults.
SHAPE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
#: Ids of special tokens, which differ between checkpoints of a class.
TOKENS = ("bos_token_id", "eos_token_id")


@dataclass(frozen=True)
class Defaults(Mapping[str, Any]):
    """The defaults of one of transformers' configuration classes, with a family's own in place of some."""

    config_class: str
    """The class, one of those in `defaults.json`."""

    own: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Defaults that the class computes or does not have, and `UNREAD` in place of some that it has."""

    takes: tuple[str, ...] = ()
    """Fields of `SHAPE` that a model of text alone may leave out, too, and those of `TOKENS` that have defaults."""

    @cached_property
    def of_part(self) -> Mapping[str, Any]:
        """The defaults of a text part beside others."""
        return self._without(TOKENS)

    @cached_property
    def of_text_alone(self) -> Mapping[str, Any]:
        """The defaults of a model that is no part of another."""
        return self._without((*SHAPE, *TOKENS))

    def _without(self, names: Collection[str]) -> dict[str, Any]:
        if self.config_class not in (classes := class_defaults()):
            raise KeyError(f"{FILE.name} has no {self.config_class}: run `make docs`, which writes it")
        found = {**classes[self.config_class], **self.own}
        left_out = {*names} - {*self.takes, *self.own}
        return {name: value for name, value in found.items() if name not in left_out and value is not UNREAD}

    def __getitem__(self, name: str) -> Any:
        return self.of_part[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.of_part)

    def __len__(self) -> int:
        return len(self.of_part)


def of_text_alone(defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """The defaults of a family's model that is no part of another."""
    return defaults.of_text_alone if isinstance(defaults, Defaults) else defaults


@cache
def class_defaults() -> Mapping[str, Mapping[str, Any]]:
    """The defaults of each configuration class that families name."""
    return json.loads(FILE.read_text(encoding="utf-8"))["classes"]
