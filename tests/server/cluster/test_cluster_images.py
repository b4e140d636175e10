"""Images through `chorus cluster up`: they reach replicas, and a request keeps them when its replica is killed."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.core.media.tiny_vision import Reference, needs_vision
from tests.server.cluster.conftest import Up, cluster_up
from tests.server.test_image_requests import HI, SEEN, as_part, picture, url_of

pytestmark = [pytest.mark.vision, needs_vision]

MANY = 400
"""Tokens of an answer that is long enough to be interrupted."""
ADAPTERS = (None, "text", "seven", "tower", "copied")


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference("smolvlm")


@pytest.fixture(scope="module")
def cluster(reference: Reference) -> Iterator[Up]:
    path = str(reference.path)
    flags = ["--model", path, "--adapters", f"{path}/adapters", "--served-model-name", "base"]
    flags += ["--dtype", "float32", "--cpu-kernels", "torch", "--device", "cpu", "--memory-bytes", "64MiB"]
    with cluster_up(2, *flags) as up:
        yield up


def told(up: Up, adapter: str | None, image: Any, count: int, began: threading.Semaphore | None = None) -> list[int]:
    """The tokens of a streamed answer about an image; `began` is released with the first."""
    message = {"role": "user", "content": [as_part(url_of(image)), HI]}
    body = {"model": adapter or "base", "messages": [message], "max_tokens": count, "temperature": 0, "stream": True}
    tokens: list[int] = []
    with up.client.stream(
        "POST", "/v1/chat/completions", json={**body, "ignore_eos": True, "return_token_ids": True}
    ) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                if began is not None and not tokens and choice.get("token_ids"):
                    began.release()
                tokens += choice.get("token_ids") or []
    return tokens


def wanted(reference: Reference, adapter: str | None, image: Any, count: int) -> list[int]:
    return reference.answer(adapter, [{"role": "user", "content": [SEEN, HI]}], [image], count)[1]


def test_replicas_see(cluster: Up, reference: Reference) -> None:
    assert cluster.client.get("/health").json()["images"] == "served"
    for number, adapter in enumerate(ADAPTERS):
        image = picture((40 + number, 60), "red")
        assert told(cluster, adapter, image, 6) == wanted(reference, adapter, image, 6)


def test_a_killed_replicas_request_goes_on_with_its_image(cluster: Up, reference: Reference) -> None:
    """Under adapters of the tower, one of which changes nothing else: the other replica encodes the image again."""
    image = picture((50, 70), "navy")
    want = {adapter: wanted(reference, adapter, image, MANY) for adapter in ("tower", "seven")}
    while cluster.metric("chorus_requests_moved_total") == 0:  # an answer may end before the signal comes
        cluster.wait_until(lambda: cluster.metric("chorus_replicas_up") == 2)
        began = threading.Semaphore(0)
        with ThreadPoolExecutor(4) as threads:
            answers = [(name, threads.submit(told, cluster, name, image, MANY, began)) for name in [*want] * 2]
            for _ in range(2):
                began.acquire()
            os.kill(killed := cluster.replicas[0], signal.SIGKILL)
            for name, answer in answers:
                assert answer.result() == want[name]
        cluster.wait_until(lambda killed=killed: killed not in cluster.replicas and len(cluster.replicas) == 2)
