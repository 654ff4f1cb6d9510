"""The dashboard as people see it, in headless Chromium."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from .browser import Visit, chromium
from .scene import KEY, Scene, add_story
from .shown import Shown, shown

HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
PHONE = {"viewport": {"width": 360, "height": 720}, "has_touch": True, "is_mobile": True}
PAGES = {"programs": "#/", "engines": "#/engines", "queues": "#/load"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests."""
    with chromium() as running:
        yield running


@contextlib.contextmanager
def with_story() -> Iterator[Shown]:
    """A dashboard whose clock stands still, and its story's id in ``story``."""
    scene = Scene()
    scene.fill(280)
    story = add_story(scene)
    with shown(scene) as running:
        running.story = story
        yield running


@pytest.fixture(scope="module")
def served() -> Iterator[Shown]:
    """One for all tests that change nothing."""
    with with_story() as running:
        yield running


@pytest.fixture
def visit(browser: Browser, served: Shown) -> Iterator[Callable[..., Visit]]:
    """Makes visits of the dashboard; none of them may have complained."""
    visits: list[Visit] = []

    def make(**options: object) -> Visit:
        visits.append(Visit(browser, served, **options))
        visits[-1].sign_in()
        return visits[-1]

    yield make
    for one in visits:
        one.close()


def wait(condition: Callable[[], object], limit_s: float = 12) -> None:
    """Wait until a condition holds, which the page brings about."""
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "it does not happen"
        time.sleep(0.05)


def frame_cost(one: Visit, frames: int = 60) -> dict[str, float]:
    """Scroll by whole screens; return the processor time of the page's thread a frame, in ms."""
    devtools = one.context.new_cdp_session(one.page)
    devtools.send("Performance.enable", {"timeDomain": "threadTicks"})

    def spent() -> dict[str, float]:
        metrics = devtools.send("Performance.getMetrics")["metrics"]
        return {metric["name"]: metric["value"] for metric in metrics}

    before = spent()
    one.page.evaluate(
        """async (frames) => {
          const scroll = document.querySelector('.grid-scroll');
          for (let i = 0; i < frames; i++) {
            scroll.scrollTop += 900;
            await new Promise(requestAnimationFrame);
          }
        }""",
        frames,
    )
    after = spent()
    names = ("TaskDuration", "ScriptDuration", "LayoutDuration", "RecalcStyleDuration")
    return {name: round((after[name] - before[name]) / frames * 1000, 2) for name in names}


def slowdown(row: list[str]) -> float:
    """Return the figure in a row's cell, without its sign."""
    return float(row[8][:-1])


def test_the_way_in(browser: Browser, served: Shown):
    """Without the key there is a form and no data; with a wrong one, a word of it."""
    one = Visit(browser, served)
    one.page.goto(served.url)
    one.page.wait_for_selector("#login[open]")
    assert one.rows() == []
    one.picture("login")
    one.page.fill("#key", "wrong")
    one.page.press("#key", "Enter")
    wait(lambda: "not an admin key" in one.page.inner_text("#login-error"))
    one.forgive("401")
    one.give_key()
    assert KEY not in one.page.url
    assert one.page.evaluate("document.cookie") == "", "scripts cannot read the cookie"
    one.page.reload()
    one.wait_live()
    one.page.click("#logout")
    one.page.wait_for_selector("#login[open]")
    one.close()


