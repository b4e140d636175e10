"""Rights of tenants' keys: resources of others can't be told from missing ones, and bounds hold."""

import hashlib
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chorus.core.engine_stats import TenantStats
from chorus.memory.adapters.adapter import Tier
from chorus.server.access.grants import ALL, Grant, InvalidKey
from chorus.server.access.keys import Keys, NamedKey, new_key, read_keys
from chorus.server.access.shared_bounds import TokenBudgets
from chorus.server.cli.command import main
from chorus.server.engine import engine_view
from chorus.server.engine.metrics import Metrics
from chorus.server.errors import ApiError

NAMES = ["acme/sql", "acme/mail", "zeta/sql", "zeta/law", "solo"]
ABSENT = ["acme/none", "zeta/none", "none"]
"""Names as the adapters have them, one of each that no adapter goes by."""

GLOBS = ["acme/*", "zeta/*", "*/sql", "solo", "zeta/l?w", "[az]*/mail", "absent"]

grants = st.builds(
    Grant, adapters=st.none() | st.lists(st.sampled_from(GLOBS), max_size=3).map(tuple), base=st.booleans()
)


def routes_of(name):
    """Requests to every route that takes a model's or an adapter's name."""
    messages, long = [{"role": "user", "content": "hi"}], "x" * 2000
    for path, body in (
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/completions", {"prompt": "hi", "stream": True}),
        ("/v1/completions", {"prompt": long}),
        ("/v1/chat/completions", {"messages": messages, "n": 2}),
        ("/v1/chat/completions/batch", {"messages": [messages, messages]}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": messages, "max_tokens": 4}),
        ("/v1/messages/count_tokens", {"messages": messages}),
        ("/v1/responses/input_tokens", {"input": "hi"}),
        ("/inference/v1/generate", {"token_ids": [97], "sampling_params": {"max_tokens": 2}}),
        ("/tokenize", {"prompt": "hi"}),
        ("/detokenize", {"tokens": [97]}),
    ):
        yield "POST", path, {"model": name, **body}
    for path in ("/generate", "/generate_stream", "/"):
        yield "POST", path, {"inputs": "hi", "parameters": {"adapter_id": name}}
    for path in ("/v1/completions", "/tokenize"):
        yield "POST", path, {"prompt": "hi", "model": f"{name}@1"}
    yield "POST", f"/v1/adapters/{name}/drain", {}
    yield "PATCH", f"/v1/adapters/{name}", {"paused": True}
    yield "POST", "/v1/completions", {"prompt": "hi", "lora_path": name}
    yield "POST", "/v1/completions", {"prompt": "hi", "model": f"base:{name}"}
    for path in (f"/v1/models/{name}", f"/v1/adapters/{name}"):
        yield "GET", path, None
    yield "PATCH", f"/v1/adapters/{name}", {"pinned": True}
    yield "DELETE", f"/v1/adapters/{name}", None
    yield "POST", "/v1/adapters", {"name": name, "path": "x"}
    yield "POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": "x"}
    yield "POST", "/skyrl/v1/load_lora_adapter", {"lora_name": name, "lora_path": "x"}
    yield "POST", "/v1/unload_lora_adapter", {"lora_name": name}


NUM_ROUTES = len(list(routes_of("")))
LISTS = ["/v1/models", "/v1/adapters", "/metrics", "/health", "/load", "/server_info", "/model_info", "/version"]


@pytest.fixture(scope="module")
def tenants(tmp_path_factory, start_one, make_engine):
    """A server whose key's grant the test sets, busy with every adapter."""
    engine = make_engine([])
    for name in NAMES:
        engine.store.tiers[name] = Tier.DEVICE
    patch = pytest.MonkeyPatch()
    patch.setattr(engine_view, "tenants_of", lambda _: [TenantStats(name, 1, 1, 2.0) for name in NAMES])
    patch.setattr(engine_view, "adapter_names_of", lambda _: (NAMES, NAMES))
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("sk-limited-key limited adapters=absent\nsk-everything-key all\nsk-the-admin-key ops admin=yes\n")
    live = start_one(engine, settings={"api_key_file": path, "fair_by": "adapter"})
    for name in NAMES:
        body, headers = {"model": name, "prompt": "hi"}, {"authorization": "Bearer sk-everything-key"}
        assert live.client.post("/v1/completions", json=body, headers=headers).status_code == 200
    yield live
    patch.undo()


