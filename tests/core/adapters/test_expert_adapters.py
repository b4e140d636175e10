"""Adapters on routers, shared experts and experts: their files, and how they are loaded and refused."""

from __future__ import annotations

import itertools
import json
import random
import re
import threading
import time
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.core.executors.adapters import open_rows
from chorus.core.model.read_config import read_model_config
from chorus.core.requests.types import CannotMerge
from chorus.memory.adapters import image as adapter_image
from chorus.memory.adapters.image import ImageForm, read_image
from chorus.memory.files.adapter_weights import matrices_of
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.format import inspect_adapter, open_weights
from chorus.memory.files.module_paths import ExpertForm
from chorus.memory.host.buffers import HostBuffers
from chorus.memory.host.image import HostImage
from chorus.memory.host.images import ThreadReads
from chorus.memory.pages.adapter_layout import AdapterLayout
from chorus.ops.moe.expert_gemms import unpack

from ..paths.asked import answers, told
from ..paths.family_rows import FIELDS
from ..paths.path import RANKS
from ..test_streaming import Gate
from ..tiny_families import EXPERTS, make_all_linear
from ..tiny_mixtures import ADAPTERS, LETTERS, make_mixture, one_by_one, together, unswapped

pytestmark = pytest.mark.wide

GATED = [name for name in EXPERTS if not name.startswith("nemotron-3")]
"""For experts without gates, see test_layers_of_one_part.py."""

