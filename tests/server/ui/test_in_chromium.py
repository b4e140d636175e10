"""The operator's page in a browser: at 100,000 pages and 5,000 adapters, light and dark, narrow and wide."""

from __future__ import annotations

import os
import random
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from chorus.core.quarantine import Quarantined
from chorus.memory.adapters.adapter import Tier
from chorus.memory.pages.pool import PageKind
from chorus.server.engine.engine_view import Holding, Phase, Picture, PrefixRow
from chorus.server.engine.request_metrics import Ended
from chorus.server.ui import watchers

from .chromium import BROWSER, DRIVER, chromium

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(BROWSER is None or DRIVER is None, reason="needs chromium and chromedriver"),
]

KEY, ADMIN = "sk-an-api-key", "sk-the-admin-key"
NONE = "\N{EN DASH}"
HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
NUM_PAGES, NUM_ADAPTERS = 100_000, 5_000
NAMES = ["alice", "bob", HOSTILE, *(f"tenant{one % 40}/adapter-{one:04}" for one in range(NUM_ADAPTERS - 3))]


class Scene:
    """Pictures of a large server at work, each a little different from the one before."""

    def __init__(self):
        self.random = random.Random(0)
        self.kinds = bytearray(NUM_PAGES)
        self.kinds[0] = PageKind.RESERVED
        self.pages = {}  # by owner
        free = list(range(1, NUM_PAGES))
        self.random.shuffle(free)
        self.free = [*sorted(free[60_000:], reverse=True), *free[:60_000]]
        for name in NAMES[:1500]:
            self.take((PageKind.ADAPTER, name, ""), 16)
        for number in range(600):
            self.take(self.holder(number), self.random.randint(1, 60))
        for page in self.free[:9000]:
            self.kinds[page] = PageKind.CACHED
        self.running = range(256)
        self.uses = [int(5000 / (1 + index)) for index in range(NUM_ADAPTERS)]

    def holder(self, number):
        return (
            PageKind.KV,
            NAMES[min(NUM_ADAPTERS - 1, int(self.random.paretovariate(0.6)) + 1)],
            f"tenant{number % 40}",
        )

    def take(self, key, count):
        pages, self.free = self.free[-count:], self.free[:-count]
        for page in pages:
            self.kinds[page] = key[0]
        self.pages.setdefault(key, []).extend(pages)

    def picture(self):
        rng = self.random
        for key in rng.sample([key for key in self.pages if key[0] is PageKind.KV], 20):
            for page in self.pages.pop(key):
                self.kinds[page] = PageKind.FREE
                self.free.append(page)
        for number in range(24):
            self.take(self.holder(number), rng.randint(1, 40))
        phases = Counter()
        for kind, adapter, tenant in self.pages:
            if kind is PageKind.KV:
                phases[adapter, tenant, rng.choice([*[Phase.RUNNING] * 8, Phase.WAITING, Phase.PAUSED])] += 1
        adapters = []
        for index, name in enumerate(NAMES):
            self.uses[index] += (PageKind.ADAPTER, name, "") in self.pages and rng.random() < 0.02
            tier = Tier.DEVICE if index < 1500 else Tier.HOST if index < 3500 else Tier.DISK
            adapters.append((name, tier, 2 << index % 6, 16, self.uses[index], index == 0, str(index + 1), index == 1))
        holdings = [Holding(*key, pages) for key, pages in self.pages.items()]
        done = Future()
        aside = [Quarantined("broken/" + "long" * 30, Path("/x"), f"{HOSTILE}: lora_A has {'many' * 60} columns")]
        prefixes = [PrefixRow("", 64, 0, 0), PrefixRow(NAMES[3], 32, 4800, 80_000)]
        done.set_result(
            Picture(
                lambda: adapters,
                phases,
                bytes(self.kinds),
                holdings,
                quarantined=aside,
                prefixes=lambda: prefixes,
            )
        )
        return done


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(watchers, "TICK_SECONDS", 0.2)


@pytest.fixture(scope="module")
def large(start_one, make_engine):
    """A server that holds much."""
    engine = make_engine(["alice", "bob"])
    live = start_one(engine)
    live.worker.picture = Scene().picture
    for name in NAMES[:300]:
        note_use(live.app.state.watchers.metrics, name, f"acme/{name[:20]}")
    return live


