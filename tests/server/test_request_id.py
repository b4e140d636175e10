"""A request's id goes out as it came in, if it is one."""

import pytest


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/nothing"])
@pytest.mark.parametrize("sent", ["abc-123", "a" * 128, "Root=1-67a_b:c.d/e+f@g"])
def test_it_is_repeated(shared, path, sent):
    assert shared.client.get(path, headers={"X-Request-Id": sent}).headers["x-request-id"] == sent


@pytest.mark.parametrize("sent", [None, "", "a" * 129, "a b", "<script>", 'a"b', "a\tb"])
def test_what_is_none_is_replaced(shared, sent):
    headers = {} if sent is None else {"X-Request-Id": sent}
    first, second = (shared.client.get("/health", headers=headers).headers["x-request-id"] for _ in range(2))
    assert first != second and first != sent and len(first) == 32


def test_on_answers_streams_and_errors(shared):
    for body, status in (({"prompt": "a"}, 200), ({"prompt": "a", "stream": True}, 200), ({}, 400)):
        response = shared.client.post("/v1/completions", json=body, headers={"X-Request-Id": "same"})
        assert response.status_code == status and response.headers["x-request-id"] == "same"


def test_two_calls_may_share_it(shared):
    body = {"prompt": "ab", "request_id": "mine"}
    answers = [shared.post(**body).json() for _ in range(2)]
    assert [answer["id"] for answer in answers] == ["cmpl-mine"] * 2
    assert shared.post(prompt="ab", rid="other").json()["id"] == "cmpl-other"
