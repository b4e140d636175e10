"""Adapter backends of the executors: they read adapter files and move adapters into the arena.

Tests: tests/core/executors/test_adapters.py, tests/core/executors/test_cuda_interpreted.py,
tests/core/executors/test_host_waits.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from ...memory.adapters.image import ImageForm, RowJobs, read_image
from ...memory.adapters.vectors import BaseWeights
from ...memory.files.composed import inspect as inspect_adapter
from ...memory.files.error import AdapterFormatError
from ...memory.files.identity import ContentHash
from ...memory.files.manifest import AdapterManifest
from ...memory.files.methods.registry import CONVERT
from ...memory.host.image import HostImage
from ...memory.pages.adapter_layout import AdapterLayout
from ...memory.pages.arena import Arena
from ...memory.transfers.dma import open_dma
from ...memory.transfers.transfer import Transfer
from ...ops.cpu import native_reader
from ..config import MOST_GPU_RANK
from ..model.lora.lora_state_cuda import MAX_PARTS
from ..model.specs.config import ModelConfig


@dataclass(slots=True)
class Coming:
    """An adapter being copied into its pages."""

    image: HostImage
    layout: AdapterLayout
    began: float
    """When its copy began, as `time.monotonic` has it."""
    is_counted: bool = False
    """True once a step has started with it."""


class ModelAdapters:
    """Reads PEFT directories and moves adapters into an executor's arena, layer by layer.

    pinned_bytes: the most host memory that is pinned for images. scope: context in which copies to the arena's device
    are issued. failure: see `open_dma`. base: see `ModelAdapters.base`.
    """

    def __init__(
        self,
        config: ModelConfig,
        arena: Arena,
        dtype: torch.dtype,
        pinned_bytes: int = 0,
        scope: Callable[[], AbstractContextManager[None]] = nullcontext,
        failure: Callable[[], str | None] = lambda: None,
        *,
        base: BaseWeights | None = None,
    ) -> None:
        self._scope = scope
        self.base = base
        """Reads adapters with DoRA or biases; None: they can't be read."""
        self._config = config
        self._page = arena.layout
        self._dtype = dtype
        self.dma = open_dma(arena.pages, pinned_bytes, failure=failure)
        self._open_rows = open_rows if native_reader.available(dtype) else None
        self._layouts: WeakValueDictionary[Hashable, AdapterLayout] = WeakValueDictionary()
        self.coming: WeakKeyDictionary[Transfer, Coming] = WeakKeyDictionary()
        """The adapters whose copies were still running when `load` returned."""

    def inspect(self, path: Path, roots: Sequence[Path] = ()) -> AdapterManifest:
        return inspect_adapter(path, self._config.module_paths, roots)

    def layout(self, manifest: AdapterManifest) -> AdapterLayout:
        """Return the layout of the manifest's parts; adapters of equal shape share one."""
        key = tuple((part.rank, part.layers, part.targets, part.experts) for part in manifest.parts), manifest.vectors
        found = self._layouts.get(key)
        if found is None:
            config, page = self._config, self._page
            found = self._layouts[key] = AdapterLayout.build(
                manifest.parts, config.projections, page.page_elems, page.itemsize, vectors=manifest.vectors
            )
        return found

    def read(
        self, manifest: AdapterManifest, layout: AdapterLayout, image: HostImage, content: ContentHash | None = None
    ) -> None:
        form = ImageForm(layout, self._config.projections, self._page.page_elems, self._dtype)
        if manifest.vectors and self.base is None:
            raise RuntimeError(f"{manifest.path} can't be read without the base model's weights")
        read_image(manifest, form, image, self.dma.buffers, self._open_rows, base=self.base, content=content)

    def keep_within(self, room: Callable[[], int]) -> None:
        """See `Buffers.keep_within`."""
        self.dma.buffers.keep_within(room)

    def load(self, image: HostImage, layout: AdapterLayout, pages: list[int]) -> Transfer | None:
        began = time.monotonic()
        with self._scope():
            transfer = self.dma.copies.start(image, layout, pages)
            if transfer.is_done():
                return None
            self.coming[transfer] = Coming(image, layout, began)
            return transfer

    def start(self, image: HostImage, layout: AdapterLayout, pages: list[int]) -> Transfer:
        """Like `place`, but always return a transfer."""
        with self._scope():
            return self.dma.copies.start(image, layout, pages)

    def copy_pages(self, image: torch.Tensor, pages: Sequence[int], *, to_device: bool) -> Transfer:
        """See `CopyEngine.copy_pages`."""
        with self._scope():
            return self.dma.copies.copy_pages(image, pages, to_device=to_device)

    def save(self, layout: AdapterLayout, pages: list[int]) -> HostImage:
        with self._scope():
            image = HostImage()
            data = image.take(self.dma.buffers, (len(pages), self._page.page_elems), self._dtype)
            self.dma.copies.copy_out(pages, data)
            image.publish(layout.num_layers)
            return image


