"""The format of the log's lines, and their data of requests."""

from __future__ import annotations

import json
import logging
import re
from contextlib import contextmanager

import httpx
import pytest

from chorus.server.log_lines import JsonLines, TextLines, about_request, note_request


@contextmanager
def written(formatter):
    """Gives the lines that are logged meanwhile, by anything."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(handler.format(record))
    handler.setFormatter(formatter)
    root, ours = logging.getLogger(), [logging.getLogger(name) for name in ("chorus", "chorus.access")]
    before = [(one, one.level) for one in ours]
    root.addHandler(handler)
    for one in ours:
        one.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        root.removeHandler(handler)
        for one, level in before:
            one.setLevel(level)


def test_a_line_has_time_level_logger_and_its_request():
    log = logging.getLogger("chorus.some")
    with written(TextLines()) as lines, about_request("abc"):
        note_request(tenant="acme corp", model="base")
        log.warning("it %s", "failed", extra={"status": 500, "duration": 0.12345678})
    (line,) = lines
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} WARNING chorus\.some: it failed "
        r'\[request_id=abc tenant="acme corp" model=base status=500 duration=0\.123457\]',
        line,
    )


def test_without_a_request_a_line_is_as_ever():
    with written(TextLines()) as lines:
        logging.getLogger("some.library").warning("hello")
    assert lines[0].endswith(" WARNING some.library: hello")


def test_json_lines_hold_whatever_is_logged():
    with written(JsonLines()) as lines, about_request("abc"):
        note_request(model='a"\n]')
        try:
            raise ValueError("é\n")
        except ValueError:
            logging.getLogger("chorus.x").exception("a\nb %d", 5)
    (line,) = lines
    found = json.loads(line)
    assert "\n" not in line and line.isascii()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found.pop("time"))
    assert found.pop("exception").endswith("ValueError: é\n")
    assert found == {"level": "ERROR", "logger": "chorus.x", "message": "a\nb 5", "request_id": "abc", "model": 'a"\n]'}


def test_no_client_writes_lines_of_its_own():
    with written(TextLines()) as lines, about_request("abc"):
        note_request(model="x\n2026-01-01 00:00:00,000 INFO chorus.audit: the keys were read anew")
        logging.getLogger("chorus.x").info("served")
    assert len(lines[0].splitlines()) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_s_line_tells_who_what_and_how_long(start, fake_engine, tmp_path, stream):
    keys = tmp_path / "keys"
    keys.write_text("sk-a-long-key acme\n")
    live = start(fake_engine, settings={"api_key_file": keys, "access_log": True})
    headers = {"authorization": "Bearer sk-a-long-key", "x-request-id": "mine"}
    with written(JsonLines()) as lines:
        body = {"model": "alice", "prompt": "abc", "stream": stream}
        assert live.client.post("/v1/completions", json=body, headers=headers).status_code == 200
        assert live.client.post("/v1/completions", json={**body, "model": "nobody"}, headers=headers).status_code == 404
        assert httpx.get(f"{live.url}/v1/models").status_code == 401
        live.wait_until(lambda: sum(" from " in line for line in lines) >= 3, 30)  # lines are written after answers
    told = [json.loads(line) for line in lines]
    told = [line for line in told if line["logger"] == "chorus.access" and " from " in line["message"]]
    known = {"request_id": "mine", "tenant": "acme"}
    first, second, third = (
        {name: line.get(name) for name in ("request_id", "tenant", "model", "status")} for line in told
    )
    assert first == {**known, "model": "alice", "status": 200} and told[0]["message"].startswith("POST /v1/completions")
    assert second == {**known, "model": "nobody", "status": 404}
    assert third["status"] == 401 and third["tenant"] is None and third["request_id"]
    assert all(0 < line["duration"] < 60 for line in told)
