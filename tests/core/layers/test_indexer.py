"""Sparse attention by an indexer: pages, ranks, adapters, and what is refused. For paths, see `paths`."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from chorus.core.model.program.native_decoder import why_unsupported
from chorus.core.model.program.op import CHOSEN
from chorus.core.model.program.ops.indexers import Choose, Index
from chorus.core.model.program.ops.latents import LatentAttend
from chorus.core.model.program.text import program_lines
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.specs.layers import ropes_of
from chorus.core.model.weights.shard import Shard

from ..paths.asked import answers, told
from ..tiny_families import ADAPTERS, save_family

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]

by_torch = pytest.mark.parametrize("kernels", ["torch"])

V32, GLM_5 = FAMILIES = ("deepseek-v3.2", "glm-5")


def config_of(root, family, **changes):
    """A family's configuration with some fields changed in the file."""
    save_family(family, root)
    file = root / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return read_model_config(root)


@by_torch
def test_pages_keep_the_indexers_keys_next_to_latents(tiny, drive):
    driver = drive(tiny(V32), adapters={}, block_tokens=8)
    layout, model = driver.engine.executor.layout, driver.executor.rank.config
    assert layout.page_bytes == 8 * model.num_layers * (32 + 8 + 16) * 4
    k, v = driver.executor.rank.arena.kv_layers[-1]
    assert (k.shape[2:], v.shape[2:]) == ((1, 56), (1, 32))
    assert k.data_ptr() == v.data_ptr()


@by_torch
def test_layers_that_share_a_choice_keep_latents_alone(tiny, drive):
    layout = drive(tiny(GLM_5), adapters={}).engine.executor.layout
    assert [shape.head_dim for shape in layout.layer_shapes] == [64, 40, 64, 64, 40]


def test_a_layer_attends_to_what_the_last_indexer_chose(tmp_path):
    config = config_of(tmp_path, GLM_5)
    kinds = [[type(op) for op in config.composed(layer).program.ops] for layer in config.layers]
    has_own = [(Index in own, Choose in own) for own in kinds]
    assert has_own == [(True, True), (False, False), (True, True), (True, True), (False, False)]
    attends = [op for layer in config.layers for op in config.composed(layer).program.ops if type(op) is LatentAttend]
    assert [op.chosen for op in attends] == [CHOSEN] * 5


def test_the_indexers_elements_are_paired_as_each_family_does(tmp_path):
    mixers = [config_of(tmp_path / family, family).attention for family in FAMILIES]
    assert [(it.rope.interleaved, it.indexer.rope.interleaved) for it in mixers] == [(True, False), (True, True)]
    assert len(ropes_of(config_of(tmp_path / V32, V32).layers)) == 2


def test_a_program_says_what_the_indexer_does(tmp_path):
    text = "\n".join(program_lines(config_of(tmp_path, V32)))
    assert "q_b_proj, wq_b" in text
    assert "q_a_proj, kv_a_proj_with_mqa, wk, weights_proj" in text
    assert "iq, iw ← index qh[-256:] in[-32:-16] in[-16:]  " in text
    assert "16 heads of 16, rotated by a yarn rope of base 10000; writes a key for all heads" in text
    assert "chosen ← choose iq iw" in text
    assert "12 tokens by the scores of all heads" in text
    assert "sees the 12 tokens that were chosen" in text


def test_every_rank_has_the_whole_indexer(tmp_path):
    share = Shard(1, 2).config(config_of(tmp_path, V32))
    own = {each.path.rpartition(".")[2]: each for each in share.composed(share.layers[0]).projections}
    assert [own[name].is_replicated for name in ("wq_b", "wk", "weights_proj", "q_b_proj")] == [True, True, True, False]
    assert share.attention.indexer == read_model_config(tmp_path).attention.indexer


@by_torch
def test_adapters_target_the_indexer(tiny, drive):
    store = drive(tiny(GLM_5)).engine.store
    targets = {name: set(store.get(name).manifest.targets) for name in ADAPTERS}
    assert targets["r3-all"] >= {"indexer.wq_b", "indexer.wk", "indexer.weights_proj", "q_b_proj", "kv_b_proj"}
    assert targets["r8-qv"] == {"kv_b_proj", "indexer.wk"}


@pytest.mark.parametrize("family", FAMILIES)
@by_torch
def test_all_tokens_are_attended_to_where_no_request_has_more(tiny, drive, family):
    """Then no scores are made, and the answers are those of a model without an indexer."""
    it = tiny(family)
    driver = drive(it, max_model_len=12, block_tokens=4, max_num_batched_tokens=64)
    want = answers(it, driver, 4, seed=4, lengths=(3, 6), tokens=5)
    assert told(driver, want) == want


