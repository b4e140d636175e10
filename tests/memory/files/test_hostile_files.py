"""Files of strangers that are made to do harm. Each is refused or without effect, little of it is in memory at once,
and nothing of it but texts and flags of tokens reaches the tokenizers library.
"""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace

import pytest
import tokenizers

from chorus.memory.files import strict_json
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.format import inspect_adapter
from chorus.memory.files.json_stream import MAX_VALUE, PIECE_BYTES
from chorus.memory.files.tokens.added_tokens import MAX_TOKEN
from chorus.memory.files.tokens.base_tokens import MAX_TEXT_BYTES, BaseTokens
from chorus.memory.files.tokens.tokenizer_json import MAX_ADDED
from chorus.server.demo.builtin import BUILTIN_MODEL
from chorus.server.engine.adapter_tokenizers import own_template

from ...tables import TINY_PATHS

FILE, CONFIG, LISTED, NAMED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
)
BASE = json.loads((BUILTIN_MODEL / FILE).read_text())
TOOL = {"id": 259, "content": "<tool>", "special": True}
REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
SLOW = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
DEEP = "[" * 100_000 + "]" * 100_000


def tokenizer(**changed):
    return json.dumps({**BASE, "added_tokens": [*BASE["added_tokens"], TOOL], **changed})


def model(**changed):
    return tokenizer(model={**BASE["model"], **changed})


def listed(count, content="t{}"):
    return json.dumps({content.format(index): 259 + index for index in range(count)})