MIXTRAL = {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@pytest.fixture
def kernels() -> str:
    """The native decoder where it takes a family; else PyTorch's operators, with the native library's mixtures."""
    return "auto"


@pytest.fixture(scope="module")
def mixture():
    """`mixture("mixtral")`: the family's model with adapters, made once in a process."""
    return cache(make_mixture)


@pytest.mark.parametrize("family", EXPERTS)
def test_adapters_target_what_they_are_named_for(mixture, drive, family):
    it = mixture(family)
    store = drive(it).engine.store
    targets = {name: store.get(name).manifest.targets for name in ADAPTERS}
    assert "gate" in targets["r4-router"]
    has_shared = any(each.name == "shared_expert.down_proj" for each in read_model_config(it.model).projections)
    assert has_shared == ("shared_expert.down_proj" in targets["r5-shared"])
    assert family.startswith("qwen3.5") == ("shared_expert_gate" in targets["r5-shared"])


@pytest.mark.native
@pytest.mark.parametrize("family", [name for name in GATED if RANKS not in FIELDS.get(name, {}).get("refused", {})])
def test_ranks_have_half_of_each_expert(mixture, drive, family):
    """Half of gate and half of up; and the whole router."""
    it = mixture(family)
    driver = drive(it, tensor_parallel_size=2)
    whole = read_model_config(it.model).experts
    weights = next(layer["experts"] for layer in driver.executor.rank.decoder.layers if "experts" in layer)
    assert len(weights.gate_up) == len(unpack(weights.router)) == whole.count
    assert {unpack(each).shape[0] for each in weights.gate_up} == {whole.size}


@pytest.mark.parametrize("family", [family for family in GATED if not family.startswith("gemma-4")])
def test_files_of_each_expert_give_the_same_tokens(mixture, drive, tmp_path, family):
    """The same deltas in files of another form, under the names of the family's checkpoints."""
    it = mixture(family)
    names = MIXTRAL if family.startswith("mixtral") else {}
    config = read_model_config(it.model)
    source = it.adapters["r2-experts"]
    forms = config.tensors.alternates, config.tensors.swapped
    own = one_by_one(source, tmp_path / "each", config.experts.count, names, *forms)
    driver = drive(it, max_num_seqs=8, max_num_batched_tokens=24, adapters={**it.adapters, "r2-experts": own})
    assert driver.engine.store.get("r2-experts").manifest.modules.experts is ExpertForm.EACH
    want = answers(it, driver, 6, seed=1, adapters=("r2-experts", None, "r4-router"))
    assert told(driver, want) == want


@pytest.mark.parametrize("family", [family for family in GATED if not family.startswith("gemma-4")])
def test_a_tensor_for_all_experts_gives_the_same_tokens(mixture, drive, tmp_path, family):
    """Tinker's form, under the names that it has for experts, and for the attention of gpt-oss."""
    it = mixture(family)
    config = read_model_config(it.model)
    forms = config.tensors.alternates, config.tensors.swapped
    each = one_by_one(it.adapters["r2-experts"], tmp_path / "each", config.experts.count, None, *forms)
    own = together(each, tmp_path / "own", LETTERS, "attn" if family.startswith("gpt-oss") else "self_attn")
    driver = drive(it, max_num_seqs=8, max_num_batched_tokens=24, adapters={**it.adapters, "r2-experts": own})
    assert driver.engine.store.get("r2-experts").manifest.modules.experts is ExpertForm.TOGETHER
    want = answers(it, driver, 6, seed=1, adapters=("r2-experts", None, "r4-router"))
    assert told(driver, want) == want


@pytest.mark.parametrize("family", EXPERTS)
def test_adapters_that_are_evicted_and_loaded_while_others_run(mixture, drive, family):
    """There is room for the largest adapter and little more; layers are read while steps run."""
    it = mixture(family)
    probe = drive(it, block_tokens=8, max_model_len=64).engine
    largest = max(adapter.num_pages for _, adapter in probe.store.registered())
    pages = largest + probe.executor.layout.pages_for_tokens(48, chunk=24)
    limits = {"block_tokens": 8, "max_num_seqs": 2, "max_num_batched_tokens": 24, "max_model_len": 64}
    driver = drive(it, num_pages=pages + 1, prefix_cache=False, reads=ThreadReads(2), **limits)
    for turn in range(2):
        want = answers(it, driver, 8, seed=turn, lengths=(5, 40), adapters=tuple(ADAPTERS))
        assert told(driver, want) == want
    assert driver.engine.stats().num_adapter_evictions > 0


@pytest.mark.parametrize("form", [ExpertForm.STACKED, ExpertForm.EACH])
def test_a_prefill_follows_the_read_of_experts_layer_by_layer(mixture, drive, tmp_path, monkeypatch, form):
    """It begins when the first layer has been read, and waits for each of the others when it reaches it."""
    for most in ("_FIRST_READ_BYTES", "_LAST_READ_BYTES"):
        monkeypatch.setattr(adapter_image, most, 1)
    adapter_image.row_jobs.cache_clear()
    it, begun = mixture("qwen3-moe"), list[threading.Timer]()
    path = it.adapters["r2-experts"]
    if form is ExpertForm.EACH:
        path = one_by_one(path, tmp_path / "each", read_model_config(it.model).experts.count)

    def before(plan):
        if plan.sequences and not begun:
            stream = driver.engine.store.images.peek(driver.engine.store.get("r2-experts")).stream
            assert stream.num_ready == 1 < read_model_config(it.model).num_layers
            begun.extend(threading.Timer(0.02 * count, gate.allow, [1]) for count in range(1, 8))
            for timer in begun:
                timer.start()

    driver = drive(
        it, adapters={"r2-experts": path}, reads=ThreadReads(1), clock=time.monotonic, max_load_stall_seconds=60.0,
        before=before,
    )  # fmt: skip
    gate = Gate(driver)
    driver.engine.costs.disk_adapter_page = 0.0
    try:
        want = answers(it, driver, 1, seed=1, adapters=("r2-experts",))
        gate.begin(driver, "r2-experts")
        assert told(driver, want) == want
    finally:
        gate.allow()
        adapter_image.row_jobs.cache_clear()
    for timer in begun:
        timer.join()
    assert driver.engine.store.get("r2-experts").manifest.modules.experts is form
    assert driver.engine.stats().num_streamed_loads == 1


def test_adapters_on_a_mixture_are_not_merged(mixture, drive):
    it = mixture("qwen3-moe")
    driver = drive(it)
    for name, targets in (
        ("r2-experts", "experts.gate_proj, experts.up_proj, experts.down_proj"),
        ("r4-router", "gate"),
    ):
        want = answers(it, driver, 1, seed=3, adapters=(name,))
        assert told(driver, want) == want
        adapter = driver.engine.store.get(name)
        assert not driver.engine.merging.may_merge(adapter)
        with pytest.raises(CannotMerge, match=f"'{name}' changes .*{targets}, parts of a mixture of experts"):
            driver.engine.merge(name)
        driver.answers.clear()


def values_of(path, config, reader):
    """An adapter's manifest, and its values as they lie in pages. reader: `open_rows`, or None for torch's."""
    manifest, image = inspect_adapter(path, config.module_paths), HostImage()
    layout = AdapterLayout.build(manifest.parts, config.projections, 512, 4)
    read_image(manifest, ImageForm(layout, config.projections, 512, torch.float32), image, HostBuffers(), reader)
    return manifest, image.data.view(-1)[: layout.num_elems]


@pytest.mark.parametrize("reader", [None, pytest.param(open_rows, marks=pytest.mark.native)])
@pytest.mark.parametrize("family", ["qwen3-moe-mixed", "mixtral"])
def test_both_forms_are_the_same_values_in_pages(mixture, tmp_path, family, reader):
    it, config = mixture(family), read_model_config(mixture(family).model)
    names = MIXTRAL if family == "mixtral" else {}
    own = one_by_one(it.adapters["r2-experts"], tmp_path / "each", config.experts.count, names)
    stacked, want = values_of(it.adapters["r2-experts"], config, reader)
    each, found = values_of(own, config, reader)
    assert stacked.parts == each.parts
    assert torch.equal(found, want)
    assert found.any()


OWN_NAMES = {name: name for name in LETTERS}


def change_config(path, **fields):
    file = path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.parametrize("reader", [None, pytest.param(open_rows, marks=pytest.mark.native)])
@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("qwen3-moe-mixed", LETTERS),
        ("qwen3-moe-mixed", OWN_NAMES),
        ("mixtral", {**LETTERS, "mlp": "block_sparse_moe"}),
    ],
)
@pytest.mark.parametrize(
    "targets", [None, r".*(attn\.q_proj|experts\.(gate|up|down)_proj)"], ids=["own names", "usual names"]
)
def test_what_experts_share_is_in_the_file_once(mixture, tmp_path, family, names, targets, reader):
    """As Tinker shares A of gate and up, and B of down: each expert's pages have it."""
    it, config = mixture(family), read_model_config(mixture(family).model)
    each = one_by_one(it.adapters["r2-experts"], tmp_path / "each", config.experts.count)
    tensors = load_file(each / "adapter_model.safetensors")
    for name in [name for name in tensors if re.search(r"gate_proj.lora_A|up_proj.lora_A|down_proj.lora_B", name)]:
        tensors[name] = tensors[re.sub(r"experts\.[0-9]+", "experts.0", name)].clone()
    save_file(tensors, each / "adapter_model.safetensors")
    own = together(each, tmp_path / "own", names)
    shared = load_file(own / "adapter_model.safetensors")
    assert {tensor.shape[0] for tensor in shared.values() if tensor.ndim == 3} == {1, config.experts.count}
    if targets is not None:
        change_config(own, target_modules=targets, rank_pattern={r".*experts\.(gate|up)_proj": 3})
    (one, want), (other, found) = values_of(each, config, None), values_of(own, config, reader)
    assert (one.parts, other.modules.experts) == (other.parts, ExpertForm.TOGETHER)
    assert torch.equal(found, want)
    assert found.any()