class CudaAdapters(ModelAdapters):
    """Adapter backend of a GPU: it refuses adapters that the static tables can't hold.

    The thread that launches steps calls `place`.
    """

    def __init__(
        self,
        config: ModelConfig,
        arena: Arena,
        dtype: torch.dtype,
        scope: Callable[[], AbstractContextManager[None]],
        failure: Callable[[], str | None],
        max_rank: int,
        pinned_bytes: int,
    ) -> None:
        super().__init__(config, arena, dtype, pinned_bytes=pinned_bytes, scope=scope, failure=failure)
        self._max_rank = max_rank

    def inspect(self, path: Path, roots: Sequence[Path] = ()) -> AdapterManifest:
        manifest = super().inspect(path, roots)
        check_tables(manifest, path, self._max_rank)
        return manifest

    def layout(self, manifest: AdapterManifest) -> AdapterLayout:
        check_tables(manifest, manifest.path, self._max_rank)  # a composed one was never inspected
        return super().layout(manifest)

    def close(self) -> None:
        """Wait until no copy is running."""
        self.dma.copies.close()


def check_tables(manifest: AdapterManifest, path: Path, max_rank: int) -> None:
    """Raise AdapterFormatError for an adapter that the static tables of a GPU can't hold, or whose tokens it has no
    logits for.
    """
    if manifest.num_tokens:
        raise AdapterFormatError(
            f"{path}: adds tokens beyond the base model's vocabulary, which a GPU does not serve; set device to 'cpu', "
            "or resize the base model's vocabulary and serve that"
        )
    if manifest.rank > max_rank:
        fix = (
            "raise max_lora_rank"
            if manifest.rank <= MOST_GPU_RANK
            else f"a GPU serves ranks up to {MOST_GPU_RANK}: set device to 'cpu', or "
            f"{CONVERT if manifest.is_larger else 'use a smaller rank'}"
        )
        raise AdapterFormatError(f"{path}: has rank {manifest.rank}, above max_lora_rank {max_rank}; {fix}")
    num_parts = sum(not part.token_ids for part in manifest.parts)
    if num_parts > MAX_PARTS:
        raise AdapterFormatError(
            f"{path}: rank_pattern, alpha_pattern and layers make {num_parts} different parts; "
            f"a GPU serves at most {MAX_PARTS}: set device to 'cpu', or train with fewer ranks and alphas"
        )


def open_rows(fd: int, jobs: RowJobs, out_elems: int, dtype: torch.dtype) -> native_reader.FileRows:
    """Begin to read adapter rows with the native library."""
    return native_reader.FileRows(fd, _native_jobs(jobs, out_elems), dtype)


@lru_cache(64)
def _native_jobs(jobs: RowJobs, out_elems: int) -> native_reader.ReadJobs:
    """The same jobs in the library's form, checked once; `ITEM_BYTES` and the library number element types alike."""
    return native_reader.ReadJobs(jobs.table, jobs.groups, jobs.spans, out_elems)
