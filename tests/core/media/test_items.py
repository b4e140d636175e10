"""Places of images in a prompt, and what the prefix cache compares there."""

from __future__ import annotations

import pytest

from chorus.core.requests.media import MediaItem, keys_of, placed

IMAGE = 9


def test_runs_are_those_of_placeholders() -> None:
    tokens = [1, IMAGE, IMAGE, 2, IMAGE, 3, IMAGE, IMAGE, IMAGE]
    assert placed(tokens, IMAGE, [3, 1, 2]) == [((1, 2), (4, 1)), ((6, 1),), ((7, 2),)]
    assert placed([1, 2], IMAGE, []) == []
    assert placed([7, IMAGE, 8, 7, IMAGE, 8], IMAGE, [3, 3], (7, 8)) == [((0, 3),), ((3, 3),)]


@pytest.mark.parametrize("rows", [[], [1], [2, 2], [4]])
def test_each_placeholder_is_a_row(rows: list[int]) -> None:
    with pytest.raises(ValueError, match="3 places"):
        placed([IMAGE, 1, IMAGE, IMAGE], IMAGE, rows)


def test_rows_of_a_chunk_begin_where_it_does() -> None:
    item = MediaItem(b"", "d", ((2, 3), (7, 2)))
    assert item.num_rows == 5
    assert list(item.places(0, 20)) == [(2, 0, 3), (7, 3, 2)]
    assert list(item.places(3, 8)) == [(3, 1, 2), (7, 3, 1)]
    assert list(item.places(8, 9)) == [(8, 4, 1)]
    assert list(item.places(5, 7)) == []


def test_keys_are_pairs_at_images_alone() -> None:
    item = MediaItem(b"", "d", ((2, 2),))
    tokens = [1, 5, IMAGE, IMAGE, IMAGE]
    assert keys_of(tokens, [item], 0) == [1, 5, ("d", 0), ("d", 1), IMAGE]
    assert keys_of(tokens[3:], [item], 3, "@2") == [("d@2", 1), IMAGE]
    assert MediaItem.from_wire(item.to_wire()) == item


def test_ends_are_the_tokens_beside_rows() -> None:
    """Only those that a prompt has there: a mark that stands elsewhere is text, and not found for an end."""
    item = MediaItem(b"", "d", ((2, 2), (6, 1)))
    tokens = [1, 7, IMAGE, IMAGE, 5, 5, IMAGE, 8, 7, 8]
    assert item.with_ends(tokens, (7, 8)).ends == (1, 1)
    assert item.with_ends(tokens, (6, 8)).ends == (0, 1)
    assert item.with_ends(tokens[:7], (7, 8)).ends == (1, 0)
    assert MediaItem(b"", "d", ((0, 1),)).with_ends([IMAGE, 7], (7, 8)).ends == (0, 0)
    both = item.with_ends(tokens, (7, 8))
    assert list(both.spans(0, 20)) == [(1, 3), (6, 2)] and list(item.spans(0, 20)) == [(2, 2), (6, 1)]
    assert list(both.spans(0, 2)) == [(1, 1)] and list(both.spans(7, 8)) == [(7, 1)] and list(both.spans(8, 9)) == []
    assert keys_of(tokens, [both], 0) == [1, ("", 7), ("d", 0), ("d", 1), 5, 5, ("d", 2), ("", 8), 7, 8]
    assert keys_of(tokens[7:], [both], 7, "@2") == [("", 8), 7, 8]
