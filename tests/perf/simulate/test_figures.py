"""The papers' figures: all are there with their sources, their computed values, and the table."""

from __future__ import annotations

import json
import re
import tomllib

import pytest

from chorus.perf.simulate.__main__ import main
from chorus.perf.simulate.figures.figure import UNITS, load_figures, parse_figures
from chorus.perf.simulate.figures.results import compute, document
from chorus.perf.simulate.setup import Setup, StudyError
from chorus.perf.simulate.static_batches import static_batches
from chorus.perf.simulate.study import load_study
from chorus.perf.workload import WorkloadSpec

pytestmark = pytest.mark.wide

FIGURES = {figure.name: figure for figure in load_figures()}

#: Every figure and table with numbers that the papers' texts print.
ASKED = {
    "caraserve": ["2", "3", "4", "5", "9", "10", "12", "13", "14", "15", "16", "17", "18", "19", "20", "sizes"],
    "punica": ["1", "7", "8", "9", "10", "11", "12", "13", "loads"],
    "dlora": ["2b", "5", "9", "10", "11", "12", "13", "14", "15", "sizes"],
    "slora": ["table"],
    "article": ["sizes", "overhead", "scheduling"],
}

#: Numbers that must be among a figure's published ones.
NUMBERS = {
    "caraserve-3": [10, 16, 20],
    "caraserve-5": [34.8, 35.8, 35.3, 35.9],
    "caraserve-9": [0.96],
    "caraserve-10": [412, 451, 22, 71, 78, 11, 50, 50, 9],
    "caraserve-13": [88, 126, 36, 28, 36, 5, 25, 31, 6, 42, 41, 1, 25, 25, 10, 24, 20, 9],
    "caraserve-14": [31, 22, 9, 8, 3, 3, 6, 3, 2, 39, 39, 7, 34, 32, 7, 31, 31, 8],
    "caraserve-15": [20.2, 18.5],
    "caraserve-19": [99, 16.1, 18.8, 36.4, 99, 36.0],
    "caraserve-20": [80],
    "punica-1": [11, 13, 17, 34, 32],
    "punica-8": [37, 116, 46, 40],
    "punica-9": [72, 75, 89, 118],
    "punica-10": [72],
    "punica-12": [457],
    "slora-table": [8.05, 7.61, 599, 2019, 20841, 26218, 5.5],
    "dlora-5": [38.9],
    "dlora-10": [3.9, 2.4, 5.2, 2.5],
    "dlora-11": [5.30, 13.93, 18.92, 3.6, 1.4],
    "dlora-14": [1.8],
    "article-overhead": [28.5, 3.1, 10.9, 48.2, 8.6],
}


@pytest.mark.slow
def test_the_baseline_of_punica_11_is_reproduced_before_anything_is_compared_with_it():
    figure = FIGURES["punica-11"]
    runs = {"vLLM, Identical", "13B: vLLM, Identical"}
    figure = figure.model_copy(
        update={
            "runs": {run: figure.runs[run] for run in runs},
            "rows": [row for row in figure.rows if row.name in runs],
            "orders": [],
        }
    )
    (result,) = compute([figure], seeds=1)
    for line in result.lines:
        assert line.ratio == pytest.approx(1, abs=0.03), line.row.name


def test_every_figure_that_was_asked_for_is_there():
    assert sorted(FIGURES) == sorted(f"{paper}-{name}" for paper, names in ASKED.items() for name in names)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_figure_has_all_of_its_published_numbers(name):
    left = [row.published for row in FIGURES[name].rows]
    for number in NUMBERS[name]:
        left.remove(number)
    assert not [number for number in left if isinstance(number, float)]


def test_punica_11_has_both_models_and_vllm_beside_them():
    published = {row.name: row.published for row in FIGURES["punica-11"].rows}
    for popularity in ("Distinct", "Uniform", "Skewed", "Identical"):
        assert published[f"Punica, {popularity}"] == 1044
        assert published[f"13B: Punica, {popularity}"] == 693
    assert published["vLLM, Identical"] == 1140
    assert published["13B: vLLM, Identical"] == 789
    assert published["Punica over vLLM, Distinct"] == 12


