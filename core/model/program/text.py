"""Writes a model's program for people: one line for each op.

Tests: tests/core/model/program/test_text.py
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from ....memory.pages.projections import Projection
from ..specs.config import ModelConfig
from .ends import end_programs
from .layer_program import LayerProgram
from .op import Op
from .ops.embed import AddPositions, Embed
from .ops.linear import Gemm
from .ops.logits import Logits
from .ops.spans import Begin, End


def program_lines(config: ModelConfig) -> list[str]:
    """The programs of a model's ends and of all layers: each once, and which layers have it."""
    ends = end_programs(config)
    before, behind = (
        _aligned((op.formula(), _end_detail(op, config)) for op in ops) for ops in (ends.before, ends.behind)
    )
    lines = ["before the layers:", *(f"  {line}" for line in before), *_layer_lines(config)]
    return [*lines, "behind the layers:", *(f"  {line}" for line in behind)]


def _layer_lines(config: ModelConfig) -> list[str]:
    found: dict[tuple[str, ...], list[int]] = {}
    shared = [config.composed(layer).shared for layer in config.layers]
    for index, (program, own) in enumerate(zip(config.programs, config.projections.layers, strict=True)):
        found.setdefault(tuple(_lines(program, own, shared[index])), []).append(index)
    lines = list[str]()
    for program, layers in found.items():
        title = f"all {config.num_layers} layers" if len(layers) == config.num_layers else _layers(layers)
        lines += [f"{title}{_sharing(layers, shared)}:", *(f"  {line}" for line in program)]
    return lines


def _layers(indices: Sequence[int]) -> str:
    """Numbers of layers, as `layers 0-2, 4-6`."""
    runs = [[each for _, each in run] for _, run in groupby(enumerate(indices), lambda pair: pair[1] - pair[0])]
    names = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return f"layer{'s' if len(indices) > 1 else ''} {', '.join(names)}"


def _sharing(indices: Sequence[int], shared: Sequence[Mapping[str, int]]) -> str:
    """Which layers have the same weights. shared: the first layer with each slot that layers share, by layer."""
    same: dict[int, list[int]] = {}
    for index in indices:
        for first in set(shared[index].values()):
            same.setdefault(first, []).append(index)
    groups = [f"{_layers(each)} share weights" for each in same.values() if len(each) > 1]
    return f" ({'; '.join(groups)})" if groups else ""


def _lines(program: LayerProgram, own: Sequence[Projection], shared: Collection[str]) -> Iterator[str]:
    ops = [op for op in program.ops if not isinstance(op, Begin | End)]
    return _aligned((op.formula(), _detail(op, own, shared)) for op in ops)


def _detail(op: Op, own: Sequence[Projection], shared: Collection[str]) -> str:
    """What an op of a layer computes with. own: the layer's projections. shared: slots that layers share."""
    found = _product(op, own) if isinstance(op, Gemm) else op.detail()
    return f"{found}; shared" if {*op.slots} & {*shared} else found


def _product(op: Gemm, projections: Sequence[Projection]) -> str:
    own = [each for each in projections if each.product == op.weight]
    names = ", ".join(each.path.rpartition(".")[2] for each in own)
    return f"{own[0].inputs} → {sum(each.outputs for each in own)}: {names}"


def _aligned(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Formulas, and behind the longest one their details."""
    rows = list(rows)
    width = max((len(formula) for formula, _ in rows), default=0)
    return (f"{formula:{width}}  {detail}".rstrip() for formula, detail in rows)


def _end_detail(op: Op, config: ModelConfig) -> str:
    """What an op of a model's ends computes with."""
    match op:
        case Embed(adapted=False):
            return f"{config.num_layers} vectors of a token, times {op.factor:g}: {op.table}"
        case Embed():
            factor = "" if op.factor == 1.0 else f", times {op.factor:g}"
            return f"{config.vocab_size:,} tokens → {config.hidden_size}{factor}: embed_tokens"
        case AddPositions():
            table = config.position_table
            assert table is not None, "the op is of a model with a table"
            return f"{table.rows:,} positions → {config.hidden_size}: {'sinusoids' if table.is_made else 'learned'}"
        case Gemm():
            return f"{config.hidden_size} → per-layer embeddings: {op.weight}"
        case Logits():
            table = "embed_tokens" if config.tie_word_embeddings else "lm_head"
            return f"{config.hidden_size} → {op.vocab:,}{', with a bias' * bool(op.bias)}: {table}"
    return op.detail()
