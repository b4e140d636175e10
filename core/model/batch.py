"""A step's inputs as tensors, passed down `forward`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

import torch

from ..requests.types import ScheduledRow
from .lora_state import StepLora
from .sampler import following_tokens


class RowPlan(Protocol):
    """A step's rows as a model's attention takes them: `Attention`, or `NativeRows`."""

    def plan(self, qo_indptr: Sequence[int], page_table: torch.Tensor, kv_lens: Sequence[int]) -> None: ...


P = TypeVar("P", bound=RowPlan, covariant=True)
L = TypeVar("L", bound=StepLora, covariant=True)


class Way(StrEnum):
    """Multiplier of rows with weights.

    LIBRARY: cuBLAS on a GPU. SMALL: our kernel, for at most `small_gemm_schedule.MAX_ROWS` rows in 16 bits, with the
    activation behind the product where there is one. EXPANDED: as SMALL, and adapters are expanded in the same launch,
    so that the activation stays in it.
    """

    LIBRARY = "library"
    SMALL = "small"
    EXPANDED = "expanded"


#: Ways of a step's products: of each group of projections in a layer (`lora_state`), and behind them of the logits.
Ways = tuple[Way, ...]

BY_LIBRARY: Ways = (Way.LIBRARY,) * 5


@dataclass(slots=True)
class StepBatch(Generic[P, L]):
    """Inputs of a forward pass, with attention and adapters in the form that the model takes.

    token_ids, positions, page, offset: `[tokens]` int64; (page, offset) is where a token's KV is written.
    logit_tokens: `[logits]` int64, indices of the tokens to compute logits for; None: every token. score_tokens:
    `[scores]` int64, indices of the tokens for which logits are computed in slices after the step. lora: None when no
    row uses an adapter. merged: use the shadow weights, with an adapter merged into them. ways: backend of each
    product; other than the library only for few tokens on a GPU.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    page: torch.Tensor
    offset: torch.Tensor
    attention: P
    lora: L | None
    logit_tokens: torch.Tensor | None = None
    score_tokens: torch.Tensor | None = None
    merged: bool = False
    ways: Ways = BY_LIBRARY


def ragged_batch(
    rows: list[ScheduledRow],
    block_tokens: int,
    dummy_page: int,
    attention: P,
    lora: L | None,
    merged: bool = False,
) -> StepBatch[P, L]:
    """The unpadded batch of a step that holds prefill chunks; plans `attention` for it."""
    token_ids, positions, page, offset, qo_indptr, score_tokens = [], [], [], [], [0], []
    for row in rows:
        token_ids += row.tokens
        span = range(row.start, row.kv_len)
        positions += span
        page += [row.pages[position // block_tokens] for position in span]
        offset += [position % block_tokens for position in span]
        if row.scores_prompt:
            score_tokens += range(qo_indptr[-1], qo_indptr[-1] + len(following_tokens(row)))
        qo_indptr.append(len(token_ids))
    columns = torch.tensor((token_ids, positions, page, offset), dtype=torch.long)
    width = max(len(row.pages) for row in rows)
    table = torch.tensor([row.pages + [dummy_page] * (width - len(row.pages)) for row in rows], dtype=torch.long)
    attention.plan(qo_indptr, table, [row.kv_len for row in rows])
    return StepBatch(
        *columns.unbind(0),
        attention=attention,
        lora=lora,
        logit_tokens=torch.tensor([end - 1 for end in qo_indptr[1:]], dtype=torch.long),
        score_tokens=torch.tensor(score_tokens, dtype=torch.long) if score_tokens else None,
        merged=merged,
    )
