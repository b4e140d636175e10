"""Traces: accepted ones, and errors that describe a wrong file."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from chorus.perf.workload import WorkloadError, WorkloadSpec
from chorus.perf.workload.trace import Csv, TraceError

from . import traces_on_disk as disk


def rows(trace: dict) -> list:
    return Csv(**{**trace, "path": Path(trace["path"])}).rows()


def test_times_and_lengths_as_azure_has_them(tmp_path):
    found = rows(disk.azure_llm(tmp_path))
    assert [row.arrival - found[0].arrival for row in found] == pytest.approx([0, 0.75, 3.7500001], abs=1e-6)
    assert [(row.prompt_tokens, row.output_tokens) for row in found] == [(100, 7), (2000, 31), (40, 1)]
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.250000+00:00,2162,5\n"
    assert rows(disk.azure_llm(tmp_path, text))[0].arrival % 60 == 0.25


HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
WRONG_AZURE = {
    "no column": ("TIMESTAMP,GeneratedTokens\n", r"azure\.csv:1: no column 'ContextTokens' \(the header has TIMESTAMP"),
    "no header": ("", r"azure\.csv:1: no column 'TIMESTAMP' \(the header has nothing\)"),
    "no number": (
        HEADER + "2023-01-01 00:00:00.0,12,3\n2023-01-01 00:00:00.0,x,3\n",
        r"azure\.csv:3: ContextTokens is 'x'; it must be a whole number of at least 1",
    ),
    "zero": (HEADER + "2023-01-01 00:00:00.0,0,3\n", "ContextTokens is '0'"),
    "fraction": (HEADER + "2023-01-01 00:00:00.0,1.5,3\n", "ContextTokens is '1.5'"),
    "no time": (HEADER + "yesterday,5,3\n", "TIMESTAMP is 'yesterday'; it must be seconds, or a time like"),
    "no end": (HEADER + "inf,5,3\n", "TIMESTAMP is 'inf'"),
    "no fraction": (HEADER + "2023-01-01 00:00:00.1x,5,3\n", "TIMESTAMP is"),
    "back in time": (
        HEADER + "2023-01-01 00:00:01.0,5,3\n2023-01-01 00:00:00.9,5,3\n",
        r"azure\.csv:3: TIMESTAMP is .*before the row above; sort the file by time",
    ),
    "short line": (HEADER + "2023-01-01 00:00:01.0,5\n", r"azure\.csv:2: 2 fields, the header has 3; fix or remove"),
    "no rows": (HEADER, r"azure\.csv: the trace has no rows"),
}


@pytest.mark.parametrize("case", WRONG_AZURE)
def test_wrong_files_are_told_by_line_and_field(tmp_path, case):
    text, message = WRONG_AZURE[case]
    with pytest.raises(TraceError, match=message):
        rows(disk.azure_llm(tmp_path, text))


def test_no_file(tmp_path):
    with pytest.raises(TraceError, match=r"nowhere\.csv: the trace cannot be opened \(No such file"):
        rows({"format": "csv", "path": tmp_path / "nowhere.csv"})


def test_no_text(tmp_path):
    path = tmp_path / "bytes.csv"
    path.write_bytes(b"arrival\n\xff\n")
    with pytest.raises(TraceError, match=r"bytes\.csv: not readable as CSV"):
        rows({"format": "csv", "path": path})


CSV = """when,model,in,out,rank,customer,note
2024-05-01 10:00:00.25,a,30,4,8,acme,x
2024-05-01 10:00:01.75,,3,2,,,"y, z"
2024-05-01T10:00:02,b,5,6,16,zebra,
"""
NAMES = {"arrival": "when", "adapter": "model", "prompt_tokens": "in", "output_tokens": "out", "tenant": "customer"}


def test_a_csv_of_ones_own_is_a_whole_workload(tmp_path):
    (tmp_path / "mine.csv").write_text(CSV)
    found = list(WorkloadSpec.parse({"trace": {"format": "csv", "path": "mine.csv", "names": NAMES}}, tmp_path))
    assert [(each.arrival, each.adapter, each.prompt_tokens, each.output_tokens) for each in found] == [
        (0.0, "a", 30, 4),
        (1.5, None, 3, 2),
        (1.75, "b", 5, 6),
    ]
    assert [(each.rank, each.tenant) for each in found] == [
        (8, "acme"),
        (0, None),
        (16, "zebra"),
    ]


def test_parts_of_a_workload_may_be_a_traces_and_others_laws(tmp_path):
    (tmp_path / "mine.csv").write_text("arrival,adapter,rank\n5,a,8\n6.5,b,16\n")
    fields = {"trace": {"format": "csv", "path": "mine.csv"}}
    with pytest.raises(WorkloadError, match=r"mine\.csv\) has no prompt_tokens, only adapter, arrival, rank"):
        list(WorkloadSpec.parse(fields, tmp_path))
    found = list(WorkloadSpec.parse({**fields, "lengths": {"kind": "alpaca"}}, tmp_path))
    assert [(each.arrival, each.rank) for each in found] == [(0.0, 8), (1.5, 16)]
    ranks = {"ranks": {"kind": "fixed", "rank": 4}}
    found = list(WorkloadSpec.parse({**fields, "lengths": {"kind": "alpaca"}, "adapters": ranks}, tmp_path))
    assert [each.rank for each in found] == [4, 4], "the specification's own"


@pytest.mark.parametrize(
    ("text", "names", "message"),
    [
        ("arrival,in\nsoon,3\n", {}, r"csv:2: arrival is 'soon'; it must be seconds, or a time like 2023"),
        ("arrival,adapter\n2,a\n1,a\n", {}, r"csv:3: arrival is '1'; it is before the row above"),
        ("arrival,prompt_tokens\n2,0\n", {}, r"csv:2: prompt_tokens is '0'; it must be a whole number of at least 1"),
        ("arrival\n2,a\n", {}, r"csv:2: 2 fields, the header has 1"),
        ("time\n2\n", {"arrival": "when"}, r"csv:1: no column 'when' \(the header has time\)"),
        ("time\n2\n", {}, r"the header is 'time'; name a column after one of arrival"),
        ("", {}, r"the header is ''; name a column"),
        ("arrival\n2\n", {"speed": "x"}, r"names has 'speed', not a field of a request; use some of arrival"),
    ],
)
def test_wrong_csv_is_told(tmp_path, text, names, message):
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises((TraceError, ValidationError), match=message):
        rows({"format": "csv", "path": path, "names": names})


def test_ranks_of_a_trace_are_its_adapters(tmp_path):
    path = tmp_path / "r.csv"
    head, line = "arrival,adapter,prompt_tokens,output_tokens,rank\n", "{},{},3,4,{}\n".format
    workload = {"trace": {"format": "csv", "path": str(path)}}
    path.write_text(head + line(0, "a", 8) + line(1, "b", "") + line(2, "a", ""))
    assert [each.rank for each in WorkloadSpec.parse(workload)] == [8, None, 8]
    for rank in (16, 0):
        path.write_text(head + line(0, "a", 8) + line(1, "a", rank))
        with pytest.raises(TraceError, match=r"adapter 'a' has rank .*; give each adapter one rank, of at least 1"):
            list(WorkloadSpec.parse(workload))


def test_a_replayed_trace_tells_who_asks(tmp_path):
    path = tmp_path / "r.csv"
    head = "arrival,adapter,prompt_tokens,output_tokens,tenant,note\n"
    path.write_text(f"{head}0,a,3,4,t1,s1\n1,a,3,4,t2,\n2,a,3,4,,\n")
    trace = {"format": "csv", "path": str(path)}
    fields = {
        "arrivals": {"process": "replay", "trace": trace},
        "popularity": {"kind": "trace", "trace": trace},
        "lengths": {"kind": "trace", "trace": trace},
    }
    found = list(WorkloadSpec.parse(fields))
    assert [(each.arrival, each.adapter, each.prompt_tokens) for each in found] == [
        (0, "a", 3),
        (1, "a", 3),
        (2, "a", 3),
    ]
    assert [each.tenant for each in found] == ["t1", "t2", None]
    assert {each.tenant for each in WorkloadSpec.parse({**fields, "tenants": {"batch": 1.0}})} == {"batch"}
