"""Studies: valid fields of their files, their results, and published orders of rows that they reproduce."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib

import pytest

from chorus.perf.gate.__main__ import BASELINES
from chorus.perf.simulate.__main__ import main
from chorus.perf.simulate.results import run_study
from chorus.perf.simulate.setup import StudyError
from chorus.perf.simulate.study import load_study, parse_study, shipped_studies
from chorus.perf.workload import WorkloadError, WorkloadSpec

pytestmark = pytest.mark.wide

TINY = """
title = "tiny"
source = "nobody"
why = "it is made up"
metrics = ["ttft_mean", "requests", "ttft_increase"]

[setup]
profile = "a10-llama2-7b-bgmv"
replicas = 2
router = { policy = "most_idle" }

[setup.workload]
duration = 4.0
arrivals = { process = "poisson", rate = 10.0 }
popularity = { kind = "uniform" }
lengths = { kind = "alpaca" }
adapters = { count = 5, ranks = { kind = "fixed", rank = 8 } }

[quick]
"workload.duration" = 1.0

[[rows]]
name = "two"

[[rows]]
name = "one"
reference = "two"
set = { replicas = 1, mix = false }
paper = { ttft_mean = 0.5 }
"""

AXIS = """
[[region]]
name = "load"
fields = ["workload.arrivals.rate"]
factors = [0.5, 1.0, 2.0]
"""


def parsed(text):
    return parse_study(tomllib.loads(text), "tiny")


def changed(old, new):
    assert old in TINY
    return TINY.replace(old, new, 1)


def quick(name):
    """Rows of a study's quick run as the gate's baseline has them, to which it holds every run to the last digit."""
    text = (BASELINES / "simulate" / f"{name}.any.json").read_text("utf-8")
    rows = {}
    for place, (value,) in json.loads(text)["values"].items():
        row, _, metric = place.rpartition(" ")
        rows.setdefault(row, {})[metric] = value
    return rows


def medians(results):
    return {row: {name: each.median for name, each in found.items()} for row, found in results.spreads.items()}


def outcome(name, **options):
    results = run_study(load_study(name), seeds=1, **options)
    return results, medians(results)


# -- files


@pytest.mark.parametrize("name", shipped_studies())
def test_shipped_studies_are_whole(name):
    study = load_study(name)
    assert study.name == name
    assert len(study.why.split()) > 10, "it says why the numbers differ"
    assert study.rows


WRONG = {
    "title": (changed('title = "tiny"\n', ""), "tiny.toml: title: is missing"),
    "a metric": (changed('"ttft_mean", "requests"', '"speed"'), "'speed' is not a metric; use one of requests"),
    "a field": (changed("replicas = 2", "replica = 2"), "row 'two': replica: no such field"),
    "a value": (changed("replicas = 2", "replicas = 0"), "row 'two': replicas is 0"),
    "a row's value": (changed("replicas = 1,", "replicas = -1,"), "row 'one': replicas is -1"),
    "a policy": (changed("most_idle", "best"), "router.policy: is 'best'; use one of first"),
    "a policy's field": (changed("most_idle", "rank_aware"), "rank-aware needs router.slo; set it"),
    "rows": (
        changed('title = "tiny"', 'title = "tiny"\nquick_rows = "three"'),
        "quick_rows is 'three', which matches no row's",
    ),
    "a reference": (changed('reference = "two"', 'reference = "three"'), "'three' is not a row; name one of two, one"),
    "an axis": (TINY + AXIS.replace("factors", "values = [1]\nfactors"), "'load' needs either factors or values"),
    "an axis's field": (
        TINY + AXIS.replace("arrivals.rate", "speed"),
        "region.load: workload.speed is None",
    ),
    "an axis's value": (
        TINY + '[[region]]\nname = "size"\nfields = ["replicas"]\nvalues = [1, 0]\n',
        "row 'two': replicas is 0",
    ),
    "two names": (changed('name = "one"', 'name = "two"'), "two rows have one name"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_studies_are_refused(case):
    text, message = WRONG[case]
    with pytest.raises(StudyError) as caught:
        parse_study(tomllib.loads(text), "tiny", "tiny.toml")
    assert str(caught.value).startswith("tiny")
    assert message in str(caught.value)


def test_a_file_that_is_no_toml_is_refused(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY + "[")
    with pytest.raises(WorkloadError, match=r"tiny\.toml: not TOML"):
        load_study(str(path))


@pytest.mark.parametrize("name", sorted(set(shipped_studies()) - {"preloading"}))  # of which the trace is not here
def test_workloads_of_shipped_studies_can_be_made(name):
    study = load_study(name)
    for row in study.rows:
        assert next(iter(WorkloadSpec.parse(study.setup_of(row, quick=True).workload))).id == 0


RUN_WRONG = {
    "workload": (changed("rate = 10.0", "rate = -1.0"), "arrivals.rate"),
    "engine": (changed("replicas = 2\n", "replicas = 2\nengine = { max_num_seqs = 0 }\n"), "engine: max_num_seqs is 0"),
    "terms": (changed("replicas = 2\n", 'replicas = 2\nterms = { "speed.x" = 1.0 }\n'), "terms.speed.x: no such cost"),
    "ranks": (changed(', ranks = { kind = "fixed", rank = 8 }', ""), "adapters have no rank"),
    "warmup": (changed("replicas = 2\n", "replicas = 2\nwarmup = 99.0\n"), "warmup is 99 s and no request"),
    "a metric": (changed('"requests"', '"slo_attainment"'), "does not have slo_attainment"),
}


@pytest.mark.parametrize("case", RUN_WRONG)
def test_what_can_only_be_seen_when_it_runs_is_refused_by_name(case):
    text, message = RUN_WRONG[case]
    with pytest.raises(StudyError, match="tiny: ") as caught:
        run_study(parsed(text))
    assert message in str(caught.value)


# -- results


@pytest.mark.wide
def test_results_are_the_same_every_time_and_follow_seed_and_scale():
    study = parsed(TINY)
    first, again = (json.dumps(run_study(study, seeds=2).to_json()) for _ in range(2))
    assert first == again
    found = json.loads(first)
    assert found["study"] == "tiny"
    assert [row["row"] for row in found["rows"]] == ["two", "one"]
    assert found["rows"][0]["ttft_increase"] == 0
    assert found["rows"][1]["ttft_increase"] > 0
    other = run_study(study, seed=1, seeds=2).to_json()
    assert other["rows"] != found["rows"]
    twice, quick = (run_study(study, seeds=2, scale=2.0).to_json(), run_study(study, seeds=2, quick=True).to_json())
    assert quick["rows"][0]["requests"] < found["rows"][0]["requests"] < twice["rows"][0]["requests"]


def test_the_quick_version_may_have_fewer_rows():
    study = parsed(changed('title = "tiny"', 'title = "tiny"\nquick_rows = "tw"'))
    assert list(run_study(study, quick=True, seeds=1).spreads) == ["two"]
    assert list(run_study(study, seeds=1, scale=0.5).spreads) == ["two", "one"]


def test_where_requests_wait_adapters_that_are_there_go_first_and_others_are_read_ahead():
    rows = quick("adapter-scheduling")
    for lengths, gain in (("short", 1.05), ("long", 1.04)):
        fifo, resident, prefetch, limit, _ = (
            found for name, found in rows.items() if name.startswith(f"{lengths}, closed")
        )
        cold = [found["cold_starts_per_second"] for found in (limit, prefetch, resident, fifo)]
        assert cold == sorted(set(cold))
        assert fifo["ttft_mean"] > gain * resident["ttft_mean"]
        assert resident["ttft_p99"] > fifo["ttft_p99"], "who is overtaken without end waits longest"
        assert limit["ttft_mean"] > prefetch["ttft_mean"]
    for load in (50, 80):
        alike = [found["ttft_mean"] for name, found in rows.items() if name.startswith(f"short, {load} %")]
        assert len(set(alike[:3])) == 1, "nobody waits"
        assert alike[4] < 0.9 * alike[0]


def test_ranks_pay_where_they_differ_and_do_not_hurt_where_they_do_not():
    rows = quick("rank-skew")
    for kernel in ("BGMV", "BGMV apart"):
        aware, hidden, idle = (
            rows[f"{kernel}, {name}"]["time_per_token_mean"] for name in ("rank-aware", "without ranks", "most idle")
        )
        assert aware < 0.98 * hidden
        assert aware < 0.98 * idle
    rows = quick("rank-even")
    for kernel in ("BGMV", "MBGMV", "BGMV apart"):
        aware, idle = (rows[f"{kernel}, {name}"]["time_per_token_mean"] for name in ("rank-aware", "most idle"))
        assert aware < 1.02 * idle


def test_cold_starts_take_a_larger_share_at_higher_rates():
    rows = quick("cold-start-share")
    shares = [rows[f"{rate} requests/s, on demand"]["cold_share"] for rate in (3, 6, 9)]
    assert shares[1] > 1.2 * shares[0]
    assert shares[2] > 1.1 * shares[1]
    assert rows["9 requests/s, cached"]["cold_share"] == 0
    assert rows["9 requests/s, streamed and kept"]["cold_share"] < 0.3 * shares[0]


@pytest.mark.slow
def test_the_share_of_cold_starts_is_the_published_one_where_every_request_has_one():
    """CaraServe's Fig. 3 is not fitted; the popularity of its adapters, which it does not give, is left out."""
    study = load_study("cold-start-share")
    alone = study.model_copy(update={"rows": [row for row in study.rows if row.name.endswith("no adapter twice")]})
    rows = medians(run_study(alone, seeds=1))
    for rate, published in ((3, 0.10), (6, 0.16), (9, 0.20)):
        assert rows[f"{rate} requests/s, no adapter twice"]["cold_share"] == pytest.approx(published, rel=0.1)


