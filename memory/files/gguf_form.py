"""Adapters of llama.cpp: one GGUF file, as `convert_lora_to_gguf.py` writes it.

For some architectures llama.cpp keeps the rows of q and k in another order, so their B has that order, too. In
Qwen3.5 it sorts the value heads of Gated DeltaNet by their number within a key head, and then by that head; in
transformers it is the opposite. In GPT-NeoX it sorts rows of q, k and v by part. All experts of a projection are in one
tensor of three dimensions. The rank is a tensor's own, and the scale is alpha / rank.

What its converter can't take apart is in no such file: keys and values of latents in newer versions, which have them
apart, Qwen3-Next's two projections in one, and experts that a checkpoint has in one tensor (Granite-MoE, gpt-oss).

Tests: tests/memory/files/test_adapter_forms.py, tests/core/adapters/test_gguf_adapters.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..pages.projections import Projections
from .arrangement import Arrangement
from .config import AdapterConfig
from .directory import AdapterDirectory
from .error import AdapterFormatError, shown
from .formulas import Tiled
from .gguf_header import GgufHeader
from .module_paths import ModulePaths
from .tensor_file import TensorFile
from .tensor_info import Computed, TensorInfo

GGUF_SUFFIX = ".gguf"

_PREFIX = "base_model.model.model.layers."
_TENSOR = re.compile(r"blk\.([0-9]{1,6})\.([a-z_.]+)\.weight\.lora_([ab])")

_PATHS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}

#: Of latent attention.
_LATENTS = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_b": "self_attn.kv_b_proj",
}

_INDEXER = {
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.proj": "self_attn.indexer.weights_proj",
}

_CONVOLUTION = {"shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj"}

_GATE_AND_UP = {"ffn_up": "mlp.gate_up_proj"}

_DELTA = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_out": "linear_attn.out_proj",
}

_AS_LLAMA = (
    "arcee", "cohere2", "command-r", "ernie4_5", "exaone", "exaone4", "gemma", "gemma2", "gemma3", "granite",
    "hunyuan-dense", "mistral3", "nemotron", "olmo", "olmo2", "phi2", "qwen2", "qwen2vl", "qwen3", "qwen3vl",
    "seed_oss", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip

_WITH_EXPERTS = (
    "dots1", "ernie4_5-moe", "glm4moe", "gpt-oss", "granitemoe", "hunyuan-moe", "llama", "minimax-m2", "olmoe",
    "qwen2moe", "qwen3moe", "qwen3vlmoe",
)  # fmt: skip

#: Architectures that are read, with the modules that have other names there than in `_PATHS`.
_ARCHITECTURES: dict[str, dict[str, str]] = {
    **{name: {} for name in _AS_LLAMA},
    **dict.fromkeys(_WITH_EXPERTS, _EXPERTS),
    **dict.fromkeys(("chatglm", "glm4", "phi3"), _GATE_AND_UP),
    "deepseek2": _EXPERTS | _LATENTS,
    "glm-dsa": _EXPERTS | _LATENTS | _INDEXER,
    "gptneox": {},
    "lfm2": _CONVOLUTION,
    "lfm2moe": _EXPERTS | _CONVOLUTION,
    "qwen35": _DELTA,
    "qwen35moe": _EXPERTS | _DELTA,
    "qwen3next": _EXPERTS | {"ssm_ba": "linear_attn.in_proj_ba", "ssm_out": "linear_attn.out_proj"},
}

#: Architectures for which the halves of rotary pairs are next to each other in rows of q and k.
_INTERLEAVED = frozenset(["arcee", "granite", "granitemoe", "llama", "mistral3", "olmo", "smollm3"])

#: Architectures whose heads of values in Gated DeltaNet are in another order.
_TILED = frozenset(["qwen35", "qwen35moe"])

#: Architectures whose rows of q, k and v follow one another by part.
_BY_PART = frozenset(["gptneox"])
_Q_K_V = "self_attn.qkv_proj"

_AGAIN = "make it again with llama.cpp's convert_lora_to_gguf.py, or serve PEFT's own files"


class GgufForm:
    """See the module. name: of the file."""

    kind = "a GGUF file"
    title = "llama.cpp's GGUF"
    is_plain = False

    def __init__(self, name: str) -> None:
        self.weights_file = name
        self._ranks: dict[str, int] = {}
        self._metadata: dict[str, Any] = {}

    def peft_name(self, name: str) -> str:
        return name

    def entries(self, file: TensorFile) -> dict[str, TensorInfo]:
        return GgufHeader.read(file).tensors

    def listed(self, file: TensorFile, modules: ModulePaths) -> dict[str, TensorInfo]:
        header = GgufHeader.read(file)
        self._metadata, self._ranks = header.metadata, {}
        names = self._paths(file.path)
        own_names = {modules.projections[module].path: path for module, path in modules.renamed}
        tensors: dict[str, TensorInfo] = {}
        for name, info in header.tensors.items():
            match = _TENSOR.fullmatch(name)
            path = names.get(match[2]) if match else None
            if match is None or path is None:
                file.add(tensors, name, info)
                continue
            for own, share in self._shares(info, path, match[3].upper(), modules.projections):
                module = f"{_PREFIX}{match[1]}.{own_names.get(own, own)}"
                if match[3] == "a" and info.shape:
                    self._ranks[module.removeprefix("base_model.model.")] = info.shape[-2:][0]
                file.add(tensors, f"{module}.lora_{match[3].upper()}.weight", share, name)
        return tensors

    def config(self, directory: AdapterDirectory, given: Collection[str], base: ModulePaths) -> AdapterConfig:
        file = directory.path / self.weights_file
        alpha = self._metadata.get("adapter.lora.alpha")
        if not isinstance(alpha, float) or not alpha > 0:
            raise _refuse(file, "adapter.lora.alpha", alpha, f"a number above 0 is needed; {_AGAIN}")
        rank = Counter(self._ranks.values()).most_common(1)[0][0] if self._ranks else 1
        others = {re.escape(module): own for module, own in self._ranks.items() if own != rank}
        peft: dict[str, Any] = {
            "peft_type": "LORA",
            "r": rank,
            "rank_pattern": others,
            "lora_alpha": alpha,
            "target_modules": sorted(self._ranks),
            "base_model_name_or_path": self._metadata.get("general.base_model.0.repo_url"),
        }
        if (invocation := self._metadata.get("adapter.alora.invocation_tokens")) is not None:
            peft["alora_invocation_tokens"] = invocation
        return AdapterConfig.of(file, peft)

    def _shares(
        self, info: TensorInfo, path: str, side: str, projections: Projections
    ) -> Iterator[tuple[str, TensorInfo]]:
        """The paths of the modules that a tensor is of, and the share of each."""
        if path != _Q_K_V or self._metadata.get("general.architecture") not in _BY_PART:
            yield path, self._in_order(info, path, side, projections)
            return
        parts = [projections[name] for name in ("q_proj", "k_proj", "v_proj") if name in projections]
        whole = side == "A" or len(info.shape) != 2 or info.shape[0] != sum(each.outputs for each in parts)
        first = 0
        for each in parts:
            yield each.path, info if whole else info.rows(first, each.outputs)
            first += each.outputs

    def _paths(self, file: Path) -> dict[str, str]:
        """Where a layer has the modules, by llama.cpp's names."""
        for field, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
            if (value := self._metadata.get(field)) != wanted:
                raise _refuse(file, field, value, f"{wanted!r} is needed, as of an adapter; {_AGAIN}")
        architecture = self._metadata.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
            known = ", ".join(sorted(_ARCHITECTURES))
            raise _refuse(
                file, "general.architecture", architecture, f"GGUF adapters are read of {known}; serve PEFT's own files"
            )
        return _PATHS | _ARCHITECTURES[architecture]

    def _in_order(self, info: TensorInfo, path: str, side: str, projections: Projections) -> TensorInfo:
        architecture = self._metadata.get("general.architecture")
        if architecture in _TILED and path in _DELTA.values():
            return _grouped(info, path, side, projections)
        module = path.rpartition(".")[2]
        is_turned = side == "B" and module in ("q_proj", "k_proj") and module in projections
        if not is_turned or architecture not in _INTERLEAVED or len(info.shape) != 2:
            return info
        rows, columns = info.shape
        return replace(info, arrangement=Arrangement((rows, columns), interleaved_heads=projections[module].units))


def _grouped(info: TensorInfo, path: str, side: str, projections: Projections) -> TensorInfo:
    """A or B of Gated DeltaNet with the heads of values in transformers' order; one of another shape as it is."""
    by_path = {each.path: each for each in projections}
    qkv, of_heads, own = (by_path.get(each) for each in (_DELTA["attn_qkv"], _DELTA["ssm_beta"], path))
    if qkv is None or of_heads is None or own is None or len(info.shape) != 2:
        return info
    is_out = path == _DELTA["ssm_out"]
    first = 2 * qkv.sections[0] if own is qkv else 0
    count = own.inputs if is_out else own.outputs
    if side == ("B" if is_out else "A") or info.shape[1 if is_out else 0] != count or of_heads.outputs == qkv.units:
        return info
    heads = of_heads.outputs
    formula = Tiled(qkv.units, heads // qkv.units, (count - first) // heads, first, is_out)
    return TensorInfo("F32", info.shape, 0, 0, computed=Computed("LoRA", formula, (info,), is_larger=False))


def _refuse(file: Path, field: str, value: Any, why: str) -> AdapterFormatError:
    return AdapterFormatError(f"{file}: {field} is {shown(value)}: {why}")