def note_use(metrics, name, tenant, tokens=3):
    spent = metrics.accepted(name, tenant, 1, 5)
    metrics.generated(spent, tokens, 1.5, first=True)
    one = Ended(3.0, 1.0, 1.5, 2.0, 5, 2, tokens, 16, page_seconds=8.0)
    metrics.ended(spent, name, "stop", replace(one, last_seconds=1.5 + 0.5 * max(tokens - 1, 1)))


def opened(browser, live, width=1600):
    browser.run("sessionStorage.clear(); localStorage.clear()") if browser.run("return location.host") else None
    browser.resize(width)
    browser.prefer("light")
    browser.open(f"{live.url}/ui")


def drawn(browser, more=1):
    """Wait until as many more events were drawn."""
    count = browser.run("return Number(document.documentElement.dataset.events || 0)")
    browser.wait("return Number(document.documentElement.dataset.events || 0) >= arguments[0]", count + more)


LAYOUT_SHIFT = """window.shifts = []; new PerformanceObserver((list) => window.shifts.push(...list.getEntries().map(
    (one) => [one.value, one.sources.map(({node, previousRect: a, currentRect: b}) =>
        `${node?.id || node?.className || node?.parentNode?.id || node?.nodeName}: `
        + `${node?.textContent.slice(0, 60)}, from ${[a.x, a.y, a.width, a.height]} `
        + `to ${[b.x, b.y, b.width, b.height]}`)]
    ))).observe({type: 'layout-shift', buffered: false});"""


@pytest.fixture(scope="module")
def backgrounds():
    """The page's background in each colour scheme that was seen."""
    return {}


