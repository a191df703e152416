"""In a browser, a person sees first what is wrong, then its curves, the map and the ranks; and can search and zoom."""

import asyncio

import pytest
from browser import needs_chromium, opened
from recorded_runs import CULPRIT, make_run
from served import served

from trainsentry.exporters.files.json_files import replace_json

pytestmark = needs_chromium

NAME = "layers.<b>&amp;.weight"
READ = "![...document.querySelectorAll('.note')].some((n) => n.textContent.includes('reading'))"
DRAWN = "document.body?.dataset.drawn === 'yes'"
COLOURED = """(selector) => { const c = document.querySelector(selector), d = c.getContext("2d");
  const p = d.getImageData(0, 0, c.width, c.height).data, seen = new Set();
  for (let i = 0; i < p.length; i += 4) if (p[i + 3]) seen.add((p[i] << 16) | (p[i + 1] << 8) | p[i + 2]);
  return seen.size; }"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A run with an incident, and one that is well, whose one layer has a name that looks like markup."""
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "well", incident=False, name=NAME, ranks=1)
    make_run(folder / "broken", ranks=3)
    names = ["", *(name for i in range(6) for name in (f"layers.{i}", f"layers.{i}.mlp"))]
    modules = [{"name": name, "type": "Linear" if name else "Gpt"} for name in names]
    replace_json(folder / "broken" / "rank0" / "graph.json", {"modules": modules})
    with served(folder) as server:
        yield server


def look(server, run, check, *, width=1400, dark=False):
    """Open a run's page, wait until it is drawn, and check it; the page has no error and asks its own server alone."""

    async def looking():
        address = f'{server.address}#{{"run":"{run}"}}'
        async with opened(address, width=width, dark=dark) as page:
            await page.wait_for(DRAWN)
            await page.wait_for(READ)
            await check(page)
            assert page.problems == []
            assert all(url.startswith((server.address, "data:")) for url in page.requests)
            assert await page.ask("document.documentElement.scrollWidth <= window.innerWidth")

    asyncio.run(looking())


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (400, True)])
def test_the_first_screen_says_what_is_wrong_and_the_figures_are_drawn(server, width, dark):
    async def check(page):
        bottom = await page.ask("document.querySelector('.culprit').getBoundingClientRect().bottom")
        assert 0 < bottom < 900
        assert CULPRIT in await page.ask("document.querySelector('.culprit').textContent")
        texts = await page.ask("document.body.innerText")
        for text in ("finished", "step 39", "worst", "loss, rank 0", f"{CULPRIT}, gradient, rank 0", "1.0 %"):
            assert text in texts
        label = "[...document.querySelectorAll('.map-svg .suspect')].find((t) => t.checkVisibility() && t.textContent)"
        assert await page.ask(f"{label}.textContent") == f"{CULPRIT} #1"
        assert await page.ask(f"{label}.getBoundingClientRect().left") >= 0
        marks = "[...document.querySelectorAll('#maps .map-svg text.mark')].map((t) => t.textContent)"
        assert await page.ask(marks) == ["#1 step 30"]
        assert await page.ask(f"({COLOURED})('.curve canvas')") > 5
        assert await page.ask("document.querySelectorAll('#rank-rows tr').length") == 3
        titles = "[...document.querySelectorAll('#rank-maps .map:not([hidden]) b')].map((t) => t.textContent)"
        assert await page.ask(titles) == ["loss", f"{CULPRIT}, gradient, norm"]
        ink = await page.ask("getComputedStyle(document.body).backgroundColor")
        assert (ink == "rgb(22, 22, 26)") == dark

    look(server, "broken", check, width=width, dark=dark)


def test_a_series_is_searched_for_chosen_and_zoomed_into(server):
    async def check(page):
        await page.ask("(() => { const s = document.querySelector('#search'); s.value = 'grad 5'; "
                       "s.dispatchEvent(new Event('input')); })()")  # fmt: skip
        await page.wait_for("document.querySelectorAll('#matches .choice').length === 1")
        await page.ask("document.querySelector('#matches .choice').click()")
        await page.wait_for("document.querySelectorAll('.curve').length === 3")
        await page.wait_for("document.querySelector('.curve .note').textContent.startsWith('6 at step 39')")
        box = await page.ask("(() => { const b = document.querySelector('.curve canvas').getBoundingClientRect(); "
                             "return [b.left, b.top, b.width]; })()")  # fmt: skip
        left, top, wide = box
        for kind, share in (("mousePressed", 0.5), ("mouseMoved", 0.6), ("mouseReleased", 0.75)):
            mouse = {"x": left + wide * share, "y": top + 60, "button": "left", "clickCount": 1}
            await page.call("Input.dispatchMouseEvent", type=kind, **mouse)
        await page.wait_for("Number(document.querySelector('#first').value) > 10")
        await page.wait_for("document.querySelector('.map').found.first > 10")
        await page.wait_for("document.querySelector('#maps .map-svg').shown[0] === view.first")
        first, last = await page.ask("[view.first, view.last]")
        assert 10 < first < last < 39

    look(server, "broken", check)


