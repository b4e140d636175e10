"""The regression gate: results that pass, results that fail, and comparisons that it refuses."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from chorus.perf.gate import __main__ as gate
from chorus.perf.gate.baseline import Baseline, Run, compare
from chorus.perf.gate.suite import GateError, Metric, Rule, Suite, find, suite_of, suites
from chorus.perf.gate.verdict import Status, allowance, judge, noise

POSITIVE = st.floats(1e-6, 1e6)
REPEATS = st.lists(POSITIVE, min_size=1, max_size=12)
KINDS = st.sampled_from(["ratio", "measured"])
DIRECTIONS = st.sampled_from(["lower", "higher"])


def metric(better: Any = "lower", **rule) -> Metric:
    return Metric("speed", better, Rule(**{"kind": "ratio", **rule}))


# -- one metric


@given(REPEATS, KINDS, st.sampled_from(["lower", "higher", "same"]))
def test_a_result_passes_against_itself(values, kind, better):
    assert judge(metric(better, kind=kind), values, values).status is Status.OK


@given(REPEATS, st.randoms(), DIRECTIONS)
def test_the_order_of_repeats_does_not_matter(values, random, better):
    shuffled = random.sample(values, len(values))
    assert judge(metric(better), values, shuffled).status is Status.OK


@given(REPEATS, REPEATS, DIRECTIONS, st.floats(1e-3, 1e3))
def test_the_unit_does_not_matter(baseline, result, better, factor):
    plain = judge(metric(better), baseline, result)
    assert plain.change is not None
    assume(abs(abs(plain.change) - plain.allowed) > 1e-6)
    scaled = judge(metric(better), [v * factor for v in baseline], [v * factor for v in result])
    assert scaled.status is plain.status


@given(REPEATS, st.floats(1.0, 50.0), DIRECTIONS)
def test_beyond_the_cap_no_noise_excuses_a_regression(values, factor, better):
    rule = metric(better, floor=0.05, cap=0.5)
    worse = [v * 2.01 * factor for v in values] if better == "lower" else [v / (2.01 * factor) for v in values]
    verdict = judge(rule, values, worse)
    assert verdict.status is Status.WORSE
    assert not verdict.status.passes


@given(REPEATS, st.floats(1.0, 50.0), DIRECTIONS)
def test_what_is_better_always_passes(values, factor, better):
    improved = [v / factor for v in values] if better == "lower" else [v * factor for v in values]
    assert judge(metric(better), values, improved).status.passes


@given(REPEATS, st.floats(0.0, 0.049), st.booleans(), DIRECTIONS)
def test_within_the_floor_everything_passes(values, share, up, better):
    moved = [v * (1 + share if up else 1 - share) for v in values]
    assert judge(metric(better, floor=0.05), values, moved).status is Status.OK


@given(REPEATS, REPEATS, st.floats(0, 1), st.floats(0.01, 2), st.floats(0, 6))
def test_the_allowance_lies_between_floor_and_cap(baseline, result, floor, cap, k):
    allowed = allowance(metric(floor=floor, cap=cap, noise=k), baseline, result)
    assert floor <= allowed <= max(floor, cap)
    assert allowed >= min(cap, k * max(noise(baseline), noise(result)))


def test_noise_is_the_scaled_median_absolute_deviation():
    assert noise([10.0, 11.0, 9.0, 10.0, 100.0]) == pytest.approx(1.4826 * 1.0 / 10.0)
    assert noise([7.0]) == 0.0
    assert noise([0.0, 0.0, 1.0]) == 0.0


def test_noisy_repeats_allow_what_quiet_ones_do_not():
    quiet, noisy = [10.0, 10.1, 9.9], [10.0, 11.0, 9.0]
    assert judge(metric(), quiet, [12.0, 12.1, 11.9]).status is Status.WORSE
    assert judge(metric(), noisy, [12.0, 13.0, 11.0]).status is Status.OK


@given(POSITIVE, st.floats(1e-6, 10.0), st.booleans())
def test_exact_values_may_not_move(value, share, up):
    moved = value * (1 + share) if up else value / (1 + share)
    assert judge(metric("same", kind="exact"), [value], [moved]).status is Status.CHANGED
    assert judge(metric("lower", kind="exact"), [value], [moved]).status is (Status.WORSE if up else Status.BETTER)
    assert judge(metric("lower", kind="exact"), [value], [value, moved]).status.passes != up


def test_a_count_that_was_zero_and_is_not():
    verdict = judge(metric(kind="exact"), [0.0], [1.0])
    assert verdict.status is Status.WORSE
    assert verdict.to_json()["change"] is None, "there is no share of nothing"
    assert judge(metric(kind="exact"), [0.0], [0.0]).status is Status.OK


@pytest.mark.parametrize("values", [(), (math.nan,), (1.0, math.inf)])
def test_a_metric_without_a_number_is_missing(values):
    assert judge(metric(), [1.0], values).status is Status.MISSING
    assert judge(metric(), [], values).status is Status.MISSING


def test_a_metric_without_a_baseline_is_new():
    assert judge(metric(), [], [1.0]).status is Status.NEW


# -- results and suites


def test_pointers_find_values():
    document = {"a/b": [{"c~d": 1}, 2], "": 3}
    assert find(document, "/a~1b/0/c~0d") == 1
    assert find(document, "/a~1b/1") == 2
    assert find(document, "/") == 3
    assert find(document, "") is document
    assert [find(document, wrong) for wrong in ("/x", "/a~1b/2", "/a~1b/x", "/a~1b/1/0")] == [None] * 4


SUITE = """
about = "made up"
match = ["/study", "/rows"]
device = "/machine"
variant = "/study"
same = ["/seed"]
[[metrics]]
name = "share"
at = "/shares"
kind = "ratio"
better = "lower"
floor = 0.1
[[tables]]
at = "/rows"
kind = "exact"
better = { hits = "higher" }
"""


def result(**changes) -> dict:
    rows = [{"policy": "fifo", "limit": False, "ttft": 4.5, "hits": 7, "note": None}]
    whole = {"study": "papers", "machine": "box", "seed": 0, "shares": [1.5, 2.0], "rows": rows}
    return {**whole, **changes}


@pytest.fixture
def directory(tmp_path) -> Path:
    (tmp_path / "made.toml").write_text(SUITE)
    return tmp_path


def run_of(directory: Path, *results: dict) -> Run:
    return Run.of(Suite.read(directory / "made.toml"), results or [result()])


def test_a_suite_reads_metrics_and_rows(directory):
    readings = {name: values for name, (_, values) in run_of(directory).readings.items()}
    assert readings == {"share": (1.5, 2.0), "fifo False ttft": (4.5,), "fifo False hits": (7.0,)}
    better = {name: metric.better for name, (metric, _) in run_of(directory).readings.items()}
    assert better == {"share": "lower", "fifo False ttft": "same", "fifo False hits": "higher"}


def test_several_results_are_repeats(directory):
    run = run_of(directory, result(), result(shares=[4.0]))
    assert run.readings["share"][1] == (1.5, 2.0, 4.0)
    with pytest.raises(GateError, match="not repeats of one run"):
        run_of(directory, result(), result(seed=1))


@pytest.mark.parametrize("key", ["", 'key = ["policy"]'])
def test_rows_of_one_name_are_refused(directory, key):
    (directory / "made.toml").write_text(SUITE + key)
    with pytest.raises(GateError, match="add the column that tells them apart"):
        run_of(directory, result(rows=result()["rows"] * 2))


def test_a_result_is_known_by_its_keys(directory):
    known = suites(directory)
    assert suite_of(result(), known).name == "made"
    with pytest.raises(GateError, match=r"fits no suite of made \(its keys: other\)"):
        suite_of({"other": 1}, known)
    shutil.copy(directory / "made.toml", directory / "twin.toml")
    with pytest.raises(GateError, match="fits several suites of made, twin"):
        suite_of(result(), suites(directory))


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("about = 'x'\nmatch = ['rows']", "match"),
        ("about = 'x'\nwhat = 1", "what"),
        ("about = 'x'\n[[metrics]]\nname='a'\nat='/a'\nkind='guess'\nbetter='lower'", "kind"),
        ("about = ", "can't be read"),
    ],
)
def test_a_wrong_suite_is_named(tmp_path, text, field):
    (tmp_path / "wrong.toml").write_text(text)
    with pytest.raises(GateError, match=f"wrong.toml.*{field}"):
        suites(tmp_path)


# -- baselines


def baseline_of(run: Run, directory: Path) -> Baseline:
    found = Baseline.find(run, directory)
    assert found is not None
    return found


def test_a_baseline_holds_what_was_read(directory):
    run = run_of(directory)
    path = Baseline.write(run, directory)
    assert path == directory / "made" / "papers.box.json"
    found = Baseline.find(run, directory)
    assert found is not None
    assert found.values["share"] == [1.5, 2.0]
    assert all(verdict.status is Status.OK for verdict in compare(run, found))
    assert Baseline.find(run_of(directory, result(machine="other")), directory) is None
    assert Baseline.find(run_of(directory, result(study="other")), directory) is None
    with pytest.raises(GateError, match=r"/seed is 3, in the baseline .* it is 0"):
        Baseline.find(run_of(directory, result(seed=3)), directory)


def test_a_baseline_needs_every_metric(directory):
    with pytest.raises(GateError, match="lacks share"):
        Baseline.write(run_of(directory, result(shares=[])), directory)


def test_a_row_that_is_gone_is_missing_and_a_new_one_is_not(directory):
    Baseline.write(run_of(directory), directory)
    run = run_of(directory, result(rows=[{**result()["rows"][0], "policy": "new"}]))
    statuses = {verdict.metric.name: verdict.status for verdict in compare(run, baseline_of(run, directory))}
    assert statuses["fifo False ttft"] is Status.MISSING
    assert statuses["new False ttft"] is Status.NEW


def test_a_portable_suite_compares_devices_but_for_local_metrics(tmp_path):
    local = '\n[[metrics]]\nname = "absolute"\nat = "/shares"\nkind = "measured"\nbetter = "lower"\nlocal = true\n'
    (tmp_path / "made.toml").write_text("portable = true\n" + SUITE + local)
    Baseline.write(run_of(tmp_path), tmp_path)
    for machine, at_home in (("box", True), ("other", False)):
        run = run_of(tmp_path, result(machine=machine))
        found = {verdict.metric.name: verdict for verdict in compare(run, baseline_of(run, tmp_path))}
        assert ("absolute" in found) is at_home
        assert found["share"].metric.rule.floor == (0.1 if at_home else 0.2)


# -- the command


def call(capsys, *argv: object) -> tuple[int, str, dict]:
    code = gate.main([str(argument) for argument in argv])
    *text, last = capsys.readouterr().out.splitlines()
    return code, "\n".join(text), json.loads(last)


def written(path: Path, value: dict) -> Path:
    path.write_text("some lines\nof a table\n" + json.dumps(value) + "\n")
    return path


def test_the_command_takes_and_keeps_a_baseline(directory, tmp_path, capsys):
    file = written(tmp_path / "out.txt", result())
    code, _, found = call(capsys, file, "--baseline", directory, "--update")
    assert code == 0
    assert found["suites"][0]["updated"]
    code, text, found = call(capsys, file, "--baseline", directory)
    assert (code, found["ok"]) == (0, True)
    assert "none worse" in text

    worse = written(tmp_path / "worse.txt", result(shares=[3.0, 4.0]))
    code, text, found = call(capsys, worse, "--baseline", directory)
    (row,) = [each for each in found["suites"][0]["metrics"] if each["status"] != "ok"]
    assert (code, row["name"], row["status"], row["change"]) == (1, "share", "worse", 1.0)
    assert "1 worse of 3 metrics" in text
    assert text.splitlines()[-1] == "worse: made on box: share: 3.5, baseline 1.75, allowed 50%"

    gone = written(tmp_path / "gone.txt", result(rows=[]))
    code, text, _ = call(capsys, gone, "--baseline", directory)
    assert code == 1
    assert "2 missing of 3 metrics" in text


def test_an_unknown_device_is_told_apart_from_a_regression(directory, tmp_path, capsys):
    call(capsys, written(tmp_path / "out.txt", result()), "--baseline", directory, "--update")
    other = written(tmp_path / "other.txt", result(machine="H200"))
    code, _, found = call(capsys, other, "--baseline", directory)
    assert code == 2
    assert found["error"] == "made papers: no baseline for H200, only for box; first run: write one with --update"
    code, text, _ = call(capsys, other, "--baseline", directory, "--skip-unknown")
    assert code == 0
    assert "skipped" in text


def test_the_first_run_on_a_device_writes_its_baseline_and_says_so(directory, tmp_path, capsys):
    first = written(tmp_path / "first.txt", result(machine="H200"))
    code, text, found = call(capsys, first, "--baseline", directory, "--write-missing")
    assert code == 0
    assert "first run on H200: 3 metrics are its baseline; commit" in text
    assert Path(found["suites"][0]["baseline"]).is_file()
    worse = written(tmp_path / "worse.txt", result(machine="H200", rows=[]))
    code, text, _ = call(capsys, worse, "--baseline", directory, "--write-missing")
    assert code == 1, "later runs are compared"
    assert "2 missing of 3 metrics" in text


@pytest.mark.parametrize(
    ("text", "message"), [("no json", "does not end with a JSON object"), ('{"machine": 1}', "fits no suite")]
)
def test_what_is_no_result_is_refused(directory, tmp_path, capsys, text, message):
    (tmp_path / "bad").write_text(text)
    code, _, found = call(capsys, tmp_path / "bad", "--baseline", directory)
    assert code == 2
    assert message in found["error"]


# -- the baselines of this repository

KEPT = Path(gate.__file__).parents[1] / "results"


@pytest.fixture
def gpu_suite(tmp_path):
    """The GPU's suite, without baselines."""
    directory = tmp_path / "baselines"
    directory.mkdir()
    shutil.copy(gate.BASELINES / "gpu.toml", directory)
    return directory


