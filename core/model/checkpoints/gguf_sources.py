"""Where GGUF files have the tensors of transformers' checkpoints: names, order of rows, and changed values.

What llama.cpp's converter does is known from its source: `modify_tensors` of each class in `conversion/*.py` of
ggml-org/llama.cpp. Names are those of the package `gguf` (`tensor_mapping.py`). The converter changes

- LlamaModel and what derives from it (Granite, Granite-MoE, Arcee, SmolLM3, Ministral), OlmoModel, MuseGlimmerModel:
  the order of rows of q and k (`permute`);
- Gemma, NemotronModel, Qwen3NextModel, MiniMaxM3Model, Step35Model: norms, to which it adds 1, but for the norm of
  Gated DeltaNet; MuseGlimmerModel: those of layers;
- DeepseekV2Model and what derives from it (GLM-5, DeepSeek-V3.2, Dots 3, HY V4), Glm5NextModel: `kv_b_proj`. Older
  files have it as transformers does. Newer files split it into a tensor of keys, which is transposed, and one of
  values;
- Dots3NoteModel: norms of latents, by whose factors it multiplies them if config.json says that there are such;
- GPTNeoXModel, BloomModel: `query_key_value`, whose rows it orders by part, and not by head; FalconModel: and not by
  group of heads;
- GPT2Model: matrices of layers, which it transposes;
- Qwen3NextModel: `in_proj_qkvz` likewise, into two tensors, and `A_log`, which it stores as `-exp(A_log)`;
- GraniteMoeModel: gate and up of experts and of the shared one, which it takes apart;
- MambaModel, Mamba2Model, JambaModel, NemotronHModel, Glm5NextModel: `A_log`, likewise; of Mamba 2 and Nemotron-H it
  has `A_log` and `D` as matrices of one column, and the norm as a matrix of a row for each group;
- these, LFM2Model, LFM2MoeModel, Qwen3NextModel: kernels of convolutions, which lose their dimension of 1;
- Glm4MoeModel, Glm4MoeLiteModel: nothing, but the file has a draft layer after the last;
- all with experts: the matrices of all experts are one tensor, and with `--fuse-gate-up-exps` gate and up are, too.

MuseGlimmerModel adds norms of q and k that only say `qk_scale_factor`.

The classes of the other architectures below change nothing but names. (Glm4Model also orders rows of q and k, but of
models with `mrope_section` alone: GLM-4.1V, whose tensors are not found by their names here.)

Tests: tests/core/test_gguf.py
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from functools import partial

import torch

from ..config_json import UnsupportedModel
from .gguf_file import GgufFile, Stored
from .gguf_made import MADE, by_unit
from .gguf_names import GgufNames
from .gguf_source import GgufSource

#: Architectures for which llama.cpp stores the halves of rotary pairs next to each other, in rows of q and k.
_INTERLEAVED = {
    "llama", "arcee", "granite", "granitemoe", "mistral3", "muse-glimmer", "nemotron_h", "nemotron_h_moe", "olmo",
    "smollm3",
}  # fmt: skip

#: Architectures whose norms it stores with 1 added → the ends of these norms' names.
_ONE_PLUS = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "minimax-m3", "nemotron", "qwen3next", "step35"), "norm.weight"),
    "muse-glimmer": "layernorm.weight",
}

#: Architectures whose values and rows it stores as transformers has them, but for what `_MADE` says.
_AS_THEY_ARE = {
    "bloom", "chatglm", "cohere2", "command-r", "dbrx", "deepseek2", "deepseek32", "dots1", "dots3note", "ernie4_5",
    "ernie4_5-moe", "exaone", "exaone4", "falcon", "glm-dsa", "glm4", "glm4moe", "glm5-next", "gpt2",
    "gptneox", "hunyuan-dense", "hunyuan-moe", "hy_v3", "hy_v4", "jamba", "laguna", "lfm2", "lfm2moe", "mamba",
    "mamba2", "mimo2", "minimax-m2", "mpt", "olmo2", "olmoe",
    "phi2", "phi3", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "seed_oss", "stablelm", "starcoder", "starcoder2",
}  # fmt: skip

#: Architectures that store `-exp(A_log)`.
_EXPONENTIAL = {"glm5-next", "jamba", "mamba", "mamba2", "nemotron_h", "nemotron_h_moe", "qwen3next"}

#: Vectors that files of some architectures have as matrices.
_FLAT = (".A_log", ".D", ".mixer.norm.weight")
_WITH_FLAT = {"mamba2", "nemotron_h", "nemotron_h_moe"}

#: Architectures whose matrices transformers has as `[in, out]`, and the ends of their names.
_INPUTS_FIRST = {"gpt2": (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")}

_KNOWN = sorted(_INTERLEAVED | _ONE_PLUS.keys() | _AS_THEY_ARE)

#: Tensors that config.json's fields say.
_FROM_CONFIG = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}

#: The same in layers, of an architecture.
_FROM_CONFIG_IN_LAYERS = {"muse-glimmer": (".attn_q_norm.weight", ".attn_k_norm.weight")}

#: The number of an expert in transformers' names; the file has the matrices of all experts in one tensor.
_EXPERT = re.compile(r"\.experts\.(\d+)\.")

#: The number of a layer in transformers' names, and in the file's.
_LAYER, _BLOCK = re.compile(r"\.(?:layers|blocks|h)\.(\d+)\."), re.compile(r"blk\.(\d+)\.")

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

#: Norms of Dots 3's latents.
_NORMS_OF_LATENTS = ("q_a_layernorm.weight", "kv_a_layernorm.weight")

#: The one norm that has no 1 added in an architecture of `_ONE_PLUS`.
_PLAIN_NORM = "linear_attn.norm.weight"


def sources(file: GgufFile, wanted: Collection[str]) -> dict[str, GgufSource]:
    """Names of transformers → where the file has them. Tensors that are not wanted have the file's name, but those of
    draft layers, which are named as layers of the model.
    """
    names = Names(file)
    found = {name: source for name in wanted if (source := names.source(name)) is not None}
    used = {part.tensor for source in found.values() for part in source.parts}
    in_layers = _FROM_CONFIG_IN_LAYERS.get(file.architecture, ())
    others = {name for name in file.tensors.keys() - used - _FROM_CONFIG if not name.endswith(in_layers)}
    return found | {names.unused(name): GgufSource((Stored(name),), names.shape(Stored(name))) for name in others}


class Names:
    """The names of a file's tensors. Raises UnsupportedModel for an architecture that is not known."""

    def __init__(self, file: GgufFile) -> None:
        if file.architecture not in _KNOWN:
            raise UnsupportedModel(
                f"{file.path}: general.architecture is {file.architecture!r}: not supported as GGUF; supported: "
                f"{', '.join(_KNOWN)}; use the original checkpoint"
            )
        blocks = int(file.get("{arch}.block_count", 0))
        self.file = file
        try:
            self._table = GgufNames(file.architecture, blocks)
        except KeyError:
            raise UnsupportedModel(
                f"{file.path}: general.architecture is {file.architecture!r}, which the installed gguf does not know; "
                "run: pip install -U gguf"
            ) from None
        self._layers = blocks - int(file.get("{arch}.nextn_predict_layers", 0))

    def shape(self, part: Stored) -> tuple[int, ...]:
        """The shape of a part as a matrix or a vector."""
        shape = tuple(map(int, reversed(self.file.tensors[part.tensor].shape)))
        if part.heads and len(shape) > 2:
            *heads, rows, columns = shape
            rows, columns = (columns, rows) if part.transposed else (rows, columns)
            return math.prod(heads) * rows, columns
        if part.transposed:
            return shape[::-1]
        if part.row:
            return (1, *shape)
        if part.flat:
            return (math.prod(shape),)
        return shape if part.expert is None else shape[1:]

    def source(self, name: str) -> GgufSource | None:
        """Where the file has a tensor of transformers; None: it has not."""
        made = MADE.get(self.file.architecture)
        if made is not None and (source := made(self, name)) is not None:
            return source
        expert = _EXPERT.search(name)
        number = None if expert is None else int(expert[1])
        found = self._find(name if expert is None else f"{name[: expert.start()]}.experts.{name[expert.end() :]}")
        if found is None:
            return self._of_both(name)
        if found not in self.file.tensors:
            return None if number is None else self._of_gate_and_up(found, number)
        part = Stored(
            found,
            number,
            flat=self.file.architecture in _WITH_FLAT and name.endswith(_FLAT),
            transposed=name.endswith(_INPUTS_FIRST.get(self.file.architecture, ())),
        )
        if name.endswith(_SHARED_GATE) and len(self.shape(part)) == 1:
            part = Stored(found, row=True)
        shape = self.shape(part)
        if name.endswith(_KERNELS) and len(shape) == 2:
            shape = (shape[0], 1, shape[1])
        return GgufSource((part,), shape, self._order(name, shape[0]), self._values(name, shape[0]))

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
        units = self.file.get(f"{{arch}}.{field}")
        if not isinstance(units, int) or units < 1 or any(size < 1 or size % units for size in sizes):
            raise UnsupportedModel(
                f"{self.file.path}: {self.file.architecture}.{field} is {units}, which does not divide "
                f"{', '.join(map(str, sizes))} rows; convert the model to GGUF again"
            )
        return partial(by_unit, sizes, units)

    def number(self, field: str, default: int | None = None) -> int:
        """A whole number of the metadata, of at least 1."""
        found = self.file.get(f"{{arch}}.{field}", default)
        if type(found) is not int or found < 1:
            raise UnsupportedModel(
                f"{self.file.path}: {self.file.architecture}.{field} is {found}: a whole number of at least 1 is "
                "needed; convert the model to GGUF again"
            )
        return found

    def _find(self, name: str) -> str | None:
        """The file's name of a tensor."""
        end = next((each for each in _ENDS if name.endswith(each)), "")
        return self._table.find(name, again=name.removesuffix(end) + _ENDS.get(end, ""))

    def _of_both(self, name: str) -> GgufSource | None:
        """A `gate_up` tensor, whose halves the file stores as two tensors."""
        both = ".gate_up_proj."
        found = [self._find(name.replace(both, f".{each}_proj.")) for each in ("gate", "up")] if both in name else []
        parts = tuple(Stored(each) for each in found if each in self.file.tensors)
        return self.joined(parts) if len(parts) == 2 else None

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
        heads = self.number("attention.head_count") if module == "q_proj" else self._kv_heads(name)
        return partial(_halves, heads, rows)

    def _kv_heads(self, name: str) -> int:
        """Heads of keys in the layer of transformers' `name`."""
        heads = self.file.get("{arch}.attention.head_count_kv")
        if isinstance(heads, list) and (layer := _LAYER.search(name)) is not None:
            return int(heads[int(layer[1])])
        return self.number("attention.head_count_kv", self.number("attention.head_count"))

    def _values(self, name: str, rows: int) -> Callable[[torch.Tensor], torch.Tensor] | None:
        end = _ONE_PLUS.get(self.file.architecture)
        if end is not None and name.endswith(end) and not name.endswith(_PLAIN_NORM):
            return _less_one
        if self.file.architecture == "dots3note" and name.endswith(_NORMS_OF_LATENTS):
            return self._without_factor(rows)
        return _log if self.file.architecture in _EXPONENTIAL and name.endswith(".A_log") else None

    def _without_factor(self, rank: int) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """What undoes the factor of latents of this rank; None: the file's norms have none."""
        if not self.file.config.get("apply_mla_qkv_lora_rescale", False):
            return None
        hidden = int(self.file.tensors["token_embd.weight"].shape[0])
        return partial(_divided, (hidden / rank) ** 0.5)


def _halves(heads: int, rows: int) -> torch.Tensor:
    """Where a tensor with the halves of rotary pairs next to each other has the rows of one with whole halves."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()


def _divided(factor: float, values: torch.Tensor) -> torch.Tensor:
    return values / factor


def _less_one(values: torch.Tensor) -> torch.Tensor:
    return values - 1


def _log(values: torch.Tensor) -> torch.Tensor:
    """`A_log`: files store `-exp(A_log)`."""
    return (-values).log()
