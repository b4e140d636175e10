"""The number of threads that are of use: affinity mask and control groups' quotas."""

from __future__ import annotations

import os

import pytest

from chorus.core.cpus import available_cpus, cpu_quota, features, has_fast_gemms, processor_name


@pytest.fixture
def system(tmp_path):
    """`system(cgroup, mounts, files)`: a /proc/self and cgroup file systems; mounts: (root, kind, options) per name."""

    def build(cgroup, mounts, files):
        proc = tmp_path / "proc"
        proc.mkdir()
        (proc / "cgroup").write_text(cgroup)
        lines = ["21 1 0:20 / /proc rw,nosuid - proc proc rw"]
        for name, (root, kind, options) in mounts.items():
            lines.append(f"30 1 0:26 {root} {tmp_path / name} rw,nosuid shared:4 - {kind} cgroup {options}")
        (proc / "mountinfo").write_text("\n".join(lines) + "\n")
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        return proc

    return build


V2 = {"unified": ("/", "cgroup2", "rw")}
V1 = {"cpu": ("/", "cgroup", "rw,cpu,cpuacct"), "memory": ("/", "cgroup", "rw,memory")}


def test_quota_of_version_two(system):
    proc = system("0::/pod/box\n", V2, {"unified/pod/box/cpu.max": "150000 100000"})
    assert cpu_quota(proc) == 1.5


def test_the_group_around_may_allow_less(system):
    files = {"unified/pod/cpu.max": "50000 100000", "unified/pod/box/cpu.max": "max 100000"}
    assert cpu_quota(system("0::/pod/box\n", V2, files)) == 0.5


def test_quota_of_version_one(system):
    cgroup = "5:memory:/pod\n4:cpu,cpuacct:/pod/box\n0::/elsewhere\n"
    files = {
        "cpu/pod/box/cpu.cfs_quota_us": "300000",
        "cpu/pod/box/cpu.cfs_period_us": "100000",
        "cpu/pod/cpu.cfs_quota_us": "-1",
        "cpu/pod/cpu.cfs_period_us": "100000",
        "memory/pod/cpu.cfs_quota_us": "1",
        "memory/pod/cpu.cfs_period_us": "100000",
    }
    assert cpu_quota(system(cgroup, V1, files)) == 3.0


def test_a_mount_may_begin_at_the_containers_group(system):
    mounts = {"cpu": ("/docker/abc", "cgroup", "rw,cpu")}
    files = {"cpu/inner/cpu.cfs_quota_us": "200000", "cpu/inner/cpu.cfs_period_us": "100000"}
    assert cpu_quota(system("4:cpu:/docker/abc/inner\n", mounts, files)) == 2.0


def test_a_path_outside_the_mount_means_its_top(system):
    files = {"unified/cpu.max": "400000 100000"}
    assert cpu_quota(system("0::/../other\n", {"unified": ("/box", "cgroup2", "rw")}, files)) == 4.0


@pytest.mark.parametrize("text", ["max 100000", "", "many 100000", "100000 0"])
def test_no_limit(system, text):
    assert cpu_quota(system("0::/\n", V2, {"unified/cpu.max": text})) is None


def test_no_control_groups(tmp_path):
    assert cpu_quota(tmp_path) is None
    assert available_cpus(tmp_path) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("quota", "cpus"), [("10000", 1), ("100000", 1), ("190000", 1), ("100000000", None)])
def test_threads_are_as_many_as_the_quota_pays_for(system, quota, cpus):
    allowed = len(os.sched_getaffinity(0))
    proc = system("0::/\n", V2, {"unified/cpu.max": f"{quota} 100000"})
    assert available_cpus(proc) == (cpus or allowed)


X86 = """processor	: 0
model name	: A  Processor @ 2.50GHz
flags		: fpu avx2 avx512f{}

processor	: 1
model name	: another
flags		: avx512_bf16
"""


@pytest.mark.parametrize(
    ("text", "name", "bfloat16", "float16"),
    [
        (X86.format(""), "A Processor @ 2.50GHz", False, False),
        (X86.format(" avx512_bf16"), "A Processor @ 2.50GHz", True, False),
        (X86.format(" amx_bf16 avx512_fp16"), "A Processor @ 2.50GHz", True, True),
        ("processor\t: 0\nFeatures\t: fp asimd bf16 i8mm\n", None, True, False),
        (None, None, False, False),
    ],
)
def test_which_products_are_fast_is_read_from_the_processors_features(tmp_path, text, name, bfloat16, float16):
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    assert processor_name(tmp_path) == name or name is None
    assert bool(features(tmp_path)) == (text is not None)
    found = [has_fast_gemms(dtype, tmp_path) for dtype in ("bfloat16", "float16", "float32")]
    assert found == [bfloat16, float16, True]