def tinkers(path, config, spoil=lambda tensors: None, **fields):
    """An adapter on every linear module but the router, as Tinker writes it; it says so of all modules."""
    generator, tensors, hidden, size = torch.Generator().manual_seed(0), {}, config.hidden_size, config.experts.size

    def put(at, *shapes):
        for side, shape in zip("AB", shapes, strict=True):
            tensors[f"base_model.model.{at}.lora_{side}.weight"] = torch.randn(shape, generator=generator)

    for layer, projection in itertools.product(range(config.num_layers), config.projections.layers[0]):
        at = f"model.layers.{layer}."
        if projection.path.startswith("self_attn."):
            put(at + projection.path, (2, projection.inputs), (projection.outputs, 2))
    for layer in range(config.num_layers):
        at, count = f"model.layers.{layer}.mlp.experts.", config.experts.count
        put(f"{at}w1", (1, 2, hidden), (count, size, 2))
        put(f"{at}w3", (1, 2, hidden), (count, size, 2))
        put(f"{at}w2", (count, 2, size), (1, hidden, 2))
    put("model.unembed_tokens", (2, hidden), (config.vocab_size, 2))
    spoil(tensors)
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    written = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": "all-linear", **fields}
    (path / "adapter_config.json").write_text(json.dumps(written))
    return path