def test_a_cell_of_a_map_is_read_and_a_row_leads_to_its_curve(server):
    async def check(page):
        await page.ask("document.querySelector('#maps .map-svg').scrollIntoView({block: 'center'})")
        left, top, wide, first = await page.ask(
            "(() => { const m = document.querySelector('#maps .map-svg'), b = m.getBoundingClientRect(); "
            "return [b.left, b.top + Number(m.dataset.top), b.width, m.rows[0][1]]; })()"
        )
        place = {"x": left + wide * 30.5 / 40, "y": top + first * 3 + 5, "button": "left", "clickCount": 1}
        await page.call("Input.dispatchMouseEvent", type="mouseMoved", **place)
        await page.wait_for("document.querySelector('#maps .read').textContent.includes('step 30: +40.0 or more')")
        assert CULPRIT in await page.ask("document.querySelector('#maps .read').textContent")
        await page.ask("document.querySelector('.curve:nth-child(2) button').click()")
        await page.wait_for("document.querySelectorAll('.curve').length === 1")
        await page.ask("document.querySelector('#maps .map-svg').scrollIntoView({block: 'center'})")
        top = await page.ask("(() => { const m = document.querySelector('#maps .map-svg'); "
                             "return m.getBoundingClientRect().top + Number(m.dataset.top); })()")  # fmt: skip
        for kind in ("mousePressed", "mouseReleased"):
            await page.call("Input.dispatchMouseEvent", type=kind, **(place | {"y": top + first * 3 + 5}))
        await page.wait_for(f"document.querySelector('.curve b').textContent.startsWith('{CULPRIT}')")

    look(server, "broken", check)


def test_the_tree_of_modules_leads_to_the_culprit_and_is_searched(server):
    async def check(page):
        await page.wait_for("!document.querySelector('#modules-part').hidden")
        own = await page.ask("[...document.querySelectorAll('#modules li.m2')].at(-1).innerText")
        assert own.startswith("mlp")
        assert "suspect of incident 1" in own
        opened_ones = await page.ask(
            "[...document.querySelectorAll('#modules details[open]')].map((d) => d.dataset.name)"
        )
        assert opened_ones == ["", "layers", "layers.3"]
        mark = "getComputedStyle([...document.querySelectorAll('#modules i.m2')].at(-1)).backgroundColor"
        assert await page.ask(mark) == "rgb(179, 20, 27)"
        await page.ask("(() => { const f = document.querySelector('#find-module'); f.value = 'layers.5'; "
                       "f.dispatchEvent(new Event('input')); })()")  # fmt: skip
        assert await page.ask("document.querySelector('#modules-found').textContent") == "2 found"
        seen = "[...document.querySelectorAll('#modules li')].filter((li) => li.offsetParent).length"
        assert await page.ask(seen) == 4  # the model, layers, and the two that match
        await page.ask("document.querySelector('#find-module').value = ''; findModules()")
        await page.ask("view.chosen = []; drawCurves().then(() => 0)")
        await page.ask("document.querySelector('#modules button.link').click()")
        await page.wait_for(f"document.querySelector('.curve b')?.textContent.startsWith('{CULPRIT}')")

    look(server, "broken", check)


def test_a_run_without_modules_has_no_tree(server):
    async def check(page):
        assert await page.ask("document.querySelector('#modules-part').hidden")

    look(server, "well", check)


def test_names_are_shown_as_they_are_and_become_no_markup(server):
    async def check(page):
        assert await page.ask("document.querySelector('#verdict h1').textContent") == "No incident."
        await page.ask("document.querySelector('#search').dispatchEvent(new Event('input'))")
        await page.wait_for("document.querySelectorAll('#matches .choice').length > 1")
        assert await page.ask(f"[...document.querySelectorAll('#matches')][0].textContent.includes('{NAME}')")
        assert await page.ask("document.querySelector('#matches b')") is None

    look(server, "well", check)


def test_the_person_changes_to_another_run(server):
    async def check(page):
        await page.ask("(() => { const r = document.querySelector('#run'); r.value = 'well'; "
                       "r.dispatchEvent(new Event('change')); })()")  # fmt: skip
        await page.wait_for("document.querySelector('#verdict h1').textContent === 'No incident.'")
        await page.wait_for("document.querySelectorAll('.curve').length === 1")
        await page.wait_for("document.querySelector('#rank-map-part').hidden")

    look(server, "broken", check)


def test_a_folder_without_a_run_says_so_in_one_line_until_there_is_one(tmp_path):
    async def looking(server):
        async with opened(server.address) as page:
            await page.wait_for("document.querySelector('#trouble')?.textContent.includes('no run yet')")
            make_run(tmp_path / "run")
            await page.wait_for(f"document.querySelector('#verdict').textContent.includes('{CULPRIT}')")
            assert await page.ask("document.querySelector('#trouble').hidden")

    with served(tmp_path) as server:
        asyncio.run(looking(server))
