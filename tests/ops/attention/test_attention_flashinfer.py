"""FlashInfer attention without a GPU: the arguments of its wrappers, and the results that they imply."""

from __future__ import annotations

import inspect
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from packaging.requirements import Requirement

from chorus.ops.attention import attention_backend, attention_flashinfer, attention_values
from chorus.ops.attention.attention import PLAIN, AttentionSetup, HeadShape, Scores, count_prefills
from chorus.ops.attention.attention_backend import AttentionUnavailable, TorchBackend, choose_attention
from chorus.ops.attention.attention_flashinfer import FlashInferBackend, float_workspace_bytes
from chorus.ops.attention.attention_plan import PlanBuffers
from chorus.ops.attention.latent_attention import LatentAttention
from chorus.ops.elementwise.float8_kv import UNSCALED

from .attention_ref import paged_attention_ref
from .fake_flashinfer import FakeFlashInfer, Stream
from .test_attention import DUMMY, SCALES, Step, chunks, decodes

MAX_ROWS, MAX_PAGES = 12, 16


@pytest.fixture(autouse=True)
def small_workspaces(monkeypatch):
    monkeypatch.setattr(attention_flashinfer, "FLOAT_WORKSPACE_BYTES", 1)
    monkeypatch.setattr(attention_flashinfer, "DECODE_INT_WORKSPACE_BYTES", 64)


def make(heads=4, kv_heads=2, head_dim=8, block_tokens=4, dtype=torch.float32, scores=PLAIN, float8_kv=False):
    """A backend over the stand-in, in whose plans any dtype and head size will do; and the stand-in."""
    stream = Stream()
    fake = FakeFlashInfer(stream)
    shape = HeadShape(heads, kv_heads, head_dim, block_tokens)
    setup = AttentionSetup(shape, dtype, torch.device("cpu"), MAX_ROWS, MAX_PAGES, (scores,), float8_kv=float8_kv)
    return FlashInferBackend(setup, num_sms=2, module=fake, new_event=stream.new_event), fake


@pytest.mark.wide
@settings(max_examples=80)
@given(
    seed=st.integers(0, 2**32 - 1),
    steps=st.lists(st.tuples(st.lists(chunks, max_size=4), st.lists(decodes, max_size=5)), min_size=1, max_size=3),
    heads=st.sampled_from([(4, 4), (4, 2), (8, 1), (6, 2)]),
    block_tokens=st.sampled_from([3, 4, 16]),
    spare_columns=st.integers(0, 3),
)
def test_ragged_steps_equal_the_definition(seed, steps, heads, block_tokens, spare_columns):
    """Whole prompts, later chunks and decode rows, mixed or alone; one object goes through several steps."""
    backend, _ = make(*heads, 8, block_tokens)
    attention = backend.ragged()
    for index, (prefills, decoding) in enumerate(steps):
        rows = prefills + decoding
        assume(rows)
        Step(
            seed + index,
            rows,
            heads=heads[0],
            kv_heads=heads[1],
            block_tokens=block_tokens,
            spare_columns=spare_columns,
        ).check(attention)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    steps=st.lists(st.lists(decodes, min_size=1, max_size=8), min_size=1, max_size=6),
    heads=st.sampled_from([(4, 4), (4, 2), (8, 1)]),
)
def test_buckets_share_buffers_and_replay_after_any_plan(seed, steps, heads):
    """A replay reads the buffers of the last plan, whichever bucket ran before and however long the rows were."""
    backend, fake = make(*heads)
    buckets = {size: backend.decode(size) for size in (1, 2, 4, 8)}
    for index, rows in enumerate(steps):
        bucket = next(size for size in buckets if size >= len(rows))
        step = Step(seed + index, rows, heads=heads[0], kv_heads=heads[1])
        want = paged_attention_ref(step.q, step.k, step.v, step.qo_indptr, step.tables, step.kv_lens)
        padding = bucket - len(rows)
        step.qo_indptr = range(bucket + 1)
        step.kv_lens += [1] * padding
        step.page_table = torch.cat(
            (step.page_table, torch.full((padding, step.page_table.shape[1]), DUMMY, dtype=torch.long))
        )
        step.q = torch.cat((step.q, torch.randn(padding, *step.q.shape[1:])))
        got = step.run(buckets[bucket])
        torch.testing.assert_close(got[: len(rows)], want.flatten(1), rtol=1e-4, atol=1e-5)
        assert got.isfinite().all()
    planned = sum(wrapper.plans > 0 for wrapper in fake.wrappers)
    assert fake.fast_plans == len(steps) - planned, "all but a bucket's first plan are fast"


