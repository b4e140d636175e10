"""Sinks: experts that every token goes to, by weights of the router that chooses the others (Inkling).

Tests: tests/core/layers/test_sink_experts.py
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from ...config_json import UnsupportedModel
from ...specs.feed_forward import Experts, Routing, Scoring

#: Fields of such a mixture that have an effect.
_BESIDE_SINKS = {"count", "size", "routing", "activation", "sinks", "has_fixed_router"}


@dataclass(frozen=True, kw_only=True)
class SinkExperts(Experts):
    """A mixture with sinks: the router scores them, too, and all weights are sigmoids divided by the sum of those of
    the token's experts and of all sinks. Such a router has a learned factor of all weights, one number.
    """

    sinks: int
    """Further experts, of the same width, that every token goes to."""

    def __post_init__(self) -> None:
        if others := self._others():
            raise UnsupportedModel(f"a router that weighs experts of all tokens has {', '.join(others)} of others")

    def _others(self) -> list[str]:
        """Fields that such a mixture doesn't compute, and that differ from what it does."""
        wanted = {"scoring": Scoring.SIGMOID, "renormalised": True}
        free = {"per_token", "factor", "corrected"}
        routing = {each.name: wanted.get(each.name, each.default) for each in fields(Routing) if each.name not in free}
        own = {each.name: each.default for each in fields(self) if each.name not in _BESIDE_SINKS}
        return [
            *(f"routing.{name}" for name, value in routing.items() if getattr(self.routing, name) != value),
            *(name for name, value in own.items() if getattr(self, name) != value),
        ]

    @property
    def of_sinks(self) -> Experts:
        """The mixture that all sinks are."""
        return Experts(self.sinks, self.size, Routing(self.sinks), self.activation)

    @property
    def active_size(self) -> int:
        """See `Experts.active_size`."""
        return (self.routing.per_token + self.sinks) * self.size

    @property
    def for_all(self) -> str:
        """See `Experts.for_all`."""
        return f", and {self.sinks} for all"
