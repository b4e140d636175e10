"""Which class writes a layer, and what it wrote.

Tests: tests/core/model/program/test_golden.py
"""

from __future__ import annotations

from functools import cache

from ..specs.attention import AttentionSpec
from ..specs.gated_streams import GatedStreamsSpec
from ..specs.head_conv import HeadConvSpec
from ..specs.hyper_connections import HyperConnectionSpec
from ..specs.layers import LayerSpec, StreamsSpec
from ..specs.norms import NormSpec
from ..specs.stream_convs import StreamConvSpec
from .build import Build
from .layers.ax import AxLayer
from .layers.bitnet import BitNetLayer
from .layers.decoder import DecoderLayer
from .layers.diffllama import DiffLlamaLayer
from .layers.dots_3 import Dots3Layer
from .layers.falcon_h1 import FalconH1Layer
from .layers.gated_streams import GatedStreamsLayer
from .layers.gemma_3n import Gemma3nLayer
from .layers.gemma_4 import Gemma4Layer
from .layers.hyper import HyperConnectedLayer
from .layers.inkling import InklingLayer
from .layers.jetmoe import JetMoeLayer
from .layers.longcat import LongCatLayer
from .layers.mimo import MiMoLayer
from .layers.mistral_large_4 import MistralLarge4Layer
from .layers.muse import MuseLayer
from .layers.zamba import ZambaLayer
from .layers.zaya import ZayaLayer

_BY_STREAMS: dict[type, type[DecoderLayer]] = {
    StreamsSpec: Gemma3nLayer,
    HyperConnectionSpec: HyperConnectedLayer,
    GatedStreamsSpec: GatedStreamsLayer,
}
_BY_CONVS: dict[type, type[DecoderLayer]] = {StreamConvSpec: InklingLayer, HeadConvSpec: ZayaLayer}


@cache
def composed(spec: LayerSpec, norm: NormSpec, hidden: int) -> Build:
    """A layer as its class writes it, with norms of this kind. hidden: width of the residual stream."""
    found = Build(hidden, norm)
    _class_of(spec)(spec).build(found)
    return found


def _class_of(spec: LayerSpec) -> type[DecoderLayer]:
    """By what the layer has that others have not."""
    if spec.streams is not None:
        return _BY_STREAMS[type(spec.streams)]
    if spec.convs is not None:
        return _BY_CONVS[type(spec.convs)]
    has = {
        ZambaLayer: spec.block,
        AxLayer: spec.norm_gates,
        FalconH1Layer: spec.mixer_beside,
        ZayaLayer: spec.scales_residual or spec.takes_routed,
        MuseLayer: spec.scales_first or spec.residual_temperature or spec.out_eps,
        LongCatLayer: spec.is_late or spec.takes_late,
        Gemma4Layer: spec.beside or spec.scaled or spec.input_size,
    }
    found = next((each for each, own in has.items() if own), DecoderLayer)
    return found if spec.attention is None or found is not DecoderLayer else _class_by(spec.attention)


def _class_by(a: AttentionSpec) -> type[DecoderLayer]:
    """By what attention has."""
    has = {
        JetMoeLayer: a.query_experts,
        DiffLlamaLayer: a.difference,
        BitNetLayer: a.inner_norm,
        MiMoLayer: a.value_dim or a.value_factor != 1.0,
        MistralLarge4Layer: a.grows,
        Dots3Layer: a.latent is not None and a.latent.norms_key,
    }
    return next((each for each, own in has.items() if own), DecoderLayer)