@pytest.mark.parametrize("scales", SCALES, ids=str)
@pytest.mark.parametrize("scores", [PLAIN, Scores(0.3, 5, 2.0)], ids=str)
def test_a_cache_in_float8(scales, scores):
    """Plans are told its dtype, runs its scales, unless they are 1."""
    backend, fake = make(float8_kv=True, scores=scores)
    ragged, bucket = backend.ragged(), backend.decode(2)
    for seed in range(3):
        Step(seed, [(5, 6), (3, 0), (1, 9)]).in_float8(scales).check(ragged, scores)
        Step(seed, [(1, 3 + seed), (1, 12)]).in_float8(scales).check(bucket, scores)
    runs = [kwargs for _, method, _, kwargs in fake.calls if method == "run"]
    assert len(runs) == 9
    assert all(("k_scale" in given) == (scales != UNSCALED) for given in runs)
    plans = [kwargs for name, method, _, kwargs in fake.calls if method == "plan" or name == "fast_decode_plan"]
    assert {given["kv_data_type"] for given in plans} == {torch.float8_e4m3fn}
    assert {given["q_data_type"] for given in plans} == {torch.float32}


def test_rows_may_share_pages():
    """A prefix that two requests have in common lies in the same pages of both."""
    backend, _ = make()
    step = Step(3, [(5, 8), (3, 8), (1, 11)])
    for table in step.tables[1:]:
        table[:2] = step.tables[0][:2]
    for row, table in zip(step.page_table, step.tables, strict=True):
        row[: len(table)] = torch.tensor(table)
    step.check(backend.ragged())


def test_a_plan_waits_for_the_copies_of_the_last_one(monkeypatch):
    """Page-locked memory is read when the copy runs, not when it is issued."""
    backend, fake = make()

    def late(buffers):
        used = len(buffers.on_host)
        fake.stream.copy(buffers.on_device[:used], buffers.on_host[:used])

    monkeypatch.setattr(PlanBuffers, "upload", late)
    attention, bucket = backend.ragged(), backend.decode(2)
    first, second = Step(1, [(5, 6), (1, 9)]), Step(2, [(1, 3), (1, 12)])
    for step, planned, other in ((first, attention, bucket), (second, bucket, attention)):
        waits = fake.stream.waits
        step.check(planned)
        assert fake.stream.waits == waits + 1
        third = Step(4, [(1, 1), (1, 2)])
        other.plan([0, 1, 2], third.page_table, third.kv_lens)
    assert fake.stream.pending


def test_what_wrappers_share():
    backend, fake = make()
    one, two = backend.decode(1), backend.decode(2)
    wrappers = fake.wrappers
    assert wrappers[0].workspace is wrappers[1].workspace
    assert wrappers[0].int_workspace is not wrappers[1].int_workspace
    assert wrappers[0].indices.data_ptr() == wrappers[1].indices.data_ptr()
    assert {type(one), type(two)} == {attention_flashinfer.FlashInferDecodeAttention}


@pytest.mark.parametrize(
    ("group", "tensor_cores"), [(1, False), (2, False), (3, False), (4, True), (7, True), (8, True)]
)
def test_decode_kernel_by_group(group, tensor_cores):
    """The other kernel knows no groups but 1, 2, 3, 4 and 8."""
    backend, fake = make(group * 2, 2)
    backend.decode(1)
    assert fake.wrappers[-1].tensor_cores is tensor_cores


@pytest.mark.parametrize(("head_dim", "kernel"), [(64, "fa2"), (128, "auto"), (256, "fa2")])
def test_prefill_kernel_by_head_size(head_dim, kernel):
    backend, fake = make(head_dim=head_dim)
    backend.ragged()
    assert fake.wrappers[0].backend == kernel


