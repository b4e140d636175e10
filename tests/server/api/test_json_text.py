"""JSON in pieces is the JSON that is written at once."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from chorus.server.api.json_text import PLAIN_SLICE, SLICE, Sliced, dumps, encode, pieces

VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5), st.dictionaries(st.text(), inner, max_size=5), st.tuples(inner, inner)
    ),
    max_leaves=30,
)


@settings(max_examples=40)
@given(VALUES)
def test_pieces_join_to_the_whole(value):
    assert b"".join(pieces(value)) == dumps(value)
    assert json.loads(encode(value)) == json.loads(json.dumps(value))


@given(st.integers(0, 5 * SLICE), st.integers(0, 3 * PLAIN_SLICE))
def test_long_arrays_are_cut(count, numbers):
    made = []

    def make(item):
        made.append(item)
        return {"item": item, "list": [item]}

    body = {"choices": [{"logprobs": Sliced(range(count), make), "ids": list(range(numbers))}, {"ids": []}], "n": 1}
    plain = {
        "choices": [
            {"logprobs": [{"item": i, "list": [i]} for i in range(count)], "ids": list(range(numbers))},
            {"ids": []},
        ],
        "n": 1,
    }
    assert json.loads(encode(body)) == plain and dumps(body) == dumps(plain) == encode(body)
    assert len(list(pieces(body))) >= count // SLICE + numbers // PLAIN_SLICE


def test_items_are_made_when_they_are_written():
    made = []
    writing = pieces(Sliced(range(10 * SLICE), lambda item: made.append(item) or item))
    assert made == []
    next(writing)
    assert len(made) == SLICE
