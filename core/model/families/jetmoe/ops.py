"""Experts of queries and of outputs, and biases of what experts add up to (JetMoE).

Tests: tests/core/layers/test_query_experts.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .....ops.moe.routing import Routing
from ...program.layer_program import Kept
from ...program.op import Op, Read
from ...program.ops.moe import chosen_of
from ...specs.attention import AttentionSpec

if TYPE_CHECKING:
    from ...program.torch_step import OpContext, Run, Step


@dataclass(frozen=True, slots=True)
class QueryExperts:
    """A mixture of attention heads (arXiv 2210.05144), as JetMoE has it.

    A router chooses some experts for a token. Each has a query for every head of keys and values, and takes what these
    queries attend to:

        y = Σ weight_e · output_e(attended(query_e(x))) + bias

    So attention has as many heads as experts are chosen times heads of keys and values.
    """

    count: int
    routing: Routing

    @property
    def per_token(self) -> int:
        """Experts of a token."""
        return self.routing.per_token


@dataclass(frozen=True, slots=True)
class QueriesOfExperts(Op):
    """Queries of the experts that logits choose, `[tokens, heads · head_dim]`: those of one head of keys and values
    side by side.

    chosen: `[tokens, per_token]`, the experts of each token, and their weights.
    """

    READS = ("x", "logits")
    WRITES = ("out", "chosen", "weights")
    SLOTS = ("experts",)
    LACKS = "experts of queries"

    x: Read
    logits: Read
    out: str
    chosen: str
    weights: str
    attention: AttentionSpec
    spec: QueryExperts
    experts: str = "query_experts"

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        from ...nvtx_spans import span

        index, mixer, spec = at.index, self.attention, self.spec
        read, logits_of = at.reader(self.x), at.reader(self.logits)
        by_head = (spec.per_token, mixer.num_kv_heads, mixer.head_dim)
        chosen_out, weights_out = (
            Kept(self.chosen, by_head[:1], is_index=True),
            Kept(self.weights, by_head[:1], is_wide=True),
        )

        def run(step: Step) -> None:
            names, experts = step.names, step.layers[index][self.experts]
            with span("attn.queries"):
                found = experts.choose(logits_of(names).float().contiguous(), spec.routing)
                q = experts.queries_of(read(names), found.experts)
                names[self.out] = q.view(-1, *by_head).transpose(1, 2).flatten(1)
            chosen, weights = step.kept.get(chosen_out), step.kept.get(weights_out)
            names[self.chosen] = found.experts if chosen is None else chosen.copy_(found.experts)
            names[self.weights] = found.weights if weights is None else weights.copy_(found.weights)

        return run

    def detail(self) -> str:
        """See `Op.detail`."""
        return chosen_of(self.spec, "queries")


@dataclass(frozen=True, slots=True)
class OutputsOfExperts(Op):
    """The weighted sum of what chosen experts make of attention's output x."""

    READS = ("x", "chosen", "weights")
    WRITES = ("out",)
    SLOTS = ("experts",)

    x: str
    chosen: str
    weights: str
    out: str
    attention: AttentionSpec
    spec: QueryExperts
    experts: str = "query_experts"

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        from ...nvtx_spans import span

        index, mixer, spec = at.index, self.attention, self.spec
        by_head = (mixer.num_kv_heads, spec.per_token, mixer.head_dim)

        def run(step: Step) -> None:
            names, experts = step.names, step.layers[index][self.experts]
            with span("attn.outputs"):
                rows = names[self.x].reshape(-1, *by_head).transpose(1, 2).flatten(2).flatten(0, 1)
                names[self.out] = experts.outputs_of(rows, names[self.chosen].long(), names[self.weights])

        return run

    def detail(self) -> str:
        """See `Op.detail`."""
        return chosen_of(self.spec, "outputs")


@dataclass(frozen=True, slots=True)
class AddBias(Op):
    """`x + bias`, in x's place; before a sum over ranks, of which the first alone has a bias."""

    READS = ("x",)
    WRITES = ("x",)
    SLOTS = ("bias",)
    IN_PLACE = True
    LACKS = "mixture with a bias of its sum"

    x: str
    bias: str

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        index = at.index

        def run(step: Step) -> None:
            if (bias := step.layers[index].get(self.bias)) is not None:
                step.names[self.x].add_(bias)

        return run
