"""Images on two TP ranks: the first one's process encodes them, and each step sends the others their rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from chorus.core.engine import Engine
from chorus.core.requests.plan_wire import plan_from_wire, plan_to_wire
from chorus.core.requests.request import Request
from chorus.core.requests.types import ScheduledSequence, StepPlan
from chorus.ops.library import native_library

from .test_served_images import Asked, answers, engine_of, images_of, picture
from .tiny_vision import adapters_of, needs_vision

pytestmark = [
    pytest.mark.native(needed=False),
    pytest.mark.vision,
    needs_vision,
    pytest.mark.skipif(not native_library.available(torch.float32), reason="ranks add up by the native library"),
]

#: Runs of rows; axes; additions; blocks in all layers, and in some; inputs of layers; states; experts; those of images.
FEW = ("smolvlm", "qwen3_vl", "gemma3")
FAMILIES = [
    name if name in FEW else pytest.param(name, marks=pytest.mark.wide)
    for name in (
        *FEW,
        "mistral3",
        "gemma4",
        "gemma4_inputs",
        "qwen3_5",
        "qwen3_vl_moe",
        "paligemma2",
        "granite_vision",
        "ernie4_5_vl_moe",
    )
]


@pytest.fixture(scope="module", params=FAMILIES)
def asked(request: pytest.FixtureRequest) -> Asked:
    return Asked(request.param)


@pytest.fixture(scope="module", params=[("torch", "swap"), ("auto", "recompute")], ids="-".join)
def engine(request: pytest.FixtureRequest, asked: Asked) -> Iterator[Engine]:
    """Two ranks of some kernels, for all tests of a family: to start their processes takes longer than a test."""
    kernels, preemption = request.param
    fields = {"tensor_parallel_size": 2, "memory_bytes": 128 << 20, "preemption": preemption, "prefix_cache": False}
    engine = engine_of(asked, kernels, **fields)
    yield engine
    engine.close()


def test_images_and_adapters_on_two_ranks(asked: Asked, engine: Engine) -> None:
    """In one batch with text; chunks end inside images, or before and behind them."""
    images, wanted = images_of(asked), {}
    assert not engine.adapters.quarantine and engine.model.why_blind is None
    for number, adapter in enumerate((None, *adapters_of(asked.reference.family))):
        for count in (0, 1 + number % 3):
            own = [images[(number + index) % len(images)] for index in range(count)]
            request = asked.request(f"{adapter} {count}", adapter, own)
            wanted[request.id] = asked.wanted[request.id]
            engine.add_request(request)
    assert answers(engine) == wanted


def test_preempted_on_two_ranks(asked: Asked, engine: Engine) -> None:
    request = asked.request("preempted", "linear", [picture(1, (40, 60)), picture(2, (30, 90))])
    engine.add_request(request)
    found: list[int] = []
    while engine.has_work():
        for output in engine.step():
            assert output.error is None, output.error
            found += output.token_ids
        if len(found) >= 3 and request.is_running and not request.num_preemptions:
            engine.scheduler.lifecycle.preempt(request)
    assert found == asked.wanted["preempted"] and request.num_preemptions == 1


def test_a_plan_has_the_rows_of_its_step_alone() -> None:
    """And as they are, whatever their dtype; files of images stay where they are."""
    asked = Asked("qwen3_vl")
    request: Request = asked.request("one", None, [picture(1, (90, 30)), picture(2, (20, 60))])
    (first, count), *_ = request.media[0].runs
    request.media = tuple(replace(item, ends=(1, 0)) for item in request.media)
    rows = [torch.randn(item.num_rows, 6).bfloat16() for item in request.media]
    start, tokens = first + 2, request.token_ids[first + 2 : first + count + 1]
    sequence = ScheduledSequence(
        "one", -1, tokens, start, [1, 2, 3], request.params, 0, False, request.token_ids, request.num_prompt_tokens,
        media=request.media, media_rows=rows,
    )  # fmt: skip
    plan = plan_to_wire(StepPlan(1, [sequence], []), samples=False)
    sent = plan["sequences"][0]["media"]
    assert [each["count"] for each in sent] == [count - 2, 0] and "data" not in sent[0]
    (found,) = plan_from_wire(plan, lambda _: pytest.fail("no adapter")).sequences
    assert [(item.runs, item.grid, item.ends) for item in found.media] == [
        (item.runs, item.grid, item.ends) for item in request.media
    ]
    assert found.sees and found.position_shift == sequence.position_shift
    assert torch.equal(found.media_rows[0][2:count], rows[0][2:].float())
