"""GLM-5.3-Flash: pools of tokens that an indexer chooses, decays with a bound, mixed streams; what is refused.

For paths, see `paths`.
"""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chorus.core.model.config_json import ConfigJson
from chorus.core.model.families.glm_next import GLM_5_NEXT_TEXT
from chorus.core.model.program.layer_program import Kept
from chorus.core.model.program.text import program_lines
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.specs.hyper_connections import HyperConnectionSpec
from chorus.ops.attention.indexer import chosen_pools
from chorus.ops.mixers.gated_delta import DeltaWeights, _inputs
from chorus.ops.mixers.recurrent import RecurrentState

from ..paths.asked import answers, told
from ..test_families import executor_of, logits_of
from ..tiny_families import save_family

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]

GLM, PROMPTS = "glm-5.3-flash", [list(range(3, 43)), [9, 8, 7]]
by_torch = pytest.mark.parametrize("kernels", ["torch"])


@pytest.fixture
def model(tmp_path):
    save_family(GLM, tmp_path)
    return tmp_path


def with_text(path, **fields):
    """A configuration with other values of its text part's fields; None: without them."""
    raw = json.loads((path / "config.json").read_text())
    text = {**raw["text_config"], **fields}
    raw["text_config"] = {name: value for name, value in text.items() if value is not None}
    (path / "config.json").write_text(json.dumps(raw))
    return path


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), pool=st.integers(1, 6), count=st.integers(1, 5), tokens=st.integers(20, 50))
def test_indices_of_transformers(seed, pool, count, tokens):
    """The very module of GLM-5.3-Flash chooses the same tokens."""
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextIndexer

    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "q_lora_rank": 16, "index_n_heads": 40, "index_head_dim": 12}
    config = Glm5NextTextConfig(**sizes, index_topk=count * pool, index_kpool=pool)
    indexer = Glm5NextTextIndexer(config, 0)
    with torch.no_grad():
        for each in indexer.parameters():
            each.normal_()
        x, low = torch.randn(1, tokens, 32), torch.randn(1, tokens, 16)
        theirs = indexer(x, low, torch.ones(1, tokens, dtype=torch.bool), None)
        q, k = indexer.wq_b(low).view(1, tokens, 40, 12), indexer.k_norm(indexer.wk(x))
        kept = torch.cat((k, x @ indexer.index_kpool_compress_gate.T), -1)
        seen, most = torch.ones(1, tokens, tokens, dtype=torch.bool).tril(), count * pool + pool - 1
        if tokens <= most:
            return  # all are attended to
        ours = chosen_pools(q, indexer.weights_proj(x), kept, seen, most, indexer.index_kpool_compress_ape)
    assert ours.shape == (1, tokens, most)
    for token in range(tokens):
        own = [each for each in ours[0, token].tolist() if each <= token]
        assert len(own) == len(set(own))
        assert sorted(own) == sorted(each for each in theirs[0, token].tolist() if each >= 0)


def test_a_choice_of_pools_does_not_depend_on_how_many_places_there_are():
    torch.manual_seed(1)
    q, weights, kept = torch.randn(1, 1, 4, 6), torch.randn(1, 1, 4), torch.randn(1, 60, 12)
    biases, length = torch.randn(4, 6), 31
    seen = torch.arange(60)[None, None] < length
    found = [chosen_pools(q, weights, kept[:, :n], seen[..., :n], 11, biases) for n in (31, 32, 40, 60)]
    own = [[each for each in one[0, 0].tolist() if each < length] for one in found]
    assert own == [own[0]] * 4
    assert {28, 29, 30} <= set(own[0])
    assert len(own[0]) == 11
    kept[:, length:] = torch.nan
    assert torch.equal(chosen_pools(q, weights, kept, seen, 11, biases), found[-1])


def test_decays_have_a_bound_as_transformers_module_says():
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextForgetGate

    torch.manual_seed(0)
    gate = Glm5NextTextForgetGate(Glm5NextTextConfig(hidden_size=16, linear_head_dim=8, linear_num_heads=3))
    with torch.no_grad():
        for each in gate.parameters():
            each.normal_()
        x = torch.randn(1, 5, 16)
        decays = gate.f_b_proj(gate.f_a_proj(x))[0]
        taps, norm = torch.randn(2, 72), torch.ones(8)
        weights = DeltaWeights(taps, gate.dt_bias, gate.A_log, norm, 1e-5, by_channel=True, bound=-5.0)
        state = RecurrentState(torch.zeros(1, 1, 72), torch.zeros(1, 3, 8, 8))
        rows = torch.cat((torch.randn(5, 72), torch.randn(5, 24 + 3), decays), 1)
        found = _inputs(rows[:, :72], rows, weights, state).log_decay
        assert torch.allclose(found, gate(x)[0], rtol=1e-5, atol=1e-6)
    assert found.min() >= -5.0
    assert found.max() <= 0.0


