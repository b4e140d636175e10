"""Recent answers of adapters, in which proposals for their next requests are looked up.

Tests: tests/core/speculation/test_answer_cache.py.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from ..requests.request import Request
from ..requests.types import FinishReason
from .ngram_table import BREAK, LENGTHS, MOST_SLOTS, NgramTable

LEAD = max(LENGTHS)
"""Tokens of the prompt's end that are kept before an answer, so that the beginning of the answer can be found."""

FEWEST_TOKENS = 64
"""The least that a text counts: its tables have memory, too."""

_Key = tuple[int | None, str, str]
"""An adapter's version, None for the base model; the tenant and the cache salt, whatever their names are."""


class AnswerCache:
    """Keeps the last answers by adapter version, tenant and cache salt, of at most `most_tokens` tokens in all.

    Only requests of the same version, tenant and salt see an answer: to others, a fast answer would reveal it. The
    answers of the version, tenant and salt that were used least recently are dropped first. A token takes 4 bytes here
    and at most 16 in the tables.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most = most_tokens
        self._most_each = min(most_tokens // 2, MOST_SLOTS)
        self._texts: OrderedDict[_Key, _Texts] = OrderedDict()
        self.num_tokens = 0
        """Tokens that all kept answers count as."""

    def add(self, request: Request) -> None:
        """Keep the answer of a request that ends, unless it ends in an error. A stop string ends it by an abort."""
        answer = request.token_ids[max(0, request.num_prompt_tokens - LEAD) :]
        is_answer = request.params.pooling is None and request.num_output_tokens > 1
        if request.finish_reason is FinishReason.ERROR or not is_answer:
            return
        key = _key_of(request)
        texts = self._texts.pop(key, None) or _Texts()
        self.num_tokens -= texts.num_tokens
        texts.add(answer[-self._most_each + 1 :], self._most_each)
        self.num_tokens += texts.num_tokens
        self._texts[key] = texts
        while self.num_tokens > self._most:
            _, oldest = self._texts.popitem(last=False)
            self.num_tokens -= oldest.num_tokens

    def tables(self, request: Request) -> Sequence[NgramTable]:
        """The texts that a request's proposals may come from, the newest first."""
        texts = self._texts.get(key := _key_of(request))
        if texts is None:
            return ()
        self._texts.move_to_end(key)
        return texts.tables

    def drop_version(self, version: int) -> None:
        """Forget the answers of an adapter's version."""
        for key in [key for key in self._texts if key[0] == version]:
            self.num_tokens -= self._texts.pop(key).num_tokens


class _Texts:
    """Answers of one version, tenant and salt, in two lists: when the new one is full, the old one is dropped."""

    def __init__(self) -> None:
        self.tables: list[NgramTable] = []

    @property
    def num_tokens(self) -> int:
        return sum(max(FEWEST_TOKENS, len(table.tokens)) for table in self.tables)

    def add(self, answer: list[int], most: int) -> None:
        """most: tokens of a list."""
        if not self.tables or len(self.tables[0].tokens) + 1 + len(answer) > most:
            self.tables = [NgramTable(array("i")), *self.tables[:1]]
        newest = self.tables[0]
        assert isinstance(newest.tokens, array)
        newest.tokens.extend((BREAK, *answer))
        newest.insert(len(newest.tokens))


def _key_of(request: Request) -> _Key:
    version = None if request.adapter is None else request.adapter.version
    return version, request.tenant, request.cache_salt
