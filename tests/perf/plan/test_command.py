"""`chorus plan` from a trace to a page, and wrong input."""

from __future__ import annotations

import json
import re
import shlex
from shutil import copytree
from xml.etree import ElementTree

import pytest

from chorus.core.costs.profile import load_profile
from chorus.perf.bench.models.random_mixture import MixtureShape
from chorus.perf.plan import command
from chorus.server.checkpoints.pull import models_dir
from chorus.server.cli.command import make_parser
from chorus.server.start.flags import Parser, UsageError


def plan(*flags):
    parser = Parser(prog="chorus plan")
    command.add_flags(parser)
    return command.run(parser.parse(list(map(str, flags))))


def shown(page):
    """The texts of the page's charts."""
    svg = ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    return {each.text for each in svg.iter("{http://www.w3.org/2000/svg}text")}


@pytest.mark.wide
def test_a_plan_is_one_page_that_needs_nothing_else(trace, model, tmp_path, capsys):
    out = tmp_path / "plan.html"
    flags = ["--trace", trace, "--gpu", "l4", "--model", model, "--slo-ttft", "2s", "--slo-tpot", "100ms"]
    assert plan(*flags, "--policy", "affinity,most-idle", "--seeds", 2, "--out", out, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    best = found["best"]
    assert best["meets"] and best["attainment"][1] >= 0.99 and best["seeds"] == 2
    assert best["replicas"] == min(one["replicas"] for one in found["candidates"] if one["meets"])
    assert found["predicted"] and "predicted" in found["summary"]
    assert found["command"].startswith(f"chorus cluster up {model} --policy {best['policy']} ")
    page = out.read_text()
    loaded = re.sub(r' xmlns(:xlink)?="[^"]*"', "", page)  # names of formats, which no browser asks for
    assert not re.search(r"""(src|href)\s*=\s*"(?!#)|url\((?!#)|@import|<script|https?:""", loaded)
    assert "prefers-color-scheme: dark" in page
    assert {"Arrivals", "Time to first token of the best candidate", "affinity", "asked for", "SLO"} <= shown(page)
    assert "predicted</span>" in page and found["command"] in page
    assert page.count("<tr") == 1 + len(found["candidates"]) and page.count('class="best"') == 1


def test_a_measured_profile_that_follows_the_load(trace, tmp_path, capsys):
    profile = tmp_path / "profile.json"
    load_profile("a100-llama2-7b").save(profile)
    flags = ["--trace", trace, "--gpu", f"profile:{profile}", "--slo-ttft", "3s", "--policy", "most-idle"]
    flags += ["--seeds", 1, "--memory-bytes", "20GiB", "--engine", "max_num_seqs=4", "--min-replicas", 1]
    assert plan(*flags, "--out", tmp_path / "plan.html") == 0
    said = capsys.readouterr().out
    assert "from a measured profile" in said and "predicted" not in said
    assert all(f"\nAn adapter of rank {rank} takes " in said for rank in (8, 16, 64))
    assert re.search(
        r"chorus cluster up MODEL .*--memory-bytes 20GiB --max-num-seqs 4 --replicas \d+ --min-replicas 1\n", said
    )


@pytest.mark.wide
def test_the_command_has_all_that_was_planned_with(trace, model, tmp_path, capsys):
    flags = ["--trace", trace, "--gpu", "l4", "--model", model, "--slo-ttft", "2s", "--slo-tpot", "100ms"]
    flags += ["--policy", "least-delay", "--seeds", 1, "--engine", "chunked_prefill=false"]
    assert plan(*flags, "--out", tmp_path / "plan.html") == 0
    words = shlex.split(next(line for line in capsys.readouterr().out.splitlines() if line.startswith("chorus")))
    assert {"--adapters", "--slo-tpot", "--host-cache-bytes", "--no-chunked-prefill"} < set(words)
    given = make_parser().parse(words[1:])
    assert (given.policy, given.slo_tpot, given.replicas) == ("least-delay", 0.1, 1)


@pytest.mark.wide
def test_a_plan_with_a_kv_cache_in_float8(trace, model, tmp_path, capsys):
    """Of a measured profile, only if it was measured so."""
    flags = ["--trace", trace, "--slo-ttft", "3s", "--policy", "most-idle", "--seeds", 1, "--out", tmp_path / "p.html"]
    float8 = ["--engine", "kv_cache_dtype=fp8"]
    assert plan(*flags, "--gpu", "l4", "--model", model, *float8) == 0
    assert "--kv-cache-dtype fp8" in capsys.readouterr().out
    measured = load_profile("a100-llama2-7b")
    measured.save(tmp_path / "auto.json")
    geometry = measured.geometry.model_copy(update={"float8_kv": True})
    measured.model_copy(update={"geometry": geometry}).save(tmp_path / "fp8.json")
    assert plan(*flags, "--gpu", f"profile:{tmp_path}/auto.json", *float8) == 2
    assert "--engine kv_cache_dtype is 'fp8', but a100-llama2-7b was measured with 'auto'" in capsys.readouterr().err
    assert plan(*flags, "--gpu", f"profile:{tmp_path}/fp8.json", "--engine", "kv_cache_dtype=auto") == 2
    assert "is 'auto', but a100-llama2-7b was measured with 'fp8'" in capsys.readouterr().err
    assert plan(*flags, "--gpu", f"profile:{tmp_path}/fp8.json") == 0
    assert "--kv-cache-dtype fp8" in capsys.readouterr().out


def test_a_plan_with_quantised_weights(trace, model, tmp_path, capsys):
    flags = ["--trace", trace, "--slo-ttft", "3s", "--policy", "most-idle", "--seeds", 1, "--out", tmp_path / "p.html"]
    assert plan(*flags, "--gpu", "l4", "--model", model, "--engine", "quantization=int4") == 0
    assert "--quantization int4" in capsys.readouterr().out
    assert plan(*flags, "--gpu", "l4", "--model", model, "--engine", "quantization=int3") == 2
    assert "--engine quantization is 'int3'; use one of int8, int4, w8a8, w4a8, fp8" in capsys.readouterr().err
    load_profile("a100-llama2-7b").save(tmp_path / "p.json")
    assert plan(*flags, "--gpu", f"profile:{tmp_path}/p.json", "--engine", "quantization=int4") == 2
    assert "but a100-llama2-7b has measured steps; leave it out" in capsys.readouterr().err


def test_an_arena_without_room_for_an_adapter_is_no_plan(trace, model, tmp_path, capsys):
    flags = ["--trace", trace, "--gpu", "l4", "--model", model, "--slo-ttft", "2s", "--memory-bytes", "32MiB"]
    assert plan(*flags, "--policy", "affinity", "--seeds", 1, "--out", tmp_path / "plan.html") == 1
    assert "no replica has room for some request, or for its adapter" in capsys.readouterr().out


def test_a_model_has_the_names_that_it_is_served_by(trace, model, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags = ["--trace", trace, "--gpu", "l4", "--model", "smollm2", "--slo-ttft", "9s", "--policy", "random"]
    flags += ["--seeds", 1, "--memory-bytes", "3GiB", "--out", tmp_path / "plan.html"]
    assert plan(*flags) == 2
    assert "--model: model smollm2 has not been fetched yet; run: chorus pull smollm2" in capsys.readouterr().err
    copytree(model, models_dir() / "smollm2")
    assert plan(*flags) == 0
    assert "\nchorus cluster up smollm2 --policy random " in capsys.readouterr().out


def test_a_file_without_a_header_is_named(trace, model, tmp_path, capsys):
    trace.write_text("")
    assert plan("--trace", trace, "--gpu", "l4", "--model", model, "--slo-ttft", "2s") == 2
    assert f"{trace}) has no arrival, only nothing that can be read" in capsys.readouterr().err


def test_no_plan_is_exit_code_1_and_the_page_says_why(trace, model, tmp_path, capsys):
    rows = trace.read_text().splitlines()
    trace.write_text("\n".join([rows[0]] + [re.sub(r"^[\d.]+", "1000", row) for row in rows[1:]] * 6) + "\n")
    out = tmp_path / "plan.html"
    flags = ["--trace", trace, "--gpu", "l4", "--model", model, "--slo-ttft", "1s", "--policy", "random"]
    assert plan(*flags, "--max-replicas", 2, "--seeds", 2, "--memory-bytes", "1GiB", "--out", out) == 1
    said = capsys.readouterr().out
    assert "No candidate, with up to 2 replicas" in said and "Reason with 2 by random: " in said
    assert "TTFT" in out.read_text()


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--gpu", "h1000"], r"--gpu is 'h1000'; use one of h100"),
        (["--gpu", "profile:/nowhere"], "/nowhere is neither a file nor"),
        (["--policy", "best"], r"--policy is 'best'; use some of .*affinity"),
        (["--targets", "q"], "--targets is 'q'; use some of q_proj"),
        (["--memory-bytes", "1TiB"], r"--memory-bytes is \d+, but NVIDIA H100.* has room for"),
        (["--host-cache-bytes", "much"], "--host-cache-bytes is 'much': a size must be"),
        (["--engine", "max_num_seqs=0"], "--engine: max_num_seqs is '0'"),
        (["--engine", "fast"], "--engine is 'fast'; give NAME=VALUE"),
        (
            ["--engine", "max_num_seq=4"],
            "--engine is 'max_num_seq=4', which plans do not simulate; use some of max_num_seqs",
        ),
        (["--engine", "tensor-parallel-size=2"], "--engine is 'tensor-parallel-size=2', which plans do not simulate"),
        (["--engine", "prefix_cache=true"], "--engine is 'prefix_cache=true', which plans do not simulate"),
        (["--engine", "host_cache_bytes=5"], "--engine is 'host_cache_bytes=5', which plans do not simulate"),
        (["--engine", "max_model_len=110"], "the model takes 110 tokens of a request"),
        (
            ["--slo-tpot", "1ms"],
            r"--slo-tpot is 1 ms, and .*% of the requests take longer even alone.* ms a token; raise --slo-tpot",
        ),
        (
            ["--slo-ttft", "1ms"],
            r"--slo-ttft is 1 ms, and 100.0% .*prompt and 20 output tokens.* takes .* ms; raise --slo-ttft",
        ),
        (["--trace", "/nowhere.csv"], "/nowhere.csv: the trace cannot be opened"),
    ],
)
def test_wrong_input_is_named_with_its_fix(trace, model, tmp_path, capsys, flags, text):
    given = ["--trace", trace, "--gpu", "h100", "--model", model, "--slo-ttft", "500ms", "--out", tmp_path / "p.html"]
    assert plan(*given, *flags) == 2
    assert re.search(text, capsys.readouterr().err)
    assert not (tmp_path / "p.html").exists()


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ([], "the SLO is missing"),
        (["--slo-ttft", "500"], "no time; give one with a unit, such as 500ms"),
        (["--slo-ttft", "1s", "--seeds", 0], "--seeds: is 0; give 1 or more"),
        (["--slo-ttft", "1s", "--boot-seconds", -5], "--boot-seconds: is -5; give 0 or more"),
        (["--slo-ttft", "1s", "--min-replicas", 5, "--max-replicas", 3], "--min-replicas is 5, above --max-replicas 3"),
        (["--slo-ttft", "1s", "--attainment", 1.5], "--attainment: is 1.5; give a number above 0, at most 1"),
        (["--slo-ttft", "1s", "--out", "/nowhere/p.html"], "--out is /nowhere/p.html: its directory does not exist"),
    ],
)
def test_wrong_flags_are_usage_errors(trace, flags, text):
    with pytest.raises(UsageError, match=re.escape(text)):
        plan("--trace", trace, "--gpu", "h100", *flags)