@pytest.mark.slow
def test_loading_on_demand_costs_what_it_is_fitted_to():
    """CaraServe §7.2; the time to first token is not fitted. Points that settle slowly, near the card's limit, run for
    as long as the study says.
    """
    study = load_study("cold-start")
    slow = {row.name: row for row in study.rows if row.name in ("9/s, rank 64, cached", "9/s, rank 64, on demand")}
    found = run_study(study.model_copy(update={"rows": list(slow.values())}), seeds=1)
    rows = quick("cold-start") | medians(found)
    published = {"9/s, rank 64": (0.71, 0.50), "9/s, rank 32": (0.28, 0.25), "6/s, rank 64": (0.25, 0.24)}
    for name, (time_per_token, e2e) in published.items():
        row = rows[f"{name}, on demand"]
        assert row["time_per_token_increase"] == pytest.approx(time_per_token, abs=0.07)
        assert row["e2e_increase"] == pytest.approx(e2e, abs=0.07)
    worst = rows["9/s, rank 64, on demand"]
    for name in ("9/s, rank 32, on demand", "6/s, rank 64, on demand", "9/s, rank 64, streamed"):
        for metric in ("ttft_increase", "time_per_token_increase", "e2e_increase"):
            assert worst[metric] > 1.3 * rows[name][metric] > 0


