"""Check that wheels hold what they must: `python .github/wheel_levels.py WHEEL…`.

The native library is optional in a build, so that one without a compiler ends well; in a wheel that is published it is
not.
"""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

LEVELS = {"x86_64": {"avx2", "avx512", "avx512bf16", "amx"}, "aarch64": {"neon"}}

LEFT_OUT = (
    "tests/",
    "chorus/tests/",
    *(f"chorus/perf/{name}/" for name in ("bench", "gate", "kernels", "profile", "report")),
)


def faults(wheel: Path) -> list[str]:
    """What is wrong with a wheel."""
    names = zipfile.ZipFile(wheel).namelist()
    built = {found[1] for name in names if (found := re.fullmatch(r"chorus/ops/_native_(\w+)\..*\.so", name))}
    architecture = next((name for name in LEVELS if wheel.stem.endswith(name)), None)
    if architecture is None:
        return [f"{wheel.name}: is for none of {', '.join(LEVELS)}"]
    found = [f"{wheel.name}: has no library for {level}" for level in sorted(LEVELS[architecture] - built)]
    return found + [f"{wheel.name}: ships {name}" for name in names if name.startswith(LEFT_OUT)]


if __name__ == "__main__":
    wrong = [fault for name in sys.argv[1:] for fault in faults(Path(name))]
    print(*wrong, sep="\n", file=sys.stderr)
    sys.exit(1 if wrong or not sys.argv[1:] else 0)
