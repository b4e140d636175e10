"""`chorus adapters` against a server."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from chorus.memory.adapters.adapter import Tier
from chorus.server.cli.command import main

KEY, ADMIN = "a-key-of-a-user", "a-key-of-the-admin"


@pytest.fixture(autouse=True)
def no_keys(monkeypatch):
    for name in ("CHORUS_ADMIN_KEY", "CHORUS_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def ask(capsys):
    """`ask(live, "list")`: the exit code and the output."""

    def run(live, *arguments):
        code = main(["adapters", *arguments, "--url", live if isinstance(live, str) else live.url])
        printed = capsys.readouterr()
        return code, (printed.out if code == 0 else printed.err).strip()

    return run


def test_list(start, fake_engine, ask):
    fake_engine.store.tiers["team/carol"] = Tier.DEVICE
    fake_engine.store.pinned.add("team/carol")
    reason = "its weights are broken"
    fake_engine.adapters.quarantine["dan"] = SimpleNamespace(name="dan", path="/adapters/dan", reason=reason)
    live = start(fake_engine)
    code, text = ask(live, "list")
    assert code == 0
    assert [line.split() for line in text.splitlines()] == [
        ["NAME", "TIER", "RANK", "PINNED", "VERSION", "CONTENT"],
        ["alice", "disk", "4", "no", "1", "0" * 12],
        ["bob", "disk", "4", "no", "1", "0" * 12],
        ["team/carol", "device", "4", "yes", "1", "0" * 12],
        ["dan", "is", "not", "served:", *reason.split()],
    ]
    code, text = ask(live, "list", "--json")
    assert [one["name"] for one in json.loads(text)["data"]] == ["alice", "bob", "team/carol"]


def test_add_and_remove(start, ask, subject, tmp_path):
    from chorus.core.config import EngineConfig
    from chorus.core.engine import Engine

    reference = subject("wide_heads")
    engine = Engine.from_config(
        EngineConfig(model=reference.model, memory_bytes=8 << 20, threads=1, cpu_kernels="torch")
    )
    path = reference.adapters["r2-qv"]
    live = start(engine, adapter_roots=(path.parent,))
    code, text = ask(live, "add", "team/legal", path.name)
    assert code == 0 and text.startswith("added team/legal: version 1, content ")
    code, text = ask(live, "add", "team/legal", str(path), "--pin")
    assert code == 0 and text.startswith("replaced and pinned team/legal: version 2, content ")
    assert engine.store.is_pinned(engine.store.get("team/legal"))
    assert ask(live, "remove", "team/legal", "--force") == (0, "removed team/legal")
    code, text = ask(live, "remove", "team/legal")
    assert code == 1 and "refused (404): The lora adapter 'team/legal' cannot be found" in text
    code, text = ask(live, "add", "legal", str(tmp_path))
    assert code == 1 and "refused (403)" in text and "outside the directories" in text


def test_keys_come_from_a_file_or_the_environment(start, fake_engine, ask, tmp_path, monkeypatch):
    live = start(fake_engine, settings={"api_key": [KEY], "admin_key": [ADMIN]}, adapter_roots=(tmp_path,))
    code, text = ask(live, "list")
    assert code == 1 and "refused (401): an API key is needed" in text
    path = tmp_path / "keys"
    path.write_text(f"# ours\n{KEY} support\n")
    assert ask(live, "list", "--api-key-file", str(path))[0] == 0
    monkeypatch.setenv("CHORUS_API_KEY", KEY)
    assert ask(live, "list")[0] == 0
    code, text = ask(live, "remove", "alice")
    assert code == 1 and "needs an admin key" in text
    monkeypatch.setenv("CHORUS_ADMIN_KEY", ADMIN)
    code, text = ask(live, "remove", "nobody")
    assert code == 1 and KEY not in text and ADMIN not in text
    path.write_text("short\n")
    code, text = ask(live, "list", "--api-key-file", str(path))
    assert code == 1 and "key file" in text


def test_what_is_no_server(ask, start, fake_engine):
    code, text = ask("http://127.0.0.1:1", "list")
    assert code == 1 and "can't reach http://127.0.0.1:1" in text and len(text.splitlines()) == 1
    assert "; start the server, or give its --url" in text
    code, text = ask("no-url", "list")
    assert code == 1 and "can't reach no-url" in text