def test_rank_aware_routing_keeps_more_requests_within_the_slo():
    rows = quick("rank-aware-routing")
    for kernel in ("MBGMV", "BGMV"):
        aware, idle, chance, packed = (
            rows[f"{kernel}, {name}"] for name in ("rank-aware", "most idle", "random", "first fit")
        )
        for other in (idle, chance, packed):
            assert aware["time_per_token_mean"] < 0.95 * other["time_per_token_mean"]
            assert aware["slo_attainment"] > other["slo_attainment"] + 0.03
        assert packed["time_per_token_mean"] > 1.05 * chance["time_per_token_mean"]


def test_consolidation_frees_replicas():
    rows = quick("consolidation")
    assert rows["consolidate"]["replicas_in_use"] < 0.5 * rows["most idle"]["replicas_in_use"]
    assert rows["consolidate"]["busy_batch"] > 2 * rows["random"]["busy_batch"]


# -- the command


def test_the_list_names_every_study(capsys):
    assert main(["--list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in shipped_studies())


@pytest.mark.slow
def test_one_line_of_json_per_study(capsys, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(TINY)
    assert (
        main(
            [
                str(path),
                "scaling",
                "--quick",
                "--rows",
                "^(one|two|fixed, 3)$",
                "--json",
                "--time",
                "--out",
                str(tmp_path),
            ]
        )
        == 0
    )
    printed = capsys.readouterr()
    assert [json.loads(line)["study"] for line in printed.out.splitlines()] == ["mine", "scaling"]
    assert "MiB at most" in printed.err
    assert json.loads((tmp_path / "mine.json").read_text()) == json.loads(printed.out.splitlines()[0])


@pytest.mark.wide
def test_the_table_shows_both_values(capsys, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(TINY.replace("duration = 4.0", "duration = 30.0"))
    assert main([str(path), "--seeds", "2"]) == 0
    printed = capsys.readouterr().out
    assert "(500)" in printed
    assert "it is made up" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a study"),
        (["nowhere.toml"], "nowhere.toml is neither a file nor a shipped study; shipped are adapter-locality"),
        (["scaling", "--scale", "0"], "--scale: is 0"),
        (["scaling", "--seed", "-1"], "--seed: is -1"),
        (["scaling", "--seeds", "0"], "--seeds: is 0; give 1 or more"),
        (["scaling", "--jobs", "0"], "--jobs: is 0; give 1 or more"),
        (["scaling", "--check", "1.5"], "--check: is 1.5; give a number above 0, at most 1"),
    ],
)
def test_wrong_usage_is_told(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_failed_order_fails_the_check(tmp_path, capsys):
    path = tmp_path / "mine.toml"
    path.write_text(TINY.replace('name = "two"', 'name = "two"\npaper = { ttft_mean = 0.9 }'))
    assert (main([str(path), "--quick"]), main([str(path), "--quick", "--check"])) == (0, 1)
    assert "~~0 of 3~~" in capsys.readouterr().out


MINE = changed(
    TINY[TINY.index("[setup.workload]") : TINY.index("[quick]")],
    """[setup.workload]
trace = { format = "csv", path = "mine.csv" }

""",
).replace('"workload.duration" = 1.0', '"workload.requests" = 2')
REQUESTS = "arrival,adapter,prompt_tokens,output_tokens,rank\n0,a,30,4,8\n0.5,b,40,5,64\n0.7,a,30,4,8\n"


def test_traces_lie_beside_their_study(tmp_path, monkeypatch, capsys):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "study.toml").write_text(MINE)
    (tmp_path / "here" / "mine.csv").write_text(REQUESTS)
    monkeypatch.chdir(tmp_path)
    assert main(["here/study.toml", "--json", "--seeds", "1"]) == 0
    assert [row["requests"] for row in json.loads(capsys.readouterr().out)["rows"]] == [3, 3]


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        (REQUESTS.replace("40", "many"), "mine.csv:3: prompt_tokens is 'many'; it must be a whole number"),
        (REQUESTS.replace(",64", ","), "workload.adapters.ranks: the adapters have no rank; set it"),
        (None, "mine.csv: the trace cannot be opened"),
    ],
)
def test_a_wrong_trace_is_told_in_a_line(tmp_path, requests, message, capsys):
    (tmp_path / "study.toml").write_text(MINE)
    if requests is not None:
        (tmp_path / "mine.csv").write_text(requests)
    assert main([str(tmp_path / "study.toml"), "--seeds", "1"]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert len(told.splitlines()) == 1


@pytest.mark.wide
def test_no_tensor_library_is_needed():
    code = "import sys; sys.modules['torch'] = None; from chorus.perf.simulate.__main__ import main; sys.exit(main())"
    command = [
        sys.executable,
        "-c",
        code,
        "fairness",
        "--rows",
        "^alone$",
        "--seeds",
        "1",
        "--quick",
        "--json",
        "--scale",
        "0.1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
