"""Maximum length of a request."""

from __future__ import annotations

import logging

from ..config import EngineConfig
from ..model.config import ModelConfig, UnsupportedModel

logger = logging.getLogger(__name__)


def max_model_len_of(config: EngineConfig, model: ModelConfig) -> int:
    """The configured limit, or else the model's: its positions, or its sliding window where that is shorter.

    Within the window, windowed attention is plain causal attention; beyond it is not served.
    """
    limit = model.max_context
    name = "max_position_embeddings" if limit == model.max_position_embeddings else "sliding_window"
    if config.max_model_len is None:
        if limit < model.max_position_embeddings:
            logger.info(
                "max_model_len is %d, the model's sliding window, not its %d positions", limit,
                model.max_position_embeddings,
            )  # fmt: skip
        return limit
    if config.max_model_len > limit:
        raise UnsupportedModel(f"max_model_len is {config.max_model_len}, the model's {name} {limit}; lower it")
    return config.max_model_len
