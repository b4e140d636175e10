"""Commands that the documentation names: each module is there and is a command, and each option is one of its."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from chorus.perf.plan import command as plan_command
from chorus.server.cli.command import make_parser
from chorus.server.start.flags import UsageError

pytestmark = pytest.mark.wide

ROOT = Path(__file__).resolve().parent.parent

MANUALS = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]

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


def own_commands(text: str) -> list[list[str]]:
    """The words after `chorus` of every such line in a text's blocks of shell commands."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("chorus ")]


def refusal(words: list[str]) -> str | None:
    """What `chorus` says of these words, if they are not understood."""
    try:
        arguments = make_parser().parse(words)
        if words[0] == "plan":
            plan_command.check(arguments)
    except UsageError as error:
        return str(error)
    return None


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


@pytest.mark.parametrize(
    "page",
    [page for page in MANUALS if own_commands(page.read_text("utf-8"))],
    ids=lambda page: page.name,
)
def test_every_command_of_ours_is_understood(page):
    assert [why for why in map(refusal, own_commands(page.read_text("utf-8"))) if why is not None] == []


def test_commands_of_ours_that_are_gone_are_found():
    text = (
        "```sh\nchorus serve M \\\n  --frobnicate  # so\npip install chorus\nchorus pull smollm2\n```\n`chorus sing`\n"
    )
    assert own_commands(text) == [["serve", "M", "--frobnicate"], ["pull", "smollm2"]]
    first, second = map(refusal, own_commands(text))
    assert "--frobnicate" in (first or "")
    assert second is None


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
