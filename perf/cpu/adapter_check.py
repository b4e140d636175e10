"""Times the parts of an adapter's check: its header, its weights into an image, and whether they change anything.

    python -m chorus.perf.cpu.adapter_check --rank 64 --rounds 5

The model has random weights and the adapter random rows; both are written to a temporary directory, so that reads come
from the page cache. `check_over_read` is what a load over HTTP takes, over its header and weights alone. The hash of
the content, which is found in the background, is timed beside it. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from ...core.config import EngineConfig
from ...core.engine import Engine
from ...core.model.config import ModelConfig
from ...memory.files.format import CONFIG_FILE, WEIGHTS_FILE, tensor_shapes
from ...memory.files.identity import with_content, with_effect
from ...memory.host.image import HostImage

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 1024,
    "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "eos_token_id": 2,
    "dtype": "bfloat16",
}  # fmt: skip


def write_adapter(path: Path, config: ModelConfig, rank: int, dtype: torch.dtype) -> None:
    path.mkdir()
    modules = list(config.module_dims)
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules}
    (path / CONFIG_FILE).write_text(json.dumps(fields))
    save_file(
        {
            name: torch.randn(shape).to(dtype)
            for layer in range(config.num_layers)
            for module in modules
            for name, shape in tensor_shapes(layer, module, rank, config.module_dims)
        },
        path / WEIGHTS_FILE,
    )


def measure(directory: Path, rank: int, rounds: int, dtype: str) -> dict[str, float]:
    (directory / "config.json").write_text(json.dumps(MODEL))
    config = ModelConfig.read(directory)
    path = directory / "adapter"
    write_adapter(path, config, rank, getattr(torch, dtype))
    engine = Engine.from_config(
        EngineConfig(model=directory, load_format="dummy", memory_bytes=1 << 30, threads=1, dtype="bfloat16")
    )
    taken: dict[str, list[float]] = {"inspect": [], "read": [], "effect": [], "hash": []}
    try:
        backend = engine.executor.adapters
        for _ in range(rounds + 1):
            start = time.perf_counter()
            manifest = backend.inspect(path)
            inspected = time.perf_counter()
            image = HostImage()
            backend.read(manifest, backend.layout(manifest), image)
            read = time.perf_counter()
            with_effect(manifest)
            judged = time.perf_counter()
            with_content(manifest)
            hashed = time.perf_counter()
            for name, seconds in (
                ("inspect", inspected - start),
                ("read", read - inspected),
                ("effect", judged - read),
                ("hash", hashed - judged),
            ):
                taken[name].append(seconds)
    finally:
        engine.close()
    found = {f"{name}_ms": 1e3 * statistics.median(seconds[1:]) for name, seconds in taken.items()}
    found["mib"] = (path / WEIGHTS_FILE).stat().st_size / (1 << 20)
    read_ms = found["inspect_ms"] + found["read_ms"]
    found["check_over_read"] = (read_ms + found["effect_ms"]) / read_ms
    return {name: round(value, 2) for name, value in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chorus-check-") as name:
        found = measure(Path(name), arguments.rank, arguments.rounds, arguments.dtype)
    for name, value in found.items():
        print(f"{name:<16} {value:>9}")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
