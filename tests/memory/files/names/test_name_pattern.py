"""Patterns of untrusted files match as `re` does, in a number of steps that is known beforehand."""

from __future__ import annotations

import gc
import json
import random
import re
import warnings
from types import SimpleNamespace

import pytest

from chorus.memory.files.config import CONFIG_FILE, MAX_PATTERNS, AdapterConfig, read_fields
from chorus.memory.files.directory import AdapterDirectory
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.names.module_names import ModuleNames
from chorus.memory.files.names.name_pattern import MAX_CHARACTERS, MAX_STEPS, NamePattern, Steps

KEYS = [
    f"model.layers.{layer}.{block}_proj" for layer in range(3) for block in ("self_attn.q", "self_attn.k", "mlp.up")
] + ["lm_head", "model", "model.layers.0", "a", "ab", "model.embed_tokens"]
NAMES = ModuleNames(KEYS)

#: As they are in files that PEFT, ms-swift and unsloth have written.
REAL = [
    r".*\.(q|v)_proj",
    r"^model\.layers\.[01]\.self_attn\.(q|k)_proj$",
    r"^(?!.*visual).*(?:q_proj|up_proj)$",
    r"^(model(?=\.layers).*\.(q_proj|up_proj))$",
    r"(?:.*?(?:layers|text).*?(?:self_attn|mlp).*?(?:q_proj|up_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|up_proj)))",
    "model.layers.1.self_attn.q_proj",
    "self_attn.q_proj|up_proj",
    r"layers\.\d+\.mlp\..*",
    "",
]

_NAMES = ["a", "b", "q", "_", "proj", "q_proj", "model", "layers", r"\.", "self_attn", "mlp", "0", "1", "é"]
_CHARACTERS = [".", ".*", ".*", r"\d", r"\w", r"\b", r"\B", r"\-", "[a-z]", "[^.]", "[qk]", r"[\d]", "[]a]", "^", "$"]
_GROUPS = ["(", "(?:", "(?=", "(?!", ")", ")", "|", "(?i)", "(?P<x>", "\\1", "\\Z", "(?<=a)"]
_REPEATS = ["*", "+", "?", "*?", "++", "{1,2}", "{2}", "{0,}", "{,3}"]
PIECES = [*_NAMES, *_CHARACTERS, *_GROUPS, *_REPEATS, "]", "}", "-", "[", "{", "\\"]


def pattern(text, steps=MAX_STEPS):
    return NamePattern(text, ValueError, Steps(steps))


def assert_as_re(text):
    it = pattern(text)
    by_re = re.compile(text)
    assert NAMES.at(it.whole(NAMES)) == [key for key in KEYS if by_re.fullmatch(key)], text
    assert NAMES.at(it.tail(NAMES, NAMES.ends)) == [key for key in KEYS if re.match(rf"(.*\.)?({text})$", key)], text
    numbered = re.compile(rf"(?:^|.*?\.)(?:{text})\.(?P<idx>\d+)\.")
    assert NAMES.at(it.before_number(NAMES, anywhere=True)) == [key for key in KEYS if numbered.match(key)], text


@pytest.mark.parametrize("text", REAL)
def test_patterns_of_real_files(text):
    assert_as_re(text)


@pytest.mark.wide
def test_any_pattern_that_is_taken_matches_what_re_matches():
    rng = random.Random(5)
    taken = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # `re` warns of syntax that may change its meaning
        for _ in range(8000):
            text = "".join(rng.choices(PIECES, k=rng.randrange(1, 9)))
            try:
                pattern(text).whole(NAMES)
            except ValueError:
                continue
            assert_as_re(text)
            taken += 1
    assert taken > 1500


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        ("(", "unterminated"),
        ("a)", "unbalanced"),
        ("a)|(b", "unbalanced"),
        ("[0-9", "unterminated"),
        ("a{2}{3}", "multiple repeat"),
        ("a*+", "possessive repeat is not served"),
        ("*a", "nothing to repeat"),
        ("^*", "nothing to repeat"),
        (r"\p{L}", "bad escape"),
        (r"\1", "invalid group reference"),
        (r"(a)\1", "not served"),
        ("(?>a)", "atomic group is not served"),
        ("(?i)a", "not served"),
        ("(?i:a)", "not served"),
        ("(?P<x>a)", "not served"),
        ("(?<=a)b", "not served"),
        ("(?<!a)b", "not served"),
        ("[z-a]", "bad character range"),
        ("a{4294967294}", "255"),
        ("a{4294967296}", "too large"),
        ("a{999}", "255"),
        ("a{256,}", "255"),
        ("a{3,2}", "min repeat greater than max repeat"),
        ("(" * 900, "20 deep"),
        (r"a[\\[]", "with a backslash"),
        ("[a--b]", "with a backslash"),
        ("[[a]", "with a backslash"),
        ("(" * 30 + ")" * 30, "20 deep"),
        ("a" * (MAX_CHARACTERS + 1), "2001 characters"),
    ],
)
def test_what_is_not_served_is_refused_by_name(bad, word):
    with pytest.raises(ValueError, match=re.escape(word)):
        pattern(bad).tail(NAMES, 0)