@by_torch
def test_pages_keep_keys_and_gates_next_to_latents(tiny, drive):
    layout = drive(tiny(GLM), adapters={}).engine.executor.layout
    assert [shape.head_dim for shape in layout.layer_shapes] == [32 + 2 * 16, 32]


def test_mixed_streams_live_across_mixers_in_float32(model):
    config = read_model_config(model)
    assert config.streams == HyperConnectionSpec(3, 1e-5, 1e-6, rounds=4, joined=False)
    for layer in config.layers:
        reads = config.composed(layer).program.reads
        assert {Kept("give", (3,), is_wide=True), Kept("mix", (9,), is_wide=True)} <= {*reads}


def test_a_program_says_what_is_mixed_and_chosen(model):
    text = "\n".join(program_lines(read_model_config(model)))
    assert "numbers of 3 streams, eps 1e-05, mixed by 4 rounds of Sinkhorn-Knopp: ffn_hyper" in text
    assert "s ← mixᵀ · s + give ⊗ y" in text
    assert "not rotated; writes a key for all heads, and gates of pools of 4" in text
    assert "joined ← sum_streams s" in text


@by_torch
def test_all_tokens_are_attended_to_where_no_request_has_more(tiny, drive):
    it = tiny(GLM)
    driver = drive(it, max_model_len=15, max_num_batched_tokens=64)
    want = answers(it, driver, 4, seed=4, lengths=(3, 6), tokens=5)
    assert told(driver, want) == want


def test_random_weights_need_no_checkpoint(model):
    for file in model.glob("*.safetensors"):
        file.unlink()
    assert logits_of(executor_of(model, load_format="dummy"), [[3, 4, 5]]).isfinite().all()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu': limited activations are supported with silu alone"),
        ({"qk_rope_head_dim": 8}, "qk_rope_head_dim is 8: transformers rotates nothing"),
        ({"index_kpool_always_select_tail": False}, "first tokens would see nothing"),
        ({"index_topk": 13}, "index_topk is 13: index_kpool is 4; it must be a multiple"),
        ({"linear_lower_bound": 1.0}, r"linear_lower_bound is 1\.0: a finite number below 0"),
        ({"indexer_types": ["full", "shared", "full", "full"]}, "layer 1 shares a choice"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "sliding_attention is not supported"),
        ({"q_lora_rank": 0}, "q_lora_rank"),
    ],
)
def test_what_is_not_computed_is_refused_by_its_field(model, fields, why):
    with pytest.raises(UnsupportedModel, match=why):
        read_model_config(with_text(model, **fields))


@pytest.mark.parametrize(
    ("linear", "lowest"),
    [
        ({}, -5.0),
        ({"linear_lower_bound": -2.0}, -2.0),
        ({"linear_lower_bound": None}, None),
        ({"linear_attn_config": {"head_dim": 16, "gate_lower_bound": -3.0}, "linear_lower_bound": -2.0}, -3.0),
        ({"linear_attn_config": {"num_heads": 4}, "linear_lower_bound": None}, -5.0),
        ({"linear_attn_config": {"num_heads": 4, "safe_gate": False}, "linear_lower_bound": None}, None),
    ],
)
def test_the_bound_of_decays_is_that_of_transformers(tmp_path, linear, lowest):
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig

    shape = {"vocab_size": 150, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
    raw = {**shape, "num_attention_heads": 64, **linear}
    fields = ConfigJson(tmp_path, raw).with_defaults(GLM_5_NEXT_TEXT.defaults)
    config, theirs = GLM_5_NEXT_TEXT.read(fields), Glm5NextTextConfig(**raw)
    found = config.recurrent
    assert (found.bound or None, found.k_dim, found.num_k_heads) == (
        lowest,
        theirs.linear_head_dim,
        theirs.linear_num_heads,
    )
    assert theirs.linear_lower_bound == lowest
    assert [layer.attention is not None for layer in config.layers] == [False, False, False, True]
