"""Peers next to `chorus serve`: each gets the same load, in turns; no test looks at a speed."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from chorus.perf.bench.environment import describe
from chorus.perf.bench.options import Options
from chorus.perf.bench.sections import peers
from chorus.perf.serving import vllm_process
from chorus.perf.serving.streams import Answered

LIMITS = {"copy": {"bytes_per_s": 4e9}, "read": {"bytes_per_s": 5e9}, "matmul": {"flops_per_s": 1e11}}


@pytest.fixture
def context(tmp_path):
    argv = ["--quick", "--device", "cpu", "--out", str(tmp_path), "--beside", f"vllm={tmp_path}"]
    context = Options.parse(argv).context()
    context.store.write("limits", 0.0, describe("cpu"), values=LIMITS)
    return context


@pytest.fixture
def log(monkeypatch) -> list[tuple]:
    """Calls of the servers, which answer in 2 s, chorus in 1; the first token comes after half of the time."""
    done: list[tuple] = []

    class Fake(peers.Served):
        def signal(self, suspend: bool) -> None:
            done.append((self.server.url, "suspend" if suspend else "resume"))

    def start(name: str):
        def peer(load, path, lora, stack):
            url = f"{name} {'lora' if lora else 'plain'}"
            return Fake(cast(Any, SimpleNamespace(url=url, address=url)), lambda index: {"index": index})

        return peer

    def read_streams(address, bodies):
        done.append((address, [(body["model"], body["index"]) for body in bodies], bodies[0]["prompt"]))
        seconds = 1.0 if address.startswith("chorus") else 2.0
        return Answered(seconds, [seconds / 4, seconds / 2], [])

    def bodies(url, names, size, draw, vocab):
        return [{"model": name, "prompt": draw.random()} for name in names]

    monkeypatch.setattr(peers, "PEERS", {name: start(name) for name in ("chorus", "vllm", "llamacpp")})
    monkeypatch.setattr(peers, "read_streams", read_streams)
    monkeypatch.setattr(peers, "bodies", bodies)
    return done


def test_each_case_has_rates_of_each_server_and_a_limit(context, log):
    values = peers.run(context)
    assert "not_measured" not in values
    assert {(row["case"], row["peer"]) for row in values["rows"]} == {
        (case, peer) for case in peers.CASES for peer in ("chorus", "vllm")
    }
    for row in values["rows"]:
        seconds = 1.0 if row["peer"] == "chorus" else 2.0
        assert row["rate"] == 8 * 4 / seconds
        assert row["prefill_rate"] == 8 * 8 / (seconds / 2)
        assert row["decode_rate"] == 8 * 3 / (seconds / 2)
        assert row["samples"] == 1
    limits = values["limits"]
    assert limits["base"] == limits["plain"]
    assert limits["base"]["prefill_rate"] == pytest.approx(8 * 8 / context.floors(8, 8).prefill)
    assert limits["base"]["decode_rate"] == pytest.approx(8 / context.floors(8, 10).decode)
    ranks = (8, 8, 16, 16, 32, 32, 64, 64)
    assert limits["mixed"]["decode_rate"] == pytest.approx(8 / context.floors(8, 10, ranks).decode)
    assert limits["one"]["decode_rate"] == pytest.approx(8 / context.floors(8, 10, (32,)).decode)
    (table,) = peers.tables(values)
    assert len(table.rows) == 8 and table.render().row_count == 8


def test_one_server_runs_at_a_time_and_all_get_the_same_load(context, log):
    peers.run(context)
    starts, rest = log[:4], log[4:]
    kinds = [f"{peer} {kind}" for peer in ("chorus", "vllm") for kind in ("plain", "lora")]
    assert starts == [(kind, "suspend") for kind in kinds]
    ends = [entry for entry in rest if entry[1] == "resume"][-4:]
    assert {server for server, _ in ends} == {*kinds}, "a suspended server can't end"
    measured = [entry for entry in rest if len(entry) == 3]
    for entry in measured:
        server, asked, _ = entry
        at = rest.index(entry)
        assert rest[at - 1] == (server, "resume")
        assert rest[at + 1] == (server, "suspend")
        assert len(asked) == 8
    prompts = {}
    for server, asked, prompt in measured:
        prompts.setdefault(prompt, []).append((server.split()[0], asked))
    assert len(prompts) == 2 * len(peers.CASES), "two rounds, of which the first is dropped"
    for (peer, asked), (other, others) in prompts.values():
        assert {peer, other} == {"chorus", "vllm"}
        assert asked == others
    mixed = [f"r{rank}-00{index}" for rank in peers.RANKS for index in range(2)]
    asked = [each for (_, each), _ in prompts.values()]
    assert list(zip(mixed, range(8), strict=True)) in asked
    assert [("r32-000", 4)] * 8 in asked
    assert [(None, None)] * 8 in asked


def test_a_peer_that_does_not_start_costs_no_other(context, log, monkeypatch):
    def broken(*_):
        raise OSError("no such program")

    monkeypatch.setitem(peers.PEERS, "vllm", broken)
    values = peers.run(context)
    assert values["not_measured"] == [{"case": "start of vllm", "why": "OSError: no such program"}]
    assert {row["peer"] for row in values["rows"]} == {"chorus"}


def test_a_rate_is_the_median_of_the_samples():
    rates = [{"rate": 10.0}, {"rate": 1.0}, {"rate": 12.0}]
    assert peers.row("base", "chorus", rates) == {"case": "base", "peer": "chorus", "rate": 10.0, "samples": 3}


def test_the_best_peer_is_the_mark():
    rates = {
        ("chorus", "mixed"): 100,
        ("vllm", "mixed"): 20,
        ("llamacpp", "mixed"): 50,
        ("chorus", "base"): 90,
        ("vllm", "plain"): 100,
        ("llamacpp", "plain"): 80,
    }
    rows = [{"peer": peer, "case": case, "rate": rate, "prefill_rate": rate} for (peer, case), rate in rates.items()]
    found = {goal.name: goal for goal in peers.goals({"rows": rows, "limits": {"base": {"prefill_rate": 100.0}}})}
    assert (found["mixed / best peer's mixed"].value, found["mixed / best peer's mixed"].met) == (2.0, False)
    assert (found["mixed / vllm's mixed"].value, found["mixed / vllm's mixed"].met) == (5.0, True)
    assert found["base / best peer's plain"].value == 0.9
    assert found["prefill: base / its limit"].value == 0.9
    assert found["mixed / base"].value == pytest.approx(100 / 90)
    assert found["one / base"].met is None


LOAD = peers.Load(Path("work/model"), {"a": Path("named/a"), "b": Path("named/b")}, 100, "bfloat16", 2)


@pytest.mark.parametrize(
    ("name", "path", "program"),
    [("vllm", "env/bin/vllm", "env/bin/vllm"), ("llamacpp", "tree", "tree/build/bin/llama-server")],
)
def test_peers_get_the_adapters_where_lora_is_on(monkeypatch, name, path, program):
    commands = []

    @contextmanager
    def started(words, environment=None):
        commands.append(words)
        yield SimpleNamespace(url="")

    monkeypatch.setattr(peers, "started", started)
    monkeypatch.setattr(vllm_process, "started", started)
    monkeypatch.setattr(vllm_process, "_wait_until_ready", lambda url: None)
    monkeypatch.setattr(peers, "converted", lambda load, tree, script, file, *rest: Path(f"{file.name}.gguf"))
    with ExitStack() as stack:
        served = [peers.PEERS[name](LOAD, Path(path), lora, stack) for lora in (False, True)]
    plain, lora = commands
    assert plain[0] == lora[0] == program
    assert not any("lora" in word for word in plain)
    more = " ".join(lora)
    assert ("a=named/a b=named/b" if name == "vllm" else "--lora a.gguf,b.gguf") in more
    assert served[0].more(None) == {}
    wanted = {} if name == "vllm" else {"lora": [{"id": 0, "scale": 0.0}, {"id": 1, "scale": 1.0}]}
    assert served[1].more(1) == wanted


@pytest.mark.parametrize(("asked", "kind"), [("int8", "Q8_0"), ("int4", "Q4_K_S")])
def test_llama_cpp_gets_weights_of_as_many_bits(tmp_path, monkeypatch, asked, kind):
    commands, ran = [], []

    @contextmanager
    def started(words, environment=None):
        commands.append(words)
        yield SimpleNamespace()

    def run(command, **options):
        ran.append([str(word) for word in command])
        Path(command[2]).write_text("gguf")

    monkeypatch.setattr(peers, "started", started)
    monkeypatch.setattr(peers, "launched", started)
    monkeypatch.setattr(peers, "converted", lambda *_: tmp_path / "model.bf16.gguf")
    monkeypatch.setattr(peers.subprocess, "run", run)
    load = replace(LOAD, engine={"quantization": asked, "quantize_lm_head": "true"})
    with ExitStack() as stack:
        for _ in range(2):
            peers.llamacpp(load, Path("tree"), False, stack)
        peers.chorus(load, Path(), False, stack)
    assert [words[:1] + words[-1:] for words in ran] == [["tree/build/bin/llama-quantize", kind]]
    made = tmp_path / f"model.bf16.{kind}.gguf"
    assert str(made) in commands[0] and str(made) in commands[1] and made.read_text() == "gguf"
    assert commands[2][-3:] == ["--quantization", asked, "--quantize-lm-head"]
    with pytest.raises(ValueError, match=f"quantization is {asked}, which only llamacpp"), ExitStack() as stack:
        peers.vllm(load, Path("vllm"), False, stack)


def test_bars_of_quantised_weights_are_their_own():
    rates = {("chorus", "base"): 130, ("llamacpp", "plain"): 100, ("chorus", "mixed"): 90, ("llamacpp", "mixed"): 25}
    rows = [
        {"peer": peer, "case": case} | dict.fromkeys(("rate", "prefill_rate", "decode_rate"), rate)
        for (peer, case), rate in rates.items()
    ]
    found = peers.goals({"rows": rows, "limits": {}, "quantization": "int8"})
    assert [(goal.value, goal.mark, goal.met) for goal in found] == [
        (1.3, 1.2, True),
        (3.6, 3.0, True),
        (1.3, 1.0, True),
    ]


def test_files_are_converted_once(tmp_path, monkeypatch):
    ran = []

    def run(command, env, check):
        ran.append([str(word) for word in command])
        Path(command[-1]).write_text("gguf")

    monkeypatch.setattr(peers.subprocess, "run", run)
    load = peers.Load(tmp_path / "model", {}, 100, "bfloat16", 2)
    for _ in range(2):
        made = peers.converted(load, Path("tree"), "convert.py", tmp_path / "model", "--base", "x")
        assert made.read_text() == "gguf" and made.name == "model.bf16.gguf"
    ((_, script, *rest, _),) = ran
    assert script == "tree/convert.py"
    assert rest[:5] == ["--base", "x", str(tmp_path / "model"), "--outtype", "bf16"]
