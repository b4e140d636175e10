"""Collect the packages that a GPU machine without a network lacks: `python -m chorus.perf.bench.carry --out DIR`.

Downloads wheels for that machine's Python with pip, copies an archive of FlashInfer's prebuilt modules next to them if
one is given, and the native library that was built here. It writes a script to source there, which unpacks everything
and sets the environment, or stops with the cause.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ...memory.host.child_python import python_command
from ...ops.library import native_library
from ..report.command import parser
from .environment import COMMIT_VARIABLE, commit

#: Packages that the engine, its GPU tests and this benchmark import beyond torch, triton, cupy, transformers and
#: accelerate with their dependencies. FlashInfer is pinned: prebuilt modules belong to one version.
PACKAGES = tuple(Path(__file__).with_name("carried.txt").read_text("utf-8").split())

#: The project's own dependencies that a machine with torch and transformers has.
WITH_TORCH = {"torch", "transformers", "huggingface-hub", "tokenizers", "safetensors", "numpy"}

#: Newest first: pip takes a wheel of any of them, and none of another number.
PLATFORMS = tuple(
    [f"manylinux_2_{minor}_x86_64" for minor in range(39, 16, -1)] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
)

_INSTALL = "-q --disable-pip-version-check --no-index --no-deps --no-compile --upgrade"

WHEELS, MODULES, NATIVE, SCRIPT = "wheels", "flashinfer-aot", "native", "enter.sh"

_ROOT = Path(__file__).resolve().parents[2]

_UNPACK = (
    "import sys, tarfile; tar = tarfile.open(sys.argv[1]); "
    "tar.extraction_filter = getattr(tarfile, 'data_filter', None); tar.extractall(sys.argv[2])"
)
"""Python's own reader, because the machine may have no `xz` for tar. Pythons before 3.11.4 have no filters."""


def download(packages: Sequence[str], python: str, out: Path) -> None:
    """Put a wheel of each package for `python` (`3.12`) into `out`. Dependencies are not followed: name them, too."""
    platforms = [part for name in PLATFORMS for part in ("--platform", name)]
    flags = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--implementation", "cp"]
    where = ["--python-version", python, *platforms, "--dest", str(out)]
    command = [*python_command("pip"), "download", *flags, *where, *packages]
    subprocess.run(command, check=True)


def unmet(wheels: Path, python: str) -> tuple[list[str], list[str]]:
    """Requirements of the wheels for `python` that a carried version does not meet, and required packages that are not
    carried.

    The latter must be installed on the other machine.
    """
    metadata = {canonicalize_name(found["Name"]): found for found in map(_metadata, sorted(wheels.glob("*.whl")))}
    environment = {"python_version": python, "sys_platform": "linux", "platform_system": "Linux", "extra": ""}
    wrong, elsewhere = [], set()
    for name, found in metadata.items():
        for text in found.get_all("Requires-Dist") or ():
            need = Requirement(text)
            if need.marker is not None and not need.marker.evaluate(environment):
                continue
            carried = metadata.get(canonicalize_name(need.name))
            if carried is None:
                elsewhere.add(canonicalize_name(need.name))
            elif not need.specifier.contains(carried["Version"], prereleases=True):
                wrong.append(f"{name} needs {need}, carried is {carried['Version']}; add --also '{need.name}==…'")
    return wrong, sorted(elsewhere)