@pytest.mark.parametrize("name", sorted({path.name for path in KEPT.glob("h100-*")} - {"h100-2026-11-22-c9fc77f"}))
def test_a_kept_result_of_a_gpu_passes_the_gate_as_its_workflow_calls_it(gpu_suite, capsys, name):
    """The first one names no engine."""
    path = KEPT / name / "result.json"
    code, text, _ = call(capsys, path, "--baseline", gpu_suite, "--write-missing")
    assert (code, "first run on" in text) == (0, True)
    code, text, found = call(capsys, path, "--baseline", gpu_suite, "--write-missing")
    assert (code, ", none worse than the baseline" in text) == (0, True)
    kinds = {metric["name"].split()[0] for metric in found["suites"][0]["metrics"]}
    sections = json.loads(path.read_text("utf-8"))["sections"]
    tables = {"decode": "decode", "attention": "attention", "prefill": "prefill", "merged": "merged", "mixes": "mix"}
    tables |= {
        "experts": "experts",
        "http": "HTTP",
        "sampling": "draw",
        "ttft": "TTFT",
        "products": "product",
        "sgmv": "SGMV",
    }
    assert {tables[section] for section in sections if section in tables} <= kinds


@pytest.mark.parametrize("file", ["experts.json", "int4.json", "ttft-merged.json"])
def test_mixtures_and_quantised_models_have_tables_and_baselines_of_their_own(capsys, file):
    """The int4 engine is compared with itself, on the same kind of GPU."""
    code, _, found = call(capsys, KEPT / "h100-2026-11-27-22220d4f" / file)
    (report,) = found["suites"]
    kinds = {metric["name"].split()[0] for metric in report["metrics"] if metric["status"] == "ok"}
    assert kinds == {"experts.json": {"experts"}, "int4.json": {"decode"}, "ttft-merged.json": {"TTFT", "merged"}}[file]
    assert code == (0 if file == "int4.json" else 1), "a whole run has the other sections, too"
    assert {metric["status"] for metric in report["metrics"]} <= {"ok", "missing"}


