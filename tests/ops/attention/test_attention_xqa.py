"""XQA's decode attention without a GPU: the arguments of its call, the results that they imply, and when it serves."""

from __future__ import annotations

import inspect
import random
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chorus.ops.attention import attention_xqa
from chorus.ops.attention.attention import PLAIN, AttentionSetup, HeadShape, Scores
from chorus.ops.attention.attention_backend import AttentionUnavailable, rival_attention
from chorus.ops.attention.attention_xqa import PageTable, XqaBackend, xqa_obstacle

from .attention_ref import paged_attention_ref
from .fake_flashinfer import FakeFlashInfer, Stream
from .test_attention import DUMMY, Step, decodes
from .test_attention_flashinfer import FlashInferModules, choose, compiler, hopper  # noqa: F401

MAX_ROWS, MAX_PAGES = 12, 16


def make(heads=4, kv_heads=2, head_dim=8, block_tokens=4, scores=PLAIN):
    fake = FakeFlashInfer(Stream())
    shape = HeadShape(heads, kv_heads, head_dim, block_tokens)
    setup = AttentionSetup(shape, torch.float32, torch.device("cpu"), MAX_ROWS, MAX_PAGES, (scores,))
    return XqaBackend(setup, 2, SimpleNamespace(ragged=lambda: "ragged"), module=fake), fake


@pytest.mark.wide
@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    steps=st.lists(st.lists(decodes, min_size=1, max_size=8), min_size=1, max_size=6),
    heads=st.sampled_from([(4, 4), (4, 2), (8, 1)]),
    scores=st.sampled_from([PLAIN, Scores(0.3, 5), Scores(window=9)]),
)
def test_buckets_equal_the_definition(seed, steps, heads, scores):
    """A replay reads the table of the last plan, whichever bucket ran before and however long the rows were."""
    backend, _ = make(*heads, scores=scores)
    buckets = {size: backend.decode(size) for size in (1, 2, 4, 8)}
    for index, rows in enumerate(steps):
        bucket = next(size for size in buckets if size >= len(rows))
        step = Step(seed + index, rows, heads=heads[0], kv_heads=heads[1])
        want = paged_attention_ref(step.q, step.k, step.v, step.qo_indptr, step.tables, step.kv_lens, scores)
        padding = bucket - len(rows)
        step.qo_indptr = range(bucket + 1)
        step.kv_lens += [1] * padding
        spare = torch.full((padding, step.page_table.shape[1]), DUMMY, dtype=torch.long)
        step.page_table = torch.cat((step.page_table, spare))
        step.q = torch.cat((step.q, torch.randn(padding, *step.q.shape[1:])))
        got = step.run(buckets[bucket], scores)
        torch.testing.assert_close(got[: len(rows)], want.flatten(1), rtol=1e-4, atol=1e-5)


def test_only_changed_entries_of_a_table_are_sent(monkeypatch):
    """Rows grow, end and come back with other pages; the table always has what the step has."""
    sent = []

    def counted(values, device):
        sent.append(values.numel())
        return values

    monkeypatch.setattr(attention_xqa, "on_device", counted)
    table, rng = PageTable(4, 8, 4, torch.device("cpu")), random.Random(1)
    lists = [[rng.randrange(1, 99)] for _ in range(4)]
    lens = [1] * 4
    for step in range(60):
        for row in range(4):
            if rng.random() < 0.1 or lens[row] == 32:
                lists[row], lens[row] = [rng.randrange(1, 99)], 0
            lens[row] += 1
            if lens[row] > 4 * len(lists[row]):
                lists[row].append(rng.randrange(1, 99))
        rows = torch.tensor([pages + [DUMMY] * (8 - len(pages)) for pages in lists])
        sent.clear()
        table.write(rows, lens, lists if step % 7 else None)
        assert sum(sent) <= 4 + 2 * sum(map(len, lists))
        assert table.lens.tolist() == lens
        for row, pages in enumerate(lists):
            assert table.pages[row, : len(pages)].tolist() == pages
    sent.clear()
    table.write(rows, lens, lists)
    assert sent == [4], "the lengths alone"


@pytest.mark.parametrize(("lens", "width"), [([1] * 5, 8), ([0], 8), ([33], 8), ([20], 4)])
def test_refuses_rows_that_do_not_fit(lens, width):
    table = PageTable(4, 8, 4, torch.device("cpu"))
    with pytest.raises(ValueError, match="does not fit in 4 rows of"):
        table.write(torch.zeros(len(lens), width, dtype=torch.long), lens)


def test_other_steps_are_the_other_backends():
    assert make()[0].ragged() == "ragged"


def test_refuses_caches_that_the_kernel_reads_otherwise():
    step, (backend, _) = Step(1, [(1, 3)]), make()
    attention = backend.decode(1)
    arena = torch.randn(9, 4 * 2 * 8 + 4)[:, :64].view(9, 4, 2, 8)
    step.k = step.v = arena
    with pytest.raises(ValueError, match="of the cache must be multiples of 8, a head"):
        step.run(attention)
    step.v = torch.randn(9, 4, 2, 8)
    with pytest.raises(ValueError, match="the same strides"):
        step.run(attention)


