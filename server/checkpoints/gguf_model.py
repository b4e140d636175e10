"""A GGUF file as a model: a directory with a link to it, and the configuration and tokenizer that it lacks."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from ...core.model.config_json import UnsupportedModel
from ...memory.files.tokens.torchvision import mend_torchvision

#: Changes when directories that were made before are not good any longer.
_VERSION = 2

_CONFIG = ("config.json", "generation_config.json")
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def directory_of(file: Path, cache: Path, *, tokenizer: bool = True) -> Path:
    """The model directory of a GGUF file, which is made in `cache` if it is not there.

    config.json and the tokenizer's files are those beside the file, or are made of its metadata. tokenizer: False: the
    directory needs none. Raises UnsupportedModel, or OSError if the cache can't be written.
    """
    told = file.stat()
    beside = [name for name in _CONFIG + _TOKENIZER if (file.parent / name).is_file()]
    key = f"{_VERSION} {file.resolve()} {told.st_size} {told.st_mtime_ns} {beside}"
    target = cache / hashlib.sha256(key.encode()).hexdigest()[:16] / file.stem
    if not (target / "config.json").is_file():
        _publish(target, lambda made: _write_config(file, made))
    if tokenizer and not (target / "tokenizer.json").is_file():
        _publish(target, lambda made: _write_tokenizer(file, made))
    return target


def _publish(target: Path, write: Callable[[Path], None]) -> None:
    """Have files written elsewhere and move them into `target` whole; config.json comes last."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=target.parent) as work:
        made = Path(work)
        write(made)
        for path in sorted(made.iterdir(), key=lambda path: path.name == "config.json"):
            path.replace(target / path.name)


def _link(file: Path, made: Path, names: tuple[str, ...]) -> bool:
    """Link files beside a GGUF file; True if the first of them is there."""
    for name in names:
        if (beside := file.parent / name).is_file():
            (made / name).symlink_to(beside.resolve())
    return (file.parent / names[0]).is_file()


def _write_config(file: Path, made: Path) -> None:
    from ...core.model.checkpoints.gguf_file import GgufFile
    from .gguf_config import config_of

    (made / f"model{file.suffix}").symlink_to(file.resolve())
    if _link(file, made, _CONFIG):
        return
    (made / "config.json").write_text(json.dumps(config_of(GgufFile(file)), indent=2) + "\n", encoding="utf-8")


def _write_tokenizer(file: Path, made: Path) -> None:
    if _link(file, made, _TOKENIZER):
        return
    mend_torchvision()
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(made)
    except Exception as error:  # whatever transformers and the metadata's contents raise
        raise UnsupportedModel(
            f"{file}: its tokenizer can't be made of its metadata ({type(error).__name__}: {error}); "
            "give the original model's directory by --tokenizer, or put its tokenizer.json beside the file"
        ) from error
