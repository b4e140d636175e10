"""The real thing: `chorus cluster up` with two replicas of the built-in model, asked over HTTP, and one is killed."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from chorus.server.access.shared_bounds import MERGE_SECONDS
from tests.server.cluster.certificates import new_authority
from tests.server.cluster.conftest import SECONDS, cluster_up, running

pytestmark = pytest.mark.slow  # `test_cluster_composed.py` has the cluster of a plain `pytest`

NAMES = (None, "reverse", "upper", "count")
TOKENS = 120

UNFINISHED = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer sk-narrow-key\r\n"
    b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{"
)
"""A request that is in progress, as most of its body is still to come."""


def body(index: int) -> dict[str, object]:
    """A long answer, greedy or drawn, of the base model or of an adapter."""
    model = NAMES[index % len(NAMES)] or "chorus-builtin"
    rest = {"temperature": 0.9, "seed": index} if index % 2 else {"temperature": 0, "logprobs": 1}
    return {
        "model": model,
        "prompt": f"hello world {index}\n",
        "max_tokens": TOKENS,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
        **rest,
    }


def read(client: httpx.Client, index: int, began: threading.Semaphore | None = None) -> tuple[list[int], str, str]:
    """Token ids, text and finish reason of a streamed answer; `began` is released at its first token."""
    tokens: list[int] = []
    text, finish = "", ""
    with client.stream("POST", "/v1/completions", json=body(index)) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            (choice,) = event["choices"]
            if not tokens and began is not None:
                began.release()
            tokens += choice["token_ids"]
            text += choice["text"]
            finish = choice["finish_reason"] or finish
    return tokens, text, finish


def test_answers_go_on_as_if_no_replica_had_been_killed(up):
    count = 6
    with ThreadPoolExecutor(count) as threads:
        unbroken = list(threads.map(lambda index: read(up.client, index), range(count)))
        assert all(len(tokens) == TOKENS and finish == "length" for tokens, _, finish in unbroken)
        while up.metric("chorus_requests_moved_total") == 0:  # an answer may end before the signal comes
            up.wait_until(lambda: up.metric("chorus_replicas_up") == 2)
            began = threading.Semaphore(0)
            answers = [threads.submit(read, up.client, index, began) for index in range(count)]
            for _ in range(count // 2):
                began.acquire()
            killed = up.replicas[0]
            os.kill(killed, signal.SIGKILL)
            assert [answer.result() for answer in answers] == unbroken
            # all may have ended before it died: it must be known to be gone before another one is killed
            up.wait_until(lambda killed=killed: killed not in up.replicas and len(up.replicas) == 2)
    assert up.client.get("/health").status_code == 200
    up.wait_until(lambda: up.metric("chorus_replicas_up") == 2)


def test_answers_leave_a_replica_that_drains_and_their_clients_do_not_notice(up):
    up.wait_until(lambda: up.metric("chorus_replicas_up") == 2)
    count = 6
    with ThreadPoolExecutor(count) as threads:
        unbroken = list(threads.map(lambda index: read(up.client, index), range(count)))
        before, began = up.replicas, threading.Semaphore(0)
        answers = [threads.submit(read, up.client, index, began) for index in range(count)]
        for _ in range(count // 2):
            began.acquire()
        os.kill(before[0], signal.SIGTERM)
        assert [answer.result() for answer in answers] == unbroken
    up.wait_until(lambda: not running(before[0]) and before[1] in up.replicas)
    up.wait_until(lambda: up.metric("chorus_replicas_up") == 2)


def test_answers_wait_for_a_replica_where_all_have_died(up):
    up.wait_until(lambda: up.metric("chorus_replicas_up") == 2)
    unbroken = read(up.client, 0)
    with ThreadPoolExecutor(2) as threads:
        began = threading.Semaphore(0)
        answer = threads.submit(read, up.client, 0, began)
        began.acquire()
        # the one that runs it last: a request that sees two die ends
        for name in sorted(("r0", "r1"), key=lambda name: up.metric(f'chorus_replica_requests{{replica="{name}"}}')):
            above = up.metric("chorus_replicas_up") - 1
            os.kill(next(pid for pid in up.replicas if f"/{name}.sock" in up.command(pid)), signal.SIGKILL)
            up.wait_until(lambda above=above: up.metric("chorus_replicas_up") == above)
        assert up.client.get("/health").status_code == 503
        late = threads.submit(read, up.client, 0)
        assert [answer.result(), late.result()] == [unbroken] * 2
    up.wait_until(lambda: up.metric("chorus_replicas_up") == 2)


def test_replicas_are_processes_that_say_what_they_are_in_a_private_directory(up):
    up.wait_until(lambda: len(up.replicas) == 2)
    for pid in up.replicas:
        arguments = (Path("/proc") / str(pid) / "cmdline").read_bytes().decode().split("\0")
        socket = Path(arguments[arguments.index("--listen") + 1].removeprefix("unix:"))
        assert socket.parent.stat().st_mode & 0o777 == 0o700
        assert not any("secret" in argument and len(argument) == 64 for argument in arguments)


def test_a_reload_is_never_stale_and_answers_in_progress_keep_what_they_began_with(up, roots):
    def load(name: str, **more: object) -> None:
        body = {"lora_name": "mine", "lora_path": str(roots / name), **more}
        assert up.client.post("/v1/load_lora_adapter", json=body).status_code == 200

    def ask() -> str:
        body = {"model": "mine", "prompt": "abc\n", "max_tokens": 8, "temperature": 0}
        return up.client.post("/v1/completions", json=body).json()["choices"][0]["text"]

    load("upper")
    assert ask() == "ABC"
    for name, answer in (("reverse", "cba"), ("upper", "ABC"), ("reverse", "cba")):
        load(name, load_inplace=True)
        with ThreadPoolExecutor(4) as threads:
            assert set(threads.map(lambda _: ask(), range(8))) == {answer}
    assert up.client.post("/v1/unload_lora_adapter", json={"lora_name": "mine"}).status_code == 200
    body = {"model": "mine", "prompt": "abc\n", "max_tokens": 8}
    assert up.client.post("/v1/completions", json=body).status_code == 404


def test_a_pinned_adapter_is_resident_at_all_replicas_and_again_at_one_that_was_killed(up):
    def shown() -> str:
        lines = up.client.get("/metrics").text.splitlines()
        return next((line for line in lines if line.startswith("vllm:lora_adapter_loaded") and '"upper"' in line), "")

    up.wait_until(lambda: up.metric("chorus_replicas_up") == 2)
    state = up.client.patch("/v1/adapters/upper", json={"pinned": True}).raise_for_status().json()
    assert state["pinned"]
    up.wait_until(lambda: 'level="gpu"' in shown() and 'pinned="true"' in shown())
    os.kill(up.replicas[0], signal.SIGKILL)
    up.wait_until(lambda: up.metric("chorus_replicas_up") == 1)
    up.wait_until(lambda: up.metric("chorus_replicas_up") == 2 and 'pinned="true"' in shown())
    assert not up.client.patch("/v1/adapters/upper", json={"pinned": False}).json()["pinned"]
    assert 'pinned="false"' in shown()
    assert up.client.patch("/v1/adapters/nothing", json={"pinned": True}).status_code == 404


def test_a_limited_key_knows_no_adapter_but_its_own_and_its_bounds_hold(up):
    def ask(model: str, key: str = "limited", **more: object) -> httpx.Response:
        body = {"model": model, "prompt": "abc\n", "max_tokens": 8, "temperature": 0, **more}
        return up.client.post("/v1/completions", json=body, headers={"authorization": f"Bearer sk-{key}-key"})

    def told(name: str) -> tuple[int, str]:
        answer = ask(name)
        return answer.status_code, answer.text.replace(name, "NAME")

    limited = {"authorization": "Bearer sk-limited-key"}
    assert ask("upper").json()["choices"][0]["text"] == "ABC"
    assert up.client.post("/v1/completions", json=body(1)).status_code == 200  # reverse is known, and resident
    assert told("reverse") == told("nothing") == told("chorus-builtin") and told("reverse")[0] == 404
    for path in ("/v1/models", "/v1/adapters", "/metrics"):
        text = up.client.get(path, headers=limited).text
        assert "upper" in text and "reverse" not in text, path
    refused = None
    while refused is None or refused.status_code == 200:  # where the first has ended by then
        more = {**body(2), "model": "upper"}
        with up.client.stream("POST", "/v1/completions", json=more, headers=limited) as first:
            next(first.iter_lines())
            refused = ask("upper")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert [ask("upper", "frugal").status_code for _ in range(2)] == [200, 429]


def test_an_adapter_that_a_request_names_comes_from_its_store_to_all_replicas(up, store):
    def ask(name: str) -> str:
        body = {"model": name, "prompt": "abc\n", "max_tokens": 8, "temperature": 0}
        return up.client.post("/v1/completions", json=body).json()["choices"][0]["text"]

    before = store.asked["/upper/adapter_model.safetensors"]  # other clusters fetch it, too
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(ask, ["stored/upper"] * 16)) == {"ABC"}
    assert store.asked["/upper/adapter_model.safetensors"] == before + 1
    assert "stored/upper" in [one["name"] for one in up.client.get("/v1/adapters").json()["data"]]
    body = {"model": "stored/none", "prompt": "abc\n", "max_tokens": 8}
    assert up.client.post("/v1/completions", json=body).status_code == 404


def test_a_path_outside_the_roots_and_a_broken_adapter_are_refused_as_by_one_server(up, roots):
    (roots / "broken").mkdir()
    (roots / "broken" / "adapter_config.json").write_text("{}")
    for path, status in ((roots.parent, 403), (roots / "broken", 400), (roots / "nowhere", 404)):
        body = {"lora_name": "bad", "lora_path": str(path)}
        assert up.client.post("/v1/load_lora_adapter", json=body).status_code == status
    listed = up.client.get("/v1/adapters").json()
    assert "bad" not in [one["name"] for one in listed["data"]]


def test_a_push_that_one_replica_can_not_read_fails_by_its_name_and_the_old_version_goes_on(up, roots):
    def push(path):
        return up.client.post("/v1/load_lora_adapter", json={**named, "lora_path": str(roots / path)})

    up.wait_until(lambda: up.metric("chorus_replicas_up") == 2)
    named = {"lora_name": "pushed", "load_inplace": True}
    assert push("upper").status_code == 200
    shutil.copytree(roots / "reverse", roots / "pushed-later")
    config = json.loads((roots / "pushed-later" / "adapter_config.json").read_text())
    (roots / "pushed-later" / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 3}))
    pid = up.replicas[1]
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (8, hard))
    try:
        answer = push("pushed-later")
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        error = answer.json()["error"]
        assert re.search(r"replica r\d can't load the adapter: .*Too many open files", error["message"])
        assert error["code"] == "adapter_unreadable"
        assert up.client.get("/v1/adapters/pushed").json()["path"] == str(roots / "upper")
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    assert push("pushed-later").status_code == 200
    assert up.client.get("/v1/adapters/pushed").json()["path"] == str(roots / "pushed-later")
    assert up.client.delete("/v1/adapters/pushed").status_code == 200


def test_what_is_wrong_with_a_request_is_said_as_by_one_server(up):
    for wrong, status in (({"model": "none"}, 404), ({"prompt": [10**6]}, 400), ({"max_tokens": -1}, 400)):
        body = {"model": "upper", "prompt": "abc\n", "max_tokens": 4, **wrong}
        answer = up.client.post("/v1/completions", json=body)
        assert (answer.status_code, "message" in answer.json()["error"]) == (status, True)


def test_calls_of_tools_are_forced_by_replicas_and_read_by_the_front(up):
    parameters = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    asked = {"messages": [{"role": "user", "content": "hi"}], "parallel_tool_calls": False, "max_tokens": 100}
    body = {**asked, "tools": tools, "tool_choice": "required"}
    (answer,) = up.client.post("/v1/chat/completions", json=body).json()["choices"]
    assert answer["finish_reason"] == "tool_calls"
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "f" and json.loads(call["function"]["arguments"])["unit"] in "CF"


def test_labels_of_other_servers_are_pinned_and_removed_each_by_itself(up):
    def load(name, path, **fields):
        body = {"lora_name": name, "lora_path": path, **fields}
        return up.client.post("/load_lora_adapter", json=body).raise_for_status().json()["loaded_adapters"]

    def pins():
        listed = up.client.get("/v1/adapters").json()["data"]
        return {one["name"]: one["pinned"] for one in listed if one["name"].startswith("org/n")}

    up.wait_until(lambda: up.metric("chorus_replicas_up") == 2)
    load("org/n@v1", "upper", pinned=True)
    load("org/n@v2", "reverse")
    assert {"org/n@v1", "org/n@v2"} <= load("org/n", "reverse").keys()
    assert pins() == {"org/n": False, "org/n@v1": True, "org/n@v2": False}
    assert up.client.patch("/v1/adapters/org/n@v1", json={"pinned": False}).status_code == 200
    assert up.client.patch("/v1/adapters/org/n@v2", json={"pinned": True}).json()["pinned"]
    assert pins() == {"org/n": False, "org/n@v1": False, "org/n@v2": True}
    assert up.client.post("/unload_lora_adapter", json={"lora_name": "org/n@v2"}).status_code == 200
    assert pins() == {"org/n": False, "org/n@v1": False}
    assert up.client.delete("/v1/adapters/org/n").status_code == 200
    assert pins() == {}


def test_several_fronts_on_one_port_know_the_same_adapters_share_bounds_and_outlive_each_other(
    roots, store, source_flags, tmp_path
):
    def post(name: str, key: str) -> httpx.Response:
        body = {"model": name, "prompt": "abc\n", "max_tokens": 8, "temperature": 0}
        headers = {"authorization": f"Bearer sk-{key}-key"}
        return httpx.post(f"{url}/v1/completions", json=body, timeout=SECONDS, headers=headers)  # its own connection

    def ask(name: str = "mine") -> tuple[int, str]:
        answer = post(name, "operator")
        return answer.status_code, answer.json()["choices"][0]["text"]

    def num_ended() -> float:
        text = httpx.get(f"{url}/metrics", headers={"authorization": "Bearer sk-operator-key"}, timeout=SECONDS).text
        lines = (line for line in text.splitlines() if line.startswith("vllm:request_success_total"))
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    keys = tmp_path / "keys"
    lines = (
        "sk-operator-key ops admin=yes",
        "sk-narrow-key narrow requests=1",
        "sk-frugal-key frugal tokens_per_minute=6",
    )
    keys.write_text("\n".join(lines))
    flags = "--api-servers", "2", "--adapter-roots", str(roots), "--api-key-file", str(keys), *source_flags
    with cluster_up(2, *flags, key="sk-operator-key") as several:
        url, api_servers = str(several.client.base_url), several.children("api-server")
        assert len(api_servers) == 2 and len(several.replicas) == 2
        for name, answer in (("upper", "ABC"), ("reverse", "cba")):
            body = {"lora_name": "mine", "lora_path": str(roots / name), "load_inplace": True}
            assert several.client.post("/v1/load_lora_adapter", json=body).status_code == 200
            with ThreadPoolExecutor(4) as threads:
                assert set(threads.map(lambda _: ask(), range(12))) == {(200, answer)}
                assert set(threads.map(ask, [f"stored/{name}"] * 12)) == {(200, answer)}
                assert 1 <= store.asked[f"/{name}/adapter_model.safetensors"] <= 3
        several.wait_until(lambda: {num_ended() for _ in range(8)} == {48})  # whichever API server is asked
        base = several.client.get("/v1/models").json()["data"][0]["id"]
        for _ in range(20):
            assert post(base, "operator").status_code == 200
        several.wait_until(lambda: several.metric("chorus_base_requests_after_load_total") == 20)
        assert post("mine", "frugal").status_code == 200
        time.sleep(2 * MERGE_SECONDS)
        assert {post("mine", "frugal").status_code for _ in range(12)} == {429}
        where = several.client.base_url
        with socket.create_connection((where.host, where.port)) as connection:
            connection.sendall(UNFINISHED)
            several.wait_until(lambda: post("mine", "narrow").status_code == 429)
            assert {post("mine", "narrow").status_code for _ in range(12)} == {429}
        several.wait_until(lambda: post("mine", "narrow").status_code == 200)
        os.kill(api_servers[0], signal.SIGKILL)
        several.wait_until(lambda: not running(api_servers[0]))
        assert {ask() for _ in range(4)} == {(200, "cba")}
        several.wait_until(lambda: len(several.children("api-server")) == 2)


def test_replicas_behind_tls_are_replaced_one_after_another_and_requests_migrate_while_answers_go_on(tmp_path):
    tls = new_authority(tmp_path / "tls")
    flags = ("--listen", "tcp://127.0.0.1:0", "--tls", str(tls), "--give-up-seconds", str(SECONDS), "--preload")
    flags += ("--log-format", "json", "--access-log", "--api-servers", "2")
    policy = ("--policy", "first-fit", "--migration", "greedy")  # all requests begin at one replica
    eager = (f"--migration-setting={each}" for each in ("interval_seconds=0.1", "excess_requests=1"))
    with cluster_up(2, *flags, *policy, *eager) as up, ThreadPoolExecutor(4) as threads:
        first = set(up.replicas)
        unbroken = [read(up.client, index) for index in range(4)]  # one alone stays where it is
        assert up.metric("chorus_requests_moved_total") == 0
        while up.metric("chorus_requests_moved_total") == 0:
            assert list(threads.map(lambda index: read(up.client, index), range(4))) == unbroken
        up.process.send_signal(signal.SIGUSR1)
        while first & set(up.replicas) or len(up.replicas) < 2:
            assert list(threads.map(lambda index: read(up.client, index), range(4))) == unbroken
            time.sleep(0.3)  # for the processes that begin
        up.wait_until(lambda: up.metric("chorus_replicas_up") == 2)
        up.wait_until(lambda: any("all replicas have been replaced" in line for line in up.lines))
        assert not first & set(up.replicas)
        assert list(threads.map(lambda index: read(up.client, index), range(4))) == unbroken
    lines = [line for line in up.lines if not line.startswith("chorus ")]  # its first, to who has started it
    told = [json.loads(line) for line in lines if line != "ready\n"]
    assert all(set(line) >= {"time", "level", "logger", "message"} for line in told)
    assert not [line for line in told if line["level"] in ("WARNING", "ERROR", "CRITICAL")], "the restart was planned"
    served = [line for line in told if line["logger"] == "chorus.access" and "POST" in line["message"]]
    assert served and all({"request_id", "tenant", "model", "status", "duration"} <= set(line) for line in served)


def test_replicas_follow_the_load_with_no_answer_lost_or_changed_and_end_with_a_parent_that_is_killed():
    flags = ("--min-replicas", "1", "--max-replicas", "2", "--scale-seconds", "1", "--max-num-seqs", "4")
    with cluster_up(1, *flags, "--give-up-seconds", str(SECONDS)) as up, ThreadPoolExecutor(4) as threads:
        unbroken = [read(up.client, index) for index in range(4)]  # one at a time is no load

        def keep_asking(count, until):
            """So many answers are under way all the time."""

            def ask(index):
                while not until():
                    assert read(up.client, index) == unbroken[index]

            list(threads.map(ask, range(count)))

        assert (len(up.replicas), up.metric("chorus_replicas")) == (1, 1)
        keep_asking(4, lambda: up.metric("chorus_replicas") == 2)
        up.wait_until(lambda: up.metric("chorus_replicas_up") == len(up.replicas) == 2)
        keep_asking(2, lambda: up.metric("chorus_replicas") == 1)
        assert list(threads.map(lambda index: read(up.client, index), range(2))) == unbroken[:2]
        up.wait_until(lambda: len(up.replicas) == 1)
        assert up.client.get("/health").status_code == 200
        replicas = up.replicas
        up.process.kill()
        up.process.wait()
        up.wait_until(lambda: not any(running(pid) for pid in replicas))
