"""Bytes of the adapter tables, for Llama-3.1-8B's shapes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chorus.perf import gate
from chorus.perf.bench.host_time import CASES, table_bytes


@pytest.mark.parametrize(("rows", "before"), [(256, (103_707_232, 99_287_168)), (4096, (1_647_448_672, 1_573_501_248))])
def test_tables_are_copied_from_room_for_adapters_of_one_part(rows, before):
    """before: bytes when that room was for adapters of as many parts as any may have."""
    found = table_bytes(rows, 256)
    assert found["page-locked"] < before[0] / 16
    assert found["device"] < 0.56 * before[1]


def test_the_gate_has_them():
    values = json.loads((Path(gate.__file__).parent / "baselines/host_time/any.json").read_text())["values"]
    for rows, rank in CASES:
        found = table_bytes(rows, rank)
        for what in ("page-locked", "device"):
            assert values[f"table bytes {rows} {rank} {what}"] == [float(found[what])]
