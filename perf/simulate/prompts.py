"""Token ids of simulated prompts: prompts share as long a prefix as their workload says, and nothing else."""

from __future__ import annotations

import random
from functools import lru_cache
from itertools import chain

from ..workload.request import TraceRequest

_MOST_BLOCKS = 1 << 14  # that are kept, of some hundred tokens each


def make_prompt(request: TraceRequest, vocab_size: int) -> list[int]:
    """Return a request's token ids: by its `hash_ids`, block by block, or else ids that no other request has.

    Blocks of other ids, and prompts of other requests, differ from their first tokens on, up to a chance in 2^16 for
    every token.
    """
    if not request.hash_ids:
        return _tokens(f"request {request.id}", request.prompt_tokens, vocab_size)
    blocks = (_block(each, request.hash_block_tokens, vocab_size) for each in request.hash_ids)
    tokens = list(chain.from_iterable(blocks))
    del tokens[request.prompt_tokens :]
    # A trace with scaled-up lengths has fewer ids than blocks: no other request has the tokens beyond them.
    return tokens + _tokens(f"request {request.id}", request.prompt_tokens - len(tokens), vocab_size)


@lru_cache(maxsize=_MOST_BLOCKS)
def _block(hash_id: int, count: int, vocab_size: int) -> list[int]:
    return _tokens(f"block {hash_id}", count, vocab_size)


def _tokens(name: str, count: int, vocab_size: int) -> list[int]:
    drawn = memoryview(random.Random(name).randbytes(2 * count)).cast("H")
    return [token % vocab_size for token in drawn]
