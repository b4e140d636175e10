"""Directories that are read as adapters, and the errors for others."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace

import peft
import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.memory.files import config as config_module
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.format import inspect_adapter
from chorus.memory.files.identity import with_content
from chorus.memory.files.module_paths import ModulePaths
from chorus.memory.host.image import HostImage
from chorus.memory.pages.adapter_layout import uniform_parts

from ...tables import TINY, TINY_PATHS, hybrid_table
from ..conftest import Draft
from .loading import CONFIG, LAYERS, Q0_A, Q0_B, WEIGHTS, load, refusal

pytestmark = pytest.mark.wide

UP2_B = "base_model.model.model.layers.2.mlp.up_proj.lora_B.weight"


# -- accepted adapters


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("served", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("page_elems", [256, 1024, 4096])
@pytest.mark.parametrize("rank", [1, 3, 8, 65])
def test_every_element_is_where_the_layout_says(adapter_draft, tmp_path, stored, served, page_elems, rank):
    it = adapter_draft(rank=rank, dtype=stored, seed=rank)
    it.tensors = {name: tensor.clamp(-9, 9) for name, tensor in it.tensors.items()}
    manifest, layout, image = load(it.write(tmp_path / "a"), served, page_elems)
    (part,), (place,) = manifest.parts, layout.parts
    assert (part.rank, part.scale, part.layers, part.targets) == (rank, 2.0, (0, 1, 2), TINY.names)
    assert image.shape == (layout.num_pages, page_elems)
    slab_elems = place.slabs.slab_elems
    assert layout.num_pages == math.ceil(3 * rank * slab_elems / page_elems)
    image = image.view(-1)
    seen = torch.zeros(image.shape, dtype=torch.bool)
    for layer in range(LAYERS):
        for m, projection in enumerate(TINY):
            d_in, d_out = projection.dims
            key = f"base_model.model.model.layers.{layer}.{projection.path}"
            a, b = (it.tensors[f"{key}.lora_{side}.weight"].to(served) for side in "AB")
            for i in range(rank):
                slab = (layer * rank + i) * slab_elems
                for offset, row, width in (
                    (place.slabs.a_offset[m], a[i], d_in),
                    (place.slabs.b_offset[m], b[:, i], d_out),
                ):
                    span = slice(slab + offset, slab + offset + width)
                    assert torch.equal(image[span], row)
                    assert not seen[span].any(), "two rows in one place"
                    seen[span] = True
    assert not image[~seen].any(), "something lies between the rows"


def test_ranks_and_scales_follow_peft(adapter_draft, tmp_path):
    """Against peft itself: the first pattern that matches in the file's order, by name, path or regular expression."""
    peft = pytest.importorskip("peft")
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils.other import get_pattern_key

    cases = [
        ({"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"up_proj": 5}}, None),
        ({"rank_pattern": {"model.layers.1.self_attn.q_proj": 2, "q_proj": 3, r".*\.2\.mlp\..*": 5}}, None),
        ({"rank_pattern": {"proj": 2, "_proj": 3, "layers.0.mlp.up_proj": 1}}, None),
        ({"rank_pattern": {r"layers\.[01]\..*": 7, "mlp.(up|down)_proj": 2}, "use_rslora": True}, None),
        ({"alpha_pattern": {"^model.layers.0.self_attn.q_proj": 0.5, "k_proj|v_proj": 9}}, None),
        ({"layers_to_transform": [0, 2]}, None),
        ({"layers_to_transform": 1, "layers_pattern": "layers"}, None),
        ({"layers_to_transform": [1, 7], "layers_pattern": ["blocks", "layers"]}, None),
        ({"layers_to_transform": []}, None),
        ({"layers_to_transform": [0]}, ["model.layers.2.mlp.up_proj", "q_proj"]),
        ({"exclude_modules": ["k_proj", "layers.1.mlp.up_proj"]}, None),
        ({"exclude_modules": r".*layers\.0\..*"}, None),
        ({}, r".*\.(q|v)_proj"),
        ({}, r"model\.layers\.[12]\.(self_attn\.k_proj|mlp\.(up|down)_proj)"),
        ({"exclude_modules": ["down_proj"]}, "all-linear"),
        ({}, ["self_attn.q_proj", "layers.1.mlp.down_proj", "c_attn"]),
    ]
    for number, (fields, targets) in enumerate(cases):
        targets = list(TINY.names) if targets is None else targets
        config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets, **fields)
        if targets == "all-linear":
            config.target_modules = set(TINY.names)
        expected = {}
        for layer in range(LAYERS):
            for m, module in enumerate(TINY.names):
                key = f"model.layers.{layer}.{'self_attn' if m < 4 else 'mlp'}.{module}"
                found = check_target_module_exists(config, key)
                if found and type(found).__name__ != "_ExcludedModule":
                    rank = config.rank_pattern.get(get_pattern_key(config.rank_pattern, key), config.r)
                    alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern, key), config.lora_alpha)
                    expected[layer, module] = rank, alpha / (math.sqrt(rank) if config.use_rslora else rank)
        it = adapter_draft(ranks=lambda *at, e=expected: e.get(at, (1,))[0], r=4, lora_alpha=6, **fields)
        it.config["target_modules"] = targets
        it.tensors = {
            name: tensor
            for name, tensor in it.tensors.items()
            if (int(name.split(".")[4]), name.split(".")[6]) in expected
        }
        manifest = inspect_adapter(it.write(tmp_path / str(number)), TINY_PATHS)
        actual = {
            (layer, module): (part.rank, part.scale)
            for part in manifest.parts
            for layer in part.layers
            for module in part.targets
        }
        assert actual == expected, fields
        assert sum(len(part.layers) * len(part.targets) for part in manifest.parts) == len(expected)
        assert manifest.rank == max(rank for rank, _ in expected.values())


