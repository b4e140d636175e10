"""The measured side: `python -m chorus.perf.contenders.child MODULE:CLASS CPUS` answers calls, one JSON line each.

A line `{"do": "run", …}` calls that method with the other fields; the answer is `{"result": …}` or `{"error": …}`.
What the engine prints goes to standard error.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
from typing import Any


def main(target: str, cpus: str) -> None:
    os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})  # before any library counts them
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    module, _, name = target.partition(":")
    served = getattr(importlib.import_module(module), name)()
    for line in sys.stdin:
        request = json.loads(line)
        method = request.pop("do")
        print(json.dumps(_answer(served, method, request)), file=answers)
        if method == "close":
            break


def _answer(served: Any, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
    gc.collect()
    try:
        return {"result": getattr(served, method)(**arguments)}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main(*sys.argv[1:])