@pytest.mark.parametrize("path", sorted((gate.BASELINES / "gpu").glob("*.json")), ids=lambda path: path.name)
def test_a_baseline_of_a_gpu_is_of_a_kept_run_without_faults(path):
    """A run that a fault slowed lets regressions pass."""
    commit = json.loads(path.read_text("utf-8"))["commit"]
    notes = re.findall(r"^\| `(\S+)` \|(.*)$", (KEPT / "README.md").read_text("utf-8"), re.MULTILINE)
    found = [note for folder, note in notes if commit.startswith(folder.rpartition("-")[2])]
    assert len(found) == 1
    assert "fault" not in found[0]


def test_a_baseline_is_of_one_commit_and_of_its_results_day(tmp_path, gpu_suite, capsys):
    results = []
    for commit in ("abc", "def"):
        found = json.loads((KEPT / "h100-2026-11-27-22220d4f" / "result.json").read_text("utf-8"))
        found["environment"]["commit"]["hash"] = commit
        results.append(written(tmp_path / f"{commit}.json", found))
    code, text, _ = call(capsys, *results, "--baseline", gpu_suite, "--update")
    assert (code, "these results are of the commits abc, def; give those of one" in text) == (2, True)
    assert call(capsys, results[0], "--baseline", gpu_suite, "--update")[0] == 0
    (path,) = (gpu_suite / "gpu").glob("*.json")
    fields = json.loads(path.read_text("utf-8"))
    assert (path.name, fields["commit"]) == ("as-it-is-by-default.nvidia-h100-80gb-hbm3.json", "abc")
    assert fields["taken"] == "2026-11-27"


