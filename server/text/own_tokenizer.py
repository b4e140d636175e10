"""The library's tokenizer of an adapter that adds tokens to its base model's.

Tests: tests/server/engine/test_adapter_tokenizers.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...memory.files.tokenizer_json import PARTS, with_parts

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from ...memory.files.added_tokens import OwnTokens


def own_backend(base: Backend, own: OwnTokens) -> Backend:
    """A tokenizer with the adapter's added tokens; the vocabulary is the base model's own object.

    Raises ValueError for parts that the library can't read, or a token that it would give another id.
    """
    from tokenizers import AddedToken, Tokenizer

    parts, made = base if not own.parts else with_parts(own.parts), Tokenizer(base.model)
    for name in PARTS:
        if (part := getattr(parts, name)) is not None:
            setattr(made, name, part)
    tokens = base.get_added_tokens_decoder()
    for token in own.tokens:
        flags = {name: value for name, value in token._asdict().items() if name not in ("id", "text")}
        tokens[token.id] = AddedToken(token.text, **flags)
    made.add_tokens([tokens[id_] for id_ in sorted(tokens)])
    for id_, token in tokens.items():
        if (given := made.token_to_id(token.content)) != id_:
            raise ValueError(f"token {token.content!r} has id {id_}, the library makes it {given}")
    return made