def _metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as files:
        (name,) = (each for each in files.namelist() if each.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(files.read(name).decode("utf-8"))


def write_script(out: Path, archive: Path | None, tree: dict[str, object]) -> Path:
    """The script that a shell on the other machine sources in the repository's root. tree: its commit."""
    revision = f"{tree['hash'] or 'unknown'}{'-dirty' if tree['dirty'] else ''}"
    unpack = []
    if archive is not None:
        unpack = [
            'aot="$site/flashinfer/data/aot"; mkdir -p "$aot"',
            f'python3 -c {shlex.quote(_UNPACK)} "$here/{archive.name}" "$aot" '
            f"|| {_stop(f'{archive.name} could not be unpacked')}",
            "export FLASHINFER_DISABLE_JIT=1",
        ]
    lines = [
        "# Source this in the root of the repository: . DIR/enter.sh",
        'here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"',
        'site="${CHORUS_SITE:-/tmp/chorus-site}"',
        f"""mkdir -p "$site" || {_stop("the folder for packages could not be made; set CHORUS_SITE")}""",
        f'python3 -m pip install {_INSTALL} --target "$site" "$here/{WHEELS}"/*.whl '
        f"|| {_stop('pip could not install the wheels')}",
        *unpack,
        f'for library in "$here/{NATIVE}"/*.so; do [ ! -e "$library" ] || cp "$library" ops/ '
        f"|| {_stop('the native library could not be copied into ops/')}; done",
        'ln -sfn "$PWD" "$site/chorus"',
        'export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"',
        f"export {COMMIT_VARIABLE}={shlex.quote(revision)}",
    ]
    path = out / SCRIPT
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _stop(cause: str) -> str:
    """Shell code that leaves the sourced script with an error."""
    return f"{{ echo {shlex.quote(f'enter.sh: {cause}; nothing is set')} >&2; return 1; }}"


def take_native(out: Path, built: Path = _ROOT / "ops") -> list[Path]:
    """Copy the native library that was built here, if any; it does not depend on the Python version."""
    folder = out / NATIVE
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return [Path(shutil.copyfile(path, folder / path.name)) for path in sorted(built.glob("_native*.so"))]


def _obstacle(natives: Sequence[Path]) -> str | None:
    """Why a native library would not be used on the other machine either; None if it would."""
    for path in natives:
        try:
            native_library.opened(path)
        except OSError as error:
            return f"{path.name}: {error}; build it anew first: pip install -e . --no-deps --no-build-isolation"
    return None


def take_archive(archive: Path, out: Path) -> Path:
    """Copy a tar archive of FlashInfer's modules. ValueError when it holds no modules, or names beyond its folder."""
    with tarfile.open(archive) as tar:
        names = tar.getnames()
    if not any(name.endswith(".so") for name in names):
        raise ValueError(f"{archive}: holds no *.so; an archive of flashinfer/data/aot is needed")
    if unsafe := [name for name in names if name.startswith("/") or ".." in Path(name).parts]:
        raise ValueError(f"{archive}: {unsafe[0]} would be unpacked outside its folder")
    suffix = "".join(archive.suffixes[-2:]) if archive.suffixes[-2:-1] == [".tar"] else archive.suffix
    return Path(shutil.copyfile(archive, out / f"{MODULES}{suffix}"))


def main(argv: list[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    add = command.add_argument
    add("--out", type=Path, required=True, help="folder to carry")
    add("--python", default="3.12", metavar="VERSION", help="of the other machine")
    add("--flashinfer-aot", type=Path, metavar="ARCHIVE", help="tar of flashinfer/data/aot, built for that GPU")
    add("--also", nargs="+", default=[], metavar="NAME[==VERSION]", help="more packages")
    add("--without", nargs="+", default=[], metavar="NAME", help="the machine's packages, as `pip freeze` prints them")
    add("--limit", type=float, default=64.0, metavar="MIB", help="fail if all of it is more")
    args = command.parse_args(argv)
    wheels = args.out / WHEELS
    shutil.rmtree(wheels, ignore_errors=True)  # two versions of a package would stop pip there
    wheels.mkdir(parents=True)
    archive = take_archive(args.flashinfer_aot, args.out) if args.flashinfer_aot else None
    natives = take_native(args.out)
    if obstacle := _obstacle(natives):
        print(obstacle, file=sys.stderr)
        return 1
    if not natives:
        print("no native library is built here: adapters will be read by torch there, which is slower", file=sys.stderr)
    left_out = set(map(package_name, (*args.without, *args.also)))  # a package of --also replaces ours
    wanted = [*(name for name in PACKAGES if package_name(name) not in left_out), *args.also]
    try:
        download(wanted, args.python, wheels)
    except subprocess.CalledProcessError as error:
        print(f"pip could not download everything (exit {error.returncode}); see above", file=sys.stderr)
        return 1
    wrong, elsewhere = unmet(wheels, args.python)
    script = write_script(args.out, archive, commit())
    files = [path for path in args.out.rglob("*") if path.is_file()]
    total = sum(os.path.getsize(path) for path in files)
    print(f"{len(list(wheels.iterdir()))} wheels, {total / 2**20:.1f} MiB in all in {args.out}")
    print(f"there, in the root of the repository: . {script}")
    print(f"it must have: {', '.join(elsewhere)}")
    if total > args.limit * 2**20:
        largest = max(files, key=os.path.getsize)
        wrong.append(f"that is more than {args.limit:g} MiB; the largest is {largest.name}; see --without")
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


def package_name(requirement: str) -> str:
    """The package of `NAME==VERSION`, as pip compares names."""
    return canonicalize_name(requirement.partition("==")[0])


if __name__ == "__main__":
    sys.exit(main())
