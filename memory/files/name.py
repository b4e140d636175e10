"""Rules for adapters' names."""

from __future__ import annotations

from .error import AdapterFormatError, shown

MAX_NAME_CHARACTERS = 256


def check_name(name: str) -> str:
    """The name, if every answer, log line and metric can hold it; else AdapterFormatError, which shows it safely."""
    if len(name) > MAX_NAME_CHARACTERS:
        raise AdapterFormatError(
            f"{shown(name[:MAX_NAME_CHARACTERS])}… has {len(name)} characters; a name has at most {MAX_NAME_CHARACTERS}"
        )
    if not name or not name.isprintable() or name != name.strip():
        raise AdapterFormatError(
            f"{shown(name)} is no name: printable characters are needed, in UTF-8, without blanks around them"
        )
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise AdapterFormatError(f"{shown(name)} is no name: its parts between slashes can't be empty, '.' or '..'")
    return name
