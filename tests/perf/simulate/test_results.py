"""Results of many seeds: medians and their intervals, in how many seeds an order holds, and where."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from statistics import median
from typing import IO, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorus.perf.simulate.__main__ import main
from chorus.perf.simulate.document import order_text
from chorus.perf.simulate.results import CONFIDENCE, Spread, interval, run_study
from chorus.perf.simulate.setup import StudyError
from tests.perf.simulate.test_studies import AXIS, TINY, changed, parsed
from tests.processes import runs

EQUAL = """
[[rows]]
name = "as two"

[[expect]]
metric = "ttft_mean"
order = ["two", "as two"]
source = "us"
"""


def published(first, second):
    """Two replicas, and one that serves one request at a time."""
    told = changed('[[rows]]\nname = "two"', f'[[rows]]\nname = "two"\npaper = {{ ttft_mean = {first} }}')
    return told.replace("ttft_mean = 0.5", f"ttft_mean = {second}").replace("mix = false", '"engine.max_num_seqs" = 1')


def study(text=TINY):
    return parsed(text)


def test_medians_and_intervals_are_those_of_the_seeds():
    each = [run_study(study(), seed=seed, seeds=1).to_json()["rows"] for seed in (4, 5, 6)]
    found = run_study(study(), seed=4, seeds=3).to_json()
    assert found["load"]["seeds"] == [4, 5, 6]
    for place, row in enumerate(found["rows"]):
        values = [rows[place]["ttft_mean"] for rows in each]
        assert len(set(values)) == 3
        assert row["ttft_mean"] == sorted(values)[1]
        assert found["spreads"][row["row"]]["ttft_mean"] == (sorted(values)[1], min(values), max(values))


def test_ten_seeds_are_the_rule_and_a_quick_look_takes_fewer():
    assert len(run_study(study(), scale=0.2).seeds) == 10
    assert len(run_study(study("quick_seeds = 2\n" + TINY), quick=True).seeds) == 2
    assert len(run_study(study("seeds = 12\n" + TINY), scale=0.2, seeds=4).seeds) == 4


def test_an_order_holds_in_so_many_seeds():
    (order,) = run_study(study(published(0.1, 0.5)), seeds=4).orders
    assert (order.order.rows, order.held, order.seeds) == (["two", "one"], 4, 4)
    (order,) = run_study(study(published(0.9, 0.5)), seeds=4).orders
    assert (order.order.rows, order.held, order.holds_in(0.01)) == (["one", "two"], 0, False)
    (pair,) = order.pairs
    assert (pair.low, pair.high, pair.held) == ("one", "two", 0)
    assert pair.gap.low <= pair.gap.median <= pair.gap.high < 0


def test_an_order_holds_in_a_seed_only_if_all_of_its_pairs_do():
    several = published(0.1, 0.5).replace("duration = 4.0", "duration = 0.4")
    third = '\n[[rows]]\nname = "other"\nset = { mix = false }\npaper = { ttft_mean = 0.2 }\n'
    found = run_study(study(several + third), seeds=10)
    (order,) = found.orders
    assert [(pair.low, pair.high) for pair in order.pairs] == [("two", "other"), ("two", "one"), ("other", "one")]
    assert max(0, sum(pair.held for pair in order.pairs) - 20) <= order.held <= min(pair.held for pair in order.pairs)


def test_a_row_may_be_claimed_to_be_the_least_of_several():
    least = """
[[rows]]
name = "one by one"
set = { replicas = 1, "engine.max_num_seqs" = 1 }