@pytest.mark.integration
@pytest.mark.skipif(find_spec("flashinfer") is None, reason="flashinfer is not installed")
def test_calls_fit_the_real_signature():
    import flashinfer

    backend, fake = make()
    Step(2, [(1, 3), (1, 12)]).run(backend.decode(2))
    ((name, _, args, given),) = fake.calls
    inspect.signature(getattr(flashinfer.decode, name)).bind(*args, **given)


# -- when it serves


class Modules(FlashInferModules):
    def imported(self, name):
        return self if name in ("flashinfer.jit.xqa", "flashinfer") else super().imported(name)

    __version__ = "0.6.4"

    def gen_xqa_module(self, *, page_size, head_dim, head_group_ratio, use_sliding_window, **dtypes):
        name = f"xqa_{page_size}_{head_dim}_{head_group_ratio}" + "_window" * use_sliding_window
        return SimpleNamespace(name=name, is_aot=name in self.built_ahead)


@pytest.fixture
def modules(hopper, monkeypatch):  # noqa: F811
    modules = Modules()
    monkeypatch.setattr(attention_xqa, "import_module", modules.imported)
    monkeypatch.setattr(
        attention_xqa, "XqaBackend", lambda setup, num_sms, eager: SimpleNamespace(name="xqa", eager=eager)
    )
    return modules


def test_xqa_where_it_is_asked_for(hopper, compiler, modules):  # noqa: F811
    backend = choose(wanted="xqa")
    assert (backend.name, backend.eager) == ("xqa", "flashinfer")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float32}, "attention is xqa, but FlashInfer needs bfloat16"),
        ({"float8_kv": True}, "attention is xqa, but XQA rounds queries to FP8 where the KV cache is in FP8"),
        ({"scores": (Scores(softcap=30.0),)}, "attention is xqa, but XQA has no soft caps"),
        ({"heads": (24, 8)}, "XQA supports 1, 2, 4, 8 heads per KV head; here it is 3"),
    ],
)
def test_it_is_refused_by_name_where_it_cannot_serve(hopper, compiler, modules, change, reason):  # noqa: F811
    with pytest.raises(AttentionUnavailable, match=reason):
        choose(wanted="xqa", **change)


@pytest.mark.parametrize("block_tokens", [16, 32])
def test_it_is_refused_where_it_reads_values_from_wrong_pages(hopper, modules, monkeypatch, block_tokens):  # noqa: F811
    """By name, and `auto` does not try it: sample values may lie in pages that hide it."""
    shape = HeadShape(16, 4, 256, block_tokens)
    setup = AttentionSetup(shape, torch.bfloat16, torch.device("cuda:0"), 8, 64)
    assert f"pages of {block_tokens} tokens on compute capability 12.0" in str(xqa_obstacle(setup, (12, 0)))
    assert "set block_tokens to 64 or 128" in str(xqa_obstacle(setup, (12, 1)))
    assert xqa_obstacle(setup, (9, 0)) is xqa_obstacle(setup, (10, 0)) is None
    for other in (shape._replace(head_dim=128), shape._replace(block_tokens=64)):
        assert xqa_obstacle(replace(setup, heads=other), (12, 0)) is None
    modules.built_ahead = {f"xqa_{block_tokens}_256_4"}
    theirs = SimpleNamespace(name="flashinfer 0.6.4")
    assert rival_attention(setup, theirs).eager is theirs
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    assert rival_attention(setup, theirs) is None


def test_it_is_refused_on_other_devices_and_without_its_module(hopper, modules, monkeypatch):  # noqa: F811
    theirs = {"prefill_fa3_torch.bfloat16", "prefill_fa2_torch.bfloat16"}
    hopper["modules"].built_ahead = theirs | {f"{name}_window" for name in theirs}
    with pytest.raises(AttentionUnavailable, match="no compiled xqa_16_128_4, and there is no CUDA compiler"):
        choose(wanted="xqa")
    modules.built_ahead = {"xqa_16_128_4"}
    assert choose(wanted="xqa").name == "xqa"
    with pytest.raises(AttentionUnavailable, match="no compiled xqa_16_128_4_window, and"):
        choose(wanted="xqa", scores=(Scores(scale=0.1), Scores(window=512)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with pytest.raises(AttentionUnavailable, match=r"needs compute capability 9.x, 10.x, 12.x; cuda:0 has 8.9"):
        choose(wanted="xqa")


def test_it_is_compared_with_flashinfer_where_it_is_built_ahead(hopper, modules):  # noqa: F811
    setup = AttentionSetup(HeadShape(32, 8, 128, 16), torch.bfloat16, torch.device("cuda:0"), 8, 64)
    theirs = SimpleNamespace(name="flashinfer 0.6.4")
    assert rival_attention(setup, theirs) is None
    modules.built_ahead = {"xqa_16_128_4"}
    assert rival_attention(setup, theirs).eager is theirs
    assert rival_attention(replace(setup, float8_kv=True), theirs) is None
    assert rival_attention(setup, SimpleNamespace(name="triton 3.6")) is None
