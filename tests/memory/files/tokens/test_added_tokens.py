"""Tokens that adapters' tokenizer files add: which are used, which are refused, and what a file costs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tokenizers import AddedToken, Tokenizer

from chorus.memory.files.directory import AdapterDirectory
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.format import inspect_adapter
from chorus.memory.files.identity import with_content
from chorus.memory.files.json_stream import JsonStream
from chorus.memory.files.tokens.added_tokens import added_beyond
from chorus.memory.files.tokens.base_tokens import BaseTokens
from chorus.memory.files.tokens.tokenizer_json import read_model
from chorus.server.demo.builtin import BUILTIN_MODEL

from ....tables import TINY_PATHS

TOOL = {"id": 259, "content": "<tool>", "special": True}
FILE = "tokenizer.json"
BASE = json.loads((BUILTIN_MODEL / FILE).read_text())


@pytest.fixture
def modules():
    """A base model of 264 rows, whose tokenizer has 259 tokens."""
    return replace(TINY_PATHS, vocab_size=264, base_tokens=BaseTokens(BUILTIN_MODEL))


@pytest.fixture
def adapter(adapter_draft, tmp_path):
    return adapter_draft().write(tmp_path / "a")


def tokens_of(path, modules):
    found = inspect_adapter(path, modules).tokens
    assert found is not None
    return found


def backend(*texts, special=True):
    found = Tokenizer.from_file(str(BUILTIN_MODEL / FILE))
    found.add_tokens([AddedToken(text, special=special, normalized=False) for text in texts])
    return found


def changed(path, change):
    raw = json.loads((BUILTIN_MODEL / FILE).read_text())
    change(raw)
    (path / FILE).write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("added_tokens.json", {"<tool>": 259, "<|eos|>": 258}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"259": {"content": "<tool>"}}}),
        (FILE, None),
    ],
)
def test_tokens_of_padding_rows_are_found_in_each_file(adapter, modules, file, content):
    assert inspect_adapter(adapter, modules).tokens is None
    if content is None:
        backend("<tool>").save(str(adapter / file))
    else:
        (adapter / file).write_text(json.dumps(content))
    assert [token.id for token in tokens_of(adapter, modules).tokens if token.text == "<tool>"] == [259]


def test_flags_and_named_tokens_are_the_adapter_s(adapter, modules):
    (adapter / "added_tokens.json").write_text(json.dumps({"<tool>": 259, "<end>": 260, "<more>": 261}))
    (adapter / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<end>"}, "additional_special_tokens": ["<more>"], "unk_token": None})
    )
    tokens = tokens_of(adapter, modules)
    assert [(token.text, token.special) for token in tokens.tokens] == [
        ("<tool>", False),
        ("<end>", True),
        ("<more>", True),
    ]
    assert tokens.named == (("eos_token", "<end>"),)


def test_the_base_model_s_own_file_is_compared_by_its_bytes(adapter, modules):
    """Its vocabulary is parsed on neither side."""
    (adapter / FILE).write_bytes((BUILTIN_MODEL / FILE).read_bytes())
    (adapter / "tokenizer_config.json").write_bytes((BUILTIN_MODEL / "tokenizer_config.json").read_bytes())
    for _ in range(2):
        assert inspect_adapter(adapter, modules).tokens is None
    assert "model" not in vars(modules.base_tokens) and not modules.base_tokens.same


def test_a_difference_behind_a_known_beginning_is_found(adapter_draft, tmp_path, modules):
    """Where an earlier adapter's file begins with the same bytes."""
    text = (BUILTIN_MODEL / FILE).read_text()
    long = text.replace('"model"', " " * (300 << 10) + '"model"')
    paths = [adapter_draft().write(tmp_path / str(index)) for index in range(2)]
    (paths[0] / FILE).write_text(long)
    assert inspect_adapter(paths[0], modules).tokens is None
    (paths[1] / FILE).write_text(long.replace('"A": 65', '"another": 65'))
    with pytest.raises(AdapterFormatError, match="has token 'another' as 65, the base model's as None"):
        inspect_adapter(paths[1], modules)


def test_files_that_equal_another_adapters_are_not_parsed_again(adapter_draft, tmp_path, modules, monkeypatch):
    paths = [adapter_draft().write(tmp_path / str(index)) for index in range(3)]
    for path in paths:
        (path / FILE).write_bytes((BUILTIN_MODEL / FILE).read_bytes())
        (path / "tokenizer_config.json").write_bytes((BUILTIN_MODEL / "tokenizer_config.json").read_bytes())
    assert inspect_adapter(paths[0], modules).tokens is None
    with monkeypatch.context() as patch:
        patch.setattr("chorus.memory.files.tokens.added_tokens.read_members", None)
        assert inspect_adapter(paths[1], modules).tokens is None
    (paths[2] / "added_tokens.json").write_text(json.dumps({"<tool>": 259}))
    assert tokens_of(paths[2], modules).tokens[-1].text == "<tool>"


