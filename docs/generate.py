"""Write the generated pages of docs/reference and the types of the library's options: `python docs/generate.py`;
`--check` fails where a file is stale.

Sources: the command line's parser, the settings' schema, the metrics of a server on the built-in model, the families of
models, and what the native decoder lacks of the tests' tiny geometries.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import json
import re
import sys
import tempfile
import textwrap
import types
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

if TYPE_CHECKING:
    from prometheus_client.samples import Sample
    from pydantic.fields import FieldInfo

ROOT = Path(__file__).parent.parent
HEAD = "<!-- Written by docs/generate.py: change the source, and run `make docs`. -->\n"

MATRIX = "docs/reference/support-matrix.md"

#: Around a part of a page that is written here.
BEGIN, END = "<!-- Written by docs/generate.py: what the native decoder lacks. -->", "<!-- End. -->"

#: The end of a help text that tells a default.
DEFAULT = r"\(default: ([^()]*)\)$"


def text(words: str | None) -> str:
    """A help text as a table's cell: a sentence with a capital letter, unless it begins with a value or a name."""
    plain = " ".join((words or "").replace("%%", "%").split()).replace("|", "\\|").replace("<", "&lt;")
    plain = re.sub(DEFAULT, "", plain).strip()
    return sentence(plain)


def sentence(words: str) -> str:
    """Words with a capital letter, unless they begin with a value or a name."""
    return words[:1].upper() + words[1:] if re.match(r"[a-z'-]+([ ,;.]|$)", words) else words


def actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Arguments of a command that are not settings, help apart, and are not hidden."""
    for action in parser._actions:
        is_shown = action.dest not in ("help", "model_argument", "version") and action.help != argparse.SUPPRESS
        if is_shown and not action.dest.startswith("setting_"):
            yield action


def commands(parser: argparse.ArgumentParser) -> dict[str, tuple[argparse.ArgumentParser, str]]:
    """Commands below a parser, with one line each."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            lines = {one.dest: one.help or "" for one in action._choices_actions}
            return {name: (sub, lines.get(name, "")) for name, sub in action.choices.items() if name in lines}
    return {}


def command_section(name: str, parser: argparse.ArgumentParser, line: str, depth: int = 2) -> Iterator[str]:
    yield f"{'#' * depth} `chorus {name}`\n"
    yield f"{text(line)}.\n" if not line.endswith(".") else f"{text(line)}\n"
    rows = [action for action in actions(parser) if not isinstance(action, argparse._SubParsersAction)]
    if any(action.dest.startswith("setting_") for action in parser._actions):
        yield "Takes [settings](settings.md) as flags.\n"
    if rows:
        yield "| argument | meaning | default |\n|---|---|---|"
        for action in rows:
            names = ", ".join(f"`{flag}`" for flag in action.option_strings) or f"`{action.metavar or action.dest}`"
            told = re.search(DEFAULT, action.help or "")
            is_told = action.default in (None, argparse.SUPPRESS, False, [], ())
            default = (told[1] if told else "") if is_told else f"`{action.default}`"
            yield f"| {names} | {text(action.help)} | {default} |"
        yield ""
    for sub, (parser_of, words) in commands(parser).items():
        yield from command_section(f"{name} {sub}", parser_of, words, depth + 1)


def command_line() -> str:
    from chorus.server.cli.command import make_parser

    lines = ["# Command line\n", HEAD]
    for name, (parser, line) in commands(make_parser()).items():
        lines += command_section(name, parser, line)
    return "\n".join(lines).rstrip() + "\n"


def settings() -> str:
    from chorus.server.settings import Settings
    from chorus.server.start.flags import add_settings

    parser = argparse.ArgumentParser()
    add_settings(parser)
    lines = [
        "# Settings\n",
        HEAD,
        "Every setting is a flag (`--max-num-seqs 64`), an environment variable (`CHORUS_MAX_NUM_SEQS=64`), or a line "
        "of the TOML file that `--config` names (`max_num_seqs = 64`). Flags win over variables, variables over the "
        "file. Sizes take units (`512MB`, `2GiB`).\n",
    ]
    for group in parser._action_groups:
        found = [action for action in group._group_actions if action.dest.startswith("setting_")]
        if found:
            title = group.title or ""
            lines += [f"## {title[:1].upper()}{title[1:]}\n", "| setting | meaning | default |\n|---|---|---|"]
            for action in found:
                field = Settings.model_fields[action.dest.removeprefix("setting_")]
                default = "" if is_told(field) else f"`{shown(field.default)}`"
                lines.append(f"| `{action.option_strings[0]}` | {text(field.description)} | {default} |")
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def is_told(field: FieldInfo) -> bool:
    """True if a setting's default needs no words, or its description has them."""
    return field.default in (None, [], {}, "") or "default:" in (field.description or "").lower()