def test_all_linear_modules_without_any_tensor_are_untrained(adapter_draft, tmp_path):
    """As in PEFT, which leaves their B zero. A module with some of its tensors is refused, and one that is named."""
    it = adapter_draft(("q_proj", "o_proj", "up_proj"))
    it.config["target_modules"] = "all-linear"
    manifest = inspect_adapter(it.write(tmp_path / "a"), TINY_PATHS)
    assert manifest.targets == ("q_proj", "o_proj", "up_proj")
    assert manifest.untrained == ("k_proj", "v_proj", "gate_proj", "down_proj")
    assert inspect_adapter(adapter_draft().write(tmp_path / "whole"), TINY_PATHS).untrained == ()
    for number, (change, why) in enumerate(
        [
            (lambda: it.tensors.pop(Q0_A), "targets q_proj of layer 0"),
            (lambda: it.tensors.clear(), "lora_A.weight is missing"),
        ]
    ):
        change()
        with pytest.raises(AdapterFormatError, match=why):
            inspect_adapter(it.write(tmp_path / f"broken{number}"), TINY_PATHS)
    named = adapter_draft(("q_proj", "o_proj"))
    named.config["target_modules"] = ["q_proj", "o_proj", "up_proj"]
    with pytest.raises(AdapterFormatError, match="targets up_proj of layer 0"):
        inspect_adapter(named.write(tmp_path / "named"), TINY_PATHS)


def test_null_target_modules_are_peft_s_default(adapter_draft, tmp_path):
    it = adapter_draft(("q_proj", "v_proj"))
    it.config["target_modules"] = None
    assert inspect_adapter(it.write(tmp_path / "a"), TINY_PATHS).targets == ("q_proj", "v_proj")


def test_thousands_of_manifests_share_what_is_equal(adapter_draft, tmp_path):
    paths = [adapter_draft(seed=i, base_model_name_or_path=f"org/{i}").write(tmp_path / str(i)) for i in range(3)]
    first, *others = [inspect_adapter(path, TINY_PATHS) for path in paths]
    assert all(other.parts is first.parts for other in others)


# -- refusals: a change to a good adapter → words that the message must have


def config(**fields):
    return lambda it: it.config.update(fields)


