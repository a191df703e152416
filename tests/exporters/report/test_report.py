"""The report shows the suspect first, escapes everything, requests nothing, stays small and draws without an error."""

import asyncio
import json
import re
import subprocess

import numpy as np
import pytest
from bokeh.models import ColumnDataSource
from browser import CHROMIUM, needs_chromium, opened
from PIL import Image
from recorded_runs import CULPRIT, make_run
from step_records import Records
from written_files import fail

from trainsentry.anomaly.incident import Incident, Suspect
from trainsentry.collectors.statistics import STATISTICS
from trainsentry.exporters.csv.writer import CsvWriter
from trainsentry.exporters.files.foreign_files import InputError
from trainsentry.exporters.files.json_files import append_lines, replace_json
from trainsentry.exporters.maps.colours import palette
from trainsentry.exporters.maps.layers_map import NEUTRAL
from trainsentry.exporters.report.data import gather
from trainsentry.exporters.report.page import MAX_BYTES, write_report
from trainsentry.exporters.report.sections import dump_of, figures_of

FAULTS = ((400, "h.1.attn.weight", "gradient"), (1100, "h.4.mlp.weight", "parameter"))
"""Two faults 700 steps apart: step, name and quantity."""


def test_the_verdict_comes_first_and_the_page_asks_for_nothing(tmp_path):
    page = write_report(make_run(tmp_path), report=fail).read_text()
    body = page[page.index("<body>") :]
    assert body.index("First suspect: " + CULPRIT) < body.index("Evidence")
    assert "default-src 'none'" in page
    outside = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)  # Bokeh's own code has addresses it never asks
    assert not re.search(r"""(?:src|href)=["'](?:https?:)?//""", outside)
    assert len(page.encode()) < MAX_BYTES


def test_curves_stand_beside_siblings_and_other_ranks(tmp_path):
    data = gather(make_run(tmp_path), fail)
    assert data.siblings(0, "gradient", CULPRIT)[:2] == ["layers.2.mlp.weight", "layers.4.mlp.weight"]
    steps, values = data.curve(0, "gradient", CULPRIT)
    assert values[steps.index(29)] == pytest.approx(1.0)  # norm 4 of 16 elements
    assert values[steps.index(30)] == pytest.approx(125.0)
    assert values[steps.index(31)] == float("inf")  # not finite
    assert data.curve(1, "gradient", CULPRIT)[1][30] == pytest.approx(1.0)


def test_the_picture_of_layers_stands_in_numbers_too_those_that_differ_most_first(tmp_path):
    page = write_report(make_run(tmp_path)).read_text()
    table = page[page.index("Table of the layers furthest") :]
    first = re.search(r"<tbody><tr>(.*?)</tr>", table, re.DOTALL)[1]
    assert re.findall(r">([^<]+)</td>", first) == [CULPRIT, "1", "125", "not finite", "31"]


def test_the_timeline_begins_where_the_trouble_did_however_much_follows(tmp_path):
    root = make_run(tmp_path)
    line = {"name": "noise", "quantity": "gradient", "score": 5.0, "rank": 0, "order": 1}
    with (root / "rank0" / "anomalies.jsonl").open("a") as file:
        for step in [2, *range(31, 20000)]:
            file.write(json.dumps({**line, "step": step}) + "\n")
    page = write_report(root).read_text()
    steps = re.findall(r'<tr><td class="n">(\d+)</td><td>(?:noise|layers)', page)
    assert steps[0] in {"30", "31"}
    assert re.search(r"; \d{5} more in anomalies.jsonl", page)


def test_a_run_without_an_incident_says_so(tmp_path):
    page = write_report(make_run(tmp_path, incident=False)).read_text()
    assert "Nothing abnormal was found." in page


def test_a_page_of_very_many_layers_and_steps_stays_small(tmp_path):
    page = write_report(make_run(tmp_path, steps=700, layers=900, ranks=1))
    assert page.stat().st_size < MAX_BYTES


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", "</script><img src=x onerror=alert(1)>", "=cmd()|' /C calc'!A0"]
)
def test_names_cannot_get_out_of_their_place(tmp_path, name):
    page = write_report(make_run(tmp_path, name=name)).read_text()
    assert name not in page or name.startswith("=")
    assert "<script>alert" not in page
    assert "<img src=x" not in page


