"""Commands that the documentation names: each module is there and is a command, and each option is one of its."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.wide

ROOT = Path(__file__).resolve().parent.parent

PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("perf/**/*.md")),
    ROOT / "Makefile",
    *sorted(ROOT.glob(".github/workflows/*.yml")),
    *sorted(ROOT.glob("perf/**/*.py")),
]

#: A module and the rest of the command.
_COMMAND = re.compile(r"python3? -m (?:chorus\.)?((?:perf|tests|server|core)[\w.]*)((?:[^`|>;&#\n\\]|\\\n)*)")

_HISTORY = "CHANGELOG.md"  # names commands as they were


def commands(text: str) -> list[tuple[str, str]]:
    """Module and arguments of every command in a text."""
    return [(module.rstrip("."), arguments) for module, arguments in _COMMAND.findall(text)]


def problem(module: str, arguments: str, root: Path = ROOT) -> str | None:
    """Reason why a command can't be meant as it is written."""
    place = root.joinpath(*module.split("."))
    file = place / "__main__.py" if place.is_dir() else place.with_suffix(".py")
    if not file.is_file():
        return f"{module} is no module"
    source = file.read_text("utf-8")
    if file.name != "__main__.py" and '__name__ == "__main__"' not in source:
        return f"{module} is no command"
    near = "".join(each.read_text("utf-8") for each in file.parent.rglob("*.py"))
    options = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", arguments)) - {"--help"}
    made = re.findall(r'f"(--[\w-]+-){', near)  # such as f"--slo-{name}"
    unknown = [each for each in sorted(options) if f'"{each}"' not in near and not each.startswith(tuple(made))]
    return f"{module} has no {', '.join(unknown)}" if unknown else None


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != _HISTORY], ids=lambda page: page.name)
def test_every_command_can_be_run_as_it_is_written(page):
    found = [problem(*command) for command in commands(page.read_text("utf-8"))]
    assert [why for why in found if why is not None] == []


def test_commands_that_are_gone_are_found(tmp_path):
    (tmp_path / "perf" / "bench").mkdir(parents=True)
    (tmp_path / "perf" / "bench" / "__main__.py").write_text('add("--quick")\n')
    (tmp_path / "perf" / "bench" / "sizes.py").write_text("")
    text = (
        "`python -m chorus.perf.bench --quick --out x`, `python -m chorus.perf.gpu`, python -m chorus.perf.bench.sizes"
    )
    assert [problem(*each, tmp_path) for each in commands(text)] == [
        "perf.bench has no --out",
        "perf.gpu is no module",
        "perf.bench.sizes is no command",
    ]