def test_programs_are_shown_sorted_and_filtered(visit):
    """The figures are the table's; a heading sorts, the filter and the states narrow."""
    one = visit()
    page = one.page
    wait(lambda: one.cell(0, 0).startswith("research_agent"))
    first = one.rows()[0]
    assert first[1:6] == ["LangGraph", "Active", "2", "9· 1", "9.81 s"]
    assert page.get_attribute(".grid", "aria-rowcount") == "282"
    page.click(".grid-head [data-key=slowdown] button")
    assert page.get_attribute("[data-key=slowdown]", "aria-sort") == "descending"
    wait(lambda: slowdown(one.rows()[0]) > slowdown(one.rows()[5]))
    page.click(".grid-head [data-key=slowdown] button")
    assert page.get_attribute("[data-key=slowdown]", "aria-sort") == "ascending"
    page.click(".grid-head [data-key=name] button")
    wait(lambda: one.cell(0, 0).startswith("browser-task"))
    page.keyboard.press("/")
    page.keyboard.type("langgraph slowdown>1.5")
    wait(lambda: {row[1] for row in one.rows()} == {"LangGraph"})
    wait(lambda: all(slowdown(row) >= 1.5 for row in one.rows()))
    page.keyboard.press("Escape")
    page.click("[data-group=active]")
    wait(lambda: {row[2] for row in one.rows()} == {"Active"})
    page.click("[data-group=all]")
    page.fill("#filter", "nothing is called this")
    page.wait_for_selector(".empty:not([hidden]) >> text=No program matches")
    page.click(".empty button")
    wait(lambda: len(one.rows()) > 5)


def test_the_keyboard_is_enough(visit):
    """Filter, move, open, back; the active row is told to screen readers."""
    one = visit()
    page = one.page
    page.keyboard.press("/")
    page.keyboard.type("research_agent")
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowDown")
    wait(lambda: page.get_attribute(".grid", "aria-activedescendant"))
    row = page.get_attribute(".grid", "aria-activedescendant")
    assert page.get_attribute(f"#{row}", "aria-selected") == "true"
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:has-text('research_agent')")
    page.keyboard.press("Escape")
    page.wait_for_selector(".grid")
    for key, title in (("e", "Engines"), ("q", "Queues and fairness")):
        page.keyboard.press(key)
        page.wait_for_selector(f"h1:has-text('{title}')")
    page.keyboard.press("?")
    page.wait_for_selector("#keys[open]")
    page.keyboard.press("Escape")
    page.keyboard.press("p")
    page.wait_for_selector(".grid")


def test_a_key_finds_the_page_that_the_key_before_it_opened(visit):
    """However fast they come: here all in one turn of the browser's loop."""
    page = visit().page
    page.evaluate(
        """() => { for (const key of ["e", "q", "/"]) document.body.dispatchEvent(
            new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true })) }"""
    )
    page.keyboard.type("research_agent")
    assert page.input_value("#filter") == "research_agent"
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowDown")
    opened = page.evaluate(
        """() => { document.activeElement.dispatchEvent(new KeyboardEvent(
            "keydown", { key: "Enter", bubbles: true, cancelable: true }));
            return document.querySelector(".back") !== null }"""
    )
    assert opened
    page.wait_for_selector("h1:has-text('research_agent')")


def test_a_program_has_its_graph_timeline_and_calls(visit, served: Shown):
    """Forks and joins are edges; each phase is a bar; a failed call says why."""
    one = visit()
    page = one.go(f"#/program/{served.story}")
    page.wait_for_selector(".dag .node")
    assert page.locator(".dag .node").count() == 9
    assert page.locator(".edge.fork").count() == 3
    assert page.locator(".edge.join").count() >= 2
    for phase in ("queued", "running", "preempted", "swapped"):
        assert page.locator(f".timeline svg .p-{phase}").count() > 0, phase
    assert page.locator(".timeline svg .p-tool").count() >= 4
    texts = page.locator("table.calls tbody tr").all_inner_texts()
    assert len(texts) == 9
    assert any("engine_died" in text for text in texts)
    assert "9 calls in 4 threads" in (page.get_attribute(".dag", "aria-label") or "")
    page.click(".dag .node >> nth=0")
    assert page.locator("tr.picked").count() == 1
    width = page.evaluate("document.querySelector('.timeline svg').clientWidth")
    page.click("[aria-label='Zoom in']")
    assert page.evaluate("document.querySelector('.timeline svg').clientWidth") > 1.8 * width
    page.hover(".timeline .p-swapped >> nth=0")
    assert "host memory" in page.inner_text("#tooltip")
    one.go("#/program/nobody")
    page.wait_for_selector("text=No such program")
    one.forgive("404")