def shown(default: object) -> str:
    """A default; sizes in bytes with a unit."""
    if isinstance(default, int) and not isinstance(default, bool) and default >= 1 << 20 and default % (1 << 20) == 0:
        mib = default >> 20
        return f"{mib >> 10}GiB" if mib % 1024 == 0 else f"{mib}MiB"
    return str(default)


def metrics() -> str:
    import httpx
    from prometheus_client.parser import text_string_to_metric_families

    from chorus.server.demo.builtin import BUILTIN_ADAPTERS
    from chorus.server.settings import Settings
    from chorus.server.start.launch import build_app, serving

    given = Settings(threads=1, num_pages=256, adapters=BUILTIN_ADAPTERS)
    with serving(build_app(given), given) as url:
        for model in ("reverse", "upper"):
            httpx.post(f"{url}/v1/completions", json={"model": model, "prompt": "ab\n", "max_tokens": 2}, timeout=60)
        scraped = httpx.get(f"{url}/metrics", timeout=60).text
    families = sorted(text_string_to_metric_families(scraped), key=lambda family: family.name)
    families = [family for family in families if not family.name.endswith("_created")]
    busy, common = busy_labels(), {"engine", "model_name"}
    labels_of = {
        family.name: {label for sample in family.samples or busy.get(family.name, []) for label in sample.labels}
        for family in families
    }
    others = [name for name, labels in labels_of.items() if name.startswith("vllm:") and not common <= labels]
    lines = [
        "# Metrics\n",
        HEAD,
        "`GET /metrics` has these series. `vllm:` series have vLLM's names and labels, for existing dashboards and "
        "gateways. With keys, a key sees the series of its own tenant and models; an admin key sees all. A cluster "
        "adds the series named in [clusters](../how-to/cluster.md#limits-and-metrics). A series that ends in "
        "`_created` is the time at which the series next to it began. Labels are in brackets; `vllm:` series have "
        f"`engine` and `model_name`, too, but for {' and '.join(f'`{name}`' for name in others)}.\n",
    ]
    for kind in ("counter", "gauge", "histogram"):
        lines.append(f"## {kind.capitalize()}s\n")
        of_meaning: dict[str, list[str]] = {}
        for family in families:
            if family.type == kind:
                labels = labels_of[family.name] - {"le"}
                labels -= common if common <= labels else set()
                name = f"`{family.name}{'_total' if kind == 'counter' else ''}`"
                name += f" ({', '.join(f'`{one}`' for one in sorted(labels))})" if labels else ""
                of_meaning.setdefault(text(family.documentation), []).append(name)
        lines += (f"* {', '.join(names)}: {meaning}" for meaning, names in of_meaning.items())
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def busy_labels() -> dict[str, list[Sample]]:
    """Samples of series that a server has only while requests run, or while an adapter is merged."""
    from prometheus_client import generate_latest
    from prometheus_client.parser import text_string_to_metric_families

    from chorus.core.engine_stats import EngineStats, TenantStats
    from chorus.memory.adapters.adapter_costs import LOAD_BUCKETS, AdapterCost
    from chorus.server.engine.engine_view import EngineView
    from chorus.server.engine.metrics import Metrics, tenants_text
    from chorus.server.engine.request_metrics import Ended

    cost = AdapterCost("reverse", 1.0, 1.0, (1, *[0] * len(LOAD_BUCKETS)))
    view = EngineView(tenants=[TenantStats("tenant", num_running=1, num_waiting=1, standing=0)], costs=lambda: [cost])
    stats = EngineStats(merged_adapter="reverse")
    metrics = Metrics(lambda: stats, lambda: view, "base", budgets=lambda: {"tenant": 1.0})
    spent = metrics.accepted("base", "tenant", 1, 1)
    metrics.ended(spent, "base", "stop", Ended(1.0, 1.0, 1.0, 1.0, 1, 0, 1, 1))
    texts = (
        metrics.render(generate_latest),
        metrics.render_tenants(generate_latest),
        tenants_text(view, generate_latest),
    )
    return {family.name: family.samples for family in text_string_to_metric_families(b"".join(texts).decode())}


