"""The encoder's queue and cache, with rows that no model makes."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chorus.core.media.encoder import Encoded, ImageEncoder
from chorus.core.media.images import BadImage
from chorus.core.requests.media import MediaItem
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.memory.host.budget import HostBudget


class Maker:
    """Rows `[2, 4]` float32, of 32 bytes; it waits until it may go."""

    def __init__(self) -> None:
        self.may_go, self.began, self.encoded = threading.Event(), threading.Event(), list[str]()

    def prepare(self, item: MediaItem) -> Any:
        if item.data == b"bad":
            raise BadImage("is no image")
        return SimpleNamespace(digest=item.data.decode(), tensors={})

    def changes(self, bound: Any) -> Any:
        return bound

    def encode(self, prepared: Any, changes: Any) -> torch.Tensor:
        self.began.set()
        self.may_go.wait()
        self.encoded.append(prepared.digest + ("" if changes is None else f" {changes}"))
        return torch.zeros(2, 4)


def request(id: str, *images: str, tenant: str = "", scope: str = "") -> Request:
    media = tuple(MediaItem(each.encode(), each, ((index * 2, 2),)) for index, each in enumerate(images))
    found = Request(id, [0] * 2 * len(images), RequestParams(), tenant=tenant, media=media)
    found.fairness_key, found.media_scope = tenant, scope
    found.bound = "adapter" if scope else None  # pyright: ignore[reportAttributeAccessIssue]
    return found


class Driven:
    """An encoder, and what it has done."""

    def __init__(self, num_bytes: int = 1 << 20, budget: int = 1 << 20, share: bool = False) -> None:
        self.maker, self._woken = Maker(), threading.Event()
        self.budget = HostBudget(budget)
        self.encoder = ImageEncoder(lambda: self.maker, num_bytes, 1, self._woken.set, self.budget, share=share)

    def wait(self, count: int) -> list[Encoded]:
        found: list[Encoded] = []
        while len(found) < count:
            assert self._woken.wait(60)
            self._woken.clear()
            found += self.encoder.take()
        return found

    def close(self) -> None:
        self.maker.may_go.set()
        self.encoder.close()


@pytest.fixture
def driven(request: pytest.FixtureRequest) -> Any:
    made: list[Driven] = []

    def make(**fields: Any) -> Driven:
        made.append(Driven(**fields))
        return made[-1]

    yield make
    for each in made:
        each.close()


Make = Callable[..., Driven]


def waits_for_the_tower(it: Driven, id: str) -> None:
    while id not in [each.id for each in it.encoder._at_tower]:  # noqa: SLF001
        time.sleep(0.001)


def test_tenants_take_turns(driven: Make) -> None:
    it = driven()
    it.encoder.submit(request("first", "x", tenant="a"))
    assert it.maker.began.wait(60)
    for number in range(3):
        it.encoder.submit(request(f"a{number}", f"a{number}", tenant="a"))
    it.encoder.submit(request("b", "b", tenant="b"))
    assert it.encoder.num_waiting("a") == 4 and it.encoder.num_waiting("b") == 1
    it.maker.may_go.set()
    it.wait(5)
    assert it.maker.encoded in (["x", "a0", "b", "a1", "a2"], ["x", "b", "a0", "a1", "a2"])
    assert not it.encoder.has_work()


def test_a_turn_is_an_image(driven: Make) -> None:
    """A request of many images keeps no other tenant's waiting for all of them."""
    it = driven()
    it.encoder.submit(request("many", "a0", "a1", "a2", "a0", tenant="a"))
    it.encoder.submit(request("later", "a3", tenant="a"))
    assert it.maker.began.wait(60)
    it.encoder.submit(request("b", "b0", "b1", tenant="b"))
    waits_for_the_tower(it, "b")
    it.maker.may_go.set()
    done = {one.request.id: len(one.request.media_rows) for one in it.wait(3)}
    encoded = it.maker.encoded
    assert [each for each in encoded if each < "b"] == ["a0", "a1", "a2", "a3"]
    assert encoded.index("b0") == 1 and encoded.index("b1") <= 3
    assert done == {"b": 2, "many": 4, "later": 1}  # threads say so in any order


