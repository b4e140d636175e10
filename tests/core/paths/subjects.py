"""The rows of the table of paths."""

from __future__ import annotations

from .adapter_rows import ADAPTER_ROWS
from .family_rows import FAMILY_ROWS
from .weight_rows import WEIGHT_ROWS

SUBJECTS = {row.name: row for row in (*FAMILY_ROWS, *ADAPTER_ROWS, *WEIGHT_ROWS)}
