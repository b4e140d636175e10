"""The Helm chart: its values and their schema, and with `helm` what it renders, down to the server's flags."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

import chorus
from chorus.server.cli.command import make_parser
from chorus.server.settings import Settings

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy" / "helm" / "chorus"
HELM = shutil.which("helm")
KUBERNETES = "1.31"

needs_helm = pytest.mark.skipif(HELM is None, reason="needs helm")

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())

SYNCED = {
    "keys": {"apiKeys": "", "allowUnauthenticated": True},
    "adapterSync": {
        "enabled": True,
        "image": "syncer:1",
        "adapters": [{"id": "sql", "source": "/models/rollout/sql"}, {"id": "law", "source": "law"}],
    },
}
CASES = {
    "usual": {},
    "uploads": {"adapters": {"uploads": {"enabled": True, "storageClass": "fast"}}},
    "gpus": {"gpus": 2, "nodeSelector": {"gpu": "h100"}, "settings": {"CHORUS_LOG_LEVEL": "info"}},
    "sources": {
        "adapters": {
            "path": "",
            "sources": ["a/*=s3://bucket/a/*"],
            "sourceHosts": "s3://bucket",
            "sourcesSecret": "aws",
        }
    },
    "open": {"keys": {"apiKeys": "", "allowUnauthenticated": True}, "networkPolicy": {"enabled": False}},
    "observed": {
        "keys": {"adminKeys": "admin"},
        "networkPolicy": {"from": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]},
        "serviceMonitor": {"enabled": True, "labels": {"release": "p"}, "keySecret": {"name": "s", "key": "k"}},
    },
    "hpa": {"autoscaling": {"kind": "hpa", "maxReplicas": 8}},
    "keda": {"autoscaling": {"kind": "keda", "prometheus": "http://p:9090"}},
    "asked": {
        "autoscaling": {
            "kind": "keda",
            "prometheus": "http://p:9090",
            "minReplicas": 0,
            "query": "q",
            "queryTarget": 3,
        },
    },
    "gateway": {
        "inferencePool": {"enabled": True},
        **SYNCED,
        "networkPolicy": {"from": [{"podSelector": {}}, {"namespaceSelector": {"matchLabels": {"name": "gateways"}}}]},
        "adapters": {"roots": ["/models/adapters", "/models/rollout"]},
    },
}
WITHOUT_SCHEMA = {"ServiceMonitor", "ScaledObject", "InferencePool"}
"""Kinds of other projects, which `kubernetes-validate` does not know: only rendered."""


def scaled(kind, **more):
    return {"autoscaling": {"kind": kind, **more}}


def merged(values, more):
    return {
        **values,
        **{
            name: merged(values.get(name, {}), value) if isinstance(value, dict) and name in values else value
            for name, value in more.items()
        },
    }


def leaves(values, path=""):
    """Paths of the values that have no members."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{path}.{name}")
        else:
            yield f"{path}.{name}"


@pytest.mark.parametrize("more", CASES.values(), ids=CASES)
def test_values_fit_the_schema(more):
    jsonschema.validate(merged(VALUES, more), SCHEMA)


@pytest.mark.parametrize(
    "wrong",
    [
        {"replica": 2},
        {"replicas": -1},
        {"autoscaling": {"kind": "vpa"}},
        {"model": {"path": "base"}},
        {"settings": {"PATH": "/bin"}},
        {"adapters": {"uploads": {"size": "many"}}},
        {"adapters": {"roots": ["/data"]}},
        {"serviceMonitor": {"enabled": True, "keySecret": {"name": "s"}}},
        {"serviceMonitor": {"keySecret": {"key": "k"}}},
        {"serviceMonitor": {"labels": {"a": 1}}},
        {"podDisruptionBudget": {"maxUnavailable": "many"}},
        {"podDisruptionBudget": {"maxUnavailable": -1}},
        {"nodeSelector": {"a": 1}},
        {"podAnnotations": {"a": True}},
        {"adapterSync": {"keySecret": {"name": "s", "key": "k"}}},  # the sidecar sends no key
    ],
    ids=str,
)
def test_wrong_values_are_refused(wrong):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(merged(VALUES, wrong), SCHEMA)


