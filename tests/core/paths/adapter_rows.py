"""Rows of the table: every form of adapter that PEFT makes, on modules of every kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from ..adapters.adapter_zoo import BIASED_FORMS, FORMS, METHODS, kept_zoo
from ..adapters.model_module_forms import FORMS as MODULE_FORMS
from ..adapters.model_module_forms import make_forms
from ..tiny_families import EXPERTS, make_all_linear, make_tiny
from ..tiny_mixtures import ADAPTERS, make_mixture
from .family_rows import FIELDS
from .path import MERGING
from .subject import Subject

DENSE = {"r3-dense": {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "o_proj", "in_proj"]}}

#: Families with DoRA: projections in one matrix, norms around, scaled or parallel parts, linear attention, gates, rows
#: by head of several projections, latents, and latents of gates.
DORA = ("phi-3", "gemma-3", "cohere-2", "granite", "qwen3.5", "qwen2", "qwen3-next", "deepseek-v3", "kimi-linear")

#: Families with adapters on embeddings and heads: untied and tied; with factors of embeddings and logits, soft caps,
#: several layers of norms, and an odd vocabulary, of which one rank has one token more.
MODULES = ("llama2", "llama3", "granite", "gemma-2", "cohere-2-untied", "qwen3.5-tied", "odd")

#: Of streams, the matrices that nothing may change.
STREAMS = {"exclude_modules": r".*altup.*"}


def zoo(title: str, forms: Mapping[str, Any], merged: str, make: Callable[[], Any]) -> list[Subject]:
    """A row of each form beside plain LoRA, if there is some, and one of all at once."""
    beside = ("plain",) if "plain" in forms else ()
    rows = [Subject(f"{title}: {name}", make, (name, None, *beside), name) for name in forms if name != "plain"]
    return [*rows, Subject(f"{title}: all at once", make, (None, *forms), merged)]


def dora(family: str) -> Subject:
    """A family's row with DoRA on all that it may be on."""
    more = {"exclude_modules": r".*\.mlp\..*"} if family == "kimi-linear" else {}
    return of_family(f"{family}: DoRA", family, partial(make_tiny, family, use_dora=True, **more))


def all_linear(family: str, why_unmerged: str = "", **arguments: Any) -> Subject:
    """A family's row with an adapter on what PEFT's "all-linear" reaches. why_unmerged: empty: it can be merged."""
    make = partial(make_all_linear, family, **arguments)
    refused = {MERGING: why_unmerged} if why_unmerged else {}
    name = f"{family}: all-linear{' with DoRA' * arguments.get('use_dora', False)}"
    return of_family(name, family, make, ("all", None), "all", refused=refused)


def experts(family: str) -> Subject:
    """A family's row with adapters on routers, experts and shared experts, beside one that may be merged."""
    make = partial(make_mixture, family, {**ADAPTERS, **DENSE})
    return of_family(f"{family}: experts", family, make, (None, *ADAPTERS, *DENSE), next(iter(DENSE)))


def of_family(name: str, family: str, make: Callable[[], Any], *fields: Any, **more: Any) -> Subject:
    """A row that leaves out the comparisons which its family's row leaves out, and refuses what that refuses."""
    own = FIELDS.get(family, {})
    refused = {**own.get("refused", {}), **more.pop("refused", {})}
    return Subject(name, make, *fields, untold=own.get("untold", {}), refused=refused, **more)


ADAPTER_ROWS = [
    *zoo("forms", FORMS, "alora", cache(kept_zoo)),
    *zoo("forms on biases", BIASED_FORMS, "alora-bias", cache(partial(kept_zoo, biased=True))),
    *zoo("methods", METHODS, "loha", cache(partial(kept_zoo, methods=True))),
    *map(dora, DORA),
    *(of_family(f"{name}: modules", name, partial(make_forms, name), (None, *MODULE_FORMS), "all") for name in MODULES),
    all_linear("gemma-4-inputs", "inputs of layers"),
    all_linear("gemma-3n", "linear_left", **STREAMS),
    all_linear("gemma-3n-biased", "linear_left", **STREAMS),
    all_linear("gemma-3n", "linear_left", exclude_modules=r".*(altup|per_layer_model_projection).*", use_dora=True),
    all_linear("kimi-linear", "parts of a mixture of experts"),
    all_linear("mimo-v2-flash"),
    all_linear("ax-k2", "attention_norm.fc1"),
    all_linear("dots-3-note", "parts of a mixture of experts"),
    all_linear("minimax-m3", "parts of a mixture of experts"),
    all_linear("dbrx", "parts of a mixture of experts"),
    all_linear("step-3.7", "parts of a mixture of experts"),
    all_linear("ling-2.6", "parts of a mixture of experts"),
    all_linear("muse-spark", "parts of a mixture of experts"),
    all_linear("jetmoe", "parts of a mixture of experts"),
    all_linear("zaya", "parts of a mixture of experts"),
    all_linear("qwen4-exp", "parts of a mixture of experts"),
    *map(experts, EXPERTS),
]
