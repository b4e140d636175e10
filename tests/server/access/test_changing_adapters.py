"""Who may change adapters without an admin key, and what restricted keys see of the adapters of others."""

from __future__ import annotations

import asyncio
import logging
import types

import pytest
from starlette.requests import Request

from chorus.server.access.grants import Grant
from chorus.server.access.keys import Keys, KeyWatch, NamedKey
from chorus.server.errors import not_served, on_error
from chorus.server.settings import Settings
from chorus.server.start.checks import warn_of_rights

PLAIN, ACME, OTHER, LIMITED = (
    NamedKey("sk-plain-key"),
    *(NamedKey(f"sk-{t}-key", t) for t in ("acme", "other", "limited")),
)
ONLY = Grant(("alice",))


def may_change(key, *others, **options):
    keys = Keys([key, *others], **options)
    return keys.identify(f"Bearer {key.key}").may_change_adapters


def test_a_tenants_key_changes_adapters_only_where_the_server_says_so():
    assert not may_change(ACME) and not may_change(ACME, PLAIN)
    assert may_change(PLAIN) and may_change(PLAIN, ACME)
    assert may_change(ACME, tenants_change=True)
    assert not may_change(LIMITED._replace(grant=ONLY), tenants_change=True)
    keys = Keys([ACME, PLAIN], [NamedKey("sk-the-admin-key")], tenants_change=True)
    assert not keys.identify(f"Bearer {ACME.key}").may_change_adapters
    assert not keys.identify(f"Bearer {PLAIN.key}").may_change_adapters
    assert keys.identify("Bearer sk-the-admin-key").may_change_adapters


@pytest.mark.parametrize(
    ("lines", "options", "said"),
    [
        ("sk-acme-key acme\n", {}, "no key may change adapters"),
        (
            "sk-acme-key acme\nsk-other-key other\n",
            {"tenants_change_adapters": True},
            "the keys of 2 tenants may change",
        ),
        ("sk-plain-key-1\nsk-plain-key-2\n", {}, "the keys of 2 tenants may change"),
        ("sk-plain-key-1\nsk-acme-key acme\n", {}, None),
        ("sk-acme-key acme\nsk-ops-key ops admin=yes\n", {}, None),
        ("sk-acme-key acme\n", {"adapters": None}, None),
    ],
)
def test_the_start_warns(tmp_path, lines, options, said):
    (tmp_path / "keys").write_text(lines)
    places = {"model": tmp_path, "adapters": tmp_path, **options}
    warning = warn_of_rights(Settings(api_key_file=tmp_path / "keys", **places))
    assert warning is None if said is None else said in (warning or "")


@pytest.fixture
def live(start, make_engine):
    live = start(make_engine(["alice", "bob"]))
    doors = [each for each in live.app.user_middleware if "keys" in each.kwargs]
    doors[0].kwargs["keys"].replace(Keys([ACME, LIMITED._replace(grant=ONLY)]))
    return live


def ask(live, key, method, path, **body):
    headers = {"authorization": f"Bearer {key.key}"}
    return live.client.request(method, path, headers=headers, **({"json": body} if body else {}))


def test_a_tenants_key_is_told_what_gives_the_right(live):
    for method, path in (("DELETE", "/v1/adapters/alice"), ("POST", "/v1/unload_lora_adapter")):
        refused = ask(live, ACME, method, path, lora_name="alice")
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "admin_key_required"
        assert "admin=yes" in refused.json()["error"]["message"]
        assert "--tenants-change-adapters" in refused.json()["error"]["message"]
    assert live.worker.adapters is not None and ask(live, ACME, "GET", "/v1/adapters/alice").status_code == 200


def test_a_scale_of_zero_opens_no_door(live):
    for fields in (
        {"adapters": [{"name": "bob", "scale": 0}]},
        {"adapters": [{"name": "alice"}, {"name": "bob", "scale": 0}]},
        {"lora": [{"id": "bob", "scale": 0.0}]},
        {"merged_adapters": {"ids": ["alice", "bob"], "weights": [1, 0], "merge_strategy": "cat"}},
    ):
        refused = ask(live, LIMITED, "POST", "/v1/completions", prompt="a", **fields)
        unknown = ask(live, LIMITED, "POST", "/v1/completions", prompt="a", model="bob")
        assert (refused.status_code, refused.json()) == (404, unknown.json()), fields


def test_numbers_of_adapters_tell_a_restricted_key_nothing(live):
    everything = {one["id"] for one in ask(live, ACME, "GET", "/lora-adapters").json()}
    (own,) = ask(live, LIMITED, "GET", "/lora-adapters").json()
    assert own["name"] == "alice" and own["id"] not in everything
    assert ask(live, LIMITED, "GET", "/lora-adapters").json() == [own], "it stays the same"
    lora = [{"id": own["id"], "scale": 1.0}]
    assert ask(live, LIMITED, "POST", "/v1/completions", prompt="a", max_tokens=1, lora=lora).status_code == 200
    lora = [{"id": min(everything), "scale": 1.0}]
    assert ask(live, LIMITED, "POST", "/v1/completions", prompt="a", lora=lora).status_code == 400


def test_the_adapter_that_serves_as_the_base_model_stays_hidden(live):
    live.worker.adapters.as_base = "bob"
    assert "bob" in ask(live, ACME, "GET", "/v1/models").text
    shown = ask(live, LIMITED._replace(grant=ONLY), "GET", "/v1/models")
    assert shown.json()["data"][0]["id"] == "base" and "bob" not in shown.text
    answer = ask(live, LIMITED, "POST", "/v1/completions", prompt="a", max_tokens=1)
    assert answer.status_code == 200 and "bob" not in answer.headers.get("x-chorus-adapter", "")


@pytest.mark.parametrize("sees", [False, True])
def test_the_reason_of_a_quarantine_shows_a_tenant_no_path(sees):
    private = types.SimpleNamespace(hide=lambda text: text)
    app = types.SimpleNamespace(state=types.SimpleNamespace(private_paths=private))
    scope = {"type": "http", "app": app, "path": "/v1/completions", "state": {"sees_paths": sees}, "headers": []}
    error = not_served("adapter 'a' is not served: /srv/tenants/acme/tokenizer.json is not JSON")
    body = bytes(asyncio.run(on_error(Request(scope), error)).body).decode()
    assert ("/srv/tenants" in body) is sees and "tokenizer.json is not JSON" in body


def test_a_signal_to_reload_keys_that_are_in_no_file_is_logged(caplog):
    watch = KeyWatch(Keys([PLAIN]), lambda: pytest.fail("nothing to read"), ())
    with caplog.at_level(logging.INFO):
        watch.reload()
        watch.look()
    assert "this server has none" in caplog.text
