"""The program of a layer.

Tests: tests/core/model/program/test_builder.py
"""

from __future__ import annotations

from ..specs.gated_streams import GatedStreamsSpec
from ..specs.head_conv import HeadConvSpec
from ..specs.hyper_connections import HyperConnectionSpec
from ..specs.layers import LayerSpec, StreamsSpec
from ..specs.norms import NormSpec
from ..specs.shared_block import SharedBlock
from ..specs.stream_convs import StreamConvSpec
from .builder import LayerBuilder, LayerProgram
from .conv_builders import ConvBuilder, ConvolvedBuilder
from .gated_builder import GatedBuilder
from .other_builders import BlockBuilder, HyperBuilder, StreamBuilder


def layer_program(spec: LayerSpec, norm: NormSpec) -> LayerProgram:
    """The program of a layer with norms of this kind. spec: of a TP rank's share."""
    builder = LayerBuilder(spec, norm)
    match spec.block or spec.streams or spec.convs:
        case SharedBlock() as block:
            builder = BlockBuilder(spec, norm, block)
        case StreamsSpec() as streams:
            builder = StreamBuilder(spec, norm, streams)
        case HyperConnectionSpec() as streams:
            builder = HyperBuilder(spec, norm, streams)
        case GatedStreamsSpec() as streams:
            builder = GatedBuilder(spec, norm, streams)
        case HeadConvSpec() as convs:
            builder = ConvolvedBuilder(spec, norm, convs)
        case StreamConvSpec() as convs:
            builder = ConvBuilder(spec, norm, convs)
        case None:
            pass
    builder.build()
    before, mixers, after = map(tuple, builder.parts)
    return LayerProgram(before, mixers, after, tuple(builder.reads), tuple(builder.mixed), builder.earlier)
