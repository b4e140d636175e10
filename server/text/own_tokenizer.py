"""The library's tokenizer of an adapter that adds tokens to its base model's.

Tests: tests/server/engine/test_own_tokens.py, tests/server/text/test_own_tokenizer.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...core.requests.request_params import InvalidRequest
from ...memory.files.tokens.base_tokens import made_parts

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from ...memory.files.tokens.added_tokens import OwnTokens

ENCODING = ("encode", "encode_batch_fast")
"""Methods that read a client's text."""

PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


class CalledTokenizer:
    """The library's tokenizer, whose panics become errors: they are no Exceptions, and would end the caller's thread.

    broken: makes the error for a panic that the tokens of an adapter cause; None: there are none. base: the base
    model's tokenizer, which is asked the same then. If it panics, too, the text is the cause.
    """

    def __init__(
        self, backend: Backend, base: CalledTokenizer | None = None, broken: Callable[[str], Exception] | None = None
    ) -> None:
        self.backend = backend
        self._base, self._broken = base, broken

    def with_backend(self, backend: Backend) -> CalledTokenizer:
        """Another tokenizer of the same tokens."""
        return CalledTokenizer(backend, self._base, self._broken)

    def __getattr__(self, name: str) -> Any:
        """An attribute of the library's; its methods are guarded."""
        value = getattr(self.backend, name)
        if not callable(value) or name in PARTS:
            return value

        def call(*arguments: Any, **options: Any) -> Any:
            try:
                return value(*arguments, **options)
            except BaseException as error:
                if not is_panic(error):
                    raise
                reason = str(error)
            if self._base is not None and self._broken is not None:
                if name in ENCODING:
                    getattr(self._base, name)(*arguments, **options)
                raise self._broken(reason)
            raise InvalidRequest("prompt", f"the model's tokenizer can't read this text: {reason}")

        self.__dict__[name] = call
        return call


def own_backend(base: CalledTokenizer, own: OwnTokens, broken: Callable[[str], Exception]) -> CalledTokenizer:
    """A tokenizer with the adapter's added tokens; the vocabulary and all parts are the base model's own objects, or
    such as transformers makes of its files: see `OwnTokens.parts`.

    broken: as in `CalledTokenizer`. Raises ValueError for a token that the library would give another id, and what
    `broken` makes.
    """
    from tokenizers import AddedToken

    tokens = base.get_added_tokens_decoder()
    for token in own.tokens:
        flags = {name: value for name, value in token._asdict().items() if name not in ("id", "text")}
        tokens[token.id] = AddedToken(token.text, **flags)
    made = CalledTokenizer(sharing(base.backend), base, broken)
    for name, part in made_parts({name: json.loads(text) for name, text in own.parts}).items():
        setattr(made.backend, name, part)
    made.add_tokens([tokens[id_] for id_ in sorted(tokens)])
    for id_, token in tokens.items():
        if (given := made.token_to_id(token.content)) != id_:
            raise ValueError(f"token {token.content!r} has id {id_}, the library makes it {given}")
    return made


def sharing(backend: Backend) -> Backend:
    """A tokenizer without added tokens that has another's vocabulary and parts, which are the same objects."""
    from tokenizers import Tokenizer

    made = Tokenizer(backend.model)
    for name in PARTS:
        if (part := getattr(backend, name)) is not None:
            setattr(made, name, part)
    return made


def is_panic(error: BaseException) -> bool:
    """True for a fault within the library, whose class can't be imported."""
    return type(error).__name__ == "PanicException"