def test_engines_queues_and_fairness(visit):
    """Load, cache, hits, steps and heartbeat; queues over time; how evenly programs wait."""
    one = visit()
    page = one.go("#/engines")
    page.wait_for_selector(".engine")
    assert page.locator(".engine").count() == 2
    card = page.inner_text(".engine >> nth=0")
    for words in ("e0", "Ready", "heartbeat", "KV cache", "41 %", "71 %", "Steps a second", "plas"):
        assert words in card
    assert page.get_attribute("[role=meter] >> nth=1", "aria-valuenow") == "41"
    one.go("#/load")
    page.wait_for_selector(".time-chart .area")
    assert page.locator(".spread li").count() == 7
    assert page.locator(".classes li").count() == 4
    assert 0 < float(page.inner_text(".jain-value")) <= 1
    box = page.locator(".time-chart").first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
    wait(lambda: "s ago" in page.inner_text(".chart-readout >> nth=0"))


def test_ten_thousand_rows(browser: Browser):
    """All of them scroll, sort and filter; only those in sight exist; it stays quick."""
    scene = Scene()
    scene.fill(10_000, calls_max=1)
    with shown(scene, clock_runs=True) as served:
        one = Visit(browser, served)
        page = one.sign_in()
        assert page.get_attribute(".grid", "aria-rowcount") == "10001"
        assert page.locator(".grid-canvas > .grid-row").count() < 60
        page.evaluate("document.querySelector('.grid-scroll').scrollTop = 1e9")
        wait(lambda: page.locator("[aria-rowindex='10001']").count() == 1)
        page.click(".grid-head [data-key=service_s] button")
        page.evaluate("document.querySelector('.grid-scroll').scrollTop = 0")
        wait(lambda: all(re.fullmatch(r"[\d.]+ s", row[5]) for row in one.rows()[:5]))
        page.fill("#filter", "sql 0777")
        wait(lambda: {"sql-analyst" in row[0] for row in one.rows()} == {True})
        page.fill("#filter", "")
        report = Path(__file__).parents[3] / "out" / "dashboard-frames.json"
        report.parent.mkdir(exist_ok=True)
        report.write_text(json.dumps(frame_cost(one)) + "\n")
        one.close()


def test_changes_appear_by_themselves(browser: Browser):
    """A new program, its calls, its end; the order follows."""
    scene = Scene()
    scene.fill(40)
    with shown(scene, clock_runs=True) as served:
        one = Visit(browser, served)
        one.sign_in()
        served.do(lambda: scene.program("fresh", "fresh program", "LangGraph"))
        call = served.do(lambda: scene.begin("fresh"))
        wait(lambda: any(row[0].startswith("fresh program") and row[2] == "Active"
                         for row in one.rows()))  # fmt: skip
        served.do(lambda: scene.end(*call, [(0.0, "run", 1, "fresh")]))
        wait(lambda: any(row[0].startswith("fresh") and row[2] == "Tool wait"
                         for row in one.rows()))  # fmt: skip
        one.go("#/program/fresh")
        one.page.wait_for_selector(".dag .node")
        call = served.do(lambda: scene.begin("fresh", node="second"))
        wait(lambda: one.page.locator(".dag .node").count() == 2)
        served.do(lambda: scene.end(*call, [(0.0, "run", 1, "fresh")]))
        program = scene.table.get(call[0].program.program_id)
        assert program is not None
        served.do(lambda: scene.table.end_program(program, "ok", scene.now_s))
        wait(lambda: one.page.inner_text(".pill >> nth=0") == "Ended")
        one.close()


