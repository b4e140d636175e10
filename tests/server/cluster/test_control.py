"""Commands to the engines of a cluster: first with links that only note what was sent, then with two replicas."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from chorus.core.requests.request_params import InvalidRequest
from chorus.core.sleep import CannotSleep
from chorus.memory.pages.block import Medium
from chorus.server.cluster.commands import BUSY, FREEZE, RESET_ROWS, SLEEP, WAKE, reset_of, tiers_of
from chorus.server.cluster.control import Control
from chorus.server.demo.builtin import BUILTIN_ADAPTERS

from .conftest import SECONDS, cluster_up

FILES = ("adapter_config.json", "adapter_model.safetensors")


class Noting:
    """A link that notes the commands that it was sent."""

    def __init__(self, name):
        self.name, self.is_up, self.sent = name, True, []

    def send(self, kind, *fields):
        assert kind == "control"
        self.sent.append(fields)

    @property
    def commands(self):
        return [(kind, argument) for _, kind, argument in self.sent]


@pytest.fixture
def fleet():
    links = [Noting("one"), Noting("two")]
    return SimpleNamespace(links=links, control=Control(links))


def reply(fleet, link, count=0, failure=None, text=""):
    fleet.control.on_reply(link, link.sent[-1][0], count, failure, text)


def test_a_command_is_done_once_every_replica_has_carried_it_out(fleet):
    one, two = fleet.links
    done = fleet.control.reset(True, [Medium.POOL, Medium.DISK])
    reply(fleet, one, 3)
    assert not done.done()
    reply(fleet, two, 4)
    (command,) = one.commands
    assert done.result(0) == 7 and one.commands == two.commands
    assert (tiers_of(command[0]), command[1]) == ([Medium.POOL, Medium.DISK], True)
    for wrong in (SLEEP, reset_of([]), "reset:gpu"):
        with pytest.raises(ValueError):
            tiers_of(wrong)


def test_rows_of_images_are_reset_at_all_replicas(fleet):
    one, two = fleet.links
    done = fleet.control.reset_image_rows()
    reply(fleet, one, 1)
    reply(fleet, two, 2)
    assert done.result(0) == 3 and one.commands == two.commands == [(RESET_ROWS, True)]


def test_a_replica_that_is_gone_has_nothing_to_carry_out(fleet):
    one, two = fleet.links
    done = fleet.control.reset(False, [*Medium])
    reply(fleet, one, 3)
    two.is_up = False
    fleet.control.on_down(two)
    assert done.result(0) == 3
    one.is_up = False
    assert fleet.control.reset(False, [*Medium]).result(0) == 0


def test_a_replica_that_connects_gets_the_state_of_the_others(fleet):
    one, two = fleet.links
    two.is_up = False
    fleet.control.on_up(two)
    assert not two.sent, "it runs already"
    fleet.control.freeze(True)
    fleet.control.on_up(two)
    fleet.control.sleep()
    fleet.control.on_up(two)
    reply(fleet, two)  # to nobody
    fleet.control.wake()
    fleet.control.freeze(False)
    fleet.control.on_up(two)
    assert two.commands == [(FREEZE, True), (SLEEP, True)]
    assert one.commands == [(FREEZE, True), (SLEEP, True), (WAKE, True), (FREEZE, False)]


def test_all_replicas_sleep_or_none(fleet):
    one, two = fleet.links
    done = fleet.control.sleep()
    reply(fleet, one)
    reply(fleet, two, failure=BUSY, text="adapters are being read")
    with pytest.raises(CannotSleep, match="replica two: adapters are being read"):
        done.result(0)
    assert one.commands == two.commands == [(SLEEP, True), (WAKE, True), (FREEZE, False)]


def test_a_field_that_no_replica_takes_is_told(fleet):
    one, two = fleet.links
    done = fleet.control.sleep()
    for link in (one, two):
        reply(fleet, link, failure="field:level", text="only on the CPU")
    with pytest.raises(InvalidRequest, match="only on the CPU") as told:
        done.result(0)
    assert told.value.field == "level"


# --- two replicas ---


@pytest.fixture(scope="module")
def up(tmp_path_factory):
    uploads = tmp_path_factory.mktemp("uploads")
    with cluster_up(2, "--adapter-uploads", str(uploads), "--give-up-seconds", str(SECONDS)) as running:
        yield running


def push(up, content, name="policy", **fields):
    files = {file: (file, (BUILTIN_ADAPTERS / content / file).read_bytes()) for file in FILES}
    response = up.client.post("/v1/load_lora_adapter", data={"lora_name": name, **fields}, files=files)
    assert response.status_code == 200, response.text
    return response.headers["x-chorus-adapter"]


def asked(up, text, model="policy", **fields):
    body = {"model": model, "prompt": f"{text}\n", "max_tokens": len(text) + 1, "temperature": 0, **fields}
    return up.client.post("/v1/completions", json=body)


def answers(up, *args, **fields):
    response = asked(up, *args, **fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"].strip()


def at_once(count, function):
    """Results of as many calls of a function on threads."""
    with ThreadPoolExecutor(count) as threads:
        return [one.result(SECONDS) for one in [threads.submit(function) for _ in range(count)]]


def test_a_push_is_told_once_every_replica_has_it(up):
    """Right after each push sixteen requests at once, more than a replica takes, all get the new version."""
    for content, expected in (("upper", "HELLO"), ("reverse", "olleh"), ("upper", "HELLO")):
        header = push(up, content, keep_versions="2")

        def ask():
            response = asked(up, "hello")
            return response.json()["choices"][0]["text"].strip(), response.headers["x-chorus-adapter"]

        assert at_once(16, ask) == [(expected, header)] * 16
    assert up.client.delete("/v1/adapters/policy").status_code == 200


def test_versions_end_cleanly_while_their_requests_run(up):
    push(up, "upper")
    with up.client.stream(
        "POST",
        "/v1/completions",
        json={
            "model": "policy",
            "prompt": "hello\n",
            "max_tokens": 200,
            "ignore_eos": True,
            "stream": True,
            "temperature": 0,
        },
    ) as running:
        assert running.headers["x-chorus-adapter"].startswith("policy@")
        lines = running.iter_lines()
        next(lines)
        push(up, "reverse")
        assert answers(up, "hello") == "olleh"
        text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith("data: {"))
    assert text.lstrip("H").startswith("ELLO"), "it has kept the version that it began with"
    names = [card["id"] for card in up.client.get("/v1/models").json()["data"]]
    assert [name for name in names if name.startswith("policy")] == ["policy"]


def test_the_prefix_caches_of_all_replicas_are_reset(up):
    base = up.client.get("/v1/models").json()["data"][0]["id"]

    def cached():
        response = asked(up, "the quick brown fox jumps over the lazy dog " * 4, model=base)
        return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    at_once(12, cached)
    assert all(at_once(12, cached)), "both replicas have the prompt"
    assert up.client.post("/reset_prefix_cache?tiers=disk").json() == {"success": True}
    assert cached(), "memory was not named"
    assert up.client.post("/reset_prefix_cache").json() == {"success": True}
    assert cached() == 0
    at_once(12, cached)
    assert up.client.post("/reset_encoder_cache").status_code == 200
    assert up.client.post("/reset_prefix_cache?reset_running_requests=true").status_code == 200
    assert cached() == 0 and answers(up, "hello") == "olleh"


def test_paused_engines_begin_no_step_until_they_are_resumed(up):
    assert up.client.post("/pause?mode=keep").json() == {"status": "paused"}
    found = []
    threads = [threading.Thread(target=lambda: found.append(answers(up, "hello"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    assert not found and up.client.get("/health").status_code == 200
    header = push(up, "upper")
    assert header.startswith("policy@"), "a push needs no steps"
    assert up.client.post("/resume").json() == {"status": "resumed"}
    for thread in threads:
        thread.join(SECONDS)
    assert found == ["olleh"] * 4, "they have kept the version that they began with"
    assert answers(up, "hello") == "HELLO"


def test_a_cluster_sleeps_and_wakes(up):
    assert up.client.post("/sleep?level=1").status_code == 200
    assert up.client.get("/is_sleeping").json() == {"is_sleeping": True}
    refused = asked(up, "hello")
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "asleep"
    push(up, "reverse")
    pids = up.replicas
    assert up.client.post("/wake_up?tags=weights").status_code == 200
    assert asked(up, "hello").status_code == 503
    assert up.client.post("/wake_up?tags=kv_cache").status_code == 200
    assert answers(up, "hello") == "olleh" and up.replicas == pids


def test_a_replica_that_starts_anew_is_paused_as_the_others_are(up):
    assert up.client.post("/pause?mode=keep").status_code == 200
    killed = up.replicas[0]
    os.kill(killed, signal.SIGKILL)
    up.wait_until(lambda: len(up.replicas) == 2 and killed not in up.replicas)
    up.wait_until(lambda: up.metric("chorus_replicas_up") == 2)
    found = []
    thread = threading.Thread(target=lambda: found.extend(answers(up, "hello") for _ in range(2)))
    thread.start()
    time.sleep(1.0)
    assert not found
    assert up.client.post("/resume").status_code == 200
    thread.join(SECONDS)
    assert found == ["olleh"] * 2
