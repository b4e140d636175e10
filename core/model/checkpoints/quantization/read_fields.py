"""Readers that formats share, of fields of `quantization_config`."""

from __future__ import annotations

import re
from collections.abc import Set as AbstractSet

from ...config_json import ConfigJson
from .module_list import ModuleList

#: Fields of AWQ and GPTQ that say how the checkpoint was made and how kernels run; without effect on its weights.
OF_TOOLS = {
    "act_group_aware",
    "adapter",
    "backend",
    "batch_size",
    "block_name_to_quantize",
    "cache_block_outputs",
    "damp_auto_increment",
    "damp_percent",
    "dataset",
    "disable_exllama",
    "exllama_config",
    "lm_head",
    "max_input_length",
    "meta",
    "model_file_base_name",
    "model_name_or_path",
    "model_seqlen",
    "module_name_preceding_first_block",
    "mse",
    "offload_to_disk",
    "offload_to_disk_path",
    "pad_token_id",
    "quantizer",
    "static_groups",
    "sym",
    "tokenizer",
    "true_sequential",
    "use_cuda_fp16",
    "use_exllama",
}


def check_known(fields: ConfigJson, used: AbstractSet[str], no_effect: AbstractSet[str] = frozenset()) -> None:
    """Raise UnsupportedModel for a field that is neither used nor known to have no effect on weights."""
    for name in sorted(fields.raw.keys() - used - no_effect):
        raise fields.refuse(name, f"unknown field; known: {', '.join(sorted(used | no_effect))}")


def read_modules(fields: ConfigJson, *names: str) -> ModuleList:
    """The modules that some fields list."""
    entries = []
    for name in names:
        entries += (of_field := fields.texts(name))
        try:
            ModuleList(of_field)
        except re.error as error:
            raise fields.refuse(name, f"{error.pattern!r} is not a regular expression: {error}") from None
    return ModuleList(entries)


def read_group_size(fields: ConfigJson, name: str, default: int = 128) -> int | None:
    """Columns per group; None for −1, which means one group a row."""
    if fields.raw.get(name) == -1:
        return None
    return fields.integer(name, default)


def num_groups(columns: int, size: int | None) -> int:
    """Groups of `size` columns, of which the last may be shorter; None: one."""
    return 1 if size is None else -(-columns // size)
