"""The projections that an adapter on PEFT's "all-linear" has, in families whose layers have others than most."""

from __future__ import annotations

from typing import Any

import pytest

from chorus.core.model.read_config import read_model_config
from chorus.memory.files.format import inspect_adapter

from ..tiny_families import make_all_linear

pytestmark = pytest.mark.wide

HEADS = "q_proj k_proj v_proj o_proj"
MLP = "gate_proj up_proj down_proj"
SHARED = "shared_expert.gate_proj shared_expert.up_proj shared_expert.down_proj"
LATENTS = "q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj o_proj"
INDEXER = "indexer.wq_b indexer.wk indexer.weights_proj"


def of_kind(kind: str, names: str) -> str:
    """Names of projections with sizes of their own in layers of one kind."""
    return " ".join(f"{name}@{kind}" for name in names.split())


TARGETS: dict[str, tuple[str, ...]] = {
    "ax-k2": (
        LATENTS,
        INDEXER,
        MLP,
        SHARED,
        *(f"{norm}_norm.fc{one}" for norm in ("attention", "mlp") for one in "12"),
    ),
    "bitnet": (HEADS, MLP),
    "dbrx": (HEADS, "gate"),
    "diffllama": (HEADS, MLP),
    "dots-3-note": (f"g_proj {LATENTS}", of_kind("sliding", f"g_proj {LATENTS}"), INDEXER, MLP, SHARED),
    "glm-5.3-flash": (
        *(LATENTS, INDEXER, MLP, SHARED),
        *("b_proj f_a_proj f_b_proj g_a_proj g_b_proj", of_kind("linear", HEADS)),
    ),
    "hy-v4": ("g_proj", LATENTS, INDEXER, MLP, SHARED),
    "inkling": (f"r_proj {HEADS}", of_kind("sliding", f"r_proj {HEADS}"), MLP),
    "jetmoe": ("k_proj v_proj query_router gate",),
    "mimo-v2-flash": (HEADS, of_kind("full", HEADS), MLP),
    "minimax-m3": (HEADS, "indexer.q_proj indexer.k_proj", MLP, SHARED),
    "muse-spark": ("g_proj", HEADS, MLP, "pre_expert_proj post_expert_proj"),
    "qwen4-exp": (
        *("attn_down attn_give attn_up mlp_down mlp_give mlp_up join_down join_up key_proj value_proj", HEADS),
        *("in_proj_qkv in_proj_z in_proj_a in_proj_b out_proj indexer.index_qk_proj shared_expert_gate", SHARED),
    ),
    "step-3.7": (f"g_proj {HEADS}", of_kind("6_heads", f"g_proj {HEADS}"), MLP, SHARED),
    "zaya": ("q_proj k_proj v_proj_current v_proj_delayed o_proj router.down_proj router.fc1 router.fc2 gate",),
}

#: Of `LoraConfig`, beside what all have.
ARGUMENTS: dict[str, dict[str, Any]] = {"glm-5.3-flash": {"exclude_modules": ".*visual.*"}}


@pytest.mark.parametrize("family", TARGETS)
def test_adapters_are_on_all_linear_modules(family):
    it = make_all_linear(family, **ARGUMENTS.get(family, {}))
    found = inspect_adapter(it.adapters["all"], read_model_config(it.model).module_paths)
    assert {each.replace(" ", "_") for each in found.targets} == {*" ".join(TARGETS[family]).split()}
