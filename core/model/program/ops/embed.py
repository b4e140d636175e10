"""What stands before all layers.

Tests: tests/core/model/program/test_ends.py, tests/core/layers/test_gated_residual.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..op import PER_LAYER, STREAM, Op

if TYPE_CHECKING:
    from ..lowering import Lowering
    from ..torch_step import OpContext, Run, Step


@dataclass(frozen=True, slots=True)
class Embed(Op):
    """`out = table[token] · factor`, the factor as the table's dtype has it."""

    WRITES = ("out",)
    SLOTS = ("table",)

    out: str
    table: str
    factor: float = 1.0

    adapted: bool = False
    """Adapters add to the rows, and have rows of their own."""

    first_from: int | None = None
    """Tokens from this one on have the first row."""

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        import torch
        from torch.nn import functional

        index, model = at.index, at.model

        def run(step: Step) -> None:
            table, token_ids, lora = step.layers[index][self.table], step.batch.token_ids, step.batch.lora
            known = token_ids if lora is None else lora.known(token_ids)
            if self.first_from is not None:
                known = known.where(known < self.first_from, 0)
            rows = functional.embedding(known, table)
            if lora is not None and self.adapted:
                lora.embed(rows, token_ids)
            if self.factor != 1.0:
                rows = rows * float(torch.tensor(self.factor, dtype=rows.dtype))
            step.names[self.out] = rows.to(model.dtype)

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`. The decoder itself has those to which adapters add."""
        from ..native_binding import weight_of

        out, table = to.held_as(to.written(at)), weight_of(self.table)
        rows = self.first_from
        own = {"width": out.value.width, "factor": self.factor, "table": table}
        to.emit("LookUp", out=out, rows=(lambda at: len(table(at))) if rows is None else rows, **own)

    def columns(self, given: Sequence[int], to: Lowering) -> int:
        """See `Op.columns`."""
        return to.lasting[PER_LAYER].width


@dataclass(frozen=True, slots=True)
class AddPositions(Op):
    """`x += table[position]`."""

    READS = ("x",)
    WRITES = ("x",)
    SLOTS = ("table",)

    x: str
    table: str = "positions"

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        from torch.nn.functional import embedding

        index = at.index

        def run(step: Step) -> None:
            step.names[self.x] += embedding(step.batch.positions, step.layers[index][self.table])

        return run


@dataclass(frozen=True, slots=True)
class EmbedMedia(Op):
    """Rows of tokens of images and of sound, from `first` on: of a table of their own, in place of x's."""

    READS = ("x",)
    WRITES = ("out",)
    SLOTS = ("table",)

    x: str
    out: str
    first: int
    table: str = "media"

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        import torch
        from torch.nn.functional import embedding

        index = at.index

        def run(step: Step) -> None:
            table, rows = step.layers[index][self.table], step.names[self.x]
            places = step.batch.token_ids - self.first
            own = embedding(places.clamp(0, len(table) - 1), table)
            step.names[self.out] = torch.where((places >= 0)[:, None], own, rows)

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        from ..native_binding import weight_of

        to.need("OpKind.kLookUp", "embedding of tokens of images and sound")
        table, width = weight_of(self.table), to.stream.value.width
        own = {"factor": 1.0, "first": self.first, "rows": lambda at: len(table(at)), "keeps": 1, "table": table}
        to.emit("LookUp", out=to.stream, width=width, **own)

    def detail(self) -> str:
        """See `Op.detail`."""
        return f"tokens of images and sound, from {self.first:,} on: {self.table}"


@dataclass(frozen=True, slots=True)
class PlaceImages(Op):
    """Rows that an encoder made of images, written to x in their tokens' places; rounded as the table's are."""

    READS = ("x",)
    WRITES = ("x",)
    SLOTS = ("table",)

    x: str
    table: str

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        index = at.index

        def run(step: Step) -> None:
            if (media := step.batch.media) is not None:
                x = step.names[self.x]
                rows = media.part(0, x.shape[1]).to(x.device, step.layers[index][self.table].dtype)
                x.index_copy_(0, media.places.to(x.device), rows.to(x.dtype))

        return run

    def detail(self) -> str:
        """See `Op.detail`."""
        return "rows that the vision tower made, in their tokens' places"


@dataclass(frozen=True, slots=True)
class ScaleEmbeddings(Op):
    """`x = (x + b) · w`, in place. scales: w and b `[2, hidden]`."""

    READS = ("x",)
    WRITES = ("x",)
    SLOTS = ("scales",)
    LACKS = "learned factor of embeddings"

    x: str = STREAM
    scales: str = "embed_scales"

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        index = at.index

        def run(step: Step) -> None:
            scale, bias = step.layers[index][self.scales]
            step.names[self.x].add_(bias).mul_(scale)

        return run
