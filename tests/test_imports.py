"""The architecture as a test: which package may import which. Also runs alone: `python tests/test_imports.py [root]`.

    perf → server → core → {graphs, ops, memory}

Within `core`, `memory` and `server`, a room may import only those after it in `ROOMS`. A package may import those to
its right; the three leaves import neither each other nor `core`. Source imports its own packages relatively. Optional
dependencies have one home each and are imported lazily, so that a machine without them can import everything: inside a
function, or at the top of a module named after them (`sgmv_triton`), which then must itself be imported lazily, or by
another so named.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "chorus"

LEAVES = {"graphs", "ops", "memory"}
MAY_IMPORT = {
    "perf": {"perf", "server", "core", *LEAVES},
    "server": {"server", "core", *LEAVES},
    "core": {"core", *LEAVES},
    "graphs": {"graphs"},
    "ops": {"ops"},
    "memory": {"memory"},
}

#: Rooms of a package, each of which may import only those after it.
ROOMS = {
    "core": (
        "costs", "engine", "served_adapters", "servable", "policies", "quarantine", "merging", "executors",
        "scheduling", "model", "engine_stats", "requests", "cpus", "cold_start", "config",
    ),
    "memory": ("adapters", "transfers", "host", "files", "pages"),
    "server": (
        "cli", "cluster", "llm", "start", "app", "ui", "api", "http", "engine", "text", "settings", "stores",
        "checkpoints", "access", "errors", "executors",
    ),
}  # fmt: skip

#: Optional dependency → the only packages (path prefixes) that may import it.
HOMES = {
    "triton": ("ops", "perf/kernels"), "flashinfer": ("ops",), "cupy": ("memory",), "ray": ("server/cluster",),
    "highspy": ("server/cluster",), "fsspec": ("server/stores",),
}  # fmt: skip

NOT_SOURCE = {"tests", "examples", "build", "dist", "node_modules"}


@dataclass(frozen=True)
class Import:
    """One imported module: absolute name parts (of the package: below its root), and how it is imported."""

    line: int
    parts: tuple[str, ...]
    relative: bool
    lazy: bool


def check(root: Path) -> list[str]:
    """Every breach below `root`, one line each."""
    packages = _listed_packages(root)
    breaches = [
        f"pyproject.toml: lists {'/'.join(package) or '.'}, which has no __init__.py"
        for package in sorted(packages)
        if not root.joinpath(*package, "__init__.py").is_file()
    ]
    for path in _sources(root):
        at = path.relative_to(root)
        if at.parts[:-1] not in packages or (len(at.parts) == 1 and at.name != "__init__.py"):
            breaches.append(f"{at}: lies in no package that pyproject.toml lists")
        elif at.parts[:-1] and at.parts[0] not in MAY_IMPORT:
            breaches.append(f"{at}: {at.parts[0]} is not one of the packages {', '.join(MAY_IMPORT)}")
        else:
            breaches += _check_file(path, at)
    if found := circle(root):
        breaches.append(f"these import each other: {', '.join(found)}")
    return breaches


def circle(root: Path) -> list[str]:
    """Files each of which imports the next, be it lazily or for types; the first is also the last. Empty if none."""
    sources = [path.relative_to(root) for path in _sources(root)]
    known = {at.parts[:-1] if at.name == "__init__.py" else at.with_suffix("").parts: at.as_posix() for at in sources}
    imported: dict[str, set[str]] = {}
    for at in sources:
        with suppress(SyntaxError, ImportError):
            found = [one.parts for one in _imports((root / at).read_text("utf-8"), at.parts[:-1]) if one.relative]
            nearest = (next((near for near in (parts, parts[:-1]) if near in known), None) for parts in found)
            imported[at.as_posix()] = {known[near] for near in nearest if near is not None}
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def _listed_packages(root: Path) -> set[tuple[str, ...]]:
    """Folders of pyproject.toml's packages; `()` is the root itself."""
    listed = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["packages"]
    return {tuple(name.split(".")[1:]) for name in listed}


