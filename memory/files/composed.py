"""An adapter made of others with scales: the sum of all that they add to the base model.

Its A and B are those of its sources one after another, A with the factors; its rank is the sum of ranks. So it takes
pages, is loaded and cached like any adapter. As PEFT's `add_weighted_adapter` with the combination `cat`.

Tests: tests/memory/files/test_composed.py.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from .adapter_weights import AdapterWeights
from .error import AdapterChanged, AdapterFormatError
from .format import inspect_adapter
from .manifest import AdapterManifest
from .module_paths import ModulePaths
from .peft_names import is_of_a, tensor_shapes
from .targets import parts_of

if TYPE_CHECKING:
    import torch

Sources = Sequence[tuple[AdapterManifest, float]]

_SCHEME = "composed:"


def composed(sources: Sources) -> AdapterManifest:
    """The manifest of adapters with scales. Raises AdapterFormatError for one that can't be composed."""
    first = sources[0][0]
    modules = first.modules
    if modules is None:
        raise AdapterFormatError(f"{first.path}: was not inspected, so it can't be composed with others")
    for manifest, _ in sources:
        if (why := manifest.why_alone) is not None:
            raise AdapterFormatError(f"{manifest.path}: {why}; name it alone in a request, without a scale")
    ranks: dict[tuple[int, str], int] = defaultdict(int)
    for part in (part for manifest, _ in sources for part in manifest.parts):
        for target in product(part.layers, part.targets):
            ranks[target] += part.rank
    hashes = [manifest.content_hash for manifest, _ in sources]
    lines = (f"{content} {scale.hex()}\n" for content, (_, scale) in zip(hashes, sources, strict=True))
    return AdapterManifest(
        _path_of(sources),
        parts_of({target: (rank, 1.0) for target, rank in ranks.items()}, modules.projections),
        file_size=sum(manifest.file_size for manifest, _ in sources),
        content_hash=None if None in hashes else sha256("".join(["chorus composed 1\n", *lines]).encode()).hexdigest(),
        no_effect=all(manifest.no_effect for manifest, _ in sources),
        modules=modules,
        sources=tuple(sources),
    )


def inspect(path: Path, modules: ModulePaths, roots: Sequence[Path] = ()) -> AdapterManifest:
    """As `inspect_adapter`; the path may be the `path` of a composed manifest."""
    sources = _read_path(path)
    if sources is None:
        return inspect_adapter(path, modules, roots)
    return composed([(inspect_adapter(source, modules, roots), scale) for source, scale in sources])


def paths_of(path: Path) -> list[Path]:
    """The directories of an adapter, which may be composed, by the path in its manifest."""
    sources = _read_path(path)
    return [path] if sources is None else [source for source, _ in sources]


class _Share(NamedTuple):
    """A source's tensor in a composed one."""

    file: AdapterWeights
    shape: tuple[int, int]
    factors: tuple[float, ...]
    """Multiplied one after another, as PEFT does."""


class ComposedWeights:
    """The weights of a composed adapter, opened for a `with` block; see `AdapterWeights`."""

    def __init__(self, manifest: AdapterManifest, open_source: Callable[[AdapterManifest], AdapterWeights]) -> None:
        """open_source: opens the weights of a source, if they are those that were inspected."""
        self.path = manifest.path
        self._stack = ExitStack()
        self._files: list[AdapterWeights] = []
        self._shares: dict[str, list[_Share]] = defaultdict(list)
        with ExitStack() as stack:
            for source, scale in manifest.sources:
                file = stack.enter_context(open_source(source))
                self._files.append(file)
                for name, shape, of_part in _tensors(source):
                    factors = (scale, of_part) if is_of_a(name) else ()
                    self._shares[name].append(_Share(file, shape, factors))
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def is_unchanged(self) -> bool:
        return all(file.is_unchanged() for file in self._files)

    def changed(self) -> AdapterChanged:
        return next((file for file in self._files if not file.is_unchanged()), self._files[0]).changed()

    def matrix(self, name: str, shape: tuple[int, int], buffer: torch.Tensor) -> torch.Tensor:
        """See `AdapterWeights.matrix`; in float32."""
        import torch

        found = []
        for share in self._shares[name]:
            values = share.file.matrix(name, share.shape, buffer).to(torch.float32, copy=True)
            for factor in share.factors:
                values = values * factor
            found.append(values)
        joined = torch.cat(found, 0 if is_of_a(name) else 1)
        if joined.shape != shape:
            raise self.changed()
        return joined


def _tensors(manifest: AdapterManifest) -> Iterator[tuple[str, tuple[int, int], float]]:
    """Name and shape of each tensor, and the scale of its part."""
    assert manifest.modules is not None
    for part in manifest.parts:
        for layer, module in product(part.layers, part.targets):
            for name, shape in tensor_shapes(layer, manifest.modules.projections[module], part.rank):
                yield name, shape, part.scale


def _path_of(sources: Sources) -> Path:
    """Says the sources to other processes that see the same disk."""
    told = [[str(manifest.path.absolute()), scale] for manifest, scale in sources]
    return Path(f"{_SCHEME}{json.dumps(told)}")


def _read_path(path: Path) -> list[tuple[Path, float]] | None:
    text = str(path)
    if not text.startswith(_SCHEME):
        return None
    try:
        return [(Path(source), float(scale)) for source, scale in json.loads(text.removeprefix(_SCHEME))]
    except (ValueError, TypeError, RecursionError) as error:
        raise AdapterFormatError(f"{text[:200]!r}: not the path of a composed adapter: {error}") from None
