"""Requests in other servers' forms: the error says which form to send here."""

import pytest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "ab"}]
BODIES = {COMPLETIONS: {"prompt": "ab"}, CHAT: {"messages": USER}}


def error_of(response, status=400):
    assert response.status_code == status, response.text
    return response.json()["error"]


def test_what_is_asked_of_the_wrong_route_names_the_right_one(shared):
    error = error_of(shared.post(COMPLETIONS, messages=USER))
    assert error["param"] == "messages" and "POST /v1/chat/completions" in error["message"]
    error = error_of(shared.post(CHAT, prompt="ab"))
    assert error["param"] == "prompt" and "POST /v1/completions" in error["message"]
    for path in BODIES:
        assert "POST /v1/responses" in error_of(shared.post(path, input="ab"))["message"]
        assert "POST /generate" in error_of(shared.post(path, inputs="ab"))["message"]
    assert "POST /v1/completions" in error_of(shared.post("/v1/responses", prompt="ab"))["message"]
    assert "POST /v1/completions" in error_of(shared.post("/v1/messages", prompt="ab", max_tokens=1))["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("lora_request", {"lora_name": "a"}, "name the adapter as model"),
        ("lora_name", "a", "name the adapter as model"),
        ("functions", [{"name": "f"}], "use tools"),
        ("function_call", "auto", "use tool_choice"),
        ("options", {"num_ctx": 5}, "give the fields in it themselves"),
        ("parameters", {}, "give the fields in it themselves"),
        ("extra_body", {"top_k": 5}, "give the fields in it themselves"),
        ("num_predict", 5, "use max_tokens"),
        ("num_ctx", 5, "--max-model-len"),
        ("stop_sequences", ["a"], "use stop"),
        ("num_return_sequences", 2, "use n"),
        ("guided_decoding", {"json": {}}, "use structured_outputs"),
        ("format", "json", "use response_format"),
        ("keep_alive", "5m", "pinned"),
        ("engine", "a", "it is called model"),
    ],
)
def test_other_servers_fields_are_translated(shared, path, name, value, words):
    error = error_of(shared.post(path, **BODIES[path], **{name: value}))
    assert error["param"] == name and words in error["message"]


@pytest.mark.parametrize(
    ("path", "right"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/completions", "/v1/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/openai/v1/completions", "/v1/completions"),
        ("/responses", "/v1/responses"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/api/chat", "/v1/chat/completions"),
        ("/api/generate", "/v1/completions"),
    ],
)
def test_routes_without_v1_say_where_to_go(shared, path, right):
    error = error_of(shared.post(path, **BODIES[CHAT]), 404)
    assert f"did you mean {right}?" in error["message"]


def test_other_routes_are_listed_and_methods_told(shared):
    error = error_of(shared.client.get("/nothing/like/it"), 404)
    assert "GET /openapi.json" in error["message"]
    error = error_of(shared.client.get(CHAT), 405)
    assert error["message"] == "/v1/chat/completions does not accept GET; it accepts POST"


@pytest.mark.parametrize(
    ("role", "words"), [("assistantt", "did you mean assistant?"), ("robot", "it must be system, developer, user")]
)
def test_roles_that_the_template_does_not_know_are_refused(shared, role, words):
    for path in (CHAT, "/tokenize"):
        error = error_of(shared.post(path, messages=[*USER, {"role": role, "content": "x"}]))
        assert error["param"] == "messages[1].role" and words in error["message"]
    for role in ("developer", "user", "assistant", "tool"):  # this template itself refuses a system message
        messages = [{"role": role, "content": "x"}, *USER]
        assert shared.post(CHAT, messages=messages).status_code == 200


def test_a_mistyped_model_is_told_what_is_meant(shared, start, fake_engine, tmp_path):
    error = error_of(shared.post(COMPLETIONS, model="bse", prompt="ab"), 404)
    assert error["message"] == "there is no model 'bse'; did you mean 'base'?"
    error = error_of(shared.post(COMPLETIONS, model="nothing-like-it", prompt="ab"), 404)
    assert "GET /v1/models" in error["message"]
    assert "did you mean 'base'?" in error_of(shared.client.get("/v1/models/Base"), 404)["message"]
    assert "did you mean 'base'?" in error_of(shared.post("/tokenize", model="basee", prompt="a"), 404)["message"]


def test_the_index_leads_a_browser_to_the_page_and_a_program_to_the_routes(shared):
    asked = shared.client.get("/", headers={"accept": "text/html,*/*"}, follow_redirects=False)
    assert asked.status_code == 307 and asked.headers["location"] == "/ui"
    for accept in ("*/*", "application/json"):
        index = shared.client.get("/", headers={"accept": accept})
        assert index.status_code == 200 and index.headers["vary"] == "accept"
        routes = index.json()["routes"]
        assert routes["chat"] == CHAT and routes["ui"] == "/ui"
    for path in routes.values():
        assert shared.client.request("OPTIONS", path).status_code == 405, "each is there"
