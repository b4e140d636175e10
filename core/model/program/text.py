"""Writes a model's program for people: one line for each op.

Tests: tests/core/model/program/test_text.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from ....memory.pages.projections import Projection
from ....ops.attention.blocks import BlockMask
from ..specs.attention import AttentionSpec, HeadNorm
from ..specs.config import ModelConfig
from ..specs.norms import NormSpec
from ..specs.rope_config import RopeConfig
from .end_text import connections, end_detail
from .ends import end_programs
from .hyper_ops import ConnectStreams, GiveToStreams
from .indexer_ops import Choose, ChooseBlocks, Index, IndexBlocks
from .inkling_ops import ConvolveStream, MoeWithSinks
from .layer_program import LayerProgram
from .ops import (
    Activate,
    Add,
    AddMedia,
    Attend,
    Begin,
    Clip,
    End,
    Gemm,
    Heads,
    LatentAttend,
    Latents,
    Mix,
    Moe,
    Norm,
    Op,
    Replace,
    ResizeHeads,
    Scale,
    SharedExpert,
    SubtractHeads,
    TakeGates,
)
from .query_ops import OutputsOfExperts, QueriesOfExperts
from .stream_ops import AddToOthers, CorrectStreams, PredictStreams


def program_lines(config: ModelConfig) -> list[str]:
    """The programs of a model's ends and of all layers: each once, and which layers have it."""
    ends = end_programs(config)
    before, behind = (
        _aligned((_formula(op), end_detail(op, config)) for op in ops) for ops in (ends.before, ends.behind)
    )
    lines = ["before the layers:", *(f"  {line}" for line in before), *_layer_lines(config)]
    return [*lines, "behind the layers:", *(f"  {line}" for line in behind)]


def _layer_lines(config: ModelConfig) -> list[str]:
    found: dict[tuple[str, ...], list[int]] = {}
    for index, (program, own) in enumerate(zip(config.programs, config.projections.layers, strict=True)):
        found.setdefault(tuple(_lines(program, own)), []).append(index)
    lines = list[str]()
    for program, layers in found.items():
        lines += [_layers(layers, config.num_layers), *(f"  {line}" for line in program)]
    return lines


def _layers(indices: Sequence[int], count: int) -> str:
    """Numbers of layers, as `layers 0-2, 4-6`."""
    if len(indices) == count:
        return f"all {count} layers:"
    runs = [[each for _, each in run] for _, run in groupby(enumerate(indices), lambda pair: pair[1] - pair[0])]
    names = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return f"layer{'s' if len(indices) > 1 else ''} {', '.join(names)}:"


def _lines(program: LayerProgram, own: Sequence[Projection]) -> Iterator[str]:
    ops = [op for op in program.ops if not isinstance(op, Begin | End)]
    return _aligned((_formula(op), _product(op, own) if isinstance(op, Gemm) else _detail(op)) for op in ops)


def _product(op: Gemm, projections: Sequence[Projection]) -> str:
    own = [each for each in projections if each.group is op.group]
    names = ", ".join(each.path.rpartition(".")[2] for each in own)
    return f"{own[0].inputs} → {sum(each.outputs for each in own)}: {names}"


