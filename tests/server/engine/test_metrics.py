"""GET /metrics."""

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.engine_stats import EngineStats, adapter_names_of
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.memory.adapters.adapter import Tier
from chorus.server.cluster.cluster_view import ClusterCollector
from chorus.server.engine import engine_view
from chorus.server.engine.engine_view import EngineView


def test_metrics(start, fake_engine):
    live = start(fake_engine)
    live.post(model="alice", prompt="abc")
    live.post(model="base", prompt="abcdef", max_tokens=2)
    live.post(model="nobody", prompt="abc")
    text = live.client.get("/metrics").text
    lines = text.splitlines()
    assert 'chorus_requests_total{finish_reason="stop",model="alice"} 1.0' in lines
    assert 'chorus_requests_total{finish_reason="length",model="base"} 1.0' in lines
    assert 'chorus_generated_tokens_total{model="alice"} 4.0' in lines
    assert 'chorus_prompt_tokens_total{model="base"} 7.0' in lines
    assert "chorus_steps_total 6.0" in lines
    assert 'chorus_pages{kind="free"} 100.0' in lines
    assert "chorus_last_step_adapters 0.0" in lines
    assert "chorus_time_to_first_token_seconds_count 2.0" in lines
    assert "chorus_inter_token_latency_seconds_count 4.0" in lines
    assert "chorus_request_seconds_count 2.0" in lines
    assert "nobody" not in text


def test_what_vllms_boards_read_of_requests(start, fake_engine):
    fake_engine.num_cached_tokens = 1
    live = start(fake_engine)
    live.post(model="alice", prompt="abc", n=2, max_tokens=8)
    live.post(model="base", prompt="abcdef", max_tokens=2, stream=True)
    live.post(model="base", prompt="abc", stop="b")
    lines = live.client.get("/metrics").text.splitlines()
    labels = '{engine="0",model_name="base"}'

    def value(name):
        (line,) = (line for line in lines if line.startswith(f"vllm:{name}{labels}"))
        return float(line.rpartition(" ")[2])

    counted = {
        "request_prompt_tokens": (4, 4 + 4 + 7 + 4),
        "request_prefill_kv_computed_tokens": (4, 3 + 3 + 6 + 3),
        "request_generation_tokens": (4, 4 + 4 + 2 + 2),
        "request_max_num_generation_tokens": (3, 4 + 2 + 2),
        "request_params_max_tokens": (4, 8 + 8 + 2 + 16),
        "request_params_n": (3, 2 + 1 + 1),
        "request_num_preemptions": (4, 2 + 2 + 1 + 1),
        "request_queue_time_seconds": (4, 2.0**-18),
    }
    for name, (count, total) in counted.items():
        assert (value(f"{name}_count"), value(f"{name}_sum")) == (count, total), name
    for name in ("prefill_time", "decode_time", "inference_time", "time_per_output_token"):
        assert value(f"request_{name}_seconds_count") == 4
    parts = value("request_prefill_time_seconds_sum") + value("request_decode_time_seconds_sum")
    assert value("request_inference_time_seconds_sum") == pytest.approx(parts)


BOARDS = (
    "cache_config_info",
    "e2e_request_latency_seconds",
    "generation_tokens_total",
    "inter_token_latency_seconds",
    "iteration_tokens_total",
    "kv_cache_usage_perc",
    "num_requests_running",
    "num_requests_waiting",
    "prompt_tokens_total",
    "request_decode_time_seconds",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_prefill_time_seconds",
    "request_prompt_tokens",
    "request_queue_time_seconds",
    "request_success_total",
    "request_time_per_output_token_seconds",
    "time_to_first_token_seconds",
)
"""Metrics of the 43 panels of the Grafana boards in vLLM 0.33's examples."""


def test_every_panel_of_every_board_has_its_metrics(start, fake_engine):
    live = start(fake_engine)
    live.post(model="alice", prompt="abc")
    text = live.client.get("/metrics").text
    families = set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))
    assert {f"vllm:{name}" for name in BOARDS} <= families
    board = json.loads((Path(__file__).parents[3] / "docs" / "deploy" / "grafana.json").read_text())
    asked = " ".join(target["expr"] for panel in board["panels"] for target in panel.get("targets", ()))
    names = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\b(?:chorus_|vllm:)\w+", asked)}
    assert len(names) > 25 and names <= families


DEPLOY = Path(__file__).parents[3] / "docs" / "deploy"


