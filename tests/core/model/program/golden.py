"""What every tiny geometry's configuration is turned into before there are weights, and hashes of that by section.

Of each geometry: the program's text, each layer's segments with buffers that live across them, programs of the ends,
lasting buffers, projections with their ids, GEMM shapes, shapes of KV and of states, the native decoder's ops with
registers, or its refusal, slots (tensors, shapes, ranks' shares, keeps), and module paths of adapters; of the share of
one of two ranks, too, as far as it has them, or why there is none.

`python -m tests.core.model.program.golden --write` writes `golden.json`, `--out FILE` all that is hashed. The FILEs of
two checkouts are compared by `--diff A B`, which prints the first differences of each geometry.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import hashlib
import json
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from chorus.core.config import EngineConfig
from chorus.core.executors.base import _state_shape
from chorus.core.media.serving import with_tower
from chorus.core.model.program.ends import end_programs
from chorus.core.model.program.native_binding import LayerBinding
from chorus.core.model.program.native_decoder import _program
from chorus.core.model.program.op import NoNativeOp
from chorus.core.model.program.text import program_lines
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import ModelConfig, UnsupportedModel
from chorus.core.model.weights.shard import Shard
from chorus.core.model.weights.slot import shard_shape
from chorus.memory.pages.projections import Role

from ....conftest import quiet
from ... import test_text_parts as text_parts
from ... import tiny_families as tiny

FILE = Path(__file__).with_name("golden.json")
#: Hexadecimal digits of a hash: of 300 geometries with 20 sections, one in 3,000 changes would not be seen.
DIGITS = 6


def make_configs(root: Path) -> None:
    """Write `config.json` of each geometry, without a model."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    def write(name: str, config: Any, architecture: str) -> None:
        (root / name).mkdir(parents=True, exist_ok=True)
        raw = {**config.to_dict(), "architectures": [architecture]}
        (root / name / "config.json").write_text(json.dumps(raw, default=str, sort_keys=True))

    for name, (config_class, arguments, _) in tiny.EVERY.items():
        own = {**tiny.COMMON, **arguments}
        if config_class in tiny.BESIDE_TEXT:
            own = {"text_config": own, **tiny.BESIDE_TEXT[config_class]}
        config = getattr(transformers, config_class)(**own)
        found = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
        auto = found if isinstance(found, str) or found is None else found[0]
        write(name, config, tiny.BY_ANOTHER.get(config_class) or tiny.OF_CLASSES.get(config_class) or str(auto))
    for name, (config_class, text, parts) in _beside().items():
        write(name, getattr(transformers, config_class)(text_config=text, **parts), name)


def _beside() -> dict[str, tuple[str, dict[str, Any], dict[str, Any]]]:
    """Architectures beside `tiny.EVERY`, for ops that no family there has: additions of images' rows behind layers,
    factors of heads, experts of images' positions, and embeddings of images' and sound's tokens. Each has a class, its
    text part, and other parts.
    """
    found = {}
    for name in ("Qwen3VL", "MistralLarge4", "Ernie4_5_VLMoe"):
        name += "ForConditionalGeneration"
        config_class, text, vision = {**text_parts.MODELS, **text_parts.RENAMED}[name]
        found[name] = config_class, {**text_parts.TEXT, **text}, {"vision_config": vision}
    towers = {
        "vision_config": {"hidden_size": 24, "vocab_size": 7, "vocab_offset": 140},
        "audio_config": {"hidden_size": 16, "vocab_size": 4, "vocab_offset": 146},
    }
    text = {**tiny.COMMON, **tiny.SHAPES["gemma-3n"][1]}
    return {**found, "Gemma3nForConditionalGeneration": ("Gemma3nConfig", text, towers)}


def model_of(path: Path) -> ModelConfig:
    """A geometry as it is served, with what images need."""
    config = read_model_config(path)
    return config if config.vision is None else with_tower(EngineConfig(model=path), config)


def golden(root: Path, names: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """Sections of each geometry in `root`, or of these, by name."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(root / name for name in names) or sorted(root.iterdir()):
        config = model_of(path)
        found[path.name] = {"file": _file(path), **_facts(config), **_facts_of_whole(config)}
        try:
            found[path.name]["share"] = _facts(Shard(1, 2).config(config))
        except UnsupportedModel as error:
            found[path.name]["share"] = str(error).replace(str(root), "")
    return found


def _file(path: Path) -> dict[str, Any]:
    """The configuration, in which versions of transformers have other defaults."""
    raw = json.loads((path / "config.json").read_text())
    return {name: each for name, each in raw.items() if name != "transformers_version"}


def hashes(found: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Hashes by geometry and section."""
    return {name: {each: _hash(value) for each, value in sections.items()} for name, sections in found.items()}


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:DIGITS]


