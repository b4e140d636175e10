"""Every section runs on a CPU with a tiny model, so that a GPU only has to run it; no test looks at a speed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from chorus.ops.library import native_library
from chorus.perf.bench.context import Context
from chorus.perf.bench.environment import describe
from chorus.perf.bench.options import Options
from chorus.perf.bench.report import SMOKE, digest, report
from chorus.perf.bench.sections import decode, equality, families, http, levels, mixes
from chorus.perf.bench.sections.registry import SECTIONS, section
from chorus.perf.bench.store import RESULT, ResultStore
from chorus.perf.bench.subject import Subject
from chorus.perf.serving.streams import Answered

pytestmark = pytest.mark.wide

RATE = {"bytes_per_s": 4e9, "counted": "bytes"}
LIMITS = {
    "copy": RATE,
    "read": {**RATE, "bytes_per_s": 5e9},
    "host_to_device": RATE,
    "host_to_device_pages": RATE,
    "matmul": {"flops_per_s": 1e11, "counted": "FLOP"},
}


@pytest.fixture(scope="module")
def context(tmp_path_factory) -> Context:
    options = Options.parse(["--quick", "--device", "cpu", "--out", str(tmp_path_factory.mktemp("gpu"))])
    context = options.context()
    context.store.write("limits", 0.0, describe("cpu"), values=LIMITS)
    return context


def run(context: Context, name: str) -> dict:
    """A section's values as they are read back from its file; its tables can be drawn."""
    values = section(name).run(context)
    context.store.write(name, 0.0, describe("cpu"), values=values)
    values = context.store.values(name)
    tables = section(name).tables(values)
    assert tables
    assert all(table.rows and table.render().row_count == len(table.rows) for table in tables)
    return values


def test_each_section_has_a_letter_of_its_own():
    letters = [what[:4] for what in SECTIONS.values()]
    assert all(re.fullmatch(r"\([a-z]\) ", letter) for letter in letters)
    assert len(set(letters)) == len(letters)


def test_sections_are_modules():
    assert all(hasattr(section(name), "run") and hasattr(section(name), "tables") for name in SECTIONS)


def test_limits(tmp_path):
    context = Options.parse(["--quick", "--device", "cpu", "--out", str(tmp_path)]).context()
    values = run(context, "limits")
    for name in ("copy", "read", "host_to_device", "host_to_device_pages"):
        assert values[name]["bytes_per_s"] > 0
        assert "bytes" in values[name]["counted"]
    assert values["matmul"]["flops_per_s"] > 0
    assert context.bandwidth() == max(values["copy"]["bytes_per_s"], values["read"]["bytes_per_s"])


def test_decode(context):
    values = run(context, "decode")
    assert [row["bucket"] for row in values["buckets"]] == [1, 2]
    for row in values["buckets"]:
        assert row["base_over_floor"] == pytest.approx(row["base_ms"] / row["base_floor_ms"])
        assert row["lora_less_floor_over_base"] == pytest.approx(
            (row["lora_ms"] - row["adapters_floor_ms"]) / row["base_ms"]
        )
        assert row["plain_ms"] > 0
        assert row["base_device_ms"] > 0
        assert row["lora_device_ms"] > 0
    shape, itemsize = context.size.geometry, context.dtype.itemsize
    one = values["buckets"][0]
    weights = shape.layer_params + shape.head_params
    kv = (one["context_tokens"] + 1) * shape.kv_elems_per_token
    assert one["base_floor_ms"] == pytest.approx((weights + kv) * itemsize / 5e9 * 1e3)
    assert one["adapters_floor_ms"] == pytest.approx(16 * shape.rank_params * itemsize / 5e9 * 1e3)


def test_floors_count_quantised_weights_as_they_are_kept(context):
    shape, plain = context.size.geometry, context.floors(1, 8)
    quantised = replace(context, engine={"quantization": "int8"}).floors(1, 8)
    rows = sum(each.outputs for layer in shape.projections.layers for each in layer)
    assert plain.step_bytes - quantised.step_bytes == 3 * shape.layer_params - 4 * rows, "float32 has three bytes more"
    assert quantised.decode == pytest.approx(quantised.step_bytes / 5e9)
    assert quantised.prefill_flops == plain.prefill_flops


