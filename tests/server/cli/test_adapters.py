"""`chorus adapters` against a server."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import httpx
import pytest

from chorus.memory.adapters.adapter import Tier
from chorus.server.access.keys import new_key
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
    fake_engine.store.pins.names.add("team/carol")
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
    assert engine.store.get("team/legal") in engine.store.pins
    assert ask(live, "remove", "team/legal", "--force") == (0, "removed team/legal")
    code, text = ask(live, "remove", "team/legal")
    assert code == 1 and "refused (404): The lora adapter 'team/legal' cannot be found" in text
    code, text = ask(live, "add", "legal", str(tmp_path))
    assert code == 1 and "refused (403)" in text and "outside the directories" in text


@pytest.fixture
def adapters_of(subject, tmp_path):
    """An engine of a tiny base model, and the directory that has its adapters."""
    from chorus.core.config import EngineConfig
    from chorus.core.engine import Engine

    reference = subject("wide_heads")
    config = EngineConfig(model=reference.model, memory_bytes=8 << 20, threads=1, cpu_kernels="torch")
    return Engine.from_config(config), reference.adapters


def test_versions_are_uploaded_shown_and_rolled_back(start, ask, adapters_of, tmp_path):
    engine, adapters = adapters_of
    live = start(engine, settings={"adapter_uploads": tmp_path / "uploads"})
    first = tmp_path / "first"
    shutil.copytree(adapters["r1-all"], first)
    (first / "chat_template.jinja").write_text("{{ messages[0].content }}")
    second = adapters["r2-qv"]
    for number, path in enumerate((first, second, first), 1):
        code, text = ask(live, "upload", "legal", str(path), "--keep-versions", "4")
        verb = "added" if number == 1 else "replaced"
        assert code == 0 and text.startswith(f"{verb} legal: version {number}, "), text
    assert ask(live, "upload", "legal@final", str(second), "--keep-versions", "4", "--pin")[0] == 0
    kept = [path.name for path in (tmp_path / "uploads").rglob("chat_template.jinja")]
    assert kept == ["chat_template.jinja"], "the same content is kept once, with all of its files"
    code, text = ask(live, "versions", "legal")
    found = [line.split() for line in text.splitlines()]
    assert [words[0] for words in found] == ["final", "3", "2", "1"]
    assert found[0][2:] == ["pinned"] and found[1][1] == found[3][1] != found[2][1] == found[0][1]

    code, text = ask(live, "rollback", "legal")
    assert code == 0 and text.startswith("legal is version 3, content ") and text.endswith("; removed final")
    code, text = ask(live, "rollback", "legal", "--to", "9")
    assert code == 1 and "legal has no version 9 that is kept; it has 3, 2, 1" in text
    assert ask(live, "rollback", "legal", "--to", "3") == (0, "legal is version 3 already")
    code, text = ask(live, "rollback", "legal", "--to", "1")
    assert code == 0 and text.startswith("legal is version 1, content ") and text.endswith("; removed 3, 2")
    code, text = ask(live, "list")
    assert [line.split()[0] for line in text.splitlines()] == ["NAME", "legal"]
    code, text = ask(live, "rollback", "legal")
    assert code == 1 and "legal has no earlier version that is kept; load versions with --keep-versions" in text
    code, text = ask(live, "versions", "nobody")
    assert code == 1 and "refused (404)" in text
    code, text = ask(live, "upload", "legal", str(tmp_path / "nowhere"))
    assert code == 1 and "adapter_config.json: No such file or directory; name the directory of a PEFT adapter" in text


def test_pin_pause_and_drain(start, ask, adapters_of):
    engine, adapters = adapters_of
    path = next(iter(adapters.values()))
    live = start(engine, adapter_roots=(path.parent,))
    assert ask(live, "add", "legal", str(path))[0] == 0
    assert ask(live, "pin", "legal") == (0, "legal is pinned")
    assert engine.store.get("legal") in engine.store.pins
    assert ask(live, "unpin", "legal") == (0, "legal is not pinned")
    assert ask(live, "pause", "legal") == (0, "legal is paused")
    assert ask(live, "drain", "legal", "--seconds", "5") == (0, "no request uses legal")
    assert ask(live, "resume", "legal") == (0, "legal is not paused")
    code, text = ask(live, "pause", "nobody")
    assert code == 1 and "refused (404)" in text


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


def test_the_key_of_a_server_s_file_is_one_that_can_be_sent(start, fake_engine, ask, tmp_path, monkeypatch):
    """The file that `chorus serve` reads may begin with comments and hashes, and its admin key may be any line."""
    path = tmp_path / "keys"
    (_, one), (_, other) = new_key(), new_key()
    path.write_text(f"# ours\n\n{one} legal\n{KEY} support adapters=none\n{ADMIN} platform admin=yes\n{other}\n")
    live = start(fake_engine, settings={"api_key_file": path}, adapter_roots=(tmp_path,))
    code, text = ask(live, "list", "--api-key-file", str(path))
    assert code == 0 and "alice" in text
    code, text = ask(live, "remove", "nobody", "--api-key-file", str(path))
    assert code == 1 and "refused (404)" in text, "the admin's key, rather than the first"
    path.write_text(f"# ours\n{one} legal\n{other}\n")
    words = "only hashes of keys, which can't be sent; give a key as `chorus keys add` printed it"
    code, text = ask(live, "list", "--api-key-file", str(path))
    assert (code, text) == (1, f"chorus: error: {path} has {words}")
    monkeypatch.setenv("CHORUS_API_KEY", f"{one},{other}")
    code, text = ask(live, "list")
    assert (code, text) == (1, f"chorus: error: CHORUS_API_KEY has {words}")
    monkeypatch.setenv("CHORUS_API_KEY", f"{one},{ADMIN}")
    assert ask(live, "list")[0] == 0


def test_what_is_no_server(ask, start, fake_engine):
    code, text = ask("http://127.0.0.1:1", "list")
    assert code == 1 and "can't reach http://127.0.0.1:1" in text and len(text.splitlines()) == 1
    assert "; start the server, or give its --url" in text
    code, text = ask("no-url", "list")
    assert code == 1 and "can't reach no-url" in text


def test_a_directory_that_is_newer_than_the_start_is_loaded_as_the_404_says(start, ask, adapters_of, tmp_path):
    engine, adapters = adapters_of
    live = start(engine, settings={"adapters": tmp_path}, adapter_roots=(tmp_path,))
    shutil.copytree(adapters["r2-qv"], tmp_path / "legal")
    refused = httpx.post(f"{live.url}/v1/completions", json={"model": "legal", "prompt": "a", "max_tokens": 1})
    assert refused.status_code == 404
    told = refused.json()["error"]["message"]
    assert told.endswith("is loaded by POST /v1/adapters (chorus adapters add NAME DIR)")
    assert ask(live, "add", "legal", "legal")[0] == 0
    served = httpx.post(f"{live.url}/v1/completions", json={"model": "legal", "prompt": "a", "max_tokens": 1})
    assert served.status_code == 200
