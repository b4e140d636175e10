"""A model's layer specifications as the native decoder takes them, and its refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from chorus.core.model.batch import StepBatch
from chorus.core.model.compose.build import Build
from chorus.core.model.compose.composed import composed
from chorus.core.model.compose.decoder_layer import DecoderLayer
from chorus.core.model.families.falcon_h1.layer import FactoredLayer
from chorus.core.model.families.gemma_4.layer import Gemma4Layer
from chorus.core.model.families.muse.layer import MuseLayer
from chorus.core.model.program.native_binding import Tables, score_scale
from chorus.core.model.program.native_decoder import NativeDecoderModel, why_unsupported
from chorus.core.model.specs.attention import AttentionSpec, HeadNorm, OutputGate
from chorus.core.model.specs.feed_forward import (
    Activation,
    ClampedSwiglu,
    Experts,
    GatedSpec,
    Routing,
    UngatedActivation,
    UngatedSpec,
)
from chorus.core.model.specs.layers import LayerSpec
from chorus.core.model.specs.norms import NormKind, Norms
from chorus.core.model.specs.positions import PositionTable
from chorus.core.model.specs.rope_config import RopeConfig
from chorus.core.model.weights.layer_weights import LayerWeights
from chorus.memory.pages.arena import Arena
from chorus.memory.pages.layout import PageLayout
from chorus.memory.pages.projections import Projections
from chorus.ops.elementwise.elementwise import rotary_table
from chorus.ops.library import native_library

from ....ops.cpu.native_layers import BLOCK, LAYERS, VOCAB, Kind, Model, reference

ROPE = RopeConfig(16)
MIXER = AttentionSpec(4, 2, 16, 0.25, ROPE)
LAYER = DecoderLayer(MIXER, GatedSpec(80))
needs_library = pytest.mark.skipif(not native_library.levels(), reason="needs the native library")


@dataclass
class Config:
    """The part of `ModelConfig` that the native decoder reads."""

    layers: tuple[LayerSpec, ...]
    kind: Kind = field(default_factory=Kind)

    def __getattr__(self, name: str) -> Any:
        kind = self.kind
        mixer, feed_forward = self.layers[0].mixer, self.layers[0].feed_forward
        written = list(map(self.composed, self.layers))
        around = Build(kind.hidden, kind.norm), Build(kind.hidden, kind.norm)
        self.layers[0].begin(around[0])
        self.layers[0].finish(around[1])
        names = {
            "hidden_size": kind.hidden,
            "intermediate_size": feed_forward.size,
            "num_heads": mixer.num_heads,
            "num_kv_heads": mixer.num_kv_heads,
            "head_dim": mixer.head_dim,
            "q_size": mixer.q_size,
            "kv_size": mixer.kv_size,
            "num_layers": len(self.layers),
            "attention": mixer,
            "recurrent": None,
            "attention_layers": [layer.mixer for layer in self.layers if layer.mixer],
            "attention_shapes": [mixer],
            "kv_layers": [layer.mixer for layer in self.layers if layer.mixer],
            "per_layer_embeddings": None,
            "media": (),
            "vision": None,
            "streams": self.layers[0].streams,
            "split": around[0],
            "join": around[1],
            "top_k": None,
            "experts": next((layer.experts for layer in self.layers if layer.experts), None),
            "has_last_norm": True,
            "scales_embeddings": False,
            "head_bias": kind.head_biased,
            "num_experts": next((layer.experts.count for layer in self.layers if layer.experts), 0),
            "vocab_size": VOCAB,
            "num_ranks": 1,
            "norm": kind.norm,
            "final_norm": kind.norm,
            "projections": Projections(tuple(each.projections for each in written)),
            "programs": [each.program for each in written],
        }
        return names[name] if name in names else getattr(kind, name)

    def composed(self, layer: LayerSpec) -> Build:
        return composed(layer, self.kind.norm, self.kind.hidden)

    def embedding_factor(self, dtype: torch.dtype) -> float:
        return self.kind.embedding_multiplier


def refusal(*layers: LayerSpec, dtype: torch.dtype = torch.float32) -> str | None:
    return why_unsupported(Config(layers), dtype)  # pyright: ignore[reportArgumentType]


def changed(**fields: Any) -> LayerSpec:
    return replace(LAYER, mixer=replace(MIXER, **fields))


@needs_library
class TestRefusals:
    @pytest.mark.parametrize(
        "layer",
        [
            LAYER,
            changed(rope=None, window=8, softcap=2.0, head_norm=HeadNorm.ALL),
            changed(sinks=True, window=8),
            changed(rope=None, slopes=(0.5, 0.25, 0.125, 0.0625), clip=6.0),
            MuseLayer(LAYER.mixer, LAYER.feed_forward, Norms.AFTER_MLP, out_eps=1e-8),
            changed(rope=replace(ROPE, dim=6, interleaved=True)),
            replace(LAYER, norms=Norms.PARALLEL, feed_forward=GatedSpec(80, Activation.GELU_TANH)),
            replace(LAYER, norms=Norms.PARALLEL_TWO_NORMS),
            *(replace(LAYER, feed_forward=UngatedSpec(80, each)) for each in UngatedActivation),
            *(changed(head_norm=each) for each in HeadNorm),
            changed(window=32, chunked=True),
            replace(LAYER, mixer=None),
            replace(LAYER, feed_forward=None),
        ],
    )
    def test_layers_that_it_computes(self, layer):
        assert refusal(LAYER, layer) is None

    @pytest.mark.parametrize("gate", OutputGate)
    def test_gates_and_norms_of_all_heads_that_it_computes(self, gate):
        assert refusal(changed(output_gate=gate, head_norm=HeadNorm.ALL)) is None

    def test_experts_are_refused_for_what_the_library_does_not_compute(self):
        def refused(experts: Experts, dtype: torch.dtype = torch.float32) -> str | None:
            return refusal(LAYER, replace(LAYER, feed_forward=experts), dtype=dtype)

        plain = Experts(16, 40, Routing(2))
        swiglu = ClampedSwiglu(1.7, 7.0)
        assert refused(plain) is None
        assert refused(replace(plain, activation=swiglu, biased=True, shared_size=24, shared_gate=True)) is None
        assert refused(replace(plain, activation=UngatedActivation.RELU_SQUARED)) is None
        assert refused(replace(plain, routing=Routing(2, scaled=True))) is None
        xielu = refused(replace(plain, activation=UngatedActivation.XIELU))
        assert xielu == "it has no mixture of experts with xielu, and this model has it"
        assert refusal(LAYER, Gemma4Layer(LAYER.mixer, LAYER.feed_forward, beside=plain)) is None
        if native_library.available(torch.bfloat16):
            odd = refused(replace(plain, size=41), torch.bfloat16)
            assert odd is not None
            assert odd.startswith("it needs even sizes, and this model's are [16] of heads, [")

    def test_factors_before_a_norm_are_computed(self):
        scaled = FactoredLayer(MIXER, GatedSpec(80), gate_factor=0.5, part_factor=2.0)
        assert refusal(LAYER, scaled) is None
        assert refusal(LAYER, replace(scaled, norms=Norms.AROUND)) is None

    def test_a_norm_of_all_heads_of_keys_that_are_values_is_refused(self):
        both = refusal(changed(keys_are_values=True, value_norm=True, head_norm=HeadNorm.ALL))
        assert both.startswith("it has no norm of all heads of keys that are values")
        assert refusal(changed(keys_are_values=True, value_norm=True, head_norm=HeadNorm.EACH)) is None


class TestTables:
    def test_layers_with_the_same_rope_share_their_angles(self):
        other = changed(rope=replace(ROPE, theta=500.0))
        tables = Tables.of([LAYER, other, changed(rope=None), LAYER], 9)
        (first, _), (second, _) = tables.angles.values()
        assert not torch.equal(first, second)
        assert torch.equal(first, rotary_table(ROPE.inverse_frequencies(), 9)[0])

    def test_pairs_have_one_angle_and_the_attention_factor_is_in_it(self):
        rope = RopeConfig(6, interleaved=True, attention_factor=1.5)
        cos, sin = Tables.of([changed(rope=rope)], 5).angles[rope]
        angles = torch.outer(torch.arange(5.0), rope.inverse_frequencies())
        for element in range(6):
            torch.testing.assert_close(cos[:, element], 1.5 * angles[:, element // 2].cos())
            torch.testing.assert_close(sin[:, element], 1.5 * angles[:, element // 2].sin())

    @pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 112, 128, 256])
    def test_the_usual_scale_has_the_bits_of_float32_arithmetic(self, head_dim):
        """For 96 and 112 it differs from head_dim^-0.5 rounded to float32."""
        mixer = replace(MIXER, head_dim=head_dim, scale=head_dim**-0.5)
        assert score_scale(mixer) == 1 / np.sqrt(np.float32(head_dim))
        assert score_scale(replace(mixer, scale=0.3)) == 0.3


class GivenWeights:
    """The part of `Weights` that the native decoder asks for."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def embed(self) -> torch.Tensor:
        return self._model.embed

    def norm(self) -> torch.Tensor:
        assert self._model.norm is not None
        return self._model.norm

    def quantised_head(self, embed: torch.Tensor) -> torch.Tensor:
        return self._model.head

    def lm_head_bias(self) -> torch.Tensor | None:
        return self._model.head_bias

    def ends(self, pack=None) -> dict[str, torch.Tensor]:
        return {}

    def embedding_norm(self) -> torch.Tensor | None:
        return self._model.embedding_norm

    def position_table(self) -> torch.Tensor | None:
        return self._model.position_table

    def rope_factors(self) -> torch.Tensor | None:
        return None

    def layers(self, pack: Callable[[torch.Tensor], torch.Tensor], pack_expert: object) -> Iterator[LayerWeights]:
        for layer in self._model.weights:
            parts = {name: part for name, part in vars(layer).items() if name != "whole"}
            yield LayerWeights(**{**parts, **{name: pack(parts[name]) for name in ("qkv", "o", "gate_up", "down")}})


