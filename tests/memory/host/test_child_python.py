"""Child processes run no code of the current directory."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from chorus.core.executors.worker_processes import WorkerProcesses
from chorus.memory.host.child_python import SAFE_PATH, python_command, spawn_context
from chorus.server.checkpoints import pull
from chorus.server.checkpoints.pull import PullError
from chorus.server.cli import convert_adapter
from chorus.server.cli.adapters import CommandError
from chorus.server.cluster import ray_actors
from chorus.server.cluster.child import Child

ROOT = Path(__file__).parents[3]


class NoRanks:
    def lose(self) -> None: ...


def _convert(directory: Path) -> None:
    (directory / "adapter_model.bin").write_bytes(b"no pickle")
    (directory / "adapter_config.json").write_text("{}")
    asked = argparse.Namespace(directory=directory, out=None, kind="pickle", experts=None)
    with pytest.raises(CommandError, match="is not read as weights only"):
        convert_adapter.run(asked)


def _cluster(directory: Path) -> None:
    child = Child("r0", ["--version"], directory / "ready")
    assert subprocess.run(child.command, capture_output=True, text=True, check=True).stdout.startswith("chorus")


def _ranks(directory: Path) -> None:
    memory = os.memfd_create("memory")
    try:
        ranks = WorkerProcesses({"rank 1": len}, memory, NoRanks(), 60)
        with pytest.raises(RuntimeError, match="could not join: TypeError"):  # a descriptor has no length
            ranks.join()
        ranks.close()
    finally:
        os.close(memory)


def _pull(directory: Path) -> None:
    with pytest.raises(PullError, match="could not download"):
        pull.download("chorus-lora-absent==0", directory)


def _spawned(directory: Path) -> None:
    with ProcessPoolExecutor(1, mp_context=spawn_context()) as pool:
        assert list(pool.map(abs, [-1])) == [1]


@pytest.mark.parametrize("start", [_convert, _cluster, _ranks, _pull, _spawned])
def test_a_planted_module_is_not_imported(start: Callable[[Path], None], tmp_path: Path, monkeypatch) -> None:
    for name in ("json", "torch", "numpy", "struct", "pickle", "chorus", "pip"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'a').write(__name__)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # as of an interactive interpreter
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv(SAFE_PATH, "")
    start(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_rays_processes_neither(monkeypatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(ray_actors, "import_ray", lambda: None)
    monkeypatch.setattr(os, "execv", lambda _, command: commands.append(command))
    ray_actors.join("127.0.0.1:6379", None, None)
    assert commands[0][:4] == python_command("ray.scripts.scripts") and "-P" in commands[0]
    assert ray_actors.ENVIRONMENT[SAFE_PATH] == "1"


def test_every_start_of_python_is_the_helpers() -> None:
    """Other code neither names the interpreter with `-m` nor has contexts of multiprocessing."""
    start = re.compile(r"""(sys\.executable|\bpython),\s*"-m"|get_context\(|import_module\("multiprocessing""")
    found = [
        path.relative_to(ROOT).as_posix()
        for folder in ("core", "graphs", "memory", "ops", "perf", "server")
        for path in (ROOT / folder).rglob("*.py")
        if start.search(path.read_text(encoding="utf-8"))
    ]
    assert found == ["memory/host/child_python.py"]
