"""`chorus convert-adapter`: converts an adapter's `adapter_model.bin`, a pickle, to safetensors, or Unsloth's order of
experts to PEFT's.

A separate process reads the pickle, as weights only, with limited memory and time.

Tests: tests/server/cli/test_check.py, tests/server/cli/test_convert_experts.py
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
from pathlib import Path

from ...memory.files.config import CONFIG_FILE
from ...memory.files.form import WEIGHTS_FILE
from ...memory.files.unserved import PICKLE_FILE
from ...memory.host.child_python import python_command
from ..machine_faults import fault_of
from . import unsloth_experts
from .adapters import CommandError

_PICKLE = "pickle"
SECONDS = 600.0
MAX_BYTES = 8 << 30
"""Largest pickle: many times the size of an adapter of the largest rank."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="the adapter's directory")
    parser.add_argument(
        "--from",
        dest="kind",
        choices=[_PICKLE, unsloth_experts.NAME],
        default=_PICKLE,
        help=f"{_PICKLE} (default): {PICKLE_FILE} to safetensors; {unsloth_experts.NAME}: an adapter on all experts "
        "(target_parameters) that Unsloth trained before unsloth-zoo of 17 September 2026, which has the expert index "
        "of lora_B slowest; nothing in its file tells",
    )
    parser.add_argument(
        "--experts",
        type=int,
        metavar="N",
        help=f"with --from {unsloth_experts.NAME}: experts of the base model; default: as r tells if there is no "
        "rank_pattern",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help=f"a new directory for {WEIGHTS_FILE} and the configuration; default: DIR. --from {unsloth_experts.NAME} "
        "needs one",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return the exit code. Raises CommandError."""
    source: Path = arguments.directory
    target: Path = arguments.out or source
    if arguments.kind == unsloth_experts.NAME:
        return _convert_experts(source, target, arguments.experts)
    if arguments.experts is not None:
        raise CommandError(f"--experts is used with --from {unsloth_experts.NAME} only; leave it out")
    pickle, weights = source / PICKLE_FILE, target / WEIGHTS_FILE
    _check(source, pickle, weights)
    try:
        target.mkdir(parents=True, exist_ok=True)
        if target != source:
            shutil.copyfile(source / CONFIG_FILE, target / CONFIG_FILE)
        part = weights.with_name(f".{WEIGHTS_FILE}.{os.getpid()}")
        try:
            _unpickle(pickle, part)
            part.replace(weights)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(target, error) from None
    print(f"wrote {weights}; chorus check {target} says whether it is served")
    return 0


def _convert_experts(source: Path, target: Path, experts: int | None) -> int:
    if experts is not None and experts < 1:
        raise CommandError(f"--experts is {experts}: a number from 1 is needed")
    if source == target:
        raise CommandError(f"--from {unsloth_experts.NAME} needs a new directory: name it by --out DIR")
    try:
        count = unsloth_experts.convert(source, target, experts)
    except OSError as error:
        raise _unwritable(target, error) from None
    file = target / WEIGHTS_FILE
    print(f"wrote {file}, {count} tensors in PEFT's order; chorus check {target} says whether it is served")
    return 0


def _unwritable(target: Path, error: OSError) -> CommandError:
    return CommandError(fault_of(error, target) or f"{target}: can't be written: {error.strerror or error}")


def _check(source: Path, pickle: Path, weights: Path) -> None:
    if weights.exists():
        raise CommandError(f"{weights} exists already; remove it to convert {PICKLE_FILE} again")
    if not (source / CONFIG_FILE).is_file():
        raise CommandError(f"{source / CONFIG_FILE}: not found; name the directory of a PEFT adapter")
    if not pickle.is_file():
        raise CommandError(f"{pickle}: not found; there is nothing to convert")
    if (size := pickle.stat().st_size) > MAX_BYTES:
        raise CommandError(f"{pickle}: has {size} bytes, which is more than any adapter; the limit is {MAX_BYTES}")


def _unpickle(pickle: Path, weights: Path) -> None:
    """Convert a pickle's tensors to safetensors in another process. Raises CommandError if it can't."""
    command = python_command(f"{__package__}.unpickle", str(pickle), str(weights))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise CommandError(
            f"{pickle}: was not read within {SECONDS:g} s; it does not hold an adapter's weights"
        ) from None
    if done.returncode:
        told = done.stderr.strip().splitlines()
        reason = told[-1][:400] if told else f"its reader ended with {done.returncode}"
        raise CommandError(f"{pickle}: {reason}")