def keys_of(live):
    return next(one for one in live.app.user_middleware if "keys" in one.kwargs).kwargs["keys"]


def send(live, grant, method, path, body):
    keys_of(live).replace(Keys([NamedKey("sk-limited-key", "limited", grant)], [NamedKey("sk-the-admin-key", "ops")]))
    headers = {"authorization": "Bearer sk-limited-key", "x-request-id": "same"}
    return live.client.request(method, path, json=body, headers=headers)


HINT = re.compile(r"did you mean '([^']*)'\?|GET /v1/models lists the models there are; an adapter's .*NAME DIR\)")
"""A 404's hint of similar names: only names that the key may use."""


def told(answer, name):
    headers = {key: value for key, value in answer.headers.items() if key != "date"}
    headers.pop("content-length", None)
    return answer.status_code, HINT.sub("HINT", answer.text).replace(name, "NAME"), headers


@pytest.mark.wide
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(grant=grants, name=st.sampled_from(NAMES), absent=st.sampled_from(ABSENT), which=st.integers(0, NUM_ROUTES - 1))
def test_another_s_adapter_is_as_none(tenants, grant, name, absent, which):
    theirs, absents = list(routes_of(name))[which], list(routes_of(absent))[which]
    answer = send(tenants, grant, *theirs)
    if not grant.allows(name):
        assert told(answer, name) == told(send(tenants, grant, *absents), absent), theirs
        hints = [found[1] for found in HINT.finditer(answer.text) if found[1]]
        assert all(grant.allows(None if hint == "base" else hint) for hint in hints)
    elif theirs[1] == "/v1/completions" and theirs[2]["prompt"] == "hi":
        assert answer.status_code == 200


@settings(max_examples=30, deadline=None)
@given(grant=grants, path=st.sampled_from(LISTS))
def test_lists_and_metrics_name_none_of_others(tenants, grant, path):
    text = send(tenants, grant, "GET", path, None).text
    for name in NAMES:
        if not grant.allows(name):
            assert name not in text, path
        elif path in LISTS[:3]:
            assert name in text, path


def test_a_limited_key_is_told_no_one_else_s_load(tenants):
    """Not by a header with its answers (ORCA's), nor by a route."""
    body, headers = {"model": NAMES[0], "prompt": "hi"}, {"endpoint-load-metrics-format": "JSON"}
    for key, grant, is_told in (("limited", Grant(adapters=(NAMES[0],)), False), ("everything", ALL, True)):
        named = [NamedKey("sk-the-key", key, grant)]
        keys_of(tenants).replace(Keys(named, [NamedKey("sk-the-admin-key", "ops")]))
        said = {**headers, "authorization": "Bearer sk-the-key"}
        answer = tenants.client.post("/v1/completions", json=body, headers=said)
        assert answer.status_code == 200 and ("endpoint-load-metrics" in answer.headers) == is_told
        assert tenants.client.get("/load", headers=said).json() == {"server_load": 0}


def test_what_a_limited_key_sees_of_metrics_is_its_own(tenants):
    text = send(tenants, Grant(("acme/*",)), "GET", "/metrics", None).text
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    own = ('model="base"', 'tenant="limited"')
    assert lines and all("acme/" in line or any(one in line for one in own) for line in lines)
    assert 'chorus_adapter_tier{adapter="acme/sql",tier="device"} 1.0' in lines
    whole = send(tenants, Grant(), "GET", "/metrics", None).text
    assert "zeta/law" in whole and "chorus_requests_running" in whole


def test_a_limited_key_s_metrics_are_written_once(tenants, monkeypatch):
    written = []
    render = Metrics.render

    def recorded(self, *args):
        written.append(args)
        return render(self, *args)

    monkeypatch.setattr(Metrics, "render", recorded)
    send(tenants, Grant(("acme/*",)), "GET", "/metrics", None)
    assert len(written) == 1


