"""Makes the pictures of the documentation from the present code: `make pictures`.

A small GPT is trained for 2,000 steps under the monitor. At step 700 one gradient is 200 times too large, at step 1400
one weight 1,024 times. Then Chromium takes pictures of the report, of the live page (both on a telephone in the dark
too) and of TensorBoard. This takes some minutes and needs Chromium.
"""

import argparse
import contextlib
import io
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from limits.browser import seconds_until
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainsentry import TrainMonitor
from trainsentry.exporters.report.page import write_report
from trainsentry.exporters.tensorboard.dashboard import MAP_LARGE
from trainsentry.monitor.demo.model import Gpt, GptConfig
from trainsentry.monitor.demo.training import Batches

DOCS = Path(__file__).resolve().parents[1] / "docs"
STEPS = 2000
GRADIENT = (700, "blocks.4.up.weight")
WEIGHT = (1400, "blocks.9.attention.proj.weight")
COLOURS, RARE = 160, 48
"""Colours of a picture, and how many of them are for what is rare, as a legend's: text and curves need few colours,
and a file is then a third as large."""

REPORT = ((1400, 1500), (400, 2050))
LIVE = ((1100, 2250), (400, 3620))
"""Pixels of a page on a desk and on a telephone, down to the map that shows both faults."""

LOADING_SECONDS = 6
"""Seconds in which TensorBoard reads something new, unless it has read all."""

SETTLE_MS = 12_000
"""Virtual milliseconds that a page gets to draw itself."""


def train(out: Path, steps: int) -> None:
    """Train with two faults 700 steps apart."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Gpt(GptConfig(layers=12, width=48, heads=3, context=32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = Batches(4, 32, 0)
    parameters = dict(model.named_parameters())
    config = {"output_dir": str(out), "export": {"tensorboard": True, "report": False}}
    with TrainMonitor(config).watch(model, optimizer) as monitor:
        for step in range(steps):
            tokens, targets = batches.draw()
            if step == WEIGHT[0]:
                with torch.no_grad():
                    parameters[WEIGHT[1]].view(-1)[7] *= 1024
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            if step == GRADIENT[0]:
                parameters[GRADIENT[1]].grad *= 200
            monitor.log(loss=loss)
            optimizer.step()
            if step % 50 == 0:
                monitor.flush()  # no record is left out, however slow the machine


def chromium() -> str:
    """Return the browser's path.

    Raises:
        SystemExit: when there is none.

    """
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        sys.exit("make pictures: needs Chromium (apt-get install chromium)")
    return found


def shoot(url: str, target: Path, width: int, height: int, *, dark: bool = False) -> None:
    """Write a picture of a page."""
    raw = target.with_suffix(".raw.png")
    command = [
        chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-color-profile=srgb",
        f"--virtual-time-budget={SETTLE_MS}", f"--window-size={width},{height}", f"--screenshot={raw}",
        *(["--blink-settings=preferredColorScheme=0"] if dark else []), url,
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    save_small(raw, target)


def save_small(raw: Path, target: Path) -> None:
    """Write a screenshot with few colours, the common ones and those of a few pixels, and remove its file."""
    image = Image.open(raw).convert("RGB")
    shades: list[int] = []
    for count, method in ((COLOURS - RARE, Image.Quantize.MEDIANCUT), (RARE, Image.Quantize.MAXCOVERAGE)):
        shades += (image.quantize(count, method=method).getpalette() or [])[: 3 * count]
    chosen = Image.new("P", (1, 1))
    chosen.putpalette(shades)
    image.quantize(palette=chosen, dither=Image.Dither.NONE).save(target, optimize=True)
    raw.unlink()


def wait_until_read(url: str) -> None:
    """Wait until TensorBoard has read the loss to its end: it shows what it has so far."""
    seen, before = b"", None
    for _ in range(60):
        with contextlib.suppress(OSError):
            seen = urllib.request.urlopen(f"{url}data/plugin/scalars/scalars?run=rank0&tag=scalars%2Floss").read()
        if seen and seen == before:
            return
        before = seen
        time.sleep(LOADING_SECONDS)


@contextlib.contextmanager
def serving(*command: str) -> Iterator[str]:
    """Run a server of Python's on a free port; yield its address, which answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    whole = [sys.executable, "-m", *command, "--port", str(port)]
    server = subprocess.Popen(whole, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}/"
    try:
        for _ in range(100):
            with contextlib.suppress(OSError), urllib.request.urlopen(url):
                break
            time.sleep(0.3)
        yield url
    finally:
        server.terminate()
        server.wait()


def shoot_tensorboard(events: Path, target: Path) -> None:
    """Write a picture of the page that TensorBoard opens on."""
    with serving("tensorboard.main", "--logdir", str(events)) as url:
        wait_until_read(url)
        raw = target.with_suffix(".raw.png")
        drawn = "document.querySelector('image-card img')?.naturalWidth > 0"  # it draws in threads, so time must pass
        seconds_until(f"{url}#timeseries", drawn, 120, raw, (1400, 1200))
        save_small(raw, target)


def shoot_pages(run: Path, page: Path, out: Path) -> None:
    """Write pictures of a run's report and of its live page, on a desk and on a telephone in the dark."""
    with serving("trainsentry", "serve", str(run)) as url:
        for name, address, (wide, narrow) in (("report", page.as_uri(), REPORT), ("live", url, LIVE)):
            shoot(address, out / f"{name}.png", *wide)
            shoot(address, out / f"{name}-dark.png", *narrow, dark=True)


def write_map(events: Path, target: Path) -> None:
    """Write the last map that TensorBoard shows."""
    reader = EventAccumulator(str(events), size_guidance={"images": 0}).Reload()
    Image.open(io.BytesIO(reader.Images(MAP_LARGE)[-1].encoded_image_string)).save(target, optimize=True)


def main() -> None:
    """Make the pictures."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--run", type=Path, help="pictures of this run instead of a new one")
    options.add_argument("--out", type=Path, default=DOCS, help="folder of the pictures")
    options.add_argument("--steps", type=int, default=STEPS)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run = chosen.run or Path(temporary) / "monitor_output"
        if chosen.run is None:
            train(run, chosen.steps)
        page = write_report(run, Path(temporary) / "report.html")
        shoot_pages(run, page, chosen.out)
        write_map(run / "tensorboard" / "rank0", chosen.out / "layers-map.png")
        shoot_tensorboard(run / "tensorboard", chosen.out / "tensorboard.png")


if __name__ == "__main__":
    main()