class TestAlerts:
    """Grafana's alert rules and Prometheus's configuration in docs/deploy."""

    @pytest.fixture
    def rules(self):
        found = yaml.safe_load((DEPLOY / "grafana-alerts.yaml").read_text())
        assert found["apiVersion"] == 1
        return [rule for group in found["groups"] for rule in group["rules"]]

    def test_rules_ask_for_metrics_that_there_are(self, rules, start, fake_engine):
        live = start(fake_engine)
        live.post(model="alice", prompt="abc")
        families = set(re.findall(r"^# TYPE (\S+) ", live.client.get("/metrics").text, re.MULTILINE))
        in_flight = SimpleNamespace(num_waiting=0, num_moves=0, num_stale=0, num_at=lambda name: 0)
        dispatcher = SimpleNamespace(
            in_flight=in_flight,
            links=(),
            num_replicas=2,
            num_deaths=0,
            scale=SimpleNamespace(value=0),
            reported_costs=list,
        )
        registry = CollectorRegistry()
        registry.register(ClusterCollector(dispatcher))
        families |= set(re.findall(r"^# TYPE (\S+) ", generate_latest(registry).decode(), re.MULTILINE))
        for rule in rules:
            asked = rule["data"][0]["model"]["expr"]
            names = set(re.findall(r"\b(?:chorus_|vllm:)\w+", asked))
            assert names or "up{" in asked, asked
            assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in names} <= families, asked
            assert asked.count("(") == asked.count(")") and asked.count("{") == asked.count("}")

    def test_rules_are_complete(self, rules):
        assert len(rules) >= 8 and len({rule["uid"] for rule in rules}) == len(rules)
        for rule in rules:
            value, bound = rule["data"]
            assert rule["condition"] == bound["refId"] and bound["model"]["expression"] == value["refId"]
            assert bound["datasourceUid"] == "__expr__" and bound["model"]["type"] == "threshold"
            (condition,) = bound["model"]["conditions"]
            assert condition["evaluator"]["type"] in ("gt", "lt") and len(condition["evaluator"]["params"]) == 1
            assert value["relativeTimeRange"]["from"] > value["relativeTimeRange"]["to"]
            assert rule["annotations"]["summary"] and rule["labels"]["severity"] in ("warning", "critical")
            assert rule["noDataState"] in ("OK", "Alerting", "NoData") and re.fullmatch(r"\d+m", rule["for"])

    def test_prometheus_scrapes_the_job_that_rules_name(self, rules, start, fake_engine):
        found = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
        (job,) = found["scrape_configs"]
        assert any(f'job="{job["job_name"]}"' in rule["data"][0]["model"]["expr"] for rule in rules)
        assert start(fake_engine).client.get(job["metrics_path"]).status_code == 200
        assert job["static_configs"][0]["targets"] == ["127.0.0.1:8000"]


def test_sizes_of_steps(start, fake_engine):
    stats = fake_engine.stats
    counts = (2, 3, *[0] * 11, 1)
    fake_engine.stats = lambda: replace(stats(), step_sizes=counts, num_step_tokens=20_022)
    lines = start(fake_engine).client.get("/metrics").text.splitlines()
    labels = 'engine="0",model_name="base"'
    assert f"vllm:iteration_tokens_total_sum{{{labels}}} 20022.0" in lines
    for bound, count in (("1.0", 2), ("8.0", 5), ("16384.0", 5), ("+Inf", 6)):
        assert f'vllm:iteration_tokens_total_bucket{{engine="0",le="{bound}",model_name="base"}} {count}.0' in lines


def test_openmetrics_where_the_scraper_takes_it(start, fake_engine):
    live = start(fake_engine)
    live.post(model="alice", prompt="abc")
    for accept in (
        "application/openmetrics-text;version=1.0.0,text/plain;q=0.5",
        "application/openmetrics-text;version=x",
    ):
        response = live.client.get("/metrics", headers={"accept": accept})
        assert response.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
        families = {family.name: family for family in text_string_to_metric_families(response.text)}
        assert families["vllm:request_prompt_tokens"].type == "histogram" and "chorus_generated_tokens" in families
        assert families["vllm:iteration_tokens_total"].samples
    plain = live.client.get("/metrics", headers={"accept": "text/plain;version=x, */*"})
    assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8" and "# EOF" not in plain.text


