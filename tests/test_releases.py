"""Notes of releases: a page for each, which the release publishes alone, and fragments for the next one."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
NOTES = sorted((ROOT / "docs" / "releases").glob("*.md"))
NOTES_DIR = Path("docs", "releases")
BLOB = "https://github.com/$GITHUB_REPOSITORY/blob/$GITHUB_REF_NAME"
MOST_BYTES = 20_000
"""More is a log, and nobody reads it."""

needs_towncrier = pytest.mark.skipif(shutil.which("towncrier") is None, reason="needs towncrier")


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
    assert "--notes-file notes.md" in release and "CHANGELOG" not in release
    before = commands[: commands.index(release)]
    (made,) = [command for command in before if "> notes.md" in command]
    assert shlex.split(made)[:4] == ["python", ".github/release_notes.py", "${GITHUB_REF_NAME#v}", BLOB]
    uploaded = [step.get("uses", "").partition("@")[0] for step in jobs["publish"]["steps"]]
    assert commands.index(made) < uploaded.index("pypa/gh-action-pypi-publish")
    for name in ("images", "manuals"):
        assert jobs[name]["if"] == jobs["publish"]["if"] and jobs[name]["needs"] == "publish"


def test_fragments_have_a_kind_that_the_notes_show():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]
    kinds = {one["directory"] for one in settings["type"]}
    for fragment in (ROOT / settings["directory"]).iterdir():
        if fragment.name not in settings["ignore"]:
            name = re.fullmatch(r"[\w+-]+\.(\w+)\.md", fragment.name)
            assert name is not None and name[1] in kinds, f"{fragment.name}: NAME.{'|'.join(sorted(kinds))}.md"


@pytest.fixture
def project(tmp_path):
    """A copy of what release 0.6.0 is made of, with two fragments alone."""
    pages = (f"docs/{name}" for name in ("releases", "how-to", "reference"))
    for path in ("pyproject.toml", "CHANGELOG.md", "changelog.d/README.md", *pages):
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / path).is_dir() else shutil.copy)(ROOT / path, target)
    log = tmp_path / "CHANGELOG.md"
    sections = re.split(r"(?=^## )", log.read_text(), flags=re.MULTILINE)
    log.write_text("".join(each for each in sections if not each.startswith("## [0.6.0]")))
    (tmp_path / "changelog.d" / "one.added.md").write_text("A thing that users wanted.\n")
    (tmp_path / "changelog.d" / "two.fixed.md").write_text("What was wrong.\n")
    return tmp_path


def build(project, version):
    command = ["towncrier", "build", "--yes", "--version", version, "--date", "2027-01-02", "--dir", str(project)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=project)
    assert ended.returncode == 0, ended.stderr


def notes(project, version):
    command = [sys.executable, str(ROOT / ".github" / "release_notes.py"), version, "https://host/blob/v1"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=project)


@needs_towncrier
def test_towncrier_moves_the_fragments_into_the_changelog_and_leaves_the_page(project):
    before, pages = (project / "CHANGELOG.md").read_text(), {path: path.read_bytes() for path in NOTES}
    build(project, "0.6.0")
    after = (project / "CHANGELOG.md").read_text()
    start = after.index("## [0.6.0] - 2027-01-02\n")
    end = after.index("\n## ", start) + 1
    section = after[start:end]
    assert after[:start].rstrip() == before[: before.index("\n## ")].rstrip()  # the introduction, and where to write
    assert after[end:] == before[before.index("\n## ") + 1 :]
    assert [line for line in section.splitlines() if line] == [
        "## [0.6.0] - 2027-01-02",
        "### Added",
        "- A thing that users wanted.",
        "### Fixed",
        "- What was wrong.",
    ]
    assert [path.name for path in (project / "changelog.d").iterdir()] == ["README.md"]
    assert {
        ROOT / "docs" / "releases" / path.name: path.read_bytes() for path in (project / NOTES_DIR).iterdir()
    } == pages


@needs_towncrier
def test_the_published_notes_are_the_page_with_links_that_work_elsewhere(project):
    build(project, "0.6.0")
    ended = notes(project, "0.6.0")
    assert ended.returncode == 0, ended.stderr
    page = (project / NOTES_DIR / "0.6.0.md").read_text()
    linked = re.findall(r"\]\(\.\./([^)]+)\)", page)
    assert len(linked) > 3 and "](../" not in ended.stdout
    assert re.findall(r"\]\(https://host/blob/v1/docs/([^)]+)\)", ended.stdout) == linked
    assert ended.stdout.replace("https://host/blob/v1/docs/", "../").strip() == page.strip()


@needs_towncrier
def test_a_release_that_is_not_ready_is_refused(project):
    ended = notes(project, "0.6.0")
    assert ended.returncode == 1 and not ended.stdout
    assert "changelog.d has one.added.md, two.fixed.md; run towncrier build --version 0.6.0" in ended.stderr
    assert "CHANGELOG.md has no section [0.6.0]" in ended.stderr
    build(project, "9.9.9")
    assert "docs/releases/9.9.9.md is missing" in notes(project, "9.9.9").stderr
    (project / NOTES_DIR / "9.9.9.md").write_text("# Chorus 9.9.9\n\n[a](../how-to/nothing.md)\n")
    assert "links to ../how-to/nothing.md, which is not there" in notes(project, "9.9.9").stderr
    (project / NOTES_DIR / "9.9.9.md").write_text("# Chorus 9.9.8\n")
    assert "must begin with # Chorus 9.9.9" in notes(project, "9.9.9").stderr


@pytest.mark.parametrize("file", ["CONTRIBUTING.md", ".github/pull_request_template.md", "changelog.d/README.md"])
def test_each_change_is_a_fragment(file):
    text = (ROOT / file).read_text()
    assert "changelog.d" in text or file.startswith("changelog.d")
    assert "Unreleased" not in text and "Unreleased" not in (ROOT / "CHANGELOG.md").read_text()
