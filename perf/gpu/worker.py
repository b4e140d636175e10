"""One section of the GPU benchmark in a process of its own: what it breaks on the device ends with it."""

from __future__ import annotations

import os
import sys
import time
import traceback

from .environment import describe, describe_host
from .options import Options
from .sections.registry import section


def run_section(name: str, options: Options) -> bool:
    """Run a section and write its file; whether it went well."""
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    environment = describe_host(options.device)
    store = options.store()
    began = time.perf_counter()
    try:
        context = options.context()
        environment = describe(options.device)
        values = section(name).run(context)
    except Exception:
        store.write_failed(name, time.perf_counter() - began, environment, traceback.format_exc())
        traceback.print_exc()
        return False
    store.write_done(name, time.perf_counter() - began, environment, values)
    return True


def main(argv: list[str]) -> int:
    name, *rest = argv
    return 0 if run_section(name, Options.parse(rest)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