def tensor(name, change):
    return lambda it: it.tensors.update({name: change(it.tensors[name])})


def extra(name, *shape):
    return lambda it: it.tensors.update({name: torch.ones(shape)})


def poisoned(value, name=UP2_B, at=(3, 1)):
    def change(it):
        it.tensors[name][at] = value

    return change


def together(*changes):
    return lambda it: [change(it) for change in changes]


def dora(first=1.0, longer=0):
    """Magnitudes of every module; the first one with another value, or longer than the module has outputs."""

    def change(it):
        it.config["use_dora"] = True
        for name in [name for name in it.tensors if "lora_B" in name]:
            magnitudes = torch.ones(len(it.tensors[name]) + (longer if name == Q0_B else 0))
            magnitudes[0] = first if name == Q0_B else 1.0
            it.tensors[name.replace("lora_B.weight", "lora_magnitude_vector")] = magnitudes

    return change


REFUSED = {
    "missing tensor": (lambda it: it.tensors.pop(UP2_B), WEIGHTS, UP2_B, "missing", "up_proj of layer 2"),
    "extra tensor": (lambda it: it.config["target_modules"].remove("up_proj"), WEIGHTS, "up_proj", "not targeted"),
    "untargeted layer": (config(layers_to_transform=[0, 1]), WEIGHTS, "layers.2", "not targeted"),
    "rank of A": (tensor(Q0_A, lambda t: t[:3]), WEIGHTS, Q0_A, "[3, 16]", "[4, 16]", "rank_pattern"),
    "rank of B": (tensor(Q0_B, lambda t: t[:, :2]), WEIGHTS, Q0_B, "[16, 2]", "rank_pattern"),
    "rank in config": (config(r=5), WEIGHTS, "its rank is 4", "it is 5"),
    "transposed": (tensor(UP2_B, lambda t: t.T), WEIGHTS, UP2_B, "[4, 24]", "[24, 4]"),
    "one dimension": (tensor(Q0_A, lambda t: t.flatten()), WEIGHTS, Q0_A, "[64]"),
    "another base": (
        lambda it: (
            config(base_model_name_or_path="org/other")(it),
            *(tensor(Q0_A.replace("layers.0", f"layers.{n}"), lambda t: torch.ones(4, 99))(it) for n in range(3)),
        ),
        WEIGHTS,
        Q0_A,
        "[4, 99]",
        "'org/other'",
        "base model that it was trained on",
    ),
    "one damaged": (
        tensor(Q0_A, lambda t: torch.ones(4, 99)),
        WEIGHTS,
        "[4, 99]",
        f"that of {Q0_A.replace('layers.0', 'layers.1')} is right, so this one is damaged: save the adapter again",
    ),
    "ZeRO-3": (
        lambda it: (
            config(base_model_name_or_path="org/other")(it),
            it.tensors.update({name: torch.empty(0) for name in it.tensors}),
        ),
        WEIGHTS,
        "has shape [0]",
        "needed; it is empty, as tensors are whose values DeepSpeed's ZeRO-3 keeps on other processes",
        "stage3_gather_16bit_weights_on_model_save",
    ),
    "weights of a base model": (
        lambda it: (
            it.tensors.clear(),
            it.tensors.update({"model.layers.0.self_attn.q_proj.weight": torch.ones(16, 16)}),
        ),
        WEIGHTS,
        "no LoRA tensor is in this file, which has 1 others, such as 'model.layers.0.self_attn.q_proj.weight'",
        "serve a whole model as the MODEL of chorus serve",
    ),
    "layer beyond": (extra(Q0_A.replace("layers.0", "layers.3"), 4, 16), WEIGHTS, "layer 3", "3 layers"),
    "leading zero": (extra(Q0_A.replace("layers.0", "layers.00"), 4, 16), WEIGHTS, "layers.00", "not supported"),
    "wrong block": (extra(Q0_A.replace("self_attn", "mlp"), 4, 16), WEIGHTS, "mlp.q_proj", "not supported"),
    "NaN": (poisoned(math.nan), WEIGHTS, UP2_B, "NaN or infinity"),
    "infinity": (poisoned(-math.inf, Q0_A, (0, 15)), WEIGHTS, Q0_A, "NaN or infinity"),
    "DoRA flag": (config(use_dora=True), WEIGHTS, "lora_magnitude_vector is missing", "use_dora"),
    "DoRA tensor": (extra(Q0_A.replace("lora_A", "lora_magnitude_vector"), 16), WEIGHTS, "magnitude", "use_dora"),
    "DoRA's shape": (dora(longer=1), WEIGHTS, "lora_magnitude_vector", "is needed"),
    "DoRA not finite": (dora(math.nan), WEIGHTS, "lora_magnitude_vector", "NaN"),
    "DoRA with lora_bias": (config(use_dora=True, lora_bias=True), CONFIG, "lora_bias", "DoRA"),
    "DoRA on the head": (
        together(dora(), extra("base_model.model.lm_head.lora_magnitude_vector", 40)),
        WEIGHTS,
        "lm_head",
        "DoRA",
        "exclude_modules",
    ),
    "activated DoRA": (config(use_dora=True, alora_invocation_tokens=[1]), CONFIG, "use_dora", "alora"),
    "activated bias": (config(bias="all", alora_invocation_tokens=[1]), CONFIG, "bias", "alora"),
    "modules_to_save": (config(modules_to_save=["lm_head"]), CONFIG, "modules_to_save", "lm_head"),
    "saved module": (extra("base_model.model.lm_head.weight", 40, 16), WEIGHTS, "lm_head", "modules_to_save"),
    "resized vocabulary": (
        extra("base_model.model.model.embed_tokens.weight", 44, 16),
        WEIGHTS,
        "embed_tokens",
        "44 rows",
        "resized",
        "save_embedding_layers=False",
    ),
    "trained norm": (extra("base_model.model.model.norm.weight", 16), WEIGHTS, "whole trained", "modules_to_save"),
    "trained projection": (extra(f"{Q0_A.split('.lora_')[0]}.weight", 16, 16), WEIGHTS, "q_proj", "whole trained"),
    "unknown": (extra("base_model.model.something.else", 4), WEIGHTS, "something.else", "unknown", "save_pretrained"),
    "classifier's head": (extra("base_model.model.score.weight", 2, 16), WEIGHTS, "score", "classifier", "CAUSAL_LM"),
    "classifier": (
        config(task_type="TOKEN_CLS", modules_to_save=["classifier", "score"]),
        CONFIG,
        "task_type is 'TOKEN_CLS'",
        "'score'",
        "CAUSAL_LM",
    ),
    "embedding": (extra("base_model.model.model.embed_tokens.lora_embedding_A", 4, 40), WEIGHTS, "embedding"),
    "embedding target": (config(target_modules=["q_proj", "embed_tokens"]), CONFIG, "embed_tokens", "exclude_modules"),
    "head target": (config(target_modules=".*(_proj|lm_head)"), CONFIG, "lm_head", "exclude_modules"),
    "matches a block": (config(target_modules=".*mlp.*"), CONFIG, "model.layers.0.mlp"),
    "bias tensor": (extra(Q0_B.replace("weight", "bias"), 16), WEIGHTS, "lora_B.bias", "lora_bias"),
    "layer bias": (extra(Q0_B.replace("lora_B.weight", "bias"), 16), WEIGHTS, "q_proj.bias", "bias 'none'"),
    "bias": (config(bias="some"), CONFIG, "bias", "lora_only"),
    "bias of a norm": (
        together(config(bias="all"), extra("base_model.model.model.layers.0.input_layernorm.bias", 16)),
        WEIGHTS,
        "input_layernorm.bias",
        "bias='lora_only' or 'none'",
    ),
    "lora_bias": (config(lora_bias=True), WEIGHTS, "lora_B.bias is missing", "lora_bias"),
    "unprefixed": (extra(Q0_A.removeprefix("base_model.model."), 4, 16), WEIGHTS, "base_model.model.", "save_pre"),
    "ill-named": (extra(Q0_A.replace("lora_A", "lora_A.default"), 4, 16), WEIGHTS, "lora_A.default"),
    "rank 0": (config(r=0), CONFIG, "r is 0", "1 to 4096"),
    "negative rank": (config(r=-4), CONFIG, "r is -4"),
    "absurd rank": (config(r=4097), CONFIG, "r is 4097", "4096"),
    "rank as text": (config(r="4"), CONFIG, "r is '4'"),
    "rank as float": (config(r=4.0), CONFIG, "r is 4.0"),
    "rank as bool": (config(r=True), CONFIG, "r is True"),
    "rank null": (config(r=None), CONFIG, "r is None"),
    "negative alpha": (config(lora_alpha=-1), CONFIG, "lora_alpha is -1"),
    "NaN alpha": (config(lora_alpha=math.nan), CONFIG, "lora_alpha is nan"),
    "infinite alpha": (config(lora_alpha=math.inf), CONFIG, "lora_alpha is inf"),
    "huge alpha": (config(lora_alpha=10**400), CONFIG, "lora_alpha"),
    "alpha as text": (config(lora_alpha="16"), CONFIG, "lora_alpha is '16'"),
    "rank_pattern list": (config(rank_pattern=[1]), CONFIG, "rank_pattern", "object"),
    "rank_pattern value": (config(rank_pattern={"q_proj": 0}), CONFIG, "rank_pattern", "1 to 4096"),
    "rank_pattern regex": (config(rank_pattern={"q_proj(": 2}), CONFIG, "rank_pattern", "q_proj(", "regular"),
    "regex repetition": (config(rank_pattern={"q{99999999999}": 2}), CONFIG, "rank_pattern", "regular expression"),
    "rank_pattern unheeded": (config(rank_pattern={"q_proj": 2}), WEIGHTS, "its rank is 4", "it is 2"),
    "alpha_pattern value": (config(alpha_pattern={"q_proj": math.nan}), CONFIG, "alpha_pattern", "finite"),
    "long pattern": (config(target_modules="q" * 3000), CONFIG, "target_modules", "3000"),
    "use_rslora": (config(use_rslora="yes"), CONFIG, "use_rslora", "true or false"),
    "target_modules number": (config(target_modules=7), CONFIG, "target_modules is 7"),
    "target_modules mixed": (config(target_modules=["q_proj", 7]), CONFIG, "target_modules"),
    "target_modules regex": (config(target_modules="(q_proj"), CONFIG, "target_modules", "regular expression"),
    "no target": (config(target_modules=[]), CONFIG, "match none"),
    "no target in base": (config(target_modules=["c_attn"]), CONFIG, "match none"),
    "all excluded": (config(exclude_modules=".*"), CONFIG, "match none"),
    "layers with regex": (config(target_modules=".*q_proj", layers_to_transform=[1]), CONFIG, "layers_to_transform"),
    "layers as text": (config(layers_to_transform=["1"]), CONFIG, "layers_to_transform", "layer number"),
    "negative layer": (config(layers_to_transform=[-1]), CONFIG, "layers_to_transform"),
    "pattern without layers": (config(layers_pattern="layers"), CONFIG, "layers_pattern", "layers_to_transform"),
    "OFT": (config(peft_type="OFT"), CONFIG, "peft_type is 'OFT'", "LORA"),
    "IA3": (
        config(peft_type="IA3"),
        WEIGHTS,
        "lora_A.weight' is LoRA's, but peft_type in adapter_config.json is 'IA3'",
    ),
    "no type": (config(peft_type=None), CONFIG, "peft_type"),
    "PiSSA": (config(init_lora_weights="pissa_niter_4"), CONFIG, "init_lora_weights", "path_initial_model"),
    "replicated layers": (config(layer_replication=[[0, 2], [1, 3]]), CONFIG, "layer_replication"),
    "trained tokens": (config(trainable_token_indices=[1]), WEIGHTS, "trainable_token_indices"),
    "bare parameters": (config(target_parameters=["experts"]), CONFIG, "target_parameters"),
    "VeLoRA": (config(velora_config={"num_groups": 2}), CONFIG, "velora_config"),
    **{
        f"{name} by default": (config(**{name: {}}), CONFIG, f"{name} is {{}}")
        for name in ("kasa_config", "velora_config", "monteclora_config", "arrow_config", "use_bdlora", "zlora_config")
    },
    "an unknown variant": (config(use_zlora=True), CONFIG, "use_zlora", "not known"),
    "an unknown variant's settings": (config(zlora_config={"a": 1}), CONFIG, "zlora_config", "not known"),
    "no invocation": (config(alora_invocation_tokens=[]), CONFIG, "alora_invocation_tokens", "1"),
    "words as an invocation": (config(alora_invocation_tokens=["<a>"]), CONFIG, "alora_invocation_tokens", "ids"),
    "a truth as an invocation": (config(alora_invocation_tokens=[True]), CONFIG, "alora_invocation_tokens", "ids"),
    "a number as an invocation": (config(alora_invocation_tokens=7), CONFIG, "alora_invocation_tokens", "ids"),
    "float64": (tensor(Q0_A, lambda t: t.double()), WEIGHTS, Q0_A, "F64", "F32, F16, BF16"),
    "int8": (tensor(Q0_A, lambda t: t.to(torch.int8)), WEIGHTS, Q0_A, "I8", "convert"),
    "fp8": (tensor(Q0_A, lambda t: t.to(torch.float8_e4m3fn)), WEIGHTS, Q0_A, "F8_E4M3", "convert"),
    "no tensors": (lambda it: it.tensors.clear(), WEIGHTS, "missing"),
}


