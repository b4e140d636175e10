"""The profilers' files are read as they write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from chorus.perf.profile import tables

FILES = Path(__file__).parent / "profiles"

#: A layer of two groups.
LAUNCHES = [
    {"kernel": "shrink_decode", "group": "qkv", "bytes": 12_000_000},
    {"kernel": "expand_decode", "group": "qkv", "bytes": 6_000_000},
    {"kernel": "shrink_decode", "group": "o", "bytes": 4_000_000},
    {"kernel": "expand_decode", "group": "o", "bytes": 4_000_000},
]


def read(name: str) -> str:
    return (FILES / name).read_text("utf-8")


def test_top_kernels():
    first, *_, last = tables.top(tables.trace(read("nsys_cuda_gpu_trace.csv")))
    assert (first["kernel"], first["count"], first["total_us"], first["median_us"]) == ("expand_decode", 4, 8.0, 1.5)
    assert first["share"] >= last["share"] > 0
    assert last["least_us"] <= last["median_us"]


def test_trace_leaves_copies_out():
    kernels = tables.trace(read("nsys_cuda_gpu_trace.csv"))
    assert len(kernels) == 9
    assert kernels[0] == tables.Kernel("shrink_decode", 2000, 1000, "11")
    assert kernels[4].name.endswith("(int, T2, T3)"), "a comma in a name is no column"


def test_gaps_between_graph_launches():
    found = tables.graph_gaps(tables.trace(read("nsys_cuda_gpu_trace.csv")))
    # the first graph ends at 7000, the second begins at 10000; both span 2000 to 17000
    assert found == {"graph_launches": 2, "count": 1, "median_us": 3.0, "largest_us": 3.0, "busy_share": 0.8}


def test_no_gap_without_two_graphs():
    kernels = tables.trace(read("nsys_cuda_gpu_trace.csv"))
    found = tables.graph_gaps(kernel for kernel in kernels if kernel.correlation != "13")
    assert found["graph_launches"] == 1
    assert found["median_us"] is None


def test_bandwidth_of_each_launch_from_a_trace():
    rows = tables.sgmv(tables.trace(read("nsys_cuda_gpu_trace.csv")), LAUNCHES, 12e12)
    assert [(row["kernel"], row["group"], row["count"]) for row in rows] == [
        ("shrink_decode", "qkv", 2), ("expand_decode", "qkv", 2), ("shrink_decode", "o", 2), ("expand_decode", "o", 2)
    ]  # fmt: skip
    assert [row["us"] for row in rows] == [1.0, 3.0, 1.0, 1.0]
    assert rows[0]["bytes_per_s"] == pytest.approx(12e12)
    assert rows[0]["share"] == pytest.approx(1.0)
    assert rows[1]["share"] == pytest.approx(2e12 / 12e12)


def test_no_share_without_a_limit():
    (row, *_) = tables.sgmv(tables.trace(read("nsys_cuda_gpu_trace.csv")), LAUNCHES, None)
    assert row["share"] is None


def test_counters_with_a_row_per_kernel():
    found = tables.counters(read("ncu_raw.csv"))
    assert [each.name for each in found] == ["shrink_decode", "expand_decode"] * 2
    assert found[0].metrics["dram__bytes_read.sum"] == 12_000_000
    assert found[0].metrics["gpu__time_duration.sum"] == 4000
    assert "Grid Size" not in found[0].metrics
    assert "sm__warps_active.avg.pct_of_peak_sustained_active" not in found[3].metrics, "n/a is no number"


def test_what_memory_moved_beside_what_was_counted():
    (row, *_) = tables.sgmv(tables.counters(read("ncu_raw.csv")), LAUNCHES, 4e12)
    assert row["us"] == 4.0
    assert row["bytes_per_s"] == pytest.approx(3e12)
    assert row["share"] == pytest.approx(0.75)
    assert row["dram_bytes"] == 12_500_000
    assert row["dram_over_counted"] == pytest.approx(12.5 / 12)
    assert (row["peak_percent"], row["registers"]) == (70.1, 80)


def test_a_layer_that_was_cut_off_is_left_out():
    found = tables.counters(read("ncu_raw.csv"))
    rows = tables.sgmv([*found, found[0]], LAUNCHES, None)
    assert [row["count"] for row in rows] == [1, 1, 1, 1]


def test_kernels_of_another_workload_are_refused():
    found = tables.counters(read("ncu_raw.csv"))
    with pytest.raises(tables.UnreadableReport, match="SGMV kernel 0 is expand_decode"):
        tables.sgmv([*found[1:], found[0]], LAUNCHES, None)
    with pytest.raises(tables.UnreadableReport, match="2 SGMV kernels were seen, a layer has 4"):
        tables.sgmv(found[:2], LAUNCHES, None)


@pytest.mark.parametrize("read_table", [tables.trace, tables.counters])
def test_output_without_a_table_is_told(read_table):
    with pytest.raises(tables.UnreadableReport, match="Failed to initialize the profiler"):
        read_table("==ERROR== Failed to initialize the profiler: LibraryNotLoaded\n")
