"""Reads a checkpoint's weights part by part."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ....memory.pages.projections import UnitRows
from ....ops.elementwise.float8_kv import UNSCALED, KvScales
from ..checkpoints.open_checkpoint import open_checkpoint
from ..checkpoints.quantization.format import WeightFormat, rows_and_columns
from ..checkpoints.quantization.group_scaled import GroupScaled, row_chunks
from ..checkpoints.quantization.groups import part_of, stacked
from ..checkpoints.quantization.reading import REMEDY
from ..checkpoints.quantization.rounded_inputs import Float8Inputs, RoundedInputs
from ..specs.config import ModelConfig, UnsupportedModel
from .kv_scales import read_kv_scales
from .score_head import BIAS, WEIGHT
from .shard import WHOLE, Shard
from .slot import Part, part_shape
from .tensor_parts import (
    EMBED,
    LAYER,
    LM_HEAD,
    Source,
    model_part,
    model_parts,
    quantised_parts,
    sources,
    whole_matrices,
)
from .weights import Pack, Weights

logger = logging.getLogger(__name__)

#: Elements of a quantised projection that are read at a time, in multiples of so many rows: packed words hold several.
_CHUNK, _ROWS = 1 << 23, 128

#: Beginnings of names that a message has.
_NAMED = 6

#: Constants of old checkpoints: rotary frequencies, and causal masks.
_IGNORED = re.compile(
    r"\.(self_attn|attention)\.rotary_emb\.inv_freq$|\.(attention|attn)\.((masked_)?bias|causal_mask)$"
    r"|\.ple_embedding\.(layer_multipliers|ngram_heads_(vocab_sizes|offsets))$"
)


def _some(beginnings: Sequence[str]) -> str:
    """Beginnings of names for a message."""
    named = [f"{each}*" for each in beginnings[:_NAMED]]
    return ", ".join([*named, "…"] if len(beginnings) > _NAMED else named)


class WeightLoader(Weights):
    """Reads a checkpoint one part at a time, so that memory holds the kept parts and little more than one projection.

    advance: called with the bytes read. Raises UnsupportedModel when made if a tensor is missing, of another shape or
    unknown: an unused weight means that the model differs from its configuration.
    """

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        dtype: torch.dtype,
        advance: Callable[[int], None] = lambda _: None,
        shard: Shard = WHOLE,
    ) -> None:
        super().__init__(config, dtype, shard)
        self.advance = advance
        self._scratch = torch.empty(0, dtype=dtype)
        self._flat: dict[str, tuple[int, ...]] = {}  # matrices that are a stack's, and the shapes of stacks
        wanted = {source.name for source in sources(config, ()).values()}
        self._checkpoint = open_checkpoint(directory, wanted, config.tensors.joined)
        self._sources = sources(config, self._checkpoint)
        if config.tensors.by_shape:
            self._sources |= self._not_transposed()
        if config.tie_word_embeddings and self._has(self._sources[LM_HEAD].name):
            if self._sources[EMBED].name not in self._checkpoint:  # tied weights may be stored under either name
                self._embed_name = LM_HEAD
                del self._tensors[EMBED]
            self._tensors[LM_HEAD] = model_part(LM_HEAD, (config.vocab_size, config.hidden_size))
        self._stored = self._stored_shapes()
        ends = tuple(f".{part}" for part in config.tensors.wrapped)
        self._wrapped = {self._sources[part].name for part in self._tensors if part.endswith(ends)}
        self._quantised = self._find_quantised()
        self._checkpoint.check({name: self._given(name) for name in self._stored if name not in self._quantised})
        self._check_unused()
        self._num_bytes = {
            name: sum(self._checkpoint[each].num_bytes for each in self._quantised.get(name, (name,)))
            for name in self._stored
        }

    def _has(self, name: str) -> bool:
        """True if the checkpoint has a weight, plain or quantised."""
        how = self._config.weight_format
        return name in self._checkpoint or (how is not None and how.stores(self._checkpoint, name))

    def _find_quantised(self) -> dict[str, Collection[str]]:
        """Quantised projections → the checkpoint's tensors that each consists of."""
        how = self._config.weight_format
        if how is None:
            return {}
        if self._config.tensors.inputs_first:
            raise UnsupportedModel(
                f"{self._checkpoint.directory}: quantised checkpoints of a family whose matrices are [in, out] are not "
                "supported; use the original checkpoint, with --quantization"
            )
        covered = {*quantised_parts(self._config), LM_HEAD, *whole_matrices(self._config)}
        parts = self._tensors.keys() - (model_parts(self._config).keys() - covered)
        matrices = {self._sources[part].name for part in parts if part.endswith(".weight")}
        embed = self._sources[self._embed_name].name
        if embed not in matrices and how.stores(self._checkpoint, embed):
            raise UnsupportedModel(
                f"{self._checkpoint.directory}: the token embeddings, tensor {embed}, are quantised, which is not "
                "supported; use a checkpoint with plain embeddings"
            )
        others = {self._sources[part].name for part in parts if part not in covered}
        try:
            return {
                name: how.check(self._checkpoint, name, shape)
                for name, shape in self._stored.items()
                if name in matrices
                and len(shape) in how.dimensions
                and (how.stores if name in others else how.covers)(self._checkpoint, name)
            }
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{error}; {REMEDY}") from None

    def _stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the checkpoint's tensors; the rows of parts in one tensor add up."""
        shapes: dict[str, tuple[int, ...]] = {}
        experts: dict[str, set[int]] = {}
        transposed: set[str] = set()
        for part, tensor in self._tensors.items():
            source, (rows, *others) = self._sources[part], tensor.shape
            before = shapes.get(source.name, (0,))[0]
            shapes[source.name] = (before + rows, *others)
            if source.expert is not None:
                experts.setdefault(source.name, set()).add(source.expert)
            if source.transposed:
                transposed.add(source.name)
        for name, numbers in experts.items():
            rows, *others = shapes[name]
            matrix = (rows // len(numbers), *others)
            count = len(numbers) + self._num_unread(name)
            shapes[name] = (count, *(matrix[::-1] if name in transposed else matrix))
            if self._config.tensors.flat:
                self._flat[name] = shapes[name]
        if (embed := self._sources[EMBED].name) in shapes:  # rows beyond the head's are not read
            rows, *others = shapes[embed]
            shapes[embed] = (rows + self._config.further_embeddings, *others)
        if LM_HEAD in self._tensors and self._config.further_logits:
            rows, *others = shapes[head := self._sources[LM_HEAD].name]
            shapes[head] = (rows + self._config.further_logits, *others)
        return shapes | {name: shapes[name][::-1] for name in transposed - experts.keys()}

    def _num_unread(self, stack: str) -> int:
        """Experts of a stack of gates or ups that have no output matrix, and are not read."""
        experts = self._config.experts
        return 0 if experts is None or stack.endswith("down_proj") else experts.num_stored - experts.count

    def _not_transposed(self) -> dict[str, Source]:
        """The sources of parts in stacks whose shape says that they are not transposed."""
        shapes = {name: (count, *rest[::-1]) for name, (count, *rest) in self._stored_shapes().items()}
        return {
            part: source._replace(transposed=False)
            for part, source in self._sources.items()
            if source.transposed
            and source.name in self._checkpoint
            and self._checkpoint[source.name].shape == shapes[source.name]
        }

    def _given(self, name: str) -> tuple[int, ...]:
        """The shape that a tensor must have: one number may have no dimension, and some vectors are matrices."""
        if (stack := self._flat.get(name)) is not None:
            return (stack[0] * stack[1], *stack[2:])
        shape, given = self._stored[name], self._checkpoint[name].shape if name in self._checkpoint else None
        if given is None or len(shape) != 1 or math.prod(given) != shape[0]:
            return shape
        return given if not given or name in self._wrapped else shape

    def _is_elsewhere(self, name: str) -> bool:
        """True for a tensor that the decoder does not use: constants of old checkpoints, and a score head."""
        return _IGNORED.search(name) is not None or (self._config.is_classifier and name in (WEIGHT, BIAS))

    def _check_unused(self) -> None:
        used, left_out = {self._sources[part].name for part in self._tensors}, list[str]()
        used |= {each for names in self._quantised.values() for each in names}
        how, scales = self._config.weight_format, 0
        for name in self._checkpoint.names():
            if name in used:
                continue
            if name.startswith(self._config.tensors.left_out):
                left_out.append(name)
            elif how is not None and how.left_out(self._checkpoint, name):
                scales += 1
            elif not self._is_elsewhere(name):
                raise UnsupportedModel(f"{self._checkpoint[name].path}: tensor {name} has no place in this model")
        if scales:
            logger.info(
                "%d scales of activations, and of the KV cache unless it is in FP8, and biases of zeros are left out",
                scales,
            )
        self._log_left_out(left_out)

    def _log_left_out(self, names: Sequence[str]) -> None:
        tower = self._config.tower  # where images are served
        seeing = 0 if tower is None else sum(map(tower.has, names))
        if seeing:
            logger.info("%d tensors of the checkpoint are the vision tower's: the first image has them read", seeing)
        if left_out := len(names) - seeing:
            named = _some(self._config.tensors.left_out)
            logger.info("%d tensors of the checkpoint (%s) have no effect on text and are left out", left_out, named)

    def kv_scales(self) -> list[KvScales]:
        """Raises UnsupportedModel for scales that can't be used."""
        mixers = ((index, layer.attention) for index, layer in enumerate(self._config.layers))
        layers = [index for index, mixer in mixers if mixer is not None and not mixer.shares_kv]
        keys = [self._sources[f"{LAYER.format(index)}self_attn.k_proj.weight"].name for index in layers]
        found = [read_kv_scales(self._checkpoint, name.rsplit(".", 2)[0]) for name in keys]
        given = sum(each != UNSCALED for each in found)
        logger.info(
            "the KV cache is in FP8: the checkpoint has scales for %d of %d layers, others have 1", given, len(found)
        )
        return found

    @property
    def num_bytes_kept(self) -> int:
        is_twice = self._config.tie_word_embeddings and {EMBED, LM_HEAD} <= self._tensors.keys()
        again = math.prod(self._shape([LM_HEAD])) if is_twice else 0
        return super().num_bytes_kept + self._dtype.itemsize * again

    @property
    def rounds_inputs(self) -> bool:
        return super().rounds_inputs or self._asks(RoundedInputs)

    @property
    def asks_float8_inputs(self) -> bool:
        return super().asks_float8_inputs or self._asks(Float8Inputs)

    def _asks(self, kind: type) -> bool:
        """True if the form of a stored projection has inputs of this kind."""
        how = self._config.weight_format
        found = () if how is None else map(how.narrow, self._quantised)
        return any(each is not None and isinstance(each.inputs, kind) for each in found)

    @property
    def num_bytes(self) -> int:
        """Bytes to read in all."""
        return sum(self._num_bytes.values())

    def lm_head(self, embed: torch.Tensor) -> torch.Tensor:
        tied = self._tied(embed)
        if self._embed_name == LM_HEAD:
            return tied
        head = super().lm_head(embed)
        if LM_HEAD in self._tensors and self._config.tie_word_embeddings:
            if torch.equal(head, tied):
                return tied
            logger.warning("tie_word_embeddings is true, but %s differs from %s; serving both", LM_HEAD, EMBED)
        return head

    def _read(
        self, *names: str, reuse: bool = False, dtype: torch.dtype | None = None, whole: bool = False
    ) -> torch.Tensor:
        """Each is read straight into its rows of the result."""
        shape = self._shape(names, whole)
        if reuse:
            if self._scratch.numel() < shape.numel():
                self._scratch = torch.empty(0, dtype=self._dtype)  # gone before its successor comes
                self._scratch = torch.empty(shape.numel(), dtype=self._dtype)
            target = self._scratch[: shape.numel()].view(shape)
        else:
            target = torch.empty(shape, dtype=dtype or self._dtype)
        for name, share in zip(names, target.split([self._shape([name], whole)[0] for name in names]), strict=True):
            source, parts = self._sources[name], ((),) if whole else self._parts(name)
            targets = share.split([part_shape(self._tensors[name].shape, part)[0] for part in parts])
            for part, own in zip(parts, targets, strict=True):
                self._read_share(own, name, source, part)
            self._advance(name)
        return target

    def _read_share(self, target: torch.Tensor, name: str, source: Source, share: Part) -> None:
        """share: of the part, as slices; see `_rows`."""
        if source.units is None:
            self._read_part(target, source, self._rows(name, source, share))
            return
        span, rows = self._span(name, source.units, share)
        held = torch.empty((span.stop - span.start, *target.shape[1:]), dtype=target.dtype)
        self._read_part(held, source, (span, *share[1:]))
        torch.index_select(held, 0, rows, out=target)

    def _span(self, name: str, units: UnitRows, share: Part) -> tuple[slice, torch.Tensor]:
        """The rows of the checkpoint's tensor from the first to the last of a share of a part, and which of them are
        the share's.
        """
        start, stop, _ = (share[0] if share else slice(None)).indices(self._tensors[name].shape[0])
        rows = torch.tensor(units.rows()[start:stop])
        first = int(rows.min())
        return slice(first, int(rows.max()) + 1), rows - first

    def _beside(self, at: str, path: str, module: str, name: str) -> torch.Tensor | None:
        around, _, _ = self._sources[at + path].name.rpartition(f".{module}.")
        stored = f"{around}.{name}"
        return self._checkpoint.read(stored) if stored in self._checkpoint else None

    def _table(self, name: str) -> tuple[torch.Tensor, ...]:
        self._advance(name)
        return tuple(self._checkpoint.parts(self._sources[name].name))

    def _projection(self, names: Sequence[str], pack: Pack | None) -> Any:
        if pack is not None and self.plan.reads_narrow and (found := self._scaled(names, self.plan.reads)) is not None:
            return pack(found)
        return super()._projection(names, pack)

    def _expert(self, names: Sequence[str], keeps: Callable[[GroupScaled], bool] | None) -> torch.Tensor | GroupScaled:
        if keeps is not None and (found := self._scaled(names, keeps)) is not None:
            return replace(found, inputs=None)
        return super()._expert(names, keeps)

    def _scaled(self, names: Sequence[str], keeps: Callable[[GroupScaled], bool]) -> GroupScaled | None:
        """The rank's shares of projections as they are stored; None if they are not narrow values to be kept."""
        how, found = self._config.weight_format, []
        if how is None or any(self._sources[name].name not in self._quantised for name in names):
            return None
        for name in names:
            source = self._sources[name]
            for part in self._parts(name):
                matrix = self._stored_matrix(how, name, source, part)
                if matrix is None or not keeps(matrix):
                    return None
                found.append(matrix)
        if len({(matrix.bits, matrix.is_float) for matrix in found}) > 1:
            return None
        for name in names:
            self._advance(name)
        return stacked(found)

    def _stored_matrix(self, how: WeightFormat, name: str, source: Source, share: Part) -> GroupScaled | None:
        """A share of a part as it is stored; None if it is not narrow values."""
        if source.units is not None:
            span, picked = self._span(name, source.units, share)
            rows, columns = rows_and_columns((span, *share[1:]), self._stored[source.name])
            whole = how.scaled(self._checkpoint, source.name, (rows, columns))
            return None if whole is None else part_of(whole, picked, slice(None))
        rows, columns = rows_and_columns(self._rows(name, source, share), self._stored[source.name])
        if source.step > 1:
            rows = slice(rows.start, rows.stop, source.step)
        return how.scaled(self._checkpoint, source.name, (rows, columns))

    def _advance(self, name: str) -> None:
        """Tell that a part was read: its share of the tensor that it is in."""
        source = self._sources[name].name
        share = math.prod(self._tensors[name].shape), math.prod(self._stored[source])
        self.advance(self._num_bytes[source] * share[0] // share[1])

    def _read_part(self, target: torch.Tensor, source: Source, part: Part) -> None:
        """part: of the source's tensor, as its slices are but for the step; of a stack, the expert's comes first."""
        how, name, step = self._config.weight_format, source.name, source.step
        if how is not None and name in self._quantised:
            rows, columns = rows_and_columns(part, self._stored[name])
            for chunk in row_chunks(target, _CHUNK, _ROWS):  # a read is never as large as the projection
                first, end = rows.start + chunk.start * step, rows.start + chunk.stop * step
                these = slice(first, end) if step == 1 else slice(first, min(end, rows.stop), step)
                how.read_into(target[chunk], self._checkpoint, name, (these, columns))
        elif name in self._wrapped:
            target.copy_(self._checkpoint.read(name).flatten()[tuple(part)])
        elif source.expert is None and source.transposed:
            rows, columns = rows_and_columns(part, self._stored[name][::-1])
            target.copy_(self._checkpoint.read(name, (columns, rows)).T)
        elif source.expert is None:
            self._checkpoint.read_into(target, name, part)
        elif source.transposed:
            expert, rows, columns = (*part, slice(None))[:3]
            target.copy_(self._of_expert(name, (expert, columns, rows)).T[::step])
        else:
            target.copy_(self._of_expert(name, part)[::step])

    def _of_expert(self, name: str, part: Part) -> torch.Tensor:
        """A part of an expert's matrix in a stack. part: slices of the expert, and of the stack's rows and columns."""
        if (stack := self._flat.get(name)) is None:
            return self._checkpoint.read(name, part)[0]
        (expert, rows, *columns), length = part, stack[1]
        start, stop, _ = rows.indices(length)
        first = expert.start * length
        return self._checkpoint.read(name, (slice(first + start, first + stop), *columns))

    def _rows(self, name: str, source: Source, share: Part) -> Part:
        """A part of the rank's share, as slices of the tensor that the checkpoint has it in."""
        rows = self._tensors[name].shape[0]
        if source.expert is None and rows == self._stored[source.name][-1 if source.transposed else 0]:
            return share
        start, stop, _ = (share[0] if share else slice(None)).indices(rows)
        first = source.first + start * source.step
        part = slice(first, first + (stop - start - 1) * source.step + 1), *share[1:]
        return part if source.expert is None else (slice(source.expert, source.expert + 1), *part)