def test_a_slower_gpu_fails_the_gate_in_every_table(gpu_suite, tmp_path, capsys):
    path = KEPT / "h100-2026-11-22-e391802" / "result.json"
    call(capsys, path, "--baseline", gpu_suite, "--write-missing")
    slower = json.loads(path.read_text("utf-8"))
    for values in slower["sections"].values():
        for rows in (each for each in values.values() if isinstance(each, list)):
            for row in rows:
                for column, value in row.items():
                    if column.endswith(("_ms", "_us", "ms", "us")) and isinstance(value, float):
                        row[column] = 1.4 * value
                    elif column.startswith(("tokens_per_s", "over_", "cold_tokens")) or "_over_" in column:
                        row[column] = value and value / 1.4
    code, _, found = call(capsys, written(tmp_path / "slower.json", slower), "--baseline", gpu_suite)
    worse = {each["name"].split()[0] for each in found["suites"][0]["metrics"] if each["status"] == "worse"}
    assert code == 1
    assert worse >= {"decode", "SGMV", "attention", "prefill", "merged", "mix", "HTTP", "draw", "sampled", "TTFT"}


def test_every_suite_is_well_formed_and_its_baselines_are_whole():
    known = suites(gate.BASELINES)
    assert {"allocator", "cpu", "gpu", "kernels", "simulate"} <= set(known)
    folders = [path.name for path in gate.BASELINES.iterdir() if path.is_dir()]
    assert set(folders) <= set(known)
    for path in gate.BASELINES.glob("*/*.json"):
        fields = json.loads(path.read_text("utf-8"))
        assert fields["suite"] == path.parent.name
        assert fields["values"]
        assert all(values and all(map(math.isfinite, values)) for values in fields["values"].values())
        named = {entry.name for entry in known[fields["suite"]].metrics}
        assert named <= set(fields["values"])


