"""The archive for a machine without a network unpacks there and fits together."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from chorus.memory.host.child_python import python_command
from chorus.perf.bench import carry

pytestmark = pytest.mark.wide


def wheel(folder: Path, name: str, version: str, *needs: str) -> Path:
    """A wheel of one module."""
    info = f"{name}-{version}.dist-info"
    metadata = [
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}",
        *(f"Requires-Dist: {need}" for need in needs),
    ]
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}/__init__.py", f"version = {version!r}\n")
        file.writestr(f"{info}/METADATA", "\n".join(metadata) + "\n")
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")
    return path


def archive(path: Path, *names: str) -> Path:
    with tarfile.open(path, "w:xz") as tar:
        for name in names:
            tar.addfile(tarfile.TarInfo(name))
    return path


def test_needs_that_do_not_fit_are_found(tmp_path):
    wheel(tmp_path, "alpha", "1.0", "beta==2.0", "torch", 'gamma; python_version < "3.11"', 'delta; extra == "more"')
    wheel(tmp_path, "beta", "2.1", "alpha>=1")
    wrong, elsewhere = carry.unmet(tmp_path, "3.12")
    assert wrong == ["alpha needs beta==2.0, carried is 2.1; add --also 'beta==…'"]
    assert elsewhere == ["torch"]


@pytest.mark.parametrize(("names", "problem"), [(["a/README"], "holds no"), (["a.so", "../b.so"], "unpacked outside")])
def test_archives_that_are_refused(tmp_path, names, problem):
    with pytest.raises(ValueError, match=problem):
        carry.take_archive(archive(tmp_path / "a.tar.xz", *names), tmp_path)


@pytest.fixture
def machine(tmp_path):
    """A folder that was carried to a machine with python3 and the system's simplest tools: no xz."""
    out, tree, tools = (tmp_path / name for name in ("out", "tree", "tools"))
    for folder in (out / carry.WHEELS, tree / "ops", tools):
        folder.mkdir(parents=True)
    wheel(out / carry.WHEELS, "flashinfer", "0.6.4")
    (tree / "__init__.py").write_text("here = True\n")
    (tools / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tools / "python3").chmod(0o755)
    for name in ("mkdir", "dirname", "ln", "cp", "sh"):
        (tools / name).symlink_to(shutil.which(name))
    return Machine(out, tree, tools, tmp_path / "site")