ENDLESS = ["(" * 15 + "a" + ")*" * 15, r"(a|a)*(a|a)*(a|a)*\d" * 50, "(.*){200}" * 90, "((.{200}){200}){200}"]


@pytest.mark.parametrize("text", ENDLESS)
def test_the_steps_of_a_match_are_bounded(text):
    """By the number of steps, not by a clock: the same pattern is always taken or always refused."""
    steps = Steps()
    try:
        NamePattern(text, ValueError, steps).tail(NAMES, NAMES.ends)
    except ValueError as error:
        assert "too many steps" in str(error)
    assert -1 <= steps.left < MAX_STEPS


def test_classes_of_many_kinds_take_too_many_steps():
    steps = Steps()
    with pytest.raises(ValueError, match="too many steps"):
        for first in range(0x4E00, 0x4E00 + 6000, 60):
            NamePattern("".join(f"[^{chr(first + n)}]*" for n in range(60)), ValueError, steps).tail(NAMES, NAMES.ends)


def test_matching_gives_way_however_many_steps_are_taken_at_once(monkeypatch):
    pauses = []
    monkeypatch.setattr("chorus.memory.files.names.name_pattern.time", SimpleNamespace(sleep=pauses.append))
    steps = Steps(1 + 64 * 101)
    for _ in range(64):
        steps.take(101)  # leaves 64 of them but once
    assert len(pauses) >= 60


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"])
def test_an_adapter_with_endless_patterns_is_refused_by_the_field(tmp_path, field):
    deep = "((((((a?b?){9}){9}){9}){9}){9}){9}"
    value = {f"{deep}{number}": 4 for number in range(9)} if field.endswith("n") else deep
    (tmp_path / CONFIG_FILE).write_text(
        json.dumps({"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]} | {field: value})
    )
    with (
        AdapterDirectory(tmp_path) as directory,
        pytest.raises(AdapterFormatError, match=rf"{field} is .*too many steps"),
    ):
        AdapterConfig.of(directory.path / CONFIG_FILE, read_fields(directory)).targets(
            ModuleNames(["ab" * 200 + ".q_proj", *KEYS])
        )


def test_the_patterns_of_a_file_are_never_all_there_at_once(tmp_path):
    """Otherwise the garbage collector would stop every thread while it visits the parsed patterns."""
    patterns = {f"{'.*a' * 20}{number}": 4 for number in range(1000)}
    config = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"], "rank_pattern": patterns}
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config))
    gc.collect()
    before = len(gc.get_objects())
    most = 0

    def look(phase, info):
        nonlocal most
        most = max(most, len(gc.get_objects()) - before)

    with AdapterDirectory(tmp_path) as directory:
        config = AdapterConfig.of(directory.path / CONFIG_FILE, read_fields(directory))
        look("read", {})
        gc.callbacks.append(look)
        try:
            config.targets(ModuleNames(["q_proj"]))
        finally:
            gc.callbacks.remove(look)
    assert most < 10 * len(patterns)


@pytest.mark.parametrize("field", ["target_modules", "rank_pattern"])
def test_a_wrong_pattern_is_refused_though_no_module_is_left_for_it(tmp_path, field):
    config = {"peft_type": "LORA", "r": 8, "target_modules": ["k_proj"], "rank_pattern": {".*": 4}}
    config[field] = "(" if field == "target_modules" else {".*": 4, "(": 5}
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config))
    with AdapterDirectory(tmp_path) as directory, pytest.raises(AdapterFormatError, match=f"{field} is .*unterminated"):
        AdapterConfig.of(directory.path / CONFIG_FILE, read_fields(directory)).targets(NAMES)


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_the_number_of_patterns_is_bounded(tmp_path, field):
    config = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config | {field: {f"q{n}": 4 for n in range(MAX_PATTERNS + 1)}}))
    with (
        AdapterDirectory(tmp_path) as directory,
        pytest.raises(AdapterFormatError, match=f"{field}.* at most {MAX_PATTERNS}"),
    ):
        AdapterConfig.of(directory.path / CONFIG_FILE, read_fields(directory))


def test_a_pattern_for_each_module_of_a_large_model(tmp_path):
    blocks = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj"]
    keys = [f"model.layers.{layer}.{block}" for layer in range(126) for block in blocks]
    patterns = {key: 1 + number % 64 for number, key in enumerate(keys)}
    config = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"]}
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config | {"rank_pattern": patterns, "alpha_pattern": patterns}))
    with AdapterDirectory(tmp_path) as directory:
        found = AdapterConfig.of(directory.path / CONFIG_FILE, read_fields(directory)).targets(ModuleNames(keys))
    assert found == {key: (rank, 1.0) for key, rank in patterns.items()}
