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


def test_a_key_is_needed_all_the_same(start, fake_engine):
    live = start(fake_engine, settings={"api_key": ["secret-key"]})
    assert live.post("/v1/embeddings", input="a").status_code == 401


def test_a_body_that_is_no_json_is_still_refused_elsewhere(shared):
    assert shared.client.post("/v1/completions", files={"file": b"a"}).status_code == 415
    assert shared.client.post("/no/such/route", files={"file": b"a"}).status_code == 404
