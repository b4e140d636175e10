"""Adapters whose tokenizer.json is the base model's with one thing altered: each is refused by name, or its texts and
tokens are those of the file as the `tokenizers` library reads it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from chorus.memory.files.directory import AdapterDirectory
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.tokens.added_tokens import OwnTokens, own_tokens
from chorus.memory.files.tokens.base_tokens import BaseTokens
from chorus.server.demo.builtin import BUILTIN_MODEL
from chorus.server.text.own_tokenizer import CalledTokenizer, own_backend

from ...tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.wide

TEXTS = [
    'a falsehood: {"true": [12, null], "ab": false}} \n\n tail',
    "no rest  for the tester ab<s>a <unk> b</s> </s>  ☃é x",
    "ROOM <s> room  <tool>tool <tool> ",
    " \tabba 12 <|eos|> <|bos|> x<|pad|>y",
]

#: What stands in place of a null, by the name of its field.
INSTEAD = {
    "normalizer": {"type": "Lowercase"},
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
    "decoder": {"type": "Fuse"},
    "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
    "padding": {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                "pad_type_id": 0, "pad_token": "<s>"},
    "unk_token": "a",
    "unk_id": 3,
    "continuing_subword_prefix": "a",
    "end_of_word_suffix": "a",
    "dropout": 1.0,
}  # fmt: skip

SPECIALS = ["<unk>", "<s>", "</s>"]


def builtin(path: Path) -> None:
    (path / "tokenizer.json").write_bytes((BUILTIN_MODEL / "tokenizer.json").read_bytes())


def byte_level(path: Path) -> None:
    save_tokenizer(path)


def like_llama(path: Path) -> None:
    """Merges of pieces, with bytes for what has none."""
    pieces = [
        *SPECIALS,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abelorstx",
        "es",
        "est",
        "▁t",
        "▁test",
        "ab",
    ]
    merges = [("e", "s"), ("es", "t"), ("▁", "t"), ("▁t", "est"), ("a", "b")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    found = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    found.decoder = decoders.Sequence(steps)
    found.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A </s> $B", [("<s>", 1), ("</s>", 2)])
    save(found, path)


def unigram(path: Path) -> None:
    letters = [(letter, -5.0 - index / 8) for index, letter in enumerate("▁abelorst")]
    words = [("▁test", -3.0), ("est", -4.0), ("ab", -4.5), ("ba", -4.6), ("▁to", -4.7), ("ro", -4.9)]
    bytes_ = [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    found = Tokenizer(models.Unigram([*((each, 0.0) for each in SPECIALS), *bytes_, *letters, *words], 0, True))
    found.pre_tokenizer = pre_tokenizers.Metaspace()
    found.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    save(found, path)


def word_piece(path: Path) -> None:
    pieces = [*SPECIALS, "ab", "##ba", "no", "rest", "test", "##er", "for", "the", "a", "x", "12", "room", "##s"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    found = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>", max_input_chars_per_word=20))
    found.normalizer = normalizers.BertNormalizer(lowercase=True)
    found.pre_tokenizer, found.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    save(found, path)


def save(tokenizer: Tokenizer, path: Path) -> None:
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in SPECIALS])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=True)])
    tokenizer.save(str(path / "tokenizer.json"))


def altered(value: Any, name: str) -> Any:
    """Another leaf."""
    match value:
        case None:
            return INSTEAD.get(name, "a")
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return value + 1.5
    return f"{value}e"


def alterations(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Each leaf altered, each entry left out, neighbours of lists and of tokens' ids swapped: a name, and the value."""
    if not isinstance(value, dict | list):
        yield f"alter {path}", altered(value, str(path[-1]))
        return
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    for before, key in zip([None, *keys], keys, strict=False):
        for name, changed in alterations(value[key], (*path, key)):
            yield name, with_value(value, key, changed)
        without = copy.copy(value)
        del without[key]
        yield f"drop {(*path, key)}", without
        if before is not None and (isinstance(value, list) or path[-1:] == ("vocab",)):
            yield f"swap {(*path, key)}", with_value(with_value(value, key, value[before]), before, value[key])
        if isinstance(value, dict) and path[-1:] == ("vocab",):
            yield f"rename {(*path, key)}", {f"{each}e" if each == key else each: id_ for each, id_ in value.items()}


def with_value(container: Any, key: Any, value: Any) -> Any:
    found = copy.copy(container)
    found[key] = value
    return found


def library_s(text: str) -> Tokenizer | None:
    """None for a file that the library can't read."""
    try:
        found = Tokenizer.from_str(text)
    except Exception:  # the library raises nothing narrower
        return None
    found.no_truncation()  # as servers call it, and transformers
    found.no_padding()
    return found


def behaviour(tokenizer: Tokenizer | CalledTokenizer) -> list[Any]:
    """What becomes of `TEXTS`, and of all tokens."""
    found: list[Any] = []
    for text in TEXTS:
        for adds in (True, False):
            try:
                ids = tokenizer.encode(text, add_special_tokens=adds).ids
            except Exception as error:
                found.append(str(error))
                continue
            found += [ids, *(tokenizer.decode(ids, skip_special_tokens=skips) for skips in (True, False))]
    ids = range(tokenizer.get_vocab_size())
    return found + [tokenizer.decode([id_], skip_special_tokens=skips) for id_ in ids for skips in (True, False)]


def accepted(path: Path, text: str, base: BaseTokens) -> OwnTokens | None:
    (path / "tokenizer.json").write_text(text)
    with AdapterDirectory(path) as directory:
        return own_tokens(directory, base, None)


@pytest.mark.parametrize("make", [builtin, byte_level, like_llama, unigram, word_piece])
def test_each_is_refused_or_served_as_the_library_reads_it(tmp_path, make):
    directory, adapter = tmp_path / "base", tmp_path / "adapter"
    directory.mkdir()
    adapter.mkdir()
    make(directory)
    text = (directory / "tokenizer.json").read_text()
    base, plain, raw = BaseTokens(directory), Tokenizer.from_str(text), json.loads(text)
    assert accepted(adapter, text, base) is None
    assert accepted(adapter, json.dumps(raw), base) is None
    want, counts = behaviour(plain), {"refused": 0, "own": 0, "same": 0}
    wrong = []
    for name, changed in alterations(raw):
        made = json.dumps(changed)
        try:
            own = accepted(adapter, made, base)
        except AdapterFormatError:
            counts["refused"] += 1
            continue
        if (reference := library_s(made)) is None:
            continue
        counts["same" if own is None else "own"] += 1
        try:
            found = want if own is None else behaviour(own_backend(CalledTokenizer(plain), own, ValueError))
        except ValueError:  # refused when it is first used
            continue
        if found != behaviour(reference):
            wrong.append(name)
    assert not wrong
    assert counts["refused"] > len(raw["model"]["vocab"])
    assert 0 < counts["same"] < 30, "members that change nothing, such as the version"
