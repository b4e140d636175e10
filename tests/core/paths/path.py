"""A column of the table of paths: one way to serve requests, whose tokens are those of transformers + peft."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch

from chorus.core.model.program.native_decoder import NativeDecoderModel, why_unsupported
from chorus.core.model.specs.config import ModelConfig, UnsupportedModel
from chorus.core.model.weights.shard import Shard
from chorus.graphs.runner import StepMode

from ..conftest import Driver
from ..merging.test_merged import merge
from .asked import PROMPTS, Asked, told
from .subject import Subject

#: A path's needs that rows may be refused.
MERGING, RANKS = "merged weights", "ranks"

#: The reason in `Subject.untold` why bits of PyTorch's operators are not compared; those of the native decoder are.
TORCH_BITS = "bits by PyTorch"


@dataclass(frozen=True)
class Cell:
    """A row on some kernels, to be served in one way.

    kernels: "torch", or "native": the native decoder if it takes the model, else PyTorch's operators with as much of
    the native library as they use. fixture: returns pytest's fixture of a name.
    """

    subject: Subject
    kernels: str
    fixture: Callable[[str], Any]

    @property
    def it(self) -> Any:
        return self.subject.it

    def drive(self, **config: Any) -> Driver:
        """An engine of the row; `config` has the path's settings. If the native decoder says that it doesn't take the
        model, it must refuse it, and nothing else computes it unasked.
        """
        limits = {"block_tokens": self._block_tokens(), "max_num_seqs": 8, "max_num_batched_tokens": 24}
        config, make = {**limits, **self.subject.options, **config}, self.fixture("drive")
        why = self.why_not_native(self.subject.config, config)
        if why is not None and self.kernels == "native":
            with pytest.raises(UnsupportedModel, match=re.escape(f"cpu_kernels is 'native', but {why}")):
                make(self.it, cpu_kernels="native", **config)
        driver = make(self.it, cpu_kernels=self.cpu_kernels(why), **config)
        executor = driver.executor.inner
        first = getattr(executor, "first", getattr(executor, "inner", executor))
        assert isinstance(first.decoder, NativeDecoderModel) == (why is None)
        return driver

    def _block_tokens(self) -> int:
        """Small blocks, with room for a rank's share of a recurrent state."""
        if self.subject.config.recurrent is None:
            return 8
        return 16 * (2 if self.subject.options.get("kv_cache_dtype") == "fp8" else 1)

    def why_not_native(self, config: ModelConfig, settings: Mapping[str, Any]) -> str | None:
        """Why the native decoder doesn't compute the cell; None if it does. settings: some of an engine's."""
        if self.kernels == "torch":
            return "the cell is of PyTorch's operators"
        size, dtype = settings.get("tensor_parallel_size", 1), getattr(torch, settings.get("dtype", "float32"))
        return why_unsupported(config if size == 1 else Shard(0, size).config(config), dtype)

    def cpu_kernels(self, why_not_native: str | None) -> str:
        return "auto" if self.kernels == "native" and why_not_native is not None else self.kernels

    def merge(self, driver: Driver) -> None:
        """Merge the row's adapter; a request that uses it loads it, with the tokens that invoke it if it has some."""
        name = self.subject.merged
        driver.run("load", name, self.it.case(name, 9, seed=0, count=1)[0], max_tokens=1)
        merge(driver, name)

    def check(self, driver: Driver, asked: Asked, turn: str = "") -> None:
        """Requests get the tokens of transformers and peft."""
        want = asked.add(self.subject, driver, turn)
        assert told(driver, want) == want


@dataclass(frozen=True)
class Path:
    """Serves requests by one engine, whose settings are `limits`."""

    name: str
    limits: Mapping[str, Any] = field(default_factory=dict)
    asked: Asked = PROMPTS
    merges: bool = False

    own_needs: ClassVar[tuple[str, ...]] = ()

    @property
    def needs(self) -> tuple[str, ...]:
        """What a row may be refused, and what it may have no reference for."""
        shared = {RANKS: "tensor_parallel_size" in self.limits, MERGING: self.merges}
        return (*self.own_needs, *(need for need, is_there in shared.items() if is_there))

    def runs(self, subject: Subject, kernels: str) -> bool:
        """True if the table has a cell for a row on these kernels."""
        return subject.why_untold(self.needs) is None

    def serve(self, cell: Cell) -> None:
        """Serve the row's requests and check their answers, and that they have gone this way."""
        driver = self.drive(cell)
        if self.merges:
            cell.merge(driver)
        self.ask(cell, driver)
        if self.merges:
            assert {plan.mode for plan in driver.plans} == {StepMode.MERGED}
        self.verify(cell, driver)

    def drive(self, cell: Cell) -> Driver:
        return cell.drive(**self.limits)

    def ask(self, cell: Cell, driver: Driver) -> None:
        cell.check(driver, self.asked)

    def verify(self, cell: Cell, driver: Driver) -> None:
        """Check that requests went the way that the path is named for."""
