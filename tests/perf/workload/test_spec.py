"""Specifications: the same requests always, parts that do not disturb each other, errors, files."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from chorus.perf.workload import WorkloadError, WorkloadSpec

from . import traces_on_disk as disk

FIELDS = {
    "seed": 11,
    "duration": 30,
    "arrivals": {"process": "poisson", "rate": {"curve": "linear", "points": [[0, 10], [20, 200]]}},
    "popularity": {"kind": "zipf"},
    "adapters": {"count": 20, "base_share": 0.1, "ranks": {"kind": "choice", "ranks": [8, 16, 32, 64]}},
    "lengths": {"kind": "sharegpt"},
    "tenants": {"interactive": 0.8, "batch": 0.2},
}
KNOWN = [
    (0, 0.096917667, "adapter-00004", 293, 44, 32, "batch"),
    (1, 0.226861377, "adapter-00003", 2, 150, 64, "interactive"),
    (2, 0.326898436, "adapter-00000", 40, 57, 64, "interactive"),
]
TOML = """
seed = 3
requests = 200
[arrivals]
process = "poisson"
rate = 7
[popularity]
kind = "uniform"
[lengths]
kind = "alpaca"
"""


@pytest.mark.wide
def test_same_specification_same_requests_in_another_process():
    code = (
        "import json, sys, hashlib; sys.modules['torch'] = None; from chorus.perf.workload import WorkloadSpec; "
        "print(hashlib.sha256(repr(list(WorkloadSpec.parse(json.loads(sys.argv[1])))).encode()).hexdigest())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, json.dumps(FIELDS)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    mine = hashlib.sha256(repr(list(WorkloadSpec.parse(FIELDS))).encode()).hexdigest()
    assert result.stdout.strip() == mine


def test_first_requests_of_a_known_workload():
    """A change here is a change of every workload: benchmarks before and after it do not compare."""
    first = [request[:7] for _, request in zip(range(3), WorkloadSpec.parse(FIELDS), strict=False)]
    assert first == KNOWN


def test_another_seed_is_another_workload():
    assert list(WorkloadSpec.parse(FIELDS)) != list(WorkloadSpec.parse({**FIELDS, "seed": 12}))


@pytest.mark.parametrize(
    ("change", "columns"),
    [
        ({"lengths": {"kind": "alpaca"}}, (0, 1, 2, 5, 6)),
        ({"popularity": {"kind": "uniform"}}, (0, 1, 3, 4)),
        ({"arrivals": {"process": "poisson", "rate": 100}}, (0, 2, 3, 4, 5, 6)),
        ({"adapters": {"count": 20, "base_share": 0.1}}, (0, 1, 2, 3, 4, 6)),
        ({"tenants": None}, (0, 1, 2, 3, 4, 5)),
    ],
)
def test_parts_do_not_disturb_each_other(change, columns):
    before, after = list(WorkloadSpec.parse(FIELDS)), list(WorkloadSpec.parse({**FIELDS, **change}))
    assert before != after
    for one, other in zip(before, after, strict=False):
        assert [one[column] for column in columns] == [other[column] for column in columns]


def test_an_adapter_has_one_tenant():
    fields = {**FIELDS, "duration": 100, "tenants": {"large": 0.7, "small": 0.3}}
    fields["adapters"] = {**FIELDS["adapters"], "base_share": 0.3}
    found = list(WorkloadSpec.parse(fields))
    of_adapter = {}
    for request in found:
        if request.adapter is not None:
            assert of_adapter.setdefault(request.adapter, request.tenant) == request.tenant
    assert set(of_adapter.values()) == {"large", "small"}
    base = [request.tenant for request in found if request.adapter is None]
    assert base.count("small") / len(base) == pytest.approx(0.3, rel=0.3)
    alone = WorkloadSpec.parse({**FIELDS, "tenants": None})
    assert [request.tenant for request in alone][:3] == [None] * 3


def test_files(tmp_path):
    toml = tmp_path / "w.toml"
    toml.write_text(TOML)
    assert len(list(WorkloadSpec.load(toml))) == 200
    as_json = tmp_path / "w.json"
    as_json.write_text(WorkloadSpec.load(toml).model_dump_json())
    assert WorkloadSpec.load(as_json) == WorkloadSpec.load(toml)
    changed = WorkloadSpec.load(toml, ["seed=5", "arrivals.rate=9", "popularity.kind=distinct"])
    assert (changed.seed, changed.model_dump()["arrivals"]["rate"], changed.popularity.kind) == (5, 9.0, "distinct")


def test_traces_lie_beside_the_specification(tmp_path):
    disk.azure_llm(tmp_path)
    path = tmp_path / "w.toml"
    names = ", ".join(f'{field} = "{name}"' for field, name in disk.AZURE_NAMES.items())
    trace = f'{{format = "csv", path = "azure.csv", names = {{ {names} }} }}'
    path.write_text(
        f'[arrivals]\nprocess = "replay"\ntrace = {trace}\n[popularity]\nkind = "distinct"\n'
        f'[lengths]\nkind = "trace"\ntrace = {trace}\n'
    )
    assert [request.prompt_tokens for request in WorkloadSpec.load(path)] == [100, 2000, 40]


WRONG = {
    "endless": ({"duration": None}, "the workload never ends; set duration"),
    "unknown": ({"colour": 1}, "workload: colour: no such field here"),
    "inner unknown": ({"adapters": {"number": 3}}, r"adapters\.number: no such field here"),
    "missing": ({"arrivals": {"process": "poisson"}}, r"arrivals\.rate: is missing; set it"),
    "no kind": ({"lengths": {}}, "lengths: 'kind' is missing; say which"),
    "unknown kind": ({"lengths": {"kind": "azure_conv"}}, r"lengths\.kind is 'azure_conv'; use one of 'laws', "),
    "text": ({"duration": "long"}, "duration is 'long': Input should be a valid number"),
    "negative": ({"seed": -1}, "seed is -1: "),
    "no rate": ({"arrivals": {"process": "poisson", "rate": 0}}, r"arrivals\.rate is 0: "),
    "rate": (
        {"arrivals": {"process": "poisson", "rate": {"curve": "square"}}},
        r"arrivals\.rate.*with the curve linear",
    ),
    "points": (
        {"arrivals": {"process": "poisson", "rate": {"curve": "linear", "points": [[5, 1], [0, 1]]}}},
        "put them in order of time",
    ),
    "no requests ever": (
        {"arrivals": {"process": "poisson", "rate": {"curve": "linear", "points": [[0, 0]]}}},
        "give at least one a positive rate",
    ),
    "weights": (
        {"adapters": {"ranks": {"kind": "choice", "ranks": [8, 16], "weights": [1]}}},
        "1 weights for 2 ranks; give one for each",
    ),
    "alpha": ({"popularity": {"kind": "zipf", "alpha": 1}}, r"popularity\.alpha is 1: "),
    "no tenants": ({"tenants": {}}, "tenants is {}: Dictionary should have at least 1 item"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_specifications(case):
    change, message = WRONG[case]
    with pytest.raises(WorkloadError, match=message):
        WorkloadSpec.parse({**FIELDS, **change})


def test_all_errors_at_once():
    with pytest.raises(WorkloadError) as caught:
        WorkloadSpec.parse({"seed": "x", "popularity": {"kind": "zipf", "alpha": 0}})
    lines = str(caught.value).splitlines()
    assert len(lines) == 4  # seed, alpha, arrivals, lengths


def test_uses_that_a_trace_has_no_column_for(tmp_path):
    replay = {"process": "replay", "trace": disk.adapters(tmp_path)}
    with pytest.raises(WorkloadError, match=r"arrivals: the trace .*has no arrival, only adapter"):
        WorkloadSpec.parse({**FIELDS, "arrivals": replay})
    popularity = {"kind": "trace", "trace": disk.azure_llm(tmp_path)}
    with pytest.raises(WorkloadError, match=r"popularity: the trace .*has no adapter"):
        list(WorkloadSpec.parse({**FIELDS, "popularity": popularity}))


def test_laws_that_need_a_number_of_requests(tmp_path):
    replay = {"process": "replay", "trace": disk.azure_llm(tmp_path)}
    with pytest.raises(WorkloadError, match=r"set `requests`, or `adapters\.count`"):
        list(WorkloadSpec.parse({**FIELDS, "adapters": {}, "arrivals": replay}))


def test_broken_files(tmp_path):
    path = tmp_path / "w.toml"
    path.write_text(TOML)
    assert len(list(WorkloadSpec.load(path, ["requests=5"]))) == 5
    for setting in ("seed", "seed=x"):
        with pytest.raises(WorkloadError, match="seed"):
            WorkloadSpec.load(path, [setting])
    with pytest.raises(WorkloadError, match=r"nowhere\.toml: can't be read"):
        WorkloadSpec.load(tmp_path / "nowhere.toml")
    path.write_text("seed =")
    with pytest.raises(WorkloadError, match=r"w\.toml: not TOML \("):
        WorkloadSpec.load(path)
    with pytest.raises(WorkloadError, match=r"w\.json: not JSON \("):
        WorkloadSpec.load(path.rename(tmp_path / "w.json"))


def test_no_trace_is_part_of_the_package():
    package = Path(str(sys.modules["chorus.perf.workload"].__file__)).parent
    assert {path.suffix for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts} == {".py"}