def test_rights_to_a_name_are_rights_to_its_versions():
    grant = Grant(("acme/*", "solo"))
    assert grant.allows("solo@7") and grant.allows("acme/sql@step-1")
    assert not grant.allows("solo2@7") and not grant.allows("zeta@solo")


def test_the_base_model_can_be_kept_back(tenants):
    def ask(grant):
        return send(tenants, grant, "POST", "/v1/completions", {"prompt": "hi", "model": "base"})

    assert ask(Grant()).status_code == 200
    assert ask(Grant(base=False)).status_code == 404
    models = send(tenants, Grant(("solo",), base=False), "GET", "/v1/models", None).json()["data"]
    assert [one["id"] for one in models] == ["solo"]


@pytest.mark.parametrize("tenants", [False, True])
def test_a_limited_key_changes_no_adapter(start, fake_engine, tmp_path, tenants):
    path = tmp_path / "keys"
    path.write_text("sk-limited-key limited adapters=alice\nsk-everything-key all\n")
    live = start(fake_engine, settings={"api_key_file": path, "tenants_change_adapters": tenants})
    codes = []
    for key in ("sk-limited-key", "sk-everything-key"):
        answer = live.client.delete("/v1/adapters/alice", headers={"authorization": f"Bearer {key}"})
        codes.append(answer.json()["error"]["code"])
    assert codes == ["admin_key_required", "adapter_loading_disabled" if tenants else "admin_key_required"]


def test_requests_at_once(start, fake_engine, tmp_path):
    path = tmp_path / "keys"
    path.write_text("sk-narrow-key narrow requests=1\nsk-wider-key wider\n")
    live = start(fake_engine, settings={"api_key_file": path, "tenant_gateways": "127.0.0.1"})
    narrow, wider = ({"authorization": f"Bearer {key}"} for key in ("sk-narrow-key", "sk-wider-key"))
    body = {"model": "base", "prompt": "hi"}
    fake_engine.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(live.client.post, "/v1/completions", json=body, headers=narrow)
        live.wait_until(lambda: live.app.state.gate.num_generating == 1)
        named = {**narrow, "x-llm-d-inference-fairness-id": "part"}  # a part of the tenant is no way around
        refused = live.client.post("/v1/completions", json=body, headers=named)
        fake_engine.gate.set()
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert live.client.get("/v1/models", headers=narrow).status_code == 200
        assert live.client.post("/v1/completions", json=body, headers=wider).status_code == 200
        assert first.result().status_code == 200
    live.wait_until(lambda: live.app.state.gate.active == 0)
    assert live.client.post("/v1/completions", json=body, headers=narrow).status_code == 200
    live.wait_until(lambda: not live.app.state.gate.request_slots._held)  # noqa: SLF001


def test_tokens_per_minute(start, fake_engine, tmp_path, monkeypatch):
    path = tmp_path / "keys"
    path.write_text("sk-narrow-key narrow tokens_per_minute=6\nsk-wider-key wider\n")
    live = start(fake_engine, settings={"api_key_file": path})
    now = [0.0]
    monkeypatch.setattr(live.app.state.gate.tokens, "_clock", lambda: now[0])

    def ask(key="sk-narrow-key"):
        body = {"model": "base", "prompt": "hello"}  # 6 tokens with the first, and as many of the answer
        return live.client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})

    usage = ask().json()["usage"]
    assert usage["total_tokens"] == 12
    refused = ask()
    assert refused.status_code == 429 and refused.headers["retry-after"] == "70", "7 tokens at a tenth a second"
    assert ask("sk-wider-key").status_code == 200
    now[0] += 70
    assert ask().status_code == 200


def test_a_budget_comes_back_evenly():
    now = [0.0]
    budgets = TokenBudgets(lambda: now[0])
    budgets.check("a", 60)
    budgets.spend("a", 60, 90)
    with pytest.raises(ApiError) as caught:
        budgets.check("a", 60)
    assert caught.value.retry_after == 31
    budgets.check("b", 60)
    now[0] = 31.0
    budgets.check("a", 60)