def test_every_field_of_peft_is_judged():
    """A variant that a new PEFT adds must be served, or refused by name."""
    names = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    assert names <= config_module._SERVED | config_module._UNSERVED.keys()  # noqa: SLF001
    assert not config_module._SERVED & config_module._UNSERVED.keys()  # noqa: SLF001


def test_invocation_tokens(adapter_draft, tmp_path):
    it = adapter_draft()
    it.config["alora_invocation_tokens"] = [5, 6]
    path = it.write(tmp_path / "a")
    manifest = inspect_adapter(path, TINY_PATHS)
    assert manifest.invocation_tokens == (5, 6)
    assert inspect_adapter(path, replace(TINY_PATHS, vocab_size=7)).invocation_tokens == (5, 6)
    with pytest.raises(AdapterFormatError, match=r"alora_invocation_tokens has 6, the base model's tokens end at 6"):
        inspect_adapter(path, replace(TINY_PATHS, vocab_size=6))
    it.config["alora_invocation_tokens"] = [5]
    other = inspect_adapter(it.write(tmp_path / "b"), TINY_PATHS)
    assert with_content(other).content_hash != with_content(manifest).content_hash


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_file_and_the_cause(adapter_draft, tmp_path, case):
    change, file, *words = REFUSED[case]
    it = adapter_draft()
    change(it)
    message = refusal(it.write(tmp_path / "a"))
    assert message.startswith(str(tmp_path / "a" / file)), message
    for word in words:
        assert word in message
    assert len(message) < 1200
    assert message.isprintable()


