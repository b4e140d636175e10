"""Print the notes of a release for a page elsewhere: `python .github/release_notes.py X.Y.Z URL`.

They are docs/releases/X.Y.Z.md. Its relative links become links below URL, the repository at the release's tag. A
release that is not ready is refused: its changes must be in CHANGELOG.md, and no fragment may be left.
"""

from __future__ import annotations

import os.path
import re
import sys
from pathlib import Path

PAGES = Path("docs", "releases")
LINK = re.compile(r"\]\((?![\w+.-]+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def faults(version: str) -> list[str]:
    """The reasons why the working directory can't be published as the release."""
    found = []
    if left := sorted(path.name for path in Path("changelog.d").glob("*.*.md")):
        found.append(f"changelog.d has {', '.join(left)}; run towncrier build --version {version}")
    if f"\n## [{version}] - " not in Path("CHANGELOG.md").read_text():
        found.append(f"CHANGELOG.md has no section [{version}]; run towncrier build --version {version}")
    page = PAGES / f"{version}.md"
    if not page.is_file():
        return [*found, f"{page} is missing; write what users notice first"]
    text = page.read_text()
    if not text.startswith(f"# Chorus {version}\n"):
        found.append(f"{page} must begin with # Chorus {version}")
    links = sorted({link[1] for link in LINK.finditer(text)})
    return found + [f"{page} links to {to}, which is not there" for to in links if not (PAGES / to).exists()]


def published(version: str, url: str) -> str:
    """The page, with absolute links."""

    def absolute(link: re.Match[str]) -> str:
        return f"]({url}/{os.path.normpath(PAGES / link[1])}{link[2] or ''})"

    return LINK.sub(absolute, (PAGES / f"{version}.md").read_text())


if __name__ == "__main__":
    release, tree = sys.argv[1:]
    wrong = faults(release)
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    if wrong:
        sys.exit(1)
    sys.stdout.write(published(release, tree))
