"""Qwen4-Exp, and the text part of its model of images: layers of Gated DeltaNet, some with a table of n-grams, and
layers of attention to blocks that an indexer chooses; all take of several residual streams by gates.

Tests: tests/core/layers/test_gated_streams.py, tests/core/paths
"""

from __future__ import annotations

from dataclasses import replace

from .....memory.files.module_behind import ModuleBehind
from ...config_json import ConfigJson
from ...specs.attention import AttentionSpec, HeadNorm, OutputGate
from ...specs.config import ModelConfig
from ...specs.family import Family
from ...specs.feed_forward import Routing
from ...specs.norms import Norms
from ...specs.recurrent import GatedDeltaSpec
from ...specs.tensor_names import TensorNames
from .. import qwen3_5, reading, rotary
from ..defaults import Defaults
from .indexer import MeanIndexerSpec
from .layer import GatedStreamsLayer, GatedStreamsSpec
from .ngrams import NgramSpec

_LINEAR, _INDEXED = "linear_attention", "indexed_attention"

#: transformers' name of what joins the streams, behind all layers.
_JOIN = "hyper_connection_mixer"

_TABLE = "ple.ple_embedding.ngram_embedding"

#: States hold tokens in float32.
_MOST_TOKENS = 1 << 24


def _read(fields: ConfigJson) -> ModelConfig:
    norm, interval = reading.rms_norm(fields, one_plus=True), fields.integer("full_attention_interval", 4)
    types = reading.layer_types(fields, interval, _LINEAR, _INDEXED)
    streams = GatedStreamsSpec(fields.integer("hc_count", least=2), fields.integer("hc_lowrank"))
    routing = Routing(1, renormalised=fields.boolean("norm_topk_prob"))
    shared = fields.integer("shared_expert_intermediate_size")
    experts = reading.experts(fields, routing, shared=shared, shared_gate=True)
    kinds = dict.fromkeys(types)
    mixers = {kind: _attention(fields) if kind == _INDEXED else _delta(fields, norm.eps) for kind in kinds}
    first = GatedStreamsLayer(mixers[types[0]], experts, Norms.NONE, gates=streams)
    lookups = _lookups(fields, types, streams)
    layers = [replace(first, mixer=mixers[kind], table=lookups.get(at)) for at, kind in enumerate(types)]
    layers[-1] = replace(layers[-1], joins=True)
    parts = tuple(f"{_TABLE}.shard_{at}.weight" for at in range(fields.integer("split_ngram_parts")))
    names = replace(_NAMES, joined={f"{_TABLE}.weight": parts}, numbers=ModuleBehind(len(layers) - 1, _JOIN))
    return reading.dense(fields, layers, norm, tensors=names, has_last_norm=False)


def _delta(fields: ConfigJson, eps: float) -> GatedDeltaSpec:
    gates = "silu" if fields.is_null("output_gate_type") else fields.text("output_gate_type", "silu")
    if gates not in ("silu", "sigmoid"):
        raise fields.refuse("output_gate_type", f"{gates} is not supported; supported: silu, sigmoid")
    return replace(qwen3_5.delta(fields, eps), sigmoid_gates=gates == "sigmoid")


def _attention(fields: ConfigJson) -> AttentionSpec:
    own = rotary.attention(fields, head_norm=HeadNorm.EACH, output_gate=OutputGate.BESIDE_QUERIES)
    assert own.rope is not None, "`rotary.attention` has a rope"
    width, size, budget = (fields.integer(f"indexer_{each}") for each in ("head_dim", "compress_ratio", "budget"))
    if fields.integer("indexer_kv_heads") != 1:
        raise fields.refuse("indexer_kv_heads", "all queries of the indexer have one key in this family")
    if budget % size:
        raise fields.refuse("indexer_budget", f"indexer_compress_ratio is {size}; it must be a multiple of that")
    if own.rope.dim > width:
        raise fields.refuse("indexer_head_dim", f"{own.rope.dim} elements of a head rotate; it must have as many")
    index = MeanIndexerSpec(fields.integer("indexer_n_heads"), width, own.rope, size, budget // size, local=0)
    return replace(own, block_indexer=index, top_k=index.top_k)


def _lookups(fields: ConfigJson, types: list[str], streams: GatedStreamsSpec) -> dict[int, NgramSpec]:
    """By layer."""
    numbers, ends = sorted(set(fields.indices("ple_layer_ids"))), fields.token_ids("eos_token_id")
    if not numbers:
        return {}
    for number in numbers:
        if not 1 <= number <= len(types) or types[number - 1] != _LINEAR:
            why = f"layers are counted from 1, and only those of {_LINEAR} have tables; {number} is not one of them"
            raise fields.refuse("ple_layer_ids", why)
    if not ends:
        raise fields.refuse("eos_token_id", "tables of n-grams need the token that ends a text")
    hidden, vocab = fields.integer("hidden_size"), fields.integer("vocab_size")
    if vocab > _MOST_TOKENS:
        raise fields.refuse("vocab_size", f"states keep tokens of up to {_MOST_TOKENS:,}")
    size, per, width = fields.integer("ngram_size", least=2), fields.integer("heads_per_ngram"), _width(fields)
    if width % (heads := (size - 1) * per):
        raise fields.refuse("ple_embed_dim", f"a token has {heads} rows; {width} must be a multiple of that")
    first = NgramSpec(
        streams.count,
        hidden,
        size,
        per,
        width,
        taps=fields.integer("ple_conv_kernel_size", least=2),
        vocab=vocab,
        least_rows=fields.integer("ngram_vocab_size_base"),
        multiple=fields.integer("make_ngram_vocab_size_divisible_by"),
        seed=fields.integer("seed", least=0),
        end=ends[0],
        place=0,
    )
    return {number - 1: replace(first, place=place) for place, number in enumerate(numbers)}


def _width(fields: ConfigJson) -> int:
    return fields.optional("ple_embed_dim") or fields.integer("hidden_size")


_CONNECTIONS = {"attn": "attn_hyper_connection", "mlp": "mlp_hyper_connection", "join": _JOIN}
_PARTS = {
    "norm": "hc_norm",
    "down": "input_mix_weight_down",
    "up": "input_mix_weight_up",
    "give": "block_inject_weight",
}
_NAMES = TensorNames(
    prefixes=("model.language_model.", "model."),
    names={
        **{
            f"streams.{part}_{own}": f"{module}.{name}"
            for part, module in _CONNECTIONS.items()
            for own, name in _PARTS.items()
        },
        "ple.table": _TABLE,
        **{f"self_attn.indexer.{each}_norm": f"self_attn.indexer.{each}_layernorm" for each in "qk"},
    },
    left_out=("visual.", "model.visual.", "mtp."),
)
QWEN4_EXP = Family(
    "Qwen4-Exp",
    ("Qwen4ExpForConditionalGeneration", "Qwen4ExpForCausalLM"),
    _read,
    Defaults("Qwen4ExpTextConfig", {"partial_rotary_factor": 1.0}),
    _NAMES,
    notes="tables of n-grams stay in the host's memory; draft layers (`mtp`) are left out; on one rank, "
    f"{reading.ON_OPERATORS}",
    nulls=("ple_layer_ids", "ple_embed_dim", "output_gate_type"),
)
