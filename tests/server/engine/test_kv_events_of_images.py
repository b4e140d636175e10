"""KV events of blocks that hold rows of images."""

from __future__ import annotations

from chorus.core.kv_events import Stored
from chorus.memory.pages.block import Key
from chorus.server.engine.kv_publisher import IMAGE_TOKENS, KvBatches


def stored(*tokens: Key) -> dict:
    (event,) = KvBatches("m", 2).events([Stored(1, None, tokens, None, 0, None, ("", ""))])
    return event


def test_a_row_is_a_number_that_no_vocabulary_has() -> None:
    one, other = stored(5, ("digest", 0)), stored(5, ("another", 0))
    assert one["token_ids"][0] == 5 and IMAGE_TOKENS <= one["token_ids"][1] < 1 << 32
    assert one["token_ids"][1] != other["token_ids"][1] != stored(5, ("another", 1))["token_ids"][1]
    assert len({str(each["block_hashes"]) for each in (one, other, stored(5, 6))}) == 3
    assert one == stored(5, ("digest", 0))