def test_files_as_tinker_writes_them(mixture, tmp_path):
    """Every expert's pages have the tensors' values, and what experts share."""
    config = read_model_config(mixture("qwen3-moe").model)
    path = tinkers(tmp_path / "own", config)
    manifest, _ = values_of(path, config, None)
    experts = ["experts.gate_proj", "experts.up_proj", "experts.down_proj"]
    assert set(manifest.targets) == {"q_proj", "k_proj", "v_proj", "o_proj", *experts, "lm_head"}
    with open_weights(path, config.module_paths) as file:
        tensors, buffer = load_file(path / "adapter_model.safetensors"), torch.empty(1 << 16, dtype=torch.uint8)
        part = next(part for part in manifest.parts if part.experts)
        assert part.experts == tuple(range(config.experts.count))
        for target, letter in zip(experts, ("w1", "w3", "w2"), strict=True):
            for expert, pair in enumerate(matrices_of(part, 1, target, file.modules)):
                for side, (name, shape) in zip("AB", pair, strict=True):
                    whole = tensors[f"base_model.model.model.layers.1.mlp.experts.{letter}.lora_{side}.weight"]
                    assert torch.equal(file.matrix(name, shape, buffer), whole[expert if len(whole) > 1 else 0])


@pytest.mark.parametrize(("part", "left"), [("self_attn", 3), ("mlp", 4), ("unembed", 7)])
def test_files_of_what_tinker_was_told_to_train(mixture, tmp_path, part, left):
    """`train_attn`, `train_mlp` and `train_unembed`: the configuration says "all-linear" of them all."""
    config = read_model_config(mixture("qwen3-moe").model)

    def spoil(tensors):
        for name in [name for name in tensors if part in name]:
            del tensors[name]

    manifest, values = values_of(tinkers(tmp_path / "own", config, spoil), config, None)
    assert len([name for name in manifest.targets if name != "lm_head"]) == left
    assert ("lm_head" in manifest.targets) == (part != "unembed")
    experts = {f"experts.{name}_proj" for name in ("gate", "up", "down")}
    untrained = {"self_attn": {"q_proj", "k_proj", "v_proj", "o_proj"}, "mlp": set(), "unembed": set()}[part]
    assert set(manifest.untrained) == untrained
    assert experts.isdisjoint(manifest.targets) == (part == "mlp")
    assert values.any()


def with_shape(end, *shape):
    def spoil(tensors):
        (name,) = [name for name in tensors if name.endswith(end)]
        tensors[name] = torch.zeros(shape)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (with_shape("1.mlp.experts.w1.lora_A.weight", 5, 2, 64), r"w1\.lora_A.* has shape \[5, 2, 64\], .*1 or 16 of"),
        (with_shape("1.mlp.experts.w2.lora_B.weight", 64, 2), r"w2\.lora_B.* shape \[64, 2\], three dimensions are"),
        (with_shape("1.mlp.experts.w3.lora_B.weight", 16, 41, 2), r"0\.up_proj\.lora_B.* \[41, 2\], \[40, 2\] is"),
        (with_shape("0.mlp.experts.w3.lora_A.weight", 1, 3, 64), r"0\.up_proj\.lora_A.* its rank is 3, by"),
        (lambda tensors: tensors.pop(next(n for n in tensors if "w2.lora_A" in n)), r"0\.down_proj.* is missing"),
        (
            lambda tensors: tensors.update({
                "base_model.model.model.layers.0.mlp.experts.gate_proj.lora_A.weight": torch.zeros(1, 2, 64)
            }),
            r"experts\.0\.gate_proj.* a second time",
        ),
    ],
)  # fmt: skip
def test_bad_tensors_of_all_experts_are_named(mixture, tmp_path, spoil, why):
    config = read_model_config(mixture("qwen3-moe").model)
    with pytest.raises(AdapterFormatError, match=why):
        inspect_adapter(tinkers(tmp_path / "own", config, spoil), config.module_paths)


