"""The default arena: as large as the model needs, within the limits of machine and control groups."""

from __future__ import annotations

import pytest

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.executors import host_memory
from chorus.core.executors.base import ModelExecutor
from chorus.core.executors.choice import completed
from chorus.core.executors.cpu_setup import cpu_pages
from chorus.core.executors.host_memory import (
    LEAST_BYTES,
    SAMPLING_BYTES,
    available_bytes,
    default_arena_bytes,
    default_host_cache_bytes,
    total_bytes,
)
from chorus.memory.pages.layout import PageLayout

GIB = 1 << 30


def write(root, **files):
    for name, text in files.items():
        path = root.joinpath(*name.split("__"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def root(tmp_path):
    top = tmp_path / "sys/fs/cgroup"
    write(
        tmp_path,
        proc__meminfo=f"MemTotal: 99999999 kB\nMemAvailable:   {8 * GIB >> 10} kB\n",
        proc__self__mountinfo=f"30 1 0:26 / {top} rw - cgroup2 cgroup rw\n"
        f"31 1 0:27 / {top}/memory rw - cgroup none rw,memory\n",
    )
    return tmp_path


def test_a_machine_without_limits_has_what_it_says(root):
    assert available_bytes(root / "proc") == 8 * GIB
    write(root, proc__self__cgroup="0::/a/b\n")
    root.joinpath("sys/fs/cgroup/a/b").mkdir(parents=True)
    root.joinpath("sys/fs/cgroup/a/b/memory.max").write_text("max\n")
    assert available_bytes(root / "proc") == 8 * GIB


@pytest.mark.parametrize("where", ["a/b", "a", ""])
def test_a_control_groups_limit_counts_and_that_of_every_group_above(root, where):
    write(root, proc__self__cgroup="0::/a/b\n")
    group = root / "sys/fs/cgroup" / where
    group.mkdir(parents=True)
    group.joinpath("memory.max").write_text(f"{3 * GIB}\n")
    group.joinpath("memory.current").write_text(f"{2 * GIB}\n")
    assert available_bytes(root / "proc") == GIB
    assert total_bytes(root / "proc") == 3 * GIB
    group.joinpath("memory.stat").write_text(f"anon 5\nfile {GIB}\n")
    assert available_bytes(root / "proc") == 2 * GIB


def test_control_groups_of_the_first_version(root):
    write(root, proc__self__cgroup="5:cpu,cpuacct:/x\n4:memory:/x\n")
    group = root / "sys/fs/cgroup/memory/x"
    group.mkdir(parents=True)
    group.joinpath("memory.limit_in_bytes").write_text(f"{GIB}\n")
    group.joinpath("memory.usage_in_bytes").write_text("0\n")
    assert available_bytes(root / "proc") == GIB


def test_without_any_word_of_the_system_it_is_modest(tmp_path):
    assert available_bytes(tmp_path / "proc") == GIB
    assert total_bytes(tmp_path / "proc") >= GIB, "POSIX has a word for it"


@pytest.mark.parametrize(
    ("max_model_len", "available", "weights", "logits", "want"),
    [
        (16, 100 * GIB, 0, 0, LEAST_BYTES + 4 * (1 << 20)),
        (16384, 100 * GIB, 0, 0, LEAST_BYTES + 4 * GIB),
        (16384, 8 * GIB + SAMPLING_BYTES, 0, 0, 2 * GIB),
        (16384, 8 * GIB + SAMPLING_BYTES, 4096, 0, 2 * GIB - 1024),
        (16384, 8 * GIB + SAMPLING_BYTES, 0, 256 << 20, 2 * GIB - 256 * (1 << 20)),  # 1 GiB of logits
        (16384, 0, 4096, 0, 2 << 20),
    ],
)
def test_room_for_a_few_long_requests_within_a_share_of_what_is_left(max_model_len, available, weights, logits, want):
    layout = PageLayout(32, 8, 64, 16, 2)
    assert layout.page_bytes == 1 << 20
    assert default_arena_bytes(layout, max_model_len, weights, logits, available) == want


def test_images_get_a_share_of_a_large_machine_and_a_little_of_a_small_one():
    assert default_host_cache_bytes(2048 * GIB) == 256 * GIB
    assert default_host_cache_bytes(2 * GIB) == GIB


def test_an_engine_looks_at_the_machine_unless_it_is_told(subject, monkeypatch):
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 80 * GIB)
    for asked, got in ((None, 10 * GIB), (0, 0), (5, 5)):
        config = EngineConfig(model=subject("gqa").model, memory_bytes=8 << 20, host_cache_bytes=asked)
        engine = Engine.from_config(config)
        assert (engine.config.host_cache_bytes, engine.store.images.budget.capacity_bytes) == (got, got)
        engine.close()


@pytest.mark.parametrize(
    ("name", "given"), [("host_cache_bytes", 500 * GIB), ("memory_bytes", 500 * GIB), ("num_pages", 10_000_000)]
)
def test_memory_that_the_machine_has_not_is_told_at_the_start(subject, monkeypatch, caplog, name, given):
    """The server starts all the same: pages that nothing is written to take no memory."""
    monkeypatch.setattr(host_memory, "total_bytes", lambda: 64 * GIB)
    few = EngineConfig(model=subject("gqa").model, memory_bytes=8 << 20, host_cache_bytes=GIB)
    many = few.model_copy(update={name: given})
    shapes = ModelExecutor(many)
    page = shapes.layout.page_bytes

    def told(config):
        caplog.clear()
        completed(config)
        cpu_pages(config, shapes, shapes.layout, 0)
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    assert told(few) == []
    size = f"{given * page / GIB:.2f}" if name == "num_pages" else "500.00"
    asked = f"num_pages is {given}: {size} GiB" if name == "num_pages" else f"{name} is {size} GiB"
    has = "the machine has 64.00 GiB of memory"
    assert told(many) == [f"{asked}, but {has}: the system may end this process once so much is in use; lower it"]
