"""The models' shapes, and the LoRA work made of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from chorus.core.model.read_config import read_model_config
from chorus.core.model.weights.tensor_parts import tensor_shapes
from chorus.ops.lora.sgmv_schedule import decode
from chorus.perf.bench.lora_case import ArenaPages, LoraCase, layer_bytes, layers_for, num_pages
from chorus.perf.bench.models.families import FAMILIES
from chorus.perf.bench.models.sizes import SIZES, Geometry
from chorus.perf.kernels.variants import GROUPS

LLAMA, TINY = SIZES["llama-3.1-8b"], SIZES["tiny"]


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_the_configuration_is_the_geometry(size, tmp_path):
    config = read_model_config(size.write_config(tmp_path, "bfloat16"))
    assert config.projections.layers == size.geometry.projections.layers
    assert config.dtype == "bfloat16"
    count = sum(torch.Size(shape).numel() for shape in tensor_shapes(config).values())
    norms = (2 * config.num_layers + 1) * config.hidden_size
    assert count == size.geometry.layer_params + 2 * size.geometry.head_params + norms


@pytest.mark.parametrize("size", ["tiny", "125m", "1b"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_configuration_is_read_at_every_size(family, size, tmp_path):
    """A size that a family refuses would end a run of the benchmark where nobody looks."""
    size = replace(SIZES[size], family=family)
    config = read_model_config(size.write_config(tmp_path, "bfloat16"))
    assert config.architecture == FAMILIES[family].get("architectures", ["LlamaForCausalLM"])[0]
    shape = size.geometry
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (shape.layers, shape.hidden, shape.vocab)


def test_llama_is_llama(tmp_path):
    config = read_model_config(LLAMA.write_config(tmp_path, "bfloat16"))
    count = sum(torch.Size(shape).numel() for shape in tensor_shapes(config).values())
    assert count == 8_030_261_248
    assert LLAMA.geometry.page_layout(2).page_bytes == 2 << 20
    assert (rope := config.attention.rope) is not None
    assert (rope.theta, rope.factor, config.head_dim) == (500000.0, 8.0, 128)


def test_groups_are_those_of_the_kernels():
    assert LLAMA.geometry.groups == {name: (d_in, tuple(modules)) for name, (d_in, modules) in GROUPS.items()}
    assert sorted(module for _, modules in LLAMA.geometry.groups.values() for module, _, _ in modules) == list(
        range(len(LLAMA.geometry.projections))
    )


def test_bytes_of_a_layer():
    assert layer_bytes(LLAMA, [16], 2) == 16 * 81920 * 2
    assert layer_bytes(LLAMA, [8, 64], 2) == 72 * 81920 * 2


def test_layers_are_more_than_a_cache_holds():
    cache = 50 << 20
    for ranks in ([8], [16] * 32, [64] * 256):
        per_layer = layer_bytes(LLAMA, ranks, 2)
        assert layers_for(per_layer, cache) * per_layer >= 4 * cache
    assert layers_for(1, cache) == 256, "as many as are worth it"
    assert layers_for(10**9, 0) == 1


def test_pages_are_each_adapters_own():
    """A whole model's adapter in whole pages."""
    assert num_pages(LLAMA, [16], 32, 2) == 40
    assert num_pages(LLAMA, [1, 1], 1, 2) == 2


def test_an_arena_hands_out_different_pages():
    arena = ArenaPages(TINY, torch.float32, "cpu", 6, seed=0)
    taken = arena.take([2, 3])
    assert len({page for pages in taken for page in pages}) == 5
    assert arena.take([2, 3]) == taken
    with pytest.raises(ValueError, match="needs 7 pages, the arena has 6"):
        arena.take([7])


def test_a_layers_cost_is_that_of_its_groups():
    arena = ArenaPages(TINY, torch.float32, "cpu", num_pages(TINY, [4, 8], 1, 4), seed=0)
    case = LoraCase(TINY, arena, [1, 2], [4, 8], 1, decode(3, 8), 8)
    whole = case.cost()
    assert whole.bytes == sum(case.cost([group]).bytes for group in case.groups)
    assert whole.flops == 2 * (1 * 4 + 2 * 8) * sum(sum(each.dims) for each in TINY.geometry.projections)
    assert whole.bytes > layer_bytes(TINY, [4, 8], 4)


def test_a_step_counts_bytes_and_work():
    """Requests with 3 tokens each: a decode step reads all once, a prefill multiplies with all."""
    shape = Geometry(hidden=4, ffn=6, layers=1, heads=2, kv_heads=1, vocab=10)
    layer, head, per_rank = 4 * 4 + 2 * (4 * 2) + 4 * 4 + 3 * (4 * 6), 40, 8 + 6 + 6 + 8 + 3 * 10
    kv = 2 * (3 + 1) * 2 * 2  # requests · length · K and V · width
    base, mixed, one = (shape.step(2, 2, 1, 3, ranks)[0] for ranks in ((), (1, 3, 5), (3,)))
    assert base == 2 * (layer + head + kv)
    assert mixed == base + 2 * per_rank * 4, "of the adapters only what two rows have"
    assert one == base + 2 * per_rank * 3
    assert shape.step(2, 2, 1, 3, kv_itemsize=1) == (2 * (layer + head) + kv, shape.step(2, 2, 1, 3)[1])
    base, mixed, one = (shape.step(2, 2, 3, 0, ranks)[1] for ranks in ((), (1, 3), (3,)))
    assert base == 2 * 3 * 2 * layer + 2 * (2 * head + 4 * 4 * 6)
    assert mixed == base + 3 * 2 * per_rank * 4
    assert one == base + 3 * 2 * per_rank * 6
