"""Where GGUF files have the tensors of transformers' checkpoints: names, order of rows, and changed values.

What llama.cpp's converter does is known from its source: `modify_tensors` of each class in `conversion/*.py` of
ggml-org/llama.cpp. Names are those of the package `gguf` (`tensor_mapping.py`). The converter changes

- LlamaModel and what derives from it (Granite, Granite-MoE, Arcee, SmolLM3, Ministral), OlmoModel: the order of rows of
  q and k (`permute`);
- Gemma, NemotronModel, Qwen3NextModel: norms, to which it adds 1, but for the norm of Gated DeltaNet;
- DeepseekV2Model and GlmMoeDsaModel: `kv_b_proj`. Older files have it as transformers does. Newer files split it into a
  tensor of keys, which is transposed, and one of values;
- GPTNeoXModel: `query_key_value`, whose rows it orders by part, and not by head;
- Qwen3NextModel: `in_proj_qkvz` likewise, into two tensors, and `A_log`, which it stores as `-exp(A_log)`;
- GraniteMoeModel: gate and up of experts and of the shared one, which it takes apart;
- MambaModel, Mamba2Model, JambaModel: `A_log`, likewise; of Mamba 2 it has `A_log` and `D` as matrices of one column,
  and the norm as a matrix of a row for each group;
- these, LFM2Model, LFM2MoeModel, Qwen3NextModel: kernels of convolutions, which lose their dimension of 1;
- Glm4MoeModel, Glm4MoeLiteModel: nothing, but the file has a draft layer after the last;
- all with experts: the matrices of all experts are one tensor, and with `--fuse-gate-up-exps` gate and up are, too.

The classes of the other architectures below change nothing but names. (Glm4Model also orders rows of q and k, but of
models with `mrope_section` alone: GLM-4.1V, whose tensors are not found by their names here.)

Tests: tests/core/test_gguf.py
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..config_json import UnsupportedModel
from .gguf_file import GgufFile, Stored

if TYPE_CHECKING:
    from gguf import TensorNameMap

#: Architectures for which llama.cpp stores the halves of rotary pairs next to each other, in rows of q and k.
_INTERLEAVED = {"llama", "arcee", "granite", "granitemoe", "mistral3", "olmo", "smollm3"}

#: Architectures whose norms it stores with 1 added.
_ONE_PLUS = {"gemma", "gemma2", "gemma3", "nemotron", "qwen3next"}

#: Architectures whose values and rows it stores as transformers has them, but for what `_MADE` says.
_AS_THEY_ARE = {
    "chatglm", "cohere2", "command-r", "deepseek2", "dots1", "ernie4_5", "ernie4_5-moe", "exaone", "exaone4", "glm-dsa",
    "glm4", "glm4moe", "gptneox", "jamba", "lfm2", "lfm2moe", "mamba", "mamba2", "olmo2", "olmoe", "phi2", "phi3",
    "qwen2", "qwen2moe", "qwen3", "qwen3moe", "seed_oss", "stablelm", "starcoder2",
}  # fmt: skip

#: Architectures that store `-exp(A_log)`.
_EXPONENTIAL = {"jamba", "mamba", "mamba2", "qwen3next"}

#: Vectors that files of Mamba 2 have as matrices.
_FLAT = (".A_log", ".D", ".mixer.norm.weight")

_KNOWN = sorted(_INTERLEAVED | _ONE_PLUS | _AS_THEY_ARE)

#: Tensors that config.json's fields say.
_FROM_CONFIG = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}

#: The number of an expert in transformers' names; the file has the matrices of all experts in one tensor.
_EXPERT = re.compile(r"\.experts\.(\d+)\.")

#: The number of a layer in transformers' names, and in the file's.
_LAYER, _BLOCK = re.compile(r"\.layers\.(\d+)\."), re.compile(r"blk\.(\d+)\.")

#: Ends of transformers' names, and as the file's table of names has them.
_ENDS = {
    "e_score_correction_bias": "e_score_correction.bias",
    ".expert_bias": ".expert_bias.bias",
    ".dt_bias": ".dt_proj.bias",
}

#: Tensors `[channels, 1, width]`, which files have without the dimension of 1.
_KERNELS = (".conv.conv.weight", ".conv1d.weight")

#: A tensor `[1, hidden]`, which some files have as a vector.
_SHARED_GATE = ".shared_expert_gate.weight"

#: The one norm that has no 1 added in an architecture of `_ONE_PLUS`.
_PLAIN_NORM = "linear_attn.norm.weight"


class GgufSource(NamedTuple):
    """Where a file has a tensor of transformers."""

    parts: tuple[Stored, ...]
    """Tensors whose rows follow one another."""

    shape: tuple[int, ...]
    """Of transformers' tensor."""

    order: Callable[[], torch.Tensor] | None = None
    """Makes the rows of `parts` in transformers' order. None: they are in that order."""

    values: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Makes transformers' values of the file's. None: they are the same."""


def sources(file: GgufFile, wanted: Collection[str]) -> dict[str, GgufSource]:
    """Names of transformers → where the file has them. Tensors that are not wanted have the file's name, but those of
    draft layers, which are named as layers of the model.
    """
    names = _Names(file)
    found = {name: source for name in wanted if (source := names.source(name)) is not None}
    used = {part.tensor for source in found.values() for part in source.parts}
    others = file.tensors.keys() - used - _FROM_CONFIG
    return found | {names.unused(name): GgufSource((Stored(name),), names.shape(Stored(name))) for name in others}


class _Names:
    """The names of a file's tensors. Raises UnsupportedModel for an architecture that is not known."""

    def __init__(self, file: GgufFile) -> None:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        by_name = {name: architecture for architecture, name in MODEL_ARCH_NAMES.items()}
        if file.architecture not in _KNOWN:
            raise UnsupportedModel(
                f"{file.path}: general.architecture is {file.architecture!r}: not supported as GGUF; supported: "
                f"{', '.join(_KNOWN)}; use the original checkpoint"
            )
        if file.architecture not in by_name:
            raise UnsupportedModel(
                f"{file.path}: general.architecture is {file.architecture!r}, which the installed gguf does not know; "
                "run: pip install -U gguf"
            )
        blocks = int(file.get("{arch}.block_count", 0))
        self.file = file
        self._table: TensorNameMap = get_tensor_name_map(by_name[file.architecture], blocks)
        self._layers = blocks - int(file.get("{arch}.nextn_predict_layers", 0))

    def shape(self, part: Stored) -> tuple[int, ...]:
        """The shape of a part as a matrix or a vector."""
        shape = tuple(map(int, reversed(self.file.tensors[part.tensor].shape)))
        if part.heads and len(shape) == 3:
            heads, *rest = shape
            rows, columns = reversed(rest) if part.transposed else rest
            return heads * rows, columns
        if part.row:
            return (1, *shape)
        if part.flat:
            return (math.prod(shape),)
        return shape if part.expert is None else shape[1:]

    def source(self, name: str) -> GgufSource | None:
        """Where the file has a tensor of transformers; None: it has not."""
        made = _MADE.get(self.file.architecture)
        if made is not None and (source := made(self, name)) is not None:
            return source
        expert = _EXPERT.search(name)
        number = None if expert is None else int(expert[1])
        found = self._find(name if expert is None else f"{name[: expert.start()]}.experts.{name[expert.end() :]}")
        if found is None:
            return None
        if found not in self.file.tensors:
            return None if number is None else self._of_gate_and_up(found, number)
        part = Stored(found, number, flat=self.file.architecture == "mamba2" and name.endswith(_FLAT))
        if name.endswith(_SHARED_GATE) and len(self.shape(part)) == 1:
            part = Stored(found, row=True)
        shape = self.shape(part)
        if name.endswith(_KERNELS) and len(shape) == 2:
            shape = (shape[0], 1, shape[1])
        return GgufSource((part,), shape, self._order(name, shape[0]), self._values(name))

    def unused(self, name: str) -> str:
        """The name of a tensor of the file that is not wanted."""
        block = _BLOCK.match(name)
        is_draft = block is not None and int(block[1]) >= self._layers
        return f"model.layers.{block[1]}.{name[block.end() :]}" if block is not None and is_draft else name

    def block(self, name: str, tensor: str) -> str | None:
        """The name of a tensor of the file in the layer of transformers' `name`; None: the file has no such tensor."""
        layer = _LAYER.search(name)
        found = layer and f"blk.{layer[1]}.{tensor}"
        return found if found in self.file.tensors else None

    def joined(self, parts: tuple[Stored, ...], order: Callable[[], torch.Tensor] | None = None) -> GgufSource:
        """The source of a tensor with the rows of several."""
        shapes = [self.shape(part) for part in parts]
        return GgufSource(parts, (sum(shape[0] for shape in shapes), *shapes[0][1:]), order)

    def by_unit(self, field: str, sizes: tuple[int, ...]) -> Callable[[], torch.Tensor]:
        """The order of rows of a tensor that has those of each unit together, where the file has runs of rows of all
        units. field: the metadata with their number. sizes: rows of each run.
        """
        units = self._count(field, sizes)
        return partial(_by_unit, sizes, units)

    def _count(self, field: str, sizes: tuple[int, ...]) -> int:
        """A number of the metadata by which all sizes can be divided."""
        units = self.file.get(f"{{arch}}.{field}")
        if not isinstance(units, int) or units < 1 or any(size < 1 or size % units for size in sizes):
            raise UnsupportedModel(
                f"{self.file.path}: {self.file.architecture}.{field} is {units}, which does not divide "
                f"{', '.join(map(str, sizes))} rows; convert the model to GGUF again"
            )
        return units

    def _find(self, name: str) -> str | None:
        """The file's name of a tensor. Experts of LFM2-MoE are in the table without `model.`."""
        end = next((each for each in _ENDS if name.endswith(each)), "")
        name = name.removesuffix(end) + _ENDS.get(end, "")
        return self._table.get_name(name, (".weight", ".bias")) or self._table.get_name(
            name.removeprefix("model."), (".weight", ".bias")
        )

    def _of_gate_and_up(self, found: str, expert: int) -> GgufSource | None:
        """A matrix of an expert in a tensor of gates and ups, which the converter makes on request."""
        matrix = next((each for each in ("gate", "up") if f".ffn_{each}_exps." in found), None)
        both = matrix and found.replace(f".ffn_{matrix}_exps.", ".ffn_gate_up_exps.")
        if both is None or both not in self.file.tensors:
            return None
        part = Stored(both, expert)
        rows, *others = self.shape(part)
        first = 0 if matrix == "gate" else rows // 2
        return GgufSource((part,), (rows // 2, *others), partial(torch.arange, first, first + rows // 2))

    def _order(self, name: str, rows: int) -> Callable[[], torch.Tensor] | None:
        module = name.split(".")[-2]
        if self.file.architecture not in _INTERLEAVED or module not in ("q_proj", "k_proj"):
            return None
        heads = self.file.get("{arch}.attention.head_count")
        if module == "k_proj":
            heads = self.file.get("{arch}.attention.head_count_kv", heads)
        return partial(_halves, int(heads), rows)

    def _values(self, name: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
        if self.file.architecture in _ONE_PLUS and name.endswith("norm.weight") and not name.endswith(_PLAIN_NORM):
            return _less_one
        return _log if self.file.architecture in _EXPONENTIAL and name.endswith(".A_log") else None


def _halves(heads: int, rows: int) -> torch.Tensor:
    """Where a tensor with the halves of rotary pairs next to each other has the rows of one with whole halves."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()


def _by_unit(sizes: tuple[int, ...], units: int) -> torch.Tensor:
    """See `_Names.by_unit`."""
    runs = [torch.arange(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    return torch.cat([run.view(units, -1) for run in runs], 1).flatten()


def _less_one(values: torch.Tensor) -> torch.Tensor:
    return values - 1


def _log(values: torch.Tensor) -> torch.Tensor:
    """`A_log`: files store `-exp(A_log)`."""
    return (-values).log()


def _kv_up(names: _Names, name: str) -> GgufSource | None:
    """DeepSeek's keys and values of latents: of every head its keys, then its values; newer files have them apart."""
    if not name.endswith(".kv_b_proj.weight") or names.block(name, "attn_kv_b.weight"):
        return None
    keys, values = names.block(name, "attn_k_b.weight"), names.block(name, "attn_v_b.weight")
    if keys is None or values is None or any(len(names.file.tensors[each].shape) != 3 for each in (keys, values)):
        return None
    parts = Stored(keys, heads=True, transposed=True), Stored(values, heads=True)
    sizes = tuple(names.shape(part)[0] for part in parts)
    return names.joined(parts, names.by_unit("attention.head_count", sizes))


def _qkv(names: _Names, name: str) -> GgufSource | None:
    """GPT-NeoX' q, k and v by head."""
    kind = name.rpartition(".")[2]
    found = names.block(name, f"attn_qkv.{kind}") if name.endswith(f".query_key_value.{kind}") else None
    if found is None:
        return None
    part = Stored(found)
    order = names.by_unit("attention.head_count", (names.shape(part)[0] // 3,) * 3)
    return names.joined((part,), order)


def _qkvz(names: _Names, name: str) -> GgufSource | None:
    """Qwen3-Next's q, k, v and z by head of keys; older files have one tensor of transformers' order."""
    if not name.endswith(".in_proj_qkvz.weight"):
        return None
    qkv, gate = names.block(name, "attn_qkv.weight"), names.block(name, "attn_gate.weight")
    if qkv is None or gate is None:
        return None
    parts = Stored(qkv), Stored(gate)
    both, values = (names.shape(part)[0] for part in parts)
    keys = (both - values) // 2
    return names.joined(parts, names.by_unit("ssm.group_count", (keys, keys, values, values)))


def _gate_and_up(names: _Names, name: str) -> GgufSource | None:
    """Gate and up of Granite-MoE's shared expert."""
    if not name.endswith(".shared_mlp.input_linear.weight"):
        return None
    gate, up = (names.block(name, f"ffn_{each}_shexp.weight") for each in ("gate", "up"))
    return None if gate is None or up is None else names.joined((Stored(gate), Stored(up)))


#: Architectures that have some tensors made of others, or in another order.
_MADE: dict[str, Callable[[_Names, str], GgufSource | None]] = {
    "deepseek2": _kv_up,
    "glm-dsa": _kv_up,
    "gptneox": _qkv,
    "granitemoe": _gate_and_up,
    "qwen3next": _qkvz,
}
