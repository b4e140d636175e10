"""Reading of a call's outputs: one by one for a stream, many at once where nobody waits for each."""

from __future__ import annotations

import asyncio
import gc
import weakref
from concurrent.futures import Future
from contextlib import suppress

import pytest

from chorus.core.requests.request import Request
from chorus.core.requests.request_params import InvalidRequest, RequestParams
from chorus.core.requests.types import FinishReason, RequestOutput
from chorus.server.engine.generation import AT_ONCE, BULK, Choice, Generation
from chorus.server.text.detokenizer import ByteDetokenizer, TextStream

LENGTH = FinishReason.LENGTH


class FakeWorker:
    """Accepts every request and keeps where its outputs go."""

    def __init__(self):
        self.receivers = {}
        self.aborted = []

    def submit(self, request, on_output, loop):
        self.receivers[request.id] = (on_output, loop)
        accepted = Future()
        accepted.set_result(None)
        return accepted

    def abort(self, request_id):
        self.aborted.append(request_id)


def make_generation(worker, num_choices=1, in_bulk=True):
    streams = [TextStream(ByteDetokenizer(lambda token: bytes([token]))) for _ in range(num_choices)]
    choices = [Choice(i, Request(f"c-{i}", [1], RequestParams()), stream) for i, stream in enumerate(streams)]
    return Generation(worker, choices, id="c", model="m", in_bulk=in_bulk)


def output(token, index=0, finish=None):
    return RequestOutput(f"c-{index}", (token,), finish_reason=finish)


async def longest_stretch(work, count):
    """The most that `count` grows by between two turns of the event loop while `work` runs."""
    task, before, longest = asyncio.ensure_future(work), count(), 0
    while not task.done():
        await asyncio.sleep(0)
        longest, before = max(longest, count() - before), count()
    return await task, longest


@pytest.mark.parametrize("num_choices", [AT_ONCE - 1, 2048])
def test_a_call_of_many_choices_submits_a_few_between_turns_of_the_event_loop(num_choices):
    """Submitting 2,048 in one turn held up everybody else for a tenth of a second."""

    async def submit():
        worker = FakeWorker()
        generation = make_generation(worker, num_choices)
        _, longest = await longest_stretch(generation.start(), lambda: len(worker.receivers))
        assert len(worker.receivers) == num_choices
        return longest

    assert asyncio.run(submit()) == min(num_choices, AT_ONCE)


def test_no_refused_choice_waits_for_the_garbage_collector():
    """Each one was in a cycle of its error's frames: full collections took half a second beside thousands of texts."""
    errors = []

    class Refusing(FakeWorker):
        def submit(self, request, on_output, loop):
            refused, error = Future(), InvalidRequest("model", "no")
            errors.append(weakref.ref(error))
            asyncio.get_running_loop().call_soon(refused.set_exception, error)
            return refused

    async def submit():
        gc.disable()
        try:
            with suppress(InvalidRequest):
                await make_generation(Refusing(), 100).start()
            await settle()
            return sum(each() is not None for each in errors)
        finally:
            gc.enable()

    assert asyncio.run(submit()) == 0


def test_a_call_that_is_given_up_while_it_is_submitted_leaves_nothing_behind(caplog):
    class Refusing(FakeWorker):
        def submit(self, request, on_output, loop):
            super().submit(request, on_output, loop)
            refused = Future()
            refused.set_exception(InvalidRequest("model", "no"))
            return refused

    async def leave():
        worker = Refusing()
        starting = asyncio.ensure_future(make_generation(worker, 4 * AT_ONCE).start())
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await settle()
        assert len(worker.receivers) == AT_ONCE and {*worker.receivers} <= {*worker.aborted}

    asyncio.run(leave())
    gc.collect()
    assert not caplog.records, "futures of refusals were left alone"


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize("in_bulk", [False, True])
def test_outputs_arrive_whole_and_in_order(in_bulk):
    async def read():
        worker = FakeWorker()
        generation = make_generation(worker, 2, in_bulk)
        await generation.start()
        reading = asyncio.create_task(generation.finish())
        await settle()
        for step in range(200):
            for index in range(2):
                on_output, loop = worker.receivers[f"c-{index}"]
                sent = output(97 + step % 26, index, LENGTH if step == 199 else None)
                if loop is None:
                    await asyncio.to_thread(on_output, sent)
                else:
                    loop.call_soon(on_output, sent)
        await reading
        return [choice.text for choice in generation.choices]

    text = "".join(chr(97 + step % 26) for step in range(200))
    assert asyncio.run(read()) == [text, text]


def test_the_loop_is_woken_for_many_outputs_and_for_the_last():
    async def read():
        worker = FakeWorker()
        generation = make_generation(worker)
        await generation.start()
        reading = asyncio.create_task(generation.finish())
        await settle()
        on_output, loop = worker.receivers["c-0"]
        assert loop is None, "the engine's thread hands them over"
        counts = []
        for _ in range(BULK + 1):
            on_output(output(97))
            await settle()
            counts.append(len(generation.choices[0].token_ids))
        assert counts == [0] * (BULK - 1) + [BULK, BULK]
        on_output(output(97, finish=LENGTH))
        await reading
        return len(generation.choices[0].token_ids)

    assert asyncio.run(read()) == BULK + 2


@pytest.mark.parametrize("turns", range(4))
def test_a_wake_that_comes_late_finds_nothing_and_does_no_harm(turns):
    async def read():
        worker = FakeWorker()
        generation = make_generation(worker, 2)
        await generation.start()
        reading = asyncio.create_task(generation.finish())
        await settle()
        for index in range(2):  # both wake the loop, and the second one's output may have been read by then
            for _ in range(BULK):
                worker.receivers[f"c-{index}"][0](output(97, index))
            for _ in range(turns):
                await asyncio.sleep(0)
        await settle()
        for index in range(2):
            worker.receivers[f"c-{index}"][0](output(97, index, LENGTH))
        await reading
        return [len(choice.token_ids) for choice in generation.choices]

    assert asyncio.run(read()) == [BULK + 1] * 2


def test_a_request_whose_loop_is_gone_is_aborted():
    worker = FakeWorker()
    generation = make_generation(worker)

    async def leave():
        await generation.start()

    asyncio.run(leave())
    worker.receivers["c-0"][0](output(97, finish=LENGTH))
    assert worker.aborted == ["c-0"]