def test_prefill_kernel_of_a_cache_in_float8():
    backend, fake = make(head_dim=128, float8_kv=True)
    backend.ragged()
    assert fake.wrappers[0].backend == "fa2", "fa3 needs queries in FP8, too"


def test_refuses_what_does_not_fit():
    backend, _ = make()
    table = torch.zeros(MAX_ROWS + 1, MAX_PAGES, dtype=torch.long)
    ragged, bucket = backend.ragged(), backend.decode(2)
    with pytest.raises(ValueError, match="13 sequences, but the buffers have room for 12"):
        ragged.plan(range(MAX_ROWS + 2), table, [1] * (MAX_ROWS + 1))
    with pytest.raises(ValueError, match="host memory"):
        ragged.plan([0, 1], table[:1].to("meta"), [1])
    with pytest.raises(ValueError, match="sequences have 0 to 3 tokens"):
        ragged.plan([0, 1, 2], table[:2], [0, 3])
    with pytest.raises(ValueError, match="must fit in 16 pages"):
        ragged.plan([0, 1], table[:1], [4 * MAX_PAGES + 1])
    with pytest.raises(ValueError, match="must come before"):
        ragged.plan([0, 1, 4], table[:2], [1, 3])
    with pytest.raises(ValueError, match="the bucket has 2 rows of one token"):
        bucket.plan([0, 1], table[:1], [1])
    with pytest.raises(ValueError, match="the bucket has 2 rows of one token"):
        bucket.plan([0, 2], table[:1], [2])
    assert count_prefills([0, 3, 5, 6], 3) == 2


@pytest.mark.integration
@pytest.mark.skipif(find_spec("flashinfer") is None, reason="flashinfer is not installed")
def test_calls_fit_the_real_signatures():
    import flashinfer

    how = Scores(0.3, 100, 20.0)
    backend, fake = make(scores=how)
    ragged, bucket = backend.ragged(), backend.decode(2)
    Step(1, [(5, 6), (1, 9)]).run(ragged, how)
    for seed in (2, 3):
        Step(seed, [(1, 3), (1, 12)]).run(bucket, how)
    seen = set()
    for name, method, args, kwargs in fake.calls:
        if method is None:
            real = getattr(flashinfer.decode, name)
            inspect.signature(real).bind(*args, **kwargs)
        else:
            real = getattr(getattr(flashinfer, name), method)
            inspect.signature(real).bind(None, *args, **kwargs)
        seen.add((name, method))
    decode, prefill = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
    wanted = {(name, method) for name in (decode, prefill) for method in ("__init__", "plan", "run")}
    assert seen == wanted | {(decode, "reset_workspace_buffer"), ("fast_decode_plan", None)}


# -- how much memory plans need