def test_each_value_is_used_and_each_used_value_is_there():
    text = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    used = set(re.findall(r"\.Values((?:\.\w+)+)", text))
    there = set(leaves(VALUES))
    for name in used:
        assert any(one == name or one.startswith(f"{name}.") for one in there), name
    for name in there:
        assert any(name == one or name.startswith(f"{one}.") for one in used), f"{name} has no effect"


def test_the_chart_installs_this_version_of_chorus():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chorus.__version__


def helm(*arguments):
    return subprocess.run([HELM, *arguments], capture_output=True, text=True, timeout=60, check=False)


def render(tmp_path, more):
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump(more))
    return helm("template", "mine", str(CHART), "--kube-version", f"{KUBERNETES}.0", "-f", str(values))


def rendered(tmp_path, more):
    """The rendered objects, by kind and name."""
    ended = render(tmp_path, more)
    assert ended.returncode == 0, ended.stderr
    return {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(ended.stdout)}


@needs_helm
@pytest.mark.integration
def test_helm_finds_no_fault():
    ended = helm("lint", "--strict", str(CHART))
    assert ended.returncode == 0, ended.stdout


@needs_helm
@pytest.mark.integration
@pytest.mark.parametrize("more", CASES.values(), ids=CASES)
def test_what_is_rendered_is_valid_and_serves(more, tmp_path):
    found = rendered(tmp_path, more)
    for (kind, _), one in found.items():
        if kind not in WITHOUT_SCHEMA:
            kubernetes_validate.validate(one, KUBERNETES, strict=True)
    pod = found["Deployment", "mine"]["spec"]["template"]
    container = pod["spec"]["containers"][0]
    (_, *arguments) = container["args"]
    parsed = make_parser().parse(arguments)
    assert parsed.setting_host == "0.0.0.0" and str(parsed.model_argument) == "/models/base"
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for each in pod["spec"]["containers"] for mount in each["volumeMounts"]} == volumes
    selector = found["Service", "mine"]["spec"]["selector"]
    assert selector.items() <= pod["metadata"]["labels"].items()
    assert found["Deployment", "mine"]["spec"]["selector"]["matchLabels"] == selector
    assert container["resources"]["limits"].get("nvidia.com/gpu", 0) == more.get("gpus", 0)
    wanted = {"ServiceMonitor": ["observed"], "ScaledObject": ["keda", "asked"], "InferencePool": ["gateway"]}
    wanted |= {"HorizontalPodAutoscaler": ["hpa"], "PersistentVolumeClaim": ["uploads"]}
    kinds = {kind for kind, _ in found}
    for kind, cases in wanted.items():
        assert (kind in kinds) == any(more is CASES[case] for case in cases), kind
    assert ("replicas" in found["Deployment", "mine"]["spec"]) == ("autoscaling" not in more)


