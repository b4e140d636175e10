"""Steps and kernels of traces."""

from __future__ import annotations

import json

import pytest

from chorus.perf.profile.trace import TraceError, read_chrome, read_nsight

from . import recorded


def test_each_step_has_the_kernels_that_ran_within_it(tmp_path):
    replayed, launched = read_chrome(recorded.write(tmp_path / "trace.json"))
    assert [kernel.name for kernel in replayed.kernels] == [name for name, _, _ in recorded.KERNELS]
    assert [kernel.name for kernel in launched.kernels] == [name for name, _, _ in recorded.KERNELS]
    assert (replayed.host_us, replayed.device_us) == (300.0, 149.0)
    assert (replayed.in_graphs, launched.in_graphs) == (7, 0)
    assert {kernel.launch for kernel in replayed.kernels} == {900}
    assert len({kernel.launch for kernel in launched.kernels}) == 7


def test_kernels_that_overlap_are_busy_once_and_leave_no_gap(tmp_path):
    step, _ = read_chrome(recorded.write(tmp_path / "trace.json"))
    assert step.busy_us == 5 + 40 + (158 - 146) + 20 + 60 + 4
    assert [gap for _, gap in step.gaps()] == [1.0, 0.0, 0.0, 2.0, 2.0, 3.0]


def test_a_file_that_is_no_trace_is_refused(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text("[1, 2", "utf-8")
    with pytest.raises(TraceError, match=r"is not a trace of torch\.profiler: JSONDecodeError"):
        read_chrome(path)
    path.write_text(json.dumps({"traceEvents": []}), "utf-8")
    with pytest.raises(TraceError, match=r"has no span named 'chorus\.step': record it with"):
        read_chrome(path)


KERNELS = """\
Processing [decode.sqlite] with [cuda_gpu_trace.py]...
Start (ns),Duration (ns),CorrId,GrdX,GrdY,GrdZ,BlkX,BlkY,BlkZ,Reg/Trd,StcSMem (MB),Device,Ctx,Strm,Name
1000500,400,7,1,1,1,128,1,1,32,0.0,NVIDIA H100,1,16,rms_norm_rows
1001000,2500,7,1,1,1,128,1,1,32,0.0,NVIDIA H100,1,16,"void kernel<a, b>(int)"
9000000,100,8,1,1,1,128,1,1,32,0.0,NVIDIA H100,1,16,after
"""
SPANS = """\
Start (ns),End (ns),Duration (ns),DurChild (ns),DurNonChild (ns),Name,PID,TID,Lvl,NumChild,RangeId,ParentId,RangeStack
1000000,1005000,5000,0,5000,chorus:chorus.step,1,1,0,0,1,,:1
1000100,1004000,3900,0,3900,chorus:layer.0,1,1,1,0,2,1,:1:2
"""


def test_nsight_systems_tables_are_read_alike():
    (step,) = read_nsight(KERNELS, SPANS)
    assert step.host_us == 5.0
    assert [(kernel.name, kernel.start, kernel.duration, kernel.launch) for kernel in step.kernels] == [
        ("rms_norm_rows", 1000.5, 0.4, 7),
        ("void kernel<a, b>(int)", 1001.0, 2.5, 7),
    ]
    with pytest.raises(TraceError, match=r"no table with a column 'Start \(ns\)'"):
        read_nsight("SKIPPED: decode.sqlite does not contain CUDA kernel data.", SPANS)
