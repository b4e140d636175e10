"""Recognises directories and tensors that can't be served, and says how to fix them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from .directory import AdapterDirectory
from .error import AdapterFormatError, shown

PICKLE_FILE = "adapter_model.bin"

_CHECKPOINT = re.compile(r"checkpoint-([0-9]{1,12})")
_MOST_LOOKED_AT = 256
"""The most sub-directories that are searched for an adapter."""

_HEADS = ("score", "classifier", "qa_outputs", "v_head")
"""Module names of the heads that classifiers and PPO models have in place of, or in addition to, the model's own."""

_KEPT_WHOLE = ("embed_tokens", "lm_head")
_MODULE = re.compile(r"(?:^|\.)(?:layers\.[0-9]+|norm|[a-z_]*layernorm|modules_to_save)\.")


def missing_config(directory: AdapterDirectory, config_file: str) -> AdapterFormatError:
    """Return the error for a directory without an `adapter_config.json`."""
    hint = hint_of(directory, config_file)
    return AdapterFormatError(
        f"{directory.path / config_file}: not found; a PEFT configuration is needed{'; ' if hint else ''}{hint}"
    )


def hint_of(directory: AdapterDirectory, config_file: str) -> str:
    """Return what to use in place of a directory without an `adapter_config.json`; "" if nothing is known."""
    names = directory.names()
    if "config.json" in names and any(name.endswith((".safetensors", ".bin", ".gguf")) for name in names):
        return "it holds a whole model, not an adapter: serve it as the MODEL of chorus serve"
    steps = {int(found[1]): name for name in names if (found := _CHECKPOINT.fullmatch(name))}
    saved = [name for _, name in sorted(steps.items(), reverse=True) if directory.has(f"{name}/{config_file}")]
    if saved:
        others = f", the last of {len(saved)}" if len(saved) > 1 else ""
        return f"it is a trainer's output: use its sub-directory {saved[0]}{others}"
    inner = [name for name in names[:_MOST_LOOKED_AT] if directory.has(f"{name}/{config_file}")]
    if inner:
        return f"an adapter is in its sub-directory {shown(inner[0])}: use that"
    return ""


def refuse_other_weights(directory: AdapterDirectory, weights_file: str) -> None:
    """Raise AdapterFormatError if a directory has its weights in an unsupported form."""
    if directory.has(weights_file):
        return
    file = directory.path / weights_file
    if directory.has(PICKLE_FILE):
        raise AdapterFormatError(
            f"{file}: not found; {PICKLE_FILE} is a pickle, which is never read: convert it to safetensors with "
            f"chorus convert-adapter {shown(str(directory.path))}"
        )


MERGE = (
    "merge it with PEFT (peft.PeftModel.from_pretrained(base, ADAPTER).merge_and_unload().save_pretrained(DIR)) and "
    "serve the result as a MODEL of its own, or train LoRA"
)

SERVE_WITH_ITS_BASE = "serve it with the base model that it was trained on"


def mend_of(shape: Sequence[int]) -> str:
    """How to mend an adapter with a tensor of another shape than the base model's: by another base model, unless the
    shape shows another cause.
    """
    if 0 in shape:
        return (
            "it is empty, as tensors are whose values DeepSpeed's ZeRO-3 keeps on other processes: gather them to "
            "save them (stage3_gather_16bit_weights_on_model_save, or deepspeed.zero.GatheredParameters)"
        )
    return SERVE_WITH_ITS_BASE


def refuse_no_lora(file: Path, tensors: Collection[str], given_name: Callable[[str], str]) -> None:
    """Raise AdapterFormatError for a file of a model's own weights, such as one of a full fine-tuning. given_name:
    returns a tensor's name in the file.
    """
    if tensors and not any("lora_" in each or "lora_" in given_name(each) for each in tensors):
        first = shown(min(map(given_name, tensors)))
        raise AdapterFormatError(
            f"{file}: no LoRA tensor is in this file, which has {len(tensors)} others, such as {first}; save the "
            "adapter alone with PEFT's save_pretrained, or serve a whole model as the MODEL of chorus serve"
        )


def why_not_lora(name: str, shape: Sequence[int]) -> str:
    """Return why a tensor is not part of LoRA on any module."""
    module = name.split(".")[-2] if name.count(".") else name
    if module in _HEADS or any(f".{head}." in name for head in _HEADS):
        return (
            "is a head of its own, as of a classifier or a reward model; the only head that is served is score, if "
            "modules_to_save names it: train with task_type='SEQ_CLS', or with task_type='CAUSAL_LM'"
        )
    if module in _KEPT_WHOLE and "modules_to_save" not in name:
        return (
            f"is a copy of the whole {module}, {shape[0] if shape else 0} rows. PEFT saves one where modules_to_save "
            "names it, where the vocabulary was resized, or with save_embedding_layers=True. If it is the base model's "
            "own, save with save_pretrained(DIR, save_embedding_layers=False); a resized vocabulary is not supported: "
            "merge the adapter into its base and serve that"
        )
    if _MODULE.search(name):
        return "is a whole trained module, not LoRA, which is not supported; train without modules_to_save"
    return (
        "is unknown: it is neither LoRA's A or B nor a module of the base model; save the adapter again with PEFT's "
        "save_pretrained"
    )
