"""Real clients against a server: `python tests/clients URL MODEL`.

Runs in any environment: the cases of each client that is installed there (and of Node's, in `--node DIR`, a directory
with `node_modules`), and none of the others. A case fails by an exception. An answer that only shows the model's
quality, such as a number out of the bounds that the client removed from a schema, is a failure, too, and printed.
Prints a line per failure and one per client: its versions, cases passed of all.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    command = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    command.add_argument("url", help="the server's, such as http://127.0.0.1:8000")
    command.add_argument("model", help="a name that it serves")
    command.add_argument("--only", default="", help="the client's file, without its ending")
    command.add_argument("--node", type=Path, help="a directory with node_modules")
    args = command.parse_args()
    failed = 0
    for path in sorted(HERE.glob("*_cases.py")):
        if args.only in path.stem:
            failed += run(path, args.url, args.model)
    if args.node is not None and (node := shutil.which("node")):
        for path in sorted(HERE.glob("*_cases.mjs")):
            if args.only in path.stem:
                shutil.copy(path, args.node)  # node looks for modules in the file's folder
                done = subprocess.run([node, path.name, args.url, args.model], cwd=args.node, check=False)
                failed += done.returncode
    return 1 if failed else 0


def run(path: Path, url: str, model: str) -> int:
    """Run one client's cases; how many failed."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        versions = " ".join(f"{name} {version(name)}" for name in module.PACKAGES)
    except (ImportError, PackageNotFoundError) as error:
        print(f"{path.stem}: not run: {error}", flush=True)
        return 0
    failed, began = [], time.monotonic()
    cases = module.cases(url, model)
    for case in cases:
        try:
            case()
        except Exception as error:
            failed.append(case.__name__)
            print(
                f"{path.stem}.{case.__name__}: {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True
            )
    seconds = time.monotonic() - began
    print(f"{versions}: {len(cases) - len(failed)} of {len(cases)} in {seconds:.0f} s; failed: {failed}", flush=True)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
