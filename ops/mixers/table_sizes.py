"""Sizes of the tables of n-grams, without torch. Tests: tests/ops/mixers/test_ngrams.py."""

from __future__ import annotations

import math
from functools import cache


@cache
def table_sizes(least: int, first: int, count: int) -> tuple[int, ...]:
    """Primes from `least` on, `count` of them, behind the first `first`: rows of each head's part of a table."""
    found: list[int] = []
    number = least
    while len(found) < first + count:
        if _is_prime(number):
            found.append(number)
        number += 1
    return tuple(found[first:])


def _is_prime(number: int) -> bool:
    if number < 4 or number % 2 == 0:
        return number in (2, 3)
    return all(number % divisor for divisor in range(3, math.isqrt(number) + 1, 2))
