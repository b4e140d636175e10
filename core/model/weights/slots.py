"""Names of slots of parts whose weights are one object.

Tests: tests/core/model/weights/test_slots.py
"""

from __future__ import annotations

#: Slots `recurrent.…` are of a recurrent mixer, and `experts.…` of a mixture.
RECURRENT, EXPERTS = "recurrent", "experts"

#: Likewise `lookup.…` of a table of n-grams, beside the table itself.
LOOKUP, LOOKUP_TABLE = "lookup", "lookup_table"