def test_names_are_no_part_of_a_tooltips_template(tmp_path):
    page = write_report(make_run(tmp_path, name="layers.@3.<b>")).read_text()
    assert '["","@name"]' in page.replace(" ", "")
    assert '["","layers.@3' not in page.replace(" ", "")


def test_files_that_are_missing_or_half_written_cost_their_own_part_only(tmp_path):
    root = make_run(tmp_path)
    (root / "run.json").unlink()
    (root / "rank1" / "status.json").write_text('{"state": "runn')
    table = root / "rank0" / "gradient_0-999.csv"
    table.write_text(table.read_text()[:-20])
    with (root / "incidents.jsonl").open("a") as file:
        file.write('{"id": 2, "sum')
    problems = []
    page = write_report(root, report=lambda *problem: problems.append(problem)).read_text()
    assert CULPRIT in page
    assert {p[0] for p in problems} == {table, root / "incidents.jsonl", root / "rank1" / "status.json"}


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(InputError):
        write_report(tmp_path)


WHERE_IT_STANDS = """<script>addEventListener("load", () => {
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), range = document.createRange();
  while (texts.nextNode() && !texts.currentNode.data.includes("CULPRIT"));
  range.selectNodeContents(texts.currentNode);
  document.body.dataset.bottom = Math.ceil(range.getBoundingClientRect().bottom);
});</script></body>"""


@needs_chromium
@pytest.mark.parametrize("width", [1200, 390])
def test_a_browser_draws_it_without_an_error_with_the_suspect_on_the_first_screen(tmp_path, width):
    path = write_report(make_run(tmp_path / "run"))
    page = re.sub(r"<meta http-equiv=.Content-Security-Policy.[^>]*>", "", path.read_text())
    path.write_text(page.replace("</body>", WHERE_IT_STANDS.replace("CULPRIT", CULPRIT)))
    picture = tmp_path / "page.png"
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom",
        "--virtual-time-budget=8000", f"--window-size={width},900", f"--screenshot={picture}", path.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line and "ERROR" in line.upper()]
    assert console == []
    assert picture.stat().st_size > 20_000
    assert 0 < int(re.search(r'data-bottom="(-?\d+)"', done.stdout)[1]) < 900
    assert done.stdout.count("bk-Figure") >= 3 or "bk-" in done.stdout  # figures were put into the page


def test_the_report_is_written_when_a_run_ends_with_an_incident(tmp_path, monkeypatch):
    from dataclasses import replace
    from types import SimpleNamespace

    from trainsentry.collectors.series import SeriesTable
    from trainsentry.exporters.exporter import ExportPlace
    from trainsentry.exporters.report import exporter

    started = []
    fake = SimpleNamespace(DEVNULL=None, Popen=lambda command, **_: started.append(command))
    monkeypatch.setattr(exporter, "subprocess", fake)
    monkeypatch.delenv(exporter.SWITCH, raising=False)
    root = make_run(tmp_path)
    place = ExportPlace(root, root / "rank0", 0, SeriesTable(), ())
    exporter.report_of(None, place)(1)
    exporter.report_of(None, place)(0)
    exporter.report_of(None, replace(place, beside=True))(1)
    assert len(started) == 1
    subprocess.run(started[0], check=True)
    assert json.loads((root / "incidents.jsonl").read_text())["name"] in (root / "report.html").read_text()


