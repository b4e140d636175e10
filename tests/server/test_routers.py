"""Servers with routers of other projects, each where it is installed: sglang-router, vllm-router, litellm's proxy."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections import Counter
from contextlib import contextmanager

import httpx
import pytest

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine

pytestmark = pytest.mark.integration

SECONDS = 180
"""A deadline, not an expectation: routers start within two seconds, litellm's proxy within ten."""


def free_port():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def command(name, *arguments, package=None):
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; pip install {package or name}, best into an environment of its own")
    return [found, *arguments]


def with_metrics(*router):
    return command(*router, "--prometheus-port", str(free_port()))


def is_healthy(client):
    return is_successful(client, "/health")


def knows_its_workers(client):
    """Whether all three servers take part: sglang-router says that it is healthy before it has registered them."""
    return is_successful(client, "/readiness") and client.get("/readiness").json()["healthy_workers"] == 3


@contextmanager
def routing(log, *arguments, ready=is_healthy):
    """A router as a process of its own; gives a client of it. ready(client): whether it has started."""
    port = free_port()
    common = ("--host", "127.0.0.1", "--port", str(port))
    direct = {**os.environ, "NO_PROXY": "*", "no_proxy": "*", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with log.open("wb") as out:
        process = subprocess.Popen([*arguments, *common], stdout=out, stderr=out, env=direct)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=SECONDS, trust_env=False) as client:
                deadline = time.monotonic() + SECONDS
                while not ready(client):
                    assert process.poll() is None and time.monotonic() < deadline, log.read_text("utf-8", "replace")
                    time.sleep(0.05)
                yield client
        finally:
            process.kill()
            process.wait()


def is_successful(client, route):
    try:
        return client.get(route).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize(
    "router",
    [("sglang-router", "launch", "--policy", "round_robin"), ("vllm-router", "--policy", "round_robin")],
    ids=lambda router: router[0],
)
def test_a_router_in_front_of_three_servers(start, make_engine, read_events, tmp_path, router):
    arguments = with_metrics(*router)
    lives = [start(make_engine(["alice", "bob"])) for _ in range(3)]
    urls = [live.url for live in lives]
    with routing(tmp_path / "log", *arguments, "--worker-urls", *urls, ready=knows_its_workers) as client:
        for _ in range(6):
            answer = client.post("/v1/completions", json={"model": "alice", "prompt": "abc"})
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == "cba" and answer.json()["model"] == "alice"
        assert Counter(len(live.engine.asked) for live in lives) == {2: 3}, "each server has its third"
        asked = {"model": "bob", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
        assert client.post("/v1/chat/completions", json=asked).status_code == 200
        stream = client.post("/v1/completions", json={"model": "base", "prompt": "hello", "stream": True})
        assert "".join(event["choices"][0]["text"] for event in read_events(stream)) == "hello"
        wrong = client.post("/v1/completions", json={"model": "alice", "prompt": "abc", "nonsense": 1})
        assert wrong.status_code == 400 and wrong.json()["error"]["code"] == "unknown_parameter"
        missing = client.post("/v1/completions", json={"model": "absent", "prompt": "abc"})
        assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"


def test_litellm_proxy_in_front_of_a_server(start, make_engine, read_events, tmp_path):
    """An adapter and the base model by names of the proxy's own: answers, streams, and errors as they are."""
    live = start(make_engine(["alice"]))
    providers = ("hosted_vllm", "openai")
    common = {"api_base": f"{live.url}/v1", "api_key": "none"}
    models = [
        {"model_name": f"{provider}-{name}", "litellm_params": {"model": f"{provider}/{model}", **common}}
        for provider in providers
        for name, model in (("support", "alice"), ("plain", "base"), ("gone", "absent"))
    ]
    config = tmp_path / "litellm.yaml"
    general = {"dangerously_permit_weak_or_unset_master_key": True}  # it listens on this machine alone
    config.write_text(
        json.dumps({"model_list": models, "litellm_settings": {"num_retries": 0}, "general_settings": general})
    )
    arguments = command("litellm", "--config", str(config), package="litellm[proxy]")
    with routing(
        tmp_path / "log", *arguments, ready=lambda client: is_successful(client, "/health/liveliness")
    ) as client:
        for provider in providers:
            check_proxied(client, live, read_events, provider)


def check_proxied(client, live, read_events, provider):
    """What a proxy answers for one provider's models is what the server answers."""
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    whole = client.post("/v1/chat/completions", json={"model": f"{provider}-support", **asked})
    assert whole.status_code == 200, whole.text
    direct = live.client.post("/v1/chat/completions", json={"model": "alice", **asked}).json()
    assert whole.json()["choices"][0]["message"]["content"] == direct["choices"][0]["message"]["content"]
    assert whole.json()["usage"]["total_tokens"] == direct["usage"]["total_tokens"]
    stream = client.post("/v1/chat/completions", json={"model": f"{provider}-plain", **asked, "stream": True})
    deltas = [event["choices"][0]["delta"] for event in read_events(stream) if event["choices"]]
    base = live.client.post("/v1/chat/completions", json={"model": "base", **asked}).json()
    assert "".join(delta.get("content") or "" for delta in deltas) == base["choices"][0]["message"]["content"]
    answer = client.post("/v1/completions", json={"model": f"{provider}-support", "prompt": "abc"})
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == "cba", answer.text
    wrong = client.post("/v1/chat/completions", json={"model": f"{provider}-plain", **asked, "temperature": -1})
    assert wrong.status_code == 400 and "temperature" in wrong.text
    missing = client.post("/v1/chat/completions", json={"model": f"{provider}-gone", **asked})
    assert missing.status_code == 404 and "absent" in missing.text


def test_vllm_router_sends_prompts_to_the_server_that_has_cached_them(start, subject, tmp_path):
    """By KV events alone: all servers are idle, and each prompt is cached on one of them.

    Prompts of the base model: vllm-router 0.1.17 leaves blocks with a LoRA name out of its index.
    """
    arguments = with_metrics("vllm-router", "--policy", "kv_aware", "--kv-event-model", "base")
    reference, lives = subject("wide_heads"), []
    for _ in range(3):
        engine = Engine.from_config(
            EngineConfig(model=reference.model, memory_bytes=8 << 20, threads=1, cpu_kernels="torch")
        )
        events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        lives.append(start(engine, settings={"kv_events_endpoint": events, "kv_events_replay_endpoint": replay}))
        arguments += ["--kv-event-source", f"{lives[-1].url}={events}"]
        arguments += ["--kv-event-replay-source", f"{lives[-1].url}={replay}"]

    def cached_tokens(client, number):
        prompt = [(7 * at + number) % 250 + 1 for at in range(64)]
        answer = client.post("/v1/completions", json={"model": "base", "prompt": prompt, "max_tokens": 1})
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    urls = [live.url for live in lives]
    with routing(tmp_path / "log", *arguments, "--worker-urls", *urls, ready=knows_its_workers) as client:
        for attempt in range(20):  # until the router has read the events: each time with new prompts
            numbers = range(6 * attempt, 6 * attempt + 6)
            for number in numbers:
                assert cached_tokens(lives[number % 3].client, number) == 0
            time.sleep(0.1 * attempt)
            if all(cached_tokens(client, number) == 48 for number in numbers):
                break
        else:
            pytest.fail((tmp_path / "log").read_text("utf-8", "replace")[-4000:])
