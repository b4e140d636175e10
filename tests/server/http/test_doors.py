"""Requests that must not come in: foreign hosts, foreign pages, clients without a key, bodies that are no JSON."""

import asyncio
import re
import socket
from pathlib import Path

import pytest

from chorus.core.engine_stats import TenantStats
from chorus.server.access.addresses import Networks
from chorus.server.access.hosts import Hosts, is_loopback, is_same_origin
from chorus.server.access.keys import InvalidKey, Keys, KeyWatch, NamedKey, Right, check_key, read_keys
from chorus.server.api.absent import ABSENT
from chorus.server.api.generation_api import ROUTES
from chorus.server.api.pooling.pooling_api import ROUTES as POOLING
from chorus.server.engine import engine_view
from chorus.server.errors import GENERATES, ApiError
from chorus.server.http.doors import Doors
from chorus.server.http.gate import GENERATING, Gate
from chorus.server.settings import Settings
from chorus.server.start.checks import LaunchError, check_access
from chorus.server.start.flags import UsageError

pytestmark = pytest.mark.wide

KEY, OTHER, ADMIN = "sk-first-key", "sk-second-key", "sk-admin-key"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    import os

    for name in os.environ:
        if name.startswith("CHORUS_"):
            monkeypatch.delenv(name)


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def error_of(response, status):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error["code"]


def test_routes_that_generate_are_counted_as_such():
    assert set(GENERATING) == ROUTES.keys() | POOLING.keys()


# -- content type


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "json"])
@pytest.mark.parametrize(
    "path",
    ["/v1/completions", "/v1/chat/completions", "/v1/adapters", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"],
)
def test_bodies_are_json_or_415(shared, path, kind):
    """Types that a form, or a script without asking, can send from any web page."""
    response = shared.client.post(path, content=b'{"model": "base"}', headers={"content-type": kind} if kind else {})
    assert error_of(response, 415) == "unsupported_media_type"


def test_json_by_its_other_names(shared):
    for kind in ("application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"):
        body = b'{"model": "base", "prompt": "ok"}'
        assert shared.client.post("/v1/completions", content=body, headers={"content-type": kind}).status_code == 200


# -- host and origin


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost@evil.example", "", "a b", "x" * 400]
)
def test_foreign_hosts_are_refused(shared, host):
    for path in ("/v1/models", "/health"):
        assert error_of(shared.client.get(path, headers={"host": host}), 400) == "invalid_host"


def test_names_of_this_machine_are_served(shared):
    port = shared.url.rpartition(":")[2]
    for host in (f"localhost:{port}", "LOCALHOST", f"127.0.0.1:{port}", f"[::1]:{port}", "localhost.", "a.localhost"):
        assert shared.client.get("/v1/models", headers={"host": host}).status_code == 200, host


def test_hosts():
    assert Hosts("10.0.0.5").serves("10.0.0.5:8000") and not Hosts("10.0.0.5").serves("10.0.0.6")
    wide = Hosts("0.0.0.0")
    assert wide.serves("10.0.0.6") and wide.serves("[fe80::1]:80") and wide.serves(socket.gethostname())
    assert not wide.serves("evil.example"), "a name of the attacker's that points here"
    assert Hosts("0.0.0.0", guarded=True).serves("chorus.example")
    assert not Hosts("127.0.0.1", guarded=True).serves("chorus.example")
    listed = Hosts("0.0.0.0", ["api.example", "*.svc.local"])
    assert listed.serves("api.example:80") and listed.serves("a.svc.local") and listed.serves("localhost")
    assert not listed.serves("svc.local") and not listed.serves("10.0.0.6")
    assert Hosts("127.0.0.1", ["*"]).serves("anything")
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("localhost") and not is_loopback("0.0.0.0")


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1:1", "http://localhost.evil.example"]
)
def test_foreign_pages_change_nothing(shared, origin):
    for method, path in (("POST", "/v1/completions"), ("POST", "/v1/adapters"), ("DELETE", "/v1/adapters/alice")):
        response = shared.client.request(method, path, json={}, headers={"origin": origin})
        assert error_of(response, 403) == "origin_not_allowed"
        assert "access-control-allow-origin" not in response.headers


def test_a_page_of_the_server_itself_may(shared):
    response = shared.client.post(
        "/v1/completions", json={"model": "base", "prompt": "ok"}, headers={"origin": shared.url}
    )
    assert response.status_code == 200
    assert is_same_origin("https://a.example", "a.example:443") and not is_same_origin("null", "null")


