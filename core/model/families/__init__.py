"""Families of checkpoints that are served, by architecture."""

from __future__ import annotations

from ..family import Family
from . import (
    cohere,
    exaone,
    gemma,
    gemma_2,
    gemma_3,
    glm,
    glm_moe,
    gpt_oss,
    granite,
    internlm,
    llama,
    mistral,
    mixtral,
    olmo,
    olmoe,
    phi,
    qwen,
    qwen3_5,
    qwen3_moe,
    seed_oss,
    smollm3,
)

ALL: tuple[Family, ...] = (
    llama.LLAMA,
    mistral.MISTRAL,
    mistral.MINISTRAL,
    mistral.MINISTRAL_3,
    mistral.MISTRAL_3,
    qwen.QWEN2,
    qwen.QWEN3,
    qwen.QWEN2_VL,
    qwen.QWEN3_VL,
    qwen3_5.QWEN3_5,
    gemma.GEMMA,
    gemma_2.GEMMA_2,
    gemma_3.GEMMA_3,
    gemma_3.GEMMA_3_TEXT,
    granite.GRANITE,
    granite.GRANITE_4,
    phi.PHI_3,
    smollm3.SMOLLM3,
    olmo.OLMO_2,
    olmo.OLMO_3,
    glm.GLM,
    glm.GLM_4,
    exaone.EXAONE_4,
    cohere.COHERE_2,
    internlm.INTERNLM_3,
    seed_oss.SEED_OSS,
    mixtral.MIXTRAL,
    qwen3_moe.QWEN3_MOE,
    olmoe.OLMOE,
    granite.GRANITE_MOE,
    glm_moe.GLM_4_MOE,
    gpt_oss.GPT_OSS,
    qwen3_5.QWEN3_5_MOE,
)

FAMILIES = {architecture: family for family in ALL for architecture in family.architectures}
"""A checkpoint's architecture → its family."""
