"""The commands of `docs/how-to/back-up.md`, run while a server has the files open."""

import re
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine

from ....attacks.swaps import FILES, NAME
from ...conftest import live_server

PAGE = Path(__file__).parents[4] / "docs/how-to/back-up.md"

EXAMPLE = {"uploads": "/var/lib/chorus/uploads", "keys": "/etc/chorus/keys", "model": "/models/llama"}

RSYNC = """rsync() {  # of machines without it: the same files
    [ "$1 $2" = "-a --exclude" ] && tar -C "$4" --exclude "$3" -cf - . | tar -C "$5" -xf -
}
"""


def commands(section, **places):
    """The commands of a section of the page, with these places for those of its example."""
    text = PAGE.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    script = "".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))
    for path, place in EXAMPLE.items():
        script = script.replace(place, str(places[path]))
    return script if shutil.which("rsync") else RSYNC + script


def run(script, directory):
    """What the commands print; each must succeed."""
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script],
        cwd=directory,
        env={"PATH": path, "HOME": str(directory)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
    return done.stdout


def by_python(script):
    """The script with the page's other command in place of `sqlite3`'s copy."""
    (command,) = re.findall(r"`(python -c .*)`", PAGE.read_text())
    file, copy = re.search(r'^sqlite3 (\S+) "\.backup (\S+)"$', script, re.MULTILINE).groups()
    return re.sub(r"^sqlite3 .*", command.replace("FILE", file).replace("COPY", copy), script, flags=re.MULTILINE)


@pytest.mark.parametrize("copies", ["sqlite3", "python"])
def test_a_backup_made_while_a_server_runs_brings_all_names_back(tokenizer, subject, tmp_path, copies):
    if copies == "sqlite3" and shutil.which("sqlite3") is None:
        pytest.skip("needs the sqlite3 command")
    reference = subject("wide_heads")
    places = {"uploads": tmp_path / "uploads", "keys": tmp_path / "keys", "model": reference.model}
    places["keys"].write_text("sk-acme1 acme\n")

    def serve(uploads):
        config = EngineConfig(model=reference.model, memory_bytes=8 << 20, threads=1, cpu_kernels="torch")
        engine = Engine.from_config(config)
        return live_server(engine, tokenizer, settings={"adapter_uploads": uploads, "keep_versions": 2})

    def push(live, content):
        path = reference.adapters[content]
        files = {file: (file, (path / file).read_bytes()) for file in FILES}
        told = live.client.post("/v1/load_lora_adapter", data={"lora_name": NAME}, files=files)
        assert told.status_code == 200

    def served(live):
        listed = live.client.get("/v1/adapters").json()["data"]
        return {one["name"]: one["content_hash"] for one in listed if one["name"].startswith(NAME)}

    with serve(places["uploads"]) as live:
        for content in ("r64-qkv-up", "r8-attention"):
            push(live, content)
        before = served(live)
        assert set(before) == {NAME, f"{NAME}@1"}
        script = commands("Back up while it runs", **places)
        run(script if copies == "sqlite3" else by_python(script), tmp_path)
        if copies == "sqlite3":
            told = run(commands("Check a backup", **places), tmp_path)
            assert "ok" in told.splitlines() and "2" in told.splitlines() and "refused" not in told, told
        push(live, "r64-qkv-up")  # and the server goes on
    with closing(sqlite3.connect(tmp_path / "backup/uploads/names.sqlite")) as db:
        assert db.execute("SELECT count(*) FROM adapters").fetchone() == (2,)
    with serve(tmp_path / "backup" / "uploads") as live:
        assert served(live) == before
