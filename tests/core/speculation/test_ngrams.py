"""N-grams: proposals are what followed the last tokens, in bounded memory and time."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.core.speculation.ngrams import LENGTHS, MOST_SLOTS, NgramIndex, NgramProposer

SHORTEST, LONGEST = min(LENGTHS), max(LENGTHS)


class Counted(list):
    """A list that counts the items that are read."""

    num_read = 0

    def __getitem__(self, key):
        self.num_read += len(range(*key.indices(len(self)))) if isinstance(key, slice) else 1
        return super().__getitem__(key)


def occurrences(tokens, length):
    """Ends of the earlier occurrences of the last `length` tokens."""
    gram, end = tokens[-length:], len(tokens)
    return [at for at in range(length, end) if tokens[at - length : at] == gram] if length < end else []


def going_round(tokens, at, count):
    """`count` tokens from position `at` on, as if the list went on with them."""
    known = list(tokens)
    for position in range(at, at + count):
        known.append(known[position])
    return known[len(tokens) :]


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60), st.lists(st.integers(1, 5), max_size=20), st.integers(1, 9)
)
def test_proposals_follow_an_earlier_occurrence_of_the_last_tokens(tokens, steps, count):
    """Every call, also after several tokens at once: a match if there is any, and the longest n-gram's if it is new."""
    known, index, last = tokens[:1], NgramIndex(tokens[:1], 100), None
    rest = tokens[1:]
    for step in [*steps, len(rest)]:
        proposal = index.propose(count)
        known = index.tokens
        begins = occurrences(known, SHORTEST)
        if not begins:
            assert proposal == []
        else:
            assert proposal in [going_round(known, at, count) for at in begins]
            longest = occurrences(known, LONGEST)
            if longest and last == []:  # it follows no match of an earlier call
                assert proposal == going_round(known, longest[-1], count)
        last = proposal
        index.tokens += rest[:step]
        rest = rest[step:]


def test_a_match_is_followed_as_long_as_it_goes_on():
    """The last two tokens occurred elsewhere more recently, but more of them match the earlier place."""
    index = NgramIndex([1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 9, 1, 2, 3, 4], 100)
    assert index.propose(2) == [5, 6]
    index.tokens += [5, 6]
    assert index.propose(2) == [7, 8]
    index.tokens += [9]
    assert index.propose(2) == [1, 2]  # the match ended, and `6 9` occurred before


def test_a_period_goes_on():
    assert NgramIndex([7, 8, 9] * 2, 100).propose(8) == [7, 8, 9, 7, 8, 9, 7, 8]


def test_memory_is_bounded_and_old_ngrams_are_forgotten():
    rng = random.Random(0)
    index = NgramIndex([rng.randrange(1 << 15) for _ in range(20 * MOST_SLOTS)], 1 << 30)
    assert index.propose(4) == []
    assert [len(table) for table in index.tables] == [MOST_SLOTS] * len(LENGTHS)
    index.tokens += index.tokens[-50:-40]
    assert index.propose(4) == index.tokens[-50:-46]
    assert [len(table) for table in NgramIndex([1], 10).tables] == [64, 64]


def test_a_token_takes_constant_time():
    tokens = Counted(random.Random(1).randrange(50) for _ in range(1000))
    index = NgramIndex(tokens, 4000)
    index.propose(8)
    before = tokens.num_read
    assert before < 1000 * 8
    for token in range(2000):
        tokens.append(token % 60)
        index.propose(8)
    assert tokens.num_read - before < 2000 * 40


def test_each_request_has_an_index_of_its_own():
    proposer = NgramProposer()
    requests = [Request(name, tokens, RequestParams()) for name, tokens in (("a", [1, 2, 1, 2]), ("b", [3, 4, 5]))]
    for each in requests:
        each.max_length = 50
    assert proposer.propose(dict.fromkeys(requests, 3)) == {requests[0]: [1, 2, 1]}
    requests[1].token_ids += [3, 4]
    index = requests[1].proposing
    assert proposer.propose({requests[1]: 2}) == {requests[1]: [5, 3]}
    assert requests[1].proposing is index
