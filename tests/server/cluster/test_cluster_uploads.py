"""Uploads of a cluster with several fronts: names and files are there again after a restart, and after a wrong one."""

import shutil
import subprocess
import sys

import pytest

from chorus.server.demo.builtin import BUILTIN_ADAPTERS

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


@pytest.mark.long
def test_uploads_outlive_restarts_and_wrong_ones(tmp_path):
    uploads = tmp_path / "uploads"
    flags = ("--fronts", "2", "--adapter-uploads", str(uploads), "--keep-versions", "2")
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
            [*second, "--registry", str(tmp_path / "other.sqlite")], capture_output=True, text=True, timeout=SECONDS,
            check=False,
        )  # fmt: skip
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