def test_equal_sets_are_one_object_and_the_content_tells_others_apart(adapter_draft, tmp_path, modules):
    manifests = []
    for index, texts in enumerate((("<tool>",), ("<tool>",), ("<end>",), ())):
        path = adapter_draft().write(tmp_path / str(index))
        if texts:
            (path / FILE).write_text(json.dumps(json.loads(backend(*texts).to_str()), indent=1))
        manifests.append(with_content(inspect_adapter(path, modules)))
    assert manifests[0].tokens is manifests[1].tokens and len(modules.base_tokens.same) == 1
    hashes = [one.content_hash for one in manifests]
    assert hashes[0] == hashes[1] and len(set(hashes)) == 3
    plain = with_content(inspect_adapter(tmp_path / "3", TINY_PATHS))
    assert plain.content_hash == hashes[3], "the base model's tokenizer changes no content"
    assert "tokenizer with tokens of its own" in manifests[0].why_alone


def test_a_reserved_token_may_get_another_text(adapter, modules):
    changed(adapter, lambda raw: raw["added_tokens"][0].update(content="<tool>"))
    tokens = tokens_of(adapter, modules)
    assert (tokens.tokens[0].id, tokens.tokens[0].text) == (256, "<tool>")


def test_tokens_without_a_row_are_no_tokens(adapter, modules):
    """As trainers add for padding, without resizing the model."""
    (adapter / "added_tokens.json").write_text(json.dumps({"[PAD]": 264}))
    assert inspect_adapter(adapter, modules).tokens is None


def test_members_in_another_order_are_read(adapter, modules):
    raw = json.loads(backend("<tool>").to_str())
    (adapter / FILE).write_text(json.dumps(raw, sort_keys=True, indent=1))
    assert tokens_of(adapter, modules).tokens[-1].text == "<tool>"


def test_merges_as_lists_of_large_vocabularies_are_read(adapter):
    """As newer versions of the library write them: more lists than other files may have."""
    text = json.dumps({"added_tokens": [TOOL], "model": {"type": "BPE", "merges": [["a", "b"]] * 100_000}})
    (adapter / FILE).write_text(text)
    with AdapterDirectory(adapter) as directory:
        assert added_beyond(directory, 250) == {259: "<tool>"}


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("added_tokens.json", "{", "added_tokens.json: not JSON"),
        ("added_tokens.json", [], r"added_tokens.json: holds \[\]; a JSON object is needed"),
        ("added_tokens.json", {"<tool>": "259"}, "the id of '<tool>' is '259'; a token's number is needed"),
        ("added_tokens.json", {"<tool>": 259, "<|eos|>": 260}, r"'<\|eos\|>' has id 260, in the base .* it has 258"),
        ("added_tokens.json", {"A": 259}, "'A' has id 259, in the base model's tokenizer it has 65"),
        ("added_tokens.json", {"<tool>": 261}, "'<tool>' has id 261, and the next free id is 259"),
        ("added_tokens.json", {"<tool>": 65}, "'<tool>' has id 65, and the base model's tokenizer has 'A' there"),
        ("tokenizer_config.json", {"eos_token": 3}, "tokenizer_config.json: eos_token is 3; a token's text is needed"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"x": {"content": "a"}}},
            "added_tokens_decoder.* is 'x'",
        ),
        ("tokenizer_config.json", {"added_tokens_decoder": {"259": "a"}}, "is 'a'; an object with content is needed"),
        ("tokenizer_config.json", {"added_tokens_decoder": 7}, "added_tokens_decoder is 7; an object"),
        (FILE, '{"added_tokens"', "tokenizer.json: not JSON: character 15 is not ':'"),
        (FILE, {"added_tokens": 5}, "added_tokens is 5; a list of tokens is needed"),
        (FILE, {"added_tokens": [5]}, r"added_tokens\[0\] is 5; an object with id and content is needed"),
        (FILE, {"added_tokens": [{"id": 259}]}, r"content of added_tokens\[0\] is None; the token's text is needed"),
        (FILE, {"added_tokens": [{**TOOL, "special": 1}]}, r"special of added_tokens\[0\] is 1; it is true or false"),
        (FILE, {"added_tokens": [TOOL]}, "tokenizer.json: its pre_tokenizer is not that of the base model's tokenizer"),
        (
            FILE,
            {**BASE, "added_tokens": [*BASE["added_tokens"], TOOL], "model": {}},
            "tokenizer.json: its model has no vocab",
        ),
    ],
)
def test_refusals(adapter, modules, file, content, words):
    (adapter / file).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(AdapterFormatError, match=words):
        inspect_adapter(adapter, modules)