def test_cors_is_off_unless_it_is_asked_for(shared, start, fake_engine):
    asked = {"origin": "https://app.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in shared.client.options("/v1/completions", headers=asked).headers
    live = start(fake_engine, settings={"cors_origins": "https://app.example"})
    assert (
        live.client.options("/v1/completions", headers=asked).headers["access-control-allow-origin"] == asked["origin"]
    )
    body = {"model": "base", "prompt": "ok"}
    response = live.client.post("/v1/completions", json=body, headers={"origin": asked["origin"]})
    assert response.status_code == 200 and response.headers["access-control-allow-origin"] == asked["origin"]
    assert live.client.post("/v1/completions", json=body, headers={"origin": "https://evil.example"}).status_code == 403


# -- keys


@pytest.fixture
def guarded(start, fake_engine):
    return start(fake_engine, settings={"api_key": [KEY, OTHER], "admin_key": [ADMIN]})


def test_every_route_but_health_needs_a_key(guarded):
    assert guarded.client.get("/health").status_code == 200
    for method, path in (
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
        ("GET", "/version"),
        ("GET", "/v1/adapters"),
        ("GET", "/nowhere"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("DELETE", "/v1/adapters/alice"),
        ("POST", "/health"),
    ):
        for headers in (
            {},
            bearer("sk-wrong-key"),
            bearer("x"),
            {"authorization": KEY},
            {"authorization": f"Basic {KEY}"},
        ):
            response = guarded.client.request(method, path, json={} if method == "POST" else None, headers=headers)
            assert error_of(response, 401) == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
            assert KEY not in response.text and "wrong-key" not in response.text
    for key in (KEY, OTHER, ADMIN):
        assert guarded.client.get("/v1/models", headers=bearer(key)).status_code == 200


def test_only_an_admin_key_changes_adapters(guarded):
    changes = (
        ("POST", "/v1/adapters"),
        ("PATCH", "/v1/adapters/alice"),
        ("DELETE", "/v1/adapters/alice"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/unload_lora_adapter"),
    )
    for method, path in changes:
        response = guarded.client.request(method, path, json={}, headers=bearer(KEY))
        assert error_of(response, 403) == "admin_key_required"
        assert guarded.client.request(method, path, json={}, headers=bearer(ADMIN)).status_code != 401
    assert guarded.client.get("/v1/adapters", headers=bearer(KEY)).status_code == 200


RIGHTS = {
    ("GET", "/"): Right.OPEN,
    ("GET", "/health"): Right.OPEN,
    ("GET", "/ping"): Right.OPEN,
    ("POST", "/ping"): Right.KEY,
    ("GET", "/version"): Right.KEY,
    ("GET", "/metrics"): Right.KEY,
    ("GET", "/load"): Right.KEY,
    ("GET", "/v1/models"): Right.KEY,
    ("GET", "/tokenizer_info"): Right.KEY,
    ("GET", "/lora-adapters"): Right.KEY,
    ("GET", "/v1/models/{name:path}"): Right.KEY,
    ("POST", "/v1/completions"): Right.KEY,
    ("POST", "/v1/chat/completions"): Right.KEY,
    **{("POST", path): Right.KEY for path in (*GENERATES, *POOLING)},
    ("GET", "/info"): Right.KEY,
    ("POST", "/inference/v1/generate"): Right.KEY,
    ("POST", "/skyrl/v1/load_lora_adapter"): Right.ADMIN,
    ("POST", "/pause"): Right.ADMIN,
    ("POST", "/resume"): Right.ADMIN,
    ("POST", "/v1/adapters/{name:path}/drain"): Right.ADMIN,
    ("POST", "/tokenize"): Right.KEY,
    ("POST", "/detokenize"): Right.KEY,
    ("POST", "/v1/responses"): Right.KEY,
    ("POST", "/v1/chat/completions/batch"): Right.KEY,
    ("POST", "/v1/messages"): Right.KEY,
    ("GET", "/openapi.json"): Right.KEY,
    ("POST", "/v1/messages/count_tokens"): Right.KEY,
    ("POST", "/v1/responses/input_tokens"): Right.KEY,
    ("GET", "/server_info"): Right.ADMIN,
    ("GET", "/model_info"): Right.KEY,
    ("GET", "/get_model_info"): Right.KEY,
    ("GET", "/get_server_info"): Right.ADMIN,
    ("GET", "/health_generate"): Right.OPEN,
    ("POST", "/invocations"): Right.KEY,
    **{(method, path): Right.KEY for path, (methods, _) in ABSENT.items() for method in methods},
    ("GET", "/v1/adapters"): Right.KEY,
    ("GET", "/v1/adapters/{name:path}"): Right.KEY,
    ("POST", "/v1/adapters"): Right.ADMIN,
    ("PATCH", "/v1/adapters/{name:path}"): Right.ADMIN,
    ("DELETE", "/v1/adapters/{name:path}"): Right.ADMIN,
    ("POST", "/v1/load_lora_adapter"): Right.ADMIN,
    ("POST", "/v1/unload_lora_adapter"): Right.ADMIN,
    ("GET", "/ui"): Right.OPEN,
    ("GET", "/ui/ui.js"): Right.OPEN,
    ("GET", "/ui/ui.css"): Right.OPEN,
    ("GET", "/ui/events"): Right.OPERATOR,
    ("GET", "/get_world_size"): Right.ADMIN,
    ("GET", "/is_sleeping"): Right.ADMIN,
    ("GET", "/is_paused"): Right.ADMIN,
    ("POST", "/reset_mm_cache"): Right.ADMIN,
    ("POST", "/reset_encoder_cache"): Right.ADMIN,
    ("GET", "/flush_cache"): Right.ADMIN,
    ("POST", "/flush_cache"): Right.ADMIN,
    ("POST", "/reset_prefix_cache"): Right.ADMIN,
    ("POST", "/load_lora_adapter"): Right.ADMIN,
    ("POST", "/unload_lora_adapter"): Right.ADMIN,
    ("POST", "/pause_generation"): Right.ADMIN,
    ("POST", "/continue_generation"): Right.ADMIN,
    ("POST", "/sleep"): Right.ADMIN,
    ("POST", "/wake_up"): Right.ADMIN,
}
STREAMS = ["/ui/events"]
"""Paths with an answer that has no end."""


def test_every_route_has_its_right(guarded):
    """A route that is new here must be given one, and stand in the list."""
    routes = guarded.app.routes
    assert {(method, route.path): route.right for route in routes for method in route.methods - {"HEAD"}} == RIGHTS
    for (method, path), right in RIGHTS.items():
        for key in (None, KEY, ADMIN):
            if path in STREAMS and key == ADMIN:
                continue
            headers = {"content-type": "application/json"} | (bearer(key) if key else {})
            response = guarded.client.request(method, path.replace("{name:path}", "alice"), headers=headers)
            error = response.json() if response.status_code in (401, 403) else {}
            refused = (error if path in GENERATES else error.get("error", {})).get("code")
            if right is Right.OPEN or key == ADMIN or (right is Right.KEY and key):
                assert refused in (None, "adapter_loading_disabled"), (method, path, key)
            else:
                assert refused == ("admin_key_required" if key else "invalid_api_key"), (method, path, key)


@pytest.mark.parametrize("path", ["/v1/adapters%0A", "/v1/load_lora_adapter%0A", "/v1/adapters/a%00", "/health%7F"])
def test_a_control_character_in_a_path_is_refused(guarded, path):
    """Regular expressions of routes match before a final newline, too: it reached the route, but not its guard."""
    for key in (KEY, ADMIN):
        response = guarded.client.post(path, json={"name": "a", "path": "/a"}, headers=bearer(key))
        assert error_of(response, 400) == "invalid_path"


def test_without_admin_keys_api_keys_change_adapters(start, fake_engine):
    live = start(fake_engine, settings={"api_key": [KEY]})
    response = live.client.post("/v1/unload_lora_adapter", json={"lora_name": "alice"}, headers=bearer(KEY))
    assert error_of(response, 403) == "adapter_loading_disabled"


OK = {"model": "base", "prompt": "ok"}


def test_a_key_file_names_tenants(start, fake_engine, tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"{KEY} support\n{OTHER} support\n{ADMIN}\n")
    assert read_keys(path) == [NamedKey(KEY, "support"), NamedKey(OTHER, "support"), NamedKey(ADMIN)]
    live = start(fake_engine, settings={"api_key_file": path})
    for key in (KEY, OTHER):
        live.client.post("/v1/completions", json=OK, headers={"authorization": f"Bearer {key}"})
    assert [asked.tenant for asked in fake_engine.asked] == ["support"] * 2


def test_a_gateway_names_the_tenant_in_a_header(start, fake_engine):
    live = start(fake_engine, settings={"tenant_header": "X-Tenant"})
    for headers in ({"x-tenant": "acme"}, {}, {"x-tenant": ""}):
        assert live.client.post("/v1/completions", json=OK, headers=headers).status_code == 200
    assert [asked.tenant for asked in fake_engine.asked] == ["acme", "at-127.0.0.1", "at-127.0.0.1"]
    answer = live.client.post("/v1/completions", json=OK, headers={"x-tenant": "two words"})
    assert error_of(answer, 400) == "invalid_tenant"
    assert "X-Tenant is 'two words'" in answer.json()["error"]["message"]
    plain = start(fake_engine)
    plain.client.post("/v1/completions", json=OK, headers={"x-tenant": "acme"})
    assert fake_engine.asked[-1].tenant == "at-127.0.0.1", "no header names one where none is configured"


FAIRNESS = "x-llm-d-inference-fairness-id"


def test_a_trusted_gateway_names_a_part_of_the_key_s_tenant(start, fake_engine, tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"{KEY} support\n{OTHER} research\n")
    live = start(fake_engine, settings={"api_key_file": path, "tenant_gateways": "127.0.0.1"})
    for key, name in ((KEY, "flow-1"), (OTHER, "flow-1"), (KEY, "research"), (KEY, "")):
        headers = {"authorization": f"Bearer {key}", FAIRNESS: name}
        assert live.client.post("/v1/completions", json=OK, headers=headers).status_code == 200
    tenants = [asked.tenant for asked in fake_engine.asked]
    assert tenants == ["support|flow-1", "research|flow-1", "support|research", "support"]
    forged = {"authorization": f"Bearer {KEY}", FAIRNESS: "research|flow-1"}
    assert error_of(live.client.post("/v1/completions", json=OK, headers=forged), 400) == "invalid_tenant"


def test_only_the_gateway_s_word_counts(start, fake_engine):
    elsewhere = start(fake_engine, settings={"tenant_gateways": ["192.0.2.0/24"]})
    through_proxy = {FAIRNESS: "flow-1", "x-forwarded-for": "192.0.2.7"}  # not the client's network counts
    assert elsewhere.client.post("/v1/completions", json=OK, headers=through_proxy).status_code == 200
    assert fake_engine.asked[-1].tenant == "at-192.0.2.7"
    start(fake_engine).client.post("/v1/completions", json=OK, headers={FAIRNESS: "flow-1"})
    assert fake_engine.asked[-1].tenant == "at-127.0.0.1"
    named = start(fake_engine, settings={"tenant_gateways": ["127.0.0.1"], "tenant_header": "X-Tenant"})
    named.client.post("/v1/completions", json=OK, headers={FAIRNESS: "flow-1", "X-Tenant": "acme"})
    assert fake_engine.asked[-1].tenant == "acme"


def test_an_admin_key_alone_guards_the_adapters_alone(start, fake_engine):
    live = start(fake_engine, settings={"admin_key": [ADMIN]})
    assert live.post(model="base", prompt="ok").status_code == 200
    assert error_of(live.client.delete("/v1/adapters/alice"), 403) == "admin_key_required"


def test_a_tenant_is_named_by_its_key_and_the_name_does_not_tell_it():
    keys = Keys([NamedKey(KEY), NamedKey(OTHER)], [NamedKey(ADMIN)])
    tenants = {keys.identify(f"Bearer {key}").tenant for key in (KEY, OTHER, ADMIN)}
    assert len(tenants) == 3 and all(tenant.startswith("key-") and len(tenant) == 20 for tenant in tenants)
    assert not any(key in tenant for key in (KEY, OTHER, ADMIN) for tenant in tenants)
    assert Keys([NamedKey(KEY)]).identify(f"bearer  {KEY} ").tenant == keys.identify(f"Bearer {KEY}").tenant
    assert Keys().identify("Bearer none").tenant == ""


def test_keys_from_the_environment_and_from_a_file(tmp_path, monkeypatch):
    path = tmp_path / "keys"
    path.write_text(f"# ours\n{KEY}\n\n  {OTHER}  \n")
    assert read_keys(path) == [NamedKey(KEY), NamedKey(OTHER)]
    keys = Settings(api_key_file=path, admin_key_file=path).client_keys()
    assert keys.identify(f"Bearer {OTHER}").may_change_adapters
    for name, value in (("CHORUS_API_KEY", KEY), ("CHORUS_API_KEYS", f"{OTHER},{KEY}")):
        monkeypatch.setenv(name, value)
        assert Settings().client_keys().identify(f"Bearer {KEY}").tenant
        monkeypatch.delenv(name)
    for text in ("", "# none\n", "short\n", "has blanks in inside\n", f"{KEY} na,me\n", f"{KEY} a\n{OTHER}\n{KEY} b\n"):
        path.write_text(text)
        with pytest.raises(InvalidKey, match="key file"):
            read_keys(path)
    with pytest.raises(InvalidKey, match="can't be read"):
        read_keys(tmp_path / "missing")
    with pytest.raises(InvalidKey, match="ASCII"):
        check_key("schlüsselchen")


def test_one_key_is_one_tenants(tmp_path):
    with pytest.raises(InvalidKey, match="two tenants, a and b"):
        Keys([NamedKey(KEY, "a")], [NamedKey(KEY, "b")])
    assert Keys([NamedKey(KEY)], [NamedKey(KEY, "b")]).identify(f"Bearer {KEY}").tenant == "b"
    both = Keys([NamedKey(KEY)], [NamedKey(KEY)])
    assert both.guarded, "an admin key that is an API key, too, does not open the server"


@pytest.mark.parametrize("name", ["API_KEY", "API_KEYS", "API_KEY_FILE", "ADMIN_KEY", "ADMIN_KEYS", "ADMIN_KEY_FILE"])
def test_an_empty_variable_of_keys_is_refused(name, monkeypatch, capsys):
    """As one is whose secret is missing: the server would be open."""
    from chorus.server.cli.command import main

    for value in ("", " "):
        monkeypatch.setenv(f"CHORUS_{name}", value)
        assert main(["serve"]) == 2
        assert f"CHORUS_{name} is set and empty" in capsys.readouterr().err


def test_keys_are_read_anew_when_their_file_changes(tmp_path, caplog):
    path = tmp_path / "keys"
    path.write_text(f"{KEY} support\n")
    settings = Settings(api_key_file=path)
    keys = settings.client_keys()
    watch = KeyWatch(keys, settings.client_keys, [path])
    with caplog.at_level("INFO", "chorus"):
        watch.look()
        assert not caplog.records
        path.write_text(f"{OTHER} batch\n")
        watch.look()
        with pytest.raises(ApiError):
            keys.identify(f"Bearer {OTHER}")  # it may still be being written
        watch.look()
        assert keys.identify(f"Bearer {OTHER}").tenant == "batch"
        with pytest.raises(ApiError):
            keys.identify(f"Bearer {KEY}")
        assert "reloaded the keys: 1 tenants, new: batch, removed: support" in caplog.text
        path.write_text("")
        watch.look()
        watch.look()
        assert "stay as they were" in caplog.text
        assert keys.guarded and keys.identify(f"Bearer {OTHER}").tenant == "batch"
        path.write_text(f"{KEY} support\n")
        watch.reload()
        watch.look()
        assert keys.identify(f"Bearer {KEY}").tenant == "support", "a signal does not wait for the next look"
    assert KEY not in caplog.text and OTHER not in caplog.text


def test_health_shows_traffic_to_keys_alone(monkeypatch, start, fake_engine):
    monkeypatch.setattr("chorus.server.engine.watchdog.POLL_SECONDS", 1e6)  # or it would see that nothing hangs
    guarded = start(fake_engine, settings={"api_key": [KEY], "admin_key": [ADMIN]})
    for headers in ({}, bearer("sk-wrong-key")):
        assert guarded.client.get("/health", headers=headers).json() == {"status": "ok"}
    assert "stats" in guarded.client.get("/health", headers=bearer(KEY)).json()
    guarded.worker.stalled = "the engine has not finished a step for 9 s"
    assert guarded.client.get("/health").json() == {"status": "unavailable"}
    assert "9 s" in guarded.client.get("/health", headers=bearer(KEY)).json()["reason"]
    assert "stats" in start(fake_engine).client.get("/health").json(), "a server without keys has no secrets"


def tenants_of(live, headers):
    return set(
        re.findall(r'chorus_tenant_standing{tenant="([^"]+)"', live.client.get("/metrics", headers=headers).text)
    )


def test_metrics_name_other_tenants_to_admins_alone(start, fake_engine, tmp_path, monkeypatch):
    (tmp_path / "keys").write_text(f"{KEY} support\n{OTHER} batch\n")
    standing = [TenantStats(name, 1, 0, 2.0) for name in ("support", "batch", "other")]
    monkeypatch.setattr(engine_view, "tenants_of", lambda _: standing)
    live = start(fake_engine, settings={"api_key_file": tmp_path / "keys", "admin_key": [ADMIN]})
    assert tenants_of(live, bearer(KEY)) == {"support"}
    assert tenants_of(live, bearer(OTHER)) == {"batch"}
    assert tenants_of(live, bearer(ADMIN)) == {"support", "batch", "other"}
    plain = start(fake_engine, settings={"api_key_file": tmp_path / "keys"})
    assert tenants_of(plain, bearer(KEY)) == {"support"}, "keys may change adapters here, and still are tenants'"
    assert tenants_of(start(fake_engine), {}) == {"support", "batch", "other"}
    by_adapter = start(fake_engine, settings={"api_key_file": tmp_path / "keys", "fair_by": "adapter"})
    assert len(tenants_of(by_adapter, bearer(KEY))) == 3, "adapters' names are in /v1/models"


def test_a_proxy_names_clients_by_their_addresses_alone(start, fake_engine):
    live = start(fake_engine, settings={"trusted_proxies": "127.0.0.1,10.0.0.0/8"})
    for forwarded, tenant in (
        ("192.0.2.7", "at-192.0.2.7"),
        ("1.1.1.1, 192.0.2.7, 10.0.0.9", "at-192.0.2.7"),
        ("[2001:db8::1]:80", "at-2001:db8::/64"),
        ("192.0.2.7:1234", "at-192.0.2.7"),
        ("support", "at-127.0.0.1"),
        ("192.0.2.7, key-0123", "at-127.0.0.1"),
        ("10.0.0.3", "at-10.0.0.3"),
        ("", "at-127.0.0.1"),
    ):
        assert live.client.post("/v1/completions", json=OK, headers={"x-forwarded-for": forwarded}).status_code == 200
        assert fake_engine.asked[-1].tenant == tenant, forwarded
    alone = start(fake_engine, settings={"trusted_proxies": ""})
    alone.client.post("/v1/completions", json=OK, headers={"x-forwarded-for": "192.0.2.7"})
    assert fake_engine.asked[-1].tenant == "at-127.0.0.1"


def test_keys_are_never_shown(capsys, monkeypatch, caplog, guarded):
    from chorus.server.cli.command import main

    assert KEY not in repr(Settings(api_key=[KEY])) and KEY not in str(Settings(api_key=[KEY]))
    assert main(["serve", "--api-key", "short"]) == 2
    assert "short'" not in capsys.readouterr().err
    monkeypatch.setenv("CHORUS_API_KEY", KEY)
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    assert KEY not in capsys.readouterr().out
    guarded.client.post("/v1/completions", json={"model": "base", "prompt": "ok"}, headers=bearer(KEY))
    assert KEY not in guarded.client.get("/metrics", headers=bearer(KEY)).text
    assert KEY not in caplog.text


def test_listening_beyond_this_machine_needs_a_key_or_a_word(tmp_path):
    with pytest.raises(LaunchError, match="--allow-unauthenticated"):
        check_access(Settings(host="0.0.0.0"))
    warning = check_access(Settings(host="0.0.0.0", allow_unauthenticated=True))
    assert warning is not None and "without an API key" in warning
    assert check_access(Settings(host="0.0.0.0", api_key=[KEY])) is None
    assert check_access(Settings()) is None
    with pytest.raises(LaunchError, match="--allow-unauthenticated"):  # an admin key leaves the model open to all
        check_access(Settings(host="0.0.0.0", admin_key=[ADMIN]))
    with pytest.raises(LaunchError, match="key file"):
        check_access(Settings(api_key_file=tmp_path / "missing"))


def test_a_mistyped_setting_for_keys_does_not_leave_the_door_open(monkeypatch):
    from chorus.server.start.flags import Parser, add_settings, read_settings

    parser = Parser(prog="chorus serve")
    add_settings(parser)
    monkeypatch.setenv("CHORUS_API_KEYY", KEY)
    with pytest.raises(UsageError, match="did you mean CHORUS_API_KEY") as caught:
        read_settings(parser.parse([]))
    assert KEY not in str(caught.value)


# -- from the parser up


def raw(live, sent):
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(sent)
        received = b""
        while part := connection.recv(1 << 16):
            received += part
    return received


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: localhost\r\nbroken\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 200_000, 431),
        (b"GET /" + b"z" * 200_000, 431),
        (
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\nnot a size\r\n",
            400,
        ),
    ],
)
def test_what_is_no_http_is_told_in_openais_shape(shared, sent, status, caplog):
    head, _, body = raw(shared, sent).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), head
    assert b"content-type: application/json" in head.lower()
    import json

    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert not caplog.records, "what clients do wrong is not for the log"


