"""The command that compares simulator and executor: both serve the same requests, and what it prints is their means."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from chorus.core.config import EngineConfig
from chorus.core.costs.profile import Number, Terms, load_profile
from chorus.perf.simulate.agreement import (
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    Load,
    Recorded,
    compare,
    errors,
    main,
    prompt_of,
    serve_both,
    table,
    unrest,
)
from chorus.perf.simulate.records import Records, Served
from chorus.perf.workload.request import TraceRequest
from chorus.perf.workload.traces import jsonl


def test_both_serve_the_same_requests(subject):
    model = subject("gqa").model
    config = EngineConfig(
        model=model, adapters=model.parent / "adapters", threads=1, max_num_seqs=8, max_num_batched_tokens=64,
        memory_bytes=32 << 20,
    )  # fmt: skip
    profile = load_profile("a100-llama2-7b")
    real, simulated = serve_both(config, profile, Load(12, 500.0))
    for records in (real, simulated):
        assert len(records) == 12
        assert records.num_failed == 0
        assert (records.column("ttft") <= records.column("e2e")).all()
        assert (records.column("queue") <= records.column("ttft")).all()
    asked = Load(12, 500.0).trace(profile, 4, list("abcdefgh"))
    assert sorted(real.column("tokens")) == sorted(simulated.column("tokens")) == sorted(r.output_tokens for r in asked)
    assert sorted(real.column("arrival")) == sorted(simulated.column("arrival"))


def test_a_load_is_the_same_every_time():
    profile = load_profile("a100-llama2-7b")
    load = Load(300, 0.5, seed=3)
    trace = load.trace(profile, 4, ["a", "b"])
    assert trace == load.trace(profile, 4, ["a", "b"])
    assert [r.arrival for r in trace] == sorted(r.arrival for r in trace)
    assert {r.adapter for r in trace} == {None, "a", "b"}
    assert all(PROMPT_TOKENS[0] <= r.prompt_tokens <= PROMPT_TOKENS[1] for r in trace)
    assert all(OUTPUT_TOKENS[0] <= r.output_tokens <= OUTPUT_TOKENS[1] for r in trace)
    prompts = [prompt_of(request, 100) for request in trace[:20]]
    assert [len(prompt) for prompt in prompts] == [r.prompt_tokens for r in trace[:20]]
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 20
    assert all(16 <= token < 100 for prompt in prompts for token in prompt)
    twice = Load(300, 1.0, seed=3).trace(profile, 4, ["a", "b"])
    assert twice[-1].arrival == pytest.approx(trace[-1].arrival / 2)


def records(*served):
    found = Records()
    for each in served:
        found.add(Served(*each))
    return found


def test_the_deviation_is_of_means():
    real = records((0.0, 1.0, 5.0, 0.1, 0.0, 5), (1.0, 3.0, 9.0, 0.1, 0.0, 4))
    simulated = records((0.0, 1.0, 5.0, 0.1, 0.0, 5), (1.0, 4.0, 10.0, 0.1, 0.0, 4))
    found = compare(real, simulated)
    assert found["deviation"] == {"ttft": pytest.approx(0.25), "tpot": pytest.approx(0.0), "e2e": pytest.approx(1 / 14)}
    assert [row[-1] for row in table(found).rows][:1] == [pytest.approx(25.0)]
    assert compare(real, real)["deviation"]["ttft"] == 0


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


def test_the_command(subject, capsys):
    model = subject("gqa").model
    flags = ["--model", str(model), "--adapters", str(model.parent / "adapters"), "--threads", "1", "--json"]
    code = main([*flags, "--repeats", "1", "--requests", "5", "--rounds", "1", "--limit", "1e9"])
    found = json.loads(capsys.readouterr().out)
    assert (code, found["verdict"]) == ((2, "inconclusive") if found["unrest"] else (0, "agrees"))
    assert (found["real"]["requests"], found["simulated"]["requests"]) == (5, 10), "simulated before and after"
    assert len(found["decode_r2"]) == 2
    with pytest.raises(SystemExit):
        main(flags[:2])
    assert "--model and --adapters go together" in capsys.readouterr().err


def test_the_command_takes_a_workload_that_nothing_was_fitted_to(subject, tmp_path, capsys):
    model = subject("gqa").model
    path = tmp_path / "trace.jsonl"
    with path.open("w") as file:
        jsonl.write([TraceRequest(n, 60.0 * n, "acme" if n % 2 else None, 40, 5) for n in range(6)], file)
    flags = ["--model", str(model), "--adapters", str(model.parent / "adapters"), "--threads", "1", "--json"]
    flags += ["--profile", "a100-llama2-7b", "--repeats", "1", "--load", "900"]
    code = main([*flags, "--workload", str(path), "--requests", "5"])
    found = json.loads(capsys.readouterr().out)
    assert found["real"]["requests"] == found["simulated"]["requests"] == 5
    assert found["median_error"].keys() == {"ttft", "e2e"}
    assert found["verdict"] == ("inconclusive" if found["unrest"] else "differs"), "this is no A100"
    assert code == (2 if found["unrest"] else 1)
    path.write_text("")
    with pytest.raises(SystemExit):
        main([*flags, "--workload", str(path)])
    assert "has 0 requests; at least 2 are needed" in capsys.readouterr().err


def test_a_recorded_load_keeps_the_pattern_and_cuts_what_is_too_long():
    profile = load_profile("a100-llama2-7b")
    requests = [TraceRequest(n, 100 + n**1.5, "acme" if n % 3 else None, 10 * n + 1, 5000) for n in range(200)]
    trace = Recorded(requests, 0.5, 1000).trace(profile, 4, ["b", "a"])
    assert [each.id for each in trace] == list(range(200))
    assert trace[0].arrival == 0
    ratios = [each.arrival / n**1.5 for n, each in enumerate(trace) if n]
    assert ratios == pytest.approx([ratios[0]] * 199)
    assert {each.prompt_tokens for each in trace[80:]} == {750}
    assert {each.output_tokens for each in trace} == {250}
    assert {each.adapter for each in trace if each.id % 3} == {trace[1].adapter} <= {"a", "b"}
    twice = Recorded(requests, 1.0, 1000).trace(profile, 4, ["b", "a"])
    assert twice[-1].arrival == pytest.approx(trace[-1].arrival / 2)


def test_errors_are_of_each_request_and_each_simulation():
    real = records((0.0, 1.0, 4.0, 0.0, 0.0, 5), (1.0, 2.0, 5.0, 0.0, 0.0, 4))
    simulated = records((1.0, 3.0, 5.0, 0.0, 0.0, 4), (0.0, 1.0, 3.0, 0.0, 0.0, 5), (0.0, 2.0, 4.0, 0.0, 0.0, 5))
    assert errors(real, simulated) == {"ttft": [0.5, 0.0, 1.0], "e2e": [0.0, 0.25, 0.0]}


def test_no_conclusion_is_drawn_on_a_machine_that_was_not_quiet():
    profile = load_profile("a100-llama2-7b")
    step = Terms(terms={name: Number(value=1.3 * n.value, source="slower") for name, n in profile.step.terms.items()})
    slower = profile.model_copy(update={"step": step})
    assert unrest([0.02, 0.09], [profile, profile], 0) == []
    assert unrest([0.02, 0.2], [profile], 0) == ["rounds of a fit differ by 20% (at most 10%)"]
    assert unrest([], [profile, slower], 0) == ["fits differ by 30% (at most 10%)"]
    assert unrest([], [profile], 2) == ["the system held the process up 2 times"]


def test_the_simulator_in_perf_imports_no_torch():
    code = (
        "import sys; from chorus.perf.simulate.speed import measure; found = measure(0.5, 2); "
        "assert 'torch' not in sys.modules; print(found['cluster']['requests'])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "170"
