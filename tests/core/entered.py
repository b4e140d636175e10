"""Files and functions of the engine that a step with LoRA enters: how much a reader must open to follow it.

`python -m tests.core.entered` counts them for a decode step, one with an arrival and a warm completion, on torch's
operators and, where they are built, the native ones; `--list` names the files and the functions that are called in
each. The CUDA path is counted where it runs without a GPU, in tests/core/executors/test_cuda_interpreted.py.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import chorus
from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.ops.library import native_library
from chorus.perf.report.command import parser
from chorus.server.demo.builtin import BUILTIN_ADAPTERS, BUILTIN_MODEL

ROOT = Path(chorus.__file__).resolve().parent
ENGINE = ("core", "ops", "memory", "graphs")


def entered(step: Callable[[], object]) -> dict[str, list[str]]:
    """Functions entered by file of the engine while `step` runs on this thread; paths are relative to the package."""
    codes: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    found: dict[str, list[str]] = {}
    for code in sorted(codes, key=lambda code: code.co_qualname):
        path = Path(code.co_filename).resolve()
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in ENGINE:
            found.setdefault(path.relative_to(ROOT).as_posix(), []).append(code.co_qualname)
    return found


def of_cpu(kernels: str, arrives: bool = False) -> dict[str, list[str]]:
    """One decode step of two requests, of which one uses an adapter. kernels: `native` or `torch`. arrives: another
    request of the adapter begins in it.
    """
    engine = _engine(kernels)
    try:
        params = RequestParams(max_tokens=400, ignore_eos=True)
        requests = [Request(str(name), [5, 6, 7], params, name) for name in (None, "reverse")]
        for request in requests:
            engine.add_request(request)
        while min(request.num_output_tokens for request in requests) < 4:  # the adapter has to be read
            engine.step()
        steps = []
        for index in range(3):
            if arrives:
                engine.add_request(Request(f"new {index}", [5, 6, 7], params, "reverse"))
            steps.append(entered(engine.step))
        return min(steps, key=len)  # in two of them at most a request's block may become full
    finally:
        engine.close()


def of_completion() -> dict[str, list[str]]:
    """A completion by an adapter that the engine has served before, from its arrival to its last token."""
    engine = _engine("auto")
    params = RequestParams(max_tokens=30, ignore_eos=True)

    def complete(name: str) -> None:
        engine.add_request(Request(name, list(range(5, 45)), params, "reverse"))
        while engine.has_work():
            engine.step()

    try:
        complete("before")
        return entered(lambda: complete("warm"))
    finally:
        engine.close()


def _engine(kernels: str) -> Engine:
    config = EngineConfig(
        model=BUILTIN_MODEL, device="cpu", cpu_kernels=kernels, adapters=BUILTIN_ADAPTERS, speculation="off"
    )
    return Engine.from_config(config)


def main(argv: list[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--list", action="store_true", help="name the files and functions")
    args = command.parse_args(argv)
    native = ["native"] if native_library.available(torch.float32) else []
    ways = {
        f"{kernels}, {'step with an arrival' if arrives else 'decode step'}": of_cpu(kernels, arrives)
        for kernels, arrives in itertools.product([*native, "torch"], [False, True])
    }
    for way, found in {**ways, "warm completion": of_completion()}.items():
        print(f"{way}: {len(found)} files, {sum(map(len, found.values()))} functions")
        if args.list:
            for path, functions in sorted(found.items()):
                print(f"  {path}: {', '.join(functions)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