def laid_out(qo_lens, kv_pages, *, heads, kv_heads, head_dim, num_sms, block_tokens, graph):
    """Float workspace bytes as `PrefillPlan` lays them out, in 0.6.4's words."""
    group, split_tiles = heads // kv_heads, 2 * num_sms // kv_heads
    packed = [length * group for length in qo_lens]
    longest = (sum(qo_lens) - len(qo_lens) + 1) * group if graph else sum(packed) // len(packed)
    tile = 128 if longest > 64 and head_dim < 256 else 64 if longest > 16 else 16
    if graph:
        num_tiles = -(-sum(qo_lens) * group // tile) + len(qo_lens) - 1
    low, high = max(128 // block_tokens, 1), max(kv_pages)

    def works(chunk):
        return sum(-(-p // tile) * -(-k // chunk) for p, k in zip(packed, kv_pages, strict=True))

    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if works(middle) > split_tiles else (low, middle)
    if not (graph or low < max(kv_pages)):
        return 0
    padded = max(split_tiles, num_tiles) if graph else works(low)
    return heads * padded * tile * (head_dim + 1) * 4


@given(data=st.data(), graph=st.booleans())
def test_the_float_workspace_holds_every_plan(data, graph):
    heads = data.draw(st.sampled_from([(32, 8), (32, 32), (28, 4), (64, 8), (8, 1), (40, 2)]))
    shape = {"head_dim": data.draw(st.sampled_from([64, 128, 256])), "num_sms": data.draw(st.sampled_from([20, 132]))}
    lens = st.just(1) if graph else st.integers(1, 3000)
    rows = data.draw(st.lists(st.tuples(lens, st.integers(1, 4000)), min_size=1, max_size=64))
    used = laid_out(*zip(*rows, strict=True), heads=heads[0], kv_heads=heads[1], block_tokens=16, graph=graph, **shape)
    assert used <= float_workspace_bytes(*heads, shape["head_dim"], len(rows), shape["num_sms"])


# -- which backend serves


@pytest.fixture
def hopper(monkeypatch):
    """A GPU and FlashInfer as far as the choice looks at them."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: type("Properties", (), {"multi_processor_count": 132})
    )
    monkeypatch.setattr(attention_backend, "version", lambda name: "0.6.4")
    made = {}

    def fake_backend(setup, num_sms):
        made.update(setup=setup, num_sms=num_sms)
        return "flashinfer"

    monkeypatch.setattr(attention_flashinfer, "FlashInferBackend", fake_backend)
    monkeypatch.setitem(sys.modules, "chorus.ops.attention.attention_triton", SimpleNamespace(TritonBackend=OurBackend))
    monkeypatch.setattr(attention_backend, "find_spec", lambda name: name)
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT", raising=False)
    made["modules"] = modules = FlashInferModules()
    monkeypatch.setattr(attention_flashinfer, "import_module", modules.imported)
    return made


class OurBackend:
    """Arguments of the choice for our own backend."""

    name = "triton"

    def __init__(self, setup, num_sms, *, reason, fix):
        self.setup, self.num_sms, self.reason, self.fix = setup, num_sms, reason, fix


class FlashInferModules:
    """FlashInfer's compiled modules, as its own Python asks for them: those built ahead, and a compiler or none."""

    def __init__(self):
        self.built_ahead, self.cuda_home = set(), None

    def imported(self, name):
        assert name in ("flashinfer.prefill", "flashinfer.decode", "flashinfer.jit.cpp_ext", "flashinfer.utils")
        return self

    def get_cuda_path(self):
        if self.cuda_home is None:
            raise RuntimeError("Could not find nvcc")
        return self.cuda_home

    def determine_attention_backend(self, device, *settings):
        return "fa3"

    def gen_batch_prefill_module(self, kernel, dtype, *rest):
        return self._spec(f"prefill_{kernel}_{dtype}{_kv_of(dtype, rest[0])}", *rest[-3:-1])

    def gen_batch_decode_module(self, dtype, *rest):
        return self._spec(f"decode_{dtype}{_kv_of(dtype, rest[0])}", *rest[-2:])

    def _spec(self, name, window, softcap):
        name += "_window" * window + "_softcap" * softcap
        return SimpleNamespace(name=name, is_aot=name in self.built_ahead)


def _kv_of(dtype, kv_dtype):
    return "" if kv_dtype == dtype else f"_kv_{kv_dtype}"


def choose(
    dtype=torch.bfloat16,
    head_dim=128,
    device="cuda:0",
    heads=(32, 8),
    scores=(PLAIN,),
    float8_kv=False,
    value_dim=None,
    **kwargs,
):
    shape = HeadShape(*heads, head_dim, 16)
    sizes = {"max_rows": 8, "max_pages_per_row": 64, "scores": scores, "float8_kv": float8_kv, "value_dim": value_dim}
    setup = AttentionSetup(shape, dtype, torch.device(device), **sizes)
    return choose_attention(setup, **kwargs)


#: Of DeepSeek-V3.
LATENTS = {"heads": (128, 1), "head_dim": 576, "value_dim": 512}


@pytest.fixture
def compiler(hopper, tmp_path):
    """A CUDA compiler where FlashInfer looks for it."""
    nvcc = tmp_path / "bin/nvcc"
    nvcc.parent.mkdir()
    nvcc.touch()
    hopper["modules"].cuda_home = str(tmp_path)


def test_flashinfer_where_it_can(hopper, compiler):
    assert choose() == "flashinfer"
    assert hopper["num_sms"] == 132
    assert hopper["setup"].heads == (32, 8, 128, 16)
    assert (hopper["setup"].dtype, hopper["setup"].device) == (torch.bfloat16, torch.device("cuda:0"))
    assert choose(torch.float16, 64) == "flashinfer"


@pytest.mark.parametrize(
    "scores", [(Scores(softcap=50.0),), (Scores(0.1, 512),), (PLAIN, Scores(scale=0.5)), (Scores(0.1, 512, 30.0),)]
)
def test_flashinfer_has_windows_soft_caps_and_scales(hopper, compiler, scores):
    assert choose(scores=scores) == "flashinfer"
    assert hopper["setup"].scores == scores


@pytest.mark.parametrize(
    ("change", "name", "reason"),
    [
        ({"dtype": torch.float32}, "triton", "the model is in float32"),
        ({"head_dim": 16}, "triton", "the model's have 16"),
        ({"head_dim": 96}, "triton", "the model's have 96"),
        ({"head_dim": 8}, "torch", "16 to 512 elements in bfloat16, the model's have 8"),
        ({"dtype": torch.float32, "head_dim": 256}, "torch", "16 to 128 elements in float32, the model's have 256"),
        ({"dtype": torch.float64}, "torch", "does not support float64"),
        ({"device": "cpu"}, "torch", "this one is cpu"),
        ({"float8_kv": True, "head_dim": 96}, "triton", "the model's have 96"),
        ({"float8_kv": True, "dtype": torch.float32}, "torch", "a KV cache in FP8 for bfloat16 and float16, the model"),
        ({"heads": (34, 2), "head_dim": 96}, "torch", "up to 16 heads per KV head, the model has 17"),
        ({"wanted": "torch"}, "torch", "attention is torch"),
        ({"scores": (PLAIN, Scores(has_sinks=True))}, "triton", "FlashInfer is not asked for attention sinks"),
        (
            {"scores": (Scores(has_slopes=True),)},
            "torch",
            "FlashInfer is not asked for slopes of ALiBi, and the model has them; the decode kernel has no slopes of",
        ),
        ({"wanted": "triton"}, "triton", "attention is triton"),
        ({"wanted": "triton", "scores": (PLAIN, Scores(0.1, None, 30.0))}, "triton", "attention is triton"),
    ],
)
def test_others_where_it_cannot_or_is_not_asked_for(hopper, compiler, change, name, reason):
    backend = choose(**change)
    assert backend.name == name
    assert reason in backend.reason
    assert not backend.fix, "nothing that can be installed would help"
    if name == "torch":
        assert not backend.captures
    else:
        assert backend.setup.heads == (32, 8, change.get("head_dim", 128), 16)
        assert (backend.setup.max_rows, backend.setup.max_pages_per_row) == (8, 64)
        assert backend.setup.scores == change.get("scores", (PLAIN,))
        assert backend.num_sms == 132


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"wanted": "flashinfer", "dtype": torch.float32}, "attention is flashinfer, but FlashInfer needs bfloat16"),
        (
            {"wanted": "flashinfer", "scores": (Scores(has_sinks=True),)},
            "attention is flashinfer, but FlashInfer",
        ),
        (
            {"wanted": "triton", "scores": (Scores(has_slopes=True),)},
            "attention is triton, but the decode kernel has no slopes of ALiBi, and the model has them",
        ),
        ({"wanted": "triton", "head_dim": 8}, "attention is triton, but the decode kernel supports heads of 16 to 512"),
        ({"wanted": "flashinfer", **LATENTS}, "attention is flashinfer, but FlashInfer is not asked for latents"),
        ({"wanted": "xqa", **LATENTS}, "attention is xqa, but FlashInfer is not asked for latents"),
        (
            {"wanted": "triton", **LATENTS, "dtype": torch.float32},
            "attention is triton, but the decode kernel supports heads of 16 to 128 elements in float32, the model's "
            "have 512",
        ),
    ],
)
def test_a_backend_that_is_asked_for_and_cannot_serve_is_refused(hopper, compiler, change, reason):
    with pytest.raises(AttentionUnavailable, match=reason):
        choose(**change)


