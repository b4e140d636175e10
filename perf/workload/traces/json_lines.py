"""Objects of a file with one JSON object a line."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import TraceError
from .text import open_text


def json_lines(path: Path, fields: tuple[str, ...]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, object) of each line, which must have the named fields; empty lines are left out."""
    with open_text(path) as file:
        line = 0
        try:
            for line, text in enumerate(file, 1):
                if not text.strip():
                    continue
                found = json.loads(text)
                if not isinstance(found, dict):
                    raise TraceError(path, line, f"a {type(found).__name__}, not an object", "mend or drop the line")
                if missing := [name for name in fields if name not in found]:
                    have = ", ".join(found) or "nothing"
                    raise TraceError(
                        path, line, f"no field {missing[0]!r} (it has {have})", "give the file of that format"
                    )
                yield line, found
        except json.JSONDecodeError as error:
            raise TraceError(path, line, f"not JSON ({error.msg}, column {error.colno})", "mend the line") from None
        except (UnicodeDecodeError, EOFError, OSError, lzma.LZMAError) as error:
            raise TraceError(path, line + 1, f"not readable ({error})", "give an intact file") from None
