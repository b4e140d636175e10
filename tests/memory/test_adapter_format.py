"""PEFT directories: what is read is what peft wrote, and every refusal names the file and what is wrong in it."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.memory.adapter_format import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterFormatError,
    inspect_adapter,
    is_adapter_dir,
    read_image,
)
from chorus.memory.layout import MODULES, SlabLayout

A = "base_model.model.model.layers.{}.{}.lora_A.weight"
B = "base_model.model.model.layers.{}.{}.lora_B.weight"


def inspect(path, config):
    return inspect_adapter(path, config.module_dims, config.num_layers)


@pytest.fixture
def adapter(llama, tmp_path):
    """A copy of a sound adapter (rank 8 on q, k, v, o) to spoil."""
    return shutil.copytree(llama[0].adapters["r8-attention"], tmp_path / "adapter")


def edit_config(path, **fields):
    file = path / CONFIG_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def edit_tensors(path, edit):
    """`edit(tensors)` changes the file's mapping of names to tensors in place."""
    tensors = load_file(path / WEIGHTS_FILE)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / WEIGHTS_FILE)


# -- what is read


@pytest.mark.parametrize("name", ["r1-all", "r2-qv", "r3-mlp", "r5-ko", "r8-attention", "r16-down", "r33-all"])
def test_manifest_says_what_peft_wrote(llama, name):
    subject, config = llama
    path = subject.adapters[name]
    written = json.loads((path / CONFIG_FILE).read_text())
    manifest = inspect(path, config)
    rank, alpha = written["r"], written["lora_alpha"]
    assert manifest.path == path
    assert manifest.rank == rank
    assert manifest.scale == pytest.approx(alpha / rank**0.5 if written["use_rslora"] else alpha / rank)
    assert manifest.targets == tuple(module for module in MODULES if module in written["target_modules"])
    assert manifest.num_params(config.module_dims) == sum(t.numel() for t in load_file(path / WEIGHTS_FILE).values())
    assert is_adapter_dir(path)
    assert not is_adapter_dir(path.parent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pages_of_slabs", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("name", ["r1-all", "r2-qv", "r5-ko", "r8-attention", "r33-all"])
def test_image_holds_every_row_where_the_layout_says(llama, name, pages_of_slabs, dtype):
    """Slab `layer · rank + i` holds row i of A and row i of Bᵀ of every target; layers straddle pages at most sizes."""
    subject, config = llama
    manifest = inspect(subject.adapters[name], config)
    dims, itemsize = config.module_dims, dtype.itemsize
    slab_elems = SlabLayout.build(dims, manifest.targets, 1, itemsize, check=False).slab_elems
    slabs = SlabLayout.build(dims, manifest.targets, pages_of_slabs * slab_elems + 5, itemsize)
    assert slabs.slabs_per_page == pages_of_slabs
    image = read_image(manifest, slabs, dims, config.num_layers, dtype)
    assert image.dtype is dtype
    assert image.shape == (slabs.pages_for(config.num_layers * manifest.rank), slabs.page_elems)

    tensors = {name: tensor.to(dtype) for name, tensor in load_file(subject.adapters[name] / WEIGHTS_FILE).items()}
    expected = torch.zeros_like(image)
    for layer in range(config.num_layers):
        for module in manifest.targets:
            index = MODULES.index(module)
            block = "self_attn." if index < 4 else "mlp."
            a, b = tensors[A.format(layer, block + module)], tensors[B.format(layer, block + module)]
            for row in range(manifest.rank):
                page, place = divmod(layer * manifest.rank + row, pages_of_slabs)
                for offset, values in ((slabs.a_offset[index], a[row]), (slabs.b_offset[index], b[:, row])):
                    start = place * slab_elems + offset
                    expected[page, start : start + len(values)] = values
    assert torch.equal(image, expected)


def test_layer_that_straddles_pages_is_really_tested(llama):
    _, config = llama
    assert any(
        (layer + 1) * rank % spp for rank in (5, 8, 33) for spp in (2, 3, 7) for layer in range(config.num_layers)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_files_of_any_float_dtype_are_read(llama, adapter, dtype):
    _, config = llama
    whole = load_file(adapter / WEIGHTS_FILE)
    edit_tensors(adapter, lambda tensors: tensors.update({k: v.to(dtype) for k, v in tensors.items()}))
    manifest = inspect(adapter, config)
    slabs = SlabLayout.build(config.module_dims, manifest.targets, 10_000, 4)
    image = read_image(manifest, slabs, config.module_dims, config.num_layers, torch.float32)
    first = whole[A.format(0, "self_attn.q_proj")][0].to(dtype).float()
    assert torch.equal(image[0, : len(first)], first)


# -- what is refused: configuration


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "LOHA"),
        ("use_dora", True),
        ("bias", "all"),
        ("bias", "lora_only"),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 4}),
        ("alpha_pattern", {"q_proj": 4}),
        ("layer_replication", [[0, 2]]),
        ("trainable_token_indices", [1]),
        ("lora_bias", True),
        ("fan_in_fan_out", True),
        ("layers_to_transform", [0]),
        ("target_parameters", ["x"]),
        ("use_qalora", True),
        ("use_bdlora", True),
        ("arrow_config", {"top_k": 1}),
        ("alora_invocation_tokens", [1, 2]),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "corda"),
        ("r", 0),
        ("r", -1),
        ("r", True),
        ("r", "8"),
        ("r", 8.0),
        ("r", None),
        ("lora_alpha", "16"),
        ("lora_alpha", None),
        ("lora_alpha", float("nan")),
        ("lora_alpha", float("inf")),
    ],
)
def test_refused_configuration_names_file_and_field(llama, adapter, field, value):
    """Everything that peft would apply otherwise than as `W + scale · B · A`."""
    edit_config(adapter, **{field: value})
    with pytest.raises(AdapterFormatError) as caught:
        inspect(adapter, llama[1])
    assert str(caught.value).startswith(f"{adapter / CONFIG_FILE}: {field} is {value!r}")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("init_lora_weights", False),
        ("init_lora_weights", "gaussian"),
        ("modules_to_save", None),
        ("rank_pattern", {}),
        ("lora_dropout", 0.1),
        ("exclude_modules", None),
        ("some_field_of_a_later_peft", None),
    ],
)
def test_configuration_that_changes_nothing_is_accepted(llama, adapter, field, value):
    before = inspect(adapter, llama[1])
    edit_config(adapter, **{field: value})
    assert inspect(adapter, llama[1]) == before


