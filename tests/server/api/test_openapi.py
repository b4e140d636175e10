"""The OpenAPI document describes the routes' fields, and allows the requests of clients."""

import json
import re
from pathlib import Path

import jsonschema
import pytest

from chorus.server.api.absent import ABSENT
from chorus.server.api.openapi import BODIES

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def described(shared):
    response = shared.client.get("/openapi.json")
    assert response.status_code == 200 and response.headers["content-type"] == "application/json"
    return response.json()


def validator(described, path, method="post"):
    schema = described["paths"][path][method]["requestBody"]["content"]["application/json"]["schema"]
    return jsonschema.Draft202012Validator({**schema, "components": described["components"]})


def test_every_route_but_the_absent_ones_is_there(described):
    assert described["openapi"].startswith("3.1")
    paths = described["paths"]
    assert {"/health", "/metrics", "/v1/models/{name}", "/openapi.json"} <= paths.keys()
    absent = {(method.lower(), path) for path, (methods, _) in ABSENT.items() for method in methods}
    operations = {(method, path) for path, found in paths.items() for method in found}
    assert not operations & absent and not any(path.startswith("/ui") for path in paths)
    assert ("get", "/lora-adapters") in operations, "only its POST is absent"
    for method, path in BODIES:
        assert "requestBody" in paths[path][method.lower()], path
    names = [operation["operationId"] for path in paths.values() for operation in path.values()]
    assert len(names) == len(set(names))


def test_every_route_is_on_a_page(described):
    pages = "".join(page.read_text("utf-8") for page in (ROOT / "docs").rglob("*.md"))
    told = {re.sub(r"\{\w+\}|NAME|ID", "…", path) for path in re.findall(r"/[\w/{}.-]*", pages)}
    untold = sorted(path for path in described["paths"] if re.sub(r"\{\w+\}", "…", path) not in told)
    assert not untold, "add them to docs/reference/http-api.md"


def test_queries_are_those_of_their_method(described):
    def queries(path, method):
        return [
            each["name"] for each in described["paths"][path][method].get("parameters", ()) if each["in"] == "query"
        ]

    assert queries("/pause", "post") == ["mode", "clear_cache", "wait_for_inflight_requests"]
    assert queries("/wake_up", "post") == ["tags"] and not queries("/resume", "post")
    assert queries("/v1/adapters/{name}", "delete") == ["force"]
    assert not queries("/v1/adapters/{name}", "get") and not queries("/v1/models", "get")


def test_every_reference_leads_somewhere(described):
    def refs(value):
        if isinstance(value, dict):
            yield from [value["$ref"]] if isinstance(value.get("$ref"), str) else []
            for each in value.values():
                yield from refs(each)
        elif isinstance(value, list):
            for each in value:
                yield from refs(each)

    found = set(refs(described["paths"])) | set(refs(described["components"]["schemas"]))
    assert "#/components/schemas/ChatCompletionRequest" in found
    for ref in found:
        assert ref.removeprefix("#/components/schemas/") in described["components"]["schemas"], ref


def test_bodies_are_the_ones_that_are_taken(shared, described):
    user = [{"role": "user", "content": "hi"}]
    bodies = {
        "/v1/completions": {"model": "base", "prompt": "abc", "max_tokens": 3},
        "/v1/chat/completions": {"model": "base", "messages": user, "max_tokens": 3, "stop": ["x"]},
        "/v1/responses": {"model": "base", "input": "abc", "max_output_tokens": 3},
        "/v1/messages": {"model": "base", "messages": user, "max_tokens": 3},
        "/generate": {"inputs": "abc", "parameters": {"max_new_tokens": 3}},
        "/tokenize": {"prompt": "abc"},
        "/detokenize": {"tokens": [97]},
    }
    for path, body in bodies.items():
        validator(described, path).validate(body)
        assert shared.post(path, **body).status_code == 200, path
        missing = {name: body[name] for name in body if name not in ("prompt", "messages", "input", "inputs", "tokens")}
        if path != "/v1/completions":  # whose prompt may be of four kinds
            assert not validator(described, path).is_valid(missing), path
        assert shared.post(path, **missing).status_code in (400, 422), path
    odd = {**bodies["/v1/chat/completions"], "temprature": 1}
    assert not validator(described, "/v1/chat/completions").is_valid(odd)
    assert json.loads(shared.post("/v1/chat/completions", **odd).text)["error"]["code"] == "unknown_parameter"