def _aligned(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Formulas, and behind the longest one their details."""
    rows = list(rows)
    width = max((len(formula) for formula, _ in rows), default=0)
    return (f"{formula:{width}}  {detail}".rstrip() for formula, detail in rows)


def _formula(op: Op) -> str:
    """An op as `q, gates ← heads in`."""
    reads = " ".join(map(str, op.reads))
    match op:
        case Add():
            return f"{op.x} += {op.y}"
        case Replace():
            return f"{op.x} ← {op.y}"
        case AddMedia():
            return f"{op.x} += image[{op.part}]"
        case AddToOthers():
            return f"{op.streams}[1:] += {op.y}"
        case GiveToStreams():
            kept = op.streams if op.mix is None else f"{op.mix}ᵀ · {op.streams}"
            return f"{op.streams} ← {kept} + {op.give} ⊗ {op.y}"
        case PredictStreams():
            return f"{op.streams} += {op.factors} · {op.streams}"
        case CorrectStreams():
            return f"{op.streams} += (1 + {op.factors}) ⊗ ({op.x} - {op.before})"
        case Gemm():
            return f"{op.out} ← gemm[{op.group.name}] {reads}"
    return f"{', '.join(op.writes)} ← {_name(op)} {reads}".rstrip()


def _name(op: Op) -> str:
    words = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in type(op).__name__)
    return words.removeprefix("_")


def _detail(op: Op) -> str:
    """What an op computes with: the shapes of weights, kinds and numbers."""
    match op:
        case Norm():
            return f"{_norm(op.norm)}: {op.weight}"
        case Heads():
            return _heads(op.attention)
        case Latents() | Index() | Choose() | IndexBlocks() | ChooseBlocks():
            return _latents(op)
        case Attend() | LatentAttend():
            return _attention(op.attention)
        case Mix() | ConvolveStream():
            return op.mixer.described() if isinstance(op, Mix) else f"{op.place}, {op.convs.described()}"
        case Moe() | MoeWithSinks() | QueriesOfExperts() | OutputsOfExperts():
            return _experts(op)
        case Activate():
            return str(op.activation)
        case Scale() | Clip() | ResizeHeads() | SubtractHeads() | TakeGates() | ConnectStreams() | SharedExpert():
            return _numbers(op)
    return ""


def _numbers(op: Scale | Clip | ResizeHeads | SubtractHeads | TakeGates | ConnectStreams | SharedExpert) -> str:
    match op:
        case SharedExpert():
            return f"width {op.spec.shared_size}"
        case ConnectStreams():
            return connections(op)
        case Scale():
            return op.weight or f"{op.factor:g}"
        case Clip():
            return f"within ±{op.limit:g}"
        case ResizeHeads():
            return f"{f'{len(op.order)} ' if op.order else ''}heads of {op.width} → {op.to}"
        case TakeGates():
            return f"{op.width} for each of {op.heads} heads"
        case SubtractHeads():
            return f"heads less those behind them, each normalised without weights, times {1 - op.difference.first:g}"


def _norm(norm: NormSpec) -> str:
    return f"{norm.kind}, eps {norm.eps:g}"


def _rope(rope: RopeConfig | None) -> str:
    return "not rotated" if rope is None else f"rotated by a {rope.type} rope of base {rope.theta:g}"


_HEAD_NORMS = {
    None: "",
    HeadNorm.EACH: "each normalised, ",
    HeadNorm.ALL: "normalised together, ",
    HeadNorm.BARE: "each normalised without weights, ",
    HeadNorm.OWN: "each normalised with weights of its own, ",
    HeadNorm.BIASED: "each normalised with weights and biases, ",
    HeadNorm.ROTATED: "each normalised after it is rotated, ",
}


def _heads(mixer: AttentionSpec) -> str:
    own = f"{_HEAD_NORMS[mixer.head_norm]}{_rope(mixer.rope)}"
    if mixer.shares_kv:
        return f"{mixer.num_heads} heads of {mixer.head_dim}, {own}; an earlier layer's keys and values"
    values = "; values are keys" * mixer.keys_are_values + "; values normalised" * mixer.value_norm
    growth = "; queries grow with their position" if mixer.query_growth else ""
    heads = f"{mixer.num_heads} heads of {mixer.head_dim}, {mixer.num_kv_heads} of keys and values"
    return f"{heads}, {own}{values}{growth}; writes keys and values"


def _latents(op: Latents | Index | Choose | IndexBlocks | ChooseBlocks) -> str:
    if isinstance(op, IndexBlocks | ChooseBlocks):
        return _blocks_of_keys(op)
    if isinstance(op, Choose):
        return f"{op.attention.top_k:,} tokens by the scores of all heads"
    if isinstance(op, Index):
        heads = f"{op.indexer.heads} heads of {op.indexer.key_dim}"
        kept = f", and gates of pools of {op.indexer.pool}" if op.indexer.pool else ""
        return f"{heads}, {_rope(op.indexer.rope)}; writes a key for all heads{kept}"
    size = f"a latent of {op.latent.kv_rank} and a key of {op.latent.rotated_dim}"
    heads = f"{op.attention.num_heads} heads, {_rope(op.attention.rope)}"
    return f"{heads}; an earlier layer's latents" if op.kept is None else f"{heads}; writes {size} for all heads"


def _blocks_of_keys(op: IndexBlocks | ChooseBlocks) -> str:
    spec = op.indexer
    if isinstance(op, IndexBlocks):
        heads = f"{spec.heads} heads of {spec.key_dim}"
        return f"{heads}, each normalised, {_rope(spec.rope)}; writes a key for all heads"
    return f"{spec.top} blocks of {spec.block} tokens by {spec.scored_by}"


_BLOCKS = {
    BlockMask.NONE: "",
    BlockMask.IN_WINDOW: ", and those behind it in an image",
    BlockMask.WHOLE: ", and all of the prompt",
}


def _attention(mixer: AttentionSpec) -> str:
    seen = "all tokens" if mixer.window is None else f"the last {mixer.window:,} tokens"
    if mixer.chunked and mixer.window is not None:
        seen = f"its own chunk of {mixer.window:,} tokens"
    if mixer.top_k is not None:
        seen = f"the {mixer.top_k:,} tokens that were chosen"
    cap = "" if mixer.softcap is None else f", soft cap {mixer.softcap:g}"
    seen += _BLOCKS[mixer.blocks]
    relative = "" if mixer.relative is None else f", learned numbers of {mixer.relative.extent:,} distances"
    terms = f"{', sinks' * mixer.sinks}{', slopes' * bool(mixer.slopes)}{relative}"
    return f"sees {seen}; scale {mixer.scale:g}{cap}{terms}"


def _experts(op: Moe | MoeWithSinks | QueriesOfExperts | OutputsOfExperts) -> str:
    routing, shared = op.spec.routing, ""
    match op:
        case Moe():
            size, of_all = f"{op.spec.size}", op.spec.shared_size
            shared = f", and one of {of_all} for all" if of_all else ""
        case MoeWithSinks():
            size, shared = f"{op.spec.size}", f", and {op.spec.sinks} for all, which the router weighs, too"
        case QueriesOfExperts():
            size = "queries"
        case OutputsOfExperts():
            size = "outputs"
    return f"{op.spec.count} experts of {size}, {routing.per_token} for each token by {routing.scoring}{shared}"