def _facts(config: ModelConfig) -> dict[str, Any]:
    ends, table = end_programs(config), config.projections
    try:
        gemms: Any = [_plain(table.gemm_shapes), _plain(table.gemm_shape_of)]
    except ValueError as error:
        gemms = str(error)
    return {
        "text": program_lines(config),
        "segments": _once(_segments(config.composed(each).program) for each in config.layers),
        "ends": {
            each.name: list(map(_op, getattr(ends, each.name)))
            for each in dataclasses.fields(ends)
            if each.name != "lasting"
        },
        "lasting": _plain(ends.lasting),
        "projections": _once([{"id": table.id(each.name), **_plain(each)} for each in own] for own in table.layers),
        "kv": [list(each.kv_shape) for each in config.kv_layers],
        "state": _plain(_state_shape(config, speculates=True)),
        "native": _native(config),
        "gemms": gemms,
    }


def _facts_of_whole(config: ModelConfig) -> dict[str, Any]:
    table = config.projections
    paths = _plain(dataclasses.replace(config.module_paths, base_rows=None, base_tokens=None, tower=None))
    return {
        "slots": _once(_slots(each, config) for each in config.layers),
        "model": [{"id": table.id(each.name), **_plain(each)} for each in table.model],
        "names": _plain((table.names, table.names_with_mixtures, table.unmerged, table.bypassed)),
        "paths": {name: each for name, each in paths.items() if name != "projections"},
        "stored": [each.path for each in config.stored_projections],
    }


def _op(op: Any) -> str:
    """An op's kind, buffers and slots; its detail is in the program's text."""
    reads = [f"{each}{' copied' * getattr(each, 'copied', False)}" for each in op.reads]
    return f"{type(op).__name__} {','.join(op.writes)} <- {','.join(reads)} | {','.join(op.slots)}"


def _segments(program: Any) -> list[dict[str, Any]]:
    parts, kept = ("before", "mixers", "after"), ("reads", "mixed")
    return [
        {part: list(map(_op, getattr(each, part))) for part in parts}
        | {part: _plain(getattr(each, part)) for part in kept}
        for each in program.segments
    ]


def _slots(layer: Any, config: ModelConfig) -> list[dict[str, Any]]:
    def tensor(each: Any) -> dict[str, Any]:
        shares = [each.share(rank, 2) for rank in (0, 1)] if each.rows or each.columns else []
        try:
            shapes = [list(shard_shape(each.shape, share)) for share in shares]
        except Exception as error:  # of an odd number of heads: it is a fact, too
            shapes = [str(error)]
        own = {name: getattr(each, name) for name in ("path", "shape", "rows", "columns", "made")}
        return {**_plain(own), "shares": _plain(shares), "shapes": shapes}

    names = ("name", "keep", "first_rank", "factor", "count", "shared", "stored_in")
    return [
        {**_plain({name: getattr(each, name) for name in names}), "tensors": list(map(tensor, each.tensors))}
        for each in config.composed(layer).slots
    ]


class _Named(dict[str, str]):
    """Weights by name: each is its name."""

    def get(self, name: str, default: object = None) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"w:{name}"

    def __missing__(self, name: str) -> str:
        return f"w:{name}"


def _native(config: ModelConfig) -> Any:
    try:
        program = _program(config)
    except NoNativeOp as error:
        return f"no {error}"
    layers = [[[op.kind, _arguments(op.arguments)] for op in ops] for ops in program._ops]  # noqa: SLF001
    ends = {"before": program.before, "behind": program.behind}
    listed = {name: [[op.kind, _arguments(op.arguments)] for op in ops] for name, ops in ends.items() if ops}
    return {"registers": _plain(program.registers), "layers": _once(layers), **listed}


def _arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _arguments(each) if isinstance(each, dict) else _late(each) if callable(each) else _plain(each)
        for name, each in arguments.items()
    }