def test_decode_without_room_for_a_second_engine(context, monkeypatch):
    def crowded(context: Context, adapters: dict, **size: Any) -> Subject:
        if not adapters:
            raise torch.OutOfMemoryError("full")
        return Subject(context, adapters, **size)

    monkeypatch.setattr(decode, "Subject", crowded)
    values = run(context, "decode")
    assert "full" in values["plain_absent"]
    assert all(row["plain_ms"] is None and row["base_ms"] > 0 for row in values["buckets"])


def test_decode_of_an_engine_with_other_fields_starts_no_second_engine(context):
    values = run(replace(context, engine={"quantize_lm_head": "false"}), "decode")
    assert values["plain_absent"] == "the engine has fields of its own"
    assert all(row["plain_ms"] is None and row["lora_ms"] > 0 for row in values["buckets"])


def test_a_row_that_fails_costs_no_other(context, monkeypatch, tmp_path):
    """And its error is among the results, which are kept row by row."""
    inner, saved = decode.Subject.step_seconds, []

    def step_seconds(subject: Subject, steps: int, rows: int) -> list[float]:
        if rows == 2 and subject.adapter_pages():
            raise RuntimeError("a kernel failed")
        return inner(subject, steps, rows)

    monkeypatch.setattr(Subject, "step_seconds", step_seconds)
    values = decode.run(replace(context, save=lambda found: saved.append(len(found["buckets"]))))
    assert [row["bucket"] for row in values["buckets"]] == [1]
    (lost,) = values["not_measured"]
    assert lost == {"case": "decode, 2 adapters", "why": "RuntimeError: a kernel failed"}
    assert saved == [0, 0, 1, 1]


@pytest.mark.parametrize("name", ["limits", "prefill", "ttft", "mixes"])
def test_rows_are_saved_as_they_come(context, name, tmp_path):
    """In the order of measurement; results of a killed process can be shown."""
    saved = []
    values = section(name).run(replace(context, save=lambda found: saved.append(json.dumps(found))))
    assert len(saved) > 2
    assert json.loads(saved[-1]).keys() <= values.keys()
    for found in map(json.loads, saved):
        assert section(name).tables(found)


def test_a_device_that_does_nothing_more_ends_the_section(context):
    def dead() -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    found: dict = {}
    lost = replace(context, timer=SimpleNamespace(synchronize=dead))
    with pytest.raises(RuntimeError, match="illegal memory access"), lost.row(found, "one"):
        raise ZeroDivisionError
    assert found["not_measured"] == [{"case": "one", "why": "ZeroDivisionError: "}]


def test_prefill(context):
    rows = run(context, "prefill")["rows"]
    assert {(row["tokens"], row["rank"]) for row in rows} == {(8, 0), (8, 16), (32, 0), (32, 16)}
    assert all(row["floor_ms"] > 0 and row["tokens_per_s"] > 0 for row in rows)


@pytest.mark.parametrize("engine", [{}, {"quantization": "int4"}], ids=["plain", "int4"])
def test_experts(context, engine):
    context = replace(context, engine=engine)
    values = run(context, "experts")
    assert "not_measured" not in values
    assert [(row["rows"], row["case"]) for row in values["rows"]] == [
        (1, "base"), (1, "attention r16"), (1, "experts r8"), (2, "base"), (2, "attention r16"),
    ]  # fmt: skip
    base, attention, on_experts, *_ = values["rows"]
    assert base["experts"] == 2 and all(row["ms"] > 0 and row["device_ms"] > 0 for row in values["rows"])
    assert base["adapter_bytes"] == 0 < attention["adapter_bytes"] < on_experts["adapter_bytes"]
    assert base["share"] == pytest.approx(base["bytes"] / (base["ms"] / 1e3) / 5e9)
    assert values["weights"] == engine.get("quantization", "float32")
    assert [row["tokens"] for row in values["prefill"]] == [8]


def test_ttft(context):
    rows = run(context, "ttft")["rows"]
    assert [(row["rank"], row["loading"]) for row in rows] == [(8, "stream"), (16, "stream")]
    assert all(row["cold_over_warm"] == pytest.approx(row["cold_ms"] / row["warm_ms"]) for row in rows)


