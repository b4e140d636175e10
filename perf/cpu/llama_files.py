"""Converts a checkpoint and its adapters to llama.cpp's format with its own scripts; kept beside the originals."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

_OUTTYPE = {"bfloat16": "bf16", "float32": "f32"}


@dataclass(frozen=True)
class LlamaFiles:
    """GGUF files of a model and its adapters."""

    model: Path
    adapters: list[Path]


def convert(source: Path, python: Path, dtype: str, model: Path, adapters: dict[str, Path]) -> LlamaFiles:
    """The files, converted on first use. RuntimeError when a script fails.

    source: llama.cpp's source tree. python: one with torch, transformers and sentencepiece.
    """
    kind = _OUTTYPE[dtype]

    def converted(script: str, path: Path, *arguments: str | Path) -> Path:
        target = path.with_name(f"{path.name}.{kind}.gguf")
        if not target.is_file():
            _run([python, source / script, *arguments, path, "--outtype", kind], source, target)
        return target

    return LlamaFiles(
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