def models() -> str:
    from chorus.core.model.families.registry import ALL

    lines = [
        "# Models\n",
        HEAD,
        "These families are served on the CPU, with their adapters, and give the tokens of `transformers` and `peft`: "
        "tests compare them for tiny random models of each family. `chorus models MODEL` says the same of a "
        "checkpoint. For GPUs see the [support matrix](support-matrix.md).\n",
        "A checkpoint that also sees images or video is served for text, and the tensors of its tower are left out, "
        "unless its line has images among what is served: see [Images](../how-to/images.md).\n",
        "| family | `architectures` in `config.json` | limits |\n|---|---|---|",
    ]
    for family in ALL:
        names = ", ".join(f"`{name}`" for name in family.architectures)
        limits = family.notes or ("text only" if family.tensors.left_out else "")
        lines.append(f"| {family.title} | {names} | {limits} |")
    return "\n".join(lines) + "\n"


def support_matrix() -> str:
    """The page with its table of what the native decoder does not compute written anew."""
    page = (ROOT / MATRIX).read_text()
    before, _, rest = page.partition(BEGIN)
    _, _, behind = rest.partition(END)
    rows = [f"| {title} | {', '.join(lacks)} |" for title, lacks in sorted(not_native().items())]
    head = "| family | what the native decoder does not compute of it |\n|---|---|"
    return "\n".join([f"{before}{BEGIN}\n", head, *rows, f"\n{END}{behind}"])


def not_native() -> dict[str, list[str]]:
    """By title, families of which a tiny geometry, or a rank's share of it, has what the native decoder lacks."""
    sys.path.insert(0, str(ROOT))
    from chorus.core.model.families.registry import ALL
    from chorus.core.model.program.native_decoder import why_lacking
    from chorus.core.model.specs.config import UnsupportedModel
    from chorus.core.model.weights.shard import Shard
    from tests.conftest import quiet
    from tests.core.model.program.golden import make_configs, model_of

    titles = {name: family.title for family in ALL for name in family.architectures}
    found: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as root, quiet():
        make_configs(Path(root))
        for path in sorted(Path(root).iterdir()):
            config = model_of(path)
            lack = why_lacking(config)
            if lack is None:
                with contextlib.suppress(UnsupportedModel):
                    lack = why_lacking(Shard(0, 2).config(config))
            lacks = found.setdefault(titles[config.architecture], [])
            if lack is not None and lack not in lacks:
                lacks.append(lack)
    return {title: lacks for title, lacks in found.items() if lacks}


OPTION_TYPES = '''"""Types of `LLM`'s options. Written by docs/generate.py: change the settings, and run `make docs`.

Tests: tests/server/library/test_options.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict


class Options(TypedDict, total=False):
    """Keyword arguments of `LLM`: the settings of `chorus serve` that make sense without HTTP."""
'''


def option_types() -> str:
    from chorus.server.library.options import NAMED, OPTIONS, with_options
    from chorus.server.settings import Settings

    lines = [OPTION_TYPES]
    for name, field in Settings.model_fields.items():
        if name in OPTIONS - NAMED:
            meaning = with_options(" ".join((field.description or "").split())).replace("; repeatable", "")
            told = f"{sentence(meaning)}."
            if not is_told(field):
                told += f" Default: {shown(field.default)}."
            lines += [f"    {name}: {option_type(name, field)}", *docstring(told, "    ")]
    return "\n".join(lines) + "\n"


def option_type(name: str, field: FieldInfo) -> str:
    """The type of the values that a program may give a setting, as code."""
    from pydantic import BeforeValidator

    from chorus.server.settings import SIZES

    found = list(type_names(field.annotation))
    is_read = name in SIZES or any(isinstance(each, BeforeValidator) for each in field.metadata)
    if is_read and "str" not in found:  # as a flag's text
        found.insert(len(found) - ("None" in found), "str")
    return " | ".join(found)