def test_values_that_overflow_the_models_dtype(adapter_draft, tmp_path):
    it = adapter_draft()
    it.tensors[UP2_B][0, 0] = 1e5
    path = it.write(tmp_path / "a")
    load(path, torch.float32)
    load(path, torch.bfloat16)
    message = refusal(path, torch.float16)
    assert UP2_B in message
    assert "beyond the range of torch.float16" in message


# -- the engine


def generate(engine, adapter, prompt=(5, 6, 7, 8), count=6):
    engine.add_request(Request("r", list(prompt), RequestParams(count, temperature=0, ignore_eos=True), adapter))
    tokens, error = [], None
    while engine.has_work():
        for output in engine.step():
            tokens += output.token_ids
            error = output.error or error
        engine.check_integrity()
    return tokens, error


@pytest.mark.wide
def test_a_refused_version_leaves_the_old_one_serving(adapter_draft, tiny_engine, tmp_path):
    engine = tiny_engine()
    store = engine.store
    old = store.register("it", adapter_draft(rank=3, seed=5).write(tmp_path / "old"))
    expected = generate(engine, "it")
    assert expected[1] is None
    assert expected != generate(engine, None)
    free = engine.stats().num_free_pages
    for number, (case, (damage, *_)) in enumerate(REFUSED.items()):
        if case in ("saved module", "resized vocabulary"):  # the base model's own rows are at hand, to compare them
            continue
        it = adapter_draft()
        damage(it)
        with pytest.raises(AdapterFormatError):
            engine.adapters.check(it.write(tmp_path / str(number)))
        assert store.get("it") is old, case
        assert store.names() == ["it"], case
        engine.check_integrity()
        assert engine.stats().num_free_pages == free, case
        assert generate(engine, "it") == expected, case


