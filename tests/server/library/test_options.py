"""Options of `LLM` have the types and descriptions of the settings, which editors and type checkers show."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any, Literal, Unpack, get_args, get_origin, get_type_hints

import pytest
from pydantic import TypeAdapter

from chorus import LLM, InvalidRequest
from chorus.server.library import option_types
from chorus.server.library.option_types import Options
from chorus.server.library.options import NAMED, OPTIONS, settings_of
from chorus.server.settings import LoraModule, Settings

HINTS = get_type_hints(Options)


def test_the_constructor_s_keywords_have_types():
    assert get_type_hints(LLM.__init__)["options"] == Unpack[Options]
    assert HINTS.keys() == OPTIONS - NAMED, "run make docs"
    assert inspect.signature(LLM).parameters.keys() >= NAMED
    assert Any not in HINTS.values() and object not in HINTS.values()


@pytest.mark.parametrize("name", HINTS)
def test_a_type_allows_the_setting_s_values(name):
    """The default, and each of the words that the setting knows."""
    field = Settings.model_fields[name]
    allowed = TypeAdapter(HINTS[name], config={"strict": True})
    if field.default is not None or type(None) in get_args(field.annotation):
        allowed.validate_python(field.get_default(call_default_factory=True))
    own, typed = words_of(field.annotation), words_of(HINTS[name])
    assert own == typed


def words_of(annotation):
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    return set().union(*(words_of(each) for each in get_args(annotation)))


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("memory_bytes", "512MiB", 512 << 20),
        ("max_adapter_bytes", "1GB", 10**9),
        ("tokenizer", "/a", Path("/a")),
        ("weights", {"a": 2}, {"a": 2.0}),
        ("weights", "a=2", {"a": 2.0}),
        ("adapter_roots", ("/a", Path("/b")), [Path("/a"), Path("/b")]),
        ("adapter_source_hosts", ["a.example"], ["a.example"]),
        ("override_generation_config", {"temperature": 0.5}, {"temperature": 0.5}),
        ("lora_modules", ["a=/b"], [LoraModule("a", Path("/b"))]),
        ("lora_modules", [("a", "/b")], [LoraModule("a", Path("/b"))]),
        ("lora_modules", [{"name": "a", "path": "/b"}], [LoraModule("a", Path("/b"))]),
        ("target_step_ms", 3, 3.0),
        ("target_step_ms", "auto", "auto"),
    ],
)
def test_values_of_other_types_that_are_read_have_a_type(name, value, read):
    TypeAdapter(HINTS[name]).validate_python(value)
    assert getattr(settings_of({name: value}), name) == read


@pytest.mark.parametrize(
    ("name", "value"), [("dtype", "float8"), ("max_num_seqs", "many"), ("prefix_cache", 3.5), ("weights", 5)]
)
def test_values_of_wrong_types_have_none_and_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match="validation error"):
        TypeAdapter(HINTS[name]).validate_python(value)
    with pytest.raises(InvalidRequest, match=f"^{name}"):
        settings_of({name: value})


def test_an_editor_shows_descriptions_without_flags():
    (made,) = (node for node in ast.parse(inspect.getsource(option_types)).body if isinstance(node, ast.ClassDef))
    shown = {}
    for field, text in zip(made.body, made.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            assert isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            shown[field.target.id] = " ".join(str(text.value.value).split())
    assert shown.keys() == HINTS.keys()
    assert shown["max_waiting"].endswith("None: no limit. Default: 4096.")
    assert shown["memory_bytes"].count("default") == 1
    assert "an adapter of adapters or lora_modules" in shown["strict_adapters"]
    assert not [name for name, text in shown.items() if "--" in text or "repeatable" in text]
