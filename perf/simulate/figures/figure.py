r"""Figures as data: a paper's numbers, their place and setting, and how ours are computed.

paper = "Punica (MLSys 2024)"

    [[figures]]
    name = "punica-1"
    title = "Fig. 1: decode latency by batch size"
    setting = "what the paper says of it"
    assumed = "what it does not say"

    [figures.runs]                # of the simulator, or prices of a profile
    "batch 32" = { price = { of = "decode", profile = "a100-llama2-7b", rows = 32, context = 2048 } }

    [[figures.rows]]
    name = "batch 32, long"
    published = 34.0
    unit = "ms"
    source = "§2.1: \"from 17 ms to 34 ms for longer sequences\""
    run = "batch 32"

A serving run is a row of a shipped study (`row`), or the figure's own `setup`, with some fields changed (`set`).

Tests: tests/perf/simulate/test_figures.py
"""

from __future__ import annotations

import itertools
from importlib.resources import files
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from ...workload.fields import Strict, read_fields
from ..setup import Setup
from ..study import Order, load_study, make_setup, validated

#: Factor from SI units, or a share, to each unit.
UNITS = {
    "ms": 1e3,
    "µs": 1e6,
    "%": 1e2,
    "times": 1.0,
    "tokens/s": 1.0,
    "requests/s": 1.0,
    "1/s": 1.0,
    "MB": 1e-6,
    "MiB": 2.0**-20,
    "": 1.0,
}


class Price(Strict):
    """A value that a profile alone determines, in closed form."""

    of: Literal["decode", "lora", "prefill", "load", "adapter", "kv"]
    """A decode step, its LoRA part, a prefill of one prompt, a load over the link (seconds), an adapter's size or that
    of a request's KV (bytes).
    """
    profile: str
    rows: PositiveInt = 1
    """Sequences of the decode step."""
    context: int = Field(default=0, ge=0)
    """Tokens that each has in its KV cache, or that the prompt has."""
    rank: int = Field(default=0, ge=0)
    adapters: PositiveInt | None = None
    """The rank of every sequence, and the number of distinct adapters; default: one per sequence."""
    targets: list[str] | None = None
    share: PositiveFloat = 1.0
    """Factor of the price, such as 1/32 for one of 32 layers."""


class Term(Strict):
    """Value of a cost model's term, and its source or the number that it was fitted to."""

    value: float = Field(ge=0)
    source: str = Field(min_length=3)


class System(Strict):
    """One of the paper's systems, described by its behaviour."""

    does: str
    """A description in words."""
    terms: dict[str, Term] = {}
    """Dotted terms that replace the profile's."""
    set: dict[str, Any] = {}
    """Dotted fields of the setup."""
    static: bool = False
    """The system keeps a batch, all of one adapter, until its longest completion has ended (`static_batches`)."""


class Run(Strict):
    """A simulation, or a price."""

    price: Price | None = None
    row: str | None = None
    """A row of the figure's study."""
    system: str | None = None
    set: dict[str, Any] = {}
    """Dotted fields that replace its own and the system's."""


class Published(Strict):
    """One published number, and how ours is computed."""

    name: str = Field(min_length=1)
    published: float | str | None = None
    """The number; words if the text has only these; None if no text has it."""
    unit: str = ""
    """See `UNITS`."""
    source: str = Field(min_length=3)
    """Section and the paper's own words."""
    run: str | None = None
    metric: str = "value"
    """The source of ours; a price's metric is "value"."""
    over: str | None = None
    over_metric: str | None = None
    """The run that it is compared with."""
    form: Literal["value", "increase", "ratio", "saving"] = "value"
    """Kind of the comparison; "saving" is 1 less the ratio."""
    also: list[tuple[str, str]] = []
    """More pairs of a run and its comparison; the row has the largest value of all, for a number stated as "up to"."""
    open: str | None = None
    """The mechanism that is not built yet, which is why there is no run."""
    tolerance: PositiveFloat | None = None
    """Share by which a closed form may differ from the number."""
    fitted: str = ""
    """The constants that were fitted to exactly this number, so ours is not a prediction of it."""
    why: str = ""
    """The reason why ours differ."""

    @property
    def runs(self) -> list[str]:
        """Names of the runs used."""
        return [run for run in (self.run, self.over, *itertools.chain.from_iterable(self.also)) if run is not None]


class Figure(Strict):
    """A figure, a table, or numbers of one section."""

    paper: str
    name: str
    title: str
    setting: str
    """The paper's setting."""
    assumed: str = ""
    """Assumptions about facts that it does not state, the same for all rows."""
    why: str = ""
    """The reason why ours differ, for all rows without their own."""
    study: str | None = None
    """The runs name its rows."""
    set: dict[str, Any] = {}
    """Dotted fields of all of these; the study's quick ones override them."""
    setup: dict[str, Any] = {}
    quick: dict[str, Any] = {}
    """Setup of runs without a study."""
    systems: dict[str, System] = {}
    runs: dict[str, Run] = {}
    rows: list[Published] = Field(min_length=1)
    orders: list[Order] = []
    directory: None = None

    @property
    def simulated(self) -> list[str]:
        """Names of the runs that depend on a seed."""
        return [name for name, run in self.runs.items() if run.price is None]

    def setup_of(self, name: str, *, quick: bool = False, seed: int | None = None) -> Setup:
        """Return the setup of a serving run. Raises StudyError."""
        run, fields = self.runs[name], dict[str, Any]()
        if run.system is not None:
            system = self.systems[run.system]
            fields = system.set | {f"terms.{term}": each.value for term, each in system.terms.items()}
            fields |= {"static": True} if system.static else {}
        fields, base = fields | run.set, self
        if run.row is not None:
            base = load_study(str(self.study))
            known = {row.name: row for row in base.rows}
            shared = {name: value for name, value in self.set.items() if not (quick and name in base.quick)}
            fields = shared | known[run.row].set | fields
        changes = [*(base.quick.items() if quick else ()), *fields.items()]
        setup = make_setup(base, changes, f"{self.name}: row {name!r}", seed=seed)
        return setup.model_copy(update={"profile": profile_path(setup.profile)})


def profile_path(name: str) -> str:
    """Return the path of a profile stored with the figures and used only by them; otherwise its name."""
    path = _shipped() / "profiles" / f"{name}.json"
    return str(path) if path.is_file() else name


def load_figures() -> list[Figure]:
    """All figures, by paper. They are not user input, so only tests check their names."""
    entries = sorted((_shipped() / "papers").iterdir(), key=lambda entry: entry.name)
    return [figure for entry in entries if entry.name.endswith(".toml") for figure in parse_figures(read_fields(entry))]


def parse_figures(fields: dict[str, Any]) -> list[Figure]:
    """The figures of one paper. Raises StudyError for an unknown field."""
    paper = fields["paper"]
    return [validated(Figure, {**each, "paper": paper}, each["name"]) for each in fields["figures"]]


def _shipped() -> Any:
    return files(__name__.rpartition(".")[0])