def test_it_comes_back_after_a_restart(browser: Browser, tmp_path: Path):
    """It says that the server is away and keeps what it had; then it says that it was restarted."""
    scene = Scene(state=str(tmp_path / "journal"))
    scene.fill(30)
    with shown(scene) as served:
        port = int(re.findall(r":(\d+)/", served.url)[0])
        one = Visit(browser, served)
        page = one.sign_in()
    page.wait_for_selector("#link[data-state=retrying]")
    assert "does not answer" in page.inner_text("#banner")
    assert len(one.rows()) > 5, "what was known stays in sight"
    one.picture("reconnecting")
    again = Scene(state=str(tmp_path / "journal"))
    again.fill(3)
    with shown(again, port=port):
        one.wait_live()
        wait(lambda: len(one.rows()) == 3)
        assert "started again" in page.inner_text("#banner")
        one.close("ERR_")
    # without a journal the cookies of the time before are not known: the key is asked for
    third = Scene()
    with shown(third, port=port) as served:
        one = Visit(browser, served)
        page = one.sign_in()
    with shown(Scene(), port=port):
        page.wait_for_selector("#login[open]")
        one.give_key()
        one.close("ERR_", "401")


def test_hostile_names_stay_text(browser: Browser):
    """Whatever a program calls itself, its nodes or its session is never markup."""
    scene = Scene()
    program = scene.program("hostile", HOSTILE, HOSTILE)
    program.conversation = HOSTILE
    call = scene.begin("hostile", node=HOSTILE)
    scene.advance(0.5)
    scene.end(*call, [(0.1, "run", 1, HOSTILE)])
    scene.begin("hostile", node="javascript:alert(1)", engine="e0", why=HOSTILE)
    program.note_tool("t", HOSTILE, begins=True)
    with shown(scene) as served:
        one = Visit(browser, served)
        page = one.sign_in()
        wait(lambda: HOSTILE in one.cell(0, 0))
        one.go(f"#/program/{program.program_id}")
        page.wait_for_selector(".dag .node")
        assert page.inner_text("h1") == HOSTILE
        page.hover(".dag .node >> nth=0")
        assert "<img" in page.inner_text("#tooltip")
        one.go("#/program/" + HOSTILE.replace("<", "%3C"))
        page.wait_for_selector("text=No such program")
        for place in PAGES.values():
            one.go(place)
            page.wait_for_selector("h1")
        assert page.evaluate("window.hacked") is None
        assert page.locator("img[src=x]").count() == 0
        one.close("404")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pictures_and_contrast(browser: Browser, theme: str):
    """Every view in both themes; each text stands out from what is behind it."""
    with with_story() as served:  # a fresh one, whose past is the same each time
        size = {"width": 1280, "height": 860}
        one = Visit(browser, served, color_scheme=theme, viewport=size)
        page = one.sign_in()
        for name, place in {**PAGES, "program": f"#/program/{served.story}"}.items():
            one.go(place)
            page.wait_for_selector({"program": ".dag", "queues": ".area"}.get(name, ".page"))
            page.wait_for_timeout(150)  # a frame or two: bars reach their length
            poor = page.evaluate(CONTRAST)
            assert poor == [], f"{name}, {theme}"
            one.picture(name if theme == "light" else f"{name}-dark")
        one.close()


def test_a_phone_shows_everything_without_scrolling_sideways(visit, served: Shown):
    """At 360 pixels; a tap opens a program."""
    one = visit(**PHONE)
    page = one.page
    places = {**PAGES, "program": f"#/program/{served.story}"}
    for name, place in places.items():
        one.go(place)
        page.wait_for_selector({"program": ".dag", "queues": ".area"}.get(name, ".page"))
        page.wait_for_timeout(150)
        wide = page.evaluate(
            "() => [document.body, document.querySelector('main')]"
            ".map(e => e.scrollWidth - e.clientWidth)"
        )
        assert wide == [0, 0], name
        if name in ("programs", "program"):
            one.picture(f"{name}-phone")
    one.go("#/")
    page.select_option(".sorter select", "wait_s down")
    assert page.get_attribute("[data-key=wait_s]", "aria-sort") == "descending"
    page.locator(".grid-canvas > .grid-row").first.tap()
    page.wait_for_selector(".page.program")


