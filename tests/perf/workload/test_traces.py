"""Trace readers: what they read, and what they say of a file that is wrong."""

from __future__ import annotations

import gzip
import io
import itertools
from collections import Counter
from pathlib import Path

import pytest
from pydantic import ValidationError

from chorus.perf.workload import TraceError, WorkloadError, WorkloadSpec
from chorus.perf.workload.traces.functions2019 import AzureFunctions2019
from chorus.perf.workload.traces.published import AzureFunctions, AzureLLM, LoraSequence, Mooncake
from chorus.perf.workload.traces.table import Csv

from . import traces_on_disk as disk


def rows(kind, trace: dict) -> list:
    return list(kind(**{**trace, "path": Path(trace["path"])}).rows())


def test_azure_llm(tmp_path):
    found = rows(AzureLLM, disk.azure_llm(tmp_path))
    assert [row.arrival for row in found] == pytest.approx([0.5, 1.25, 4.2500001], abs=1e-9)
    assert [(row.prompt_tokens, row.output_tokens) for row in found] == [(100, 7), (2000, 31), (40, 1)]


def test_azure_llm_of_2024(tmp_path):
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n"
    assert rows(AzureLLM, disk.azure_llm(tmp_path, text))[0].arrival == pytest.approx(0.00993)


def test_compressed(tmp_path):
    path = tmp_path / "azure.csv.gz"
    path.write_bytes(gzip.compress(disk.AZURE_LLM.encode()))
    assert len(rows(AzureLLM, {"format": "azure_llm", "path": path})) == 3
    path.write_bytes(gzip.compress(disk.AZURE_LLM.encode())[:-12])
    with pytest.raises(TraceError, match="give an intact file"):
        rows(AzureLLM, {"format": "azure_llm", "path": path})


def test_azure_functions(tmp_path):
    found = rows(AzureFunctions, disk.azure_functions(tmp_path))
    assert [row.arrival for row in found] == [1.0, 1.5, 2.0, 2.5]
    assert [row.adapter for row in found] == ["f0123456789a", "ffffffffffff", "f0123456789a", "eeeeeeeeeeee"]
    assert [row.tenant for row in found] == ["a1", "a1", "a1", "a2"]


