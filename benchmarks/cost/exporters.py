"""Measures CSV writing and conversion to TensorBoard: statistics a second and memory, also of msprobe on equal files.

    python benchmarks/cost/exporters.py write                      # CSV, one core
    python benchmarks/cost/exporters.py convert --peers PYTHON     # msprobe's files, msprobe and ours in turn
    python benchmarks/cost/exporters.py memory                     # 580 MB of our CSV: time and resident memory
    python benchmarks/cost/exporters.py page                  # 10,000 series × 10,000 steps: how long TensorBoard takes
    python benchmarks/cost/exporters.py history                    # diagnose, report: two sizes, alone and on dask

`PYTHON` is an interpreter with msprobe and trainsentry installed (`benchmarks/peers.py` makes one); without it only
ours is measured.
"""

import argparse
import json
import resource
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))

from machine import describe_machine

from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import Layout, Series, SeriesTable
from trainsentry.collectors.statistics import STATISTICS
from trainsentry.exporters.csv.writer import CsvWriter

CONVERT = """
import sys, time, resource
which, source, out = sys.argv[1:]
if which == "msprobe":
    from msprobe.pytorch.monitor.csv2tb import csv2tensorboard_by_step
else:
    from trainsentry.exporters.convert.msprobe_csv2tb import csv2tensorboard_by_step
csv2tensorboard_by_step(source, process_num=1, output_dirpath=out, **({"time_start": "Dec03_21-34-40",
    "time_end": "Dec03_21-34-49"} if which == "msprobe" else {}))
usage = [resource.getrusage(w).ru_maxrss for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print("RSS", max(usage) // 1024)
"""


QUANTITIES = ("gradient", "parameter", "update", "exp_avg", "exp_avg_sq", "activation_input", "activation_output",
              "activation_grad_output")  # fmt: skip