def _sources(root: Path) -> Iterator[Path]:
    tops = (path for path in root.iterdir() if path.name not in NOT_SOURCE and not path.name.startswith("."))
    for path in sorted(path for top in tops for path in (top.rglob("*.py") if top.is_dir() else [top])):
        if path.suffix == ".py" and not any(part.startswith(".") for part in path.relative_to(root).parts[:-1]):
            yield path


def _check_file(path: Path, at: Path) -> Iterator[str]:
    try:
        imports = _imports(path.read_text("utf-8"), at.parts[:-1])
    except (SyntaxError, ImportError) as error:
        yield f"{at}: {error}"
        return
    for found in imports:
        for breach in _breaches(found, at):
            yield f"{at}:{found.line}: {breach}"


def _breaches(found: Import, at: Path) -> Iterator[str]:
    name, top = ".".join(found.parts), found.parts[0] if found.parts else ""
    if not found.relative:
        if top == PACKAGE:
            yield f"imports {name} absolutely; source imports its own packages relatively"
        elif top in HOMES:
            if not at.as_posix().startswith(tuple(f"{home}/" for home in HOMES[top])):
                yield f"imports {top}, which only {' and '.join(f'{home}/' for home in HOMES[top])} may"
            elif not found.lazy and not at.stem.endswith(f"_{top}"):
                yield f"imports {top} when it is imported; import it inside the function that needs it"
        return
    package = at.parts[0] if len(at.parts) > 1 else ""
    if not package:
        if not found.lazy:
            yield f"the root package imports {name or 'itself'}; importing {PACKAGE} must import nothing else"
    elif top and top not in MAY_IMPORT[package]:
        yield f"{package} imports {name}; it may import {', '.join(sorted(MAY_IMPORT[package]))}"
    elif breach := _room_breach(found.parts, at):
        yield breach
    elif not found.lazy and any(
        part.endswith(f"_{home}") and not at.stem.endswith(f"_{home}") for part in found.parts for home in HOMES
    ):
        yield f"imports {name} when it is imported; that module needs an optional dependency"


def _room_breach(target: tuple[str, ...], at: Path) -> str | None:
    """A breach of the order of rooms within a package; None when there is none."""
    rooms = ROOMS.get(at.parts[0], ())
    own, other = Path(at.parts[1]).stem, target[1] if len(target) > 1 and target[0] == at.parts[0] else ""
    if own not in rooms or other not in rooms or rooms.index(own) <= rooms.index(other):
        return None
    return f"{at.parts[0]}/{own} imports {'.'.join(target)}; it may import {', '.join(rooms[rooms.index(own) + 1 :])}"


@cache
def _imports(source: str, package: tuple[str, ...]) -> tuple[Import, ...]:
    """Every import statement, and every `import_module("…")` with a literal name, wherever it stands."""
    tree = ast.parse(source)
    lines = {line for first, last in _lazy_spans(tree) for line in range(first, last + 1)}
    return tuple(_find_imports(tree, package, lines))


def _find_imports(tree: ast.Module, package: tuple[str, ...], lazy_lines: set[int]) -> Iterator[Import]:
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        lazy = line in lazy_lines
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(line, tuple(alias.name.split(".")), relative=False, lazy=lazy)
            case ast.ImportFrom(module=str(module), level=0):
                yield Import(line, tuple(module.split(".")), relative=False, lazy=lazy)
            case ast.ImportFrom(module=module, names=names, level=level):
                if level > len(package) + 1:
                    raise ImportError(f"line {line}: a relative import leaves the package")
                base = package[: len(package) + 1 - level] + tuple(module.split(".") if module else ())
                for alias in names:
                    # `from .. import x` names a package or an attribute of the root; only packages matter here
                    is_attribute = not base and alias.name not in MAY_IMPORT
                    yield Import(line, base if is_attribute else (*base, alias.name), relative=True, lazy=lazy)
            case ast.Call(
                args=[ast.Constant(value=str(name)), *_], func=ast.Name(id=called) | ast.Attribute(attr=called)
            ):
                if called in ("import_module", "__import__") and not name.startswith("."):
                    yield Import(line, tuple(name.split(".")), relative=False, lazy=lazy)


