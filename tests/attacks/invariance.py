"""Logits of the native decoder are batch-invariant: alone and in batches, bit for bit, over random shapes.

    python -m tests.attacks.invariance --cases 10000

A case is one request, computed alone on one thread, its whole prompt at once, and again in batches: with other requests
in the same steps, prompts cut into chunks anywhere, single tokens, padding rows, other adapters, one thread or two.
Every logit of every position must have the same bits. Models, adapters and pages are generated anew for every few
cases: widths that fill no tile, odd ranks, adapters of several parts, tokens with two adapters.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from chorus.core.model.compose.composed import composed
from chorus.core.model.compose.decoder_layer import DecoderLayer
from chorus.core.model.native_names import native_norm
from chorus.core.model.program.native_binding import Tables, layer_bindings
from chorus.core.model.program.native_decoder import native_layer
from chorus.core.model.program.native_program import NativeProgram
from chorus.core.model.specs.attention import AttentionSpec, HeadNorm, LatentSpec
from chorus.core.model.specs.feed_forward import Activation, GatedSpec
from chorus.core.model.specs.layers import LayerSpec
from chorus.core.model.specs.norms import PARALLEL, NormKind, Norms, NormSpec
from chorus.core.model.specs.rope_config import RopeConfig
from chorus.core.model.weights.layer_weights import LayerWeights
from chorus.memory.pages.adapter_layout import AdapterLayout, AdapterPart
from chorus.memory.pages.layout import PageLayout
from chorus.memory.pages.projections import Projections
from chorus.ops.cpu import native
from chorus.ops.elementwise.float8_kv import UNSCALED, KvScales
from chorus.ops.library import native_library, native_model
from chorus.ops.lora.sgmv import AdapterRows, Segments
from chorus.perf.report.command import conclude, parser
from chorus.perf.report.table import Table

from ..ops.gemm.whole_numbers import WholeNumbers

RANKS = (1, 1, 2, 3, 3, 4, 5, 6, 7, 8, 9, 11, 15, 16, 17, 21, 31, 32, 33, 48, 64, 65)
LENGTHS = (1, 2, 3, 4, 5, 7, 11, 12, 13, 16, 23, 33, 47, 48, 49, 64, 70)
THREADS = (1, 2)
VOCAB = (33, 64, 97)
_MOST_TOKENS = 512


@dataclass
class Request:
    """Token ids, and the adapters that all of its tokens use, added in this order."""

    tokens: list[int]
    entries: list[int]


@dataclass
class Row:
    """`count` tokens of a request from `start` on; request -1 is a padding row."""

    request: int
    start: int
    count: int


@dataclass
class World:
    """A model with its adapters, requests and pages."""

    model: native_model.NativeModel
    layout: PageLayout
    table: Projections
    adapters: list[list[AdapterRows]]
    requests: list[Request]
    pages: list[list[int]] = field(default_factory=list)  # of each request


@dataclass
class Tally:
    """Counts of compared and of different values."""

    cases: int = 0
    logits: int = 0
    steps: int = 0
    seconds: float = 0.0
    differing: list[str] = field(default_factory=list)


def build(
    rng: random.Random, dtype: torch.dtype, *, plain: bool = False, positions: int = 0, latents: bool = False
) -> World:
    """A random model of one to three layers, three to seven adapters, two to six requests. plain: its layers are as
    most are. positions: those that it has at least. latents: keys and values are latents.
    """
    generator = torch.Generator().manual_seed(rng.getrandbits(32))

    def weights(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(*shape, generator=generator)).to(dtype)

    drawn = _latents(rng) if latents else _heads(rng)
    hidden, ffn = 2 * rng.randint(8, 90), rng.choice((2 * rng.randint(8, 120), 32 * rng.randint(1, 7)))
    num_layers, vocab = rng.randint(1, 3), rng.choice(VOCAB)
    specs = [_spec(rng, drawn, ffn, plain=plain) for _ in range(num_layers)]
    float8_kv = rng.random() < 0.3 and not latents
    layout = PageLayout(
        num_layers,
        drawn.num_kv_heads,
        drawn.head_dim,
        rng.choice((4, 16, 32)),
        dtype.itemsize,
        float8_kv=float8_kv,
        value_dim=drawn.cached_value_dim,
    )
    table = Projections(tuple(composed(spec, NormSpec(1e-6), hidden).projections for spec in specs))
    biased = rng.random() < 0.5

    def vector(width: int, wanted: bool = True, centre: float = 1.0) -> Any:
        return centre + 0.1 * torch.randn(width, generator=generator) if wanted else None

    form = rng.choice((None, None, (8, 1 << 20, False), (4, 128, False), (4, 32, True), (8, 64, True)))

    def packed(outputs: int, inputs: int) -> Any:
        weight = weights(outputs, inputs, scale=inputs**-0.5)
        return native_model.pack(weight) if form is None else WholeNumbers.of(weight.float(), *form).packed()

    def bias(width: int) -> torch.Tensor | None:
        return vector(width, biased, 0.0)

    def layer(spec: LayerSpec, shapes: Mapping[str, int]) -> LayerWeights:
        def matrix(product: str) -> Any:
            return packed(table.gemm_shapes[shapes[product]].outputs, table.gemm_shapes[shapes[product]].inputs)

        mixer = spec.attention
        assert mixer is not None
        found = {
            "attention_norm": vector(hidden),
            "mlp_norm": vector(hidden, spec.norms not in PARALLEL),
            "attention_out_norm": vector(hidden),
            "mlp_out_norm": vector(hidden),
            "qkv": matrix("qkv"),
            "o": matrix("o"),
            "gate_up": matrix("gate_up"),
            "down": matrix("down"),
            "qkv_bias": bias(table.gemm_shapes[shapes["qkv"]].outputs),
            "o_bias": bias(hidden),
            "gate_up_bias": bias(2 * ffn),
            "down_bias": bias(hidden),
        }
        if (latent := mixer.latent) is not None:
            rows = mixer.num_heads * (latent.key_dim + latent.value_dim)
            found |= {"kv_up": weights(rows, latent.kv_rank, scale=latent.kv_rank**-0.5)}
            found |= {"k_norm": vector(latent.kv_rank), "q_norm": vector(max(1, latent.q_rank))}
            found |= {"q_up": matrix("q_up") if latent.q_rank else None}
        elif mixer.head_norm is not None:
            heads = (mixer.num_heads, mixer.num_kv_heads) if mixer.head_norm is HeadNorm.ALL else (1, 1)
            found |= {f"{name}_norm": vector(count * mixer.head_dim) for name, count in zip("qk", heads, strict=True)}
        return native_layer(LayerWeights(**found), spec, composed(spec, NormSpec(1e-6), hidden).slots)

    layers = list(map(layer, specs, table.gemm_shape_of))
    longest = rng.random() < 0.15
    requests = [
        Request([rng.randrange(vocab) for _ in range(rng.randint(100, 260) if longest and not i else length)], [])
        for i, length in enumerate(rng.choices(LENGTHS, k=rng.randint(2, 6)))
    ]
    plans = [_parts(rng, table) for _ in range(rng.randint(3, 7))]
    placed = [AdapterLayout.build(parts, table, layout.page_elems, dtype.itemsize) for parts in plans]
    needed = [layout.pages_for_tokens(len(request.tokens)) for request in requests]
    count = 1 + sum(needed) + sum(adapter.num_pages for adapter in placed)
    free = list(range(1, count))
    rng.shuffle(free)
    arena = weights(count, layout.page_elems, scale=0.15)
    adapters = []
    for parts, place in zip(plans, placed, strict=True):
        pages = [free.pop() for _ in range(place.num_pages)]
        adapters.append([_rows(part, where, pages) for part, where in zip(parts, place.parts, strict=True)])
    for adapter in adapters:
        for rows in adapter:
            if rng.random() < 0.5:
                cancel(arena, rows)
    for request in requests:
        request.entries = _entries(rng, len(adapters))
    requests_end = max(positions, *(len(request.tokens) for request in requests))
    scales = [
        KvScales(rng.choice((1.0, 0.01)), rng.choice((1.0, 0.003))) if float8_kv else UNSCALED
        for _ in range(num_layers)
    ]
    norm = NormSpec(1e-5, NormKind.LAYER if rng.random() < 0.2 else NormKind.RMS)
    program = NativeProgram([composed(spec, norm, hidden).program for spec in specs], hidden, table)
    planes = [index * layout.block_tokens * drawn.head_dim for index in range(num_layers)] if latents else ()
    places = layer_bindings(specs, layers, Tables.of(specs, requests_end), kv_scales=scales, planes=planes)
    model = native_model.NativeModel(
        hidden=hidden,
        vocab=vocab,
        block_tokens=layout.block_tokens,
        eps=norm.eps,
        num_layers=num_layers,
        ops=program.ops(places),
        registers=program.registers,
        gemm_shapes=table.gemm_shapes,
        gemm_shape_of=table.gemm_shape_of,
        positions=requests_end,
        embed=weights(vocab, hidden),
        lm_head=native_model.pack(weights(vocab, hidden)),
        norm=vector(hidden),
        arena=arena,
        float8_kv=float8_kv,
        norm_kind=native_norm(norm.kind),
        logits_scale=rng.choice((1.0, 0.25)),
        logits_softcap=rng.choice((0.0, 20.0)),
        embedding_multiplier=rng.choice((1.0, 3.0)),
    )
    return World(model, layout, table, adapters, requests, [[free.pop() for _ in range(n)] for n in needed])


def _heads(rng: random.Random) -> AttentionSpec:
    """Attention whose heads have keys and values."""
    kv_heads = rng.choice((1, 1, 2, 3))
    heads, head_dim = kv_heads * rng.choice((1, 2, 3, 5)), 2 * rng.randint(2, 40)
    return AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5, RopeConfig(head_dim, 1e4))


def _latents(rng: random.Random) -> AttentionSpec:
    """Attention over latents."""
    q_rank, kv_rank, key = rng.choice((0, 2 * rng.randint(4, 30))), 2 * rng.randint(4, 50), 2 * rng.randint(2, 24)
    heads, rotated, value = rng.choice((1, 2, 5, 7, 13, 50)), 2 * rng.randint(1, 12), 2 * rng.randint(2, 24)
    latent = LatentSpec(q_rank, kv_rank, key, rotated, value, 1e-6)
    rope = RopeConfig(rotated, 1e4, interleaved=rng.random() < 0.3)
    return AttentionSpec(heads, 1, kv_rank + rotated, (key + rotated) ** -0.5, rope, latent=latent)


def _spec(rng: random.Random, drawn: AttentionSpec, ffn: int, *, plain: bool) -> LayerSpec:
    """How a layer computes: a plain one, or with some features of other families."""
    if plain:
        return DecoderLayer(drawn, GatedSpec(ffn), Norms.BEFORE)
    if drawn.latent is None:
        dim = rng.choice((drawn.head_dim, drawn.head_dim, drawn.head_dim // 4 * 2, 0))
        drawn = replace(
            drawn,
            rope=RopeConfig(dim, 1e4, interleaved=rng.random() < 0.3) if dim else None,
            window=rng.choice((None, None, 1, 5, 16, 31, 40)),
            softcap=rng.choice((None, None, 2.0)),
            head_norm=rng.choice((None, None, None, None, HeadNorm.EACH, HeadNorm.ALL)),
        )
    norms = rng.choice((*(Norms.BEFORE,) * 6, Norms.AROUND, Norms.AFTER, Norms.PARALLEL, Norms.PARALLEL))
    part = GatedSpec(ffn, rng.choice((Activation.SILU, Activation.GELU_TANH)))
    return DecoderLayer(drawn, part, norms, residual_multiplier=rng.choice((1.0, 1.0, 0.3)))


def _parts(rng: random.Random, table: Projections) -> list[AdapterPart]:
    """One rank for all modules, or two that share them out."""
    num_layers = table.num_layers
    modules = [name for name in table.names if rng.random() < 0.7] or [table.names[0]]
    cut = rng.randint(1, len(modules)) if rng.random() < 0.3 else len(modules)
    layers = tuple(range(num_layers)) if rng.random() < 0.8 else (rng.randrange(num_layers),)
    shares = [tuple(share) for share in (modules[:cut], modules[cut:]) if share]
    return [AdapterPart(rng.choice(RANKS), rng.choice((0.5, 1.0, 2.0)), layers, share) for share in shares]


def _rows(part: AdapterPart, place: Any, pages: list[int]) -> AdapterRows:
    slabs = place.slabs
    return AdapterRows(
        pages,
        part.rank,
        part.scale / part.rank**0.5,
        slabs.slab_elems,
        slabs.a_offset,
        slabs.b_offset,
        place.first_elem,
    )


def cancel(arena: torch.Tensor, rows: AdapterRows) -> None:
    """Make rank-rows large and every second pair subtract the sum of the first.

    Only the error of the additions remains, so another order shows, even after rounding to bf16.
    """
    run = arena[rows.pages].flatten()
    starts = [first + i * rows.slab_elems for first in rows.first_elem if first >= 0 for i in range(rows.rank)]
    slabs = [run[start : start + rows.slab_elems] for start in starts]
    begins = [*rows.a_offset, *rows.b_offset, rows.slab_elems]
    for i, slab in enumerate(slabs):
        of_layer = i % rows.rank
        for a, b in zip(rows.a_offset, rows.b_offset, strict=True):
            if a < 0:
                continue
            of_a, of_b = (slice(begin, min(end for end in begins if end > begin)) for begin in (a, b))
            if of_layer % 4 >= 2:
                slab[of_a] = -slabs[i - 2][of_a]
                slab[of_b] = slabs[i - 2][of_b]
            elif of_layer + 2 < rows.rank and of_layer // 4 * 4 + 3 < rows.rank:
                slab[of_b] *= 512
    arena[rows.pages] = run.view(len(rows.pages), -1)


def _entries(rng: random.Random, adapters: int) -> list[int]:
    """The base model, one adapter, or several."""
    kind = rng.random()
    if kind < 0.15:
        return []
    return rng.sample(range(adapters), rng.choice((2, 2, 3)) if kind > 0.8 else 1)


def schedule(rng: random.Random, requests: Sequence[Request]) -> Iterator[list[Row]]:
    """Steps that take every request through its tokens, in chunks of any size, requests beginning at any time."""
    at = [0] * len(requests)
    style = rng.choice(("whole", "any", "single", "mixed"))
    while any(done < len(request.tokens) for done, request in zip(at, requests, strict=True)):
        rows, room = [], _MOST_TOKENS
        for index, request in enumerate(requests):
            left = len(request.tokens) - at[index]
            if not left or rng.random() < 0.2:
                continue
            single = style == "single" or (style == "mixed" and rng.random() < 0.5)
            count = min(room, 1 if single else left if style == "whole" else rng.randint(1, left))
            if count:
                rows.append(Row(index, at[index], count))
                at[index] += count
                room -= count
        rng.shuffle(rows)
        if rows and all(row.count == 1 for row in rows):
            rows += [Row(-1, 0, 1)] * rng.choice((0, 0, 1, 3, 40))
        if rows:
            yield rows


def compute(decoder: native.NativeDecoder, world: World, rows: Sequence[Row]) -> torch.Tensor:
    """Logits of all the step's tokens."""
    ids, positions, page, offset, indptr, tables, lengths = [], [], [], [], [0], [], []
    segments = Segments()
    last: list[int] | None = None
    begin = 0
    for row in rows:
        padding = row.request < 0
        table = [0] if padding else world.pages[row.request]
        span = range(row.start, row.start + row.count)
        ids += [0] * row.count if padding else world.requests[row.request].tokens[span.start : span.stop]
        positions += span
        page += [table[position // world.layout.block_tokens] for position in span]
        offset += [position % world.layout.block_tokens for position in span]
        indptr.append(indptr[-1] + row.count)
        tables.append(table)
        lengths.append(span.stop)
        entries = [] if padding else world.requests[row.request].entries
        if entries != last:  # neighbours of one adapter are one segment
            _close(segments, world, last, begin, indptr[-2])
            begin, last = indptr[-2], entries
    _close(segments, world, last, begin, indptr[-1])
    width = max(map(len, tables))
    plan = native.NativeRows()
    plan.plan(indptr, torch.tensor([table + [0] * (width - len(table)) for table in tables]), lengths)
    tokens, at, pages, offsets = (torch.tensor(values) for values in (ids, positions, page, offset))
    answer = decoder.forward(tokens, at, pages, offsets, plan, torch.arange(len(ids)), segments)
    return answer.clone()  # the next step overwrites them


def _close(segments: Segments, world: World, entries: list[int] | None, begin: int, end: int) -> None:
    for entry in entries or ():
        for part in world.adapters[entry]:
            segments.add(begin, end, part)


def compare(seed: int, dtype: torch.dtype, tally: Tally, runs: int = 4) -> None:
    """Build a random case; run its requests alone, then `runs` times together."""
    rng = random.Random(seed)
    world = build(rng, dtype, latents=seed % 4 == 3)
    alone = native.NativeDecoder(world.model, 1)
    expected = []
    for index, request in enumerate(world.requests):
        expected.append(compute(alone, world, [Row(index, 0, len(request.tokens))]))
    decoders = {threads: native.NativeDecoder(world.model, threads) for threads in THREADS}
    for run in range(runs):
        threads = rng.choice(THREADS)
        wrong = [0] * len(world.requests)
        for rows in schedule(rng, world.requests):
            logits = compute(decoders[threads], world, rows)
            tally.steps += 1
            begin = 0
            for row in rows:
                got = logits[begin : begin + row.count]
                begin += row.count
                if row.request >= 0:
                    want = expected[row.request][row.start : row.start + row.count]
                    wrong[row.request] += int((got.view(torch.int32) != want.view(torch.int32)).sum())
                    tally.logits += got.numel()
        for index, (request, bits) in enumerate(zip(world.requests, wrong, strict=True)):
            tally.cases += 1
            if bits:
                ranks = [[part.rank for part in world.adapters[entry]] for entry in request.entries]
                tally.differing.append(
                    f"seed {seed}, {dtype}, run {run}, request {index} ({len(request.tokens)} tokens, ranks {ranks}, "
                    f"{threads} threads): {bits} logits differ"
                )
    for decoder in (alone, *decoders.values()):
        decoder.close()


def attack(seed: int, cases: int, dtype: torch.dtype) -> Tally:
    """At least `cases` cases."""
    tally, began = Tally(), time.perf_counter()
    while tally.cases < cases:
        compare(seed, dtype, tally)
        seed += 1
    tally.seconds = round(time.perf_counter() - began, 1)
    return tally


def main() -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--cases", type=int, default=10_000, help="how many requests to compare, of each data type")
    command.add_argument("--seed", type=int, default=0, help="of the first model")
    args = command.parse_args()
    if reason := native_library.why_unavailable(torch.bfloat16):
        print(f"the native decoder is not available here: {reason}", file=sys.stderr)
        return 2
    result: dict[str, dict[str, float]] = {}
    for dtype in (torch.bfloat16, torch.float32):
        tally = attack(args.seed, args.cases, dtype)
        print(*tally.differing[:10], sep="\n")
        result[str(dtype)] = {**vars(tally), "differing": len(tally.differing)}
    table = Table("requests alone and in company", ["dtype", *result["torch.float32"]])
    for name, row in result.items():
        table.add(name, *row.values())
    table.show()
    met = not any(row["differing"] for row in result.values())
    return conclude({"invariance": result, "met": met}, met)


if __name__ == "__main__":
    sys.exit(main())
