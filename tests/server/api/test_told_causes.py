"""Errors about other servers' routes, fields and encodings name the cause and the way."""

from __future__ import annotations

import gzip
import json

from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from chorus.server.api.generation_builder import _doubled

from ...tiny_tokenizer import save_tokenizer


def message(response):
    return response.json()["error"]["message"]


def test_an_unknown_route_is_a_404_whatever_the_body(shared):
    for body in ({}, {"content": b"x", "headers": {"content-type": "text/plain"}}, {"content": b"{}"}):
        refused = shared.client.post("/v1/nothing/here", **body)
        assert refused.status_code == 404 and "there is no route POST" in message(refused)
    assert shared.client.post("/v1/completions").status_code == 415
    assert shared.client.put("/v1/completions", content=b"x").status_code == 405


def test_what_is_never_served_is_not_repeated_by_clients(shared):
    refused = shared.client.post("/v1/audio/speech", json={})
    assert refused.status_code == 501 and refused.headers["x-should-retry"] == "false"
    assert "x-should-retry" not in shared.client.post("/v1/completions", json={}).headers


def test_a_compressed_body_is_told(shared):
    body = gzip.compress(json.dumps({"prompt": "a"}).encode())
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    refused = shared.client.post("/v1/completions", content=body, headers=headers)
    assert refused.status_code == 415 and refused.headers["accept-encoding"] == "identity"
    assert "content-encoding is 'gzip'; send it uncompressed" in message(refused)
    headers["content-encoding"] = "identity"
    assert shared.client.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers).status_code == 200


def test_tokenizer_info_says_which_flag_serves_it(shared):
    refused = shared.client.get("/tokenizer_info")
    assert refused.status_code == 404 and "--enable-tokenizer-info-endpoint" in message(refused)


def test_sglangs_generate_is_told_from_tgis(shared):
    refused = shared.client.post("/generate", json={"text": "a", "sampling_params": {"max_new_tokens": 3}})
    assert refused.status_code == 422 and refused.json()["param"] == "text"
    assert "SGLang" in refused.json()["error"] and "/v1/completions" in refused.json()["error"]


def test_a_doubled_first_token_is_found(tmp_path):
    save_tokenizer(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])

    class Whole:
        def decode(self, tokens, *, skip_special_tokens):
            return backend.decode(tokens, skip_special_tokens=skip_special_tokens)

    def found(text):
        return _doubled(Whole(), text, backend.encode(text).ids)

    assert found("<s>hello") == "<s>"
    assert found("hello") is None and found("") is None
    backend.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    assert found("<s>hello") is None and found("aab") is None and found("<s><s>a") is None


def test_a_doubled_first_token_is_told_in_a_header(shared, monkeypatch):
    monkeypatch.setattr("chorus.server.api.generation_builder._doubled", lambda *_: "<s>")
    told = shared.post(prompt="<s>a", model="base", max_tokens=1).headers["x-chorus-warning"]
    assert told.startswith("the prompt begins with <s> twice") and "add_special_tokens" in told
    monkeypatch.undo()
    assert "x-chorus-warning" not in shared.post(prompt="a", model="base", max_tokens=1).headers