def two_faults(root, *, steps=1500):
    """Write the files of a run whose gradient and whose weight each jump once, 700 steps apart."""
    rng = np.random.default_rng(0)
    records = Records()
    writer = CsvWriter(root / "rank0", records.table, STATISTICS)
    names = [f"h.{i}.{part}.weight" for i in range(6) for part in ("attn", "mlp")]
    for n in range(steps):
        sizes = {(name, "gradient"): 0.1 * np.exp(rng.normal(0, 0.2)) for name in names}
        sizes |= {(name, "parameter"): 3.0 + n / 1000 for name in names}
        if n == FAULTS[0][0]:
            sizes[FAULTS[0][1:]] = 20.0
        if n == FAULTS[1][0]:
            sizes[FAULTS[1][1:]] *= 1024
        writer.write(records.step(n, sizes | {("loss", "loss"): 3.0 + rng.normal(0, 0.1)}))
    writer.close()
    replace_json(root / "rank0" / "status.json", {"state": "closed", "rank": 0, "step": steps - 1})
    lines, seen = [], []
    for number, (step, name, quantity) in enumerate(FAULTS, 1):
        score = 50.0 + number
        who = {"step": step, "rank": 0, "name": name, "quantity": quantity, "statistic": "max", "kind": "spike"}
        suspect = Suspect(**who, score=score, module="", evidence=f"the largest magnitude of {name} jumped")
        line = Incident(
            number, step, 0, name, quantity, "max", "spike", "warning", score, f"{name} jumped", (suspect,),
            (f"dump: dump/step{step}/rank0 (4 tensors)",), step, step,
        )  # fmt: skip
        lines.append(line.to_json())
        seen.append({**who, "score": score, "value": 10.0, "expected": 0.1})
    append_lines(root / "incidents.jsonl", lines)
    append_lines(root / "rank0" / "anomalies.jsonl", seen)
    (root / "dump" / "step400" / "rank0").mkdir(parents=True)
    return root


def test_every_suspect_has_its_curve_in_the_statistic_of_its_sentence(tmp_path):
    data = gather(two_faults(tmp_path), fail)
    figures = {shown.title: shown for shown in figures_of(data) if shown.part == "Suspects"}
    assert len(figures) == 2
    for number, (step, name, quantity) in enumerate(FAULTS, 1):
        shown = figures[f"{name}: {quantity}, rank 0"]
        assert shown.columns[1] == "largest magnitude"
        assert shown.incidents == (number,)
        steps, values = data.curves[0, quantity, "max"][name]
        norm = 20.0 if quantity == "gradient" else 1024 * (3.0 + step / 1000)
        assert values[steps.index(step)] == pytest.approx(
            norm / 2
        )  # of the test's tensors the largest is half the norm


def test_an_incident_leads_to_its_curve_and_dump_and_every_link_of_the_page_arrives(tmp_path):
    page = write_report(two_faults(tmp_path)).read_text()
    addresses = set(re.findall(r' id="([^"]+)"', page))
    links = set(re.findall(r'href="#([^"]+)"', page))
    assert links >= {"incident-1", "incident-2", "curve-1", "curve-2", "timeline", "ranks", "configuration"}
    assert links <= addresses
    assert 'href="dump/step400/rank0/"' in page
    assert "dump/step1100/rank0/" not in page  # that folder is not there


def test_the_timeline_begins_with_the_first_incident_though_the_second_is_worse(tmp_path):
    data = gather(two_faults(tmp_path), fail)
    assert data.run.incidents[0]["first_seen"] == FAULTS[1][0]
    assert data.anomalies[0]["step"] == FAULTS[0][0]
    figure = next(shown.figure for shown in figures_of(data) if shown.anchor == "timeline")
    assert figure.select({"type": ColumnDataSource})[0].data["x"] == [FAULTS[0][0], FAULTS[1][0]]


def test_all_figures_share_their_axis_of_steps(tmp_path):
    figures = [shown.figure for shown in figures_of(gather(two_faults(tmp_path), fail))]
    assert len({figure.x_range.id for figure in figures if not isinstance(figure, str)}) == 1


def test_a_dump_of_a_foreign_file_leads_nowhere_else(tmp_path):
    assert dump_of({"actions": ["dump: dump/../../etc (1 tensor)"]}, tmp_path) is None


def shoot(page, target, width, height, *options):
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=8000",
        f"--window-size={width},{height}", f"--screenshot={target}", *options, page.as_uri(),
    ]  # fmt: skip
    subprocess.run(command, capture_output=True, check=True, timeout=120)
    return np.asarray(Image.open(target).convert("RGB"), int)


