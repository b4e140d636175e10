"""Fields of specifications: read from files, set by dotted names, strictly checked; each fault becomes one line."""

from __future__ import annotations

import json
import tomllib
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError


class WorkloadError(ValueError):
    """Invalid input; the message names the file or the field, the value and the fix."""


class Strict(BaseModel):
    """Base of every part of a specification: unknown fields, and values of another type, are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def read_fields(path: Any) -> dict[str, Any]:
    """Return the fields of a TOML file, or of a JSON file if its name says so. Raises WorkloadError."""
    kind, parse = ("JSON", json.loads) if path.name.endswith(".json") else ("TOML", tomllib.loads)
    try:
        return parse(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path}: can't be read ({error}); check the path") from None
    except ValueError as error:
        raise WorkloadError(f"{path.name}: not {kind} ({error}); fix it") from None


def put(fields: Any, parts: list[str], value: Any) -> None:
    """Set the field with these names, from the outermost table on. Raises WorkloadError if one is not a table."""
    for table in parts[:-1]:
        fields = fields.setdefault(table, {}) if isinstance(fields, dict) else None
    if not isinstance(fields, dict):
        raise WorkloadError(f"{'.'.join(parts)}: no such field; check the dotted name")
    fields[parts[-1]] = value


def wrong_fields(origin: str, fields: Any, error: ValidationError) -> str:
    """Return a line for each wrong field, which begins with `origin`."""
    return "\n".join(_line(origin, fields, each) for each in error.errors(include_url=False))


def _line(origin: str, fields: Any, error: Any) -> str:
    field = _name(fields, error)
    begin = f"{origin}: {field}" if field else origin
    message = error["msg"].removeprefix("Value error, ")
    match error["type"]:
        case "value_error":
            return f"{begin}: {message}"
        case "extra_forbidden":
            return f"{begin}: no such field here; remove it, or check its spelling"
        case "missing":
            return f"{begin}: is missing; set it"
        case "union_tag_not_found":
            return f"{begin}: {error['ctx']['discriminator']} is missing; say which"
        case "union_tag_invalid":
            name, known = error["ctx"]["discriminator"].strip("'"), error["ctx"]["expected_tags"]
            return f"{begin}.{name} is {error['ctx']['tag']!r}; use one of {known}"
        case _:
            return f"{begin} is {error['input']!r:.80}: {message}"


def _name(fields: Any, error: Any) -> str:
    """Return the wrong field's dotted name: pydantic's location without the kinds of unions, which are not fields."""
    parts, location = [], error["loc"]
    for place, part in enumerate(location):
        last = place == len(location) - 1
        if isinstance(fields, dict) and (part in fields or (last and error["type"] == "missing")):
            parts.append(part)
            fields = fields.get(part)
        elif isinstance(fields, list) and isinstance(part, int):
            parts.append(part)
            fields = fields[part] if part < len(fields) else None
    return ".".join(map(str, parts))