def test_adapters_by_tier(start, fake_engine, monkeypatch):
    live = start(fake_engine)
    fake_engine.store.tiers |= {"alice": Tier.DEVICE, "carol": Tier.HOST, "dan": Tier.LOADING}
    lines = live.client.get("/metrics").text.splitlines()
    assert [line for line in lines if line.startswith("chorus_adapter_tier{")] == [
        'chorus_adapter_tier{adapter="alice",tier="device"} 1.0',
        'chorus_adapter_tier{adapter="dan",tier="loading"} 1.0',
        'chorus_adapter_tier{adapter="carol",tier="host"} 1.0',
    ]
    assert [line for line in lines if line.startswith("chorus_adapters{")] == [
        *(f'chorus_adapters{{tier="{tier}"}} 1.0' for tier in ("disk", "loading", "host", "device")),
        'chorus_adapters{tier="failed"} 0.0',
    ]
    monkeypatch.setattr("chorus.server.engine.engine_view.MAX_TIER_SERIES", 1)
    text = live.client.get("/metrics").text
    assert 'adapter="alice"' in text and 'adapter="dan"' not in text and 'chorus_adapters{tier="host"} 1.0' in text


def test_cache_counters(start, fake_engine):
    stats = fake_engine.stats
    counts = {
        "num_cached_pages": 5,
        "num_shadow_pages": 4,
        "merged_adapter": "alice",
        "num_mode_switches": 3,
        "predicted_step_seconds": 1.5,
        "measured_step_seconds": 2.5,
        "wrong_step_seconds": 1.25,
        "num_steps_leaving_out": 12,
        "num_adapter_hits": 7,
        "num_adapter_loads": 8,
        "num_streamed_loads": 6,
        "num_adapter_evictions": 9,
        "num_prefix_hit_tokens": 10,
        "num_prefix_query_tokens": 11,
        "num_swapped": 12,
        "swapped_bytes": 13,
        "num_swaps_out": 14,
        "num_swaps_in": 15,
        "swapped_bytes_out": 16,
        "swapped_bytes_in": 17,
        "num_swaps_dropped": 18,
    }
    fake_engine.stats = lambda: replace(stats(), **counts)
    lines = start(fake_engine).client.get("/metrics").text.splitlines()
    for line in (
        'chorus_pages{kind="cached"} 5.0',
        'chorus_pages{kind="shadow"} 4.0',
        'chorus_merged_adapter{adapter="alice"} 1.0',
        "chorus_mode_switches_total 3.0",
        "chorus_mode_predicted_seconds_total 1.5",
        "chorus_mode_measured_seconds_total 2.5",
        "chorus_mode_wrong_seconds_total 1.25",
        "chorus_mode_steps_leaving_out_total 12.0",
        "chorus_adapter_hits_total 7.0",
        "chorus_adapter_loads_total 8.0",
        "chorus_adapter_streamed_loads_total 6.0",
        "chorus_adapter_evictions_total 9.0",
        "chorus_prefix_hit_tokens_total 10.0",
        "chorus_prefix_query_tokens_total 11.0",
        "chorus_swapped_requests 12.0",
        "chorus_swapped_bytes 13.0",
        "chorus_swaps_out_total 14.0",
        "chorus_swaps_in_total 15.0",
        "chorus_swapped_out_bytes_total 16.0",
        "chorus_swapped_in_bytes_total 17.0",
        "chorus_swaps_dropped_total 18.0",
    ):
        assert line in lines


def test_metrics_keep_their_old_names_for_a_release(start, fake_engine):
    fake_engine.stats = lambda: EngineStats(num_async_steps=3, num_timed_out_reads=2, num_pages=99)
    lines = start(fake_engine).client.get("/metrics").text.splitlines()
    for name, count in (("async_steps", 3.0), ("steps_ahead", 3.0), ("adapter_timed_out_reads", 2.0)):
        assert f"chorus_{name}_total {count}" in lines
    assert "chorus_adapter_given_up_reads_total 2.0" in lines
    assert {"chorus_pool_pages 99.0", "chorus_arena_pages 99.0"} <= set(lines)


def test_eager_steps_by_reason(start, fake_engine):
    fake_engine.stats = lambda: EngineStats(eager_steps=(1, 0, 3, 0))
    lines = start(fake_engine).client.get("/metrics").text.splitlines()
    for reason, count in (("off", 1.0), ("tokens", 0.0), ("tiles", 3.0), ("offload", 0.0)):
        assert f'chorus_steps_eager_total{{reason="{reason}"}} {count}' in lines


def test_credits_of_adapters(start, fake_engine):
    credits = {"alice": 70_002.5, "bob": 69_997.5}
    fake_engine.store.tiers |= {"alice": Tier.DEVICE, "bob": Tier.DEVICE}
    live = start(fake_engine)
    assert "chorus_adapter_credit{" not in live.client.get("/metrics").text
    policy = SimpleNamespace(credit=lambda adapter: credits[adapter.name])
    fake_engine.modes = SimpleNamespace(policy=policy)
    lines = live.client.get("/metrics").text.splitlines()
    assert [line for line in lines if line.startswith("chorus_adapter_credit{")] == [
        'chorus_adapter_credit{adapter="alice"} 70002.5',
        'chorus_adapter_credit{adapter="bob"} 69997.5',
    ]