SWAPPED = {"A": BASE["model"]["vocab"]["B"], "B": BASE["model"]["vocab"]["A"]}


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw["model"]["vocab"].update(new=256), "has token 'new' as 256, the base model's as None"),
        (lambda raw: raw["model"]["vocab"].pop("A"), "its vocabulary has 255 tokens, the base model's has 256"),
        (lambda raw: raw["model"]["vocab"].update(SWAPPED), "has token 'A' as 66, the base model's as 65"),
        (lambda raw: raw["model"]["merges"].append("a b"), "the merges, or scores, of its vocabulary are not"),
        (
            lambda raw: raw["model"].update(byte_fallback=True),
            "byte_fallback of its model is True, the base .* is None",
        ),
        (lambda raw: raw.update(normalizer={"type": "Lowercase"}), "its normalizer is not that of the base model's"),
        (lambda raw: raw["added_tokens"].pop(1), r"added_tokens lacks '<\|bos\|>', 257 in the base model's tokenizer"),
        (lambda raw: raw["added_tokens"].reverse(), r"has '<.*>' of id 25\d after '<.*>' of id 25\d; list them by id"),
    ],
)
def test_another_tokenizer_is_refused_with_what_differs(adapter, modules, adds, change, words):
    """Whether or not it has a token that the base model's lacks."""

    def change_both(raw):
        if adds:
            raw["added_tokens"].append(TOOL)
        change(raw)

    changed(adapter, change_both)
    with pytest.raises(AdapterFormatError, match=words):
        inspect_adapter(adapter, modules)


def test_a_token_twice_in_place_of_another_is_refused(adapter, modules):
    (adapter / FILE).write_text((BUILTIN_MODEL / FILE).read_text().replace('"B": 66', '"A": 65'))
    with pytest.raises(AdapterFormatError, match="its vocabulary has token 'A' twice"):
        inspect_adapter(adapter, modules)


@pytest.mark.parametrize("flag", ["special", "single_word", "lstrip", "rstrip", "normalized"])
def test_another_flag_of_the_base_model_s_token_is_the_adapter_s_own(adapter, modules, flag):
    changed(adapter, lambda raw: raw["added_tokens"][0].update({flag: not raw["added_tokens"][0][flag]}))
    tokens = tokens_of(adapter, modules)
    assert [token.flags[flag] for token in tokens.tokens] == [flag != "special", *2 * [flag == "special"]]


def test_of_two_files_the_configuration_has_the_flags(adapter, modules):
    """As transformers reads them."""
    changed(adapter, lambda raw: None)
    decoder = {"257": {**BASE["added_tokens"][1], "lstrip": True}}
    (adapter / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    assert [token.lstrip for token in tokens_of(adapter, modules).tokens] == [False, True, False]


@pytest.mark.parametrize(
    ("one", "other"), [(["a b", "c"], ["a", "b c"]), (["a", "b", "c", "d"], ["a", "b\nc d"]), ("a b c", ["a", "b c"])]
)
def test_merges_are_told_apart_whatever_their_tokens(one, other):
    def digest(merges):
        pairs = [merges[at : at + 2] for at in range(0, len(merges), 2)] if isinstance(merges, list) else [merges]
        text = json.dumps({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": pairs}})
        return read_model(JsonStream.of(text.encode())).merges

    assert digest(one) != digest(other)
    assert digest(["a", "b"]) == digest("a b"), "both forms of the library"


def test_files_that_contradict_each_other_are_refused(adapter, modules):
    backend("<tool>").save(str(adapter / FILE))
    (adapter / "added_tokens.json").write_text(json.dumps({"<other>": 259}))
    with pytest.raises(AdapterFormatError, match=r"token 259 is '<other>', in tokenizer.json it is '<tool>'"):
        inspect_adapter(adapter, modules)
    (adapter / "added_tokens.json").write_text(json.dumps({"<tool>": 260}))
    with pytest.raises(AdapterFormatError, match=r"'<tool>' has id 260, in tokenizer.json it has 259"):
        inspect_adapter(adapter, modules)