[[expect]]
metric = "ttft_mean"
order = ["two", "one", "one by one"]
source = "us"
least = true
"""
    (order,) = run_study(study(TINY + least), seeds=3).orders
    assert [(pair.low, pair.high) for pair in order.pairs] == [("two", "one"), ("two", "one by one")]
    assert order.held == min(pair.held for pair in order.pairs) == 3
    assert order_text(order) == "TTFT, ms: two < each of one, one by one"


def test_equals_are_in_no_order():
    assert [(order.held, order.seeds) for order in run_study(study(TINY + EQUAL), seeds=2).orders] == [(0, 2)]


@pytest.mark.wide
def test_processes_change_nothing():
    told = study(published(0.1, 0.5) + AXIS)
    alone, beside = (run_study(told, seeds=3, jobs=jobs, region=True) for jobs in (1, 2))
    assert json.dumps(alone.to_json()) == json.dumps(beside.to_json())


@pytest.mark.wide
def test_an_error_in_another_process_is_told_alike():
    wrong = study(changed("replicas = 2\n", "replicas = 2\nwarmup = 99.0\n"))
    for jobs in (1, 2):
        with pytest.raises(StudyError, match="tiny: row 'two': warmup is 99 s and no request"):
            run_study(wrong, jobs=jobs)


def test_a_region_shows_where_orders_hold():
    curve = 'rate = { curve = "linear", points = [[0.0, 5.0], [4.0, 15.0]] }'
    told = published(0.1, 0.5).replace("rate = 10.0", curve) + AXIS
    told += '[[region]]\nname = "replicas"\nfields = ["replicas", "engine.max_num_seqs"]\nvalues = [1, 2]\n'
    found = run_study(study(told.replace("set = { replicas = 1,", "set = {")), seeds=3, region=True)
    load, replicas = found.region
    assert (load.axis.name, [point for point, _ in load.points]) == ("load", [0.5, 1.0, 2.0])
    assert [point for point, _ in replicas.points] == [1, 2]
    assert all(order.seeds == 3 for strip in found.region for _, orders in strip.points for order in orders)
    quick = run_study(study(told.replace("set = { replicas = 1,", "set = {")), seeds=3, quick=True)
    assert load.points[1][1] == quick.orders
    parts = found.to_json()["region"]
    assert [part["axis"] for part in parts] == ["load", "replicas"]
    assert parts[0]["points"][2]["point"] == 2.0


def test_factors_multiply_what_each_row_has():
    told = study(TINY + AXIS.replace('"workload.arrivals.rate"', '"replicas", "workload.arrivals.rate"'))
    (axis,) = told.region
    setups = [told.setup_of(row, at=(axis, 2.0)) for row in told.rows]
    assert [setup.replicas for setup in setups] == [4, 2]
    assert [setup.workload["arrivals"]["rate"] for setup in setups] == [20.0, 20.0]
    assert told.setup_of(told.rows[0], at=(axis, 0.2)).replicas == 1


@given(st.integers(1, 60))
def test_the_interval_is_the_narrowest_that_is_sure_enough(count):
    rank, sure = interval(count)

    def inside(rank):  # each of `count` values falls below the median with a chance of one half
        return sum(math.comb(count, below) for below in range(rank + 1, count - rank)) / 2**count

    assert sure == pytest.approx(inside(rank))
    assert rank == 0 or sure >= CONFIDENCE
    if rank + 1 < count / 2:
        assert inside(rank + 1) < CONFIDENCE


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30))
def test_a_spread_encloses_its_median(values):
    spread = Spread.of(values)
    assert spread.low <= spread.median <= spread.high
    assert spread.median == pytest.approx(median(values), rel=1e-6)
    for bound in (spread.low, spread.high):
        assert any(bound == pytest.approx(value, rel=1e-6) for value in values), "an order statistic, but for rounding"


# -- the command


def test_the_check_asks_for_a_share_of_seeds(tmp_path, capsys):
    path = tmp_path / "mine.toml"
    path.write_text(published(0.9, 0.5))
    assert (main([str(path), "--quick"]), main([str(path), "--quick", "--check"])) == (0, 1)
    assert "~~0 of 3~~" in capsys.readouterr().out
    path.write_text(published(0.1, 0.5))
    assert main([str(path), "--quick", "--check", "1.0"]) == 0


def test_a_request_that_fails_fails_the_check_and_is_printed(tmp_path, capsys):
    study = tmp_path / "tiny.toml"
    study.write_text(TINY.replace("[quick]", "[setup.engine]\nmax_model_len = 60\n\n[quick]"))
    page = tmp_path / "page.md"
    assert main([str(study), "--seeds", "2", "--check", "0.01", "--markdown", str(page)]) == 1
    line = re.search(r"two: (\d+) of (\d+) requests were refused or failed", capsys.readouterr().out)
    assert line is not None
    assert 0 < int(line[1]) < int(line[2])
    assert line[0] in page.read_text()
    assert main([str(study), "--seeds", "2", "--json", "--check", "0.01"]) == 1
    assert json.loads(capsys.readouterr().out)["failed"]["two"] == [int(line[1]), int(line[2])]


def test_the_page_has_every_study_and_says_how_it_was_made(tmp_path, capsys):
    path, other, page = tmp_path / "mine.toml", tmp_path / "first.toml", tmp_path / "page.md"
    path.write_text(published(0.9, 0.5) + AXIS)
    other.write_text(published(0.9, 0.5))
    flags = ["--quick", "--region", "--seed", "4", "--seeds", "2", "--rows", "^(one|two)$", "--markdown", str(page)]
    assert main([str(other), str(path), *flags]) == 0
    text = page.read_text()
    assert "`chorus simulate mine --quick --region --seed 4 --seeds 2 --rows '^(one|two)$'`" in text
    assert text.startswith("# first") and text.index("# first") < text.index("# mine")
    assert "* ~~0 of 2~~: TTFT, ms: one < two" in text
    assert "| orders by load | x 0.5 | x 1 | x 2 |" in text
    assert "x 0.5" in capsys.readouterr().out
    assert main([str(other), "--quick", "--seeds", "1", "--markdown", str(page)]) == 0
    assert "# mine" not in page.read_text()


def test_rows_are_named_by_a_pattern_and_bring_the_rows_that_they_refer_to(tmp_path, capsys):
    study = parsed(TINY)
    assert [row.name for row in study.part("two").rows] == ["two"]
    assert [row.name for row in study.part("^one$").rows] == ["two", "one"]  # one refers to two
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    assert main([str(path), "--quick", "--rows", "three"]) == 2
    assert "rows: 'three' matches no row; the rows are two, one" in capsys.readouterr().err
    assert main([str(path), "--quick", "--rows", "("]) == 2
    assert "'(' is not a regular expression" in capsys.readouterr().err


WAIT = 120

MAPS = """
import time
from multiprocessing import active_children
from chorus.perf.simulate.results import map_of
if __name__ == "__main__":
    with map_of(2) as mapped:
        results = mapped(time.sleep, [1e6, 1e6])
        print(*(child.pid for child in active_children()), flush=True)
        list(results)
"""


@pytest.mark.wide
def test_a_command_that_is_killed_leaves_no_simulation(tmp_path):
    script = tmp_path / "maps.py"
    script.write_text(MAPS)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as command:
        pids = cast(IO[str], command.stdout).readline().split()
        assert len(pids) == 2
        command.kill()
    deadline = time.monotonic() + WAIT
    while left := [pid for pid in pids if runs(pid)]:
        assert time.monotonic() < deadline, f"{left} outlive the command that began them"
        time.sleep(0.05)