def test_nothing_long_is_echoed(shared):
    long, num_echoes = "x" * 5000, 0
    for response in (
        shared.client.get(f"/{long}"),
        shared.client.post(f"/v1/models/{long}", json={}),
        shared.client.get(f"/v1/models/{long}"),
        shared.client.get("/v1/models", headers={"host": long[:250]}),
        shared.client.post("/v1/completions", json={"model": long, "prompt": "a"}),
        shared.client.post("/v1/completions", json={}, headers={"origin": long}),
        shared.client.post("/v1/completions", content=b"{}", headers={"content-type": long}),
        shared.post(model="base", prompt="a", logit_bias={long: 1}),
    ):
        assert 400 <= response.status_code < 500
        assert response.json()["error"]["message"] and "x" * 201 not in response.text
        num_echoes += "x" * 150 in response.text
    assert num_echoes >= 5, "or nothing was there to be cut short"


def test_what_the_disk_did_is_no_500_and_names_no_directory(start, fake_engine, tmp_path):
    live = start(fake_engine, adapter_roots=(tmp_path,))

    def fails(path, *rest, **limits):
        raise OSError(5, "Input/output error", str(path))

    fake_engine.adapters.check = fails
    (tmp_path / "one").mkdir()
    response = live.client.post("/v1/adapters", json={"name": "one", "path": "one"})
    assert error_of(response, 503) == "storage_unavailable"
    assert str(tmp_path) not in response.text