@pytest.mark.parametrize("name", FIGURES)
def test_workloads_of_figures_can_be_made(name):
    figure = FIGURES[name]
    for run in figure.simulated:
        assert next(iter(WorkloadSpec.parse(figure.setup_of(run, quick=True).workload))).id == 0


@pytest.mark.parametrize("name", FIGURES)
def test_every_row_has_a_source_and_says_how_ours_is_found_or_why_not(name):
    figure = FIGURES[name]
    assert figure.setting
    for row in figure.rows:
        assert re.search(r"§|Fig|abstract|table|\"|ours|above|over|<|list of", row.source), row.source
        if row.run is not None:
            assert row.fitted or row.why or figure.why, f"{row.name} says nothing of why it may differ"
        elif row.published is None or row.why or figure.why:
            assert row.open is None or row.why == "", "it is open, or says why nothing is computed"
        else:
            assert row.open, f"{row.name} is neither computed nor names the mechanism that it waits for"
    for system in figure.systems.values():
        assert len(system.does.split()) > 2, "it says what the baseline does"


#: Beginnings of the texts' file names.
TEXTS = {"caraserve": "000_", "dlora": "001_", "punica": "002_", "article": "004_"}


@pytest.mark.parametrize("paper", TEXTS)
def test_quotes_are_the_papers_own_words(paper, shared_data):
    found = list((shared_data.parent / "papers").glob(f"{TEXTS[paper]}*.txt"))
    if not found:
        pytest.skip("the papers' texts are not at hand")
    text = words(found[0].read_text("utf-8"))
    for figure in FIGURES.values():
        for each in [*figure.rows, *figure.orders] if figure.name.startswith(paper) else ():
            for quote in re.findall('"([^"]+)"', each.source):
                for part in quote.split("..."):
                    assert words(part) in text, f"{figure.name}: {quote}"


def words(text):
    """Words of four letters and more, without the mark-up that the texts add to numbers and symbols."""
    found = re.findall("[a-z]{4,}", text.lower())
    return " ".join(["", *(word for word in found if word not in ("percent", "times", "mathrm", "math")), ""])


@pytest.mark.parametrize("name", FIGURES)
def test_closed_forms_reproduce_what_they_claim_to(name):
    figure = FIGURES[name]
    if figure.simulated:
        figure = figure.model_copy(
            update={
                "rows": [row for row in figure.rows if not set(row.runs) & set(figure.simulated)],
                "orders": [],
                "runs": {run: figure.runs[run] for run in figure.runs.keys() - set(figure.simulated)},
            }
        )
    (result,) = compute([figure], seeds=1)
    for line in result.lines:
        if line.row.tolerance is not None:
            assert line.ratio == pytest.approx(1, abs=line.row.tolerance), line.row.name


def test_fig_5_decides_as_the_paper_does():
    (result,) = compute([FIGURES["caraserve-5"]], seeds=1)
    assert [(claim.held, claim.seeds) for claim in result.claims] == [(1, 1), (1, 1)]


def test_a_running_request_waits_for_the_loads_of_those_that_join_it():
    (result,) = compute([FIGURES["caraserve-2"]], seeds=1)
    ours = result.lines[0].ours
    assert ours is not None
    assert ours.median == pytest.approx(2, rel=1e-5)


# -- valid files