def test_mixes(context):
    values = run(context, "mixes")
    assert [(row["popularity"], row["adapters"]) for row in values["rows"]] == [
        ("distinct", 4),
        ("uniform", 2),
        ("zipf-1.5", 3),
        ("identical", 1),
    ]
    assert values["base"]["tokens_per_s"] > 0


@pytest.mark.wide
def test_sampling(context):
    values = run(context, "sampling")
    assert [row["bucket"] for row in values["steps"]] == [1, 2]
    for row in values["steps"]:
        assert row["greedy_tokens_per_s"] > 0
        assert {"temperature_over_greedy", "top_p_over_greedy"} <= set(row)
    assert all(row["same_tokens"] == row["bucket"] for row in values["draws"]), "as the torch path draws"


@pytest.mark.skipif(not native_library.available(torch.float32), reason="no native library")
def test_families(context):
    values = run(context, "families")
    assert [(row["family"], row["case"]) for row in values["rows"]] == [
        (family, case) for family in ("llama", "qwen3-moe") for case in families.CASES
    ]
    assert all(row["share"] > 0 for row in values["rows"])


def test_states_of_sequences_are_bytes_that_a_step_needs():
    shape = SimpleNamespace(recurrent_shape=(4, 8, 16), conv_shape=(3, 32))
    hybrid: Any = SimpleNamespace(recurrent=shape, num_recurrent_layers=5, lookup=None)
    dense: Any = SimpleNamespace(recurrent=None)
    assert (families.state_bytes(hybrid), families.state_bytes(dense)) == (2 * 4 * 5 * (512 + 96), 0)


def test_levels(context):
    values = run(context, "levels")
    level = native_library.levels()[0]
    assert [(row["level"], row["case"]) for row in values["rows"]] == [(level, case) for case in levels.CASES]
    assert all(row["share"] > 0 and row["over_first"] == 1.0 for row in values["rows"])
    assert all(rate > 0 for rate in values["rates"][level].values())


@pytest.mark.skipif(not native_library.available(torch.float32), reason="no native library")
def test_another_build_runs_beside_ours(context, tmp_path):
    """A copy of our library stands for it."""
    (ours,) = Path(native_library.__file__).parents[1].glob(f"_native_{native_library.level()}.*so")
    other = shutil.copy(ours, tmp_path / "old.so")
    values = run(replace(context, beside={"old": other, "vllm": tmp_path}), "levels")
    assert {row["level"] for row in values["rows"]} == {native_library.levels()[0], "old"}
    assert "not_measured" not in values


def test_a_cpu_that_is_measured_has_sections_and_bars_of_its_own(tmp_path, capsys):
    options = Options.parse(["--quick", "--device", "cpu", "--model-size", "125m", "--out", str(tmp_path)])
    context = options.context()
    assert not context.smoke
    assert context.dtype is torch.bfloat16
    assert set(SECTIONS) - set(options.known) == {
        "equality", "sgmv", "products", "attention", "latents", "experts"
    }  # fmt: skip
    environment = describe("cpu")
    store = options.store()
    rates = {"base": 1.0, "mixed": 0.7}
    rows = [{"peer": "chorus", "case": case, "rate": rate, "prefill_rate": 1.0} for case, rate in rates.items()]
    store.write("peers", 1.0, environment, values={"rows": rows, "limits": {"base": {"prefill_rate": 1.0}}})
    found = digest(store.combine(options.known, environment), tmp_path / RESULT)
    assert found["measurement"] is True
    met = {goal["name"]: goal["met"] for goal in found["goals"]}
    assert (met["prefill: base / its limit"], met["mixed / base"], met["base / plain"]) == (True, False, None)


def test_a_gpu_leaves_out_what_is_of_cpus(tmp_path):
    known = Options.parse(["--quick", "--out", str(tmp_path)]).known
    of_cpus = {"peers", "levels", "families"}
    assert set(SECTIONS) - set(known) == of_cpus


@pytest.mark.wide
def test_equality(context):
    cases = run(context, "equality")["cases"]
    assert all(case["equal"] for case in cases)
    assert {case["rows"] for case in cases} == {1, 2, 3, 4}