def test_unreadable_weights_fail_their_request_only(adapter_draft, tiny_engine, tmp_path):
    engine = tiny_engine()
    it = adapter_draft()
    poisoned(math.inf)(it)
    engine.store.register("bad", it.write(tmp_path / "bad"))
    engine.store.register("good", adapter_draft(seed=2).write(tmp_path / "good"))
    expected = generate(engine, "good")
    tokens, error = generate(engine, "bad")
    assert not tokens
    assert error is not None and UP2_B in error
    assert generate(engine, "good") == expected


def test_a_checked_registration_is_read_already(adapter_draft, tiny_engine, tmp_path):
    engine = tiny_engine()
    path = adapter_draft().write(tmp_path / "a")
    image = HostImage()
    adapter = engine.store.register("a", engine.adapters.check(path, image=image), image)
    assert engine.store.tier(adapter) == "host"
    (path / WEIGHTS).unlink()
    assert generate(engine, "a")[1] is None


# -- directories that are something else


def test_a_trainers_output_names_the_newest_checkpoint(adapter_draft, tmp_path):
    for step in (500, 1500, 1000):
        adapter_draft().write(tmp_path / "out" / f"checkpoint-{step}")
    (tmp_path / "out" / "checkpoint-2000").mkdir()  # was not saved to its end
    (tmp_path / "out" / "trainer_state.json").write_text("{}")
    message = refusal(tmp_path / "out")
    assert "adapter_config.json: not found" in message
    assert "use its sub-directory checkpoint-1500, the last of 3" in message