def test_lora_requests_info_as_gateways_read_it(monkeypatch, start, fake_engine):
    monkeypatch.setattr(engine_view, "adapter_names_of", lambda _: (["alice", "bob"], ["carol"]))
    live = start(fake_engine)
    (line,) = (line for line in live.client.get("/metrics").text.splitlines() if line.startswith("vllm:lora_requests"))
    labels, _, value = line.rpartition(" ")
    assert labels == (
        'vllm:lora_requests_info{max_lora="32",running_lora_adapters="alice,bob",waiting_lora_adapters="carol"}'
    )
    assert abs(float(value) - time.time()) < 60


def test_residency_as_routers_read_it(start, fake_engine):
    live = start(fake_engine)
    fake_engine.store.tiers |= {"alice": Tier.DEVICE, "bob": Tier.HOST, "carol": Tier.LOADING, "a,b": Tier.DEVICE}
    fake_engine.store.pins.names.add("alice")
    lines = live.client.get("/metrics").text.splitlines()
    base = 'engine="0",model_name="base"'
    loaded = "vllm:lora_adapter_loaded"
    assert [line for line in lines if line.startswith(f"{loaded}{{")] == [
        f'{loaded}{{adapter_name="alice",engine="0",level="gpu",model_name="base",pinned="true",rank="4"}} 1.0',
        f'{loaded}{{adapter_name="a,b",engine="0",level="gpu",model_name="base",pinned="false",rank="4"}} 1.0',
        f'{loaded}{{adapter_name="bob",engine="0",level="cpu",model_name="base",pinned="false",rank="4"}} 1.0',
    ]
    assert f"vllm:num_gpu_loaded_lora_adapters{{{base}}} 2.0" in lines
    assert f"vllm:max_gpu_lora_adapters{{{base}}} 9.0" in lines


def test_residency_is_told_before_any_adapter_is_loaded(start, make_engine):
    lines = start(make_engine([])).client.get("/metrics").text.splitlines()
    assert 'vllm:num_gpu_loaded_lora_adapters{engine="0",model_name="base"} 0.0' in lines


def test_a_comma_in_a_name_does_not_split_what_gateways_read(monkeypatch, start, fake_engine):
    names = ["a,b", "c=d", 'e"f', "g%h", "i\nj", "k\udce9"]
    monkeypatch.setattr(engine_view, "adapter_names_of", lambda _: (names, []))
    (line,) = (
        one for one in start(fake_engine).client.get("/metrics").text.split("\n") if "lora_requests_info{" in one
    )
    value = line.partition('running_lora_adapters="')[2].partition('",waiting')[0]
    assert len(value.split(",")) == len(names)
    assert value.split(",")[0] == "a%2Cb" and value.split(",")[3] == "g%25h"


def test_names_that_are_no_utf8_do_not_break_listings(start, fake_engine):
    odd = "caf\udce9"
    fake_engine.store.tiers[odd] = Tier.DEVICE
    live = start(fake_engine)
    assert live.client.get("/metrics").status_code == 200
    assert odd in [card["id"] for card in json.loads(live.client.get("/v1/models").content)["data"]]


def test_series_of_adapters_that_are_gone_go(start, fake_engine):
    live = start(fake_engine)
    live.post(model="alice", prompt="abc")
    live.post(model="base", prompt="abc")
    assert 'model="alice"' in live.client.get("/metrics").text
    del fake_engine.store.tiers["alice"]
    text = live.client.get("/metrics").text
    assert "alice" not in text and 'chorus_prompt_tokens_total{model="base"}' in text
    assert 'chorus_prompt_tokens_total{model="other"} 4.0' in text, "the sum stays"


def test_the_number_of_series_has_a_limit(start, fake_engine):
    live = start(fake_engine, settings={"metric_series": 1})
    for name in ("alice", "alice", "bob", "base"):
        live.post(model=name, prompt="abc")
    text = live.client.get("/metrics").text
    assert 'chorus_requests_total{finish_reason="stop",model="alice"} 2.0' in text
    assert 'chorus_requests_total{finish_reason="stop",model="other"} 1.0' in text
    assert 'chorus_requests_total{finish_reason="stop",model="base"} 1.0' in text and 'model="bob"' not in text