@pytest.mark.parametrize("what", ["kv", "tokens"])
def test_equality_sees_a_wrong_bit(context, monkeypatch, what):
    inner, seen = equality.trace, []

    def trace(subject, adapters, steps):
        found = inner(subject, adapters, steps)
        seen.append(subject)
        if len(seen) == 2 and what == "kv":
            page = subject.arena_pages[-1].view(torch.int32)  # nobody's
            page[3] ^= 1
        elif len(seen) == 2:
            next(iter(found.tokens.values()))[-1] ^= 1
        return found

    monkeypatch.setattr(equality, "trace", trace)
    with pytest.raises(equality.Differs, match=r"1 of \d+ pages differ" if what == "kv" else r"tokens of q\d+ differ"):
        equality.run(context)


@pytest.mark.slow
@pytest.mark.triton
def test_sgmv_in_the_interpreter(context):
    """In a process of its own: kernels of a process that interprets can't be compiled."""
    options = ["--quick", "--device", "cpu", "--out", str(context.store.directory)]
    done = worker("sgmv", *options)
    assert done.returncode == 0, done.stderr
    values = context.store.values("sgmv")
    for row in values["cells"]:
        assert row["error"] <= 1e-4
        assert row["share"] == pytest.approx(row["bytes"] / (row["us"] / 1e6) / 5e9)
    assert {row["group"] for row in values["groups"]} == {"qkv", "o", "gate_up", "down"}
    by_group = [row["bytes"] for row in values["groups"]]
    whole = next(row for row in values["cells"] if (row["tokens"], row["popularity"]) == (3, "distinct"))
    assert sum(by_group) == whole["bytes"]
    assert values["prefill"]
    tables = section("sgmv").tables(values)
    assert all(table.rows for table in tables)


@pytest.mark.slow
@pytest.mark.triton
def test_products_in_the_interpreter(context):
    options = ["--quick", "--device", "cpu", "--out", str(context.store.directory)]
    done = worker("products", *options)
    assert done.returncode == 0, done.stderr
    values = context.store.values("products")
    assert "not_measured" not in values
    assert {(row["product"], row["count"]) for row in values["rows"]} == {
        (product, count) for product in ("qkv", "o", "gate and up", "down") for count in (1, 3)
    }
    for row in values["rows"]:
        assert row["small_error"] <= 1e-4
        assert row["small_share"] == pytest.approx(row["bytes"] / (row["small_us"] / 1e6) / 5e9)
    assert all(table.rows for table in section("products").tables(values))


@pytest.mark.triton
@pytest.mark.parametrize(("kv_cache_dtype", "kv_itemsize"), [("auto", 4), ("fp8", 1)])
def test_attention_in_the_interpreter(context, kv_cache_dtype, kv_itemsize):
    options = ["--quick", "--device", "cpu", "--out", str(context.store.directory)]
    options += ["--engine", f"kv_cache_dtype={kv_cache_dtype}"]
    done = worker("attention", *options)
    assert done.returncode == 0, done.stderr
    values = context.store.values("attention")
    assert "not_measured" not in values
    assert values["absent"] == dict.fromkeys(("flashinfer", "xqa"), "there is no GPU")
    assert [(row["tokens"], row["count"]) for row in values["rows"]] == [(40, 1), (40, 3)]
    for row in values["rows"]:
        assert row["triton_error"] <= 1e-4
        assert row["triton_share"] == pytest.approx(row["bytes"] / (row["triton_us"] / 1e6) / 5e9)
        least = row["count"] * 40 * 2 * 64 * kv_itemsize
        assert least < row["bytes"] < 2 * least, "every key and value once"
    assert all(table.rows for table in section("attention").tables(values))


@pytest.mark.triton
def test_latents_in_the_interpreter(context):
    done = worker("latents", "--quick", "--device", "cpu", "--out", str(context.store.directory))
    assert done.returncode == 0, done.stderr
    values = context.store.values("latents")
    assert "not_measured" not in values
    assert [(row["tokens"], row["count"]) for row in values["rows"]] == [(40, 1), (40, 3)]
    for row in values["rows"]:
        assert row["error"] <= 1e-4
        assert row["triton_share"] == pytest.approx(row["bytes"] / (row["triton_us"] / 1e6) / 5e9)
        least = 4 * (row["count"] * 40 * 40 + 4 * 40 * 32)
        assert least < row["bytes"] < 1.5 * least, "every latent once, and every weight"
    assert all(table.rows for table in section("latents").tables(values))