def test_the_allocator_gives_its_baseline_again(tmp_path, capsys, monkeypatch):
    from chorus.perf.bench import allocator

    shutil.copy(gate.BASELINES / "allocator.toml", tmp_path)
    results = []
    for index in range(2):
        assert allocator.main(["--cycles", "200", "--pages", "512", "--adapters", "60"]) == 0
        results.append(tmp_path / f"{index}.txt")
        results[-1].write_text(capsys.readouterr().out)
    assert call(capsys, results[0], "--baseline", tmp_path, "--update")[0] == 0
    assert call(capsys, results[1], "--baseline", tmp_path)[0] == 0


def test_slowed_parts_take_longer_and_give_the_same():
    from .slowed import Slowdown, slow

    class Part:
        def work(self, many: int) -> int:
            return sum(range(many))

    calls = []
    plain = Part().work(1000)
    slow(Slowdown(Part, "work", 1.0, (), lambda _, many: calls.append(many) or many > 10))
    assert Part().work(1000) == plain
    assert Part().work(many=3) == 3
    assert calls == [1000, 3]


@pytest.mark.slow
@pytest.mark.triton
def test_the_quick_suite_has_every_metric_of_its_list():
    from chorus.perf.gate.cpu_suite import measure

    suite = Suite.read(gate.BASELINES / "cpu.toml")
    found = measure(rounds=1)
    assert suite.fits(found)
    readings = Run.of(suite, [found]).readings
    assert all(len(values) == 1 and values[0] > 0 for _, values in readings.values())
