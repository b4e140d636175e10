"""Models with recurrent states that speculate: checkpoints, preemption, and other processes. For paths, see `paths`."""

from __future__ import annotations

import itertools
import json
import random

import pytest
import torch

from chorus.core.model.read_config import read_model_config
from chorus.core.policies import Policies
from chorus.core.requests.plan_wire import plan_from_wire, plan_to_wire
from chorus.memory.files.format import inspect_adapter
from chorus.ops.library import native_library

from ..paths.asked import answers, told
from ..speculation.stand_ins import Drawn, Free, Right, Wrong
from ..speculation.test_speculation import WAYS, ask, same
from ..tiny_families import ADAPTERS, HYBRIDS

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]


needs_library = pytest.mark.skipif(
    not native_library.available(torch.float32), reason="ranks add up by the native library"
)
KERNELS = ["torch", "native"]

ONE = [
    *itertools.product(("qwen3.5", "qwen3.5-tied"), KERNELS),
    ("lfm2", "native"),
    ("granite-4-h", "native"),
    ("nemotron-h", "native"),
    *itertools.product(["falcon-h1"], KERNELS),
]
"""Geometries on one rank."""

TWO = [
    *itertools.product(["qwen3.5", "granite-4-h"], KERNELS),
    ("lfm2", "native"),
    ("nemotron-h", "native"),
    *itertools.product(["falcon-h1"], KERNELS),
]
"""Geometries on two ranks: one has several heads of values for each of keys, one a group of heads for both ranks."""

both = pytest.mark.parametrize("kernels", KERNELS)


def on_ranks(one, two):
    """Geometries on one rank, and on two."""
    values = [*((*each, 1) for each in one), *(pytest.param(*each, 2, marks=needs_library) for each in two)]
    return pytest.mark.parametrize(("family", "kernels", "ranks"), values)


on_one_or_two_ranks = on_ranks(ONE, TWO)
preempted = on_ranks(*([each for each in some if each[0] != "nemotron-h"] for some in (ONE, TWO)))
"""Likewise, without a geometry of few pages, whose sequences don't crowd each other out."""

on_few_ranks = on_ranks(ONE, TWO[:2])
"""As `on_one_or_two_ranks`, of tests that take long."""


@pytest.mark.parametrize("family", HYBRIDS)
def test_adapters_are_on_layers_of_both_kinds(tiny, family):
    it = tiny(family)
    manifest = inspect_adapter(it.adapters["r3-all"], read_model_config(it.model).module_paths)
    targets = {"qwen3.5": 12, "olmo": 14, "lfm3": 10}.get(family.split("-")[0], 9)
    assert (len(manifest.parts), len(manifest.targets)) == (3, targets)


def speculating(drive, it, proposer, **limits):
    driver = drive(it, speculation="ngram", policies=Policies(proposer=proposer), **limits)
    driver.engine.speculation.cost = Free()
    return driver


def noted(keep, kept):
    """`PrefixCache.keep_checkpoint`, with the accepted drafts of each checkpoint added to `kept`."""

    def keep_checkpoint(block, pages, accepted):
        kept.append(accepted)
        return keep(block, pages, accepted)

    return keep_checkpoint


def proposers(want):
    """Right, wrong and random proposals for the requests of `want`."""

    def answer(request):
        return want.get(request.id, [])

    return [Right(answer), Wrong(answer), Drawn(answer, random.Random(0))]


@on_few_ranks
def test_a_checkpoint_may_lie_between_accepted_drafts(tiny, drive, family, ranks, monkeypatch):
    """A second turn begins where the cache has the first one's answer: at a state, and inputs that it takes in."""
    it, want = tiny(family), {}
    for proposer in proposers(want):
        driver = speculating(
            drive, it, proposer, adapters={}, block_tokens=16, state_checkpoint_tokens=16, tensor_parallel_size=ranks
        )
        prefix, kept = driver.engine.prefix, []
        monkeypatch.setattr(prefix, "keep_checkpoint", noted(prefix.keep_checkpoint, kept))
        for seed in range(2):
            prompt, whole = it.case(None, 9, seed=seed, count=56)
            for cut in (0, 30, 45):
                name = f"{seed}.{cut}"
                want[name] = whole[cut:]
                driver.add(name, None, prompt + whole[:cut], max_tokens=56 - cut)
                assert told(driver, {name: None}) == {name: whole[cut:]}
        assert driver.engine.stats().num_prefix_hit_tokens > 2 * (32 + 48) * 0.8
        assert any(kept) or type(proposer) is not Right
        assert not any(kept) or type(proposer) is not Wrong