def worker(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "chorus.perf.bench", "--worker", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def test_a_run_without_a_gpu_says_so(context, tmp_path, capsys):
    combined = context.store.combine(SECTIONS, describe("cpu"))
    report(combined, tmp_path / "report.txt")
    shown = capsys.readouterr().out
    assert f"device cpu: {SMOKE}" in shown
    assert "goals" not in shown
    text = (tmp_path / "report.txt").read_text("utf-8")
    assert all(SMOKE in line for line in text.splitlines() if line.startswith("("))
    summary = digest(combined, tmp_path / RESULT)
    assert summary["measurement"] is False
    assert "goals" not in summary
    json.dumps(summary)


def test_a_gpu_run_shows_the_goals(tmp_path, capsys):
    store = ResultStore(tmp_path, {"run": "quick", "device": "cuda", "model": "llama-3.1-8b", "seed": 0})
    environment = {**describe("cpu"), "device": {"type": "cuda", "name": "NVIDIA H200"}, "driver": "580"}
    combined = store.combine(SECTIONS, environment)
    report(combined, tmp_path / "report.txt")
    shown = capsys.readouterr().out
    assert shown.count("not measured") == 10
    assert SMOKE not in shown
    assert len(digest(combined, tmp_path / RESULT)["goals"]) == 10


def test_http_stands_beside_the_same_load_without_it(context, monkeypatch):
    """The server gets the load's model, adapters and lengths; a popularity without a number next to it has no share."""
    asked = []

    @contextmanager
    def launched(flags):
        asked.append(flags)
        yield SimpleNamespace(url="http://here")

    size = mixes.load(context)
    answered = Answered(size["requests"] * size["output_tokens"] / 90.0, [0.001], [0.002])
    monkeypatch.setattr(http, "launched", launched)
    monkeypatch.setattr(http, "measure", lambda *_: answered)
    context.store.write("mixes", 0.0, describe("cpu"), values={"base": {"tokens_per_s": 100.0}, "rows": []})
    values = run(replace(context, engine={"small_gemm": "off"}), "http")
    assert [row["over_offline"] for row in values["rows"]] == [pytest.approx(0.9), None]
    (flags,) = asked
    assert flags[-2:] == ["--small-gemm", "off"]
    model = Path(flags[flags.index("--model") + 1])
    tokens = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert tokens.get_vocab_size() == context.size.geometry.vocab


def test_no_prompt_is_sent_twice_to_a_server(monkeypatch):
    """The server keeps the KV of prompts that it has seen, and would answer sooner."""
    sent = []

    def read_streams(address, bodies):
        sent.append([(body["model"], tuple(body["prompt"])) for body in bodies])
        return Answered(float(len(sent)), [], [])

    card = SimpleNamespace(json=lambda: {"data": [{"id": "base"}]})
    monkeypatch.setattr(http, "read_streams", read_streams)
    monkeypatch.setattr(http.httpx, "get", lambda url, **_: card)
    server: Any = SimpleNamespace(url="http://here", address="here")
    size = {"requests": 2, "prompt_tokens": 9, "output_tokens": 4}
    for popularity, models in (("base", ["base"] * 2), ("distinct", ["a", "b"])):
        sent.clear()
        assert http.measure(server, popularity, size, ["a", "b", "c"], 512).seconds == 2.0
        assert [[model for model, _ in each] for each in sent] == [models] * 2
        assert len({prompt for each in sent for _, prompt in each}) == 4


@pytest.mark.parametrize("folder", ["h100-2026-11-27-22220d4f", "h200-2026-11-26-2cc51cf"])
def test_goals_are_under_the_name_of_the_gpu_that_was_measured(folder, tmp_path):
    kept = Path(__file__).parents[3] / "perf" / "results" / folder / "result.json"
    combined = json.loads(kept.read_text("utf-8"))
    report(combined, tmp_path / "report.txt")
    lines = (tmp_path / "report.txt").read_text("utf-8").splitlines()
    (title,) = [line.strip() for line in lines if line.startswith("goals (")]
    assert title == f"goals ({combined['environment']['device']['name']}, llama-3.1-8b)"
