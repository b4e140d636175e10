"""N-grams: proposals are what followed the last tokens, in bounded memory and time."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.core.speculation.ngram_table import LENGTHS, MOST_SLOTS, NgramTable
from chorus.core.speculation.ngrams import NgramIndex, NgramProposer

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
    known, index, last = tokens[:1], NgramIndex(tokens[:1]), None
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
    index = NgramIndex([1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 9, 1, 2, 3, 4])
    assert index.propose(2) == [5, 6]
    index.tokens += [5, 6]
    assert index.propose(2) == [7, 8]
    index.tokens += [9]
    assert index.propose(2) == [1, 2]  # the match ended, and `6 9` occurred before


def test_a_period_goes_on():
    assert NgramIndex([7, 8, 9] * 2).propose(8) == [7, 8, 9, 7, 8, 9, 7, 8]


def test_memory_is_bounded_and_old_ngrams_are_forgotten():
    rng = random.Random(0)
    index = NgramIndex([rng.randrange(1 << 15) for _ in range(20 * MOST_SLOTS)])
    assert index.propose(4) == []
    assert [len(table) for table in index.own.tables] == [MOST_SLOTS] * len(LENGTHS)
    index.tokens += index.tokens[-50:-40]
    assert index.propose(4) == index.tokens[-50:-46]
    assert [len(table) for table in NgramIndex([1]).own.tables] == [64, 64]


def test_a_token_takes_constant_time():
    tokens = Counted(random.Random(1).randrange(50) for _ in range(1000))
    index = NgramIndex(tokens)
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


def test_an_answer_begins_as_its_prediction_and_finds_the_way_back_to_it():
    """After a changed token, the next two that match tell where the prediction goes on."""
    prediction = list(range(10, 30))
    index = NgramIndex([1, 2, 10], 2, prediction)
    assert index.propose(3) == [11, 12, 13]
    index.tokens += [11, 5]
    assert index.propose(3) == []
    index.tokens += [13, 14]
    assert index.propose(30) == prediction[5:]
    index.tokens += prediction[5:]
    assert index.propose(3) == []


def test_an_answer_that_begins_otherwise_is_looked_up_in_the_prediction():
    index = NgramIndex([1, 2, 9], 2, [10, 11, 12, 13])
    assert index.propose(3) == []
    index.tokens += [10, 11]
    assert index.propose(3) == [12, 13]


def test_a_prediction_goes_before_the_prompt_and_a_longer_match_before_both():
    prompt = [5, 6, 7, 8, 20, 21]
    assert NgramIndex([*prompt, 7, 8], len(prompt) + 1, [1, 7, 8, 30, 31]).propose(2) == [30, 31]
    assert NgramIndex([*prompt, 5, 6, 7, 8], len(prompt) + 1, [1, 7, 8, 30, 31]).propose(2) == [20, 21]


@given(
    st.lists(st.integers(0, 3), min_size=3, max_size=40), st.lists(st.integers(0, 3), max_size=30), st.integers(1, 9)
)
def test_proposals_are_parts_of_the_texts(answer, prediction, count):
    """Whatever the answer becomes: a proposal stands in the prediction, or goes round in the own tokens."""
    index = NgramIndex(answer[:1], 1, prediction)
    for token in answer[1:]:
        index.tokens.append(token)
        proposal, known = index.propose(count), index.tokens
        assert len(proposal) <= count
        parts = [prediction[at : at + len(proposal)] for at in range(len(prediction))]
        assert proposal in [[], *parts, *(going_round(known, at, count) for at in range(1, len(known)))]


def test_growing_a_table_forgets_nothing():
    tokens, table = list(range(1000)), NgramTable([])
    table.tokens = tokens
    for end in range(0, 1000, 7):
        table.insert(end)
    for length in LENGTHS:
        found = [table.find(tokens[at - length : at]) for at in range(length, 900)]
        assert sum(place == at for place, at in zip(found, range(length, 900), strict=True)) > 0.5 * len(found)
        assert all(place in (0, at) for place, at in zip(found, range(length, 900), strict=True))
    assert len(table.tables[0]) == 1024
