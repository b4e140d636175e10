"""Notes of releases: a page for each, which the release publishes alone, and fragments for the next one."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
NOTES = sorted((ROOT / "docs" / "releases").glob("*.md"))
MOST_BYTES = 20_000
"""More is a log, and nobody reads it."""


@pytest.mark.parametrize("page", NOTES, ids=lambda page: page.stem)
def test_a_release_s_notes_are_short_and_in_the_manuals(page):
    text = page.read_text()
    assert re.fullmatch(r"\d+\.\d+\.\d+", page.stem) and text.startswith(f"# Chorus {page.stem}\n")
    assert len(text.encode()) < MOST_BYTES
    assert f"releases/{page.name}" in (ROOT / "mkdocs.yml").read_text()


def test_the_workflow_publishes_the_notes_of_its_version_alone():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "wheels.yml").read_text())["jobs"]
    commands = [step.get("run", "") for step in jobs["publish"]["steps"]]
    (release,) = [command for command in commands if "gh release create" in command]
    assert '--notes-file "docs/releases/${GITHUB_REF_NAME#v}.md"' in release and "CHANGELOG" not in release
    before = commands[: commands.index(release)]
    assert any('test -s "docs/releases/${GITHUB_REF_NAME#v}.md"' in command for command in before)
    for name in ("images", "manuals"):
        assert jobs[name]["if"] == jobs["publish"]["if"] and jobs[name]["needs"] == "publish"


def test_fragments_have_a_kind_that_the_notes_show():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]
    kinds = {one["directory"] for one in settings["type"]}
    for fragment in (ROOT / settings["directory"]).iterdir():
        if fragment.name not in settings["ignore"]:
            name = re.fullmatch(r"[\w+-]+\.(\w+)\.md", fragment.name)
            assert name is not None and name[1] in kinds, f"{fragment.name}: NAME.{'|'.join(sorted(kinds))}.md"


@pytest.mark.skipif(shutil.which("towncrier") is None, reason="needs towncrier")
def test_towncrier_makes_a_page_of_the_fragments(tmp_path):
    for path in ("pyproject.toml", "changelog.d"):
        (shutil.copytree if (ROOT / path).is_dir() else shutil.copy)(ROOT / path, tmp_path / path)
    (tmp_path / "docs" / "releases").mkdir(parents=True)
    (tmp_path / "changelog.d" / "one.added.md").write_text("A thing that users wanted.\n")
    (tmp_path / "changelog.d" / "two.fixed.md").write_text("What was wrong.\n")
    command = ["towncrier", "build", "--keep", "--version", "9.9.9", "--dir", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    text = (tmp_path / "docs" / "releases" / "9.9.9.md").read_text()
    assert text.startswith("# Chorus 9.9.9\n") and "- A thing that users wanted." in text
    assert text.index("Added") < text.index("Fixed")