@needs_helm
@pytest.mark.integration
@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"replicas": 2, "adapters": {"uploads": {"enabled": True}}}, "uploads belong to one server"),
        ({"keys": {"apiKeys": ""}}, "keys.apiKeys is empty"),
        ({"autoscaling": {"kind": "keda"}}, "set autoscaling.prometheus"),
        (scaled("hpa", minReplicas=9), "minReplicas is 9, more than autoscaling.maxReplicas, which is 4"),
        (scaled("hpa", minReplicas=0), "minReplicas is 0, but servers that are not there tell no load"),
        (scaled("keda", minReplicas=0, prometheus="http://p"), "give 1, or with keda an autoscaling.query"),
        (scaled("hpa", query="q"), "autoscaling.query and autoscaling.prometheus are for autoscaling.kind keda"),
        (scaled("hpa", prometheus="http://p"), "autoscaling.query and autoscaling.prometheus are for"),
        (
            merged(CASES["observed"], {"networkPolicy": {"from": []}}),
            "Prometheus .* name its peers in networkPolicy.from",
        ),
        (
            merged(CASES["gateway"], {"networkPolicy": {"from": []}}),
            "a gateway .* name its peers in networkPolicy.from",
        ),
        ({"service": {"type": "NodePort"}}, "service.type is NodePort.* name the peers in networkPolicy.from"),
        ({"service": {"type": "LoadBalancer"}}, "service.type is LoadBalancer.* name the peers in networkPolicy.from"),
        ({"settings": {"CHORUS_PORT": 9000}}, "settings has CHORUS_PORT, .* use service.port"),
        ({"settings": {"CHORUS_ADAPTERS": "/x"}}, "settings has CHORUS_ADAPTERS, .* use adapters.path"),
        ({"settings": {"CHORUS_API_KEY": "k"}}, "use keys.secret and keys.apiKeys"),
        ({"args": ["--port=9000"]}, "args has --port, .* use service.port"),
        ({"args": ["--host", "--port"]}, "args has --host, which the chart gives itself; use service"),
        (
            {"args": ["--no-allow-unauthenticated"]},
            "args has --no-allow-unauthenticated, .* use keys.allowUnauthenticated",
        ),
        ({"gpus": 2, "args": ["-tp=4"]}, "args has -tp, .* use gpus"),
        ({"serviceMonitor": {"enabled": True}}, "name an entry of a Secret with a key in serviceMonitor.keySecret"),
        ({"adapterSync": {"enabled": True}}, "needs adapterSync.image"),
        (merged(SYNCED, {"keys": {"apiKeys": "keys"}}), "its sidecar sends no key"),
        (merged(SYNCED, {"keys": {"adminKeys": "admins"}}), "its sidecar sends no key"),
        (
            SYNCED,
            "source /models/rollout/sql, which lies outside /models/adapters; name its directory in adapters.roots",
        ),
        (merged(SYNCED, {"adapters": {"roots": ["/models/roll"]}}), "lies outside /models/roll;"),
        (merged(SYNCED, {"adapters": {"path": ""}}), "needs adapters.roots"),
        (merged(SYNCED, {"adapterSync": {"adapters": [{"id": "a", "source": "x/../../a"}]}}), "a, which lies outside"),
        ({"replica": 2}, "property replica is not allowed|properties 'replica' not allowed"),  # Helm 3's words, and 4's
    ],
)
def test_what_can_t_work_is_refused_with_the_fix(more, says, tmp_path):
    ended = render(tmp_path, more)
    assert ended.returncode != 0 and re.search(says, ended.stderr)


@needs_helm
@pytest.mark.integration
def test_the_sidecar_gets_what_it_reads_and_the_server_lets_it_load(tmp_path):
    found = rendered(tmp_path, CASES["gateway"])
    server, sidecar = found["Deployment", "mine"]["spec"]["template"]["spec"]["containers"]
    assert [one["name"] for one in sidecar["env"]] == ["DYNAMIC_LORA_ROLLOUT_CONFIG"]
    wanted = yaml.safe_load(found["ConfigMap", "mine-adapters"]["data"]["configmap.yaml"])["vLLMLoRAConfig"]
    assert (wanted["host"], wanted["port"]) == ("localhost", 8000)
    assert wanted["ensureExist"]["models"] == SYNCED["adapterSync"]["adapters"]
    settings = make_parser().parse(server["args"][1:])
    assert settings.setting_adapter_roots == "/models/adapters:/models/rollout"
    assert settings.setting_allow_unauthenticated


@needs_helm
@pytest.mark.integration
def test_settings_from_a_file_are_what_the_server_takes(tmp_path, monkeypatch):
    """Helm reads the numbers of a file as floats, and writes large ones as 1.048576e+06."""
    wanted = {
        "CHORUS_MEMORY_BYTES": 64 << 30,
        "CHORUS_MAX_MODEL_LEN": 1 << 20,
        "CHORUS_STALL_SECONDS": 7.5,
        "CHORUS_ACCESS_LOG": True,
        "CHORUS_LOG_LEVEL": "debug",
    }
    data = rendered(tmp_path, {"settings": wanted})["ConfigMap", "mine"]["data"]
    assert data == {name: str(value).lower() for name, value in wanted.items()}
    for name, text in data.items():
        monkeypatch.setenv(name, text)
    settings = Settings()
    assert [getattr(settings, name.removeprefix("CHORUS_").lower()) for name in wanted] == [*wanted.values()]


