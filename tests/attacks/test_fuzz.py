"""Damaged requests: mutants are those of their number, and a server stands a short run of them."""

import json

import pytest

from .fuzz import main
from .mutants import Mutant, mutant, other_calls, questions, structured_calls

CALLS = [*questions({None: ["a\n", "b\n"], "upper": ["c\n", "d\n"]}, 0, 20), *other_calls("spare", "/tmp/spare")]
CALLS += structured_calls()


@pytest.mark.wide
def test_a_number_gives_the_same_mutant():
    first, again = ([mutant(number, CALLS) for number in range(3000)] for _ in range(2))
    assert first == again
    assert len({one.raw for one in first}) > 2000


def test_the_damage_is_of_every_kind():
    drawn = [mutant(number, CALLS) for number in range(2000)]
    intact = {call.raw() for call in CALLS}
    assert sum(one.raw in intact for one in drawn) < 100
    valid = [one for one in drawn if one.is_greedy and not one.may_wait]
    assert len(valid) > 100 and {one.path for one in valid} == {"/v1/completions", "/v1/chat/completions"}
    bodies = b"".join(one.raw for one in drawn)
    assert all(mark in bodies for mark in (b"\\ud800", b"[" * 80, b"9" * 5000, b"chunked", b"NaN", b"\xef\xbb\xbf"))


@pytest.mark.parametrize(
    ("body", "greedy"),
    [
        (b'{"temperature": 0}', True),
        (b'{"temperature": 0.0}', True),
        (b'{"temperature": 1}', False),
        (b"{}", False),
        (b"[]", False),
        (b"{", False),
    ],
)
def test_greedy_is_what_says_so(body, greedy):
    assert Mutant(0, "/v1/completions", b"", body=body).is_greedy is greedy
    assert not Mutant(0, "/tokenize", b"", body=body).is_greedy


@pytest.mark.slow
def test_a_server_stands_a_few(capsys):
    assert main(["--requests", "60", "--questions", "12", "--clients", "4"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["ok"] and result["answers"] >= 60