def _late(argument: Callable[[LayerBinding], Any]) -> Any:
    """An argument that is bound with weights, which are their names here."""
    try:
        return _plain(argument(LayerBinding(_Named(), None, page_group=71, page_layer=72, plane=73, state_layer=74)))  # pyright: ignore[reportArgumentType]
    except Exception:  # it looks into a weight
        return "late"


def _once(every: Iterable[Any]) -> list[dict[str, Any]]:
    """Equal ones once, with the layers that have each."""
    found: dict[str, tuple[Any, list[int]]] = {}
    for at, each in enumerate(every):
        found.setdefault(json.dumps(each, sort_keys=True), (each, []))[1].append(at)
    return [{"layers": layers, "is": each} for each, layers in found.values()]


def _plain(each: Any) -> Any:
    """A value as JSON has it: specifications by their fields, functions as such."""
    if isinstance(each, enum.Enum):
        return each.value if isinstance(each, Role) else each.name
    if isinstance(each, torch.Tensor):
        return [list(each.shape), str(each.dtype), hashlib.sha256(each.numpy().tobytes()).hexdigest()[:12]]
    if isinstance(each, slice):
        return [each.start, each.stop]
    if isinstance(each, Mapping):
        return {str(name): _plain(value) for name, value in each.items()}
    if hasattr(each, "_asdict"):
        return _plain(each._asdict())
    if dataclasses.is_dataclass(each) and not isinstance(each, type):
        return {one.name: _plain(getattr(each, one.name)) for one in dataclasses.fields(each)}
    if isinstance(each, (set, frozenset)):
        return sorted(map(_plain, each))
    if isinstance(each, (list, tuple)):
        return [_plain(one) for one in each]
    if callable(each):
        return "late"
    return each if each is None or isinstance(each, (str, int, float, bool)) else str(each)


def differences(one: Any, other: Any, at: str = "", limit: int = 4) -> list[str]:
    """The first differences of two values, each with its place."""
    if type(one) is not type(other):
        return [f"{at}: {str(one)[:150]} != {str(other)[:150]}"]
    found: list[str] = []
    if isinstance(one, dict):
        found += [
            f"{at}.{each} only in the {'first' if each in one else 'second'}" for each in one.keys() ^ other.keys()
        ]
        for each in sorted(one.keys() & other.keys()):
            found += differences(one[each], other[each], f"{at}.{each}", limit)
        return found[:limit]
    if isinstance(one, Sequence) and not isinstance(one, str):
        found += [] if len(one) == len(other) else [f"{at}: {len(one)} and {len(other)} entries"]
        for number, pair in enumerate(zip(one, other, strict=False)):
            found += differences(*pair, f"{at}[{number}]", limit)
        return found[:limit]
    return [] if one == other else [f"{at}: {str(one)[:300]} != {str(other)[:300]}"]


def changed(known: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Lines about geometries of which a section is not as it is known."""
    for name in sorted(known.keys() | now.keys()):
        before, found = known.get(name, {}), now.get(name, {})
        sections = [each for each in {**before, **found} if before.get(each) != found.get(each)]
        if sections:
            yield f"{name}: {', '.join(sections)}"


def read() -> dict[str, dict[str, str]]:
    """The hashes in `golden.json`."""
    lines = json.loads(FILE.read_text())["geometries"]
    return {name: dict(each.split("=") for each in line.split()) for name, line in lines.items()}


def is_of_this_version() -> bool:
    """True if the installed transformers wrote the configurations."""
    return json.loads(FILE.read_text())["transformers"] == version("transformers")


def write(found: Mapping[str, Mapping[str, str]]) -> None:
    lines = {name: " ".join(f"{each}={value}" for each, value in sections.items()) for name, sections in found.items()}
    FILE.write_text(json.dumps({"transformers": version("transformers"), "geometries": lines}, indent=0) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    parser.add_argument("--out", type=Path, help="write all that is hashed")
    parser.add_argument("--diff", type=Path, nargs=2, help="compare two of these files")
    arguments = parser.parse_args()
    if arguments.diff:
        one, other = (json.loads(each.read_text()) for each in arguments.diff)
        for name in sorted(one.keys() | other.keys()):
            for line in differences(one.get(name), other.get(name)):
                print(name, line)
        return
    with tempfile.TemporaryDirectory() as root, quiet():
        make_configs(Path(root))
        found = golden(Path(root))
    if arguments.out:
        arguments.out.write_text(json.dumps(found, sort_keys=True, indent=1))
    if arguments.write:
        write(hashes(found))


if __name__ == "__main__":
    main()