@needs_library
@pytest.mark.native
@pytest.mark.parametrize(
    "kind",
    [
        Kind(
            embedding_multiplier=3.0,
            logits_scale=0.3,
            logits_softcap=2.0,
            residual_multiplier=0.22,
            norm_kind=NormKind.LAYER,
        ),
        Kind(norms=Norms.AFTER, head_norm=HeadNorm.ALL, window=9, softcap=3.0, alternating=True, scale=0.3),
        Kind(
            norm_kind=NormKind.BIASED_LAYER,
            head_biased=True,
            position_table=PositionTable(64),
            activation=UngatedActivation.XIELU,
            head_norm=HeadNorm.ROTATED,
        ),
        Kind(norms=Norms.PARALLEL_TWO_NORMS, window=9, chunked=True, head_norm=HeadNorm.OWN, sinks=True),
        Kind(output_gate=OutputGate.PER_ELEMENT, embedding_norm=True, head_norm=HeadNorm.BARE),
        Kind(slopes=True, clip=0.7, rotated=0.0, embedding_norm=True, norm_kind=NormKind.BIASED_LAYER),
        Kind(output_gate=OutputGate.PER_HEAD, softplus_gates=True, head_norm=HeadNorm.BIASED, norms=Norms.AFTER_MLP),
        Kind(norms=Norms.AROUND, rotated=0.5, interleaved=True, activation=Activation.GELU_TANH, biased=True),
    ],
)
def test_a_model_of_a_configuration_and_weights(kind):
    """All of a specification and of the weights reaches the library."""
    model, length = Model(kind, torch.float32), 40
    arena = Arena(PageLayout(LAYERS, kind.kv_heads, kind.head_dim, BLOCK, 4), 8, torch.float32, "cpu")
    decoder = NativeDecoderModel(Config(model.specs, kind), GivenWeights(model), arena, length, 1)  # type: ignore[arg-type]
    tokens = model.tokens(length)
    position = torch.arange(length)
    attention = decoder.new_attention()
    attention.plan([0, length], torch.tensor([[1, 2, 3]]), [length])
    batch = StepBatch(torch.tensor(tokens), position, position % BLOCK, (position // BLOCK + 1)[None], attention, None)
    found, want = decoder.forward(batch), reference(model, tokens)
    assert (found - want).abs().max() < 2e-5 * want.std()
    decoder.close()
