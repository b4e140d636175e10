"""Tensors as llama.cpp's converter writes them, by names that it was seen to write.

`gguf_names.json` has what `map_tensor_name` of its own classes made of each name of a tiny model (llama.cpp as in
llama-cpp-python 0.3.36), by architecture; N stands for a layer's number. What it does to values is written down here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .gguf_changes import Converted, keys_and_values, permute, unpermute, without_heads

Json = dict[str, Any]
Tensors = dict[str, torch.Tensor]

#: Architecture → names of tensors as the converter has them → names in the file.
RECORDED: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("gguf_names.json").read_text())

_NUMBER = re.compile(r"\.(\d+)\.")

#: Ends of norms' names to which the converter adds 1.
_ONE_PLUS = {"minimax-m3": "norm.weight", "step35": "norm.weight"}

#: Ends of names that it changes before it looks for them.
_RENAMED = (
    ("e_score_correction_bias", "e_score_correction.bias"),
    (".dt_bias", ".dt_proj.bias"),
    (".moe.router_bias", ".moe.router_bias.bias"),
)


def prepared(architecture: str, tensors: Tensors) -> Tensors:
    """The tensors of a checkpoint as published, where transformers saves others."""
    if architecture == "minimax-m3":
        return {f"language_model.{name}": each for name, each in _minimax_m3(tensors)}
    if architecture == "hy_v4":
        return {_hy_v4(name): each for name, each in tensors.items()}
    return tensors


def _minimax_m3(tensors: Tensors) -> list[tuple[str, torch.Tensor]]:
    found: list[tuple[str, torch.Tensor]] = []
    for name, weight in tensors.items():
        name = name.replace("indexer.", "index_")
        if "experts" in name or "mlp.gate." in name:
            name = name.replace(".mlp.gate.e_score", ".mlp.e_score").replace(".mlp.", ".block_sparse_moe.")
        if ".experts.gate_up_proj" in name:
            parts = zip(("w1", "w3"), weight.chunk(2, 1), strict=True)
        elif ".experts.down_proj" in name:
            parts = iter([("w2", weight)])
        elif "gate_up_proj" in name:
            halves = zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True)
            found += [(name.replace("gate_up_proj", part), half) for part, half in halves]
            continue
        else:
            found.append((name, weight))
            continue
        begin = name.rpartition(".")[0]
        found += [(f"{begin}.{at}.{part}.weight", each) for part, all_of in parts for at, each in enumerate(all_of)]
    return found


def _hy_v4(name: str) -> str:
    name = name.replace("linear_gate", "gate_proj").replace("hc_pre.hc_head.", "hc_head.")
    return re.sub(r"hc_pre\.(hc_\w+_layer)\.", r"\1.hc_pre.", name)


def recorded(name: str, weight: torch.Tensor, config: Json, architecture: str) -> Converted | None:
    """What the converter makes of a tensor; None for one that it leaves out, as those of towers."""
    layer = _NUMBER.search(name)
    at = "" if layer is None else f"blk.{layer[1]}."
    own = {**config, **(config.get("text_config") or {})}
    own |= (own.get("per_layer_config") or {}).get(layer[1] if layer else "", {})
    if name.endswith("kv_b_proj.weight"):
        return keys_and_values(weight, own, at)
    if (new := _name(name, architecture)) is None:
        return _apart(name, weight, at) if architecture == "hy_v4" and name.endswith("gate_up_proj") else None
    for change in _CHANGES.get(architecture, ()):
        if (made := change(name, new, weight, own)) is not None:
            return made
    end = _ONE_PLUS.get(architecture)
    if end is not None and name.endswith(end):
        return Converted({new: weight + 1}, lambda found: found[0] - 1)
    return Converted({new: weight})


def _name(name: str, architecture: str) -> str | None:
    """The file's name."""
    for own, converters in _RENAMED:
        name = name.replace(own, converters)
    name, layer = name.replace("language_model.", ""), _NUMBER.search(name)
    name = _NUMBER.sub(".N.", name)
    found = RECORDED[architecture]
    if f"{name}.weight" in found:
        name += ".weight"
    other = (
        name.removeprefix("transformer.") if name.startswith("transformer.") else name.replace("model.", "backbone.")
    )
    if (name := name if name in found else other) not in found:
        return None
    new = found[name].replace(".N.", f".{layer[1]}." if layer else ".N.")
    return f"{new}.weight" if architecture == "glm5-next" and _BARE.search(new) else new


_BARE = re.compile(r"\.(hc_(?:attn|ffn)_(?:fn|base|scale)|indexer_compressor_(?:ape|gate))$")


def _apart(name: str, weight: torch.Tensor, at: str) -> Converted:
    """Gates and ups of experts, as HYV4Model writes them."""
    gate, up = weight.chunk(2, dim=1)
    parts = {f"{at}ffn_gate_exps.weight": gate, f"{at}ffn_up_exps.weight": up}
    return Converted(parts, lambda found: torch.cat(found, 1))