def test_model_cards_tell_no_absolute_path(shared):
    for card in shared.client.get("/v1/models").json()["data"]:
        assert not card["root"].startswith("/")


def test_only_who_may_change_adapters_sees_where_they_lie(start, make_engine):
    def paths(live, **headers):
        listed = live.client.get("/v1/adapters", headers=headers).json()["data"]
        return {one["path"] for one in (*listed, live.client.get("/v1/adapters/alice", headers=headers).json())}

    def live(**settings):
        return start(make_engine(["alice"]), settings=settings, adapter_roots=(Path("/adapters"),))

    guarded = live(api_key=[KEY], admin_key=[ADMIN])
    assert paths(guarded, **bearer(ADMIN)) == {"/adapters/alice"}
    assert paths(guarded, **bearer(KEY)) == {"alice"}
    assert paths(live(admin_key=[ADMIN])) == {"alice"}
    assert paths(live()) == {"/adapters/alice"}
    assert paths(live(host="0.0.0.0", allow_unauthenticated=True)) == {"alice"}


def test_who_has_no_key_goes_by_the_address(shared):
    seen = []

    async def route(scope, receive, send):
        seen.append(scope["state"]["tenant"])

    def tenant(address, **headers):
        scope = {"type": "http", "method": "GET", "path": "/v1/models", "client": (address, 1)}
        scope["headers"] = [(name.encode(), text.encode()) for name, text in {"host": "localhost", **headers}.items()]
        asyncio.run(Doors(route, (), Keys(), Hosts("127.0.0.1"), Networks(()), Gate())(scope, None, None))
        return seen.pop()

    assert tenant("192.0.2.1") == tenant("192.0.2.1", authorization="Bearer none") != tenant("192.0.2.2")
    assert tenant("2001:db8::1") == tenant("2001:db8::2:1") != tenant("2001:db8:0:1::1"), "one machine has a whole /64"
    assert tenant("::ffff:192.0.2.1") == tenant("192.0.2.1") != tenant("::ffff:192.0.2.2")
    shared.engine.asked.clear()
    shared.post(model="base", prompt="ok")
    assert shared.engine.asked[0].tenant == "at-127.0.0.1"