def of_bytes(begin, more, end, size):
    return begin + more * (size // len(more)) + end


#: Name, file, what it holds, and the reason of the refusal; None: it is served as if it were harmless.
HOSTILE = [
    (
        "a normaliser that doubles a text 34 times",
        FILE,
        lambda: tokenizer(normalizer={"type": "Sequence", "normalizers": [REPLACE] * 34}),
        "its normalizer is not that of the base",
    ),
    (
        "a pre-tokeniser with an endless regex",
        FILE,
        lambda: tokenizer(pre_tokenizer=SLOW),
        "its pre_tokenizer is not that",
    ),
    ("a decoder that doubles a text", FILE, lambda: tokenizer(decoder=REPLACE), "its decoder is not that of the base"),
    (
        "a post-processor with many tokens",
        FILE,
        lambda: tokenizer(post_processor={**BASE["post_processor"], "single": BASE["post_processor"]["single"] * 500}),
        "its post_processor is not that",
    ),
    (
        "a part that the library can't read",
        FILE,
        lambda: tokenizer(normalizer={"type": "none"}),
        "its normalizer is not that",
    ),
    (
        "padding and truncation",
        FILE,
        lambda: tokenizer(padding={"strategy": {"Fixed": 1 << 40}}, truncation={"max_length": 0}),
        None,
    ),
    ("unknown members", FILE, lambda: tokenizer(program={"run": ["rm", "-r", "/"]}), None),
    ("other merges", FILE, lambda: model(merges=["a b"]), "the merges, or scores, of its vocabulary are not"),
    (
        "another kind of model",
        FILE,
        lambda: model(type="WordPiece"),
        "type of its model is 'WordPiece', the base model's is 'BPE'",
    ),
    ("dropout", FILE, lambda: model(dropout=1.0), "dropout of its model is 1.0"),
    (
        "a vocabulary of millions of tokens",
        FILE,
        lambda: model(vocab={f"w{index}": index for index in range(300_000)}),
        "its vocabulary has token 'w0' as 0, the base model's as None",
    ),
    ("one token of megabytes", FILE, lambda: model(vocab={"x" * (3 << 20): 0}), "more than 65536 characters"),
    (
        "a vocabulary that names a token twice",
        FILE,
        lambda: tokenizer().replace('"vocab": {', '"vocab": {"A": 65, '),
        "has token 'A' twice",
    ),
    ("two models", FILE, lambda: tokenizer()[:-1] + ', "model": {"vocab": {}}}', "'model' occurs twice"),
    ("two lists of tokens", FILE, lambda: '{"added_tokens": [], ' + tokenizer()[1:], "'added_tokens' occurs twice"),
    (
        "more added tokens than are served",
        FILE,
        lambda: tokenizer(added_tokens=[{"id": 259 + i, "content": f"t{i}"} for i in range(MAX_ADDED + 1)]),
        f"more than {MAX_ADDED} added tokens",
    ),
    ("a member of megabytes", FILE, lambda: tokenizer(padding="x" * (3 << 20)), f"more than {MAX_VALUE} characters"),
    ("a member of a million lists", FILE, lambda: tokenizer(padding=[[]] * 1_000_000), "lists and objects, or"),
    ("nesting", FILE, lambda: '{"version": ' + "[" * 9000 + "]" * 9000 + "}", "nested too deeply"),
    ("endless nesting", FILE, lambda: '{"version": ' + DEEP + "}", "lists and objects, or"),
    (
        "nesting in the model",
        FILE,
        lambda: '{"model": ' + '{"a":' * 40 + "1" + "}" * 40 + "}",
        "added_tokens lacks",
    ),
    ("megabytes of spaces", FILE, lambda: tokenizer().replace('"model"', " " * (3 << 20) + '"model"'), None),
    (
        "a number of many digits",
        FILE,
        lambda: tokenizer(version=0).replace('"version": 0', '"version": ' + "9" * 5000),
        "has 5000 digits",
    ),
    ("not UTF-8", FILE, lambda: b'{"version": "\xff"}', "not UTF-8"),
    (
        "half a character",
        FILE,
        lambda: tokenizer(added_tokens=[{**TOOL, "content": "\ud800"}]),
        "characters of Unicode are served",
    ),
    (
        "a token of many characters",
        FILE,
        lambda: tokenizer(added_tokens=[{**TOOL, "content": "x" * (MAX_TOKEN + 1)}]),
        f"at most {MAX_TOKEN} characters",
    ),
    (
        "flags that are no flags",
        FILE,
        lambda: tokenizer(added_tokens=[{**TOOL, "lstrip": [1]}]),
        "lstrip of added_tokens",
    ),
    ("tokens of megabytes", LISTED, lambda: listed(400_000), f"is longer than {MAX_TEXT_BYTES} bytes"),
    ("more tokens than are served", LISTED, lambda: listed(MAX_ADDED + 1), f"more than {MAX_ADDED} added tokens"),
    (
        "more tokens by id than are served",
        CONFIG,
        lambda: json.dumps(
            {"added_tokens_decoder": {str(259 + i): {"content": f"t{i}"} for i in range(MAX_ADDED + 1)}}
        ),
        f"more than {MAX_ADDED} added tokens",
    ),
    ("tokens twice", LISTED, lambda: '{"<tool>": 259, "<tool>": 260}', "'<tool>' occurs twice"),
    (
        "a configuration of megabytes",
        CONFIG,
        lambda: json.dumps({"x": "y" * (3 << 20)}),
        f"is longer than {MAX_TEXT_BYTES} bytes",
    ),
    ("a configuration of many lists", CONFIG, lambda: json.dumps({"x": [[]] * 400_000}), "lists and objects, or"),
    (
        "a configuration of many small values",
        CONFIG,
        lambda: of_bytes('{"x": {"a":1', ',"ab":1', "}}", 3 << 19),
        "entries|characters",
    ),
    (
        "a configuration of numbers",
        CONFIG,
        lambda: of_bytes('{"x": [1.5', ",1.5", "]}", 1 << 20),
        "lists and objects, or",
    ),
    ("a configuration that is nested", CONFIG, lambda: '{"x": ' + DEEP + "}", "lists and objects, or"),
    ("a name of a token of many characters", NAMED, lambda: json.dumps({"eos_token": "x" * 5000}), "eos_token is"),
    ("a map that is nested", NAMED, lambda: DEEP, "lists and objects, or"),
    (
        "a configuration of the adapter of megabytes",
        "adapter_config.json",
        lambda: json.dumps({"x": "y" * (1 << 20)}),
        "is longer than",
    ),
    ("one that is nested", "adapter_config.json", lambda: DEEP, "nested too deeply|lists and objects"),
    ("a header of gigabytes", "adapter_model.safetensors", lambda: (1 << 31).to_bytes(8, "little") + b"{", "header"),
    (
        "a header of many lists",
        "adapter_model.safetensors",
        lambda: (1 << 20).to_bytes(8, "little") + b'{"a":[' + b"[]," * 349_523,
        "lists and objects|header",
    ),
]


@pytest.fixture
def modules():
    return replace(TINY_PATHS, vocab_size=264, base_tokens=BaseTokens(BUILTIN_MODEL))


@pytest.fixture
def texts(monkeypatch):
    """What the tokenizers library is given, and the longest text that is parsed at once."""
    given, longest, plain = [], [0], strict_json.decoder
    monkeypatch.setattr(tokenizers.Tokenizer, "from_str", lambda text: given.append(text) or pytest.fail("it is read"))

    def decoder(*arguments):
        found = plain(*arguments)
        decode = found.raw_decode

        def raw_decode(text, idx=0):
            longest[0] = max(longest[0], len(text) - idx)
            return decode(text, idx)

        monkeypatch.setattr(found, "raw_decode", raw_decode)
        return found

    monkeypatch.setattr(strict_json, "decoder", decoder)
    return longest


@pytest.mark.parametrize(("file", "content", "words"), [pytest.param(*each[1:], id=each[0]) for each in HOSTILE])
def test_it_is_refused_or_without_effect(adapter_draft, tmp_path, modules, texts, monkeypatch, file, content, words):
    base = modules.base_tokens
    monkeypatch.setitem(vars(base), "_rewritten", {})  # the base model's own file: no stranger's
    monkeypatch.setitem(vars(base), "_loaded", None)
    path = adapter_draft().write(tmp_path / "a")
    found = content()
    found = found.encode("utf-8", "surrogatepass") if isinstance(found, str) else found
    (path / file).write_bytes(found)
    _ = base.model, base.added
    tracemalloc.start()
    try:
        if words is None:
            tokens = inspect_adapter(path, modules).tokens
            assert tokens is None or [token.text for token in tokens.tokens if token.id >= 259] == ["<tool>"]
        else:
            with pytest.raises(AdapterFormatError, match=words):
                inspect_adapter(path, modules)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert texts[0] <= MAX_VALUE + PIECE_BYTES + 1
    if len(found) > 1 << 20:
        assert peak <= 8 * len(found), f"{peak / len(found):.1f} times its size"
    else:
        assert peak <= 24 << 20


@pytest.mark.parametrize(
    "content", ["[" * 100_000, '{"chat_template": "' + "x" * (3 << 20) + '"}', '{"a": 1', "{}", "5"]
)
def test_templates_of_such_files_are_none(tmp_path, content):
    (tmp_path / CONFIG).write_text(content)
    assert own_template(tmp_path) is None


def test_a_template_behind_many_tokens_is_found(tmp_path):
    """As in Gemma 3's configuration, of more than a megabyte."""
    decoder = {str(index): {"content": f"<unused{index}>", "special": True} for index in range(20_000)}
    (tmp_path / CONFIG).write_text(json.dumps({"added_tokens_decoder": decoder, "chat_template": "its own"}))
    assert (tmp_path / CONFIG).stat().st_size > 1 << 20
    assert own_template(tmp_path) == "its own"