def test_wide_letters_move_no_page_sideways(visit):
    """Whatever fonts a system has: here everything is spaced by two more pixels a letter."""
    one = visit(**PHONE)
    page = one.page
    page.evaluate(
        "document.querySelectorAll('header *').forEach(e => { e.style.letterSpacing = '2px'; })"
    )
    for place in PAGES.values():
        one.go(place)
        page.wait_for_selector(".page")
        assert page.evaluate("document.body.scrollWidth - document.body.clientWidth") == 0, place
        end = page.locator("#logout").bounding_box()
        assert end is not None
        assert end["x"] + end["width"] <= 360


def test_the_theme_can_be_chosen_and_is_kept(visit):
    """As the system, light, dark; over a reload."""
    one = visit()
    page = one.page
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    page.click("#theme")
    assert page.get_attribute("#theme", "aria-label") == "Theme: dark"
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert dark != light
    page.reload()
    one.wait_live()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == dark


def test_roles_and_names(visit, served: Shown):
    """What a screen reader needs: every control has a name, every page its landmarks."""
    one = visit()
    page = one.page
    for place in (*PAGES.values(), f"#/program/{served.story}"):
        one.go(place)
        page.wait_for_selector("h1")
        page.wait_for_timeout(100)
        assert page.evaluate(NAMELESS) == [], place
        assert page.locator("main h1").count() == 1
        assert page.locator(".tabs [aria-current=page]").count() == 1
        assert page.locator("[role=status]").count() >= 1
        assert page.evaluate(
            "() => { const ids = [...document.querySelectorAll('[id]')].map(e => e.id);"
            " return ids.length - new Set(ids).size; }"
        ) == 0  # fmt: skip
    one.go("#/")
    page.wait_for_selector(".grid [role=gridcell]")
    assert page.evaluate(
        "() => [...document.querySelectorAll('[role=row]')].every(row => row.closest('[role=grid]')"
        " && [...row.children].every(c => ['gridcell', 'columnheader'].includes(c.role)))"
    )
    assert page.get_attribute("#filter", "aria-label") == "Filter"


# Texts whose contrast to the nearest opaque background is below what WCAG AA asks for.
CONTRAST = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => {
    const part = (v) => v <= 10 ? v / 3294.6 : ((v / 255 + 0.055) / 1.055) ** 2.4;
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const color = rgba(getComputedStyle(e).backgroundColor);
      if (color[3] === 255) return color;
    }
    return [255, 255, 255, 255];
  };
  const poor = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility()) continue;
    if (element.closest('.visually-hidden, .skip, dialog, [hidden]')) continue;
    const style = getComputedStyle(element);
    const isSvg = element instanceof SVGElement;
    const ink = light(rgba(isSvg ? style.fill : style.color));
    let ground = behind(element);
    const box = isSvg && element.closest('.node');
    if (box) ground = rgba(getComputedStyle(box.firstChild).fill);
    const paper = light(ground);
    const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    if (ratio < 4.5) poor.push(`${element.className?.baseVal ?? element.className}: `
      + `${walker.currentNode.data.trim().slice(0, 20)} ${ratio.toFixed(2)}`);
  }
  return [...new Set(poor)];
}"""

# Controls without a name, and pictures without a text.
NAMELESS = """() => [...document.querySelectorAll(
    'button, a, input, select, img, dialog, [role=grid], [role=meter], [role=group], [role=img]')]
  .filter(e => !e.closest('[aria-hidden=true]') && e.getAttribute('aria-hidden') !== 'true')
  .filter(e => !(e.getAttribute('aria-label') || e.getAttribute('aria-labelledby')
    || e.textContent.trim() || e.labels?.length || e.hasAttribute('alt')))
  .map(e => e.outerHTML.slice(0, 80))"""