@pytest.mark.parametrize(
    ("change", "kind", "reason"),
    [
        ({}, None, "FlashInfer is not asked for latents"),
        ({"wanted": "triton"}, None, "attention is triton"),
        ({"wanted": "torch"}, LatentAttention, "attention is torch"),
        ({"dtype": torch.float32}, LatentAttention, "16 to 128 elements in float32, the model's have 512"),
    ],
)
def test_latents(hopper, compiler, change, kind, reason):
    """Of any number of heads; by PyTorch's operators where our kernel can't."""
    backend = choose(**{**LATENTS, **change})
    assert backend.name == ("triton" if kind is None else "torch")
    assert reason in backend.reason
    if kind is None:
        assert backend.setup.value_dim == 512
    else:
        assert type(backend.decode(1)) is type(backend.ragged()) is kind


BFLOAT16 = {"prefill_fa3_torch.bfloat16", "prefill_fa2_torch.bfloat16"}


def test_flashinfer_where_its_modules_were_built_ahead(hopper, monkeypatch):
    """Without a compiler, and where building is off though there is one."""
    hopper["modules"].built_ahead = BFLOAT16
    assert choose() == "flashinfer"
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert choose() == "flashinfer"
    assert choose(head_dim=64) == "flashinfer", "fa2 takes both prefill and decode then"