def test_azure_functions_2019(tmp_path):
    trace = disk.azure_functions_2019(tmp_path)
    found = rows(AzureFunctions2019, trace)
    assert [int(row.arrival // 60) for row in found] == [0, 0, 0, 1, 1, 1, 2]
    assert all(one.arrival <= other.arrival for one, other in itertools.pairwise(found))
    counts = Counter((int(row.arrival // 60), row.adapter, row.tenant) for row in found)
    assert counts == {
        (0, "f0123456789a", "o123456789ab"): 2,
        (2, "f0123456789a", "o123456789ab"): 1,
        (0, "eeeeeeeeeeee", "p123456789ab"): 1,
        (1, "eeeeeeeeeeee", "p123456789ab"): 3,
    }
    source = AzureFunctions2019(format="azure_functions_2019", path=Path(trace["path"]))
    assert list(source.rows(1)) == list(source.rows(1)) != list(source.rows(2))


def test_azure_functions_2019_of_some_functions_later_and_thinned(tmp_path):
    path = Path(disk.azure_functions_2019(tmp_path)["path"])

    def read(**fields):
        return list(AzureFunctions2019(format="azure_functions_2019", path=path, **fields).rows(3))

    assert [(row.adapter, row.arrival < 60) for row in read(start=1)] == [("eeeeeeeeeeee", True)] * 3 + [
        ("f0123456789a", False)
    ]
    assert {row.adapter for row in read(functions=1)} == {"eeeeeeeeeeee"}
    assert len(read(rate_scale=100.0)) == 700
    assert len(read(rate_scale=0.5)) < 7
    path.write_text(disk.AZURE_FUNCTIONS_2019.replace("2,0,1", "200,0,1000"))
    assert len(read(rate_scale=0.25)) == pytest.approx(300, abs=4)


@pytest.mark.parametrize("mode", ["counts", "replay"])
def test_functions_have_tenants(tmp_path, mode):
    trace = disk.azure_functions_2019(tmp_path)
    lengths = {"kind": "laws", "prompt": {"law": "constant", "tokens": 3}, "output": {"law": "constant", "tokens": 3}}
    arrivals = {"process": "replay", "trace": trace}
    popularity = {"kind": "trace", "mode": mode, "trace": trace}
    found = list(WorkloadSpec.parse({"arrivals": arrivals, "popularity": popularity, "lengths": lengths}))
    assert len(found) == 7
    assert all(each.tenant == {"f": "o123456789ab", "e": "p123456789ab"}[each.adapter[0]] for each in found)


def test_wrong_functions_of_2019(tmp_path):
    for change, message in (
        (("http,2,", "http,x,"), r"invocations\.csv:2: 1 is 'x'; it must be a whole number of at least 0"),
        (("queue,1,3", "queue,1,-3"), r"invocations\.csv:4: 2 is '-3'"),
        (("o123456789abcdef,a1,f0", ",a1,f0"), "HashOwner is ''; it must be a hash"),
        (("HashFunction", "Function"), "no column 'HashFunction'"),
    ):
        trace = disk.azure_functions_2019(tmp_path, disk.AZURE_FUNCTIONS_2019.replace(*change))
        with pytest.raises(TraceError, match=message):
            rows(AzureFunctions2019, trace)


def test_adapters_of_gentd26_as_published(tmp_path):
    found = rows(LoraSequence, disk.lora_sequence(tmp_path, disk.LORA_ARGS))
    assert [row.adapter for row in found] == [None, "7999", "51aa", None]
    for text in ("soon", "[1]", "[{'scale': 1.0}]", "[" * 5000, "{}", "[{'modelVersionId': ''}]"):
        with pytest.raises(TraceError, match=r"sequence\.csv:2: lora_args is .*it must be a list of objects with"):
            rows(LoraSequence, disk.lora_sequence(tmp_path, f'predict_type,lora_args\ne8,"{text}"\n'))


def test_lora_traces(tmp_path):
    assert [row.adapter for row in rows(LoraSequence, disk.lora_sequence(tmp_path))] == [None, "L2", "L1", "L2"]


def test_mooncake(tmp_path):
    found = rows(Mooncake, disk.mooncake(tmp_path))
    assert [row.arrival for row in found] == [0, 0.25, 1]
    assert found[1].hash_ids == (0, 1, 2) and found[1].hash_block_tokens == 512


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
    "no time": (HEADER + "yesterday,5,3\n", "TIMESTAMP is 'yesterday'; it must be a time like"),
    "no fraction": (HEADER + "2023-01-01 00:00:00.1x,5,3\n", "TIMESTAMP is"),
    "back in time": (
        HEADER + "2023-01-01 00:00:01.0,5,3\n2023-01-01 00:00:00.9,5,3\n",
        r"azure\.csv:3: TIMESTAMP is .*before the row above; sort the file by time",
    ),
    "short line": (HEADER + "2023-01-01 00:00:01.0,5\n", r"azure\.csv:2: 2 fields, the header has 3; mend or drop"),
}


@pytest.mark.parametrize("case", WRONG_AZURE)
def test_wrong_csv(tmp_path, case):
    text, message = WRONG_AZURE[case]
    with pytest.raises(TraceError, match=message):
        rows(AzureLLM, disk.azure_llm(tmp_path, text))


def test_no_file(tmp_path):
    with pytest.raises(TraceError, match=r"nowhere\.csv: the trace cannot be opened \(No such file"):
        rows(AzureLLM, {"format": "azure_llm", "path": tmp_path / "nowhere.csv"})


def test_wrong_functions(tmp_path):
    head = "app,func,end_timestamp,duration\n"
    for line, message in (
        ("a,f,1,nan", "duration is 'nan'"),
        ("a,f,1,-1", "duration is '-1'; it must be a finite number of at least 0"),
        ("a,,1,1", "func is ''"),
        ("a,f,9,1\na,f,5,1", r"functions\.csv:3: end_timestamp - duration is 4\.0; it is before"),
    ):
        with pytest.raises(TraceError, match=message):
            rows(AzureFunctions, disk.azure_functions(tmp_path, head + line + "\n"))


def test_wrong_lora_traces(tmp_path):
    with pytest.raises(TraceError, match=r"sequence\.csv:3: row is '4'; it is before"):
        rows(LoraSequence, disk.lora_sequence(tmp_path, "row,lora_ids\n5,\n4,L1\n"))


GOOD = disk.MOONCAKE[0]
WRONG_MOONCAKE = {
    "no object": ([3], "an? int, not an object"),
    "no field": ([{"timestamp": 0}], r"mooncake\.jsonl:1: no field 'input_length' \(it has timestamp\)"),
    "no time": ([{**GOOD, "timestamp": None}], "timestamp is None; it must be a finite number"),
    "true": ([{**GOOD, "output_length": True}], "output_length is True"),
    "too few ids": ([{**GOOD, "hash_ids": [1]}], "1024 tokens have 2 blocks of 512; give one id for each"),
    "no ids": ([{**GOOD, "hash_ids": ["a", "b"]}], "must be a list of whole numbers"),
    "back in time": ([{**GOOD, "timestamp": 5}, GOOD], r"mooncake\.jsonl:2: timestamp is 0; it is before"),
}


@pytest.mark.parametrize("case", WRONG_MOONCAKE)
def test_wrong_mooncake(tmp_path, case):
    lines, message = WRONG_MOONCAKE[case]
    with pytest.raises(TraceError, match=message):
        rows(Mooncake, disk.mooncake(tmp_path, lines))


def test_wrong_json(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"timestamp": 0,\n')
    with pytest.raises(TraceError, match=r"x\.jsonl:1: not JSON \("):
        rows(Mooncake, {"format": "mooncake", "path": path})


def test_reading_holds_a_row_at_a_time(tmp_path, monkeypatch):
    """The first rows of an endless file can be had."""

    class Endless(io.StringIO):
        def __init__(self) -> None:
            super().__init__()
            self.lines = itertools.chain([HEADER], itertools.repeat("2023-01-01 00:00:00.0,5,3\n"))

        def __next__(self) -> str:
            return next(self.lines)

    monkeypatch.setattr("chorus.perf.workload.traces.text.open_text", lambda path: Endless())
    source = AzureLLM(format="azure_llm", path=tmp_path)
    assert len(list(itertools.islice(source.rows(), 1000))) == 1000


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
        (0.0, "a", 30, 4), (1.5, None, 3, 2), (1.75, "b", 5, 6),
    ]  # fmt: skip
    assert [(each.rank, each.tenant, each.slo, each.session) for each in found] == [
        (8, "acme", None, None), (0, None, None, None), (16, "zebra", None, None),
    ]  # fmt: skip


def test_parts_of_a_workload_may_be_a_traces_and_others_laws(tmp_path):
    (tmp_path / "mine.csv").write_text("arrival,adapter,rank\n5,a,8\n6.5,b,16\n")
    fields = {"trace": {"format": "csv", "path": "mine.csv"}}
    with pytest.raises(WorkloadError, match=r"mine\.csv\) has no prompt_tokens, only adapter, arrival, rank"):
        list(WorkloadSpec.parse(fields, tmp_path))
    found = list(WorkloadSpec.parse({**fields, "lengths": {"kind": "alpaca"}}, tmp_path))
    assert [(each.arrival, each.rank) for each in found] == [(0.0, 8), (1.5, 16)]
    law = {"kind": "trace", "mode": "counts", "trace": fields["trace"]}
    drawn = WorkloadSpec.parse({**fields, "lengths": {"kind": "alpaca"}, "popularity": law, "requests": 2}, tmp_path)
    assert {each.rank for each in drawn} <= {8, 16}
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
        ("arrival\n2\n", {"speed": "x"}, r"names has 'speed', no field of a request; use some of arrival"),
    ],
)
def test_wrong_csv_is_told(tmp_path, text, names, message):
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises((TraceError, ValidationError), match=message):
        rows(Csv, {"format": "csv", "path": path, "names": names})


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
    head = "arrival,adapter,prompt_tokens,output_tokens,slo,tenant,session\n"
    path.write_text(f"{head}0,a,3,4,fast,t1,s1\n1,a,3,4,,t2,\n2,a,3,4,,,\n")
    trace = {"format": "csv", "path": str(path)}
    fields = {
        "arrivals": {"process": "replay", "trace": trace},
        "popularity": {"kind": "trace", "mode": "replay", "trace": trace},
        "lengths": {"kind": "trace", "mode": "replay", "trace": trace},
    }
    found = list(WorkloadSpec.parse(fields))
    assert [(each.arrival, each.adapter, each.prompt_tokens) for each in found] == [
        (0, "a", 3),
        (1, "a", 3),
        (2, "a", 3),
    ]
    assert [(each.slo, each.tenant, each.session) for each in found] == [
        ("fast", "t1", "s1"), (None, "t2", None), (None, None, None),
    ]  # fmt: skip
    assert {each.slo for each in WorkloadSpec.parse({**fields, "slo": {"batch": 1.0}})} == {"batch"}
