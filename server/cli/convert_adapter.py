"""`chorus convert-adapter`: converts an adapter's `adapter_model.bin`, a pickle, to safetensors.

A separate process reads the pickle, as weights only, with limited memory and time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from ...memory.files.config import CONFIG_FILE
from ...memory.files.form import WEIGHTS_FILE
from ...memory.files.unserved import PICKLE_FILE
from ..machine_faults import fault_of
from .adapters import CommandError

SECONDS = 600.0
MAX_BYTES = 8 << 30
"""Largest pickle: many times the size of an adapter of the largest rank."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help=f"the adapter's directory, with {PICKLE_FILE}")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help=f"a new directory for {WEIGHTS_FILE} and the configuration; default: DIR",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return the exit code. Raises CommandError."""
    source: Path = arguments.directory
    target: Path = arguments.out or source
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
        raise CommandError(
            fault_of(error, target) or f"{target}: can't be written: {error.strerror or error}"
        ) from None
    print(f"wrote {weights}; chorus check {target} says whether it is served")
    return 0


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
    command = [sys.executable, "-m", f"{__package__}.unpickle", str(pickle), str(weights)]
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
