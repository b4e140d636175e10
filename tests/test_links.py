"""Links of Markdown files lead to files and headings of the repository, and files that a manual names are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "perf/**/*.md", "server/**/*.md", ".github/*.md")
    for path in ROOT.glob(pattern)
)
MANUALS = [page for page in PAGES if page.name != "CHANGELOG.md" and "notebook" not in page.parts]

LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s#]*)(?:#([^)\s]*))?\)")
NAMED = re.compile(
    r"`((?:core|docs|examples|graphs|memory|ops|perf|server|tests)/[\w./-]+\.(?:py|md|toml|yaml|yml|json|cpp|h))`"
)


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", without_code(page.read_text("utf-8")), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", heading).strip().lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    dead = []
    for path, anchor in LINK.findall(without_code(page.read_text("utf-8"))):
        target = page.parent / path if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            dead.append(f"{path}#{anchor}" if anchor else path)
    assert not dead


@pytest.mark.parametrize("page", MANUALS, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_manual_names_exist(page):
    named = set(NAMED.findall(without_code(page.read_text("utf-8"))))
    assert not sorted(name for name in named if not (ROOT / name).exists() and not re.search("[A-Z]{2}", name))


def test_the_first_page_leads_to_every_page_of_the_site_and_only_pages_are_published():
    """The index lacked six pages, and the site published the script that writes some of them."""
    docs = ROOT / "docs"
    config = (ROOT / "mkdocs.yml").read_text("utf-8")
    linked = {path for path, _ in LINK.findall((docs / "index.md").read_text("utf-8"))}
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    assert {page for page in pages if page.startswith(("how-to/", "reference/", "explanation/"))} - linked == set()
    (excluded,) = re.findall(r"^exclude_docs: \|\n((?:  .+\n)+)", config, re.MULTILINE)
    left = (path.relative_to(docs).as_posix() for path in docs.rglob("*") if path.is_file())
    published = [path for path in left if not path.startswith(tuple(excluded.split()))]
    assert {Path(path).suffix for path in published} <= {".md", ".png", ".svg"}
