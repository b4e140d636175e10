"""Stores of other packages, by the example that the manual gives."""

import re
import sqlite3
import sys
from pathlib import Path

import pytest

from chorus.memory.files.uploads.content_store import ContentStore
from chorus.server.settings import Settings
from chorus.server.stores.allowed import Allowed
from chorus.server.stores.download import download
from chorus.server.stores.errors import NotInStore, StoreAway, StoreRefused
from chorus.server.stores.rules import Location, Rule

PAGE = Path(__file__).parents[3] / "docs/how-to/adapter-sources.md"
FILES = {"adapter_config.json": b'{"r": 4}', "adapter_model.safetensors": bytes(range(256)) * 64}


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The package of the manual, installed, and its database with one adapter."""
    found = re.search(r"```python\n# acme_adapters.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    database = tmp_path / "adapters.db"
    (tmp_path / "acme_adapters.py").write_text(found[1].replace("/var/lib/acme/adapters.db", str(database)))
    info = tmp_path / "acme_adapters-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-adapters\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[chorus.adapter_sources]\nacme = acme_adapters:Adapter\n")
    with sqlite3.connect(database) as rows:
        rows.execute("CREATE TABLE files (key TEXT, name TEXT, content BLOB)")
        rows.executemany("INSERT INTO files VALUES ('research/legal', ?, ?)", FILES.items())
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("acme_adapters", None)


@pytest.fixture
def get(tmp_path):
    content = ContentStore(tmp_path / "cache", 1 << 20, 1 << 30)

    def run(url, seconds=20.0):
        with content.draft() as draft:
            download(Location(url), content, draft, Allowed([]), seconds)
            path = draft.seal()
        return {file.name: file.read_bytes() for file in path.iterdir()}

    return run


def replaced(example, body):
    """Let the package read by other code."""
    lines = ["class Adapter:", "    def __init__(self, url, seconds):", "        pass", "    def read(self, name):"]
    (example / "acme_adapters.py").write_text("\n".join(lines) + f"\n        {body}\n")
    sys.modules.pop("acme_adapters", None)


def test_the_manuals_example(example, get):
    assert get("acme://research/legal") == FILES
    with pytest.raises(NotInStore):
        get("acme://research/other")


def test_its_tokenizer_comes_along(example, get):
    with sqlite3.connect(example / "adapters.db") as rows:
        rows.execute("INSERT INTO files VALUES ('research/legal', 'tokenizer_config.json', x'7b7d')")
    assert get("acme://research/legal") == {**FILES, "tokenizer_config.json": b"{}"}


def test_rules_of_its_scheme(example):
    rule = Rule.parse("acme/*=acme://*")
    assert rule.find("acme/research/legal") == Location("acme://research/legal")
    settings = Settings(model="/models/base", adapter_source=["acme/*=acme://research/*"])
    assert settings.adapter_rules.find("acme/legal") == (0, Location("acme://research/legal"))


def test_an_unknown_scheme_names_those_there_are(example):
    with pytest.raises(ValueError, match=r"https, http, hf, s3, gs, acme, not of other; .*chorus.adapter_sources"):
        Rule.parse("a/*=other://*")


def test_a_package_that_is_gone(get):
    with pytest.raises(StoreRefused, match="lacks the package"):
        get("acme://research/legal")


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("raise PermissionError('no')", StoreRefused),
        ("raise ValueError('no')", StoreRefused),
        ("raise FileNotFoundError('no')", NotInStore),
        ("raise RuntimeError('secret host')", StoreAway),
        ("return ['text']", StoreAway),
        ("return 7", StoreAway),
        ("yield b'x' * (2 << 20)", StoreRefused),
        ("import time; time.sleep(0.2); yield b'{}'", StoreAway),
    ],
)
def test_what_goes_wrong_in_it(example, get, body, error):
    replaced(example, body)
    with pytest.raises(error) as raised:
        get("acme://research/legal", seconds=0.1 if "sleep" in body else 20.0)
    assert "secret" not in str(raised.value)
