"""Composed adapters by name and tenant: which are forgotten, and by whose requests."""

from __future__ import annotations

from chorus.memory.adapters.composed_names import MAX_COMPOSED, ComposedNames


class Names(ComposedNames[str]):
    def __init__(self):
        super().__init__()
        self.forgotten = []

    def ask(self, name, tenant):
        if self.get(name) is None:
            self.put(name, name)
        self.request(name, tenant, self._forget)

    def _forget(self, adapter):
        self.forgotten.append(adapter)
        self.pop(adapter)


def test_each_tenant_keeps_its_latest():
    names = Names()
    for index in range(3 * MAX_COMPOSED):
        names.ask("regular", "a")
        names.ask(f"{index}", "a")
    assert len(names.values()) == MAX_COMPOSED and names.get("regular") is not None
    assert names.forgotten == [str(index) for index in range(2 * MAX_COMPOSED + 1)]


def test_a_tenant_s_flood_forgets_no_one_else_s():
    names = Names()
    names.ask("mine", "a")
    names.ask("shared", "a")
    names.ask("shared", "b")
    for index in range(MAX_COMPOSED):
        names.ask(f"{index}", "b")
    assert {"mine", "shared"} <= set(names.values()) and names.forgotten == []
    for index in range(MAX_COMPOSED):
        names.ask(f"other {index}", "a")
    assert "shared" in names.forgotten and "mine" in names.forgotten


def test_one_that_is_gone_is_no_tenant_s_any_longer():
    names = Names()
    names.ask("x", "a")
    names.pop("x")
    assert names.get("x") is None
    for index in range(MAX_COMPOSED):
        names.ask(f"{index}", "a")
    assert names.forgotten == []
