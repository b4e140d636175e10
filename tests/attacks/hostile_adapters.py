"""Adapter directories made to stop a server, written out for a command to load."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def _config(path: Path, **fields: Any) -> None:
    (path / CONFIG).write_text(json.dumps(json.loads((path / CONFIG).read_text()) | fields))


def _header(path: Path) -> tuple[dict[str, Any], bytes]:
    data = (path / WEIGHTS).read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def _put(path: Path, header: str | dict[str, Any], data: bytes = b"", size: int = 0) -> None:
    """size: of the file, if it is to be longer than its content."""
    raw = (header if isinstance(header, str) else json.dumps(header)).encode()
    with (path / WEIGHTS).open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw + data)
        file.truncate(max(size, file.tell()))


def _instead(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / name).unlink()
        make(path / name)

    return change


def _long_sizes(path: Path) -> None:
    header, data = _header(path)
    text = json.dumps(header)
    for name, entry in header.items():
        if name != "__metadata__":
            text = text.replace(json.dumps(entry["shape"]), f"[{'9' * 4290}, {'9' * 4290}]")
    _put(path, text, data)


def _sparse(path: Path) -> None:
    """Rank 4096 in all of its tensors, in a file that has no blocks on the disk."""
    header, _ = _header(path)
    rank = json.loads((path / CONFIG).read_text())["r"]
    place = 0
    for name, entry in header.items():
        if name != "__metadata__":
            entry["shape"] = [4096 if size == rank else size for size in entry["shape"]]
            end = place + 4 * entry["shape"][0] * entry["shape"][1]
            entry |= {"dtype": "F32", "data_offsets": [place, end]}
            place = end
    _put(path, header, size=8 + len(json.dumps(header)) + place)
    _config(path, r=4096)


def _many_tensors(path: Path) -> None:
    entry = '{"dtype":"F32","shape":[],"data_offsets":[0,0]}'
    _put(path, "{" + ",".join(f'"{number}":{entry}' for number in range(9000)) + "}")


def _zeros(path: Path) -> None:
    header, data = _header(path)
    _put(path, header, bytes(len(data)))


def _not_a_number(path: Path) -> None:
    header, data = _header(path)
    _put(path, header, b"\xff" * len(data))


def _classes(count: int) -> dict[str, int]:
    """Patterns of sixty classes each, none of which is there twice."""
    return {"".join(f"[^{chr(0x4E00 + 60 * n + i)}]*" for i in range(60)): 4 for n in range(count)}


SHAPES: dict[str, Callable[[Path], object]] = {
    "repeat of four billion": lambda path: _config(path, target_modules="a{4294967294}"),
    "repeats in repeats": lambda path: _config(path, target_modules="((((.*){200}){200}){200}){200}"),
    "endless backtracking": lambda path: _config(path, target_modules=r"(\w*\w*)*(\w*\w*)*\d" * 60),
    "58,201 patterns": lambda path: _config(path, rank_pattern={f"q{n}_proj": 4 for n in range(58_201)}),
    "4,096 long patterns": lambda path: _config(path, alpha_pattern={f"{'.*a' * 60}{n}": 4 for n in range(4096)}),
    "1,000 long patterns": lambda path: _config(path, alpha_pattern={f"{'.*a' * 60}{n}": 4 for n in range(1000)}),
    "1,000 short patterns": lambda path: _config(path, alpha_pattern={f"{'.*a' * 20}{n}": 4 for n in range(1000)}),
    "classes of many kinds": lambda path: _config(path, alpha_pattern=_classes(300)),
    "200,000 targets": lambda path: _config(path, target_modules=[str(n) for n in range(130_000)]),
    "a config of lists": lambda path: (path / CONFIG).write_text("[" + "[]," * 340_000 + "[]]"),
    "a config nested deeply": lambda path: (path / CONFIG).write_text("[" * 1_000_000),
    "a config of 2 GiB": lambda path: os.truncate(path / CONFIG, 2 << 30),
    "a number of a million digits": lambda path: (path / CONFIG).write_text('{"r": ' + "9" * 1_000_000 + "}"),
    "a float of a million digits": lambda path: (path / CONFIG).write_text('{"r": 0.' + "9" * 1_000_000 + "}"),
    "sizes of 4,290 digits": _long_sizes,
    "a header of long numbers": lambda path: _put(path, '{"a":{"shape":[' + ",".join(["9" * 4290] * 240) + "]}}"),
    "a header of lists": lambda path: _put(path, '{"a":[' + "[]," * 340_000 + "[]]}"),
    "a header of 16 MiB": lambda path: _put(path, '{"a":[' + "[]," * 5_500_000 + "[]]}"),
    "a header nested deeply": lambda path: _put(path, "[" * 1_000_000),
    "a header of 2^60 bytes": lambda path: (path / WEIGHTS).write_bytes((1 << 60).to_bytes(8, "little") + b"{}"),
    "9,000 tensors": _many_tensors,
    "sparse, of rank 4096": _sparse,
    "all weights zero": _zeros,
    "all weights NaN": _not_a_number,
    "a pipe for weights": _instead(WEIGHTS, os.mkfifo),
    "a pipe for a config": _instead(CONFIG, os.mkfifo),
    "an endless device": _instead(WEIGHTS, lambda file: file.symlink_to("/dev/zero")),
    "an endless config": _instead(CONFIG, lambda file: file.symlink_to("/dev/zero")),
    "a terminal": _instead(CONFIG, lambda file: file.symlink_to("/dev/tty")),
    "a link to itself": _instead(WEIGHTS, lambda file: file.symlink_to(file)),
    "a link to elsewhere": _instead(WEIGHTS, lambda file: file.symlink_to("/proc/self/mem")),
    "half of an upload": lambda path: os.truncate(path / WEIGHTS, (path / WEIGHTS).stat().st_size // 2),
    "no weights": lambda path: (path / WEIGHTS).unlink(),
}


def _flip(path: Path, rng: random.Random) -> None:
    name = rng.choice([CONFIG, WEIGHTS])
    data = bytearray((path / name).read_bytes())
    last = len(data) if name == CONFIG or rng.random() < 0.3 else 8 + int.from_bytes(data[:8], "little")
    for _ in range(rng.choice([1, 1, 2, 8, 64])):
        data[rng.randrange(last)] ^= 1 << rng.randrange(8)
    (path / name).write_bytes(data)


def _cut(path: Path, rng: random.Random) -> None:
    file = path / rng.choice([CONFIG, WEIGHTS])
    os.truncate(file, rng.randrange(file.stat().st_size + 1))


def _edit(path: Path, rng: random.Random) -> None:
    pieces = ["(", ")", "*", "+", "{9,}", ".*", "|", "[a-z]", "q_proj", "\\d", "(?=", "x", "?", "^", "$", "é", "\\"]
    pattern = "".join(rng.choices(pieces, k=rng.randrange(1, 400)))
    values = [pattern, [pattern] * rng.randrange(2000), {pattern: 4}, None, -1, 10**18, True, rng.random(), [[[]]]]
    fields = [
        "r",
        "lora_alpha",
        "target_modules",
        "rank_pattern",
        "alpha_pattern",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "use_rslora",
        "bias",
        "init_lora_weights",
    ]
    _config(path, **{rng.choice(fields): rng.choice(values) for _ in range(rng.choice([1, 1, 2, 3]))})


def hostile(root: Path, good: list[Path], mutated: int, seed: int) -> Iterator[tuple[str, Path]]:
    """Write a directory below `root` for each shape and for `mutated` changes to good adapters drawn by the seed."""
    rng = random.Random(seed)
    changes: list[tuple[str, Callable[[Path], object]]] = list(SHAPES.items())
    changes += [(f"mutated {n}", lambda path: rng.choice([_flip, _cut, _edit])(path, rng)) for n in range(mutated)]
    for number, (name, change) in enumerate(changes):
        path = root / str(number)
        shutil.copytree(rng.choice(good), path)
        change(path)
        yield name, path
