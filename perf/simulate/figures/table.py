"""The table of all figures as Markdown: what the command prints, and perf/results/figures.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from ..document import markdown_table
from .figure import Figure
from .results import Claim, FigureResult, Line

HEADS = ["", "published", "ours", "ratio", "why not"]
_HEAD = """# The papers' figures

Written by `{command}`; do not edit. Every number that the texts print, with ours beside it: the median over
{seeds} seeds and, in brackets, an interval that holds the median of all seeds with at least 95 % (order statistics of
these seeds; with fewer than six, all of them). "exact" is a price in closed form, in which no seed is. Ratio is ours
over the published number. Open rows wait for the mechanism that they name. "picture only": the number is in the
figure's picture and in no text. Settings are the papers'; what they leave out was assumed once, alike for all rows of a
figure, and was not changed to make an order come out.
"""


def document(results: Sequence[FigureResult], command: str, seeds: int) -> str:
    """Return the page. command: that wrote it."""
    lines = [_HEAD.format(command=command, seeds=seeds), *_summary(results)]
    for paper, figures in groupby(results, key=lambda result: result.figure.paper):
        lines.append(f"\n## {paper}\n")
        for result in figures:
            lines += _figure(result)
    return "\n".join(lines) + "\n"


def _summary(results: Sequence[FigureResult]) -> Iterator[str]:
    lines = [line for result in results for line in result.lines]
    claims = [claim for result in results for claim in result.claims]
    near = [line for line in lines if line.ratio is not None and 0.9 <= line.ratio <= 1.1]
    fitted = sum(bool(line.row.fitted) for line in near)
    numbers = sum(line.ratio is not None for line in lines)
    opened = sum(line.status == "open" for line in lines)
    held = sum(claim.held >= 0.8 * claim.seeds for claim in claims)
    yield (
        f"{len(lines)} rows of {len(results)} figures: {numbers} have a published number and ours beside it, "
        f'{len(near)} of them within 10 %. Of these, constants were fitted to {fitted} ("fitted" says which), and '
        f"{len(near) - fitted} are predictions. {opened} are open. "
        f"{held} of {len(claims)} orders hold in at least 80 % of their seeds."
    )


def _figure(result: FigureResult) -> Iterator[str]:
    figure = result.figure
    yield f"### {figure.name}\n\n{figure.title}. Setting: {_flat(figure.setting)}"
    if figure.assumed:
        yield f"Assumed: {_flat(figure.assumed)}"
    for name, system in figure.systems.items():
        terms = "; ".join(f"`{term}` = {each.value:g}, {each.source}" for term, each in system.terms.items())
        yield f"\n* {name}: {_flat(system.does)}{f' ({terms})' if terms else ''}"
    yield ""
    yield from markdown_table(
        [*HEADS, "source"], ([line.row.name, *_cells(line), line.row.source] for line in result.lines)
    )
    if figure.why:
        yield f"\n{_why_of_all(figure)}"
    if result.claims:
        yield ""
        claims = ([claim_text(claim), held_text(claim), claim.order.source] for claim in result.claims)
        yield from markdown_table(["order", "kept", "source"], claims)
    yield ""


def _cells(line: Line) -> list[str]:
    row = line.row
    if row.published is None:
        published = "picture only"
    else:
        published = row.published if isinstance(row.published, str) else f"{number(row.published)} {row.unit}".strip()
    why = f"open: {row.open}" if row.open is not None else row.why
    why = f"fitted: {row.fitted}. {why}" if row.fitted else why
    return [published, _ours(line), "" if line.ratio is None else f"{line.ratio:.2f}", _flat(why)]


def _why_of_all(figure: Figure) -> str:
    return f"Why not, where a row does not say: {_flat(figure.why)}"


def _ours(line: Line) -> str:
    if line.ours is None:
        return "—"
    median = f"{number(line.ours.median)} {line.row.unit}".strip()
    return f"{median} (exact)" if line.exact else f"{median} [{number(line.ours.low)}, {number(line.ours.high)}]"


def claim_text(claim: Claim) -> str:
    order = claim.order
    if order.alike:
        return f"{', '.join(order.alike)} are alike within {order.within:.0%}"
    return " < ".join(each if isinstance(each, str) else number(each) for each in order.rising)


def held_text(claim: Claim) -> str:
    if claim.seeds == 1:
        return "yes" if claim.held else "no"
    return f"in {claim.held} of {claim.seeds} seeds"


def number(value: float) -> str:
    """Three significant digits, but all of a larger whole part."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _flat(text: str) -> str:
    return " ".join(text.split())
