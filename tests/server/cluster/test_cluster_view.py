"""An API server's data for the operator's page: the nearest tiers, its own requests, each replica's counts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from chorus.core.quarantine import Quarantined
from chorus.core.requests.types import RequestOutput
from chorus.memory.adapters.adapter import Tier
from chorus.memory.adapters.adapter_costs import REST, AdapterCost
from chorus.server.cluster.address import UnixSocket
from chorus.server.cluster.cluster_view import NOTHING, costs_of, picture_of
from chorus.server.cluster.fleet import Fleet
from chorus.server.cluster.in_flight_table import InFlightTable
from chorus.server.cluster.link import Link
from chorus.server.cluster.report import Report
from chorus.server.cluster.rows import from_row, to_row
from chorus.server.engine.engine_view import Phase


def entry(name, content):
    manifest = SimpleNamespace(content_hash=content, rank=8)
    return SimpleNamespace(name=name, manifest=manifest, pinned=name == "a1", label="7")


def test_costs_of_adapters_are_added_up_by_name_over_replicas_and_ended_ones():
    links = [Link(f"r{index}", UnixSocket(Path("nowhere")), b"", 1.0) for index in range(2)]
    for link in links:
        told = Report(NOTHING, spent=[AdapterCost("h1", 1.0, 0.5, (1, 0)), AdapterCost("gone", 2.0, 0.0, (0, 0))])
        link.note_report(Report.from_wire(told.to_wire()))
        link.note_report(Report(NOTHING))
    registered = [("a1@2", entry("a1@2", "h1")), ("a2", entry("a2", "h2"))]
    found = {one.name: one[1:] for one in costs_of(links, registered, [AdapterCost("h1", 4.0, 0.25, (0, 1))])}
    assert found == {"a1": (6.0, 1.25, (2, 1)), REST: (4.0, 0.0, (0, 0))}


def test_a_row_has_the_page_seconds_of_its_output():
    for output in (RequestOutput("r", (7,), page_seconds=1.5), RequestOutput("r", (7,))):
        assert from_row(to_row(output, 3), None) == (output, 3)


def test_a_front_s_picture():
    links = [Link(f"r{index}", UnixSocket(Path("nowhere")), b"", 1.0) for index in range(3)]
    links[0].note_report(Report(NOTHING, tiers={"h1": "host", "h2": "failed", "h3": "loading"}))
    links[1].note_report(Report(NOTHING, tiers={"h1": "device", "h3": "host"}, draining=True))
    catalog = SimpleNamespace(
        registered=lambda: (
            [(f"a{one}", entry(f"a{one}", f"h{one}")) for one in (1, 2, 3, 4)] + [("n", entry("n", None))]
        ),
        paused={"a2"},
        quarantine={"worn": Quarantined("worn", Path("/x"), "no lora_A")},
    )
    in_flight = InFlightTable()
    for number, (adapter, tokens) in enumerate([("a1", [1]), (None, []), ("a1", [])]):
        record = {"id": str(number), "tokens": [7], "num_prompt_tokens": 1, "content_hash": None, "tenant": "acme"}
        request = in_flight.add({**record, "adapter": adapter})
        in_flight.receive(request.id, in_flight.place(request, "r0", "kind"), tokens, last=False)
    picture = picture_of(Fleet(links), catalog, in_flight.open())
    tiers = {row[0]: row[1] for row in picture.adapters()}
    assert tiers == {"a1": Tier.DEVICE, "a2": Tier.FAILED, "a3": Tier.LOADING, "a4": Tier.DISK, "n": Tier.DISK}
    assert all(row[2:7] == (8, 0, None, False, "7") for row in picture.adapters()) and not picture.kinds
    assert [row[0] for row in picture.adapters() if row[7]] == ["a2"]
    assert [(one.name, one.reason) for one in picture.quarantined] == [("worn", "no lora_A")]
    assert picture.phases == {
        ("a1", "acme", Phase.RUNNING): 1,
        ("", "acme", Phase.WAITING): 1,
        ("a1", "acme", Phase.WAITING): 1,
    }
    assert [(one.name, one.state, one.stats) for one in picture.replicas] == [
        ("r0", "down", NOTHING),
        ("r1", "draining", NOTHING),
        ("r2", "down", None),
    ]