@pytest.mark.native
@pytest.mark.parametrize("kernels", ["native"])
@pytest.mark.parametrize("family", [*FAMILIES, "minimax-m3-plain"])
def test_the_native_decoder_scores_long_contexts_in_parts(tmp_path, drive, family):
    """Of more keys than a unit of work has, and more tokens than a step: each by itself, as PyTorch's operators do."""
    save_family(family, tmp_path, max_position_embeddings=2048)
    it, rng = SimpleNamespace(model=tmp_path, adapters={}), random.Random(0)
    prompt = [rng.randrange(3, 150) for _ in range(1300)]
    found = {}
    for kernels, chunk in (("torch", 2048), ("native", 2048), ("native", 500)):
        driver = drive(it, max_num_batched_tokens=chunk, max_num_seqs=2, cpu_kernels=kernels)
        answer = driver.run("it", None, prompt, max_tokens=4, prompt_logprobs=1, logprobs=1)
        scores = [each.logprob for each in (*answer.prompt_logprobs, *answer.logprobs)]
        found[kernels, chunk] = torch.tensor(scores)
    assert torch.equal(found["native", 2048], found["native", 500])
    far = (found["native", 500] - found["torch", 2048]).abs() > 1e-3
    assert far.sum() <= 6, "a near tie may go the other way"


def test_the_native_decoder_needs_keys_of_even_sizes_in_bfloat16(tmp_path):
    config = config_of(tmp_path, V32)
    layers = tuple(
        replace(layer, mixer=replace(layer.mixer, indexer=replace(layer.mixer.indexer, key_dim=17)))
        for layer in config.layers
    )
    assert why_unsupported(config, torch.bfloat16) is None
    assert "needs even sizes" in (why_unsupported(replace(config, layers=layers), torch.bfloat16) or "")


@by_torch
def test_float8_is_refused_by_name(tiny, drive):
    with pytest.raises(UnsupportedModel, match="kv_cache_dtype is 'fp8', but the model's layers keep latents"):
        drive(tiny(V32), kv_cache_dtype="fp8")


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({"indexer_types": None, "index_topk_freq": 2}, "FFSFS"),
        ({"indexer_types": None, "index_topk_freq": 3, "index_skip_topk_offset": 1}, "FSSFS"),
        ({"indexer_types": None, "index_topk_freq": 0}, "FFFFF"),
        ({"indexer_types": None, "index_topk_pattern": "FSSFS", "index_topk_freq": 2}, "FSSFS"),
        ({"indexer_types": None, "index_topk_pattern": ["full", *["shared"] * 4]}, "FSSSS"),
        ({"indexer_types": ["full", "full", "shared", "shared", "full"], "index_topk_pattern": "FSSFS"}, "FFSSF"),
    ],
)
def test_layers_with_an_indexer_are_those_of_transformers(tmp_path, changes, kinds):
    from transformers import AutoConfig

    config = config_of(tmp_path, GLM_5, **changes)
    assert "".join("S" if it.indexer is None else "F" for it in config.attention_layers) == kinds
    theirs = AutoConfig.from_pretrained(tmp_path).indexer_types
    assert [kind[0].upper() for kind in theirs] == [*kinds]


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        (V32, {"q_lora_rank": None}, "q_lora_rank is None: queries have latents in this family"),
        (V32, {"index_head_dim": 6}, "index_head_dim is 6: qk_rope_head_dim, 8, of its elements rotate"),
        (V32, {"layer_types": ["full_attention"] * 2}, "full_attention is not supported; supported: indexed_attention"),
        (GLM_5, {"indexer_rope_interleave": False}, "leaves it out for this family; only true is supported"),
        (V32, {"index_topk": 0}, "index_topk is 0: a whole number of at least 1 is needed"),
        (V32, {"scoring_func": "softmax"}, "scoring_func is 'softmax': softmax is not supported; supported: sigmoid"),
        (GLM_5, {"indexer_types": ["full"] * 4}, "4 types for num_hidden_layers, 5"),
        (GLM_5, {"indexer_types": ["shared"] + ["full"] * 4}, "no layer before the first one has chosen tokens"),
        (
            GLM_5,
            {"indexer_types": None, "index_topk_freq": 2, "index_skip_topk_offset": 0},
            "index_topk_freq is 2: no layer before the first one has chosen tokens",
        ),
        (GLM_5, {"indexer_types": ["full"] * 4 + ["half"]}, "half is not supported; supported: full, shared"),
        (GLM_5, {"indexer_types": None, "index_topk_pattern": "FSXFS"}, "X is not supported; supported: full, shared"),
    ],
)
def test_what_is_not_computed_is_refused_by_its_field(tmp_path, family, changes, why):
    with pytest.raises(UnsupportedModel) as error:
        config_of(tmp_path, family, **changes)
    assert why in str(error.value)


def test_a_rank_without_an_indexer_has_the_top_k_of_the_layer_before(tmp_path):
    full, shared, *_ = config_of(tmp_path, GLM_5).attention_layers
    assert replace(full, indexer=None, form="shared") == shared
    assert (shared.top_k_within(12), shared.top_k_within(13)) == (None, 12)
