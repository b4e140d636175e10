"""`chorus models`: lists the model families that are served, or says whether a checkpoint would be."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoints.pull import PullError, resolve_model

if TYPE_CHECKING:
    from ...core.model.specs.attention import AttentionSpec
    from ...core.model.specs.config import ModelConfig
    from ...core.model.specs.feed_forward import Experts


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint",
        nargs="?",
        type=Path,
        metavar="MODEL",
        help="directory, GGUF file or name of a model: say whether it would be served, and how; reads no weights",
    )
    parser.add_argument(
        "--program",
        action="store_true",
        help="print what MODEL's layers compute, one line for each op, as every interpreter runs them",
    )


def run(arguments: argparse.Namespace) -> int:
    from ...core.model.specs.config import UnsupportedModel

    if arguments.program and arguments.checkpoint is None:
        print("chorus: error: --program needs a MODEL: chorus models MODEL --program", file=sys.stderr)
        return 2
    describe = programs if arguments.program else described
    try:
        lines = families() if arguments.checkpoint is None else describe(resolve_model(arguments.checkpoint))
    except (UnsupportedModel, PullError) as error:
        print(f"chorus: error: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


def families() -> list[str]:
    """One line for each family: its name, its architectures, and what of it is refused."""
    from ...core.model.families.plugins import plugins
    from ...core.model.families.registry import ALL, FAMILIES

    rows = [(family.title, ", ".join(family.architectures), family.notes) for family in ALL]
    for name, found in plugins(FAMILIES):
        rows.append(("", name, found) if isinstance(found, str) else (found.title, name, found.notes))
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return [f"{title:{first}}  {names:{second}}  {notes}".rstrip() for title, names, notes in rows]


def _form(directory: Path, model: ModelConfig) -> str | None:
    """How the weights are quantised; None: they are not."""
    from ...core.model.checkpoints.gguf_file import gguf_in

    if model.weight_format is not None:
        return model.weight_format.title
    file = gguf_in(directory)
    return None if file is None else f"GGUF ({file.resolve().name})"


def _kept(model: ModelConfig) -> str:
    """Who keeps quantised weights as they are stored."""
    from ...core.model.weights.narrow_bytes import bytes_saved_by_experts, weight_bytes
    from ...core.model.weights.weight_plan import NARROW, PACKED

    by = ["by GPUs"] if bytes_saved_by_experts(model, 2, NARROW) else []
    if bytes_saved_by_experts(model, 2, PACKED):
        by.append("as integers on CPUs by the native library")
    if by:
        return f"experts kept so {' and '.join(by)}, and dequantised elsewhere"
    if model.experts is None and weight_bytes(model, 2).dense:
        return "kept so by GPUs, integers also by the native decoder, and dequantised elsewhere"
    return "dequantised when they are loaded"


def _seen(mixer: AttentionSpec) -> str:
    """The tokens that a layer's attention sees."""
    if mixer.window is None:
        return "all tokens"
    return f"the last {mixer.window:,} tokens" if not mixer.chunked else f"their own chunk of {mixer.window:,} tokens"


def _heads(mixer: AttentionSpec) -> str:
    if (latent := mixer.latent) is not None:
        own = f"{mixer.num_heads} heads over latents of {latent.kv_rank} and a rotated key of {latent.rotated_dim}"
        if mixer.top_k is None:
            return own
        index = mixer.indexer
        by = "an earlier layer" if index is None else f"an indexer of {index.heads} heads of {index.key_dim}"
        return f"{own}, of {mixer.top_k} tokens chosen by {by}"
    own = f"{mixer.num_heads} heads of {mixer.head_dim}, {mixer.num_kv_heads} KV heads"
    if mixer.relative is not None:
        own += f", learned numbers of {mixer.relative.extent} distances"
    if (index := mixer.block_indexer) is None:
        return own
    by = f"an indexer of {index.heads} heads of {index.key_dim}"
    return f"{own}, of {index.top} blocks of {index.block} tokens chosen by {by}"


def _sizes(model: ModelConfig) -> list[str]:
    """Sizes of what a model has."""
    heads = " or ".join(map(_heads, model.attention_shapes))
    dense = f"feed-forward {model.intermediate_size}" if model.intermediate_size else ""
    found = (f"hidden {model.hidden_size}", dense, heads, f"vocabulary {model.vocab_size}")
    return [each for each in found if each]


def _experts(experts: Experts) -> str:
    return f"{experts.count} experts of {experts.size}, {experts.routing.per_token} for each token{experts.for_all}"


def programs(directory: Path) -> list[str]:
    """What a checkpoint's layers compute. Raises UnsupportedModel if it would not be served."""
    from ...core.model.program.text import program_lines
    from ...core.model.read_config import read_model_config

    return program_lines(read_model_config(directory))


def _images(directory: Path, model: ModelConfig) -> list[str]:
    """Whether images are served; nothing of a model that doesn't see."""
    from ...core.config import EngineConfig
    from ...core.media.serving import why_blind

    if model.vision is None or model.image_token is None:
        return []
    config = EngineConfig(model=directory)
    if why := why_blind(config, model, on_gpu=False):
        return [f"images: not served: {why}"]
    where = (
        "on CPUs, and on GPUs with --attention torch" if why_blind(config, model, on_gpu=True) else "on CPUs and GPUs"
    )
    return [f"images: served {where}, with adapters of the vision tower"]


def _layers(model: ModelConfig) -> list[str]:
    lines: list[str] = []
    if experts := model.experts:
        count = sum(layer.experts is not None for layer in model.layers)
        lines.append(f"{count} layers have {_experts(experts)}")
    for (seen, rope), count in Counter((_seen(it), it.rope) for it in model.attention_layers).items():
        turned = "no rope" if rope is None else f"{rope.type} rope of base {rope.theta:g}"
        lines.append(f"{count} layers see {seen}, with {turned}")
    if recurrent := model.recurrent:
        verb = next(layer.VERB for layer in model.layers if layer.recurrent)
        lines.append(f"{model.num_recurrent_layers} layers {verb} {recurrent.described()}")
    if (lookup := model.lookup) is not None:
        lines.append(f"{model.num_lookups} layers have {lookup.described()}, in the host's memory")
    for kind in dict.fromkeys(map(type, model.layers)):
        lines += kind.told([layer for layer in model.layers if type(layer) is kind])
    return lines


def described(directory: Path) -> list[str]:
    """What a checkpoint's configuration says. Raises UnsupportedModel if it would not be served."""
    from ...core.model.read_config import family_of, read_model_config

    model = read_model_config(directory)
    family, _ = family_of(model.architecture)
    assert family is not None, "the configuration was read by it"
    most = model.max_position_embeddings
    more = f"; with --max-model-len, up to {most:,}" if most > model.max_context else ""
    lines = [
        f"{family.title} ({model.architecture}) is served",
        f"context: {model.max_context:,} tokens{more}",
        f"shapes: {', '.join(_sizes(model))}",
        f"adapters may target: {model.module_paths.names}",
    ]
    lines += _images(directory, model)
    if (form := _form(directory, model)) is not None:
        lines.append(f"weights: {form}, {_kept(model)}")
    lines += _layers(model)
    return lines
