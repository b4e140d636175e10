"""The attack's own bookkeeping: the requests that it sends, and the results that it counts as a miss."""

import json
import socket
from itertools import islice

import pytest

from .attacked_server import Canary, rate, worst_delay, worst_gap
from .requests import MAX_BODY, Row, long_model, mutations, shapes
from .structured import outward_shapes, structured_shapes


def test_random_bodies_are_those_of_their_seed():
    first, again, other = (list(islice(mutations(seed, 50), 50)) for seed in (1, 1, 2))
    assert first == again != other
    assert all(len(attack.body) < MAX_BODY for attack in first)


@pytest.mark.wide
def test_the_shapes_are_small_but_for_those_that_say_so():
    large = {attack.name for attack in shapes() if len(attack.body) >= MAX_BODY}
    assert large == {"200,000 empty messages", "200,000 messages", "8 MB prompt"}
    names = [attack.name for attack in shapes()]
    assert len(names) == len(set(names))


def test_the_canary_counts_connections():
    canary = Canary()
    urls = [attack.body for attack in outward_shapes(canary.url)]
    assert len(urls) > 60 and all(canary.url.partition("//")[2].encode() in body for body in urls)
    assert canary.count() == 0
    for _ in range(2):
        host, port = canary.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))):
            pass
    assert canary.count() == 2 and canary.count() == 0
    canary.close()
    names = [attack.name for attack in (*structured_shapes(), *outward_shapes("http://x"))]
    assert len(names) == len(set(names))


def test_the_worst_delay_and_the_rate_are_those_of_a_time():
    answers = [(0.0, 5.0), (6.0, 0.1), (7.0, 0.2), (9.0, 3.0)]
    assert worst_delay(answers, 5.5, 8.0) == 0.2 and worst_delay(answers, 4.0, 8.0) == 5.0
    assert worst_gap([1.0, 2.0, 2.5, 3.0], 1.5, 3.2) == 0.5 and worst_gap([], 1.0, 2.0) == 1.0
    assert rate([1.0, 2.0, 2.5, 3.0], 2.0, 4.0) == 1.5


@pytest.mark.parametrize(
    ("row", "missed"),
    [
        (Row("a", 200, 1, 1.0, 0.2, 60 << 20, 0.6), []),
        (Row("a", 400, 1, 1.0, 0.3, 70 << 20, 0.4, 0.4), ["delay", "memory", "rate"]),
        (Row("a", 200, 1, 1.0, 0.1, 0, 0.4, 0.6), ["rate"]),
        (Row("a", 0, 1, 1.0, 0.0, 0, 1.0), ["no answer"]),
        (Row("a", 502, 1, 1.0, 0.0, 0, 1.0, gap=0.6, went_out=1), ["gap", "went out", "no answer"]),
        (Row("a", 503, 1, 1.0, 0.0, 0, 1.0, gap=0.4), []),
    ],
)
def test_bars(row, missed):
    assert row.missed == missed


def test_the_long_model_is_the_built_in_one_with_a_longer_context(tmp_path):
    config = json.loads((long_model(tmp_path) / "config.json").read_text())
    assert config["max_position_embeddings"] == 4096
