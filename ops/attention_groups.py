"""Attention of a model whose layers have several page groups: each group has attention of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .attention import Attention
from .attention_backend import AttentionBackend


class GroupedAttention:
    """Plans a step for every page group; a layer runs the attention of its group."""

    __slots__ = ("_groups",)

    def __init__(self, groups: Sequence[Attention]) -> None:
        self._groups = groups

    def plan(
        self,
        qo_indptr: Sequence[int],
        page_table: torch.Tensor,
        kv_lens: Sequence[int],
        tables: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """See `PagedAttention.plan`. page_table: `[rows, max_pages]`, a page of each group for every block."""
        count = len(self._groups)
        if count == 1:
            self._groups[0].plan(qo_indptr, page_table, kv_lens, tables)
            return
        for index, attention in enumerate(self._groups):
            attention.plan(qo_indptr, page_table[:, index::count], kv_lens)

    def of(self, group: int) -> Attention:
        """The attention of a group."""
        return self._groups[group]


class GroupedBackend:
    """The backends of a model's page groups, as one."""

    def __init__(self, backends: Sequence[AttentionBackend]) -> None:
        """backends: of each group; groups with equal windows may share one."""
        self._backends = backends
        distinct = list(dict.fromkeys(backends))
        self.name = ", ".join(dict.fromkeys(each.name for each in distinct))
        self.reason = "; ".join(dict.fromkeys(each.reason for each in distinct))
        self.fix = "; ".join(dict.fromkeys(each.fix for each in distinct if each.fix))
        self.captures = all(each.captures for each in distinct)

    def ragged(self) -> GroupedAttention:
        """See `AttentionBackend.ragged`."""
        return GroupedAttention([each.ragged() for each in self._backends])

    def decode(self, bucket: int) -> GroupedAttention:
        """See `AttentionBackend.decode`."""
        return GroupedAttention([each.decode(bucket) for each in self._backends])