def test_ours_where_a_module_is_missing_and_may_not_be_built(hopper, compiler, monkeypatch):
    hopper["modules"].built_ahead = BFLOAT16
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    backend = choose(torch.float16)
    assert backend.name == "triton"
    assert "no compiled prefill_fa3_torch.float16 and no prefill_fa2_torch.float16" in backend.reason
    assert "FLASHINFER_DISABLE_JIT is set" in backend.reason
    assert "leave FLASHINFER_DISABLE_JIT unset" in backend.fix
    lone_heads = choose(head_dim=64, heads=(8, 8))
    assert "no compiled decode_torch.bfloat16," in lone_heads.reason


def test_modules_of_a_cache_in_float8(hopper, monkeypatch):
    """They are others, and prompts take fa2."""
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    hopper["modules"].built_ahead = BFLOAT16
    backend = choose(float8_kv=True)
    assert backend.name == "triton"
    missing = "prefill_fa2_torch.bfloat16_kv_torch.float8_e4m3fn"
    assert backend.reason.startswith(f"FlashInfer has no compiled {missing}, and")
    hopper["modules"].built_ahead = {missing}
    assert choose(float8_kv=True) == "flashinfer"
    assert hopper["setup"].kv_dtype == torch.float8_e4m3fn


def test_ours_where_the_modules_of_windows_or_soft_caps_are_missing(hopper, monkeypatch):
    """Each has modules of its own; a group of layers without them is FlashInfer's all the same."""
    hopper["modules"].built_ahead = BFLOAT16
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert choose(scores=(Scores(scale=0.5),)) == "flashinfer"
    backend = choose(scores=(PLAIN, Scores(window=512), Scores(window=512, softcap=30.0)))
    assert backend.name == "triton"
    assert backend.reason.startswith(
        "FlashInfer has no compiled prefill_fa3_torch.bfloat16_window and no prefill_fa2_torch.bfloat16_window and no "
        "prefill_fa3_torch.bfloat16_window_softcap and no"
    )
    lone_heads = choose(head_dim=64, heads=(8, 8), scores=(Scores(softcap=2.0),))
    assert "no prefill_fa2_torch.bfloat16_softcap and no decode_torch.bfloat16_softcap," in lone_heads.reason.replace(
        "no compiled", "no"
    )


def test_ours_where_there_is_no_compiler(hopper):
    backend = choose(head_dim=64)
    assert backend.name == "triton"
    assert "there is no CUDA compiler (nvcc)" in backend.reason
    assert "install nvcc" in backend.fix
    assert "flashinfer-jit-cache==0.6.4 --index-url https://flashinfer.ai/whl/" in backend.fix, "PyPI has none"


@pytest.mark.parametrize("found", ["0.6.3", "0.6.5", "0.6.18.post1", "0.7.1", "0.9.0", "1.0"])
def test_ours_beside_a_version_that_is_not_supported(hopper, compiler, monkeypatch, found):
    monkeypatch.setattr(attention_backend, "version", lambda name: found)
    backend = choose()
    assert backend.name == "triton"
    assert f"FlashInfer {found} is installed, which is not supported; 0.6.4, and 0.7.2 up to 0.8, are" in backend.reason
    assert backend.fix == "pip install flashinfer-python==0.6.4.*"


