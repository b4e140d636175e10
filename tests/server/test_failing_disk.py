"""A disk that gives EIO while a server reads adapters from it, and then gets well."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

import chorus
from chorus.server.demo.builtin import BUILTIN_ADAPTERS

from .failing_disk import FailingDisk

ROOT = Path(chorus.__file__).resolve().parent
PATIENCE = 120


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """The adapters of every test, which begins with its own unread, and removes them."""
    directory = tmp_path_factory.mktemp("adapters")
    for test in ("failing", "changed", "stopped"):
        for name in ("reverse", "upper"):
            shutil.copytree(BUILTIN_ADAPTERS / name, directory / f"{test}-{name}")
    return directory


@pytest.fixture(scope="module")
def disk(adapters):
    return FailingDisk(adapters)


@pytest.fixture(scope="module")
def client(adapters, disk):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CHORUS_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [
        sys.executable,
        "-m",
        "tests.server.failing_disk",
        str(disk.theirs.fileno()),
        "serve",
        "--port",
        "0",
        "--adapters",
        str(adapters),
        "--threads",
        "1",
        "--memory-bytes",
        "4MiB",
    ]
    with (
        disk.theirs,
        subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT, pass_fds=[disk.theirs.fileno()]
        ) as process,
    ):
        assert process.stderr is not None
        lines = []
        try:
            for line in process.stderr:
                lines.append(line)
                if found := re.search(r"listening on (\S+)", line):
                    break
            else:
                pytest.fail("".join(lines))
            threading.Thread(target=lambda: lines.extend(process.stderr), daemon=True).start()
            with httpx.Client(base_url=found[1], timeout=PATIENCE) as client:
                yield client
        finally:
            process.kill()


def ask(client, model, **more):
    return client.post("/v1/completions", json={"model": model, "prompt": "abcdef\n", "temperature": 0, **more})


def remove(client, test):
    for name in ("reverse", "upper"):
        assert client.delete(f"/v1/adapters/{test}-{name}").status_code == 200


@pytest.mark.wide
def test_a_disk_that_fails_is_told_and_nothing_is_lost(client, disk, adapters):
    body = {"prompt": "abcdef\n", "max_tokens": 400, "ignore_eos": True, "stream": True, "return_token_ids": True}
    with client.stream("POST", "/v1/completions", json=body) as stream:
        events = stream.iter_lines()
        assert next(events).startswith("data: {"), "the neighbour has begun"
        disk.fails = True
        refused = ask(client, "failing-reverse")
        error = refused.json()["error"]
        assert refused.status_code == 503 and "retry-after" in refused.headers
        assert error["code"] == "adapter_unreadable" and error["param"] == "model"
        assert "Input/output error" in error["message"] and str(adapters) not in error["message"]
        streamed = ask(client, "failing-upper", stream=True).text.split("\n\n")
        assert json.loads(streamed[-3].removeprefix("data: "))["error"]["code"] == "adapter_unreadable"
        assert disk.num_failed >= 2
        loaded = client.post("/v1/adapters", json={"name": "more", "path": str(adapters / "failing-upper")})
        assert loaded.status_code == 503 and loaded.json()["error"]["code"] == "adapter_unreadable"
        tokens = [
            token
            for line in events
            if line.startswith("data: {")
            for token in json.loads(line[6:])["choices"][0]["token_ids"]
        ]
    assert len(tokens) >= 398, "the neighbour's stream went on to its end"
    disk.fails = False
    assert ask(client, "failing-reverse").json()["choices"][0]["text"] == "fedcba"
    assert ask(client, "failing-upper").json()["choices"][0]["text"] == "ABCDEF"
    remove(client, "failing")
    deadline = time.monotonic() + PATIENCE  # statistics are those of the engine's last turn
    while (stats := client.get("/health").json()["stats"])["num_adapter_pages"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (stats["num_running"], stats["num_waiting"], stats["num_kv_pages"], stats["num_adapter_pages"]) == (0,) * 4
    assert stats["num_free_pages"] + stats["num_cached_pages"] == stats["num_pages"]


def test_files_that_were_written_over_are_told(client, adapters):
    shutil.copy(adapters / "changed-upper" / "adapter_model.safetensors", adapters / "changed-reverse")
    refused = ask(client, "changed-reverse")
    assert refused.status_code == 424 and refused.json()["error"]["code"] == "adapter_changed"
    assert ask(client, "changed-upper").json()["choices"][0]["text"] == "ABCDEF"
    remove(client, "changed")


@pytest.mark.slow
def test_a_server_that_is_stopped_in_the_middle_of_a_read_reads_on(client, disk, monkeypatch):
    """As a debugger does, or a system that makes room for others: the system repeats its call."""
    readlink, stopped = os.readlink, []

    def stop_once(link):
        if not stopped:
            stopped.append(link)
            pid = int(link.split("/")[2])
            os.kill(pid, signal.SIGSTOP)
            while "(stopped)" not in Path(f"/proc/{pid}/status").read_text():
                time.sleep(0.001)
            os.kill(pid, signal.SIGCONT)
        return readlink(link)

    monkeypatch.setattr(os, "readlink", stop_once)
    disk.fails = True
    refused = ask(client, "stopped-reverse")
    assert stopped
    assert "Input/output error" in refused.json()["error"]["message"]
    disk.fails = False
    assert ask(client, "stopped-reverse").json()["choices"][0]["text"] == "fedcba"
    remove(client, "stopped")