def test_a_page_without_charts_is_refused_before_anything_is_simulated(trace, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"need matplotlib; run pip install 'chorus-lora\[plan\]'"):
        plan("--trace", trace, "--gpu", "l4", "--slo-ttft", "2s")


EXPERTS = "experts.gate_proj,experts.up_proj,experts.down_proj"


@pytest.mark.wide
def test_a_plan_tells_what_an_adapter_on_all_experts_takes(trace, tmp_path, capsys):
    """Qwen3-30B-A3B: 128 experts in 48 layers."""
    model = MixtureShape().write_config(tmp_path / "model")
    flags = ["--trace", trace, "--gpu", "h200", "--model", model, "--slo-ttft", "60s", "--policy", "least-delay"]
    flags += ["--seeds", 1, "--targets", f"q_proj,k_proj,v_proj,o_proj,{EXPERTS}", "--host-cache-bytes", "8GiB"]
    flags += ["--memory-bytes", "40GiB", "--max-replicas", 1]
    out = tmp_path / "plan.html"
    plan(*flags, "--out", out, "--json")
    of_rank = {each["rank"]: each for each in json.loads(capsys.readouterr().out)["adapters"]}
    assert set(of_rank) == {8, 16, 64}
    values = 48 * 8 * (2048 + 4096 + 2 * (2048 + 512) + 4096 + 2048 + 128 * 3 * (2048 + 768))
    assert of_rank[8]["pages"] == -(-2 * values // (48 * 2 * 16 * 4 * 128 * 2)) == 537
    assert of_rank[8]["num_bytes"] == 537 * 1572864
    assert "rank 8 takes 805.5 MiB in 537 pages" in out.read_text()