@needs_helm
@pytest.mark.integration
def test_large_whole_numbers_are_written_as_such(tmp_path):
    numbers = {
        "replicas": 2_000_000,
        "terminationGracePeriodSeconds": 2_000_000,
        "startupSeconds": 10_000_000,
    }
    ended = render(tmp_path, numbers)
    assert ended.returncode == 0 and not re.findall(r"\de\+\d", ended.stdout)
    scaled = {"prometheus": "http://p", "minReplicas": 1_000_000, "maxReplicas": 2_000_000, "targetWaiting": 3_000_000}
    for kind in ("hpa", "keda"):
        values = {"autoscaling": {**scaled, "kind": kind}}
        assert "e+" not in render(tmp_path, values).stdout


def test_values_name_only_metrics_that_a_server_of_the_chart_has():
    there = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    texts = [path.read_text() for path in (CHART / "values.yaml", *(CHART / "templates").iterdir())]
    named = set(re.findall(r"chorus_\w+", "".join(texts)))
    assert {"chorus_requests_waiting"} <= named
    assert not {name for name in named if f"`{name}`" not in there}


@needs_helm
@pytest.mark.integration
def test_waiting_requests_and_a_query_have_a_target_each(tmp_path):
    def trigger(case):
        (one,) = rendered(tmp_path, CASES[case])["ScaledObject", "mine"]["spec"]["triggers"]
        return one["metadata"]

    waiting, asked = trigger("keda"), trigger("asked")
    assert waiting["query"] == 'sum(chorus_requests_waiting{namespace="default",service="mine"})'
    assert waiting["threshold"] == "8"
    assert (asked["query"], asked["threshold"]) == ("q", "3")


@needs_helm
@pytest.mark.integration
def test_other_settings_replace_the_pods_and_other_adapters_of_the_sidecar_do_not(tmp_path):
    def template(more):
        return rendered(tmp_path, merged(CASES["gateway"], more))["Deployment", "mine"]["spec"]["template"]

    before = template({})
    assert template({"settings": {"CHORUS_LOG_LEVEL": "debug"}}) != before
    assert template({"adapterSync": {"adapters": []}}) == before
    annotated = template({"podAnnotations": {"a": "b"}})["metadata"]["annotations"]
    assert annotated == {**before["metadata"]["annotations"], "a": "b"}


def test_each_flag_that_the_chart_writes_is_refused_as_a_setting():
    """Or the setting, or a second flag, would be without effect, or move the server from its probes."""
    written = set(re.findall(r"- .*?--([a-z-]+)", (CHART / "templates" / "deployment.yaml").read_text()))
    check = (CHART / "templates" / "_check.tpl").read_text()
    refused = set(re.findall(r'"([a-z-]+)" "[\w. ]+"', check))
    assert {"port", "adapter-source", "tensor-parallel-size"} <= written <= refused
    assert {name.replace("-", "_") for name in refused} - {"tp"} <= set(Settings.model_fields)


@needs_helm
@pytest.mark.integration
def test_flags_of_which_the_chart_writes_none_are_taken(tmp_path):
    more = {"args": ["-tp=2", "--portable=x"], "settings": {"CHORUS_TENSOR_PARALLEL_SIZE": 2}}
    container = rendered(tmp_path, more)["Deployment", "mine"]["spec"]["template"]["spec"]["containers"][0]
    assert container["args"][-2:] == more["args"]
    budget = {"podDisruptionBudget": {"maxUnavailable": "25%"}}
    assert rendered(tmp_path, budget)["PodDisruptionBudget", "mine"]["spec"]["maxUnavailable"] == "25%"


@needs_helm
@pytest.mark.integration
def test_gpus_take_the_image_for_gpus(tmp_path):
    def image(**more):
        return rendered(tmp_path, more)["Deployment", "mine"]["spec"]["template"]["spec"]["containers"][0]["image"]

    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "wheels.yml").read_text())["jobs"]
    suffixes = {one["file"]: one["suffix"] for one in jobs["images"]["strategy"]["matrix"]["include"]}
    for gpus, file in enumerate(("Dockerfile", "docs/deploy/Dockerfile.cuda", "docs/deploy/Dockerfile.cuda")):
        assert image(gpus=gpus) == f"chorus-lora:{chorus.__version__}{suffixes[file]}"
        assert image(gpus=gpus, image={"tag": "mine"}) == "chorus-lora:mine"
