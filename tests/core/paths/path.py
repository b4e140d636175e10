"""A column of the table of paths: one way to serve requests, whose tokens are those of transformers + peft."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from chorus.graphs.runner import StepMode

from ..conftest import Driver
from ..merging.test_merged import merge
from .asked import PROMPTS, Asked, told
from .subject import Subject

#: A path's needs that rows may be refused.
MERGING, RANKS = "merged weights", "ranks"


@dataclass(frozen=True)
class Cell:
    """A row on some kernels, to be served in one way. fixture: returns pytest's fixture of a name."""

    subject: Subject
    kernels: str
    fixture: Callable[[str], Any]

    @property
    def it(self) -> Any:
        return self.subject.it

    def drive(self, **config: Any) -> Driver:
        """An engine of the row; `config` has the path's settings."""
        limits = {"block_tokens": 8, "max_num_seqs": 8, "max_num_batched_tokens": 24, "cpu_kernels": self.kernels}
        return self.fixture("drive")(self.it, **{**limits, **self.subject.options, **config})

    def merge(self, driver: Driver) -> None:
        """Merge the row's adapter; a request that uses it loads it."""
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
        shared = {MERGING: self.merges, RANKS: "tensor_parallel_size" in self.limits}
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
