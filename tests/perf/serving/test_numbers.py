"""From bytes to records to numbers, on streams and records made by hand: every number exact."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorus.perf.serving.load import ClientCost
from chorus.perf.serving.record import AnswerReader, EventReader, Record, StreamError
from chorus.perf.serving.summary import Objectives, client_summary, milliseconds, summarise


def chunk(
    text: str | None = None, tokens: int | None = None, finish: str | None = None, *, chat: bool = False
) -> bytes:
    body: dict = {"choices": []}
    if text is not None:
        part = {"delta": {"content": text}} if chat else {"text": text}
        body["choices"] = [{"index": 0, **part, "finish_reason": finish}]
    if tokens is not None:
        body["usage"] = {"prompt_tokens": 9, "completion_tokens": tokens}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def read(*parts: tuple[float, bytes]) -> Record:
    record = Record("m", scheduled=1.0)
    reader = AnswerReader(record)
    for now, data in parts:
        reader.feed(data, now)
    reader.close()
    return record


# -- events


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1), max_size=8), st.data())
def test_events_survive_any_cut(texts, data):
    stream = b"".join(b"data: " + text.encode() + b"\n\n" for text in texts)
    reader, found, at = EventReader(), [], 0
    while at < len(stream):
        size = data.draw(st.integers(1, len(stream) - at))
        found += reader.feed(stream[at : at + size])
        at += size
    assert [event.decode() for event in found] == [text.lstrip(" ") for text in texts if text.lstrip(" ")]


def test_comments_other_fields_and_crlf_are_understood():
    reader = EventReader()
    assert reader.feed(b": ping\n\nevent: x\ndata: 1\n\ndata:2\ndata: 3\n\n") == [b"1", b"2\n3"]
    assert reader.feed(b"data: 4\r\n\r") == []
    assert reader.feed(b"\ndata: 5\n\n") == [b"4", b"5"]


# -- answers


@pytest.mark.parametrize("chat", [False, True])
def test_an_answer_counted_as_it_goes(chat):
    record = read(
        (1.5, chunk("", 0, chat=chat)),  # a role, no token yet
        (2.0, chunk("ab", 1, chat=chat)),
        (2.5, chunk("", 2, chat=chat)),  # text held back
        (3.0, chunk("cd", 4, chat=chat)),
        (3.5, chunk("", 5, "stop", chat=chat) + chunk(None, 5)),
        (4.0, DONE),
    )
    assert record.token_times == [2.0, 2.5, 3.0, 3.5]
    assert (record.text, record.output_tokens, record.prompt_tokens, record.counted) == ("abcd", 5, 9, True)
    assert (record.ttft, record.tpot, record.e2e) == (1.0, 1.5 / 4, 2.5)
    assert record.itl == [0.5, 0.5, 0.5]
    assert record.finish_reason == "stop"


def test_an_answer_counted_at_its_end():
    record = read((2.0, chunk("a")), (3.0, chunk("b")), (4.0, chunk("", None, "stop")), (5.0, chunk(None, 7) + DONE))
    assert record.token_times == [2.0, 3.0]
    assert (record.output_tokens, record.counted, record.ended) == (7, True, 4.0)


def test_an_answer_that_nobody_counts():
    record = read((2.0, chunk("a")), (3.0, chunk("b", None, "length")))
    assert (record.output_tokens, record.counted, record.e2e) == (2, False, 2.0)


def test_an_empty_answer_has_a_first_token_all_the_same():
    record = read((2.0, chunk("", None, "stop")), (3.0, chunk(None, 1) + DONE))
    assert (record.ttft, record.e2e, record.output_tokens, record.tpot) == (1.0, 1.0, 1, None)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"data: {oops\n\n", "malformed"),
        (b"data: [1]\n\n", "malformed"),
        (b'data: {"choices": [3]}\n\n', "malformed"),
        (b'data: {"error": {"message": "out of pages"}}\n\n', "stream error"),
        (b'data: {"error": "out of pages"}\n\n', "stream error"),
        (chunk("a"), "cut short"),
        (DONE, "cut short"),
        (b"", "cut short"),
    ],
)
def test_what_is_no_answer_has_a_kind(data, kind):
    with pytest.raises(StreamError) as caught:
        read((2.0, data))
    assert caught.value.kind == kind


# -- numbers


def done(model: str, scheduled: float, times: list[float], tokens: int, sent: float | None = None) -> Record:
    sent = scheduled if sent is None else sent
    return Record(model, scheduled, sent, times, times[-1], 10, tokens, True)


RECORDS = [
    done("a", 0.0, [0.1, 0.2, 0.3], 3),
    done("a", 1.0, [1.4, 1.6], 5, sent=1.25),
    done("b", 2.0, [2.2], 1),
    Record("b", 3.0, 3.0, ended=4.0, error="http 503"),
    Record("b", 3.0, 3.0, [3.1], ended=3.5, error="cut short"),
]


def test_the_summary_is_exact():
    found = summarise(RECORDS, Objectives(ttft=250.0, tpot=75.0))
    assert (found["requests"], found["completed"], found["seconds"]) == (5, 3, 4.0)
    assert found["errors"] == {"cut short": 1, "http 503": 1}
    assert (found["prompt_tokens"], found["output_tokens"]) == (30, 9)
    assert found["requests_per_second"] == 3 / 4
    assert found["output_tokens_per_second"] == 9 / 4
    assert found["total_tokens_per_second"] == 39 / 4
    assert found["ttft_ms"]["p50"] == pytest.approx(200)
    assert found["ttft_ms"]["mean"] == pytest.approx(700 / 3)
    assert found["tpot_ms"]["mean"] == pytest.approx((100 + 50) / 2), "an answer of one token has none"
    assert found["itl_ms"]["max"] == pytest.approx(200)
    assert found["e2e_ms"]["p99"] == pytest.approx(np.percentile([300, 600, 200], 99))
    assert found["client_delay_ms"]["max"] == pytest.approx(250), "what the client let wait counts as latency, too"
    assert found["slo_attainment"] == {"ttft": 2 / 5, "tpot": 2 / 5, "all": 1 / 5}
    assert found["goodput_requests_per_second"] == 1 / 4
    assert found["goodput_output_tokens_per_second"] == 1 / 4


def test_each_model_has_its_own_numbers():
    found = summarise(RECORDS, Objectives(e2e=400))
    a, b = found["models"]["a"], found["models"]["b"]
    assert (a["requests"], a["errors"], a["slo_attainment"]["all"]) == (2, {}, 1 / 2)
    assert (b["requests"], b["completed"], b["tpot_ms"]) == (3, 1, None)
    assert b["output_tokens_per_second"] == 1 / 4, "over the time of the whole load"
    assert sum(part["requests"] for part in found["models"].values()) == found["requests"]


def test_nothing_but_errors_is_a_summary_too():
    found = summarise(RECORDS[3:], Objectives(ttft=1))
    assert (found["completed"], found["ttft_ms"], found["slo_attainment"]["all"]) == (0, None, 0.0)
    assert "slo_attainment" not in summarise(RECORDS, Objectives())


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50))
def test_spreads_are_ordered_and_do_not_depend_on_order(values):
    found = milliseconds(values)
    shuffled = milliseconds(random.Random(0).sample(values, len(values)))
    for name in ("p50", "p90", "p99", "min", "max"):
        assert found[name] == shuffled[name]
    assert found["min"] <= found["p50"] <= found["p90"] <= found["p99"] <= found["max"]
    assert found["max"] == max(values) * 1e3


def test_a_client_that_falls_behind_warns():
    calm = client_summary(ClientCost([0.001] * 100, cpu=1.0, wall=10.0, chunks=1000), RECORDS[:3])
    assert (calm["warnings"], calm["cpu_share"], calm["cpu_us_per_chunk"]) == ([], 0.1, 1000.0)
    busy = client_summary(ClientCost([0.001] * 50 + [0.5] * 50, cpu=9.5, wall=10.0, chunks=0), RECORDS[:3])
    assert len(busy["warnings"]) == 2
    assert busy["cpu_us_per_chunk"] is None
