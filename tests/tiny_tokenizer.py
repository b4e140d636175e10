"""A byte-level tokenizer for tiny models: every byte is a token, and some pairs that JSON has."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from chorus.server.text.vocabulary import byte_characters

SPECIALS = ("<unk>", "<s>", "</s>")
_PAIRS = ('{"', '":', ',"', '"}', "}}", "[{", "}]", '"]', "fa", "ls", "tr", "ue", "nu", "ll", "12", "ab")


def save_tokenizer(path: Path) -> Tokenizer:
    """Write a tokenizer.json: `SPECIALS`, then 256 bytes, then pairs; 275 tokens."""
    bytes_ = byte_characters()
    tokens = [*SPECIALS, *bytes_, *_PAIRS]
    merges = [(pair[0], pair[1]) for pair in _PAIRS]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    tokenizer.save(str(path / "tokenizer.json"))
    return tokenizer