def _lazy_spans(tree: ast.Module) -> Iterator[tuple[int, int]]:
    """Line spans that do not run on import: function bodies and `if TYPE_CHECKING`."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.body[0].lineno, node.end_lineno or node.lineno
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"), body=body):
                yield body[0].lineno, body[-1].end_lineno or body[-1].lineno


# -- tests


def test_source_keeps_to_the_architecture():
    assert check(ROOT) == []


def plant(root: Path, files: dict[str, str]) -> list[str]:
    """Write a minimal tree with `files` into `root` and check it."""
    root.joinpath("pyproject.toml").write_text(
        "[tool.setuptools]\npackages = "
        '["chorus", "chorus.perf", "chorus.server", "chorus.server.cluster", "chorus.core", "chorus.core.executors", '
        '"chorus.core.model", "chorus.graphs", "chorus.ops", "chorus.memory", "chorus.memory.pages"]\n'
    )
    for folder in (
        "",
        "perf",
        "server",
        "server/cluster",
        "core",
        "core/executors",
        "core/model",
        "graphs",
        "ops",
        "memory",
        "memory/pages",
    ):
        (root / folder).mkdir(exist_ok=True, parents=True)
        (root / folder / "__init__.py").touch()
    for name, source in files.items():
        path = root / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(textwrap.dedent(source))
    return check(root)


def test_allowed_imports_pass(tmp_path):
    files = {
        "perf/bench.py": "from ..server.app import app\nfrom ..core import engine\nfrom ..memory import pages\n",
        "server/app.py": "from .version import VERSION\nfrom ..core.engine import Engine\nfrom .engine import worker\n",
        "server/cluster/actors.py": "def start():\n    import ray\n\n    return ray\n",
        "core/executors/cpu.py": "from ...ops.sgmv import sgmv\nfrom ..config import Config\nimport torch\n",
        "ops/sgmv.py": "def pick():\n    from .sgmv_triton import sgmv\n\n    return sgmv\n",
        "ops/sgmv_triton.py": "import triton\nimport triton.language as tl\nfrom .launch_triton import launch\n",
        "memory/dma.py": """
            from typing import TYPE_CHECKING
            if TYPE_CHECKING:
                import cupy
            class Stream:
                def open(self):
                    import cupy
                    return cupy
        """,
        "__init__.py": "if TYPE_CHECKING:\n    from .server.llm import LLM\n",
        "examples/it.py": "from chorus import LLM\n",
        "tests/test_it.py": "import ray\nfrom chorus.core import engine\n",
        ".venv/lib/anything.py": "from chorus import core\n",
    }
    assert plant(tmp_path, files) == []


PLANTED = {
    "a leaf imports core": ("ops/a.py", "from ..core.types import X", "ops imports core.types"),
    "a leaf imports a leaf": ("graphs/a.py", "from ..memory import pages", "graphs imports memory.pages"),
    "a leaf by its name": ("memory/a.py", "from .. import ops", "memory imports ops"),
    "core imports server": ("core/a.py", "from ..server.app import app", "core imports server.app"),
    "server imports perf": ("server/a.py", "from ..perf.bench import x", "server imports perf.bench"),
    "even inside a function": ("memory/a.py", "def f():\n    from ..core import types", "memory imports core.types"),
    "even for types": ("ops/a.py", "if TYPE_CHECKING:\n    from ..core import types", "ops imports core.types"),
    "deep inside core": ("core/executors/a.py", "from ...perf import gate", "core imports perf.gate"),
    "a room imports one before it": (
        "core/model/a.py",
        "from ..scheduling.b import x",
        "core/model imports core.scheduling",
    ),
    "even for types, a room": (
        "memory/pages/a.py",
        "if TYPE_CHECKING:\n    from ..host.b import x",
        "memory/pages imports",
    ),
    "source imports tests": ("core/a.py", "from ..tests import x", "core imports tests.x"),
    "an absolute import": ("core/a.py", "from chorus.core.types import X", "imports chorus.core.types absolutely"),
    "an absolute import statement": ("core/a.py", "import chorus.ops", "imports chorus.ops absolutely"),
    "out of the package": ("core/a.py", "from ... import x", "a relative import leaves the package"),
    "triton outside ops": (
        "core/a.py",
        "def f():\n    import triton",
        "imports triton, which only ops/ and perf/kernels/ may",
    ),
    "flashinfer outside ops": ("core/a.py", "def f():\n    import flashinfer", "which only ops/ may"),
    "cupy outside memory": ("ops/a.py", "def f():\n    from cupy import cuda", "which only memory/ may"),
    "ray outside the cluster": ("server/a.py", "def f():\n    import ray", "which only server/cluster/ may"),
    "eager triton": ("ops/a.py", "import triton.language as tl", "imports triton when it is imported"),
    "eager in a class body": ("memory/a.py", "class A:\n    import cupy", "imports cupy when it is imported"),
    "eager in a try": ("memory/a.py", "try:\n    import cupy\nexcept ImportError:\n    pass", "imports cupy when"),
    "eager by import_module": ("ops/a.py", "x = importlib.import_module('triton')", "imports triton when"),
    "eager ray": ("server/cluster/a.py", "import ray", "imports ray when it is imported"),
    "an eager kernel module": ("ops/a.py", "from .sgmv_triton import sgmv", "ops.sgmv_triton.sgmv when it is imported"),
    "an eager kernel module by name": ("ops/a.py", "from . import sgmv_triton", "ops.sgmv_triton when it is imported"),
    "the root imports": ("__init__.py", "from .core.engine import Engine", "the root package imports core.engine"),
    "a file that imports itself in the end": (
        "core/a.py",
        "def f():\n    from . import a",
        "these import each other: core/a.py, core/a.py",
    ),
    "a file that imports its own package, which imports the file": (
        "__init__.py",
        "if TYPE_CHECKING:\n    from . import __version__",
        "these import each other: __init__.py, __init__.py",
    ),
    "an unlisted folder": ("core/policies/a.py", "", "lies in no package"),
    "an unlisted top folder": ("scripts/a.py", "", "lies in no package"),
    "a loose module": ("setup.py", "", "lies in no package"),
    "no Python": ("core/a.py", "def", "core/a.py: "),
}


@pytest.mark.parametrize("case", PLANTED)
def test_planted_breach_is_caught(tmp_path, case):
    name, source, want = PLANTED[case]
    breaches = plant(tmp_path, {name: source})
    assert len(breaches) == 1, breaches
    assert name in breaches[0]
    assert want in breaches[0]


def test_command_line_exits_non_zero_on_a_breach(tmp_path):
    plant(tmp_path, {"ops/a.py": "from ..core import types\n"})
    command = [sys.executable, __file__, str(tmp_path)]
    failed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert "ops/a.py:1: ops imports core.types" in failed.stdout
    (tmp_path / "ops/a.py").unlink()
    assert subprocess.run(command, capture_output=True, text=True, check=False).returncode == 0


POLICY = (
    "core.engine",
    "core.scheduling.scheduler",
    "core.requests.request",
    "core.requests.types",
    "memory.adapters.store",
    "memory.pages.prefix",
)


def test_policy_code_needs_no_torch():
    """The simulator runs the engine itself, without tensors."""
    modules = ", ".join(f"{PACKAGE}.{module}" for module in POLICY)
    code = f"import sys; sys.modules['torch'] = None; import {modules}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def main(argv: list[str]) -> int:
    breaches = check(Path(argv[0]).resolve() if argv else ROOT)
    for breach in breaches:
        print(breach)
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
