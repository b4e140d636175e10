"""What models and tenants have used, as rows of the operator's page.

Tests: tests/server/ui/test_usage_rows.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...memory.adapters.adapter_costs import REST, AdapterCost
from ..engine.metric_families import label
from ..engine.top_names import OTHER
from ..engine.usage import (
    CACHED,
    GENERATED,
    NOTHING,
    PAGE_SECONDS,
    PROMPT,
    QUEUE,
    TPOT,
    TTFT,
    Usage,
    num_errors,
    num_requests,
)

MAX_TENANTS = 5000
"""Most tenants with a row, those that have used the most tokens."""

Rows = dict[Any, Sequence[Any]]
"""Rows of a table by key; a row begins with its key."""

UsageTables = Callable[[Sequence[AdapterCost]], dict[str, Rows]]


def usage_tables(
    usage: Usage, budgets: Callable[[], Mapping[str, float]], costs: Sequence[AdapterCost]
) -> dict[str, Rows]:
    """Tables of models and of tenants, by name.

    A row: name, requests, errors, tokens in, cached and out, mean seconds in the queue, to the first token and per
    further token, and page-seconds of KV; a model's also has page-seconds and mean load seconds of its weights, a
    tenant's the tokens left of its budget.
    """
    models = usage.by_model()
    weights = {
        label(one.name) if one.name != REST else OTHER: one for one in costs if one.page_seconds or any(one.loads)
    }
    by_model: Rows = {
        name: (*_row(name, models.get(name, NOTHING)), *_weights(weights.get(name)))
        for name in [*models, *(weights.keys() - models.keys())]
    }
    tenants, left = usage.by_tenant(), {label(name): tokens for name, tokens in budgets().items()}
    most = sorted(tenants, key=lambda name: -tenants[name][PROMPT] - tenants[name][GENERATED])[:MAX_TENANTS]
    by_tenant: Rows = {name: (*_row(name, tenants[name]), _rounded(left.get(name))) for name in most}
    return {"models": by_model, "tenants": by_tenant}


def _row(name: str, row: np.ndarray) -> tuple[Any, ...]:
    return (
        name,
        num_requests(row),
        num_errors(row),
        int(row[PROMPT]),
        int(row[CACHED]),
        int(row[GENERATED]),
        *(_rounded(times.mean(row)) for times in (QUEUE, TTFT, TPOT)),
        _rounded(row[PAGE_SECONDS]),
    )


def _weights(cost: AdapterCost | None) -> tuple[float | None, float | None]:
    if cost is None:
        return None, None
    loads = sum(cost.loads)
    return _rounded(cost.page_seconds), _rounded(cost.load_seconds / loads) if loads else None


def _rounded(value: float | None) -> float | None:
    """Three digits: a row that changes only behind them need not be sent again."""
    return None if value is None else float(f"{value:.3g}")