@dataclass
class Machine:
    out: Path
    tree: Path
    tools: Path
    site: Path

    def source(self, script: Path, then: str) -> subprocess.CompletedProcess:
        environment = {"PATH": str(self.tools), "HOME": str(self.tree), "CHORUS_SITE": str(self.site)}
        return subprocess.run(
            [shutil.which("bash") or "bash", "-c", f'. "{script}" || exit 3; cd /; {then}'],
            cwd=self.tree,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.mark.wide
def test_sourcing_the_script_sets_everything_up(tmp_path, machine):
    modules = carry.take_archive(archive(tmp_path / "built.tar.xz", "./norm/norm.so"), machine.out)
    assert modules.name == "flashinfer-aot.tar.xz"
    (machine.tools / "_native.fake.so").write_bytes(b"library")
    assert len(carry.take_native(machine.out, machine.tools)) == 1
    script = carry.write_script(machine.out, modules, {"hash": "abc", "dirty": True})
    check = (
        "import flashinfer, chorus, os; print(flashinfer.version, chorus.here, os.environ['CHORUS_COMMIT'], "
        "os.environ['FLASHINFER_DISABLE_JIT'])"
    )
    done = machine.source(script, f'python3 -c "{check}"')
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0.6.4", "True", "abc-dirty", "1"]
    assert (machine.site / "flashinfer/data/aot/norm/norm.so").is_file()
    assert (machine.tree / "ops/_native.fake.so").read_bytes() == b"library"


def test_a_machine_without_a_native_library_is_set_up_too(machine):
    assert carry.take_native(machine.out, machine.tools) == []
    script = carry.write_script(machine.out, None, {"hash": None, "dirty": None})
    assert machine.source(script, "python3 -c 'import chorus'").returncode == 0


@pytest.mark.parametrize("broken", ["archive", "wheels"])
def test_what_fails_stops_the_script_with_its_cause(tmp_path, machine, broken):
    """With modules missing and compiling switched off, every later step would fail for no visible reason."""
    modules = carry.take_archive(archive(tmp_path / "built.tar.xz", "./norm/norm.so"), machine.out)
    script = carry.write_script(machine.out, modules, {"hash": "abc", "dirty": False})
    if broken == "archive":
        modules.write_bytes(modules.read_bytes()[:40])
    else:
        next((machine.out / carry.WHEELS).iterdir()).write_bytes(b"no wheel")
    done = machine.source(script, 'echo "went on: $FLASHINFER_DISABLE_JIT"')
    assert done.returncode == 3
    assert "went on" not in done.stdout
    assert f"enter.sh: {'flashinfer-aot.tar.xz' if broken == 'archive' else 'pip'} could not" in done.stderr


def test_what_is_downloaded(tmp_path, monkeypatch, capsys):
    asked: list[str] = []

    def download(packages, python, out):
        asked.extend(packages)
        wheel(out, "flashinfer_python", "0.6.4", "torch")

    monkeypatch.setattr(carry, "download", download)
    flags = [
        "--also",
        "pytest==9.0.0",
        "vllm",
        "--without",
        "Prometheus_Client",
        "Jinja2==3.1.6",
        "PyTest-Timeout==2.4",
    ]
    assert carry.main(["--out", str(tmp_path / "out"), *flags]) == 0
    assert "pytest==9.0.0" in asked
    assert "vllm" in asked
    assert "pytest" not in asked
    assert asked.count("prometheus-client") == asked.count("jinja2") == asked.count("pytest-timeout") == 0
    said = capsys.readouterr().out
    assert "1 wheels" in said
    assert carry.main(["--out", str(tmp_path / "out"), *flags, "--limit", "0.0001"]) == 1
    assert "that is more than 0.0001 MiB; the largest is " in capsys.readouterr().err
    assert "it must have: torch" in said
    assert "FLASHINFER_DISABLE_JIT" not in (tmp_path / "out" / carry.SCRIPT).read_text("utf-8")


def test_more_than_a_machine_is_brought_fails_without_being_asked(tmp_path, monkeypatch, capsys):
    def download(packages, python, out):
        with wheel(out, "huge", "1.0").open("ab") as file:
            file.truncate(65 << 20)

    monkeypatch.setattr(carry, "download", download)
    monkeypatch.setattr(carry, "unmet", lambda wheels, python: ([], []))
    monkeypatch.setattr(carry, "take_native", lambda out: [])
    assert carry.main(["--out", str(tmp_path)]) == 1
    assert "that is more than 64 MiB; the largest is huge-1.0" in capsys.readouterr().err


def test_a_native_library_of_other_sources_is_not_carried(tmp_path, monkeypatch, capsys):
    """An H100's cold loads took three times as long as they should: the library that was carried was an old one."""
    old = tmp_path / "_native_avx2.so"
    old.write_bytes(b"library")
    monkeypatch.setattr(carry, "take_native", lambda out: [old])
    assert carry.main(["--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert "_native_avx2.so" in said
    assert "file too short" in said
    assert "pip install -e ." in said


def test_pip_is_asked_for_the_other_machines_wheels(tmp_path, monkeypatch):
    ran: list[list[str]] = []
    monkeypatch.setattr(carry.subprocess, "run", lambda command, check: ran.append(command))
    carry.download(["rich"], "3.12", tmp_path)
    (command,) = ran
    assert command[:5] == python_command("pip", "download")
    assert {"--no-deps", "--only-binary=:all:"} <= set(command)
    assert command[command.index("--python-version") + 1] == "3.12"
    assert "manylinux_2_28_x86_64" in command
    assert command[-1] == "rich"


def test_what_the_project_needs_is_carried_or_stands_with_torch():
    """A run on a GPU ended at the first import: a new dependency of the project was not carried."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text("utf-8"))["project"]
    needed = {re.split(r"[><=\[]", need)[0] for need in project["dependencies"]}
    assert needed - set(map(carry.package_name, carry.PACKAGES)) <= carry.WITH_TORCH
