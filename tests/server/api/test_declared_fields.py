"""Every field that a request's body declares is read somewhere, or listed with the reason why nothing depends on it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from pydantic import BaseModel

import chorus.server
from chorus.server.app import create_app  # noqa: F401 - imports all bodies

SOURCE = Path(chorus.server.__file__).parent

HARMLESS = {
    **{(kind, "is_3d_lora_weight"): "the adapter's tensors tell it" for kind in ("LoadForSkyrl", "LoadLoraAdapter")},
    ("ContinueGeneration", "torch_empty_cache"): "a pause leaves no memory to be freed",
    ("Pause", "clear_cache"): "kept requests keep their KV, in vLLM too, and only keep is supported",
    ("StreamOptions", "include_obfuscation"): "padding of chunks, which changes no content",
}


def bodies(kind=BaseModel):
    for each in kind.__subclasses__():
        if each.__module__.startswith("chorus.server.api."):
            yield each
        yield from bodies(each)


def names_used():
    """Attributes and texts in the source: a field may be read by its name in a list of such names."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Attribute):
                yield node.attr
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


@pytest.fixture(scope="module")
def used():
    return set(names_used())


def test_no_field_is_accepted_and_ignored(used):
    declared = {(each.__name__, name) for each in bodies() for name in each.model_fields}
    assert len(declared) > 200, "the bodies were found"
    unread = {(kind, name) for kind, name in declared if name not in used}
    assert unread == set(HARMLESS)