@pytest.mark.parametrize("targets", [r".*(self_attn\.q_proj|experts\.[0-4]\.(gate|up|down)_proj)", "all-linear"])
def test_experts_may_have_ranks_of_their_own_and_be_left_out(mixture, drive, tmp_path, targets):
    """Expert 3 has another rank, padded with zeros it has the others'; experts from 5 on are left out, or zeros."""
    it, config = mixture("qwen3-moe"), read_model_config(mixture("qwen3-moe").model)
    own = one_by_one(it.adapters["r2-experts"], tmp_path / "own", config.experts.count)
    padded = one_by_one(it.adapters["r2-experts"], tmp_path / "padded", config.experts.count)
    some, zeros = load_file(own / "adapter_model.safetensors"), load_file(padded / "adapter_model.safetensors")
    for name in list(some):
        expert = re.search(r"\.experts\.(\d+)\.", name)
        if expert is not None and int(expert[1]) >= 5:
            del some[name]
            zeros[name].zero_()
        elif expert is not None and int(expert[1]) == 3:
            side = some[name][:1] if "lora_A" in name else some[name][:, :1]
            some[name] = side.clone()
            (zeros[name][1:] if "lora_A" in name else zeros[name][:, 1:]).zero_()
    save_file(some, own / "adapter_model.safetensors")
    save_file(zeros, padded / "adapter_model.safetensors")
    file = own / "adapter_config.json"
    fields = json.loads(file.read_text())
    fields["target_modules"] = targets
    fields["rank_pattern"] = {r".*experts\.3\.\w+": 1, **fields["rank_pattern"]}
    fields["alpha_pattern"] = {
        r".*layers\.0\.mlp\.experts\.3\.(gate|up)_proj": 2,  # over a third of the rank the scale of 6 / 3
        r".*layers\.0\.mlp\.experts\.3\.down_proj": 3,
        r".*layers\.1\.mlp\.experts\.3\.(gate|up)_proj": 3,
        r".*layers\.1\.mlp\.experts\.3\.down_proj": 4.5,
        **fields["alpha_pattern"],
    }
    file.write_text(json.dumps(fields))
    assert {part.experts for part in inspect_adapter(own, config.module_paths).parts} == {(), (3,), (0, 1, 2, 4)}
    driver = drive(it, adapters={"own": own, "padded": padded}, max_num_seqs=4)
    rng = random.Random(0)
    for index in range(4):
        prompt = [rng.randrange(3, 150) for _ in range(20)]
        for name in ("own", "padded"):
            driver.add(f"{name}{index}", name, prompt, max_tokens=8)
    answers = driver.drain()
    for index in range(4):
        assert answers[f"own{index}"].tokens == answers[f"padded{index}"].tokens


@pytest.mark.native(needed=False)
def test_a_parameter_of_a_module_that_only_holds_modules_is_passed_over(drive):
    """PEFT's "all-linear" of Hunyuan-A13B names `gate.weight`, where the model has `gate.wg.weight`."""
    it = make_all_linear("hunyuan-moe")
    driver = drive(it, max_num_batched_tokens=24, max_num_seqs=4)
    want = answers(it, driver, 2, seed=8, adapters=(None, "all"))
    assert told(driver, want) == want


def test_files_of_older_versions_have_a_and_b_of_swapped_experts_as_others_do(mixture, tmp_path):
    it, config = mixture("llama-4"), read_model_config(mixture("llama-4").model)
    source, tensors = it.adapters["r2-experts"], {}
    given = load_file(source / "adapter_model.safetensors")
    for name, tensor in given.items():
        tensors[name] = unswapped(given, name, config.experts.count) if ".experts." in name else tensor
    older = tmp_path / "older"
    older.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, older / "adapter_model.safetensors")
    (older / "adapter_config.json").write_text((source / "adapter_config.json").read_text())
    (one, want), (other, found) = values_of(source, config, None), values_of(older, config, None)
    assert one.parts == other.parts
    assert torch.equal(found, want)
    assert any(tensors[name].shape != tensor.shape for name, tensor in given.items())
