"""The summary of a profiled load."""

from __future__ import annotations

from chorus.perf.profile.parts import Part
from chorus.perf.profile.summary import summarise, tables
from chorus.perf.profile.trace import read_chrome

from . import recorded


def test_time_and_gaps_by_part(tmp_path):
    steps = read_chrome(recorded.write(tmp_path / "trace.json"))
    found = summarise(steps, {Part.PRODUCTS: 32.0, Part.LOGITS: 50.0, Part.LORA: 7.0})
    rows = {row["part"]: row for row in found["parts"]}
    assert rows["base products"] == {
        "part": "base products",
        "kernels": 1,
        "us": 40.0,
        "gap_us": 1.0,
        "floor_us": 32.0,
        "over_floor": 1.25,
    }
    assert (rows["LoRA"]["kernels"], rows["LoRA"]["us"], rows["LoRA"]["over_floor"]) == (2, 12.0, 12 / 7)
    assert (rows["sampling"]["gap_us"], rows["sampling"]["floor_us"]) == (3.0, None)
    assert (found["steps"], found["host_us"], found["device_us"], found["floor_us"]) == (2, 300.0, 149.0, 89.0)
    assert found["replayed"] == 0.5, "all kernels of one step, none of the other's"
    assert sum(row["gap_us"] for row in found["parts"]) + found["busy_us"] == found["device_us"]
    assert sum(row["us"] for row in found["parts"]) == found["busy_us"], "time that kernels share counts once"
    assert found["kernels"][0] == {"name": recorded.KERNELS[5][0], "part": "logits", "us": 60.0, "count": 1.0}


def test_tables_show_every_part(tmp_path):
    found = summarise(read_chrome(recorded.write(tmp_path / "trace.json")), {})
    parts, kernels = tables("decode:1:lora", found)
    assert parts.title.startswith("decode:1:lora: 300 µs a step for the host, 149 on the device, 141 in kernels")
    assert [row[0] for row in parts.rows] == [row["part"] for row in found["parts"]]
    assert len(kernels.rows) == len(recorded.KERNELS)
    assert parts.render().row_count