def test_directory_must_exist(llama, tmp_path):
    with pytest.raises(AdapterFormatError, match=f"^{tmp_path / 'nowhere'}: no such directory$"):
        inspect(tmp_path / "nowhere", llama[1])


def test_configuration_must_exist(llama, adapter):
    (adapter / CONFIG_FILE).unlink()
    with pytest.raises(AdapterFormatError, match=f"{CONFIG_FILE}: not found"):
        inspect(adapter, llama[1])


@pytest.mark.parametrize("text", ["{", "[]", "\xff", ""])
def test_configuration_must_be_a_json_object(llama, adapter, text):
    (adapter / CONFIG_FILE).write_bytes(text.encode("latin-1"))
    with pytest.raises(AdapterFormatError, match=f"^{adapter / CONFIG_FILE}: "):
        inspect(adapter, llama[1])


# -- what is refused: weights


def test_weights_must_exist(llama, adapter):
    (adapter / WEIGHTS_FILE).unlink()
    with pytest.raises(AdapterFormatError, match=f"^{adapter / WEIGHTS_FILE}: not found$"):
        inspect(adapter, llama[1])


def test_pickle_files_are_refused_with_a_way_out(llama, adapter):
    (adapter / WEIGHTS_FILE).rename(adapter / "adapter_model.bin")
    with pytest.raises(AdapterFormatError, match=f"{WEIGHTS_FILE}: not found; pickle files are never read: convert"):
        inspect(adapter, llama[1])


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_truncated_weights_are_refused_on_inspection(llama, adapter, keep):
    file = adapter / WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(AdapterFormatError, match=f"^{file}: cannot be read: "):
        inspect(adapter, llama[1])