def test_an_adapter_one_level_below_is_named(adapter_draft, tmp_path):
    adapter_draft().write(tmp_path / "out" / "final")
    assert "an adapter is in its sub-directory 'final'" in refusal(tmp_path / "out")


def test_a_model_given_as_an_adapter_says_so(tiny_base):
    assert "a whole model, not an adapter: serve it as the MODEL" in refusal(tiny_base)


def test_weights_in_another_form_say_what_to_do(adapter_draft, tmp_path):
    for file, words in (("adapters.safetensors", "mlx_lm.fuse"), ("adapter_model.bin", "chorus convert-adapter")):
        path = adapter_draft().write(tmp_path / file)
        (path / WEIGHTS).rename(path / file)
        message = refusal(path)
        assert file in message and words in message
    mlx = tmp_path / "adapters.safetensors"
    (mlx / "adapter_config.json").write_text('{"fine_tune_type": "lora", "lora_parameters": {"rank": 8}, "r": "no"}')
    assert "MLX" in refusal(mlx), "its configuration is not PEFT's"


def test_what_peft_saves_of_a_classifier_has_its_head(tiny_base, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(tiny_base, num_labels=2)
    it = get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", r=4))
    it.save_pretrained(tmp_path / "a")
    head = inspect_adapter(tmp_path / "a", TINY_PATHS).head
    assert head is not None and head.num_labels == 2 and head.bias is None
    saved = it.get_parameter("base_model.model.score.modules_to_save.default.weight")
    assert torch.equal(torch.from_numpy(head.weight), saved.detach())


def test_what_peft_saves_of_a_classifier_of_tokens_is_refused(tiny_base, tmp_path):
    model = AutoModelForTokenClassification.from_pretrained(tiny_base, num_labels=2)
    get_peft_model(model, peft.LoraConfig(task_type="TOKEN_CLS", r=4)).save_pretrained(tmp_path / "a")
    message = refusal(tmp_path / "a")
    assert "task_type is 'TOKEN_CLS'" in message and "task_type='SEQ_CLS'" in message


def test_what_peft_saves_beside_a_resized_vocabulary_says_so(tiny_base, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_base)
    model.resize_token_embeddings(48)
    it = get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=4))
    it.save_pretrained(tmp_path / "a", save_embedding_layers=True)
    message = refusal(tmp_path / "a")
    assert "48 rows" in message and "resized" in message and "save_embedding_layers=False" in message
    it.save_pretrained(tmp_path / "b", save_embedding_layers=False)
    assert inspect_adapter(tmp_path / "b", TINY_PATHS).rank == 4, "as the message says"


