"""A JSON object of a checkpoint, read field by field with errors that name the file and the field.

Tests: tests/core/model/specs/test_model_config.py, tests/core/model/test_pooling_config.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any


class UnsupportedModel(ValueError):
    """A checkpoint that can't be served; the message names the file, the field and the accepted values."""


#: Fields of the whole model that are those of its text part, too.
_OF_ALL_PARTS = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id")

#: The largest whole number, but for numbers of layers, and the largest other number.
_MOST, _MOST_LAYERS, _MOST_FLOAT = 2**31 - 1, 10_000, 1e12

#: A rotary table has a row for each position; Llama 4 Scout has 10 million.
_POSITIONS, _MOST_POSITIONS = ("max_position_embeddings", "model_max_length"), 2**25


def is_number(value: Any) -> bool:
    """True for a number; JSON's true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_index(value: Any) -> bool:
    return is_number(value) and isinstance(value, int) and value >= 0


class ConfigJson:
    """The object in `path`. A field that is null counts as missing where it may be null; see `with_nulls`.

    Every getter raises UnsupportedModel when the field is missing without a default, or is of another type.
    """

    def __init__(
        self,
        path: Path,
        raw: dict[str, Any],
        prefix: str = "",
        defaults: Mapping[str, Any] = MappingProxyType({}),
        *,
        nulls: Collection[str] | None = None,
    ) -> None:
        """prefix: of the fields' names in messages. defaults: values of missing fields, where a getter names none.
        nulls: the fields that may be null; None: any.
        """
        self.path = path
        self.raw = raw
        self._prefix = prefix
        self._defaults = defaults
        self._nulls = nulls

    def with_defaults(self, defaults: Mapping[str, Any]) -> ConfigJson:
        """Return the same object with values for fields that it lacks; those that it has already come first."""
        return self._with(self.raw, {**defaults, **self._defaults})

    def with_nulls(self, names: Collection[str]) -> ConfigJson:
        """Return the same object, of whose fields only these may be null; so for objects in it."""
        return ConfigJson(self.path, self.raw, self._prefix, self._defaults, nulls=names)

    def without(self, name: str) -> ConfigJson:
        """Return the same object without a field."""
        raw = {field: value for field, value in self.raw.items() if field != name}
        return self._with(raw, self._defaults)

    def with_values(self, values: Mapping[str, Any]) -> ConfigJson:
        """Return the same object with these values of fields."""
        return self._with({**self.raw, **values}, self._defaults)

    def part(self, name: str, raw: dict[str, Any]) -> ConfigJson:
        """Return an object as if it were in field `name`."""
        return ConfigJson(self.path, raw, f"{self._prefix}{name}.", nulls=self._nulls)

    def _with(self, raw: dict[str, Any], defaults: Mapping[str, Any]) -> ConfigJson:
        return ConfigJson(self.path, raw, self._prefix, defaults, nulls=self._nulls)

    def text_part(self, name: str, *, has_head: bool = False) -> ConfigJson:
        """Return the object in field `name`; this one itself where there is none.

        A model of text and images describes its text part there. Only the dtype and special tokens may be the whole
        model's, and whether embeddings are tied is, unless the output projection is the part's (has_head). Its other
        fields have no effect on the text part.
        """
        inner = self.object(name)
        if inner is None:
            return self
        of_head = () if has_head else ("tie_word_embeddings",)
        raw = {**inner.raw, **{field: self.raw[field] for field in of_head if field in self.raw}}
        outer = {field: self.raw[field] for field in _OF_ALL_PARTS if field in self.raw}
        return ConfigJson(self.path, raw, f"{self._prefix}{name}.", outer)

    def states(self, name: str, neutral: float | str | None = None) -> bool:
        """True if the family's defaults name the field: transformers' class reads it. Where they don't, raises
        UnsupportedModel for a value other than `neutral` and null, as other servers may read it.
        """
        if name in self._defaults:
            return True
        if name in self.raw and self.raw[name] not in (None, neutral):
            only = json.dumps(neutral)
            raise self.refuse(name, f"transformers leaves it out for this family; only {only} is supported")
        return False

    def has(self, name: str) -> bool:
        """True if the field is there, or has a default, and is not null."""
        return self._get(name, None) is not None

    @classmethod
    def read(cls, path: Path) -> ConfigJson:
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UnsupportedModel(f"{path}: not found; a Hugging Face checkpoint directory is needed") from None
        except (OSError, ValueError) as error:
            raise UnsupportedModel(f"{path}: cannot be read: {error}") from error
        if not isinstance(value, dict):
            raise UnsupportedModel(f"{path}: a JSON object is needed, found {type(value).__name__}")
        return cls(path, value)

    def refuse(self, name: str, why: str) -> UnsupportedModel:
        """The error for a field; raise it."""
        if name not in self.raw:
            return UnsupportedModel(f"{self.path}: {self._prefix}{name} is missing: {why}")
        return UnsupportedModel(f"{self.path}: {self._prefix}{name} is {self.raw[name]!r}: {why}")

    def is_null(self, name: str) -> bool:
        return name in self.raw and self.raw[name] is None

    def is_missing(self, name: str) -> bool:
        """True if the field is null or is not there; a default doesn't matter."""
        return self.raw.get(name) is None

    def optional(self, name: str) -> int | None:
        """A whole number of at least 1; None where the field is null, or is missing without a default."""
        return self.integer(name) if self.has(name) and not self.is_null(name) else None

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        value = self._get(name, default)
        most = _MOST_LAYERS if name.endswith("_layers") else _MOST_POSITIONS if name in _POSITIONS else _MOST
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.refuse(name, f"a whole number of at least {least} is needed")
        if value > most:
            raise self.refuse(name, f"a whole number of at most {most} is needed")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._get(name, default)
        if not is_number(value) or not 0 < value < math.inf:
            raise self.refuse(name, "a finite number above 0 is needed")
        if value > _MOST_FLOAT:
            raise self.refuse(name, f"a number of at most {_MOST_FLOAT:g} is needed")
        return float(value)

    def boolean(self, name: str, default: bool | None = None) -> bool:
        """False where the field is null, or is missing without a default."""
        value = self._get(name, default)
        value = False if value is None or self.is_null(name) else value
        if not isinstance(value, bool):
            raise self.refuse(name, "true or false is needed")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.refuse(name, "a text is needed")
        return value

    def object(self, name: str) -> ConfigJson | None:
        """The object in field `name`; None when it is missing, null or empty."""
        value = self._get(name, None)
        if value is not None and not isinstance(value, dict):
            raise self.refuse(name, "an object is needed")
        return self.part(name, value) if value else None

    def texts(self, name: str) -> list[str]:
        """A list of texts; empty when the field is missing or null."""
        return self._list(name, lambda each: isinstance(each, str), "a list of texts is needed")

    def indices(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers of at least 0; empty when the field is missing or null."""
        return tuple(self._list(name, _is_index, "a list of whole numbers of at least 0 is needed"))

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of finite numbers; empty when the field is missing or null."""
        needed = f"a list of finite numbers is needed, each at most {_MOST_FLOAT:g}"
        return tuple(self._list(name, lambda each: is_number(each) and abs(each) <= _MOST_FLOAT, needed))

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them; empty when the field is missing or null."""
        value = self._get(name, None)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(map(_is_index, ids)):
            raise self.refuse(name, "a token id or a list of them is needed")
        return tuple(ids)

    def _list(self, name: str, is_right: Callable[[Any], bool], needed: str) -> list[Any]:
        """A list of right values; empty when the field is missing or null."""
        value = self._get(name, None)
        value = [] if value is None else value
        if not isinstance(value, list) or not all(map(is_right, value)):
            raise self.refuse(name, needed)
        return value

    def _get(self, name: str, default: Any) -> Any:
        value = self.raw.get(name)
        if self.is_null(name) and self._nulls is not None and name not in self._nulls:
            has_default = default is not None or self._defaults.get(name) is not None
            way = "leave the field out for its default" if has_default else "the model needs a value"
            raise self.refuse(name, f"transformers takes no null here; {way}")
        if value is None:
            value = self._defaults.get(name) if default is None else default
        return value
