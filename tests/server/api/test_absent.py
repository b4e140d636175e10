"""Missing routes explain why, and name an alternative."""

import pytest

from chorus.server.api.absent import ABSENT


@pytest.mark.parametrize("path", ABSENT)
def test_the_reason_is_told(shared, path):
    methods, reason = ABSENT[path]
    for method in methods:
        for more in ({"json": {"input": "a"}}, {"files": {"file": b"a"}}) if method == "POST" else ({},):
            response = shared.client.request(method, path.replace("{id}", "a"), **more)
            error = response.json()["error"]
            assert response.status_code == 501 and error["code"] == "not_supported" and reason in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "says"),
    [
        ("POST", "/v1/images/generations", "makes no images; GET /health tells whether it reads"),
        ("POST", "/release_memory_occupation", "POST /sleep"),
        ("POST", "/release_kv_cache_memory", "POST /sleep"),
        ("POST", "/resume_memory_occupation", "POST /wake_up"),
        ("POST", "/collective_rpc", "no methods of workers can be called"),
        ("POST", "/abort_requests", "DELETE /v1/adapters/NAME?force=true"),
        ("POST", "/update_weight_version", "NAME@LABEL"),
        ("GET", "/weight_info", "GET /v1/adapters"),
        ("POST", "/weight_checker", "content_hash"),
        *(
            ("POST", path, "load each version with POST /v1/load_lora_adapter")
            for path in (
                "/batch_update_named_params",
                "/close_communicator",
                "/shutdown_weight_transfer_engine",
                "/start_draft_weight_update",
                "/update_weights_from_ipc",
            )
        ),
    ],
)
def test_the_reason_is_the_route_s_own(shared, method, path, says):
    answer = shared.client.request(method, path)
    assert answer.status_code == 501 and says in answer.json()["error"]["message"], answer.text
    assert ("can't be replaced" in answer.text) == ("load each version" in says)


@pytest.mark.parametrize("path", ["/abort_requestz", "/update_weights_from_disc", "/v1/v1/files", "/v1/update_weights"])
def test_no_route_that_is_absent_is_suggested(shared, path):
    """Only one that is served helps."""
    message = shared.client.post(path).json()["error"]["message"]
    assert "did you mean" not in message or not any(f"mean {one}?" in message for one in ABSENT)
    assert "there is no route" in message


def test_a_key_is_needed_all_the_same(start, fake_engine):
    live = start(fake_engine, settings={"api_key": ["secret-key"]})
    assert live.post("/v1/embeddings", input="a").status_code == 401


def test_a_body_that_is_no_json_is_still_refused_elsewhere(shared):
    assert shared.client.post("/v1/completions", files={"file": b"a"}).status_code == 415
    assert shared.client.post("/no/such/route", files={"file": b"a"}).status_code == 404