@pytest.mark.parametrize("width", [1600, 1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_narrow_and_wide(browser, large, backgrounds, tmp_path, scheme, width):
    """CHORUS_PICTURES names a directory that keeps the pictures."""
    out = Path(os.environ.get("CHORUS_PICTURES", tmp_path))
    opened(browser, large)
    browser.prefer(scheme)
    browser.resize(width)
    drawn(browser, 2)
    browser.run(LAYOUT_SHIFT)
    drawn(browser, 2)
    shifts = browser.run("return window.shifts")
    assert sum(value for value, _ in shifts) < 1e-3, f"nothing moves while numbers change: {shifts}"
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth"), "nothing is cut off"
    back = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert backgrounds.setdefault(scheme, back) == back, "whatever the width"
    assert len({*backgrounds.values()}) == len(backgrounds)
    assert len(browser.picture(out / f"{scheme}-{width}.png")) > 20_000
    print(f"milliseconds of a frame: {browser.run('return document.documentElement.dataset.frame')}")
    assert not browser.problems()


@pytest.mark.parametrize("width", [1600, 1280, 400])
def test_longer_texts_of_tiles_move_nothing(browser, large, width):
    """A minute after the last first token its percentile is a dash again: at 1,280 pixels a line less."""
    opened(browser, large)
    browser.resize(width)
    drawn(browser)
    heights = """return arguments[0].map((text) => {
        document.querySelectorAll('.tile span').forEach((one) => { one.textContent = text; });
        return document.querySelector('.tiles').offsetHeight; })"""
    assert (
        len(
            {
                *browser.run(
                    heights, ["\N{EN DASH}", "95th percentile 12.34 s", "1,234 merges \N{MIDDLE DOT} 12 switches"]
                )
            }
        )
        == 1
    )


def test_a_chosen_theme_counts_whatever_the_system_prefers(browser, large):
    opened(browser, large)
    drawn(browser, 2)
    assert browser.text("#status") == "Live" and browser.text("#model") == "base"
    assert browser.text("#arena-size") == "100 pages, 100 free", "the fake engine's own"
    browser.prefer("dark")
    browser.click("#theme")
    assert browser.run("return document.documentElement.dataset.theme") == "light"
    assert not browser.problems()


def test_the_page_tells_where_the_prefixes_of_an_adapter_are(browser, large):
    opened(browser, large)
    drawn(browser)
    browser.run("document.querySelector('#usage-by input[value=prefixes]').click()")
    browser.wait("return document.querySelectorAll('#usage tr').length === 2")
    cells = "return [...document.querySelectorAll('#usage td')].map((one) => one.textContent)"
    assert browser.run(cells) == [NAMES[3], "32", "4,800", "80,000", "base (base)", "64", "0", "0"]
    heads = "return [...document.querySelectorAll('#usage-columns th')].map((one) => one.textContent)"
    assert browser.run(heads) == ["Name", "Tokens in the pool", "Tokens in host memory", "Tokens in files ↓"]
    browser.fill("#usage-search", "none such")
    browser.wait("return document.querySelectorAll('#usage tr').length === 0")
    assert not browser.problems()


def test_names_are_text(browser, large):
    opened(browser, large)
    drawn(browser)
    browser.fill("#search", "<img")
    browser.wait("return document.querySelectorAll('#space .row').length === 1")
    assert browser.text("#space .row :first-child") == HOSTILE
    browser.click("#space .row")
    browser.click("input[value=adapter]")
    drawn(browser, 2)
    assert not browser.run("return document.querySelectorAll('img, script:not([src])').length")
    assert browser.run("return document.title") == "base · Chorus"
    assert (
        HOSTILE in browser.text("#page") and browser.run("return document.getElementById('ask-model').value") == HOSTILE
    )
    refused = browser.run("try { document.body.innerHTML = '<b>'; return 'set' } catch (error) { return error.name }")
    assert refused == "TypeError", "the browser itself makes no HTML of text"


def test_the_list_holds_the_rows_in_sight(browser, large):
    opened(browser, large)
    drawn(browser)
    rows = "return document.querySelectorAll('#space .row').length"
    assert 5 < browser.run(rows) < 30 and browser.run("return document.querySelector('#scroll').ariaRowCount") == "5001"
    browser.click("#columns [data-sort=name] button")
    first = "return document.querySelector('#space .row').firstChild.textContent"
    browser.wait(f"{first} === arguments[0]", sorted(NAMES)[0])
    browser.run("document.querySelector('#scroll').scrollTop = 1e6")
    last = "return [...document.querySelectorAll('#space .row')].some((it) => it.textContent.startsWith(arguments[0]))"
    browser.wait(last, sorted(NAMES)[-1])
    assert browser.run(rows) < 30
    browser.fill("#search", "adapter-0041")
    browser.wait(f"{rows} === 1")
    browser.press("#scroll", "Home", "Enter")
    chosen = "return document.querySelector('#space .row').ariaSelected === 'true'"
    browser.wait(chosen)
    assert browser.run("return document.querySelector('#ask-model').value") == "tenant1/adapter-0041"
    browser.fill("#search", "none such")
    browser.wait("return document.querySelector('#space').textContent === 'No adapter matches.'")


def test_what_a_thousand_adapters_and_their_tenants_have_used_is_sorted_by_any_column(browser, start, make_engine):
    names = [f"adapter-{index:04}" for index in range(1000)]
    live = start(make_engine(names))
    for index, name in enumerate(names):
        note_use(live.app.state.watchers.metrics, name, f"tenant-{index % 7}", tokens=1 + index * 7 % 1000)
    opened(browser, live)
    rows = "return [...document.querySelectorAll('#usage tr')].map((one) => one.firstChild.textContent)"
    browser.wait(f"{rows.replace('return ', 'return (')}).length === 200")
    by_tokens = sorted(names, key=lambda name: -(1 + names.index(name) * 7 % 1000))
    assert browser.run(rows) == by_tokens[:200], "by generated tokens at first"
    assert "first 200 of 1,000" in browser.run("return document.querySelector('#usage-note').textContent")
    browser.click("#usage-columns th:nth-child(1) button")
    browser.wait(f"{rows.replace('return ', 'return (')})[0] === arguments[0]", names[0])
    browser.fill("#usage-search", "adapter-0999")
    browser.wait(f"{rows.replace('return ', 'return (')}).length === 1")
    cells = "return [...document.querySelectorAll('#usage td')].map((one) => one.textContent)"
    assert browser.run(cells) == [
        "adapter-0999", "1", "0", "5", "2", "994", "1.00 s", "1.50 s", "500 ms", "8", NONE, NONE,
    ]  # fmt: skip
    browser.fill("#usage-search", "")
    browser.run("document.querySelector('#usage-by input[value=tenants]').click()")
    browser.wait(f"{rows.replace('return ', 'return (')}).length === 7")
    assert browser.run("return document.querySelector('#usage-columns').lastChild.textContent") == "Tokens left"
    for head in ("#usage-columns th.n", ".requests th.n", "#arena-replicas th.n"):
        style = browser.run("return getComputedStyle(document.querySelector(arguments[0])).textAlign", head)
        assert style == "right", f"{head} is above its numbers"


def test_each_page_has_an_owner(browser, large):
    opened(browser, large)
    drawn(browser)
    browser.press("#map", "ArrowRight")
    assert browser.text("#page") == "Page 0: Reserved"
    for by in ("adapter", "tenant", "kind"):
        browser.click(f"input[value={by}]")
        drawn(browser)
        entries = browser.run("return [...document.querySelectorAll('#legend em')].map((one) => one.textContent)")
        assert sum(int(one.split(" ")[0].replace(",", "")) for one in entries) == NUM_PAGES


def test_an_adapter_can_be_tried_with_the_key_typed_in(browser, start, fake_engine):
    live = start(fake_engine, settings={"api_key": [KEY], "admin_key": [ADMIN]})
    opened(browser, live)
    browser.wait("return document.querySelector('#status').textContent === 'An admin key is needed'")
    for key, said in ((KEY, "This key"), (ADMIN, "Live")):
        browser.fill("#key", key)
        browser.click("#key-form [type=submit]")
        browser.wait("return document.querySelector('#status').textContent.startsWith(arguments[0])", said)
    for mode, text in (("text", "olleh"), ("chat", " :tnatsissa\nolleh :resu")):
        browser.fill("#ask-model", "alice")
        browser.fill("#ask-as", mode)
        browser.fill("#ask-prompt", "hello")
        browser.click("#ask-send")
        browser.wait("return document.querySelector('#ask-state').textContent.startsWith('First token')")
        assert browser.text("#answer") == text
    browser.fill("#ask-model", "none")
    browser.click("#ask-send")
    browser.wait("return document.querySelector('#ask-state').textContent === 'It failed.'")
    assert "none" in browser.text("#answer")


def test_it_connects_again(browser, start, fake_engine):
    live = start(fake_engine)
    opened(browser, live)
    browser.wait("return document.querySelector('#status').textContent === 'Live'")
    browser.run("""window.seen = []; const status = document.querySelector('#status');
        new MutationObserver(() => seen.push(status.textContent + document.body.classList.contains('stale'))).observe(
            status, {childList: true});""")
    (watcher,) = live.app.state.watchers.watchers
    live.loop.call_soon_threadsafe(watcher.end)
    browser.wait("return window.seen.length === 2")
    assert browser.run("return window.seen") == ["The connection was lost; connecting again …true", "Livefalse"]


CUT = """return [...document.querySelectorAll('main :is(b, span, p, h2, h3, .row > *, li > *, td, th, button, label)')]
    .filter((one) => one.offsetParent && !one.closest('.hidden') && getComputedStyle(one).overflow !== 'visible'
        && one.scrollWidth > one.clientWidth + 1 && !one.title)
    .map((one) => `${one.tagName} ${one.id} ${one.className}: ${one.textContent.slice(0, 40)}`)"""


def test_nothing_is_cut_off_at_400_pixels(browser, large, tmp_path):
    out = Path(os.environ.get("CHORUS_PICTURES", tmp_path))
    opened(browser, large, 400)
    drawn(browser, 2)
    browser.click("#space .row")
    browser.run("document.querySelector('#load').open = true")
    drawn(browser)
    assert browser.run(CUT) == []
    hidden = "return [...document.querySelectorAll('#space .row > *')].filter((one) => !one.offsetParent).length"
    assert browser.run(hidden) == 0, "every column is shown"
    edges = """return [...document.querySelectorAll('main *')].filter((one) => one.offsetParent
        && !one.closest('.hidden') && one.getBoundingClientRect().right > innerWidth + 1).map((one) => one.outerHTML)"""
    assert browser.run(edges) == []
    browser.picture(out / "chosen-400.png")
    browser.resize(1280)
    drawn(browser, 2)
    browser.picture(out / "chosen-1280.png")


def test_before_a_key_is_given_only_the_reason_is_shown(browser, start, fake_engine, tmp_path):
    live = start(fake_engine, settings={"api_key": [KEY], "admin_key": [ADMIN]})
    opened(browser, live, 400)
    browser.wait("return document.querySelector('#status').textContent === 'An admin key is needed'")
    shown = "return [document.querySelector('main').offsetParent !== null, document.querySelector('#locked').hidden]"
    assert browser.run("return getComputedStyle(document.querySelector('main')).display") == "none"
    assert "admin key" in browser.text("#locked-why") and shown
    browser.picture(Path(os.environ.get("CHORUS_PICTURES", tmp_path)) / "locked-400.png")
    browser.fill("#key", ADMIN)
    browser.click("#key-form [type=submit]")
    browser.wait("return document.querySelector('#status').textContent === 'Live'")
    assert browser.run("return getComputedStyle(document.querySelector('main')).display") == "grid"
    browser.click("#key-clear")
    browser.wait("return getComputedStyle(document.querySelector('main')).display === 'none'")


def test_quarantined_adapters_and_failures_are_told(browser, start, fake_engine):
    fake_engine.adapters.quarantine["worn"] = Quarantined("worn", Path("/x"), f"{HOSTILE} no lora_A")
    live = start(fake_engine)
    live.app.state.statuses.note(429)
    live.app.state.statuses.note(500)
    opened(browser, live)
    drawn(browser, 2)
    assert browser.text("#quarantined li") == f"worn{HOSTILE} no lora_A" and browser.text("#aside-count") == "1"
    assert (browser.text("#t-errors"), browser.text("#t-refused")) == ("1", "1")


def confirm(browser, answer="yes"):
    browser.wait("return document.querySelector('#confirm').open")
    question = browser.text("#confirm-text")
    browser.click(f"#confirm-{answer}")
    return question


def test_an_operator_changes_adapters_after_a_question(browser, start, fake_engine):
    live = start(fake_engine, settings={"admin_key": [ADMIN]})
    opened(browser, live)
    browser.wait("return document.querySelector('#status').textContent === 'An admin key is needed'")
    browser.fill("#key", ADMIN)
    browser.click("#key-form [type=submit]")
    browser.wait("return document.querySelectorAll('#space .row').length === 2")
    browser.click("#space .row")
    browser.wait("return !document.querySelector('#change').hidden")
    assert browser.text("#change-name") == "alice"
    headers = {"authorization": f"Bearer {ADMIN}"}

    def state(name="alice"):
        return live.client.get(f"/v1/adapters/{name}", headers=headers).json()

    browser.click("#do-pause")
    assert confirm(browser, "no") == "Pause alice? New requests for all of its versions are refused."
    assert not state()["paused"], "No changes nothing"
    browser.click("#do-pause")
    confirm(browser)
    browser.wait("return !['', 'Working …'].includes(document.querySelector('#change-state').textContent)")
    assert browser.text("#change-state") == "alice is paused."
    browser.wait("return document.querySelector('#do-pause').textContent === 'Resume'")
    assert state()["paused"]
    browser.click("#do-pin")
    confirm(browser)
    browser.wait("return document.querySelector('#change-state').textContent !== 'Working …'")
    assert state()["pinned"] or "bad" in browser.run("return document.querySelector('#change-state').className")


def test_a_refused_change_says_why(browser, start, fake_engine):
    live = start(fake_engine)
    opened(browser, live)
    drawn(browser)
    browser.fill("#load-name", "carol")
    browser.fill("#load-path", "/nowhere")
    browser.click("#load-form [type=submit]")
    assert confirm(browser) == "Load carol?"
    browser.wait("return document.querySelector('#change-state').classList.contains('bad')")
    assert "adapter_roots" in browser.text("#change-state")
