"""Manifest of an adapter: everything but its weights.

Tests: tests/memory/files/test_adapter_format.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..pages.adapter_layout import AdapterPart, VectorTarget
from ..pages.projections import Projections
from .error import AdapterFormatError
from .module_paths import ModulePaths
from .peft_form import PeftForm
from .peft_names import STEM
from .score_head import ScoreHead
from .tensor_file import FileIdentity, TensorSpans
from .tokens.added_tokens import OwnTokens
from .tower_tensors import TowerTensor


@dataclass(frozen=True, slots=True)
class AdapterManifest:
    """Manifest of an adapter: everything but its weights.

    file_size, mtime_ns, identity: the state of the weights file that was inspected. places: of each part's layers'
    targets' A and B, in this order; None where there is no file. stem: where the file has the model's layers, if not in
    `model`; empty for a model without a head. content_hash: of what it computes, whatever the files look like, and
    no_effect: whether that is nothing; None until its weights have been read for it. base_model: what it says it was
    trained on, and names_other_base: whether that is not the model that is served. modules: where its base model has
    the projections; None where there is no file.
    """

    path: Path
    parts: tuple[AdapterPart, ...]
    file_size: int = 0
    mtime_ns: int = 0
    tensor_spans: TensorSpans | None = None
    identity: FileIdentity | None = None
    stem: str = STEM
    content_hash: str | None = None
    no_effect: bool | None = None
    base_model: str | None = None
    names_other_base: bool = False
    modules: ModulePaths | None = None

    num_left_out: int = 0
    """Tensors of the file that have no effect on text."""

    untrained: tuple[str, ...] = ()
    """Projections that its configuration targets and the file does not train: of "all-linear" those that it has no
    tensors of, and those of `bypassed`.
    """

    dropped: tuple[str, ...] = ()
    """Tensors of the file that are whole modules of the base model, as they are in it."""

    head: ScoreHead | None = field(default=None, compare=False)
    """Its score head."""

    invocation_tokens: tuple[int, ...] = ()
    """See `AdapterConfig.invocation_tokens`."""

    vectors: tuple[VectorTarget, ...] = ()
    """The modules whose outputs it scales and shifts, in the order of layers and projections."""

    tokens: OwnTokens | None = None
    """Its tokenizer, if that has tokens that the base model's lacks."""

    num_tokens: int = 0
    """One more than the last token of its head, if it adds tokens to the base model's vocabulary; 0: it adds none."""

    added: frozenset[int] = frozenset()
    """Tokens beyond the base model's vocabulary that a prompt of it may have."""

    form: str = PeftForm.title
    """How its files have it, for texts."""

    is_larger: bool = False
    """True if its A and B are computed, and may be larger than the tensors that they are computed from."""

    tower: tuple[TowerTensor, ...] = ()
    """Its tensors in a vision tower that is served."""

    sources: tuple[tuple[AdapterManifest, float], ...] = ()
    """The adapters that it is composed of, each with a scale; empty: it has files of its own."""

    @property
    def why_alone(self) -> str | None:
        """Why it can't be one of several adapters of a request; None if it can."""
        if self.invocation_tokens:
            return "is an activated LoRA (alora_invocation_tokens), which can't be composed with others"
        if self.vectors:
            return "scales or shifts outputs (DoRA, biases or IA³), which can't be composed with others"
        if self.head is not None:
            return "has a score head, which can't be composed with others"
        if self.tokens is not None:
            return "has a tokenizer with tokens of its own, which can't be composed with others"
        if any(part.token_ids for part in self.parts):
            return "has trained token rows, which can't be composed with others"
        if self.tower:
            return "changes the vision tower, which can't be composed with others"
        if any(part.experts for part in self.parts):
            return "changes experts, which can't be composed with others"
        return None

    @property
    def num_values(self) -> int:
        """Elements of A and B as they are served, which may be many more than the file has."""
        table = None if self.modules is None else self.modules.projections
        if table is None:
            return 0
        return sum(part.num_slabs * sum(sum(table[name].dims) for name in part.targets) for part in self.parts)

    def check_size(self, max_bytes: int | None) -> None:
        """Raise AdapterFormatError for computed A and B that take more bytes in 16 bits; None: they may."""
        if max_bytes is not None and self.is_larger and (size := 2 * self.num_values) > max_bytes:
            raise AdapterFormatError(
                f"{self.path}: its {self.form} becomes {size} bytes of LoRA, and {max_bytes} are allowed; train with "
                "smaller factors, or raise max_adapter_bytes, of uploads, or adapter_source_bytes, of fetched adapters"
            )

    @property
    def rank(self) -> int:
        """The largest rank of any module."""
        return max((part.rank for part in self.parts if not part.token_ids), default=0)

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the modules that it changes in any layer."""
        found = dict.fromkeys(name for part in self.parts for name in part.targets)
        found |= dict.fromkeys(target.module for target in self.vectors)
        return tuple(found if self.modules is None else sorted(found, key=self.modules.projections.id))

    @property
    def unmerged_targets(self) -> tuple[str, ...]:
        """Those of `targets` that are never merged; see `Projections.unmerged`."""
        if self.modules is None or not self.modules.projections.unmerged:
            return ()
        return tuple(name for name in self.targets if name in self.modules.projections.unmerged)

    def num_params(self, projections: Projections) -> int:
        rows = sum(part.num_slabs * sum(sum(projections[name].dims) for name in part.targets) for part in self.parts)
        return rows + sum(sum(target[2:]) * projections[target.module].outputs for target in self.vectors)
