"""Blocks of positions that see each other: where chunks and cached prefixes end."""

from __future__ import annotations

import pytest

from chorus.core.requests.blocks import NO_BLOCKS, Blocks, CutBlock, PromptBlocks, blocks_of, spans_of
from chorus.core.requests.media import MediaItem
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams


def item(*runs: tuple[int, int], digest: str = "a") -> MediaItem:
    return MediaItem(b"", digest, runs)


BLOCKS = PromptBlocks(((4, 10), (12, 20)))


def test_blocks_are_runs_of_images_and_runs_next_to_each_other_are_one() -> None:
    media = (item((4, 3), (9, 2)), item((11, 5)))
    assert blocks_of(Blocks.IMAGES, range(30), media).spans == ((4, 7), (9, 16))
    assert blocks_of(Blocks.IMAGES, range(30), ()) is NO_BLOCKS
    assert blocks_of(None, range(30), media) is NO_BLOCKS
    for found in (media, ()):
        assert blocks_of(Blocks.PROMPT, range(30), found).spans == ((0, 30),)


def test_no_chunk_ends_within_a_block() -> None:
    for start in (0, 2, 4, 10, 11, 12, 20, 25):
        for count in range(1, 30):
            end = start + BLOCKS.chunk(start, count)
            assert end > start and not any(first < end < last for first, last in BLOCKS.spans)
            at_block = next((last for first, last in BLOCKS.spans if first == start), 0)
            assert end <= max(start + count, at_block)


def test_chunks_are_as_long_as_they_may_be() -> None:
    assert [BLOCKS.chunk(0, count) for count in (3, 4, 5, 9, 10, 12, 13, 20)] == [3, 4, 4, 4, 10, 12, 12, 20]
    assert [BLOCKS.chunk(4, count) for count in (1, 6, 7)] == [6, 6, 7]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_cached_pages_end_in_no_block(size: int) -> None:
    for pages in range(12):
        found = BLOCKS.cached(pages, size)
        assert 0 <= found <= pages
        inside = [any(first < n * size < last for first, last in BLOCKS.spans) for n in range(pages + 1)]
        assert not inside[found] and all(inside[found + 1 :])


def test_spans_of_a_step() -> None:
    before, behind = PromptBlocks(((2, 5),)).of(1, 7)
    assert before.tolist() == [0, 0, 1, 2, 0, 0] and behind.tolist() == [0, 2, 1, 0, 0, 0]
    found = spans_of([(NO_BLOCKS, 5, 6), (PromptBlocks(((2, 5),)), 2, 5)])
    assert found is not None and found.behind.tolist() == [0, 2, 1, 0]
    assert spans_of([(PromptBlocks(((2, 5),)), 5, 9), (NO_BLOCKS, 0, 3)]) is None


@pytest.mark.parametrize(("start", "end"), [(3, 8), (0, 3), (3, 4)])
def test_a_part_of_a_block_is_an_error(start: int, end: int) -> None:
    with pytest.raises(CutBlock, match="see each other"):
        PromptBlocks(((2, 5),)).of(start, end)


def prefixed(tokens: list[int], digest: str, answer: int = 0) -> Request:
    request = Request("x", tokens, RequestParams(), media=(item((0, 2), digest=digest),))
    request.blocks = blocks_of(Blocks.PROMPT, tokens, request.media)
    request.token_ids += [7] * answer
    return request


def test_tokens_of_a_whole_prompt_are_told_apart_by_all_of_it() -> None:
    one = prefixed([1, 1, 5, 6], "a", answer=2)
    keys = one.keys()
    assert keys[4:] == [7, 7] and len({*keys[:4]}) == 4
    assert prefixed([1, 1, 5, 6], "a").keys() == keys[:4]
    for other in (prefixed([1, 1, 5, 6, 7], "a"), prefixed([1, 1, 5, 8], "a"), prefixed([1, 1, 5, 6], "b")):
        assert not {*other.keys()} & {*keys[:4]}
    assert one.keys(3, 5) == keys[3:5] and one.keys(5) == keys[5:]