def test_a_request_that_was_begun_ends_before_others_begin_beyond_the_limit(driven: Make) -> None:
    """Rows of requests that have not all of theirs would fill the room that none can leave."""
    it = driven(num_bytes=40)
    it.encoder.submit(request("a", *(f"a{each}" for each in range(4)), tenant="a"))
    assert it.maker.began.wait(60)
    for tenant in "bc":
        it.encoder.submit(request(tenant, *(f"{tenant}{each}" for each in range(4)), tenant=tenant))
    it.maker.may_go.set()
    for tenant in "abc":
        (one,) = it.wait(1)
        assert one.request.id == tenant and len(one.request.media_rows) == 4 and one.error is None
        one.request.media_rows.clear()
        del one
        gc.collect()
    rest = [each for each in it.maker.encoded if not each.endswith("0")]
    assert rest[:3] == ["a1", "a2", "a3"], "each thread may have begun one when there was room"


def test_a_request_between_its_turns_is_cancelled(driven: Make) -> None:
    it = driven()
    it.encoder.submit(request("many", "a0", "a1", tenant="a"))
    assert it.maker.began.wait(60)
    it.encoder.submit(request("b", "b0", tenant="b"))
    waits_for_the_tower(it, "b")
    may_go, it.maker.may_go = it.maker.may_go, threading.Event()
    it.maker.began.clear()
    may_go.set()
    assert it.maker.began.wait(60), "b's, and the other waits for its second turn"
    assert it.encoder.cancel("many") is not None
    it.maker.may_go.set()
    assert [one.request.id for one in it.wait(1)] == ["b"] and it.maker.encoded == ["a0", "b0"]
    it.close()
    assert not it.encoder._begun and not it.encoder._pixels and not it.encoder.has_work()  # noqa: SLF001


def test_an_image_that_takes_long_to_prepare_keeps_no_other_tenants_waiting(driven: Make) -> None:
    it = driven()
    prepare, may_prepare, preparing = it.maker.prepare, threading.Event(), threading.Event()

    def slow(item: MediaItem) -> Any:
        if item.data == b"slow":
            preparing.set()
            may_prepare.wait()
        return prepare(item)

    it.maker.prepare, _ = slow, it.maker.may_go.set()
    it.encoder.submit(request("slow", "slow", tenant="a"))
    assert preparing.wait(60)
    for number in range(3):
        it.encoder.submit(request(f"b{number}", f"b{number}", tenant="b"))
        assert [one.request.id for one in it.wait(1)] == [f"b{number}"]
    may_prepare.set()
    assert [one.request.id for one in it.wait(1)] == ["slow"]


def test_rows_are_shared_by_scope_alone(driven: Make) -> None:
    it = driven()
    it.maker.may_go.set()
    for number, (tenant, scope) in enumerate((("a", ""), ("a", ""), ("b", ""), ("a", "@2"), ("a", "@2"), ("a", ""))):
        it.encoder.submit(request(f"{number}", "x", tenant=tenant, scope=scope))
    done = it.wait(6)
    assert it.maker.encoded == ["x", "x", "x adapter"] or sorted(it.maker.encoded) == ["x", "x", "x adapter"]
    rows = {one.request.id: one.request.media_rows[0] for one in done}
    assert rows["0"] is rows["1"] is rows["5"] and rows["3"] is rows["4"] and rows["2"] is not rows["0"]
    shared = driven(share=True)
    shared.maker.may_go.set()
    for tenant in "ab":
        shared.encoder.submit(request(tenant, "x", tenant=tenant))
    shared.wait(2)
    assert shared.encoder.num_encoded == shared.encoder.num_found == 1


def test_an_image_that_fails_fails_its_request_alone(driven: Make) -> None:
    it = driven()
    it.maker.may_go.set()
    for id, image in (("1", "x"), ("2", "bad"), ("3", "y")):
        it.encoder.submit(request(id, image))
    errors = {one.request.id: one.error for one in it.wait(3)}
    assert errors == {"1": None, "2": "an image is no image", "3": None}


