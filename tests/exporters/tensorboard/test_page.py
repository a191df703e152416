"""TensorBoard's own page, in a browser: it opens on loss, incidents and the map, and an incident's text is a list."""

import asyncio
import contextlib
import socket
import subprocess
import sys
import urllib.parse
import urllib.request

import pytest
from browser import needs_chromium, opened
from step_records import Records

from trainsentry.anomaly.incident import Incident, Suspect
from trainsentry.collectors.statistics import STATISTICS
from trainsentry.exporters.tensorboard.writer import TensorBoardWriter

pytestmark = needs_chromium

CULPRIT = "layers.1.weight"
STEP = 20


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """The address of a TensorBoard that shows a run with an incident."""
    events = tmp_path_factory.mktemp("run") / "tensorboard"
    records = Records()
    writer = TensorBoardWriter(events / "rank0", records.table, STATISTICS)
    for n in range(40):
        sizes = {(f"layers.{i}.weight", "gradient"): 400.0 if (i, n) == (1, STEP) else 4.0 for i in range(3)}
        writer.write(records.step(n, sizes | {("loss", "loss"): 3.0 - n / 40}))
    suspect = Suspect(STEP, 0, CULPRIT, "gradient", "norm", "spike", 60.0, "", "it is 100 times its usual")
    actions = ("dump: dump/step20/rank0 (4 tensors)", "sampling every step")
    found = Incident(
        1, STEP, 0, CULPRIT, "gradient", "norm", "spike", "warning", 60.0, "It jumped.", (suspect,), actions, STEP, STEP
    )
    writer.write_incident(found)
    writer.close()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(events), "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.terminate()
        server.wait()


async def wait_until_read(address):
    for _ in range(300):
        with contextlib.suppress(OSError):
            runs = urllib.request.urlopen(f"{address}data/runs").read()
            texts = urllib.request.urlopen(f"{address}data/plugin/text/tags").read()
            if b"incident-1" in runs and b"incidents/1" in texts:
                return
        await asyncio.sleep(0.1)
    raise AssertionError("TensorBoard has not read the run")


def test_the_page_opens_on_loss_incidents_and_the_map_in_its_own_size(address):
    async def looking():
        await wait_until_read(address)
        async with opened(f"{address}#timeseries", height=1000) as page:
            await page.wait_for("document.querySelectorAll('card-view').length >= 3")
            await page.wait_for("document.querySelector('image-card img')?.naturalWidth > 0")
            cards = (
                "[...document.querySelectorAll('card-view')].slice(0, 3).map((c) => c.innerText.replace(/\\s+/g, ''))"
            )
            await page.wait_for(f"{cards}.every((text) => text.includes('0_overview/'))")
            texts = await page.ask(cards)
            for text, name in zip(texts, ("incidents", "loss", "map"), strict=True):
                assert f"0_overview/{name}" in text
            assert "rank0/incident-1" in await page.ask("document.body.innerText.replace(/\\s+/g, '')")
            shown, own, bottom = await page.ask(
                "(() => { const i = document.querySelector('image-card img'), b = i.getBoundingClientRect(); "
                "return [b.width, i.naturalWidth, b.top]; })()"
            )
            assert abs(shown / own - 1) < 0.01  # a picture that is made smaller loses the letters of its names
            assert bottom < 1000

    asyncio.run(looking())


def test_an_incidents_text_is_two_lists_and_the_command_that_opens_the_report(address):
    async def looking():
        await wait_until_read(address)
        tag = urllib.parse.quote("incidents/1", safe="")
        async with opened(f"{address}data/plugin/text/text?run=rank0&tag={tag}") as page:
            await page.wait_for("document.body.innerText.includes('It jumped.')")
            html = await page.ask("JSON.parse(document.body.innerText).at(-1).text")
            counts = "((h) => { const d = new DOMParser().parseFromString(h, 'text/html'); "
            counts += "return ['ol > li', 'ul > li', 'code'].map((s) => d.querySelectorAll(s).length); })"
            assert await page.ask(f"{counts}({html!r})") == [1, 2, 2]
            assert "trainsentry report" in html

    asyncio.run(looking())