def replace_tensor(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


def rename_tensor(old, new):
    return lambda tensors: tensors.update({new: tensors.pop(old)})


Q0A, Q0B = A.format(0, "self_attn.q_proj"), B.format(0, "self_attn.q_proj")


@pytest.mark.parametrize(
    ("edit", "names"),
    [
        (replace_tensor(Q0A, torch.zeros(9, 64)), [Q0A, "shape [9, 64]", "r=8", "[8, 64]"]),
        (replace_tensor(Q0A, torch.zeros(8, 32)), [Q0A, "shape [8, 32]", "[8, 64]"]),
        (replace_tensor(Q0B, torch.zeros(32, 8)), [Q0B, "shape [32, 8]", "[64, 8]"]),
        (replace_tensor(Q0A, torch.zeros(8)), [Q0A, "shape [8]"]),
        (lambda tensors: tensors.pop(Q0A), ["q_proj of layer 0 has no lora_A"]),
        (lambda tensors: tensors.pop(Q0B), ["q_proj of layer 0 has no lora_B"]),
        (lambda tensors: (tensors.pop(Q0A), tensors.pop(Q0B)), ["q_proj of layer 0 has no lora_A and lora_B"]),
        (rename_tensor(Q0A, "lm_head.lora_A.weight"), ["lm_head.lora_A.weight"]),
        (rename_tensor(Q0A, A.format(0, "self_attn.qkv_proj")), ["qkv_proj.lora_A.weight"]),
        (rename_tensor(Q0A, Q0A.replace("lora_A", "lora_magnitude_vector")), ["lora_magnitude_vector"]),
        (rename_tensor(Q0A, Q0A.replace("model.model", "model")), [Q0A.replace("model.model", "model")]),
        (rename_tensor(Q0A, A.format(0, "mlp.q_proj")), ["mlp.q_proj"]),
        (
            lambda t: t.update({name.replace("layers.0", "layers.3"): t[name].clone() for name in (Q0A, Q0B)}),
            [A.format(3, "self_attn.q_proj"), "layer 3", "3 layers"],
        ),
        (lambda tensors: tensors.clear(), ["holds no tensor"]),
    ],
    ids=[
        "rank", "in", "out", "dimensions", "no A", "no B", "a layer", "head", "module", "dora", "prefix", "block",
        "too many layers", "empty",
    ],
)  # fmt: skip
def test_refused_weights_name_file_and_tensor(llama, adapter, edit, names):
    edit_tensors(adapter, edit)
    with pytest.raises(AdapterFormatError) as caught:
        inspect(adapter, llama[1])
    assert str(caught.value).startswith(f"{adapter / WEIGHTS_FILE}: ")
    for name in names:
        assert name in str(caught.value)


def read(adapter, config, dtype=torch.float32):
    manifest = inspect(adapter, config)
    slabs = SlabLayout.build(config.module_dims, manifest.targets, 10_000, dtype.itemsize)
    return read_image(manifest, slabs, config.module_dims, config.num_layers, dtype)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused_when_read(llama, adapter, value):
    def spoil(tensors):
        tensors[Q0B][5, 3] = value

    edit_tensors(adapter, spoil)
    with pytest.raises(AdapterFormatError) as caught:
        read(adapter, llama[1])
    assert str(caught.value) == f"{adapter / WEIGHTS_FILE}: tensor {Q0B} holds NaN or infinity in torch.float32"


def test_values_that_overflow_the_models_dtype_are_refused_when_read(llama, adapter):
    edit_tensors(adapter, lambda tensors: tensors[Q0A].fill_(1e6))
    assert read(adapter, llama[1]).isfinite().all()
    with pytest.raises(AdapterFormatError, match=r"holds NaN or infinity in torch\.float16"):
        read(adapter, llama[1], torch.float16)


def test_weights_that_changed_since_inspection_are_refused_when_read(llama, adapter):
    manifest = inspect(adapter, llama[1])
    file = adapter / WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:-8])
    config = llama[1]
    slabs = SlabLayout.build(config.module_dims, manifest.targets, 10_000, 4)
    with pytest.raises(AdapterFormatError, match=f"^{file}: "):
        read_image(manifest, slabs, config.module_dims, config.num_layers, torch.float32)
