"""Inkling's convolutions in a layer: the parts of its program, states in pages, published names of tensors."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.core.model.families.inkling.ops import ConvolveStream
from chorus.core.model.paged_states import StatePages, layers_with_states
from chorus.core.model.program.ops.attend import Attend
from chorus.core.model.read_config import read_model_config
from chorus.memory.pages.states import StateLayout, StateShape
from chorus.ops.mixers.conv_place import ConvPlace
from chorus.ops.mixers.recurrent import RecurrentState

from ..model.checkpoints.quantization.twins import weights
from ..tiny_families import save_family

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]


@pytest.fixture
def model(tmp_path):
    save_family("inkling", tmp_path)
    return tmp_path


def test_a_layers_program_is_cut_at_each_look_at_the_past(model):
    config = read_model_config(model)
    for spec in config.layers:
        segments = config.composed(spec).program.segments
        assert [type(op) for each in segments for op in each.mixers] == [
            ConvolveStream, Attend, ConvolveStream, ConvolveStream,
        ]  # fmt: skip
        places = [op.place for each in segments for op in each.mixers if isinstance(op, ConvolveStream)]
        assert places == [*ConvPlace]
        assert not any(each.after for each in segments[:-1])


def test_states_of_parts_lie_in_the_pages_of_one(model):
    """What a part writes is what it reads, and the others' channels stay."""
    config = read_model_config(model)
    spec = config.recurrent
    shape = StateShape(config.num_recurrent_layers, spec.conv_shape[0] * spec.channels, 0, 0, spec.draft_size, 2)
    layout = StateLayout(shape, 8192)

    class Arena:
        pages = torch.full((12, 2048), torch.nan)

    states = StatePages(spec, layout, Arena, layers_with_states(config))
    held = torch.arange(layout.num_pages)[None]
    convs = config.layers[1].recurrent
    own = convs.weights({path: torch.zeros(each.shape) for path, each in convs.tensors.items()}).by_place
    written = {}
    for place in ConvPlace:
        width = own[place].conv.shape[1]
        written[place] = torch.randn(1, 3, width), torch.randn(1, 2, width)
        state = RecurrentState(written[place][0].clone(), torch.empty(1, 0), written[place][1].clone())
        states.write(1, held, state, 2, own[place].part)
    for place, (conv, drafts) in written.items():
        found = states.read(1, held, torch.tensor([False]), 2, own[place].part)
        assert torch.equal(found.conv, conv)
        assert torch.equal(found.drafts, drafts)
        assert not states.read(1, held, torch.tensor([True]), 2, own[place].part).conv.any()


def _published(tensors):
    """The tensors under the names of published checkpoints, rows of gate and up in turn."""
    found = {}
    renamed = [
        ("self_attn.rel", "attn.rel"), ("self_attn.q_norm", "attn.q_norm"), ("self_attn.k_norm", "attn.k_norm"),
        ("self_attn.k_sconv.conv1d", "attn.k_sconv"), ("self_attn.v_sconv.conv1d", "attn.v_sconv"),
        ("attn_sconv.conv1d", "attn_sconv"), ("mlp_sconv.conv1d", "mlp_sconv"),
        ("self_attn.q_proj", "attn.wq_du"), ("self_attn.k_proj", "attn.wk_dv"), ("self_attn.v_proj", "attn.wv_dv"),
        ("self_attn.r_proj", "attn.wr_du"), ("self_attn.o_proj", "attn.wo_ud"),
        ("post_attention_layernorm", "mlp_norm"), ("input_layernorm", "attn_norm"),
        ("e_score_correction_bias", "bias"), ("embed_tokens.embed_norm", "embed_norm"), ("embed_tokens", "embed"),
        ("mlp.experts.down_proj", "mlp.experts.w2_weight"),
        ("shared_experts.down_proj", "shared_experts.shared_w2_weight"),
        ("mlp.down_proj", "mlp.w2_md"),
    ]  # fmt: skip
    for name, tensor in tensors.items():
        if name == "lm_head.weight":
            found["model.llm.unembed.weight"] = tensor
            continue
        name = name.replace("model.", "model.llm.", 1)
        if "up_proj" in name and "gate_up" not in name:
            continue
        if "mlp.experts.gate_up_proj" in name:
            name, tensor = name.replace("gate_up_proj", "w13_weight"), _in_turns(*tensor.chunk(2, 1), 1)
        elif "shared_experts.gate_proj" in name:
            up = tensors[name.replace("model.llm.", "model.").replace("gate_proj", "up_proj")]
            name, tensor = name.replace("gate_proj", "shared_w13_weight"), _in_turns(tensor, up, 1)
        elif "mlp.gate_proj" in name:
            up = tensors[name.replace("model.llm.", "model.").replace("gate_proj", "up_proj")]
            name, tensor = name.replace("gate_proj", "w13_dn"), _in_turns(tensor, up, 0)
        for ours, theirs in renamed:
            if ours in name:
                name = name.replace(ours, theirs)
                break
        found[name] = tensor.contiguous()
    return found


def _in_turns(gate, up, dim):
    return torch.stack((gate, up), dim + 1).flatten(dim, dim + 1)


def test_published_tensors_are_the_same(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("published")
    (path / "config.json").write_text((model / "config.json").read_text())
    save_file(_published(load_file(model / "model.safetensors")), path / "model.safetensors")
    both = zip(weights(model, torch.float32), weights(path, torch.float32), strict=True)
    assert all(want is found is None or torch.equal(want, found) for want, found in both)