def test_what_gateways_made_for_vllm_read(start, fake_engine, monkeypatch):
    told, counts = fake_engine.stats, {"num_prefix_query_tokens": 7, "num_prefix_hit_tokens": 5, "num_preemptions": 3}
    monkeypatch.setattr(fake_engine, "stats", lambda: replace(told(), **counts))
    live = start(fake_engine)
    live.post(model="alice", prompt="abc")
    lines = live.client.get("/metrics").text.splitlines()
    labels = '{engine="0",model_name="base"}'
    for line in (
        f"vllm:num_requests_running{labels} 0.0",
        f"vllm:num_requests_waiting{labels} 0.0",
        f"vllm:kv_cache_usage_perc{labels} 0.0",
        f"vllm:time_to_first_token_seconds_count{labels} 1.0",
        f"vllm:e2e_request_latency_seconds_count{labels} 1.0",
        f"vllm:inter_token_latency_seconds_count{labels} 3.0",
        f"vllm:prompt_tokens_total{labels} 4.0",
        f"vllm:generation_tokens_total{labels} 4.0",
        f"vllm:prefix_cache_queries_total{labels} 7.0",
        f"vllm:prefix_cache_hits_total{labels} 5.0",
        f"vllm:num_preemptions_total{labels} 3.0",
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="base"} 1.0',
        'vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="100"} 1.0',
    ):
        assert line in [_sorted_labels(one) for one in lines], line


def _sorted_labels(line):
    name, brace, rest = line.partition("{")
    inside, _, value = rest.rpartition("}")
    return f"{name}{{{','.join(sorted(inside.split(',')))}}}{value}" if brace else line


def test_where_each_adapter_is_and_what_it_costs(start, fake_engine):
    fake_engine.store.tiers["alice"] = Tier.DEVICE
    fake_engine.store.pins.names.add("alice")
    lines = start(fake_engine).client.get("/metrics").text.splitlines()
    for line in (
        'chorus_adapter_rank{adapter="alice"} 4.0',
        'chorus_adapter_pinned{adapter="alice"} 1.0',
        'chorus_adapter_load_seconds{adapter="alice"} 0.25',
    ):
        assert line in lines


def test_a_scrape_does_not_wait_for_a_stuck_engine(start, fake_engine, monkeypatch):
    monkeypatch.setattr("chorus.server.api.about.SCRAPE_SECONDS", 30.0)
    fake_engine.store.tiers["alice"] = Tier.DEVICE
    live = start(fake_engine)
    assert 'adapter="alice"' in live.client.get("/metrics").text
    monkeypatch.setattr("chorus.server.api.about.SCRAPE_SECONDS", 0.05)
    fake_engine.gate.clear()
    live.worker.submit(Request("stuck", [97], RequestParams()), lambda output: None).result(5)
    live.wait_until(lambda: live.worker.stats.num_steps == 0)
    assert 'adapter="alice"' in live.client.get("/metrics").text
    fake_engine.gate.set()


def test_a_broken_engine_is_still_scraped(start, fake_engine):
    live = start(fake_engine)
    fake_engine.fail_steps, fake_engine.fail_aborts = 1, True
    live.post(model="base", prompt="a")
    assert live.client.get("/health").status_code == 503
    assert "chorus_requests_total" in live.client.get("/metrics").text


def test_the_engine_tells_which_adapters_are_in_use(subject):
    reference = subject("tied")
    engine = Engine.from_config(
        EngineConfig(model=reference.model, memory_bytes=4 << 20, threads=1, cpu_kernels="torch", max_num_seqs=2)
    )
    names = ["r2-qv", "r3-mlp", "r8-attention"]
    for name in names:
        engine.store.register(name, reference.adapters[name])
    params = RequestParams(max_tokens=8, temperature=0, ignore_eos=True)
    for number, name in enumerate([None, *names, names[2]]):
        engine.add_request(Request(str(number), [5, 6, 7], params, name))
    assert adapter_names_of(engine.scheduler) == ([], names)
    while {each.tier for each in EngineView.of(engine).adapters} != {
        Tier.HOST
    }:  # one may run while its adapter is still being read
        engine.store.images.wait(1)
    while engine.stats().num_running < 2:
        engine.step()
    running, waiting = adapter_names_of(engine.scheduler)
    view = EngineView.of(engine)
    assert (view.running, view.waiting, view.max_adapters) == (running, waiting, 2)
    assert set(running) | set(waiting) == set(names)
    tiers = {each.name: each.tier for each in view.adapters}
    assert all(tiers[name] is Tier.DEVICE for name in running)
    assert [(each.name, each.num_running, each.num_waiting) for each in view.tenants] == [("", 2, 3)]
    assert view.tier_counts["device"] == len(running) and sum(view.tier_counts.values()) == 3
    while engine.has_work():
        engine.step()
    assert adapter_names_of(engine.scheduler) == ([], [])
    engine.close()