def _groups(name: str, new: str, weight: torch.Tensor, config: Json) -> Converted | None:
    """q, k and v, as FalconModel writes them."""
    if "query_key_value" not in name:
        return None
    heads, groups = config["num_attention_heads"], config["num_kv_heads"]
    each = config["hidden_size"] // heads
    parts = weight.view(groups, heads // groups + 2, each, -1)
    q, k, v = (part.reshape(-1, weight.shape[1]) for part in (parts[:, :-2], parts[:, -2], parts[:, -1]))

    def back(found: list[torch.Tensor]) -> torch.Tensor:
        q, k, v = (part.view(groups, -1, each, weight.shape[1]) for part in found[0].split([len(q_), len(k_), len(k_)]))
        return torch.cat([q, k, v], 1).reshape(weight.shape)

    q_, k_ = q, k
    return Converted({new: torch.cat([q, k, v])}, back)


def _heads(name: str, new: str, weight: torch.Tensor, config: Json) -> Converted | None:
    return without_heads(new, weight, config["n_head"]) if "query_key_value" in name else None


def _transposed(name: str, new: str, weight: torch.Tensor, config: Json) -> Converted | None:
    """GPT2Model's matrices."""
    is_turned = name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))
    return Converted({new: weight.T.contiguous()}, lambda found: found[0].T) if is_turned else None


def _experts(name: str, new: str, weight: torch.Tensor, config: Json) -> Converted | None:
    """DbrxModel's experts, in one matrix."""
    if "experts.mlp" not in name:
        return None
    stack = weight.view(config["ffn_config"]["moe_num_experts"], -1, weight.shape[1])
    if not name.endswith("w2"):
        return Converted({new: stack}, lambda found: found[0].reshape(weight.shape))
    return Converted({new: stack.transpose(1, 2).contiguous()}, lambda found: found[0].mT.reshape(weight.shape))


def _factors(name: str, new: str, weight: torch.Tensor, config: Json) -> Converted | None:
    """Dots3NoteModel's norms of latents."""
    if not name.endswith(("q_a_layernorm.weight", "kv_a_layernorm.weight")):
        return None
    factor = (config["hidden_size"] / len(weight)) ** 0.5 if config.get("apply_mla_qkv_lora_rescale") else 1.0
    return Converted({new: weight * factor}, lambda found: found[0] / factor)


def _states(name: str, new: str, weight: torch.Tensor, config: Json) -> Converted | None:
    """NemotronHModel's and Glm5NextModel's."""
    shape, is_flat = weight.shape, "n_groups" in config
    if name.endswith("A_log"):
        made = -torch.exp(weight).view(-1, 1) if is_flat else -torch.exp(weight)
        return Converted({new: made}, lambda found: torch.log(-found[0]).view(shape))
    if name.endswith((".mixer.D", ".mixer.norm.weight")):
        rows = config["n_groups"] if name.endswith("norm.weight") else len(weight)
        return Converted({new: weight.view(rows, -1)}, lambda found: found[0].flatten())
    if re.search(r"\.[qkv]_conv1d\.weight$", name):
        return Converted({new: weight.view(1, len(weight), 1, -1)}, lambda found: found[0].view(shape))
    if name.endswith(".conv1d.weight"):
        return Converted({new: weight.squeeze(1)}, lambda found: found[0].unsqueeze(1))
    if is_flat and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config["num_attention_heads" if name.endswith("q_proj.weight") else "num_key_value_heads"]
        return Converted({new: permute(weight, heads)}, lambda found: unpermute(found[0], heads))
    return None


_Change = Callable[[str, str, torch.Tensor, Json], Converted | None]
_CHANGES: dict[str, tuple[_Change, ...]] = {
    "bloom": (_heads,),
    "dbrx": (_experts,),
    "dots3note": (_factors,),
    "falcon": (_groups,),
    "glm5-next": (_states,),
    "gpt2": (_transposed,),
    "nemotron_h_moe": (_states,),
}


@cache
def head_counts(text: str, architecture: str) -> Json:
    """Metadata of a model by which its tensors are read. text: its config.json."""
    config = json.loads(text)
    config = {"_": len(config.get("layers_block_type") or ()), **config, **(config.get("text_config") or {})}
    layers = next(config[name] for name in ("num_hidden_layers", "n_layer", "n_layers", "_") if config.get(name))
    heads = config.get("num_attention_heads") or config.get("n_head") or config.get("n_heads")
    found = {"block_count": layers, "attention.head_count": heads}
    kv_heads = config.get("num_kv_heads") or config.get("num_key_value_heads")
    if architecture == "nemotron_h_moe":  # of layers with attention alone
        types = config["layers_block_type"]
        kv_heads = [config["num_key_value_heads"] * ("attention" in kind) for kind in types]
    if kv_heads:
        found["attention.head_count_kv"] = kv_heads
    return {f"{architecture}.{name}": value for name, value in found.items()}
