"""The load client against a scripted server: everything sent, everything accounted for. No test looks at a time."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import pytest

from chorus.perf.serving.__main__ import main
from chorus.perf.serving.client import Client
from chorus.perf.serving.load import run_load, warm_up
from chorus.perf.serving.plan import PlannedRequest
from chorus.perf.serving.record import LoadError

pytest.importorskip("aiohttp")


def send(url: str, plan: list[PlannedRequest], endpoint: str = "completions", timeout: float = 20.0, **options):
    extra = {"temperature": 0, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}

    async def run():
        async with Client(url, endpoint, timeout=timeout, api_key="secret", extra=extra) as client:
            return await run_load(client, plan, **options)

    return asyncio.run(run())


def request(at: float, model: str = "base", tokens: int = 3, **extra) -> PlannedRequest:
    return PlannedRequest(at, model, "hi", tokens, extra)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_every_request_is_sent_and_recorded_in_order(scripted, endpoint):
    plan = [request(0.002 * index, ("base", "left")[index % 2], 1 + index % 4) for index in range(40)]
    outcome = send(scripted.url, plan, endpoint)
    records = outcome.records
    assert len(scripted.bodies) == 40
    assert [(r.model, r.scheduled, r.output_tokens) for r in records] == [(p.model, p.at, p.max_tokens) for p in plan]
    for record in records:
        assert record.ok, record.detail
        assert record.text == "x" * record.output_tokens
        assert len(record.token_times) == record.output_tokens
        assert record.sent < record.token_times[0]
        assert record.token_times == sorted(record.token_times)
        assert record.token_times[-1] <= record.ended
    assert outcome.cost.chunks == sum(p.max_tokens for p in plan)


def test_the_body_is_what_servers_know(scripted):
    send(scripted.url, [request(0, "left", 2, ignore_eos=True)])
    send(scripted.url, [request(0)], "chat")
    completion, chat = scripted.bodies
    assert completion == {
        "model": "left", "prompt": "hi", "max_tokens": 2, "stream": True, "temperature": 0, "ignore_eos": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }  # fmt: skip
    assert chat["messages"] == [{"role": "user", "content": "hi"}]
    assert scripted.paths == ["/v1/completions", "/v1/chat/completions"]


def test_every_failure_has_a_kind_and_none_is_dropped(scripted):
    scripted.fail.update({"left": "http", "right": "event", "c": "cut", "d": "garbage"})
    expected = {"base": "", "left": "http 503", "right": "stream error", "c": "cut short", "d": "malformed"}
    outcome = send(scripted.url, [request(0.001 * i, model) for i, model in enumerate([*expected] * 2)])
    assert Counter((r.model, r.error) for r in outcome.records) == dict.fromkeys(expected.items(), 2)
    assert {r.detail for r in outcome.records if r.model in ("left", "right")} == {"no room", "out of pages"}
    assert all(r.ended >= r.sent for r in outcome.records)


def test_an_answer_that_does_not_come_is_a_timeout(scripted):
    scripted.fail["base"] = "hang"
    (record,) = send(scripted.url, [request(0)], timeout=0.3).records
    assert (record.error, record.detail) == ("timeout", "no complete answer within 0.3 s")


def test_no_server_is_an_error_of_every_request():
    outcome = send("http://127.0.0.1:9", [request(0), request(0)])
    assert [r.error for r in outcome.records] == ["connect", "connect"]


def test_the_load_is_open_and_a_limit_closes_it(scripted):
    scripted.fail["base"], scripted.awaited = "together", 8
    outcome = send(scripted.url, [request(0) for _ in range(8)])
    assert all(r.ok for r in outcome.records), "no answer is waited for before the next request is sent"
    scripted.fail.clear()
    scripted.most_open = 0
    outcome = send(scripted.url, [request(0, tokens=5) for _ in range(9)], max_concurrency=2)
    assert scripted.most_open <= 2
    assert all(r.ok for r in outcome.records)
    assert max(r.client_delay for r in outcome.records) > 0


def test_warm_up_is_told_of_failures(scripted):
    scripted.fail["left"] = "http"

    async def run():
        async with Client(
            scripted.url, "completions", timeout=5, api_key=None, extra={"stream_options": {"include_usage": True}}
        ) as client:
            return await warm_up(client, [request(0), request(0, "left")])

    assert [record.error for record in asyncio.run(run())] == ["", "http 503"]


# -- the command


def bench(capsys, *argv: str) -> tuple[int, str, dict]:
    code = main(list(argv))
    *text, last = capsys.readouterr().out.splitlines()
    return code, "\n".join(text), json.loads(last)


FAST = ("--rate", "inf", "--input-len", "8", "--output-len", "4", "--warm-up", "1")


def test_the_command_measures_and_writes(scripted, capsys, tmp_path):
    code, text, found = bench(
        capsys, scripted.url, *FAST, "--num-requests", "30", "--slo-ttft", "60000", "--out", str(tmp_path)
    )
    assert code == 0
    load = found["load"]
    assert (load["completed"], load["output_tokens"], load["slo_attainment"]["all"]) == (30, 120, 1.0)
    assert set(load["models"]) == {"left", "right"}
    assert "30 of 30 requests" in text
    assert json.loads((tmp_path / "serving.json").read_text()) == found
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert len(lines) == 30
    assert len(scripted.bodies) == 31, "and one to warm up"


def test_failures_show_and_fail_the_command(scripted, capsys):
    scripted.fail["left"] = "event"
    code, text, found = bench(capsys, scripted.url, *FAST, "--num-requests", "20", "--popularity", "distinct")
    assert code == 1
    assert found["load"]["errors"] == {"stream error": 10}
    assert "stream error: out of pages" in text


def test_a_workload_file_is_served_by_the_adapters_there_are(scripted, capsys, tmp_path):
    spec = tmp_path / "load.json"
    lengths = {"kind": "laws", "prompt": {"law": "constant", "tokens": 100}, "output": {"law": "constant", "tokens": 4}}
    fields = {"requests": 9, "arrivals": {"process": "constant", "rate": 1000.0}, "popularity": {"kind": "distinct"},
              "adapters": {"count": 3}, "lengths": lengths}  # fmt: skip
    spec.write_text(json.dumps(fields))
    code, _, found = bench(capsys, scripted.url, "--workload", str(spec), "--set", "requests=6")
    assert code == 0
    assert found["load"]["requests"] == 6
    assert found["substituted_adapters"] == 3
    assert found["shortened_requests"] == 6, "100 + 4 tokens do not fit in 64"
    assert [body["model"] for body in scripted.bodies[-6:]].count("left") == 4


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--adapters", "nobody"), "has no model 'nobody'; it has base, left, right"),
        (("--prompts", "skills"), "needs the built-in model"),
        (("--burstiness", "-1"), "--burstiness is -1"),
        (("--popularity", "uniform:3"), "--popularity is 'uniform:3'"),
        (("--popularity", "pareto"), "popularity"),
        (("--set", "seed=1"), "give one with --workload"),
        (("--workload", "/nowhere.toml"), "/nowhere.toml"),
        (("--tokenizer", "/nowhere"), "--tokenizer /nowhere can't be read"),
    ],
)
def test_what_is_asked_wrongly_is_said(scripted, capsys, argv, message):
    assert main([scripted.url, *argv]) == 2
    assert message in capsys.readouterr().err
    assert not scripted.bodies


def test_a_server_that_is_not_there_is_said(capsys):
    assert main(["http://127.0.0.1:9"]) == 2
    assert "can't be reached" in capsys.readouterr().err


def test_a_model_that_can_not_answer_is_said_before_the_load(scripted, capsys):
    scripted.fail["base"] = "http"
    assert main([scripted.url, "--num-requests", "50"]) == 2
    assert "a first request to base failed: http 503: no room" in capsys.readouterr().err
    assert len(scripted.bodies) == 3


def test_models_must_be_a_list(scripted):
    async def run():
        async with Client(scripted.url + "/v1/", "completions", timeout=5, api_key=None, extra={}) as client:
            assert [card["id"] for card in await client.models()] == ["base", "left", "right"]
        async with Client(scripted.url + "/nothing", "completions", timeout=5, api_key=None, extra={}) as client:
            await client.models()

    with pytest.raises(LoadError, match="answered 404"):
        asyncio.run(run())