def table_of(count: int, kinds: tuple[str, ...] = ("gradient",)) -> tuple[SeriesTable, int]:
    """Return a table of `count` weights, and the id of their layout."""
    table = SeriesTable()
    for i in range(count):
        table.series_id(Series(f"model.layers.{i // 9}.mlp.{i % 9}.weight", kinds[i * len(kinds) // count]))
    return table, table.layout_id(Layout((4096, 4096), "float32", 4096**2))


def record_of(step: int, count: int, layout: int, rng: np.random.Generator) -> StepRecord:
    """Return a step's statistics."""
    values = np.abs(rng.standard_normal((count, 8))).astype(np.float32).astype(float)
    values[:, 4:6] = 0
    return StepRecord(step, 0, np.arange(count, dtype=np.int32), np.full(count, layout, np.int32), values)


def write() -> None:
    """Measure the CSV writer."""
    count, rng = 10_000, np.random.default_rng(0)
    table, layout = table_of(count)
    records = [record_of(step, count, layout, rng) for step in range(20)]
    with tempfile.TemporaryDirectory() as folder:
        writer = CsvWriter(Path(folder), table, STATISTICS)
        writer.write(records[0])
        begin = time.perf_counter()
        for record in records[1:]:
            writer.write(record)
        seconds = time.perf_counter() - begin
    print(f"CSV: {count * 7 * 19 / seconds / 1e6:.1f} million statistics a second, {seconds / 19 * 1e3:.1f} ms a step")


def convert(peers: str | None, params: int, steps: int) -> None:
    """Measure the conversion of msprobe's files, one for each step."""
    rng = np.random.default_rng(0)
    names = [f"blocks.{i // 12}.{'abcdefghijkl'[i % 12]}.weight" for i in range(params)]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        directory = source / "Dec03_21-34-40-rank0-abcd0000"
        directory.mkdir(parents=True)
        for step in range(steps):
            values = np.round(rng.standard_normal((params, 4)) * 0.01, 6)
            lines = [
                f'0,{n},{step},{",".join(map(str, v))},0,"[256, 256]",torch.float32\n'
                for n, v in zip(names, values.tolist(), strict=True)
            ]
            head = "vpp_stage,name,step,min,max,mean,norm,nans,shape,dtype\n"
            (directory / f"grad_reduced_{step}-{step}.csv").write_text(head + "".join(lines))
        scalars = params * steps * 5
        rates = {}
        for which in ("msprobe", "trainsentry") if peers else ("trainsentry",):
            begin = time.perf_counter()
            command = [peers or sys.executable, "-c", CONVERT, which, str(source), f"{folder}/{which}"]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            seconds = time.perf_counter() - begin
            rates[which] = scalars / seconds
            memory = done.stdout.split("RSS")[-1].strip()
            print(f"{which}: {scalars} scalars in {seconds:.1f} s, {rates[which]:,.0f} a second, {memory} MB resident")
        if peers:
            print(f"ratio: {rates['trainsentry'] / rates['msprobe']:.0f}")
            print(f"equal through TensorBoard's reader: {_equal(Path(folder))}")


def _equal(folder: Path) -> bool:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = []
    for which in ("msprobe", "trainsentry"):
        reader = EventAccumulator(str(folder / which / "rank0" / "grad_reduced"), size_guidance={"scalars": 0})
        reader.Reload()
        found.append({tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]})
    return found[0] == found[1]


def memory() -> None:
    """Measure time and memory of a conversion of half a gigabyte."""
    code = (
        "import resource, sys, time; from trainsentry.exporters.convert.csv2tb import csv2tb; t = time.perf_counter();"
        "d = csv2tb(sys.argv[1], sys.argv[2], full=sys.argv[3] == 'full', raw_tags=-1); s = time.perf_counter() - t;"
        "print(f'{sys.argv[3]}: {s:.1f} s, {d.scalars:,} scalars written, '"
        "f'{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MB resident')"
    )
    count, rng = 1000, np.random.default_rng(0)
    table, layout = table_of(count)
    with tempfile.TemporaryDirectory() as folder:
        writer = CsvWriter(Path(folder) / "run" / "rank0", table, STATISTICS)
        for step in range(3500):
            writer.write(record_of(step, count, layout, rng))
        writer.close()
        size = sum(f.stat().st_size for f in Path(folder).rglob("*.csv"))
        print(f"{size / 1e6:.0f} MB of CSV, {count} series × 3,500 steps")
        for how in ("thinned", "full"):
            subprocess.run([sys.executable, "-c", code, f"{folder}/run", f"{folder}/{how}", how], check=True)


def page(series: int, steps: int) -> None:
    """Measure how long TensorBoard's own reader takes until it shows the run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from trainsentry.exporters.tensorboard.writer import TensorBoardWriter

    rng = np.random.default_rng(0)
    table, layout = table_of(series, QUANTITIES)
    with tempfile.TemporaryDirectory() as folder:
        writer = TensorBoardWriter(Path(folder) / "rank0", table, STATISTICS)
        base = record_of(0, series, layout, rng)
        begin = time.perf_counter()
        for step in range(steps):
            factor = np.exp(0.1 * rng.standard_normal((series, 1)))
            record = StepRecord(step, 0, base.ids, base.layouts, base.values * factor, time=float(step))
            writer.write(record)
        writer.close()
        wrote = time.perf_counter() - begin
        files = list((Path(folder) / "rank0").iterdir())
        begin = time.perf_counter()
        reader = EventAccumulator(str(Path(folder) / "rank0"))
        reader.Reload()
        tags = reader.Tags()
        seconds = time.perf_counter() - begin
        size = sum(f.stat().st_size for f in files)
        shown = {kind: len(tags[kind]) for kind in ("scalars", "images", "tensors")}
        print(
            f"{series:,} series × {steps:,} steps: written in {wrote / steps * 1e3:.1f} ms a step, {size / 1e6:.1f} MB"
        )
        print(f"TensorBoard's reader: {seconds:.1f} s; tags {json.dumps(shown)}")
        print(f"resident: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MB")
        _load_page(folder)


def _load_page(folder: str) -> None:
    """Measure how long a browser takes to show the page: from TensorBoard's start, and from opening the address."""
    from browser import seconds_until

    command = [sys.executable, "-m", "tensorboard.main", "--logdir", folder, "--port", "6127"]
    begin = time.perf_counter()
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", 6127)) == 0:
                    break
            time.sleep(0.1)
        there = "document.querySelectorAll('image-card img').length > 0"
        seconds = seconds_until("http://127.0.0.1:6127/#timeseries", there, 120)
        whole = time.perf_counter() - begin
        print(
            f"page in headless Chromium: first picture {seconds or float('nan'):.1f} s after the address, {whole:.1f} s"
        )
        print("after TensorBoard was started")
    finally:
        server.kill()
        server.wait()


def history(megabytes: int) -> None:
    """Measure reading a history in two sizes, from which the cost of one larger than memory can be extrapolated."""
    count, rng = 2000, np.random.default_rng(0)
    table, layout = table_of(count)
    a_step = 212_000  # bytes of CSV
    for size in (megabytes // 4, megabytes):
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(2):
                writer = CsvWriter(Path(folder) / f"rank{rank}", table, STATISTICS)
                base = record_of(0, count, layout, rng)
                for step in range(size * 1_000_000 // (2 * a_step)):
                    noise = np.exp(0.2 * rng.standard_normal((count, 1)))
                    writer.write(StepRecord(step, rank, base.ids, base.layouts, base.values * noise))
                writer.close()
            written = sum(f.stat().st_size for f in Path(folder).rglob("*.csv")) / 1e6
            for command in (["diagnose"], ["diagnose", "--engine", "dask"], ["report"]):
                begin = time.perf_counter()
                process = subprocess.Popen(
                    [Path(sys.executable).parent / "trainsentry", *command, folder], stdout=subprocess.DEVNULL
                )
                most = _peak_memory(process)
                seconds = time.perf_counter() - begin
                print(f"{written:.0f} MB: {' '.join(command)}: {seconds:.1f} s, {most:.0f} MB in its largest process")


def _peak_memory(process: "subprocess.Popen[bytes]") -> float:
    """Wait for a process; return the peak resident memory, in MB, of the largest among it and its children."""
    import psutil

    most = 0.0
    while process.poll() is None:
        try:
            own = psutil.Process(process.pid)
            most = max(most, *(p.memory_info().rss / 1e6 for p in (own, *own.children(recursive=True))))
        except psutil.Error:
            pass
        time.sleep(0.1)
    return most


def main() -> None:
    """Run the chosen part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("write", "convert", "memory", "page", "history"))
    parser.add_argument("--peers")
    parser.add_argument("--params", type=int, default=500)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--series", type=int, default=10_000)
    parser.add_argument("--megabytes", type=int, default=1000)
    options = parser.parse_args()
    print(describe_machine())
    if options.part == "write":
        write()
    elif options.part == "convert":
        convert(options.peers, options.params, options.steps)
    elif options.part == "memory":
        memory()
    elif options.part == "history":
        history(options.megabytes)
    else:
        page(options.series, options.steps)


if __name__ == "__main__":
    main()
