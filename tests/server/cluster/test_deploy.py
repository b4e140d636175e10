"""The files of docs/deploy keep to the flags of the command line."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

from chorus.server.cli.command import make_parser
from chorus.server.cluster.plan import ClusterPlan
from chorus.server.settings import Settings

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "docs" / "deploy"
KUSTOMIZE = DEPLOY / "kustomize"


def plan_of(command: list[str]) -> tuple[ClusterPlan, set[str]]:
    """The plan of a `chorus cluster up`, and the names of the settings that it gives."""
    assert command[0] == "chorus"
    arguments = make_parser().parse(command[1:])
    given = {name.removeprefix("setting_") for name in vars(arguments) if name.startswith("setting_")}
    assert given <= set(Settings.model_fields)
    return ClusterPlan.of(arguments), given


def test_compose_starts_a_cluster():
    (service,) = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"].values()
    plan, given = plan_of(service["command"])
    assert (plan.replicas, plan.ray, plan.tls) == (2, None, None) and "api_key_file" in given


@pytest.mark.parametrize("file", [ROOT / "Dockerfile", DEPLOY / "Dockerfile.cuda"], ids=lambda path: path.name)
def test_images_install_extras_that_exist_and_serve(file):
    text = file.read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.search(r"EXTRAS=([\w,]+)", text) or re.search(r"/src\[([\w,]+)\]", text)
    assert named is not None
    assert set(named[1].split(",")) <= extras.keys()
    started = re.search(r"^CMD (.*)", text, re.M)
    assert started is not None
    command = json.loads(started[1])
    assert make_parser().parse(command[1:]).setting_host == "0.0.0.0"


def test_pods_run_as_the_user_who_owns_the_image_s_state():
    template = (ROOT / "deploy" / "helm" / "chorus" / "templates" / "deployment.yaml").read_text()
    base = yaml.safe_load((KUSTOMIZE / "deployment.yaml").read_text())
    user = base["spec"]["template"]["spec"]["securityContext"]["runAsUser"]
    assert re.findall(r"runAsUser: (\d+)", template) == [str(user)]
    for file in (ROOT / "Dockerfile", DEPLOY / "Dockerfile.cuda"):
        text = file.read_text()
        assert re.findall(r"useradd .*--uid (\d+) chorus", text) == [str(user)], file
        assert "chown chorus /state" in text and "USER chorus" in text


def test_the_image_for_cpus_takes_the_build_of_pytorch_for_cpus():
    """PyPI's brings gigabytes of CUDA packages. The bounds are the package's, in README and the tutorial, too."""
    text = (ROOT / "Dockerfile").read_text()
    index = re.search(r"^ARG TORCH_INDEX=(\S+)$", text, re.M)
    assert index is not None and index[1] == "https://download.pytorch.org/whl/cpu"
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (torch,) = (one for one in needed if one.startswith("torch>"))
    assert f'--index-url "$TORCH_INDEX"}} "{torch}"' in text
    command = f'pip install "torch{torch[torch.index("<") :]}" torchvision --index-url {index[1]}'
    for page in (ROOT / "README.md", ROOT / "docs" / "tutorial.md"):
        assert command in page.read_text(), page


#: Flags of other programs that the files of docs/deploy name.
OTHERS_FLAGS = {
    "--build",
    "--build-arg",
    "--config.file",
    "--create-home",
    "--from",
    "--gpus",
    "--index-url",
    "--no-cache-dir",
    "--no-install-recommends",
    "--project-directory",
    "--remove",
    "--uid",
}


@pytest.mark.parametrize(
    "file",
    [ROOT / "Dockerfile", *sorted(path for path in DEPLOY.rglob("*") if path.is_file() and path.suffix != ".json")],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_every_flag_that_a_file_or_its_comments_name_exists(file):
    pages = [ROOT / "docs" / "reference" / name for name in ("settings.md", "command-line.md")]
    known = set(re.findall(r"`(--[\w-]+)", "".join(page.read_text() for page in pages)))
    assert {"--port", "--replicas"} <= known
    found = set(re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", file.read_text()))
    assert found - known - OTHERS_FLAGS == set()


def test_each_pod_asks_for_the_gpus_that_its_comments_name():
    limits = []
    base = yaml.safe_load((KUSTOMIZE / "deployment.yaml").read_text())
    assert "on CPUs" in (KUSTOMIZE / "deployment.yaml").read_text().partition("\n")[0]
    (container,) = base["spec"]["template"]["spec"]["containers"]
    limits.append(dict(container["resources"]["limits"]))
    overlay = yaml.safe_load((DEPLOY / "kustomize-gpu" / "kustomization.yaml").read_text())
    assert [(DEPLOY / "kustomize-gpu" / path).resolve() for path in overlay["resources"]] == [KUSTOMIZE]
    (patch,) = overlay["patches"]
    assert patch["target"] == {"kind": base["kind"], "name": base["metadata"]["name"]}
    (change,) = yaml.safe_load(patch["patch"])
    *path, key = (part.replace("~1", "/") for part in change["path"].split("/")[1:])
    at = base
    for part in path:
        at = at[int(part)] if isinstance(at, list) else at[part]
    assert change["op"] == "add"
    at[key] = change["value"]
    limits.append(container["resources"]["limits"])
    assert [one.get("nvidia.com/gpu") for one in limits] == [None, "1"]
    (image,) = overlay["images"]
    assert container["image"].partition(":")[0] == image["name"]
    built = re.search(r"docker build -t (\S+)", (DEPLOY / "Dockerfile.cuda").read_text())
    assert built is not None and built[1] == f"{image['name']}:{image['newTag']}"


def test_compose_builds_an_image_of_the_repository():
    (service,) = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"].values()
    assert service["build"] == "." and (ROOT / "Dockerfile").is_file()


def test_kustomize_lists_its_files_and_kubernetes_takes_them():
    schemas = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    listed = yaml.safe_load((KUSTOMIZE / "kustomization.yaml").read_text())
    assert {*listed["resources"], "kustomization.yaml"} == {path.name for path in KUSTOMIZE.iterdir()}
    for name in listed["resources"]:
        schemas.validate(yaml.safe_load((KUSTOMIZE / name).read_text()), schemas.latest_version(), strict=True)
    names = [literal.partition("=")[0] for maps in listed["configMapGenerator"] for literal in maps["literals"]]
    assert {name.removeprefix("CHORUS_").lower() for name in names} <= set(Settings.model_fields)


def test_kustomize_serves_with_flags_that_exist_and_mounts_what_it_names():
    deployment = yaml.safe_load((KUSTOMIZE / "deployment.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    arguments = make_parser().parse(container["args"][1:])
    assert str(arguments.setting_adapter_uploads) == "/state/uploads"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    service = yaml.safe_load((KUSTOMIZE / "service.yaml").read_text())
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    assert container["ports"][0]["name"] == service["spec"]["ports"][0]["targetPort"]


def test_kubernetes_takes_the_pods_the_service_and_the_policy():
    schemas = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    cluster, *others = yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    pods = [{"apiVersion": "v1", "kind": "PodTemplate", "template": group["template"]} for group in groups]
    for one in (*pods, *others):
        schemas.validate(one, schemas.latest_version(), strict=True)  # an unknown field is an error, too
    pods[0]["template"]["spec"]["containers"][0]["imagge"] = "x"
    with pytest.raises(schemas.ValidationError):
        schemas.validate(pods[0], schemas.latest_version(), strict=True)


def test_kuberay_starts_as_many_replicas_as_it_has_workers_for_and_mounts_what_it_names():
    cluster, service, policy = yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    (workers,) = cluster["spec"]["workerGroupSpecs"]
    (container,) = head["containers"]
    command = re.search(r"exec (chorus .*)", container["args"][0])
    assert command is not None
    plan, given = plan_of(shlex.split(command[1]))
    assert plan.ray == "auto" and plan.replicas == workers["replicas"] and "api_key_file" in given
    groups = [cluster["spec"]["headGroupSpec"], workers]
    assert cluster["spec"].keys() == {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
    assert all(isinstance(value, str) for group in groups for value in group["rayStartParams"].values())
    for spec in (head, workers["template"]["spec"]):
        (one,) = spec["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in one["volumeMounts"]}
        assert {str(plan.tls), str(plan.secret_file.parent), "/models"} <= mounts.keys()
        assert set(mounts.values()) == {volume["name"] for volume in spec["volumes"]}
    assert {port["name"] for port in container["ports"]} >= {service["spec"]["ports"][0]["targetPort"]}
    assert policy["spec"]["podSelector"]["matchLabels"]["ray.io/cluster"] == cluster["metadata"]["name"]
