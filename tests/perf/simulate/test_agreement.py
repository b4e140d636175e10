"""The command that compares simulator and executor: both serve the same requests, and what it prints is their means."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace

import pytest

from chorus.core.config import EngineConfig
from chorus.core.costs.machine import Measured, measure_machine
from chorus.core.costs.measure import Samples
from chorus.core.costs.profile import Number, Terms, load_profile
from chorus.perf.simulate import agreement
from chorus.perf.simulate.agreement import (
    Repeat,
    errors,
    main,
    serve_both,
    summary,
    table,
    unrest,
)
from chorus.perf.simulate.loads import at_load
from chorus.perf.simulate.records import Records, Served
from chorus.perf.workload import WorkloadSpec

FEW = {"batches": 48}
"""Steps that a profile is fitted to."""


def test_both_serve_the_same_requests(subject):
    model = subject("gqa").model
    config = EngineConfig(
        model=model, adapters=model.parent / "adapters", threads=1, max_num_seqs=8, max_num_batched_tokens=64,
        memory_bytes=32 << 20,
    )  # fmt: skip
    profile = load_profile("a100-llama2-7b")
    workload = list(itertools.islice(WorkloadSpec.parse(agreement.MADE_UP), 12))
    real, simulated = serve_both(config, profile, workload, 500.0)
    for records in (real, simulated):
        assert len(records) == 12
        assert records.num_failed == 0
        assert (records.column("ttft") <= records.column("e2e")).all()
        assert (records.column("queue") <= records.column("ttft")).all()
    asked = at_load(workload, 500.0, profile, 4, list("abcdefgh"))
    assert sorted(real.column("tokens")) == sorted(simulated.column("tokens")) == sorted(r.output_tokens for r in asked)
    assert sorted(real.column("arrival")) == sorted(simulated.column("arrival"))


def records(*served):
    found = Records()
    for each in served:
        found.add(Served(*each))
    return found


def test_both_sides_are_beside_the_median_error():
    real = records((0.0, 1.0, 5.0, 0.1, 0.0, 5), (1.0, 3.0, 9.0, 0.1, 0.0, 4))
    simulated = records((0.0, 1.0, 5.0, 0.1, 0.0, 5), (1.0, 4.0, 10.0, 0.1, 0.0, 4))
    found = summary([Repeat(real, simulated, [])])
    assert found["median_error"] == {"ttft": pytest.approx(1 / 6), "e2e": pytest.approx(1 / 18)}
    rows = {row[0]: row for row in table(found).rows}
    assert rows["ttft"][1::3] == pytest.approx((2000.0, 2500.0, 100 / 6))
    assert rows["tpot"][-1] is None
    assert summary([Repeat(real, real, [])])["median_error"] == {"ttft": 0.0, "e2e": 0.0}


def test_records_are_summed_up():
    first = records((0.0, 1.0, 5.0, 0.5, 2.0, 5), (1.0, 3.0, 3.0, 0.5, 0.0, 1))
    assert list(first.column("tpot")) == [1.0, 0.0]
    assert list(first.column("cold_share")) == [pytest.approx(0.4), 0.0]
    assert list(first.column("time_per_token")) == [1.0, 3.0]
    summary = first.summary()
    assert summary["tpot"]["mean"] == 1.0, "an answer of one token has no time per further token"
    assert summary["ttft"] == pytest.approx({"mean": 2.0, "p50": 2.0, "p90": 2.8, "p99": 2.98, "min": 1.0, "max": 3.0})
    assert summary["tokens_per_second"] == pytest.approx(6 / 5)
    first.extend(first)
    assert (len(first), first.summary()["requests"]) == (4, 4)
    assert Records().summary() == {"requests": 0, "failed": 0}


def test_the_command(subject, monkeypatch, capsys):
    monkeypatch.setattr(agreement, "measure_machine", lambda config, **how: measure_machine(config, **how | FEW))
    monkeypatch.setattr(agreement, "MOST_ERROR", {"ttft": 1e9, "e2e": 1e9})
    model = subject("gqa").model
    flags = ["--model", str(model), "--adapters", str(model.parent / "adapters"), "--threads", "1"]
    code = main([*flags, "--repeats", "1", "--requests", "5", "--rounds", "1"])
    found = last_line(capsys)
    assert (code, found["verdict"]) == ((2, "inconclusive") if len(found["unrest"]) == 2 else (0, "agrees"))
    tries = len(found["unrest"]) or 1
    assert (found["real"]["requests"], found["simulated"]["requests"]) in ((5 * n, 10 * n) for n in (1, tries))
    assert len(found["decode_r2"]) in (2, 3), "before and after"
    with pytest.raises(SystemExit):
        main(flags[:2])
    assert "--model and --adapters go together" in capsys.readouterr().err


def test_the_command_takes_a_workload_that_nothing_was_fitted_to(subject, tmp_path, capsys):
    model = subject("gqa").model
    (tmp_path / "trace.csv").write_text(
        "arrival,adapter,prompt_tokens,output_tokens\n"
        + "".join(f"{60 * n},{'acme' if n % 2 else ''},40,5\n" for n in range(6))
    )
    path = tmp_path / "workload.toml"
    path.write_text('trace = { format = "csv", path = "trace.csv" }\n')
    flags = ["--model", str(model), "--adapters", str(model.parent / "adapters"), "--threads", "1"]
    flags += ["--profile", "a100-llama2-7b", "--repeats", "1", "--load", "900", "--workload", str(path)]
    code = main([*flags, "--requests", "5"])
    found = last_line(capsys)
    assert found["real"]["requests"] == found["simulated"]["requests"] in (5, 10)
    assert found["median_error"].keys() == {"ttft", "e2e"}
    held_up = len(found["unrest"]) == 2
    assert (code, found["verdict"]) == ((2, "inconclusive") if held_up else (1, "differs")), "this is no A100"
    with pytest.raises(SystemExit):
        main([*flags, "--set", "requests=1"])
    assert "has 1 requests; at least 2 are needed" in capsys.readouterr().err


def last_line(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_errors_are_of_each_request_and_each_simulation():
    real = records((0.0, 1.0, 4.0, 0.0, 0.0, 5), (1.0, 2.0, 5.0, 0.0, 0.0, 4))
    simulated = records((1.0, 3.0, 5.0, 0.0, 0.0, 4), (0.0, 1.0, 3.0, 0.0, 0.0, 5), (0.0, 2.0, 4.0, 0.0, 0.0, 5))
    assert errors(real, simulated) == {"ttft": [0.5, 0.0, 1.0], "e2e": [0.0, 0.25, 0.0]}


def measured(decode: float, noise: float = 0.02, prefill: float = 1.0) -> Measured:
    profile = load_profile("a100-llama2-7b")
    return Measured(profile, Samples([], [decode] * 3, noise), Samples([], [prefill] * 3, 0.0), uncached=True)


def test_no_conclusion_is_drawn_on_a_machine_that_was_not_quiet():
    assert unrest([], 0, 0.0) == unrest([measured(1.0), measured(1.08, 0.09)], 0, 0.04) == []
    assert unrest([measured(1.0, 0.2), measured(1.0)], 0, 0.0) == ["rounds of a fit differ by 20% (at most 10%)"]
    drifted = ["the same steps take 30% more or less afterwards (at most 10%)"]
    assert unrest([measured(1.0), measured(1.3)], 0, 0.0) == drifted
    assert unrest([measured(1.0), measured(1.0, prefill=0.7)], 0, 0.0) == drifted
    assert unrest([], 0, 0.12) == ["others took 12% of the processors' time (at most 5%)"]
    assert unrest([], 2, 0.0) == ["the system held the process up 2 times"]


def test_a_fit_that_explains_small_steps_otherwise_is_no_unrest():
    """Two fits to the same seconds may price a step that neither of them saw otherwise: the machine is the same."""
    profile = load_profile("a100-llama2-7b")
    step = Terms(terms={name: Number(value=1.3 * n.value, source="slower") for name, n in profile.step.terms.items()})
    other = replace(measured(1.0), profile=profile.model_copy(update={"step": step}))
    assert unrest([measured(1.0), other], 0, 0.0) == []


def test_a_repeat_that_says_nothing_is_made_again(subject, monkeypatch, capsys):
    """A machine that was unquiet once costs one repeat; one that never is quiet, the conclusion."""
    model = subject("gqa").model
    found = iter([["noise"], [], [], ["noise"], ["noise"], [], ["noise"]])
    monkeypatch.setattr(agreement, "unrest", lambda fits, num_held_up, others: next(found))
    both = records(*((float(number), number + 1.0, number + 5.0, 0.1, 0.0, 5) for number in range(3)))
    monkeypatch.setattr(agreement, "serve_both", lambda config, profile, workload, load, refit: (both, both))
    flags = ["--model", str(model), "--adapters", str(model.parent / "adapters"), "--threads", "1"]
    flags += ["--profile", "a100-llama2-7b", "--repeats", "2", "--requests", "3", "--load", "900"]
    assert main(flags) == 0
    asked = last_line(capsys)
    assert (asked["real"]["requests"], asked["unrest"], asked["verdict"]) == (6, [["noise"]], "agrees")
    assert main(flags) == 2
    asked = last_line(capsys)
    assert (asked["real"]["requests"], asked["verdict"]) == (12, "inconclusive"), "all are shown where too few count"


def test_the_simulator_in_perf_imports_no_torch():
    code = (
        "import sys; from chorus.perf.simulate.__main__ import main; "
        "main(['adapter-locality', '--quick', '--seeds', '1', '--scale', '0.02', '--json']); "
        "assert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["rows"]
