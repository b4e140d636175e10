"""The engine under measurement is where a measurement takes it to be."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from chorus.memory.adapters.adapter import Tier
from chorus.memory.transfers.dma import RESERVED_BYTES
from chorus.memory.transfers.pinned import PinnedBuffers
from chorus.perf.bench.options import Options
from chorus.perf.bench.subject import Subject, Unsettled, host_cache

from ...memory.transfers.test_pinned import PlainMemory


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    context = Options.parse(["--quick", "--device", "cpu", "--out", str(tmp_path_factory.mktemp("gpu"))]).context()
    adapters = context.adapters(4, 3)
    with Subject(context, adapters, max_seqs=4, max_batched=16, max_len=48, inline_reads=True) as subject:
        yield subject


def test_names_share_their_weights(subject):
    paths = [subject.engine.store.get(name).manifest.path for name in ("r4-000", "r4-001", "r4-002")]
    assert len(set(paths)) == 3
    assert len({(path / "adapter_model.safetensors").stat().st_ino for path in paths}) == 1


@pytest.mark.parametrize("num_bytes", [3 << 20, 84 << 20, 336 << 20])
def test_a_new_image_is_pinned_while_the_old_one_is_still_held(num_bytes):
    """Else its copies are as slow as those of ordinary memory, and a cold start's time is theirs."""
    memory = PlainMemory()
    buffers = PinnedBuffers(memory, host_cache([num_bytes]))
    buffers.reserve(RESERVED_BYTES)
    image = num_bytes + (4 << 20)  # of whole pages, more than the file
    images = [buffers.take((image,), torch.uint8) for _ in range(2)]
    assert all(map(memory.holds, images)), "ordinary memory"


def test_tiers(subject):
    store = subject.engine.store
    subject.load(["r4-000"])
    assert store.tier(store.get("r4-000")) is Tier.DEVICE
    subject.to_host("r4-000")
    assert store.tier(store.get("r4-000")) is Tier.HOST
    subject.to_disk("r4-000")
    assert store.tier(store.get("r4-000")) is Tier.DISK
    assert subject.first_token_seconds(5, "r4-000") > 0
    assert not subject.engine.has_work()


def test_an_adapter_whose_read_has_brought_all_but_not_returned_is_waited_for(tmp_path, monkeypatch):
    context = Options.parse(["--quick", "--device", "cpu", "--out", str(tmp_path)]).context()
    adapters = context.adapters(4, 1)
    with Subject(context, adapters, max_seqs=4, max_batched=16, max_len=48) as threaded:
        backend, read = threaded.executor.adapters, threaded.executor.adapters.read

        def lingering(*arguments):
            read(*arguments)
            time.sleep(0.3)

        monkeypatch.setattr(backend, "read", lingering)
        threaded.load(list(adapters))
        threaded.to_host("r4-000")


def test_steps_of_other_rows_are_refused(subject):
    requests = subject.decoding([None, "r4-001"], 4, 6)
    assert len(subject.step_seconds(2, 2)) == 2
    assert subject.replay_seconds(2, lora=True) > 0
    subject.engine.abort(requests[0].id)
    with pytest.raises(Unsettled, match="a step had 1 tokens where 2 rows should decode"):
        subject.step_seconds(1, 2)
    subject.clear(requests)
    assert not subject.engine.has_work()


def test_adapters_that_are_read_slowly_decode_together(tmp_path, monkeypatch):
    """A request whose adapter came late would still be in its prefill when others have used up their tokens."""
    context = Options.parse(["--quick", "--device", "cpu", "--out", str(tmp_path)]).context()
    adapters = context.adapters(4, 3)
    with Subject(context, adapters, max_seqs=4, max_batched=16, max_len=48) as cold:
        backend, read = cold.executor.adapters, cold.executor.adapters.read

        def slow(*arguments):
            time.sleep(0.1)
            return read(*arguments)

        monkeypatch.setattr(backend, "read", slow)
        requests = cold.decoding(list(adapters), 4, 6)
        assert len(cold.step_seconds(6, 3)) == 6
        cold.clear(requests)


@pytest.mark.slow
def test_shares_of_ranks_find_room(tmp_path):
    """In addition to KV of all rows; a rank's share of an adapter is more than its part of it."""
    flags = ["--quick", "--device", "cpu", "--model-size", "125m", "--out", str(tmp_path)]
    context = Options.parse(flags).context()
    adapters = context.adapters(64, 8)
    with Subject(
        context, adapters, max_seqs=8, max_batched=64, max_len=32, inline_reads=True, tensor_parallel_size=2, threads=2
    ) as shared:
        requests = shared.decoding(list(adapters), 8, 6)
        assert len(shared.step_seconds(6, 8)) == 6
        shared.clear(requests)


def test_a_replay_changes_nothing(subject):
    """The same request gives the same tokens, whether its steps are replayed in between or not."""

    def tokens(*, replayed: bool) -> list[int]:
        subject._random.seed(7)  # noqa: SLF001  the prompts that come from now on
        (request,) = subject.decoding(["r4-002"], 6, 8)
        while not request.finished:
            if replayed:
                subject.replay_seconds(1, lora=True)
            subject.step()
        return request.token_ids

    assert tokens(replayed=True) == tokens(replayed=False)


def test_a_request_that_fails_is_an_error(subject, monkeypatch):
    output = SimpleNamespace(error="boom", request_id="q0")
    monkeypatch.setattr(subject.engine, "step", lambda: [output])
    with pytest.raises(RuntimeError, match="request q0: boom"):
        subject.step()