@pytest.mark.slow
@pytest.mark.usefixtures("crowded")
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@preempted
def test_preempted_requests_keep_their_accepted_drafts(tiny, drive, family, ranks, preemption):
    it, want = tiny(family), {}
    limits = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "preemption": preemption,
        "max_model_len": 128,
        "tensor_parallel_size": ranks,
    }
    layout = drive(it, adapters={}, speculation="ngram", **limits).engine.executor.layout
    pages = 2 * layout.pages_for_tokens(80, chunk=64)
    for proposer in proposers(want)[::2]:
        driver = speculating(drive, it, proposer, adapters={}, num_pages=pages, **limits)
        want |= answers(it, driver, adapters=(None,), count=12, seed=4, lengths=(5, 20), tokens=60)
        assert told(driver, want) == want
        stats = driver.engine.stats()
        assert stats.num_preemptions > 0
        assert (stats.num_swaps_out > 0) == (preemption == "swap")
        assert stats.num_accepted_tokens > 0


SAMPLED = [*WAYS[:7], WAYS[8], WAYS[9], *WAYS[14:]]
"""Sampling parameters of requests that speculate, and one of those that don't."""


@pytest.mark.parametrize(
    ("family", "kernels", "dtype"),
    [(*case, "float32") for case in ONE]
    + [(family, "native", "bfloat16") for family, kernels in ONE if kernels == "native"],
)
def test_outputs_are_those_without_speculation(tiny, drive, kernels, family, dtype):
    """Sampled tokens and log-probabilities, of mixed adapters; the native decoder's to the bit (torch's kernels round
    steps of other sizes otherwise in bfloat16). Some steps fail, and run again sequence by sequence.
    """
    it, rng = tiny(family), random.Random(family)
    asked = [
        ([None, *ADAPTERS][index % 4], [rng.randrange(3, 150) for _ in range(rng.randint(3, 30))], "",
         {"max_tokens": 30, **way})
        for index, way in enumerate(SAMPLED)
    ]  # fmt: skip
    limits = {"dtype": dtype, "max_num_seqs": 6, "max_num_batched_tokens": 40, "max_model_len": 128}
    plain = drive(it, **limits)
    ask(plain, it, asked)
    want = plain.drain()

    def answer(request):
        return want[request.id].tokens

    def fail(plan):
        if plan.num_drafts and plan.step_id % 5 == 0 and len(plan.sequences) > 1:
            raise RuntimeError("an injected fault")

    for proposer, least in ((Right(answer), 0.9), (Drawn(answer, random.Random(7)), 0.05)):
        driver = speculating(drive, it, proposer, before=fail, **limits)
        ask(driver, it, asked)
        same(driver.drain(), want, kernels)
        stats = driver.engine.stats()
        assert stats.num_accepted_tokens > least * stats.num_proposed_tokens > 0


@both
def test_a_plan_for_another_process_has_the_drafts_that_states_take_in(tiny, drive):
    it, want = tiny("qwen3.5"), {}
    driver = speculating(drive, it, Right(lambda request: want[request.id]), adapters={})
    sent = []

    def send(plan):
        sent.append((plan_to_wire(plan), [row.states.accepted for row in plan.sequences]))

    driver.executor.before = send
    want |= answers(it, driver, adapters=(None,), count=2, seed=5, tokens=20)
    assert told(driver, want) == want
    assert max(max(accepted) for _, accepted in sent) > 1
    for wire, accepted in sent:
        received = plan_from_wire(json.loads(json.dumps(wire)), lambda entry: None)
        assert [row.states.accepted for row in received.sequences] == accepted
