"""Times how a very long history opens: the live page's first answers and the report, with its levels and without.

    python benchmarks/limits/long_history.py --megabytes 2000

It writes a run of one rank by the recorder's own writer, three quantities of `--series` series each and one spike of
one step, and asks for what the page shows first. Each question is a process of its own, so that its memory and the
bytes that it reads (`rchar` of /proc/self/io) are its own.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))

from machine import describe_machine

from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import GRADIENT, PARAMETER, Layout, Series, SeriesTable
from trainsentry.collectors.statistics import COLUMNS, MAX, MEAN, MIN, NORM, VALUE
from trainsentry.exporters.csv.writer import CsvWriter
from trainsentry.exporters.files.json_files import replace_json

QUANTITIES = (GRADIENT, PARAMETER, "exp_avg")
STATISTICS = ("min", "max", "mean", "norm", "nans", "infs", "zeros")
ROW_BYTES = 142

QUESTION = """
import json, sys, time
from pathlib import Path
root, what = Path(sys.argv[1]), sys.argv[2]
began = time.perf_counter()
if what == "report":
    from trainsentry.exporters.report.page import write_report
    write_report(root, root / "report.html", lambda *_: None)
    seen = {}
else:
    from trainsentry.exporters.live.answers import Answers
    answers = Answers(root)
    query = {"rank": "0", "table": "gradient", "name": "layers.7.weight", "statistic": "norm"}
    found = getattr(answers, what)(query)
    seen = {key: found[key] for key in ("whole", "bucket", "width", "columns") if key in found}
    if what == "points":
        seen |= {"points": len(found["steps"]), "largest": max(found["values"])}
seconds = time.perf_counter() - began
read = next(int(line.split()[1]) for line in open("/proc/self/io") if line.startswith("rchar"))
megabytes = next(int(line.split()[1]) // 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"seconds": round(seconds, 1), "read_mb": read // 1_000_000, "memory_mb": megabytes, **seen}))
"""


def write(root: Path, steps: int, series: int, *, levels: bool) -> float:
    """Write the run; return the seconds of processor time that the writer took."""
    table, rng = SeriesTable(), np.random.default_rng(0)
    layout = table.layout_id(Layout((64, 64), "float32", 4096))
    names = [Series(f"layers.{i}.weight", q, module=f"layers.{i}") for q in QUANTITIES for i in range(series)]
    loss = table.series_id(Series("loss", "loss", scalar=True))
    ids = np.array([*map(table.series_id, names), loss], np.int32)
    layouts = np.full(len(ids), layout, np.int32)
    writer = CsvWriter(root / "rank0", table, STATISTICS, levels=levels)
    spent, level = 0.0, np.exp(rng.normal(0, 2, len(ids)))
    for step in range(steps):
        size = level * np.exp(0.2 * rng.standard_normal(len(ids)))
        if step == steps * 371 // 1000:  # between two windows
            size[7] *= 1000
        values = np.zeros((len(ids), COLUMNS))
        values[:, NORM], values[:, MAX], values[:, MIN], values[:, MEAN] = size, size / 16, -size / 16, size / 1e4
        values[:, VALUE] = np.where(ids == loss, size, np.nan)
        began = time.process_time()
        writer.write(StepRecord(step, 0, ids, layouts, values))
        spent += time.process_time() - began
    began = time.process_time()
    writer.close()
    spent += time.process_time() - began
    replace_json(root / "rank0" / "status.json", {"state": "closed", "ended": "finished", "rank": 0, "step": steps - 1})
    replace_json(root / "run.json", {"configuration": {}, "framework": "pytorch"})
    return spent


def ask(root: Path, what: str) -> str:
    """Return what a question cost and said."""
    command = [sys.executable, "-c", QUESTION, str(root), what]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr.strip().rpartition("\n")[2]


def megabytes(folder: Path) -> float:
    """Return the size of the files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*.csv")) / 1e6


def main() -> None:
    """Write a history, ask, remove its levels, and ask again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=2000)
    parser.add_argument("--series", type=int, default=200)
    parser.add_argument("--folder", help="where to write the run; a temporary folder by default")
    parser.add_argument("--without", action="store_true", help="ask again without the levels")
    options = parser.parse_args()
    steps = options.megabytes * 1_000_000 // (ROW_BYTES * len(QUANTITIES) * options.series)
    print(describe_machine())
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        few = min(steps, 1000)
        plain = write(Path(folder) / "plain", few, options.series, levels=False) / few
        root = Path(folder) / "run"
        leveled = write(root, steps, options.series, levels=True) / steps
        levels = megabytes(root / "rank0" / "levels")
        size = megabytes(root)
        print(f"{steps} steps, {size:.0f} MB, of which levels {levels:.0f} MB")
        print(f"to write, in ms of processor time a step: {1000 * plain:.2f} without, {1000 * leveled:.2f} with levels")
        for kept in (True, False) if options.without else (True,):
            if not kept:
                (root / "rank0" / "levels").rename(root / "levels.away")
            for what in ("state", "series", "points", "map", "report"):
                print("with levels" if kept else "without", what, ask(root, what), flush=True)


if __name__ == "__main__":
    main()
