"""Long strings of a JSON object, in whatever pieces it comes."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorus.server.http.json_strings import Base64, LongStrings


def read(text, size, fields=("w",)):
    strings, found = LongStrings(fields), {}
    for first in range(0, len(text), size):
        for name, piece in strings.feed(text[first : first + size]):
            found[name] = found.get(name, b"") + piece
    return json.loads(strings.rest), found


PLAIN = st.none() | st.booleans() | st.integers() | st.text()
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))
TEXT = st.text(st.characters(max_codepoint=0xD7FF))
"""Without pairs of escapes, which are no base64: each half of one comes as `?`."""

OBJECTS = st.dictionaries(st.text(min_size=2), VALUES) | st.fixed_dictionaries({"w": TEXT, "x": VALUES})


@pytest.mark.wide
@given(OBJECTS, st.integers(1, 9), st.booleans())
def test_the_rest_is_the_object_without_the_strings(given, size, is_ascii):
    text = json.dumps(given, ensure_ascii=is_ascii).encode("utf-8", "backslashreplace")
    rest, found = read(text, size)
    is_long = isinstance(given.get("w"), str)
    assert rest == json.loads(text) | ({"w": ""} if is_long else {})
    assert found == ({"w": json.loads(text)["w"].encode("utf-8", "replace")} if is_long else {})


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_only_the_objects_own_fields_are_long(size):
    text = rb'{"a": {"w": "no"}, "b": ["w", "no"], "w" : "ye\/s\u003d", "c": "w", "d": {"e": ["w"]}, "\"w": "no"}'
    rest, found = read(text, size)
    assert found == {"w": b"ye/s="}
    assert rest["a"] == {"w": "no"} and rest["b"] == ["w", "no"] and rest['"w'] == "no" and rest["w"] == ""


@pytest.mark.parametrize("size", [1, 3, 4, 5, 64])
def test_base64_in_pieces(size):
    for data in (b"", b"a", b"ab", b"abc", bytes(range(256))):
        text, decoder = base64.b64encode(data), Base64()
        pieces = [decoder.feed(text[first : first + size]) for first in range(0, len(text), size)]
        decoder.close()
        assert b"".join(pieces) == data


@pytest.mark.parametrize("pieces", [[b"abc"], [b"ab!d"], [b"YQ==", b"YQ=="], [b"YQ==YQ=="], [b"ab d"], ["é".encode()]])
def test_what_is_no_base64(pieces):
    decoder = Base64()
    with pytest.raises(ValueError):
        for piece in pieces:
            decoder.feed(piece)
        decoder.close()
