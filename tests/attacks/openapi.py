"""Requests drawn from the server's own OpenAPI document, by schemathesis: `python -m tests.attacks.openapi`.

Valid and invalid bodies, parameters and headers of every route but `/pause` and `/resume`, which stop the engine for
all others, against a server with the built-in model. No answer may have a status of 5xx, and the server must be well
when all is over. Needs `schemathesis` on the PATH, best in an environment of its own: `pip install schemathesis`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile

import httpx

from chorus.perf.report.command import conclude, parser
from chorus.perf.serving.server_process import launched

FLAGS = "--memory-bytes", "8MiB", "--threads", "1", "--max-model-len", "256"
STOPPING = "/pause", "/resume"

_COUNT = re.compile(r"(\d+) generated")


def main(argv: list[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--cases", type=int, default=2000, help="at least this many, all routes together")
    command.add_argument("--examples", type=int, default=30, help="most examples of a route and phase")
    command.add_argument("--seed", type=int, default=0, help="what cases are drawn from")
    args = command.parse_args(argv)
    program = shutil.which("schemathesis")
    if program is None:
        command.error("schemathesis is not installed")
    with launched(list(FLAGS)) as server, tempfile.TemporaryDirectory() as notes:  # which schemathesis writes
        excluded = [word for path in STOPPING for word in ("--exclude-path", path)]
        drawn = subprocess.run(
            [
                program,
                "run",
                f"{server.url}/openapi.json",
                "--checks",
                "not_a_server_error",
                "--max-examples",
                str(args.examples),
                "--seed",
                str(args.seed),
                "--mode",
                "all",
                "--continue-on-failure",
                "--request-timeout",
                "60",
                "--suppress-health-check",
                "too_slow",
                "--no-color",
                *excluded,
            ],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            cwd=notes,
        )
        healthy = httpx.get(f"{server.url}/health", timeout=60).status_code == 200
    print(drawn.stdout[-6000:], flush=True)
    counted = _COUNT.search(drawn.stdout)
    cases = int(counted[1]) if counted else 0
    met = drawn.returncode == 0 and healthy and cases >= args.cases
    return conclude({"cases": cases, "status": drawn.returncode, "healthy": healthy, "met": met}, met)


if __name__ == "__main__":
    sys.exit(main())
