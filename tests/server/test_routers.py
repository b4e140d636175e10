"""Three servers behind routers of other projects: sglang-router and vllm-router, each where it is installed."""

from __future__ import annotations

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

pytestmark = pytest.mark.router

SECONDS = 60
"""A deadline, not an expectation: routers start within two seconds."""


def free_port():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def command(name, *arguments):
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; pip install {name}, best into an environment of its own")
    return [found, *arguments]


@contextmanager
def routing(log, *arguments):
    """A router as a process of its own; gives a client of it."""
    port = free_port()
    common = ("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()))
    direct = {**os.environ, "NO_PROXY": "*", "no_proxy": "*"}
    with log.open("wb") as out:
        process = subprocess.Popen([*arguments, *common], stdout=out, stderr=out, env=direct)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=SECONDS, trust_env=False) as client:
                deadline = time.monotonic() + SECONDS
                while not is_ready(client):
                    assert process.poll() is None and time.monotonic() < deadline, log.read_text("utf-8", "replace")
                    time.sleep(0.05)
                yield client
        finally:
            process.kill()
            process.wait()


def is_ready(client):
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize(
    "router",
    [("sglang-router", "launch", "--policy", "round_robin"), ("vllm-router", "--policy", "round_robin")],
    ids=lambda router: router[0],
)
def test_a_router_in_front_of_three_servers(start, make_engine, read_events, tmp_path, router):
    arguments = command(*router)
    lives = [start(make_engine(["alice", "bob"])) for _ in range(3)]
    with routing(tmp_path / "log", *arguments, "--worker-urls", *(live.url for live in lives)) as client:
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
        missing = client.post("/v1/completions", json={"model": "nobody", "prompt": "abc"})
        assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"


def test_vllm_router_sends_prompts_to_the_server_that_has_cached_them(start, subject, tmp_path):
    """By KV events alone: all servers are idle, and each prompt is cached on one of them.

    Prompts of the base model: vllm-router 0.1.17 leaves blocks with a LoRA name out of its index.
    """
    arguments = command("vllm-router", "--policy", "kv_aware", "--kv-event-model", "base")
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

    with routing(tmp_path / "log", *arguments, "--worker-urls", *(live.url for live in lives)) as client:
        for attempt in range(20):  # until the router has read the events: each time with new prompts
            numbers = range(6 * attempt, 6 * attempt + 6)
            for number in numbers:
                assert cached_tokens(lives[number % 3].client, number) == 0
            time.sleep(0.1 * attempt)
            if all(cached_tokens(client, number) == 48 for number in numbers):
                break
        else:
            pytest.fail((tmp_path / "log").read_text("utf-8", "replace")[-4000:])
