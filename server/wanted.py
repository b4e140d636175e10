"""Error messages for wrong values. Of pydantic's errors only the kind is used, never the text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

MAX_SHOWN = 60
"""Characters of a wrong value that an error shows."""

_A_NUMBER, _WHOLE, _YES_NO, _AN_OBJECT = "a number", "a whole number", "true or false", "an object"

_WANTED = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), _WHOLE),
    **dict.fromkeys(("float_type", "float_parsing"), _A_NUMBER),
    **dict.fromkeys(("bool_type", "bool_parsing"), _YES_NO),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type", "mapping_type"), _AN_OBJECT),
    "finite_number": "a finite number",
    "string_type": "a string",
    "list_type": "a list",
    "path_type": "a path",
    "greater_than_equal": "at least {ge}",
    "greater_than": "above {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "below {lt}",
    "literal_error": "{expected}",
    "string_too_short": "at least {min_length} characters long",
    "string_too_long": "at most {max_length} characters long",
    "too_short": "at least {min_length} entries long",
    "too_long": "at most {max_length} entries long",
    "string_pattern_mismatch": "text that matches {pattern}",
}
"""Messages by the kind of pydantic's error; pydantic fills in the braces."""


def problem_of(error: ErrorDetails) -> str:
    """The fault of a field, to follow its name: ` is 'hot'; it must be a number`, or `: ` and the check's own words."""
    kind = error["type"]
    if kind == "missing":
        return ": it is missing"
    if kind == "extra_forbidden":
        return ": there is no such field; leave it out"
    if kind in _WANTED:
        context: Mapping[str, Any] = error.get("ctx", {})
        return f" is {shown(error['input'])}; it must be {_WANTED[kind].format_map(context)}"
    return f": {error['msg'].removeprefix('Value error, ')}"


def shown(value: Any) -> str:
    """A wrong value, shortened."""
    if isinstance(value, str) and len(value) > MAX_SHOWN:
        value = value[: MAX_SHOWN - 1] + "…"
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= MAX_SHOWN + 2 else text[: MAX_SHOWN - 1] + "…"
