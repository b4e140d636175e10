"""Lines of code as a test: what measures stays smaller than what is measured. Comments, docstrings and blanks are free.

Alone: `python tests/test_lines.py [root]`.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

MOST = {"perf": 10_769}
"""Most lines of code of each package. The bar of `perf` is 10,500: lower the number with whatever goes."""

_NO_CODE = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
)  # fmt: skip


def code_lines(source: str) -> int:
    """Number of lines with code on them."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body:
                case [ast.Expr(value=ast.Constant(value=str())) as docstring, *_]:
                    lines.difference_update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(lines)


def check(root: Path) -> list[str]:
    """A line for each package that has too many."""
    breaches = []
    for package, most in MOST.items():
        found = sum(code_lines(path.read_text("utf-8")) for path in root.joinpath(package).rglob("*.py"))
        if found > most:
            breaches.append(f"{package}: {found} lines of code, at most {most} may be; delete what has no reader")
    return breaches


# -- tests


def test_packages_stay_small():
    assert check(ROOT) == []


def test_text_costs_nothing():
    source = '"""Module.\n\nMore.\n"""\n\n# comment\nX = (\n    1,\n)\n'
    assert code_lines(source) == 3
    assert code_lines(source + 'def f():\n    """Doc."""\n    return """a\nb"""\n') == 6
    assert code_lines('class A:\n    """Doc."""\n\n    x = 1\n    """Of x."""\n') == 3


def test_a_large_package_is_caught(tmp_path, monkeypatch):
    monkeypatch.setitem(MOST, "perf", 2)
    path = tmp_path / "perf" / "deep" / "a.py"
    path.parent.mkdir(parents=True)
    path.write_text("x = 1\ny = 2\n# three\n")
    assert check(tmp_path) == []
    path.with_name("b.py").write_text("z = 3\n")
    assert check(tmp_path) == ["perf: 3 lines of code, at most 2 may be; delete what has no reader"]


def main(argv: list[str]) -> int:
    breaches = check(Path(argv[0]).resolve() if argv else ROOT)
    for breach in breaches:
        print(breach)
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