# -- layers of two kinds

HYBRID = hybrid_table("LLAL")


def hybrid_draft(names=HYBRID.names, rank=4, **config):
    """An adapter of the model of `HYBRID`, as PEFT saves it."""
    tensors = {}
    for layer, projections in enumerate(HYBRID.layers):
        for each in projections:
            if each.name in names:
                key = f"base_model.model.model.layers.{layer}.{each.path}"
                tensors[f"{key}.lora_A.weight"] = torch.randn(rank, each.inputs)
                tensors[f"{key}.lora_B.weight"] = torch.randn(each.outputs, rank)
    base = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(names), "bias": "none"}
    return Draft({**base, **config}, tensors)


def hybrid_refusal(it, path):
    with pytest.raises(AdapterFormatError) as caught:
        inspect_adapter(it.write(path), ModulePaths(HYBRID))
    return str(caught.value)


def test_parts_of_an_adapter_have_layers_that_have_all_their_modules(tmp_path):
    manifest = inspect_adapter(hybrid_draft().write(tmp_path / "a"), ModulePaths(HYBRID))
    assert manifest.parts == tuple(sorted(uniform_parts(HYBRID, 4), key=lambda part: (part.layers, part.targets)))
    assert manifest.targets == HYBRID.names
    assert manifest.num_params(HYBRID) == 4 * HYBRID.rank_elems()


@pytest.mark.parametrize("targets", ["all-linear", r".*\.(mlp|linear_attn|self_attn)\..*_proj.*", list(HYBRID.names)])
def test_targets_of_layers_of_two_kinds(tmp_path, targets):
    manifest = inspect_adapter(hybrid_draft(target_modules=targets).write(tmp_path / "a"), ModulePaths(HYBRID))
    assert manifest.targets == HYBRID.names


def test_a_module_that_only_other_layers_have_is_refused_by_name(tmp_path):
    it = hybrid_draft(("q_proj", "in_proj_z"))
    key = "base_model.model.model.layers.3.self_attn.q_proj"
    it.tensors |= {f"{key}.lora_A.weight": torch.zeros(4, 16), f"{key}.lora_B.weight": torch.zeros(16, 4)}
    message = hybrid_refusal(it, tmp_path / "a")
    assert "q_proj.lora_A.weight' is for q_proj of layer 3, which the base model has in layer 2 only" in message
    it = hybrid_draft(("in_proj_z",), layers_to_transform=[2])
    message = hybrid_refusal(it, tmp_path / "b")
    assert "match none of" in message and "in_proj_z is not in layer 2, but in layers 0-1, 3" in message
    assert "layer 1, but" not in hybrid_refusal(hybrid_draft(("lm_heads",)), tmp_path / "c")


def test_a_missing_tensor_of_one_kind_of_layer_is_named(tmp_path):
    it = hybrid_draft()
    del it.tensors["base_model.model.model.layers.1.linear_attn.out_proj.lora_B.weight"]
    assert "targets out_proj of layer 1" in hybrid_refusal(it, tmp_path / "a")
