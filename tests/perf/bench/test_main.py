"""The command: a process per section, failures recorded, a second call runs the missing sections."""

from __future__ import annotations

import json
import sys

import pytest

from chorus.perf.bench import __main__ as command
from chorus.perf.bench.environment import describe
from chorus.perf.bench.options import Options
from chorus.perf.bench.sections.registry import SECTIONS
from chorus.perf.bench.store import RESULT, ResultStore


@pytest.fixture
def run(monkeypatch, capfd):
    """`run(*flags)`: the exit code, the last line of the output, and all other output."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(*flags: str) -> tuple[int, dict, str]:
        code = command.main([*flags])
        said = capfd.readouterr()
        return code, json.loads(said.out.splitlines()[-1]), said.err

    return run


@pytest.mark.wide
def test_a_second_call_runs_what_is_missing(tmp_path, run):
    flags = ("--quick", "--device", "cpu", "--out", str(tmp_path), "--sections", "limits")
    code, summary, said = run(*flags)
    assert code == 0, "all that was asked for is there"
    assert summary["done"] == ["limits"]
    assert summary["missing"] == [name for name in SECTIONS if name != "limits"]
    assert "there already" not in said
    written = (tmp_path / "limits.json").stat().st_mtime_ns
    _, summary, said = run(*flags)
    assert "limits: there already" in said
    assert (tmp_path / "limits.json").stat().st_mtime_ns == written
    combined = json.loads((tmp_path / RESULT).read_text("utf-8"))
    assert combined["sections"]["limits"]["copy"]["bytes_per_s"] > 0
    assert combined["environment"]["device"]["type"] == "cpu"


@pytest.mark.slow
def test_a_section_that_fails_costs_no_other(tmp_path, run):
    """Without a device all fail, each with its own traceback."""
    code, summary, _ = run("--quick", "--out", str(tmp_path), "--sections", "limits", "prefill")
    assert code == 1
    assert summary["failed"] == ["limits", "prefill"]
    record = json.loads((tmp_path / "limits.json").read_text("utf-8"))
    assert record["status"] == "failed"
    assert "torch sees no CUDA device; for a smoke run without one: --device cpu" in record["error"]
    assert record["error"].startswith("Traceback")


@pytest.fixture
def sections(monkeypatch):
    """Sections as processes that write nothing; a table holds their programs."""
    programs: dict[str, str] = {}

    monkeypatch.setattr(
        command, "worker_command", lambda name, options: [sys.executable, "-S", "-c", programs.get(name, "")]
    )
    return programs


def call(tmp_path, *flags: str, **options) -> tuple[int, dict]:
    code = command.main(["--quick", "--device", "cpu", "--out", str(tmp_path), *flags], **options)
    return code, json.loads((tmp_path / RESULT).read_text("utf-8"))


def test_a_process_that_dies_is_recorded(tmp_path, sections):
    sections["limits"] = "import os; print('last words', flush=True); os.kill(os.getpid(), 9)"
    code, found = call(tmp_path, "--sections", "limits")
    assert code == 1
    assert "the process ended with -9" in found["failed"]["limits"]
    assert "last words" in found["failed"]["limits"]


def test_a_section_that_hangs_is_ended(tmp_path, sections):
    sections["limits"] = "import time; time.sleep(600)"
    code, found = call(tmp_path, "--sections", "limits", "sgmv", "--section-timeout", "0.2")
    assert code == 1
    assert "not done after 0 s" in found["failed"]["limits"]
    assert "the process ended with 0" in found["failed"]["sgmv"], "it wrote no results"


def test_the_log_of_a_section_that_hangs_has_all_that_it_printed(tmp_path, sections, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    sections["limits"] = "import time; print('under way'); time.sleep(600)"
    _, found = call(tmp_path, "--sections", "limits", "--section-timeout", "1")
    assert "under way" in found["failed"]["limits"]


@pytest.mark.wide
def test_rows_of_a_section_that_hangs_are_shown(tmp_path, sections, capsys):
    """Those that it has saved before it was ended."""
    store = Options.parse(["--quick", "--device", "cpu", "--out", str(tmp_path)]).store()
    rows = [{"tokens": 8, "rank": 0, "ms": 1.0, "tokens_per_s": 2.0, "floor_ms": 3.0, "over_floor": 4.0}]
    store.save("prefill", 1.0, {**describe("cpu"), "date": ""}, {"rows": rows})
    record = (tmp_path / "prefill.json").read_text("utf-8")
    sections["prefill"] = (
        f"from pathlib import Path; import time; Path({str(tmp_path / 'prefill.json')!r}).write_text({record!r}); "
        "time.sleep(600)"
    )
    code, found = call(tmp_path, "--sections", "prefill", "--section-timeout", "2")
    assert code == 1
    assert "not done after 2 s" in found["failed"]["prefill"]
    assert found["partial"]["prefill"]["rows"] == rows
    assert "(d) prefill (incomplete)" in capsys.readouterr().out


def test_sections_run_in_their_own_order(tmp_path, sections, capsys):
    """`http` reads what `mixes` wrote, and all read the rates of `limits`."""
    call(tmp_path, "--sections", "http", "mixes", "limits")
    begun = [line.partition(":")[0] for line in capsys.readouterr().err.splitlines() if line.endswith(" …")]
    assert begun == ["limits", "mixes", "http"]


def test_the_report_says_why_a_process_was_ended(tmp_path, sections, capsys):
    sections["limits"] = "import time; print('the last line of its log', flush=True); time.sleep(600)"
    call(tmp_path, "--sections", "limits", "--section-timeout", "1")
    assert "FAILED limits: not done after 1 s" in capsys.readouterr().out


def test_no_section_is_started_after_the_budget(tmp_path, sections, capsys):
    ticks = iter([0.0, 0.0, 90.0, 91.0])
    _, found = call(tmp_path, "--sections", "limits", "sgmv", "decode", "--budget", "100", clock=lambda: next(ticks))
    assert list(found["failed"]) == ["limits"]
    assert {"sgmv", "decode"} <= set(found["missing"])
    assert "sgmv: no time left; call again" in capsys.readouterr().err


def test_a_section_without_its_file_runs_again(tmp_path, sections):
    settings = Options.parse(["--quick", "--device", "cpu", "--out", "x"]).settings
    store = ResultStore(tmp_path, settings)
    environment = {"commit": {"hash": None, "dirty": None}, "device": {}, "driver": None, "versions": {}, "date": ""}
    counts = {"rows": []}
    store.write("products", 1.0, environment, values=counts)
    _, found = call(tmp_path, "--sections", "products")
    assert found["sections"]["products"] == counts
    store.path("products").unlink()
    _, found = call(tmp_path, "--sections", "products")
    assert "the process ended with 0" in found["failed"]["products"], "it ran again, and wrote nothing"


def test_kernels_that_cannot_be_interpreted_stop_a_smoke_run(tmp_path, sections, monkeypatch, capsys):
    monkeypatch.setattr(command, "interpreter_obstacle", lambda: "install other versions")
    assert command.main(["--quick", "--device", "cpu", "--out", str(tmp_path)]) == 2
    assert "install other versions" in capsys.readouterr().err
    assert list(tmp_path.glob("*.json")) == []


def test_results_of_another_kind_of_run_are_not_mixed(tmp_path, sections, capsys):
    call(tmp_path, "--sections", "limits")
    assert command.main(["--full", "--device", "cpu", "--out", str(tmp_path)]) == 2
    assert "choose another --out" in capsys.readouterr().err


def test_a_worker_gets_the_same_options(tmp_path):
    options = Options.parse(["--full", "--device", "cpu", "--out", str(tmp_path), "--seed", "3"])
    again = Options.parse(options.given)
    assert again.settings == options.settings
    assert (again.out, again.work_dir) == (options.out, options.work_dir)


@pytest.mark.parametrize(
    "argv", [[], ["--quick"], ["--quick", "--full", "--out", "x"], ["--quick", "--out", "x", "--sections", "y"]]
)
def test_bad_arguments(argv, capsys):
    with pytest.raises(SystemExit):
        Options.parse(argv)
    assert "usage" in capsys.readouterr().err