@pytest.mark.parametrize("found", ["0.6.4", "0.6.4.post1", "0.7.2", "0.7.2.post1", "0.7.4", "0.8.0", "0.8.1rc1"])
@pytest.mark.parametrize("problem", [None, "it differs by 1.0e+00"])
def test_a_version_that_has_not_run_serves_if_its_values_are_right(hopper, compiler, monkeypatch, found, problem):
    """Beside a newer vLLM or SGLang, which ask for it, prompts were PyTorch's."""
    asked = []
    monkeypatch.setattr(attention_backend, "version", lambda name: found)
    monkeypatch.setattr(attention_values, "values_problem", lambda setup, backend: asked.append(backend) or problem)
    backend = choose()
    if found.startswith("0.6.4"):
        assert (backend, asked) == ("flashinfer", [])
        return
    assert asked == ["flashinfer"]
    if problem is None:
        assert backend == "flashinfer"
        with pytest.raises(AttentionUnavailable, match=f"as FlashInfer 0.6.4 has it, and {found} is installed"):
            choose(wanted="xqa")
    else:
        assert backend.name == "triton"
        assert f"FlashInfer {found} gives wrong values here (it differs by 1.0e+00)" in backend.reason
        with pytest.raises(AttentionUnavailable, match="gives wrong values"):
            choose(wanted="flashinfer")


def test_a_wrappers_own_modules_are_looked_for(hopper):
    """0.7 has one for equal strides of K and V, by another name."""
    modules = hopper["modules"]

    def primary(kernel, dtype, *rest):
        spec = modules.gen_batch_prefill_module(kernel, dtype, *rest)
        return SimpleNamespace(name=f"{spec.name}_kv_stride_equal", is_aot="_equal" in modules.built_ahead)

    modules._gen_batch_prefill_primary_module = primary  # noqa: SLF001
    modules.built_ahead = BFLOAT16
    assert "no compiled prefill_fa2_torch.bfloat16_kv_stride_equal, and" in choose().reason
    modules.built_ahead = {"prefill_fa3_torch.bfloat16", "_equal"}
    assert choose() == "flashinfer"


@pytest.mark.parametrize("extra", ["cuda12", "cuda13"])
def test_the_extras_install_versions_that_are_supported(extra):
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    wanted = [Requirement(each) for each in project["project"]["optional-dependencies"][extra]]
    pins = next(each.specifier for each in wanted if each.name == "flashinfer-python")
    assert str(pins) == f"<0.9,>={attention_flashinfer.VERSION}"
    assert all(each in pins for each in (attention_flashinfer.VERSION, "0.7.2", "0.7.4", "0.8.1"))


def test_ours_where_flashinfer_itself_fails(hopper, monkeypatch):
    def broken(name):
        raise RuntimeError("flashinfer-jit-cache version does not match")

    monkeypatch.setattr(attention_flashinfer, "import_module", broken)
    backend = choose()
    assert backend.name == "triton"
    assert "cannot be loaded (flashinfer-jit-cache version" in backend.reason
    assert "that fit each other" in backend.fix


def test_ours_without_the_package_and_torch_on_an_older_device_or_without_triton(hopper, monkeypatch):
    monkeypatch.setattr(attention_backend, "version", missing)
    backend = choose()
    assert (backend.name, backend.reason) == ("triton", "FlashInfer is not installed")
    assert "chorus-lora[cuda13]" in backend.fix
    monkeypatch.setattr(attention_backend, "find_spec", lambda name: None)
    backend = choose()
    assert (backend.name, backend.reason) == ("torch", "FlashInfer is not installed; Triton is not installed")
    assert "chorus-lora[cuda13]" in backend.fix
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "compute capability 8.0, cuda:0 has 7.5" in choose().reason
    assert not choose().fix


def missing(name):
    raise attention_backend.PackageNotFoundError(name)


def test_torch_backend_computes():
    backend = TorchBackend(HeadShape(4, 2, 8, 4), torch.device("cpu"), "asked for")
    Step(1, [(5, 6), (1, 9)]).check(backend.ragged())
    Step(2, [(1, 3), (1, 12)]).check(backend.decode(2))
