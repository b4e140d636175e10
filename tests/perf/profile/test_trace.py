"""Steps and kernels of traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from chorus.perf.profile.trace import TraceError, read_chrome, read_nsight

from . import recorded


def test_each_step_has_the_kernels_that_it_launched(tmp_path):
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
    assert [spent for _, spent, _ in step.timeline()] == [5, 40, 6, 6, 20, 60, 4]
    assert [gap for *_, gap in step.timeline()] == [0, 1, 0, 0, 2, 2, 3]


def test_a_replay_is_known_by_its_node_where_the_trace_names_one(tmp_path):
    path = recorded.write(tmp_path / "trace.json")
    trace = json.loads(path.read_text("utf-8"))
    for event in trace["traceEvents"]:
        if event["cat"] == "kernel" and event["name"] != "warm_up":
            event["args"] |= {"graph id": 3, "graph node id": 17179869184}
    path.write_text(json.dumps(trace), "utf-8")
    assert [step.in_graphs for step in read_chrome(path)] == [7, 7]


def test_a_trace_of_an_h100_is_read_to_the_microsecond(tmp_path):
    """Two decode steps of Llama-3.1-8B with 64 adapters, launched ahead, whose kernels begin early: of the whole trace
    these kernels, calls and spans.
    """
    path = tmp_path / "trace.json"
    path.write_bytes(gzip.decompress((Path(__file__).parent / "h100-decode-64-lora.trace.json.gz").read_bytes()))
    steps = read_chrome(path)
    assert [len(step.kernels) for step in steps] == [593, 593]
    assert [step.in_graphs for step in steps] == [587, 587]
    for step in steps:
        assert sum(spent + gap for _, spent, gap in step.timeline()) == pytest.approx(step.device_us)
        assert step.busy_us < sum(kernel.duration for kernel in step.kernels)


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
1005500,400,7,1,1,1,128,1,1,32,0.0,NVIDIA H100,1,16,rms_norm_rows
1006000,2500,7,1,1,1,128,1,1,32,0.0,NVIDIA H100,1,16,"void kernel<a, b>(int)"
9000000,100,8,1,1,1,128,1,1,32,0.0,NVIDIA H100,1,16,after
"""
CALLS = """\
Start (ns),Duration (ns),Name,Result,CorrID,Pid,Tid,T-Pri,Thread Name
1000100,300,cudaGraphLaunch_v10000,0,7,1,1,20,python
6000000,300,cudaLaunchKernel_v7000,0,8,1,1,20,python
"""
SPANS = """\
Start (ns),End (ns),Duration (ns),DurChild (ns),DurNonChild (ns),Name,PID,TID,Lvl,NumChild,RangeId,ParentId,RangeStack
1000000,1005000,5000,0,5000,chorus:chorus.step,1,1,0,0,1,,:1
1000100,1004000,3900,0,3900,chorus:layer.0,1,1,1,0,2,1,:1:2
"""


def test_nsight_systems_tables_are_read_alike():
    (step,) = read_nsight(KERNELS, CALLS, SPANS)
    assert (step.host_us, step.in_graphs) == (5.0, 2)
    assert [(kernel.name, kernel.start, kernel.duration, kernel.launch) for kernel in step.kernels] == [
        ("rms_norm_rows", 1005.5, 0.4, 7),
        ("void kernel<a, b>(int)", 1006.0, 2.5, 7),
    ]
    with pytest.raises(TraceError, match=r"no table with a column 'Start \(ns\)'"):
        read_nsight("SKIPPED: decode.sqlite does not contain CUDA kernel data.", CALLS, SPANS)