def test_a_cancelled_request_is_not_taken(driven: Make) -> None:
    it = driven()
    it.encoder.submit(request("running", "x"))
    assert it.maker.began.wait(60)
    it.encoder.submit(request("waiting", "y"))
    it.encoder.submit(request("kept", "z"))
    assert it.encoder.cancel("waiting") is not None and it.encoder.cancel("waiting") is None
    assert it.encoder.cancel("running") is not None
    it.maker.may_go.set()
    assert [one.request.id for one in it.wait(1)] == ["kept"]
    assert "y" not in it.maker.encoded and not it.encoder.has_work()


def test_rows_of_requests_bound_what_is_encoded(driven: Make) -> None:
    """A request keeps its rows; others' images wait until it has ended. One request may have more than the bound."""
    it = driven(num_bytes=64)
    it.maker.may_go.set()
    it.encoder.submit(request("1", "a", "b", "c"))
    (first,) = it.wait(1)
    assert len(first.request.media_rows) == 3
    it.encoder.submit(request("2", "d"))
    gc.collect()
    assert it.encoder.has_work() and not it.encoder.take()
    first.request.media_rows.clear()
    (second,) = it.wait(1)
    assert second.request.id == "2" and second.error is None


def test_rows_are_counted_once_for_all_requests_that_hold_them(driven: Make) -> None:
    it = driven(num_bytes=64)
    it.maker.may_go.set()
    for id, image in (("1", "a"), ("2", "a"), ("3", "a"), ("4", "b")):
        it.encoder.submit(request(id, image))
    done = it.wait(4)  # 32 bytes of `a` and as many of `b`
    assert [one.request.id for one in done] == ["1", "2", "3", "4"] and it.encoder.num_found == 2


def test_rows_for_the_next_use_count_in_the_budget_of_host_memory(driven: Make) -> None:
    """Where it is full, they are not kept; the requests that got them have them all the same."""
    it = driven(num_bytes=256, budget=64)
    it.maker.may_go.set()
    for id, image in (("1", "a"), ("2", "b")):
        it.encoder.submit(request(id, image))
        it.wait(1)
    assert it.budget.num_bytes == 64
    it.budget.make_room(32)
    assert it.budget.num_bytes == 32
    full = driven(budget=31)
    full.maker.may_go.set()
    for id in "123":
        full.encoder.submit(request(id, "a"))
        (done,) = full.wait(1)
        assert done.error is None and len(done.request.media_rows) == 1
        done.request.media_rows.clear()
    assert full.encoder.num_encoded == 3 and full.budget.num_bytes == 0


def test_rows_of_a_request_are_found_although_they_are_not_kept(driven: Make) -> None:
    it = driven(budget=0)
    it.maker.may_go.set()
    for id in "12":
        it.encoder.submit(request(id, "a"))
    first, second = it.wait(2)
    assert first.request.media_rows[0] is second.request.media_rows[0]
    assert (it.encoder.num_encoded, it.encoder.num_found) == (1, 1)
    assert it.encoder.cache.num_bytes == 0
    it.budget.capacity_bytes = 64
    it.encoder.submit(request("3", "a"))
    (third,) = it.wait(1)
    assert it.encoder.num_encoded == 1 and it.encoder.cache.num_bytes == 32, "they are kept once there is room"
    for one in (first, second, third):
        one.request.media_rows.clear()
    del first, second, third, one
    gc.collect()
    it.encoder.submit(request("4", "a"))
    it.wait(1)
    assert it.encoder.num_encoded == 1


def test_an_image_that_fails_leaves_those_before_it(driven: Make) -> None:
    it = driven()
    it.maker.may_go.set()
    it.encoder.submit(request("1", "x", "bad"))
    (failed,) = it.wait(1)
    assert failed.error and it.encoder.cache.num_bytes == 32
    it.encoder.submit(request("2", "x"))
    (done,) = it.wait(1)
    assert done.error is None and it.maker.encoded == ["x"]
