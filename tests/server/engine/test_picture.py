"""The snapshot of the operator's page, over the real engine without tensors: each held page has its owner."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.memory.adapters.adapter import Tier
from chorus.memory.pages.block import Medium
from chorus.memory.pages.pool import PageKind
from chorus.perf.bench.schedule_time import FakeExecutor
from chorus.perf.inline_reads import InlineReads
from chorus.server.engine.engine_view import Phase, Picture, PrefixRow


@pytest.fixture
def engine():
    executor = FakeExecutor(1000)
    config = EngineConfig(model=Path("none"), max_num_seqs=2, num_pages=1000)
    made = Engine(config, executor, reads=InlineReads())
    for name in ("a", "b", "c"):
        made.store.register(name, Path(f"{name}-16"))
    return made


def add(engine, name, adapter, tenant, tokens=40):
    params = RequestParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    engine.add_request(Request(name, [1] * tokens, params, adapter, tenant=tenant))


def test_every_page_in_use_has_its_owner(engine):
    for name, adapter, tenant in (("1", "a", "acme"), ("2", None, "zeta"), ("3", "b", "acme")):
        add(engine, name, adapter, tenant)
        engine.step()
    engine.adapters.pin("c")
    picture = Picture.of(engine)
    kinds = np.frombuffer(picture.kinds, np.uint8)
    held = Counter()
    for kind, adapter, tenant, pages in picture.holdings:
        assert (kinds[pages] == kind).all() and (tenant != "") == (kind is PageKind.KV)
        held[kind, adapter] += len(pages)
    for kind in (PageKind.KV, PageKind.ADAPTER):
        assert sum(count for key, count in held.items() if key[0] is kind) == engine.pool.count(kind)
    assert held[PageKind.ADAPTER, "c"] == engine.store.get("c").num_pages
    rows = {row[0]: row for row in picture.adapters()}
    assert rows["a"] == ("a", Tier.DEVICE, 16, 4, 1, False, "1", False) and rows["c"][5]
    assert picture.phases.total() == len(engine.scheduler.running) + len(engine.scheduler.waiting)


def test_a_paused_request_is_one_without_a_row(engine):
    for index in range(2):
        add(engine, f"first {index}", "a", "acme")
        engine.step()
        engine.step()
    add(engine, "other", "b", "zeta")
    for _ in range(5):
        engine.step()
    phases = Picture.of(engine).phases
    running = engine.scheduler.running
    assert len(running) == 3, "the other tenant's begins beside a full batch"
    assert phases["b", "zeta", Phase.RUNNING] == 1
    assert (phases["a", "acme", Phase.RUNNING], phases["a", "acme", Phase.PAUSED]) == (1, 1)
    engine.abort("other")
    assert Picture.of(engine).phases == {("a", "acme", Phase.RUNNING): 2}


def test_a_snapshot_is_not_changed_by_later_steps(engine):
    add(engine, "1", "a", "acme")
    engine.step()
    picture = Picture.of(engine)
    pages = [list(holding.pages) for holding in picture.holdings]
    kinds = picture.kinds
    for _ in range(40):
        engine.step()
    assert [list(holding.pages) for holding in picture.holdings] == pages and picture.kinds == kinds


def test_rows_of_prefixes_tell_where_they_are(engine):
    """In tokens; host memory and files are counted by what an engine with such tiers has."""
    for name, adapter in (("1", "a"), ("2", "a"), ("3", None)):
        add(engine, name, adapter, "acme")
        while engine.has_work():
            engine.step()
    block, versions = engine.block_tokens, {name: engine.store.get(name).version for name in "abc"}
    picture = Picture.of(engine)
    pool = {name: engine.prefix.num_blocks[version, Medium.POOL] for name, version in (("", 0), ("a", versions["a"]))}
    assert picture.prefixes() == [PrefixRow("", block * pool[""], 0, 0), PrefixRow("a", block * pool["a"], 0, 0)]
    assert min(pool.values()) >= 2
    engine.prefix.num_blocks[versions["b"], Medium.HOST] = 3
    engine.disk = SimpleNamespace(num_blocks=lambda version: 5 if version == versions["c"] else 0)
    assert picture.prefixes()[2:] == [PrefixRow("b", 0, 3 * block, 0), PrefixRow("c", 0, 0, 5 * block)]
