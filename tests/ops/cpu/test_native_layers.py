"""Every kind of dense layer on the native decoder, against plain float64 arithmetic, at every ISA level."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from allpairspy import AllPairs

from chorus.core.model.specs.attention import HeadNorm, OutputGate
from chorus.core.model.specs.feed_forward import Activation, UngatedActivation
from chorus.core.model.specs.norms import NormKind, Norms
from chorus.core.model.specs.positions import PositionTable
from chorus.ops.cpu import native
from chorus.ops.elementwise.float8_kv import UNSCALED, KvScales
from chorus.ops.library import native_library

from .native_layers import Kind, Model, reference, step

pytestmark = [pytest.mark.native, pytest.mark.wide]

LEVELS = native_library.levels()
LENGTH = 83
BOUND = {torch.float32: 2e-5, torch.bfloat16: 0.16}
"""Largest error of a logit, in standard deviations of all."""

VALUES: OrderedDict[str, list[Any]] = OrderedDict(
    window=[None, 1, 7, 16, 33, 64],
    softcap=[None, 3.0],
    rotated=[1.0, 0.5, 0.25, 0.0],
    interleaved=[False, True],
    alternating=[False, True],
    head_norm=[None, *HeadNorm],
    output_gate=[None, *OutputGate],
    value_norm=[False, True],
    keys_are_values=[False, True],
    scaled=[False, True],
    chunked=[False, True],
    sinks=[False, True],
    slopes=[False, True],
    clip=[None, 0.8],
    softplus_gates=[False, True],
    # layers without norms of their own are those of gated streams, which the library does not compute
    norms=[each for each in Norms if each is not Norms.NONE],
    norm_kind=list(NormKind),
    residual_multiplier=[1.0, 0.22],
    # GELU by erf differs from GELU_TANH in one function alone, and is among those of one feature
    activation=[*(each for each in Activation if each is not Activation.GELU), *UngatedActivation],
    biased=[False, True],
    scale=[None, 0.2],
    attention_factor=[1.0, 1.3],
    embedding_multiplier=[1.0, 3.5],
    embedding_norm=[False, True],
    head_biased=[False, True],
    logits_scale=[1.0, 0.3],
    logits_softcap=[None, 4.0],
    kv_scales=[None, UNSCALED, KvScales(3.0, 0.004)],
    shape=[
        {},
        {"heads": 3, "kv_heads": 1, "head_dim": 20, "hidden": 72, "ffn": 96},
        {"heads": 2, "kv_heads": 2, "head_dim": 256, "hidden": 64, "ffn": 64},
        {"heads": 10, "kv_heads": 2, "head_dim": 10, "hidden": 40},
    ],
    adapter=[False, True],
    dtype=[torch.float32, torch.bfloat16],
)

SINGLE = {
    "plain": {},
    "window": {"window": 7},
    "window of one token": {"window": 1},
    "score scale": {"scale": 0.4},
    "soft cap of scores": {"softcap": 2.0},
    "partial rotation": {"rotated": 0.5},
    "pairs rotated": {"interleaved": True},
    "some pairs rotated": {"interleaved": True, "rotated": 0.5},
    "no rotation": {"rotated": 0.0},
    "attention factor": {"attention_factor": 1.3},
    "layers of two kinds": {"window": 7, "alternating": True},
    "sinks": {"sinks": True, "window": 7},
    "sinks beside soft caps": {"sinks": True, "softcap": 2.0},
    "norm of each head": {"head_norm": HeadNorm.EACH},
    "norm of all heads": {"head_norm": HeadNorm.ALL},
    "norm of heads without weights": {"head_norm": HeadNorm.BARE},
    "norm of rotated heads": {"head_norm": HeadNorm.ROTATED, "rotated": 0.5},
    "LayerNorm of each head": {"head_norm": HeadNorm.OWN},
    "LayerNorm of each head with a bias": {"head_norm": HeadNorm.BIASED, "rotated": 0.5},
    "slopes": {"slopes": True, "rotated": 0.0},
    "slopes beside sinks, in windows": {"slopes": True, "sinks": True, "window": 20},
    "slopes beside soft caps": {"slopes": True, "softcap": 2.0, "window": 7},
    "clipped queries, keys and values": {"clip": 0.8},
    **{f"softplus gates {each}": {"output_gate": each, "softplus_gates": True} for each in OutputGate},
    **{f"gates {each}": {"output_gate": each} for each in OutputGate},
    "norm of all heads between gates": {"output_gate": OutputGate.BESIDE_QUERIES, "head_norm": HeadNorm.ALL},
    "chunks": {"window": 16, "chunked": True, "alternating": True},
    "chunks that begin within sixteen keys": {"window": 10, "chunked": True, "sinks": True},
    "norms of parallel parts": {"norms": Norms.PARALLEL_TWO_NORMS},
    "norm of embeddings": {"embedding_norm": True},
    "positions": {"position_table": PositionTable(256), "embedding_multiplier": 3.0},
    "ReLU": {"activation": UngatedActivation.RELU, "ffn": 96},
    "bias of the head": {"head_biased": True, "logits_scale": 0.3, "logits_softcap": 2.0},
    "norm of values": {"value_norm": True, "head_norm": HeadNorm.EACH},
    "keys as values": {"keys_are_values": True, "head_norm": HeadNorm.EACH, "window": 7},
    "factor of a layer": {"scaled": True},
    "norms after": {"norms": Norms.AFTER},
    "norms after feed-forward parts": {"norms": Norms.AFTER_MLP},
    "norms of embeddings with biases": {"embedding_norm": True, "norm_kind": NormKind.BIASED_LAYER},
    "norms around": {"norms": Norms.AROUND},
    "norms behind": {"norms": Norms.BEHIND, "norm_kind": NormKind.BIASED_LAYER},
    "norm behind the mixer": {"norms": Norms.BEHIND_MIXER, "norm_kind": NormKind.BIASED_LAYER},
    "parallel": {"norms": Norms.PARALLEL},
    "centered": {"norm_kind": NormKind.LAYER, "head_norm": HeadNorm.EACH},
    "norms with biases": {"norm_kind": NormKind.BIASED_LAYER},
    "norms with biases around": {"norm_kind": NormKind.BIASED_LAYER, "norms": Norms.AROUND},
    "residual multiplier": {"residual_multiplier": 0.22},
    "gelu": {"activation": Activation.GELU_TANH},
    "gelu in panels of its own": {"activation": Activation.GELU_TANH, "ffn": 96},
    **{f"{each.name} without a gate": {"activation": each} for each in UngatedActivation},
    "ReLU² in panels": {"activation": UngatedActivation.RELU_SQUARED, "ffn": 96},
    "gated GELU by erf": {"activation": Activation.GELU},
    "gated GELU by erf in panels": {"activation": Activation.GELU, "ffn": 96},
    "gated ReLU²": {"activation": Activation.RELU_SQUARED},
    "gated ReLU² in panels": {"activation": Activation.RELU_SQUARED, "ffn": 96},
    "factors of a gated part": {"gate_factor": 0.7, "part_factor": 1.4},
    "factors in panels": {"gate_factor": 0.7, "part_factor": 1.4, "ffn": 96, "activation": Activation.GELU_TANH},
    "embedding multiplier": {"embedding_multiplier": 3.5},
    "logits scale": {"logits_scale": 0.3},
    "soft cap of logits": {"logits_softcap": 2.0, "logits_scale": 0.7},
    "keys and values in FP8": {"kv_scales": UNSCALED, "window": 33},
    "scaled keys and values in FP8": {"kv_scales": KvScales(0.007, 9.0), "softcap": 2.0},
    "heads of 256": {"head_dim": 256, "heads": 2, "kv_heads": 1},
}


@pytest.fixture(params=LEVELS)
def level(request, monkeypatch) -> str:
    monkeypatch.setenv(native_library.ISA, request.param)
    return request.param


def check(kind: Kind, dtype: torch.dtype, adapted: bool = False, whole: tuple[int, int] | None = None) -> None:
    """A prompt at once, in chunks and token by token, alone and among others: the same bits, near the reference.

    whole: bits and group of whole-number weights.
    """
    model = Model(kind, dtype)
    if whole is not None:
        model.quantise(*whole)
    adapter = model.add_adapter() if adapted else None
    tokens, other = model.tokens(LENGTH), model.tokens(LENGTH)
    decoder = native.NativeDecoder(model.native(LENGTH), 2)
    pages, others = model.take(LENGTH), model.take(LENGTH)
    (every,) = step(decoder, model, [(tokens, pages, 0, LENGTH, adapter)])
    want = reference(model, tokens, adapter, pages if kind.kv_scales else None)
    error = ((every - want).abs().max() / want.std()).item()
    assert error < BOUND[dtype], error
    model.spoil(pages)
    found, begin = [], 0
    for end in (1, 30, 31, 32, 65, 66, 67, LENGTH - 1, LENGTH):
        parts = [(tokens, pages, begin, end, adapter), (other, others, begin, end, None)]
        found.append(step(decoder, model, parts if end % 2 else parts[::-1])[1 - end % 2])
        begin = end
    assert torch.equal(torch.cat(found), every)
    single = [step(decoder, model, [(tokens, pages, at, at + 1, adapter)])[0] for at in range(LENGTH)]
    assert torch.equal(torch.cat(single), every)
    decoder.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SINGLE)
def test_one_feature(level, name, dtype):
    check(Kind(**SINGLE[name]), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adapters_of_layers_with_other_projections(level, dtype):
    check(Kind(two_mixers=True), dtype, adapted=True)


CASES = [case._asdict() for case in AllPairs(VALUES)]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_features_together(level, case):
    values = dict(CASES[case])
    values["keys_are_values"] &= values["head_norm"] is not HeadNorm.ALL  # which is refused
    shape, dtype, adapter = values.pop("shape"), values.pop("dtype"), values.pop("adapter")
    check(Kind(**values, **shape), dtype, adapter)