TINY = """
paper = "a paper"

[[figures]]
name = "tiny"
title = "Fig. 0"
setting = "any"

[figures.setup]
profile = "a10-llama2-7b-bgmv"

[figures.setup.workload]
requests = 20
arrivals = { process = "poisson", rate = 10.0 }
popularity = { kind = "uniform" }
lengths = { kind = "alpaca" }
adapters = { count = 5, ranks = { kind = "fixed", rank = 8 } }

[figures.systems.slow]
does = "takes longer"
terms = { "overhead.base" = { value = 0.1, source = "made up" } }

[figures.runs]
one = {}
two = { system = "slow" }
load = { price = { of = "load", profile = "a10-llama2-7b-bgmv", rank = 8 } }

[[figures.rows]]
name = "first"
published = 100.0
unit = "ms"
source = "§1: words"
run = "one"
metric = "ttft_mean"

[[figures.rows]]
name = "second"
unit = "ms"
source = "§1: words"
run = "two"
metric = "ttft_mean"

[[figures.rows]]
name = "loading"
unit = "ms"
source = "§1: words"
run = "load"

[[figures.rows]]
name = "later"
published = 3.0
source = "§1: words"
open = "magic"

[[figures.orders]]
order = ["first", "second"]
source = "§1: words"

[[figures.orders]]
alike = true
within = 0.05
order = ["first", "second"]
source = "§1: words"
"""


def parsed(text):
    return parse_figures(tomllib.loads(text))


def changed(old, new):
    assert old in TINY
    return TINY.replace(old, new, 1)


@pytest.mark.parametrize("name", FIGURES)
def test_figures_name_what_there_is(name):
    figure = FIGURES[name]
    rows = [row.name for row in figure.rows]
    assert len(set(rows)) == len(rows)
    for run in figure.runs.values():
        assert run.system is None or run.system in figure.systems
        if run.row is not None:
            assert figure.study is not None and run.row in {row.name for row in load_study(figure.study).rows}
    for row in figure.rows:
        assert row.unit in UNITS and figure.runs.keys() >= set(row.runs)
        assert (row.over is None) == (row.form == "value"), "a comparison has both"
        assert not row.also or row.over is not None, "the first pair is run and over"
        assert row.run is None or row.open is None, "what is open has no run"
    computed = {row.name for row in figure.rows if row.run is not None}
    assert all(set(order.rows) <= computed for order in figure.orders)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('unit = "ms"', 'units = "ms"'),
        ('system = "slow"', 'systems = "slow"'),
        ("requests = 20", "request = 20"),
        ('0.05\norder = ["first", "second"]', '0.05\norder = ["first"]'),
    ],
)
def test_what_is_no_field_is_refused(old, new):
    with pytest.raises(StudyError, match="tiny"):
        compute(parsed(changed(old, new)), seeds=1)


# -- results


def test_rows_are_medians_over_seeds_and_orders_are_counted_seed_by_seed():
    (result,) = compute(parsed(TINY), seeds=3)
    first, second, loading, later = result.lines
    (alone,) = compute(parsed(TINY), seeds=1)
    seed, ours, slow, load = (line.ours for line in (alone.lines[0], first, second, loading))
    assert seed and ours and slow and load
    assert seed.low == seed.high == seed.median, "one seed"
    assert ours.low < ours.median < ours.high
    assert ours.low <= seed.median <= ours.high
    assert first.ratio == pytest.approx(ours.median / 100)
    assert slow.median > ours.median + 100, "every step takes 0.1 s more"
    assert loading.exact and load.low == load.high
    assert (later.status, later.ours, later.ratio) == ("open", None, None)
    rising, alike = result.claims
    assert (rising.held, rising.seeds) == (3, 3)
    assert (alike.held, alike.seeds) == (0, 3)


def test_up_to_is_the_largest_of_all_pairs():
    text = changed(
        'unit = "ms"\nsource = "§1: words"\nrun = "two"\n',
        'unit = "times"\nsource = "§1: words"\nrun = "one"\nover = "two"\nform = "ratio"\n'
        'also = [["two", "one"], ["one", "one"]]\n',
    )
    (result,) = compute(parsed(text), seeds=1)
    (plain,) = compute(parsed(TINY), seeds=1)
    one, two, ratio = (line.ours for line in (*plain.lines[:2], result.lines[1]))
    assert one is not None and two is not None and ratio is not None
    assert ratio.median == pytest.approx(two.median / one.median)


