"""Fifteen hundred damaged adapters: each is served as PEFT would apply it, or refused with the cause, and no more."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.memory.files.error import AdapterFormatError

from ..fakes import acquire_whole

pytestmark = pytest.mark.wide

peft_utils = pytest.importorskip("peft.tuners.tuners_utils")
peft_other = pytest.importorskip("peft.utils.other")

EXAMPLES = 800
BATCHES = 4
LAYERS = 3
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

_NUMBERS = [0, 1, 2, 3, 4, 8, -1, 2**31, 10**30, 0.5, 16.0, -2.5, math.nan, math.inf]
_TEXTS = ["", "4", "q_proj", "lora", "all-linear", "none", "LORA", "IA3", "gaussian", "pissa", "\ud800", "\x00"]
_PATTERNS = [".*", ".*_proj", r".*\.[qv]_proj", "(", "[0-9"]
_LISTS = [[], [0], [0, 1], [2, 99], ["q_proj"], ["q_proj", "v_proj"], list(MODULES), ["lm_head"], [None], [[]]]
_RANKS = [{}, {"q_proj": 2}, {"q_proj": 4}, {r"layers\.0\..*": 4}, {"(": 1}, {"v_proj": "x"}, {"": 3}, {"x": {}}]
VALUES = [None, True, False, *_NUMBERS, *_TEXTS, *_PATTERNS, *_LISTS, *_RANKS]
_SCALES = ["r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"]
_TARGETS = ["target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "target_parameters"]
_KINDS = ["peft_type", "use_dora", "bias", "lora_bias", "modules_to_save", "layer_replication", "fan_in_fan_out"]
_TRAINING = ["lora_dropout", "init_lora_weights", "task_type", "inference_mode", "base_model_name_or_path"]
FIELDS = [*_SCALES, *_TARGETS, *_KINDS, *_TRAINING, "trainable_token_indices", "unheard_of"]


def good_adapters(draft, root: Path) -> list[Path]:
    """The adapter that the damage starts from: every feature of the format."""
    everywhere = tuple(MODULES)
    drafts = [
        draft(everywhere, 4),
        draft(("q_proj", "v_proj"), 8, dtype=torch.bfloat16, use_rslora=True),
        draft(everywhere, 2, dtype=torch.float16, layers=(0, 2), layers_to_transform=[0, 2]),
        draft(
            ("q_proj", "down_proj"),
            3,
            ranks=lambda layer, module: 7 if module == "q_proj" else 1 if layer == 1 else 3,
            rank_pattern={"q_proj": 7, "layers.1.mlp.down_proj": 1},
            alpha_pattern={"layers.0.self_attn.q_proj": 9},
        ),
        draft(("k_proj", "up_proj"), 5, target_modules=r".*\.(k|up)_proj"),
    ]
    return [it.write(root / str(number)) for number, it in enumerate(drafts)]


# -- damage


def flip(path: Path, rng: random.Random, name: str, first: int, last: int) -> None:
    data = bytearray((path / name).read_bytes())
    for _ in range(rng.choice([1, 1, 1, 2, 8, 64])):
        data[rng.randrange(first, min(last, len(data)))] ^= 1 << rng.randrange(8)
    (path / name).write_bytes(data)


def flip_header(path, rng):
    flip(path, rng, WEIGHTS, 0, 8 + header_length(path))


def flip_data(path, rng):
    flip(path, rng, WEIGHTS, 8 + header_length(path), 1 << 40)


def flip_config(path, rng):
    flip(path, rng, CONFIG, 0, 1 << 40)


def resize(path, rng):
    file = path / rng.choice([CONFIG, WEIGHTS, WEIGHTS])
    size = file.stat().st_size
    if rng.random() < 0.7:
        os.truncate(file, rng.choice([0, 1, 7, 8, 9, rng.randrange(size), size - 1]))
    else:
        with file.open("ab") as stream:
            stream.write(rng.randbytes(rng.choice([1, 4, 1000])))


def header_length(path: Path) -> int:
    return struct.unpack("<Q", (path / WEIGHTS).read_bytes()[:8])[0]


def edit_header(path, rng):
    raw = (path / WEIGHTS).read_bytes()
    length = header_length(path)
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    name, other = rng.sample(names, 2)
    entry = header[name]
    kind = rng.randrange(8)
    if kind == 0:
        entry["dtype"] = rng.choice(["F32", "F16", "BF16", "I8", "F8_E4M3", "F64", "BOOL", "X", None, 3])
    elif kind == 1:
        entry["shape"] = rng.choice(
            [entry["shape"][::-1], [*entry["shape"], 1], [], [0], [-1, 4], ["4", 4], None, [2.0]]
        )
    elif kind == 2:
        entry["data_offsets"] = [place + rng.choice([-4, 0, 2, 4, 1 << 40]) for place in entry["data_offsets"]]
    elif kind == 3:
        del header[name]
    elif kind == 4:
        header[name], header[other] = header[other], header[name]
    elif kind == 5:
        header[rename(name, rng)] = header.pop(name)
    elif kind == 6:
        header["__metadata__"] = rng.choice([{}, {"format": "pt"}, {"a": 1}, [], None, "x"])
    else:
        header[name] = rng.choice([None, [], 3, "x", {}])
    raw = json.dumps(header).encode()
    (path / WEIGHTS).write_bytes(struct.pack("<Q", len(raw) + rng.choice([0, 0, 0, 0, -1, 1, 1 << 50])) + raw + data)


def rename(name: str, rng: random.Random) -> str:
    old, new = rng.choice(
        [
            ("lora_A", "lora_B"),
            ("lora_B", "lora_A"),
            ("layers.0", "layers.1"),
            ("layers.2", "layers.7"),
            ("weight", "bias"),
            ("_proj", "_prok"),
            ("self_attn", "mlp"),
            ("base_model.", ""),
            ("lora_A.weight", "lora_magnitude_vector"),
            ("lora_A", "lora_embedding_A"),
            ("layers.", "layers.0"),
            ("layers.1", "layers.\u0661"),
        ]
    )
    return name.replace(old, new)


def edit_tensors(path, rng):
    tensors = load_file(path / WEIGHTS)
    name, other = rng.sample(sorted(tensors), 2)
    tensor = tensors[name]
    kind = rng.randrange(9)
    if kind == 0:
        del tensors[name]
    elif kind == 1:
        tensors[rename(name, rng)] = tensor.clone()
    elif kind == 2:
        tensors[name] = tensor.T.contiguous()
    elif kind == 3:
        tensors[name] = tensor[: rng.randrange(len(tensor) + 1)].contiguous()
    elif kind == 4:
        tensors[name] = torch.cat((tensor, tensor))
    elif kind == 5:
        dtype = rng.choice([torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.bool])
        tensors[name] = tensor.to(dtype)
    elif kind == 6:
        tensor.view(-1)[rng.randrange(tensor.numel())] = rng.choice([math.nan, math.inf, -math.inf, 65504.0, -0.0])
    elif kind == 7:
        tensors[rng.choice(["x", "base_model.model.lm_head.weight", ""])] = torch.ones(3)
    else:
        tensors[name], tensors[other] = tensors[other], tensors[name]
    save_file(tensors, path / WEIGHTS)


def edit_config(path, rng):
    config = json.loads((path / CONFIG).read_text())
    for _ in range(rng.choice([1, 1, 1, 2])):
        field = rng.choice(FIELDS)
        if rng.random() < 0.15:
            config.pop(field, None)
        else:
            config[field] = rng.choice(VALUES)
    (path / CONFIG).write_text(json.dumps(config, sort_keys=rng.random() < 0.5))


def replace_file(path, rng):
    file = path / rng.choice([CONFIG, WEIGHTS])
    content = file.read_bytes()
    file.unlink()
    kind = rng.randrange(8)
    if kind == 0:
        file.mkdir()
    elif kind == 1:
        file.symlink_to(file)
    elif kind == 2:
        os.mkfifo(file)
    elif kind == 3:
        file.write_bytes(rng.randbytes(rng.choice([0, 8, 300, 5000])))
    elif kind == 5:
        file.symlink_to(rng.choice(["/dev/zero", "/dev/null", "/proc/self/mem", "/", "nowhere", "/dev/tty"]))
    elif kind == 6:
        file.write_bytes(content)
        os.truncate(file, rng.choice([1 << 20, 1 << 40]))  # no blocks on the disk
    elif kind == 4:
        file.with_name("moved").write_bytes(content)
        file.symlink_to(file.with_name("moved"))  # a good link


def swap_files(path, rng):
    """Files of two good adapters in one directory."""
    other = path.parent.parent / "good" / rng.choice("01234")
    name = rng.choice([CONFIG, WEIGHTS])
    shutil.copy(other / name, path / name)


_NAMES = ["q", "v", "k", "up", "_proj", "_proj", "layers", "self_attn", "mlp", "(q|v)", "(?:q|k)", "[qkv]", "[^v]"]
_SYNTAX = [r"\.", ".", ".*", ".*", r"\d", "?", "+", "|", "^", "$", r"\b", "(?!mlp)", "(?=q)", "{2}"]
PIECES = [*_NAMES, *_SYNTAX, "(", ")", "[", "\\", "*", "é", ""]


def edit_pattern(path, rng):
    """An accepted pattern must match as `re` does; none of these keeps `re` for long."""
    config = json.loads((path / CONFIG).read_text())
    for _ in range(rng.choice([1, 1, 2])):
        pattern = "".join(rng.choices(PIECES, k=rng.randrange(1, 7)))
        field = rng.choice(["target_modules", "exclude_modules", "rank_pattern", "alpha_pattern", "layers_pattern"])
        if field == "target_modules" and rng.random() < 0.7:
            pattern = rng.choice([".*({})_proj", ".*({}).*", r".*\.(q_proj|{})"]).replace("{}", pattern)
        config[field] = {pattern: config.get("r", 4)} if field in ("rank_pattern", "alpha_pattern") else pattern
        if field == "layers_pattern":
            config["layers_to_transform"] = [0, 1, 2]
    (path / CONFIG).write_text(json.dumps(config))


def long_numbers(path, rng):
    digits = rng.choice("129") * rng.choice([19, 20, 310, 4290, 4301, 100_000])
    raw = (path / WEIGHTS).read_bytes()
    length = header_length(path)
    if rng.random() < 0.3:
        config = json.loads((path / CONFIG).read_text()) | {rng.choice(FIELDS): "N"}
        (path / CONFIG).write_text(json.dumps(config).replace('"N"', digits + rng.choice(["", ".5", "e9"])))
        return
    header = json.loads(raw[8 : 8 + length])
    entry = header[rng.choice([name for name in header if name != "__metadata__"])]
    entry[rng.choice(["shape", "data_offsets"])][rng.randrange(2)] = "N"
    text = json.dumps(header).replace('"N"', digits).encode()
    (path / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def wrap(path, rng):
    """As trained inside of a larger model: some names, all of them, or in several ways."""
    tensors, stems = load_file(path / WEIGHTS), rng.choice([STEMS[:1], STEMS[:1], STEMS[1:2], STEMS])
    share = rng.choice([1.0, 1.0, 0.5])
    renamed = {
        name.replace(PREFIX, f"base_model.model.{rng.choice(stems)}.") if rng.random() < share else name: tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, path / WEIGHTS)


def zero(path, rng):
    """Served as it is, though it may change nothing."""
    tensors = load_file(path / WEIGHTS)
    side = rng.choice(["lora_A", "lora_B", "lora"])
    save_file({name: tensor * 0 if side in name else tensor for name, tensor in tensors.items()}, path / WEIGHTS)


PREFIX = "base_model.model.model."
STEMS = ["model.language_model", "language_model.model", "model.text_model"]

DAMAGE = [
    flip_header,
    flip_data,
    flip_config,
    resize,
    edit_header,
    edit_tensors,
    edit_config,
    edit_config,
    replace_file,
    swap_files,
    edit_pattern,
    edit_pattern,
    long_numbers,
    wrap,
    zero,
]


# -- the expected values


def read_with_peft(path: Path) -> dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor, float]]:
    """(layer, module) → A, B in float32 and scale, by safetensors' reader and PEFT's own matching."""
    raw = json.loads((path / CONFIG).read_text())
    targets = raw.get("target_modules", ["q_proj", "v_proj"])
    targets = ["q_proj", "v_proj"] if targets is None else targets
    if isinstance(targets, str) and targets.lower() == "all-linear":
        names = load_file(path / WEIGHTS)  # what has no tensors in any layer is untrained
        targets = [module for module in MODULES if any(f".{module}." in name for name in names)]
    config = SimpleNamespace(
        target_modules=set(targets) if isinstance(targets, list) else targets,
        exclude_modules=raw.get("exclude_modules"),
        layers_to_transform=raw.get("layers_to_transform"),
        layers_pattern=raw.get("layers_pattern"),
        modules_to_save=raw.get("modules_to_save"),
        target_parameters=None,
    )
    ranks, alphas = raw.get("rank_pattern") or {}, raw.get("alpha_pattern") or {}
    tensors = load_file(path / WEIGHTS)
    found = {}
    stem = next((stem for stem in STEMS if any(f"base_model.model.{stem}.layers" in name for name in tensors)), "model")
    for layer in range(LAYERS):
        for module in MODULES:
            key = f"{stem}.layers.{layer}.{'mlp' if module in MODULES[4:] else 'self_attn'}.{module}"
            match = peft_utils.check_target_module_exists(config, key)
            if not match or isinstance(match, peft_utils._ExcludedModule):  # noqa: SLF001 - peft tells it by that alone
                continue
            rank = ranks.get(peft_other.get_pattern_key(ranks, key), raw.get("r", 8))
            alpha = alphas.get(peft_other.get_pattern_key(alphas, key), raw.get("lora_alpha", 8))
            a, b = (tensors.pop(f"base_model.model.{key}.lora_{side}.weight").float() for side in "AB")
            assert len(a) == b.shape[1] == rank
            found[layer, module] = a, b, alpha / (math.sqrt(rank) if raw.get("use_rslora") else rank)
    assert not tensors, "tensors that PEFT would not use"
    return found


def check_equal(actual: dict, expected: dict) -> None:
    assert actual.keys() == expected.keys()
    for key, (a, b, scale) in expected.items():
        assert torch.equal(actual[key][0], a)
        assert torch.equal(actual[key][1], b)
        assert math.isclose(actual[key][2], scale, rel_tol=1e-12)
        assert torch.isfinite(a).all()
        assert torch.isfinite(b).all()


def generate(engine, adapter: str) -> list[int]:
    engine.add_request(Request("r", [5, 6, 7], RequestParams(4, temperature=0, ignore_eos=True), adapter))
    tokens: list[int] = []
    while engine.has_work():
        for output in engine.step():
            assert output.error is None
            tokens += output.token_ids
    return tokens


@pytest.mark.parametrize("batch", range(BATCHES))
def test_damaged_adapters_are_read_right_or_refused(adapter_draft, tiny_engine, resident_weights, tmp_path, batch):
    rng = random.Random(batch)
    good = good_adapters(adapter_draft, tmp_path / "good")
    engine = tiny_engine()
    for path in good:
        engine.store.register(f"good-{path.name}", path)
    answers = {name: generate(engine, name) for name in engine.store.names()}
    free = engine.stats().num_pages
    engine.reclaimer.reclaim_all()
    loaded = refused = 0
    for number in range(EXAMPLES // BATCHES):
        path = tmp_path / "bad" / str(number)
        shutil.copytree(rng.choice(good), path)
        damage = rng.choice(DAMAGE)
        damage(path, rng)
        try:
            adapter = engine.store.register("bad", path)
            acquire_whole(engine.store, adapter)
        except AdapterFormatError as error:
            refused += 1
            message = str(error)
            assert message.startswith(str(path)), message
            assert len(message) > len(str(path)) + 20, message
            assert message.isprintable(), message
            assert len(message) < 1500
        else:
            loaded += 1
            check_equal(resident_weights(engine, "bad"), read_with_peft(path))
            engine.store.release(adapter)
        engine.check_integrity()
        if number % 50 == 0:
            name = rng.choice(sorted(answers))
            assert generate(engine, name) == answers[name]
        engine.reclaimer.reclaim_all()
        engine.check_integrity()
        assert engine.stats().num_free_pages == free, f"{damage.__name__} lost pages"
        shutil.rmtree(path)
    assert loaded > EXAMPLES // BATCHES // 10
    assert refused > EXAMPLES // BATCHES // 3