@given(
    grant=st.builds(
        Grant,
        adapters=st.none() | st.lists(st.sampled_from(GLOBS), min_size=1, max_size=3).map(tuple),
        base=st.booleans(),
        requests=st.none() | st.integers(1, 1000),
        tokens_per_minute=st.none() | st.integers(1, 10**9),
        weight=st.none() | st.sampled_from([0.5, 1.0, 2.0]),
        admin=st.booleans(),
    )
)
def test_a_grant_reads_as_it_is_written(grant):
    if grant.admin and grant.limited:
        with pytest.raises(InvalidKey):
            Grant.parse(grant.words())
    else:
        assert Grant.parse(grant.words()) == grant


@pytest.mark.parametrize(
    "words",
    [
        "adapter=a",
        "base=maybe",
        "requests=0",
        "requests=-1",
        "weight=nan",
        "weight=inf",
        "weight=0",
        "requests=1 requests=2",
        "admin",
        "tokens_per_minute=",
        "admin=yes adapters=a",
    ],
)
def test_a_wrong_right_is_refused(words):
    with pytest.raises(InvalidKey):
        Grant.parse(words.split())


def test_keys_are_made_listed_and_revoked(tmp_path, capsys):
    path = tmp_path / "keys"
    path.write_text("# ours\nsk-an-older-key old\n")
    path.chmod(0o640)

    def command(*words):
        code = main(["keys", *words, "--file", str(path)])
        shown = capsys.readouterr()
        return code, shown.out.strip(), shown.err

    code, key, _ = command("add", "acme", "adapters=acme/*", "base=no", "weight=2", "requests=3")
    assert code == 0 and len(key) == len("ck-") + 16 + 1 + 64
    text = path.read_text()
    assert key not in text and hashlib.sha256(key.encode()).hexdigest() in text and text.startswith("# ours\n")
    assert path.stat().st_mode & 0o777 == 0o640
    keys = Keys(read_keys(path))
    known = keys.identify(f"Bearer {key}")
    assert known.tenant == "acme" and known.grant == Grant(("acme/*",), base=False, requests=3, weight=2.0)
    assert keys.identify("Bearer sk-an-older-key").grant == Grant() and keys.weights == {"acme": 2.0}
    kept = text.splitlines()[-1].split()[0]
    for wrong in (key[:-1] + ("0" if key[-1] != "0" else "1"), kept, kept.rpartition(":")[2]):
        with pytest.raises(ApiError):
            keys.identify(f"Bearer {wrong}")
    one = kept.split(":")[1]
    assert command("list")[1].splitlines() == [
        "(not made here) old",
        f"{one} acme adapters=acme/* base=no requests=3 weight=2",
    ]
    assert command("revoke", "0" * 16)[0] == 1
    assert command("revoke", one)[0] == 0 and path.read_text() == "# ours\nsk-an-older-key old\n"
    new = tmp_path / "new"
    assert main(["keys", "add", "solo", "--file", str(new)]) == 0
    assert new.stat().st_mode & 0o777 == 0o600
    last = read_keys(new)[0].id
    assert main(["keys", "revoke", last, "--file", str(new)]) == 1
    assert f"{last} is the last key of {new}" in capsys.readouterr().err
    assert main(["keys", "add", "two words", "--file", str(new)]) == 1
    assert "the tenant's name is 'two words'" in capsys.readouterr().err


def test_a_hash_stands_for_its_key_alone():
    key, kept = new_key()
    keys = Keys([NamedKey(kept, "a", Grant(("x",)))], [NamedKey("sk-the-admin-key")])
    assert keys.identify(f"Bearer {key}").grant.adapters == ("x",) and keys.tenants[0] == "a"
    with pytest.raises(InvalidKey, match="admin key"):
        Keys([], [NamedKey(kept, "a", Grant(("x",)))])
    with pytest.raises(InvalidKey, match="weights"):
        Keys([NamedKey("sk-one-key", "a", Grant(weight=1)), NamedKey("sk-two-key", "a", Grant(weight=2))])
