"""JetMoE, with experts of queries around shared keys and values: names, products, refusals. For paths, see `paths`."""

from __future__ import annotations

import pytest
import torch

from chorus.core.model.families.jetmoe.matrices import ListedQueries
from chorus.core.model.families.jetmoe.ops import OutputsOfExperts, QueriesOfExperts
from chorus.core.model.program.native_decoder import why_unsupported
from chorus.core.model.program.text import program_lines
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.specs.feed_forward import Routing, Scoring
from chorus.core.model.weights.shard import Shard
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.format import inspect_adapter
from chorus.ops.gemm import packed_gemm
from chorus.ops.moe import expert_gemms

from ..tiny_families import load_model, save_family
from .test_narrow_values import changed

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]


@pytest.fixture
def model(tmp_path):
    save_family("jetmoe", tmp_path)
    return tmp_path


@pytest.fixture
def listed():
    generator = torch.Generator().manual_seed(2)
    queries, outputs = torch.randn(5, 12, 8, generator=generator), torch.randn(5, 8, 12, generator=generator)
    return ListedQueries([*queries], [*outputs])


def test_matrices_are_multiplied_with_the_rows_that_go_to_them(listed):
    x, logits = torch.randn(7, 8), torch.randn(7, 5)
    choice = listed.choose(logits, Routing(2, Scoring.SOFTMAX_OF_CHOSEN))
    best = logits.topk(2)
    assert torch.equal(choice.experts, best.indices)
    torch.testing.assert_close(choice.weights, best.values.softmax(-1))
    q = listed.queries_of(x, choice.experts).view(7, 2, 12)
    y = listed.outputs_of(q.flatten(0, 1), choice.experts, choice.weights)
    for row, place in ((row, place) for row in range(7) for place in range(2)):
        torch.testing.assert_close(q[row, place], listed.queries[choice.experts[row, place]] @ x[row])
    want = [sum(w * listed.outputs[e] @ p for w, e, p in zip(*each, strict=True)) for each in zip(
        choice.weights, choice.experts.tolist(), q, strict=True)]  # fmt: skip
    torch.testing.assert_close(y, torch.stack(want))


@pytest.mark.parametrize("pack", [packed_gemm.pack, expert_gemms.pack], ids=["onednn", "library"])
def test_a_rows_bits_do_not_depend_on_other_rows(listed, pack):
    listed = ListedQueries([pack(each) for each in listed.queries], [pack(each) for each in listed.outputs])
    x, chosen = torch.randn(40, 8), torch.randint(0, 5, (40, 2))
    weights = torch.rand(40, 2)
    q = listed.queries_of(x, chosen)
    y = listed.outputs_of(q, chosen, weights)
    for row in (0, 17, 39):
        alone = listed.queries_of(x[row : row + 1], chosen[row : row + 1])
        assert torch.equal(alone, q[2 * row : 2 * row + 2])
        assert torch.equal(listed.outputs_of(alone, chosen[row : row + 1], weights[row : row + 1])[0], y[row])


def test_slots_and_heads(model):
    config = read_model_config(model)
    attention = config.layers[0].attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (6, 2, 16)
    own = {slot.name: slot for slot in config.composed(config.layers[0]).slots}
    assert (own["query_experts.queries"].count, own["query_experts.queries"].tensors[3].shape) == (8, (32, 64))
    assert own["query_experts.outputs"].tensors[7].path == "self_attn.experts.7.o_proj.weight"
    assert {"outputs_bias", "experts_bias"} <= own.keys()
    assert (config.norm.eps, config.final_norm.eps) == (1e-6, 1e-5), "the file's is of the last norm alone"


def test_the_file_names_the_width_of_heads_as_transformers_does(model):
    assert read_model_config(changed(model, kv_channels=24)).head_dim == 24
    with pytest.raises(UnsupportedModel, match=r"head_dim.*another name of kv_channels"):
        read_model_config(changed(model, kv_channels=24, head_dim=8))


def test_the_program_and_its_text(model):
    config = read_model_config(model)
    program = config.composed(config.layers[0]).program
    kinds = [type(op) for op in program.ops]
    assert kinds.index(QueriesOfExperts) < kinds.index(OutputsOfExperts)
    assert {each.name for each in program.reads} == {"q", "ec", "ew"}, "experts and weights outlive a captured piece"
    text = "\n".join(program_lines(config))
    assert "8 experts of queries, 3 for each token" in text
    assert "8 experts of outputs, 3 for each token" in text


def test_the_native_decoder_refuses_it_by_name(model):
    assert why_unsupported(read_model_config(model), torch.float32) == (
        "it has no experts of queries, and this model has it"
    )


def test_ranks_share_heads_of_keys(model):
    config = read_model_config(model)
    assert Shard(0, 2).config(config).layers[0].attention.num_heads == 3
    with pytest.raises(UnsupportedModel, match=r"num_key_value_heads 2, for which experts have queries.*one of 1, 2"):
        Shard(0, 4).config(read_model_config(changed(model, num_experts_per_tok=4)))


def test_adapters_on_experts_of_queries_are_refused(model, tmp_path_factory):
    from peft import LoraConfig, get_peft_model

    path = tmp_path_factory.mktemp("adapter")
    lora = LoraConfig(
        r=2, target_parameters=["self_attention.experts.input_linear.weight"], target_modules=[], task_type="CAUSAL_LM"
    )
    get_peft_model(load_model(model), lora).save_pretrained(path)
    with pytest.raises(AdapterFormatError, match=r"input_linear"):
        inspect_adapter(path, read_model_config(model).module_paths)