@needs_chromium
@pytest.mark.parametrize("options", [(), ("--blink-settings=preferredColorScheme=0",)], ids=["light", "dark"])
def test_both_faults_are_seen_in_the_first_map_of_the_page(tmp_path, options):
    """The first two spots that are far from usual, from the left, stand 700 steps apart and in their modules' rows."""
    image = shoot(write_report(two_faults(tmp_path)), tmp_path / "page.png", 1400, 1600, *options)
    assert (image[5, 5].mean() < 60) == bool(options)
    far = palette(dark=bool(options))[2 * NEUTRAL].astype(int)
    deep = np.abs(image - far).max(axis=2) < 20
    bar = np.flatnonzero(deep.any(axis=1))[-1]
    deep[bar - 15 :] = False  # the colour bar below the map ends in the same colour
    columns = np.flatnonzero(deep.any(axis=0))
    first, second = np.split(columns, np.flatnonzero(np.diff(columns) > 1) + 1)  # two spots, and no third
    upper, lower = (np.flatnonzero(deep[:, spot].any(axis=1)) for spot in (first, second))
    assert upper.max() < lower.min()  # h.1 stands above h.4
    assert min(len(upper), len(lower)) >= 12  # of 15, whose edges the browser blends
    assert min(len(first), len(second)) >= 4
    assert second.min() - first.max() > 300


@needs_chromium
@pytest.mark.parametrize(("width", "dark"), [(1400, False), (400, True)])
def test_a_person_sees_the_culprit_first_zooms_all_figures_at_once_and_follows_an_incident(tmp_path, width, dark):
    page = write_report(two_faults(tmp_path))

    async def looking():
        async with opened(page.as_uri(), width=width, dark=dark) as shown:
            await shown.wait_for("document.querySelectorAll('.bk-Figure').length >= 4")
            assert 0 < await shown.ask("document.querySelector('.first').getBoundingClientRect().bottom") < 900
            labels = "[...document.querySelector('.map-svg').querySelectorAll('text.suspect')]"
            names = await shown.ask(f"{labels}.filter((t) => t.checkVisibility()).map((t) => t.textContent)")
            assert names == ["h.1.attn #1", "h.4.mlp #2"]
            await shown.ask("document.querySelector('.map-svg').scrollIntoView({block: 'center'})")
            left, top, wide = await shown.ask(
                "(() => { const b = document.querySelector('.map-svg').getBoundingClientRect(); "
                "return [b.left, b.top + b.height / 3, b.width]; })()"
            )
            for kind, share in (("mousePressed", 0.25), ("mouseMoved", 0.3), ("mouseReleased", 0.35)):
                mouse = {"x": left + wide * share, "y": top, "button": "left", "clickCount": 1}
                await shown.call("Input.dispatchMouseEvent", type=kind, **mouse)
            await shown.wait_for("document.querySelector('.map-svg').shown[0] > 200")
            range_of = "Bokeh.documents[0].roots().at(-1).x_range"
            first, last = await shown.ask(f"[{range_of}.start, {range_of}.end]")
            assert 200 < first < FAULTS[0][0] < last < 700
            assert await shown.ask("[...document.querySelectorAll('.map-svg')].every((m) => m.shown[0] > 200)")
            visible = "[...document.querySelector('.map-svg').querySelectorAll('text.mark')]"
            visible += ".filter((t) => t.getAttribute('visibility') === 'visible').map((t) => t.textContent)"
            assert await shown.ask(visible) == [f"#1 step {FAULTS[0][0]}"]
            await shown.ask("document.querySelector('#incident-1 ~ p a[href^=\"#curve\"]').click()")
            await shown.wait_for("location.hash.startsWith('#curve') && document.querySelector(':target') !== null")
            assert await shown.ask("document.documentElement.scrollWidth <= window.innerWidth")
            assert shown.problems == []
            assert {url.partition(":")[0] for url in shown.requests} <= {"file", "data", "blob"}

    asyncio.run(looking())


def test_several_ranks_stand_beside_each_other_and_one_alone_has_no_such_map(tmp_path):
    several = {shown.anchor: shown for shown in figures_of(gather(make_run(tmp_path / "two", ranks=3), fail))}
    assert {"ranks-loss", "ranks-deviation"} <= several.keys()
    assert "rank 0 #1" in several["ranks-deviation"].figure
    assert not [f for f in figures_of(gather(make_run(tmp_path / "one", ranks=1), fail)) if "ranks-" in f.anchor]