@pytest.mark.wide
def test_results_do_not_depend_on_jobs():
    one, two = (compute(parsed(TINY), seeds=2, jobs=jobs)[0].to_json() for jobs in (1, 2))
    assert one == two


def test_the_first_seed_is_chosen():
    """Seeds 1 and 2 are two of 0, 1 and 2."""
    (all_three,) = compute(parsed(TINY), seeds=3)
    (later,) = compute(parsed(TINY), seeds=2, first=1)
    (same,) = compute(parsed(TINY), seeds=1, first=1)
    (zero,) = compute(parsed(TINY), seeds=1)
    ours, inner, one, other = (each.lines[0].ours for each in (all_three, later, same, zero))
    assert ours and inner and one and other
    assert one.median != other.median
    assert {inner.low, inner.high, other.median} == {ours.low, ours.median, ours.high}
    assert one.median in (inner.low, inner.high)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--seed", "-1"], "--seed: is -1; give 0 or more"),
        (["--seeds", "0"], "--seeds: is 0; give 1 or more"),
        (["--jobs", "0"], "--jobs: is 0; give 1 or more"),
    ],
)
def test_flags_of_figures_are_checked(capsys, flags, why):
    assert main(["figures", "--figure", "caraserve-5", *flags]) == 2
    assert why in capsys.readouterr().err


def test_the_page_names_sources_mechanisms_and_fits():
    results = compute(parsed(TINY), seeds=2)
    page = document(results, "chorus simulate figures", 2)
    assert "open: magic" in page
    assert "made up" in page
    assert re.search(r"\| loading \| picture only \| [\d.]+ ms \(exact\) \|", page)
    assert "in 2 of 2 seeds" in page


def test_numbers_that_constants_were_fitted_to_are_no_predictions():
    text = TINY.replace('name = "loading"', 'name = "loading"\nfitted = "link.latency"')
    rows = [line for result in compute(parsed(text), seeds=2) for line in result.lines]
    near = [line for line in rows if line.ratio is not None and 0.9 <= line.ratio <= 1.1]
    page = document(compute(parsed(text), seeds=2), "chorus simulate figures", 2)
    fitted = sum(bool(line.row.fitted) for line in near)
    assert f"{len(near)} of them within 10 %. Of these, constants were fitted to {fitted}" in page
    assert "fitted: link.latency. " in page


def test_the_command_prints_one_figure(capsys):
    assert main(["figures", "--figure", "caraserve-5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["figure"] == "caraserve-5"
    assert {row["status"] for row in found["rows"]} == {"computed"}
    assert main(["figures", "--figure", "punica-99"]) == 2
    assert "punica-99 is unknown; use one of" in capsys.readouterr().err
    assert main(["figures", "--list"]) == 0
    assert "caraserve-10" in capsys.readouterr().out


# -- baselines


def test_static_batches_wait_for_their_longest_answer():
    def setup(popularity, output):
        return Setup.model_validate(
            {
                "profile": "a10-llama2-7b-bgmv",
                "engine": {"max_num_seqs": 4},
                "workload": {
                    "requests": 64,
                    "arrivals": {"process": "constant", "rate": 1e6},
                    "popularity": {"kind": popularity},
                    "lengths": {"kind": "laws", "prompt": {"law": "constant", "tokens": 16}, "output": output},
                    "adapters": {"ranks": {"kind": "fixed", "rank": 8}},
                },
            }
        )

    equal = {"law": "constant", "tokens": 50}
    spread = {"law": "uniform", "low": 1, "high": 99}
    alone = static_batches(setup("distinct", equal))
    same = static_batches(setup("identical", equal))
    mixed = static_batches(setup("identical", spread))
    assert alone["busy_batch"] == pytest.approx(1)
    assert same["busy_batch"] == pytest.approx(4)
    assert 1.5 < mixed["busy_batch"] < 3, "rows that have ended are waste"
    assert alone["tokens_per_second"] < mixed["tokens_per_second"] < same["tokens_per_second"]