def type_names(annotation: Any) -> Iterator[str]:
    """Alternatives of a type of settings, as code."""
    from chorus.server.settings import LoraModule

    kind, parts = get_origin(annotation), get_args(annotation)
    inner = [" | ".join(type_names(each)) for each in parts] if kind in (list, dict) else []
    if kind in (Union, types.UnionType):
        for each in parts:
            yield from type_names(each)
    elif kind is Annotated:
        yield from type_names(parts[0])
    elif kind is Literal:
        yield "Literal[{}]".format(", ".join(f'"{word}"' for word in parts))
    elif kind is list:
        yield f"Sequence[{inner[0]}]"
    elif kind is dict:
        yield f"Mapping[{', '.join(inner)}]"
    elif annotation is LoraModule:
        yield from ("str", "dict[str, str]", "tuple[str, str | Path]")
    elif annotation is Path:
        yield from ("str", "Path")
    else:
        yield {type(None): "None", Any: "Any"}.get(annotation) or annotation.__name__


def docstring(words: str, indent: str) -> Iterator[str]:
    """Lines of a docstring as ruff would format it."""
    most = 120 - len(indent)
    if len(words) <= most - 6:
        yield f'{indent}"""{words}"""'
        return
    yield from textwrap.wrap(f'"""{words}', most, initial_indent=indent, subsequent_indent=indent)
    yield f'{indent}"""'


def family_defaults() -> str:
    """Defaults of the configuration classes of transformers that families name."""
    from chorus.core.model.families.defaults import FILE

    known = json.loads(FILE.read_text()) if FILE.is_file() else {"transformers": "0", "classes": {}}
    return with_classes(known, {name for path in FILE.parent.rglob("*.py") for name in named_classes(path)})


def with_classes(known: dict[str, Any], names: Collection[str]) -> str:
    """The text of a file with these classes. known: the file, which stays as it is if a newer transformers wrote it, or
    if no default has moved since.
    """
    import transformers
    from packaging.version import Version

    version = transformers.__version__
    if Version(version) >= Version(known["transformers"]):
        found = {name: class_defaults(name) for name in names}
        known = known if found == known["classes"] else {"classes": found, "transformers": version}
    return json.dumps(known, indent=1, sort_keys=True) + "\n"


def named_classes(path: Path) -> Iterator[str]:
    """Configuration classes that a family's file names: what `Defaults` has first."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Defaults":
            yield ast.literal_eval(node.args[0])


#: Fields of configuration classes that say how a model is trained, or what it returns.
OF_TRAINING = re.compile(r"drop|init|_loss|use_cache|output_router|dtype|pad_token_id")


def class_defaults(name: str) -> dict[str, Any]:
    """Defaults of a configuration class: those of its fields, and of its rope, which it computes. A rope has no base
    where the class would take that of `rope_theta`, which then has it.
    """
    import transformers

    config_class, found = getattr(transformers, name), {}
    of_all = {each.name for each in dataclasses.fields(transformers.PreTrainedConfig)}
    for field in dataclasses.fields(config_class):
        if field.name in of_all or OF_TRAINING.search(field.name):
            continue
        if field.default is not dataclasses.MISSING:
            found[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
    rope = config_class().to_dict().get("rope_parameters") or {}
    if "rope_theta" in rope:
        found.setdefault("rope_theta", config_class.default_theta)  # where an object leaves it out
        if (share := rope.pop("partial_rotary_factor", None)) is not None:
            found["partial_rotary_factor"] = share
        if config_class(rope_theta=7.0).to_dict()["rope_parameters"]["rope_theta"] == 7.0:
            found["rope_theta"] = rope.pop("rope_theta")
        if rope not in ({"rope_type": "default"}, {"rope_type": "default", "rope_theta": found["rope_theta"]}):
            found["rope_parameters"] = rope
    return json.loads(json.dumps(found))


WRITTEN = {
    "core/model/families/defaults.json": family_defaults,  # first: pages read families by it
    "docs/reference/command-line.md": command_line,
    "docs/reference/settings.md": settings,
    "docs/reference/metrics.md": metrics,
    "docs/reference/models.md": models,
    MATRIX: support_matrix,
    "server/library/option_types.py": option_types,
}


def main(argv: list[str]) -> int:
    stale = []
    for name, write in WRITTEN.items():
        path, new = ROOT / name, write()
        if not path.is_file() or path.read_text() != new:
            stale.append(name)
            if "--check" not in argv:
                path.write_text(new)
    print(*(f"{name} is stale" if "--check" in argv else f"wrote {name}" for name in stale), sep="\n")
    return 1 if stale and "--check" in argv else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
