"""Uploads of a cluster with several API servers: names and files are there again after a restart, and after a wrong
one.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import chorus
from chorus.server.demo.builtin import BUILTIN_ADAPTERS

from ..blocking_process import CUSTOMIZE, DIRECTORY
from .conftest import SECONDS, cluster_up

FILES = ("adapter_config.json", "adapter_model.safetensors")


def push(client, content, name="policy"):
    files = {file: (file, (BUILTIN_ADAPTERS / content / file).read_bytes()) for file in FILES}
    return client.post("/v1/adapters", data={"name": name}, files=files)


def served(up):
    listed = up.client.get("/v1/adapters").json()["data"]
    ours = [one for one in listed if one["name"].startswith(("policy", "other"))]
    return {one["name"]: (one["version"], one["content_hash"]) for one in ours}


def weights(uploads):
    return sorted(path.read_bytes() for path in uploads.rglob(FILES[1]))


@pytest.mark.slow
def test_uploads_outlive_restarts_and_wrong_ones(tmp_path):
    uploads = tmp_path / "uploads"
    flags = ("--api-servers", "2", "--adapter-uploads", str(uploads), "--keep-versions", "2")
    with cluster_up(1, *flags) as up:
        assert push(up.client, "upper").json()["version"] == 1
        assert push(up.client, "reverse").json()["version"] == 2
        assert push(up.client, "rot13", "other").json()["version"] == 1, "numbers count per name"
        assert push(up.client, "rot13", "other@x").json()["version"] == "x"
        again = push(up.client, "rot13", "other@x")
        assert again.status_code == 200 and again.json()["version"] == "x", "the same bytes under the same label"
        taken = push(up.client, "upper", "other@x")
        assert taken.status_code == 400 and taken.json()["error"]["code"] == "adapter_already_loaded"
        assert up.client.delete("/v1/adapters/policy@2").status_code == 200
        up.wait_until(lambda: served(up)["policy"][0] == 1)
        assert push(up.client, "reverse").json()["version"] == 3
        before, kept = served(up), weights(uploads)
        assert set(before) == {"policy", "policy@1", "other", "other@1"}
        second = [sys.executable, "-m", "chorus.server", "cluster", "up", "--replicas", "1", "--port", "0", *flags]
        told = subprocess.run(
            [*second, "--registry", str(tmp_path / "other.sqlite")],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert told.returncode != 0 and "belongs to another server or cluster" in told.stderr
        assert weights(uploads) == kept
    names = [path for path in uploads.iterdir() if path.name.startswith("names.sqlite")]
    for path in names:
        shutil.copy(path, tmp_path / path.name)
        path.unlink()
    told = subprocess.run(second, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert told.returncode != 0 and "Restore that file if it was lost" in told.stderr
    assert weights(uploads) == kept
    for path in names:
        shutil.copy(tmp_path / path.name, path)
    with cluster_up(1, *flags) as up:
        assert served(up) == before and weights(uploads) == kept
        for name in ("policy", "other"):
            assert up.client.delete(f"/v1/adapters/{name}").status_code == 200


def listeners(port):
    """Sockets that listen on a port of this machine."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    sockets = ((local.rpartition(":")[2], state) for _, local, _, state, *_ in map(str.split, lines))
    return sum(state == "0A" and int(local, 16) == port for local, state in sockets)


@pytest.mark.slow
def test_no_process_of_a_cluster_asks_the_disk_on_its_event_loop(tmp_path, monkeypatch):
    root, found = Path(chorus.__file__).resolve().parent, tmp_path / "found"
    found.mkdir()
    (tmp_path / "sitecustomize.py").write_text(CUSTOMIZE)
    path = [str(tmp_path), str(root), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    monkeypatch.setenv(DIRECTORY, str(found))
    with cluster_up(1, "--api-servers", "2", "--adapter-uploads", str(tmp_path / "uploads")) as up:

        def ask():
            for number in range(4):  # either API server
                assert push(up.client, "upper", f"n{number}").status_code in (200, 201)
                answer = up.client.post("/v1/completions", json={"model": f"n{number}", "prompt": "a", "max_tokens": 2})
                assert answer.status_code == 200
                for way in ("/v1/models", "/v1/adapters", "/metrics", "/health", "/load", f"/v1/adapters/n{number}"):
                    assert up.client.get(way).status_code == 200
                up.client.patch(f"/v1/adapters/n{number}", json={"paused": False})
            assert up.client.delete("/v1/adapters/n0").status_code == 200

        up.wait_until(lambda: listeners(up.client.base_url.port) == 2)  # both API servers have begun
        ask()  # modules are imported where they are needed first
        processes = up.replicas + up.children("api-server") + up.children("registry")
        for pid in processes:
            os.kill(pid, signal.SIGUSR2)
        up.wait_until(lambda: len(list(found.iterdir())) == len(processes) == 4)
        ask()
        time.sleep(2)  # reads the replicas' reports
    texts = [file.read_text() for file in found.iterdir()]
    assert all(len(text.splitlines()) == 1 for text in texts), "\n\n".join(texts)
